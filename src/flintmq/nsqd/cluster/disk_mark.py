"""A count that a node's data directory and the coordination store both have, so that an older copy of the directory is
known for what it is. A member of an in-sync set is trusted to have all that it acknowledged, and such a copy has not.

::

    count + 1 --> cluster.mark, durably --> the store        at each start, and every MARK_S from then on

So the directory has never counted less far than the store, unless it is from before: a snapshot that was put back, or a
disk that forgot what it had synced. A store that is older than the directory is no sign of that.

With the count the store is told where the node is reached, so that it can be named while it is away.

``cluster.mark`` holds the count as ``node.id`` holds an identity, see ``storage/identity.py``.

Rules of this file: a mark that is missing or damaged counts as none; where one of the two cannot be written, the node
goes on, and the next time is tried again.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import DiskRecord, encode
from flintmq.cluster.store import Store, StoreError, swap
from flintmq.cluster.view import View
from flintmq.env import Env
from flintmq.storage import Files, read_number, write_number

MARK_NAME = "cluster.mark"
MARK_S = 60.0
"""Between two counts, in seconds: a copy that is put back after a shorter time is not found out."""

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
        self._count = 0

    async def load(self) -> None:
        """Read how far the data directory has counted."""
        try:
            self._count = await self._env.run_blocking(self._read)
        except OSError as error:
            log.error("CLUSTER: %s: %s", MARK_NAME, error.strerror or error)

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
            await self._env.run_blocking(self._write, count)
        except OSError as error:
            log.warning("CLUSTER: %s cannot be written: %s", MARK_NAME, error.strerror or error)
            return
        self._count = count
        try:
            before = self._view.pairs.get(self._key)
            record = DiskRecord(count, self._incarnation, *self._view.place(self._node_id))
            await swap(self._store, self._key, before, encode(record))
        except StoreError as error:
            log.debug("CLUSTER: the store was not told of count %d of the data directory: %s", count, error)

    def _read(self) -> int:
        try:
            digits = read_number(self._files, MARK_NAME)
        except FileNotFoundError:
            return 0
        return 0 if digits is None else int(digits, 16)

    def _write(self, count: int) -> None:
        write_number(self._files, MARK_NAME, f"{count:016x}")
