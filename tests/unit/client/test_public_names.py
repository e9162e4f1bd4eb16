"""What ``dir()`` shows of a consumer, a producer and a message, of both flavours: what an application may call."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest

import flintmq.sync
from flintmq import ConnectionOptions, Consumer, ConsumerOptions, Message, Producer, ProducerOptions
from flintmq.client.core import producer_settings, settings
from flintmq.errors import OptionError

DOCS = Path(__file__).resolve().parents[3] / "docs"
CONSUMER = {
    "batches", "channel", "close", "connections", "describe", "is_paused", "is_starved", "max_in_flight", "partitions",
    "pause", "run", "start", "stats", "stop", "topic", "trace", "unpause",
}  # fmt: skip
PRODUCER = {"close", "connections", "describe", "dpub", "mpub", "pub", "start", "stats", "trace", "traced"}
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


def test_a_message_likewise():
    assert shown(Message) == MESSAGE


@pytest.mark.parametrize("client", [Producer, flintmq.sync.Producer, Consumer, flintmq.sync.Consumer])
@pytest.mark.parametrize("handed", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_client_is_of_one_process(client, handed):
    made = (
        client(nsqd_tcp_addresses="a:1")
        if "Producer" in client.__name__
        else client("t", "c", nsqd_tcp_addresses="a:1")
    )
    with pytest.raises(TypeError, match=rf"a {client.__name__} cannot be pickled or copied: .* make one where"):
        handed(made)


class Remade(flintmq.sync.Producer):
    """One that says itself what makes another one of it."""

    def __getstate__(self):
        return {"address": "a:1"}

    def __setstate__(self, state):
        Remade.__init__(self, state["address"])


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_client_of_an_application_may_say_how_it_is_pickled(protocol):
    assert shown(pickle.loads(pickle.dumps(Remade("a:1"), protocol))) == PRODUCER


def test_both_consumers_take_the_same():
    ours, sync = (inspect.signature(kind).parameters for kind in (Consumer, flintmq.sync.Consumer))
    assert {name for name in ours if name not in sync} == {"concurrency", "inline"}
    assert [each for name, each in ours.items() if name in sync] == [*sync.values()]


def test_both_producers_take_the_same():
    ours, sync = ({*inspect.signature(kind).parameters} for kind in (Producer, flintmq.sync.Producer))
    assert ours - sync == {"batch", "batch_count_max", "batch_bytes_max", "max_bytes_in_flight"}
    assert sync - ours == {"pool_size"}


@pytest.mark.parametrize(
    ("options", "defaults"),
    [(ConsumerOptions, settings._DEFAULTS), (ProducerOptions, producer_settings._DEFAULTS)],
    ids=["consumer", "producer"],
)
def test_every_option_has_a_default_and_a_line_of_its_own(options, defaults):
    names = set(options.__annotations__)
    assert names == set(defaults)
    described = inspect.getdoc(options)
    assert described is not None
    assert [name for name in names if name not in described] == []


@pytest.mark.parametrize("kind", [Consumer, flintmq.sync.Consumer], ids=["asyncio", "sync"])
def test_an_option_that_is_none_is_refused(kind):
    with pytest.raises(TypeError, match=r"Consumer\(\) got an unexpected keyword argument 'max_inflight'"):
        kind("t", "c", nsqd_tcp_addresses="a:1", max_inflight=5)


@pytest.mark.parametrize("kind", [Producer, flintmq.sync.Producer], ids=["asyncio", "sync"])
def test_nor_by_a_producer(kind):
    with pytest.raises(TypeError, match=r"Producer\(\) got an unexpected keyword argument 'retries'"):
        kind("a:1", retries=5)


@pytest.mark.parametrize("kind", [Producer, flintmq.sync.Producer], ids=["asyncio", "sync"])
def test_the_options_of_a_producer_are_keyword_arguments(kind):
    common: ProducerOptions = {"max_tries": 5, "sharding": "java", "trace": ["t"], "lookup_interval": 5}
    assert kind("a:1", **common).traced == ("t",)
    with pytest.raises(OptionError, match="max_tries"):
        kind("a:1", max_tries=0)


def test_the_page_for_who_comes_from_pynsq_names_what_there_is():
    rows = re.findall(r"^\| (.*) \| (.*) \|$", (DOCS / "from-pynsq.md").read_text(), re.MULTILINE)
    here = " ".join(re.findall("`([^`]*)`", " ".join(right for _, right in rows)))
    kinds = (Consumer, Producer, ConnectionOptions)
    known = {*flintmq.__all__, *flintmq.sync.__all__, *CONSUMER, *PRODUCER, *MESSAGE}
    known |= {name for kind in kinds for name in inspect.signature(kind).parameters}
    known |= {*ConsumerOptions.__annotations__, *ProducerOptions.__annotations__}
    assert "lookup_interval" in here
    of_python, of_the_page = {"async", "for", "in", "raise"}, {"consumer", "message", "delay", "flintmq", "sync"}
    assert {*re.findall(r"\w+", here)} - known <= of_python | of_the_page
