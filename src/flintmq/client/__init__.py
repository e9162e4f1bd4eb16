"""The client: producer, consumer, and the policies they follow; on asyncio and on blocking sockets.

Rooms, lower to upper: ``core`` (what every client does alike; no event loop, no thread, no socket), ``aio`` and
``blocking`` (the same on asyncio and on blocking sockets), and beside them ``admin``, the HTTP APIs of the daemons.
Upon both: ``app`` and ``prometheus``.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flintmq.client.aio.consumer import Consumer
    from flintmq.client.aio.producer import Producer
    from flintmq.client.app import App
    from flintmq.client.core.message import Discard, Message, Requeue
    from flintmq.client.options import ConnectionOptions

__all__ = ["App", "ConnectionOptions", "Consumer", "Discard", "Message", "Producer", "Requeue"]

_MODULES = {
    "App": "app",
    "Consumer": "aio.consumer",
    "Producer": "aio.producer",
    "Message": "core.message",
    "Requeue": "core.message",
    "Discard": "core.message",
    "ConnectionOptions": "options",
}


if not TYPE_CHECKING:  # else any name would do for those who check types

    def __getattr__(name: str) -> Any:  # the blocking client needs no event loop, and does not want to import one
        if name not in _MODULES:
            raise AttributeError(f"module 'flintmq.client' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"flintmq.client.{_MODULES[name]}"), name)
        globals()[name] = value
        return value
