"""Figures of several nodes put together, for views and in NSQ's form."""

from __future__ import annotations

import pytest

from flintmq.nsqadmin import daemons, official
from flintmq.nsqadmin.gather import is_another, topics_view
from flintmq.nsqadmin.snapshots import Known, Rates, Snapshot, merge
from flintmq.nsqadmin.views import Missing, NodeRow, TopicsQuery

S = 10**9


def node(address: str) -> NodeRow:
    host, _, port = address.rpartition(":")
    return NodeRow(address=address, hostname=host, broadcast_address=host, http_port=int(port))


def stats(body: str) -> daemons.Stats:
    return daemons.read_stats(body.encode())


def channel(name: str, depth: int, **more: int) -> daemons.Channel:
    return daemons.Channel(channel_name=name, depth=depth, **more)  # type: ignore[arg-type]


def snapshot(known_topics: tuple[str, ...] = (), **topics: list[daemons.Topic]) -> Snapshot:
    nodes = {f"{name}:4151": node(f"{name}:4151") for name in topics}
    answers = {f"{name}:4151": daemons.Stats(health="OK", topics=found) for name, found in topics.items()}
    return merge(1.0, Known(nodes, list(known_topics), []), answers, [])


def test_a_topic_of_two_nodes_is_one_row():
    found = snapshot(
        a=[daemons.Topic("t", depth=1, message_count=5, channels=[channel("c", 3), channel("d", 9)])],
        b=[daemons.Topic("t", depth=2, message_count=7, paused=True, channels=[channel("c", 4, in_flight_count=2)])],
    )
    row = found.topics["t"]
    assert (row.depth, row.message_count, row.node_count, row.channel_count) == (3, 12, 2, 2)
    assert (row.waiting, row.in_flight, row.paused) == (12, 2, True)  # what no channel has yet waits too
    assert found.channels["t"]["c"].depth == 7
    assert found.nodes["b:4151"].message_count == 7


def test_a_topic_that_no_node_has_is_inactive():
    found = snapshot(("gone", "t"), a=[daemons.Topic("t")])
    assert [name for name, row in found.topics.items() if row.is_inactive] == ["gone"]


def test_the_partitions_of_the_redesigned_nsq_are_one_topic():
    found = snapshot(
        a=[
            daemons.Topic("t", topic_full_name="t-0", topic_partition="0", depth=4096, channels=[channel("c", 3)]),
            daemons.Topic("t", topic_full_name="t-1", topic_partition="1", depth=4096, channels=[channel("c", 4)]),
        ]
    )
    row = found.topics["t"]
    assert (row.depth, row.waiting, row.node_count) == (0, 7, 1)  # its depth is bytes


def test_names_that_nothing_can_have_are_left_out_and_counted():
    found = stats('{"topics": [{"topic_name": "<script>", "channels": null}, {"topic_name": "t", "channels": ['
                  '{"channel_name": "../etc"}, {"channel_name": "c"}]}]}')  # fmt: skip
    assert [topic.topic_name for topic in found.topics or ()] == ["t"]
    assert found.dropped_names == 2
    merged = merge(1.0, Known({"a:4151": node("a:4151")}, [], []), {"a:4151": found}, [])
    assert merged.notes == ["nsqd a:4151 tells of 2 names that nothing can have: left out"]


@pytest.mark.parametrize(
    "body",
    [
        '{"topics": 7}',
        '{"topics": [{"topic_name": "t", "depth": "many"}]}',
        "[]",
        "<html>",
        "",
        "{" * 5000,
        '{"health":1}',
    ],
)
def test_nonsense_is_not_read_as_nothing(body: str):
    with pytest.raises((ValueError, RecursionError)):
        stats(body)


def test_an_answer_of_old_daemons_stands_in_data():
    assert stats('{"status_code":200,"data":{"health":"OK","topics":[]}}').health == "OK"


def rates_of(*snapshots: tuple[int, Snapshot]) -> Snapshot:
    rates = Rates()
    for at_s, found in snapshots:
        rates.tell(at_s * S, found)
    return snapshots[-1][1]


def one(count: int, depth: int) -> Snapshot:
    topics = [daemons.Topic("t", message_count=count, channels=[channel("c", depth, message_count=count)])]
    return snapshot(a=topics)


def test_rates_are_between_two_rounds():
    found = rates_of((10, one(100, 10)), (20, one(200, 60)))
    topic = found.topics["t"]
    assert (topic.in_per_s, topic.growth_per_s) == (10, 5)
    assert found.nodes["a:4151"].in_per_s == 10
    assert (found.channels["t"]["c"].in_per_s, found.channels["t"]["c"].out_per_s) == (10, 5)


def test_rounds_that_follow_each_other_closely_share_a_beginning():
    found = rates_of(*((10 + 2 * number, one(100 * number, 0)) for number in range(7)))
    assert found.topics["t"].in_per_s == 50
    found = rates_of((10, one(0, 0)), (10, one(1000, 0)))
    assert found.topics["t"].in_per_s is None  # of no time at all


def test_a_node_that_was_restarted_has_no_rate():
    found = rates_of((10, one(100, 10)), (20, one(5, 5)))
    assert found.topics["t"].in_per_s is None
    assert found.nodes["a:4151"].in_per_s is None


def test_a_node_that_comes_back_is_no_burst():
    found = rates_of(
        (10, one(100, 10)),
        (20, snapshot(a=[daemons.Topic("t", message_count=100)], b=[daemons.Topic("t", message_count=9000)])),
    )
    assert found.topics["t"].in_per_s is None


def many() -> Snapshot:
    return snapshot(
        ("gone",),
        a=[
            daemons.Topic("orders", message_count=3, channels=[channel("c", 5)]),
            daemons.Topic("Clicks", message_count=9, channels=[channel("c", 0, client_count=2)]),
            daemons.Topic("mails", message_count=1, paused=True, channels=[channel("c", 7, client_count=1)]),
        ],
    )


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ({}, ["Clicks", "gone", "mails", "orders"]),
        ({"sort": "-name"}, ["orders", "mails", "gone", "Clicks"]),
        ({"sort": "-waiting"}, ["mails", "orders", "Clicks", "gone"]),
        ({"sort": "no such column"}, ["Clicks", "gone", "mails", "orders"]),
        ({"text": "cLi"}, ["Clicks"]),
        ({"text": "<"}, []),
        ({"state": "inactive"}, ["gone"]),
        ({"state": "active"}, ["Clicks", "mails", "orders"]),
        ({"state": "paused"}, ["mails"]),
        ({"state": "waiting"}, ["mails", "orders"]),
        ({"state": "lonely"}, ["orders"]),
        ({"page": 2, "page_size": 3}, ["orders"]),
        ({"page": 99, "page_size": 3}, ["orders"]),
        ({"page": -1, "page_size": 1}, ["Clicks"]),
    ],
)
def test_topics_are_filtered_sorted_and_cut(query: dict[str, object], names: list[str]):
    view = topics_view(many(), TopicsQuery(**query))  # type: ignore[arg-type]
    assert [row.name for row in view.topics] == names
    assert view.total == 4
    assert view.sums.message_count == 13


def test_missing_daemons_are_in_every_view():
    found = many()
    found.missing.append(Missing("nsqd", "b:4151", "down", "nothing listens there"))
    assert topics_view(found, TopicsQuery()).missing == found.missing


def latency(count: int, value: float) -> daemons.Latency:
    return daemons.Latency(count, [daemons.Quantile(0.99, value)])


def test_percentiles_of_nodes_have_the_least_the_most_and_the_average_by_count():
    topics = [
        daemons.Topic("t", e2e_processing_latency=latency(1, 100.0)),
        daemons.Topic("t", e2e_processing_latency=latency(3, 500.0)),
    ]
    rows = [official.topic_stats(each, node(f"{name}:4151"), 0, False) for name, each in zip("ab", topics, strict=True)]
    found = official.sum_topic("t", rows)["e2e_processing_latency"]
    assert found == {
        "count": 4,
        "percentiles": [{"average": 400.0, "count": 4, "max": 500.0, "min": 100.0, "quantile": 0.99}],
        "topic": "t", "channel": "", "host": "*",
    }  # fmt: skip


def test_clients_stand_by_node_and_the_nearest_first():
    near = NodeRow(address="a:1", zone="z", region="r")
    clients = [
        daemons.Client(client_id=name, topology_zone=zone, topology_region=region)
        for name, zone, region in (("far", "y", "q"), ("region", "y", "r"), ("zone", "z", "r"))
    ]
    row = official.channel_stats(daemons.Channel("c", clients=clients), "t", near, 0, True)
    assert [each["client_id"] for each in official.sum_channel("t", "c", [row])["clients"]] == ["zone", "region", "far"]


def test_whose_nsqd_it_is():
    assert daemons.kind_of("1.3.0", "") == "nsq"
    assert daemons.kind_of("1.3.0", "0.1.0") == "flintmq"
    assert daemons.kind_of("0.3.7-HA.1.9.9", "") == "youzan"
    assert daemons.kind_of("", "") == "unknown"


@pytest.mark.parametrize(
    ("older", "newer"), [("1.2.9", "1.2.10"), ("1.3.0-alpha", "1.3.0"), ("nonsense", "0.0.1"), ("", "0.1.0")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str):
    assert daemons.version_key(older) < daemons.version_key(newer)


def test_what_a_leader_says_of_copies_that_lack_something_is_read():
    body = (
        b'{"node": "a", "partitions": [{"topic": "t", "partition": 1, "bytes": 9, "messages": 7, "end_bytes": 9, '
        b'"followers": {"b": {"bytes_done": 4, "messages_done": 3}}}]}'
    )
    (led,) = daemons.cluster_copies().read(body).partitions
    assert (led.topic, led.partition, led.messages - led.followers["b"].messages_done) == ("t", 1, 4)


@pytest.mark.parametrize(
    ("seen", "now", "is_other"),
    [
        ("5.aa", "9.aa", False),
        ("5.aa.bb", "0.bb.cc", False),  # a node with the first log is away
        ("5.aa", "9.bb", True),
        ("5", "9", False),
        ("5", "4", True),
        ("5.aa", "4", True),
        ("5.aa", "", False),  # nobody has one of that name now
        ("5", "", False),
        ("nonsense", "4", False),
        ("9" * 30, "4", False),
    ],
)
def test_another_topic_of_the_same_name_is_told_by_its_logs_or_its_messages(seen: str, now: str, is_other: bool):
    assert is_another(seen, now) is is_other
