"""One connection between two nodes: all partitions that one leads and the other has copies of, each a stream.

:class:`LeaderLink` is the end of the node that leads; it stays while the other one is away, and counts how long.
:class:`FollowerLink` is the end of the other node, for one connection. Both take bytes and give bytes.

Who may send what is decided when there is room for it, not before (``take_output``): so a peer that does not read costs
what stands in its window, and what changed meanwhile goes out as it is by then. In this order:

1. short answers and questions;
2. new messages: streams that had everything before, in turns;
3. what others lack, a chunk at a time, in half of the window and a quarter of the time: somebody who catches up delays
   nobody's new messages by more than a chunk, and arrives all the same;
4. progress, behind the messages that it needs.

How far channels in order are goes out with the first: a message waits for it.

Rules of this file: no IO, no clock; what has not changed is not looked at: 10,000 idle streams cost a ping. An error of
one stream is its own; a :class:`PeerError` ends the connection, and whoever owns it says so with a Farewell.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from heapq import heappop, heappush
from typing import Protocol

from flintmq.cluster.following import Following
from flintmq.cluster.history import LogShape, agreement
from flintmq.cluster.leading import ALL_FLOORS, STALL_NS, Leading, NotInLog, WholeState
from flintmq.cluster.state import LAG_NS_MAX, Member
from flintmq.errors import FlintError
from flintmq.wire.peer import (
    FLOORS_MAX,
    FLOORS_VERSION,
    STREAM_MAX,
    Acks,
    Append,
    Close,
    CutTo,
    Farewell,
    FloorAcks,
    Floors,
    Frame,
    Identity,
    NeedState,
    Open,
    Opened,
    PeerError,
    PeerReader,
    Ping,
    Pong,
    Progress,
    ProgressAcks,
    Ready,
    Refusal,
    Refused,
    StartOver,
    StateBegin,
    StateEnd,
    StatePart,
    StateTaken,
    Watermarks,
    encode,
    encode_one,
    shorten,
    tallies,
)

PING_NS = 500_000_000
UNREACHED_NS = LAG_NS_MAX + 750_000_000
"""Of silence, after which a node that the store still counts among the living lives, and cannot be reached: a lease is
not longer than ``LAG_NS_MAX``, and the rest is the time that a store takes to notice."""
GONE_NS = UNREACHED_NS + LAG_NS_MAX
"""Of silence, after which one that had only stood still, and lost its lease with that, would be registered again."""
WATERMARK_NS = 100_000_000
"""A watermark that changed is told at the latest so long afterwards, also when nothing else is."""
RETRY_NS_MIN = 50_000_000
RETRY_NS_MAX = 1_000_000_000
OUTPUT_BYTES = 256 * 1024
"""Taken from a link at once, about."""
STREAMS_MAX = 131_072
"""Of one connection, at a follower."""
REPLIES_BYTES_MAX = 16 * 1024 * 1024
"""Waiting for a leader that does not read."""
TAILS_PER_BEHIND = 3
"""Chunks of new messages for one of somebody who catches up, while there are both."""
STATES_MAX = 2
"""Whole states of partitions that one link sends at the same time."""
STATE_PARTS_MAX = 2
"""Parts of each that are under way and not written by the follower."""

Piece = bytes | memoryview


@dataclass(frozen=True, slots=True)
class Window:
    """Bytes that may be under way without having been acknowledged; one batch may exceed them.

    Attributes:
        link_bytes: on a connection; to those who catch up, half of it.
        stream_bytes: of one partition.
        chunk_bytes: at once.
    """

    link_bytes: int = 16 * 1024 * 1024
    stream_bytes: int = 4 * 1024 * 1024
    chunk_bytes: int = 1024 * 1024


class _Phase(Enum):
    AWAY = "not connected"
    OPENING = "asked whether it follows"
    ALIGNING = "its log is being made a prefix"
    RUNNING = "follows"
    REFUSED = "refused; asked again later"


# -- the leader's end --------------------------------------------------------------------------------------------------


class LeaderStream:
    """One partition, sent to one follower.

    Attributes:
        leading: the partition.
        number: on the connection; -1: none.
        sent: the end up to which it was sent the log; -1: not known where to begin.
        problem: why it does not follow; empty: it does, or is about to.
    """

    __slots__ = (
        "_link",
        "behind_bytes",
        "floors_sent",
        "flying",
        "flying_bytes",
        "is_behind",
        "leading",
        "number",
        "opened_ns",
        "phase",
        "place",
        "problem",
        "progress_next",
        "progress_position",
        "progress_sent",
        "retry_ns",
        "sent",
        "state",
        "state_asked",
        "state_at",
        "state_number",
        "state_taken",
    )

    def __init__(self, link: LeaderLink, leading: Leading) -> None:
        self._link = link
        self.leading = leading
        self.number = -1
        self.phase = _Phase.AWAY
        self.problem = ""
        self.retry_ns = 0
        self.state: WholeState | None = None
        self.reset()

    def reset(self) -> None:
        """Forget what was sent."""
        self.sent = -1
        self.place = -1  # where it was told to end
        self.opened_ns: int | None = None
        self.flying: deque[tuple[int, int, bool]] = deque()  # end, bytes, whether it was behind
        self.flying_bytes = 0
        self.behind_bytes = 0
        self.is_behind = True
        self.floors_sent = -1
        self.progress_next: int | None = None
        self.progress_position = (0, 0)
        self.progress_sent = -1
        self.drop_state()
        self.state_number: int | None = None

    def drop_state(self) -> None:
        """Nothing of a whole state is sent any more."""
        state, self.state = self.state, None
        self.state_at = -1  # parts sent; -1: nothing of it
        self.state_taken = 0
        self.state_asked = False  # for more of it
        if state is not None:
            state.close()

    @property
    def confirmed_ns(self) -> int | None:
        confirmed_ns = self._link.confirmed_ns
        if self.opened_ns is None or confirmed_ns is None or confirmed_ns < self.opened_ns:
            return None
        return confirmed_ns

    @property
    def heard_ns(self) -> int:
        return self._link.heard_ns

    @property
    def is_running(self) -> bool:
        """Whether it follows."""
        return self.phase is _Phase.RUNNING

    def wake(self) -> None:
        self._link.wake(self)

    def wake_watermark(self) -> None:
        self._link.wake_watermark(self)

    def wake_floors(self) -> None:
        self._link.wake_floors(self)

    def describe(self) -> str:
        """One line, for logs and failing tests."""
        leading = self.leading
        return (
            f"{leading.topic}/{leading.number} -> {self._link.node} stream {self.number}: {self.phase.value} "
            f"sent={self.sent} flying={self.flying_bytes} progress={self.progress_next} {self.problem}"
        )


class LeaderLink:
    """The connection to one node that has copies of partitions which are led here.

    Args:
        node: id of that node.
        now_ns: monotonic time.
        window: how much is under way.
        on_output: is called when there may be something to take; it must not take it before it returns.
        heard_ns: when that node was last heard of over a connection of its own; None: there is none. Who begins to lead
            does not wait anew for one that was silent before.

    Attributes:
        streams: by topic and partition.
        is_silent: nothing was heard of it for ``LAG_NS_MAX``, or it is known to be dead.
        is_unreached: nothing was heard of it for ``UNREACHED_NS``.
        is_gone: nothing was heard of it for ``GONE_NS``, or nobody listens where it did.
        confirmed_ns: when the last ping was sent that it answered.
    """

    def __init__(
        self,
        node: str,
        now_ns: int,
        window: Window | None = None,
        on_output: Callable[[], None] = lambda: None,
        heard_ns: int | None = None,
    ) -> None:
        self.node = node
        self.streams: dict[tuple[str, int], LeaderStream] = {}
        self.is_silent = False
        self.is_unreached = False
        self.is_gone = False
        self.confirmed_ns: int | None = None
        self._window = Window() if window is None else window
        self._on_output = on_output
        self._is_dead = False
        self._heard_ns = now_ns if heard_ns is None else heard_ns
        self._now_ns = now_ns
        self._peer: Identity | None = None
        self._process = ""  # incarnation of the one that was connected last
        self._retries: list[tuple[int, int, LeaderStream]] = []
        self._retry_count = 0
        self._forget_connection()

    def _forget_connection(self) -> None:
        self._peer = None
        self._reader = PeerReader(is_trusted=True)
        self._numbers: dict[int, LeaderStream] = {}
        self._next_number = 0
        self._control: list[Piece] = []
        self._opening: dict[LeaderStream, None] = {}
        self._tails: dict[LeaderStream, None] = {}
        self._behind: dict[LeaderStream, None] = {}
        self._watermarks: dict[LeaderStream, None] = {}
        self._floors: dict[LeaderStream, None] = {}
        self._states_waiting: deque[LeaderStream] = deque()
        self._states: dict[LeaderStream, object] = {}
        self._tail_bytes = 0  # sent since somebody who catches up had a turn
        self._flying_bytes = 0
        self._behind_bytes = 0
        self._pinged_ns: int | None = None
        self._watermarks_ns = 0
        self._retries.clear()
        self.confirmed_ns = None

    # --- streams

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection."""
        return self._peer is not None

    @property
    def incarnation(self) -> str:
        """Incarnation of the process at the other end; empty: there is no connection."""
        return "" if self._peer is None else self._peer.incarnation

    @property
    def heard_ns(self) -> int:
        """Time at which something was heard of the node; later, where this node stood still since."""
        return self._heard_ns

    def is_followed_by(self, leading: Leading, incarnation: str) -> bool:
        """Whether a process follows a partition that is led here, and so leads it no longer itself."""
        stream = self.streams.get((leading.topic, leading.number))
        is_its = self._peer is not None and self._peer.incarnation == incarnation
        return is_its and stream is not None and stream.leading is leading and stream.is_running

    def add(self, leading: Leading) -> LeaderStream:
        """Send a partition that is led here to this node, in place of an earlier epoch of it."""
        key = leading.topic, leading.number
        self.remove(*key)
        stream = self.streams[key] = LeaderStream(self, leading)
        if self.is_silent:
            leading.silent(self.node, is_dead=self._is_dead)
        if self.is_unreached:
            leading.unreached(self.node)
        if self.is_gone:
            leading.gone(self.node)
        if self._peer is not None:
            self._open(stream)
        return stream

    def remove(self, topic: str, number: int) -> None:
        """Send a partition no more, if it was."""
        stream = self.streams.pop((topic, number), None)
        if stream is not None:
            self._close(stream)
            stream.phase = _Phase.AWAY

    def connected(self, peer: Identity, now_ns: int) -> None:
        """The node has answered, and is who it should be."""
        if self._peer is not None:
            self.disconnected(now_ns)
        self._forget_connection()
        self._peer = peer
        self._process = peer.incarnation
        self._heard(now_ns)
        for stream in self.streams.values():
            self._open(stream)

    def disconnected(self, now_ns: int) -> None:
        """The connection is gone."""
        self._now_ns = now_ns
        self._states_waiting.clear()
        for stream in self.streams.values():
            self._stop(stream, _Phase.AWAY)
        self._forget_connection()

    def registered(self, incarnation: str, now_ns: int) -> bool:
        """Take note of which process is the node; return whether the one that is, or was, connected is another.

        What that has acknowledged counts no more, and the connection is over.
        """
        if self._process in ("", incarnation):
            return False
        self._process = ""
        if self._peer is not None:
            self.disconnected(now_ns)
        for stream in self.streams.values():
            stream.leading.replaced(self.node)
        return True

    def presume_dead(self, is_refused: bool = False) -> None:
        """The node is dead: do not wait until it has been silent for long enough.

        Args:
            is_refused: nobody listens where it did; else the store does not count it among the living any more, to
                which it comes back if it has only stood still.
        """
        if not self._is_dead:
            self._is_dead = True
            self._fall_silent()
        if is_refused and not self.is_gone:
            self._set_gone()

    def lives(self) -> None:
        """The store counts the node among the living, whether or not it is reached."""
        if self._is_dead:
            self._is_dead = False
            for stream in self.streams.values():
                stream.leading.silent(self.node)

    def _set_gone(self) -> None:
        self.is_gone = True
        for stream in self.streams.values():
            stream.leading.gone(self.node)

    def _fall_silent(self) -> None:
        was_silent, self.is_silent = self.is_silent, True
        for stream in self.streams.values():
            stream.leading.silent(self.node, is_dead=self._is_dead)
        if was_silent:
            return
        for stream in list(self._states):
            if stream.state is not None and stream.state.more is not None:  # what it is read from is not kept for it
                self._refuse(stream, "it was silent while it was sent the state of the partition")

    def _open(self, stream: LeaderStream) -> None:
        stream.reset()
        stream.phase = _Phase.OPENING
        stream.number = self._next_number
        self._next_number += 1
        self._numbers[stream.number] = stream
        self._opening[stream] = None
        self._on_output()

    def _close(self, stream: LeaderStream) -> None:
        if stream.number >= 0 and self._numbers.pop(stream.number, None) is not None:
            if stream in self._opening:
                del self._opening[stream]
            else:
                self._send(Close(stream.number))
        self._stop(stream, stream.phase)

    def _stop(self, stream: LeaderStream, phase: _Phase) -> None:
        self._flying_bytes -= stream.flying_bytes
        self._behind_bytes -= stream.behind_bytes
        for waiting in self._opening, self._tails, self._behind, self._watermarks, self._floors:
            waiting.pop(stream, None)
        stream.reset()
        stream.number = -1
        stream.phase = phase
        stream.leading.closed(self.node, stream)
        self._release_state(stream)

    def _refuse(self, stream: LeaderStream, problem: str) -> None:
        """Close a stream, and open it again later."""
        self._close(stream)
        stream.phase = _Phase.REFUSED
        stream.problem = problem
        stream.retry_ns = min(max(RETRY_NS_MIN, stream.retry_ns * 2), RETRY_NS_MAX)
        self._retry_count += 1
        heappush(self._retries, (self._now_ns + stream.retry_ns, self._retry_count, stream))

    # --- time

    def tick(self, now_ns: int) -> None:
        """Do what is due; call it ten times a second."""
        stall_ns = now_ns - self._now_ns
        self._now_ns = now_ns
        if stall_ns >= STALL_NS:  # this node stood still: that says nothing about the other one
            self._heard_ns += stall_ns
        if not self.is_silent and now_ns - self._heard_ns >= LAG_NS_MAX:
            self._fall_silent()
        if not self.is_unreached and now_ns - self._heard_ns >= UNREACHED_NS:
            self.is_unreached = True
            for stream in self.streams.values():
                stream.leading.unreached(self.node)
        if not self.is_gone and now_ns - self._heard_ns >= GONE_NS:
            self._set_gone()
        if self._peer is None:
            return
        is_room = not self._control  # a peer that does not read is not told ever more
        if is_room and (self._pinged_ns is None or now_ns - self._pinged_ns >= PING_NS):
            self._pinged_ns = now_ns
            self._send(Ping(now_ns))
        while self._retries and self._retries[0][0] <= now_ns:
            stream = heappop(self._retries)[2]
            if stream.phase is _Phase.REFUSED:
                self._open(stream)
        if is_room and self._watermarks and now_ns - self._watermarks_ns >= WATERMARK_NS:
            self._watermarks_ns = now_ns
            self._send_watermarks()

    def _send_watermarks(self) -> None:
        told = [(stream.number, stream.leading.watermark) for stream in self._watermarks]
        pairs = [(number, watermark) for number, watermark in told if watermark is not None]
        self._watermarks.clear()
        for tally in tallies(pairs):
            self._send(Watermarks(tally))

    def _heard(self, now_ns: int) -> None:
        self._now_ns = self._heard_ns = now_ns
        if self.is_silent:
            self.is_silent = self.is_unreached = self.is_gone = self._is_dead = False
            for stream in self.streams.values():
                stream.leading.heard(self.node)

    # --- what goes out

    def wake(self, stream: LeaderStream) -> None:
        """A stream has something to say, perhaps."""
        if stream.phase is _Phase.RUNNING:
            (self._behind if stream.is_behind else self._tails)[stream] = None
            self._on_output()

    def wake_watermark(self, stream: LeaderStream) -> None:
        """A stream's watermark has moved."""
        if stream.phase is _Phase.RUNNING:
            self._watermarks[stream] = None

    def wake_floors(self, stream: LeaderStream) -> None:
        """A stream has floors to tell."""
        if stream.phase is _Phase.RUNNING and self._peer is not None and self._peer.version >= FLOORS_VERSION:
            self._floors[stream] = None
            self._on_output()

    def _send(self, frame: Frame) -> None:
        self._control.append(encode_one(frame))
        self._on_output()

    @property
    def has_output(self) -> bool:
        """Whether there is something to take now."""
        return bool(self._control or self._opening or self._floors or self._next_stream())

    def _next_stream(self) -> LeaderStream | None:
        window = self._window.link_bytes
        if self._flying_bytes >= window:
            return None
        is_due = not self._tails or self._tail_bytes >= TAILS_PER_BEHIND * self._window.chunk_bytes
        if is_due and self._behind and self._behind_bytes < window // 2:
            return next(iter(self._behind))
        return next(iter(self._tails)) if self._tails else None

    def take_output(self, now_ns: int, bytes_max: int = OUTPUT_BYTES) -> list[Piece]:
        """Return what to write next, about ``bytes_max`` of it; empty: nothing for now."""
        self._now_ns = max(self._now_ns, now_ns)
        pieces, self._control = self._control, []
        size = sum(map(len, pieces))
        while self._opening and size < bytes_max:
            stream = next(iter(self._opening))
            del self._opening[stream]
            leading, state = stream.leading, stream.leading.state
            frame = Open(stream.number, leading.topic, leading.number, state.topic_number, state.log_id, leading.epoch)
            pieces.append(encode_one(frame))
            size += len(pieces[-1])
        while self._floors and size < bytes_max:
            stream = next(iter(self._floors))
            del self._floors[stream]
            size += self._send_floors(stream, pieces)
        while size < bytes_max and (next_stream := self._next_stream()) is not None:
            self._tails.pop(next_stream, None)
            self._behind.pop(next_stream, None)
            was_behind, first = next_stream.is_behind, len(pieces)
            self._pump(next_stream, pieces)
            added = sum(map(len, pieces[first:]))
            size += added
            self._tail_bytes = 0 if was_behind else self._tail_bytes + added
        if self._control:  # of what was found while looking
            pieces += self._control
            self._control = []
        return pieces

    def _send_floors(self, stream: LeaderStream, pieces: list[Piece]) -> int:
        """Tell the floors that a follower does not have, however many; return how many bytes that takes."""
        leading, size = stream.leading, 0
        told = leading.floors_after(stream.floors_sent)
        for at in range(0, max(1, len(told)), FLOORS_MAX):
            part = told[at : at + FLOORS_MAX]
            is_last = at + FLOORS_MAX >= len(told)
            stream.floors_sent = leading.floor_number if is_last else part[-1][0]
            floors = [(channel, floor) for _, channel, floor in part]
            pieces.append(encode_one(Floors(stream.number, stream.floors_sent, floors)))
            size += len(pieces[-1])
        return size

    def _pump(self, stream: LeaderStream, pieces: list[Piece]) -> None:
        """Send one chunk of a stream, and progress when it has the messages."""
        leading = stream.leading
        if stream.sent < leading.end:
            if stream.flying_bytes >= self._window.stream_bytes:
                return  # an acknowledgement wakes it
            if not self._send_chunk(stream, pieces):
                return
        is_behind = stream.sent < leading.end
        stream.is_behind = is_behind
        if is_behind or self._pump_progress(stream, pieces):
            (self._behind if is_behind or stream.state is not None else self._tails)[stream] = None

    def _send_chunk(self, stream: LeaderStream, pieces: list[Piece]) -> bool:
        leading, first = stream.leading, stream.sent
        try:
            data, end, gap = leading.read(first, self._window.chunk_bytes)
        except NotInLog as error:
            self._start_over(stream, str(error))
            return False
        except FlintError as error:
            self._refuse(stream, f"this node cannot read its log: {error}")
            return False
        self._watermarks.pop(stream, None)
        pieces += encode(Append(stream.number, first, leading.watermark or 0, gap), data)
        size = len(data)
        stream.sent = end
        stream.flying.append((end, size, stream.is_behind))
        stream.flying_bytes += size
        self._flying_bytes += size
        if stream.is_behind:
            stream.behind_bytes += size
            self._behind_bytes += size
        return True

    def _start_over(self, stream: LeaderStream, problem: str) -> None:
        try:
            shape = stream.leading.log.shape()
        except FlintError as error:
            return self._refuse(stream, f"this node cannot read its log: {error}")
        if stream.sent == shape.start:  # where it would begin again nothing can be read
            return self._refuse(stream, problem)
        self._land(stream, stream.sent)
        opened_ns = stream.opened_ns
        stream.reset()
        stream.opened_ns = opened_ns
        self._release_state(stream)
        self._register(stream)
        return self._align(stream, shape.start, StartOver(stream.number, shape.start, shape.offset_bytes))

    def _register(self, stream: LeaderStream) -> None:
        peer = self._peer
        assert peer is not None
        stream.leading.opened(self.node, Member(peer.node, peer.boot_id, peer.syncs), stream)

    def _align(self, stream: LeaderStream, place: int, frame: CutTo | StartOver) -> None:
        stream.phase = _Phase.ALIGNING
        stream.place = place
        self._send(frame)

    def _pump_progress(self, stream: LeaderStream, pieces: list[Piece]) -> bool:
        """Send progress for which the follower has the messages; return whether there is more to send now."""
        leading = stream.leading
        if stream.state is not None:
            return self._send_state(stream, stream.state, pieces)
        while stream.progress_next is not None and stream.progress_next <= leading.progress_number:
            number = stream.progress_next
            entry = leading.entry(number)
            if entry is None:
                stream.progress_next = None
                break
            needs, records = entry
            if needs > stream.sent:
                return False
            position = (leading.epoch, number)
            pieces += encode(Progress(stream.number, position, stream.progress_position, needs), records)
            stream.progress_position, stream.progress_sent, stream.progress_next = position, number, number + 1
        if stream.progress_next is None and stream not in self._states:
            self._ask_for_state(stream)
        return False

    # --- whole states

    def _ask_for_state(self, stream: LeaderStream) -> None:
        if len(self._states) >= STATES_MAX:
            if stream not in self._states_waiting:
                self._states_waiting.append(stream)
            return
        request = self._states[stream] = object()

        def done(state: WholeState | None) -> None:
            if self._states.get(stream) is not request or stream.state is not None:
                if state is not None and state is not stream.state:
                    state.close()
                return  # it was closed, or starts over
            if state is None:
                self._refuse(stream, "the state of the partition cannot be read now")
            else:
                stream.state, stream.state_number = state, state.number
                self.wake(stream)

        stream.leading.log.whole_state(done)

    def _ask_for_more(self, stream: LeaderStream, state: WholeState) -> None:
        stream.state_asked = True

        def done(parts: list[bytes] | None) -> None:
            if stream.state is not state:
                return
            stream.state_asked = False
            if parts is None:
                self._refuse(stream, "the state of the partition cannot be read further")
                return
            if not parts:
                state.more = None
            state.parts.extend(parts)
            self.wake(stream)

        assert state.more is not None
        state.more(done)

    def _release_state(self, stream: LeaderStream) -> None:
        if self._states.pop(stream, None) is not None:
            self._ask_for_next_state()

    def _ask_for_next_state(self) -> None:
        while self._states_waiting and len(self._states) < STATES_MAX:
            stream = self._states_waiting.popleft()
            if stream.phase is _Phase.RUNNING and stream.progress_next is None and stream.state is None:
                self._ask_for_state(stream)

    def _send_state(self, stream: LeaderStream, state: WholeState, pieces: list[Piece]) -> bool:
        """Send one part."""
        if state.needs > stream.sent:
            return False
        position = (stream.leading.epoch, state.number)
        if stream.state_at < 0:
            stream.state_at = 0
            pieces.append(encode_one(StateBegin(stream.number, position, state.needs)))
        if state.parts and stream.state_at - stream.state_taken < STATE_PARTS_MAX:
            pieces += encode(StatePart(stream.number), state.parts.popleft())
            stream.state_at += 1
        if not state.parts and state.more is not None and not stream.state_asked:
            self._ask_for_more(stream, state)
        if state.parts:
            return stream.state_at - stream.state_taken < STATE_PARTS_MAX
        if state.more is not None:
            return False
        pieces.append(encode_one(StateEnd(stream.number)))
        stream.drop_state()
        stream.progress_position, stream.progress_sent = position, state.number
        stream.progress_next = state.number + 1
        self._release_state(stream)
        return stream.progress_next <= stream.leading.progress_number

    # --- what comes in

    def receive(self, data: bytes, now_ns: int) -> None:
        """Take what the node sent.

        Raises:
            PeerError: it broke a rule, or says farewell; the connection is to be closed.
        """
        self._heard(now_ns)
        reader = self._reader
        reader.receive(data)
        while (found := reader.next_frame()) is not None:
            self._take(found[0])

    def _take(self, frame: Frame) -> None:
        match frame:
            case Acks(ends):
                for number, end in ends:
                    stream = self._stream(number)
                    if stream is not None:
                        self._acked(stream, end)
            case ProgressAcks(numbers):
                for number, progress in numbers:
                    stream = self._stream(number)
                    if stream is not None:
                        self._progress_acked(stream, progress)
            case FloorAcks(numbers):
                for number, floors in numbers:
                    stream = self._stream(number)
                    if stream is not None:
                        self._floors_acked(stream, floors)
            case Pong(sent_ns):
                if self._pinged_ns is None or sent_ns > self._pinged_ns:
                    raise self._wrong("an answer to a ping that was never sent")
                if self.confirmed_ns is None or sent_ns > self.confirmed_ns:
                    self.confirmed_ns = sent_ns
            case Opened() | Ready() | Refused() | NeedState() | StateTaken():
                stream = self._stream(frame.stream)
                if stream is not None:
                    self._answered(stream, frame)
            case Farewell(reason):
                raise PeerError(f"node {self.node} closed the connection: {reason}")
            case _:
                raise self._wrong(f"{type(frame).__name__}, which only a leader sends")

    def _stream(self, number: int) -> LeaderStream | None:
        """Find a stream; None for one that was closed, of which something was still under way."""
        stream = self._numbers.get(number)
        if stream is None and number >= self._next_number:
            raise self._wrong(f"something about stream {number}, which was never opened")
        return stream

    def _wrong(self, reason: str) -> PeerError:
        return PeerError(f"node {self.node} sent {reason}")

    def _answered(self, stream: LeaderStream, frame: Opened | Ready | Refused | NeedState | StateTaken) -> None:
        match frame:
            case Opened():
                self._expect(stream, frame, stream.phase is _Phase.OPENING and stream not in self._opening)
                self._opened(stream, frame)
            case Ready(_, end):
                self._expect(stream, frame, stream.phase is _Phase.ALIGNING)
                if end != stream.place:
                    raise self._wrong(f"Ready at {end} on stream {stream.number}, which was told {stream.place}")
                stream.sent = end
                stream.phase = _Phase.RUNNING
                stream.problem = ""
                stream.retry_ns = 0
                self._watermarks[stream] = None
                self.wake(stream)
                if self._peer is not None and self._peer.version < FLOORS_VERSION:
                    stream.leading.floors_acked(self.node, ALL_FLOORS, self._now_ns)
                self.wake_floors(stream)
            case Refused(_, epoch, refusal, reason):
                self._refused(stream, epoch, refusal, reason)
            case NeedState():
                self._expect(stream, frame, stream.phase is _Phase.RUNNING)
                if stream.state is None and stream not in self._states:
                    stream.progress_next = None
                    self.wake(stream)
            case StateTaken(_, count):
                if stream.state is not None and stream.state_at >= 0:
                    if count > stream.state_at:
                        raise self._wrong(f"StateTaken of {count} parts on stream {stream.number}, never sent")
                    stream.state_taken = max(stream.state_taken, count)
                    self.wake(stream)

    def _expect(self, stream: LeaderStream, frame: Frame, is_expected: bool) -> None:
        if not is_expected:
            raise self._wrong(f"{type(frame).__name__} of stream {stream.number} out of turn")

    def _opened(self, stream: LeaderStream, frame: Opened) -> None:
        leading = stream.leading
        if leading.is_ended or self.node not in leading.followers:
            return self._refuse(stream, "it is not to have the partition")
        theirs = LogShape(frame.history, frame.start, frame.end)
        if frame.start > frame.end:
            raise self._wrong(f"a log from {frame.start} to {frame.end}")
        try:
            ours = leading.log.shape()
        except FlintError as error:
            return self._refuse(stream, f"this node cannot read its log: {error}")
        stream.opened_ns = self._now_ns
        self._register(stream)
        leading.heard(self.node)
        place = agreement(ours, theirs)
        if place is None:
            return self._align(stream, ours.start, StartOver(stream.number, ours.start, ours.offset_bytes))
        stream.progress_next = leading.next_progress(frame.progress)
        if stream.progress_next is not None:
            stream.progress_position = frame.progress
            stream.progress_sent = stream.progress_next - 1
            leading.progress_acked(self.node, stream.progress_sent, self._now_ns)
        return self._align(stream, place, CutTo(stream.number, place))

    def _refused(self, stream: LeaderStream, epoch: int, refusal: Refusal, reason: str) -> None:
        leading = stream.leading
        if refusal is Refusal.HIGHER_EPOCH:
            if epoch <= leading.epoch:
                raise self._wrong(f"a refusal of epoch {leading.epoch} because of epoch {epoch}")
            self._refuse(stream, f"it follows epoch {epoch}")
            leading.ended(epoch)
            return
        self._refuse(stream, f"{refusal.name}: {reason}" if reason else refusal.name)
        if refusal is Refusal.BROKEN:
            leading.silent(self.node, reason or "it did not say why")

    def _acked(self, stream: LeaderStream, end: int) -> None:
        if stream.phase is not _Phase.RUNNING:
            return  # it is being started over
        if end > stream.sent:
            raise self._wrong(f"an acknowledgement of {end} on stream {stream.number}, which was sent {stream.sent}")
        self._land(stream, end)
        try:
            stream.leading.acked(self.node, end, self._now_ns)
        except ValueError as error:
            raise self._wrong(str(error)) from None
        if stream.sent < stream.leading.end:
            self.wake(stream)
        elif self._tails or self._behind:
            self._on_output()

    def _land(self, stream: LeaderStream, end: int) -> None:
        """Make room in the windows for what has arrived."""
        flying = stream.flying
        while flying and flying[0][0] <= end:
            _, size, was_behind = flying.popleft()
            stream.flying_bytes -= size
            self._flying_bytes -= size
            if was_behind:
                stream.behind_bytes -= size
                self._behind_bytes -= size

    def _progress_acked(self, stream: LeaderStream, number: int) -> None:
        if stream.phase is not _Phase.RUNNING:
            return
        if number > stream.progress_sent:
            raise self._wrong(f"an acknowledgement of progress {number} on stream {stream.number}, never sent")
        stream.leading.progress_acked(self.node, number, self._now_ns)
        if stream.state_number is not None and number >= stream.state_number:
            stream.state_number = None

    def _floors_acked(self, stream: LeaderStream, number: int) -> None:
        if stream.phase is not _Phase.RUNNING:
            return
        if number > stream.floors_sent:
            raise self._wrong(f"an acknowledgement of floors {number} on stream {stream.number}, never sent")
        stream.leading.floors_acked(self.node, number, self._now_ns)


# -- the follower's end ------------------------------------------------------------------------------------------------


class FollowerOwner(Protocol):
    """The keeper of the copies of this node."""

    def find(self, frame: Open, peer: Identity) -> Following | tuple[Refusal, int, str]:
        """Return the copy that a node says it leads; or why it is not followed, and the highest epoch that is known."""
        ...


class _FollowerStream:
    """One partition on a connection."""

    __slots__ = ("_link", "acked", "following", "is_refused", "number")

    def __init__(self, link: FollowerLink, number: int) -> None:
        self._link = link
        self.number = number
        self.following: Following | None = None
        self.is_refused = False
        self.acked = -1

    @property
    def confirmed_ns(self) -> int:
        return self._link.confirmed_ns

    def send(self, frame: Frame) -> None:
        if isinstance(frame, Ready):
            self.acked = -1
        self._link.send(frame)

    def refuse(self, refusal: Refusal, epoch: int, reason: str = "") -> None:
        if not self.is_refused:
            self.is_refused = True
            self._link.send(Refused(self.number, epoch, refusal, shorten(reason)))

    def acknowledge(self) -> None:
        self._link.acknowledge(self)

    def acknowledge_progress(self, number: int) -> None:
        self._link.acknowledge_progress(self, number)

    def acknowledge_floors(self, number: int) -> None:
        self._link.acknowledge_floors(self, number)


class FollowerLink:
    """A connection from a node that leads partitions of which there are copies here.

    Args:
        peer: that node.
        owner: of the copies.
        on_output: is called when there may be something to take; it must not take it before it returns.
        spare: memory for all links of a loop to receive into; see :class:`flintmq.wire.peer.PeerReader`.

    Attributes:
        confirmed_ns: when its last ping was answered; 0: none was.
    """

    def __init__(
        self,
        peer: Identity,
        owner: FollowerOwner,
        on_output: Callable[[], None] = lambda: None,
        spare: list[bytearray] | None = None,
    ) -> None:
        self.peer = peer
        self.confirmed_ns = 0
        self._owner = owner
        self._on_output = on_output
        self._reader = PeerReader(is_trusted=True, spare=spare)
        self._streams: dict[int, _FollowerStream] = {}
        self._replies: list[Piece] = []
        self._replies_bytes = 0
        self._unacknowledged: dict[_FollowerStream, None] = {}
        self._progress: dict[_FollowerStream, int] = {}
        self._floors: dict[_FollowerStream, int] = {}
        self._ping_ns: int | None = None
        self._appended: dict[Following, None] = {}
        self._is_closed = False

    # --- what comes in

    def space(self) -> memoryview:
        """Return where the next bytes may be put instead of being passed to :meth:`receive`; then :meth:`filled`."""
        return self._reader.space()

    def filled(self, count: int) -> None:
        """Take so many bytes that were put into the space; :meth:`receive` goes on with them."""
        self._reader.filled(count)

    def receive(self, data: bytes, opens_max: int = STREAMS_MAX) -> bool:
        """Take what the leader sent; return whether there is more of that to take.

        Args:
            data: behind what is left of the last call; empty: go on with that, and with what was put into the space.
            opens_max: streams that are opened before it is left for another turn.

        Raises:
            PeerError: it broke a rule, says farewell, or does not read what it is sent; the connection is to be closed.
        """
        reader = self._reader
        if data:
            reader.receive(data)
        while opens_max > 0:
            found = reader.next_frame()
            if found is None:
                return False
            self._take(*found)
            opens_max -= isinstance(found[0], Open)
            if self._replies_bytes > REPLIES_BYTES_MAX:
                raise PeerError(f"node {self.peer.node} does not read: {self._replies_bytes} bytes of answers wait")
        return True

    def take_appended(self) -> list[Following]:
        """Return the copies that were appended to since the last time, to be synced where that is the rule; see
        :meth:`Following.synced`.
        """
        appended, self._appended = self._appended, {}
        return list(appended)

    def _take(self, frame: Frame, body: memoryview) -> None:
        match frame:
            case Append(number, first, watermark, gap):
                stream, following = self._stream(number)
                if following is not None and following.append(stream, first, watermark, body, gap):
                    self._appended[following] = None
            case Watermarks(watermarks):
                for number, watermark in watermarks:
                    stream, following = self._stream(number)
                    if following is not None:
                        following.watermark(stream, watermark)
            case Floors(number):
                stream, following = self._stream(number)
                if following is not None:
                    following.floors(stream, frame)
            case Ping(sent_ns):
                self._ping_ns = sent_ns
                self._on_output()
            case Open():
                self._open(frame)
            case Close(number):
                self._close(number)
            case CutTo() | StartOver() | Progress() | StateBegin() | StatePart() | StateEnd():
                self._pass_on(frame, body)
            case Farewell(reason):
                raise PeerError(f"node {self.peer.node} closed the connection: {reason}")
            case _:
                raise PeerError(f"node {self.peer.node} sent {type(frame).__name__}, which only a follower sends")

    def _pass_on(
        self, frame: CutTo | StartOver | Progress | StateBegin | StatePart | StateEnd, body: memoryview
    ) -> None:
        stream, following = self._stream(frame.stream)
        if following is None:
            return
        match frame:
            case CutTo():
                following.cut_to(stream, frame)
            case StartOver():
                following.start_over(stream, frame)
            case Progress():
                following.progress(stream, frame, body)
            case StateBegin():
                following.state_begin(stream, frame)
            case StatePart():
                following.state_part(stream, body)
            case StateEnd():
                following.state_end(stream)

    def _stream(self, number: int) -> tuple[_FollowerStream, Following | None]:
        stream = self._streams.get(number)
        if stream is None:
            raise PeerError(f"node {self.peer.node} sent something about stream {number}, which is not open")
        return stream, stream.following

    def _open(self, frame: Open) -> None:
        number = frame.stream
        if number in self._streams or len(self._streams) >= STREAMS_MAX:
            raise PeerError(
                f"node {self.peer.node} opened stream {number}, with {len(self._streams)} open, at most {STREAMS_MAX}"
            )
        stream = self._streams[number] = _FollowerStream(self, number)
        found = self._owner.find(frame, self.peer)
        if isinstance(found, Following):
            stream.following = found
            found.open(stream, frame)
        else:
            stream.refuse(*found)

    def _close(self, number: int) -> None:
        stream, following = self._stream(number)
        del self._streams[number]
        self._unacknowledged.pop(stream, None)
        self._progress.pop(stream, None)
        self._floors.pop(stream, None)
        if following is not None:
            following.closed(stream)

    def closed(self) -> None:
        """The connection is gone."""
        self._is_closed = True
        for stream in self._streams.values():
            if stream.following is not None:
                stream.following.closed(stream)
        self._streams.clear()
        self._unacknowledged.clear()
        self._progress.clear()
        self._floors.clear()

    # --- what goes out

    def send(self, frame: Frame) -> None:
        """Answer."""
        if self._is_closed:
            return
        data = encode_one(frame)
        self._replies.append(data)
        self._replies_bytes += len(data)
        self._on_output()

    def acknowledge(self, stream: _FollowerStream) -> None:
        """Acknowledge a log with what goes out next."""
        if not self._is_closed:
            self._unacknowledged[stream] = None
            self._on_output()

    def acknowledge_progress(self, stream: _FollowerStream, number: int) -> None:
        """Acknowledge progress with what goes out next."""
        if not self._is_closed:
            self._progress[stream] = number
            self._on_output()

    def acknowledge_floors(self, stream: _FollowerStream, number: int) -> None:
        """Acknowledge floors with what goes out next."""
        if not self._is_closed:
            self._floors[stream] = number
            self._on_output()

    @property
    def has_output(self) -> bool:
        """Whether there is something to take now."""
        is_said = self._replies or self._unacknowledged or self._progress or self._floors
        return bool(is_said or self._ping_ns is not None)

    def take_output(self, now_ns: int) -> list[Piece]:
        """Return what to write next; empty: nothing for now."""
        pieces, self._replies, self._replies_bytes = self._replies, [], 0
        ends = []
        for stream in self._unacknowledged:
            following = stream.following
            if following is None or following.stream is not stream:
                continue
            end = following.acknowledged_end
            if end > stream.acked:
                stream.acked = end
                ends.append((stream.number, end))
        self._unacknowledged.clear()
        pieces += [encode_one(Acks(tally)) for tally in tallies(ends)]
        if self._progress:
            pieces += [encode_one(ProgressAcks(tally)) for tally in tallies(_numbers(self._progress))]
            self._progress.clear()
        if self._floors:
            pieces += [encode_one(FloorAcks(tally)) for tally in tallies(_numbers(self._floors))]
            self._floors.clear()
        if self._ping_ns is not None:  # last: what was refused before it is said before it
            pieces.append(encode_one(Pong(self._ping_ns)))
            self._ping_ns = None
            self.confirmed_ns = now_ns
        return pieces


def _numbers(said: dict[_FollowerStream, int]) -> list[tuple[int, int]]:
    """The numbers of those streams that change their copies still."""
    return [
        (stream.number, number)
        for stream, number in said.items()
        if stream.following is not None and stream.following.stream is stream
    ]


assert STREAMS_MAX <= STREAM_MAX
