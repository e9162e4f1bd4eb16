"""OFFSETS, FETCH and CURSOR on the logs of a spool, as FlintMQ's nsqd answers them; nothing else can be asked.

Who connects has to know the spool's token, which AUTH carries: what is served here nsqd may have protected.

The rules of this file: one connection can neither hold more than one answer above the transport's bound, nor keep the
loop for longer than one answer; what is not understood closes it.

Source: docs/reference/protocol.md.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
from collections import deque
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from flintmq.errors import RemoteProtocolError, StorageError
from flintmq.limits import FETCH_BYTES_MAX
from flintmq.spool.feed import Feed
from flintmq.version import __version__
from flintmq.wire import server as wire
from flintmq.wire.commands import FETCH_UNVERIFIED
from flintmq.wire.frames import error_frame, fetched_frame, keep_room_for_fetched, response_frame

CONNECTIONS_MAX = 1000
EVENTS_MAX = 1024  # parsed and not answered, of one connection; then it is not read
SILENCE_MAX_S = 5.0  # until a connection has said its token
EARLIEST, LATEST = -2, -1

log = logging.getLogger("flintmq.spool")


class Service:
    """The part of a spool that its connections share.

    Args:
        channel: that CURSOR may name.
        token: that AUTH has to say.
        moved: called when a cursor has moved.
    """

    def __init__(self, feeds: Mapping[str, Feed], channel: str, token: bytes, moved: Any) -> None:
        self.feeds = feeds
        self.channel = channel
        self.token = token
        self.moved = moved
        self.connections: set[Connection] = set()

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.connections):
            connection.close()

    def answer(self, event: wire.Event) -> bytes:
        """Answer a request of somebody who is known.

        Raises:
            RemoteProtocolError: it cannot be.
        """
        if isinstance(event, wire.Offsets):
            return self._offsets(event)
        if isinstance(event, wire.Fetch):
            return self._fetch(event)
        if isinstance(event, wire.Cursor):
            return self._cursor(event)
        raise RemoteProtocolError("E_INVALID", f"a spool has no {type(event).__name__.upper()}", fatal=True)

    def _feed(self, command: str, topic: str, partition: int) -> Feed:
        feed = self.feeds.get(topic)
        if feed is None or partition != feed.log.partition:
            detail = f"{command} topic {topic} partition {partition} is not in this spool"
            raise RemoteProtocolError("E_TOPIC_NOT_EXIST", detail, fatal=False)
        return feed

    def _offsets(self, event: wire.Offsets) -> bytes:
        feed = self._feed("OFFSETS", event.topic, 0)
        of_topic = feed.log
        waits_for, waits_s = feed.waits
        row = {
            "partition": of_topic.partition,
            "log_id": f"{of_topic.log_id:016x}",
            "epoch": of_topic.epoch,
            "start": of_topic.start_sequence,
            "end": of_topic.committed_sequence,
            "size_bytes": of_topic.size_bytes,
            "is_caught_up": feed.is_caught_up,
            "waits_for": waits_for,
            "waits_s": waits_s,
        }
        if event.timestamp_ns is not None:
            row["at"] = min(of_topic.sequence_at(event.timestamp_ns), of_topic.committed_sequence)
        return response_frame(msgspec.json.encode({"topic": event.topic, "partitions": [row]}))

    def _fetch(self, event: wire.Fetch) -> bytes:
        of_topic = self._feed("FETCH", event.topic, event.partition).log
        if event.epoch != of_topic.epoch:
            detail = f"FETCH epoch {event.epoch}, the log is at {of_topic.epoch}"
            raise RemoteProtocolError("E_STALE_EPOCH", detail, fatal=False)
        start, end = of_topic.start_sequence, of_topic.committed_sequence
        if not start <= event.start <= end or event.end < event.start:
            raise RemoteProtocolError("E_OFFSET_OUT_OF_RANGE", f"start={start} end={end}", fatal=False)
        keep_room_for_fetched()
        read = of_topic.fetch_unverified if event.bytes_max & FETCH_UNVERIFIED else of_topic.fetch
        try:
            data, following = read(
                event.start, min(event.end, end), min(event.bytes_max & ~FETCH_UNVERIFIED, FETCH_BYTES_MAX)
            )
        except StorageError as error:
            log.error("FETCH %s: %s", event.topic, error)
            raise RemoteProtocolError("E_FETCH_FAILED", f"FETCH failed {error}", fatal=False) from error
        return b"".join(fetched_frame(data, following))

    def _cursor(self, event: wire.Cursor) -> bytes:
        feed = self._feed("CURSOR", event.topic, event.partition)
        if event.channel != self.channel:
            detail = f"CURSOR channel {event.channel} is not the one of this spool, {self.channel}"
            raise RemoteProtocolError("E_BAD_CHANNEL", detail, fatal=False)
        if event.sequence >= 0:
            feed.move(event.sequence)
            self.moved()
        return response_frame(msgspec.json.encode({"sequence": feed.floor}))


class Connection(asyncio.Protocol):
    """One client."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._parser = wire.ServerConnection(wire.ServerLimits())
        self._transport: asyncio.Transport | None = None
        self._events: deque[wire.Event] = deque()
        self._is_known = False
        self._is_paused = False
        self._is_due = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if len(self._service.connections) >= CONNECTIONS_MAX:
            log.warning("more than %d connections, one is refused", CONNECTIONS_MAX)
            self._transport.abort()
            return
        self._service.connections.add(self)
        self._deadline = asyncio.get_running_loop().call_later(SILENCE_MAX_S, self._check_known)

    def connection_lost(self, error: Exception | None) -> None:
        self._service.connections.discard(self)
        self._events.clear()
        self._transport = None
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self) -> None:
        """Close it behind what was answered."""
        if self._transport is not None:
            self._transport.close()

    def _check_known(self) -> None:
        if not self._is_known and self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._events += self._parser.receive_data(data)
        self._go_on()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._go_on()

    def _go_on(self) -> None:
        """Answer what may be answered now, one request in a turn."""
        if self._is_due or self._transport is None:
            return
        if self._events and not self._is_paused:
            self._execute(self._transport, self._events.popleft())
        if not self._events and self._parser.has_more:
            self._events += self._parser.more()
        if self._transport.is_closing():
            return
        if self._events and not self._is_paused:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next_turn)
        if len(self._events) > EVENTS_MAX or (self._events and self._is_paused):
            self._transport.pause_reading()
        elif not self._transport.is_reading():
            self._transport.resume_reading()

    def _next_turn(self) -> None:
        self._is_due = False
        self._go_on()

    def _execute(self, transport: asyncio.Transport, event: wire.Event) -> None:
        if isinstance(event, wire.Nop):
            return
        if isinstance(event, wire.Identify):
            features = {"version": __version__, "max_rdy_count": 1, "auth_required": True}
            transport.write(response_frame(msgspec.json.encode(features)))
            self._events += self._parser.resume()
        elif isinstance(event, wire.Auth) and hmac.compare_digest(event.secret, self._service.token):
            self._is_known = True
            transport.write(response_frame(msgspec.json.encode({"identity": "spark", "permission_count": 1})))
            self._events += self._parser.resume()
        elif isinstance(event, wire.Violation):
            self._refuse(transport, event.code or "E_INVALID", event.detail)
        elif not self._is_known:
            self._refuse(transport, "E_UNAUTHORIZED", "AUTH the token of this spool is wrong, or was not said")
        else:
            try:
                transport.write(self._service.answer(event))
            except RemoteProtocolError as error:
                if error.fatal:
                    self._refuse(transport, error.code, error.detail)
                else:
                    transport.write(error_frame(error.code, error.detail))

    def _refuse(self, transport: asyncio.Transport, code: str, detail: str) -> None:
        self._events.clear()
        transport.write(error_frame(code, detail))
        transport.close()
