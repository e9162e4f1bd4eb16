"""Offsets JSON: sorted at every level, exclusive ends, and what users may write."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import OptionError
from flintmq.spark.offsets import RESERVED_TOPICS, PartitionKey, Position, entries_of, from_json, parse_given, to_json

NAMES = st.from_regex(r"[.a-zA-Z0-9_-]{1,20}(#ephemeral)?", fullmatch=True).filter(
    lambda name: name not in RESERVED_TOPICS
)
KEYS = st.builds(PartitionKey, NAMES, st.sampled_from(["127.0.0.1:4150", "[::1]:4150", "a.b:1"]), st.integers(0, 1023))
POSITIONS = st.builds(Position, st.integers(0, (1 << 50) - 1), st.from_regex(r"[0-9a-f]{16}", fullmatch=True))


def test_the_form_documented():
    offsets = {
        PartitionKey("flights", "127.0.0.1:4150", 0): Position(336_777, "0000018f3c5a7b21"),
        PartitionKey("flights", "127.0.0.1:4150", 10): Position(7, "0000018f3c5a7b22"),
        PartitionKey("flights", "127.0.0.1:4150", 2): Position(1, "0000018f3c5a7b23"),
        PartitionKey("a", "host:1", 0): Position(5, "0000018f3c5a7b24"),
    }
    assert json.dumps(to_json(offsets)) == (
        '{"_log": {"a": {"host:1/0": "0000018f3c5a7b24"}, "flights": {"127.0.0.1:4150/0": "0000018f3c5a7b21", '
        '"127.0.0.1:4150/10": "0000018f3c5a7b22", "127.0.0.1:4150/2": "0000018f3c5a7b23"}}, '
        '"a": {"host:1/0": 5}, '
        '"flights": {"127.0.0.1:4150/0": 336777, "127.0.0.1:4150/10": 7, "127.0.0.1:4150/2": 1}}'
    )


@given(st.dictionaries(KEYS, POSITIONS, max_size=8), st.randoms())
def test_equal_offsets_are_equal_text_and_come_back(offsets, random):
    text = json.dumps(to_json(offsets))
    assert text == json.dumps(json.loads(text), sort_keys=True)
    items = list(offsets.items())
    random.shuffle(items)
    assert json.dumps(to_json(dict(items))) == text
    assert from_json(json.loads(text)) == offsets


def test_no_partition_yet():
    assert from_json(to_json({})) == {}
    assert from_json({}) == {}
    assert entries_of({}) == {}


def test_where_partitions_enter_is_part_of_an_end():
    old, new = PartitionKey("t", "a:1", 0), PartitionKey("u", "a:1", 0)
    ends = {old: Position(9, "00000000000000a1"), new: Position(7, "00000000000000b2")}
    entering = {new: Position(3, "00000000000000b2")}
    end = json.loads(json.dumps(to_json(ends, entering)))
    assert json.dumps(end) == (
        '{"_from": {"u": {"a:1/0": 3}}, '
        '"_log": {"t": {"a:1/0": "00000000000000a1"}, "u": {"a:1/0": "00000000000000b2"}}, '
        '"t": {"a:1/0": 9}, "u": {"a:1/0": 7}}'
    )
    assert (from_json(end), entries_of(end)) == (ends, entering)


def test_given_offsets():
    given_offsets = parse_given("startingOffsets", '{"t": {"a:1/0": 5, "1": -1}, "u": {"0": -2}}')
    assert given_offsets.sequence(PartitionKey("t", "a:1", 0)) == 5
    assert given_offsets.sequence(PartitionKey("t", "b:1", 0)) is None
    assert given_offsets.sequence(PartitionKey("t", "b:1", 1)) == -1
    assert given_offsets.sequence(PartitionKey("u", "b:1", 0)) == -2
    assert given_offsets.log_id(PartitionKey("t", "a:1", 0)) is None


def test_offsets_of_a_checkpoint_may_be_pasted():
    key = PartitionKey("t", "a:1", 0)
    position = {key: Position(9, "00000000000000a1")}
    pasted = parse_given("startingOffsets", json.dumps(to_json(position, position)))
    assert (pasted.sequence(key), pasted.log_id(key)) == (9, "00000000000000a1")


@pytest.mark.parametrize(
    "text",
    ['{"t": 5}', '{"t": {"0": "5"}}', '{"t": {"0": -3}}', '{"t": {"0": true}}', '{"t": {"a:1": 4}}', '{"_log": 1}'],
)
def test_other_forms_are_refused(text):
    with pytest.raises(OptionError, match="startingOffsets"):
        parse_given("startingOffsets", text)
