"""The part of nsqd's HTTP API that looks into topics and channels, and moves and finishes what is in them.

::

    GET  /message/get         one stored message, by id, virtual offset or count
    GET  /channel/peek        what a channel delivers next, what is in flight, what is deferred; nothing is disturbed
    POST /channel/setoffset   let a channel go on at another place: replay, or skip
    POST /channel/skip        finish everything without delivering it, until /channel/unskip
    POST /message/finish      finish one message in one channel, wherever it is
    POST /message/cancel      the same in every channel

Rules of this file: a change is answered when it is as durable as a topic's creation; a look reads a few messages a
turn; every count and body has a bound.

Source: Youzan's HTTP API, NSQ's issues.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterable
from itertools import islice
from typing import Any

import msgspec

from flintmq.broker import peek
from flintmq.broker.broker import ChannelNotFound
from flintmq.broker.channel import Channel
from flintmq.broker.partition import Ended, Partition
from flintmq.broker.seek import BadPlace, TooManyHoles, drop, drop_spilled, parse_place, seek, sequence_at
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.message import (
    FRAME_OVERHEAD_BYTES,
    HEADERS,
    HEADERS_SIZE_MAX,
    MESSAGE_HEADER,
    body_position,
    headers_of,
    hex_id,
    internal_id,
    partition_of,
    sequence_of,
)
from flintmq.net.http_messages import EMPTY, HttpError, PendingResponse, Request, Response, json_response
from flintmq.nsqd.api.answers import stored, when
from flintmq.nsqd.api.arguments import (
    channel_of,
    message_id,
    message_id_of,
    number,
    number_within,
    one_partition,
    partition_here,
    partitions_of,
    topic_of,
)
from flintmq.nsqd.api.route import DRY, LARGE, TOPIC_ADMIN, TOPIC_READ, Route
from flintmq.nsqd.client import Client
from flintmq.nsqd.in_turns import rest
from flintmq.nsqd.node import Node
from flintmq.storage import ChannelStore

_PLACE_BYTES_MAX = 256
_PEEK_COUNT_MAX = 100
_PEEK_COUNT = 10
_BODY_BYTES_MAX = 1024 * 1024  # of one body of a look
_BODY_BYTES = 4096
_BODIES_BYTES_MAX = 4 * 1024 * 1024  # of all bodies of a look; what is beyond comes without
_READS_PER_TURN = 4
_BYTES_PER_TURN = 256 * 1024
_UTF8_SIZE_MAX = 4
_WHATS = ("next", "in_flight", "deferred")


class MessagesApi:
    """These routes of one nsqd."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._engine = node.engine
        self._broker = node.engine.broker

    # -- one stored message ----------------------------------------------------------------------------------------

    def get(self, request: Request) -> Response:
        """``/message/get``."""
        topic = topic_of(self._broker, request)
        mode, text = request.query.get("search_mode"), request.query.get("search_pos")
        if mode not in ("id", "virtual_offset", "count"):
            raise HttpError(400, "MISSING_ARG_SEARCH_MODE" if mode is None else "INVALID_ARG_SEARCH_MODE")
        if text is None:
            raise HttpError(400, "MISSING_ARG_SEARCH_POS")
        position = message_id_of(text) if mode == "id" else number(text)
        if position is None:
            raise HttpError(400, "INVALID_ARG_SEARCH_POS")
        partition = self._partition_of(request, topic, position if mode == "id" else None)
        try:
            found = _search(partition, mode, position)
        except StorageError as error:
            raise HttpError(503, str(error)) from None
        if found is None:
            raise HttpError(404, "MESSAGE_NOT_FOUND")
        row = _as_stored(partition.number, found, found.size, partition.has_headers(found.sequence))
        if request.query.get("needext") != "true":
            row["ext"] = ""
        return json_response(row)

    def _partition_of(self, request: Request, topic: Topic, internal: int | None) -> Partition:
        """The partition that is named, the one that an id is of, or the only one."""
        if internal is None:
            return one_partition(request, topic)
        for partition in partitions_of(request, topic):
            if partition.number == partition_of(internal):
                return partition
        raise HttpError(404, "MESSAGE_NOT_FOUND")

    # -- looking at a channel --------------------------------------------------------------------------------------

    async def peek_channel(self, request: Request) -> Response:
        """``/channel/peek``."""
        topic, name = channel_of(self._broker, request)
        what = request.query.get("what", "next")
        if what not in _WHATS:
            raise HttpError(400, "INVALID_ARG_WHAT")
        count = number_within(request, "count", _PEEK_COUNT, 1, _PEEK_COUNT_MAX)
        body_bytes = number_within(request, "max_body", _BODY_BYTES, 0, _BODY_BYTES_MAX)
        look_bytes = body_bytes + (HEADERS.size + HEADERS_SIZE_MAX if topic.meta.extend_support else 0)
        rows: list[msgspec.Raw] = []
        left = _BODIES_BYTES_MAX
        for partition in partitions_of(request, topic):
            channel = partition.channels.get(name)
            if channel is None:
                continue  # deleted in this partition
            try:
                async for found in self._look(partition, channel, what, count - len(rows), look_bytes):
                    has_headers = partition.has_headers(found.sequence)
                    message = _as_stored(partition.number, found, min(body_bytes, max(0, left)), has_headers)
                    message["body_size"] = found.size - _body_at(found, has_headers)
                    row = self._row(message, partition.number, found, what)
                    left -= min(body_bytes, found.size)
                    rows.append(msgspec.Raw(msgspec.json.encode(row)))
            except StorageError as error:
                raise HttpError(503, str(error)) from None
            if len(rows) >= count:
                break
            if topic.partitions.get(partition.number) is not partition or name not in partition.channels:
                break  # deleted meanwhile
        return json_response({"topic": topic.name, "channel": name, "what": what, "messages": rows})

    async def _look(self, partition: Partition, channel: Channel, what: str, count: int, body_bytes: int) -> Any:
        now_ns = self._engine.due_clock_ns()
        looks: Iterable[peek.Seen]
        if what == "deferred":
            looks = await self._deferred(channel, count, body_bytes, now_ns)
        elif what == "next":
            looks = peek.next_messages(channel, count, body_bytes, now_ns)
        else:
            looks = peek.in_flight_messages(channel, count, body_bytes)
        seen_count = seen_bytes = 0
        for found in islice(looks, count):
            yield found
            seen_count += 1
            seen_bytes += len(found.head)
            if seen_count == _READS_PER_TURN or seen_bytes >= _BYTES_PER_TURN:
                seen_count = seen_bytes = 0
                await rest()
                if partition.is_deleted:
                    return

    async def _deferred(self, channel: Channel, count: int, body_bytes: int, now_ns: int) -> list[peek.Seen]:
        """Return those in memory and those in the database, as they will come due."""
        found = list(peek.deferred_messages(channel, count, body_bytes))
        shift_ns = self._broker.clock_shift_ns
        head_bytes = FRAME_OVERHEAD_BYTES + body_bytes

        def read(store: ChannelStore, cursor: int) -> list[tuple[int, int, int, bytes, int]]:
            return store.spilled_after(cursor, now_ns + shift_ns, count, head_bytes)

        for sequence, due_ns, delivery_count, head, size in await self._ask(channel, read):
            each = peek.Seen(sequence, delivery_count, head, size, None)
            batch = peek.find(channel.log, sequence)
            if batch is not None:
                each.offset_bytes = batch.offset_of(sequence)
            each.due_ns = due_ns - shift_ns
            found.append(each)
        unique = {each.sequence: each for each in found}  # one may have left memory meanwhile
        return sorted(unique.values(), key=lambda each: (each.due_ns, each.sequence))[:count]

    def _row(self, message: dict[str, Any], partition: int, found: peek.Seen, what: str) -> dict[str, Any]:
        row = {"partition": partition, **message}
        row["attempts"] = found.attempts
        if what == "deferred":
            left_ns = max(0, found.due_ns - self._engine.due_clock_ns())
            row["due"] = found.due_ns + self._broker.clock_shift_ns
            row["due_in_ms"] = left_ns // 1_000_000
        if what == "in_flight":
            left_ns = max(0, found.deadline_ns - self._engine.env.clock.monotonic_ns())
            row["timeout_in_ms"] = left_ns // 1_000_000
            client = None if found.owner is None else found.owner.owner
            if isinstance(client, Client):
                row["client"] = {
                    "remote_address": client.peer,
                    "client_id": client.request.client_id,
                    "hostname": client.request.hostname,
                }
        return row

    # -- changes ---------------------------------------------------------------------------------------------------

    def set_offset(self, request: Request) -> PendingResponse:
        """``/channel/setoffset``."""
        topic, name = channel_of(self._broker, request)
        partitions = partitions_of(request, topic)
        try:
            place = parse_place(request.body.decode("utf-8", "replace"))
        except BadPlace as error:
            raise HttpError(400, str(error)) from None
        if place.is_of_one_partition and len(partitions) > 1:
            raise HttpError(400, "MISSING_ARG_PARTITION")
        try:
            parts = [(partition, partition.channels.get(name)) for partition in partitions]
            moves = [(part, sequence_at(place, partition)) for partition, part in parts if part is not None]
        except StorageError as error:
            raise HttpError(503, str(error)) from None
        if not moves:
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        for channel, sequence in moves:
            seek(channel, place, sequence)
        return when(self._changed(channel for channel, _ in moves))

    def skip(self, request: Request) -> PendingResponse:
        """``/channel/skip``."""
        return self._skip(request, True)

    def unskip(self, request: Request) -> PendingResponse:
        """``/channel/unskip``."""
        return self._skip(request, False)

    def _skip(self, request: Request, skipped: bool) -> PendingResponse:
        topic, name = channel_of(self._broker, request)
        here = partition_here(request, topic)
        try:
            self._broker.skip_channel(topic, name, skipped, here)
        except ChannelNotFound:
            raise HttpError(404, "CHANNEL_NOT_FOUND") from None
        return when(self._changed(()))

    async def finish(self, request: Request) -> Response:
        """``/message/finish``."""
        topic, name = channel_of(self._broker, request)
        partition, sequence = self._message(request, topic)
        if name not in partition.channels:
            raise HttpError(404, "CHANNEL_NOT_FOUND")
        if not await self._drop(partition.channels[name], sequence):
            raise HttpError(404, "MESSAGE_NOT_FOUND")
        await stored(self._changed([partition.channels[name]] if name in partition.channels else []))
        return EMPTY

    async def cancel(self, request: Request) -> Response:
        """``/message/cancel``."""
        topic = topic_of(self._broker, request)
        partition, sequence = self._message(request, topic)
        if not topic.channel_names:
            raise HttpError(409, "TOPIC_HAS_NO_CHANNEL")
        changed = []
        for name, channel in list(partition.channels.items()):
            if partition.channels.get(name) is channel and await self._drop(channel, sequence):
                changed.append((name, channel))
        if not changed:
            raise HttpError(404, "MESSAGE_NOT_FOUND")
        await stored(self._changed(channel for name, channel in changed if partition.channels.get(name) is channel))
        return json_response({"channels": [name for name, _ in changed]})

    def _message(self, request: Request, topic: Topic) -> tuple[Partition, int]:
        internal = message_id(request)
        return self._partition_of(request, topic, internal), sequence_of(internal)

    async def _drop(self, channel: Channel, sequence: int) -> bool:
        try:
            dropped = drop(channel, sequence)
            while dropped is None:  # again only when it has come due or was moved meanwhile
                generation = channel.spilled.generation
                pack = await self._ask(channel, lambda store, cursor: store.find_spilled(cursor, sequence))
                is_there = pack is not None and self._broker.has(channel)
                dropped = drop_spilled(channel, sequence, pack, generation) if is_there else False
        except TooManyHoles as error:
            raise HttpError(429, str(error)) from None
        except StorageError as error:
            raise HttpError(503, str(error)) from None
        return dropped

    # -- waiting ---------------------------------------------------------------------------------------------------

    def _changed(self, channels: Iterable[Channel]) -> Ended:
        """Return what ends when what was done to channels survives."""
        try:
            for channel in channels:
                self._broker.was_changed(channel)
        except (ChannelNotFound, StorageError) as error:
            raise HttpError(503, str(error)) from None
        self._engine.schedule()
        return self._node.topics.when_durable()

    async def _ask(self, channel: Channel, read: Any) -> Any:
        """Have the database read off the loop.

        Raises:
            StorageError: it cannot be read.
        """
        done: asyncio.Future[Any] = self._engine.loop.create_future()

        def answered(answer: Any, error: BaseException | None) -> None:
            if done.done():
                return  # who asked is gone
            if error is None:
                done.set_result(answer)
            else:
                done.set_exception(error)

        self._broker.ask(channel, read, answered)
        self._engine.schedule()
        try:
            return await done
        except OSError as error:
            raise StorageError(str(error)) from error


def _search(partition: Partition, mode: str, position: int) -> peek.Seen | None:
    log = partition.log
    if mode == "virtual_offset":
        sequence = log.sequence_at_offset(position)
    else:
        sequence = sequence_of(position) if mode == "id" else position
    batch = peek.find(log, sequence)
    if batch is None or (mode == "virtual_offset" and batch.offset_of(sequence) > position):
        return None
    return peek.seen(batch, sequence, batch.size)


def _as_stored(partition: int, found: peek.Seen, body_bytes: int, has_headers: bool) -> dict[str, Any]:
    """A message in the fields of the redesigned NSQ's /message/get."""
    _, _, timestamp_ns, attempts, wire_id = MESSAGE_HEADER.unpack_from(found.head)
    internal = internal_id(partition, found.sequence)
    is_text = wire_id == hex_id(internal)
    at = _body_at(found, has_headers)
    headers = headers_of(found.head)[1] if has_headers else b""
    body = found.head[at : at + body_bytes]
    row: dict[str, Any] = {
        "id": internal,
        "trace_id": 0 if is_text else int.from_bytes(wire_id[8:], "big"),
        "body": "",
        "timestamp": timestamp_ns,
        "attempts": attempts,
        "offset": found.offset_bytes,
        "queue_cnt_index": found.sequence,
        "ext": headers.decode(errors="replace"),
        "message_id": wire_id.decode("ascii") if is_text else wire_id.hex(),
    }
    row["body"], is_exact = _text_of(body, len(body) < found.size - at)
    if not is_exact:
        row["body_base64"] = base64.b64encode(body).decode("ascii")
    return row


def _body_at(found: peek.Seen, has_headers: bool) -> int:
    """Return where the body begins in a message."""
    return body_position(found.head) if has_headers else FRAME_OVERHEAD_BYTES


def _text_of(body: bytes, is_cut: bool) -> tuple[str, bool]:
    """A body as text, and whether it is UTF-8; a character that was cut at its end is left out."""
    try:
        return body.decode(), True
    except UnicodeDecodeError as error:
        if is_cut and error.reason == "unexpected end of data" and len(body) - error.start < _UTF8_SIZE_MAX:
            return body[: error.start].decode(), True
        return body.decode(errors="replace"), False


_PART = ("topic", "channel", "partition")
ROUTES = (
    Route("GET", "/message/get", TOPIC_READ, MessagesApi.get,
          ("topic", "partition", "search_mode", "search_pos", "needext"), ("delayed_queue",), line=LARGE),
    Route("GET", "/channel/peek", TOPIC_READ, MessagesApi.peek_channel, (*_PART, "what", "count", "max_body"),
          line=LARGE),
    Route("POST", "/channel/setoffset", TOPIC_ADMIN, MessagesApi.set_offset, _PART, DRY,
          body_limit=lambda _limits: _PLACE_BYTES_MAX),
    Route("POST", "/channel/skip", TOPIC_ADMIN, MessagesApi.skip, _PART, DRY),
    Route("POST", "/channel/unskip", TOPIC_ADMIN, MessagesApi.unskip, _PART, DRY),
    Route("POST", "/message/finish", TOPIC_ADMIN, MessagesApi.finish, (*_PART, "msgid"), DRY),
    Route("POST", "/message/cancel", TOPIC_ADMIN, MessagesApi.cancel, ("topic", "partition", "msgid")),
)  # fmt: skip
