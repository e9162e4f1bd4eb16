"""This node's part in the cluster, for whoever looks: figures, rows for operators, one text for failing tests.

Rules of this file: nothing is changed here; what is shown is that of the moment.

Source: ``nsqd/replica_figures.py`` for what figures mean.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flintmq.cluster.view import View
from flintmq.nsqd.cluster.alone import Alone
from flintmq.nsqd.cluster.belonging import BelongingStore
from flintmq.nsqd.cluster.lease import Lease
from flintmq.nsqd.cluster.let_go import LetGo
from flintmq.nsqd.cluster.peers import Peers
from flintmq.nsqd.cluster.seen import Seen, figures_of, sorted_partitions
from flintmq.nsqd.cluster.table import Table
from flintmq.nsqd.replica_figures import ClusterFigures, ReplicaFigures


class Shown:
    """The :class:`flintmq.nsqd.replica_figures.ClusterPart` of a node.

    Args:
        node_id, incarnation: of this process.
    """

    def __init__(
        self,
        node_id: str,
        incarnation: str,
        view: View,
        table: Table,
        lease: Lease,
        peers: Peers,
        seen: Seen,
        store: BelongingStore,
        gone: LetGo,
        alone: Alone,
    ) -> None:
        self.node_id = node_id
        self._incarnation = incarnation
        self._view = view
        self._table = table
        self._lease = lease
        self._peers = peers
        self._seen = seen
        self._store = store
        self._gone = gone
        self._alone = alone

    def figures(self) -> ClusterFigures:
        """See :class:`flintmq.nsqd.replica_figures.ClusterPart`."""
        seen = self._seen
        return ClusterFigures(
            cluster=self._view.keys.cluster,
            node=self.node_id,
            incarnation=self._incarnation,
            has_lease=self._lease.is_held,
            revision=self._view.revision,
            problem=self._lease.problem or self._store.problem,
            elected_count=seen.elected_count,
            ended_count=seen.ended_count,
            joined_count=seen.joined_count,
            left_count=seen.left_count,
            caught_up_count=seen.caught_up_count,
            replica_count=len(self._table.copies),
            leader_count=len(self._table.led),
            set_aside_count=self._gone.aside_count,
            double_topics=tuple(self._alone.doubles()),
        )

    def replicas(self, topic: str = "", partition: int | None = None) -> Iterator[ReplicaFigures]:
        """See :class:`flintmq.nsqd.replica_figures.ClusterPart`."""
        for each in sorted_partitions(self._table.copies, topic, partition):
            copy = self._table.copies.get(each)
            if copy is not None:
                yield figures_of(self._view, each, copy.replica, copy.led, copy.following)

    def copies(self, lags_only: bool = False) -> list[dict[str, Any]]:
        """Return what is led here, how much that is, and how far the other copies are.

        Args:
            lags_only: of those partitions alone that somebody is not in sync of who is to be.
        """
        rows = []
        for (topic, number), led in self._table.led.items():
            leading, stored = led.leading, led.replica.log
            if lags_only and not leading.state.lacking:
                continue
            total = stored.bytes_below(stored.next_sequence)
            rows.append(
                {
                    "topic": topic,
                    "partition": number,
                    "bytes": total,
                    "messages": stored.next_sequence - stored.start_sequence,
                    "end_bytes": stored.end_offset_bytes,
                    "followers": {
                        node: {
                            "bytes_done": stored.bytes_below(follower.acked),
                            "messages_done": max(0, follower.acked - stored.start_sequence),
                        }
                        for node, follower in leading.followers.items()
                    },
                }
            )
        return rows

    def describe(self) -> str:
        """The state of everything, for humans and failing tests."""
        lines = [
            f"node {self.node_id} incarnation={self._incarnation} held={self._lease.is_held} {self._lease.problem}"
        ]
        lines += [
            f"  {led.leading.describe()} ready={led.is_ready} fenced={led.is_fenced}"
            for led in self._table.led.values()
        ]
        for link in self._peers.links():
            lines += [f"  {stream.describe()}" for stream in link.streams.values()]
        lines += [f"  {copy.replica.describe()}" for copy in self._table.copies.values() if copy.replica is not None]
        return "\n".join(lines)
