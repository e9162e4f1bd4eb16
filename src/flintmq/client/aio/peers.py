"""The nsqd that a client is connected to, told apart by what they say of themselves."""

from __future__ import annotations

from typing import Any, NamedTuple

from flintmq.client.aio.consumer import Consumer
from flintmq.client.aio.producer import Producer
from flintmq.client.core.link import Link


class Peer(NamedTuple):
    """An nsqd at the other end of a connection.

    Attributes:
        address: ``host:port`` that was connected to.
        run_id: the same on every way to one process of nsqd, and no other has it; empty where nsqd tells none.
    """

    address: str
    run_id: str


def peers(client: Consumer[Any] | Producer) -> tuple[Peer, ...]:
    """Return the nsqd that are connected now, each once."""
    links = client._connections if isinstance(client, Producer) else client._consuming.connections()
    return tuple(
        dict.fromkeys(Peer(each.address, each.features.nsqd_run_id) for each in links if isinstance(each, Link))
    )
