"""FlintMQ: NSQ in Python. The public names; each is imported when it is first used.

::

    from flintmq import Consumer, Producer

    async with Producer("127.0.0.1:4150") as producer:
        await producer.pub("orders", b"hello")

    async with Consumer("orders", "billing", nsqd_tcp_addresses="127.0.0.1:4150") as consumer:
        async for message in consumer:
            async with message:
                print(message.body)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from flintmq.version import __version__

if TYPE_CHECKING:
    from flintmq import errors, sync, testing
    from flintmq.client.admin.clients import LookupdAdmin, NsqdAdmin
    from flintmq.client.admin.question import HttpRefused
    from flintmq.client.aio.consumer import Consumer
    from flintmq.client.aio.producer import Producer
    from flintmq.client.app import App
    from flintmq.client.core.message import Discard, Message, Requeue
    from flintmq.client.core.order import OrderViolation
    from flintmq.client.core.producer_settings import ProducerOptions
    from flintmq.client.core.publish import Published
    from flintmq.client.core.settings import ConsumerOptions
    from flintmq.client.core.start import Start
    from flintmq.client.options import ConnectionOptions
    from flintmq.client.security import TlsRefused
    from flintmq.client.telemetry import Telemetry
    from flintmq.errors import (
        BodyError,
        ConnectionFailed,
        DiscoveryError,
        FinFailed,
        FlintError,
        LocalProtocolError,
        NoNsqd,
        NsqdError,
        OptionError,
        ProtocolError,
        PublishError,
        PublishRefused,
        PublishUnknown,
        RemoteProtocolError,
        ReqFailed,
        TouchFailed,
    )

__all__ = [
    "App",
    "Producer",
    "Consumer",
    "Message",
    "Requeue",
    "Discard",
    "ConnectionOptions",
    "ConsumerOptions",
    "ProducerOptions",
    "Start",
    "NsqdAdmin",
    "LookupdAdmin",
    "Telemetry",
    "Published",
    "errors",
    "sync",
    "testing",
    "FlintError",
    "ProtocolError",
    "LocalProtocolError",
    "RemoteProtocolError",
    "NsqdError",
    "FinFailed",
    "ReqFailed",
    "TouchFailed",
    "PublishError",
    "PublishRefused",
    "PublishUnknown",
    "ConnectionFailed",
    "TlsRefused",
    "HttpRefused",
    "OrderViolation",
    "DiscoveryError",
    "NoNsqd",
    "BodyError",
    "OptionError",
    "__version__",
]

_MODULES = ("errors", "sync", "testing")

_CLIENT = {
    "App": "flintmq.client.app",
    "Producer": "flintmq.client.aio.producer",
    "Consumer": "flintmq.client.aio.consumer",
    "Message": "flintmq.client.core.message",
    "Requeue": "flintmq.client.core.message",
    "Discard": "flintmq.client.core.message",
    "ConnectionOptions": "flintmq.client.options",
    "ConsumerOptions": "flintmq.client.core.settings",
    "ProducerOptions": "flintmq.client.core.producer_settings",
    "Start": "flintmq.client.core.start",
    "NsqdAdmin": "flintmq.client.admin.clients",
    "LookupdAdmin": "flintmq.client.admin.clients",
    "HttpRefused": "flintmq.client.admin.question",
    "TlsRefused": "flintmq.client.security",
    "Telemetry": "flintmq.client.telemetry",
    "Published": "flintmq.client.core.publish",
    "OrderViolation": "flintmq.client.core.order",
}


if not TYPE_CHECKING:  # else any name would do for those who check types

    def __getattr__(name: str) -> Any:
        if name in _MODULES:
            return importlib.import_module(f"flintmq.{name}")
        if name not in __all__:
            raise AttributeError(f"module 'flintmq' has no attribute {name!r}")
        value = getattr(importlib.import_module(_CLIENT.get(name, "flintmq.errors")), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted(__all__)
