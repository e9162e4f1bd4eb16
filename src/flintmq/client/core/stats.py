"""Figures that clients count; the same on asyncio and on blocking sockets."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class ProducerStats:
    """Counters since the producer was made, and where it stands.

    Attributes:
        published: messages that nsqd answered OK.
        failed: messages whose call ended with an exception.
        commands: PUB, MPUB and DPUB sent.
        retries: commands sent again.
        bytes_in_flight: what counts against ``max_bytes_in_flight`` now.
        connections: nsqd that are connected now.
    """

    published: int = 0
    failed: int = 0
    commands: int = 0
    retries: int = 0
    bytes_in_flight: int = 0
    connections: int = 0


@dataclass(slots=True)
class ConsumerStats:
    """Counters since the consumer was made, and where it stands.

    Attributes:
        received: messages delivered.
        finished: FINs sent.
        requeued: REQs sent.
        dropped: messages whose connection was lost, or whose time was over, before they were handed out or answered;
            nsqd delivers them again.
        failed: messages whose handler raised.
        given_up: messages with more attempts than ``max_attempts``.
        late: FIN, REQ and TOUCH that nsqd refused because the message was not ours any more.
        connections: nsqd, or partitions on them, that are subscribed now.
        in_flight: delivered and not answered, over all connections.
        queued: delivered and not handed out.
        backoff: ``normal``, ``waiting`` or ``probing``.
        order_violations: messages that came out of order, of a consumer that wants order.
        blocked: partitions whose message comes again and again.
    """

    received: int = 0
    finished: int = 0
    requeued: int = 0
    dropped: int = 0
    failed: int = 0
    given_up: int = 0
    late: int = 0
    connections: int = 0
    in_flight: int = 0
    queued: int = 0
    backoff: str = "normal"
    order_violations: int = 0
    blocked: int = 0
