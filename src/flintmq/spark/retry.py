"""Retries: how often, and after how long a pause, something is tried again.

The rules of this file: every series of attempts ends; progress starts a new one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.1
PAUSE_MAX_S = 5.0

log = logging.getLogger("flintmq.spark")


class Retries:
    """Counts failures in a row.

    Args:
        limit: failures that are forgiven.
        sleep: how to pause; seconds.
    """

    def __init__(self, limit: int, sleep: Callable[[float], None] = time.sleep) -> None:
        self._limit = limit
        self._sleep = sleep
        self._failures = 0

    def succeeded(self) -> None:
        """Forget the failures so far."""
        self._failures = 0

    def failed(self, error: Exception, doing: str) -> None:
        """Pause before the next attempt.

        Raises:
            Exception: ``error`` itself, once it happened more often in a row than the limit.
        """
        self._failures += 1
        if self._failures > self._limit:
            raise error
        pause_s = min(FIRST_PAUSE_S * 2 ** (self._failures - 1), PAUSE_MAX_S)
        log.warning("%s failed (%s), attempt %d of %d in %.1f s", doing, error, self._failures, self._limit, pause_s)
        self._sleep(pause_s)
