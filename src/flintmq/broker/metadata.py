"""Changes of topics, channels and settings that the database does not have yet, and who waits for them.

Rules of this file: order is kept; what could not be written comes before what was added since.

Source: docs/decisions/0003.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from flintmq.broker.partition import Partition
from flintmq.storage.records import PutBacklog, Record, TopicRecord
from flintmq.storage.rows import Statement

Waiter = Callable[[BaseException | None], None]


@dataclass(slots=True, eq=False)
class MetadataBatch:
    """The changes that one flush takes.

    Attributes:
        records: by names, what the statements say by numbers of this node.
        statements: to be run in order.
        waiters: told when they were, or why not.
        local: as ``waiters``, of what concerns this node alone; told first.
        must_sync: whether they have to survive a power loss, whatever the durability policy is.
    """

    records: list[Record] = field(default_factory=list)
    statements: list[Statement] = field(default_factory=list)
    waiters: list[Waiter] = field(default_factory=list)
    local: list[Waiter] = field(default_factory=list)
    must_sync: bool = False


class Metadata:
    """Owner of the statements for the next flush.

    Attributes:
        keepers: of topics whose own rows are kept elsewhere: by name, who says what a record writes.
    """

    __slots__ = ("_handed_on", "_next", "_taken", "keepers")

    def __init__(self) -> None:
        self._next = MetadataBatch()
        self._taken: MetadataBatch | None = None
        self._handed_on: list[MetadataBatch] = []  # written here, and on their way to other nodes
        self.keepers: dict[str, Callable[[TopicRecord], list[Statement]]] = {}

    def __bool__(self) -> bool:
        return bool(self._next.statements)

    def put(self, record: Record, cursor: int = 0, must_sync: bool = False) -> None:
        """Have a record written.

        Args:
            cursor: the number of the channel's cursor, when it is about one.
            must_sync: whether it has to survive a power loss, whatever the durability policy is.
        """
        self._next.records.append(record)
        if self.keepers and isinstance(record, TopicRecord) and record.topic in self.keepers:
            self._next.statements += self.keepers[record.topic](record)
        else:
            self._next.statements += record.statements(cursor)
        self._next.must_sync |= must_sync

    def put_own(self, statement: Statement, must_sync: bool = False) -> None:
        """Have something written that is about this node alone.

        Args:
            must_sync: as for :meth:`put`.
        """
        self._next.statements.append(statement)
        self._next.must_sync |= must_sync

    def put_backlog(self, partition: Partition) -> None:
        """Have written where a partition's backlog begins, and where a paused topic stopped."""
        where = partition.backlog_start, partition.paused_at
        self.put(PutBacklog(partition.topic_name, partition.number, *where))

    def wait(self, *waiters: Waiter) -> None:
        """Call back when the next flush has ended, with None or with why it failed."""
        self._next.waiters += waiters

    def wait_here(self, *waiters: Waiter) -> None:
        """As :meth:`wait`, of what need not be on any other node."""
        self._next.local += waiters

    def wait_for_all(self, waiter: Waiter) -> bool:
        """Call back when everything put so far is written, or could not be; False when nothing is to be written."""
        if self._next.statements:
            self._next.waiters.append(waiter)
        elif self._taken is not None and self._taken.statements:
            self._taken.waiters.append(waiter)
        elif self._handed_on:
            self._handed_on[-1].waiters.append(waiter)
        else:
            return False
        return True

    @property
    def has_waiters(self) -> bool:
        """Whether somebody waits for the next flush."""
        return bool(self._next.waiters or self._next.local)

    def take(self) -> MetadataBatch:
        """Hand over what is to be written; :meth:`ended` says what became of it."""
        self._taken, self._next = self._next, MetadataBatch()
        return self._taken

    def ended(self, batch: MetadataBatch, error: BaseException | None, must_sync: bool) -> None:
        """Take note of a flush; what could not be written goes into the next one.

        Args:
            must_sync: whether the next one has to survive a power loss if this one failed.
        """
        self._taken = None
        if error is not None:
            self._next.records[:0] = batch.records
            self._next.statements[:0] = batch.statements
            self._next.must_sync |= must_sync

    def handing_on(self, batch: MetadataBatch) -> None:
        """It is written here, and its waiters wait for other nodes."""
        self._handed_on.append(batch)

    def handed_on(self, batch: MetadataBatch) -> None:
        """Other nodes have it, or cannot."""
        self._handed_on.remove(batch)
