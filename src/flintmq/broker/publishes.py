"""The publishes of a turn: gathered by partition, written with the turn, committed when it is stored.

Rules of this file: no clock, no socket; a partition that fails does not keep the others from being written.

Source: docs/decisions/0002 (group commit).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from flintmq.broker.deliveries import Deliveries
from flintmq.broker.log_marks import LogMarks
from flintmq.broker.partition import Bounds, Partition, PublishGroup
from flintmq.broker.topic import Topic
from flintmq.errors import DiskFull, StorageError
from flintmq.storage import PartitionLog

_TURN_WEIGHT = 1024 * 1024  # of what one partition writes in one turn, see partition.py


class Publishes:
    """Owner of the partitions that were published to.

    Args:
        topics: all there are, by name.
        report: told what could not be read.
        on_defect: told what was being done, and an exception that nobody expected there.

    Attributes:
        pending: partitions for which :meth:`write_pending` has something to do.
        left_bytes: of publishes that the last turn did not get to write, about.
        write_error: why something published or created last could not be stored; None after the next good write.
        disk_full: why a publish found no room on the disk last; None: none did. It stays after a good write.
        snapshots_due: logs to be synced, so that what they know of producers is written down.
    """

    __slots__ = ("_deliveries", "_marks", "_on_defect", "_report", "_topics", "disk_full",
                 "left_bytes", "pending", "snapshots_due", "write_error")  # fmt: skip

    def __init__(
        self,
        topics: Mapping[str, Topic],
        deliveries: Deliveries,
        marks: LogMarks,
        report: Callable[[StorageError], None],
        on_defect: Callable[[str, Exception], None],
    ) -> None:
        self._topics = topics
        self._deliveries = deliveries
        self._marks = marks
        self._report = report
        self._on_defect = on_defect
        self.pending: dict[Partition, None] = {}
        self.left_bytes = 0
        self.write_error: StorageError | None = None
        self.disk_full: DiskFull | None = None
        self.snapshots_due: dict[PartitionLog, None] = {}

    def publish_to(
        self,
        partition: Partition,
        bodies: Sequence[bytes],
        due_ns: int = 0,
        is_stored_form: bool = False,
        producer: tuple[bytes, int] | None = None,
    ) -> PublishGroup:
        """Publish messages to one partition; they are written at the end of the turn. See :meth:`Partition.publish`.

        Args:
            due_ns: the clock of due times before which they are not delivered, 0 for at once.
            producer: who counts these messages, and the sequence that it gave the first of them; see
                :meth:`Partition.publish_once`.
        """
        if producer is not None:
            group = partition.publish_once(*producer, bodies, due_ns, is_stored_form)
            self.take_up(partition)
            self.note_snapshot(partition)
            return group
        if partition.bounds is not None:
            partition.bounds.admit(partition, bodies)
        self.pending[partition] = None
        return partition.publish(bodies, due_ns, is_stored_form)

    def take_up(self, partition: Partition) -> None:
        """Write with the turn what a partition has pending."""
        if partition.has_pending:
            self.pending[partition] = None

    def forget(self, partition: Partition) -> None:
        """Drop a partition that is deleted."""
        self.pending.pop(partition, None)

    def note_snapshot(self, partition: Partition) -> None:
        """Have a partition's log synced when what it knows of producers is to be written down."""
        log = partition.log
        if log.producers.is_snapshot_due and isinstance(log, PartitionLog) and log.failed is None:
            self.snapshots_due[log] = None

    @property
    def has_held(self) -> bool:
        """Whether something was published that waits for files of its topic, or for the database."""
        partitions = (partition for topic in self._topics.values() for partition in topic.partitions.values())
        return any(partition.has_pending and not partition.is_writable for partition in partitions)

    def write_pending(self, wall_ns: int) -> list[PublishGroup]:
        """Append what the turn published; return the groups that now wait for durability."""
        if not self.pending:
            return []
        groups: list[PublishGroup] = []
        error: StorageError | None = None
        is_stored = False
        for partition in list(self.pending):
            del self.pending[partition]  # first: if writing it goes wrong, the others come in the next turn
            if not partition.is_writable:
                continue  # until its files are there, or the database knows what it has to
            self._marks.grown[partition] = None
            # a quarter of what there is at least: it does not grow beyond four times what a turn brings
            weight = partition.pending_weight
            left = weight // 4 if weight > 4 * _TURN_WEIGHT else _TURN_WEIGHT
            try:
                while left > 0 and partition.has_pending:
                    group = partition.write_pending(wall_ns, left)
                    left -= partition.written_weight
                    if partition.write_error is not None:
                        error = error or partition.write_error
                        if isinstance(partition.write_error, DiskFull):
                            self.disk_full = partition.write_error
                    if group is not None:
                        groups.append(group)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; what the others have written is answered
                self._on_defect(f"writing to topic {partition.topic_name} partition {partition.number}", defect)
                partition.end_pending(StorageError(f"{partition.topic_name}: {defect!r}"))
            if partition.written_weight and isinstance(partition.log, PartitionLog):
                is_stored = True  # what goes into memory says nothing of the disk
            if partition.has_pending:
                self.pending[partition] = None
        if error is not None or is_stored:
            self.write_error = error
        self.left_bytes = sum(partition.pending_weight for partition in self.pending) if self.pending else 0
        return groups

    def commit_groups(self, groups: Iterable[PublishGroup]) -> None:
        """Nothing more is waited for: answer the publishers and let consumers see the messages, in the log's order."""
        for group in groups:
            partition = group.partition
            if partition.is_handed_over:
                continue
            try:
                if partition.is_deleted:
                    group.end(None)
                else:
                    self._marks.grown[partition] = None
                    partition.commit_through(partition.storable_end)
                if partition.bounds is not None:
                    self._bound_backlog(partition, partition.bounds)
            except Exception as defect:  # noqa: BLE001 - on_defect tells it; the other publishers are answered
                self._on_defect(f"answering publishers of topic {partition.topic_name}", defect)
                if partition.watermark is None:
                    self._end_group(group)
            self._deliveries.mark_waiting(partition.channels.values())

    def set_watermark(self, partition: Partition, sequence: int | None) -> None:
        """Let nothing at or beyond ``sequence`` be committed, until told otherwise; None: no limit.

        What lies below it is committed as soon as nothing else is waited for.

        Raises:
            ValueError: more is committed already.
        """
        committed = partition.log.committed_sequence
        if sequence is not None and sequence < committed:
            where = f"topic {partition.topic_name} partition {partition.number}"
            raise ValueError(f"{where}: watermark {sequence} is below {committed}, up to which it is committed")
        partition.watermark = sequence
        try:
            partition.commit_through(partition.storable_end)
            if partition.bounds is not None:
                self._bound_backlog(partition, partition.bounds)
        except Exception as defect:  # noqa: BLE001 - as in commit_groups
            self._on_defect(f"answering publishers of topic {partition.topic_name}", defect)
        self._deliveries.mark_waiting(partition.channels.values())

    def _bound_backlog(self, partition: Partition, bounds: Bounds) -> None:
        """Something published has been stored: drop what is too much that no channel has been given."""
        try:
            for channel in bounds.committed(partition):
                self._deliveries.mark(channel)
        except StorageError as error:
            self._report(error)

    def _end_group(self, group: PublishGroup) -> None:
        """Answer the publishers of what is stored, whatever went wrong on the way; nothing when they are."""
        try:
            group.end(None)
        except Exception as defect:  # noqa: BLE001 - as in commit_groups
            self._on_defect(f"answering publishers of topic {group.partition.topic_name}", defect)
