"""Messages a channel has taken out of its window: long delays, overflow, and what never gets finished.

Their frames live in the database of the data directory, keyed by due time; in memory are only those that are due or in
flight, at most :data:`LOADED_MAX` ready ones. Rows leave the database when the message is finished, so a crash at any
point delivers it again rather than losing it.

Rules of this file: no IO. :meth:`AsideStore.take_changes` hands over what the database must do;
:meth:`AsideStore.restore_changes` takes it back when that failed.

Source: design/performance.md decision 8, design/reliability.md R4.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from flintmq.broker.subscription import Subscription

LOADED_MAX = 2000


class Aside:
    """One message outside the window that is in memory: due, or in flight."""

    __slots__ = ("attempts", "deadline_ns", "delivered_ns", "frame", "owner", "sequence")

    def __init__(self, sequence: int, attempts: int, frame: bytes) -> None:
        self.sequence = sequence
        self.attempts = attempts
        self.frame = frame
        self.owner: Subscription | None = None
        self.deadline_ns = 0
        self.delivered_ns = 0


@dataclass(slots=True)
class Changes:
    """What the database must do for one channel, in this order: clear, put, move, remove.

    Attributes:
        cleared_from: everything set aside before is to be forgotten from this sequence on; None: nothing.
        put: sequence -> (due_ns, attempts, frame).
        moved: sequence -> (due_ns, attempts), for rows that exist.
        removed: sequences whose rows go.
    """

    put: dict[int, tuple[int, int, bytes]] = field(default_factory=dict)
    moved: dict[int, tuple[int, int]] = field(default_factory=dict)
    removed: dict[int, None] = field(default_factory=dict)
    cleared_from: int | None = None

    def __bool__(self) -> bool:
        return bool(self.put or self.moved or self.removed or self.cleared_from is not None)

    def forget_from(self, first: int) -> None:
        """Drop what was to be done about messages from a sequence on, because they are to be forgotten."""
        for mapping in (self.put, self.moved, self.removed):
            for sequence in [each for each in mapping if each >= first]:
                del mapping[sequence]
        self.cleared_from = first if self.cleared_from is None else min(first, self.cleared_from)


class AsideStore:
    """The messages of one channel that are outside its window.

    Attributes:
        loaded: those in memory, by sequence.
        ready: sequences due and waiting for a consumer, in due order.
        count: how many there are in all, in memory or not.
        generation: goes up when everything is forgotten, so that rows read before are told from rows read after.
        next_due_ns: earliest wall time at which the database holds one that is not loaded; None when it holds none.
    """

    __slots__ = ("_changes", "_loaded_through", "count", "generation", "loaded", "next_due_ns", "ready")

    def __init__(self, count: int = 0, next_due_ns: int | None = None) -> None:
        self.loaded: dict[int, Aside] = {}
        self.ready: deque[int] = deque()
        self.count = count
        self.next_due_ns = next_due_ns
        self.generation = 0
        self._loaded_through = (-1, -1)
        self._changes = Changes()

    @property
    def has_changes(self) -> bool:
        return bool(self._changes)

    @property
    def pending_rows(self) -> int:
        """Rows waiting in memory to be written."""
        return len(self._changes.put)

    def put(self, sequence: int, due_ns: int, attempts: int, frame: bytes) -> None:
        """Take a message over from the window."""
        self.count += 1
        self._changes.removed.pop(sequence, None)
        self._changes.put[sequence] = (due_ns, attempts, frame)
        self._expect(due_ns)

    def put_loaded(self, aside: Aside) -> None:
        """Take over a message that a consumer holds or that is ready; it is due at once should the process die."""
        self.count += 1
        self.loaded[aside.sequence] = aside
        self._changes.put[aside.sequence] = (0, aside.attempts, aside.frame)

    def defer(self, aside: Aside, due_ns: int) -> None:
        """Give a loaded message a new due time and forget its frame."""
        self.loaded.pop(aside.sequence, None)
        self._move(aside, due_ns)
        self._expect(due_ns)

    def _move(self, aside: Aside, due_ns: int) -> None:
        pending = self._changes.put.get(aside.sequence)
        if pending is not None:
            self._changes.put[aside.sequence] = (due_ns, aside.attempts, pending[2])
        else:
            self._changes.moved[aside.sequence] = (due_ns, aside.attempts)

    def finish(self, sequence: int) -> None:
        """Forget a loaded message for good."""
        self.loaded.pop(sequence, None)
        self.count -= 1
        self._changes.moved.pop(sequence, None)
        self._changes.put.pop(sequence, None)
        self._changes.removed[sequence] = None

    def make_ready(self, aside: Aside) -> None:
        """Put a loaded message in line for delivery; its attempts count after a restart too."""
        aside.owner = None
        self.ready.append(aside.sequence)
        self._move(aside, 0)

    def wants_due(self, wall_ns: int) -> bool:
        """Whether rows are due that are not loaded, and there is room for them."""
        return self.next_due_ns is not None and self.next_due_ns <= wall_ns and len(self.ready) < LOADED_MAX // 2

    @property
    def loaded_through(self) -> tuple[int, int]:
        """``(due_ns, sequence)`` up to which rows have been loaded already."""
        return self._loaded_through

    def accept_due(self, rows: Sequence[tuple[int, int, int, bytes]], next_due_ns: int | None, generation: int) -> None:
        """Take rows ``(sequence, due_ns, attempts, frame)`` that came due, in due order.

        Args:
            next_due_ns: due time of the first row after them.
            generation: what :attr:`generation` was when the rows were asked for.
        """
        if generation != self.generation:
            return
        changes = self._changes
        for sequence, due_ns, attempts, frame in rows:
            self._loaded_through = max(self._loaded_through, (due_ns, sequence))
            if (
                sequence in self.loaded
                or sequence in changes.removed
                or sequence in changes.moved
                or sequence in changes.put
            ):
                continue  # in memory already, or the row is older than what happened since it was read
            self.loaded[sequence] = Aside(sequence, attempts, frame)
            self.ready.append(sequence)
        self.next_due_ns = next_due_ns
        for changed in (changes.put, changes.moved):
            for sequence, row in changed.items():
                if sequence not in self.loaded:
                    self._expect(row[0])

    def _expect(self, due_ns: int) -> None:
        if self.next_due_ns is None or due_ns < self.next_due_ns:
            self.next_due_ns = due_ns
        if due_ns <= self._loaded_through[0]:
            self._loaded_through = (due_ns - 1, -1)

    def take_changes(self) -> Changes:
        """Hand over the changes since the last call."""
        changes, self._changes = self._changes, Changes()
        return changes

    def restore_changes(self, failed: Changes) -> None:
        """Take back changes that could not be written; newer ones win."""
        newer = self._changes
        if newer.cleared_from is not None:
            failed.forget_from(newer.cleared_from)
        newer.cleared_from = failed.cleared_from
        for sequence, put in failed.put.items():
            if sequence in newer.removed or sequence in newer.put:
                continue
            moved = newer.moved.pop(sequence, None)
            newer.put[sequence] = put if moved is None else (moved[0], moved[1], put[2])
        for sequence, moved in failed.moved.items():
            if sequence not in newer.removed and sequence not in newer.put:
                newer.moved.setdefault(sequence, moved)
        for sequence in failed.removed:
            if sequence not in newer.put:
                newer.removed[sequence] = None

    def knows(self, sequence: int) -> bool | None:
        """Whether a message that is not loaded is set aside; None when only the database can tell."""
        changes = self._changes
        if sequence in changes.put or sequence in changes.moved:
            return True
        cleared_from = changes.cleared_from
        if sequence in changes.removed or (cleared_from is not None and sequence >= cleared_from):
            return False
        return None if self.count else False

    def clear(self) -> None:
        """Forget everything."""
        self.clear_from(0)
        self.count = 0
        self.next_due_ns = None

    def clear_from(self, first: int) -> None:
        """Forget everything from a sequence on; :attr:`count` is right again after the next flush."""
        for sequence in [each for each in self.loaded if each >= first]:
            del self.loaded[sequence]
        self.ready = deque(each for each in self.ready if each < first)
        self._changes.forget_from(first)
        self._loaded_through = (-1, -1)
        self.generation += 1
        self.next_due_ns = 0  # which is earliest of what is left, the database knows
