"""Figures of a daemon in Prometheus' text format, on every daemon under ``/metrics``.

::

    # HELP flintmq_nsqd_topic_messages_total Messages published to a topic
    # TYPE flintmq_nsqd_topic_messages_total counter
    flintmq_nsqd_topic_messages_total{topic="orders"} 17

Rules of this file: figures are collected at each scrape, nothing is counted for it in between. The lines are written
here and not by prometheus-client, which takes four times as long: a scrape of thousands of topics must not be felt by
those who publish meanwhile.

Source: https://prometheus.io/docs/instrumenting/exposition_formats/ (text format 0.0.4).
"""

from __future__ import annotations

import os
import resource
from collections.abc import Iterable
from typing import Literal

from flintmq.net.http_messages import Response

CONTENT_TYPE = ("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
_PROCESS = "/proc/self"  # of the kernel, where it is Linux
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def labels_of(**labels: str) -> str:
    """Return labels as they stand in a line, to be made once for many metrics."""
    return "{" + ",".join(f'{name}="{value.translate(_ESCAPES)}"' for name, value in labels.items()) + "}"


class Family:
    """One metric with all of its samples.

    Args:
        name: in full, a counter's ends in ``_total``.
        kind: a ``summary`` has samples with the label ``quantile`` alone.
        help: what it counts, as a phrase.
    """

    __slots__ = ("_name", "lines")

    def __init__(self, name: str, kind: Literal["gauge", "counter", "summary"], help: str) -> None:  # noqa: A002
        assert name.endswith("_total") == (kind == "counter"), name
        self._name = name
        self.lines = [f"# HELP {name} {help}\n# TYPE {name} {kind}\n"]

    def add(self, value: float, labels: str = "") -> Family:
        """Add a sample with labels of :func:`labels_of`; a bool counts as 0 or 1."""
        self.lines.append(f"{self._name}{labels} {value + 0}\n")
        return self


def exposition(families: Iterable[Family]) -> Response:
    """Return the answer to a scrape: ``families`` in their order, those without samples left out."""
    lines = [line for family in families if len(family.lines) > 1 for line in family.lines]
    return Response(200, "".join(lines).encode(), (CONTENT_TYPE,))


def process_families() -> list[Family]:
    """Return figures of this process under the names that Prometheus' own libraries use."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    families = [
        Family("process_cpu_seconds_total", "counter", "CPU time of the process, user and system").add(
            usage.ru_utime + usage.ru_stime
        ),
        Family("process_resident_memory_bytes", "gauge", "Memory of the process in RAM").add(resident_bytes()),
        Family("process_max_fds", "gauge", "Most files the process may have open").add(
            resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        ),
    ]
    if os.path.isdir(f"{_PROCESS}/fd"):
        open_count = len(os.listdir(f"{_PROCESS}/fd"))
        families.append(Family("process_open_fds", "gauge", "Files the process has open").add(open_count))
    return families


def resident_bytes() -> int:
    """Return this process's bytes of memory that are in RAM; their peak where the system does not tell the present."""
    from pathlib import Path  # for those who ask

    try:
        return int(Path(f"{_PROCESS}/statm").read_text(encoding="ascii").split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
