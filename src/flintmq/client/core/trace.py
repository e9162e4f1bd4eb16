"""The trace log: which message was stored where, and which came from where; a line of JSON each.

The logger is ``flintmq.trace``; nothing is configured, so the application says where it goes::

    {"event": "publish", "topic": "orders", "partition": 1, "nsqd": "10.0.0.5:4150", "internal_id": 1125899906842626,
     "trace_id": 12345, "offset": 135, "raw_size": 40, "count": 1}
    {"event": "receive", "topic": "orders", "channel": "billing", "partition": 1, "internal_id": 1125899906842626,
     "trace_id": 12345, "attempts": 1, "offset": 135, "raw_size": 40, "local_ip": "10.0.0.9", "nsqd_ip": "10.0.0.5",
     "nsqd": "10.0.0.5:4150"}

``null`` is what was not told: a plain NSQ tells no ids, offsets come with traced publishes and with ordered consuming.

Source: Youzan's smart client, "Message Tracing", Youzan's message tracing.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from flintmq.client.core.message import split_any_id

if TYPE_CHECKING:
    from flintmq.client.core.message import Delivery
    from flintmq.wire.extended import Stored

log = logging.getLogger("flintmq.trace")


class _Published(msgspec.Struct, tag_field="event", tag="publish"):
    topic: str
    partition: int | None
    nsqd: str
    internal_id: int | None
    trace_id: int | None
    offset: int | None
    raw_size: int | None
    count: int


class _Received(msgspec.Struct, tag_field="event", tag="receive"):
    topic: str
    channel: str
    partition: int | None
    internal_id: int | None
    trace_id: int | None
    attempts: int
    offset: int | None
    raw_size: int | None
    local_ip: str
    nsqd_ip: str
    nsqd: str


_encode = msgspec.json.Encoder().encode


def published(topic: str, nsqd: str, partition: int | None, stored: Stored | None, trace_ids: list[int]) -> None:
    """Log that nsqd took one message, or several of which ``stored`` is the first."""
    if not log.isEnabledFor(logging.INFO):
        return
    trace_id = None if partition is None else trace_ids[0]
    if stored is None:
        line = _Published(topic, partition, nsqd, None, trace_id, None, None, len(trace_ids))
    else:
        internal_id, _, offset, raw_size = stored
        line = _Published(topic, partition, nsqd, internal_id, trace_id, offset, raw_size, len(trace_ids))
    log.info("%s", _encode(line).decode())


def received(topic: str, channel: str, delivery: Delivery, partition: int | None, ends: tuple[str, str]) -> None:
    """Log messages that came.

    Args:
        ends: IP address of this client and of nsqd.
    """
    if not log.isEnabledFor(logging.INFO):
        return
    for _, attempts, message_id, _ in delivery.records:
        internal_id, trace_id = (None, None) if partition is None else split_any_id(message_id)
        extension = None if delivery.extensions is None else delivery.extensions.get(message_id)
        has_position = extension is not None and extension.offset >= 0
        line = _Received(
            topic,
            channel,
            partition,
            internal_id,
            trace_id,
            attempts,
            extension.offset if extension is not None and has_position else None,
            extension.raw_size if extension is not None and has_position else None,
            *ends,
            delivery.link.address,
        )
        log.info("%s", _encode(line).decode())
