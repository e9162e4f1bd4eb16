"""The part of nsqd's HTTP API that switches the trace on and off, and looks into it.

::

    POST /message/trace/enable?topic=orders[&channel=billing][&only=traced]
    POST /message/trace/disable?topic=orders[&channel=billing]
    GET  /message/trace?topic=orders&msgid=5[&limit=100]     or &traceid=77

Rules of this file: a switch is a setting of the topic or channel, and answered when it is durable; a search reads what
this nsqd has of the trace backwards, a little each turn of the loop, until it has found enough or its bound is reached.

Source: Youzan's HTTP API (``/message/trace/enable``), Youzan's message tracing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from flintmq.batch import EXTENDED, Batch, decode_header
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.errors import UNREADABLE_JSON, StorageError
from flintmq.limits import READ_AHEAD_BYTES
from flintmq.message import FRAME_OVERHEAD_BYTES, body_position
from flintmq.net.http_messages import HttpError, PendingResponse, Request, Response, json_response
from flintmq.nsqd.api.answers import when
from flintmq.nsqd.api.arguments import channel_of, found_topic, message_id_of, number_within, topic_name
from flintmq.nsqd.api.route import TOPIC_ADMIN, TOPIC_READ, Route
from flintmq.nsqd.in_turns import rest
from flintmq.nsqd.node import Node
from flintmq.nsqd.tracing import ALL, OFF, PUB, TRACED, Event
from flintmq.settings import BadSetting

_EVENTS_MAX = 1000
_EVENTS = 100
_SEARCH_BYTES_MAX = 64 * 1024 * 1024
_SEARCH_S_MAX = 2.0
_SEARCHES_MAX = 4  # at a time
_STRETCH = 512  # messages that are looked at together, at first
_TRACE_ID_MAX = 2**64 - 1
_decode = msgspec.json.Decoder(Event).decode


class TraceApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._broker = node.engine.broker
        self._loop = node.engine.loop
        self._tracing = node.tracing
        self._search_count = 0

    # -- the switch ------------------------------------------------------------------------------------------------

    def enable(self, request: Request) -> PendingResponse:
        """``/message/trace/enable``."""
        only = request.query.get("only")
        if only not in (None, TRACED):
            raise HttpError(400, f"INVALID_ARG_ONLY: only={only[:64]}, it must be {TRACED}, or be left out for all")
        return self._switch(request, TRACED if only else ALL)

    def disable(self, request: Request) -> PendingResponse:
        """``/message/trace/disable``."""
        return self._switch(request, OFF)

    def _switch(self, request: Request, mode: str) -> PendingResponse:
        topic, channel = self._names(request)
        settings = msgspec.structs.replace(self._broker.own_settings(topic.name, channel), trace=mode)
        try:
            self._broker.change_settings(topic, channel, settings)
        except BadSetting as error:
            raise HttpError(400, str(error)) from None
        self._node.engine.schedule()
        return when(self._node.topics.when_durable(topic))

    def _names(self, request: Request) -> tuple[Topic, str | None]:
        name = topic_name(request)
        if name == self._tracing.topic_name:
            raise HttpError(400, f"INVALID_ARG_TOPIC: {name} is where the trace goes, and is not traced itself")
        return (
            channel_of(self._broker, request) if "channel" in request.query else (found_topic(self._broker, name), None)
        )

    # -- looking into the trace --------------------------------------------------------------------------------------

    async def find(self, request: Request) -> Response:
        """``/message/trace``."""
        wanted = _wanted(request)
        if self._search_count >= _SEARCHES_MAX:
            raise HttpError(429, f"TOO_MANY_SEARCHES: {_SEARCHES_MAX} run already, ask again")
        self._search_count += 1
        try:
            await self._tracing.settle()
            await self._search(wanted)
        except StorageError as error:
            raise HttpError(503, str(error)) from None
        finally:
            self._search_count -= 1
        return json_response(wanted.answer())

    async def _search(self, wanted: _Search) -> None:
        topic = self._broker.topics.get(self._tracing.topic_name)
        until = self._loop.time() + _SEARCH_S_MAX
        for partition in () if topic is None else topic.partitions.values():
            log = partition.log
            end, stretch = log.committed_sequence, _STRETCH
            while end > log.start_sequence and not wanted.is_done:
                if wanted.searched_bytes >= _SEARCH_BYTES_MAX or self._loop.time() > until:
                    wanted.is_complete = False
                    return
                size, end = await _look_at(partition, max(log.start_sequence, end - stretch), end, wanted)
                if partition.is_deleted:
                    return
                if size < READ_AHEAD_BYTES // 2:
                    stretch *= 2
                elif size > 2 * READ_AHEAD_BYTES:
                    stretch = max(1, stretch // 2)


def _wanted(request: Request) -> _Search:
    topic = topic_name(request)
    msgid, traceid = request.query.get("msgid"), request.query.get("traceid")
    limit = number_within(request, "limit", _EVENTS, 1, _EVENTS_MAX)
    if (msgid is None) == (traceid is None):
        both = "INVALID_ARG_TRACEID: name a msgid or a traceid, not both"
        raise HttpError(400, "MISSING_ARG_MSGID: name a msgid or a traceid" if msgid is None else both)
    if msgid is not None:
        internal = message_id_of(msgid)
        if internal is None:
            raise HttpError(400, "INVALID_ARG_MSGID")
        return _Search(topic, internal, None, limit)
    assert traceid is not None
    if not (traceid.isascii() and traceid.isdigit() and len(traceid) <= 20 and 0 < int(traceid) <= _TRACE_ID_MAX):
        raise HttpError(400, f"INVALID_ARG_TRACEID: it must be a number from 1 to {_TRACE_ID_MAX}")
    return _Search(topic, None, int(traceid), limit)


@dataclass(slots=True)
class _Search:
    """One search, and what it has found; the newest stretch is looked at first.

    Attributes:
        stretches: found events with the text they are stored as, a list for each stretch in order of time.
        is_complete: whether no bound cut the search off.
        oldest_ns: time of the oldest batch that was looked at.
    """

    topic: str
    msgid: int | None
    traceid: int | None
    limit: int
    stretches: list[list[tuple[Event, bytes]]] = field(default_factory=list)
    count: int = 0
    searched_bytes: int = 0
    is_complete: bool = True
    is_done: bool = False
    oldest_ns: int | None = None

    @property
    def needle(self) -> bytes:
        """Text that every event has which is wanted."""
        if self.msgid is not None:
            return b'"topic":"%s","msgid":%d,' % (self.topic.encode(), self.msgid)
        assert self.traceid is not None
        return b'"traceid":%d,' % self.traceid

    def add(self, found: list[tuple[Event, bytes]]) -> None:
        """Take what a stretch had."""
        self.stretches.append(found)
        self.count += len(found)
        # nothing is older than the publish of a message
        self.is_done = self.msgid is not None and any(event.action == PUB for event, _ in found)
        if self.count > self.limit:
            self.is_complete, self.is_done = False, True

    def answer(self) -> dict[str, Any]:
        """The newest events, oldest first."""
        found = [each for stretch in reversed(self.stretches) for each in stretch]
        found.sort(key=lambda each: each[0].timestamp)
        return {
            "topic": self.topic,
            **({"msgid": self.msgid} if self.msgid is not None else {"traceid": self.traceid}),
            "events": [msgspec.Raw(text) for _, text in found[-self.limit :]],
            "complete": self.is_complete,
            "searched_bytes": self.searched_bytes,
            "oldest": self.oldest_ns,
        }


async def _look_at(partition: Partition, first: int, end: int, wanted: _Search) -> tuple[int, int]:
    """Search the batches that hold the messages from ``first`` to ``end``; others get their turns.

    Returns:
        How many bytes they were, and the first sequence of all of them.
    """
    found: list[tuple[Event, bytes]] = []
    needle = wanted.needle
    size, start = 0, first
    while start < end and not partition.is_deleted:
        data, following = partition.log.fetch(start, end, READ_AHEAD_BYTES)
        if following <= start:
            break
        start = following
        size += len(data)
        for batch in _batches(data):
            if wanted.oldest_ns is None or batch.header.timestamp_min < wanted.oldest_ns:
                wanted.oldest_ns = batch.header.timestamp_min
            first = min(first, batch.first)
            found += _matches(batch, needle, end, wanted)
        await rest()
    wanted.searched_bytes += size
    wanted.add(found)
    return size, first


def _batches(data: bytes) -> Iterator[Batch]:
    position = 0
    while position < len(data):
        header = decode_header(data, position)
        yield Batch(data[position : position + header.size], header)
        position += header.size


def _matches(batch: Batch, needle: bytes, end: int, wanted: _Search) -> Iterator[tuple[Event, bytes]]:
    """Events of a batch that are wanted, those with sequences below ``end``."""
    data = bytes(batch.data)
    at = data.find(needle, batch.frames_at)
    while at >= 0:
        index = bisect_right(batch.positions(), at - batch.frames_at) - 1
        sequence = batch.first + index
        if sequence < end:
            frame = batch.frames(sequence, sequence + 1)
            text = bytes(frame[body_position(frame) if batch.header.flags & EXTENDED else FRAME_OVERHEAD_BYTES :])
            event = _event(text)
            if event is not None and event.topic == wanted.topic and _is(event, wanted):
                yield event, text
        at = data.find(needle, batch.frames_at + batch.positions()[index + 1])


def _is(event: Event, wanted: _Search) -> bool:
    return event.msgid == wanted.msgid if wanted.msgid is not None else event.traceid == wanted.traceid


def _event(text: bytes) -> Event | None:
    """One event; None for what somebody else has published to the topic of the trace."""
    try:
        return _decode(text)
    except UNREADABLE_JSON:
        return None


_NAMES = ("topic", "channel")
ROUTES = (
    Route("POST", "/message/trace/enable", TOPIC_ADMIN, TraceApi.enable, (*_NAMES, "only"), ("slow",)),
    Route("POST", "/message/trace/disable", TOPIC_ADMIN, TraceApi.disable, _NAMES, ("slow",)),
    Route("GET", "/message/trace", TOPIC_READ, TraceApi.find, ("topic", "msgid", "traceid", "limit")),
)
