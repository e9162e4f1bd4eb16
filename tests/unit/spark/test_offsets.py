"""Offsets JSON: sorted at every level, exclusive ends, and what users may write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import OptionError
from flintmq.spark.errors import BadCheckpoint
from flintmq.spark.offsets import (
    RESERVED_TOPICS,
    Offsets,
    PartitionKey,
    Place,
    entries_of,
    from_json,
    is_current,
    parse_given,
    times_of,
    to_json,
)

NAMES = st.from_regex(r"[.a-zA-Z0-9_-]{1,20}(#ephemeral)?", fullmatch=True).filter(
    lambda name: name not in RESERVED_TOPICS
)
LOG_IDS = st.from_regex(r"[0-9a-f]{16}", fullmatch=True)
KEYS = st.builds(PartitionKey, NAMES, st.integers(0, 1023), LOG_IDS)
A, B, C, D = (f"00000000000000{number}" for number in ("a1", "b2", "c3", "d4"))


def test_the_form_documented():
    offsets = {
        PartitionKey("flights", 0, "0000018f3c5a7b21"): 336_777,
        PartitionKey("flights", 10, "0000018f3c5a7b22"): 7,
        PartitionKey("flights", 2, "0000018f3c5a7b23"): 1,
        PartitionKey("a", 0, "0000018f3c5a7b24"): 5,
    }
    assert json.dumps(to_json(offsets)) == (
        '{"_log": 3, "a": {"0/0000018f3c5a7b24": 5}, '
        '"flights": {"0/0000018f3c5a7b21": 336777, "10/0000018f3c5a7b22": 7, "2/0000018f3c5a7b23": 1}}'
    )
    key = PartitionKey("flights", 0, "0000018f3c5a7b21")
    timed = to_json({key: 336_777}, {key: 1}, {key: 1_767_225_600_123_456_789})
    assert json.dumps(timed) == (
        '{"_from": {"flights": {"0/0000018f3c5a7b21": 1}}, "_log": 3, '
        '"_times": {"flights": {"0/0000018f3c5a7b21": 1767225600123456789}}, '
        '"flights": {"0/0000018f3c5a7b21": 336777}}'
    )
    assert (from_json(timed), times_of(timed)) == ({key: 336_777}, {key: 1_767_225_600_123_456_789})
    assert times_of({"_log": 2, "flights": {"0/0000018f3c5a7b21": 5}}) == {}


@pytest.mark.slow
@given(st.dictionaries(KEYS, st.integers(0, (1 << 50) - 1), max_size=8), st.randoms())
def test_equal_offsets_are_equal_text_and_come_back(offsets, random):
    text = json.dumps(to_json(offsets))
    assert text == json.dumps(json.loads(text), sort_keys=True)
    items = list(offsets.items())
    random.shuffle(items)
    assert json.dumps(to_json(dict(items))) == text
    assert from_json(json.loads(text)) == offsets
    assert is_current(json.loads(text))


def test_no_partition_yet():
    assert from_json(to_json({})) == {}
    assert from_json({}) == {}
    assert entries_of({}) == {}


def test_where_partitions_enter_is_part_of_an_end():
    old, new = PartitionKey("t", 0, A), PartitionKey("u", 0, B)
    ends, entering = {old: 9, new: 7}, {new: 3}
    end = json.loads(json.dumps(to_json(ends, entering)))
    assert json.dumps(end) == (
        '{"_from": {"u": {"0/00000000000000b2": 3}}, "_log": 3, '
        '"t": {"0/00000000000000a1": 9}, "u": {"0/00000000000000b2": 7}}'
    )
    assert (from_json(end), entries_of(end)) == (ends, entering)


BEFORE = {
    "_from": {"u": {"[::1]:4150/3": 4}},
    "_log": {"t": {"a:1/0": A, "b:1/0": B}, "u": {"[::1]:4150/3": C}},
    "t": {"a:1/0": 9, "b:1/0": 5},
    "u": {"[::1]:4150/3": 7},
}
"""As releases wrote it that named logs by address."""


def test_the_form_before_is_understood():
    t, t2, u = PartitionKey("t", 0, A), PartitionKey("t", 0, B), PartitionKey("u", 3, C)
    assert from_json(BEFORE) == {t: 9, t2: 5, u: 7}
    assert entries_of(BEFORE) == {u: 4}
    assert not is_current(BEFORE)
    assert from_json({"_log": {}}) == {}, "a query that has begun and read nothing"
    twice = {"_log": {"t": {"a:1/0": A, "localhost:1/0": A}}, "t": {"a:1/0": 9, "localhost:1/0": 5}}
    assert from_json(twice) == {t: 9}, "all of it below 9 was read"


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ({"_log": 4, "t": {"0/00000000000000a1": 4}}, "form 4 of its offsets is not known here"),
        ({"t": {"0": 4}}, "form None"),
        ({"_log": 2, "t": {"a:1/0": 4}}, "'a:1/0' is not <partition>/<log id>"),
        ({"_log": {"t": {"a:1/0": A}}, "t": {"b:1/0": 4}}, "b:1/0"),
        ({"_log": 2, "t": {"0/00000000000000a1": "x"}}, "x"),
        ({"_log": 2, "t": 5}, "int"),
        ({"_log": 3, "t": 5}, "int"),
    ],
)
def test_a_checkpoint_of_something_else(offsets, words):
    with pytest.raises(BadCheckpoint, match=words) as caught:
        from_json(offsets)
    assert "choose another checkpointLocation" in str(caught.value)


def test_given_offsets():
    given_offsets = parse_given("startingOffsets", '{"t": {"a:1/0": 5, "1": -1}, "u": {"0": -2}}')
    assert given_offsets.sequence(PartitionKey("t", 0, A), "a:1") == 5
    assert given_offsets.sequence(PartitionKey("t", 0, A), "b:1") is None
    assert given_offsets.sequence(PartitionKey("t", 1, A), "b:1") == -1
    assert given_offsets.sequence(PartitionKey("u", 0, A), "b:1") == -2
    assert given_offsets.gone([]) == {}


def test_offsets_of_a_checkpoint_may_be_pasted():
    key, other = PartitionKey("t", 0, A), PartitionKey("t", 0, B)
    offsets: Offsets = {key: 9}
    pasted = parse_given("startingOffsets", json.dumps(to_json(offsets, offsets, offsets)))
    assert (pasted.sequence(key, "a:1"), pasted.sequence(other, "a:1")) == (9, None)
    assert pasted.gone([other]) == {key: 9}
    pasted.check("startingOffsets", {other: Place("a:1", 1, 2)})


def test_offsets_of_a_checkpoint_of_before_name_logs_as_well():
    """Wherever they are now; who has that address by now may have another log."""
    pasted = parse_given("startingOffsets", json.dumps(BEFORE))
    t, t2, u = PartitionKey("t", 0, A), PartitionKey("t", 0, B), PartitionKey("u", 3, C)
    stranger = PartitionKey("t", 0, D)
    assert [pasted.sequence(key, "elsewhere:1") for key in (t, t2, u)] == [9, 5, 7]
    assert pasted.sequence(stranger, "a:1") is None
    assert pasted.gone([t, u, stranger]) == {t2: 5}
    pasted.check("startingOffsets", {t: Place("elsewhere:1", 1, 10), u: Place("elsewhere:1", 1, 8)})


@pytest.mark.parametrize(
    "text",
    [
        '{"_log": {"t": {"a:1/0": 5}}}',
        '{"_log": {"t": {"0": "x"}}}',
        '{"t": 5}',
        '{"t": {"0": "5"}}',
        '{"t": {"0": -3}}',
        '{"t": {"0": true}}',
        '{"t": {"a:1": 4}}',
        '{"_log": 1}',
    ],
)
def test_other_forms_are_refused(text):
    with pytest.raises(OptionError, match="startingOffsets"):
        parse_given("startingOffsets", text)
