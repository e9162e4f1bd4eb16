"""Who may use an endpoint that is for some addresses only."""

import pytest

from flintmq.net.networks import LOOPBACK, Networks


@pytest.mark.parametrize(
    ("ranges", "peer", "expected"),
    [
        (LOOPBACK, "127.0.0.1:4000", True),
        (LOOPBACK, "127.9.9.9:1", True),
        (LOOPBACK, "[::1]:4000", True),
        (LOOPBACK, "[::ffff:127.0.0.1]:4000", True),
        (LOOPBACK, "@", True),
        (LOOPBACK, "10.0.0.1:4000", False),
        (LOOPBACK, "[::ffff:10.0.0.1]:4000", False),
        (LOOPBACK, "[fe80::1%eth0]:4000", False),
        (["fe80::/10"], "[fe80::1%eth0]:4000", True),
        (["10.1.2.3/8"], "10.255.0.1:1", True),
        (["10.1.2.3"], "10.1.2.4:1", False),
        ([], "203.0.113.1:1", True),
        (LOOPBACK, "localhost:1", False),
        (LOOPBACK, "127.0.0.1", False),
    ],
)
def test_networks(ranges, peer, expected):
    assert Networks(ranges).allows(peer) is expected


def test_what_is_not_a_range_is_refused():
    with pytest.raises(ValueError, match="nonsense"):
        Networks(["nonsense"])
