"""Nodes that stop to answer again and again: how long each has to be steady before it is in sync again.

A member of an in-sync set that answers nothing holds publishers for ``LAG_NS_MAX``, until it is out. A node that comes
back, joins and stops again would hold them each time; one whose disk hangs again and again, and that leaves by itself,
has the store written each time. So each time that it fell out within a while it is watched for longer before it is
taken in: not at all after the first time, then 5 s, 10 s and so on. Which partition it fell out of does not matter, nor
under which epoch: what stops is a node.

Rules of this file: no IO and no clock, it is told the time; one object for all that a process leads; what a restart of
that process forgets costs one more time.
"""

from __future__ import annotations

from flintmq.cluster.state import LAG_NS_MAX

STEADY_NS_MIN = 5_000_000_000
"""After the second time; twice as long after each further one."""
STEADY_NS_MAX = 60_000_000_000
FORGOTTEN_NS = 300_000_000_000
"""After so long without falling out all is forgotten."""
_DOUBLED_MAX = 16


class _Falls:
    __slots__ = ("count", "has_joined", "last_ns")

    def __init__(self) -> None:
        self.count = 0
        self.last_ns = 0
        self.has_joined = True


class Steadiness:
    """The nodes that fell out of in-sync sets lately, of all partitions that are led here.

    Attributes:
        now_ns: monotonic time, of the last tick.
    """

    __slots__ = ("_nodes", "now_ns")

    def __init__(self) -> None:
        self.now_ns = 0
        self._nodes: dict[str, _Falls] = {}

    def tick(self, now_ns: int) -> None:
        """Take note of the time; call it a few times a second."""
        self.now_ns = now_ns
        if self._nodes:
            for node in [node for node, falls in self._nodes.items() if self._is_forgotten(falls)]:
                del self._nodes[node]

    def _is_forgotten(self, falls: _Falls) -> bool:
        return self.now_ns - falls.last_ns >= FORGOTTEN_NS

    def fell(self, node: str) -> None:
        """A node fell out of an in-sync set, and publishers may have waited for it, or it left because it is unfit.

        What it leaves together counts once: until it has joined somewhere again, and ``LAG_NS_MAX`` have passed.
        """
        falls = self._nodes.setdefault(node, _Falls())
        if falls.has_joined and (not falls.count or self.now_ns - falls.last_ns >= LAG_NS_MAX):
            falls.count += 1
            falls.last_ns = self.now_ns
            falls.has_joined = False

    def joined(self, node: str) -> None:
        """A node was taken into an in-sync set."""
        falls = self._nodes.get(node)
        if falls is not None:
            falls.has_joined = True

    def count(self, node: str) -> int:
        """Return how often a node fell out lately."""
        falls = self._nodes.get(node)
        return 0 if falls is None else falls.count

    def wait_ns(self, node: str) -> int:
        """Return for how long a node has to have been steady before it is taken into an in-sync set; 0: it need not."""
        count = self.count(node)
        if count < 2:
            return 0
        return min(STEADY_NS_MIN << min(count - 2, _DOUBLED_MAX), STEADY_NS_MAX)
