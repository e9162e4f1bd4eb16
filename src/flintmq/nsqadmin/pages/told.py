"""Outcomes of changes, kept until the page that follows a change has shown them.

Rules of this file: in memory, at most so many, the oldest go first; each is told once, and only to who caused it.
"""

from __future__ import annotations

from collections import OrderedDict
from random import Random

from flintmq.nsqadmin.views import DoneView

_KEPT_MAX = 256
_KEY_BITS = 64


class Told:
    """The outcomes that are still to be told."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._kept: OrderedDict[str, tuple[str, DoneView]] = OrderedDict()

    def keep(self, name: str, outcome: DoneView) -> str:
        """Keep an outcome for the visitor of that name; returns the key for the address of the next page."""
        key = f"{self._random.getrandbits(_KEY_BITS):016x}"
        self._kept[key] = name, outcome
        while len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)
        return key

    def take(self, name: str, key: str) -> DoneView | None:
        """The outcome of that key, once; None for what is not there, or somebody else's."""
        kept = self._kept.get(key)
        if kept is None or kept[0] != name:
            return None
        del self._kept[key]
        return kept[1]
