"""The redesigned NSQ's commands, answers and messages, byte by byte (Youzan's TCP protocol)."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.unit.wire import built

from flintmq.errors import LocalProtocolError, RemoteProtocolError
from flintmq.wire import commands, extended
from flintmq.wire.extended import Extension, Stored, parse_stored, split_body, split_id, stored_reply


def test_commands_name_the_partition():
    assert commands.sub("t", "c", 3) == b"SUB t c 3\n"
    assert commands.pub("t", b"xy", 0) == b"PUB t 0\n\0\0\0\x02xy"
    assert commands.mpub("t", [b"x"], 7) == b"MPUB t 7\n\0\0\0\x09\0\0\0\x01\0\0\0\x01x"
    assert extended.sub_order("t", "c", 3) == b"SUB_ORDER t c 3\n"
    assert extended.sub_order("t", "c", 3, extended.SUB_ORDERED) == b"SUB_ORDERED t c 3\n"
    assert extended.sub_advanced("t", "c") == b"SUB_ADVANCED t c\n"
    assert extended.sub_advanced("t", "c", 3) == b"SUB_ADVANCED t c 3\n"
    assert extended.sub_advanced("t", "c", 3, "timestamp:17") == b"SUB_ADVANCED t c 3 timestamp:17\n"
    assert extended.sub_advanced("t", "c", None, "msgcount:1") == b"SUB_ADVANCED t c -1 msgcount:1\n"
    assert extended.sub_advanced("t", "c", 0, "special:-1") == b"SUB_ADVANCED t c 0 special:-1\n"


def test_traced_commands():
    assert built.pub_trace("t", 1, 12345, b"traced") == (
        b"PUB_TRACE t 1\n" + b"\0\0\0\x0e" + b"\0\0\0\0\0\0\x30\x39" + b"traced"
    )
    assert built.mpub_trace("t", 1, [(1, b"a"), (2, b"bc")]) == (
        b"MPUB_TRACE t 1\n" + b"\0\0\0\x1f" + b"\0\0\0\x02"
        b"\0\0\0\x09" + b"\0\0\0\0\0\0\0\x01" + b"a"
        b"\0\0\0\x0a" + b"\0\0\0\0\0\0\0\x02" + b"bc"
    )  # fmt: skip


def test_commands_with_headers():
    assert built.pub_ext("t", 0, b"{}", b"x") == b"PUB_EXT t 0\n" + b"\0\0\0\x05" + b"\0\x02{}" + b"x"
    assert built.mpub_ext("t", 0, [(b"{}", b"x"), (b"", b"y")]) == (
        b"MPUB_EXT t 0\n" + b"\0\0\0\x14" + b"\0\0\0\x02" + b"\0\0\0\x05\0\x02{}x" + b"\0\0\0\x03\0\0y"
    )


def test_the_answer_that_was_seen():
    """Trace id 12345, body "traced" -> internal id 6, offset 135, raw size 36."""
    data = b"OK" + b"\0\0\0\0\0\0\0\x06" + b"\0\0\0\0\0\0\x30\x39" + b"\0\0\0\0\0\0\0\x87" + b"\0\0\0\x24"
    assert len(data) == 30
    assert parse_stored(data) == Stored(6, 12345, 135, 36)
    assert stored_reply(Stored(6, 12345, 135, 36)) == data
    assert parse_stored(b"OK") is None
    assert split_id(b"\0\x04\0\0\0\0\0\x02" + b"\0\0\0\0\0\0\x30\x39") == ((1 << 50) + 2, 12345)


@pytest.mark.parametrize("data", [b"", b"NO", b"OK1", b"OK" + bytes(27), b"OK" + bytes(29), b"XX" + bytes(28)])
def test_other_answers_are_none_of_nsqd(data: bytes):
    with pytest.raises(RemoteProtocolError, match="traced publish"):
        parse_stored(data)


@pytest.mark.parametrize(
    ("data", "is_extended", "is_ordered", "expected"),
    [
        (b"body", False, False, (Extension(0, b"", -1, 0), b"body")),
        (b"\0" + b"body", True, False, (Extension(0, b"", -1, 0), b"body")),
        (b"\x04\0\x02{}" + b"body", True, False, (Extension(4, b"{}", -1, 0), b"body")),
        (b"\x02\0\x03tag" + b"", True, False, (Extension(2, b"tag", -1, 0), b"")),
        (b"\0\0\0\0\0\0\0\x87\0\0\0\x24body", False, True, (Extension(0, b"", 135, 36), b"body")),
        (b"\x04\0\x02{}\0\0\0\0\0\0\0\x87\0\0\0\x24b", True, True, (Extension(4, b"{}", 135, 36), b"b")),
    ],
)
def test_what_stands_in_front_of_a_body(
    data: bytes, is_extended: bool, is_ordered: bool, expected: tuple[Extension, bytes]
):
    assert split_body(data, is_extended, is_ordered) == expected
    assert built.joined_body(*expected, is_extended, is_ordered) == data


@given(
    st.sampled_from([0, 2, 4]), st.binary(max_size=70), st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1),
    st.binary(max_size=40), st.booleans(), st.booleans(),
)  # fmt: skip
def test_a_body_that_is_cut_is_told_or_shorter(
    version: int, headers: bytes, offset: int, raw_size: int, body: bytes, is_extended: bool, is_ordered: bool
):
    """Round trip, and no cut in front of the body is taken for a message."""
    extension = Extension(
        version if is_extended else 0,
        headers if is_extended and version else b"",
        offset if is_ordered else -1,
        raw_size if is_ordered else 0,
    )
    data = built.joined_body(extension, body, is_extended, is_ordered)
    assert split_body(data, is_extended, is_ordered) == (extension, body)
    for size in range(len(data) - len(body)):
        with pytest.raises(RemoteProtocolError, match="says that it has"):
            split_body(data[:size], is_extended, is_ordered)


@pytest.mark.parametrize(
    ("build", "code"),
    [
        (lambda: commands.sub("t", "c", -1) and commands.pub("t", b"x", -1), "E_BAD_PARTITION"),
        (lambda: extended.sub_order("t", "c", -1), "E_BAD_PARTITION"),
        (lambda: extended.sub_order("t", "?", 1), "E_BAD_CHANNEL"),
        (lambda: extended.sub_advanced("t", "?", 1), "E_BAD_CHANNEL"),
        (lambda: extended.sub_advanced("t", "c", -1), "E_BAD_PARTITION"),
        (lambda: extended.sub_advanced("t", "c", 1, "msgcount:-1"), "E_INVALID"),
        (lambda: extended.sub_advanced("t", "c", 1, "special:-1\n"), "E_INVALID"),
        (lambda: built.pub_trace("?", 1, 1, b"x"), "E_BAD_TOPIC"),
        (lambda: built.pub_trace("t", 1, -1, b"x"), "INVALID_TRACE_ID"),
        (lambda: built.pub_trace("t", 1, 2**64, b"x"), "INVALID_TRACE_ID"),
        (lambda: built.pub_trace("t", 1, 1, b""), "E_BAD_MESSAGE"),
        (lambda: built.pub_ext("t", 1, b"{}", b""), "E_BAD_MESSAGE"),
        (lambda: built.pub_ext("t", 1, b"x" * 65536, b"x"), "E_BAD_EXT"),
        (lambda: built.mpub_ext("t", 1, []), "E_BAD_MESSAGE"),
        (lambda: built.mpub_trace("t", 1, []), "E_BAD_MESSAGE"),
    ],
)
def test_what_would_be_refused_is_not_sent(build: object, code: str):
    with pytest.raises(LocalProtocolError) as caught:
        build()  # type: ignore[operator]
    assert caught.value.code == code
