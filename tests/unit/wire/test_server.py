"""The server's parser: a table of what each command gives, whole and byte by byte."""

import json
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flintmq.wire import commands
from flintmq.wire import server as wire
from flintmq.wire.server import (
    Auth,
    Close,
    CreateTopic,
    Cursor,
    Fetch,
    Finish,
    FinishRun,
    Identify,
    Nop,
    Offsets,
    Publish,
    Ready,
    Requeue,
    ServerConnection,
    ServerLimits,
    Subscribe,
    Touch,
    Violation,
    go_quote,
)

LIMITS = ServerLimits(max_msg_size=100, max_body_size=400)
ID = b"000000000000002a"
LONG = "a" * 64


def size(number):
    return struct.pack(">i", number)


def connection(*, subscribed=False, limits=LIMITS):
    parser = ServerConnection(limits)
    assert parser.receive_data(b"  V2") == []
    if subscribed:
        assert parser.receive_data(b"SUB t c\n") == [Subscribe("t", "c")]
    return parser


def feed(parser, data, step=None):
    """Parse ``data`` in pieces of ``step`` bytes, going on after IDENTIFY and AUTH."""
    events = []
    pieces = [data] if step is None else [data[i : i + step] for i in range(0, len(data), step)]
    for piece in pieces:
        found = parser.receive_data(piece)
        events += found
        while found and isinstance(found[-1], Identify | Auth):
            found = parser.resume()
            events += found
    return events


GOOD = [
    (b"IDENTIFY\n" + size(2) + b"{}", [Identify(b"{}")]),
    (b"AUTH\n" + size(6) + b"secret", [Auth(b"secret")]),
    (b"SUB t c\n", [Subscribe("t", "c")]),
    (b"SUB t c extra\r\n", [Subscribe("t", "c", wire.NOT_A_NUMBER, names_partition=True)]),
    (b"SUB t c -1\n", [Subscribe("t", "c", names_partition=True)]),
    (b"SUB t c 3\n", [Subscribe("t", "c", 3, names_partition=True)]),
    (b"SUB t c 1024\n", [Subscribe("t", "c", wire.NOT_A_NUMBER, names_partition=True)]),
    (b"SUB_ORDER t c 0\n", [Subscribe("t", "c", 0, "SUB_ORDER", names_partition=True)]),
    (b"SUB_ORDERED t c 0\n", [Subscribe("t", "c", 0, "SUB_ORDERED", names_partition=True)]),
    (b"SUB_ADVANCED t c\n", [Subscribe("t", "c", None, "SUB_ADVANCED")]),
    (b"SUB_ADVANCED t c 0\n", [Subscribe("t", "c", 0, "SUB_ADVANCED", names_partition=True)]),
    (
        b"SUB_ADVANCED t c 0 msgcount:5 x\n",
        [Subscribe("t", "c", 0, "SUB_ADVANCED", "msgcount:5", names_partition=True)],
    ),
    (b"SUB t c 0 msgcount:5\n", [Subscribe("t", "c", 0, names_partition=True)]),
    (
        b"PUB t 0\n" + size(1) + b"a" + b"PUB t 1\n" + size(1) + b"b" + b"PUB t\n" + size(1) + b"c",
        [
            Publish("PUB", "t", [b"a"], 1, 0, 0),
            Publish("PUB", "t", [b"b"], 1, 0, 1),
            Publish("PUB", "t", [b"c"], 1),
        ],
    ),
    (b"DPUB t 5 7\n" + size(1) + b"a", [Publish("DPUB", "t", [b"a"], 1, 5, 7)]),
    (b"SUB t.x-Y_1#ephemeral c#ephemeral\n", [Subscribe("t.x-Y_1#ephemeral", "c#ephemeral")]),
    (b"SUB " + LONG.encode() + b" c\n", [Subscribe(LONG, "c")]),
    (b"PUB t\n" + size(1) + b"a", [Publish("PUB", "t", [b"a"], 1)]),
    (b"PUB t\n" + size(100) + b"a" * 100, [Publish("PUB", "t", [b"a" * 100], 1)]),
    (b"DPUB t 1500\n" + size(1) + b"a", [Publish("DPUB", "t", [b"a"], 1, 1500)]),
    (b"DPUB t 3600000\n" + size(1) + b"a", [Publish("DPUB", "t", [b"a"], 1, 3_600_000)]),
    (b"DPUB t \n" + size(1) + b"a", [Publish("DPUB", "t", [b"a"], 1, 0)]),
    (commands.mpub("t", [b"a", b"bc"]), [Publish("MPUB", "t", [b"a", b"bc"], 1)]),
    (commands.mpub("t", [b"ab", b"cd", b"ef"]), [Publish("MPUB", "t", (b"ab", b"cd", b"ef"), 1)]),
    (b"NOP\n", [Nop()]),
    (b"NOP\r\n", [Nop()]),
    (b"INTERNAL_CREATE_TOPIC t 3\n", [CreateTopic("t", 3, False)]),
    (b"INTERNAL_CREATE_TOPIC t 0 TRUE\n", [CreateTopic("t", 0, True)]),
    (b"INTERNAL_CREATE_TOPIC t -1 0\n", [CreateTopic("t", None, False)]),
    (b"OFFSETS t\n", [Offsets("t", None)]),
    (b"OFFSETS t 17\n", [Offsets("t", 17)]),
    (commands.fetch("t", 3, 5, 7, 9, 11), [Fetch("t", 3, 5, 7, 9, 11)]),
    (commands.cursor("t", "c", 0, -1), [Cursor("t", "c", 0, -1)]),
    (commands.cursor("t", "c", 2, 17), [Cursor("t", "c", 2, 17)]),
]

SUBSCRIBED = [
    (b"RDY 5\n", [Ready(5)]),
    (b"RDY\n", [Ready(1)]),
    (b"RDY 2500\n", [Ready(2500)]),
    (b"RDY \n", [Ready(0)]),
    (b"FIN " + ID + b"\n", [FinishRun((42,))]),
    (b"FIN not-a-hex-number\n"[:4] + b"not_hexadecimal!\n", [Finish(b"not_hexadecimal!")]),
    (b"REQ " + ID + b" 0\n", [Requeue(ID, 0)]),
    (b"REQ " + ID + b" 99999999\n", [Requeue(ID, 99_999_999)]),
    (b"TOUCH " + ID + b"\n", [Touch(ID)]),
    (b"CLS\nRDY 5\nFIN " + ID + b"\n", [Close(), FinishRun((42,))]),
    (b"PUB t\n" + size(1) + b"a", [Publish("PUB", "t", [b"a"], 1)]),
]

BAD = [
    (b"nop\n", "E_INVALID", "invalid command nop"),
    (b"\n", "E_INVALID", "invalid command "),
    (b"FOO bar\n", "E_INVALID", "invalid command FOO"),
    (b"RDY 1\n", "E_INVALID", "cannot RDY in current state"),
    (b"FIN " + ID + b"\n", "E_INVALID", "cannot FIN in current state"),
    ((b"FIN " + ID + b"\n") * 3, "E_INVALID", "cannot FIN in current state"),
    (b"REQ " + ID + b" 1\n", "E_INVALID", "cannot REQ in current state"),
    (b"TOUCH " + ID + b"\n", "E_INVALID", "cannot TOUCH in current state"),
    (b"CLS\n", "E_INVALID", "cannot CLS in current state"),
    (b"SUB t\n", "E_INVALID", "SUB insufficient number of parameters"),
    (b"SUB  a b\n", "E_BAD_TOPIC", 'SUB topic name "" is not valid'),
    (b"SUB a* b\n", "E_BAD_TOPIC", 'SUB topic name "a*" is not valid'),
    (b"SUB a \xff\n", "E_BAD_CHANNEL", 'SUB channel name "\\xff" is not valid'),
    (b"SUB a" + LONG.encode() + b" c\n", "E_BAD_TOPIC", f'SUB topic name "a{LONG}" is not valid'),
    (b"PUB\n", "E_INVALID", "PUB insufficient number of parameters"),
    (b"PUB a$\n" + size(1) + b"x", "E_BAD_TOPIC", 'PUB topic name "a$" is not valid'),
    (b"PUB t\n" + size(0), "E_BAD_MESSAGE", "PUB invalid message body size 0"),
    (b"PUB t\n" + size(-1), "E_BAD_MESSAGE", "PUB invalid message body size -1"),
    (b"PUB t\n" + size(101), "E_BAD_MESSAGE", "PUB message too big 101 > 100"),
    (b"DPUB t\n", "E_INVALID", "DPUB insufficient number of parameters"),
    (b"DPUB t x\n", "E_INVALID", "DPUB could not parse timeout x"),
    (b"DPUB t -1\n", "E_INVALID", "DPUB could not parse timeout -1"),
    (b"DPUB t 3600001\n", "E_INVALID", "DPUB timeout 3600001 out of range 0-3600000"),
    (b"MPUB\n", "E_INVALID", "MPUB insufficient number of parameters"),
    (b"MPUB a$\n", "E_BAD_TOPIC", 'E_BAD_TOPIC MPUB topic name "a$" is not valid'),
    (b"MPUB t\n" + size(0), "E_BAD_BODY", "MPUB invalid body size 0"),
    (b"MPUB t\n" + size(401), "E_BAD_BODY", "MPUB body too big 401 > 400"),
    (b"MPUB t\n" + size(4) + size(0), "E_BAD_BODY", "MPUB invalid message count 0"),
    (b"MPUB t\n" + size(4) + size(80), "E_BAD_BODY", "MPUB invalid message count 80"),
    (b"MPUB t\n" + size(8) + size(1) + size(0), "E_BAD_MESSAGE", "MPUB invalid message(0) body size 0"),
    (b"MPUB t\n" + size(8) + size(1) + size(101), "E_BAD_MESSAGE", "MPUB message too big 101 > 100"),
    (b"IDENTIFY\n" + size(401), "E_BAD_BODY", "IDENTIFY body too big 401 > 400"),
    (b"IDENTIFY\n" + size(0), "E_BAD_BODY", "IDENTIFY invalid body size 0"),
    (b"IDENTIFY\n" + size(-5), "E_BAD_BODY", "IDENTIFY invalid body size -5"),
    (b"AUTH x\n", "E_INVALID", "AUTH invalid number of parameters"),
    (b"AUTH\n" + size(0), "E_BAD_BODY", "AUTH invalid body size 0"),
    (b"OFFSETS\n", "E_INVALID", "OFFSETS insufficient number of parameters"),
    (b"OFFSETS t x\n", "E_INVALID", "OFFSETS could not parse timestamp x"),
    (b"FETCH t\n", "E_INVALID", "FETCH insufficient number of parameters"),
    (b"FETCH t x\n", "E_INVALID", "FETCH could not parse partition x"),
    (b"INTERNAL_CREATE_TOPIC t\n", "E_INVALID", "INTERNAL_CREATE_TOPIC insufficient number of parameters"),
    (
        b"INTERNAL_CREATE_TOPIC t 0 maybe\n",
        "E_BAD_EXT",
        'INTERNAL_CREATE_TOPIC extend "maybe" is neither true nor false',
    ),
    (b"CURSOR t c 0\n", "E_INVALID", "CURSOR insufficient number of parameters"),
    (b"CURSOR t c 0 x\n", "E_INVALID", "CURSOR could not parse 0 x"),
    (b"CURSOR t c! 0 1\n", "E_BAD_CHANNEL", 'CURSOR channel name "c!" is not valid'),
]

BAD_SUBSCRIBED = [
    (b"SUB t c\n", "E_INVALID", "cannot SUB in current state"),
    (b"IDENTIFY\n", "E_INVALID", "cannot IDENTIFY in current state"),
    (b"AUTH\n", "E_INVALID", "cannot AUTH in current state"),
    (b"CLS\nCLS\n", "E_INVALID", "cannot CLS in current state"),
    (b"RDY 2501\n", "E_INVALID", "RDY count 2501 out of range 0-2500"),
    (b"RDY -1\n", "E_INVALID", "RDY could not parse count -1"),
    (b"RDY +1\n", "E_INVALID", "RDY could not parse count +1"),
    (b"RDY 1.5\n", "E_INVALID", "RDY could not parse count 1.5"),
    (b"RDY 99999999999999999999\n", "E_INVALID", "RDY could not parse count 99999999999999999999"),
    (b"FIN\n", "E_INVALID", "FIN insufficient number of params"),
    (b"FIN 1\n", "E_INVALID", "invalid message ID"),
    (b"REQ " + ID + b"\n", "E_INVALID", "REQ insufficient number of params"),
    (b"REQ " + ID + b" x\n", "E_INVALID", "REQ could not parse timeout x"),
    (b"REQ 1 1\n", "E_INVALID", "invalid message ID"),
    (b"TOUCH\n", "E_INVALID", "TOUCH insufficient number of params"),
    (b"TOUCH 12345\n", "E_INVALID", "invalid message ID"),
]


def plain(events):
    """Events with bodies as lists, so that both ways of splitting compare equal."""
    for event in events:
        if isinstance(event, Publish):
            event.bodies = list(event.bodies)
    return events


@pytest.mark.parametrize("step", [None, 1, 7])
@pytest.mark.parametrize(("data", "expected"), GOOD, ids=lambda v: repr(v)[:40])
def test_commands_of_a_fresh_connection(data, expected, step):
    assert plain(feed(connection(), data, step)) == plain(expected)


@pytest.mark.parametrize("step", [None, 1, 7])
@pytest.mark.parametrize(("data", "expected"), SUBSCRIBED, ids=lambda v: repr(v)[:40])
def test_commands_of_a_consumer(data, expected, step):
    assert feed(connection(subscribed=True), data, step) == expected


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize(("data", "code", "detail"), BAD, ids=lambda v: repr(v)[:40])
def test_violations_of_a_fresh_connection(data, code, detail, step):
    parser = connection()
    assert feed(parser, data + b"PUB t\n" + size(1) + b"a", step) == [Violation(code, detail)]
    assert parser.receive_data(b"NOP\n") == []


@pytest.mark.parametrize("step", [None, 1])
@pytest.mark.parametrize(("data", "code", "detail"), BAD_SUBSCRIBED, ids=lambda v: repr(v)[:40])
def test_violations_of_a_consumer(data, code, detail, step):
    events = feed(connection(subscribed=True), data, step)
    assert events[-1] == Violation(code, detail)


def test_wrong_magic():
    note = "bad protocol magic '  V9'"
    assert ServerConnection(LIMITS).receive_data(b"  V9NOP\n") == [Violation("E_BAD_PROTOCOL", "", note)]


@pytest.mark.parametrize(
    ("data", "magic", "hint"),
    [
        (b"PROXY TCP4 10.0.0.1 10.0.0.2 1 2\r\n", "'PROX'", "the PROXY protocol"),
        (b"\r\n\r\n\0\r\nQUIT\n", "'\\r\\n\\r\\n'", "the PROXY protocol"),
        (b"GET /ping HTTP/1.1\r\n\r\n", "'GET '", "--http-address"),
        (b"POST /pub?topic=t HTTP/1.1\r\n", "'POST'", "--http-address"),
        (b"\x16\x03\x01\x02\x00\x01", "'\\x16\\x03\\x01\\x02'", "tls_v1"),
        (b"  V1", "'  V1'", "this is no nsqlookupd"),
        (b"\n\x1b[2J", "'\\n\\x1b[2'", ""),
    ],
)
def test_what_came_instead_of_the_magic_is_for_the_log_alone(data, magic, hint):
    (violation,) = ServerConnection(LIMITS).receive_data(data)
    assert isinstance(violation, Violation)
    assert (violation.code, violation.detail) == ("E_BAD_PROTOCOL", "")
    assert violation.note.startswith(f"bad protocol magic {magic}{hint and ' - '}")
    assert hint in violation.note and violation.note.isprintable()


def test_a_line_without_end_closes_without_an_error_frame():
    events = feed(connection(), b"A" * (16 * 1024))  # as long with its end as NSQ's buffer, which has no room for it
    assert [type(event) for event in events] == [Violation]
    assert events[0].code == ""
    assert feed(connection(), b"A" * (16 * 1024 - 1)) == []


def test_a_run_of_fins_is_one_event_and_so_is_a_run_of_pubs():
    parser = connection(subscribed=True)
    lines = b"".join(b"FIN %016x\n" % n for n in range(100, 130))
    assert parser.receive_data(lines) == [FinishRun(tuple(range(100, 130)))]
    events = parser.receive_data((b"PUB t\n" + size(1) + b"a") * 3 + b"PUB u\n" + size(1) + b"b")
    assert events == [Publish("PUB", "t", [b"a"] * 3, 3), Publish("PUB", "u", [b"b"], 1)]


def test_a_run_ends_where_the_lines_do():
    parser = connection(subscribed=True)
    data = b"FIN %016x\n" % 1 + b"FIN %016x\n" % 2 + b"RDY 3\n" + b"FIN 00000000000000 7\n" + b"NOP\n"
    assert parser.receive_data(data)[:2] == [FinishRun((1, 2)), Ready(3)]


def test_commands_after_identify_wait_for_the_answer():
    parser = connection()
    assert parser.receive_data(b"IDENTIFY\n" + size(2) + b"{}SUB t c\n") == [Identify(b"{}")]
    assert parser.receive_data(b"RDY 1\n") == []
    assert parser.resume() == [Subscribe("t", "c"), Ready(1)]


def test_bytes_behind_an_upgrading_identify_are_handed_over():
    parser = connection()
    parser.receive_data(b"IDENTIFY\n" + size(2) + b"{}\x16\x03")
    parser.receive_data(b"\x01")
    assert parser.take_held() == b"\x16\x03\x01"


def test_without_tls_only_identify_is_legal():
    parser = connection()
    parser.tls_missing = True
    assert parser.receive_data(b"PUB t\n") == [Violation("E_INVALID", "cannot PUB in current state (TLS required)")]


def test_a_huge_body_is_refused_before_it_is_gathered():
    parser = connection(limits=ServerLimits())
    assert parser.receive_data(b"PUB t\n" + size(2**31 - 1) + bytes(1000))[0].code == "E_BAD_MESSAGE"
    assert parser.held_bytes == 0


def test_a_big_body_in_small_pieces_costs_one_join():
    parser = connection(limits=ServerLimits())
    body = bytes(1024 * 1024)
    data = b"PUB t\n" + size(len(body)) + body
    events = feed(parser, data, 1400)
    assert len(events) == 1
    assert events[0].bodies == [body]


@pytest.mark.parametrize(
    ("raw", "quoted"),
    [
        (b"a", '"a"'),
        (b'a"\\', '"a\\"\\\\"'),
        (b"\x00\x07\n\t\x7f", '"\\x00\\a\\n\\t\\x7f"'),
        ("\u00e9\u2028".encode(), '"\u00e9\\u2028"'),
        (b"\xff\xfe", '"\\xff\\xfe"'),
    ],
)
def test_go_quote(raw, quoted):
    assert go_quote(raw) == quoted


bodies_lists = st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=12)
stream_parts = st.one_of(
    bodies_lists.map(lambda bodies: commands.mpub("t", bodies)),
    st.binary(min_size=1, max_size=30).map(lambda body: commands.pub("t", body)),
    st.lists(st.integers(0, 2**64 - 1), min_size=1, max_size=9).map(
        lambda ids: commands.fins(b"%016x" % n for n in ids)
    ),
    st.just(b"NOP\n"),
    st.integers(0, 2500).map(commands.rdy),
)


@settings(max_examples=150, deadline=None)
@given(parts=st.lists(stream_parts, max_size=12), cuts=st.lists(st.integers(0, 600), max_size=8))
def test_any_split_gives_the_same_commands(parts, cuts):
    data = b"".join(parts)
    whole = flatten(connection(subscribed=True).receive_data(data))
    parser, start = connection(subscribed=True), 0
    pieces: list[wire.Event] = []
    for cut in [*sorted(cuts), len(data)]:
        pieces += parser.receive_data(data[start:cut]) if cut > start else []
        start = max(start, cut)
    assert flatten(pieces) == whole


def flatten(events):
    """Undo the joining of runs, which depends on how the bytes arrive."""
    flat: list[object] = []
    for event in events:
        if isinstance(event, FinishRun):
            flat += [("FIN", internal) for internal in event.ids]
        elif isinstance(event, Publish) and event.command == "PUB":
            flat += [("PUB", event.topic, body) for body in event.bodies]
        elif isinstance(event, Publish):
            flat.append(("MPUB", event.topic, list(event.bodies)))
        else:
            flat.append(event)
    return flat


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300), state=st.booleans())
def test_no_input_breaks_the_parser(data, state):
    parser = connection(subscribed=state)
    for event in feed(parser, data, 13):
        assert type(event) in wire.Event.__args__
    assert parser.held_bytes <= len(data)


def test_every_command_of_the_table_is_parsed():
    found = {(name.decode(), state) for state, routes in wire._ROUTES.items() for name in routes}
    assert found == {(name, state) for name, row in commands.COMMANDS.items() for state in row.states}
    assert json.dumps(sorted(commands.COMMANDS))


@pytest.mark.parametrize(
    ("data", "code", "detail"),
    [
        (b"PUB t\n", "E_BAD_MESSAGE", "PUB failed to read message body size"),
        (b"PUB t\n" + size(2) + b"x", "E_BAD_MESSAGE", "PUB failed to read message body"),
        (b"DPUB t 1\n" + size(2)[:3], "E_BAD_MESSAGE", "DPUB failed to read message body size"),
        (b"IDENTIFY\n" + size(2), "E_BAD_BODY", "IDENTIFY failed to read body"),
        (b"AUTH\n", "E_BAD_BODY", "AUTH failed to read body size"),
        (b"MPUB t\n" + size(2)[:3], "E_BAD_BODY", "MPUB failed to read body size"),
        (b"MPUB t\n" + size(20), "E_BAD_BODY", "MPUB failed to read message count"),
        (b"MPUB t\n" + size(20) + size(2), "E_BAD_MESSAGE", "MPUB failed to read message(0) body size"),
        (b"MPUB t\n" + size(20) + size(2) + size(2) + b"x", "E_BAD_MESSAGE", "MPUB failed to read message body"),
        (b"MPUB t\n" + size(2) + b"ab", "E_BAD_BODY", "MPUB failed to read message count"),
        (b"MPUB t\n" + size(4) + size(79), "E_BAD_MESSAGE", "MPUB failed to read message(0) body size"),
        (b"MPUB t\n" + size(9) + size(1) + size(2) + b"x", "E_BAD_MESSAGE", "MPUB failed to read message body"),
    ],
)
@pytest.mark.parametrize("step", [None, 1])
def test_a_stream_that_ends_in_a_body(data, code, detail, step):
    parser = connection()
    assert feed(parser, data, step) == []
    assert parser.receive_eof() == [Violation(code, detail)]
    assert parser.receive_eof() == []


@pytest.mark.parametrize("data", [b"", b"NOP\n", b"NO", b"PUB t", b"FETCH t 0\n"])
def test_a_stream_that_ends_elsewhere_is_no_violation(data):
    parser = connection()
    parser.receive_data(data)
    assert parser.receive_eof() == []


def test_a_stream_that_ends_before_the_magic_is_no_violation():
    parser = ServerConnection(LIMITS)
    assert parser.receive_data(b"  ") == []
    assert parser.receive_eof() == []


def test_a_stream_that_ends_behind_an_unanswered_identify():
    parser = connection()
    assert parser.receive_data(b"IDENTIFY\n" + size(2) + b"{}PUB t\n") == [Identify(b"{}")]
    assert parser.receive_eof() == []
    assert parser.resume() == [Violation("E_BAD_MESSAGE", "PUB failed to read message body size")]


def test_the_count_of_an_mpub_is_refused_before_its_body_is_there():
    assert connection().receive_data(b"MPUB t\n" + size(400) + size(0)) == [
        Violation("E_BAD_BODY", "MPUB invalid message count 0")
    ]


def test_without_heartbeats_there_is_no_sub():
    parser = connection()
    parser.heartbeats_disabled = True
    assert parser.receive_data(b"SUB\n") == [Violation("E_INVALID", "cannot SUB with heartbeats disabled")]


def test_rdy_behind_cls_is_ignored_whatever_it_says():
    parser = connection(subscribed=True)
    assert parser.receive_data(b"CLS\nRDY x\nRDY 100000\nRDY\nNOP\n") == [Close(), Nop()]


def test_an_id_in_upper_case_is_another_one():
    parser = connection(subscribed=True)
    assert parser.receive_data(b"FIN 000000000000002A\n") == [Finish(b"000000000000002A")]
    assert parser.receive_data(b"FIN %s\nFIN 000000000000002A\n" % ID) == [
        FinishRun((42,)),
        Finish(b"000000000000002A"),
    ]


def test_leading_zeros_do_not_count():
    assert connection(subscribed=True).receive_data(b"RDY " + b"0" * 5000 + b"7\n") == [Ready(7)]


def raw_line(command: bytes, internal: int, trace: int = 0, rest: bytes = b"") -> bytes:
    return command + b" " + struct.pack(">QQ", internal, trace) + rest + b"\n"


LINE_ENDS = int.from_bytes(b"\n \r\n\n \r\n", "big")


@pytest.mark.parametrize("step", [None, 1, 7, 21])
def test_ids_of_a_topic_with_partitions_are_bytes_of_any_value(step):
    parser = connection()
    feed(parser, b"SUB t c 0\n")
    parser.raw_ids = True
    ids = [2, LINE_ENDS, (1 << 50) + 2, 3]
    data = b"".join(raw_line(b"FIN", each, LINE_ENDS) for each in ids)
    data += raw_line(b"REQ", LINE_ENDS, 13, b" 250") + raw_line(b"TOUCH", LINE_ENDS, 13) + b"NOP\r\n"
    found = feed(parser, data, step)
    finished = [each for event in found if isinstance(event, wire.FinishRun) for each in event.ids]
    message_id = struct.pack(">QQ", LINE_ENDS, 13)
    assert finished == ids
    others = [event for event in found if not isinstance(event, wire.FinishRun)]
    assert others == [wire.Requeue(message_id, 250), wire.Touch(message_id), wire.Nop()]


def test_what_follows_a_raw_id_is_the_end_of_the_line_or_a_word():
    parser = connection()
    feed(parser, b"SUB t c 0\n")
    parser.raw_ids = True
    assert feed(parser, raw_line(b"FIN", 2, 0, b"x")) == [wire.Violation("E_INVALID", "invalid message ID")]


def test_the_line_of_a_repeated_pub_has_its_partition():
    parser = connection()
    line = b"PUB t 1\n" + size(1) + b"a"
    feed(parser, line)
    assert (parser.pub_topic, parser.pub_partition) == ("t", 1)
    assert parser.repeated_pub(line) == b"a"
    assert parser.repeated_pub(b"PUB t 2\n" + size(1) + b"a") is None
    assert feed(parser, line * 2) == [Publish("PUB", "t", [b"a", b"a"], 2, 0, 1)]
    feed(parser, b"PUB t\n" + size(1) + b"a")
    assert (parser.pub_topic, parser.pub_partition) == ("t", None)
