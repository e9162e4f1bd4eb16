"""nsqlookupd's figures for Prometheus. There are no series per topic or node, so their number never grows.

Source: the names follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from flintmq.clock import Clock
from flintmq.cluster.registration import RegistrationDatabase
from flintmq.cluster.state import whole_members
from flintmq.net.http_messages import Request, Response
from flintmq.net.http_router import Router
from flintmq.net.metrics import Family, exposition, labels_of, process_families

if TYPE_CHECKING:
    from flintmq.nsqlookupd.coordinator import Coordinator

_NAMESPACE = "flintmq_nsqlookupd"
_PER_TURN = 1000  # partitions that are looked at before others get a turn


def collect(database: RegistrationDatabase, now_ns: int, version: str) -> list[Family]:
    """Return the figures as they are now.

    Args:
        now_ns: monotonic time, which decides who is active.
    """
    topics = database.topics()
    active = database.nodes(now_ns)
    about = Family(f"{_NAMESPACE}_build_info", "gauge", "Always 1; says what runs").add(1, labels_of(version=version))
    figures = (
        ("topics", "Topics that are known", len(topics)),
        ("channels", "Channels that are known", sum(len(database.channels(topic)) for topic in topics)),
        ("nodes", "nsqds that are connected", len(database.all_nodes())),
        ("active_nodes", "nsqds that are listed, because they have pinged lately", len(active)),
        ("topic_registrations", "Topics of all active nsqds, added up", sum(len(node.topics) for node in active)),
        ("tombstones", "Topics that are hidden on a nsqd", sum(sum(node.tombstones) for node in active)),
    )
    return [about, *(Family(f"{_NAMESPACE}_{name}", "gauge", text).add(value) for name, text, value in figures)]


async def collect_cluster(coordinator: Coordinator) -> list[Family]:
    """Return the figures of the cluster as they are known here; others get their turn meanwhile."""
    view = coordinator.view
    unled = under = unwritable = lossy = 0
    for count, (partition, state) in enumerate(list(view.partitions.items()), 1):
        if count % _PER_TURN == 0:
            await asyncio.sleep(0)
        record = view.topics.get(partition[0])
        if record is not None and record.is_deleting:
            continue
        wanted, least = (len(state.replicas), 1) if record is None else (record.meta.replica, record.min_in_sync)
        live = sum(node in view.nodes for node in state.in_sync_nodes)
        whole = len(whole_members(state, view.nodes))
        unled += view.leader(partition) is None
        under += whole < wanted
        unwritable += live < least
        lossy += state.may_have_lost
    missing = sum(
        max(0, record.partition_num - len(view.of_topic.get(topic, ())))
        for topic, record in view.topics.items()
        if not record.is_deleting
    )
    takes_part, is_followed = not coordinator.problem, coordinator.store_away_since_s is None
    is_read_only = bool(coordinator.writing.reason)
    draining = {*view.drains, *(name for name, node in view.nodes.items() if node.is_draining)}
    gauges = (
        ("cluster_master", "1 while this nsqlookupd is the master of the cluster", coordinator.is_master),
        ("cluster_has_master", "1 while there is a master, as far as this nsqlookupd knows",
         takes_part and coordinator.known_master is not None),
        ("cluster_healthy", "1 while this nsqlookupd takes part in the cluster, and the store takes writes",
         takes_part and is_followed and not is_read_only),
        ("cluster_store_followed", "0 once the coordination store was away for longer than a lease: all other figures "
         "of the cluster are as they were then", is_followed),
        ("cluster_store_read_only", "1 while the coordination store is there and takes no writes: nobody is elected",
         is_read_only),
        ("cluster_lookupds", "nsqlookupds of the cluster that live", len(view.lookupds)),
        ("cluster_nodes", "nsqds of the cluster that live", len(view.nodes)),
        ("cluster_draining_nodes", "nsqds that drain, by themselves or because an operator has everything taken from "
         "them; those that are away as well", len(draining)),
        ("cluster_topics", "Topics of the cluster", len(view.topics)),
        ("cluster_partitions", "Partitions of the cluster", len(view.partitions) + missing),
        ("cluster_partitions_without_leader", "Partitions that nobody leads", unled + missing),
        ("cluster_partitions_under_replicated", "Partitions with fewer copies in sync than wanted", under + missing),
        ("cluster_partitions_not_writable", "Partitions with fewer copies in sync than an OK needs",
         unwritable + missing),
        ("cluster_partitions_may_have_lost", "Partitions that may have lost messages, until acknowledged", lossy),
        ("cluster_unreadable", "Values of the coordination store that cannot be read", len(view.unreadable)),
    )  # fmt: skip
    elections = Family(f"{_NAMESPACE}_elections_total", "counter", "Elections that this nsqlookupd has seen")
    return [
        *(Family(f"{_NAMESPACE}_{name}", "gauge", text).add(value) for name, text, value in gauges),
        elections.add(coordinator.election_count),
    ]


def add_route(
    router: Router, clock: Clock, database: RegistrationDatabase, version: str, coordinator: Coordinator | None = None
) -> None:
    """Answer ``GET /metrics``."""

    async def metrics(request: Request) -> Response:
        cluster = [] if coordinator is None else await collect_cluster(coordinator)
        return exposition([*collect(database, clock.monotonic_ns(), version), *cluster, *process_families()])

    router.add("GET", "/metrics", metrics, is_logged=False, takes=())
