"""A broker on a disk in memory, with a clock moved by hand, and what its owner does in a turn.

Everything goes through what the daemon uses: publishes are appended, synced and committed, FIN, REQ, TOUCH and RDY mark
the channel and are followed by a pump, time passes from one deadline to the next. What differs is that nothing happens
by itself: progress is written when a test says so, and the process ends cleanly, by kill -9 or with the power.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from tests.sim.disk import CrashingDisk

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.broker.channel import Channel
from flintmq.broker.progress import Flush
from flintmq.broker.shared_subscription import ChannelParts, PartSubscription, SharedSubscription
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.limits import WRITE_BUFFER_HIGH_BYTES
from flintmq.message import FRAME_OVERHEAD_BYTES, LOCATION, internal_id, partition_of, sequence_of, with_location
from flintmq.storage import ChannelStore, PartitionLog, create_logs
from flintmq.testing import ManualClock
from flintmq.topic_meta import TopicMeta

SECOND = 1_000_000_000
MSG_TIMEOUT_NS = 60 * SECOND
MAX_MSG_TIMEOUT_NS = 900 * SECOND
_HEAD = struct.Struct(">IIQH16s")
_STEPS_MAX = 10_000


class Delivery(NamedTuple):
    """One message as a consumer got it."""

    internal: int
    attempts: int
    body: bytes

    @property
    def partition(self) -> int:
        return partition_of(self.internal)

    @property
    def sequence(self) -> int:
        return sequence_of(self.internal)


class Consumer:
    """A connection that is subscribed: to one partition, in order or not, or to all partitions of a topic at once.

    Attributes:
        channels: it is fed from.
    """

    def __init__(
        self, world: BrokerWorld, channels: dict[int, Channel], raw_ids: bool, in_order: bool, msg_timeout_ns: int
    ) -> None:
        self.world = world
        self.channels = channels
        self.msg_timeout_ns = msg_timeout_ns
        self._is_stuck = False
        self._raw_ids = raw_ids
        self._in_order = in_order
        self._out: list[bytes | memoryview] = []
        self._parts: dict[int, Subscription] = {}
        self.subscription: Any
        self.channel: Any
        if len(channels) == 1:
            ((number, self.channel),) = channels.items()
            self.subscription = self._parts[number] = Subscription(self._out, msg_timeout_ns, MAX_MSG_TIMEOUT_NS)
            if in_order:
                self.subscription.layout = with_location
        else:
            parts = {number: PartSubscription(self._out, msg_timeout_ns, MAX_MSG_TIMEOUT_NS) for number in channels}
            self._parts |= parts
            self.channel = ChannelParts(channels, parts)
            self.subscription = SharedSubscription(list(parts.values()))
        for number, channel in channels.items():
            channel.add(self._parts[number])
        self.subscription.is_open = True
        self._pump()

    def _pump(self) -> None:
        broker = self.world.broker
        if isinstance(self.channel, ChannelParts):
            broker.mark_in_turn(self.channel.in_turn())
        else:
            broker.mark(self.channel)
        self.world.pump()

    def received(self) -> list[Delivery]:
        """Take what was put out since the last call."""
        data = b"".join(bytes(part) for part in self._out)
        self._out.clear()
        if not self._is_stuck:
            self.subscription.room_bytes = WRITE_BUFFER_HIGH_BYTES
        found = []
        while data:
            size, kind, _, attempts, message_id = _HEAD.unpack_from(data)
            assert kind == 2
            internal = int.from_bytes(message_id[:8], "big") if self._raw_ids else int(message_id, 16)
            body = data[FRAME_OVERHEAD_BYTES : size + 4]
            if self._in_order:
                _, raw_size = LOCATION.unpack_from(body)
                body = body[LOCATION.size :]
                assert raw_size == FRAME_OVERHEAD_BYTES + len(body)
            found.append(Delivery(internal, attempts, body))
            data = data[size + 4 :]
        return found

    @property
    def in_flight_count(self) -> int:
        return int(self.subscription.in_flight_count)

    @property
    def capacity(self) -> int:
        return int(self.subscription.capacity)

    def ready(self, rdy_count: int) -> None:
        self.subscription.rdy_count = rdy_count
        self._pump()

    def finish(self, ids: Iterable[int]) -> list[int]:
        """Finish messages by internal id; return those that were not in flight here."""
        wanted = tuple(ids)
        failed: list[int] = self.channel.finish(self.subscription, wanted) if wanted else []
        self._pump()
        return failed

    def requeue(self, internal: int, delay_ns: int) -> bool:
        is_done: bool = self.channel.requeue(self.subscription, internal, delay_ns, self.world.due_clock_ns)
        self._pump()
        return is_done

    def touch(self, internal: int) -> bool:
        is_done: bool = self.channel.touch(self.subscription, internal, self.world.now_ns)
        self._pump()
        return is_done

    def has_room(self, is_there: bool) -> None:
        """What the connection says when its socket takes no more, or takes something again."""
        self._is_stuck = not is_there
        self.subscription.room_bytes = WRITE_BUFFER_HIGH_BYTES if is_there else 0
        self._pump()

    def detach(self) -> None:
        """Break the connection; the turn has not ended."""
        for number, channel in self.channels.items():
            channel.remove(self._parts[number])
            self.world.broker.mark(channel)


class BrokerWorld:
    """One data directory and the brokers that live on it, one after the other.

    Args:
        window_max: messages between a channel's floor and its cursor; None for what the daemon has.

    Attributes:
        consumers: those connected now.
    """

    def __init__(self, window_max: int | None = None, seed: int = 1) -> None:
        self.clock = ManualClock()
        self.random = random.Random(seed)
        self.disk = CrashingDisk(rng=self.random)
        self.window_max = window_max
        self.consumers: list[Consumer] = []
        self.problems: list[Exception] = []
        self.broker: Broker
        self.open()

    # -- the process

    def open(self) -> None:
        """Start on what is on the disk."""
        self.files = self.disk.attach()
        self.broker = Broker(self.files, ChannelStore(self.files), BrokerOptions(), self.random, print)
        self.broker.on_problem = self.problems.append
        self.broker.open(self.clock.wall_ns())
        for topic in self.broker.topics.values():
            for partition in topic.partitions.values():
                self._bound_windows(partition.channels.values())
        self.pump()

    def _bound_windows(self, channels: Iterable[Channel]) -> None:
        if self.window_max is not None:
            for channel in channels:
                channel.window.size_max = self.window_max

    def restart(self) -> None:
        """End cleanly, as SIGTERM does, and start again."""
        for consumer in self.consumers:
            consumer.detach()
        self.consumers.clear()
        self.pump()
        self.flush()
        self.broker.close()
        self.files.close()
        self.open()

    def die(self, power_loss: bool) -> None:
        """End by kill -9 or with the power, and start again."""
        self.consumers.clear()
        self.disk.crash(power_loss, self.random)
        self.open()

    def take_flush(self) -> Flush:
        return self.broker.take_flush(self.due_clock_ns)

    def run_flush(self, flush: Flush) -> Any:
        return self.broker.run_flush(flush, self.due_clock_ns, True)

    def end_flush(self, flush: Flush, answers: Any, error: BaseException | None = None) -> None:
        self.broker.flush_ended(flush, answers, error, self.due_clock_ns)
        self.pump()

    def flush(self) -> None:
        """Write progress, as the daemon does every 0.1 s."""
        flush = self.take_flush()
        self.end_flush(flush, self.run_flush(flush))

    # -- topics and channels

    def create(self, name: str, meta: TopicMeta | None = None) -> Topic:
        """A plain topic, or one with all its partitions here; durable."""
        if meta is None:
            topic = self.broker.topic(name, self.clock.wall_ns())
        else:
            topic = self.broker.create_partitions(name, meta, range(meta.partition_num), self.clock.wall_ns())
            self.flush()
            taken = self.broker.take_creations()
            create_logs([creation for new in taken for creation in new.creations], True)
            self.broker.creations_ended(taken)
        self.flush()
        return topic

    def create_channel(self, topic: str, name: str) -> None:
        channels, _ = self.broker.channel(self.broker.topics[topic], name)
        self._bound_windows(channels)
        self.flush()

    def channel(self, topic: str, name: str, partition: int = 0) -> Channel:
        return self.broker.topics[topic].partitions[partition].channels[name]

    # -- clients

    @property
    def now_ns(self) -> int:
        return self.clock.monotonic_ns()

    @property
    def due_clock_ns(self) -> int:
        return self.clock.wall_ns()

    def publish(self, topic: str, bodies: list[bytes], partition: int | None = None, delay_ns: int = 0) -> list[int]:
        """Publish, durably; return the internal ids."""
        found = self.broker.topics[topic]
        home = found.next_partition() if partition is None else found.partitions[partition]
        first = home.log.next_sequence
        self.broker.publish_to(home, bodies, self.due_clock_ns + delay_ns if delay_ns else 0)
        groups = self.broker.write_pending(self.clock.wall_ns())
        log = home.log
        ticket = log.begin_sync()
        if ticket is not None:
            assert isinstance(log, PartitionLog)
            ticket.run()
            log.finish_sync(ticket, None)
        self.broker.commit_groups(groups)
        self.pump()
        return [internal_id(home.number, first + place) for place in range(len(bodies))]

    def subscribe(
        self, topic: str, channel: str, partition: int | None = None, msg_timeout_ns: int = MSG_TIMEOUT_NS
    ) -> Consumer:
        """Connect a consumer with RDY 0; to all partitions when none is named. The channel is there."""
        found = self.broker.topics[topic]
        numbers = list(found.partitions) if partition is None else [partition]
        channels = {number: found.partitions[number].channels[channel] for number in numbers}
        in_order = any(each.keep_floor is not None for each in channels.values())
        consumer = Consumer(self, channels, found.meta.is_partitioned, in_order, msg_timeout_ns)
        self.consumers.append(consumer)
        return consumer

    def leave(self, consumer: Consumer) -> None:
        self.consumers.remove(consumer)
        consumer.detach()
        self.pump()

    # -- time

    def pump(self) -> None:
        for _ in range(_STEPS_MAX):
            self.broker.pump(self.now_ns, self.due_clock_ns)
            if not self.broker.has_marked:
                return
        raise AssertionError(f"there is always something to deliver:\n{self.broker.describe()}")

    def passing(self, duration_ns: int) -> Iterator[int]:
        """Let time pass, from deadline to deadline; yields how much of it has after each."""
        start = self.now_ns
        end = start + duration_ns
        for _ in range(_STEPS_MAX):
            deadline = self.broker.next_deadline_ns
            is_last = deadline is None or deadline > end
            self.clock.advance(max(0, (end if is_last or deadline is None else deadline) - self.now_ns))
            self.broker.handle_deadlines(self.now_ns, self.due_clock_ns)
            self.pump()
            yield self.now_ns - start
            if is_last:
                return
        raise AssertionError(f"{_STEPS_MAX} deadlines in {duration_ns / SECOND} s:\n{self.broker.describe()}")

    def pass_time(self, duration_ns: int) -> None:
        for _ in self.passing(duration_ns):
            pass
