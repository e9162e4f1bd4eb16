"""The cluster that a data directory belongs to, and a store that is asked as long as it is that cluster's.

::

    cluster.id --> 16 hex digits, written before this node first joins; kept as ``node.id`` is, see storage/identity.py
    the store  --> /flintmq/<cluster>/cluster has the same id --> it is followed, and written
                                             another, or none --> StoreUnavailable, as of a store that is away

So a store that was emptied, or an address of another cluster's, changes nothing here: what is known stays in force, as
far as the lease of this node and what its replicas confirm allow, until the right one is back.

A directory that was one of a cluster before there was this file belongs to the first store that knows the node or one
of its logs.

Rules of this file: a change is sent with the condition that the cluster's record is as it was; what is read counts only
together with that record.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager

from flintmq.broker.replica import Replica
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import BadState, ClusterRecord, decode
from flintmq.cluster.store import (
    OPERATIONS_MAX,
    CompareValue,
    Events,
    Get,
    KeyValue,
    Lease,
    Snapshot,
    Span,
    Store,
    StoreUnavailable,
    Txn,
    TxnResult,
)
from flintmq.cluster.view import PartitionId, View
from flintmq.env import Env
from flintmq.errors import StorageError
from flintmq.net.lease import Apart
from flintmq.storage import Files, read_number, write_number

ID_NAME = "cluster.id"
OPERATIONS_TAKEN_MAX = OPERATIONS_MAX - 1
"""Of each list of a transaction that :class:`BelongingStore` takes: it adds the record of the cluster to each."""
JOINS_ANOTHER = (
    "Give the node the --cluster-store of its cluster. If it is to go to the other one, remove cluster.id and "
    "cluster.mark from its data directory first: what it has of the cluster before is set aside there, not deleted"
)

log = logging.getLogger(__name__)


class OtherStore(StoreUnavailable):
    """The store is not of the cluster that this data directory belongs to.

    Args:
        name: of the cluster.
        mine: its id.
        found: id of the cluster that the store has under this name; empty: it has none.
    """

    def __init__(self, name: str, mine: str, found: str) -> None:
        there = f"has the cluster {found}" if found else "has no cluster"
        super().__init__(
            f"the store {there} under the name {name}, and this data directory belongs to the cluster {mine}: the "
            "store is another one, or was emptied. Nothing here is changed by it; give it back its content"
        )
        self.found = found
        self.name = name
        self.mine = mine


class OtherCluster(StorageError):
    """A node is started with the store of a cluster that its data directory does not belong to.

    Args:
        text: what was found.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"{self.text}. {JOINS_ANOTHER}"


class Belonging:
    """Knows the cluster.

    Attributes:
        cluster_id: of it; empty: this directory belongs to none yet.
    """

    def __init__(self, env: Env, files: Files) -> None:
        self.cluster_id = ""
        self._env = env
        self._files = files

    async def load(self) -> None:
        """Read to which cluster the data directory belongs.

        Raises:
            StorageError: that cannot be read.
        """
        try:
            found = await self._env.run_blocking(read_number, self._files, ID_NAME)
        except FileNotFoundError:
            return
        except OSError as error:
            raise StorageError(f"{ID_NAME}: {error.strerror or error}") from error
        if found is None:
            log.warning("CLUSTER: %s is damaged: the store has to know this node", ID_NAME)
        self.cluster_id = found or ""

    async def adopt(self, cluster_id: str) -> None:
        """Belong to a cluster from now on; where that cannot be written, for as long as this process lives."""
        if self.cluster_id == cluster_id:
            return
        try:
            await self._env.run_blocking(write_number, self._files, ID_NAME, cluster_id)
        except OSError as error:
            log.warning("CLUSTER: %s cannot be written: %s", ID_NAME, error.strerror or error)
        self.cluster_id = cluster_id
        log.info("CLUSTER: the data directory belongs to cluster %s from now on", cluster_id)

    @staticmethod
    def is_known(view: View, node: str, replicas: Iterable[tuple[PartitionId, Replica]]) -> bool:
        """Whether a store knows a node, or a log of its replicas: then they are of that cluster."""
        if node in view.disks or node in view.held or node in view.nodes:
            return True
        states = view.partitions
        return any(where in states and states[where].log_id == each.log_id for where, each in replicas)


class BelongingStore:
    """A :class:`flintmq.cluster.store.Store` that is away while it is another cluster's.

    Its transactions have ``OPERATIONS_TAKEN_MAX`` conditions and operations at most.

    Args:
        store: as it is reached.

    Attributes:
        problem: why what the store says does not count; empty: it does.
    """

    def __init__(self, store: Store, keys: Keys, belonging: Belonging) -> None:
        self.problem = ""
        self._store = store
        self._keys = keys
        self._belonging = belonging
        self._record: KeyValue | None = None  # of our cluster

    async def close(self) -> None:
        """Close the store."""
        close = getattr(self._store, "close", None)
        if close is not None:
            await close()

    def apart(self) -> AbstractAsyncContextManager[Store] | None:
        """See :class:`flintmq.net.lease.Apart`; a lease is of no cluster."""
        return self._store.apart() if isinstance(self._store, Apart) else None

    async def get(self, key: str) -> KeyValue | None:
        pair = await self._store.get(key)
        if self._belonging.cluster_id and key != self._keys.record:
            self._check(await self._store.get(self._keys.record))
        return pair

    async def range(self, span: Span) -> Snapshot:
        snapshot = await self._store.range(span)
        if span.has(self._keys.record):
            self._check(next((pair for pair in snapshot.found if pair.key == self._keys.record), None))
        return snapshot

    async def txn(self, txn: Txn) -> TxnResult:
        if not self._belonging.cluster_id:
            return await self._store.txn(txn)
        if self._record is None:
            self._check(await self._store.get(self._keys.record))
        while True:
            record = self._record
            assert record is not None
            seen = Get(record.key)
            conditions = (*txn.conditions, CompareValue(record.key, record.value))
            result = await self._store.txn(Txn(conditions, (*txn.then, seen), (*txn.otherwise, seen)))
            *found, last = result.found
            if not result.succeeded:
                self._check(last)
                if self._record is not None and self._record.value != record.value:
                    continue  # a release that writes it otherwise has
            return TxnResult(result.succeeded, result.revision, tuple(found))

    async def grant(self, ttl_s: int) -> Lease:
        return await self._store.grant(ttl_s)

    async def keepalive(self, lease_id: int) -> int:
        return await self._store.keepalive(lease_id)

    async def revoke(self, lease_id: int) -> None:
        await self._store.revoke(lease_id)

    @asynccontextmanager
    async def watch(self, span: Span, after: int) -> AsyncIterator[AsyncIterator[Events]]:
        async with self._store.watch(span, after) as watched, aclosing(self._checked(watched)) as checked:
            yield checked

    async def _checked(self, watched: AsyncIterator[Events]) -> AsyncGenerator[Events, None]:
        async for events in watched:
            for event in events.events:
                if event.key == self._keys.record:
                    self._check(event.now)
            yield events

    def _check(self, pair: KeyValue | None) -> None:
        """Make sure that the record of the cluster is ours, if there is one that this directory belongs to.

        Raises:
            OtherStore: it is not.
        """
        mine = self._belonging.cluster_id
        if not mine:
            return
        found = ""
        if pair is not None:
            try:
                found = decode(pair.key, pair.value, ClusterRecord).cluster_id
            except BadState:
                found = mine  # what cannot be read says nothing
        if found != mine:
            error = OtherStore(self._keys.cluster, mine, found)
            self.problem = str(error)
            raise error
        if self.problem:
            log.info("CLUSTER: the store is that of cluster %s again", mine)
        self.problem, self._record = "", pair
