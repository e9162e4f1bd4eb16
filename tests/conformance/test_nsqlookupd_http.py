"""nsqlookupd's HTTP API, one case per rule: the common rules, every endpoint, time (NSQ's nsqlookupd)."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
from tests.conformance.conftest import is_ours
from tests.conformance.daemon_helpers import (
    NODE,
    PEER,
    LookupConnection,
    addresses_of,
    identified,
    registered_ids,
    topics_of,
)
from tests.integration.daemons import Answer, Daemons, Nsqlookupd, wait_until

JSON_TYPE = "application/json; charset=utf-8"
NSQ_TYPE = "nsq; version=1.0"
GET_PATHS = ("/ping", "/info", "/lookup", "/topics", "/channels", "/nodes", "/debug")
JSON_PATHS = ("/info", "/lookup?topic=known", "/topics", "/channels?topic=known", "/nodes", "/debug")
POST_PATHS = ("/topic/create", "/topic/delete", "/topic/tombstone", "/channel/create", "/channel/delete")
LONGEST_NAME = "n" * 64
BAD_NAMES = {
    "empty": "",
    "too-long": "n" * 65,
    "dollar": "$",
    "space": "a%20b",
    "not-ascii": "%C3%A4",
    "only-the-suffix": "%23ephemeral",
    "line-end": "a%0a",
    "star": "*",
}
PRODUCER_KEYS = [
    "remote_address",
    "hostname",
    "broadcast_address",
    "tcp_port",
    "http_port",
    "version",
    "topology_zone",
    "topology_region",
]
BRIEF_S = 0.3


@pytest.fixture(scope="module", autouse=True)
def known(nsqlookupd: Nsqlookupd) -> None:
    """A topic that is there without a producer."""
    nsqlookupd.post("/topic/create?topic=known")


@pytest.fixture
def peer(nsqlookupd: Nsqlookupd) -> Iterator[LookupConnection]:
    """A connection that has said who it is."""
    with identified(nsqlookupd) as connection:
        yield connection


@pytest.fixture
def served(peer: LookupConnection, topic: str) -> str:
    """A topic with a channel ``c`` and one producer."""
    peer.ok(f"REGISTER {topic} c\n".encode())
    return topic


@pytest.fixture(scope="module")
def impatient(shared_daemons: Daemons) -> Nsqlookupd:
    """A nsqlookupd that finds producers inactive, and forgets tombstones, after a moment."""
    flags = (f"--inactive-producer-timeout={BRIEF_S * 1000:g}ms", f"--tombstone-lifetime={BRIEF_S * 1000:g}ms")
    return shared_daemons.nsqlookupd(*flags)


def get(nsqlookupd: Nsqlookupd, target: str) -> Answer:
    return nsqlookupd.request("GET", target)


def post(nsqlookupd: Nsqlookupd, target: str, body: bytes = b"") -> Answer:
    return nsqlookupd.request("POST", target, body)


def assert_error(answer: Answer, status: int, text: str) -> None:
    assert (answer.status, answer.body) == (status, b'{"message":"%s"}' % text.encode())
    assert answer.headers["Content-Type"] == JSON_TYPE
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


# -- common rules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", JSON_PATHS)
def test_json_answers_say_so(nsqlookupd: Nsqlookupd, target: str):
    answer = get(nsqlookupd, target)
    assert (answer.status, answer.headers["Content-Type"]) == (200, JSON_TYPE)
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


@pytest.mark.parametrize("target", JSON_PATHS)
def test_there_is_no_wrapper(nsqlookupd: Nsqlookupd, target: str):
    assert not {"status_code", "status_txt", "data"} & set(get(nsqlookupd, target).json)


@pytest.mark.parametrize("path", ["/topic/create", "/channel/create", "/channel/delete", "/topic/delete"])
def test_success_without_data_is_empty(nsqlookupd: Nsqlookupd, path: str):
    answer = post(nsqlookupd, f"{path}?topic=emptied&channel=c")
    assert (answer.status, answer.body, answer.headers["Content-Type"]) == (200, b"", None)
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


@pytest.mark.parametrize("path", ["/", "/nothing", "/lookup/x", "/topic", "/pub", "/stats", "/config/log_level"])
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_404(nsqlookupd: Nsqlookupd, method: str, path: str):
    assert_error(nsqlookupd.request(method, path), 404, "NOT_FOUND")


@pytest.mark.parametrize("path", ["/create_topic", "/delete_topic", "/create_channel", "/delete_channel"])
def test_names_of_before_1_0_are_gone(nsqlookupd: Nsqlookupd, path: str):
    assert_error(get(nsqlookupd, f"{path}?topic=t&channel=c"), 404, "NOT_FOUND")


@pytest.mark.parametrize("path", GET_PATHS)
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_a_wrong_method_of_a_question_is_405(nsqlookupd: Nsqlookupd, method: str, path: str):
    answer = nsqlookupd.request(method, path)
    assert_error(answer, 405, "METHOD_NOT_ALLOWED")
    assert answer.headers["Allow"] == "GET, OPTIONS"


def methods_of(path: str) -> set[str]:
    """What ``path`` takes; ours also the redesigned NSQ's PUT."""
    if path in GET_PATHS:
        return {"GET", "OPTIONS"}
    return {"POST", "PUT", "OPTIONS"} if path == "/topic/create" and is_ours("nsqlookupd") else {"POST", "OPTIONS"}


@pytest.mark.parametrize("path", POST_PATHS)
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_wrong_method_of_a_change_is_405(nsqlookupd: Nsqlookupd, method: str, path: str):
    if method in methods_of(path):
        pytest.skip("Youzan's tools create topics with it")
    answer = nsqlookupd.request(method, path)
    assert_error(answer, 405, "METHOD_NOT_ALLOWED")
    assert set(answer.headers["Allow"].split(", ")) == methods_of(path)


@pytest.mark.parametrize("path", ["/ping", "/topics", "/topic/create"])
def test_head_is_405(nsqlookupd: Nsqlookupd, path: str):
    answer = nsqlookupd.request("HEAD", path)
    assert (answer.status, answer.body) == (405, b"")


@pytest.mark.parametrize("path", [*GET_PATHS, *POST_PATHS])
def test_options_is_200_and_empty(nsqlookupd: Nsqlookupd, path: str):
    answer = nsqlookupd.request("OPTIONS", path)
    assert (answer.status, answer.body) == (200, b"")
    assert set(answer.headers["Allow"].split(", ")) == methods_of(path)


@pytest.mark.parametrize("path", ["/topics/", "/Topics", "/TOPICS/"])
def test_another_spelling_of_a_question_is_redirected(nsqlookupd: Nsqlookupd, path: str):
    answer = get(nsqlookupd, f"{path}?a=b")
    assert (answer.status, answer.headers["Location"]) == (301, "/topics?a=b")


@pytest.mark.parametrize("path", ["/topic/create/", "/Topic/Create"])
def test_another_spelling_of_a_change_is_redirected(nsqlookupd: Nsqlookupd, path: str):
    answer = post(nsqlookupd, f"{path}?topic=redirected")
    assert (answer.status, answer.headers["Location"]) == (308, "/topic/create?topic=redirected")
    assert "redirected" not in topics_of(nsqlookupd)


def test_parameters_in_a_body_do_not_count(nsqlookupd: Nsqlookupd):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = nsqlookupd.request("POST", "/topic/create", b"topic=in-the-body", headers)
    assert_error(answer, 400, "MISSING_ARG_TOPIC")


def test_the_first_of_several_values_counts(nsqlookupd: Nsqlookupd, topic: str):
    assert post(nsqlookupd, f"/topic/create?topic={topic}&topic=second-value").status == 200
    assert topic in topics_of(nsqlookupd)
    assert "second-value" not in topics_of(nsqlookupd)


@pytest.mark.parametrize("query", ["topic=a;b", "topic=%zz", "topic=%", "%=x"])
@pytest.mark.parametrize("path", ["/lookup", "/channels", "/topic/create", "/topic/delete", "/topic/tombstone"])
def test_a_query_that_cannot_be_read_is_400(nsqlookupd: Nsqlookupd, path: str, query: str):
    method = "POST" if path in POST_PATHS else "GET"
    assert_error(nsqlookupd.request(method, f"{path}?{query}"), 400, "INVALID_REQUEST")


def test_a_body_is_taken_and_ignored(nsqlookupd: Nsqlookupd, topic: str):
    assert post(nsqlookupd, f"/topic/create?topic={topic}", b"x" * 1000).status == 200


# -- /ping, /info ------------------------------------------------------------------------------------------------------


def test_ping(nsqlookupd: Nsqlookupd):
    answer = get(nsqlookupd, "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.headers["Content-Type"].startswith("text/plain")


def test_info(nsqlookupd: Nsqlookupd):
    info = get(nsqlookupd, "/info").json
    if is_ours("nsqlookupd"):
        assert info.pop("flintmq_version")
    assert info == {"version": "1.3.0"}


# -- /lookup -----------------------------------------------------------------------------------------------------------


def test_lookup_shows_a_producer(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    assert get(nsqlookupd, f"/lookup?topic={served}").json == {
        "channels": ["c"],
        "producers": [{**PEER, "remote_address": peer.name}],
    }


def test_lookup_names_its_fields_in_order(nsqlookupd: Nsqlookupd, served: str):
    answer = get(nsqlookupd, f"/lookup?topic={served}").json
    assert list(answer) == ["channels", "producers"]
    assert list(answer["producers"][0]) == PRODUCER_KEYS


def test_lookup_shows_fields_that_nsqd_left_out_empty(nsqlookupd: Nsqlookupd, topic: str):
    optional = ("hostname", "topology_zone", "topology_region")
    with LookupConnection(nsqlookupd.tcp) as connection:
        body = json.dumps({name: value for name, value in PEER.items() if name not in optional}).encode()
        connection.ask(b"IDENTIFY\n" + len(body).to_bytes(4, "big") + body)
        connection.ok(f"REGISTER {topic}\n".encode())
        (producer,) = get(nsqlookupd, f"/lookup?topic={topic}").json["producers"]
    assert [producer[name] for name in optional] == ["", "", ""]


def test_lookup_of_a_topic_without_producers(nsqlookupd: Nsqlookupd):
    answer = get(nsqlookupd, "/lookup?topic=known")
    assert (answer.status, answer.body) == (200, b'{"channels":[],"producers":[]}')


def test_lookup_needs_a_topic(nsqlookupd: Nsqlookupd):
    assert_error(get(nsqlookupd, "/lookup"), 400, "MISSING_ARG_TOPIC")


@pytest.mark.parametrize("name", ["unknown", "", "$", "n" * 65])
def test_lookup_of_an_unknown_topic_is_404(nsqlookupd: Nsqlookupd, name: str):
    assert_error(get(nsqlookupd, f"/lookup?topic={name}"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.improvement
def test_a_star_is_no_topic(nsqlookupd: Nsqlookupd):
    """NSQ takes it for every topic."""
    assert_error(get(nsqlookupd, "/lookup?topic=*"), 404, "TOPIC_NOT_FOUND")


@pytest.mark.improvement
def test_lists_are_sorted(nsqlookupd: Nsqlookupd, topic: str):
    """NSQ lists in any order."""
    with identified(nsqlookupd, broadcast_address="b") as b, identified(nsqlookupd, broadcast_address="a") as a:
        for connection in (b, a):
            connection.ok(*(f"REGISTER {topic} {channel}\n".encode() for channel in "zyx"))
        answer = get(nsqlookupd, f"/lookup?topic={topic}").json
    assert answer["channels"] == ["x", "y", "z"]
    assert [each["broadcast_address"] for each in answer["producers"]] == ["a", "b"]


# -- /topics, /channels ------------------------------------------------------------------------------------------------


def test_topics(nsqlookupd: Nsqlookupd, served: str):
    answer = get(nsqlookupd, "/topics").json
    assert list(answer) == ["topics"]
    assert {"known", served} <= set(answer["topics"])


def test_topics_of_a_new_nsqlookupd(impatient: Nsqlookupd):
    assert get(impatient, "/topics").body == b'{"topics":[]}'
    assert get(impatient, "/nodes").body == b'{"producers":[]}'
    assert get(impatient, "/debug").body == b"{}"


def test_channels(nsqlookupd: Nsqlookupd, served: str):
    assert get(nsqlookupd, f"/channels?topic={served}").body == b'{"channels":["c"]}'


def test_channels_of_an_unknown_topic(nsqlookupd: Nsqlookupd):
    answer = get(nsqlookupd, "/channels?topic=unknown")
    assert (answer.status, answer.body) == (200, b'{"channels":[]}')


def test_channels_needs_a_topic(nsqlookupd: Nsqlookupd):
    assert_error(get(nsqlookupd, "/channels"), 400, "MISSING_ARG_TOPIC")


# -- /nodes, /debug ----------------------------------------------------------------------------------------------------


def node_of(nsqlookupd: Nsqlookupd, peer: LookupConnection):
    (node,) = [node for node in nsqlookupd.get("/nodes")["producers"] if node["remote_address"] == peer.name]
    return node


def test_nodes(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    node = node_of(nsqlookupd, peer)
    assert node == {**PEER, "remote_address": peer.name, "tombstones": [False], "topics": [served]}
    assert list(node) == [*PRODUCER_KEYS, "tombstones", "topics"]


def test_nodes_lists_a_node_without_topics(nsqlookupd: Nsqlookupd, peer: LookupConnection):
    assert (node_of(nsqlookupd, peer)["topics"], node_of(nsqlookupd, peer)["tombstones"]) == ([], [])


def test_tombstones_belong_to_topics_by_position(nsqlookupd: Nsqlookupd, peer: LookupConnection, topic: str):
    peer.ok(*(f"REGISTER {topic}-{letter}\n".encode() for letter in "abc"))
    post(nsqlookupd, f"/topic/tombstone?topic={topic}-b&node={NODE}")
    node = node_of(nsqlookupd, peer)
    shown = dict(zip(node["topics"], node["tombstones"], strict=True))
    assert shown == {f"{topic}-a": False, f"{topic}-b": True, f"{topic}-c": False}


def test_debug_rows(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    now = time.time_ns()
    (row,) = get(nsqlookupd, "/debug").json[f"topic:{served}:"]
    assert abs(row.pop("last_update") - now) < 30e9
    assert isinstance(row.pop("tombstoned_at"), int)
    assert row == {**PEER, "id": peer.name, "tombstoned": False}


def test_debug_names_its_fields_in_order(nsqlookupd: Nsqlookupd, served: str):
    (row,) = get(nsqlookupd, "/debug").json[f"topic:{served}:"]
    first, *rest = PRODUCER_KEYS
    assert list(row) == ["id", *rest, "last_update", "tombstoned", "tombstoned_at"]
    assert first not in row


def test_debug_keys(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    for key in ("client::", f"topic:{served}:", f"channel:{served}:c"):
        assert peer.name in registered_ids(nsqlookupd, key)


def test_debug_has_only_keys_with_producers(nsqlookupd: Nsqlookupd):
    assert "topic:known:" not in get(nsqlookupd, "/debug").json


def test_debug_shows_a_tombstone(nsqlookupd: Nsqlookupd, served: str):
    post(nsqlookupd, f"/topic/tombstone?topic={served}&node={NODE}")
    debug = get(nsqlookupd, "/debug").json
    (row,) = debug[f"topic:{served}:"]
    assert row["tombstoned"] is True
    assert abs(row["tombstoned_at"] - time.time_ns()) < 30e9
    assert debug[f"channel:{served}:c"][0]["tombstoned"] is False


# -- creating and deleting ---------------------------------------------------------------------------------------------


def test_create_topic(nsqlookupd: Nsqlookupd, topic: str):
    assert post(nsqlookupd, f"/topic/create?topic={topic}").status == 200
    assert get(nsqlookupd, f"/lookup?topic={topic}").json == {"channels": [], "producers": []}


def test_create_topic_again(nsqlookupd: Nsqlookupd, served: str):
    assert post(nsqlookupd, f"/topic/create?topic={served}").status == 200
    assert addresses_of(nsqlookupd, served) == ["nsqd.example"]


def test_create_topic_needs_a_topic(nsqlookupd: Nsqlookupd):
    assert_error(post(nsqlookupd, "/topic/create"), 400, "MISSING_ARG_TOPIC")


@pytest.mark.parametrize("name", BAD_NAMES.values(), ids=BAD_NAMES)
def test_create_topic_refuses_a_bad_name(nsqlookupd: Nsqlookupd, name: str):
    assert_error(post(nsqlookupd, f"/topic/create?topic={name}"), 400, "INVALID_ARG_TOPIC")


@pytest.mark.parametrize("name", [LONGEST_NAME, "a", "x.y-z_0", "e%23ephemeral"])
def test_create_topic_takes_a_good_name(nsqlookupd: Nsqlookupd, name: str):
    assert post(nsqlookupd, f"/topic/create?topic={name}").status == 200
    assert name.replace("%23", "#") in topics_of(nsqlookupd)


def test_create_channel_also_creates_the_topic(nsqlookupd: Nsqlookupd, topic: str):
    assert post(nsqlookupd, f"/channel/create?topic={topic}&channel=c").status == 200
    assert get(nsqlookupd, f"/lookup?topic={topic}").json == {"channels": ["c"], "producers": []}


@pytest.mark.parametrize("path", ["/channel/create", "/channel/delete"])
@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "MISSING_ARG_TOPIC"),
        ("?channel=c", "MISSING_ARG_TOPIC"),
        ("?topic=$&channel=c", "INVALID_ARG_TOPIC"),
        ("?topic=&channel=c", "INVALID_ARG_TOPIC"),
        ("?topic=$", "INVALID_ARG_TOPIC"),
        ("?topic=t", "MISSING_ARG_CHANNEL"),
        ("?topic=t&channel=$", "INVALID_ARG_CHANNEL"),
        ("?topic=t&channel=", "INVALID_ARG_CHANNEL"),
        (f"?topic=t&channel={'n' * 65}", "INVALID_ARG_CHANNEL"),
    ],
)
def test_channel_arguments(nsqlookupd: Nsqlookupd, path: str, query: str, text: str):
    assert_error(post(nsqlookupd, path + query), 400, text)


def test_delete_topic_removes_it_and_its_channels(nsqlookupd: Nsqlookupd, served: str):
    assert post(nsqlookupd, f"/topic/delete?topic={served}").status == 200
    assert_error(get(nsqlookupd, f"/lookup?topic={served}"), 404, "TOPIC_NOT_FOUND")
    assert get(nsqlookupd, f"/channels?topic={served}").json == {"channels": []}
    assert not {f"topic:{served}:", f"channel:{served}:c"} & set(get(nsqlookupd, "/debug").json)


@pytest.mark.parametrize("name", ["unknown", "$", "n" * 65, ""])
def test_delete_of_an_unknown_topic_is_200(nsqlookupd: Nsqlookupd, name: str):
    answer = post(nsqlookupd, f"/topic/delete?topic={name}")
    assert (answer.status, answer.body) == (200, b"")


def test_delete_topic_needs_a_topic(nsqlookupd: Nsqlookupd):
    assert_error(post(nsqlookupd, "/topic/delete"), 400, "MISSING_ARG_TOPIC")


@pytest.mark.improvement
def test_deleting_a_star_deletes_nothing(nsqlookupd: Nsqlookupd):
    """NSQ deletes every topic."""
    assert post(nsqlookupd, "/topic/delete?topic=*").status == 200
    assert "known" in topics_of(nsqlookupd)


def test_a_producer_can_register_a_deleted_topic_again(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    post(nsqlookupd, f"/topic/delete?topic={served}")
    peer.ok(f"REGISTER {served} d\n".encode())
    assert get(nsqlookupd, f"/lookup?topic={served}").json["channels"] == ["d"]
    assert addresses_of(nsqlookupd, served) == ["nsqd.example"]


def test_delete_channel(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    peer.ok(f"REGISTER {served} d\n".encode())
    assert post(nsqlookupd, f"/channel/delete?topic={served}&channel=c").status == 200
    assert nsqlookupd.channels(served) == ["d"]
    assert registered_ids(nsqlookupd, f"channel:{served}:c") == []
    assert addresses_of(nsqlookupd, served) == ["nsqd.example"]


@pytest.mark.parametrize("query", ["topic=known&channel=c", "topic=unknown&channel=c"], ids=["channel", "topic"])
def test_delete_of_an_unknown_channel_is_404(nsqlookupd: Nsqlookupd, query: str):
    assert_error(post(nsqlookupd, f"/channel/delete?{query}"), 404, "CHANNEL_NOT_FOUND")


def test_names_stay_until_they_are_deleted(nsqlookupd: Nsqlookupd, topic: str):
    with identified(nsqlookupd) as leaving:
        leaving.ok(f"REGISTER {topic} c\n".encode())
    wait_until(lambda: addresses_of(nsqlookupd, topic) == [], "the producer gone")
    assert nsqlookupd.channels(topic) == ["c"]
    post(nsqlookupd, f"/channel/delete?topic={topic}&channel=c")
    assert nsqlookupd.channels(topic) == []
    post(nsqlookupd, f"/topic/delete?topic={topic}")
    assert topic not in topics_of(nsqlookupd)


# -- tombstones --------------------------------------------------------------------------------------------------------


def test_tombstone_hides_a_producer_from_lookup(nsqlookupd: Nsqlookupd, served: str):
    answer = post(nsqlookupd, f"/topic/tombstone?topic={served}&node={NODE}")
    assert (answer.status, answer.body) == (200, b"")
    assert get(nsqlookupd, f"/lookup?topic={served}").json == {"channels": ["c"], "producers": []}


def test_tombstone_hides_nothing_else(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    peer.ok(f"REGISTER {served}-2\n".encode())
    with identified(nsqlookupd, http_port=1) as other:
        other.ok(f"REGISTER {served}\n".encode())
        post(nsqlookupd, f"/topic/tombstone?topic={served}&node={NODE}")
        (left,) = get(nsqlookupd, f"/lookup?topic={served}").json["producers"]
        assert left["http_port"] == 1
    assert addresses_of(nsqlookupd, f"{served}-2") == ["nsqd.example"]
    assert node_of(nsqlookupd, peer)["broadcast_address"] == "nsqd.example"


def test_registering_again_does_not_lift_a_tombstone(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    post(nsqlookupd, f"/topic/tombstone?topic={served}&node={NODE}")
    peer.ok(f"REGISTER {served} c\n".encode(), b"PING\n")
    assert addresses_of(nsqlookupd, served) == []


@pytest.mark.parametrize("node", ["nsqd.example", "nsqd.example:1", "other:14151", "nsqd.example:14150", ""])
def test_tombstone_that_matches_nothing_is_200(nsqlookupd: Nsqlookupd, served: str, node: str):
    answer = post(nsqlookupd, f"/topic/tombstone?topic={served}&node={node}")
    assert (answer.status, answer.body) == (200, b"")
    assert addresses_of(nsqlookupd, served) == ["nsqd.example"]


def test_tombstone_of_an_unknown_topic_is_200(nsqlookupd: Nsqlookupd):
    assert post(nsqlookupd, f"/topic/tombstone?topic=unknown&node={NODE}").status == 200
    assert "unknown" not in topics_of(nsqlookupd)


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("", "MISSING_ARG_TOPIC"),
        (f"?node={NODE}", "MISSING_ARG_TOPIC"),
        ("?topic=t", "MISSING_ARG_NODE"),
    ],
)
def test_tombstone_arguments(nsqlookupd: Nsqlookupd, query: str, text: str):
    assert_error(post(nsqlookupd, f"/topic/tombstone{query}"), 400, text)


def test_a_tombstone_lasts_for_its_lifetime(impatient: Nsqlookupd, topic: str):
    with identified(impatient) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        post(impatient, f"/topic/tombstone?topic={topic}&node={NODE}")
        set_at = time.monotonic()
        assert addresses_of(impatient, topic) == []
        assert node_of(impatient, peer)["tombstones"] == [True]

        def is_back() -> bool:
            peer.ok(b"PING\n")
            return addresses_of(impatient, topic) == ["nsqd.example"]

        wait_until(is_back, "the producer shown again")
        assert time.monotonic() - set_at > BRIEF_S / 2
        assert node_of(impatient, peer)["tombstones"] == [False]


# -- inactive producers ------------------------------------------------------------------------------------------------


def test_an_inactive_producer_is_filtered_out(impatient: Nsqlookupd, topic: str):
    with identified(impatient) as peer:
        peer.ok(f"REGISTER {topic} c\n".encode())
        assert addresses_of(impatient, topic) == ["nsqd.example"]
        wait_until(lambda: addresses_of(impatient, topic) == [], "filtered out of /lookup")
        assert impatient.get("/nodes")["producers"] == []
        assert impatient.channels(topic) == ["c"]
        assert registered_ids(impatient, f"topic:{topic}:") == [peer.name]


def test_a_ping_makes_it_active_again(impatient: Nsqlookupd, topic: str):
    with identified(impatient) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        wait_until(lambda: addresses_of(impatient, topic) == [], "filtered out")
        peer.ok(b"PING\n")
        assert addresses_of(impatient, topic) == ["nsqd.example"]
        assert node_of(impatient, peer)["topics"] == [topic]


def test_registering_does_not_make_it_active(impatient: Nsqlookupd, topic: str):
    with identified(impatient) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        wait_until(lambda: addresses_of(impatient, topic) == [], "filtered out")
        peer.ok(f"REGISTER {topic} c\n".encode())
        assert addresses_of(impatient, topic) == []


# -- /debug/pprof, /metrics --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "cmdline", "heap", "goroutine", "threadcreate", "profile?seconds=1"])
def test_pprof(nsqlookupd: Nsqlookupd, name: str):
    answer = get(nsqlookupd, f"/debug/pprof/{name}")
    assert answer.status == 200
    assert answer.body


@pytest.mark.improvement
def test_metrics(nsqlookupd: Nsqlookupd):
    """NSQ has none."""
    answer = get(nsqlookupd, "/metrics")
    assert answer.status == 200
    assert b"flintmq_nsqlookupd_topics " in answer.body
