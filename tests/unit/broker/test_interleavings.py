"""Any interleaving of publishing, RDY, FIN, REQ, TOUCH, timeouts, connections lost, restarts and kills.

A state machine drives the broker as the daemon does and keeps, for every channel of every partition, what has to be
true of each message. Whatever happens in between:

- every message is delivered until it is finished, and is delivered with its own body;
- nobody gets a message that somebody holds, that waits for its delay, or that was finished; only a kill may forget what
  was not written yet, and in order not even that: there only a power loss may;
- attempts count every delivery, over clean restarts too; after a kill they are not below what was written;
- in order, nothing is delivered but the first message that is not finished, and that to one consumer;
- RDY bounds what a consumer holds, and nothing waits while somebody has room for it;
- FIN, REQ and TOUCH of what a consumer does not hold are refused and change nothing.

The flush of progress is taken, written and reported in separate steps, with anything in between, as it is in the daemon
where the writing happens in a thread; it may fail, and the process may die at each of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from tests.unit.broker.world import MAX_MSG_TIMEOUT_NS, SECOND, BrokerWorld, Consumer, Delivery

from flintmq.broker.channel import Channel
from flintmq.broker.progress import Flush
from flintmq.broker.spilled import SpilledStore
from flintmq.broker.window import Window
from flintmq.errors import StorageError
from flintmq.message import internal_id, partition_of, sequence_of
from flintmq.storage import FloorFile
from flintmq.topic_meta import TopicMeta

TIMEOUT_NS = 10 * SECOND
CONSUMERS_MAX = 3
RDY_COUNTS = (0, 1, 2, 3, 5, 12)
DRAIN_ROUNDS_MAX = 100


@dataclass(slots=True)
class Fate:
    """What is known of one message of one channel.

    Attributes:
        due_ns: not delivered before, on the clock of due times.
        written_due_ns: the same, as it would be after a kill.
        attempts: deliveries so far; after a kill, the most there can have been.
        attempts_min: the fewest there can have been.
        written_attempts: deliveries that a kill does not forget.
        holder: who has it.
        deadline_ns, delivered_ns: of the present delivery.
        finished: whether it is.
        is_written: whether a kill does not forget that either.
    """

    body: bytes
    due_ns: int = 0
    written_due_ns: int = 0
    attempts: int = 0
    attempts_min: int = 0
    written_attempts: int = 0
    holder: Consumer | None = None
    deadline_ns: int = 0
    delivered_ns: int = 0
    finished: bool = False
    is_written: bool = False


@dataclass
class Model:
    """One channel of one partition, as its consumers may see it."""

    topic: str
    channel: str
    partition: int
    is_ordered: bool
    fates: dict[int, Fate] = field(default_factory=dict)

    @property
    def open_fates(self) -> dict[int, Fate]:
        return {sequence: fate for sequence, fate in self.fates.items() if not fate.finished}

    def held_by(self, consumer: Consumer) -> list[int]:
        return [
            internal_id(self.partition, sequence) for sequence, fate in self.fates.items() if fate.holder is consumer
        ]

    def delivered(self, delivery: Delivery, consumer: Consumer, now_ns: int, due_clock_ns: int) -> None:
        """Check one delivery and note it."""
        sequence = delivery.sequence
        assert sequence in self.fates, f"{delivery} was never published"
        fate = self.fates[sequence]
        assert delivery.body == fate.body
        assert not fate.finished, f"{delivery} was finished"
        assert fate.holder is None, f"{delivery} is held by another consumer"
        assert fate.due_ns <= due_clock_ns, f"{delivery} is delivered early"
        assert fate.attempts_min < delivery.attempts <= fate.attempts + 1, f"{delivery}: {fate}"
        if self.is_ordered:
            assert sequence == min(self.open_fates), f"{delivery} is not the next one"
            assert not any(each.holder for each in self.fates.values()), f"{delivery} is not the only one"
        fate.attempts = fate.attempts_min = delivery.attempts
        fate.holder, fate.delivered_ns = consumer, now_ns
        fate.deadline_ns = now_ns + consumer.msg_timeout_ns

    def let_time_out(self, now_ns: int) -> None:
        for fate in self.fates.values():
            if fate.holder is not None and fate.deadline_ns <= now_ns:
                fate.holder = None

    def written(self) -> dict[int, tuple[bool, int, int]]:
        """What a flush that is taken now will write."""
        # the delivery of what is in flight is counted when it ends
        return {
            sequence: (fate.finished, fate.due_ns, fate.attempts_min - (fate.holder is not None))
            for sequence, fate in self.fates.items()
        }

    def keep(self, written: dict[int, tuple[bool, int, int]]) -> None:
        """Such a flush is on the disk."""
        for sequence, (finished, due_ns, attempts) in written.items():
            fate = self.fates[sequence]
            fate.is_written = finished
            fate.written_due_ns = due_ns
            fate.written_attempts = max(0, attempts)

    def forget(self, power_loss: bool) -> None:
        """The process died: what it holds now is what had been written."""
        keeps_floor = self.is_ordered and not power_loss
        for fate in self.fates.values():
            fate.holder = None
            fate.finished = fate.is_written or (keeps_floor and fate.finished)
            fate.due_ns = min(fate.due_ns, fate.written_due_ns)
            fate.attempts_min = min(fate.attempts_min, fate.written_attempts)


@dataclass(slots=True)
class Flushing:
    """A flush that is under way.

    Attributes:
        written: what it writes, of every model.
        answers: once it has been written.
    """

    flush: Flush
    written: dict[tuple[str, str, int], dict[int, tuple[bool, int, int]]]
    answers: list[Any] | None = None


class InterleavingMachine(RuleBasedStateMachine):
    """The topics of :attr:`TOPICS`, each with two channels, of which a run is busy with one or two."""

    TOPICS: ClassVar[dict[str, TopicMeta | None]] = {}

    @initialize(window_max=st.sampled_from([8, 8, 40, None]), data=st.data())
    def begin(self, window_max: int | None, data: Any) -> None:
        self.world = BrokerWorld(window_max)
        self.models: dict[tuple[str, str, int], Model] = {}
        self.consumers: dict[Consumer, tuple[str, str, int | None]] = {}
        self.over: dict[Consumer, int] = {}
        self.flushing: Flushing | None = None
        for topic, meta in self.TOPICS.items():
            found = self.world.create(topic, meta)
            for channel in ("c", "d"):
                self.world.create_channel(topic, channel)
                for partition in found.partitions:
                    is_ordered = meta is not None and meta.ordered
                    self.models[topic, channel, partition] = Model(topic, channel, partition, is_ordered)
        self.busy = [self.draw_place(data) for _ in range(data.draw(st.integers(1, 2)))]
        self.flush()
        # every run has something to do, whatever rules hypothesis leaves out of it
        self.publish(data, data.draw(st.integers(1, 12)), 0)
        self.connect(data, data.draw(st.lists(st.sampled_from(RDY_COUNTS), min_size=1, max_size=2)))

    def draw_place(self, data: Any) -> tuple[str, str, int]:
        topic = data.draw(st.sampled_from(list(self.TOPICS)))
        return data.draw(st.sampled_from([place for place in self.models if place[0] == topic]))

    # -- what there is

    def models_of(self, consumer: Consumer) -> list[Model]:
        topic, channel, partition = self.consumers[consumer]
        return [
            model
            for (its_topic, its_channel, number), model in self.models.items()
            if (its_topic, its_channel) == (topic, channel) and partition in (None, number)
        ]

    def held_by(self, consumer: Consumer) -> list[int]:
        return [internal for model in self.models_of(consumer) for internal in model.held_by(consumer)]

    def fate(self, consumer: Consumer, internal: int) -> Fate:
        topic, channel, _ = self.consumers[consumer]
        return self.models[topic, channel, partition_of(internal)].fates[sequence_of(internal)]

    def draw_consumer(self, data: Any, with_message: bool = False) -> Consumer:
        found = [consumer for consumer in self.consumers if not with_message or self.held_by(consumer)]
        return data.draw(st.sampled_from(found))

    @property
    def is_anything_held(self) -> bool:
        return any(fate.holder for model in self.models.values() for fate in model.fates.values())

    def look(self) -> None:
        """Take what was delivered, at this moment of time."""
        now_ns = self.world.now_ns
        for model in self.models.values():
            model.let_time_out(now_ns)
        for consumer in self.consumers:
            topic, channel, _ = self.consumers[consumer]
            for delivery in consumer.received():
                model = self.models[topic, channel, delivery.partition]
                model.delivered(delivery, consumer, now_ns, self.world.due_clock_ns)

    # -- publishers

    @rule(data=st.data(), count=st.integers(1, 12), delay_s=st.sampled_from([0, 0, 0, 3, 200]))
    def publish(self, data, count, delay_s):
        topic, _, partition = data.draw(st.sampled_from(self.busy))
        names = [b"%d-%d" % (self.world.now_ns, number) for number in range(count)]
        due_ns = self.world.due_clock_ns + delay_s * SECOND if delay_s else 0
        for internal, body in zip(self.world.publish(topic, names, partition, delay_s * SECOND), names, strict=True):
            for (its_topic, _, number), model in self.models.items():
                if (its_topic, number) == (topic, partition):
                    assert sequence_of(internal) not in model.fates, "an id is used again"
                    model.fates[sequence_of(internal)] = Fate(body, due_ns, due_ns)
        self.look()

    # -- consumers

    @rule(data=st.data(), rdy_counts=st.lists(st.sampled_from(RDY_COUNTS), min_size=1, max_size=2))
    def connect(self, data, rdy_counts):
        topic, channel, partition = data.draw(st.sampled_from(self.busy))
        meta = self.TOPICS[topic]
        numbers = [partition] if meta is None or meta.ordered else [partition, None]
        for rdy_count in rdy_counts:
            if len(self.consumers) < CONSUMERS_MAX:
                self.subscribe(topic, channel, data.draw(st.sampled_from(numbers)), rdy_count)
        self.look()

    def subscribe(self, topic: str, channel: str, partition: int | None, rdy_count: int) -> Consumer:
        consumer = self.world.subscribe(topic, channel, partition, TIMEOUT_NS)
        self.consumers[consumer] = topic, channel, partition
        self.over[consumer] = 0
        consumer.ready(rdy_count)
        return consumer

    @rule(data=st.data(), rdy_count=st.sampled_from(RDY_COUNTS))
    @precondition(lambda self: self.consumers)
    def ready(self, data, rdy_count):
        consumer = self.draw_consumer(data)
        self.over[consumer] = max(0, consumer.in_flight_count - rdy_count)
        consumer.ready(rdy_count)
        self.look()

    @rule(data=st.data())
    @precondition(lambda self: self.consumers)
    def disconnect(self, data):
        self.leave(self.draw_consumer(data))

    def leave(self, consumer: Consumer) -> None:
        for internal in self.held_by(consumer):
            self.fate(consumer, internal).holder = None
        del self.consumers[consumer]
        self.world.leave(consumer)
        self.look()  # what it held may have gone to the others at once

    @rule(data=st.data())
    @precondition(lambda self: self.is_anything_held)
    def finish(self, data):
        """Some of its own, and among them what it does not hold."""
        consumer = self.draw_consumer(data, with_message=True)
        mine = self.held_by(consumer)
        chosen = data.draw(st.lists(st.sampled_from(mine), min_size=1, unique=True))
        wrong = data.draw(st.lists(self.strange(consumer), max_size=2, unique=True))
        for internal in chosen:
            fate = self.fate(consumer, internal)
            fate.finished, fate.holder = True, None
        assert sorted(consumer.finish(chosen + wrong)) == sorted(wrong)
        self.look()

    @rule(data=st.data(), rounds=st.integers(1, 5))
    @precondition(lambda self: self.is_anything_held)
    def work(self, data, rounds):
        """Finish all that it holds, and what it gets then, as consumers do who have no trouble."""
        consumer = self.draw_consumer(data, with_message=True)
        for _ in range(rounds):
            self.finish_all(consumer)
            self.look()

    def finish_all(self, consumer: Consumer) -> None:
        held = self.held_by(consumer)
        for internal in held:
            fate = self.fate(consumer, internal)
            fate.finished, fate.holder = True, None
        assert consumer.finish(held) == []

    def strange(self, consumer: Consumer) -> st.SearchStrategy[int]:
        """Ids that a consumer does not hold: somebody else's, finished, waiting, of other partitions, of nothing."""
        mine = set(self.held_by(consumer))
        others = [i for other in self.consumers for i in self.held_by(other) if i not in mine]
        known = [internal_id(m.partition, s) for m in self.models.values() for s in m.fates]
        known = [i for i in known if i not in mine]
        return st.one_of(*(st.sampled_from(ids) for ids in (others, known, [1 << 40, 9 << 50 | 1]) if ids))

    @rule(data=st.data(), delay_s=st.sampled_from([0, 0, 1, 30, 100]))
    @precondition(lambda self: self.is_anything_held)
    def requeue(self, data, delay_s):
        consumer = self.draw_consumer(data, with_message=True)
        internal = data.draw(st.sampled_from(self.held_by(consumer)))
        fate = self.fate(consumer, internal)
        fate.holder = None
        fate.due_ns = self.world.due_clock_ns + delay_s * SECOND
        assert consumer.requeue(internal, delay_s * SECOND)
        self.look()

    @rule(data=st.data())
    @precondition(lambda self: self.is_anything_held)
    def touch(self, data):
        consumer = self.draw_consumer(data, with_message=True)
        internal = data.draw(st.sampled_from(self.held_by(consumer)))
        fate = self.fate(consumer, internal)
        fate.deadline_ns = min(self.world.now_ns + TIMEOUT_NS, fate.delivered_ns + MAX_MSG_TIMEOUT_NS)
        assert consumer.touch(internal)
        self.look()

    @rule(data=st.data())
    @precondition(lambda self: self.consumers)
    def requeue_and_touch_what_it_does_not_hold(self, data):
        consumer = self.draw_consumer(data)
        internal = data.draw(self.strange(consumer))
        assert not consumer.requeue(internal, 0)
        assert not consumer.touch(internal)
        self.look()

    # -- time and the process

    @rule(seconds=st.sampled_from([0.5, 4, 11, 31, 101, 901]))
    def time_passes(self, seconds):
        for _ in self.world.passing(int(seconds * SECOND)):
            self.look()

    @property
    def is_flush_taken(self) -> bool:
        return self.flushing is not None and self.flushing.answers is None

    @property
    def is_flush_written(self) -> bool:
        return self.flushing is not None and self.flushing.answers is not None

    @rule()
    @precondition(lambda self: self.flushing is None)
    def take_flush(self):
        written = {key: model.written() for key, model in self.models.items()}
        self.flushing = Flushing(self.world.take_flush(), written)

    @rule()
    @precondition(lambda self: self.is_flush_taken)
    def run_flush(self):
        assert self.flushing is not None
        self.flushing.answers = self.world.run_flush(self.flushing.flush)
        for key, what in self.flushing.written.items():
            self.models[key].keep(what)

    @rule()
    @precondition(lambda self: self.is_flush_written)
    def end_flush(self):
        flushing, self.flushing = self.flushing, None
        assert flushing is not None
        self.world.end_flush(flushing.flush, flushing.answers)
        self.look()

    @rule()
    @precondition(lambda self: not self.is_flush_written)
    def fail_flush(self):
        if self.flushing is None:
            self.take_flush()
        flushing, self.flushing = self.flushing, None
        assert flushing is not None
        self.world.end_flush(flushing.flush, [], StorageError("no space left"))
        self.look()

    @rule()
    def flush(self):
        if self.is_flush_taken:
            self.run_flush()
        if self.is_flush_written:
            self.end_flush()
        self.take_flush()
        self.run_flush()
        self.end_flush()

    @rule(how=st.sampled_from(["restart", "kill", "kill", "power loss"]), come_back=st.booleans())
    def end(self, how, come_back):
        """The process ends and is started again; consumers may connect again at once."""
        subscribed = [(*place, consumer.subscription.rdy_count) for consumer, place in self.consumers.items()]
        if how == "restart":
            self.restart()
        else:
            self.die(how == "power loss")
        for topic, channel, partition, rdy_count in subscribed if come_back else ():
            self.subscribe(topic, channel, partition, rdy_count)
        self.look()

    def restart(self) -> None:
        """A clean end waits for the flush that is under way, and for one more."""
        for consumer in list(self.consumers):
            self.leave(consumer)
        self.flush()
        self.world.restart()

    def die(self, power_loss: bool) -> None:
        self.flushing = None
        self.consumers.clear()
        for model in self.models.values():
            model.forget(power_loss)
        self.world.die(power_loss)
        for model in self.models.values():
            if model.is_ordered and power_loss:
                self.find_repeats(model)

    def find_repeats(self, model: Model) -> None:
        """After a power loss some of the last FINs in order may have survived, the first of them."""
        floor = self.world.channel(model.topic, model.channel, model.partition).floor
        for sequence, fate in model.fates.items():
            assert not fate.finished or sequence < floor
            fate.finished = sequence < floor

    # -- what always holds

    @invariant()
    def holds(self):
        self.check_counts()
        self.check_rdy()
        self.check_deadlines()

    def check_counts(self) -> None:
        for (topic, name, number), model in self.models.items():
            channel = self.world.channel(topic, name, number)
            held = [sequence for sequence, fate in model.fates.items() if fate.holder]
            assert channel.in_flight_count == len(held), channel.describe()
            for sequence in model.fates:
                assert channel.is_in_flight(internal_id(number, sequence)) == (sequence in held)
            waiting = len(model.open_fates) - len(held)
            assert channel.depth + channel.deferred_count == waiting, channel.describe()
            channel.check()

    def check_rdy(self) -> None:
        """RDY bounds what is held, and nothing waits while somebody has room for it."""
        for consumer in self.consumers:
            count = len(self.held_by(consumer))
            assert consumer.in_flight_count == count
            self.over[consumer] = min(self.over[consumer], max(0, count - consumer.subscription.rdy_count))
            assert count <= consumer.subscription.rdy_count + self.over[consumer]
            if consumer.capacity > 0:
                for model in self.models_of(consumer):
                    channel = self.world.channel(model.topic, model.channel, model.partition)
                    is_blocked = model.is_ordered and (channel.in_flight_count or channel.deferred_count)
                    assert not channel.depth or is_blocked, channel.describe()

    def check_deadlines(self) -> None:
        deadlines = [f.deadline_ns for m in self.models.values() for f in m.fates.values() if f.holder is not None]
        if deadlines:
            next_ns = self.world.broker.next_deadline_ns
            assert next_ns is not None and next_ns <= min(deadlines)

    def teardown(self):
        """Everything is delivered in the end, whatever was before."""
        if not hasattr(self, "models"):
            return
        for consumer in list(self.consumers):
            self.leave(consumer)
        for topic, channel, partition in self.models:
            self.subscribe(topic, channel, partition, 1000)
        self.look()
        # in order every message is a round of its own
        for _ in range(DRAIN_ROUNDS_MAX + sum(len(model.open_fates) for model in self.models.values())):
            if not any(model.open_fates for model in self.models.values()):
                break
            if not self.is_anything_held:
                self.flush()  # which also reads what was set aside and is due
            if not self.is_anything_held:
                self.time_passes(101)
            for consumer in self.consumers:
                self.finish_all(consumer)
            self.look()
        for key, model in self.models.items():
            assert not model.open_fates, self.world.channel(*key).describe()
        self.restart()
        for topic, channel, partition in self.models:
            self.subscribe(topic, channel, partition, 1000)
        self.look()  # which finds that nothing that was finished comes again
        assert not self.is_anything_held


class PlainAndOrdered(InterleavingMachine):
    TOPICS: ClassVar = {"plain": None, "ordered": TopicMeta(partition_num=2, ordered=True)}


class Parts(InterleavingMachine):
    """Consumers of all partitions, beside such of a single one."""

    TOPICS: ClassVar = {"parts": TopicMeta(partition_num=3)}


TestPlainAndOrdered = pytest.mark.slow(PlainAndOrdered.TestCase)
TestPlainAndOrdered.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
TestParts = pytest.mark.slow(Parts.TestCase)
TestParts.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


def forget_floors_with_the_process(monkeypatch):
    monkeypatch.setattr(FloorFile, "put", lambda self, cursor, floor: None)


def forget_what_a_failed_flush_was_to_write(monkeypatch):
    monkeypatch.setattr(SpilledStore, "restore_changes", lambda self, failed: None)


def do_not_count_what_timed_out(monkeypatch):
    honest = Window.take_timed_out

    def take_timed_out(self, now_ns):
        for message in honest(self, now_ns):
            self._attempts[message.sequence] = 0
            yield message

    monkeypatch.setattr(Window, "take_timed_out", take_timed_out)


def lose_what_a_lost_connection_held(monkeypatch):
    monkeypatch.setattr(Window, "requeue", lambda self, message: self._leave_flight(message))


def finish_what_anybody_holds(monkeypatch):
    honest = Window.finish_one

    def finish_one(self, subscription, sequence):
        return honest(self, self._owner(sequence) or subscription, sequence)

    monkeypatch.setattr(Window, "finish_one", finish_one)


MUTANTS = [
    forget_floors_with_the_process,
    forget_what_a_failed_flush_was_to_write,
    do_not_count_what_timed_out,
    lose_what_a_lost_connection_held,
    finish_what_anybody_holds,
]


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_planted_bugs_are_found(mutant, monkeypatch):
    mutant(monkeypatch)
    monkeypatch.setattr(Channel, "check", lambda self: None)  # what consumers see of it is enough
    only_find = settings(
        max_examples=1000,
        stateful_step_count=30,
        deadline=None,
        phases=[Phase.generate],
        database=None,
        derandomize=True,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(PlainAndOrdered, settings=only_find)
