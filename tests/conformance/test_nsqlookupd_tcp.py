"""nsqlookupd's TCP protocol, one case per rule: magic, framing, commands, registrations (NSQ's nsqlookupd)."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from tests.conformance.daemon_helpers import (
    PEER,
    LookupConnection,
    addresses_of,
    identified,
    identify_command,
    registered_ids,
    topics_of,
)
from tests.integration.daemons import Nsqlookupd, sized, wait_until

LONGEST_NAME = "n" * 64
BAD_NAMES = {
    "empty": "",
    "too-long": "n" * 65,
    "dollar": "$",
    "star": "*",
    "slash": "a/b",
    "not-ascii": "ä",
    "only-the-suffix": "#ephemeral",
    "other-suffix": "a#temporary",
    "suffix-in-the-middle": "a#ephemeral.b",
    "too-long-with-suffix": "n" * 55 + "#ephemeral",
}
GOOD_NAMES = {
    "one-letter": "a",
    "longest": LONGEST_NAME,
    "dots-dashes-underscores": ".a-B_9.",
    "ephemeral": "a#ephemeral",
    "longest-ephemeral": "n" * 54 + "#ephemeral",
}


@pytest.fixture
def raw(nsqlookupd: Nsqlookupd) -> Iterator[LookupConnection]:
    """A connection with its magic sent and nothing said."""
    with LookupConnection(nsqlookupd.tcp) as connection:
        yield connection


@pytest.fixture
def peer(nsqlookupd: Nsqlookupd) -> Iterator[LookupConnection]:
    """A connection that has said who it is."""
    with identified(nsqlookupd) as connection:
        yield connection


@pytest.fixture
def other(nsqlookupd: Nsqlookupd) -> Iterator[LookupConnection]:
    """A second connection, of another nsqd."""
    with identified(nsqlookupd, broadcast_address="other.example") as connection:
        yield connection


def words(name: str, *params: str) -> bytes:
    return " ".join((name, *params)).encode() + b"\n"


# -- magic and framing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("magic", [b"  V2", b"V1  ", b"  v1", b"PING", b"GET ", b"\0\0\0\0"], ids=repr)
def test_wrong_magic_is_answered_and_closed(nsqlookupd: Nsqlookupd, magic: bytes):
    with LookupConnection(nsqlookupd.tcp, magic) as connection:
        assert connection.raw(4 + len("E_BAD_PROTOCOL")) == sized(b"E_BAD_PROTOCOL")
        assert connection.is_closed()


def test_the_magic_itself_is_not_answered(raw: LookupConnection):
    assert raw.ask(b"PING\n") == b"OK"


def test_the_magic_may_come_in_pieces(nsqlookupd: Nsqlookupd):
    with LookupConnection(nsqlookupd.tcp, b"") as connection:
        for byte in b"  V1PING\n":
            connection.send(bytes([byte]))
        assert connection.answer() == b"OK"


def test_a_response_has_a_size_and_no_frame_type(raw: LookupConnection):
    raw.send(b"PING\n")
    assert raw.raw(6) == b"\0\0\0\x02OK"


def test_an_error_is_framed_like_a_response(raw: LookupConnection):
    raw.send(b"FOO\n")
    assert raw.raw(4 + 29) == struct.pack(">i", 29) + b"E_INVALID invalid command FOO"


@pytest.mark.parametrize("line", [b"PING\n", b"PING\r\n", b" PING\n", b"PING \n", b"\tPING\t\n"], ids=repr)
def test_white_space_around_a_line_is_dropped(raw: LookupConnection, line: bytes):
    assert raw.ask(line) == b"OK"


def test_words_are_split_at_single_spaces(peer: LookupConnection):
    assert peer.ask(b"REGISTER  t\n") == b"E_BAD_TOPIC REGISTER topic name '' is not valid"


def test_answers_come_in_the_order_of_the_commands(peer: LookupConnection, topic: str):
    peer.send(b"PING\n" + words("REGISTER", topic, "c") + b"PING\n" + words("UNREGISTER", topic, "c") + b"FOO\n")
    assert [peer.answer() for _ in range(5)] == [b"OK"] * 4 + [b"E_INVALID invalid command FOO"]


def test_a_thousand_commands_at_once(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.send(b"".join(words("REGISTER", topic, f"c{number}") for number in range(1000)))
    assert {peer.answer() for _ in range(1000)} == {b"OK"}
    assert len(nsqlookupd.channels(topic)) == 1000


def test_a_connection_that_says_nothing_harms_nobody(nsqlookupd: Nsqlookupd):
    LookupConnection(nsqlookupd.tcp, b"").close()
    assert nsqlookupd.request("GET", "/ping").body == b"OK"


# -- PING --------------------------------------------------------------------------------------------------------------


def test_ping_is_allowed_before_identify(raw: LookupConnection):
    raw.ok(b"PING\n", b"PING\n")
    assert raw.identify()["version"] == "1.3.0"


def test_ping_after_identify(peer: LookupConnection):
    peer.ok(b"PING\n", b"PING\n")


def test_ping_takes_no_notice_of_parameters(raw: LookupConnection):
    raw.ok(b"PING a b\n")


def test_ping_updates_last_update(peer: LookupConnection, nsqlookupd: Nsqlookupd):
    def last_update() -> int:
        (row,) = [row for row in nsqlookupd.get("/debug")["client::"] if row["id"] == peer.name]
        return int(row["last_update"])

    before = last_update()
    peer.ok(b"PING\n")
    assert last_update() > before


def test_a_ping_registers_nothing(raw: LookupConnection, nsqlookupd: Nsqlookupd):
    raw.ok(b"PING\n")
    assert raw.name not in registered_ids(nsqlookupd, "client::")


# -- IDENTIFY ----------------------------------------------------------------------------------------------------------


def test_identify_answers_who_nsqlookupd_is(shared_daemons, nsqlookupd: Nsqlookupd):
    named = shared_daemons.nsqlookupd("--broadcast-address=lookup.example")
    with LookupConnection(named.tcp) as connection:
        assert connection.identify() == {
            "broadcast_address": "lookup.example",
            "hostname": socket.gethostname(),
            "http_port": named.http[1],
            "tcp_port": named.tcp[1],
            "version": "1.3.0",
        }


def test_identify_answers_keys_in_order(raw: LookupConnection):
    text = raw.ask(identify_command(PEER)).decode()
    keys = list(json.loads(text))
    assert keys == sorted(keys) == ["broadcast_address", "hostname", "http_port", "tcp_port", "version"]
    assert " " not in text.replace(socket.gethostname(), "")


def test_without_a_broadcast_address_it_is_the_name_of_the_host(raw: LookupConnection):
    assert raw.identify()["broadcast_address"] == socket.gethostname()


def test_identify_makes_a_node(peer: LookupConnection, nsqlookupd: Nsqlookupd):
    (node,) = [each for each in nsqlookupd.get("/nodes")["producers"] if each["remote_address"] == peer.name]
    assert {key: node[key] for key in PEER} == PEER
    assert (node["topics"], node["tombstones"]) == ([], [])


def test_the_id_of_a_node_is_its_remote_address(peer: LookupConnection, nsqlookupd: Nsqlookupd):
    assert peer.name in registered_ids(nsqlookupd, "client::")


def test_identify_again_is_an_error(peer: LookupConnection):
    assert peer.ask(identify_command(PEER)) == b"E_INVALID cannot IDENTIFY again"
    assert peer.is_closed()


@pytest.mark.parametrize("field", ["broadcast_address", "tcp_port", "http_port", "version"])
@pytest.mark.parametrize("how", ["absent", "zero"])
def test_identify_needs_field(raw: LookupConnection, field: str, how: str):
    fields = {name: value for name, value in PEER.items() if name != field}
    if how == "zero":
        fields[field] = type(PEER[field])()
    assert raw.ask(identify_command(fields)) == b"E_BAD_BODY IDENTIFY missing fields"
    assert raw.is_closed()


@pytest.mark.parametrize("field", ["hostname", "topology_zone", "topology_region"])
def test_identify_does_without_field(raw: LookupConnection, field: str):
    answer = json.loads(raw.ask(identify_command({name: value for name, value in PEER.items() if name != field})))
    assert answer["version"] == "1.3.0"


def test_identify_ignores_unknown_fields(raw: LookupConnection):
    assert raw.identify(long_id="x", future={"a": [1]})["version"] == "1.3.0"


def test_identify_ignores_parameters(raw: LookupConnection):
    body = json.dumps(PEER).encode()
    assert json.loads(raw.ask(b"IDENTIFY a b\n" + sized(body)))["version"] == "1.3.0"


@pytest.mark.parametrize("body", [b"", b"x", b"{", b"[]", b'"text"', b'{"tcp_port":"4150"}', b"\xff{}"], ids=repr)
def test_identify_with_a_body_that_is_not_its_json(raw: LookupConnection, body: bytes):
    assert raw.ask(b"IDENTIFY\n" + sized(body)) == b"E_BAD_BODY IDENTIFY failed to decode JSON body"
    assert raw.is_closed()


def test_identify_may_come_in_pieces(raw: LookupConnection):
    for byte in identify_command(PEER):
        raw.send(bytes([byte]))
    assert json.loads(raw.answer())["version"] == "1.3.0"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"IDENTIFY\n", b"E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n\0\0", b"E_BAD_BODY IDENTIFY failed to read body size"),
        (b"IDENTIFY\n\0\0\0\x05", b"E_BAD_BODY IDENTIFY failed to read body"),
        (b"IDENTIFY\n\0\0\0\x05{}", b"E_BAD_BODY IDENTIFY failed to read body"),
    ],
    ids=["no-size", "half-a-size", "no-body", "half-a-body"],
)
def test_identify_that_ends_early(raw: LookupConnection, data: bytes, error: bytes):
    raw.send(data)
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.answer() == error
    assert raw.is_closed()


@pytest.mark.improvement
@pytest.mark.parametrize("size", [-1, -2, -(1 << 31), (1 << 31) - 1, 1 << 20], ids=str)
def test_a_size_that_cannot_be_is_refused_and_kills_nothing(nsqlookupd: Nsqlookupd, raw: LookupConnection, size: int):
    """NSQ dies of a negative one, and allocates what it is told up to 2 GiB."""
    resident_bytes = nsqlookupd.resident_bytes()
    assert raw.ask(b"IDENTIFY\n" + struct.pack(">i", size)).startswith(b"E_BAD_BODY IDENTIFY ")
    assert raw.is_closed()
    assert nsqlookupd.is_running
    assert nsqlookupd.request("GET", "/ping").body == b"OK"
    assert nsqlookupd.resident_bytes() - resident_bytes < 16 << 20


@pytest.mark.improvement
@pytest.mark.parametrize("field", ["tcp_port", "http_port"])
@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_nobody_can_connect_to_is_refused(raw: LookupConnection, field: str, port: int):
    """NSQ takes any number but 0."""
    expected = f"E_BAD_BODY IDENTIFY {field} {port} out of range 1-65535"
    assert raw.ask(identify_command({**PEER, field: port})) == expected.encode()


# -- REGISTER ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["REGISTER", "UNREGISTER"])
def test_it_needs_identify_first(raw: LookupConnection, name: str):
    assert raw.ask(words(name, "t", "c")) == b"E_INVALID client must IDENTIFY"
    assert raw.is_closed()


@pytest.mark.parametrize("name", ["REGISTER", "UNREGISTER"])
@pytest.mark.parametrize("end", ["\n", " \n", "   \r\n"], ids=repr)
def test_it_needs_a_topic(peer: LookupConnection, name: str, end: str):
    assert peer.ask((name + end).encode()) == f"E_INVALID {name} insufficient number of params".encode()
    assert peer.is_closed()


@pytest.mark.parametrize("name", ["REGISTER", "UNREGISTER"])
@pytest.mark.parametrize("bad", BAD_NAMES.values(), ids=BAD_NAMES)
def test_a_bad_topic_name(peer: LookupConnection, name: str, bad: str):
    assert peer.ask(words(name, bad, "c")) == f"E_BAD_TOPIC {name} topic name '{bad}' is not valid".encode()
    assert peer.is_closed()


@pytest.mark.parametrize("name", ["REGISTER", "UNREGISTER"])
@pytest.mark.parametrize("bad", [bad for bad in BAD_NAMES.values() if bad], ids=list(BAD_NAMES)[1:])
def test_a_bad_channel_name(peer: LookupConnection, name: str, bad: str):
    assert peer.ask(words(name, "t", bad)) == f"E_BAD_CHANNEL {name} channel name '{bad}' is not valid".encode()
    assert peer.is_closed()


@pytest.mark.parametrize("good", GOOD_NAMES.values(), ids=GOOD_NAMES)
def test_a_good_name(peer: LookupConnection, nsqlookupd: Nsqlookupd, good: str):
    peer.ok(words("REGISTER", good, good))
    escaped = good.replace("#", "%23")
    assert good in topics_of(nsqlookupd)
    assert nsqlookupd.channels(escaped) == [good]
    peer.ok(words("UNREGISTER", good, good), words("UNREGISTER", good))


def test_register_topic(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic))
    assert topic in topics_of(nsqlookupd)
    assert nsqlookupd.channels(topic) == []
    assert registered_ids(nsqlookupd, f"topic:{topic}:") == [peer.name]


def test_register_channel_also_registers_the_topic(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"))
    assert nsqlookupd.channels(topic) == ["c"]
    assert addresses_of(nsqlookupd, topic) == ["nsqd.example"]
    assert registered_ids(nsqlookupd, f"topic:{topic}:") == registered_ids(nsqlookupd, f"channel:{topic}:c")


def test_register_twice_is_once(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(*[words("REGISTER", topic, "c")] * 3)
    assert addresses_of(nsqlookupd, topic) == ["nsqd.example"]
    assert nsqlookupd.channels(topic) == ["c"]


def test_further_parameters_are_ignored(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c", "d", "e"), words("UNREGISTER", topic, "c", "d"))
    assert nsqlookupd.channels(topic) == ["c"]


def test_several_producers_of_a_topic(
    peer: LookupConnection, other: LookupConnection, nsqlookupd: Nsqlookupd, topic: str
):
    for connection in (peer, other):
        connection.ok(words("REGISTER", topic))
    assert addresses_of(nsqlookupd, topic) == ["nsqd.example", "other.example"]


def test_two_connections_of_one_nsqd_are_two_producers(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    with identified(nsqlookupd) as twin:
        for connection in (peer, twin):
            connection.ok(words("REGISTER", topic))
        assert addresses_of(nsqlookupd, topic) == ["nsqd.example"] * 2


# -- UNREGISTER --------------------------------------------------------------------------------------------------------


def test_unregister_channel_leaves_the_topic(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("UNREGISTER", topic, "c"))
    assert registered_ids(nsqlookupd, f"channel:{topic}:c") == []
    assert addresses_of(nsqlookupd, topic) == ["nsqd.example"]


def test_unregister_channel_keeps_its_name(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("UNREGISTER", topic, "c"))
    assert nsqlookupd.channels(topic) == ["c"]


def test_unregister_topic_leaves_none_of_its_channels(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("REGISTER", topic, "d"), words("UNREGISTER", topic))
    keys = (f"topic:{topic}:", f"channel:{topic}:c", f"channel:{topic}:d")
    assert [registered_ids(nsqlookupd, key) for key in keys] == [[], [], []]


def test_unregister_topic_keeps_all_names(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("UNREGISTER", topic))
    assert nsqlookupd.get(f"/lookup?topic={topic}") == {"channels": ["c"], "producers": []}


def test_unregister_concerns_only_who_says_it(
    peer: LookupConnection, other: LookupConnection, nsqlookupd: Nsqlookupd, topic: str
):
    for connection in (peer, other):
        connection.ok(words("REGISTER", topic, "c"))
    peer.ok(words("UNREGISTER", topic))
    assert addresses_of(nsqlookupd, topic) == ["other.example"]
    assert registered_ids(nsqlookupd, f"channel:{topic}:c") == [other.name]


@pytest.mark.parametrize("params", [("never-heard",), ("never-heard", "c")], ids=["topic", "channel"])
def test_unregister_what_is_unknown_is_ok(peer: LookupConnection, nsqlookupd: Nsqlookupd, params: tuple[str, ...]):
    peer.ok(words("UNREGISTER", *params))
    assert "never-heard" not in topics_of(nsqlookupd)


def test_register_again_after_unregister(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("UNREGISTER", topic), words("REGISTER", topic, "c"))
    assert addresses_of(nsqlookupd, topic) == ["nsqd.example"]


# -- ephemeral names ---------------------------------------------------------------------------------------------------


def test_the_last_producer_takes_an_ephemeral_channel_along(
    peer: LookupConnection, other: LookupConnection, nsqlookupd: Nsqlookupd, topic: str
):
    for connection in (peer, other):
        connection.ok(words("REGISTER", topic, "c#ephemeral"))
    peer.ok(words("UNREGISTER", topic, "c#ephemeral"))
    assert nsqlookupd.channels(topic) == ["c#ephemeral"]
    other.ok(words("UNREGISTER", topic, "c#ephemeral"))
    assert nsqlookupd.channels(topic) == []
    assert topic in topics_of(nsqlookupd)


def test_the_last_producer_takes_an_ephemeral_topic_along(
    peer: LookupConnection, other: LookupConnection, nsqlookupd: Nsqlookupd, topic: str
):
    name = f"{topic}#ephemeral"
    for connection in (peer, other):
        connection.ok(words("REGISTER", name))
    peer.ok(words("UNREGISTER", name))
    assert name in topics_of(nsqlookupd)
    other.ok(words("UNREGISTER", name))
    assert name not in topics_of(nsqlookupd)


def test_a_lasting_channel_stays_without_producers(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic, "c"), words("UNREGISTER", topic, "c"))
    assert nsqlookupd.channels(topic) == ["c"]


# -- disconnect --------------------------------------------------------------------------------------------------------


def test_a_disconnect_removes_all_registrations(nsqlookupd: Nsqlookupd, topic: str):
    with identified(nsqlookupd) as leaving:
        leaving.ok(words("REGISTER", topic, "c"), words("REGISTER", f"{topic}b"))
        name = leaving.name
    wait_until(lambda: name not in registered_ids(nsqlookupd, "client::"), "the node gone")
    debug = nsqlookupd.get("/debug")
    assert all(row["id"] != name for rows in debug.values() for row in rows)


def test_a_disconnect_keeps_the_names(nsqlookupd: Nsqlookupd, topic: str):
    with identified(nsqlookupd) as leaving:
        leaving.ok(words("REGISTER", topic, "c"))
    wait_until(lambda: nsqlookupd.get(f"/lookup?topic={topic}")["producers"] == [], "the producer gone")
    assert nsqlookupd.get(f"/lookup?topic={topic}") == {"channels": ["c"], "producers": []}


def test_a_reset_is_a_disconnect(nsqlookupd: Nsqlookupd, topic: str):
    leaving = identified(nsqlookupd)
    leaving.ok(words("REGISTER", topic))
    leaving.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    leaving.close()
    wait_until(lambda: nsqlookupd.producers(topic) == [], "the producer gone")


def test_a_disconnect_leaves_others_alone(other: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    other.ok(words("REGISTER", topic, "c#ephemeral"))
    with identified(nsqlookupd) as leaving:
        leaving.ok(words("REGISTER", topic, "c#ephemeral"))
    wait_until(lambda: addresses_of(nsqlookupd, topic) == ["other.example"], "one producer gone")
    assert nsqlookupd.channels(topic) == ["c#ephemeral"]


@pytest.mark.improvement
def test_a_disconnect_takes_an_ephemeral_channel_along(nsqlookupd: Nsqlookupd, topic: str):
    """NSQ keeps its name for ever."""
    with identified(nsqlookupd) as leaving:
        leaving.ok(words("REGISTER", topic, "c#ephemeral"))
    wait_until(lambda: nsqlookupd.channels(topic) == [], "the channel gone")


@pytest.mark.improvement
def test_a_disconnect_takes_an_ephemeral_topic_along(nsqlookupd: Nsqlookupd, topic: str):
    """NSQ keeps its name for ever."""
    name = f"{topic}#ephemeral"
    with identified(nsqlookupd) as leaving:
        leaving.ok(words("REGISTER", name, "c"))
        assert name in topics_of(nsqlookupd)
    wait_until(lambda: name not in topics_of(nsqlookupd), "the topic gone")


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["FOO", "ping", "IDENTIFYX", "SUB", "MAGIC", ""])
def test_an_unknown_command(raw: LookupConnection, word: str):
    assert raw.ask(f"{word}\n".encode()) == f"E_INVALID invalid command {word}".encode()
    assert raw.is_closed()


def test_nothing_behind_an_error_is_executed(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.send(b"FOO\n" + words("REGISTER", topic))
    assert peer.answer() == b"E_INVALID invalid command FOO"
    assert peer.is_closed()
    assert topic not in topics_of(nsqlookupd)


def test_an_error_unregisters_like_every_disconnect(peer: LookupConnection, nsqlookupd: Nsqlookupd, topic: str):
    peer.ok(words("REGISTER", topic))
    peer.ask(b"FOO\n")
    wait_until(lambda: nsqlookupd.producers(topic) == [], "the producer gone")


@pytest.mark.parametrize(
    "data",
    [
        b"\0" * 100,
        b"  V1" + b"\xff" * 5000 + b"\n",
        b"  V1\n\n\n\n",
        b"  V1IDENTIFY\n\0\0\0\x02{}PING\n",
        b"  V1REGISTER t c\n" * 50,
        b"  V2IDENTIFY\n",
        b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03",
        b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
    ids=["zeros", "bytes", "empty-lines", "empty-identify", "early-register", "wrong-magic", "tls", "http"],
)
def test_any_input_leaves_it_alive(nsqlookupd: Nsqlookupd, data: bytes):
    with LookupConnection(nsqlookupd.tcp, data) as connection:
        assert connection.answer().startswith(b"E_")
        assert connection.is_closed()
    assert nsqlookupd.request("GET", "/ping").body == b"OK"


@pytest.mark.improvement
def test_an_endless_line_is_refused(nsqlookupd: Nsqlookupd, raw: LookupConnection):
    """NSQ gathers it for ever."""
    raw.send(b"x" * 20_000)
    assert raw.answer() == b"E_INVALID command line too long, more than 16384 bytes"
    assert raw.is_closed()
