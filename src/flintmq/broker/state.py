"""The parts of a channel: the log it reads, a message by itself, its limits, what it writes down.

Rules of this file: data and protocols alone.

Source: docs/decisions/0001.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flintmq.batch import Batch
from flintmq.broker.subscription import Subscription
from flintmq.settings import Limits
from flintmq.storage.packs import Piece

DONE, SLOT_MAX, SHARED, GIVING_UP, DEFERRED, QUEUED = 0, 250, 251, 253, 254, 255  # what a byte of a window says


class Log(Protocol):
    """The part of a partition's log that a channel needs."""

    @property
    def start_sequence(self) -> int: ...

    @property
    def next_sequence(self) -> int: ...

    @property
    def committed_sequence(self) -> int: ...

    @property
    def end_offset_bytes(self) -> int: ...

    def read(self, sequence: int) -> Batch | None: ...


class Message:
    """One message of a channel by itself, wherever it is: between floor and cursor, or spilled.

    Messages that go the plain way, delivered in a run and finished with it, never become one.

    Attributes:
        attempts: deliveries so far, the present one included.
        frame: as it is stored, when it was spilled; None while it is in the window: the log has it.
        owner: the consumer that holds it; None when nobody does.
        deadline_ns: monotonic time when it times out; 0 while the run says that it was delivered with.
        delivered_ns: monotonic time of the present delivery; 0 likewise.
        number: of the delivery, counted by the consumer.
        pack: of spilled ones, where it is written.
    """

    __slots__ = ("attempts", "deadline_ns", "delivered_ns", "frame", "number", "owner", "pack", "sequence")

    pack: Pack

    def __init__(self, sequence: int, attempts: int, frame: bytes | None = None) -> None:
        self.sequence = sequence
        self.attempts = attempts
        self.frame = frame
        self.owner: Subscription | None = None
        self.deadline_ns = 0
        self.delivered_ns = 0
        self.number = 0

    @property
    def is_spilled(self) -> bool:
        """Whether it is outside of the window."""
        return self.frame is not None


class Pack:
    """A pack of spilled messages some of which are in memory, see :mod:`flintmq.broker.spilled`.

    Attributes:
        number: in the database; 0 until it is handed over to be written.
        left: messages that are not finished and have not left it.
        done: which have been or did since the last flush.
        pieces: what is to be written.
        size: of that in bytes.
    """

    __slots__ = ("done", "left", "number", "pieces", "size")

    def __init__(self, number: int = 0, left: int = 0) -> None:
        self.number = number
        self.left = left
        self.done: list[int] = []
        self.pieces: list[Piece] = []
        self.size = 0


class Limiter(Protocol):
    """The part of its limits that a channel needs; see :class:`flintmq.broker.limiter.ChannelLimiter`."""

    limits: Limits
    wall_ns: int
    expired_count: int
    dropped_count: int
    dead_letter_count: int

    @property
    def is_dropping(self) -> bool: ...

    @property
    def retry_ns(self) -> int | None: ...

    @property
    def giving_up_count(self) -> int: ...

    def change(self, limits: Limits) -> None: ...

    def after_pump(self, now_ns: int, wall_ns: int) -> None: ...

    def sweep(self, wall_ns: int) -> bool: ...

    def unfinished_bytes(self) -> int: ...

    def is_last_attempt(self, message: Message) -> bool: ...

    def gives_up(self, message: Message) -> bool: ...

    def withholds(self, message: Message, batch: Batch | None) -> bool: ...

    def skips(self, batch: Batch) -> bool: ...

    def forget(self) -> None: ...


@dataclass(slots=True)
class ChannelState:
    """The state of a channel that survives a restart.

    Attributes:
        floor: every sequence below is finished or spilled.
        window: one byte per message from floor on, 1 for done.
        deferred: (sequence, due wall ns) of deferred messages in the window.
        attempts: (sequence, deliveries so far) where that is not 1.
        holes: (first, end) ranges that this channel never gets.
    """

    floor: int
    window: bytes = b""
    deferred: list[tuple[int, int]] = ()  # type: ignore[assignment]
    attempts: list[tuple[int, int]] = ()  # type: ignore[assignment]
    holes: list[tuple[int, int]] = ()  # type: ignore[assignment]
