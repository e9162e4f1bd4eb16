"""Figures of a daemon in Prometheus' text formats, on every daemon under ``/metrics``.

Rules of this file: figures are collected at each scrape, nothing is counted for it in between; prometheus-client writes
the formats and is loaded at the first scrape; the text is written in a worker thread, because it may be megabytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from flintmq.net.http_messages import Response

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


@dataclass(slots=True)
class Family:
    """One metric with all of its samples.

    Attributes:
        name: without the ``_total`` of a counter.
        help: what it counts, as a phrase.
        labels: names; each sample has a value for each.
        samples: values of the labels and the figure.
    """

    name: str
    kind: Literal["gauge", "counter"]
    help: str
    labels: Sequence[str] = ()
    samples: list[tuple[Sequence[str], float]] = field(default_factory=list)


def single(name: str, kind: Literal["gauge", "counter"], help: str, value: float) -> Family:  # noqa: A002
    """A metric without labels."""
    return Family(name, kind, help, (), [((), value)])


def exposition(families: Iterable[Family], accept: str) -> Response:
    """Write ``families`` and the figures of this process in the format that ``accept`` asks for. For a worker thread.

    Args:
        accept: the request's header; OpenMetrics where it says so, otherwise Prometheus' text format 0.0.4.
    """
    from prometheus_client import CollectorRegistry, ProcessCollector
    from prometheus_client.exposition import choose_encoder

    registry = CollectorRegistry(auto_describe=False)
    ProcessCollector(registry=registry)
    registry.register(_Collected(families))
    encode, content_type = choose_encoder(accept)
    return Response(200, encode(registry), (("Content-Type", content_type),))


class _Collected:
    """Families that are collected already, as prometheus-client wants to be given them."""

    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for family in self._families:
            kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
            metric = kind(family.name, family.help, labels=family.labels)
            for labels, value in family.samples:
                metric.add_metric(labels, value)
            yield metric
