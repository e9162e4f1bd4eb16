"""What a channel is made of and what it needs: the log it reads, a message with its own deadline, what it writes down.

Rules of this file: data and protocols alone.

Source: design/performance.md decision 3.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol

from flintmq.batch import Batch
from flintmq.broker.deferred import Aside
from flintmq.broker.subscription import Subscription
from flintmq.settings import Limits

DONE, SLOT_MAX, SHARED, GIVING_UP, DEFERRED, QUEUED = 0, 250, 251, 253, 254, 255  # what a byte of a window says
NOT_DONE = re.compile(rb"[^\x00]")


class Log(Protocol):
    """What a channel needs of a partition's log."""

    @property
    def start_sequence(self) -> int: ...

    @property
    def next_sequence(self) -> int: ...

    @property
    def committed_sequence(self) -> int: ...

    @property
    def end_offset_bytes(self) -> int: ...

    def read(self, sequence: int) -> Batch | None: ...


class Policy(Protocol):
    """What a channel needs of its limits; see :class:`flintmq.broker.policy.ChannelPolicy`."""

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

    def is_last_attempt(self, sequence: int) -> bool: ...

    def gives_up(self, sequence: int, subscription: Subscription) -> bool: ...

    def takes(self, sequence: int, batch: Batch) -> bool: ...

    def takes_aside(self, aside: Aside) -> bool: ...

    def gives_up_aside(self, aside: Aside) -> bool: ...

    def skips(self, batch: Batch) -> bool: ...

    def forget(self) -> None: ...


@dataclass(slots=True)
class Held:
    """A message in flight with a deadline of its own.

    Attributes:
        number: of the delivery, counted by the consumer.
    """

    deadline_ns: int
    delivered_ns: int
    number: int


@dataclass(slots=True)
class ChannelState:
    """What of a channel survives a restart.

    Attributes:
        floor: every sequence below is finished or aside.
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
