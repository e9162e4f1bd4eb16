"""Publishing with trace ids and headers, as the server reads it; the client's serialisers are the other side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.wire import built

from flintmq.wire.server import NOT_A_NUMBER, ServerConnection, ServerLimits, Violation

LIMITS = ServerLimits(max_msg_size=100, max_body_size=400)
BODIES = st.binary(min_size=1, max_size=20)
HEADERS = st.sampled_from([b"", b"{}", b'{"k":"v"}', b"no JSON, which is not the parser's business"])


def parse(data, chunk=0, limits=LIMITS):
    parser = ServerConnection(limits)
    assert parser.receive_data(b"  V2") == []
    events = []
    for start in range(0, len(data), chunk or len(data)):
        events += parser.receive_data(data[start : start + (chunk or len(data))])
    assert parser.held_bytes == 0 or (events and isinstance(events[-1], Violation))
    return events


def commands_of(events):
    """One (command, topic, partition, bodies) per command, whatever was read together."""
    found = []
    for event in events:
        if event.command.startswith("M"):
            found.append((event.command, event.topic, event.partition, list(event.bodies)))
        else:
            found += [(event.command, event.topic, event.partition, [body]) for body in event.bodies]
    return found


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("PUB_TRACE"), st.integers(0, 2), st.integers(0, 2**64 - 1), BODIES),
            st.tuples(st.just("PUB_EXT"), st.integers(0, 2), HEADERS, BODIES),
            st.tuples(st.just("MPUB_TRACE"), st.integers(0, 2), st.integers(0, 2**64 - 1), BODIES),
            st.tuples(st.just("MPUB_EXT"), st.integers(0, 2), HEADERS, BODIES),
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(1, 200),
)
def test_whatever_the_client_writes_is_read(wanted, chunk):
    data, expected = b"", []
    for command, partition, front, body in wanted:
        if command.endswith("TRACE"):
            item = front.to_bytes(8, "big") + body
        else:
            item = len(front).to_bytes(2, "big") + front + body
        if command == "PUB_TRACE":
            data += built.pub_trace("t", partition, front, body)
        elif command == "PUB_EXT":
            data += built.pub_ext("t", partition, front, body)
        elif command == "MPUB_TRACE":
            data += built.mpub_trace("t", partition, [(front, body)] * 3)
        else:
            data += built.mpub_ext("t", partition, [(front, body)] * 3)
        expected.append((command, "t", partition, [item] * (3 if command.startswith("M") else 1)))
    assert commands_of(parse(data, chunk)) == commands_of(parse(data)) == expected


def test_a_run_to_one_place_is_one_event():
    data = built.pub_trace("t", 0, 1, b"a") * 3 + built.pub_trace("t", 1, 1, b"b")
    data += built.pub_ext("t", 1, b"{}", b"c") * 2 + built.pub_trace("t", 1, 1, b"d")
    events = parse(data)
    assert [(each.command, each.partition, each.replies, len(each.bodies)) for each in events] == [
        ("PUB_TRACE", 0, 3, 3),
        ("PUB_TRACE", 1, 1, 1),
        ("PUB_EXT", 1, 2, 2),
        ("PUB_TRACE", 1, 1, 1),
    ]


def test_pubs_between_them_stay_where_they_are():
    data = b"PUB t 0\n\0\0\0\1a" + built.pub_trace("t", 0, 1, b"b") + b"PUB t 0\n\0\0\0\1c"
    assert [event.command for event in parse(data)] == ["PUB", "PUB_TRACE", "PUB"]


@pytest.mark.parametrize(
    ("word", "partition"), [(b"", None), (b" 5", 5), (b" x", NOT_A_NUMBER), (b" 1024", NOT_A_NUMBER)]
)
def test_the_partition(word, partition):
    for command in (b"PUB_TRACE", b"PUB_EXT"):
        (event,) = parse(command + b" t" + word + b"\n\0\0\0\x0a\0\0" + b"x" * 8)
        assert event.partition == partition


def items(*sizes):
    data = len(sizes).to_bytes(4, "big") + b"".join(size.to_bytes(4, "big") + bytes(size) for size in sizes)
    return len(data).to_bytes(4, "big") + data


@pytest.mark.parametrize(
    ("data", "code", "detail"),
    [
        (b"PUB_TRACE\n", "E_INVALID", "PUB_TRACE insufficient number of parameters"),
        (b"MPUB_EXT\n", "E_INVALID", "MPUB_EXT insufficient number of parameters"),
        (b"PUB_EXT a!b 0\n", "E_BAD_TOPIC", 'PUB_EXT topic name "a!b" is not valid'),
        (b"PUB_TRACE t 0\n\0\0\0\x08", "E_BAD_BODY", "PUB_TRACE invalid body size 8 with a trace id"),
        (b"PUB_TRACE t 0\n\xff\xff\xff\xff", "E_BAD_BODY", "PUB_TRACE invalid body size -1 with a trace id"),
        (b"PUB_TRACE t 0\n\0\0\0\x6d", "E_BAD_MESSAGE", "PUB_TRACE message too big 101 > 100"),
        (b"PUB_EXT t 0\n\0\0\0\x02", "E_BAD_BODY", "PUB_EXT invalid body size 2 with headers"),
        (b"PUB_EXT t 0\n\0\1\0\x66", "E_BAD_MESSAGE", "PUB_EXT message too big 101 > 100"),
        (b"PUB_EXT t 0\n\0\0\0\x03\0\1x", "E_BAD_BODY", "PUB_EXT nothing behind headers of 1 bytes"),
        (b"PUB_EXT t 0\n\0\0\0\x03\0\2x", "E_BAD_EXT", "PUB_EXT headers of 2 bytes in a body of 3"),
        (b"PUB_EXT t 0\n\0\0\0\x67\0\0" + b"x" * 101, "E_BAD_MESSAGE", "PUB_EXT message too big 101 > 100"),
        (b"MPUB_TRACE t 0\n" + items(9, 8), "E_BAD_BODY", "MPUB_TRACE invalid body size 8 with a trace id"),
        (b"MPUB_TRACE t 0\n" + items(109), "E_BAD_MESSAGE", "MPUB message too big 101 > 100"),
        (b"MPUB_TRACE t 0\n" + items(9, 109), "E_BAD_MESSAGE", "MPUB message too big 101 > 100"),
        (b"MPUB_TRACE t 0\n\0\0\1\x91", "E_BAD_BODY", "MPUB body too big 401 > 400"),
        (b"MPUB_EXT t 0\n" + items(2, 3), "E_BAD_BODY", "MPUB_EXT invalid body size 2 with headers"),
        (b"MPUB_EXT t 0\n" + items(3, 103), "E_BAD_MESSAGE", "MPUB_EXT message too big 101 > 100"),
        (b"MPUB_EXT t 0\n\0\0\0\x04\0\0\0\0", "E_BAD_BODY", "MPUB invalid message count 0"),
    ],
)
def test_what_is_refused(data, code, detail):
    assert parse(data)[-1] == Violation(code, detail)


@pytest.mark.parametrize("command", ["PUB_TRACE", "PUB_EXT", "MPUB_TRACE", "MPUB_EXT"])
def test_permission_to_publish_several_is_asked_before_their_bodies(command):
    parser = ServerConnection(LIMITS)
    parser.refusal_of = lambda asked, topic: ("E_UNAUTHORIZED", f"{asked} {topic}")
    events = parser.receive_data(b"  V2" + command.encode() + b" t 0\n")
    assert events == ([Violation("E_UNAUTHORIZED", f"{command} t")] if command.startswith("M") else [])


def test_the_largest_message_behind_the_longest_headers():
    limits = ServerLimits(max_msg_size=100, max_body_size=200_000)
    headers, body = b"h" * 65_535, b"x" * 100
    data = built.pub_ext("t", 0, headers, body) + built.mpub_ext("t", 0, [(headers, body), (b"", body)])
    assert [len(each) for event in parse(data, limits=limits) for each in event.bodies] == [65_637, 65_637, 102]
