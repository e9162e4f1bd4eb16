"""What answers of nsqlookupd mean, and one picture from several that differ. Bytes as those of Youzan's nsqlookupd."""

from __future__ import annotations

import json

import pytest

from flintmq.client.core.discovery import NODES_PATH, Answers
from flintmq.client.core.topology import Remembered, Statement, TopicMeta, decide, parse_answer, parse_members, unite
from flintmq.errors import DiscoveryError

A, B, C = "http://a:4161", "http://b:4161", "http://c:4161"
PATH = "/lookup?topic=t"


def peer(host: str, port: int = 4150, **others: object) -> dict[str, object]:
    return {
        "id": f"{host}:1",
        "remote_address": f"{host}:1",
        "hostname": host,
        "broadcast_address": host,
        "tcp_port": port,
        "http_port": port + 1,
        "version": "0.3.7-HA.1.13.0",
        "distributed_id": f"{host}:12340:{port}:1",
        **others,
    }


def partitioned(*hosts: str | None, count: int | None = None, **meta: object) -> bytes:
    """An answer in which host number n leads partition n."""
    leaders = {str(number): peer(host) for number, host in enumerate(hosts) if host}
    answer = {
        "channels": ["ch"],
        "meta": {
            "partition_num": len(hosts) if count is None else count,
            "replica": 1,
            "extend_support": False,
            **meta,
        },
        "partitions": leaders,
        "producers": [peer(host) for host in dict.fromkeys(hosts) if host],
    }
    return json.dumps(answer).encode()


def enveloped(data: object, code: int = 200, text: str = "OK") -> bytes:
    return json.dumps({"status_code": code, "status_txt": text, "data": data}).encode()


# --- one answer ---


def test_a_topic_without_partitions_may_have_headers():
    answer = {"channels": [], "producers": [peer("n1", distributed_id="")], "meta": {"partition_num": 0}}
    assert parse_answer(200, json.dumps(answer).encode()).meta is None
    answer["meta"] = {"partition_num": 0, "extend_support": True}
    found = parse_answer(200, json.dumps(answer).encode())
    topology = unite([Remembered(found)])
    assert (topology.is_extended, topology.is_partitioned, topology.plain) == (True, False, ("n1:4150",))
    answer["meta"] = {"partition_num": 1025, "extend_support": True}
    assert parse_answer(200, json.dumps(answer).encode()).meta is None


@pytest.mark.parametrize(
    "wrap", [lambda body: body, lambda body: enveloped(json.loads(body))], ids=["bare", "envelope"]
)
def test_partitions_and_metadata(wrap):
    body = partitioned("n1", "n2", "n1", ordered=True, extend_support=True)
    answer = parse_answer(200, wrap(body))
    assert answer.leaders == {0: "n1:4150", 1: "n2:4150", 2: "n1:4150"}
    assert [node.address for node in answer.nodes] == ["n1:4150", "n2:4150"]
    assert answer.meta == TopicMeta(3, 1, extend_support=True, ordered=True)


def test_writing_is_off():
    data = {"channels": None, "meta": {"partition_num": 3, "replica": 1}, "partitions": None, "producers": None}
    answer = parse_answer(200, enveloped(data))
    assert answer.leaders == {}
    assert answer.meta == TopicMeta(3, 1)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (404, b'{"message":"TOPIC_NOT_FOUND"}', "TOPIC_NOT_FOUND"),
        (404, b"", ""),
        (500, enveloped(None, 404, "Key not found"), "Key not found"),
        (500, enveloped(None, 404, "Topic has no channel, should init at least one for the new topic"), "Topic has"),
        (200, enveloped(None, 500, "TOPIC_NOT_FOUND"), "TOPIC_NOT_FOUND"),
    ],
)
def test_no_such_topic(status, body, reason):
    answer = parse_answer(status, body)
    assert answer.nodes == ()
    assert answer.reason.startswith(reason)


@pytest.mark.parametrize(
    ("status", "body"),
    [
        (500, enveloped(None, 500, "oops")),
        (500, b"oops"),
        (400, b'{"message":"INVALID_ACCESS_MODE"}'),
        (200, enveloped(None, 400, "MISSING_ARG_TOPIC")),
        (200, b'{"partitions":{"zero":{}}}'),
        (200, b'{"partitions":5}'),
    ],
)
def test_what_is_no_answer(status, body):
    with pytest.raises(DiscoveryError):
        parse_answer(status, body)


def test_not_found_is_no_answer_to_another_question():
    with pytest.raises(DiscoveryError, match="404"):
        parse_answer(404, b"", is_topic=False)
    with pytest.raises(DiscoveryError, match=r"404: 'NOT_FOUND': no nsqlookupd is there; its HTTP port is 4161"):
        parse_answer(404, b'{"message":"NOT_FOUND"}')


def test_partitions_that_cannot_be_are_left_out():
    body = json.dumps(
        {"producers": [], "partitions": {"-11": peer("n0"), "0": peer("n1"), "1": peer(""), "2": peer("n", 0)}}
    )
    assert parse_answer(200, body.encode()).leaders == {0: "n1:4150"}


def test_no_metadata_without_a_number_of_partitions():
    assert parse_answer(200, partitioned("n1", count=0)).meta is None
    assert parse_answer(200, partitioned("n1", count=5000)).meta is None


# --- which nsqlookupd there are ---


def member(ip: str, http_port: object) -> dict[str, object]:
    return {"ID": f"{ip}:1", "NodeIP": ip, "TcpPort": "4160", "HttpPort": http_port, "RpcPort": "12340", "Epoch": 7}


@pytest.mark.parametrize("wrap", [lambda data: json.dumps(data).encode(), enveloped], ids=["bare", "envelope"])
def test_members(wrap):
    listed = [member("10.0.0.1", "4161"), member("::1", 4161), member("10.0.0.1", "4161")]
    body = wrap({"lookupdleader": listed[0], "lookupdnodes": listed})
    assert parse_members(body) == ("http://10.0.0.1:4161", "http://[::1]:4161")
    assert parse_members(body, "https") == (), "no word of a port that speaks TLS"
    for row, port in zip(listed, ("4443", 4444, ""), strict=True):
        row["HttpsPort"] = port
    body = wrap({"lookupdleader": listed[0], "lookupdnodes": listed})
    assert parse_members(body, "https") == ("https://10.0.0.1:4443", "https://[::1]:4444")
    assert parse_members(body) == ("http://10.0.0.1:4161", "http://[::1]:4161")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"<html>",
        b'{"producers":[]}',
        b'{"lookupdnodes":null}',
        b'{"lookupdnodes":5}',
        json.dumps(
            {"lookupdnodes": [member("", "1"), member("h", "x"), member("h", "0"), member("u@h/p", "1")]}
        ).encode(),
    ],
)
def test_no_members(body):
    assert parse_members(body) == ()


# --- several answers ---


def told(*answers: tuple[str, int, bytes]) -> Answers:
    known = Answers([A, B, C])
    for address, status, body in answers:
        known.note(address, PATH, status, body)
    return known


def test_plain_nodes_are_united_by_address_and_partitions_by_number():
    known = told((A, 200, partitioned("n1", None, count=2)), (B, 200, partitioned(None, "n2", count=2)))
    topology = known.topology(PATH)
    assert topology.leaders == {0: "n1:4150", 1: "n2:4150"}
    assert topology.is_complete
    assert [node.address for node in topology.nodes] == ["n1:4150", "n2:4150"]
    assert topology.plain == ()


def test_a_topic_of_nsqs_own():
    body = json.dumps({"producers": [{"broadcast_address": "n1", "tcp_port": 4150}]}).encode()
    topology = told((A, 200, body)).topology(PATH)
    assert not topology.is_partitioned
    assert topology.plain == ("n1:4150",)
    assert not topology.is_complete


def test_nsqs_own_nsqd_beside_partitions():
    data = json.loads(partitioned("n1"))
    data["producers"].append({"broadcast_address": "old", "tcp_port": 4150})
    data["producers"].append(peer("follower"))
    topology = told((A, 200, json.dumps(data).encode())).topology(PATH)
    assert topology.plain == ("old:4150",)


@pytest.mark.parametrize("host", ["", "[", "no host", "a/b", "a,b", "x" * 64, "a..b", "http://n1"])
def test_who_registers_under_what_is_no_address_is_left_out(host: str):
    """Anybody may register, under any name: the others are found."""
    producers = [{"broadcast_address": each, "tcp_port": 4150} for each in (host, "n1")]
    assert told((A, 200, json.dumps({"producers": producers}).encode())).topology(PATH).plain == ("n1:4150",)
    data = json.loads(partitioned("n1", "n2"))
    data["partitions"]["1"]["broadcast_address"] = host
    topology = told((A, 200, json.dumps(data).encode())).topology(PATH)
    assert (topology.leaders, topology.missing) == ({0: "n1:4150"}, (1,))


def test_what_is_missing():
    topology = told((A, 200, partitioned("n1", None, "n3"))).topology(PATH)
    assert topology.missing == (1,)
    assert not topology.is_complete
    assert topology.is_partitioned
    unknown = told((A, 200, partitioned("n1", count=0))).topology(PATH)
    assert unknown.is_partitioned
    assert not unknown.is_complete


def test_why_there_is_nothing():
    refusal = "Topic has no channel, should init at least one for the new topic"
    assert told((A, 500, enveloped(None, 404, refusal))).topology(PATH).is_refused
    for reason in ("TOPIC_NOT_FOUND", "Key not found"):
        assert not told((A, 500, enveloped(None, 404, reason))).topology(PATH).is_refused
    assert told((A, 500, enveloped(None, 404, refusal)), (B, 200, partitioned("n1"))).topology(PATH).reason == ""


def test_the_majority_decides_at_first():
    known = told((A, 200, partitioned("n1")), (B, 200, partitioned("n2")), (C, 200, partitioned("n2")))
    assert known.topology(PATH).leaders == {0: "n2:4150"}


def test_who_changed_its_word_last_beats_the_majority():
    known = told((A, 200, partitioned("n1")), (B, 200, partitioned("n1")), (C, 200, partitioned("n1")))
    known.note(C, PATH, 200, partitioned("n2"))
    known.note(A, PATH, 200, partitioned("n1"))
    assert known.topology(PATH).leaders == {0: "n2:4150"}
    known.note(A, PATH, 200, partitioned("n3"))
    assert known.topology(PATH).leaders == {0: "n3:4150"}


def test_who_answers_beats_who_is_remembered():
    known = told((A, 200, partitioned("n1")), (B, 200, partitioned("n1")), (C, 200, partitioned("n1")))
    known.note(A, PATH, 200, partitioned("n2"))
    known.note_failure(A, OSError("gone"))
    assert known.topology(PATH).leaders == {0: "n1:4150"}
    known.note_failure(B, OSError("gone"))
    known.note_failure(C, OSError("gone"))
    assert known.topology(PATH).leaders, "what was said last stands"


def test_who_was_found_wrong_is_believed_only_when_nobody_else_speaks():
    known = told((A, 200, partitioned("n1")), (B, 200, partitioned("n1")), (C, 200, partitioned("n2")))
    assert known.topology(PATH, [(0, "n1:4150")]).leaders == {0: "n2:4150"}
    assert known.topology(PATH, [(1, "n1:4150")]).leaders == {0: "n1:4150"}
    assert told((A, 200, partitioned("n1"))).topology(PATH, [(0, "n1:4150")]).leaders == {0: "n1:4150"}


def test_metadata_that_differ():
    known = told((A, 200, partitioned("n1", "n1")), (B, 200, partitioned("n1", "n1")), (C, 200, b'{"producers":[]}'))
    known.note(B, PATH, 200, partitioned("n1", "n1", "n1", "n1"))
    topology = known.topology(PATH)
    assert topology.partition_count == 4
    assert list(topology.leaders) == [0, 1, 2, 3]


def test_decide_keeps_the_order_of_equals():
    assert decide([Statement("x", True, 0), Statement("y", True, 0)]) == "x"


def test_all_nsqd_are_asked_for_in_the_same_way():
    known = Answers([A])
    assert known.note(A, NODES_PATH, 200, json.dumps({"producers": [peer("n1")]}).encode())
    assert [node.address for node in known.union(NODES_PATH)] == ["n1:4150"]
    assert not known.note(A, NODES_PATH, 404, b"")
