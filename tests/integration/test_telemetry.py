"""Spans of OpenTelemetry around what is published and processed, and their context on its way with the message."""

from __future__ import annotations

import json
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import Flavour

from flintmq import App, Consumer, Discard, Message, Producer, PublishError, Requeue, Telemetry
from flintmq.client.core.envelope import MAGIC, wrap
from flintmq.testing import MemoryNsqd


@pytest.fixture
def nsqd() -> Iterator[MemoryNsqd]:
    with MemoryNsqd() as nsqd:
        yield nsqd


class Spans:
    """Collects the spans that are made with :attr:`provider`."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        [span] = self.named(name)
        return span


@pytest.fixture
def spans() -> Spans:
    return Spans()


def trace_id_of(span: ReadableSpan) -> int:
    assert span.context is not None
    return span.context.trace_id


async def test_one_trace_from_producer_to_the_handler_s_own_publish(nsqd: MemoryNsqd, spans: Spans):
    telemetry = Telemetry(spans.provider, envelope=True)
    app = App(nsqd_tcp_addresses=nsqd.tcp_address, telemetry=telemetry)
    bodies: list[bytes] = []

    @app.consumer("orders", "billing")
    async def bill(message: Message) -> None:
        bodies.append(message.body)
        assert set(message.headers) == {"traceparent"}
        await app.producer.pub("invoices", b"invoice")

    async with app:
        await app.producer.pub("orders", b"order")
        await nsqd.drained("orders", "billing")
    sent, processed, invoiced = spans.one("send orders"), spans.one("process orders"), spans.one("send invoices")
    assert bodies == [b"order"]
    assert len({trace_id_of(span) for span in (sent, processed, invoiced)}) == 1
    assert processed.parent is not None and sent.context is not None and processed.context is not None
    assert processed.parent.span_id == sent.context.span_id
    assert [link.context.span_id for link in processed.links] == [sent.context.span_id]
    assert invoiced.parent is not None and invoiced.parent.span_id == processed.context.span_id
    assert (sent.kind, processed.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
    assert dict(sent.attributes or {}) == {
        "messaging.system": "nsq",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.message.body.size": 5,
    }
    host, _, port = nsqd.tcp_address.rpartition(":")
    assert dict(processed.attributes or {}) == {
        "messaging.system": "nsq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "orders",
        "messaging.consumer.group.name": "billing",
        "messaging.message.id": "0000000000000001",
        "messaging.message.body.size": 5,
        "messaging.nsq.attempts": 1,
        "server.address": host,
        "server.port": int(port),
    }


async def test_without_an_envelope_bodies_stay_what_they_are(nsqd: MemoryNsqd, spans: Spans):
    telemetry = Telemetry(spans.provider)
    async with (
        Producer(nsqd.tcp_address, telemetry=telemetry) as producer,
        Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, telemetry=telemetry, handler=lambda message: None),
    ):
        await producer.pub("t", b"x")
        await nsqd.drained("t", "c")
    assert nsqd.published("t") == [b"x"]
    assert trace_id_of(spans.one("send t")) != trace_id_of(spans.one("process t"))


async def test_consumers_take_both_and_old_consumers_see_the_envelope(nsqd: MemoryNsqd, spans: Spans):
    """Consumers switch it on first: what comes without is handed on as it is."""
    telemetry = Telemetry(spans.provider, envelope=True)
    seen: list[bytes] = []
    async with (
        Producer(nsqd.tcp_address) as plain,
        Producer(nsqd.tcp_address, telemetry=telemetry) as producer,
        Consumer(
            "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, telemetry=telemetry,
            handler=lambda message: seen.append(message.body),
        ),
    ):  # fmt: skip
        await plain.pub("t", b"1")
        await producer.pub("t", b"2")
        await producer.mpub("t", [b"3", b"4"])
        await producer.dpub("t", b"5", delay=0.01)
        await nsqd.drained("t", "c")
    assert sorted(seen) == [b"1", b"2", b"3", b"4", b"5"]
    assert [body.startswith(MAGIC) for body in nsqd.published("t")] == [False, True, True, True, True]
    [batch] = [span for span in spans.named("send t") if "messaging.batch.message_count" in (span.attributes or {})]
    processed = [span for span in spans.named("process t") if trace_id_of(span) == trace_id_of(batch)]
    assert len(processed) == 2 and (batch.attributes or {})["messaging.batch.message_count"] == 2


async def test_failures_are_told_and_wishes_are_none(nsqd: MemoryNsqd, spans: Spans):
    telemetry = Telemetry(spans.provider)

    async def handler(message: Message) -> None:
        if message.body == b"again" and message.attempts == 1:
            raise Requeue(0)
        if message.body == b"gone":
            raise Discard("no use")
        if message.body == b"group" and message.attempts == 1:
            raise ExceptionGroup("of a TaskGroup", [Requeue(0)])
        if message.body == b"bad" and message.attempts == 1:
            raise ValueError("no such customer")

    nsqd.publish("t", b"again", b"gone", b"group", b"bad")
    async with Consumer(
        "t", "c", nsqd_tcp_addresses=nsqd.tcp_address, telemetry=telemetry, handler=handler, requeue_delay=0.01,
        max_backoff=0,
    ):  # fmt: skip
        await nsqd.drained("t", "c")
    failed = [span for span in spans.named("process t") if span.status.status_code is StatusCode.ERROR]
    [span] = failed
    assert span.status.description == "no such customer"
    assert [event.name for event in span.events] == ["exception"]
    outcomes = sorted(
        str((span.attributes or {})["messaging.nsq.outcome"])
        for span in spans.named("process t")
        if "messaging.nsq.outcome" in (span.attributes or {})
    )
    assert outcomes == ["discard", "requeue", "requeue"]


async def test_a_publish_that_fails_is_an_error(nsqd: MemoryNsqd, spans: Spans):
    async with Producer(nsqd.tcp_address, telemetry=Telemetry(spans.provider), timeout=0.2) as producer:
        with pytest.raises(PublishError):
            await producer.pub("t", bytes(2 * 1024 * 1024))
    assert spans.one("send t").status.status_code is StatusCode.ERROR


async def test_code_that_iterates_makes_its_own_spans(nsqd: MemoryNsqd, spans: Spans):
    telemetry = Telemetry(spans.provider, envelope=True)
    async with (
        Producer(nsqd.tcp_address, telemetry=telemetry) as producer,
        Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, telemetry=telemetry) as consumer,
    ):
        await producer.pub("t", b"x")
        message = await anext(aiter(consumer))
        async with message:
            with telemetry.processing(message, "t", "c"):
                assert message.body == b"x"
        await nsqd.drained("t", "c")
    assert trace_id_of(spans.one("send t")) == trace_id_of(spans.one("process t"))


# -- which way the context goes ----------------------------------------------------------------------------------------


def post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=PATIENCE_S).close()


def create(nsqd: MemoryNsqd, topic: str, **meta: Any) -> None:
    """Create a topic at nsqlookupd if it has partitions, otherwise at nsqd; returns when nsqlookupd knows it."""
    lookup = nsqd.nsqlookupd_http_address
    daemon = lookup if "partition_num" in meta else nsqd.http_address
    post(f"{daemon}/topic/create?{urllib.parse.urlencode({'topic': topic, **meta})}")

    accept = {"Accept": "application/vnd.nsq; version=1.0"}  # an answer without the envelope of old nsqlookupd
    asked = urllib.request.Request(f"{lookup}/lookup?topic={topic}&metainfo=true", headers=accept)

    def is_known() -> bool:
        try:
            with urllib.request.urlopen(asked, timeout=PATIENCE_S) as answer:
                found = json.load(answer)
        except urllib.error.HTTPError:
            return False
        is_extended = bool((found.get("meta") or {}).get("extend_support"))
        return bool(found["producers"]) and is_extended == bool(meta.get("extend"))

    wait_until(is_known, f"nsqlookupd knows {topic}")


def consumed(flavour: Flavour, topic: str, count: int, **options: Any) -> dict[bytes, set[str]]:
    """Bodies, and the names of their headers."""
    seen: list[Message] = []
    with flavour.consumer(topic, "c", seen.append, **options):
        wait_until(lambda: len(seen) >= count, f"{count} messages")
    return {message.body: set(message.headers) for message in seen}


@pytest.fixture
def lookup(nsqd: MemoryNsqd) -> dict[str, Any]:
    return {"nsqlookupd_http_addresses": nsqd.nsqlookupd_http_address}


@pytest.mark.parametrize("meta", [{}, {"partition_num": 2}], ids=["plain", "partitions"])
@pytest.mark.parametrize("envelope", [False, True])
def test_on_a_topic_with_headers_the_context_is_one_from_the_first_message(
    nsqd: MemoryNsqd, lookup: dict[str, Any], flavour: Flavour, spans: Spans, envelope: bool, meta: dict[str, Any]
):
    create(nsqd, "t", extend="true", **meta)
    telemetry = Telemetry(spans.provider, envelope=envelope)
    expected = {b"first": {"traceparent"}}
    with flavour.producer(**lookup, telemetry=telemetry) as producer:
        producer.call(lambda it: it.pub("t", b"first"))
        producer.call(lambda it: it.mpub("t", [b"m1", b"m2"]))
        producer.call(lambda it: it.pub("t", b"own", headers={"x": "y"}))
        producer.call(lambda it: it.pub("t", MAGIC + b" begins so"))
    expected |= {b"m1": {"traceparent"}, b"m2": {"traceparent"}, b"own": {"x", "traceparent"}}
    found = consumed(flavour, "t", 5, **lookup, telemetry=telemetry)
    assert found == expected | {MAGIC + b" begins so": {"traceparent"}}


def test_first_messages_that_travel_at_once_and_with_headers_of_the_call(
    nsqd: MemoryNsqd, lookup: dict[str, Any], flavour: Flavour, spans: Spans
):
    """Each of these is the first one of a producer, which knows nothing of the topic."""
    create(nsqd, "t", extend="true", partition_num=2)
    telemetry = Telemetry(spans.provider, envelope=True)
    calls: list[Any] = [
        lambda it: it.mpub("t", [b"mpub"]),
        lambda it: it.mpub("t", [b"mpub own"], headers={"x": "y"}),
        lambda it: it.pub("t", b"sharded", sharding_id="k"),
        lambda it: it.pub("t", b"traced", trace_id=7),
        lambda it: it.pub("t", b"delayed headers", headers={"x": "y"}),
        lambda it: it.dpub("t", b"delayed", delay=0.01),
    ]
    for call in calls:
        with flavour.producer(**lookup, telemetry=telemetry) as producer:
            producer.call(call)
    found = consumed(flavour, "t", len(calls), **lookup, telemetry=telemetry)
    assert found == {
        b"mpub": {"traceparent"},
        b"mpub own": {"x", "traceparent"},
        b"sharded": {"traceparent"},
        b"traced": {"traceparent", "##trace_id"},
        b"delayed headers": {"x", "traceparent"},
        b"delayed": set(),
    }


def test_with_nsqd_addresses_a_call_says_that_the_topic_has_headers(nsqd: MemoryNsqd, flavour: Flavour, spans: Spans):
    create(nsqd, "t", extend="true")
    with flavour.producer(nsqd.tcp_address, telemetry=Telemetry(spans.provider, envelope=True)) as producer:
        producer.call(lambda it: it.pub("t", b"says so", headers={}))
        producer.call(lambda it: it.mpub("t", [b"too"], headers={"x": "y"}))
        producer.call(lambda it: it.pub("t", b"enveloped"))
    with flavour.producer(nsqd.tcp_address, telemetry=Telemetry(spans.provider)) as producer:
        producer.call(lambda it: it.pub("t", b"nothing"))
        producer.call(lambda it: it.pub("t", wrap({"traceparent": "00"}, b"both"), headers={"x": "y"}))
    telemetry = Telemetry(spans.provider, envelope=True)
    found = consumed(flavour, "t", 5, nsqd_tcp_addresses=nsqd.tcp_address, headers=True, telemetry=telemetry)
    assert found == {
        b"says so": {"traceparent"},
        b"too": {"x", "traceparent"},
        b"enveloped": {"traceparent"},
        b"nothing": set(),
        b"both": {"x", "traceparent"},
    }


PARTED, PARTED_WITH_HEADERS = {"partition_num": 2}, {"partition_num": 2, "extend": "true"}


@pytest.mark.parametrize(
    ("options", "meta"),
    [
        pytest.param({"ordered": True}, PARTED, id="order"),
        pytest.param({"ordered": True}, PARTED_WITH_HEADERS, id="order, headers"),
        pytest.param({"start": "beginning"}, PARTED, id="start"),
        pytest.param({"start": "beginning"}, PARTED_WITH_HEADERS, id="start, headers"),
        pytest.param({"start": "beginning"}, {}, id="start, plain"),
        pytest.param({}, PARTED, id="sub"),
        pytest.param({}, PARTED_WITH_HEADERS, id="sub, headers"),
        pytest.param({}, {}, id="sub, plain"),
    ],
)
def test_envelopes_are_opened_whatever_the_subscription(
    nsqd: MemoryNsqd,
    lookup: dict[str, Any],
    flavour: Flavour,
    spans: Spans,
    options: dict[str, Any],
    meta: dict[str, Any],
):
    create(nsqd, "t", **meta)
    telemetry = Telemetry(spans.provider, envelope=True)
    where = {"partition": 1} if meta else {}
    with flavour.producer(**lookup, telemetry=telemetry) as producer:
        producer.call(lambda it: it.pub("t", b"1", **where))
        producer.call(lambda it: it.mpub("t", [b"2", b"3"], **where))
    with flavour.producer(**lookup) as producer:  # as one of an old release stored it, or one that knew no better
        producer.call(lambda it: it.pub("t", wrap({"traceparent": "00"}, b"4"), **where))
    found = consumed(flavour, "t", 4, **lookup, telemetry=telemetry, **options)
    assert found == {body: {"traceparent"} for body in (b"1", b"2", b"3", b"4")}
