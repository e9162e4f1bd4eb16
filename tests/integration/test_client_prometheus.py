"""Figures of clients as Prometheus scrapes them."""

from __future__ import annotations

import gc

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from flintmq import Consumer, Message, Producer, Requeue
from flintmq.client.prometheus import ClientCollector
from flintmq.testing import MemoryNsqd

LABELS = ("topic", "channel", "name")


def scrape(registry: CollectorRegistry) -> dict[str, float]:
    """Sample name with its labels -> value."""
    text = generate_latest(registry).decode()
    return {
        f"{sample.name}{{{','.join(sample.labels[key] for key in LABELS if key in sample.labels)}}}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_what_a_scrape_shows():
    registry = CollectorRegistry()
    collector = ClientCollector()
    registry.register(collector)

    async def handler(message: Message) -> None:
        if message.attempts == 1 and message.body == b"0":
            raise Requeue(0)

    with MemoryNsqd() as nsqd:
        async with (
            Producer(nsqd.tcp_address) as producer,
            Consumer("t", "c", nsqd_tcp_addresses=nsqd.tcp_address, handler=handler) as consumer,
        ):
            collector.add(producer, "main")
            collector.add(consumer)
            for number in range(10):
                await producer.pub("t", b"%d" % number)
            await nsqd.drained("t", "c")
            shown = scrape(registry)
    assert shown["flintmq_client_messages_published_total{main}"] == 10
    assert shown["flintmq_client_publish_commands_total{main}"] == 10
    assert shown["flintmq_client_producer_connections{main}"] == 1
    assert shown["flintmq_client_messages_received_total{t,c,}"] == 11
    assert shown["flintmq_client_messages_finished_total{t,c,}"] == 10
    assert shown["flintmq_client_messages_requeued_total{t,c,}"] == 1
    assert shown["flintmq_client_connections{t,c,}"] == 1
    assert shown["flintmq_client_backing_off{t,c,}"] == 0
    del producer, consumer
    gc.collect()
    assert not [name for name in scrape(registry) if "messages" in name]
