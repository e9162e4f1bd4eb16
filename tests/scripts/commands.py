"""The commands of scenario scripts: each does something to a broker and says what there is to see of it.

Rules of this file: a command is a method whose name is its own, and its docstring is its row in ``README.md``; what
consumers got is told behind each command, so that nobody gets anything unseen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from tests.unit.broker.world import MSG_TIMEOUT_NS, BrokerWorld, Consumer, Delivery

from flintmq.broker.broker import ChannelNotFound, TopicNotFound
from flintmq.broker.channel import Channel
from flintmq.broker.seek import BadPlace, drop, parse_place, seek, sequence_at
from flintmq.errors import StorageError
from flintmq.message import internal_id
from flintmq.topic_meta import TopicMeta

_UNITS_NS = {"ms": 1_000_000, "s": 1_000_000_000, "m": 60_000_000_000, "h": 3_600_000_000_000}
_DURATION = re.compile(r"(\d+)(ms|s|m|h)")


class ScriptError(Exception):
    """A line of a script that is no command."""


def duration_ns(text: str) -> int:
    """Read ``5s`` or ``100ms``."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ScriptError(f"{text!r} is no duration: write 100ms, 5s, 10m or 1h")
    return int(found[1]) * _UNITS_NS[found[2]]


def shown_time(time_ns: int) -> str:
    """As :func:`duration_ns` reads it."""
    seconds, ms = divmod(time_ns // 1_000_000, 1000)
    return f"{seconds * 1000 + ms}ms" if ms else f"{seconds}s"


class Script:
    """One scenario: a world of its own, the topic ``t`` and the channel ``c`` unless another one is named."""

    def __init__(self) -> None:
        self.world = BrokerWorld()
        self.consumers: dict[str, Consumer] = {}

    def run(self, line: str) -> Iterator[str]:
        """Do one command; yields what there is to see."""
        name, *words = line.split()
        command: Callable[..., Iterator[str] | None] | None = getattr(self, "do_" + name.replace("-", "_"), None)
        if command is None:
            raise ScriptError(f"there is no command {name!r}")
        plain = [word for word in words if "=" not in word]
        options = dict(word.split("=", 1) for word in words if "=" in word)
        try:
            yield from command(*plain, **options) or ()
        except (ChannelNotFound, TopicNotFound, StorageError, BadPlace) as error:
            yield f"error: {type(error).__name__}: {error}"
        yield from self._told()

    def _told(self, prefix: str = "") -> Iterator[str]:
        for name, consumer in self.consumers.items():
            if got := consumer.received():
                yield f"{prefix}{name}: " + ", ".join(map(self._delivery, got))
        for problem in self.world.problems:
            yield f"problem: {problem}"
        self.world.problems.clear()

    def _delivery(self, delivery: Delivery) -> str:
        place = f"{delivery.partition}/" if self._is_partitioned else ""
        again = f" (attempt {delivery.attempts})" if delivery.attempts != 1 else ""
        return f"{place}{delivery.sequence} {delivery.body.decode()}{again}"

    @property
    def _is_partitioned(self) -> bool:
        return any(topic.meta.is_partitioned for topic in self.world.broker.topics.values())

    def _channels(self, channel: str | None = None) -> Iterator[tuple[str, Channel]]:
        for topic in self.world.broker.topics.values():
            for number, partition in topic.partitions.items():
                for name, found in partition.channels.items():
                    if channel in (None, name):
                        yield f"{number}/" if topic.meta.is_partitioned else "", found

    @staticmethod
    def _id(text: str) -> int:
        partition, _, sequence = text.rpartition("/")
        return internal_id(int(partition or 0), int(sequence))

    # -- topics and channels

    def do_topic(self, *flags: str, partitions: str = "") -> None:
        """`topic [partitions=N] [ordered]` creates the topic, a plain one when no partitions are named."""
        meta = TopicMeta(partition_num=int(partitions), ordered="ordered" in flags) if partitions else None
        self.world.create("t", meta)

    def do_channel(self, *names: str) -> None:
        """`channel NAME...` creates channels."""
        for name in names:
            self.world.create_channel("t", name)

    def do_window(self, size: str) -> None:
        """`window N` bounds what is between floor and cursor of channels that are created or opened from now on."""
        self.world.window_max = int(size)

    def do_pause(self, channel: str = "c") -> None:
        """`pause [CHANNEL]`, `unpause [CHANNEL]` stops and goes on delivering to its consumers."""
        self._pause(channel, True)

    def do_unpause(self, channel: str = "c") -> None:
        self._pause(channel, False)

    def _pause(self, channel: str, paused: bool) -> None:
        self.world.broker.pause_channel(self.world.broker.topics["t"], channel, paused)
        self.world.pump()

    def do_pause_topic(self) -> None:
        """`pause-topic`, `unpause-topic` stops and goes on handing messages to channels."""
        self._pause_topic(True)

    def do_unpause_topic(self) -> None:
        self._pause_topic(False)

    def _pause_topic(self, paused: bool) -> None:
        self.world.broker.pause_topic(self.world.broker.topics["t"], paused)
        self.world.pump()

    def do_empty_topic(self) -> None:
        """`empty-topic` drops what no channel has been handed."""
        self.world.broker.empty_topic(self.world.broker.topics["t"])
        self.world.pump()

    def do_empty(self, channel: str = "c") -> None:
        """`empty [CHANNEL]` drops all that a channel holds."""
        self.world.broker.empty_channel(self.world.broker.topics["t"], channel)
        self.world.pump()

    def do_delete(self, channel: str = "c") -> None:
        """`delete [CHANNEL]` deletes a channel; its consumers are gone, too."""
        gone = self.world.broker.delete_channel(self.world.broker.topics["t"], channel)
        self._forget(lambda consumer: consumer.subscription in gone)
        self.world.flush()

    def do_order(self, channel: str = "c", on: str = "on") -> None:
        """`order [CHANNEL] [on|off]` lets a channel be consumed in order, as SUB_ORDER does, or no longer."""
        self.world.broker.order_channel(self.world.broker.topics["t"], channel, on == "on")
        self.world.pump()

    def do_seek(self, place: str, channel: str = "c", partition: str = "0") -> None:
        """`seek PLACE [partition=N]` is POST /channel/setoffset, such as `seek msgcount:3`."""
        found = self.world.broker.topics["t"].partitions[int(partition)]
        wanted = parse_place(place)
        seek(found.channels[channel], wanted, sequence_at(wanted, found))
        self.world.broker.was_changed(found.channels[channel])
        self.world.pump()

    def do_drop(self, message: str, channel: str = "c") -> Iterator[str]:
        """`drop ID` finishes a message wherever it is, as an operator."""
        internal = self._id(message)
        found = self.world.channel("t", channel, internal >> 50)
        if drop(found, internal & ((1 << 50) - 1)) is not True:
            yield f"no message {message}"
        self.world.broker.was_changed(found)
        self.world.pump()

    # -- clients

    def do_publish(self, *bodies: str, partition: str | None = None, delay: str = "0s") -> None:
        """`publish BODY... [partition=N] [delay=5s]` publishes messages at once, durably."""
        number = None if partition is None else int(partition)
        self.world.publish("t", [body.encode() for body in bodies], number, duration_ns(delay))

    def do_publish_many(self, count: str, partition: str | None = None) -> None:
        """`publish-many N [partition=N]` publishes so many, of which each says which one it is."""
        self.do_publish(*(f"m{number}" for number in range(1, int(count) + 1)), partition=partition)

    def do_consume(
        self, *names: str, rdy: str = "0", channel: str = "c", partition: str | None = None, timeout: str = ""
    ) -> Iterator[str]:
        """`consume NAME... [rdy=N] [channel=C] [partition=N] [timeout=60s]` connects consumers."""
        for name in names:
            number = None if partition is None else int(partition)
            timeout_ns = duration_ns(timeout) if timeout else MSG_TIMEOUT_NS
            self.consumers[name] = self.world.subscribe("t", channel, number, timeout_ns)
        for name in names:
            self.consumers[name].ready(int(rdy))
            yield from self._told()

    def do_rdy(self, name: str, count: str) -> None:
        """`rdy NAME N` says how many messages it may hold."""
        self.consumers[name].ready(int(count))

    def do_finish(self, name: str, *messages: str) -> Iterator[str]:
        """`finish NAME ID...` sends a run of FINs."""
        failed = self.consumers[name].finish(map(self._id, messages))
        for message in messages:
            if self._id(message) in failed:
                yield f"FIN {message} failed: not in flight here"

    def do_requeue(self, name: str, message: str, delay: str = "0s") -> Iterator[str]:
        """`requeue NAME ID [delay=5s]` sends REQ."""
        if not self.consumers[name].requeue(self._id(message), duration_ns(delay)):
            yield f"REQ {message} failed: not in flight here"

    def do_touch(self, name: str, message: str) -> Iterator[str]:
        """`touch NAME ID` sends TOUCH."""
        if not self.consumers[name].touch(self._id(message)):
            yield f"TOUCH {message} failed: not in flight here"

    def do_stuck(self, name: str) -> None:
        """`stuck NAME`, `unstuck NAME` says that its socket takes no more, or takes something again."""
        self.consumers[name].has_room(False)

    def do_unstuck(self, name: str) -> None:
        self.consumers[name].has_room(True)

    def do_leave(self, name: str) -> None:
        """`leave NAME` breaks the connection."""
        self.world.leave(self.consumers.pop(name))

    def _forget(self, is_gone: Callable[[Consumer], bool]) -> None:
        for name in [name for name, consumer in self.consumers.items() if is_gone(consumer)]:
            self.world.consumers.remove(self.consumers.pop(name))

    # -- time and the process

    def do_wait(self, duration: str) -> Iterator[str]:
        """`wait 5s` lets time pass, from deadline to deadline."""
        for passed_ns in self.world.passing(duration_ns(duration)):
            yield from self._told(f"after {shown_time(passed_ns)}: ")

    def do_flush(self) -> None:
        """`flush` writes progress and reads what is due, as the daemon does every 0.1 s."""
        self.world.flush()

    def do_restart(self) -> None:
        """`restart` ends cleanly and starts again; all consumers are gone."""
        self.consumers.clear()
        self.world.restart()

    def do_kill(self) -> None:
        """`kill`, `power-loss` ends at once and starts again; what was not flushed is forgotten."""
        self._die(power_loss=False)

    def do_power_loss(self) -> None:
        self._die(power_loss=True)

    def _die(self, power_loss: bool) -> None:
        self.consumers.clear()
        self.world.die(power_loss)

    def do_fail(self, path: str) -> None:
        """`fail PATH` lets the next write to a file fail."""
        self.world.disk.fail("write", times=1, path=path)

    # -- what there is to see

    def do_show(self, channel: str | None = None) -> Iterator[str]:
        """`show [CHANNEL]` describes channels: floor, cursor, window, counts."""
        for place, found in self._channels(channel):
            yield place + found.describe().rstrip()

    def do_counts(self, channel: str | None = None) -> Iterator[str]:
        """`counts [CHANNEL]` says what /stats says of channels."""
        for place, found in self._channels(channel):
            yield (
                f"{place}{found.name}: depth {found.depth}, in flight {found.in_flight_count}, deferred "
                f"{found.deferred_count}, requeued {found.requeue_count}, timed out {found.timeout_count}"
            )
        for topic in self.world.broker.topics.values():
            if topic.depth:
                yield f"topic: depth {topic.depth}"
