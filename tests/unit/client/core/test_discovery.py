"""What is asked of nsqlookupd and when: addresses, who is asked next, polls.

What their answers mean: test_topology.py; the asking: aio/test_lookup.py and blocking/test_lookup.py.
"""

from __future__ import annotations

import json

import pytest
from tests.unit.client.lookup_answers import bare, node

from flintmq.client.core.discovery import Directory, Node, PollTimes, parse_nodes
from flintmq.client.options import NSQLOOKUPD_COUNT_MAX
from flintmq.errors import DiscoveryError

A = "http://a:4161"


def addresses(found) -> list[str]:
    return [node.address for node in found]


# --- answers ---


@pytest.mark.parametrize(
    "wrap",
    [lambda data: data, lambda data: {"status_code": 200, "status_txt": "OK", "data": data}],
    ids=["bare", "wrapped"],
)
def test_both_forms(wrap):
    body = json.dumps(wrap({"channels": ["c"], "producers": [node("n1"), node("n2", 5000)], "meta": {}})).encode()
    assert addresses(parse_nodes(body)) == ["n1:4150", "n2:5000"]


@pytest.mark.parametrize(
    "body", [b'{"producers":null}', b'{"producers":[]}', b"{}", b'{"status_code":200,"data":null}', b'{"data":{}}']
)
def test_no_nodes(body):
    assert parse_nodes(body) == ()


def test_nodes_that_cannot_be_connected_to_are_left_out():
    assert addresses(parse_nodes(bare(node(""), node("n", 0), node("::1")))) == ["[::1]:4150"]


@pytest.mark.parametrize("body", [b"", b"OK", b"[]", b'{"producers":5}', b'{"producers":[{"tcp_port":"x"}]}', b"\xff"])
def test_what_cannot_be_read(body):
    with pytest.raises(DiscoveryError, match="cannot be read"):
        parse_nodes(body)


def test_a_node_is_its_address():
    assert Node("host", 4150).address == "host:4150"


# --- which nsqlookupd there are ---


def test_a_directory_is_bounded():
    directory = Directory([A])
    listed = [{"NodeIP": "h", "HttpPort": str(port)} for port in range(1, 1000)]
    directory.note_list(A, 200, json.dumps({"lookupdnodes": listed}).encode(), 0.0)
    directory.take_lists()
    assert len(directory.addresses) == NSQLOOKUPD_COUNT_MAX
    assert directory.addresses[0] == A


# --- polling ---


def exact(interval_s: float, jitter: float) -> float:
    assert jitter == 0.3
    return interval_s


def test_polls_become_rare_and_hurry_after_a_loss():
    times = PollTimes(60.0, 0.3)
    assert [times.next_s(exact) for _ in range(7)] == [2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert times.hurry(), "a wait of 60 s is to be cut short"
    assert times.next_s(exact) == 2.0
    assert not times.hurry(), "the present one is short: losses in quick succession must not put the poll off for ever"
    assert [times.next_s(exact) for _ in range(2)] == [2.0, 4.0]


def test_polls_are_never_rarer_than_asked_for():
    times = PollTimes(0.5, 0.3)
    assert [times.next_s(exact) for _ in range(3)] == [0.5, 0.5, 0.5]


def test_a_topic_with_partitions_is_polled_more_often():
    times = PollTimes(60.0, 0.3)
    assert [times.next_s(exact) for _ in range(5)] == [2.0, 4.0, 8.0, 16.0, 32.0]
    times.limit(5.0, 1.0)
    assert [times.next_s(exact) for _ in range(2)] == [5.0, 5.0]
    assert times.hurry()
    assert [times.next_s(exact) for _ in range(4)] == [1.0, 2.0, 4.0, 5.0]
