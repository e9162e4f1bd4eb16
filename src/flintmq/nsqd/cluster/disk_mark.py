"""A count that a node's data directory and the coordination store both have, so that an older copy of the directory is
known for what it is. A member of an in-sync set is trusted to have all that it acknowledged, and such a copy has not.

::

    count + 1 --> cluster.mark, durably --> the store        at each start, and every MARK_S from then on

So the directory has never counted less far than the store, unless it is from before: a snapshot that was put back, or a
disk that forgot what it had synced. A store that is older than the directory is no sign of that.

The other way round, ``cluster.told`` has the last count that the store is known to have taken, written when it has; so
a store that knows less is from before: a backup that was put back. What it says of copies may be from before what they
have. It is counted as well soon after the states of this node's partitions have changed.

With the count the store is told where the node is reached, so that it can be named while it is away.

Both files hold a count as ``node.id`` holds an identity, see ``storage/identity.py``.

Rules of this file: a mark that is missing or damaged counts as none; where one of the two cannot be written, the node
goes on, and the next time is tried again.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import DiskRecord, encode
from flintmq.cluster.store import Fate, Store, StoreError, swap
from flintmq.cluster.view import View
from flintmq.env import Env
from flintmq.storage import Files, read_number, write_number

MARK_NAME = "cluster.mark"
TOLD_NAME = "cluster.told"
MARK_S = 60.0
"""Between two counts, in seconds: a copy that is put back after a shorter time is not found out."""
MARK_SOON_S = 5.0
"""From a change of what this node has to the next count, in seconds."""

log = logging.getLogger(__name__)


class DiskMark:
    """Counts for one process.

    Args:
        node_id, incarnation: of it.
    """

    def __init__(
        self, env: Env, files: Files, store: Store, keys: Keys, view: View, node_id: str, incarnation: str
    ) -> None:
        self._env = env
        self._files = files
        self._store = store
        self._view = view
        self._key = keys.disk(node_id)
        self._node_id = node_id
        self._incarnation = incarnation
        self._count = self._told = 0

    async def load(self) -> None:
        """Read how far the data directory has counted."""
        try:
            self._count = await self._env.run_blocking(self._read, MARK_NAME)
            if self._count:  # else it is about another cluster
                self._told = await self._env.run_blocking(self._read, TOLD_NAME)
        except OSError as error:
            log.error("CLUSTER: %s: %s", MARK_NAME, error.strerror or error)

    @property
    def is_there(self) -> bool:
        """Whether the data directory was one of a cluster."""
        return self._count > 0

    @property
    def is_store_older(self) -> bool:
        """Whether the store is from before what it was last told, as far as the view knows. Ask before the first count:
        the view learns later what the store has taken.
        """
        return self._known < self._told

    @property
    def is_older(self) -> bool:
        """Whether the data directory is from before what its node last told the store, as far as the view knows."""
        return self._count < self._known

    @property
    def _known(self) -> int:
        record = self._view.disks.get(self._node_id)
        return 0 if record is None else record.count

    async def advance(self) -> None:
        """Count on, here and then in the store."""
        count = max(self._count, self._known) + 1
        try:
            await self._env.run_blocking(self._write, MARK_NAME, count)
        except OSError as error:
            log.warning("CLUSTER: %s cannot be written: %s", MARK_NAME, error.strerror or error)
            return
        self._count = count
        try:
            before = self._view.pairs.get(self._key)
            record = DiskRecord(count, self._incarnation, *self._view.place(self._node_id))
            swapped = await swap(self._store, self._key, before, encode(record))
        except StoreError as error:
            log.debug("CLUSTER: the store was not told of count %d of the data directory: %s", count, error)
            return
        if swapped.fate is Fate.APPLIED:
            try:
                await self._env.run_blocking(self._write, TOLD_NAME, count)
            except OSError as error:
                log.warning("CLUSTER: %s cannot be written: %s", TOLD_NAME, error.strerror or error)

    def _read(self, name: str) -> int:
        try:
            digits = read_number(self._files, name)
        except FileNotFoundError:
            return 0
        return 0 if digits is None else int(digits, 16)

    def _write(self, name: str, count: int) -> None:
        write_number(self._files, name, f"{count:016x}")
