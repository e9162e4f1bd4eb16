"""What ``dir()`` shows of a consumer, a producer and a message, of both flavours: what an application may call."""

from __future__ import annotations

import inspect

import pytest

import flintmq.sync
from flintmq import Consumer, Message, Producer
from flintmq.client.core.message import ThreadMessage
from flintmq.client.core.settings import _DEFAULTS, ConsumerOptions

CONSUMER = {
    "batches", "channel", "close", "connections", "describe", "is_paused", "is_starved", "max_in_flight", "partitions",
    "pause", "run", "start", "stats", "stop", "topic", "trace", "unpause",
}  # fmt: skip
PRODUCER = {"close", "describe", "dpub", "mpub", "pub", "start", "stats", "trace", "traced"}
MESSAGE = {
    "attempts", "body", "finish", "headers", "id", "internal_id", "is_answered", "is_lost", "nsqd", "offset",
    "partition", "raw_size", "requeue", "tag", "time_left", "timestamp_ns", "touch", "trace_id", "value",
}  # fmt: skip


def shown(thing: object) -> set[str]:
    return {name for name in dir(thing) if not name.startswith("_")}


@pytest.mark.parametrize(
    ("kind", "more"), [(Consumer, {"cancel_handlers"}), (flintmq.sync.Consumer, set())], ids=["asyncio", "sync"]
)
def test_a_consumer_shows_what_an_application_may_call(kind, more):
    consumer = kind("t", "c", nsqd_tcp_addresses="a:1")
    assert shown(consumer) == shown(kind) == CONSUMER | more
    assert (consumer.topic, consumer.channel, consumer.trace) == ("t", "c", False)


@pytest.mark.parametrize("kind", [Producer, flintmq.sync.Producer], ids=["asyncio", "sync"])
def test_a_producer_likewise(kind):
    assert shown(kind("a:1")) == shown(kind) == PRODUCER


@pytest.mark.parametrize("kind", [Message, ThreadMessage])
def test_a_message_likewise(kind):
    assert shown(kind) == MESSAGE


def test_both_consumers_take_the_same():
    ours, sync = (inspect.signature(kind).parameters for kind in (Consumer, flintmq.sync.Consumer))
    assert {name for name in ours if name not in sync} == {"concurrency", "inline"}
    assert [each for name, each in ours.items() if name in sync] == [*sync.values()]


def test_every_option_has_a_default_and_a_line_of_its_own():
    names = set(ConsumerOptions.__annotations__)
    assert names == set(_DEFAULTS)
    described = inspect.getdoc(ConsumerOptions)
    assert described is not None
    assert [name for name in names if name not in described] == []


@pytest.mark.parametrize("kind", [Consumer, flintmq.sync.Consumer], ids=["asyncio", "sync"])
def test_an_option_that_is_none_is_refused(kind):
    with pytest.raises(TypeError, match=r"Consumer\(\) got an unexpected keyword argument 'max_inflight'"):
        kind("t", "c", nsqd_tcp_addresses="a:1", max_inflight=5)
