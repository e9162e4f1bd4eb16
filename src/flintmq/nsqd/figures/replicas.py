"""A node's part in a cluster, written down for ``/stats``, ``/metrics`` and ``/coordinator/stats``.

Rules of this file: what is here is handed in by whoever knows it, so that an nsqd without a cluster loads nothing of
one; there are at most ``ROWS_MAX`` series of partitions, the others are counted.

Source: Youzan's HTTP API (``/coordinator/stats``); the names of metrics follow
https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flintmq.net.metrics import Family, labels_of
from flintmq.nsqd.in_turns import in_turns
from flintmq.nsqd.replica_figures import ClusterFigures, ClusterPart, FollowerFigures, ReplicaFigures

ROWS_MAX = 5000
_NAMESPACE = "flintmq_nsqd"

Row = dict[str, Any]


# -- /stats ------------------------------------------------------------------------------------------------------------


def replica_row(replica: ReplicaFigures) -> Row:
    """Return what JSON says of one partition."""
    row: Row = {
        "topic_name": replica.topic,
        "topic_partition": str(replica.partition),
        "is_leader": replica.is_leader,
        "state": replica.state,
        "epoch": replica.epoch,
        "leader": replica.leader,
        "in_sync": list(replica.in_sync),
        "replicas": list(replica.replicas),
        "leaving": list(replica.leaving),
        "committed_sequence": replica.committed,
        "next_sequence": replica.end,
        "lag": replica.lag,
        "may_have_lost": replica.may_have_lost,
    }
    if replica.is_leader:
        row |= {"is_ready": replica.is_ready, "is_writable": replica.is_writable}
        row["followers"] = [
            {
                "node": each.node,
                "host": each.host,
                "in_sync": each.is_in_sync,
                "connected": each.is_connected,
                "catching_up": each.is_catching_up,
                "lag": each.lag,
                "progress": each.progress,
            }
            for each in replica.followers
        ]
    return row


def cluster_row(figures: ClusterFigures, replicas: Sequence[Any]) -> Row:
    """Return what JSON says of the node and its partitions."""
    return {
        "name": figures.cluster,
        "node": figures.node,
        "incarnation": figures.incarnation,
        "has_lease": figures.has_lease,
        "store_revision": figures.revision,
        "problem": figures.problem,
        "elected_count": figures.elected_count,
        "ended_count": figures.ended_count,
        "joined_count": figures.joined_count,
        "left_count": figures.left_count,
        "caught_up_count": figures.caught_up_count,
        "leader_count": figures.leader_count,
        "replica_count": figures.replica_count,
        "set_aside_count": figures.set_aside_count,
        "double_topics": figures.double_topics,
        "replicas": list(replicas),
    }


def replica_text(replica: ReplicaFigures) -> str:
    """Write the line of one partition, and of each follower that lacks something."""
    name = f"{replica.topic}-{replica.partition}"
    leader = "leader" if replica.is_leader else f"of {replica.leader or 'no leader'}"
    lines = [
        f"   [{name:<15}] {leader:<19} epoch: {replica.epoch:<4} in sync: {len(replica.in_sync)} of "
        f"{len(replica.replicas)} lag: {replica.lag:<6} end: {replica.end:<8} {replica.state}"
    ]
    lines += [
        f"      [{each.node} {each.host}] {_follower_state(each)} lag: {each.lag}"
        for each in replica.followers
        if each.lag or not each.is_in_sync
    ]
    return "\n".join(lines)


def _follower_state(follower: FollowerFigures) -> str:
    if follower.is_in_sync:
        return "in sync"
    if follower.is_catching_up:
        return f"catching up, {follower.progress} %"
    return "connected" if follower.is_connected else "away"


def cluster_text(figures: ClusterFigures, lines: Sequence[str]) -> str:
    """Write the lines of the node and its partitions, without the last end of line."""
    lease = "has its lease" if figures.has_lease else figures.problem or "has no lease"
    head = (
        f"Cluster: {figures.cluster} node {figures.node} {lease}, leads {figures.leader_count} of "
        f"{figures.replica_count}, elected: {figures.elected_count} joined: {figures.joined_count} "
        f"left: {figures.left_count}"
    )
    return "\n".join([head, *lines])


# -- /coordinator/stats ------------------------------------------------------------------------------------------------


def coordinator_row(node: str, replica: ReplicaFigures) -> Row:
    """Return a partition as the redesigned NSQ has it."""
    progress = {each.node: (each.host, each.progress) for each in replica.followers}
    catching_up = [each for each in replica.replicas if each not in replica.in_sync]
    return {
        "node": node,
        "name": replica.topic,
        "partition": replica.partition,
        "may_have_lost": replica.may_have_lost,
        "isr_stats": [{"hostname": progress.get(each, ("", 0))[0], "node_id": each} for each in replica.in_sync],
        "catchup_stats": [
            {"hostname": progress.get(each, ("", 0))[0], "node_id": each, "progress": progress.get(each, ("", 0))[1]}
            for each in catching_up
        ],
    }


def coordinator_stats(rows: Sequence[Row]) -> Row:
    """Return the whole answer; of calls between nodes and their errors it has no count of its own."""
    return {"rpc_stats": None, "ErrStats": {"OtherCoordErrs": {}}, "topic_coord_stats": list(rows)}


# -- /metrics ----------------------------------------------------------------------------------------------------------


async def families(part: ClusterPart, rows_max: int = ROWS_MAX) -> list[Family]:
    """Return what Prometheus is told; others get their turn meanwhile."""
    figures = part.figures()
    in_sync = _family("partition_in_sync", "gauge", "Copies of a partition that are in sync, as its leader has it")
    wanted = _family("partition_replicas", "gauge", "Copies of a partition that there are to be")
    epoch = _family("partition_epoch", "gauge", "How often a leader of the partition was elected")
    leads = _family("partition_leader", "gauge", "1 where this nsqd leads the partition")
    lag = _family("partition_lag_messages", "gauge", "Messages of a partition led here that its furthest copy lacks")
    counts = dict.fromkeys(("leader", "follower"), 0)
    under = unready = unwritable = lossy = catching_up = left_out = shown = 0
    async for replica in in_turns(part.replicas()):
        counts["leader" if replica.is_leader else "follower"] += 1
        if replica.is_leader:
            under += not replica.is_whole
            unready += not replica.is_ready
            unwritable += not replica.is_writable
            lossy += replica.may_have_lost
            catching_up += sum(each.is_catching_up for each in replica.followers)
        if shown >= rows_max:
            left_out += 1
            continue
        shown += 1
        labels = labels_of(topic=replica.topic, partition=str(replica.partition))
        epoch.add(replica.epoch, labels)
        leads.add(replica.is_leader, labels)
        if replica.is_leader:
            in_sync.add(len(replica.in_sync), labels)
            wanted.add(len(replica.replicas), labels)
            lag.add(replica.lag, labels)
    replicas = _family("replicas", "gauge", "Partitions of the cluster of which there is a copy here, by role")
    for role, count in counts.items():
        replicas.add(count, labels_of(role=role))
    changes = _family(
        "in_sync_changes_total", "counter", "Copies of what is led here that joined or left those in sync"
    )
    changes.add(figures.joined_count, labels_of(change="joined")).add(figures.left_count, labels_of(change="left"))
    gauges = (
        ("cluster_lease_held", "1 while the coordination store knows that this nsqd lives", figures.has_lease),
        ("under_replicated", "Partitions led here of which not every copy is in sync", under),
        ("not_ready", "Partitions led here that cannot be consumed yet", unready),
        ("not_writable", "Partitions led here in which nothing can be acknowledged", unwritable),
        ("may_have_lost", "Partitions led here that may have lost messages, until that is acknowledged", lossy),
        ("catching_up", "Copies of what is led here that are catching up", catching_up),
        ("partitions_left_out", f"Partitions that are not shown, because there are more than {rows_max}", left_out),
    )
    return [
        *(_family(name, "gauge", about).add(value) for name, about, value in gauges),
        replicas,
        _family("elections_total", "counter", "Elections of this nsqd as a leader").add(figures.elected_count),
        _family("leaderships_ended_total", "counter", "Partitions that it led no longer").add(figures.ended_count),
        changes,
        _family("catch_ups_total", "counter", "Copies of what is led here that caught up").add(figures.caught_up_count),
        epoch,
        leads,
        in_sync,
        wanted,
        lag,
    ]


def _family(name: str, kind: Any, about: str) -> Family:
    return Family(f"{_NAMESPACE}_{name}", kind, about)
