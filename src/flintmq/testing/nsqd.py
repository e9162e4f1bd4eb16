"""A whole nsqd for the tests of an application: real code and real sockets, a disk in memory, a clock to be moved.

Rules of this file:

- It is the nsqd that runs in production. What differs is handed in: the disk, the clock, addresses with free ports.
- It runs on an event loop in a thread of its own, so that tests of any style use it alike: asyncio, threads, gevent.
  Every method may be called from any thread; it is answered between two turns of that loop.
- What waits is bounded, and says what it waited for.

::

    with MemoryNsqd(clock=ManualClock()) as nsqd:
        run_my_service(nsqd.tcp_address)
        nsqd.publish("orders", b"1")
        nsqd.wait_drained("orders", "billing")
        assert nsqd.published("invoices") == [b"invoice of 1"]
        nsqd.advance(60)                               # now the message timeout has passed
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

from flintmq.addresses import format_address
from flintmq.batch import EXTENDED, RAW_IDS
from flintmq.broker.topic import Topic
from flintmq.client.core.publish import Body, check_topic, checked_bodies
from flintmq.client.options import DELAY_MAX_S, Seconds, milliseconds
from flintmq.clock import Clock, SystemClock
from flintmq.env import Env
from flintmq.errors import LocalProtocolError, StorageError
from flintmq.message import MESSAGE_HEADER, body_position
from flintmq.names import is_valid_name, listed, why_invalid
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.server import Nsqd
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.server import Nsqlookupd
from flintmq.options import resolve
from flintmq.testing.clock import ManualClock
from flintmq.testing.files import MemoryDisk
from flintmq.wire.server import Publish

log = logging.getLogger("flintmq.testing")

DEADLINE_S = 30.0
POLL_S = 0.002
LISTED_MAX = 10  # names that an error lists
_NS_PER_S = 1_000_000_000

Result = TypeVar("Result")


class StoredMessage(NamedTuple):
    """A message as the log has it.

    Attributes:
        timestamp_ns: wall time of its acceptance, nanoseconds since the Unix epoch.
        id: 16 lower-case hex digits; 32, the last 16 of which are the trace id, on topics with partitions or headers.
        body: as published, without headers.
    """

    timestamp_ns: int
    id: bytes
    body: bytes


class ChannelCounts(NamedTuple):
    """The messages of a channel by the state they are in; the words of ``/stats``.

    Attributes:
        depth: waiting to be delivered.
        in_flight: delivered and not answered.
        deferred: waiting for their time.
        requeued, timed_out: events since the start.
        clients: consumers that are connected.
    """

    depth: int
    in_flight: int
    deferred: int
    requeued: int
    timed_out: int
    clients: int

    @property
    def unfinished(self) -> int:
        """Messages that no consumer has finished."""
        return self.depth + self.in_flight + self.deferred


class MemoryNsqd:
    """An nsqd, and the nsqlookupd it registers with, in this process. Use it as a context manager.

    Args:
        flags: of nsqd, in its own spelling: ``"--msg-timeout=2s"``; addresses and ``--data-path`` have no effect.
        clock: None for real time; a :class:`ManualClock` makes timeouts and delays wait for :meth:`advance` (heartbeats
            keep real time, since the client at the other end does).
        disk: where messages are kept; a new one if None. It can be told to fail: :meth:`MemoryDisk.fail`.

    Raises:
        OptionError: a flag is unknown or its value wrong.

    Attributes:
        disk: what it writes to; outlives :meth:`restart`.
    """

    def __init__(self, *flags: str, clock: Clock | None = None, disk: MemoryDisk | None = None) -> None:
        self._options: NsqdOptions = resolve(NsqdOptions, list(flags), {}).options
        self._clock: Clock = clock or SystemClock()
        self.disk = disk or MemoryDisk()
        self._env = Env(clock=self._clock, run_blocking=_run_inline, hostname="localhost")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._nsqd: Nsqd | None = None
        self._lookupd: Nsqlookupd | None = None

    def __repr__(self) -> str:
        return f"<MemoryNsqd {self.tcp_address if self._nsqd is not None else 'not started'}>"

    # -- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def start(self) -> None:
        """Listen on free ports of 127.0.0.1.

        Raises:
            FlintError: it cannot start, as nsqd would say it.
        """
        if self._thread is not None:
            raise RuntimeError("it runs already")
        loop = self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=loop.run_forever, name="MemoryNsqd", daemon=True)
        self._thread.start()
        try:
            self._await(self._start())
        except BaseException:
            self._end_thread()
            raise

    async def _start(self) -> None:
        lookupd_options = NsqlookupdOptions(
            tcp_address="127.0.0.1:0", http_address="127.0.0.1:0", broadcast_address="127.0.0.1"
        )
        self._lookupd = Nsqlookupd(self._env, lookupd_options)
        await self._lookupd.start()
        self._options = self._options.replace(
            tcp_address="127.0.0.1:0",
            http_address="127.0.0.1:0",
            broadcast_address="127.0.0.1",
            lookupd_tcp_address=(format_address(*self._lookupd.tcp_address),),
        )
        await self._start_nsqd()

    async def _start_nsqd(self) -> None:
        self._nsqd = Nsqd(self._env, self.disk.attach(), self._options)
        await self._nsqd.start()
        await self._nsqd.introduced()  # a topic with partitions can be created, and found, from the first moment

    def close(self) -> None:
        """Stop; what it stored stays on :attr:`disk`.

        What a disk that was told to fail, or is full, does not take is logged and not raised: the test wanted it.

        Raises:
            StorageError: a disk that nobody broke failed.
        """
        if self._thread is None:
            return
        try:
            self._await(self._close())
        finally:
            self._end_thread()

    async def _close(self) -> None:
        nsqd, self._nsqd = self._nsqd, None
        lookupd, self._lookupd = self._lookupd, None
        try:
            if nsqd is not None:
                await nsqd.close()
        except (StorageError, OSError) as error:
            self.disk.release()  # as when a process ends: another one may open it
            if not self.disk.was_broken:
                raise
            log.warning("the disk, which the test broke, did not take everything at the end: %s", error)
        finally:
            if lookupd is not None:
                await lookupd.close()

    def _end_thread(self) -> None:
        loop, thread = self._loop, self._thread
        assert loop is not None and thread is not None
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        thread.join(DEADLINE_S)
        loop.close()

    def restart(self) -> None:
        """Stop nsqd cleanly and start it again, with its messages and its addresses: clients have to reconnect."""
        self._await(self._restart())

    async def _restart(self) -> None:
        nsqd = self._running()
        tcp, http = nsqd.addresses.tcp, nsqd.addresses.http
        assert tcp is not None and http is not None
        await nsqd.close()
        self._options = self._options.replace(tcp_address=format_address(*tcp), http_address=format_address(*http))
        await self._start_nsqd()

    def cut_connections(self) -> None:
        """Cut every client's connection, as a broken network does."""

        def cut() -> None:
            for client in list(self._running().clients):
                client.abort()

        self._call(cut)

    # -- addresses -------------------------------------------------------------------------------------------------

    @property
    def tcp_address(self) -> str:
        """``host:port`` for clients."""
        return _reachable(self._running().addresses.tcp)

    @property
    def http_address(self) -> str:
        """``http://host:port`` of nsqd."""
        return f"http://{_reachable(self._running().addresses.http)}"

    @property
    def nsqlookupd_http_address(self) -> str:
        """``http://host:port`` of the nsqlookupd that this nsqd registers with."""
        assert self._lookupd is not None, "start it first: with MemoryNsqd() as nsqd"
        return f"http://{_reachable(self._lookupd.http_address)}"

    # -- messages --------------------------------------------------------------------------------------------------

    def publish(self, topic: str, *bodies: Body, delay: Seconds = 0.0) -> None:
        """Publish messages; returns when they are stored.

        Args:
            bodies: at least one; bytes, or values that become JSON, as with :meth:`flintmq.Producer.pub`.
            delay: seconds or a timedelta until they may be delivered; ``--max-req-timeout`` is no limit here.

        Raises:
            TypeError: a body is text, which must be encoded, or nothing that JSON can say.
            LocalProtocolError: the topic's name is not valid, there is no body or one is empty.
            OptionError: the delay is not a duration from 0 to 365 days.
            StorageError: the disk refused them.
        """
        check_topic(topic)
        data = checked_bodies(bodies)
        self._await(self._publish(topic, data, milliseconds(delay, "delay", 0, DELAY_MAX_S)))

    async def _publish(self, topic: str, bodies: list[bytes], defer_ms: int) -> None:
        command = "MDPUB" if defer_ms else "MPUB"
        group = self._running().node.publishing.publish(Publish(command, topic, bodies, 1, defer_ms)).source
        waiter = _Waiter()
        group.waiters.append(waiter)
        self._running().node.engine.schedule()
        await waiter.has_ended.wait()
        if group.error is not None:
            raise group.error
        await self._started(topic)

    async def _started(self, topic: str) -> None:
        """Wait until a new topic hands out messages: nsqlookupd is asked for its channels before."""
        topics = self._running().node.engine.broker.topics
        await _wait_until(lambda: topic not in topics or not topics[topic].is_starting)

    def messages(self, topic: str) -> list[StoredMessage]:
        """Return every message published to a topic and still in its log, in order; consuming takes none away.

        The log forgets from its start once it is larger than ``--max-bytes-per-file`` (100 MiB). Ephemeral topics keep
        only what is not finished.
        """

        def read() -> list[StoredMessage]:
            found = self._running().node.engine.broker.topics.get(topic)
            return [] if found is None else list(_stored(found))

        return self._call(read)

    def published(self, topic: str) -> list[bytes]:
        """Return the bodies of :meth:`messages`."""
        return [message.body for message in self.messages(topic)]

    def create(self, topic: str, channel: str = "") -> None:
        """Create a topic, or a channel with its topic: what is published from now on waits in it for a consumer.

        Raises:
            LocalProtocolError: a name is not valid.
        """
        check_topic(topic)
        if channel and not is_valid_name(channel):
            raise LocalProtocolError("E_BAD_CHANNEL", why_invalid("channel", channel))
        self._await(self._create(topic, channel))

    async def _create(self, topic: str, channel: str) -> None:
        found = self._running().node.topics.create(topic)
        if channel:
            self._running().node.engine.broker.channel(found, channel)
        await self._started(topic)

    # -- where it stands -------------------------------------------------------------------------------------------

    def counts(self, topic: str, channel: str) -> ChannelCounts:
        """Count the messages of a channel by the state they are in; zeros when there is no such channel."""
        return self._call(lambda: self._count(topic, channel))

    def _count(self, topic: str, channel: str) -> ChannelCounts:
        found = self._running().node.engine.broker.topics.get(topic)
        parts = found.channels(channel) if found is not None and channel in found.channel_names else []
        return ChannelCounts(
            sum(part.depth for part in parts),
            sum(part.in_flight_count for part in parts),
            sum(part.deferred_count for part in parts),
            sum(part.requeue_count for part in parts),
            sum(part.timeout_count for part in parts),
            sum(len(part.subscriptions) for part in parts),
        )

    def is_drained(self, topic: str, channel: str) -> bool:
        """Whether the channel exists and every message of it is finished."""
        return self._call(lambda: self._is_drained(topic, channel))

    def _is_drained(self, topic: str, channel: str) -> bool:
        found = self._running().node.engine.broker.topics.get(topic)
        if found is None or channel not in found.channel_names:
            return False
        return not found.depth and not self._count(topic, channel).unfinished

    def wait_drained(self, topic: str, channel: str, timeout: float = DEADLINE_S) -> None:
        """Block until :meth:`is_drained`; for consumers in other threads. On an event loop: :meth:`drained`.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it is not; says where the messages are, or which topics or channels there are instead.
        """
        self._begin(self._drained(topic, channel, timeout)).result()

    async def drained(self, topic: str, channel: str, timeout: float = DEADLINE_S) -> None:
        """Wait until :meth:`is_drained`, on the caller's event loop.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it is not; says where the messages are, or which topics or channels there are instead.
        """
        await asyncio.wrap_future(self._begin(self._drained(topic, channel, timeout)))

    def _drained(self, topic: str, channel: str, timeout_s: float) -> Coroutine[Any, Any, None]:
        return self._reached(topic, channel, "drained", lambda: self._is_drained(topic, channel), timeout_s)

    def wait_delivered(self, topic: str, channel: str, count: int = 1, timeout: float = DEADLINE_S) -> None:
        """Block until so many messages are in flight at once; on an event loop: :meth:`delivered`.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: they are not; says where the messages are, or which topics or channels there are instead.
        """
        self._begin(self._delivered(topic, channel, count, timeout)).result()

    async def delivered(self, topic: str, channel: str, count: int = 1, timeout: float = DEADLINE_S) -> None:
        """Wait until so many messages are in flight at once, on the caller's event loop.

        What happens to a message that a handler holds, such as its timeout, can be tested from here on.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: they are not; says where the messages are, or which topics or channels there are instead.
        """
        await asyncio.wrap_future(self._begin(self._delivered(topic, channel, count, timeout)))

    def _delivered(self, topic: str, channel: str, count: int, timeout_s: float) -> Coroutine[Any, Any, None]:
        def is_delivered() -> bool:
            return self._count(topic, channel).in_flight >= count

        return self._reached(topic, channel, f"holding {count} in flight", is_delivered, timeout_s)

    async def _reached(
        self, topic: str, channel: str, state: str, condition: Callable[[], bool], timeout_s: float
    ) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await _wait_until(condition)
        except TimeoutError:
            where = self._where(topic, channel)
            raise TimeoutError(f"{topic}/{channel} not {state} within {timeout_s:g} s: {where}") from None

    def _where(self, topic: str, channel: str) -> str:
        """Say where a channel's messages are; what there is instead when there is no such channel."""
        topics = self._running().node.engine.broker.topics
        found = topics.get(topic)
        if found is None:
            there = f"; there are: {listed(sorted(topics), LISTED_MAX)}" if topics else ", and no other"
            return f"there is no topic {topic}{there}"
        waiting = found.depth
        shown = f"{waiting} {'message waits' if waiting == 1 else 'messages wait'}"
        if channel not in found.channel_names:
            wait = f" ({shown} for the first channel)" if waiting else ""
            others = listed(sorted(found.channel_names), LISTED_MAX)
            return (
                f"topic {topic} has no channel {channel}{wait}{f'; it has: {others}' if others else ', and no other'}"
            )
        wait = f"; {shown} in the topic{', which is paused' if found.paused else ''}" if waiting else ""
        return f"{self._count(topic, channel)}{wait}"

    # -- time ------------------------------------------------------------------------------------------------------

    def advance(self, seconds: float) -> None:
        """Let time pass on the clock that was handed in: timeouts and delays that end by then have ended on return.

        Raises:
            RuntimeError: nsqd runs on real time.
        """
        clock = self._clock
        if not isinstance(clock, ManualClock):
            raise RuntimeError("this nsqd runs on real time; make it with MemoryNsqd(clock=ManualClock())")

        def advance() -> None:
            clock.advance(round(seconds * _NS_PER_S))
            self._running().node.engine.look_at_clock()

        self._call(advance)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _running(self) -> Nsqd:
        if self._nsqd is None:
            raise RuntimeError("start it first: with MemoryNsqd() as nsqd")
        return self._nsqd

    def _call(self, function: Callable[[], Result]) -> Result:
        """Run a function between two turns of nsqd's loop."""

        async def call() -> Result:
            return function()

        return self._await(call())

    def _await(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return self._begin(coroutine).result(DEADLINE_S)

    def _begin(self, coroutine: Coroutine[Any, Any, Result]) -> Future[Result]:
        if self._loop is None:
            coroutine.close()
            raise RuntimeError("start it first: with MemoryNsqd() as nsqd")
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class _Waiter:
    """Waits for a publish, as a connection does."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()

    def publish_ended(self) -> None:
        self.has_ended.set()


async def _run_inline(function: Callable[..., Any], /, *args: Any) -> Any:
    """Run a blocking function at once: a disk in memory never makes its caller wait."""
    return function(*args)


async def _wait_until(condition: Callable[[], bool]) -> None:
    """Wait for what nobody is told of; the caller has the deadline."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)


def _stored(topic: Topic) -> Iterable[StoredMessage]:
    for partition in topic.partitions.values():
        log = partition.log
        sequence = log.start_sequence
        while sequence < log.committed_sequence and (batch := log.read(sequence)) is not None:
            for each in range(max(sequence, batch.first), batch.end):
                frame = bytes(batch.frames(each, each + 1))
                _, _, timestamp_ns, _, message_id = MESSAGE_HEADER.unpack_from(frame)
                flags = batch.header.flags
                body_at = body_position(frame) if flags & EXTENDED else MESSAGE_HEADER.size
                shown_id = message_id.hex().encode() if flags & RAW_IDS else message_id
                yield StoredMessage(timestamp_ns, shown_id, frame[body_at:])
            sequence = batch.end


def _reachable(address: tuple[str, int] | None) -> str:
    assert address is not None
    return format_address(*address)
