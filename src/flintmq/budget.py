"""The memory that clients can make a daemon use, as one bound in fixed shares, and who holds it.

::

    budget  6/16 unwritten output | 2/16 ephemeral topics | 2/16 publishes of a turn | 2/16 bodies not complete
            2/16 caches | 2/16 deferred

Output that a peer does not read is what one client can make grow at the expense of others, so it has rules of its own:

- up to half of its share everybody gets as much as the bounds of a connection allow;
- beyond that, only who shows that it reads gets one delivery more, once it has read everything: who has finished or
  given back a message before up to the whole share, who is new up to 5/6 of it. Who is new is asked, by a heartbeat,
  and answers with NOP if it reads; an answer is worth one delivery. So who never reads cannot use up what is left for
  those that do, however many they are, and those that answer and then do not read cannot use up all of it;
- at the whole share deliveries wait; their messages stay in the log.

Who reads a log by offset is answered by the same rules: beyond half of the share a request that goes on where the last
answer said shows that this one was read, and others wait until their connection has answered the heartbeat.

While somebody waits who shows that it reads, connections that do not are closed in the end, those that hold most first.

What clients have sent of bodies that are not complete is the other thing that each can make grow:

- up to its share everybody is read, those that have published nothing on their connection up to half of it;
- beyond that, who has sent a part of a body is read no more, and goes on in the order of coming as others end; one of
  each kind always goes on, so that a body larger than the share comes through. A part is what a read of a socket gives;
- where all these parts are more than this share and that of publishes together, connections are refused with an error,
  those with the largest part first, and a part of who has published before counts a quarter. So who sends whole
  messages, or nearly, goes on whatever there is.

While somebody is not read for it, those are refused in the end that could go on and do not; and when whoever is first
in line has not come to its turn for as long, too little moves, and those with the largest parts are refused.

Rules of this file: it counts and decides nothing about time; a counted byte is taken back by who counted it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

NO_LIMIT_BYTES = 1 << 62
COUNTED_BYTES = 512  # written at once; less is counted with the next that is more, or when the peer does not read
READ_BYTES = 256 * 1024  # that a read of a socket gives at most


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


class Sender(Protocol):
    """A connection that has sent a part of a body.

    Attributes:
        peer: who is at the other end, for the log.
        input_meter: counts the part.
    """

    peer: str
    input_meter: InputMeter

    @property
    def has_published(self) -> bool:
        """Whether a body has come through on it before."""

    @property
    def is_awaited(self) -> bool:
        """Whether nothing but bytes of the peer is missing for it to go on."""

    def pause_input(self) -> None:
        """Read no more."""

    def resume_input(self) -> None:
        """Read again."""

    def refuse_input(self, reason: str) -> None:
        """Answer with an error that says ``reason``, forget the part, and close."""


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
        newcomers: connections that have shown that they read, and wait until there is room for them.
        waiting: channels that would deliver if there were memory.
        receiving_bytes: of bodies that are not complete, of all connections.
        receiving_short_bytes: half of their share; beyond it those that have sent a part are not read unless they have
            published before.
        receiving_max_bytes: all of it; beyond it they are not either.
        receiving_full_bytes: beyond it connections are refused.
        senders: connections with counted parts.
        paused: those of them that are not read, in the order of their coming, by whether they have published before.
        favoured: one of each of these two that goes on although the share is used up.
        refused_count: connections refused because of what they had sent of a body.
        on_receiving: told that something came while those that have sent a part are not read.
        closed_count: connections closed because they did not read while memory was short.
    """

    __slots__ = ("caches_max_bytes", "closed_count", "deferred_max_bytes", "ephemeral_bytes", "ephemeral_max_bytes",
                 "favoured", "held_back", "holders", "limit_bytes", "newcomers", "newcomers_max_bytes", "on_receiving",
                 "output_bytes", "output_max_bytes", "output_short_bytes", "paused", "publishing_max_bytes",
                 "receiving_bytes", "receiving_full_bytes", "receiving_max_bytes", "receiving_short_bytes",
                 "refused_count", "senders", "to_ask", "waiting")  # fmt: skip

    def __init__(self, limit_bytes: int = NO_LIMIT_BYTES) -> None:
        part = limit_bytes // 16
        self.limit_bytes = limit_bytes
        self.output_max_bytes = 6 * part
        self.output_short_bytes = 3 * part
        self.newcomers_max_bytes = 5 * part
        self.ephemeral_max_bytes = 2 * part
        self.publishing_max_bytes = 2 * part
        self.receiving_max_bytes = 2 * part
        self.receiving_short_bytes = part
        self.receiving_full_bytes = self.receiving_max_bytes + self.publishing_max_bytes
        self.caches_max_bytes = 2 * part
        self.deferred_max_bytes = 2 * part
        self.output_bytes = 0
        self.receiving_bytes = 0
        self.refused_count = 0
        self.senders: dict[Sender, None] = {}
        self.paused: dict[bool, dict[Sender, None]] = {True: {}, False: {}}
        self.favoured: dict[bool, Sender | None] = {True: None, False: None}
        self.on_receiving: Callable[[], None] = lambda: None
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
        """Whether a consumer that has read everything may have one delivery more while memory is short.

        When not, its connection is noted: to be asked whether it reads, or to go on when there is room.

        Args:
            owner: its connection.
        """
        return reader.has_finished or self._gives_new(owner, reader.has_answered)

    def may_answer(self, owner: object, has_read: bool, has_answered: bool) -> bool:
        """Whether a connection may be given a large answer now; when not, it is noted as by :meth:`gives`.

        Args:
            has_read: whether its request shows that it has read the answer before.
            has_answered: whether it has shown that it reads since it was given that.
        """
        if not self.is_short:
            return True
        if not has_read:
            return self._gives_new(owner, has_answered)
        if self.is_full:
            self.newcomers[owner] = None
        return not self.is_full

    def _gives_new(self, owner: object, has_answered: bool) -> bool:
        if has_answered:
            if self.output_bytes < self.newcomers_max_bytes:
                return True
            self.newcomers[owner] = None
        elif owner not in self.held_back:
            self.held_back[owner] = self.to_ask[owner] = None
        return False

    @property
    def has_waiting(self) -> bool:
        """Whether a connection waits for what others use now."""
        return bool(self.held_back or self.newcomers)

    def forget(self, owner: object) -> None:
        """Forget that a connection waits: it is gone, or is to be looked at again."""
        self.held_back.pop(owner, None)
        self.to_ask.pop(owner, None)
        self.newcomers.pop(owner, None)

    def has_paused_for(self, seconds: float, now_s: float) -> bool:
        """Whether somebody who is first in line has not been read for so long."""
        first = [next(iter(line)) for line in self.paused.values() if line]
        return any(each.input_meter.paused_for_s(now_s) >= seconds for each in first)

    @property
    def has_paused(self) -> bool:
        """Whether there are connections that are not read."""
        return bool(self.paused[True] or self.paused[False])

    def resume_senders(self) -> None:
        """Read on those for which there is room, and one in any case."""
        for has_published, line in self.paused.items():
            limit_bytes = self.receiving_max_bytes if has_published else self.receiving_short_bytes
            count = (limit_bytes - self.receiving_bytes + READ_BYTES - 1) // READ_BYTES  # each may send so much at once
            while line and count > 0:
                self._resume(next(iter(line)))
                count -= 1
            if line and self.favoured[has_published] is None:
                sender = self.favoured[has_published] = next(iter(line))
                sender.input_meter.favoured_as = has_published
                self._resume(sender)

    def _resume(self, sender: Sender) -> None:
        sender.input_meter.go_on()
        sender.resume_input()

    def excess_senders(self) -> list[Sender]:
        """Return the senders that are to be refused because all parts together are too much."""
        if self.receiving_bytes <= self.receiving_full_bytes:
            return []
        found = []
        left_bytes = self.receiving_bytes
        senders = [each for each in self.senders if each.input_meter.favoured_as is None]
        senders.sort(key=lambda each: each.input_meter.held_bytes * (1 if each.has_published else 4), reverse=True)
        for sender in senders:
            if left_bytes <= self.receiving_full_bytes * 7 // 8:  # less, so that it need not be done for each
                break
            left_bytes -= sender.input_meter.held_bytes
            found.append(sender)
        return found

    def ephemeral_room(self, used_bytes: int) -> int:
        """Return by how many bytes a log of an ephemeral topic may grow now.

        No log gets more than what is left for others, so that one topic alone holds half of the share at most.

        Args:
            used_bytes: what it holds.
        """
        return max(0, (self.ephemeral_max_bytes - self.ephemeral_bytes - used_bytes) // 2)


class InputMeter:
    """Counts in a budget what one connection has sent of a body that is not complete.

    Attributes:
        held_bytes: counted for it now.
        is_paused: whether it is not read because of that.
        favoured_as: where it is the one that goes on in any case; None when it is not.
    """

    __slots__ = ("_budget", "_has_moved", "_moved_s", "_owner", "_paused_s", "_since_s", "favoured_as", "held_bytes",
                 "is_paused")  # fmt: skip

    def __init__(self, budget: Budget, owner: Sender) -> None:
        self.held_bytes = 0
        self.is_paused = False
        self.favoured_as: bool | None = None
        self._budget = budget
        self._owner = owner
        self._has_moved = False
        self._moved_s: float | None = None
        self._since_s: float | None = None
        self._paused_s: float | None = None

    def hold(self, held_bytes: int) -> None:
        """Count what there is behind a read; the connection may be paused, and others refused."""
        budget, owner, before_bytes = self._budget, self._owner, self.held_bytes
        if held_bytes < COUNTED_BYTES:
            held_bytes = 0
        budget.receiving_bytes += held_bytes - before_bytes
        self.held_bytes = held_bytes
        self._has_moved = True
        if not held_bytes:
            budget.senders.pop(owner, None)
        elif not before_bytes:
            budget.senders[owner] = None
        if held_bytes < before_bytes:  # a body is complete
            self._since_s = None
            self._end_favour()
            if budget.has_paused:
                budget.resume_senders()
        if not held_bytes or budget.receiving_bytes <= budget.receiving_short_bytes or self.favoured_as is not None:
            return
        has_published = owner.has_published
        if has_published and budget.receiving_bytes <= budget.receiving_max_bytes:
            return
        if not self.is_paused:
            self.is_paused = True
            budget.paused[has_published][owner] = None
            owner.pause_input()
        budget.on_receiving()

    def go_on(self) -> None:
        """Note that it is read again."""
        self.is_paused = False
        self._paused_s = None
        self._has_moved = True
        for line in self._budget.paused.values():
            line.pop(self._owner, None)

    def look(self, now_s: float) -> None:
        """Note whether anything has come since the last look."""
        if self._has_moved or self._moved_s is None:
            self._has_moved = False
            self._moved_s = now_s
        if self._since_s is None:
            self._since_s = now_s
        if self._paused_s is None and self.is_paused:
            self._paused_s = now_s

    def stalled_for_s(self, now_s: float) -> float:
        """For how long nothing has come although it is read; 0 while it is not."""
        return 0.0 if self.is_paused or self._moved_s is None else now_s - self._moved_s

    def paused_for_s(self, now_s: float) -> float:
        """For how long it has not been read, of the looks that there were."""
        return 0.0 if self._paused_s is None else now_s - self._paused_s

    def open_for_s(self, now_s: float) -> float:
        """For how long, of the looks that there were, one body has not become complete."""
        return 0.0 if self._since_s is None else now_s - self._since_s

    def unmark(self) -> None:
        """Begin to watch whether anything comes."""
        self._moved_s = self._since_s = self._paused_s = None

    def close(self) -> None:
        """Give its part back: the connection is gone, or has forgotten what it was sent."""
        self.go_on()
        self._end_favour()
        self.hold(0)

    def _end_favour(self) -> None:
        if self.favoured_as is not None:
            self._budget.favoured[self.favoured_as] = None
            self.favoured_as = None


class OutputMeter:
    """Counts the unwritten output of one connection in a budget.

    A piece of output that is written in part is in memory as a whole, so it counts as a whole: a client that reads all
    but the end of each large message takes no less memory than one that reads nothing.

    Attributes:
        held_bytes: counted for it now.
    """

    __slots__ = (
        "_budget",
        "_given_bytes",
        "_largest_bytes",
        "_mark_bytes",
        "_marked_s",
        "_owner",
        "_written_bytes",
        "held_bytes",
    )

    def __init__(self, budget: Budget, owner: Holder) -> None:
        self.held_bytes = 0
        self._budget = budget
        self._owner = owner
        self._given_bytes = 0  # since nothing was held
        self._largest_bytes = 0  # piece of these
        self._written_bytes = 0
        self._mark_bytes = 0
        self._marked_s: float | None = None

    def wrote(self, size_bytes: int, held_bytes: int) -> None:
        """Count what has been given to the transport.

        Args:
            held_bytes: what the transport has not written now.
        """
        self._written_bytes += size_bytes
        if held_bytes or self.held_bytes:
            self._given_bytes += size_bytes
            self._largest_bytes = max(self._largest_bytes, size_bytes)
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
        """Give its part back: the connection is gone, and its output with it."""
        self._hold(0)

    def _hold(self, held_bytes: int) -> None:
        if held_bytes:
            partial_bytes_max = max(0, self._largest_bytes - 1)
            held_bytes = max(held_bytes, min(self._given_bytes, held_bytes + partial_bytes_max))
        else:
            self._given_bytes = self._largest_bytes = 0
        self._budget.output_bytes += held_bytes - self.held_bytes
        if held_bytes and not self.held_bytes:
            self._budget.holders[self._owner] = None
            self._marked_s = None
        elif self.held_bytes and not held_bytes:
            self._budget.holders.pop(self._owner, None)
        self.held_bytes = held_bytes
