"""A cluster's state as text for people: tables that fit a terminal.

Rules of this file: no IO; nodes are called by their address, those that are away by their last one and that word, or by
their id where no address is known.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

from flintmq.addresses import format_address
from flintmq.client.admin.health import NOTE, away_nodes, live_in_sync, store_away, troubles
from flintmq.client.admin.results import ClusterNode, ClusterStatus, ClusterTopic, Drain, Move
from flintmq.tools.tables import table

_MB = 1_000_000
_NOT_KNOWN = "not known"


def names_of(status: ClusterStatus) -> dict[str, str]:
    """Return what nodes are called, by id."""
    away = {node.node: f"{node.address} (away)" for node in away_nodes(status)}
    return away | {node.node: node.address for node in status.nodes}


def status_text(status: ClusterStatus, width: int) -> str:
    """Return all of a cluster at a glance, and what is wrong with it."""
    nobody = _NOT_KNOWN if store_away(status) else "none"
    master = nobody if status.master is None else format_address(status.master.host, status.master.http_port)
    lookupds = ", ".join(format_address(each.host, each.http_port) for each in status.lookupds) or "none"
    parts = [
        f"cluster {status.cluster}, id {status.cluster_id or 'not known'}, revision {status.revision}\n"
        f"nsqlookupd: {lookupds}; master: {master}",
        nodes_text(status, width),
        topics_text(status, width),
    ]
    found = troubles(status)
    lines: list[str] = []
    for each in found:
        lines.append(f"{each.level:<8} {each.subject}: {each.text}")
        if each.advice:
            lines.append(f"         -> {each.advice}")
    parts.append("\n".join(lines) if any(each.level != NOTE for each in found) else "\n".join([*lines, "whole"]))
    return "\n\n".join(parts)


def nodes_text(status: ClusterStatus, width: int) -> str:
    """Return one line for each node; those that are away last, with the address that they had."""
    drains = {each.node: each for each in status.drains}
    titles = ("NODE", "ID", "ZONE", "LEADS", "HOLDS", "STATE")
    rows = [
        (
            node.address,
            node.node,
            node.zone or "-",
            str(node.leads),
            str(node.holds),
            _NOT_KNOWN if store_away(status) else _state(node, drains.get(node.node)),
        )
        for node in status.nodes
    ]
    away = away_nodes(status)
    rows += [
        (
            f"was {node.address}" if node.host else "-",
            node.node,
            "-",
            "0",
            str(node.holds),
            _NOT_KNOWN if store_away(status) else _away(drains.get(node.node)),
        )
        for node in away
    ]
    known = {node.node for node in (*status.nodes, *away)}
    rows += [
        ("-", each.node, "-", "0", str(each.left), _away(each)) for each in status.drains if each.node not in known
    ]
    return table(titles, rows, width) if rows else "no nsqd is in the cluster"


def _state(node: ClusterNode, drain: Drain | None) -> str:
    if node.suspected:
        return "does not answer"
    if drain is not None:
        return _draining(drain)
    return "drains" if node.is_draining else "up"


def _away(drain: Drain | None) -> str:
    return "away" if drain is None else f"away; {_draining(drain)}"


def _draining(drain: Drain) -> str:
    if not drain.left:
        return "has nothing, can be stopped" if drain.is_removal else "drained"
    return "is being removed" if drain.is_removal else "drains"


def topics_text(status: ClusterStatus, width: int) -> str:
    """Return one line for each topic."""
    live = {node.node for node in status.nodes if not node.suspected}
    rows = []
    for topic in status.topics:
        led = sum(bool(each.leader) for each in topic.partitions)
        in_sync = sum(len(live_in_sync(each, live)) for each in topic.partitions)
        wanted = topic.replicator * len(topic.partitions)
        state = _NOT_KNOWN if store_away(status) else _topic_state(topic, live)
        count = str(len(topic.partitions))
        rows.append((topic.topic, count, str(topic.replicator), str(led), f"{in_sync} of {wanted}", state))
    titles = ("TOPIC", "PARTITIONS", "COPIES", "LED", "IN SYNC", "STATE")
    return table(titles, rows, width) if rows else "the cluster has no topics"


def _topic_state(topic: ClusterTopic, live: Container[str]) -> str:
    """Return in a few words how a topic is: first what nobody can do."""
    if topic.is_deleting:
        return "is being deleted"
    unled = sum(not each.leader for each in topic.partitions)
    counts = [len(live_in_sync(each, live)) for each in topic.partitions if each.leader]
    stopped = sum(count < topic.min_in_sync for count in counts)
    stops = [f"{unled} without a leader" if unled else "", f"{stopped} acknowledge nothing" if stopped else ""]
    if any(stops):
        return ", ".join(filter(None, stops))
    return "whole" if all(count >= topic.replicator for count in counts) else "copies lack"


def topic_text(topic: ClusterTopic, status: ClusterStatus, width: int) -> str:
    """Return all of one topic."""
    names = names_of(status)

    def named(nodes: Sequence[str]) -> str:
        return " ".join(names.get(node, node) for node in nodes) or "-"

    rows = []
    for each in topic.partitions:
        in_sync = each.confirmed
        lacking = [node for node in dict.fromkeys((*each.replicas, *each.in_sync)) if node not in in_sync]
        state = each.reason or ("" if each.is_ready else "cannot be consumed yet")
        state = "; ".join(filter(None, [state, f"leaving: {named(each.leaving)}" if each.leaving else ""]))
        rows.append((str(each.partition), str(each.epoch), each.address or "-", named(in_sync), named(lacking), state))
    head = (
        f"topic {topic.topic}: {topic.partition_num} partitions of {topic.replicator} copies, "
        f"{topic.min_in_sync} in sync for an OK"
    )
    meta = ", ".join(
        f"{name}={value}" for name, value in topic.meta.items() if name not in ("partition_num", "replica")
    )
    titles = ("PARTITION", "EPOCH", "LEADER", "IN SYNC", "LACKING", "STATE")
    return "\n\n".join(["\n".join(filter(None, [head, meta])), table(titles, rows, width)])


def moves_text(moves: Sequence[Move], names: Mapping[str, str], width: int) -> str:
    """Return one line for each copy that is being made or taken away."""
    rows = [
        (
            f"{move.topic}/{move.partition}",
            " ".join(names.get(node, node) for node in move.sources) or "-",
            " ".join(names.get(node, node) for node in move.targets) or "-",
            _done(move),
            ": ".join(filter(None, [move.state, move.reason])),
        )
        for move in moves
    ]
    titles = ("PARTITION", "FROM", "TO", "COPIED", "STATE")
    return table(titles, rows, width) if rows else "nothing is being moved"


def _done(move: Move) -> str:
    done = move.bytes_done or 0
    if not move.bytes_total:
        return "-"
    share = min(100, 100 * done // move.bytes_total)
    return f"{done / _MB:.1f} of {move.bytes_total / _MB:.1f} MB ({share} %)"


def moves_line(moves: Sequence[Move]) -> str:
    """Return how far all moves together are, in a few words."""
    done, total = (sum(each.bytes_done or 0 for each in moves), sum(each.bytes_total or 0 for each in moves))
    share = f", {done / _MB:.1f} of {total / _MB:.1f} MB" if total else ""
    return f"{len(moves)} {'copy is' if len(moves) == 1 else 'copies are'} being moved{share}"


def _named(value: Any, names: Mapping[str, str]) -> str:
    """Return a value as text, ids of nodes as addresses."""
    if isinstance(value, list):
        return " ".join(_named(each, names) for each in value) or "-"
    return names.get(str(value), str(value))


def plan_text(answer: Mapping[str, Any], names: Mapping[str, str], width: int) -> str:
    """Return what a change would do, as the master says it: its copies as a table, all else line by line."""
    lines: list[str] = []
    for name, value in answer.items():
        if isinstance(value, list) and value and all(isinstance(row, dict) for row in value):
            titles = list(dict.fromkeys(key for row in value for key in row))
            rows = [[_named(row.get(key, ""), names) for key in titles] for row in value]
            lines.append(f"{name}:\n{table([title.upper() for title in titles], rows, width)}")
        elif isinstance(value, list):
            lines += [f"{name}: {item}" for item in value] or [f"{name}: none"]
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)
