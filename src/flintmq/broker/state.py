"""What a channel is made of and what it needs: the log it reads, a message with its own deadline, what it writes down.

Rules of this file: data and protocols alone.

Source: design/performance.md decision 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from flintmq.batch import Batch


class Log(Protocol):
    """What a channel needs of a partition's log."""

    @property
    def start_sequence(self) -> int: ...

    @property
    def next_sequence(self) -> int: ...

    @property
    def committed_sequence(self) -> int: ...

    def read(self, sequence: int) -> Batch | None: ...


@dataclass(slots=True)
class Held:
    """A message in flight with a deadline of its own."""

    deadline_ns: int
    delivered_ns: int


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
