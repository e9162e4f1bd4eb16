"""The embedded coordination store as a state machine: (request, now) -> answer and changes. No IO.

Invariants:

- I1: the revision grows by one with every transaction that changes something, and with every lease that ends and has
  keys; a key's revisions are never above it.
- I2: a key with a lease is in that lease's set, and in no other.
- I3: the history has every change after ``compacted``, in order; a reader further behind is told so, never a part.
- I4: a request that is refused has changed nothing.
- I5: keys, bytes, leases and history are bounded.

A store that comes back does not know who renewed what while it was away: every lease has its full time from then on
(:meth:`StoreState.restart_leases`). The history is not kept over a restart: readers that missed something begin again.

Source: docs/decisions/0017; etcd's mvcc and lease packages for what a request means.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable
from dataclasses import dataclass, field

from flintmq.cluster.store import (
    KEY_BYTES_MAX,
    LEASE_TTL_S_MAX,
    OPERATIONS_MAX,
    VALUE_BYTES_MAX,
    Compacted,
    Compare,
    Condition,
    Delete,
    Event,
    Events,
    Get,
    KeyValue,
    Lease,
    LeaseExists,
    LeaseNotFound,
    Operation,
    Put,
    Snapshot,
    Span,
    StoreRefused,
    Txn,
    TxnResult,
)

EVENTS_MAX = 1000
"""Of one answer; those of one revision may exceed it."""
RANGE_BYTES_MAX = 4 * 1024 * 1024
"""Of one answer; its last key may exceed it."""
_OVERHEAD_BYTES = 200  # of a key or an event, beside its text and value
_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """The bounds of a store.

    Attributes:
        key_count_max, lease_count_max: of keys and leases.
        bytes_max: keys and values together, with what each costs.
        history_count_max, history_bytes_max: of events that are remembered.
    """

    key_count_max: int = 500_000
    lease_count_max: int = 10_000
    bytes_max: int = 256 * 1024 * 1024
    history_count_max: int = 50_000
    history_bytes_max: int = 32 * 1024 * 1024


@dataclass(slots=True)
class Changes:
    """All that has to be written to the disk so that nothing is forgotten.

    Attributes:
        revision: of the store with them.
        keys: None for those that are deleted.
        leases: their lifetimes in seconds; None for those that have ended.
    """

    revision: int
    keys: dict[str, KeyValue | None] = field(default_factory=dict)
    leases: dict[int, int | None] = field(default_factory=dict)


@dataclass(slots=True)
class _Lease:
    ttl_s: int
    until_ns: int
    keys: set[str] = field(default_factory=set)


class StoreState:
    """Keys, leases and history.

    Args:
        revision: where to begin: 1 for a new store.
        found: keys, as they were.
        leases: id to lifetime in seconds; all have their full time from now on.

    Attributes:
        revision: of the last change.
        compacted: what happened after it is remembered.
    """

    def __init__(
        self,
        limits: StoreLimits | None = None,
        revision: int = 1,
        found: Iterable[KeyValue] = (),
        leases: Iterable[tuple[int, int]] = (),
        now_ns: int = 0,
    ) -> None:
        self.revision = self.compacted = revision
        self._limits = StoreLimits() if limits is None else limits
        self._leases = {each: _Lease(ttl_s, now_ns + ttl_s * _SECOND_NS) for each, ttl_s in leases}
        self._pairs: dict[str, KeyValue] = {pair.key: pair for pair in found}
        self._order = sorted(self._pairs)
        self._bytes = sum(map(_size_of, self._pairs.values()))
        for pair in self._pairs.values():
            if pair.lease_id:
                self._leases[pair.lease_id].keys.add(pair.key)
        self._history: list[tuple[Event, KeyValue | None]] = []  # each with what was there before
        self._history_bytes = 0
        self._changes = Changes(revision)

    # --- reading

    def get(self, key: str) -> KeyValue | None:
        """Return a key as it is."""
        return self._pairs.get(key)

    def count(self, span: Span) -> int:
        """Return how many keys a span has."""
        first, end = self._bounds(span)
        return end - first

    def _bounds(self, span: Span) -> tuple[int, int]:
        order = self._order
        first = bisect_left(order, span.start)
        return first, max(first, len(order) if span.end is None else bisect_left(order, span.end))

    def range(self, span: Span, count_max: int = 0, revision: int = 0) -> Snapshot:
        """Return what is in a span, or the first of it: at most ``RANGE_BYTES_MAX``, and what exceeds it first.

        Args:
            count_max: so many of them; 0: no other bound.
            revision: as it was then; 0: as it is.

        Raises:
            Compacted: that is not remembered.
            StoreRefused: it is still to come.
        """
        if revision > self.revision:
            raise StoreRefused(f"revision {revision} is still to come: the store is at {self.revision}")
        then = self._undone(span, revision) if 0 < revision < self.revision else {}
        first, end = self._bounds(span)
        keys, pairs = self._order[first:end], self._pairs
        if then:
            pairs = {key: pairs[key] for key in keys}
            for key, pair in then.items():
                if pair is None:
                    pairs.pop(key, None)
                else:
                    pairs[key] = pair
            keys = sorted(pairs)
        found, size = [], 0
        for key in keys[:count_max] if count_max else keys:
            found.append(pairs[key])
            size += _size_of(pairs[key])
            if size > RANGE_BYTES_MAX:
                break
        return Snapshot(self.revision, tuple(found), len(keys) > len(found))

    def _undone(self, span: Span, revision: int) -> dict[str, KeyValue | None]:
        """Find what was where something has changed since."""
        if revision < self.compacted:
            raise Compacted(self.compacted)
        then: dict[str, KeyValue | None] = {}
        for event, before in reversed(self._history[self._first_after(revision) :]):
            if span.has(event.key):
                then[event.key] = before
        return then

    def events(self, span: Span, after: int, until: int, count_max: int = EVENTS_MAX) -> Events:
        """Return what happened in a span after a revision: the first of it, whole revisions only.

        Args:
            until: up to this revision; what came later may be told to nobody yet.
            count_max: how many events are looked at; those of one revision may exceed it.

        Raises:
            Compacted: the first of it is not remembered any more.
        """
        if after >= until:
            return Events(after, ())
        if after < self.compacted:
            raise Compacted(self.compacted)
        history = self._history
        first = self._first_after(after)
        last = self._first_after(until)
        end = min(last, first + count_max)
        while end < last and history[end][0].revision == history[end - 1][0].revision:
            end += 1
        reached = until if end == last else history[end - 1][0].revision
        return Events(reached, tuple(event for event, _ in history[first:end] if span.has(event.key)))

    def _first_after(self, revision: int) -> int:
        return bisect_right(self._history, revision, key=lambda item: item[0].revision)

    # --- changing

    def apply(self, txn: Txn) -> TxnResult:
        """Carry out a transaction.

        Raises:
            StoreRefused: it cannot be carried out; nothing has changed.
        """
        for what, count in ("conditions", len(txn.conditions)), ("operations", max(len(txn.then), len(txn.otherwise))):
            if count > OPERATIONS_MAX:
                raise StoreRefused(f"a transaction has {count} {what}, at most {OPERATIONS_MAX}; divide it")
        for condition in txn.conditions:
            _check_key(condition.key)
        _check_operations(txn.then)
        _check_operations(txn.otherwise)
        succeeded = all(map(self._holds, txn.conditions))
        operations = txn.then if succeeded else txn.otherwise
        self._check_room(operations)
        found = self._carry_out(operations)
        return TxnResult(succeeded, self.revision, found)

    def _holds(self, condition: Condition) -> bool:
        pair = self._pairs.get(condition.key)
        if isinstance(condition, Compare):
            return (0 if pair is None else pair.mod_revision) == condition.mod_revision
        return pair is not None and pair.value == condition.value

    def _check_room(self, operations: tuple[Operation, ...]) -> None:
        count, size = len(self._pairs), self._bytes
        for operation in operations:
            if isinstance(operation, Get):
                continue
            before = self._pairs.get(operation.key)
            if before is not None:
                count, size = count - 1, size - _size_of(before)
            if isinstance(operation, Put):
                if operation.lease_id and operation.lease_id not in self._leases:
                    raise LeaseNotFound(operation.lease_id)
                count, size = count + 1, size + _OVERHEAD_BYTES + len(operation.key.encode()) + len(operation.value)
        limits = self._limits
        if count > max(limits.key_count_max, len(self._pairs)):  # what makes it no worse goes through
            raise StoreRefused(f"the store has {len(self._pairs)} keys, at most {limits.key_count_max}; delete some")
        if size > max(limits.bytes_max, self._bytes):
            raise StoreRefused(f"the store has {self._bytes} bytes, at most {limits.bytes_max}; delete some keys")

    def _carry_out(self, operations: Iterable[Operation]) -> tuple[KeyValue | None, ...]:
        revision = self.revision + 1
        found: list[KeyValue | None] = []
        for operation in operations:
            before = self._pairs.get(operation.key)
            if isinstance(operation, Get):
                found.append(before)
            elif isinstance(operation, Put):
                created, version = (revision, 1) if before is None else (before.create_revision, before.version + 1)
                pair = KeyValue(operation.key, operation.value, created, revision, version, operation.lease_id)
                self._set(revision, operation.key, before, pair)
            elif before is not None:
                self._set(revision, operation.key, before, None)
        self._compact()
        return tuple(found)

    def _set(self, revision: int, key: str, before: KeyValue | None, pair: KeyValue | None) -> None:
        if before is None:
            insort(self._order, key)
        else:
            self._bytes -= _size_of(before)
            if before.lease_id:
                self._leases[before.lease_id].keys.discard(key)
        if pair is None:
            del self._pairs[key]
            del self._order[bisect_left(self._order, key)]
        else:
            self._pairs[key] = pair
            self._bytes += _size_of(pair)
            if pair.lease_id:
                self._leases[pair.lease_id].keys.add(key)
        self.revision = self._changes.revision = revision
        self._changes.keys[key] = pair
        self._history.append((Event(revision, key, pair), before))
        self._history_bytes += _size_of(pair) if pair is not None else _OVERHEAD_BYTES

    def _compact(self) -> None:
        """Forget the older half of the history when there is too much of it."""
        limits, history = self._limits, self._history
        if len(history) > limits.history_count_max or self._history_bytes > limits.history_bytes_max:
            self.compact(history[len(history) // 2][0].revision)

    def compact(self, revision: int) -> None:
        """Forget what happened up to a revision, and then.

        Raises:
            Compacted: it is forgotten already.
            StoreRefused: it is still to come.
        """
        if revision > self.revision:
            raise StoreRefused(f"revision {revision} is still to come: the store is at {self.revision}")
        if revision <= self.compacted and revision < self.revision:
            raise Compacted(self.compacted)
        forgotten = self._first_after(revision)
        for event, _ in self._history[:forgotten]:
            self._history_bytes -= _OVERHEAD_BYTES if event.now is None else _size_of(event.now)
        del self._history[:forgotten]
        self.compacted = max(self.compacted, revision)

    # --- leases

    def grant(self, lease_id: int, ttl_s: int, now_ns: int) -> Lease:
        """Make a lease.

        Args:
            lease_id: 1 to 2^63 - 1.

        Raises:
            StoreRefused: it is there already, or there are too many, or the lifetime is none.
        """
        if not 1 <= ttl_s <= LEASE_TTL_S_MAX:
            raise StoreRefused(f"a lease of {ttl_s} s: it must be 1 to {LEASE_TTL_S_MAX} s")
        if not 0 < lease_id < 1 << 63:
            raise StoreRefused(f"lease {lease_id}: its id must be 1 to 2^63 - 1")
        if lease_id in self._leases:
            raise LeaseExists(lease_id)
        if len(self._leases) >= self._limits.lease_count_max:
            raise StoreRefused(f"the store has {len(self._leases)} leases, which is all there may be; revoke some")
        self._leases[lease_id] = _Lease(ttl_s, now_ns + ttl_s * _SECOND_NS)
        self._changes.leases[lease_id] = ttl_s
        return Lease(lease_id, ttl_s)

    def keepalive(self, lease_id: int, now_ns: int) -> int:
        """Renew a lease; return for how many seconds.

        Raises:
            LeaseNotFound: it is gone, or has run out and will be presently.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.until_ns <= now_ns:
            raise LeaseNotFound(lease_id)
        lease.until_ns = now_ns + lease.ttl_s * _SECOND_NS
        return lease.ttl_s

    def time_to_live(self, lease_id: int, now_ns: int) -> tuple[int, int, tuple[str, ...]]:
        """Return how many seconds a lease has left and was granted, and its keys.

        Raises:
            LeaseNotFound: it is gone.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFound(lease_id)
        return max(0, lease.until_ns - now_ns) // _SECOND_NS, lease.ttl_s, tuple(sorted(lease.keys))

    def revoke(self, lease_id: int) -> None:
        """End a lease; its keys go at once, under one revision.

        Raises:
            LeaseNotFound: it is gone already.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseNotFound(lease_id)
        self._carry_out([Delete(key) for key in sorted(lease.keys)])
        del self._leases[lease_id]
        self._changes.leases[lease_id] = None

    def expire(self, now_ns: int) -> list[int]:
        """End the leases whose time is over; return them."""
        expired = [lease_id for lease_id, lease in self._leases.items() if lease.until_ns <= now_ns]
        for lease_id in expired:
            self.revoke(lease_id)
        return expired

    def restart_leases(self, now_ns: int) -> None:
        """Give every lease its full time, after a while in which none could have been renewed."""
        for lease in self._leases.values():
            lease.until_ns = now_ns + lease.ttl_s * _SECOND_NS

    # --- for whoever keeps it

    @property
    def has_changes(self) -> bool:
        """Whether there is something to take."""
        return bool(self._changes.keys or self._changes.leases)

    def take_changes(self) -> Changes | None:
        """Return what has changed since the last time; None: nothing."""
        changes = self._changes
        if not changes.keys and not changes.leases:
            return None
        self._changes = Changes(self.revision)
        return changes

    @property
    def key_count(self) -> int:
        """The number of keys."""
        return len(self._pairs)

    @property
    def lease_count(self) -> int:
        """The number of leases."""
        return len(self._leases)

    def describe(self) -> str:
        """One line, for logs and failing tests."""
        return (
            f"StoreState revision={self.revision} compacted={self.compacted} keys={len(self._pairs)} "
            f"bytes={self._bytes} leases={len(self._leases)} history={len(self._history)}"
        )

    def check(self) -> None:
        """Assert what has to hold; for tests."""
        assert self._order == sorted(self._pairs)
        assert self._bytes == sum(map(_size_of, self._pairs.values())), "I5"
        for key, pair in self._pairs.items():
            assert key == pair.key and 1 < pair.create_revision <= pair.mod_revision <= self.revision, "I1"
            assert not pair.lease_id or key in self._leases[pair.lease_id].keys, "I2"
        held = [key for lease in self._leases.values() for key in lease.keys]
        assert len(held) == len(set(held)) == sum(pair.lease_id > 0 for pair in self._pairs.values()), "I2"
        revisions = [event.revision for event, _ in self._history]
        assert revisions == sorted(revisions) and set(range(self.compacted + 1, self.revision + 1)) == set(revisions)
        sizes = (_OVERHEAD_BYTES if event.now is None else _size_of(event.now) for event, _ in self._history)
        assert self._history_bytes == sum(sizes), "I5"


def _size_of(pair: KeyValue) -> int:
    return _OVERHEAD_BYTES + len(pair.key.encode()) + len(pair.value)


def _check_key(key: str) -> None:
    try:
        size = len(key.encode())
    except UnicodeEncodeError:
        raise StoreRefused(f"key {key[:40]!r} is no text that can be written as UTF-8") from None
    if not 0 < size <= KEY_BYTES_MAX:
        raise StoreRefused(f"key {key[:40]!r} has {size} bytes, it must be 1 to {KEY_BYTES_MAX}")


def _check_operations(operations: tuple[Operation, ...]) -> None:
    put: set[str] = set()
    deleted: set[str] = set()
    for operation in operations:
        key = operation.key
        _check_key(key)
        if isinstance(operation, Put):
            if len(operation.value) > VALUE_BYTES_MAX:
                size = len(operation.value)
                raise StoreRefused(f"the value of {key[:40]!r} has {size} bytes, at most {VALUE_BYTES_MAX}")
            if key in put or key in deleted:
                raise StoreRefused(f"a transaction changes {key[:40]!r} twice")
            put.add(key)
        elif isinstance(operation, Delete):
            if key in put:
                raise StoreRefused(f"a transaction changes {key[:40]!r} twice")
            deleted.add(key)
