"""All nsqlookupds of one nsqd: told of every topic and channel, and asked which channels a new topic has elsewhere.

Rules of this file: every wait is bounded; one that is away or slow delays only what asks it.

Source: NSQ's nsqlookupd.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable, Sequence
from urllib.parse import quote

import msgspec

from flintmq.broker.topic import Topic
from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, ConnectionFailed
from flintmq.names import is_ephemeral, is_valid_name
from flintmq.net.address import split_address
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import get
from flintmq.net.tasks import tell
from flintmq.nsqd.lookup_peer import LookupPeer, Registration
from flintmq.nsqd.options import NsqdOptions
from flintmq.wire.lookup import PORT_MAX, LookupdInfo, PeerInfo

log = logging.getLogger(__name__)

_CONCURRENT_MAX = 32
_CHANNELS_MAX = 1000  # created ahead for one topic
_FIRST_TRY_DEADLINE_S = 2.5  # a connection and IDENTIFY have 2 s


IsReady = Callable[[str, int], bool]


class _Channels(msgspec.Struct):
    channels: list[str] = []


class _Answer(msgspec.Struct):
    """nsqlookupd's answer; before 1.0 it stood in an envelope."""

    channels: list[str] | None = None
    data: _Channels | None = None


class Lookup:
    """Keeps all nsqlookupds informed.

    Args:
        me: what they are told of this nsqd.
        registrations: everything they have to know.

    Attributes:
        is_ready: whether consumers of a partition are to come here; None: of all that are.
    """

    def __init__(
        self,
        env: Env,
        options: NsqdOptions,
        me: Callable[[], PeerInfo],
        registrations: Callable[[], Iterable[Registration]],
    ) -> None:
        self._env = env
        path = options.lookupd_http_token_file
        self._token = TokenFile(path, env, "--lookupd-http-token-file") if path else None
        self._me = me
        self._registrations = registrations
        self._connect_timeout_s = options.http_client_connect_timeout_ns / 1e9
        self._request_timeout_s = options.http_client_request_timeout_ns / 1e9
        self._peers: dict[str, LookupPeer] = {}
        self._leaving: dict[asyncio.Task[None], None] = {}
        self._turns = asyncio.Semaphore(_CONCURRENT_MAX)
        self.is_ready: IsReady | None = None

    def set(self, addresses: Iterable[str]) -> None:
        """Talk to these from now on, and no longer to others."""
        before, self._peers = self._peers, {}
        for address in dict.fromkeys(addresses):
            peer = before.pop(address, None)
            self._peers[address] = peer or LookupPeer(address, self._env, self._me, self._registrations)
        for peer in before.values():
            task = asyncio.get_running_loop().create_task(peer.close())
            self._leaving[task] = None
            task.add_done_callback(lambda done: self._leaving.pop(done, None))
            task.add_done_callback(tell("leaving a nsqlookupd"))

    def __bool__(self) -> bool:
        return bool(self._peers)

    def connected(self) -> dict[str, bool]:
        """Every address, and whether it is connected now."""
        return {address: peer.info is not None for address, peer in self._peers.items()}

    def _register(self, registration: Registration, exists: bool) -> None:
        for peer in self._peers.values():
            peer.register(registration, exists)

    def changed(self, name: str, topic: Topic | None, channel: str | None, exists: bool) -> None:
        """Tell all that a topic, or a channel of it, was created or deleted.

        Args:
            topic: of that name; None when there is none any more.
        """
        if topic is not None and exists and self.is_ready is not None:
            rows = registrations_of([topic], self.is_ready)
        elif topic is None or not exists or topic.meta.is_plain:
            rows = None
        else:
            rows = registrations_of([topic])
        if rows is None:
            self._register(Registration(name, channel or ""), exists)
            return
        for row in rows:
            if not channel or channel == row.channel:
                self._register(row, True)

    def ready_changed(self, name: str, topic: Topic | None, gained: Sequence[int] | None = None) -> None:
        """Tell all that consumers of a partition are to come here, or not any more.

        Args:
            topic: of that name; None when nothing of it is here any more.
            gained: the partitions whose consumers are to come, and no others are concerned; None: some are not to.
        """
        if topic is not None and gained is not None:
            for row in registrations_of([topic], self._ready_of(gained)):
                self._register(row, True)
            return
        channels = [] if topic is None else list(topic.channel_names)
        rows = [] if topic is None else registrations_of([topic], self.is_ready)
        for channel in (*channels, ""):
            self._register(Registration(name, channel), False)
        for row in rows:
            self._register(row, True)

    def _ready_of(self, gained: Sequence[int]) -> IsReady:
        is_ready, numbers = self.is_ready, frozenset(gained)
        return lambda topic, number: number in numbers and (is_ready is None or is_ready(topic, number))

    def introduce_again(self) -> None:
        """Tell all again who this nsqd is, because that has changed."""
        for peer in self._peers.values():
            peer.introduce_again()

    async def channels_of(self, topic: str) -> list[str]:
        """Ask those that are connected for a topic's channels; return the names worth creating, without doubles.

        Takes as long as the slowest of them, and at most the sum of all deadlines.
        """
        try:
            deadline_s = _FIRST_TRY_DEADLINE_S + self._connect_timeout_s + self._request_timeout_s
            async with asyncio.timeout(deadline_s):
                found = await self._ask_all(topic)
        except TimeoutError:
            log.warning("nsqlookupds did not say in time which channels topic %s has", topic)
            found = []
        names = [name for name in dict.fromkeys(found) if is_valid_name(name) and not is_ephemeral(name)]
        if len(names) > _CHANNELS_MAX:
            log.warning("topic %s has %d channels elsewhere; %d are created now", topic, len(names), _CHANNELS_MAX)
        return names[:_CHANNELS_MAX]

    async def introduced(self) -> None:
        """Wait until every one of them knows this nsqd, or could not be told at the first try."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_FIRST_TRY_DEADLINE_S):
                await self._tried()

    async def _tried(self) -> list[LookupPeer]:
        peers = list(self._peers.values())
        for peer in peers:
            await peer.tried.wait()  # its first connection is about to be made or has failed
        return peers

    async def _ask_all(self, topic: str) -> list[str]:
        peers = await self._tried()
        infos = {peer.address: peer.info for peer in peers if peer.info is not None}
        if not infos:
            log.error("no available nsqlookupd to query for channels to pre-create for topic %s", topic)
        answers = await asyncio.gather(*(self._ask(address, info, topic) for address, info in infos.items()))
        return [name for answer in answers for name in answer]

    async def _ask(self, address: str, info: LookupdInfo, topic: str) -> list[str]:
        target = f"/channels?topic={quote(topic, safe='')}"
        if not 0 < info.http_port <= PORT_MAX:
            log.warning("nsqlookupd %s cannot be asked which channels topic %s has: no HTTP port", address, topic)
            return []
        # the name it calls itself by need not mean anything here; the one we reach it under does
        reached_by = split_address(address)
        token = "" if self._token is None else await self._token.current()
        failures = []
        for host in dict.fromkeys((info.broadcast_address, reached_by[0] if reached_by else "")):
            if not host:
                continue
            try:
                async with self._turns:
                    body = await get(
                        host,
                        info.http_port,
                        target,
                        connect_timeout_s=self._connect_timeout_s,
                        request_timeout_s=self._request_timeout_s,
                        token=token,
                    )
                answer = msgspec.json.decode(body, type=_Answer)
            except (ConnectionFailed, *UNREADABLE_JSON) as error:
                failures.append(str(error))
                continue
            return answer.channels or (answer.data.channels if answer.data is not None else [])
        reasons = "; ".join(failures)
        log.warning("nsqlookupd %s does not say which channels topic %s has: %s", address, topic, reasons)
        return []

    async def close(self) -> None:
        """Stop; every nsqlookupd forgets this nsqd when its connection closes."""
        self.set(())
        while self._leaving:
            await asyncio.wait(list(self._leaving))

    def describe(self) -> str:
        """One line per nsqlookupd, for humans."""
        return "\n".join(f"nsqlookupd {address} connected={state}" for address, state in self.connected().items())


def registrations_of(topics: Iterable[Topic], is_ready: IsReady | None = None) -> list[Registration]:
    """Return topics and their channels; of a plain one the channels alone, which name the topic as well.

    Args:
        is_ready: which of their partitions; None: all.
    """
    rows: list[Registration] = []
    for topic in topics:
        ready = tuple(n for n in topic.partitions if is_ready is None or is_ready(topic.name, n))
        if not ready and topic.partitions:
            continue
        if topic.meta.is_plain:
            rows += [Registration(topic.name, channel) for channel in topic.channel_names] or [Registration(topic.name)]
        else:
            held = ready if topic.meta.is_partitioned else ()
            rows += [Registration(topic.name, channel, held, topic.meta) for channel in ("", *topic.channel_names)]
    return rows
