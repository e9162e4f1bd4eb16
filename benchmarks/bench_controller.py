"""The decisions of a master over a large cluster that exists on paper: CPU and memory, without any process or socket.

::

    python -m benchmarks controller            1,000 nodes, 100,000 partitions of 3 copies
    python -m benchmarks controller --quick    100 nodes, 5,000 partitions

Source: docs/decisions/0019.
"""

from __future__ import annotations

import random
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from flintmq.cluster.balance import LeaderSpread, Loads, copy_to_move
from flintmq.cluster.controller import Controller
from flintmq.cluster.keys import Keys
from flintmq.cluster.orders import drain
from flintmq.cluster.state import NodeRecord, PartitionState, TopicRecord, encode, without
from flintmq.cluster.store import Event, Events, KeyValue, Snapshot
from flintmq.cluster.view import View
from flintmq.topic_meta import TopicMeta

KEYS = Keys("paper")
TOPIC_PARTITIONS = 100
COPIES = 3


def main(quick: bool = False) -> dict[str, Any]:
    """Return a row for each thing that is done."""
    node_count, partition_count = (100, 5_000) if quick else (1000, 100_000)
    rows: list[dict[str, Any]] = []

    @contextmanager
    def timed(what: str, count: int = 1) -> Iterator[None]:
        began = time.process_time()
        yield
        rows.append({"what": what, "cpu_ms": round((time.process_time() - began) / count * 1000, 3)})

    before_kib = _memory_kib()
    with timed("values are made (not part of a master)"):
        pairs = list(_values(node_count, partition_count, COPIES))
    pairs_kib = _memory_kib()
    view = View(KEYS)
    revision = pairs[-1].mod_revision
    with timed("the view takes all of it"):
        view.feed(Snapshot(revision, tuple(pairs)))
    with timed("a controller begins and looks at all of it"):
        controller = Controller(view, random.Random(1))
        _decide(controller)
    note = f"memory: values {pairs_kib - before_kib} KiB, view and controller {_memory_kib() - pairs_kib} KiB more"

    partition = ("t0", 0)
    state = view.partitions[partition]
    key = KEYS.partition(*partition)
    with timed("one event of a partition that left and joined its set", 1000):
        for _ in range(500):
            for now in (without(state, {state.replicas[-1]}), state):
                revision += 1
                _tell(view, controller, revision, key, encode(now))
                _decide(controller)
    node = state.leader
    with timed(f"node {node} dies: {len(view.led[node])} of its partitions get leaders"):
        revision += 1
        _tell(view, controller, revision, KEYS.node(node), None)
        revision += _carry_out(view, controller, revision)
    spread = LeaderSpread()
    with timed("a round of spreading leaders"):
        spread.next(view, controller.live)
    loads, choice = Loads(), random.Random(1)
    with timed("loads of all are told"):
        for number, each in enumerate(view.partitions):
            loads.told(each, 0, choice.randrange(1 << 30), number)
    with timed("the next copy to be moved by load is chosen"):
        copy_to_move(view, controller.moving.takers, loads, lambda *_: True)
    other = view.partitions[("t1", 0)].leader
    with timed(f"the plan of draining node {other} with {len(view.held[other])} copies"):
        plan = drain(controller, other)
    assert plan.swap is not None
    with timed("the drain begins: as many copies as there is room for"):
        revision += 1
        _tell(view, controller, revision, plan.swap.key, plan.swap.value)
        _carry_out(view, controller, revision)
    title = f"A master's decisions: {node_count} nodes, {partition_count} partitions of {COPIES} copies"
    return {"title": title, "rows": rows, "note": note}


def _values(node_count: int, partition_count: int, copies: int) -> Iterator[KeyValue]:
    revision = 0
    names = [f"{number:016x}" for number in range(node_count)]
    nodes = [NodeRecord(name, name, "boot", False, f"host{name}", 4150, 4151, 4152, f"host {name}") for name in names]
    for node in nodes:
        revision += 1
        yield KeyValue(KEYS.node(node.node), encode(node), revision, revision, 1)
    choice = random.Random(1)
    for topic in range(-(-partition_count // TOPIC_PARTITIONS)):
        count = min(TOPIC_PARTITIONS, partition_count - topic * TOPIC_PARTITIONS)
        revision += 1
        record = TopicRecord(topic + 1, TopicMeta(count, copies), count)
        yield KeyValue(KEYS.topic(f"t{topic}"), encode(record), revision, revision, 1)
        for number in range(count):
            holders = choice.sample(nodes, copies)
            members = tuple(node.member for node in holders)
            state = PartitionState(
                topic + 1, choice.getrandbits(62), 1, holders[0].node, holders[0].incarnation, members,
                tuple(node.node for node in holders),
            )  # fmt: skip
            revision += 1
            yield KeyValue(KEYS.partition(f"t{topic}", number), encode(state), revision, revision, 1)


def _tell(view: View, controller: Controller, revision: int, key: str, value: bytes | None) -> None:
    now = None if value is None else KeyValue(key, value, revision, revision, 1)
    controller.see(view.feed(Events(revision, (Event(revision, key, now),))))


def _decide(controller: Controller) -> None:
    while controller.has_work:
        assert not controller.next_swaps(1000)


def _carry_out(view: View, controller: Controller, revision: int) -> int:
    """Carry out everything, 32 at a time as a master does; return how much it was."""
    count = 0
    while controller.has_work:
        swaps = controller.next_swaps(32)
        for swap in swaps:
            count += 1
            controller.ended(swap, is_known=True)
            _tell(view, controller, revision + count, swap.key, swap.value)
    return count


def _memory_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
