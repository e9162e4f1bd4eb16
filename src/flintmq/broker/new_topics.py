"""Topics whose files are being made; those of a topic with partitions when the database knows it.

Rules of this file: nothing here blocks; what was deleted meanwhile is removed when its files are there.

Source: docs/decisions/0002, docs/decisions/0009.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from flintmq.broker.metadata import Metadata, Waiter
from flintmq.broker.topic import Topic
from flintmq.errors import StorageError
from flintmq.storage import Creation

_CREATIONS_MAX = 16  # topics whose files are made at once


@dataclass(slots=True, eq=False)
class NewTopic:
    """A topic whose logs have no files yet.

    Attributes:
        creations: of its logs.
        is_recorded: whether the files may be made; those of a topic with partitions when the database has its meta,
            without which they would be found as a plain topic's.
        is_under_way: whether the files are being made.
        waiters: who is told when they are, and the topic is as durable as its channels, or why not.
    """

    topic: Topic
    creations: list[Creation]
    is_recorded: bool = True
    is_under_way: bool = False
    waiters: list[Waiter] = field(default_factory=list)

    @property
    def error(self) -> Exception | None:
        """Why its files could not be made; None when they were."""
        return next((creation.error for creation in self.creations if creation.error is not None), None)

    def finish(self) -> None:
        """Let those of its logs take appends that have files."""
        for creation in self.creations:
            if creation.error is None:
                creation.finish()


class NewTopics:
    """Owner of the topics that have no files yet.

    Args:
        metadata: which has to have some of them before.
        created: told of a topic that has its files.
        refused: told of a topic that cannot have them, and why.
        deleted: told of a topic that was deleted while they were made, and has them.
    """

    __slots__ = ("_by_topic", "_created", "_deleted", "_deleted_early", "_metadata", "_refused")

    def __init__(
        self,
        metadata: Metadata,
        created: Callable[[NewTopic], None],
        refused: Callable[[NewTopic, StorageError], None],
        deleted: Callable[[NewTopic], None],
    ) -> None:
        self._metadata = metadata
        self._created = created
        self._refused = refused
        self._deleted = deleted
        self._by_topic: dict[Topic, NewTopic] = {}
        self._deleted_early: list[NewTopic] = []  # while their files were being made

    def __contains__(self, topic: Topic) -> bool:
        return topic in self._by_topic

    def add(self, topic: Topic, creations: list[Creation], is_recorded: bool) -> None:
        """Have the files of a topic made.

        Args:
            is_recorded: False when the database has to have what was put into the metadata last before they are.
        """
        new = self._by_topic[topic] = NewTopic(topic, creations, is_recorded)
        if not is_recorded:
            self._metadata.wait_here(lambda error: self._recorded(new, error))

    def _recorded(self, new: NewTopic, error: BaseException | None) -> None:
        """The database has a new topic's meta, or could not take it."""
        if self._by_topic.get(new.topic) is not new:
            return  # deleted meanwhile
        if error is None:
            new.is_recorded = True
        else:
            del self._by_topic[new.topic]
            self._refused(new, StorageError(f"cannot create topic {new.topic.name}: {error}"))

    def wait(self, waiter: Waiter, topic: Topic | None) -> bool:
        """Call back when a topic has its files, or cannot have them; False when it does not wait for any.

        Args:
            topic: None for those alone that were deleted while their files were being made.
        """
        new = None if topic is None else self._by_topic.get(topic)
        if new is None and self._deleted_early:
            new = self._deleted_early[-1]
        if new is not None:
            new.waiters.append(waiter)
        return new is not None

    def delete(self, topic: Topic) -> bool:
        """Forget a topic that is deleted; False when it has its files, which are to be removed."""
        new = self._by_topic.get(topic)
        if new is None:
            return False
        if new.is_under_way:
            self._deleted_early.append(new)  # its files go when they are there
        else:
            del self._by_topic[topic]
            self._metadata.wait(*new.waiters)
        return True

    @property
    def log_count(self) -> int:
        """Logs that have no files yet, or whose files are being made."""
        return sum(len(new.creations) for new in self._by_topic.values())

    @property
    def has_some(self) -> bool:
        """Whether files are to be made, or are being made."""
        return bool(self._by_topic) and any(new.is_recorded for new in self._by_topic.values())

    def take(self) -> list[NewTopic]:
        """Topics whose files are to be made now; the caller does it with :func:`flintmq.storage.create_logs`."""
        taken = list(islice((new for new in self._by_topic.values() if new.is_recorded), _CREATIONS_MAX))
        for new in taken:
            # one after the other, so that no directory is made that an earlier topic of that name has not left yet
            assert not new.is_under_way, "the last ones have ended"
            new.is_under_way = True
        return taken

    def ended(self, taken: Sequence[NewTopic]) -> None:
        """Take note of files that were made, or could not be."""
        for new in taken:
            del self._by_topic[new.topic]
            if new in self._deleted_early:
                self._deleted_early.remove(new)
                if new.error is None:
                    self._deleted(new)
                self._metadata.wait(*new.waiters)
            elif new.error is not None:
                self._refused(new, StorageError(f"cannot create topic {new.topic.name}: {new.error}"))
            else:
                new.finish()
                self._created(new)
                self._metadata.wait(*new.waiters)
