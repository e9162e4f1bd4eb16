"""A cluster without processes: a store, controllers over it, and what tests say about nodes and topics."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from flintmq.cluster.controller import Controller, Swap
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import Member, NodeRecord, PartitionState, TopicRecord, WantedTopic, decode, encode
from flintmq.cluster.store import Compare, Delete, Fate, Get, Put, Span, Swapped, Txn
from flintmq.cluster.store_state import StoreState
from flintmq.cluster.view import View
from flintmq.topic_meta import TopicMeta

KEYS = Keys("test")


def node(name: str, **fields: object) -> NodeRecord:
    """A node: called by one letter, on a machine of its own."""
    values = {
        "node": name,
        "incarnation": f"{name}1",
        "boot_id": f"boot {name}",
        "syncs": False,
        "host": f"{name}.example",
        "tcp_port": 4150,
        "http_port": 4151,
        "peer_port": 4152,
        "host_id": f"host {name}",
        **fields,
    }
    return msgspec.convert(values, NodeRecord)


def member(name: str, **fields: object) -> Member:
    return msgspec.structs.replace(node(name).member, **fields)


def state(leader: str, in_sync: str, replicas: str = "", **fields: object) -> PartitionState:
    """A state in epoch 3, such as ``state("a", "ab", "abc")``; led by the first process of its leader."""
    values = {
        "topic_number": 7,
        "log_id": 9,
        "epoch": 3,
        "leader": leader,
        "incarnation": f"{leader}1" if leader else "",
        "in_sync": tuple(map(member, in_sync)),
        "replicas": tuple(replicas or in_sync),
        **fields,
    }
    return PartitionState(**values)  # type: ignore[arg-type]


class World:
    """A store, and everything that changes it at once."""

    def __init__(self) -> None:
        self.store = StoreState()
        self.random = random.Random(1)

    def put(self, key: str, value: msgspec.Struct | bytes) -> None:
        data = value if isinstance(value, bytes) else encode(value)
        self.store.apply(Txn((), (Put(key, data),)))

    def delete(self, key: str) -> None:
        self.store.apply(Txn((), (Delete(key),)))

    def node(self, record: NodeRecord) -> None:
        self.put(KEYS.node(record.node), record)

    def nodes(self, names: str) -> None:
        for name in names:
            self.node(node(name))

    def topic(self, name: str, partition_num: int = 1, replica: int = 1, number: int = 7, min_in_sync: int = 1) -> None:
        meta = TopicMeta(partition_num=partition_num, replica=replica)
        self.put(KEYS.topic(name), TopicRecord(number, meta, partition_num, min_in_sync))

    def partition(self, topic: str, number: int, value: PartitionState) -> None:
        self.put(KEYS.partition(topic, number), value)

    def state(self, topic: str, number: int = 0) -> PartitionState | None:
        pair = self.store.get(KEYS.partition(topic, number))
        return None if pair is None else decode(pair.key, pair.value, PartitionState)

    def record(self, topic: str) -> TopicRecord | None:
        pair = self.store.get(KEYS.topic(topic))
        return None if pair is None else decode(pair.key, pair.value, TopicRecord)

    def wish(self, topic: str) -> WantedTopic | None:
        pair = self.store.get(KEYS.wanted(topic))
        return None if pair is None else decode(pair.key, pair.value, WantedTopic)

    def states(self) -> dict[str, PartitionState]:
        found = self.store.range(KEYS.partitions()).found
        return {pair.key: decode(pair.key, pair.value, PartitionState) for pair in found}

    def swap(self, swap: Swap) -> Swapped:
        """Carry out a swap as :func:`flintmq.cluster.store.swap` does."""
        expected = 0 if swap.before is None else swap.before.mod_revision
        change = Delete(swap.key) if swap.value is None else Put(swap.key, swap.value)
        conditions = (Compare(swap.key, expected), *swap.guards)
        result = self.store.apply(Txn(conditions, (change, Get(swap.key)), (Get(swap.key),)))
        return Swapped(Fate.APPLIED if result.succeeded else Fate.REFUSED, result.revision, result.found[0])


class Master:
    """A controller with its view, following the store step by step."""

    def __init__(self, world: World, master: Compare | None = None, **options: object) -> None:
        self.world = world
        self.view = View(KEYS)
        self.view.feed(world.store.range(KEYS.all))
        self.controller = Controller(self.view, world.random, master, **options)  # type: ignore[arg-type]
        self.reasons: list[str] = []

    def follow(self) -> bool:
        """Hear what happened; whether there was anything."""
        told = self.world.store.events(Span.of_prefix(KEYS.prefix), self.view.revision, self.world.store.revision)
        changes = self.view.feed(told)
        self.view.check()
        self.controller.see(changes)
        return bool(changes)

    def swaps(self, count_max: int = 1000) -> list[Swap]:
        swaps = self.controller.next_swaps(count_max)
        while len(swaps) < count_max and self.controller.has_work:
            swaps += self.controller.next_swaps(count_max - len(swaps))
        self.reasons += [swap.reason for swap in swaps]
        return swaps

    def settle(self, count_max: int = 3) -> list[str]:
        """Do all that is to be done; return the reasons."""
        begun = len(self.reasons)
        for _ in range(10_000):
            self.follow()
            swaps = self.swaps(count_max)
            if not swaps:
                if not self.follow():
                    return self.reasons[begun:]
                continue
            for swap in swaps:
                self.world.swap(swap)
                self.controller.ended(swap, is_known=True)
        raise AssertionError(f"it does not come to an end: {self.controller.describe()}")

    def all_topics(self) -> Iterator[str]:
        yield from self.view.topics
