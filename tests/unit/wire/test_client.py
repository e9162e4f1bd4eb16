"""The client's protocol core: against hand-made frames, and back to back with the server's."""

from __future__ import annotations

import struct
from itertools import chain, pairwise, repeat

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import LocalProtocolError, RemoteProtocolError
from flintmq.message import MESSAGE_HEADER
from flintmq.wire import server
from flintmq.wire.client import (
    SUBSCRIBED,
    Broken,
    ClientConnection,
    Features,
    Heartbeat,
    MessageFailed,
    Messages,
    Refused,
    Reply,
    Unanswered,
    parse_features,
)
from flintmq.wire.frames import HEARTBEAT_FRAME, OK_FRAME, error_frame, response_frame
from flintmq.wire.identify import IdentifyRequest, ReceivedRequest, ServerFeatures, negotiate, parse_request


def message_frame(number: int, body: bytes = b"body", attempts: int = 1) -> bytes:
    return MESSAGE_HEADER.pack(30 + len(body), 2, 1000 + number, attempts, b"%016x" % number) + body


def subscribed() -> ClientConnection:
    connection = ClientConnection()
    connection.sub("topic", "channel")
    assert connection.receive(OK_FRAME) == [Reply("SUB", None, b"OK")]
    return connection


def flat(events):
    """Events with the records of neighbouring Messages joined: how they are cut depends on the reads."""
    joined: list = []
    for event in events:
        if isinstance(event, Messages) and joined and isinstance(joined[-1], Messages):
            joined[-1] = Messages(joined[-1].records + event.records)
        else:
            joined.append(event)
    return joined


# --- bytes in ---


def test_consecutive_messages_are_one_event():
    connection = subscribed()
    events = connection.receive(message_frame(1, b"a") + message_frame(2, b"bb", 3))
    assert events == [Messages([(1001, 1, b"%016x" % 1, b"a"), (1002, 3, b"%016x" % 2, b"bb")])]


def test_order_between_kinds_is_kept():
    connection = subscribed()
    late = error_frame("E_FIN_FAILED", "FIN 0000000000000001 failed ID not in flight")
    events = connection.receive(message_frame(1) + HEARTBEAT_FRAME + message_frame(2) + late + message_frame(3))
    assert [type(event) for event in events] == [Messages, Heartbeat, Messages, MessageFailed, Messages]


STREAM = (
    message_frame(1, b"")
    + HEARTBEAT_FRAME
    + message_frame(2, b"x" * 300)
    + error_frame("E_TOUCH_FAILED", "TOUCH 0000000000000002 failed ID not in flight")
    + message_frame(3)
    + message_frame(4)
)


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_any_split_gives_the_same_events(cuts):
    whole = flat(subscribed().receive(STREAM))
    connection = subscribed()
    positions = [0, *sorted(cuts), len(STREAM)]
    events = []
    for start, stop in pairwise(positions):
        events += connection.receive(STREAM[start:stop])
    assert flat(events) == whole
    assert "held_bytes=0" in connection.describe()


def test_byte_by_byte():
    connection = subscribed()
    events = [event for byte in STREAM for event in connection.receive(bytes([byte]))]
    assert flat(events) == flat(subscribed().receive(STREAM))


@given(
    st.lists(st.tuples(st.sampled_from([0, 1, 166, 422, 65702]), st.integers(1, 40)), max_size=6),
    st.lists(st.integers(1, 5000), max_size=40),
)
def test_runs_of_one_size_are_taken_like_every_other_message(runs, reads):
    """Sizes that differ in one byte of the size field alone as well (196, 452, 65732), wherever the reads are cut."""
    bodies = [b"b" * size for size, count in runs for _ in range(count)]
    stream = b"".join(message_frame(number, body, 1 + number % 3) for number, body in enumerate(bodies))
    connection = subscribed()
    records, frames, position = [], b"", 0
    for count in chain(reads, repeat(1 << 20)):
        for event in connection.receive(stream[position : position + count]):
            assert isinstance(event, Messages)
            records += event.records
            frames += event.frames
        position += count
        if position >= len(stream):
            break
    assert records == [(1000 + n, 1 + n % 3, b"%016x" % n, body) for n, body in enumerate(bodies)]
    assert frames == stream


def test_what_is_no_message_ends_a_run_of_one_size():
    same = b"".join(message_frame(number) for number in range(100))
    error = error_frame("E_FIN_FAILED", "1" * 17)  # of the size of these messages
    assert len(error) == len(message_frame(1))
    events = subscribed().receive(same + error + same + HEARTBEAT_FRAME + same[:-1])
    assert [len(e.records) if isinstance(e, Messages) else type(e) for e in events] == [
        100, MessageFailed, 100, Heartbeat, 99,
    ]  # fmt: skip
    assert isinstance(events[2], Messages) and events[2].frames == same


def test_a_big_message_is_joined_once():
    body = bytes(3_000_000)
    frame = message_frame(1, body)
    connection = subscribed()
    pieces = [frame[at : at + 1000] for at in range(0, len(frame), 1000)]
    events = [event for piece in pieces for event in connection.receive(piece)]
    assert [event.records[0][3] for event in events if isinstance(event, Messages)] == [body]
    assert len(events) == 1


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (struct.pack(">II", 10, 3), "frame of type 3"),
        (struct.pack(">II", 3, 0), "at least 4"),
        (struct.pack(">II", 29, 2), "at least 30"),
        (struct.pack(">iI", -1, 0), "at most 1000"),
        (struct.pack(">II", 1001, 2), "raise frame_size_max"),
        (response_frame(b"OK"), "answer b'OK' to no command"),
        (b"HTTP/1.1 400 Bad Request\r\n", "what answers speaks HTTP: not an nsqd? name nsqd's TCP port, 4150"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "nsqd sends 0, 1 and 2: not an nsqd?"),
    ],
)
def test_what_no_nsqd_sends_breaks_the_connection(frame, text):
    connection = ClientConnection(frame_size_max=1000)
    connection.sub("topic", "channel")
    connection.receive(OK_FRAME)
    events = connection.receive(message_frame(1) + frame + message_frame(2))
    assert isinstance(events[0], Messages)
    assert len(events[0].records) == 1
    assert isinstance(events[1], Broken)
    assert text in str(events[1].error)
    assert len(events) == 2
    assert connection.state == "broken"
    assert connection.receive(message_frame(3)) == []


@given(st.binary(max_size=200))
def test_garbage_never_raises(data):
    connection = subscribed()
    for event in connection.receive(data):
        assert isinstance(event, Messages | Heartbeat | Refused | MessageFailed | Broken)


# --- answers ---


def test_answers_go_to_commands_in_order():
    connection = ClientConnection()
    connection.publish("t", [b"1"], "first")
    connection.publish("t", [b"2", b"3"], "second")
    connection.publish("t", [b"4"], "third", defer_ms=10)
    events = connection.receive(OK_FRAME + HEARTBEAT_FRAME + OK_FRAME + OK_FRAME)
    assert events == [
        Reply("PUB", "first", b"OK"),
        Heartbeat(),
        Reply("MPUB", "second", b"OK"),
        Reply("DPUB", "third", b"OK"),
    ]
    assert not connection.pending


def test_a_fatal_error_ends_the_connection_and_nothing_behind_was_executed():
    connection = ClientConnection()
    for token in "abc":
        connection.publish("t", [b"x"], token)
    events = connection.receive(OK_FRAME + error_frame("E_BAD_MESSAGE", "PUB message too big 9 > 8") + OK_FRAME)
    assert events == [
        Reply("PUB", "a", b"OK"),
        Refused("PUB", "b", "E_BAD_MESSAGE", "PUB message too big 9 > 8", True),
    ]
    assert connection.close() == [Unanswered("PUB", "c", maybe_executed=False)]
    assert connection.close() == []


@pytest.mark.parametrize("frame", [b"", error_frame("E_PUB_FAILED", "PUB failed exiting"), error_frame("E_NEW", "?")])
def test_what_is_behind_a_loss_may_have_been_executed(frame):
    connection = ClientConnection()
    connection.publish("t", [b"x"], "a")
    connection.publish("t", [b"x"], "b")
    connection.receive(frame)
    assert connection.close()[-1] == Unanswered("PUB", "b", maybe_executed=True)


def test_an_error_that_is_not_fatal_leaves_the_connection_open():
    connection = ClientConnection()
    connection.publish("t", [b"x"], "a")
    connection.publish("t", [b"x"], "b")
    events = connection.receive(error_frame("E_TOPIC_NOT_EXIST") + OK_FRAME)
    assert events == [Refused("PUB", "a", "E_TOPIC_NOT_EXIST", "", False), Reply("PUB", "b", b"OK")]


def test_an_error_for_no_command():
    connection = subscribed()
    assert connection.receive(error_frame("E_INVALID", "RDY count 9 out of range")) == [
        Refused("", None, "E_INVALID", "RDY count 9 out of range", True)
    ]


@pytest.mark.parametrize(
    ("code", "command"), [("E_FIN_FAILED", "FIN"), ("E_REQ_FAILED", "REQ"), ("E_TOUCH_FAILED", "TOUCH")]
)
def test_a_late_answer_names_the_message(code, command):
    connection = subscribed()
    raw = b"\x00\x01 \xff" * 4  # Youzan's ids are any bytes
    frame = struct.pack(">II", 4 + len(code) + 1 + len(command) + 1 + 16 + 7, 1)
    frame += code.encode() + b" " + command.encode() + b" " + raw + b" failed"
    (event,) = connection.receive(frame)
    assert isinstance(event, MessageFailed)
    assert (event.command, event.code, event.message_id) == (command, code, raw)
    assert connection.state == "subscribed"


# --- calls out ---


@pytest.mark.parametrize("name", ["rdy", "finish", "requeue", "touch", "cls"])
def test_consumer_commands_need_a_subscription(name):
    arguments = {"rdy": (1,), "finish": ([b"i" * 16],), "requeue": (b"i" * 16, 0), "touch": (b"i" * 16,), "cls": ()}
    connection = ClientConnection()
    with pytest.raises(LocalProtocolError, match="in state init"):
        getattr(connection, name)(*arguments[name])
    getattr(subscribed(), name)(*arguments[name])


@pytest.mark.parametrize("name", ["identify", "sub", "auth"])
def test_introductions_come_first(name):
    arguments = {"identify": (IdentifyRequest(),), "sub": ("t", "c"), "auth": (b"s",)}
    with pytest.raises(LocalProtocolError, match="in state subscribed"):
        getattr(subscribed(), name)(*arguments[name])


def test_a_bad_call_leaves_no_trace():
    connection = ClientConnection()
    with pytest.raises(LocalProtocolError):
        connection.publish("bad topic", [b"x"])
    with pytest.raises(LocalProtocolError):
        connection.publish("t", [b"a", b""])
    with pytest.raises(LocalProtocolError):
        connection.publish("t", [b"x"], defer_ms=-1)
    assert not connection.pending


def test_closing_allows_answers_and_nothing_new():
    connection = subscribed()
    assert connection.cls("bye") == b"CLS\n"
    assert connection.finish([b"i" * 16]) == b"FIN " + b"i" * 16 + b"\n"
    assert connection.requeue(b"i" * 16, 5) == b"REQ " + b"i" * 16 + b" 5\n"
    with pytest.raises(LocalProtocolError):
        connection.cls()
    assert connection.receive(response_frame(b"CLOSE_WAIT")) == [Reply("CLS", "bye", b"CLOSE_WAIT")]


# --- IDENTIFY ---


def test_features_of_a_plain_ok_are_those_of_old_nsqd():
    assert parse_features(b"OK") == Features(max_rdy_count=2500, msg_timeout=60_000)


def test_features_of_a_negotiated_answer():
    request = ReceivedRequest(feature_negotiation=True, msg_timeout=5000)
    negotiated = negotiate(request, ServerFeatures(version="1.3.0", max_rdy_count=10, auth_required=True))
    assert negotiated.response is not None
    features = parse_features(negotiated.response)
    assert (features.max_rdy_count, features.msg_timeout, features.auth_required) == (10, 5000, True)
    assert features.version == "1.3.0"


@pytest.mark.parametrize("data", [b"", b"NO", b"[]", b'{"max_rdy_count":"x"}', b"{"])
def test_features_that_cannot_be_read(data):
    with pytest.raises(RemoteProtocolError, match="cannot be read"):
        parse_features(data)


# --- back to back with the server's core ---


def test_every_command_is_understood_by_the_server():
    client = ClientConnection()
    end = server.ServerConnection(server.ServerLimits())
    request = IdentifyRequest(client_id="me", feature_negotiation=True, heartbeat_interval=1000)
    (identify,) = end.receive_data(client.open() + client.identify(request))
    assert isinstance(identify, server.Identify)
    received = ReceivedRequest(client_id="me", feature_negotiation=True, heartbeat_interval=1000)
    assert parse_request(identify.body) == received
    client.receive(response_frame(msgspec.json.encode({"max_rdy_count": 5})))
    ids = [b"%016x" % number for number in (1, 2, 3)]
    data = (
        client.sub("topic", "channel")
        + client.rdy(7)
        + client.finish(ids)
        + client.touch(ids[0])
        + client.requeue(ids[1], 90_000)
        + client.publish("topic", [b"one"])
        + client.publish("topic", [b"two", b"three"])
        + client.publish("topic", [b"four"], defer_ms=250)
        + client.nop()
        + client.cls()
    )
    assert end.resume() == []
    events = end.receive_data(data)
    assert [type(event).__name__ for event in events] == (
        ["Subscribe", "Ready", "FinishRun", "Touch", "Requeue", "Publish", "Publish", "Publish", "Nop", "Close"]
    )
    assert events[2] == server.FinishRun((1, 2, 3))
    assert [event.bodies for event in events if isinstance(event, server.Publish)] == [
        [b"one"],
        [b"two", b"three"],
        [b"four"],
    ]
    assert [name for name, _ in client.pending] == ["SUB", "PUB", "MPUB", "DPUB", "CLS"]


# --- partitions (Youzan's TCP protocol) ---


def test_commands_of_the_redesigned_nsq():
    connection = ClientConnection()
    assert connection.publish("t", [b"x"], "a", 3) == b"PUB t 3\n\x00\x00\x00\x01x"
    assert connection.publish("t", [b"x", b"y"], "b", 3).startswith(b"MPUB t 3\n\x00\x00\x00\x0e\x00\x00\x00\x02")
    traced = connection.publish("t", [b"x"], "c", 3, trace_ids=[5])
    assert traced == b"PUB_TRACE t 3\n\x00\x00\x00\x09" + bytes(7) + b"\x05x"
    assert connection.publish("t", [b"x", b"y"], "d", 3, trace_ids=[5, 6]).startswith(b"MPUB_TRACE t 3\n")
    assert connection.publish("t", [b"x"], "e", 3, headers=[b"{}"]) == b"PUB_EXT t 3\n\x00\x00\x00\x05\x00\x02{}x"
    assert [name for name, _ in connection.pending] == ["PUB", "MPUB", "PUB_TRACE", "MPUB_TRACE", "PUB_EXT"]
    assert connection.sub("t", "c", "f", 3) == b"SUB t c 3\n"
    assert connection.state == SUBSCRIBED


@pytest.mark.parametrize("command", ["SUB_ORDER", "SUB_ORDERED"])
def test_subscribing_in_order(command):
    connection = ClientConnection()
    assert connection.sub_order("t", "c", 0, "token", command) == f"{command} t c 0\n".encode()
    assert connection.state == SUBSCRIBED
    assert connection.receive(OK_FRAME) == [Reply(command, "token", b"OK")]
    with pytest.raises(LocalProtocolError):
        connection.sub_order("t", "c", 1, "token", command)


@pytest.mark.parametrize(("partition", "is_fatal"), [(None, True), (0, False)])
def test_a_redesigned_nsqd_stays_open_when_a_publish_fails(partition, is_fatal):
    connection = ClientConnection()
    connection.publish("t", [b"x"], "a", partition)
    connection.publish("t", [b"y"], "b", partition)
    events = connection.receive(error_frame("E_PUB_FAILED ") + OK_FRAME)
    assert events[0] == Refused("PUB", "a", "E_PUB_FAILED", "", is_fatal)
    assert events[1:] == ([] if is_fatal else [Reply("PUB", "b", b"OK")])


def test_an_error_without_a_description_ends_with_a_blank():
    connection = ClientConnection()
    connection.publish("t", [b"x"], "a", 1)
    assert connection.receive(error_frame("E_FAILED_ON_NOT_LEADER ")) == [
        Refused("PUB", "a", "E_FAILED_ON_NOT_LEADER", "", False)
    ]
