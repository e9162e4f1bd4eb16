"""The ports that an nsqd tells of itself, and what of its options is not shown as it was given."""

from __future__ import annotations

import pytest

from flintmq.env import Env
from flintmq.nsqd.identity import Addresses, Identity
from flintmq.nsqd.options import NsqdOptions

TCP, HTTP, HTTPS = ("h", 4150), ("h", 4151), ("h", 4152)


def identity(addresses: Addresses, **options: object) -> Identity:
    found = Identity(Env(), NsqdOptions(**options))  # type: ignore[arg-type]
    found.addresses = addresses
    return found


@pytest.mark.parametrize(
    ("addresses", "broadcast", "told"),
    [
        (Addresses(TCP, HTTP, HTTPS), 0, 4151),
        (Addresses(TCP, HTTP), 0, 4151),
        (Addresses(TCP, None, HTTPS), 0, 4152),
        (Addresses(TCP, None, HTTPS), 14151, 14151),
        (Addresses(TCP, None), 14151, 14151),
        (Addresses(TCP, None), 0, 0),
    ],
)
def test_the_port_for_http(addresses: Addresses, broadcast: int, told: int):
    me = identity(addresses, broadcast_http_port=broadcast)
    assert me.peer().http_port == me.filled_in()["broadcast_http_port"] == told
    assert me.statsd_prefix == f"nsq.localhost_{told}."
    assert me.info(False)["http_port"] == (4151 if addresses.http else -1)


def test_the_password_of_the_store_is_not_shown():
    me = identity(Addresses(TCP, HTTP), cluster_store=("https://me:hidden@a:1", "https://b:1"))
    assert me.filled_in()["cluster_store"] == ["https://***@a:1", "https://b:1"]
