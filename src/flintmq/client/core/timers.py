"""Time as the client core needs it: an event loop fits, and so does :mod:`flintmq.client.blocking.timers`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    """A call that is to come."""

    def cancel(self) -> None: ...


class Timers(Protocol):
    """An event loop as far as its timers are needed, or what stands in for it. Times are in seconds on one clock."""

    def time(self) -> float: ...
    def call_at(self, when: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...
    def call_later(self, delay: float, callback: Callable[..., object], /, *args: Any) -> Timer: ...
