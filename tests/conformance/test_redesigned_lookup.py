"""nsqlookupd with partitions: lookups, registrations, topics on several nsqds (Youzan's nsqlookupd)."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tests.conformance.conftest import is_ours, quick_flags
from tests.conformance.daemon_helpers import FakeNsqlookupd, LookupConnection, identified, wait_for_lines
from tests.conformance.protocol_helpers import fatal
from tests.conformance.redesigned_helpers import bare, enveloped, pub_to
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, sized, wait_until

pytestmark = pytest.mark.skipif(not is_ours("nsqd") or not is_ours("nsqlookupd"), reason="NSQ has no partitions")

META = {"partition_num": 3, "ordered": True}
FOR_CLIENTS = {
    "partition_num": 3,
    "replica": 1,
    "extend_support": False,
    "ordered": True,
    "multi_part": False,
    "disable_channel_auto_create": False,
}
ID = "nsqd.example:0:14150:1"


@pytest.fixture
def peer(nsqlookupd: Nsqlookupd) -> Iterator[LookupConnection]:
    """An nsqd with partitions that has said who it is."""
    with identified(nsqlookupd, distributed_id=ID) as connection:
        yield connection


@pytest.fixture
def served(peer: LookupConnection, topic: str) -> str:
    """A topic with partitions 0 and 2 of three, and a channel."""
    peer.ok(meta_command(topic), *(f"REGISTER {topic} {number} c\n".encode() for number in (0, 2)))
    return topic


@pytest.fixture(scope="module")
def nodes(shared_daemons: Daemons, nsqlookupd: Nsqlookupd) -> list[Nsqd]:
    """Two nsqds that are registered."""
    flag = f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"
    return [shared_daemons.nsqd(*quick_flags(), flag) for _ in range(2)]


@pytest.fixture
def ready_nodes(nsqlookupd: Nsqlookupd, nodes: list[Nsqd]) -> list[Nsqd]:
    ports = {nsqd.tcp[1] for nsqd in nodes}
    wait_until(lambda: {row["tcp_port"] for row in nsqlookupd.get("/nodes")["producers"]} == ports, "both to register")
    return nodes


def meta_command(topic: str, **fields: object) -> bytes:
    return f"META {topic}\n".encode() + sized(json.dumps({**META, **fields}).encode())


def post(nsqlookupd: Nsqlookupd, target: str) -> tuple[int, str]:
    answer = nsqlookupd.request("POST", target)
    return answer.status, answer.json["message"] if answer.body else ""


def peer_row(peer: LookupConnection, distributed_id: str = ID) -> dict[str, object]:
    return {
        "id": peer.name,
        "remote_address": peer.name,
        "hostname": "nsqd-host",
        "broadcast_address": "nsqd.example",
        "tcp_port": 14150,
        "http_port": 14151,
        "version": "1.2.1",
        "distributed_id": distributed_id,
    }


# -- registering -------------------------------------------------------------------------------------------------------


def test_a_node_with_an_id_is_told_that_partitions_are_understood(nsqlookupd: Nsqlookupd):
    with LookupConnection(nsqlookupd.tcp) as connection:
        assert connection.identify(distributed_id=ID)["partitions"] is True
    with LookupConnection(nsqlookupd.tcp) as connection:
        assert "partitions" not in connection.identify()


def test_a_plain_topic_of_a_node_with_an_id(nsqlookupd: Nsqlookupd, peer: LookupConnection, topic: str):
    peer.ok(f"REGISTER {topic} -11 c\n".encode())
    status, data = bare(nsqlookupd, f"/lookup?topic={topic}&access=w&metainfo=true")
    assert (status, set(data), data["channels"]) == (200, {"channels", "producers"}, ["c"])
    peer.ok(f"UNREGISTER {topic} -11\n".encode())
    assert nsqlookupd.producers(topic) == []


def test_what_goes_with_a_partition_and_what_with_all(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    peer.ok(f"UNREGISTER {served} 0\n".encode())
    assert list(bare(nsqlookupd, f"/lookup?topic={served}&access=r")[1]["partitions"]) == ["2"]
    peer.ok(f"UNREGISTER {served} -11\n".encode())
    assert bare(nsqlookupd, f"/lookup?topic={served}&access=r")[1]["producers"] == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (b"META $\n" + sized(b"{}"), b"E_BAD_TOPIC META topic name '$' is not valid"),
        (b"META t\n" + sized(b"{"), b"E_BAD_BODY META failed to decode JSON body"),
        (b"META t\n" + sized(b"{}"), b"E_BAD_BODY META partition_num 0 is not 1 to 1024"),
        (b"META t\n\xff\xff\xff\xff", b"E_BAD_BODY META invalid body size -1"),
        (b"META t\n\x7f\xff\xff\xff", b"E_BAD_BODY META body too big 2147483647 > 65536"),
        (b"REGISTER t 1024\n", b"E_BAD_PARTITIONID REGISTER partition id '1024' is not valid"),
    ],
)
def test_what_is_not_understood_is_fatal(peer: LookupConnection, command: bytes, error: bytes):
    assert peer.ask(command) == error
    assert peer.is_closed()


def test_a_plain_node_has_no_META(nsqlookupd: Nsqlookupd):
    with identified(nsqlookupd) as connection:
        assert connection.ask(meta_command("t")) == b"E_INVALID invalid command META"


# -- /lookup -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("access", ["r", "w"])
def test_lookup_with_partitions(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str, access: str):
    row = peer_row(peer)
    assert bare(nsqlookupd, f"/lookup?topic={served}&access={access}&metainfo=true") == (
        200,
        {"channels": ["c"], "meta": FOR_CLIENTS, "partitions": {"0": row, "2": row}, "producers": [row]},
    )


def test_lookup_without_metainfo(nsqlookupd: Nsqlookupd, served: str):
    assert "meta" not in bare(nsqlookupd, f"/lookup?topic={served}&access=r")[1]


def test_lookup_of_one_partition(nsqlookupd: Nsqlookupd, served: str):
    assert list(bare(nsqlookupd, f"/lookup?topic={served}&partition=2")[1]["partitions"]) == ["2"]
    data = bare(nsqlookupd, f"/lookup?topic={served}&partition=1")[1]
    assert (data["partitions"], data["producers"]) == ({}, [])
    assert bare(nsqlookupd, f"/lookup?topic={served}&partition=x") == (400, {"message": "INVALID_ARG_TOPIC_PARTITION"})


def test_lookup_in_the_envelope(nsqlookupd: Nsqlookupd, served: str):
    target = f"/lookup?topic={served}&access=r&metainfo=true"
    status, answer = enveloped(nsqlookupd, target)
    assert (status, answer["status_code"], answer["status_txt"]) == (200, 200, "OK")
    assert answer["data"] == bare(nsqlookupd, target)[1]


def test_lookup_as_nsqs_clients_ask(nsqlookupd: Nsqlookupd, served: str):
    """No parameter of the redesigned NSQ: no envelope, and nothing that NSQ does not say."""
    status, answer = enveloped(nsqlookupd, f"/lookup?topic={served}")
    assert (status, list(answer)) == (200, ["channels", "producers"])
    assert "distributed_id" not in answer["producers"][0]


@pytest.mark.parametrize(
    ("query", "status", "message"),
    [
        ("access=r", 400, "MISSING_ARG_TOPIC"),
        ("topic=t&access=x", 400, "INVALID_ACCESS_MODE"),
        ("topic=t&access=", 400, "INVALID_ACCESS_MODE"),
        ("topic=no-such-topic&access=w", 404, "Key not found"),
    ],
)
def test_lookup_that_is_refused(nsqlookupd: Nsqlookupd, query: str, status: int, message: str):
    assert bare(nsqlookupd, f"/lookup?{query}") == (status, {"message": message})
    in_envelope = {"status_code": 500, "status_txt": message, "data": None}  # as Youzan's answers, run
    assert enveloped(nsqlookupd, f"/lookup?{query}") == (500, in_envelope)


def test_an_unknown_topic_is_empty_for_readers(nsqlookupd: Nsqlookupd):
    assert bare(nsqlookupd, "/lookup?topic=no-such-topic&access=r") == (200, {"channels": [], "producers": []})


def test_a_tombstone_hides_from_writers_only(nsqlookupd: Nsqlookupd, served: str):
    nsqlookupd.post(f"/topic/tombstone?topic={served}&node=nsqd.example:14151")
    assert list(bare(nsqlookupd, f"/lookup?topic={served}&access=w")[1]["partitions"]) == []
    assert list(bare(nsqlookupd, f"/lookup?topic={served}&access=r")[1]["partitions"]) == ["0", "2"]


def test_a_topic_without_channels_is_writable_unless_told_otherwise(shared_daemons: Daemons, topic: str):
    strict = shared_daemons.nsqlookupd("--allow-write-with-nochannels=false")
    with identified(strict, distributed_id=ID) as peer:
        peer.ok(meta_command(topic), f"REGISTER {topic} 0\n".encode())
        refused = {"message": "Topic has no channel, should init at least one for the new topic"}
        assert bare(strict, f"/lookup?topic={topic}&access=w") == (404, refused)
        assert bare(strict, f"/lookup?topic={topic}&access=r")[0] == 200
        peer.ok(f"REGISTER {topic} 0 c\n".encode())
        assert bare(strict, f"/lookup?topic={topic}&access=w")[0] == 200


def test_a_plain_node_beside_one_with_partitions(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    with identified(nsqlookupd, broadcast_address="plain.example") as plain:
        plain.ok(f"REGISTER {served}\n".encode())
        data = bare(nsqlookupd, f"/lookup?topic={served}&access=r")[1]
        found = [(row["broadcast_address"], row["distributed_id"]) for row in data["producers"]]
        assert found == [("nsqd.example", ID), ("plain.example", "")]
        assert set(data["partitions"]) == {"0", "2"}


# -- other questions ---------------------------------------------------------------------------------------------------


def test_listlookup(nsqlookupd: Nsqlookupd):
    me = {
        "ID": f"127.0.0.1:0:{nsqlookupd.tcp[1]}:nsqlookup",
        "NodeIP": "127.0.0.1",
        "TcpPort": str(nsqlookupd.tcp[1]),
        "HttpPort": str(nsqlookupd.http[1]),
        "RpcPort": "0",
        "Epoch": 0,
    }
    expected = {"lookupdleader": me, "lookupdnodes": [me]}
    assert bare(nsqlookupd, "/listlookup") == (200, expected)
    assert enveloped(nsqlookupd, "/listlookup")[1]["data"] == expected


def test_topics_with_their_meta(nsqlookupd: Nsqlookupd, peer: LookupConnection, topic: str):
    peer.ok(meta_command(topic, disable_channel_auto_create=True), f"REGISTER {topic} 0 c\n".encode())
    answer = bare(nsqlookupd, "/topics?metaInfo=true")[1]
    assert topic in answer["topics"]
    (row,) = [row for row in answer["meta_info"] if row["topic_name"] == topic]
    assert row == {
        "topic_name": topic,
        "extend_support": False,
        "ordered": True,
        "multi_part": False,
        "disable_channel_auto_create": True,
        "registered_channels": ["c"],
    }
    assert set(nsqlookupd.get("/topics")) == {"topics"}


def test_channels_of_a_partition(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str):
    peer.ok(f"REGISTER {served} 2 d\n".encode())
    assert bare(nsqlookupd, f"/channels?topic={served}&partition=0") == (200, {"channels": ["c"]})
    assert bare(nsqlookupd, f"/channels?topic={served}&partition=2") == (200, {"channels": ["c", "d"]})
    assert nsqlookupd.channels(served) == ["c", "d"]


def test_nodes_with_their_partitions(nsqlookupd: Nsqlookupd, peer: LookupConnection, served: str, topic: str):
    (row,) = [row for row in nsqlookupd.get("/nodes")["producers"] if row["remote_address"] == peer.name]
    assert (row["topics"], row["partitions"]) == ([served], {served: [0, 2]})
    with identified(nsqlookupd) as plain:
        rows = nsqlookupd.get("/nodes")["producers"]
        assert all("partitions" not in row for row in rows if row["remote_address"] == plain.name)


# -- creating and deleting ---------------------------------------------------------------------------------------------


def leaders(nsqlookupd: Nsqlookupd, topic: str) -> dict[str, int]:
    data = bare(nsqlookupd, f"/lookup?topic={topic}&access=w")[1]
    return {number: row["tcp_port"] for number, row in data.get("partitions", {}).items()}


def test_partitions_are_spread_over_the_nodes(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    assert post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=5&replicator=1") == (200, "")
    found = leaders(nsqlookupd, topic)
    assert sorted(found) == ["0", "1", "2", "3", "4"]
    assert sorted(list(found.values()).count(nsqd.tcp[1]) for nsqd in ready_nodes) == [2, 3]
    for nsqd in ready_nodes:
        mine = [row["topic_partition"] for row in nsqd.stats(topic)["partitions"]]
        assert mine == [number for number, port in found.items() if port == nsqd.tcp[1]]
        with nsqd.connect() as connection:
            connection.ok(b"".join(pub_to(topic, number, b"x") for number in mine), count=len(mine))
        other = next(number for number in found if number not in mine)
        assert fatal(nsqd, pub_to(topic, other, b"x")).startswith("E_TOPIC_NOT_EXIST ")


def test_what_a_topic_was_created_with_comes_back(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    assert post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=3&orderedmulti=true") == (200, "")
    assert bare(nsqlookupd, f"/lookup?topic={topic}&access=r&metainfo=true")[1]["meta"] == FOR_CLIENTS


def test_created_again(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    target = f"/topic/create?topic={topic}&partition_num=2"
    assert post(nsqlookupd, target) == (200, "")
    before = leaders(nsqlookupd, topic)
    assert post(nsqlookupd, target) == (200, "")
    assert leaders(nsqlookupd, topic) == before
    status, message = post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=3")
    assert (status, message) == (
        400,
        f"topic {topic} is there already, with partition_num=2&replicator=1: delete it first",
    )


def test_an_interrupted_creation_is_completed(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    ready_nodes[1].post(f"/topic/create?topic={topic}&partition_num=3&replicator=1&partitions=1")
    wait_until(lambda: leaders(nsqlookupd, topic), "the partition that is there")
    assert post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=3") == (200, "")
    found = leaders(nsqlookupd, topic)
    assert (sorted(found), found["1"]) == (["0", "1", "2"], ready_nodes[1].tcp[1])


def test_a_plain_topic_of_that_name(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    ready_nodes[0].publish(topic, b"x")
    wait_until(lambda: nsqlookupd.producers(topic), "the plain topic")
    status, message = post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=1")
    assert (status, message) == (400, f"topic {topic} is there already, without partitions: delete it first")


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ("partition_num=0", "INVALID_ARG_TOPIC_PARTITION_NUM: partition_num=0, it must be 1 to 255"),
        ("partition_num=256", "INVALID_ARG_TOPIC_PARTITION_NUM: partition_num=256, it must be 1 to 255"),
        ("replicator=0", "INVALID_ARG_TOPIC_REPLICATOR: replicator=0, it must be 1 to 5"),
        ("suggestload=x", "INVALID_ARG_TOPIC_SUGGESTLOAD: suggestload=x, it must be 0 to 10000"),
    ],
)
def test_bad_parameters(nsqlookupd: Nsqlookupd, topic: str, parameters: str, message: str):
    """Youzan's code comes first, and ours say the limit behind it."""
    assert post(nsqlookupd, f"/topic/create?topic={topic}&{parameters}") == (400, message)


def test_more_than_one_copy_is_refused_with_a_reason(nsqlookupd: Nsqlookupd, topic: str):
    status, message = post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=1&replicator=2")
    assert (status, "without a cluster there is one copy" in message) == (400, True)


def test_without_a_node(shared_daemons: Daemons, topic: str):
    """One that is no FlintMQ does not count: it would make a plain topic and say that all is well."""
    lonely = shared_daemons.nsqlookupd()
    with identified(lonely, broadcast_address="127.0.0.1", http_port=1):
        status, message = post(lonely, f"/topic/create?topic={topic}&partition_num=1")
        assert (status, message.startswith("ErrType:9 ErrCode:1 : No node is available for topic")) == (400, True)


def test_deleted_everywhere(nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str):
    post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=2")
    assert post(nsqlookupd, f"/topic/delete?topic={topic}&partition=0") == (400, "REMOVE_SINGLE_PARTITION_NOT_ALLOWED")
    assert post(nsqlookupd, f"/topic/delete?topic={topic}&partition=**") == (200, "")
    assert topic not in nsqlookupd.get("/topics")["topics"]
    for nsqd in ready_nodes:
        assert nsqd.get(f"/stats?format=json&topic={topic}")["topics"] is None
    assert post(nsqlookupd, f"/topic/delete?topic={topic}&partition=**") == (500, "Key not found")


def test_channels_of_a_topic_that_does_not_make_them_itself(
    nsqlookupd: Nsqlookupd, ready_nodes: list[Nsqd], topic: str
):
    post(nsqlookupd, f"/topic/create?topic={topic}&partition_num=2&disable_channel_auto_create=true")
    target = f"?topic={topic}&channel=c"
    assert post(nsqlookupd, f"/channel/create{target}") == (200, "")
    assert post(nsqlookupd, f"/channel/create{target}") == (400, "channel c already registered")
    assert [nsqd.stats(topic, "c")["depth"] for nsqd in ready_nodes] == [0, 0]
    assert post(nsqlookupd, f"/channel/delete{target}") == (200, "")
    assert post(nsqlookupd, f"/channel/delete{target}") == (404, "CHANNEL_NOT_FOUND")
    assert [nsqd.stats(topic)["channels"] for nsqd in ready_nodes] == [[], []]


# -- nsqd's side -------------------------------------------------------------------------------------------------------


def test_nsqd_says_all_anew_when_it_gets_its_first_partitions(shared_daemons: Daemons):
    with FakeNsqlookupd() as fake:
        answer = {"broadcast_address": "127.0.0.1", "hostname": "h", "tcp_port": 1, "http_port": 1, "version": "1"}
        nsqd = shared_daemons.nsqd(*quick_flags(), fake.flag, "--node-id=7", "--broadcast-address=nsqd.example")
        nsqd.post("/topic/create?topic=plain")
        wait_for_lines(fake, "REGISTER plain")
        assert "distributed_id" not in fake.identities[0]
        fake.answers["IDENTIFY"] = json.dumps({**answer, "partitions": True}).encode()
        fake.body_commands = ("META",)
        nsqd.post("/topic/create?topic=parted&partition_num=3&partitions=0,2")
        wait_for_lines(fake, "REGISTER plain -11", "META parted", "REGISTER parted 0", "REGISTER parted 2")
        assert fake.identities[-1]["distributed_id"] == f"nsqd.example:0:{nsqd.tcp[1]}:7"
        nsqd.post("/channel/create?topic=parted&channel=d")
        wait_for_lines(fake, "REGISTER parted 0 d", "REGISTER parted 2 d")
        nsqd.post("/channel/delete?topic=parted&channel=d")
        nsqd.post("/topic/delete?topic=parted")
        wait_for_lines(fake, "UNREGISTER parted -11 d", "UNREGISTER parted -11")


def test_nsqs_nsqlookupd_hears_what_nsqs_nsqd_says(shared_daemons: Daemons):
    with FakeNsqlookupd() as fake:
        nsqd = shared_daemons.nsqd(*quick_flags(), fake.flag)
        nsqd.post("/topic/create?topic=parted&partition_num=2")
        nsqd.post("/channel/create?topic=parted&channel=c")
        wait_for_lines(fake, "REGISTER parted", "REGISTER parted c")
        assert all(len(line.split()) <= 3 and not line.startswith("META") for line in fake.lines)
