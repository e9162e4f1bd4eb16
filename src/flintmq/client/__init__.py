"""The client: producer, consumer, and the policies they follow; on asyncio here, on blocking sockets in ``blocking``.

Layers inside, upper to lower: ``app``, ``consumer``, ``dead_letters``, ``producer``, ``sending | subscribing``,
``flow | links | lanes | following | handlers``, ``admission | routing``, ``publish``,
``connection | discovery | inbox | order | trace``, ``message``, ``topology | rdy | backoff | start``, ``options``.
Beside them, on ``discovery``: ``admin``, the HTTP APIs of the daemons.
The policies (``rdy``, ``backoff``, ``routing``, ``topology``, ``order``) read no clock and draw no random number:
values come in.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flintmq.client.app import App
    from flintmq.client.consumer import Consumer
    from flintmq.client.message import Discard, Message, Requeue
    from flintmq.client.options import ConnectionOptions
    from flintmq.client.producer import Producer

__all__ = ["App", "ConnectionOptions", "Consumer", "Discard", "Message", "Producer", "Requeue"]

_MODULES = {
    "App": "app",
    "Consumer": "consumer",
    "Producer": "producer",
    "Message": "message",
    "Requeue": "message",
    "Discard": "message",
    "ConnectionOptions": "options",
}


def __getattr__(name: str) -> Any:  # the blocking client needs no event loop, and does not want to import one
    if name not in _MODULES:
        raise AttributeError(f"module 'flintmq.client' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"flintmq.client.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
