"""A copy of a partition that another node leads: who may change it, and what is said when.

Invariants:

- F1: an epoch is noted, durably, before anything is acknowledged in it; a lower one is refused from when a higher one
  is heard of.
- F2: what is acknowledged is in the log (synced, where this node does that), and the log up to there is the leader's.
- F3: one stream at a time changes the copy: the latest of the highest epoch; what still comes from another is passed
  over. A cut or a note that is under way is awaited before the next stream begins.
- F4: progress is taken when it follows the one that is here and the log is as far as it needs, or when it is whole.

::

    Open -> note_epoch -> Opened -> CutTo | StartOver -> Ready -> Append* Watermarks* Progress* State*
                                       ^                            |
                                       +------- StartOver ----------+

Rules of this file: no IO, no clock; batches and records are not looked at; the leader breaks a rule: PeerError, and its
connection ends; this node's disk does: the copy is broken, and everybody is told so, until somebody makes a new object.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from flintmq.cluster.history import LogShape, cut, latest
from flintmq.cluster.leading import Done
from flintmq.errors import FlintError
from flintmq.wire.peer import (
    CutTo,
    Floors,
    Frame,
    NeedState,
    Open,
    Opened,
    PeerError,
    Progress,
    Ready,
    Refusal,
    StartOver,
    StateBegin,
    StateTaken,
)

STATE_PARTS_MAX = 16
"""Of a whole state, that have come and are not written: a leader waits for room earlier."""


class FollowerLog(Protocol):
    """The log and the state of a copy, which somebody else keeps. Each ``done`` is called once, at once or later, with
    what went wrong.
    """

    @property
    def epoch(self) -> int:
        """The highest epoch that is noted, durably."""
        ...

    @property
    def progress(self) -> tuple[int, int]:
        """Position of the progress that is stored."""
        ...

    @property
    def end(self) -> int:
        """The end of the log as it is written."""
        ...

    @property
    def acknowledged_end(self) -> int:
        """The end up to which the log may be acknowledged: written, or synced where that is the rule."""
        ...

    def shape(self) -> LogShape:
        """Return the log's history, start and end; the end is before :attr:`end` where something is missing: the leader
        has it cut off there, and sends it.
        """
        ...

    def note_epoch(self, epoch: int, done: Done) -> None:
        """Remember, durably, that nothing lower is followed."""
        ...

    def append(self, data: memoryview, gap: int) -> int:
        """Append whole batches, verified, byte for byte; return the new end.

        Args:
            gap: messages behind the end that the leader does not have, so that the first batch begins behind them.

        Raises:
            ValueError: they are no batches, or do not follow what is there, or the gap.
            StorageError: they cannot be written.
        """
        ...

    def commit(self, sequence: int) -> None:
        """Take note that everything below is committed: at most up to the end, never back."""
        ...

    def cut_back(self, sequence: int, done: Done) -> None:
        """Let the log end at ``sequence``, durably, and its history be that of what is left: an epoch that began at
        the end goes also when nothing else does (:func:`flintmq.cluster.history.cut`).
        """
        ...

    def start_over(self, sequence: int, offset_bytes: int, done: Done) -> None:
        """Let the log and its history be empty and begin at ``sequence``, and its progress be at (0, 0), durably."""
        ...

    def keep_floors(self, floors: list[tuple[str, int]]) -> None:
        """Keep how far channels in order are, so that it outlives the process; 0: forget what is kept of one.

        Raises:
            StorageError: it cannot be written.
        """
        ...

    def drop_state(self) -> None:
        """Forget the parts that were staged."""
        ...

    def stage(self, part: bytes, done: Done) -> None:
        """Keep a part of the whole state until :meth:`apply` puts all of them in place of what there is."""
        ...

    def apply(self, position: tuple[int, int], parts: list[bytes], is_whole: bool, done: Done) -> None:
        """Store records and position in one transaction.

        Args:
            is_whole: with the parts that were staged they are the whole state, and take the place of all there is.
        """
        ...


class FollowerStream(Protocol):
    """A connection's part in a copy, see :mod:`flintmq.cluster.link`."""

    @property
    def number(self) -> int:
        """Of the stream on its connection."""
        ...

    @property
    def confirmed_ns(self) -> int:
        """Time at which its leader was last told that it is followed, monotonic."""
        ...

    def send(self, frame: Frame) -> None:
        """Answer."""
        ...

    def refuse(self, refusal: Refusal, epoch: int, reason: str = "") -> None:
        """Answer that it is not, or no longer, followed."""
        ...

    def acknowledge(self) -> None:
        """Acknowledge the log when the turn ends."""
        ...

    def acknowledge_progress(self, number: int) -> None:
        """Acknowledge progress when the turn ends."""
        ...

    def acknowledge_floors(self, number: int) -> None:
        """Acknowledge floors when the turn ends."""
        ...


class Following:
    """A copy, and the one stream that changes it.

    Args:
        topic, number: of the partition.
        topic_number: of the topic.
        log_id: of the log.
        log: to be changed.
        confirmed_ns: no leader was told later than this that it is followed: monotonic time of the process's start.

    Attributes:
        epoch: the highest that was heard of.
        broken: why nothing is taken any more; None: all is well.
    """

    def __init__(
        self,
        topic: str,
        number: int,
        topic_number: int,
        log_id: int,
        log: FollowerLog,
        confirmed_ns: int,
    ) -> None:
        self.topic = topic
        self.number = number
        self.topic_number = topic_number
        self.log_id = log_id
        self.log = log
        self.epoch = log.epoch
        self.broken: Exception | None = None
        self._confirmed_ns = confirmed_ns
        self._stream: FollowerStream | None = None
        self._stream_epoch = 0
        self._is_open = False  # Opened was sent
        self._is_ready = False  # Ready was sent, and nothing else is being done
        self._busy_count = 0
        self._after: Callable[[], None] | None = None
        self._position = (0, 0)
        self._needs_state = False
        self._state_position: tuple[int, int] | None = None  # of the whole state that is coming
        self._part_count = 0
        self._taken_count = 0

    @property
    def stream(self) -> FollowerStream | None:
        """The stream that changes it; None: nobody leads it, as far as is known here."""
        return self._stream

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way that changes the copy: it can be led, or removed."""
        return self._busy_count == 0

    @property
    def confirmed_ns(self) -> int:
        """Time at which this node last told a leader that it follows it. Once elected it delivers ``LEASE_TTL_S`` after
        that, because the leader before may act on it until then.
        """
        stream = self._stream
        return self._confirmed_ns if stream is None else max(self._confirmed_ns, stream.confirmed_ns)

    # --- who leads

    def open(self, stream: FollowerStream, frame: Open) -> None:
        """A node says that it leads."""
        if (frame.topic_number, frame.log_id) != (self.topic_number, self.log_id):
            here, there = (self.topic_number, self.log_id), (frame.topic_number, frame.log_id)
            return stream.refuse(Refusal.OTHER_LOG, 0, f"this replica is of topic and log {here}, not {there}")
        if frame.epoch < self.epoch:
            return stream.refuse(Refusal.HIGHER_EPOCH, self.epoch)
        if self.broken is not None:
            return stream.refuse(Refusal.BROKEN, self.epoch, str(self.broken))
        refusal = Refusal.TAKEN if frame.epoch == self._stream_epoch else Refusal.HIGHER_EPOCH
        self._leave(refusal, frame.epoch)
        self.epoch = self._stream_epoch = frame.epoch
        self._stream = stream
        self._then(self._begin)
        return None

    def superseded(self, epoch: int) -> None:
        """There is a later leader: perhaps this node; who led before is told so, and not followed any more."""
        if epoch > self.epoch:
            self.epoch = epoch
            self._leave(Refusal.HIGHER_EPOCH, epoch)

    def closed(self, stream: FollowerStream) -> None:
        """A stream is over: its connection broke, or the leader closed it."""
        if stream is self._stream:
            self._confirmed_ns = self.confirmed_ns
            self._forget_stream()

    def retire(self) -> None:
        """Follow nobody any more: the copy is being removed, or set aside."""
        self._leave(Refusal.NOT_HERE, self.epoch)
        self.broken = _Retired(f"the replica of {self.topic}/{self.number} is being removed")

    def interrupt(self, reason: str) -> None:
        """Follow nobody for now, and say so to who leads; it may open another stream."""
        self._leave(Refusal.NOT_HERE, self.epoch, reason)

    def _leave(self, refusal: Refusal, epoch: int, reason: str = "") -> None:
        stream = self._stream
        if stream is not None:
            self._confirmed_ns = self.confirmed_ns
            self._forget_stream()
            stream.refuse(refusal, epoch, reason)

    def _forget_stream(self) -> None:
        self._stream = self._after = None
        self._is_open = self._is_ready = self._needs_state = False
        self._drop_state()

    def _drop_state(self) -> None:
        if self._state_position is not None:
            self._state_position = None
            self.log.drop_state()

    def _begin(self) -> None:
        epoch = self._stream_epoch
        if epoch > self.log.epoch:
            self._do(lambda done: self.log.note_epoch(epoch, done), self._opened)
        else:
            self._opened()

    def _opened(self) -> None:
        assert self._stream is not None
        shape = self.log.shape()
        self._position = self.log.progress
        self._is_open = True
        number = self._stream.number
        self._stream.send(Opened(number, latest(shape.history), shape.start, shape.end, self._position))

    # --- one thing after the other

    def _do(self, operation: Callable[[Done], None], then: Callable[[], None]) -> None:
        """Begin something that ends later; go on with ``then``, or with another stream if there is one by that time."""
        self._is_ready = False
        self._after = then
        self._busy_count += 1
        try:
            operation(self._finished)
        except (FlintError, ValueError) as error:  # it was refused, and did not begin
            self._finished(error)

    def _finished(self, error: Exception | None) -> None:
        self._busy_count -= 1
        if error is not None:
            self._break(error)
        elif self._busy_count == 0 and self._after is not None and self._stream is not None:
            after, self._after = self._after, None
            after()

    def _then(self, action: Callable[[], None]) -> None:
        """Do something when nothing else is under way."""
        if self._busy_count:
            self._after = action
        else:
            action()

    def _break(self, error: Exception) -> None:
        if self.broken is None:
            self.broken = error
        stream = self._stream
        if stream is not None:
            self._confirmed_ns = self.confirmed_ns
            self._forget_stream()
            stream.refuse(Refusal.BROKEN, self.epoch, str(error))

    # --- the log

    def cut_to(self, stream: FollowerStream, frame: CutTo) -> None:
        """Cut off what the leader does not have.

        Raises:
            PeerError: it is not the time for that, or not a place in the log.
        """
        if stream is not self._stream:
            return
        self._expect(self._is_open and not self._is_ready, frame)
        shape = self.log.shape()
        if not shape.start <= frame.sequence <= shape.end:
            raise self._wrong(f"cut to {frame.sequence}, the log has {shape.start} to {shape.end}")
        if frame.sequence == shape.end == self.log.end and cut(shape.history, shape.end) == list(shape.history):
            self._ready()
        else:
            self._is_open = False
            self._do(lambda done: self.log.cut_back(frame.sequence, done), self._ready)

    def start_over(self, stream: FollowerStream, frame: StartOver) -> None:
        """Begin with an empty log.

        Raises:
            PeerError: it is not the time for that.
        """
        if stream is not self._stream:
            return
        self._expect(self._is_open, frame)
        self._is_open = self._is_ready = False
        self._needs_state = False
        self._drop_state()

        def begin() -> None:
            self._do(lambda done: self.log.start_over(frame.sequence, frame.offset_bytes, done), self._started_over)

        self._then(begin)

    def _started_over(self) -> None:
        self._position = self.log.progress
        self._ready()

    def _ready(self) -> None:
        assert self._stream is not None
        self._is_open = self._is_ready = True
        self._stream.send(Ready(self._stream.number, self.log.end))
        self._stream.acknowledge()

    def append(self, stream: FollowerStream, first: int, watermark: int, body: memoryview, gap: int = 0) -> bool:
        """Append batches; return whether there was something to append, so that it can be synced when the turn ends.

        Args:
            gap: messages from ``first`` on that the leader does not have.

        Raises:
            PeerError: it is not the time for that, or they do not follow what is there.
        """
        if stream is not self._stream:
            return False
        self._expect(self._is_ready, None)
        log = self.log
        if first != log.end:
            raise self._wrong(f"batches from {first}, the log ends at {log.end}")
        if gap and not len(body):
            raise self._wrong(f"a gap of {gap} messages from {first} on, and nothing behind it")
        if len(body):
            try:
                log.append(body, gap)
            except ValueError as error:
                behind = f" behind a gap of {gap}" if gap else ""
                raise self._wrong(f"batches from {first}{behind} that cannot be appended: {error}") from error
            except FlintError as error:
                self._break(error)
                return False
            stream.acknowledge()
        self.watermark(stream, watermark)
        return bool(len(body))

    def watermark(self, stream: FollowerStream, watermark: int) -> None:
        """Take note of what is committed."""
        if stream is self._stream and self._is_ready and watermark:
            self.log.commit(min(watermark, self.log.end))

    def synced(self) -> None:
        """The log may be acknowledged further than before."""
        if self._stream is not None:
            self._stream.acknowledge()

    @property
    def acknowledged_end(self) -> int:
        """The end up to which the log is acknowledged; -1: not now."""
        return min(self.log.acknowledged_end, self.log.end) if self._is_ready else -1

    def floors(self, stream: FollowerStream, frame: Floors) -> None:
        """Keep how far channels in order are.

        Raises:
            PeerError: it is not the time for that.
        """
        if stream is not self._stream:
            return
        self._expect(self._is_ready, frame)
        try:
            self.log.keep_floors(frame.floors)
        except (FlintError, ValueError) as error:
            self._break(error)
        else:
            stream.acknowledge_floors(frame.number)

    def _expect(self, is_expected: bool, frame: Frame | None) -> None:
        if not is_expected:
            raise self._wrong(f"{'Append' if frame is None else type(frame).__name__} out of turn")

    def _wrong(self, reason: str) -> PeerError:
        return PeerError(f"{self.topic}/{self.number}, epoch {self._stream_epoch}: the leader sent {reason}")

    # --- progress

    def progress(self, stream: FollowerStream, frame: Progress, body: memoryview) -> None:
        """Store records of the leader that follow what is here.

        Raises:
            PeerError: it is not the time for that, or the log is not that far.
        """
        if stream is not self._stream:
            return
        self._expect(self._is_ready and self._state_position is None, frame)
        if not self._fits(frame):
            if not self._needs_state:
                self._needs_state = True
                stream.send(NeedState(stream.number))
            return
        self._check_needs(frame.needs)
        self._apply(stream, frame.position, [bytes(body)], is_whole=False)

    def _fits(self, frame: Progress) -> bool:
        return not self._needs_state and frame.after == self._position and frame.position[0] == self._stream_epoch

    def state_begin(self, stream: FollowerStream, frame: StateBegin) -> None:
        """The whole state follows.

        Raises:
            PeerError: it is not the time for that, or the log is not that far.
        """
        if stream is not self._stream:
            return
        is_expected = self._state_position is None and frame.position[0] == self._stream_epoch
        self._expect(self._is_ready and is_expected, frame)
        self._check_needs(frame.needs)
        self.log.drop_state()  # of one that was not completed
        self._state_position = frame.position
        self._part_count = self._taken_count = 0

    def state_part(self, stream: FollowerStream, body: memoryview) -> None:
        """Have a part of the whole state written where nobody looks for it yet.

        Raises:
            PeerError: it is not the time for that, or too many are on their way.
        """
        if stream is not self._stream:
            return
        position = self._state_position
        if position is None:
            raise self._wrong("a part of a state that did not begin")
        self._part_count += 1
        if self._part_count - self._taken_count > STATE_PARTS_MAX:
            raise self._wrong(f"more than {STATE_PARTS_MAX} parts of a state at once")

        def done(error: Exception | None) -> None:
            if error is None and stream is self._stream and self._state_position is position:
                self._taken_count += 1
                stream.send(StateTaken(stream.number, self._taken_count))
            self._finished(error)

        self._busy_count += 1
        try:
            self.log.stage(bytes(body), done)
        except (FlintError, ValueError) as error:
            done(error)

    def state_end(self, stream: FollowerStream) -> None:
        """Store the whole state.

        Raises:
            PeerError: none has begun.
        """
        if stream is not self._stream:
            return
        position = self._state_position
        if position is None:
            raise self._wrong("the end of a state that did not begin")
        self._state_position, self._needs_state = None, False
        self._apply(stream, position, [], is_whole=True)

    def _check_needs(self, needs: int) -> None:
        if needs > self.log.end:
            raise self._wrong(f"progress that needs the log up to {needs}, it ends at {self.log.end}")

    def _apply(self, stream: FollowerStream, position: tuple[int, int], parts: list[bytes], is_whole: bool) -> None:
        self._position = position

        def done(error: Exception | None) -> None:
            if error is None and stream is self._stream:
                stream.acknowledge_progress(position[1])
            self._finished(error)

        self._busy_count += 1
        try:
            self.log.apply(position, parts, is_whole, done)
        except (FlintError, ValueError) as error:
            done(error)


class _Retired(FlintError):
    """A copy is being removed."""
