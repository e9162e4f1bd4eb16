"""A partition that this node leads, between its log, its followers and the store.

Rules of this file: what may be done is asked of :class:`flintmq.cluster.leading.Leading`; here is kept what was done:
how far the watermark is set, whether readers are let in, which change of the state is under way.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from dataclasses import dataclass

from flintmq.broker.partition import Partition
from flintmq.broker.replica import Replica
from flintmq.cluster.leading import Leading
from flintmq.cluster.state import PartitionState
from flintmq.cluster.store import Compare, KeyValue


@dataclass(frozen=True, slots=True)
class CatchUp:
    """A follower catches up: since when, and what it had then."""

    begun_ns: int
    first: int


class Led:
    """One epoch of a partition at its leader.

    Args:
        partition: in the broker.
        pair: its state in the store.
        deliver_from_ns: monotonic time from which on nobody else can deliver any more, whoever lives.
        previous: node and incarnation of the leader before, as far as that is known; when that process is dead nobody
            else delivers.

    Attributes:
        leading: decides.
        awaits_channels: those that it begins with are not on all replicas in sync yet: whoever reads has to wait.
        is_ready: whoever reads may be let in.
        is_fenced: nothing may be acknowledged or delivered, because others may lead by now.
        is_swapping: the store is being asked to change its state.
        was_writable: whether it was when it was looked at last.
        linked: nodes that it is sent to.
        catching: those of them that are not in sync, and catch up.
        asked: the state before the change that the store is or was asked for last, and why.
        guarded: the state that the store is or was asked for last, and what has to hold as well for that.
    """

    __slots__ = (
        "asked",
        "awaits_channels",
        "catching",
        "deliver_from_ns",
        "guarded",
        "is_fenced",
        "is_ready",
        "is_swapping",
        "leading",
        "linked",
        "pair",
        "partition",
        "previous",
        "replica",
        "was_writable",
    )

    def __init__(
        self,
        replica: Replica,
        partition: Partition,
        leading: Leading,
        pair: KeyValue,
        deliver_from_ns: int,
        previous: tuple[str, str] | None = None,
    ) -> None:
        self.replica = replica
        self.partition = partition
        self.leading = leading
        self.pair = pair
        self.deliver_from_ns = deliver_from_ns
        self.previous = previous
        self.awaits_channels = False
        self.is_ready = False
        self.is_fenced = False
        self.is_swapping = False
        self.was_writable = True
        self.linked: dict[str, None] = {}
        self.catching: dict[str, CatchUp] = {}
        self.asked = leading.state, ""
        self.guarded: tuple[PartitionState | None, tuple[Compare, ...]] = None, ()

    @property
    def is_writable(self) -> bool:
        """Whether what is published now can be acknowledged."""
        return self.leading.is_writable and not self.is_fenced

    def may_act(self, is_held: bool, now_ns: int) -> bool:
        """Whether this node may acknowledge and deliver: it has its lease, or all followers have just confirmed, and it
        does not have others lead.
        """
        return not self.leading.gives_up and (is_held or self.leading.is_confirmed(now_ns))
