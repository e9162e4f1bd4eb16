"""The conditions of messages before their publisher is answered and anybody gets them (``--durability``).

- ``fsync``: the publishers of a turn wait until their batch survived ``fdatasync``; while one sync runs, the next turns
  gather.
- ``os``: they wait until the kernel has it, and where a topic says so (``syncdisk``) for a sync.
- ``interval``: as ``os``; a sync of all logs follows every ``--sync-every`` messages or ``--sync-timeout``.

A policy gives each group that has been written the conditions that it waits for
(:meth:`flintmq.broker.partition.PublishGroup.add_condition`). A group is answered and delivered when it has none left
and those before it in its partition have none either. In a cluster it also waits until the in-sync replicas have the
batch, which no policy says: the partition's watermark does (:meth:`flintmq.broker.broker.Broker.set_watermark`).

Rules of this file: decisions alone; who writes, syncs and sets timers is :class:`flintmq.nsqd.engine.Engine`.

Source: docs/decisions/0002.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from flintmq.broker.partition import PublishGroup


@dataclass(slots=True)
class Written:
    """Consequences of a write of groups.

    Attributes:
        syncing: groups with a condition that is met when their logs have been synced.
        due: logs to be synced although nobody waits for it.
        is_sync_due: whether a sync is to begin now.
        is_sync_timed: whether one is to begin after ``--sync-timeout`` at the latest.
    """

    syncing: list[PublishGroup] = field(default_factory=list)
    due: dict[Any, None] = field(default_factory=dict)
    is_sync_due: bool = False
    is_sync_timed: bool = False


class Durability:
    """A policy; this one is ``os``.

    Attributes:
        syncs_files: whether the files of new topics survive a power loss before anything is written to them.
        syncs_progress: whether the progress of channels does with every flush.
        waits_for_syncs: whether every publish waits for a sync, which then tells how far its log is.
    """

    syncs_files: ClassVar[bool] = False
    syncs_progress: ClassVar[bool] = False
    waits_for_syncs: ClassVar[bool] = False

    def written(self, groups: Sequence[PublishGroup]) -> Written:
        """Give groups that have just been written their conditions."""
        result = Written()
        for group in groups:
            every = group.partition.meta.syncdisk
            if not every:
                continue
            log = group.partition.log
            if every == 1:
                group.add_condition()
                result.syncing.append(group)
            elif log.next_sequence - log.synced_sequence >= every:
                result.due[log] = None
        result.is_sync_due = bool(result.syncing or result.due)
        return result

    def sync_begins(self) -> None:
        """A sync of everything written so far begins."""

    def logs_to_sync(self, groups: Iterable[PublishGroup], due: Iterable[Any], logs: Iterable[Any]) -> list[Any]:
        """Return the logs that a sync is about.

        Args:
            groups: that wait for it.
            due: logs for which it is time.
            logs: all there are.
        """
        living = {group.partition.log: None for group in groups if not group.partition.is_deleted}
        return list({**living, **dict.fromkeys(due)})


class FsyncDurability(Durability):
    """``fsync``."""

    syncs_files = True
    syncs_progress = True
    waits_for_syncs = True

    def written(self, groups: Sequence[PublishGroup]) -> Written:
        """All wait for a sync, but for what nobody waits for on a partition that is worth none."""
        syncing = [group for group in groups if group.waiters or not group.partition.is_unwaited]
        for group in syncing:
            group.add_condition()
        return Written(syncing, is_sync_due=bool(syncing))


class IntervalDurability(Durability):
    """``interval``.

    Args:
        sync_every: messages between two syncs, from 1 on.
    """

    syncs_files = True

    def __init__(self, sync_every: int) -> None:
        self._sync_every = sync_every
        self._unsynced_count = 0

    def written(self, groups: Sequence[PublishGroup]) -> Written:
        """As with ``os``, and now and then a sync of all."""
        result = super().written(groups)
        unwaited = [group for group in groups if not group.conditions]
        self._unsynced_count += sum(group.end_sequence - group.partition.log.committed_sequence for group in unwaited)
        result.is_sync_due = result.is_sync_due or self._unsynced_count >= self._sync_every
        result.is_sync_timed = True
        return result

    def sync_begins(self) -> None:
        """Count anew: what comes from now on is not in it."""
        self._unsynced_count = 0

    def logs_to_sync(self, groups: Iterable[PublishGroup], due: Iterable[Any], logs: Iterable[Any]) -> list[Any]:
        """All of them."""
        return list(logs)


def durability_of(name: str, sync_every: int) -> Durability:
    """The policy of that name."""
    if name == "interval":
        return IntervalDurability(sync_every)
    return FsyncDurability() if name == "fsync" else Durability()
