"""Questions to a nsqlookupd of a cluster over HTTP. Each function is a method of ``LookupdAdmin``, in both flavours.

Rules of this file: as in :mod:`flintmq.client.admin.nsqd`. Any nsqlookupd of the cluster may be asked; it hands changes
on to the master. An order is answered when it stands in the coordination store, with what it comes to (``copies`` that
are made and taken away, ``copy_count``, ``notes``); it is carried out in the background. One that is in no cluster
answers 404.

Source: Youzan's nsqlookupd.
"""

from __future__ import annotations

from typing import Any, Literal

from flintmq.client.admin.question import Question, fields, get, plan, post, struct
from flintmq.client.admin.results import ClusterStatus, Election, Elections, Move, Moves


def cluster_status(*, topic: str | None = None) -> Question[ClusterStatus]:
    """Return the state of the cluster: its nodes, and of every partition who leads and who is in sync.

    Args:
        topic: only this one; None for all.
    """
    return get("/cluster/status", struct(ClusterStatus), topic=topic)


def elect(topic: str, partition: int, node: str = "", *, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Let a node lead a partition that nobody can lead without losing something; what that node lacks is lost. Where no
    node that lives has a copy the partition begins anew, with an empty log.

    Args:
        node: that has a copy, by id or address; empty: the one that has most of those that answer. Where none has a
            copy, any that lives.
        dry_run: change nothing, and return who would lead and what would be lost.
    """
    words: dict[str, Any] = {"topic": topic, "partition": partition, "node": node or None, "dry_run": dry_run or None}
    return post("/cluster/partition/elect", plan, **words)


def acknowledge_loss(topic: str, partition: int, *, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Have the cluster say no more that messages of a partition may be lost, because a leader was elected without all
    copies.

    Args:
        dry_run: change nothing, and return what would be done.
    """
    return post("/cluster/loss/acknowledge", plan, topic=topic, partition=partition, dry_run=dry_run or None)


def expand_topic(topic: str, partitions: int, *, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Give a topic of a cluster more partitions; those that are there stay as they are.

    Args:
        partitions: in all.
        dry_run: change nothing, and return what would be done.
    """
    return post("/topic/partition/expand", plan, topic=topic, partition_num=partitions, dry_run=dry_run or None)


def move_partition(
    topic: str, partition: int, source: str, target: str, *, dry_run: bool = False
) -> Question[dict[str, Any] | None]:
    """Move a copy of a partition of a cluster to another node; it is made there first, then taken away here.

    Args:
        source, target: nodes, by id or address.
        dry_run: change nothing, and return what would be done.
    """
    return post(
        "/topic/partition/move", plan, topic=topic, partition=partition, move_source=source, move_target=target,
        dry_run=dry_run or None,
    )  # fmt: skip


def drain_node(node: str, *, undo: bool = False, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Have a node of a cluster lead nothing, and give its copies to others.

    Args:
        node: by id or address.
        undo: let it have partitions again instead.
        dry_run: change nothing, and return what would be done.
    """
    return post("/cluster/node/drain", plan, node=node, undo=undo or None, dry_run=dry_run or None)


def remove_node(node: str, *, dry_run: bool = False) -> Question[dict[str, Any] | None]:
    """Drain a node of a cluster for good, and forget it when it has nothing any more.

    Args:
        node: by id or address.
        dry_run: change nothing, and return what would be done.
    """
    return post("/cluster/node/remove", plan, remove_node=node, dry_run=dry_run or None)


def cluster_moves() -> Question[list[Move]]:
    """Return the copies that are being made, or taken away."""

    def read(body: bytes) -> list[Move]:
        return struct(Moves)(body).moves

    return get("/cluster/moves", read)


def cluster_elections(*, topic: str | None = None) -> Question[list[Election]]:
    """Return who began or ceased to lead since this nsqlookupd was started, the latest first, at most 1000.

    Args:
        topic: only of this one; None for all.
    """

    def read(body: bytes) -> list[Election]:
        return struct(Elections)(body).elections

    return get("/cluster/elections", read, topic=topic)


def cluster_stats(*, top: int | None = None) -> Question[dict[str, Any]]:
    """Return the load of the nodes of a cluster, as the redesigned NSQ has it.

    Args:
        top: so many topics with the highest load as well.
    """
    return get("/cluster/stats", fields, topn=top)


def set_balance(
    *, enabled: bool | None = None, window: str | None = None, dry_run: bool = False
) -> Question[dict[str, Any] | None]:
    """Let the cluster spread leaders and copies by load by itself, or not.

    Args:
        enabled: None leaves it as it is.
        window: hours of the day in which copies are moved, as ``02-05``, UTC; None leaves it as it is.
        dry_run: change nothing, and return what would be done.
    """
    return post("/cluster/balance", plan, enabled=enabled, window=window, dry_run=dry_run or None)


def balance_top() -> Question[dict[str, Any]]:
    """Return the topics and nodes with the highest load."""
    return get("/cluster/balance/topn", fields)


def begin_upgrade() -> Question[dict[str, Any] | None]:
    """Have no copy moved from now on, because nodes are being restarted one after the other."""
    return post("/cluster/upgrade/begin", plan)


def end_upgrade() -> Question[dict[str, Any] | None]:
    """Let copies be moved again."""
    return post("/cluster/upgrade/done", plan)


def balance_by_load(enabled: bool) -> Question[dict[str, Any] | None]:
    """Let copies be moved by load, or not.

    Args:
        enabled: False: they are moved only to spread them evenly.
    """
    return post("/cluster/balance/topn", plan, enable=enabled)


def tombstone_lookupd(node: str, *, restore: bool = False) -> Question[dict[str, Any] | None]:
    """Name a nsqlookupd to clients no more.

    Args:
        node: its ``ID`` in ``/listlookup``.
        restore: name it again instead.
    """
    return post("/cluster/lookupd/tombstone", plan, node=node, restore=restore or None)


def disable_write(kind: Literal["all", "ordered", "none"]) -> Question[dict[str, Any] | None]:
    """Name no leaders to those who want to publish, so that writing comes to rest; consuming goes on.

    Args:
        kind: of all topics, of those that are consumed in order, or of none, as before.
    """
    return post("/disable/write", plan, type=kind)
