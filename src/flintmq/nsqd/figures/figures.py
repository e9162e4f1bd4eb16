"""Everything that one nsqd counts, for whoever asks.

::

    collection.py  topics and channels  ->  nsq.py         /stats, as JSON and as text
    process.py     this process         ->  prometheus.py  /metrics
                                        ->  statsd.py      datagrams
    youzan.py      partitions, for /stats of the redesigned NSQ, whose words mean other things
    replicas.py    copies of partitions, where this nsqd is one of a cluster

Source: NSQ's HTTP API (``/stats``), NSQ's statsd, NSQ's latencies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flintmq.broker.partition import Partition
from flintmq.net.metrics import Family, process_families
from flintmq.nsqd.client import Client, Clients
from flintmq.nsqd.figures import process, prometheus, replicas, statsd, youzan
from flintmq.nsqd.figures.collection import TopicFigures, topics_of
from flintmq.nsqd.figures.history import HourlySizes
from flintmq.nsqd.figures.latencies import Latencies
from flintmq.nsqd.figures.loop_delays import LoopDelays
from flintmq.nsqd.identity import Identity
from flintmq.nsqd.node import Node
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqd.replica_figures import ClusterPart


class Figures:
    """The figures of one nsqd.

    Attributes:
        history: what was published, by partition and hour.
    """

    def __init__(self, node: Node, clients: Clients, identity: Identity, options: NsqdOptions) -> None:
        self._node = node
        self._broker = node.engine.broker
        self._clients = clients
        self._identity = identity
        self._options = options
        self._clock = node.engine.env.clock
        self._gc_pauses = process.GcPauses(self._clock)
        self._loop_delays = LoopDelays()
        self._statsd: statsd.Reporter | None = None
        self.history = HourlySizes(self._clock, self._partitions)

    def start(self) -> None:
        """Begin to measure, and to report where the flags say so."""
        self._gc_pauses.start()
        self.history.start()
        if self._options.http_address:
            self._loop_delays.start()
        if self._options.statsd_address:
            self._statsd = self._new_statsd()

    async def close(self) -> None:
        """Measure and report no more."""
        if self._statsd is not None:
            await self._statsd.close()
        self._gc_pauses.stop()
        self.history.stop()
        self._loop_delays.stop()

    def _partitions(self) -> Iterator[Partition]:
        return (partition for topic in self._broker.topics.values() for partition in topic.partitions.values())

    def _new_statsd(self) -> statsd.Reporter:
        options = self._options
        return statsd.Reporter(
            options.statsd_address,
            options.statsd_interval_ns / 1e9,
            options.statsd_udp_packet_size,
            statsd.Lines(self._identity.statsd_prefix, options.statsd_exclude_ephemeral),
            self.topics,
            self.memory if options.statsd_mem_stats else None,
        )

    # -- what there is -------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """Return version, health and start of this nsqd, as the redesigned NSQ has them."""
        identity = self._identity
        start_s = identity.start_ns // 1_000_000_000
        return {"version": identity.version, "health": self._node.health(), "start_time": start_s}

    def memory(self) -> dict[str, int]:
        """Return the figures of this process's memory."""
        return process.memory(self._gc_pauses)

    def topics(self, name: str = "", channel: str = "") -> Iterator[TopicFigures]:
        """Collect topics by name, each as it is when its turn comes.

        Args:
            name: only this one; empty for all.
            channel: only this one, and only topics that have it; empty for all.
        """
        return topics_of(self._broker.topics, self._latencies(), name, channel)

    def producers(self) -> list[Client]:
        """Return the clients that have published."""
        return [client for client in self._clients if client.pub_counts]

    def partitions(self, topic: str, channel: str, partition: int | None, has_clients: bool) -> Iterator[youzan.Row]:
        """Return a row for each partition in the terms of the redesigned NSQ.

        Args:
            topic, channel: only this one; empty for all.
            partition: only this one; None for all.
        """
        return youzan.rows(
            self._broker.topics,
            self._latencies(),
            self.history,
            self._clients,
            topic=topic,
            channel=channel,
            partition=partition,
            has_clients=has_clients,
            clock_shift_ns=self._broker.clock_shift_ns,
        )

    @property
    def cluster(self) -> ClusterPart | None:
        """The figures of this nsqd's part in a cluster; None: it has none."""
        return None if self._node.agent is None else self._node.agent.shown

    async def families(self) -> list[Family]:
        """Return everything that Prometheus is told; others get their turn meanwhile."""
        node, options = self._node, self._options
        daemon = prometheus.describe_daemon(
            self._identity.version,
            options.durability,
            self._identity.start_ns,
            node.health() == "OK",
            len(self._clients),
            node.damage,
            node.lookup.connected(),
        )
        memory = prometheus.describe_memory(self._broker)
        delays, trace = self._loop_delays.family(), node.tracing.families()
        topics = await prometheus.collect_topics(self._broker.topics, self._latencies())
        cluster = [] if self.cluster is None else await replicas.families(self.cluster)
        return [*daemon, *memory, delays, *trace, *topics, *cluster, *process_families()]

    def _latencies(self) -> Latencies:
        return Latencies(self._options.e2e_processing_latency_percentile, self._clock.wall_ns())
