"""The part of nsqd's options that the broker needs.

Rules of this file: data alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from flintmq.budget import NO_LIMIT_BYTES
from flintmq.settings import NOTHING, Settings


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """Sizes in bytes, times in ns; without retention channels decide alone.

    Attributes:
        latency_window_ns: how far back the latencies of a channel are kept; 0 when they are not.
        settings: what topics inherit.
        memory_budget_bytes: see :mod:`flintmq.budget`.
    """

    segment_bytes: int = 100 * 1024 * 1024
    ephemeral_depth_max: int = 10_000
    retention_time_ns: int = 0
    retention_bytes: int = 0
    latency_window_ns: int = 0
    settings: Settings = NOTHING
    memory_budget_bytes: int = NO_LIMIT_BYTES
