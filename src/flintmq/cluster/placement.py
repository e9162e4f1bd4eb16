"""The placement of a new topic's partitions on nodes: a pure function of what is known of the nodes.

Partitions go one by one to the node with the fewest, those of this topic counted first, so that a topic is spread over
as many nodes as there are, and several of its partitions share one when there are not enough. What is placed already
stays.

Source: reference/youzan.md 1.1 ("always allow several partitions per node"), design/cluster.md.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping

from flintmq.errors import FlintError


class NoNodes(FlintError):
    """There is no node that a partition could be placed on."""

    def __str__(self) -> str:
        return "no nsqd is registered that takes topics with partitions: start one with --lookupd-tcp-address"


def place(partition_num: int, loads: Mapping[str, int], placed: Mapping[int, str]) -> dict[int, str]:
    """Place the partitions of a topic that have no node yet.

    Args:
        loads: partitions of all topics on each node that may be given some; nodes by any name that can be ordered.
        placed: partitions of this topic that are somewhere already, not necessarily on one of these.

    Returns:
        The node of each partition that is new.

    Raises:
        NoNodes: there is something to place and no node.
    """
    missing = [number for number in range(partition_num) if number not in placed]
    if not missing:
        return {}
    if not loads:
        raise NoNodes
    mine = dict.fromkeys(loads, 0)
    for node in placed.values():
        if node in mine:
            mine[node] += 1
    heap = [(mine[node], loads[node], node) for node in loads]
    heapq.heapify(heap)
    found: dict[int, str] = {}
    for number in missing:
        here, load, node = heap[0]
        found[number] = node
        heapq.heapreplace(heap, (here + 1, load + 1, node))
    return found
