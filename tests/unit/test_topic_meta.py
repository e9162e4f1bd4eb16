"""The parameters of /topic/create: ranges, defaults, and that a query says all that a topic is."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.topic_meta import (
    PLAIN,
    BadTopicMeta,
    TopicMeta,
    asks_for_partitions,
    changed_meta,
    decode_meta,
    encode_meta,
    meta_of_query,
    parse_partition,
    partitions_of_text,
)

METAS = st.builds(
    TopicMeta,
    partition_num=st.integers(1, 255),
    ordered=st.booleans(),
    multi_part=st.booleans(),
    extend_support=st.booleans(),
    disable_channel_auto_create=st.booleans(),
    retention_days=st.integers(0, 1000),
    syncdisk=st.integers(0, 1000),
    version=st.integers(0, 1000),
)


@given(METAS)
def test_a_query_says_it_all(meta):
    assert meta_of_query(meta.query()) == meta
    assert asks_for_partitions(meta.query())


@given(METAS)
def test_what_is_stored_says_it_all(meta):
    assert decode_meta(encode_meta(meta)) == meta


@given(METAS, METAS)
def test_changes_make_one_state_of_a_topic_the_other(old, new):
    """All that can be changed: headers come and never go, and the number of partitions stays."""
    found = changed_meta(old, new.changes())
    names = ("retention_days", "syncdisk", "disable_channel_auto_create", "version")
    assert [getattr(found, name) for name in names] == [getattr(new, name) for name in names]
    assert found.extend_support == (old.extend_support or new.extend_support)
    assert (found.partition_num, found.ordered, found.multi_part) == (old.partition_num, old.ordered, old.multi_part)


@given(METAS)
def test_a_change_without_a_version_is_the_next_one(meta):
    found = changed_meta(meta, {"retention": "1001"})
    assert (found.version, found.retention_days, found.syncdisk) == (meta.version + 1, 1001, meta.syncdisk)
    assert found.rank > meta.rank


def test_a_change_that_changes_nothing_is_like_what_was():
    meta = TopicMeta(partition_num=2, retention_days=3, version=4)
    assert changed_meta(meta, {"retention": "3"}).is_like(meta)
    assert not changed_meta(meta, {"retention": "4"}).is_like(meta)


def test_what_was_stored_before_there_were_versions():
    assert decode_meta(b'{"partition_num":3,"retention_days":2}') == TopicMeta(partition_num=3, retention_days=2)


def test_defaults():
    assert meta_of_query({"extend": "true"}) == TopicMeta(partition_num=1, extend_support=True)
    assert not asks_for_partitions({"topic": "t", "other": "1"})
    assert not PLAIN.is_partitioned


@pytest.mark.parametrize(
    ("name", "value", "refusal"),
    [
        ("partition_num", "0", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num", "256", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num", "", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num", "-1", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("partition_num", "٣", "INVALID_ARG_TOPIC_PARTITION_NUM"),
        ("replicator", "0", "INVALID_ARG_TOPIC_REPLICATOR"),
        ("replicator", "6", "INVALID_ARG_TOPIC_REPLICATOR"),
        ("suggestload", "10001", "INVALID_ARG_TOPIC_SUGGESTLOAD"),
        ("retention", "x", "INVALID_ARG_TOPIC_RETENTION_DAYS"),
        ("syncdisk", "1.5", "INVALID_ARG_TOPIC_SYNC_DISK"),
    ],
)
def test_what_is_out_of_its_range(name, value, refusal):
    with pytest.raises(BadTopicMeta) as refused:
        meta_of_query({"partition_num": "1", name: value})
    assert str(refused.value).startswith(f"{refusal}: {name}={value}, it must be ")


def test_a_number_of_copies_is_refused_with_the_limit():
    with pytest.raises(BadTopicMeta) as refused:
        meta_of_query({"partition_num": "1", "replicator": "6"}, copies_max=5)
    assert str(refused.value) == "INVALID_ARG_TOPIC_REPLICATOR: replicator=6, it must be 1 to 5"


def test_more_than_one_copy_is_refused_with_a_reason():
    with pytest.raises(BadTopicMeta, match="without a cluster there is one copy"):
        meta_of_query({"partition_num": "1", "replicator": "2"})


def test_numbers_of_partitions():
    assert partitions_of_text("2,0,2", 3) == [0, 2]
    assert [parse_partition(text) for text in ("0", "1023", "1024", "-1", "", "1x")] == [
        0,
        1023,
        None,
        None,
        None,
        None,
    ]
    for text in ("", "3", "0,", "a"):
        with pytest.raises(BadTopicMeta):
            partitions_of_text(text, 3)
