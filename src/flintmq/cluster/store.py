"""The coordination store: what the nodes of a cluster agree by. The interface, and what is decided without IO.

A store is an ordered map from keys to values under one revision counter. Whoever wants to change something reads it,
and changes it by a transaction that compares what was read; who holds what is a key with a lease that has to be
renewed; everybody else watches. Two stores have this interface: etcd (:mod:`flintmq.net.etcd`), and the one that
nsqlookupd keeps itself (:class:`flintmq.cluster.store_state.StoreState` behind the same protocol as etcd).

Rules of this file:

- A write is a transaction, and what is to be exact compares a revision: a request without an answer may have been
  carried out, and may still be (:class:`OutcomeUnknown`); only the comparison makes it safe to send again.
- Keys are text, and order by code point, which is the order of their UTF-8 bytes; values are bytes.
- Revisions begin at 1, in which nothing has been written; everything that one transaction changes has one revision.
- Lifetimes of leases are whole seconds, as etcd counts them.

Source: docs/decisions/0017; the model is etcd's v3 API (https://etcd.io/docs/v3.5/learning/api/).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from flintmq.errors import FlintError

KEY_BYTES_MAX = 1024
VALUE_BYTES_MAX = 256 * 1024
"""Of one value; a request of etcd may have 1.5 MiB."""
OPERATIONS_MAX = 128
"""Of each list of a transaction: etcd's --max-txn-ops."""
LEASE_TTL_S_MAX = 24 * 3600
SWAP_TRIES = 4

LAST_CODE_POINT = 0x10FFFF
_SURROGATES_BEGIN, _SURROGATES_END = 0xD800, 0xE000


# -- what can go wrong -------------------------------------------------------------------------------------------------


class StoreError(FlintError):
    """The store did not do what it was asked.

    Args:
        reason: what happened, where, and what to do.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class StoreUnavailable(StoreError):
    """No store answered in time, and nothing was changed: ask again later."""


class StoreFull(StoreUnavailable):
    """The store cannot be written, for lack of room as a rule, until somebody mends it; nothing was changed."""


class OutcomeUnknown(StoreError):
    """A change was sent and not answered: it was carried out, or will be, or never; :func:`swap` finds out."""


class StoreRefused(StoreError):
    """The store does not do this, now or later: a bound, a permission, or a request that means nothing."""


class LeaseNotFound(StoreRefused):
    """A lease has run out, was revoked, or never was.

    Args:
        lease_id: which.
    """

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id} is not there: it has run out or was revoked")
        self.lease_id = lease_id


class LeaseExists(StoreRefused):
    """A lease with this id was granted before.

    Args:
        lease_id: which.
    """

    def __init__(self, lease_id: int) -> None:
        super().__init__(f"lease {lease_id} is there already")
        self.lease_id = lease_id


class Compacted(StoreError):
    """The events after a revision are not remembered any more: begin again with a range.

    Args:
        revision: the first one whose successors are remembered; 0 when the store does not say.
    """

    def __init__(self, revision: int) -> None:
        super().__init__(f"the store remembers what happened after revision {revision} only; begin again with a range")
        self.revision = revision


# -- what is stored ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KeyValue:
    """A key that is there.

    Attributes:
        create_revision: when it was made; a key that was deleted is made anew.
        mod_revision: when it was written last.
        version: how often it was written since it was made; the first time is 1.
        lease_id: it goes when this lease does; 0: it stays.
    """

    key: str
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Span:
    """The keys from ``start`` to before ``end``; None: to the last one."""

    start: str
    end: str | None

    @classmethod
    def of_prefix(cls, prefix: str) -> Span:
        """All keys that begin with ``prefix``; with an empty one all there are."""
        kept = prefix.rstrip(chr(LAST_CODE_POINT))
        if not kept:
            return cls(prefix, None)
        following = ord(kept[-1]) + 1
        if _SURROGATES_BEGIN <= following < _SURROGATES_END:  # no text has these
            following = _SURROGATES_END
        return cls(prefix, kept[:-1] + chr(following))

    @classmethod
    def of_key(cls, key: str) -> Span:
        """One key."""
        return cls(key, key + "\0")

    def has(self, key: str) -> bool:
        """Whether a key is one of them."""
        return self.start <= key and (self.end is None or key < self.end)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The keys of a span at one revision.

    Attributes:
        revision: of the store, then.
        found: by key.
        has_more: there are more, which were not asked for.
    """

    revision: int
    found: tuple[KeyValue, ...]
    has_more: bool = False


@dataclass(frozen=True, slots=True)
class Event:
    """A key was written or deleted.

    Attributes:
        now: what it is from then on; None: it is gone.
    """

    revision: int
    key: str
    now: KeyValue | None


@dataclass(frozen=True, slots=True)
class Events:
    """Events in a span, in the order of revisions; those of one revision are never apart.

    Attributes:
        revision: there are no others up to here.
    """

    revision: int
    events: tuple[Event, ...]


# -- what is asked -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compare:
    """A key was written last at ``mod_revision``; 0: it is not there."""

    key: str
    mod_revision: int


@dataclass(frozen=True, slots=True)
class CompareValue:
    """A key is there and has this value."""

    key: str
    value: bytes


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key; it belongs to ``lease_id`` from then on, to none with 0."""

    key: str
    value: bytes
    lease_id: int = 0


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, if it is there."""

    key: str


@dataclass(frozen=True, slots=True)
class Get:
    """Read a key, as the operations before it in the transaction leave it."""

    key: str


Condition = Compare | CompareValue
Operation = Put | Delete | Get


@dataclass(frozen=True, slots=True)
class Txn:
    """If all conditions hold ``then``, else ``otherwise``, at once. No list may write a key twice, or write and delete
    it.
    """

    conditions: tuple[Condition, ...] = ()
    then: tuple[Operation, ...] = ()
    otherwise: tuple[Operation, ...] = ()


@dataclass(frozen=True, slots=True)
class TxnResult:
    """The answer to a transaction.

    Attributes:
        succeeded: the conditions held.
        revision: of the store, afterwards.
        found: what each :class:`Get` that was carried out read, in their order.
    """

    succeeded: bool
    revision: int
    found: tuple[KeyValue | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """A lease that was granted.

    Attributes:
        ttl_s: it runs out so long after the store last heard of it; may be more than was asked for.
    """

    lease_id: int
    ttl_s: int


class Store(Protocol):
    """A coordination store. Every call has a deadline of its own.

    Each may raise :class:`StoreUnavailable` and :class:`StoreRefused` as well as what is named, and what writes may
    raise :class:`StoreFull`.
    """

    async def get(self, key: str) -> KeyValue | None:
        """Return a key as it is now, None when it is not there. What was answered before is never unread."""
        ...

    async def range(self, span: Span) -> Snapshot:
        """Return all of a span as it was at one revision, not before the call."""
        ...

    async def txn(self, txn: Txn) -> TxnResult:
        """Carry out a transaction.

        Raises:
            OutcomeUnknown: it was sent and not answered.
            LeaseNotFound: it puts a key under a lease that is not there; nothing was changed.
        """
        ...

    def watch(self, span: Span, after: int) -> AbstractAsyncContextManager[AsyncIterator[Events]]:
        """Tell what happens in a span after a revision: each event once, in order, for as long as it takes.

        A store that does not answer is waited for, and asked elsewhere where there are several.

        Args:
            after: such as the revision of a :class:`Snapshot`.

        Raises:
            Compacted: (while iterating) what comes next is not remembered any more.
        """
        ...

    async def grant(self, ttl_s: int) -> Lease:
        """Make a lease.

        Args:
            ttl_s: 1 to ``LEASE_TTL_S_MAX``.
        """
        ...

    async def keepalive(self, lease_id: int) -> int:
        """Renew a lease; return for how many seconds, counted by the store from when it was asked.

        Raises:
            LeaseNotFound: it is gone, with its keys.
        """
        ...

    async def revoke(self, lease_id: int) -> None:
        """End a lease and delete its keys.

        Raises:
            LeaseNotFound: it is gone already.
            OutcomeUnknown: it was sent and not answered; send it again.
        """
        ...


# -- what is made of it ------------------------------------------------------------------------------------------------


class Fate(Enum):
    """The end of a :func:`swap`."""

    APPLIED = "applied"
    """The key has the new value."""
    REFUSED = "refused"
    """It was never carried out, and never will be: somebody else was first."""
    SUPERSEDED = "superseded"
    """It is not in force and never will be; somebody else wrote since, perhaps over it."""


@dataclass(frozen=True, slots=True)
class Swapped:
    """A :func:`swap` that has ended.

    Attributes:
        now: the key as it is; None: it is not there.
    """

    fate: Fate
    revision: int
    now: KeyValue | None


async def swap(
    store: Store,
    key: str,
    before: KeyValue | None,
    value: bytes | None,
    lease_id: int = 0,
    tries: int = SWAP_TRIES,
    guards: tuple[Condition, ...] = (),
) -> Swapped:
    """Change a key that is still as it was read, and find out what became of it when an answer is missing.

    The request is sent again as it is: its comparison lets it take place once at most, and when it holds no more,
    neither does that of a request which is still under way.

    Args:
        before: the key as it was read; None: it was not there.
        value: what to write, in which something is the writer's own (its id, a counter), so that nobody else writes
            the same; None: delete it.
        tries: how often it is sent, each with the deadline of the store.
        guards: what has to hold as well, such as that we are still the master; each has to be one that holds no more
            once it has ceased to. When one does not hold, the key may be as it was.

    Raises:
        OutcomeUnknown: no try was answered after one that may have been carried out.
        StoreUnavailable: none was sent.
        StoreRefused: nothing was changed.
    """
    change: Operation = Delete(key) if value is None else Put(key, value, lease_id)
    expected = 0 if before is None else before.mod_revision
    request = Txn((Compare(key, expected), *guards), (change, Get(key)), (Get(key),))
    unknown: OutcomeUnknown | None = None
    for _ in range(tries):
        try:
            result = await store.txn(request)
        except OutcomeUnknown as error:
            unknown = error
            continue
        except StoreUnavailable:
            if unknown is None:
                raise
            continue
        now = result.found[0]
        fate = Fate.APPLIED if result.succeeded else Fate.REFUSED
        if unknown is not None and not result.succeeded:
            fate = _fate(before, now, value, lease_id)
        return Swapped(fate, result.revision, now)
    assert unknown is not None
    raise unknown


def _fate(before: KeyValue | None, now: KeyValue | None, value: bytes | None, lease_id: int) -> Fate:
    """Tell what became of a change that may have been carried out by what stands in its place."""
    if value is None:
        if now is None:
            return Fate.APPLIED
        is_same_key = before is not None and now.create_revision == before.create_revision
        return Fate.REFUSED if is_same_key else Fate.SUPERSEDED
    if now is None:
        return Fate.SUPERSEDED
    if before is None:
        is_next = now.version == 1
    else:
        is_next = now.create_revision == before.create_revision and now.version == before.version + 1
    if is_next and (now.value, now.lease_id) == (value, lease_id):
        return Fate.APPLIED
    # a key that was not there may have been made by us, deleted, and made by somebody else
    return Fate.REFUSED if is_next and before is not None else Fate.SUPERSEDED


async def follow(store: Store, span: Span) -> AsyncGenerator[Snapshot | Events, None]:
    """Tell what is in a span, and then what happens; whenever something was missed, what is in it then.

    Close it when done (``contextlib.aclosing``): it holds a watch.
    """
    while True:
        snapshot = await store.range(span)
        yield snapshot
        try:
            async with store.watch(span, snapshot.revision) as watched:
                async for events in watched:
                    yield events
        except Compacted:
            continue


class Lapses:
    """Decides which ends of a :func:`follow` are news: none of those that only go on with what was told of.

    A store that can be read and not written, say, ends every watch at once, and gives what is in it each time.

    Args:
        lasting_ns: for how long the store was followed when its next failure is news again.
    """

    TOLD_MAX = 8

    def __init__(self, lasting_ns: int = 10_000_000_000) -> None:
        self._lasting_ns = lasting_ns
        self._since_ns: int | None = None
        self._told: set[str] = set()

    def followed(self, now_ns: int) -> None:
        """Note that the store was heard of, in monotonic time."""
        if self._since_ns is None:
            self._since_ns = now_ns

    def is_news(self, error: StoreError, now_ns: int) -> bool:
        """Note a failure; return whether it is to be told."""
        since_ns, self._since_ns = self._since_ns, None
        if since_ns is not None and now_ns - since_ns >= self._lasting_ns:
            self._told.clear()
        is_news = str(error) not in self._told and len(self._told) < self.TOLD_MAX
        if is_news:
            self._told.add(str(error))
        return is_news


@dataclass(slots=True)
class Tenure:
    """The time in which the holder of a lease may act on it: from when the last renewal that was answered was *sent*.

    The store counts from when it got it, which is later; so the holder has stopped before the store gives what it
    held to somebody else, as long as both clocks run equally fast but for ``margin_ns``.

    Attributes:
        ttl_ns: of the lease.
        sent_at_ns: boot time (:mod:`flintmq.clock`) before the last renewal (or the grant) was sent that was answered.
        margin_ns: it stops so much earlier.

    Source: docs/decisions/0017.
    """

    ttl_ns: int
    sent_at_ns: int
    margin_ns: int = 0

    @property
    def until_ns(self) -> int:
        """Its end in boot time, unless it is renewed."""
        return self.sent_at_ns + self.ttl_ns - self.margin_ns

    def is_held(self, now_ns: int) -> bool:
        """Whether its holder may still act."""
        return now_ns < self.until_ns

    def renewed(self, sent_at_ns: int, ttl_ns: int) -> None:
        """Take note of a renewal that was answered; one that was sent earlier than another changes nothing."""
        if sent_at_ns + ttl_ns > self.sent_at_ns + self.ttl_ns:
            self.sent_at_ns, self.ttl_ns = sent_at_ns, ttl_ns
