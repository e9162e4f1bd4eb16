"""FlintMQ's client without an event loop: the same names on blocking sockets, for Django, Flask, scripts and Spark.

::

    from flintmq.sync import Consumer, Producer

    producer = Producer("127.0.0.1:4150")                # one per process, for all of its threads
    producer.pub("orders", b"hello")

    with Consumer("orders", "billing", nsqd_tcp_addresses="127.0.0.1:4150") as consumer:
        for message in consumer:
            with message:
                print(message.body)
"""

from __future__ import annotations

from flintmq.client.admin.question import HttpRefused
from flintmq.client.blocking.admin import LookupdAdmin, NsqdAdmin
from flintmq.client.blocking.consumer import Consumer
from flintmq.client.blocking.producer import Producer
from flintmq.client.core.message import Discard, Message, Requeue
from flintmq.client.core.order import OrderViolation
from flintmq.client.core.producer_settings import ProducerOptions
from flintmq.client.core.publish import Published
from flintmq.client.core.settings import ConsumerOptions
from flintmq.client.core.start import Start
from flintmq.client.core.stats import ConsumerStats, ProducerStats
from flintmq.client.options import ConnectionOptions
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
    "Published",
    "ProducerStats",
    "ConsumerStats",
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
    "HttpRefused",
    "DiscoveryError",
    "NoNsqd",
    "OrderViolation",
    "BodyError",
    "OptionError",
]
