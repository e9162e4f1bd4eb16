"""The database as far as messages set aside are concerned: real SQL, in memory, for one channel without a broker."""

from itertools import count

from flintmq.broker.progress import count_spilled, spilled_record
from flintmq.broker.spilled import LOOKAHEAD_NS, SpilledStore
from flintmq.storage import ChannelStore
from flintmq.storage.files import SqliteDatabase
from flintmq.storage.packs import packed_after
from flintmq.testing import MemoryDisk, MemoryFiles

CURSOR = 1


class _Files(MemoryFiles):
    """With a database that is not written anywhere after each commit."""

    def open_database(self, path, *, shrinks=True):
        return SqliteDatabase(":memory:")


class AsideDisk:
    """A database that outlives the stores of its one channel."""

    def __init__(self):
        self.store = ChannelStore(_Files(MemoryDisk()))
        self.query = self.store._database.query

    def open(self):
        """What a start finds."""
        found, due_ns = self.query("SELECT COUNT(*), MIN(due_ns) FROM aside_pack")[0]
        ((last,),) = self.query("SELECT MAX(id) FROM aside_pack")
        stored = self.store.spilled_count(CURSOR) if found else 0
        return SpilledStore(stored, due_ns, count((last or 0) + 1))

    def write(self, changes):
        """Commit what a store handed over."""
        self.store.run_transaction(spilled_record("t", 0, "c", changes, 0).statements(CURSOR), False)

    def read_due(self, aside, wall_ns, bytes_max=1 << 30):
        """What comes due, as the store that asks takes it."""
        return self.store.due(CURSOR, aside.loaded_through, wall_ns + LOOKAHEAD_NS, bytes_max)

    def flush(self, channel, wall_ns, bytes_max=None):
        """What a broker does for the channel: write, count again, read what comes due."""
        aside = channel.spilled
        changes = aside.take_changes(wall_ns)
        recount = None if changes.cleared_from is None else count_spilled(channel, CURSOR)
        self.write(changes)
        if aside.wants_due(wall_ns):
            aside.accept_due(self.read_due(aside, wall_ns, bytes_max or aside.room_bytes), aside.generation, wall_ns)
        if recount is not None:
            recount.then(self.store.spilled_count(CURSOR), None)

    def rows(self):
        """Everything that is stored and not finished: sequence -> (due_ns, attempts, frame)."""
        found = packed_after(self.query, CURSOR, -(1 << 62), 1 << 30)
        rows = {sequence: (piece.due_ns, piece.attempts, piece.frame(sequence)) for sequence, piece in found}
        assert len(rows) == len(found) == self.store.spilled_count(CURSOR), "each once"
        return rows
