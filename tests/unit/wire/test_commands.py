"""The table of commands: what the client builds by a row the server parses by it, in the states that it names."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import LocalProtocolError
from flintmq.wire.bodies import HEADED, PLAIN, TRACED, Kind
from flintmq.wire.client import ClientConnection
from flintmq.wire.codes import CODES
from flintmq.wire.commands import CLOSING, COMMANDS, INIT, PUBLISHING, SUBSCRIBED
from flintmq.wire.identify import IdentifyRequest
from flintmq.wire.server import Close, Publish, Ready, ServerConnection, ServerLimits, Violation

LIMITS = ServerLimits(max_msg_size=1000, max_body_size=10_000)
TO_STATE = {INIT: b"", SUBSCRIBED: b"SUB t c\n", CLOSING: b"SUB t c\nCLS\n"}
VALUES = {
    "topic": "t", "channel": "c", "partition": 3, "partition|-": 3, "defer_ms": 7, "producer_id": "p", "sequence": 5,
    "first_sequence": 5, "prefix": "p", "count": 2, "id": b"000000000000002a", "timeout_ms": 9, "timestamp_ns": 11,
    "start": None, "extend": True,
}  # fmt: skip


def in_state(state):
    server, client = ServerConnection(LIMITS), ClientConnection()
    server.receive_data(b"  V2" + TO_STATE[state])
    if state != INIT:
        client.sub("t", "c")
    if state == CLOSING:
        client.cls()
    assert server.state == client.state == state
    return server, client


def example(row):
    """A command of this row as a client puts it on the wire."""
    fronts = {PLAIN: None, TRACED: (1,), HEADED: (b"{}",)}[row.body.front]
    line = row.line(*(VALUES[word.name] for word in row.words))
    match row.body.kind:
        case Kind.NONE:
            return line
        case Kind.SIZED:
            return line + b"\0\0\0\2{}"
        case Kind.FIXED:
            return line + bytes(row.body.fields.size)
        case _:
            return b"".join([line, *row.body.write(row.name, (b"body",), fronts)])


@pytest.mark.parametrize("state", TO_STATE)
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_taken_in_the_states_of_its_row_and_in_no_other(name, state):
    row = COMMANDS[name]
    server, _ = in_state(state)
    events = server.receive_data(example(row))
    if state not in row.states:
        assert events == [Violation("E_INVALID", f"cannot {name} in current state")]
        assert server.state == "broken"
        return
    assert len(events) == (state != row.ignored_in)
    assert not any(isinstance(event, Violation) for event in events)
    assert server.state == (row.then or state)
    assert server.held_bytes == 0


@pytest.mark.parametrize("state", TO_STATE)
@pytest.mark.parametrize("name", ["SUB", "CLS", "RDY", "REQ", "TOUCH", "FIN", "PUB", "IDENTIFY"])
def test_the_client_refuses_what_the_server_would(name, state):
    row = COMMANDS[name]
    _, client = in_state(state)
    calls = {
        "SUB": lambda: client.sub("t", "c"),
        "CLS": client.cls,
        "RDY": lambda: client.rdy(1),
        "REQ": lambda: client.requeue(b"0" * 16, 1),
        "TOUCH": lambda: client.touch(b"0" * 16),
        "FIN": lambda: client.finish([b"0" * 16]),
        "PUB": lambda: client.publish("t", [b"x"]),
        "IDENTIFY": lambda: client.identify(IdentifyRequest()),
    }
    pending = len(client.pending)
    if state in row.states:
        calls[name]()
        assert client.state == (row.then or state)
        assert len(client.pending) == pending + bool(row.reply)
        return
    with pytest.raises(LocalProtocolError, match=f"cannot {name} in state {state}"):
        calls[name]()
    assert (client.state, len(client.pending)) == (state, pending)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_a_command_can_be_answered_with_is_in_the_table_of_codes(name):
    row = COMMANDS[name]
    assert set(row.errors) <= set(CODES)
    assert set(row.closing) <= set(row.errors)
    assert all(row.closes(code) for code in row.errors if CODES[code].fatal)


def test_every_code_about_a_command_is_in_a_row():
    general = {
        "E_BAD_PROTOCOL", "E_AUTH_ERROR", "E_AUTH_DISABLED", "E_AUTH_FIRST", "E_UNAUTHORIZED",
        "E_FAILED_ON_NOT_LEADER", "E_PUB_TOO_MUCH_WAITING",
    }  # fmt: skip
    assert {code for row in COMMANDS.values() for code in row.errors} == set(CODES) - general


# -- publishing --------------------------------------------------------------------------------------------------------


@given(
    bodies=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5),
    partition=st.none() | st.integers(0, 1023),
    way=st.sampled_from(["plain", "later", "traced", "headed", "once"]),
    number=st.integers(0, 1000),
)
def test_one_call_publishes_in_every_way(bodies, partition, way, number):
    fields: dict[str, Any] = {
        "plain": {},
        "later": {"defer_ms": number},
        "traced": {"trace_ids": [number] * len(bodies)},
        "headed": {"headers": [b"{}"] * len(bodies)},
        "once": {"producer_id": "p", "sequence": number + 1},
    }[way]
    client, server = ClientConnection(), ServerConnection(LIMITS)
    server.receive_data(b"  V2")
    (event,) = server.receive_data(client.publish("t", bodies, "token", partition=partition, **fields))
    assert isinstance(event, Publish)
    front = {"traced": number.to_bytes(8, "big"), "headed": b"\0\2{}"}.get(way, b"")
    wanted = Publish(
        event.command,
        "t",
        [front + body for body in bodies],
        1,
        fields.get("defer_ms", 0),
        partition,
        {"traced": TRACED, "headed": HEADED}.get(way, PLAIN),
        b"p" if way == "once" else None,
        fields.get("sequence", 0),
    )
    event.bodies = [*event.bodies]
    assert event == wanted
    assert client.pending.pop() == (event.command, "token")
    assert (COMMANDS[event.command].body.kind is Kind.MESSAGE) == (len(bodies) == 1)


@pytest.mark.parametrize(
    "fields",
    [
        {"defer_ms": 1, "trace_ids": [1]},
        {"defer_ms": 1, "headers": [b"{}"]},
        {"headers": [b"{}"], "trace_ids": [1]},
        {"producer_id": "p", "sequence": 1, "defer_ms": 5, "headers": [b"{}"]},
    ],
)
def test_what_no_command_says_is_refused(fields):
    client = ClientConnection()
    with pytest.raises(LocalProtocolError, match=r"no command publishes with .* and "):
        client.publish("t", [b"x"], **fields)
    assert not client.pending


@pytest.mark.parametrize(
    ("fields", "command"),
    [
        ({"defer_ms": 5}, "MDPUB_ONCE"),
        ({"trace_ids": [1], "partition": 0}, "MPUB_TRACE_ONCE"),
        ({"headers": [b"{}"], "partition": 0}, "MPUB_EXT_ONCE"),
    ],
)
def test_one_message_that_only_a_command_for_several_can_say(fields, command):
    client = ClientConnection()
    assert client.publish("t", [b"x"], producer_id="p", sequence=1, **fields).startswith(command.encode() + b" t ")


def test_the_names_of_publishes_are_those_with_messages():
    assert set(PUBLISHING) == {name for name in COMMANDS if "PUB" in name}
    assert {row.failure for row in PUBLISHING.values()} == {
        f"E_{family}_FAILED" for family in ("PUB", "MPUB", "DPUB", "MDPUB", "PUB_ONCE", "MPUB_ONCE")
    }


# -- lines that are kept -----------------------------------------------------------------------------------------------


def test_a_line_that_is_kept_holds_only_in_its_state():
    server, _ = in_state(SUBSCRIBED)
    assert server.receive_data(b"RDY 5\nRDY 5\n") == [Ready(5), Ready(5)]
    assert server.receive_data(b"CLS\nRDY 5\n") == [Close()]
    assert server.receive_data(b"RDY 5\n") == []
    assert server.receive_data(b"CLS\n") == [Violation("E_INVALID", "cannot CLS in current state")]


def test_what_one_connection_keeps_is_bounded():
    server, _ = in_state(INIT)
    for number in range(200):
        topic = f"t{number % 70}"
        data = f"DPUB {topic} {number}\n".encode() + b"\0\0\0\1x"
        data += f"PUB_ONCE {topic} - p{number} {number + 1}\n".encode() + b"\0\0\0\1x"
        delayed, counted = server.receive_data(data)
        assert isinstance(delayed, Publish) and isinstance(counted, Publish)
        assert (delayed.topic, delayed.defer_ms) == (topic, number)
        assert (counted.topic, counted.producer_id, counted.sequence) == (topic, b"p%d" % number, number + 1)
    server.receive_data(b"OFFSETS t " + b"0" * 5000 + b"1\n")
    kept = [*server._lines, *server._heads]
    assert len(kept) <= 32 and max(map(len, kept)) <= 128


@pytest.mark.parametrize("last", [b"", b"0", b"x", b"5 x", b"9223372036854775808", b"5\r"])
def test_the_last_word_of_a_counted_publish_is_read_as_if_it_were_the_first_time(last):
    def parse(server):
        return server.receive_data(b"PUB_ONCE t - p " + last + b"\n\0\0\0\1x")

    fresh, _ = in_state(INIT)
    used, _ = in_state(INIT)
    used.receive_data(b"PUB_ONCE t - p 1\n\0\0\0\1x")
    assert parse(used) == parse(fresh)


@pytest.mark.parametrize("data", [b"\0\0\0\0\1x\n", b"\0\n", b"\0PUB t\n\0\0\0\1x"])
def test_what_begins_with_nothing_is_no_publish(data):
    server, _ = in_state(INIT)
    assert server.repeated_pub(data) is None
    (event,) = server.receive_data(data)
    assert isinstance(event, Violation)
