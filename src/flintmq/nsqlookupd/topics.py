"""Topics with partitions: nsqlookupd places them, and tells the nsqds that get some over their HTTP API.

Nothing of this is remembered here. What a topic was created with, and who has which partition, every nsqd registers
again after a restart of either side; a creation that was interrupted is completed by asking for it again. A change of a
topic has a version: an nsqd that registers a lower one was away, and is told of the higher one that another has.

Rules of this file: one change at a time; every question to an nsqd has a deadline; a failure says which nsqd and why,
and leaves what was done.

Source: Youzan's nsqlookupd (``/topic/create``, ``/topic/delete``, ``/channel/create``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple
from urllib.parse import urlencode

import msgspec

from flintmq.clock import Clock
from flintmq.cluster.placement import NoNodes, place
from flintmq.cluster.registration import NsqdNode, RegistrationDatabase
from flintmq.errors import UNREADABLE_JSON, ConnectionFailed
from flintmq.net.address import split_address
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import ask
from flintmq.net.http_messages import HttpError
from flintmq.topic_meta import BadTopicMeta, TopicMeta, changed_meta

_CONNECT_TIMEOUT_S = 2.0
_ANSWER_TIMEOUT_S = 10.0  # of a node that makes files for several partitions on a busy disk
_REGISTERED_WITHIN_S = 5.0
_CONCURRENT_MAX = 16
_MESSAGE_SIZE_MAX = 300
_ALIGN_AGAIN_S = 5.0
_INCAPABLE_TOLD_MAX = 3
_WANTS_TLS = "wants TLS, which nsqlookupd does not speak to nsqd: start it with --tls-required=tcp-https"
_WANTS_TOKEN = "asks for a token that it knows: give nsqlookupd --nsqd-http-token-file"

_log = logging.getLogger(__name__)


class _Info(msgspec.Struct):
    flintmq_version: str = ""


class _Refusal(msgspec.Struct):
    message: str = ""


class _Incapable(NamedTuple):
    """An nsqd that cannot be given partitions, and why; ends a sentence about it."""

    node: NsqdNode
    why: str

    def __str__(self) -> str:
        return f"nsqd {self.node.http_address} {self.why}"


class TopicAdmin:
    """Changes of topics with partitions.

    Args:
        token: shown to every nsqd.
    """

    def __init__(self, database: RegistrationDatabase, clock: Clock, token: TokenFile | None = None) -> None:
        self._database = database
        self._clock = clock
        self._token = token
        self._lock = asyncio.Lock()
        self._asking = asyncio.Semaphore(_CONCURRENT_MAX)
        self._registered = asyncio.Event()
        self._aligning: dict[str, asyncio.Task[None]] = {}

    def registered(self, topic: str) -> None:
        """Take note of something that an nsqd has registered."""
        self._registered.set()
        if topic not in self._aligning and self._database.behind(topic):
            task = self._aligning[topic] = asyncio.get_running_loop().create_task(self._align(topic))
            task.add_done_callback(lambda done: self._aligned(topic, done))

    def left(self, _topic: str) -> None:
        """Take note of something that an nsqd has no longer: who waits until all have a change may wait for that."""
        self._registered.set()

    async def close(self) -> None:
        """Tell nobody anything any more."""
        tasks = list(self._aligning.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _aligned(self, topic: str, task: asyncio.Task[None]) -> None:
        self._aligning.pop(topic, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("TOPIC(%s): telling nsqds of a change ended unexpectedly", topic, exc_info=task.exception())

    async def _align(self, topic: str) -> None:
        """Tell nsqds that were away what a topic was changed to meanwhile, until all know it."""
        deaf: dict[str, None] = {}  # NSQ's own, which know of no such changes
        while True:
            async with self._lock:
                for node in self._database.behind(topic):
                    if node.node_id not in deaf and await self._why_incapable(node):
                        deaf[node.node_id] = None
                behind = [node for node in self._database.behind(topic) if node.node_id not in deaf]
                if not behind:
                    return
                failure = ""
                try:
                    await self._tell_meta(topic, self._database.meta(topic), behind)
                except HttpError as error:
                    failure = error.message
                with contextlib.suppress(TimeoutError):
                    await self._until_all_have(topic, deaf)
                    _log.info("TOPIC(%s): %d nsqds were away and know now what it was changed to", topic, len(behind))
                    return
            _log.warning("TOPIC(%s): trying again to tell of a change: %s", topic, failure or "no nsqd registers it")
            await asyncio.sleep(_ALIGN_AGAIN_S)

    async def _tell_meta(self, topic: str, meta: TopicMeta, nodes: Iterable[NsqdNode]) -> None:
        target = f"/topic/meta/update?{urlencode({'topic': topic, **meta.changes()})}"
        await self._tell({node.node_id: (node, target) for node in nodes})

    async def _until_all_have(self, topic: str, deaf: Mapping[str, None]) -> None:
        """Wait until every node has registered the highest version.

        Raises:
            TimeoutError: one has not.
        """
        async with asyncio.timeout(_REGISTERED_WITHIN_S):
            while any(node.node_id not in deaf for node in self._database.behind(topic)):
                self._registered.clear()
                await self._registered.wait()

    async def change(self, topic: str, query: Mapping[str, str]) -> None:
        """Change what a topic was created with, on every nsqd that has it; asked for again it completes a change.

        Raises:
            HttpError: nobody has it, a parameter cannot be taken, or an nsqd refused.
        """
        async with self._lock:
            holders = self._database.holders(topic)
            if not holders:
                raise HttpError(400, "topic is not created")
            known = self._database.meta(topic)
            try:
                meta = changed_meta(known, query)
            except BadTopicMeta as error:
                raise HttpError(400, str(error)) from None
            if meta.is_like(known):
                meta, holders = known, self._database.behind(topic)
            await self._tell_meta(topic, meta, holders)
            try:
                await self._until_all_have(topic, {})
            except TimeoutError:
                text = f"topic {topic} is changed, and not every nsqd has registered it here yet; ask again"
                raise HttpError(500, text) from None
            _log.info("TOPIC(%s): changed to version %d on %d nsqds", topic, meta.version, len(holders))

    async def create(self, topic: str, meta: TopicMeta) -> None:
        """Create a topic, or those partitions of it that no node has.

        Raises:
            HttpError: it is there and different, there is no node, or a node refused.
        """
        async with self._lock:
            self._check(topic, meta)
            placed = self._placed(topic)
            missing = [number for number in range(meta.partition_num) if number not in placed]
            if not missing:
                return
            nodes, incapable = await self._capable_nodes()
            loads = self._loads(nodes)
            try:
                chosen = place(meta.partition_num, loads, placed)
            except NoNodes as error:
                why = _none_takes_any(incapable) if incapable else error
                raise HttpError(400, f"ErrType:9 ErrCode:1 : No node is available for topic - {why}") from None
            by_node: dict[str, list[int]] = {}
            for number, node_id in chosen.items():
                by_node.setdefault(node_id, []).append(number)
            requests = {}
            for node_id, numbers in by_node.items():
                known = self._database.meta(topic)  # whoever gets the rest of a topic gets it as it was changed
                mine = known if known.is_partitioned else meta
                query = {"topic": topic, **mine.query(), "partitions": ",".join(map(str, numbers))}
                requests[node_id] = (nodes[node_id], f"/topic/create?{urlencode(query)}")
            await self._tell(requests)
            _log.info("TOPIC(%s): %d partitions created on %d nsqds", topic, len(missing), len(by_node))
            await self._until_registered(topic, missing)

    def _check(self, topic: str, meta: TopicMeta) -> None:
        known = self._database.meta(topic)
        if known.is_partitioned and not known.is_like(meta):
            raise HttpError(400, f"topic {topic} is there already, with {urlencode(known.query())}: delete it first")
        if not known.is_partitioned and self._database.holders(topic):
            raise HttpError(400, f"topic {topic} is there already, without partitions: delete it first")

    def _placed(self, topic: str) -> dict[int, str]:
        found = self._database.partitions(topic, self._clock.monotonic_ns())
        return {} if found is None else {number: node.node_id for number, node in found.leaders.items()}

    async def _until_registered(self, topic: str, numbers: Iterable[int]) -> None:
        """Wait until all partitions are registered, so that the next request finds them."""
        try:
            async with asyncio.timeout(_REGISTERED_WITHIN_S):
                while missing := [number for number in numbers if number not in self._placed(topic)]:
                    self._registered.clear()
                    await self._registered.wait()
        except TimeoutError:
            text = f"partitions {missing} of topic {topic} are created and not registered here yet; ask again"
            raise HttpError(500, text) from None

    async def _capable_nodes(self) -> tuple[dict[str, NsqdNode], list[_Incapable]]:
        """Return live nodes that know of partitions, and all others; NSQ's own would make a plain topic and say OK."""
        capable: dict[str, NsqdNode] = {}
        incapable: list[_Incapable] = []
        asked: dict[tuple[str, int], NsqdNode] = {}
        for listed in self._database.nodes(self._clock.monotonic_ns()):
            node = listed.node
            if node.is_draining:
                incapable.append(_Incapable(node, "is being drained"))
            elif node.http_port <= 0:
                incapable.append(_Incapable(node, "has no HTTP port: start it with --http-address"))
            else:
                asked[node.broadcast_address, node.http_port] = node
        answers = await asyncio.gather(*map(self._why_incapable, asked.values()))
        for node, why in zip(asked.values(), answers, strict=True):
            if why:
                incapable.append(_Incapable(node, why))
            else:
                capable[node.node_id] = node
        return capable, incapable

    async def _why_incapable(self, node: NsqdNode) -> str:
        """Ask an nsqd whether it knows of partitions; return why it cannot be given any, empty if it can."""
        try:
            status, body = await self.ask("GET", node, "/info")
        except ConnectionFailed as error:
            why = f"does not answer: {error.reason}"
        else:
            why = _why_not(status, body)
        if why:
            _log.warning("nsqd %s gets no partitions: it %s", node.http_address, why)
        return why

    def _loads(self, nodes: Iterable[str]) -> dict[str, int]:
        loads = dict.fromkeys(nodes, 0)
        for listed in self._database.nodes(self._clock.monotonic_ns()):
            if listed.node.node_id in loads:
                loads[listed.node.node_id] = sum(map(len, listed.partitions.values()))
        return loads

    async def delete(self, topic: str) -> None:
        """Delete a topic with all of its partitions, on every nsqd that has it.

        Raises:
            HttpError: nobody knows it, or an nsqd did not delete it.
        """
        async with self._lock:
            if topic not in self._database.topics():
                raise HttpError(500, "Key not found")
            target = f"/topic/delete?{urlencode({'topic': topic})}"
            holders = self._database.holders(topic)
            await self._tell({node.node_id: (node, target) for node in holders}, also_fine=404)
            channels = self._database.delete_topic(topic)
            _log.info("DB: removing topic(%s) and %d channels", topic, len(channels))

    async def change_channel(self, action: str, topic: str, channel: str) -> None:
        """Create or delete a channel of a topic whose channels are not created by subscribing.

        Args:
            action: ``create`` or ``delete``.

        Raises:
            HttpError: there is one already, or there is none, or an nsqd did not do it.
        """
        async with self._lock:
            is_there = channel in self._database.channels(topic)
            if is_there and action == "create":
                raise HttpError(400, f"channel {channel} already registered")
            if not is_there and action == "delete":
                raise HttpError(404, "CHANNEL_NOT_FOUND")
            target = f"/channel/{action}?{urlencode({'topic': topic, 'channel': channel})}"
            holders = self._database.holders(topic)
            also_fine = 404 if action == "delete" else None
            await self._tell({node.node_id: (node, target) for node in holders}, also_fine)
            if action == "create":
                self._database.create(topic, channel)
            else:
                self._database.delete_channel(topic, channel)

    async def _tell(self, requests: Mapping[str, tuple[NsqdNode, str]], also_fine: int | None = None) -> None:
        """Have several nsqds do something.

        Raises:
            HttpError: the first failure, when all have answered.
        """
        answers = await asyncio.gather(*(self._told(node, target, also_fine) for node, target in requests.values()))
        failures = [failure for failure in answers if failure]
        if failures:
            raise HttpError(500, failures[0])

    async def _told(self, node: NsqdNode, target: str, also_fine: int | None) -> str:
        """Tell why an nsqd did not do it; empty when it did."""
        try:
            status, body = await self.ask("POST", node, target)
        except ConnectionFailed as error:
            return f"nsqd {node.http_address}: {error}"
        if status in (200, also_fine):
            return ""
        if _is_for_tls(status, body):
            return f"nsqd {node.http_address} {_WANTS_TLS}"
        try:
            reason = msgspec.json.decode(body, type=_Refusal).message
        except UNREADABLE_JSON:
            reason = body.decode("utf-8", "replace")
        return f"nsqd {node.http_address}: {reason[:_MESSAGE_SIZE_MAX] or status}"

    async def ask(self, method: str, node: NsqdNode, target: str) -> tuple[int, bytes]:
        """Ask under the name that the nsqd gives itself, which need not mean anything here, or where it comes from."""
        reached_by = split_address(node.remote_address)
        hosts = list(dict.fromkeys((node.broadcast_address, reached_by[0] if reached_by else node.broadcast_address)))
        async with self._asking:
            for host in hosts[:-1]:
                try:
                    return await self._ask_at(method, host, node, target)
                except ConnectionFailed as error:
                    _log.info("nsqd %s: %s; trying %s", node.http_address, error, hosts[-1])
            return await self._ask_at(method, hosts[-1], node, target)

    async def _ask_at(self, method: str, host: str, node: NsqdNode, target: str) -> tuple[int, bytes]:
        timeouts = {"connect_timeout_s": _CONNECT_TIMEOUT_S, "request_timeout_s": _ANSWER_TIMEOUT_S}
        token = "" if self._token is None else await self._token.current()
        return await ask(method, host, node.http_port, target, **timeouts, token=token)


def _is_for_tls(status: int, body: bytes) -> bool:
    """Return whether an answer is that of an nsqd which wants TLS; one without an HTTPS port says so, too."""
    if status != 403:
        return False
    try:
        return msgspec.json.decode(body, type=_Refusal).message == "TLS_REQUIRED"
    except UNREADABLE_JSON:
        return False


def _why_not(status: int, body: bytes) -> str:
    """Return why an nsqd with this answer to ``/info`` cannot be given partitions; empty if it can."""
    if _is_for_tls(status, body):
        return _WANTS_TLS
    if status == 401:
        return _WANTS_TOKEN
    if status != 200:
        return f"answers {status} to /info"
    try:
        is_ours = bool(msgspec.json.decode(body, type=_Info).flintmq_version)
    except UNREADABLE_JSON:
        return "gives an answer to /info that cannot be read"
    return "" if is_ours else "is not FlintMQ's"


def _none_takes_any(incapable: Sequence[_Incapable]) -> str:
    told = "; ".join(map(str, incapable[:_INCAPABLE_TOLD_MAX]))
    more = len(incapable) - _INCAPABLE_TOLD_MAX
    return f"none of those registered can be given partitions: {told}{f'; and {more} more' if more > 0 else ''}"
