"""The judgement of a cluster's state: what is wrong, how bad that is, and what to do about it.

Rules of this file: no IO; what is wrong with many partitions of a topic in the same way is one finding. ``problem``:
somebody fails now; ``warning``: all goes on, with less than is wanted; ``note``: good to know.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

from flintmq.client.admin.results import ClusterNode, ClusterPartition, ClusterStatus, ClusterTopic

NOTE, WARNING, PROBLEM = "note", "warning", "problem"
_SHOWN_MAX = 8
"""Partitions that are named one by one."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """One thing that is not as it should be.

    Attributes:
        level: ``note``, ``warning`` or ``problem``.
        subject: what it is about.
        text: what is so.
        advice: what to do.
    """

    level: str
    subject: str
    text: str
    advice: str = ""


def troubles(status: ClusterStatus) -> list[Trouble]:
    """Return what is not as it should be, of the cluster as a whole first."""
    found = [*_of_coordination(status), *_of_nodes(status.nodes)]
    live = {node.node for node in status.nodes if not node.suspected}
    hosts = {node.node: node.host_id for node in status.nodes}
    for topic in status.topics:
        found += _of_topic(topic, live, hosts)
    return found


def is_whole(status: ClusterStatus) -> bool:
    """Whether everything is as it is wanted."""
    return all(each.level == NOTE for each in troubles(status))


def store_away(status: ClusterStatus) -> str:
    """Tell that who gave this status is without the coordination store; empty: it is not."""
    if status.store_away_since_s is None:
        return ""
    since = datetime.fromtimestamp(status.store_away_since_s, UTC)
    return (
        f"this nsqlookupd is without the coordination store since {since:%Y-%m-%d %H:%M:%S} UTC: what it says of nodes "
        "and leaders is as it was then, it elects nobody, and creates no topic"
    )


def _of_coordination(status: ClusterStatus) -> list[Trouble]:
    subject = f"cluster {status.cluster}"
    found = []
    if status.problem:
        found.append(Trouble(PROBLEM, subject, f"this nsqlookupd takes no part: {status.problem}"))
    if away := store_away(status):
        advice = "is the store there (an etcd, or the nsqlookupd that keeps it), and can it be reached? see the logs"
        found.append(Trouble(PROBLEM, subject, away, advice))
    elif status.master is None:
        advice = "is the coordination store there, and a nsqlookupd with --cluster-store? look at their logs"
        text = "no nsqlookupd is the master: nobody is elected, and no topic is created"
        found.append(Trouble(PROBLEM, subject, text, advice))
    elif len(status.lookupds) == 1:
        text = "one nsqlookupd coordinates alone: while it is away, nobody is elected"
        found.append(Trouble(NOTE, subject, text, "start a second one with the same --cluster-store"))
    if status.settings.get("is_upgrading"):
        text = "it is being upgraded: no copy is moved, and no node is drained"
        found.append(Trouble(NOTE, subject, text, "when all nodes are restarted: flintmq cluster upgrade done"))
    for each in status.unreadable:
        text = f"key {each.get('key', '?')} of the store cannot be read: {each.get('reason', '')}"
        advice = "a newer release wrote it, or it was changed by hand: run releases that fit together, or restore it"
        found.append(Trouble(PROBLEM, subject, text, advice))
    return found


def _of_nodes(nodes: Iterable[ClusterNode]) -> list[Trouble]:
    found: list[Trouble] = []
    versions: dict[int, list[str]] = {}
    empty = True
    for node in nodes:
        empty = False
        subject = f"node {node.node} ({node.address})"
        versions.setdefault(node.version, []).append(node.address)
        if node.suspected:
            text = "it does not listen: it is taken for dead, and its lease is about to end"
            found.append(Trouble(WARNING, subject, text, "start it again; what it lacks it catches up by itself"))
        if node.is_full:
            text = "its disk has no room: it leads nothing that another one can lead, and falls out of sync"
            found.append(Trouble(PROBLEM, subject, text, "free space: it goes on by itself; or shorten retention"))
        if node.is_older:
            text = "its data directory was an older copy when it started: what it had in sync before counts no more"
            advice = "a snapshot that was put back, or a disk that lost what it had synced? it catches up by itself"
            found.append(Trouble(NOTE, subject, text, advice))
        if node.is_draining:
            found.append(Trouble(NOTE, subject, "it drains: it leads nothing, and gets no partitions"))
    if empty:
        advice = "start nsqd with --cluster-store and --lookupd-tcp-address"
        found.append(Trouble(PROBLEM, "nodes", "no nsqd is in the cluster", advice))
    if len(versions) > 1:
        shown = "; ".join(f"{version}: {', '.join(sorted(names))}" for version, names in sorted(versions.items()))
        text = f"nodes say different versions of what they say to each other ({shown})"
        found.append(Trouble(WARNING, "nodes", text, "finish the upgrade: versions further apart than 1 do not talk"))
    return found


def _of_topic(topic: ClusterTopic, live: set[str], hosts: dict[str, str]) -> list[Trouble]:
    subject = f"topic {topic.topic}"
    if topic.is_deleting:
        return [Trouble(NOTE, subject, "it is being deleted")]
    unled: dict[str, list[int]] = {}
    stopped: dict[str, list[int]] = {}
    lacking: dict[str, list[int]] = {}
    unready: list[int] = []
    lossy: list[int] = []
    together: list[int] = []
    for each in topic.partitions:
        in_sync = [node for node in each.in_sync if node in live]
        if not each.leader:
            unled.setdefault(each.reason, []).append(each.partition)
        elif len(in_sync) < topic.min_in_sync:
            text = f"{len(in_sync)} of {topic.replicator} copies are in sync, and an OK needs {topic.min_in_sync}"
            stopped.setdefault(text, []).append(each.partition)
        elif len(in_sync) < topic.replicator:
            lacking.setdefault(_lacking(each, in_sync, topic.replicator), []).append(each.partition)
        if each.leader and not each.is_ready:
            unready.append(each.partition)
        if each.may_have_lost:
            lossy.append(each.partition)
        machines = [hosts.get(node, "") for node in each.replicas]
        if len(machines) > len(set(machines)) and all(machines):
            together.append(each.partition)
    elect = "start all nodes that have copies; if their disks are lost: flintmq topic elect --dry-run says what is lost"
    power = (
        "messages that were acknowledged before may be lost: all who were in sync had lost their power, or an operator "
        f"elected. When that is known: flintmq topic acknowledge-loss {topic.topic}. Run nodes with --durability=fsync "
        "where it must not be"
    )
    start = "start the nodes that are away; what they lack they catch up by themselves"
    return [
        *_group(PROBLEM, subject, "nobody leads: ", unled, elect),
        *_group(PROBLEM, subject, "nothing is acknowledged: ", stopped, start),
        *_group(WARNING, subject, "", lacking, start),
        *_group(PROBLEM, subject, "", {"was led on without knowing everything": lossy}, power),
        *_group(WARNING, subject, "", {"cannot be consumed yet: its leader was elected a moment ago": unready}, ""),
        *_group(NOTE, subject, "", {"has several copies on one machine": together}, ""),
    ]


def _lacking(partition: ClusterPartition, in_sync: list[str], wanted: int) -> str:
    if len(partition.replicas) < wanted:
        return f"{len(in_sync)} of {wanted} copies are in sync, and {wanted - len(partition.replicas)} have no place"
    return f"{len(in_sync)} of {wanted} copies are in sync"


def _group(level: str, subject: str, what: str, found: dict[str, list[int]], advice: str) -> list[Trouble]:
    return [
        Trouble(level, subject, f"{_partitions(numbers)}: {what}{text}", advice)
        for text, numbers in found.items()
        if numbers
    ]


def _partitions(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_SHOWN_MAX]))
    more = f" and {len(numbers) - _SHOWN_MAX} more" if len(numbers) > _SHOWN_MAX else ""
    return f"partition {shown}" if len(numbers) == 1 else f"partitions {shown}{more}"
