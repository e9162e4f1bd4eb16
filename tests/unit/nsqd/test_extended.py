"""What is stored of trace ids and headers, what consumers are sent, and what the answers say."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.batch import EXTENDED, RAW_IDS, decode_batch, encode_batch
from flintmq.broker.partition import Partition
from flintmq.broker.topic import Topic
from flintmq.errors import RemoteProtocolError, StorageError
from flintmq.message import LOCATION, body_position, headers_of, hex_id
from flintmq.nsqd.extended import check_support, layout_of, stored_form, trace_id_bytes, trace_of
from flintmq.nsqd.partitions import to_publish
from flintmq.nsqd.pending_reply import PendingReply, Receipt
from flintmq.storage.memory_log import MemoryLog
from flintmq.topic_meta import EXTENDED_PLAIN, PLAIN, TopicMeta
from flintmq.wire.commands import COMMANDS
from flintmq.wire.extended import parse_stored
from flintmq.wire.frames import OK_FRAME
from flintmq.wire.server import Publish, Subscribe

PARTED = TopicMeta(partition_num=1)
HEADERED = TopicMeta(partition_num=1, extend_support=True)
HEADERS = st.one_of(
    st.just(b""),
    st.just(b"{}"),
    st.dictionaries(st.text(max_size=5), st.one_of(st.text(max_size=5), st.integers(), st.none()), max_size=3).map(
        lambda found: json.dumps({key: value for key, value in found.items() if key != "##trace_id"}).encode()
    ),
    st.integers(0, 2**64 - 1).map(lambda number: b'{"##trace_id":"%d"}' % number),
)


def headed(headers, body):
    return len(headers).to_bytes(2, "big") + headers + body


def publish(command, bodies):
    return Publish(command, "t", bodies, 1, front=COMMANDS[command].body.front)


def topic(meta=HEADERED, name="t"):
    return Topic(name, {0: Partition(name, 0, MemoryLog(0, 10**9))}, meta=meta)


def frames(form, meta):
    """What consumers get of stored messages."""
    layout = (RAW_IDS if meta.is_partitioned else 0) | (EXTENDED if meta.extend_support else 0)
    batch = decode_batch(encode_batch(1, 0, 1, form.bodies, layout=layout))
    return [bytes(batch.frames(number, number + 1)) for number in range(batch.first, batch.end)]


# -- what is stored ----------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(HEADERS, st.binary(min_size=1, max_size=20)), min_size=1, max_size=8), st.booleans())
def test_headers_are_stored_as_they_came(messages, is_partitioned):
    meta = HEADERED if is_partitioned else EXTENDED_PLAIN
    event = publish("MPUB_EXT", [headed(*message) for message in messages])
    form = stored_form(event, meta)
    for (headers, body), trace, frame in zip(messages, form.traces, frames(form, meta), strict=True):
        assert headers_of(frame) == ((4, headers) if headers else (0, b""))
        assert frame[body_position(frame) :] == body
        given_id = json.loads(headers).get("##trace_id") if headers else None
        assert trace == (None if given_id is None else int(given_id).to_bytes(8, "big"))
        if is_partitioned:
            assert frame[18:34] == (int.from_bytes(frame[18:26], "big")).to_bytes(8, "big") + (trace or bytes(8))
        else:
            assert frame[18:34] in {hex_id(number) for number in range(1, 10)}


LIKE_BRACKETS = st.text('[]{}"\\a', max_size=4)
VALUES = st.recursive(
    LIKE_BRACKETS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(LIKE_BRACKETS, inner, max_size=3)),
    max_leaves=10,
)


def depth_of(value):
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(depth_of, inner), default=0)


@given(VALUES, st.integers(0, 70), st.booleans())
def test_headers_are_taken_to_a_depth_whatever_their_texts_look_like(value, wrapped_count, is_last_alone):
    for number in range(wrapped_count):
        value = [value] if number % 3 else {"]": value}
    headers = json.dumps({"k": value}).encode()
    if is_last_alone:  # of equal names the last one counts, and yet all of it has to be read
        headers = headers[:-1] + b',"k":0}'
    if 1 + depth_of(value) <= 64:
        assert trace_of("PUB_EXT", headers) is None
        return
    with pytest.raises(RemoteProtocolError, match="headers are beyond a limit: nested deeper than 64"):
        trace_of("PUB_EXT", headers)


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.binary(min_size=1)), min_size=1, max_size=8), st.booleans())
def test_trace_ids_are_stored(messages, has_headers):
    meta = HEADERED if has_headers else PARTED
    bodies = [trace_id.to_bytes(8, "big") + body for trace_id, body in messages]
    form = stored_form(publish("MPUB_TRACE", bodies), meta)
    for (trace_id, body), trace, frame in zip(messages, form.traces, frames(form, meta), strict=True):
        assert frame[26:34] == trace == trace_id.to_bytes(8, "big")
        assert frame[body_position(frame) if has_headers else 34 :] == body


@pytest.mark.parametrize(
    "headers", [b"{", b"[]", b"1", b'"x"', b"null", b"{}{}", b"\xff", b'{"k":"\xff"}', b'{"k":' * 9999]
)
def test_headers_have_to_be_a_json_object(headers):
    with pytest.raises(RemoteProtocolError, match="E_INVALID_JSON_HEADER PUB_EXT headers") as refused:
        trace_of("PUB_EXT", headers)
    assert not refused.value.fatal


@pytest.mark.parametrize("value", [None, 5, "", "-1", "1.5", "x", str(2**64), "1" * 10_000, "²", "٣", True, ["1"]])
def test_trace_ids_that_are_none(value):
    with pytest.raises(RemoteProtocolError, match="INVALID_TRACE_ID") as refused:
        trace_id_bytes("PUB_EXT", value)
    assert not refused.value.fatal


@pytest.mark.parametrize(
    ("value", "number"), [("0", 0), ("007", 7), ("0" * 5000 + "1", 1), (str(2**64 - 1), 2**64 - 1)]
)
def test_trace_ids(value, number):
    assert trace_id_bytes("PUB_EXT", value) == number.to_bytes(8, "big")


@pytest.mark.parametrize(
    ("command", "meta", "is_taken"),
    [
        ("PUB_TRACE", PLAIN, False),
        ("PUB_TRACE", EXTENDED_PLAIN, False),
        ("PUB_TRACE", PARTED, True),
        ("PUB_TRACE", HEADERED, True),
        ("PUB_EXT", PLAIN, False),
        ("PUB_EXT", PARTED, False),
        ("PUB_EXT", EXTENDED_PLAIN, True),
        ("PUB_EXT", HEADERED, True),
    ],
)
def test_which_topics_have_room(command, meta, is_taken):
    topics = {"t": topic(meta)}
    event = publish(command, [b""])
    if is_taken:
        assert to_publish(topics, event) is topics["t"].first_partition
        return
    with pytest.raises(RemoteProtocolError, match="E_EXT_NOT_SUPPORT") as refused:
        to_publish(topics, event)
    assert not refused.value.fatal


def test_no_topic_is_created():
    with pytest.raises(RemoteProtocolError, match="E_TOPIC_NOT_EXIST") as refused:
        to_publish({}, publish("PUB_EXT", [b""]))
    assert refused.value.fatal


# -- what the answers say ----------------------------------------------------------------------------------------------


def published(meta, bodies, before=()):
    partition = topic(meta).first_partition
    for body in before:
        partition.publish((body,), 0)
    return partition, partition.publish(bodies, 0, is_stored_form=True)


def answer(group, command, traces, bodies):
    is_several = command.startswith("M")
    replies = 1 if is_several else len(bodies)
    return PendingReply(group, command, replies, receipt=Receipt(group, traces, bodies, is_several))


def answers(slot):
    """Each frame taken apart; None for OK."""
    found, data = [], slot.frames()
    while data:
        size = 4 + int.from_bytes(data[:4], "big")
        found.append(parse_stored(data[8:size]))
        data = data[size:]
    return found


@pytest.mark.parametrize("meta", [PARTED, HEADERED, EXTENDED_PLAIN])
def test_answers_say_where_messages_are(meta):
    front = bytes(8) if meta.is_partitioned else b""
    bodies = [front + b"\0" + b"x" * number for number in range(4)]
    partition, group = published(meta, bodies, before=[b"before"] * 2)
    traces = [b"\0\0\0\0\0\0\0\1", None, b"\0\0\0\0\0\0\0\3", b"\xff" * 8]
    slot = answer(group, "PUB_EXT", traces, bodies)
    partition.publish((b"behind",), 0)
    partition.write_pending(1)
    batch = partition.log.read(1)
    expected = []
    for number, trace in enumerate(traces, 3):
        size = len(batch.frames(number, number + 1))
        where = (number, int.from_bytes(trace or b"", "big"), batch.offset_of(number), size)
        expected.append(None if trace is None else where)
    assert answers(slot) == expected
    assert slot.receipt.stored() == expected[0]


def test_several_have_one_answer():
    bodies = [bytes(8) + b"x" * number for number in range(1, 4)]
    partition, group = published(PARTED, bodies, before=[b"before"])
    slot = answer(group, "MPUB_TRACE", [b"\0" * 8] * 3, bodies)
    partition.write_pending(1)
    assert answers(slot) == [(2, 0, 34 + 6, 3 * 34 + 6)]


def test_of_a_topic_that_was_deleted_nothing_is_said():
    bodies = [bytes(8) + b"x"] * 2
    partition, group = published(PARTED, bodies)
    slot = answer(group, "PUB_TRACE", [b"\0" * 8] * 2, bodies)
    partition.delete()
    assert group.ended
    assert slot.frames() == OK_FRAME * 2


def test_what_failed_is_answered_by_its_family():
    bodies = [bytes(8) + b"x"]
    _, group = published(PARTED, bodies)
    group.end(StorageError("disk"))
    slot = answer(group, "PUB_TRACE", [b"\0" * 8], bodies)
    assert slot.error_frame()[8:] == b"E_PUB_FAILED PUB failed disk"
    assert not slot.is_fatal
    assert PendingReply(published(EXTENDED_PLAIN, [b"\0x"])[1], "PUB").is_fatal


# -- what consumers are sent -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("meta", "knows_headers", "refusal"),
    [
        (PLAIN, False, None),
        (PLAIN, True, "E_SUB_EXTEND_FORBIDDON"),
        (PARTED, False, None),
        (PARTED, True, "E_SUB_EXTEND_FORBIDDON"),
        (HEADERED, False, "E_SUB_EXTEND_NEED"),
        (HEADERED, True, None),
        (EXTENDED_PLAIN, False, None),
        (EXTENDED_PLAIN, True, None),
        (None, False, None),
        (None, True, None),
    ],
)
def test_who_may_subscribe(meta, knows_headers, refusal):
    topics = {} if meta is None else {"t": topic(meta)}
    if refusal is None:
        check_support(topics, Subscribe("t", "c"), knows_headers)
        return
    with pytest.raises(RemoteProtocolError, match=refusal) as refused:
        check_support(topics, Subscribe("t", "c"), knows_headers)
    assert refused.value.fatal


@pytest.mark.parametrize("is_located", [False, True])
@pytest.mark.parametrize("knows_headers", [False, True])
@pytest.mark.parametrize("headers", [b"", b'{"k":"v"}'])
def test_layouts_of_a_plain_topic_with_headers(is_located, knows_headers, headers):
    (frame,) = frames(stored_form(publish("PUB_EXT", [headed(headers, b"body")]), EXTENDED_PLAIN), EXTENDED_PLAIN)
    layout = layout_of(EXTENDED_PLAIN, is_located, knows_headers)
    sent = frame if layout is None else layout(frame, 1234)
    front = (b"\4" + headed(headers, b"") if headers else b"\0") if knows_headers else b""
    place = LOCATION.pack(1234, len(frame)) if is_located else b""
    assert sent == (len(sent) - 4).to_bytes(4, "big") + frame[4:34] + front + place + b"body"


def test_layouts_of_other_topics():
    assert layout_of(PLAIN, False, False) is layout_of(PARTED, False, False) is layout_of(HEADERED, False, True) is None
    assert layout_of(PLAIN, True, False) is layout_of(PARTED, True, False)
