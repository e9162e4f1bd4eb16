"""The judgement of a cluster's state: what is wrong, how bad that is, and what to do about it.

Rules of this file: no IO; what is wrong with many partitions of a topic in the same way is one finding. ``problem``:
somebody fails now; ``warning``: all goes on, with less than is wanted; ``note``: good to know.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial

from flintmq.client.admin.results import ClusterNode, ClusterPartition, ClusterStatus, ClusterTopic
from flintmq.names import listed
from flintmq.topic_meta import NO_COPY, NOT_CREATED, TO_COME, TO_DECIDE

NOTE, WARNING, PROBLEM = "note", "warning", "problem"
CROWDED = 0.9
"""Of the copies for which a node has open files: from then on that is said."""
UNREADY_S = 10.0
"""A leader that has not said for so long that it is ready was not elected a moment ago."""
_SHOWN_MAX = 8
"""Partitions, or nodes, that are named one by one."""
_ADVICE_ON_SILENCE = (
    "does it reach this nsqlookupd (--lookupd-tcp-address) and the coordination store? its log says more"
)


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
    found = [*_of_coordination(status), *_of_nodes(status.nodes), *_of_drains(status)]
    nodes = {node.node: node for node in (*away_nodes(status), *status.nodes)}
    waits = _Waits(status)
    for topic in status.topics:
        found += _of_topic(topic, nodes, bool(store_read_only(status)), waits)
    return found


def away_nodes(status: ClusterStatus) -> list[ClusterNode]:
    """Return the nodes that have copies, or are to have some, and do not live, by id.

    A nsqlookupd of a release that does not name them leaves out their addresses; then those of the topics that the
    status has are found.
    """
    here = {node.node for node in status.nodes}
    known = {node.node: node for node in status.away if node.node not in here}
    held: dict[str, int] = {}
    for topic in status.topics:
        for each in topic.partitions:
            for node in {*each.replicas, *each.leaving, *each.in_sync} - here - known.keys():
                held[node] = held.get(node, 0) + 1
    found = [ClusterNode(node, "", 0, 0, holds=count, is_away=True) for node, count in held.items()]
    return sorted([*known.values(), *found], key=lambda node: node.node)


def live_in_sync(partition: ClusterPartition, live: Container[str]) -> list[str]:
    """Return the members of an in-sync set that can be counted on.

    Args:
        live: ids of the nodes that live, and are not taken for dead.
    """
    return [node for node in partition.confirmed if node in live]


def why_unready(partition: ClusterPartition, nodes: Mapping[str, ClusterNode]) -> str:
    """Tell why a partition that is led cannot be consumed, as far as the nsqlookupd knows; empty: it can.

    Args:
        nodes: those that are known, by id.
    """
    if partition.is_ready or not partition.leader:
        return ""
    if partition.unready_s < UNREADY_S:
        return "its leader was elected a moment ago"
    node = nodes.get(partition.leader)
    name = partition.leader if node is None or not node.host else node.address
    return f"node {name} leads it and has not said here for {partition.unready_s:.0f} s that it is ready"


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


def store_read_only(status: ClusterStatus) -> str:
    """Tell that the coordination store takes no writes; empty: it does, or it is not there at all."""
    if status.store_read_only_since_s is None or status.store_away_since_s is not None:
        return ""
    since = datetime.fromtimestamp(status.store_read_only_since_s, UTC)
    return (
        f"the coordination store takes no writes since {since:%Y-%m-%d %H:%M:%S} UTC: {status.store_read_only_reason}; "
        "nobody is elected, no copy leaves or joins those in sync, and no topic is created"
    )


def _of_coordination(status: ClusterStatus) -> list[Trouble]:
    subject = f"cluster {status.cluster}"
    found = []
    if status.problem:
        found.append(Trouble(PROBLEM, subject, f"this nsqlookupd takes no part: {status.problem}"))
    if read_only := store_read_only(status):
        advice = "mend the store, and all goes on by itself (docs/cluster.md); elect nobody by hand meanwhile"
        found.append(Trouble(PROBLEM, subject, read_only, advice))
    if away := store_away(status):
        advice = "is the store there (an etcd, or the nsqlookupd that keeps it), and can it be reached? see the logs"
        found.append(Trouble(PROBLEM, subject, away, advice))
    elif status.master is None:
        advice = "is the coordination store there, and a nsqlookupd with --cluster-store? look at their logs"
        if read_only:
            advice = "one is it when the store takes writes again"
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
    places: dict[str, list[str]] = {}
    empty = True
    for node in nodes:
        empty = False
        if node.host and _lives(node):
            places.setdefault(node.address, []).append(node.node)
        subject = f"node {node.node} ({node.address})"
        versions.setdefault(node.version, []).append(node.address)
        if node.suspected:
            text = "it does not listen: it is taken for dead, and its lease is about to end"
            found.append(Trouble(WARNING, subject, text, "start it again; what it lacks it catches up by itself"))
        if node.is_full:
            text = "its disk has no room: it leads nothing that another one can lead, and falls out of sync"
            found.append(Trouble(PROBLEM, subject, text, "free space: it goes on by itself; or shorten retention"))
        if node.copies_max and node.holds >= node.copies_max * CROWDED:
            text = (
                f"it has {node.holds} copies of partitions, and its limit of open files is enough for {node.copies_max}"
            )
            advice = "raise the limit (LimitNOFILE of systemd, ulimit -n) and start it again, or start more nsqds"
            found.append(Trouble(NOTE, subject, text, advice))
        if node.is_older:
            text = "its data directory was an older copy when it started: what it had in sync before counts no more"
            advice = "a snapshot that was put back, or a disk that lost what it had synced? it catches up by itself"
            found.append(Trouble(NOTE, subject, text, advice))
        if node.kept_alone_count:
            more = node.kept_alone_count - len(node.kept_alone)
            told = [f"{topic} ({reason})" for topic, reason in node.kept_alone] + [f"{more} more"] * (more > 0)
            text = f"the cluster has not taken {_topics(node.kept_alone_count)} of it yet: {'; '.join(told)}"
            advice = "it asks again by itself, at least once a minute; do what the reasons say, or delete it there"
            found.append(Trouble(WARNING, subject, text, advice))
        if node.is_draining:
            found.append(Trouble(NOTE, subject, "it drains: it leads nothing, and gets no partitions"))
    if empty:
        advice = "start nsqd with --cluster-store and --lookupd-tcp-address"
        found.append(Trouble(PROBLEM, "nodes", "no nsqd is in the cluster", advice))
    for address, names in places.items():
        if len(names) < 2:
            continue
        text = (
            f"{len(names)} nodes say that they are {address}: {listed(sorted(names), _SHOWN_MAX)}; clients reach one "
            "of them there, and not what the others lead"
        )
        advice = (
            "correct --broadcast-address or --broadcast-tcp-port of all but one, and start them again; name them by id "
            "until then. One whose data directory was exchanged a moment ago is gone by itself soon"
        )
        found.append(Trouble(PROBLEM, "nodes", text, advice))
    if len(versions) > 1:
        shown = "; ".join(f"{version}: {', '.join(sorted(names))}" for version, names in sorted(versions.items()))
        text = f"nodes say different versions of what they say to each other ({shown})"
        found.append(Trouble(WARNING, "nodes", text, "finish the upgrade: versions further apart than 1 do not talk"))
    return found


def _of_drains(status: ClusterStatus) -> list[Trouble]:
    """Return the drains that cannot go on because no node takes the copies."""
    if status.settings.get("is_upgrading"):
        return []  # that nothing is moved then is said
    living = {node.node for node in status.nodes if _lives(node)}
    full = {node.node for node in status.nodes if node.is_full}
    takers = _takers(status)
    names = {node.node: node.address for node in (*away_nodes(status), *status.nodes)}
    found = []
    for drain in status.drains:
        reason = (
            drain.reason
            or _nowhere(status.topics, drain.node, takers)
            or _waiting(status.topics, drain.node, living, full, names)
        )
        if drain.left and reason:
            text = f"it is drained, and copies stay ({drain.left} are left): {reason}"
            advice = (
                "start more nodes, on other machines, or free space on those that are full; or take it back: flintmq "
                f"node drain {drain.node} --undo"
            )
            found.append(Trouble(WARNING, f"node {drain.node} ({names.get(drain.node, 'away')})", text, advice))
    return found


def _nowhere(topics: Iterable[ClusterTopic], node: str, takers: Sequence[ClusterNode]) -> str:
    """Tell which copies of a node no other node can take; empty: none, or it is the master alone that knows.

    Nodes that share a machine count as apart here: whether they may have copies of the same partition is not known.
    """
    stuck = [
        f"{topic.topic}/{each.partition}"
        for topic in topics
        if not topic.is_deleting
        for each in topic.partitions
        if each.leader and node in each.replicas and len(each.replicas) <= topic.replicator
        if not any(_takes(taker, each) for taker in takers)
    ]
    return f"no node can take {listed(stuck, _SHOWN_MAX)}: all have a copy, are full, or drain" if stuck else ""


def _waiting(
    topics: Iterable[ClusterTopic], node: str, living: Container[str], full: Container[str], names: Mapping[str, str]
) -> str:
    """Tell which copies of a node wait for another one that is to have them and is away, or has no room; empty: none.

    Args:
        living: ids of the nodes that live.
        full: ids of those whose disks have no room.
        names: addresses of nodes.
    """
    waiting: dict[str, list[str]] = {}
    for topic in topics:
        for each in () if topic.is_deleting else topic.partitions:
            if each.leader and node in each.leaving:
                for other in each.replicas:
                    if other not in each.in_sync and (other not in living or other in full):
                        waiting.setdefault(other, []).append(f"{topic.topic}/{each.partition}")
    told = []
    for other, partitions in waiting.items():
        text = f"node {other} ({names.get(other, 'away')}) is to have {listed(partitions, _SHOWN_MAX)} and "
        if other in living:
            text += "has no room on its disk: free space there, or have other nodes take them with flintmq node drain"
        else:
            text += "is away: start it, or have another one take its place with flintmq node remove"
        told.append(f"{text} {other}")
    return "; ".join(told[:_SHOWN_MAX])


def _takers(status: ClusterStatus) -> list[ClusterNode]:
    """Return the nodes that get copies."""
    drained = {each.node for each in status.drains}
    return [
        node for node in status.nodes if _lives(node) and not (node.is_draining or node.is_full or node.node in drained)
    ]


class _Waits:
    """Tells copies that nobody is to have yet: they wait, or there is no node for them."""

    def __init__(self, status: ClusterStatus) -> None:
        self._takers = _takers(status)
        self._is_master = status.is_master
        self._is_upgrading = bool(status.settings.get("is_upgrading"))
        self._hosts = {node.node: node.host_id for node in status.nodes}

    def why_not(self, partition: ClusterPartition, wanted: int) -> tuple[str, str]:
        """Tell what becomes of them, and what to do; empty: there are none.

        The master says why it finds no node for one. Another nsqlookupd does not know that, nor whether nodes of one
        machine may have copies of the same partition.
        """
        count = wanted - len(partition.replicas)
        if count <= 0:
            return "", ""
        waits = "waits" if count == 1 else "wait"
        if self._is_upgrading:
            advice = "no copy is made before all nodes are restarted, and after that: flintmq cluster upgrade done"
            return f", and {count} {waits} for the end of the upgrade", advice
        taken = set() if self._is_master else {self._hosts.get(node, "") for node in partition.replicas} - {""}
        is_turn = not partition.reason and any(
            _takes(node, partition) and node.host_id not in taken for node in self._takers
        )
        if is_turn:
            advice = "a node makes a few copies at a time: flintmq cluster moves says how far they are"
            return f", and {count} {waits} for {'its' if count == 1 else 'their'} turn", advice
        why = f" ({partition.reason})" if partition.reason else ""
        advice = "start more nodes, on other machines; or ask for fewer copies: flintmq topic update --replicas"
        return f", and {count} {'has' if count == 1 else 'have'} no place{why}", advice


def _takes(node: ClusterNode, partition: ClusterPartition) -> bool:
    if node.node in partition.replicas:
        return False
    is_there = node.node in partition.leaving or node.node in partition.in_sync
    return is_there or not node.copies_max or node.holds < node.copies_max


@dataclass(slots=True)
class _Lack:
    """Partitions that lack copies in the same way.

    Attributes:
        partitions: their numbers.
        nodes: that lack something of one of them, or are away, by id; in order.
        advice: for copies that nobody is to have yet.
    """

    partitions: list[int] = field(default_factory=list)
    nodes: dict[str, None] = field(default_factory=dict)
    advice: str = ""

    def add(self, partition: int, nodes: Iterable[str]) -> None:
        self.partitions.append(partition)
        self.nodes.update(dict.fromkeys(nodes))


def _of_topic(
    topic: ClusterTopic, nodes: Mapping[str, ClusterNode], is_read_only: bool, waits: _Waits
) -> list[Trouble]:
    """Return what is not as it should be of a topic.

    Args:
        is_read_only: the coordination store takes no writes.
    """
    subject = f"topic {topic.topic}"
    if topic.is_deleting:
        return [Trouble(NOTE, subject, "it is being deleted")]
    live = {name for name, node in nodes.items() if _lives(node)}
    unled: dict[str, _Lack] = {}
    stopped: dict[str, _Lack] = {}
    lacking: dict[str, _Lack] = {}
    unready: list[int] = []
    silent: dict[str, list[ClusterPartition]] = {}
    lossy: list[int] = []
    together: list[int] = []
    for each in topic.partitions:
        in_sync = live_in_sync(each, live)
        lacks = [node for node in dict.fromkeys((*each.replicas, *each.in_sync)) if node not in in_sync]
        if not each.leader:
            away = [node for node in lacks if node not in live]
            unled.setdefault(each.reason, _Lack()).add(each.partition, away)
        elif len(in_sync) < max(topic.replicator, topic.min_in_sync):
            more, advice = waits.why_not(each, topic.replicator)
            text = f"{len(in_sync)} of {topic.replicator} copies are in sync"
            is_stopped = len(in_sync) < topic.min_in_sync
            text += f", and an OK needs {topic.min_in_sync}{more}" if is_stopped else more
            lack = (stopped if is_stopped else lacking).setdefault(text, _Lack(advice=advice))
            lack.add(each.partition, lacks)
        if each.leader and not each.is_ready:
            if each.unready_s < UNREADY_S:
                unready.append(each.partition)
            else:
                silent.setdefault(each.leader, []).append(each)
        if each.may_have_lost:
            lossy.append(each.partition)
        machines = [nodes[node].host_id if node in nodes else "" for node in each.replicas]
        if len(machines) > len(set(machines)) and all(machines):
            together.append(each.partition)
    without_leader = _advice_without_writes if is_read_only else partial(_advice_without_leader, topic.topic)
    power = (
        "messages that were acknowledged before may be lost: all who were in sync had lost their power, the store was "
        "put back from a backup, or an operator elected. When that is known: flintmq topic acknowledge-loss "
        f"{topic.topic}. Run nodes with --durability=fsync where it must not be"
    )
    return [
        *_lacks(PROBLEM, subject, "nobody leads: ", unled, nodes, without_leader),
        *_lacks(PROBLEM, subject, "nothing is acknowledged: ", stopped, nodes),
        *_lacks(WARNING, subject, "", lacking, nodes),
        *_group(PROBLEM, subject, "", {"was led on without knowing everything": lossy}, power),
        *_group(WARNING, subject, "", {"cannot be consumed yet: its leader was elected a moment ago": unready}, ""),
        *_group(PROBLEM, subject, "cannot be consumed: ", _silences(silent.values(), nodes), _ADVICE_ON_SILENCE),
        *_group(NOTE, subject, "", {"has several copies on one machine": together}, ""),
    ]


def _silences(rows: Iterable[list[ClusterPartition]], nodes: Mapping[str, ClusterNode]) -> dict[str, list[int]]:
    """Return which partitions each leader has not said for long that it is ready with; the longest time counts."""
    found: dict[str, list[int]] = {}
    for led in rows:
        longest = max(led, key=lambda each: each.unready_s)
        found.setdefault(why_unready(longest, nodes), []).extend(each.partition for each in led)
    return found


def _lives(node: ClusterNode) -> bool:
    return not node.is_away and not node.suspected


def _lacks(
    level: str,
    subject: str,
    what: str,
    found: Mapping[str, _Lack],
    nodes: Mapping[str, ClusterNode],
    advice: Callable[[str], str] | None = None,
) -> list[Trouble]:
    """Return what lacks copies, with the names of the nodes.

    Args:
        advice: tells what to do by what is so; None: by whether the nodes live.
    """
    troubled = []
    for text, lack in found.items():
        named = [_state(nodes.get(node), node) for node in lack.nodes]
        names = f"; {listed(named, _SHOWN_MAX)}" if named else ""
        told = f"{_partitions(lack.partitions)}: {what}{text}{names}"
        troubled.append(Trouble(level, subject, told, advice(text) if advice else _advice(lack, nodes)))
    return troubled


def _state(node: ClusterNode | None, name: str) -> str:
    """Tell of a node why it does not count."""
    if node is None or node.is_away:
        place = f" (was {node.address})" if node is not None and node.host else ""
        return f"node {name}{place} is away"
    return f"node {node.address} {'does not answer' if node.suspected else 'lives and is not in sync'}"


def _advice_without_writes(_reason: str) -> str:
    return (
        "mend the coordination store, which takes no writes: who can lead does so then, and nothing is lost by waiting"
    )


def _advice_without_leader(topic: str, reason: str) -> str:
    if reason.startswith(TO_COME):
        return (
            "start the nsqd that had it, with --cluster-store. If none had it: flintmq topic expand with as many "
            "partitions as the topic has"
        )
    if reason.startswith(NOT_CREATED):
        return "the master nsqlookupd creates it in a moment; if not, is there one, and do nodes have room? see its log"
    if NO_COPY in reason:
        return (
            "start the nodes that have copies. If their disks are lost for good: flintmq topic elect "
            f"{topic} PARTITION NODE --accept-loss lets it begin anew, with an empty log, on a node that lives"
        )
    if TO_DECIDE in reason:
        return (
            f"flintmq topic elect {topic} PARTITION --dry-run says who has most of it, and what is lost; copies that "
            "were put aside are in set-aside/ of data directories. If the topic was deleted before an older store was "
            f"put back: flintmq topic delete {topic}"
        )
    return (
        "start all nodes that have copies: who has most leads when all are back. If the disk of one is lost for good: "
        f"flintmq topic elect {topic} PARTITION --dry-run says who has most, and what is lost"
    )


def _advice(lack: _Lack, nodes: Mapping[str, ClusterNode]) -> str:
    if not lack.nodes:
        return lack.advice
    if all(node in nodes and _lives(nodes[node]) for node in lack.nodes):
        return (
            "they catch up by themselves if their leaders reach them: the leaders' logs say how far they are, or what "
            "is in the way: port 4153 (--peer-address) between nsqd, another secret (--cluster-secret-file), or a "
            "certificate of another authority"
        )
    return "start the nodes that are away, or mend their network; what they lack they catch up by themselves"


def _group(level: str, subject: str, what: str, found: dict[str, list[int]], advice: str) -> list[Trouble]:
    return [
        Trouble(level, subject, f"{_partitions(numbers)}: {what}{text}", advice)
        for text, numbers in found.items()
        if numbers
    ]


def _topics(count: int) -> str:
    return f"{count} {'topic' if count == 1 else 'topics'}"


def _partitions(numbers: list[int]) -> str:
    return f"partition{'s' * (len(numbers) != 1)} {listed(map(str, numbers), _SHOWN_MAX)}"
