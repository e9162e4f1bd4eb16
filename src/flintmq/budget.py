"""The memory that clients can make a daemon use, as one bound in fixed shares, and who holds it.

::

    budget  6/16 unwritten output | 2/16 ephemeral topics | 2/16 publishes of a turn | 3/16 caches | 3/16 deferred

Output that a peer does not read is what one client can make grow at the expense of others, so it has rules of its own:

- up to half of its share everybody gets as much as the bounds of a connection allow;
- beyond that, only who shows that it reads gets one delivery more, once it has read everything: who has finished or
  given back a message before up to the whole share, who is new up to 5/6 of it. Who is new is asked, by a heartbeat,
  and answers with NOP if it reads; an answer is worth one delivery. So who never reads cannot use up what is left for
  those that do, however many they are, and those that answer and then do not read cannot use up all of it;
- at the whole share deliveries wait; their messages stay in the log.

While somebody waits who shows that it reads, connections that do not are closed in the end, those that hold most first.

Rules of this file: it counts and decides nothing about time; a counted byte is taken back by who counted it.
"""

from __future__ import annotations

from typing import Any, Protocol

NO_LIMIT_BYTES = 1 << 62
COUNTED_BYTES = 512  # written at once; less is counted with the next that is more, or when the peer does not read


class Holder(Protocol):
    """A connection whose output is not all written.

    Attributes:
        peer: who is at the other end, for the log.
        meter: counts its output.
    """

    peer: str
    meter: OutputMeter

    def look_at_output(self, now_s: float) -> None:
        """Count again what is not written, because nobody is told when a peer reads a little; take more if possible."""

    def abort(self) -> None:
        """Close at once."""


class Reader(Protocol):
    """A consumer as far as its output is concerned.

    Attributes:
        has_answered: whether it has shown that it reads now, and has been given nothing since.
    """

    has_answered: bool

    @property
    def has_finished(self) -> bool:
        """Whether it has answered a message, so that it reads."""


class Budget:
    """The bound of one daemon and what is used of it; in bytes.

    Args:
        limit_bytes: all together.

    Attributes:
        output_max_bytes, ephemeral_max_bytes, publishing_max_bytes, caches_max_bytes, deferred_max_bytes: the shares.
        output_short_bytes: of unwritten output, beyond which it is given out one delivery at a time.
        newcomers_max_bytes: of unwritten output, up to which it is given to those that have only answered a heartbeat.
        output_bytes: unwritten output of all connections: put into an output, or in a transport.
        ephemeral_bytes: logs of ephemeral topics.
        holders: connections with counted output.
        held_back: connections that could take more, and have to wait because they have not shown that they read.
        to_ask: those of them that have not been asked yet whether they do.
        newcomers: connections that have answered, and wait until there is room for them.
        waiting: channels that would deliver if there were memory.
        closed_count: connections closed because they did not read while memory was short.
    """

    __slots__ = ("caches_max_bytes", "closed_count", "deferred_max_bytes", "ephemeral_bytes", "ephemeral_max_bytes",
                 "held_back", "holders", "limit_bytes", "newcomers", "newcomers_max_bytes", "output_bytes",
                 "output_max_bytes", "output_short_bytes", "publishing_max_bytes", "to_ask", "waiting")  # fmt: skip

    def __init__(self, limit_bytes: int = NO_LIMIT_BYTES) -> None:
        part = limit_bytes // 16
        self.limit_bytes = limit_bytes
        self.output_max_bytes = 6 * part
        self.output_short_bytes = 3 * part
        self.newcomers_max_bytes = 5 * part
        self.ephemeral_max_bytes = 2 * part
        self.publishing_max_bytes = 2 * part
        self.caches_max_bytes = 3 * part
        self.deferred_max_bytes = 3 * part
        self.output_bytes = 0
        self.ephemeral_bytes = 0
        self.closed_count = 0
        self.holders: dict[Holder, None] = {}
        self.held_back: dict[Any, None] = {}
        self.to_ask: dict[Any, None] = {}
        self.newcomers: dict[Any, None] = {}
        self.waiting: dict[object, None] = {}

    @property
    def is_short(self) -> bool:
        """Whether only who has shown that it reads may have more."""
        return self.output_bytes > self.output_short_bytes

    @property
    def is_full(self) -> bool:
        """Whether nobody may have more."""
        return self.output_bytes >= self.output_max_bytes

    def gives(self, reader: Reader, owner: object) -> bool:
        """While memory is short: whether a consumer that has read everything may have one delivery more.

        When not, its connection is noted: to be asked whether it reads, or to go on when there is room.

        Args:
            owner: its connection.
        """
        if reader.has_finished:
            return True
        if reader.has_answered:
            if self.output_bytes < self.newcomers_max_bytes:
                return True
            self.newcomers[owner] = None
        elif owner not in self.held_back:
            self.held_back[owner] = self.to_ask[owner] = None
        return False

    def forget(self, owner: object) -> None:
        """A connection waits no more: it is gone, or is to be looked at again."""
        self.held_back.pop(owner, None)
        self.to_ask.pop(owner, None)
        self.newcomers.pop(owner, None)

    def ephemeral_room(self, used_bytes: int) -> int:
        """How much a log of an ephemeral topic may grow now.

        No log gets more than what is left for others, so that one topic alone holds half of the share at most.

        Args:
            used_bytes: what it holds.
        """
        return max(0, (self.ephemeral_max_bytes - self.ephemeral_bytes - used_bytes) // 2)


class OutputMeter:
    """Counts the unwritten output of one connection in a budget.

    Attributes:
        held_bytes: counted for it now.
    """

    __slots__ = ("_budget", "_mark_bytes", "_marked_s", "_owner", "_written_bytes", "held_bytes")

    def __init__(self, budget: Budget, owner: Holder) -> None:
        self.held_bytes = 0
        self._budget = budget
        self._owner = owner
        self._written_bytes = 0
        self._mark_bytes = 0
        self._marked_s: float | None = None

    def wrote(self, size_bytes: int, held_bytes: int) -> None:
        """Count what has been given to the transport.

        Args:
            held_bytes: what the transport holds now.
        """
        self._written_bytes += size_bytes
        if held_bytes or self.held_bytes:
            self._hold(held_bytes)

    def look(self, held_bytes: int, now_s: float) -> None:
        """Count again, and note when what was there at the last mark has been read."""
        self._hold(held_bytes)
        if self._marked_s is None or self._written_bytes - held_bytes >= self._mark_bytes:
            self._mark_bytes, self._marked_s = self._written_bytes, now_s

    def unmark(self) -> None:
        """Begin to watch whether the peer reads."""
        self._marked_s = None

    def unread_for_s(self, now_s: float) -> float:
        """For how long the peer has not read what was there then; 0 when it holds nothing."""
        return now_s - self._marked_s if self.held_bytes and self._marked_s is not None else 0.0

    def close(self) -> None:
        """The connection is gone, and its output with it."""
        self._hold(0)

    def _hold(self, held_bytes: int) -> None:
        self._budget.output_bytes += held_bytes - self.held_bytes
        if held_bytes and not self.held_bytes:
            self._budget.holders[self._owner] = None
            self._marked_s = None
        elif self.held_bytes and not held_bytes:
            self._budget.holders.pop(self._owner, None)
        self.held_bytes = held_bytes
