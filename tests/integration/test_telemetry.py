"""Spans of OpenTelemetry around what is published and processed, and their context on its way with the message."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from flintmq import App, Consumer, Discard, Message, Producer, PublishError, Requeue, Telemetry
from flintmq.client.core.envelope import MAGIC
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
        if message.body == b"bad" and message.attempts == 1:
            raise ValueError("no such customer")

    nsqd.publish("t", b"again", b"gone", b"bad")
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
    assert outcomes == ["discard", "requeue"]


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
