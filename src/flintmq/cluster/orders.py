"""The orders of an operator to a cluster's copies, topics and nodes: each is checked, and becomes one swap.

The swap says what is wanted, in the store; the copies follow by themselves (:mod:`flintmq.cluster.moving`), whoever is
master by then. An order that could never be carried out as it was asked is refused, with what is in its way.

Rules of this file: no IO, no clock; nothing is remembered here.

Source: Youzan's nsqlookupd (``/topic/partition/*``, ``/cluster/node/remove``), docs/decisions/0017.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from flintmq.addresses import format_address
from flintmq.cluster import power
from flintmq.cluster.balance import Loads, copy_to_move
from flintmq.cluster.controller import Controller, Refused, Swap
from flintmq.cluster.moving import HostUnknown
from flintmq.cluster.placement import NoPlace, TooFewFiles, TooFewNodes, place_copies
from flintmq.cluster.state import (
    DrainRecord,
    NodeRecord,
    NoLeader,
    PartitionState,
    SettingsRecord,
    TopicRecord,
    candidates,
)
from flintmq.cluster.view import PartitionId, View
from flintmq.names import listed
from flintmq.topic_meta import NO_COPY, PARTITION_NUM_MAX, TopicMeta, usual_min_in_sync

ROWS_MAX = 1000
"""Of what a plan lists."""
_DRAIN_NOTES_MAX = 20
_NAMED_MAX = 20
"""Nodes that are named where a name is nobody's, of those that live and of those that are away."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The outcome of an order.

    Attributes:
        swap: what carries it out; None: everything is so already.
        rows: copies that are made and taken away by it, the first ``ROWS_MAX`` of them: topic, partition, nodes from
            and to; where a copy goes may be decided otherwise when its turn comes.
        count: how many there are in all.
        notes: what else is to be known of it.
    """

    swap: Swap | None
    rows: list[dict[str, object]] = field(default_factory=list)
    count: int = 0
    notes: list[str] = field(default_factory=list)


def elect(controller: Controller, topic: str, number: int, node: str) -> Plan:
    """Let a node lead that may lack some of what was acknowledged. Where no node with a copy lives it may be one
    without: the partition begins anew there, with an empty log.

    Args:
        node: as :func:`node_named` takes it; empty: the one that has most of those that have said how far they are.

    Raises:
        Refused: somebody leads or can be elected without losing anything, or the node is not there, or has no copy
            while others that live have one.
    """
    view = controller.view
    state = view.partitions.get((topic, number))
    if state is None:
        record = view.topics.get(topic)
        if record is None:
            raise Refused(f"the cluster has no topic {topic}; flintmq topic list lists all")
        if not 0 <= number < record.partition_num:
            raise Refused(f"topic {topic} has partitions 0 to {record.partition_num - 1}, and no {number}")
    elif state.has_leader(view.nodes):
        raise Refused(f"partition {topic}/{number} is led by node {state.leader}: nobody is to be elected")
    if node:
        chosen = node_named(view, node)
    else:
        best = None if state is None else power.best_of(state, controller.live)
        if best is None:
            why = controller.why_no_leader((topic, number))
            if state is not None and power.has_no_copy(state, view.nodes):
                raise Refused(f"partition {topic}/{number}: {_how_anew(topic, number, state)}")
            raise Refused(f"nobody has said how far its copy of {topic}/{number} is ({why}): name a node")
        chosen = best.node
    swap = controller.forced((topic, number), chosen)
    assert state is not None, "else it was refused"
    if power.has_no_copy(state, view.nodes):
        away = ", ".join(state.holders)
        return Plan(swap, notes=[
            f"no node with a copy is alive ({away}): everything that was stored is lost, and channels begin anew",
            f"node {chosen} begins with an empty log; who comes back with a copy of the one before sets it aside",
        ])  # fmt: skip
    return Plan(swap, notes=power.losses(state, controller.live, chosen))


def _how_anew(topic: str, number: int, state: PartitionState) -> str:
    """Tell what can be done about a partition of which no copy is there."""
    return (
        f"{NO_COPY} ({', '.join(state.holders)}): start one; if their disks are lost for good, flintmq topic elect "
        f"{topic} {number} NODE --accept-loss lets it begin anew, with an empty log, on a node that lives"
    )


def acknowledge_loss(controller: Controller, topic: str, number: int) -> Plan:
    """Say no more that messages of a partition may be lost: whoever is responsible knows it.

    Raises:
        Refused: there is no such partition.
    """
    view = controller.view
    state = view.partitions.get((topic, number))
    if state is None:
        raise Refused(f"there is no partition {topic}/{number}")
    now = power.acknowledged(state)
    if now is None:
        return Plan(None, notes=["nothing of it is said to be lost"])
    what = f"partition {topic}/{number}: it is known that messages may have been lost in epoch {state.lossy_epoch}"
    return Plan(controller.swap_to(view.keys.partition(topic, number), now, what))


def node_named(view: View, text: str) -> str:
    """Return the id of a node that is called by its id, its address ``host:port`` (of TCP, HTTP or other nodes), or as
    the redesigned NSQ calls it (``host:port:port:number``). One that is away, and has copies or is drained, is called
    by its id, or by the address of TCP or HTTP that it had, where no node that lives has that.

    Raises:
        Refused: there is none, or there are several.
    """
    if text in view.nodes or text in view.held or text in view.drains:
        return text
    away = sorted({*view.held, *view.drains} - view.nodes.keys())
    found = [node for node, record in view.nodes.items() if text in _names(record)]
    found = found or [node for node in away if text in _names_of_away(view, node)]
    if len(found) == 1:
        return found[0]
    if found:
        named = listed(sorted(found), _NAMED_MAX)
        raise Refused(f"{len(found)} nodes say that they are {text[:64]}: {named}; name the id")
    live = [f"{node} ({format_address(record.host, record.tcp_port)})" for node, record in sorted(view.nodes.items())]
    gone = [f"{node} ({_away_place(view, node)})" for node in away]
    known = listed(live, _NAMED_MAX) or "none"
    more = f"; away are {listed(gone, _NAMED_MAX)}" if gone else ""
    raise Refused(f"there is no node {text[:64]!r}; there are {known}{more}")


def _names(node: NodeRecord) -> tuple[str, ...]:
    return (*_written(node.host, node.tcp_port, node.http_port, node.peer_port), distributed_id(node))


def _names_of_away(view: View, node: str) -> tuple[str, ...]:
    host, *ports = view.place(node)
    return _written(host, *ports) if host else ()


def _written(host: str, *ports: int) -> tuple[str, ...]:
    return tuple(address for port in ports for address in (format_address(host, port), f"{host}:{port}"))


def _away_place(view: View, node: str) -> str:
    """Tell where a node was that is away, and whether it is drained."""
    host, tcp_port, _ = view.place(node)
    words = [f"was {format_address(host, tcp_port)}" if host else "its address is not known"]
    if node in view.drains:
        words.append("is removed" if view.drains[node].is_removal else "is drained")
    return ", ".join(words)


def distributed_id(node: NodeRecord) -> str:
    """Return what the redesigned NSQ calls a node."""
    return f"{node.host}:{node.peer_port}:{node.tcp_port}:{node.number}"


def move(controller: Controller, partition: PartitionId, source: str, target: str) -> Plan:
    """Move a copy of a partition from one node to another; a move that is under way may be taken back.

    Args:
        source, target: ids of nodes.

    Raises:
        Refused: there is no such copy, or there can be none on the target, or nobody can lead that it could come from,
            or another move of the partition is under way.
    """
    view, moving = controller.view, controller.moving
    topic, number = partition
    name = f"partition {topic}/{number}"
    if controller.record_of(topic).is_deleting:
        raise Refused(f"topic {topic} is being deleted")
    state = view.partitions.get(partition)
    if state is None:
        raise Refused(f"{name} cannot be moved: {controller.why_no_leader(partition)}")
    _check_not_upgrading(view)
    if source == target:
        raise Refused(f"{name} cannot be moved from node {source} to itself")
    is_taken_back = target in state.leaving or (bool(state.target) and target in state.replicas)
    if source not in (state.target or state.replicas):
        raise Refused(f"the move source node has no replica for the topic: {name} is on {', '.join(state.replicas)}")
    if (state.target or state.leaving) and not is_taken_back:
        to = ", ".join(node for node in state.target or state.replicas if node not in state.in_sync_nodes)
        raise Refused(
            f"a move of {name} is under way{f' to {to}' if to else ''}: wait until GET /cluster/moves does not list "
            "it, or take it back by a move in the other direction"
        )
    if target in (state.target or state.replicas):
        raise Refused(f"node {target} has a copy of {name} already; they are on {', '.join(state.replicas)}")
    record = controller.live.get(target)
    if record is None:
        raise Refused(f"node {target} is not there, or does not answer: nothing can be moved to it")
    if record.is_draining or target in view.drains:
        raise Refused(f"node {target} is being drained and takes nothing; undo that first, or name another one")
    if record.is_full:
        raise Refused(f"node {target} has no room on its disk: free some, or name another one")
    if not moving.has_files(record, partition):
        raise Refused(
            f"node {target} has {record.copies_max} copies, as many as its limit of open files allows: name another "
            "one, or raise the limit (LimitNOFILE of systemd, ulimit -n) and start that nsqd again"
        )
    if not is_taken_back and not state.has_leader(view.nodes):
        if power.has_no_copy(state, view.nodes):
            raise Refused(f"{name} cannot be moved, there is nothing to move: {_how_anew(topic, number, state)}")
        if isinstance(candidates(state, controller.live), NoLeader):
            why = controller.why_no_leader(partition)
            raise Refused(
                f"{name} cannot be moved, nobody leads it that the copy could come from: {why}. Start the nodes that "
                f"are away; if one is lost for good: flintmq topic elect {topic} {number} --dry-run"
            )
    wanted = tuple(target if node == source else node for node in state.target or state.replicas)
    others = [node for node in wanted if node != target]
    try:
        moving.check_hosts_known(others)
    except HostUnknown as error:
        raise Refused(f"{name} cannot be moved: {error}") from None
    if shared := moving.shares_host(record, others):
        raise Refused(
            f"node {target} is on the machine of node {shared}, which has a copy of {name}: name a node on another "
            "one, or start nsqlookupd with --allow-same-host"
        )
    now = msgspec.structs.replace(state, target=() if wanted == state.replicas else wanted)
    reason = f"{name} is to go from node {source} to node {target}"
    return Plan(controller.swap_to(view.keys.partition(*partition), now, reason), [_row(partition, source, target)], 1)


def balance_copies(controller: Controller, loads: Loads) -> Swap | None:
    """Return what moves a copy so that loads are more even; None: they are, or something is moved already."""
    view, moving = controller.view, controller.moving
    settings = view.settings
    if not controller.is_master or not (settings.balances and settings.balances_load) or settings.is_upgrading:
        return None

    def may_be_on(partition: PartitionId, source: str, target: str) -> bool:
        others = [node for node in view.partitions[partition].replicas if node != source]
        is_known = all(node in view.nodes for node in others)
        record = controller.live[target]
        return is_known and moving.has_files(record, partition) and not moving.shares_host(record, others)

    if moving.is_moving:
        return None
    found = copy_to_move(view, moving.takers, loads, may_be_on)
    if found is None:
        return None
    try:
        return move(controller, *found).swap
    except Refused:
        return None  # it was looked at a moment ago: something has changed in between


def drain(controller: Controller, node: str, is_removal: bool = False) -> Plan:
    """Take everything from a node, which may be away; when it is a removal it is forgotten after it has ended.

    Raises:
        Refused: there are not enough machines for what it has.
    """
    view = controller.view
    known = view.drains.get(node)
    if known is not None and (known.is_removal or not is_removal):
        return _drain_plan(controller, node, None)
    record = DrainRecord(node, is_removal)
    reason = f"node {node} is to {'be removed' if is_removal else 'have nothing any more'}"
    return _drain_plan(controller, node, controller.swap_to(view.keys.drain(node), record, reason))


def _drain_plan(controller: Controller, node: str, swap: Swap | None) -> Plan:
    view, moving = controller.view, controller.moving
    takers = [each for each in moving.takers if each.node != node]
    gains: Counter[str] = Counter()
    rows: list[dict[str, object]] = []
    notes: list[str] = []
    held = sorted(each for each in view.held.get(node, ()) if node in view.partitions[each].replicas)
    for partition in held:
        state = view.partitions[partition]
        staying = [each for each in state.replicas if each != node and each not in view.drains]
        others = [each for each in moving.free_for(staying) if each.node != node]
        free = [each for each in others if moving.has_files(each, partition, gains[each.node])]
        nowhere = ""
        if not free and len(staying) < controller.record_of(partition[0]).meta.replica:
            hosts = {each.host_id or each.node for each in takers}
            where: NoPlace = TooFewNodes(len(staying) + 1, len(takers), len(hosts), controller.allows_same_host)
            if others:
                where = TooFewFiles({each.node: each.copies_max for each in others})
            nowhere = f"node {node} has a copy of partition {partition[0]}/{partition[1]} that can go nowhere: {where}"
        # a row without a target would be a copy that is taken away
        if state.in_sync_nodes == (node,) and node not in controller.live:
            only = _only_copy_away(view, partition, state)
            notes.append(f"{only}. When it is back it stays: {nowhere}" if nowhere else only)
            continue
        if nowhere and swap is not None:
            raise Refused(nowhere)
        if nowhere:  # it was ordered before, when there were more nodes, or this one was away
            notes.append(f"{nowhere}; it stays until there are more nodes, or flintmq node drain {node} --undo")
            continue
        if len(rows) < ROWS_MAX:
            best = min(
                free, key=lambda each: (gains[each.node] + len(view.held.get(each.node, ())), each.node), default=None
            )
            if best is not None:
                gains[best.node] += 1
            rows.append(_row(partition, node, "" if best is None else best.node))
    moved = len(held) - len(notes)
    if (more := len(notes) - _DRAIN_NOTES_MAX + 1) > 1:
        notes[_DRAIN_NOTES_MAX - 1 :] = [f"so it is with {more} more partitions"]
    return Plan(swap, rows, moved, notes)


def _only_copy_away(view: View, partition: PartitionId, state: PartitionState) -> str:
    """Tell what becomes of a partition of which the only member of the in-sync set is to go and is away."""
    topic, number = partition
    order = f"flintmq topic elect {topic} {number}"
    if power.has_no_copy(state, view.nodes):
        what, how = "the only copy", f"{order} NODE --accept-loss lets it begin anew, with an empty log, on another one"
    else:
        what, how = "the only copy in sync", f"{order} --dry-run says who has most, and what is lost"
    return (
        f"partition {topic}/{number}: node {state.in_sync_nodes[0]} has {what} and is away; it stays as it is until "
        f"that is back. If its disk is lost: {how}"
    )


def undrain(controller: Controller, node: str) -> Plan:
    """Let a node have something again; moves that have begun go on.

    Raises:
        Refused: it is not drained.
    """
    view = controller.view
    if node not in view.drains:
        raise Refused(f"node {node} is not being drained, and not removed")
    return Plan(controller.swap_to(view.keys.drain(node), None, f"node {node} may have something again"))


def alter(controller: Controller, topic: str, meta: TopicMeta, min_in_sync: int | None = None) -> Plan:
    """Give a topic other properties, among them how many copies there are.

    Args:
        meta: what it is to be.
        min_in_sync: with fewer copies in sync nothing is acknowledged; None: as before, but for a topic that gets more
            copies and has what is usual for those that it had: then it is what is usual for so many, if that many are
            in sync already. Else those who publish would wait until the new copies are.

    Raises:
        Refused: that cannot be so.
    """
    record = controller.record_of(topic)
    if record.is_deleting:
        raise Refused(f"topic {topic} is being deleted")
    least = _raised(controller, topic, record, meta.replica) if min_in_sync is None else min_in_sync
    if least > meta.replica:
        asked = "" if min_in_sync is not None else f": give min_in_sync={meta.replica} as well"
        raise Refused(f"INVALID_ARG_TOPIC_MIN_IN_SYNC: min_in_sync={least} of replicator={meta.replica} copies{asked}")
    if least > record.min_in_sync:
        _check_in_sync(controller.view, topic, least)
    rows, count = _copies(controller, topic, record, meta.replica)
    notes = [] if meta.replica <= 1 or least > 1 else [_alone(topic, meta.replica, least, min_in_sync)]
    if least == record.min_in_sync and meta.is_like(record.meta):
        return Plan(None, notes=notes)
    if 1 < least == meta.replica and (least, meta.replica) != (record.min_in_sync, record.meta.replica):
        notes.append(_all_needed(topic, least))
    now = msgspec.structs.replace(record, meta=meta, min_in_sync=least)
    if least != record.min_in_sync:
        notes.insert(0, f"an OK needs {least} of {meta.replica} copies in sync, instead of {record.min_in_sync}")
    swap = controller.swap_to(
        controller.view.keys.topic(topic), now, f"topic {topic} is changed to version {meta.version}"
    )
    return Plan(swap, rows, count, notes)


def _raised(controller: Controller, topic: str, record: TopicRecord, copies: int) -> int:
    """Return the ``min_in_sync`` of a topic that gets another number of copies; it is never lowered unasked."""
    least = record.min_in_sync
    if copies <= record.meta.replica or least != usual_min_in_sync(record.meta.replica):
        return least
    states, live = controller.view.of_topic.get(topic, {}), controller.live
    usual = usual_min_in_sync(copies)
    if len(states) < record.partition_num:
        return least  # nodes are to bring the others, each with one copy
    return usual if all(sum(n in live for n in each.in_sync_nodes) >= usual for each in states.values()) else least


def _alone(topic: str, copies: int, least: int, asked: int | None) -> str:
    """Tell what it means that one copy in sync is enough, and how there come to be more of them."""
    text = f"min_in_sync={least}: what a leader alone acknowledges is one copy"
    usual = usual_min_in_sync(copies)
    if asked is not None or usual == least:
        return text
    order = f"flintmq topic update {topic} --min-in-sync={usual}"
    return f"{text}. With {copies} copies {usual} are usual: ask for that once so many are in sync, with {order}"


def _all_needed(topic: str, copies: int) -> str:
    """Tell what it means that every copy has to be in sync."""
    return (
        f"an OK needs all {copies} copies in sync: with one node away nothing is acknowledged, until it is back or "
        f"flintmq topic update {topic} --min-in-sync={copies - 1} says that fewer are enough"
    )


def _check_in_sync(view: View, topic: str, least: int) -> None:
    for number, state in sorted(view.of_topic.get(topic, {}).items()):
        if len(state.in_sync) < least:
            raise Refused(
                f"min_in_sync={least}, and partition {topic}/{number} has {len(state.in_sync)} copies in sync: nothing "
                "could be published to it. Give it more copies with replicator= first, wait until GET /cluster/moves "
                "lists none of it, and ask again"
            )


def _copies(
    controller: Controller, topic: str, record: TopicRecord, copies: int
) -> tuple[list[dict[str, object]], int]:
    """Return the copies that another number of them makes or takes away."""
    rows: list[dict[str, object]] = []
    count = 0
    view = controller.view
    wanted = msgspec.structs.replace(record, meta=msgspec.structs.replace(record.meta, replica=copies))
    for number, state in sorted(view.of_topic.get(topic, {}).items()):
        difference = abs(copies - len(state.replicas))
        count += difference
        if not difference or copies == record.meta.replica or len(rows) >= ROWS_MAX:
            continue
        before, now = state, state
        for _ in range(difference):
            now = _next(controller, (topic, number), now, wanted)
        out = [node for node in before.replicas if node not in now.replicas]
        new = [node for node in now.replicas if node not in before.replicas]
        rows += [_row((topic, number), node, "") for node in out]
        rows += [_row((topic, number), before.leader, node) for node in new]
    return (rows, count) if copies != record.meta.replica else ([], 0)


def _next(controller: Controller, partition: PartitionId, state: PartitionState, record: TopicRecord) -> PartitionState:
    try:
        replicas, _ = controller.moving.wanted(partition, state, record)
    except NoPlace as error:
        raise Refused(f"INVALID_ARG_TOPIC_REPLICATOR: partition {partition[0]}/{partition[1]}: {error}") from None
    except HostUnknown:
        return state
    return msgspec.structs.replace(state, replicas=replicas)


def expand(controller: Controller, topic: str, partition_num: int) -> Plan:
    """Give a topic more partitions; clients learn of them from lookups.

    Of a topic that was a single node's, those that come with nodes are waited for, and those behind them are made.
    Where the record does not say which are which, the last partition that is there was the last one to come: who asks
    for as many partitions as it has gets those behind it, empty.

    Args:
        partition_num: in all.

    Raises:
        Refused: it has more, or there is no room, or what it lacks may be on a node.
    """
    record = controller.record_of(topic)
    if record.is_deleting:
        raise Refused(f"topic {topic} is being deleted")
    if partition_num < record.partition_num:
        raise Refused(
            f"INVALID_ARG_TOPIC_PARTITION_NUM: partition_num={partition_num}, and topic {topic} has "
            f"{record.partition_num}: partitions cannot be taken away"
        )
    if partition_num > PARTITION_NUM_MAX:
        raise Refused(
            f"INVALID_ARG_TOPIC_PARTITION_NUM: partition_num={partition_num}, it must be at most {PARTITION_NUM_MAX}"
        )
    view, meta = controller.view, record.meta
    brought, first = record.brought_below, record.partition_num
    if not record.knows_brought:
        there = [number for number in range(first) if view.keys.partition(topic, number) in view.pairs]
        brought = first = there[-1] + 1 if there else record.partition_num
    lacking = ", ".join(str(number) for number in range(first, record.partition_num))
    if lacking and partition_num > record.partition_num:
        raise Refused(
            f"topic {topic} came from nodes, and partitions {lacking} are not there: start the nodes that may have "
            f"them. If there are none, ask for partition_num={record.partition_num} first, which makes them, empty"
        )
    if first == partition_num:
        return Plan(None, notes=_to_come(view, topic, brought))
    here = {number: state.replicas for number, state in view.of_topic.get(topic, {}).items()}
    new = range(first, partition_num)
    try:
        placed = place_copies(new, meta.replica, controller.sites(), here, controller.allows_same_host)
    except NoPlace as error:
        raise Refused(f"No node is available for topic - {error}") from None
    if meta.is_partitioned and partition_num > record.partition_num:
        meta = msgspec.structs.replace(meta, partition_num=partition_num, version=meta.version + 1)
    now = msgspec.structs.replace(record, meta=meta, partition_num=partition_num, brought_num=brought)
    swap = controller.swap_to(view.keys.topic(topic), now, f"topic {topic} is given {partition_num} partitions")
    rows = [_row((topic, number), "", node) for number, nodes in placed.items() for node in nodes]
    notes = _to_come(view, topic, brought)
    if lacking:
        notes.append(f"partitions {lacking} are made, empty: a node that has one of that number keeps it alone")
    if meta.ordered:
        notes.append("a key is another partition's from now on, where publishers choose the partition by it")
    return Plan(swap, rows[:ROWS_MAX], len(rows), notes)


def _to_come(view: View, topic: str, brought: int) -> list[str]:
    """Tell which partitions of a topic are waited for."""
    missing = [number for number in range(brought) if view.keys.partition(topic, number) not in view.pairs]
    numbers = ", ".join(map(str, missing))
    return [f"partitions {numbers} come with the nodes that have them: start those"] if missing else []


def settle(controller: Controller, changes: Mapping[str, object]) -> Plan:
    """Change settings of the whole cluster."""
    view = controller.view
    if view.keys.settings in view.unreadable:
        raise Refused(str(view.unreadable[view.keys.settings]))
    known = view.settings
    now: SettingsRecord = msgspec.structs.replace(known, **changes)
    if now == known:
        return Plan(None)
    now = msgspec.structs.replace(now, version=known.version + 1)
    reason = "settings of the cluster: " + ", ".join(f"{name}={value}" for name, value in changes.items())
    return Plan(controller.swap_to(view.keys.settings, now, reason))


def _check_not_upgrading(view: View) -> None:
    if view.settings.is_upgrading:
        raise Refused(
            "nothing is moved between /cluster/upgrade/begin and /cluster/upgrade/done: ask for the latter first"
        )


def _row(partition: PartitionId, source: str, target: str) -> dict[str, object]:
    return {"topic": partition[0], "partition": partition[1], "from": source, "to": target}
