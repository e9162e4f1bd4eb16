"""Counters and gauges for a statsd daemon, over UDP.

One metric per line, datagrams of whole lines::

    nsq.10_0_0_1_4151.topic.orders.message_count:17|c\\n
    nsq.10_0_0_1_4151.topic.orders.depth:3|g\\n

Rules of this file: a counter is what was added since the last report, the first report has all of it; names are not
sanitised, because dashboards know nsqd's; a report is spread over its interval, so that neither this process nor the
daemon sees a burst; nothing that happens to a datagram concerns anybody else here.

Source: NSQ's statsd; NSQ's defects for the names of percentiles.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping

from flintmq.names import is_ephemeral
from flintmq.net.address import split_address
from flintmq.net.tasks import tell
from flintmq.nsqd.figures.collection import ChannelFigures, TopicFigures
from flintmq.nsqd.figures.latencies import Latency
from flintmq.nsqd.in_turns import in_turns

log = logging.getLogger(__name__)

_HERE = "127.0.0.1"
_CONNECT_DEADLINE_S = 1.0
_KEPT_FREE_S = 1.0  # at the end of an interval, as nsqd does

_MEMORY_GAUGES = (
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
)


def percentile_name(quantile: float) -> str:
    """``99`` for 0.99 and ``99_9`` for 0.999, which nsqd calls 100."""
    return f"{quantile * 100:.10g}".replace(".", "_")


class Lines:
    """Writes figures as lines; remembers counters from one report to the next.

    Args:
        prefix: what every key starts with.
        exclude_ephemeral: leave out ephemeral topics and channels.
    """

    def __init__(self, prefix: str, exclude_ephemeral: bool) -> None:
        self._prefix = prefix
        self._exclude_ephemeral = exclude_ephemeral
        self._reported: dict[str, int] = {}
        self._counts: dict[str, int] = {}

    def report(self, topics: Iterable[TopicFigures], memory: Mapping[str, int] | None) -> list[bytes]:
        """Return the lines of one report; counters of the next begin where this one ends."""
        self.begin()
        lines = [line for topic in topics for line in self.topic(topic)]
        return lines + self.end(memory)

    def begin(self) -> None:
        """Begin a report, which :meth:`end` ends."""
        self._counts = {}

    def end(self, memory: Mapping[str, int] | None) -> list[bytes]:
        """The last lines of a report."""
        lines: list[bytes] = []
        if memory is not None:
            lines += [self._gauge(f"mem.{name}", memory[name]) for name in _MEMORY_GAUGES]
            lines.append(self._count("mem.gc_runs", memory["gc_total_runs"]))
        self._reported = self._counts
        return lines

    def _is_excluded(self, name: str) -> bool:
        return self._exclude_ephemeral and is_ephemeral(name)

    def topic(self, topic: TopicFigures) -> Iterator[bytes]:
        """Write the lines of one topic and its channels."""
        if self._is_excluded(topic.name):
            return
        key = f"topic.{topic.name}"
        yield self._count(f"{key}.message_count", topic.message_count)
        yield self._count(f"{key}.message_bytes", topic.message_bytes)
        yield self._gauge(f"{key}.depth", topic.depth)
        yield self._gauge(f"{key}.backend_depth", topic.backend_depth)
        yield from self._latency(key, topic.latency)
        for channel in topic.channels:
            if not self._is_excluded(channel.name):
                yield from self._channel(f"{key}.channel.{channel.name}", channel)

    def _channel(self, key: str, channel: ChannelFigures) -> Iterator[bytes]:
        yield self._count(f"{key}.message_count", channel.message_count)
        yield self._gauge(f"{key}.depth", channel.depth)
        yield self._gauge(f"{key}.backend_depth", channel.backend_depth)
        yield self._gauge(f"{key}.in_flight_count", channel.in_flight_count)
        yield self._gauge(f"{key}.deferred_count", channel.deferred_count)
        yield self._count(f"{key}.requeue_count", channel.requeue_count)
        yield self._count(f"{key}.timeout_count", channel.timeout_count)
        yield self._gauge(f"{key}.clients", channel.client_count)
        yield from self._latency(key, channel.latency)

    def _latency(self, key: str, latency: Latency) -> Iterator[bytes]:
        for quantile, value_ns in latency.percentiles or ():
            yield self._gauge(f"{key}.e2e_processing_latency_{percentile_name(quantile)}", value_ns)

    def _gauge(self, name: str, value: int) -> bytes:
        return f"{self._prefix}{name}:{value}|g\n".encode()

    def _count(self, name: str, value: int) -> bytes:
        self._counts[name] = value
        before = self._reported.get(name, 0)
        added = value - before if value >= before else value  # a new topic of an old name begins at 0
        return f"{self._prefix}{name}:{added}|c\n".encode()


def datagrams(lines: Iterable[bytes], size_max: int) -> Iterator[bytes]:
    """Whole lines, as many as fit into ``size_max`` bytes; a longer line stands alone."""
    packet: list[bytes] = []
    size = 0
    for line in lines:
        if packet and size + len(line) > size_max:
            yield b"".join(packet)
            packet, size = [], 0
        packet.append(line)
        size += len(line)
    if packet:
        yield b"".join(packet)


class _Socket(asyncio.DatagramProtocol):
    """Notes what the network says about our datagrams."""

    def __init__(self) -> None:
        self.error: Exception | None = None

    def error_received(self, exc: Exception) -> None:
        self.error = exc


class Reporter:
    """Reports at every interval until it is closed.

    Args:
        address: ``host:port`` of the daemon.
        interval_s: between two reports.
        packet_size: of the largest datagram in bytes.
        lines: forms the reports.
        topics: all topics, each collected when it is asked for.
        memory: figures of this process; None to leave them out.
    """

    def __init__(
        self,
        address: str,
        interval_s: float,
        packet_size: int,
        lines: Lines,
        topics: Callable[[], Iterable[TopicFigures]],
        memory: Callable[[], Mapping[str, int]] | None = None,
    ) -> None:
        self._address = address
        self._interval_s = interval_s
        self._packet_size = packet_size
        self._lines = lines
        self._topics = topics
        self._memory = memory
        self._is_failing = False
        self._closing = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._run())
        self._task.add_done_callback(tell("statsd reports"))

    async def close(self) -> None:
        """Send what is left of a report that has begun, and stop."""
        self._closing.set()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        next_at = self._loop.time()
        while not self._closing.is_set():
            next_at = max(next_at + self._interval_s, self._loop.time())
            await self._pause(next_at - self._loop.time())
            if self._closing.is_set():
                return
            try:
                await self._report()
            except (OSError, TimeoutError) as error:
                self._note(error if str(error) else TimeoutError("no answer to the look-up of its name"))
            except Exception as error:
                if not self._is_failing:
                    log.error("a statsd report ended unexpectedly: %r", error, exc_info=error)
                self._is_failing = True

    async def _pause(self, seconds: float) -> None:
        """Wait, but no longer once this is being closed."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await self._closing.wait()
        except TimeoutError:
            pass

    async def _report(self) -> None:
        address = split_address(self._address)
        assert address is not None, "the option is checked when it is read"
        host, port = address
        async with asyncio.timeout(_CONNECT_DEADLINE_S):
            transport, socket = await self._loop.create_datagram_endpoint(_Socket, remote_addr=(host or _HERE, port))
        try:
            packets = list(datagrams(await self._collect(), self._packet_size))
            pause_s = max(0.0, self._interval_s - _KEPT_FREE_S) / max(1, len(packets))
            for packet in packets:
                transport.sendto(packet)
                if not self._closing.is_set():
                    await self._pause(pause_s)
        finally:
            transport.close()
        self._note(socket.error)

    async def _collect(self) -> list[bytes]:
        lines: list[bytes] = []
        self._lines.begin()
        async for topic in in_turns(self._topics()):
            lines += self._lines.topic(topic)
        return lines + self._lines.end(self._memory() if self._memory is not None else None)

    def _note(self, error: Exception | None) -> None:
        """Say it once when reports begin to fail, and once when they get through again."""
        if error is not None and not self._is_failing:
            log.warning("statsd %s: %s; reports go on", self._address, error)
        elif error is None and self._is_failing:
            log.info("statsd %s: reports get through again", self._address)
        self._is_failing = error is not None
