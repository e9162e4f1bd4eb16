"""nsqd's connections to its nsqlookupds: each told of every topic and channel, and pinged.

Each nsqlookupd has a task of its own, so a slow one delays nobody. After a connection breaks it is tried again within
a second, and everything is registered anew. Why that failed is logged, and again when the reason becomes another one: a
nsqlookupd that was away may have something against this nsqd when it is back.

Source: NSQ's nsqlookupd.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import msgspec

from flintmq.env import Env
from flintmq.errors import FlintError, RemoteProtocolError
from flintmq.net.address import connect, split_address
from flintmq.net.tasks import kept_up
from flintmq.topic_meta import PLAIN, TopicMeta
from flintmq.wire.lookup import (
    ALL_PARTITIONS,
    PING,
    LookupClientConnection,
    LookupdInfo,
    PeerInfo,
    decode_lookupd_info,
    encode_describe,
    encode_identify,
    encode_register,
    encode_unregister,
    error_of,
)

log = logging.getLogger(__name__)

_MAGIC_V1 = b"  V1"
_CONNECT_DEADLINE_S = 1.0
_ANSWER_DEADLINE_S = 1.0
_PING_INTERVAL_S = 15.0
_RETRY_MIN_S, _RETRY_MAX_S = 0.5, 1.0
_TELL_INTERVAL_NS = 5_000_000_000  # between two lines about reasons that take turns while there is no connection
_CHANGES_MAX = 100_000  # then everything is registered anew instead
PLAIN_WORDS = "plain"
"""``REGISTER topic [channel]``, which NSQ's knows."""
YOUZAN_WORDS = "youzan"
"""``REGISTER topic partition [channel]``, which the redesigned NSQ's wants of a node that has said an id."""
OUR_WORDS = "ours"
"""The same, with partition -11 for a topic without partitions, and META."""


_YOUZAN_VERSION = "-HA."


class Registration(NamedTuple):
    """A topic, or a channel of it, that is served here.

    Attributes:
        channel: empty for the topic itself.
        partitions: those that are here; none of a plain topic.
    """

    topic: str
    channel: str = ""
    partitions: tuple[int, ...] = ()
    meta: TopicMeta = PLAIN

    def commands(self, exists: bool, dialect: str) -> list[bytes]:
        """Return what a nsqlookupd is sent.

        Args:
            dialect: what it understands: :data:`PLAIN_WORDS`, :data:`YOUZAN_WORDS` or :data:`OUR_WORDS`.
        """
        topic, channel = self.topic, self.channel
        encode = encode_register if exists else encode_unregister
        if dialect == PLAIN_WORDS:
            return [encode(topic, channel)]
        if dialect == YOUZAN_WORDS:  # there a plain topic has partition 0, under which it can be published to here
            return [encode(topic, channel, number) for number in self.partitions or (0,)]
        if not exists:
            return [encode_unregister(topic, channel, ALL_PARTITIONS)]
        head = [] if channel or self.meta == PLAIN else [encode_describe(topic, self.meta)]
        if not self.partitions:
            return [*head, encode_register(topic, channel, ALL_PARTITIONS)]
        return [*head, *(encode_register(topic, channel, number) for number in self.partitions)]


class _Connection(asyncio.Protocol):
    """Answers of one nsqlookupd, in order, as futures.

    Args:
        on_lost: called when the connection is gone.
    """

    def __init__(self, on_lost: Callable[[], None]) -> None:
        self._on_lost = on_lost
        self._parser = LookupClientConnection()
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._transport: asyncio.Transport | None = None
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.receive_data(data)
            while (response := self._parser.next_response()) is not None:
                if self._waiting:
                    future = self._waiting.popleft()
                    if not future.done():
                        future.set_result(response)
        except RemoteProtocolError as error:
            self._fail(error)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fail(ConnectionResetError("connection lost") if exc is None else exc)
        self._on_lost()

    def _fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for future in waiting:
            if not future.done():
                future.set_exception(error)
        self.close()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    @property
    def is_open(self) -> bool:
        return self._transport is not None

    async def ask(self, data: bytes, answers: int) -> list[bytes]:
        """Send commands and wait for all of their answers.

        Raises:
            OSError, TimeoutError, RemoteProtocolError: the connection is of no more use.
        """
        if self._transport is None:
            raise ConnectionResetError("connection lost")
        futures: list[asyncio.Future[bytes]] = [self._loop.create_future() for _ in range(answers)]
        self._waiting.extend(futures)
        self._transport.write(data)
        async with asyncio.timeout(_ANSWER_DEADLINE_S + answers / 1000):
            return list(await asyncio.gather(*futures))


class LookupPeer:
    """Keeps one nsqlookupd informed.

    Attributes:
        address: as configured.
        info: what it said of itself, None while not connected.
        tried: set when the first connection has been made or has failed.
    """

    def __init__(
        self, address: str, env: Env, me: Callable[[], PeerInfo], registrations: Callable[[], Iterable[Registration]]
    ) -> None:
        self.address = address
        self.info: LookupdInfo | None = None
        self.tried = asyncio.Event()
        self._env = env
        self._me = me
        self._registrations = registrations
        self._changes: deque[bytes] = deque()
        self._changed = asyncio.Event()
        self._reset = False
        self._said_partitions = False  # on this connection
        self._hides_id = False  # it wants what we cannot say of a node with an id
        work = kept_up(self._run, f"registering with nsqlookupd {address}", self._failed)
        self._task = asyncio.get_running_loop().create_task(work)

    def register(self, registration: Registration, exists: bool) -> None:
        """Tell it of a topic or channel that was created or deleted."""
        is_known = self._said_partitions or self._hides_id
        is_first = registration.meta != PLAIN and not is_known and self.info is not None
        # of what is gone it is not known here which partitions it had; who connects anew has registered nothing else
        is_gone = not exists and self._dialect == YOUZAN_WORDS
        if is_first or is_gone or len(self._changes) >= _CHANGES_MAX:
            self._changes.clear()
            self._reset = True  # what it has to know first is said when a connection begins
        self._changes += registration.commands(exists, self._dialect)
        self._changed.set()

    def introduce_again(self) -> None:
        """Say everything anew, IDENTIFY first."""
        self._changes.clear()
        self._reset = True
        self._changed.set()

    async def close(self) -> None:
        """Stop; nsqlookupd forgets this nsqd when the connection closes."""
        self.tried.set()
        self._task.cancel()
        await asyncio.wait([self._task])

    @property
    def _dialect(self) -> str:
        """The words with which this connection registers."""
        if self.info is None or not self._said_partitions:
            return PLAIN_WORDS
        if self.info.partitions:
            return OUR_WORDS
        return YOUZAN_WORDS if _YOUZAN_VERSION in self.info.version else PLAIN_WORDS

    async def _run(self) -> None:
        was_connected, told, told_ns = True, "", 0
        while True:
            try:
                await self._serve()
            except (OSError, TimeoutError, FlintError) as error:
                reason, now_ns = str(error) or "no answer", self._env.clock.monotonic_ns()
                if was_connected or (reason != told and now_ns - told_ns >= _TELL_INTERVAL_NS):
                    log.warning("nsqlookupd %s: %s; trying again until it answers", self.address, reason)
                    told, told_ns = reason, now_ns
            was_connected = self.info is not None
            self.info = None
            self.tried.set()
            await asyncio.sleep(self._env.random.uniform(_RETRY_MIN_S, _RETRY_MAX_S))

    def _failed(self, error: Exception) -> None:
        self.info = None
        self.tried.set()

    async def _serve(self) -> None:
        """Connections, each from its first byte, until one breaks.

        What has to be said anew is said on a new one, and the one before ends behind it: meanwhile consumers find this
        nsqd as before. NSQ's nsqlookupd, Youzan's and ours know who is connected by the connection's own address.
        """
        opened: list[_Connection] = []
        try:
            while True:
                opened.append(await self._connect())
                if await self._introduce(opened[-1]):
                    while len(opened) > 1:
                        opened.pop(0).close()
                    await self._keep(opened[0])
                else:
                    opened.pop().close()
        except RemoteProtocolError as error:
            if error.code in ("E_INVALID", "E_BAD_PARTITIONID") and self._said_partitions and not self._hides_id:
                self._hides_id = True  # as a node of NSQ's it is welcome everywhere
                log.warning("nsqlookupd %s: %s; it is told of topics without their partitions", self.address, error)
            raise
        finally:
            for connection in opened:
                connection.close()

    async def _introduce(self, connection: _Connection) -> bool:
        """Say who this is and what there is; False: who this is has changed meanwhile, nothing else was said."""
        me = self._me()
        said = msgspec.structs.replace(me, distributed_id="") if self._hides_id else me
        answer = await connection.ask(_MAGIC_V1 + encode_identify(said), 1)
        self.info = decode_lookupd_info(answer[0])
        self._said_partitions = bool(said.distributed_id)
        self.tried.set()
        self._reset = False
        self._changes.clear()
        if me != self._me():
            return False
        rows = list(self._registrations())
        await self._send(connection, [line for row in rows for line in row.commands(True, self._dialect)])
        log.info("nsqlookupd %s: connected, version %s", self.address, self.info.version or "unknown")
        return True

    async def _keep(self, connection: _Connection) -> None:
        """Say what changes, and that this nsqd lives, until everything has to be said anew."""
        while True:
            await self._wait(connection)
            if self._reset:
                return
            changes, self._changes = list(self._changes), deque()
            await self._send(connection, changes or [PING])

    async def _connect(self) -> _Connection:
        address = split_address(self.address)
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(_CONNECT_DEADLINE_S):
            if address is None:
                _, connection = await loop.create_unix_connection(lambda: _Connection(self._changed.set), self.address)
            else:
                connection = _Connection(self._changed.set)
                await connect(lambda: connection, *address, _CONNECT_DEADLINE_S)
        return connection

    async def _wait(self, connection: _Connection) -> None:
        """Return when there is something to say, when the connection is lost, or when it is time for a ping."""
        self._changed.clear()
        if self._reset or self._changes or not connection.is_open:
            return
        try:
            async with asyncio.timeout(_PING_INTERVAL_S):
                await self._changed.wait()
        except TimeoutError:
            pass

    async def _send(self, connection: _Connection, commands: list[bytes]) -> None:
        for start in range(0, len(commands), 500):
            part = commands[start : start + 500]
            for answer in await connection.ask(b"".join(part), len(part)):
                error = error_of(answer)
                if error is not None:
                    raise error
