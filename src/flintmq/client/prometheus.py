"""Figures of producers and consumers for Prometheus, in the process that they run in.

::

    from prometheus_client import REGISTRY, start_http_server
    from flintmq.client.prometheus import ClientCollector

    collector = ClientCollector()
    REGISTRY.register(collector)
    collector.add(consumer)                      # and producers; those that are gone are forgotten by themselves
    start_http_server(9100)

Those of :mod:`flintmq.sync` are shown alike. Nothing is counted twice for it: a scrape reads ``stats()`` of each. Needs
the package ``prometheus-client`` (``pip install 'flintmq[prometheus]'``).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from flintmq.client.core.stats import ConsumerStats, ProducerStats

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

CLIENT_COUNT_MAX = 10_000

# attribute of the stats, name, help; counters are given without their _total
_CONSUMER_COUNTERS = (
    ("received", "messages_received", "Messages delivered to this consumer."),
    ("finished", "messages_finished", "Messages finished (FIN)."),
    ("requeued", "messages_requeued", "Messages given back (REQ)."),
    ("failed", "messages_failed", "Messages whose handler raised."),
    ("given_up", "messages_given_up", "Messages with too many attempts or a body of the wrong type."),
    ("dropped", "messages_dropped", "Messages that nsqd took back before they were answered."),
    ("late", "answers_late", "FIN, REQ and TOUCH that came too late."),
    ("order_violations", "order_violations", "Messages that came out of the order of their partition."),
)
_CONSUMER_GAUGES = (
    ("in_flight", "messages_in_flight", "Messages delivered and not answered."),
    ("queued", "messages_queued", "Messages delivered and not handed to a handler."),
    ("connections", "connections", "nsqd, or partitions on them, that are subscribed now."),
    ("blocked", "partitions_blocked", "Partitions whose message comes again and again."),
)
_PRODUCER_COUNTERS = (
    ("published", "messages_published", "Messages that nsqd answered OK."),
    ("failed", "publishes_failed", "Messages whose publishing failed."),
    ("commands", "publish_commands", "PUB, MPUB and DPUB sent."),
    ("retries", "publish_retries", "Commands sent again."),
)
_PRODUCER_GAUGES = (
    ("bytes_in_flight", "publish_bytes_in_flight", "Bytes on their way, counted against max_bytes_in_flight."),
    ("connections", "producer_connections", "nsqd that are connected now."),
)


class Client(Protocol):
    """A producer or a consumer, on asyncio or on blocking sockets."""

    def stats(self) -> ConsumerStats | ProducerStats: ...


@runtime_checkable
class Subscribed(Protocol):
    """A consumer."""

    topic: str
    channel: str


class ClientCollector:
    """A collector of ``prometheus_client``; may be scraped from any thread.

    Args:
        clients: producers and consumers to begin with.
        prefix: of every name.
    """

    def __init__(self, clients: Iterable[Client] = (), prefix: str = "flintmq_client_") -> None:
        self._prefix = prefix
        self._clients: list[tuple[weakref.ref[Client], tuple[str, ...]]] = []
        for client in clients:
            self.add(client)

    def add(self, client: Client, name: str = "") -> None:
        """Show a client; two that would have the same labels are told apart by ``name``.

        Raises:
            RuntimeError: too many clients are shown.
        """
        self._clients = [each for each in self._clients if each[0]() is not None]
        if len(self._clients) >= CLIENT_COUNT_MAX:
            raise RuntimeError(f"{CLIENT_COUNT_MAX} clients are shown already; one collector is for one process")
        labels = (client.topic, client.channel, name) if isinstance(client, Subscribed) else (name,)
        self._clients.append((weakref.ref(client), labels))

    def collect(self) -> Iterable[Metric]:
        """The present figures."""
        from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily

        consumers: list[tuple[tuple[str, ...], ConsumerStats]] = []
        producers: list[tuple[tuple[str, ...], ProducerStats]] = []
        for reference, labels in list(self._clients):
            client = reference()
            found = None if client is None else client.stats()
            if isinstance(found, ConsumerStats):
                consumers.append((labels, found))
            elif found is not None:
                producers.append((labels, found))
        tables = (
            (_CONSUMER_COUNTERS, CounterMetricFamily, ("topic", "channel", "name"), consumers),
            (_CONSUMER_GAUGES, GaugeMetricFamily, ("topic", "channel", "name"), consumers),
            (_PRODUCER_COUNTERS, CounterMetricFamily, ("name",), producers),
            (_PRODUCER_GAUGES, GaugeMetricFamily, ("name",), producers),
        )
        for rows, family, label_names, clients in tables:
            for attribute, name, about in rows:
                metric = family(self._prefix + name, about, labels=label_names)
                for values, stats in clients:
                    metric.add_metric(values, getattr(stats, attribute))
                yield metric
        pausing = GaugeMetricFamily(
            f"{self._prefix}backing_off", "1 while a consumer backs off.", labels=("topic", "channel", "name")
        )
        for values, stats in consumers:
            pausing.add_metric(values, float(stats.backoff != "normal"))
        yield pausing
