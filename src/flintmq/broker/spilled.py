"""Messages a channel has taken out of its window: long delays, overflow, and what never gets finished.

Where each of them is::

    put --> far --flush--> a pack in the database --due--> soon --> ready --delivered--> in flight --FIN--> gone
             ^             (storage/packs.py)                |        ^                    |   |
             |                                               |        +--- REQ 0, timeout -+   |
             +--- not due for long, read with others --------+                                 |
             +--------------------------------------------------------------------- REQ delay -+

In memory are those that wait to be written, about :data:`FAR_BYTES_MAX` and what consumers give back; those that are
due within seconds, about :data:`LOADED_BYTES_MAX`; and those in flight, which RDY bounds. A message leaves its pack for
good when it is finished, or when it gets another due time or delivery count: it then enters a new pack in the same
transaction. So packs never change, and a crash at any point delivers a message again rather than losing it.

Rules of this file: no IO. :meth:`SpilledStore.take_changes` hands over what the database must do;
:meth:`SpilledStore.restore_changes` takes it back when that failed. No object per message before it is due.

Source: docs/decisions/0003.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise

from flintmq.batch import Batch
from flintmq.broker.state import Message, Pack
from flintmq.broker.subscription import Subscription
from flintmq.storage.packs import PACK_BYTES, SMALL_BYTES, DuePacks, NewPack, Piece, StoredPack, group

LOADED_BYTES_MAX = 8 * 1024 * 1024  # of frames that are due or nearly, of one channel
FAR_BYTES_MAX = 4 * 1024 * 1024  # of frames that wait to be written, before the channel's cursor stops at deferred ones
FAR_BYTES_LIMIT = 4 * FAR_BYTES_MAX  # before nothing more is delivered, because consumers could give it back
LOADED_TOTAL_BYTES = 64 * 1024 * 1024  # the same bounds for all channels together; each has a pack at least
FAR_TOTAL_BYTES = 32 * 1024 * 1024
LOOKAHEAD_NS = 2_000_000_000  # packs are read so long before they begin to come due
_PRESSING_NS = 200_000_000  # what is due so soon does not wait for the next flush that comes by itself
_KEPT_NS = 10_000_000_000  # what is read and due within this time stays in memory; the rest is written again
_SMALL_COUNT = 8  # small packs that are read together become one


@dataclass(slots=True)
class Changes:
    """The work of the database for one channel: note what is done, clear, put, remove.

    Attributes:
        cleared_from: everything spilled before is to be forgotten from this sequence on; None: nothing.
        packs: to be written.
        done: number of a pack -> sequences that are finished or have left it.
        gone: packs that are to be removed.
    """

    packs: list[NewPack] = field(default_factory=list)
    done: dict[int, list[int]] = field(default_factory=dict)
    gone: dict[int, None] = field(default_factory=dict)
    cleared_from: int | None = None

    def __bool__(self) -> bool:
        return bool(self.packs or self.done or self.gone or self.cleared_from is not None)


class Shares:
    """The memory that each of many channels may use for spilled messages.

    Args:
        total_bytes: most of all channels together.

    Attributes:
        loaded_bytes, far_bytes: at most :data:`LOADED_BYTES_MAX` and :data:`FAR_BYTES_MAX`, less when many need some.
    """

    __slots__ = ("_far_total_bytes", "_loaded_total_bytes", "far_bytes", "loaded_bytes")

    def __init__(self, total_bytes: int = LOADED_TOTAL_BYTES + FAR_TOTAL_BYTES) -> None:
        self._loaded_total_bytes = min(LOADED_TOTAL_BYTES, total_bytes * 2 // 3)
        self._far_total_bytes = min(FAR_TOTAL_BYTES, total_bytes // 3)
        self.loaded_bytes = LOADED_BYTES_MAX
        self.far_bytes = FAR_BYTES_MAX

    def divide(self, loaded_count: int, far_count: int) -> None:
        """Tell how many channels have some of each."""
        self.loaded_bytes = max(PACK_BYTES, min(LOADED_BYTES_MAX, self._loaded_total_bytes // max(1, loaded_count)))
        self.far_bytes = max(PACK_BYTES, min(FAR_BYTES_MAX, self._far_total_bytes // max(1, far_count)))


class SpilledStore:
    """The messages of one channel that are outside its window.

    Args:
        stored: how many the database has.
        numbers: of packs; those of one database are all different, and larger than any that it has.
        shares: of memory.

    Attributes:
        loaded: those that are due or in flight, by sequence.
        ready: sequences due and waiting for a consumer, in due order.
        count: how many there are in all, in memory or not.
        generation: goes up when something is forgotten, so that what was read before is told from what is read after.
        next_due_ns: when the database holds something that is to be read; None when it holds nothing else.
        far_bytes: of frames that wait to be written.
    """

    __slots__ = ("_changes", "_entry_count", "_far", "_fresh", "_loaded_bytes", "_now_ns", "_numbers", "_packs",
                 "_shares", "_soon", "_soon_bytes", "_taken", "_through", "_touched", "count", "far_bytes",
                 "generation", "loaded", "next_due_ns", "ready")  # fmt: skip

    def __init__(
        self,
        stored: int = 0,
        next_due_ns: int | None = None,
        numbers: Iterator[int] | None = None,
        shares: Shares | None = None,
    ) -> None:
        self.loaded: dict[int, Message] = {}
        self.ready: deque[int] = deque()
        self.count = stored
        self.next_due_ns = next_due_ns
        self.generation = 0
        self.far_bytes = 0
        self._numbers = numbers or count(1)
        self._shares = shares or Shares()
        self._loaded_bytes = 0
        self._soon: list[tuple[int, int, Piece]] = []
        self._soon_bytes = 0
        self._entry_count = 0
        self._far: list[Piece] = []
        self._fresh: list[Pack] = []  # in memory and to be written
        self._packs: dict[int, Pack] = {}  # in memory and written
        self._touched: dict[Pack, None] = {}  # of which messages have left
        self._through = (-1, -1)
        self._now_ns = 0
        self._changes = Changes()
        self._taken = Changes()  # which the database may be writing, behind the last that it was asked

    @property
    def memory_bytes(self) -> int:
        """Bytes of messages that it holds in memory."""
        return self.far_bytes + self._soon_bytes + self._loaded_bytes

    @property
    def has_changes(self) -> bool:
        """Whether :meth:`take_changes` has something."""
        return bool(self._far or self._fresh or self._touched or self._changes)

    @property
    def needs_flush(self) -> bool:
        """Whether a flush will have something to do for it, now or later."""
        return self.next_due_ns is not None or self.has_changes

    @property
    def is_crowded(self) -> bool:
        """Whether what waits to be written should be, soon."""
        return self.far_bytes >= self._shares.far_bytes // 2

    @property
    def is_full(self) -> bool:
        """Whether so much waits to be written that no more than necessary should be added."""
        return self.far_bytes >= self._shares.far_bytes

    @property
    def is_stuffed(self) -> bool:
        """Whether so much waits to be written that consumers must not get what they may give back with a delay."""
        return self.far_bytes >= FAR_BYTES_LIMIT

    # -- coming in -----------------------------------------------------------------------------------------------

    def put(self, sequence: int, due_ns: int, attempts: int, frame: bytes) -> None:
        """Take a message over from the window."""
        self.count += 1
        self._put(Piece(due_ns, sequence, 1, attempts, len(frame), frame))

    def put_batch(self, batch: Batch, first: int, end: int, due_ns: int) -> None:
        """Take messages of a delayed batch over that have not been delivered yet.

        Args:
            due_ns: of the batch, on the clock of due times.
        """
        positions = batch.positions()
        sizes: int | list[int] = positions[1] - positions[0]
        if not isinstance(positions, range):
            starts = positions[first - batch.first : end - batch.first + 1]
            sizes = [after - start for start, after in pairwise(starts)]
        self.count += end - first
        self._put(Piece(due_ns, first, end - first, 0, sizes, bytes(batch.frames(first, end))))

    def _put(self, piece: Piece) -> None:
        if piece.due_ns <= self._through[0]:
            self._add_fresh(piece)  # what the database has until then was read already
            self._wait(piece)
            return
        self._far.append(piece)
        self.far_bytes += piece.size
        self._expect(piece.due_ns)

    def put_loaded(self, message: Message) -> None:
        """Take over a message that a consumer holds; it is due at once should the process die."""
        self.count += 1
        self.loaded[message.sequence] = message
        self._loaded_bytes += len(_frame(message))
        self._enter_pack(message)

    def put_ready(self, sequence: int, attempts: int, frame: bytes) -> None:
        """Take over a message that waits for a consumer: into memory while there is room, or as the next to be read."""
        if self.room_bytes > 0:
            self.put_loaded(Message(sequence, attempts, frame))
            self.ready.append(sequence)
        else:
            self.put(sequence, self._through[0] + 1, attempts, frame)

    def _enter_pack(self, message: Message) -> None:
        frame = _frame(message)
        piece = Piece(0, message.sequence, 1, message.attempts, len(frame), frame)
        self._add_fresh(piece)
        message.pack = piece.pack

    def _add_fresh(self, piece: Piece) -> None:
        """Have messages written that stay in memory."""
        fresh = self._fresh
        if not fresh or fresh[-1].size >= PACK_BYTES or fresh[-1].done:
            fresh.append(Pack())  # what has left a pack must not enter it again
        pack = fresh[-1]
        pack.left += piece.count
        pack.size += piece.size
        pack.pieces.append(piece)
        piece.pack = pack

    def _wait(self, piece: Piece) -> None:
        self._soon_bytes += piece.size
        self._entry_count += 1
        heapq.heappush(self._soon, (piece.due_ns, self._entry_count, piece))

    def _expect(self, due_ns: int) -> None:
        if self.next_due_ns is None or due_ns < self.next_due_ns:
            self.next_due_ns = due_ns

    # -- coming due ----------------------------------------------------------------------------------------------

    def wants_due(self, wall_ns: int) -> bool:
        """Whether packs are nearly due that are not in memory, and there is room for them."""
        due_ns = self.next_due_ns
        if due_ns is None or due_ns > wall_ns + LOOKAHEAD_NS:
            return False
        return self.room_bytes > self._shares.loaded_bytes // 2

    def is_pressing(self, wall_ns: int) -> bool:
        """Whether they should be read at once."""
        return self.next_due_ns is not None and self.wants_due(wall_ns - LOOKAHEAD_NS + _PRESSING_NS)

    @property
    def room_bytes(self) -> int:
        """Bytes that may be read: what consumers hold does not count, they may have more when they are ready for it."""
        ready_bytes = self._loaded_bytes * len(self.ready) // len(self.loaded) if self.loaded else 0
        return self._shares.loaded_bytes - self._soon_bytes - ready_bytes

    @property
    def has_loaded(self) -> bool:
        """Whether some are in memory."""
        return bool(self.loaded or self._soon)

    @property
    def loaded_through(self) -> tuple[int, int]:
        """``(due_ns, number)`` up to which packs have been read already."""
        return self._through

    def accept_due(self, read: DuePacks, generation: int, wall_ns: int) -> None:
        """Take packs that come due.

        Args:
            generation: what :attr:`generation` was when they were asked for.
            wall_ns: when they were asked for.
        """
        if generation != self.generation:
            return
        self._now_ns = wall_ns
        packs = [each for each in read.packs if each.number not in self._packs]
        small_count = sum(each.size < SMALL_BYTES for each in packs)
        self._through = max(self._through, read.through)
        self.next_due_ns = read.next_due_ns
        for each in packs:
            if each.number not in self._changes.gone:
                self._load(each, small_count >= _SMALL_COUNT and each.size < SMALL_BYTES)
        far, self._far = self._far, []
        self._count_far()
        for piece in far:
            self._put(piece)  # it may have become one of those that have been read
        for new in self._changes.packs:
            self._expect(new.pieces[0].due_ns)
        self.come_due(wall_ns)

    def _load(self, stored: StoredPack, is_merged: bool) -> None:
        """Let a pack's messages wait in memory, or leave it: those that are not due for long, or all for a larger."""
        done = self._changes.done.get(stored.number)
        pieces = stored.pieces
        if done:
            pieces = [left for piece in pieces for left in piece.without(done)]
        kept_until_ns = self._now_ns + _KEPT_NS
        near = [piece for piece in pieces if piece.due_ns <= kept_until_ns]
        far = [piece for piece in pieces if piece.due_ns > kept_until_ns]
        pack = Pack(stored.number, sum(piece.count for piece in near))
        is_sparse = 2 * sum(piece.size for piece in near) < stored.size
        for piece in near:
            if is_merged or is_sparse:
                piece.own()  # the bytes of the whole pack are not to stay for a few
            if is_merged:
                self._add_fresh(piece)
            else:
                piece.pack = pack
            self._wait(piece)
        for piece in far:
            piece.own()
            self._put(piece)
        if is_merged or not near:
            self._changes.done.pop(stored.number, None)
            self._changes.gone[stored.number] = None
            return
        self._packs[stored.number] = pack
        if far:
            pack.done = [sequence for piece in far for sequence in range(piece.first, piece.end)]
            self._touched[pack] = None

    @property
    def next_soon_ns(self) -> int | None:
        """Wall time when the next message comes due that is in memory; None without any."""
        return self._soon[0][0] if self._soon else None

    def come_due(self, wall_ns: int) -> None:
        """Put what is due in line for delivery."""
        soon, loaded = self._soon, self.loaded
        while soon and soon[0][0] <= wall_ns:
            piece = heapq.heappop(soon)[2]
            attempts, pack = piece.attempts, piece.pack
            for sequence, frame in piece.messages():
                message = loaded[sequence] = Message(sequence, attempts, frame)
                message.pack = pack
            self.ready.extend(range(piece.first, piece.end))
            self._soon_bytes -= piece.size
            self._loaded_bytes += piece.size

    # -- what consumers do ---------------------------------------------------------------------------------------

    def ready_message(self, sequence: int) -> Message | None:
        """A loaded message that nobody holds; None when there is none of that sequence."""
        message = self.loaded.get(sequence)
        return None if message is None or message.owner is not None else message

    def make_ready(self, message: Message) -> None:
        """Put a loaded message in line for delivery; its attempts count after a restart too."""
        self.withdraw(message)
        self.ready.append(message.sequence)

    def withdraw(self, message: Message) -> None:
        """Take a loaded message from its consumer and leave it out of line; its attempts count after a restart too."""
        message.owner = None
        self._leave(message.pack, (message.sequence,))
        self._enter_pack(message)

    def defer(self, message: Message, due_ns: int) -> None:
        """Give a loaded message a new due time and forget its frame."""
        frame = _frame(message)
        self._unload(message)
        self._put(Piece(due_ns, message.sequence, 1, message.attempts, len(frame), frame))

    def finish(self, sequence: int) -> None:
        """Forget a loaded message for good."""
        self.count -= 1
        self._unload(self.loaded[sequence])

    def leave_line(self, sequences: Container[int]) -> None:
        """Let messages stand in line no more."""
        self.ready = deque(sequence for sequence in self.ready if sequence not in sequences)

    def finish_held(self, owner: Subscription, ids: Sequence[int], base: int) -> tuple[list[Message], tuple[int, ...]]:
        """Finish those of these messages that a consumer holds; return them and the ids of the others.

        Args:
            base: what an id has more than a sequence.
        """
        loaded, touched = self.loaded, self._touched
        finished: list[Message] = []
        others: list[int] = []
        for internal in ids:
            sequence = internal - base
            message = loaded.get(sequence)
            if message is None or message.owner is not owner:
                others.append(internal)
                continue
            del loaded[sequence]
            finished.append(message)
            pack = message.pack
            pack.left -= 1
            pack.done.append(sequence)
            touched[pack] = None
        self.count -= len(finished)
        self._loaded_bytes -= sum([len(message.frame) for message in finished])  # type: ignore[misc, arg-type]
        return finished, tuple(others)

    def _unload(self, message: Message) -> None:
        del self.loaded[message.sequence]
        self._loaded_bytes -= len(_frame(message))
        self._leave(message.pack, (message.sequence,))

    def _leave(self, pack: Pack, sequences: Sequence[int]) -> None:
        pack.left -= len(sequences)
        pack.done += sequences
        self._touched[pack] = None

    # -- to the database and back --------------------------------------------------------------------------------

    def take_changes(self, wall_ns: int = 0) -> Changes:
        """Hand over the changes since the last call."""
        self._now_ns = max(wall_ns, self._now_ns)
        changes, self._changes = self._changes, Changes()
        for pieces in group(self._far, self._now_ns):
            changes.packs.append(NewPack(next(self._numbers), pieces))
        self._far, self.far_bytes = [], 0
        for pack in self._fresh:
            if pack.left:
                pack.number = next(self._numbers)
                self._packs[pack.number] = pack
                changes.packs.append(NewPack(pack.number, sorted(pack.pieces, key=_due_ns)))
                pack.pieces = []
        self._fresh = []
        for pack in self._touched:
            if not pack.number:
                continue  # all of it was finished before it was written
            if pack.left:
                changes.done.setdefault(pack.number, []).extend(pack.done)
                pack.done = []
            else:
                changes.gone[pack.number] = None
                changes.done.pop(pack.number, None)
                del self._packs[pack.number]
        self._touched = {}
        self._taken = changes
        return changes

    def _count_far(self) -> None:
        unwritten = [piece for new in self._changes.packs for piece in new.pieces]
        self.far_bytes = sum(piece.size for piece in (*self._far, *unwritten))

    def restore_changes(self, failed: Changes) -> None:
        """Take back changes that could not be written; newer ones win."""
        newer = self._changes
        newer.packs[:0] = [new for new in failed.packs if _cut(new, newer.cleared_from)]
        self._count_far()
        for number, sequences in failed.done.items():
            newer.done.setdefault(number, [])[:0] = sequences
        newer.gone = failed.gone | newer.gone
        cleared = [each.cleared_from for each in (failed, newer) if each.cleared_from is not None]
        newer.cleared_from = min(cleared, default=None)

    # -- what has to hold ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raise with what is wrong; for tests.

        Raises:
            AssertionError: two counts of one thing differ.
        """
        loaded = self.loaded
        loaded_bytes = sum(len(_frame(message)) for message in loaded.values())
        assert loaded_bytes == self._loaded_bytes, f"loaded: {loaded_bytes} bytes are counted as {self._loaded_bytes}"
        soon_bytes = sum(piece.size for _, _, piece in self._soon)
        assert soon_bytes == self._soon_bytes, f"nearly due: {soon_bytes} bytes are counted as {self._soon_bytes}"
        unwritten = [*self._far, *(piece for new in self._changes.packs for piece in new.pieces)]
        far_bytes = sum(piece.size for piece in unwritten)
        assert far_bytes == self.far_bytes, f"to be written: {far_bytes} bytes are counted as {self.far_bytes}"
        assert all(message.sequence == sequence for sequence, message in loaded.items()), "loaded under its sequence"
        waiting = [sequence for sequence in self.ready if self.ready_message(sequence)]
        assert len(set(waiting)) == len(waiting), f"stands in line twice: {waiting}"

    # -- single messages, and all of them ------------------------------------------------------------------------

    def drop(self, sequence: int) -> bool | None:
        """Forget a message that is not loaded; False when it is not here, None when only the database can tell."""
        for piece in self._far:
            if piece.first <= sequence < piece.end:
                self._far.remove(piece)
                self._far += piece.without((sequence,))
                self.far_bytes -= len(piece.frame(sequence))
                self.count -= 1
                return True
        for entry in self._soon:
            piece = entry[2]
            if piece.first <= sequence < piece.end:
                self._soon.remove(entry)
                heapq.heapify(self._soon)
                self._soon_bytes -= piece.size
                for left in piece.without((sequence,)):
                    self._wait(left)
                self._leave(piece.pack, (sequence,))
                self.count -= 1
                return True
        changes = self._changes
        if any(piece.first <= sequence < piece.end for new in changes.packs for piece in new.pieces):
            return None  # the database will, when the flush that has failed is written
        if changes.cleared_from is not None and sequence >= changes.cleared_from:
            return False
        if not changes.packs and any(sequence in done for done in changes.done.values()):
            return False  # dropped since the last flush
        return None if self.count else False

    def drop_stored(self, sequence: int, number: int, generation: int) -> bool | None:
        """Forget a message that the database has in a pack; None when that may no longer be so.

        What the database said with one flush is good until the next one has ended, which may have been taken before.

        Args:
            generation: what :attr:`generation` was when the database was asked.
        """
        changes, taken = self._changes, self._taken
        if generation != self.generation or any(number in each for each in (self._packs, changes.gone, taken.gone)):
            return None
        if any(sequence in each.done.get(number, ()) for each in (changes, taken)):
            return False
        changes.done.setdefault(number, []).append(sequence)
        self.count -= 1
        return True

    def forget_damaged(self, stored: StoredPack) -> int:
        """Forget a pack that cannot be read any more; return how many messages it had that were not finished."""
        found = stored.found
        assert found is not None, "it is damaged"
        done = self._changes.done.pop(stored.number, [])
        pieces = [left for piece in stored.pieces for left in piece.without(done)]
        stored.pieces = pieces
        count = sum(piece.count for piece in pieces) if pieces else max(0, found.message_count - len(done))
        self._changes.gone[stored.number] = None
        self.count = max(0, self.count - count)
        return count

    def drop_not_due(self) -> None:
        """Forget everything but what is due or in flight."""
        loaded, ready = list(self.loaded.values()), list(self.ready)
        self.clear()
        for message in loaded:
            self.put_loaded(message)
        self.ready.extend(ready)

    def clear(self) -> None:
        """Forget everything."""
        self.clear_from(0)
        self.count = 0
        self.next_due_ns = None

    def clear_from(self, first: int) -> None:
        """Forget everything from a sequence on; :attr:`count` is right again after the next flush."""
        for message in [each for sequence, each in self.loaded.items() if sequence >= first]:
            self._unload(message)
        self.ready = deque(each for each in self.ready if each < first)
        soon, self._soon, self._soon_bytes = self._soon, [], 0
        for _, _, piece in soon:
            if piece.first < first:
                self._wait(piece.part(piece.first, min(piece.end, first)))
            if piece.end > first:
                self._leave(piece.pack, range(max(piece.first, first), piece.end))
        self._far = [piece.part(piece.first, min(piece.end, first)) for piece in self._far if piece.first < first]
        changes = self._changes
        changes.packs = [new for new in changes.packs if _cut(new, first)]
        self._count_far()
        changes.cleared_from = first if changes.cleared_from is None else min(first, changes.cleared_from)
        self._through = (-1, -1)
        self.generation += 1
        self.next_due_ns = 0  # which is earliest of what is left, the database knows


def _frame(message: Message) -> bytes:
    assert message.frame is not None, "what is spilled has its frame"
    return message.frame


def _cut(new: NewPack, first: int | None) -> bool:
    """Forget from a sequence on what is in a pack that has not been written; False when nothing of it is left."""
    if first is not None:
        new.pieces = [piece.part(piece.first, min(piece.end, first)) for piece in new.pieces if piece.first < first]
    return bool(new.pieces)


def _due_ns(piece: Piece) -> int:
    return piece.due_ns
