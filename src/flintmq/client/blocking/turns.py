"""The places a publish can go to now, in turn.

Rules of this file: no waiting and no locking; :mod:`flintmq.client.blocking.producer` does both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flintmq.client.blocking.pool import Pool


class Place(NamedTuple):
    """An nsqd, or a partition on it, that can be published to."""

    pool: Pool
    partition: int | None


@dataclass(slots=True)
class Turns:
    """The places a topic can be published at, in turn.

    Attributes:
        next: whose turn it was last.
    """

    places: list[Place]
    next: int
