"""Graphite behind nsqadmin: the rate of a counter, and pictures that are fetched for browsers.

Rules of this file: Graphite's address is the operator's alone, with its user and password; of a browser's request only
the query goes there, and of the answer only what is a picture or JSON comes back.

Source: nsqadmin of NSQ 1.3 (``/api/graphite``, ``/render``); NSQ's options.
"""

from __future__ import annotations

import math
from typing import Any
from urllib.parse import urlencode, urlsplit

import msgspec
from starlette.responses import Response

from flintmq.errors import UNREADABLE_JSON
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.upstream import NotAnswered, Upstream
from flintmq.options import SECOND

BYTES_MAX = 16 * 1024 * 1024
_SAFE_KINDS = ("image/png", "image/gif", "image/jpeg", "application/json", "text/csv", "text/plain")


class GraphiteLink(msgspec.Struct, frozen=True):
    """A picture of Graphite.

    Attributes:
        label: of what it shows.
        target: for ``/api/graphite`` and ``/render``.
        url: of the picture, at Graphite or, with ``--proxy-graphite``, here.
    """

    label: str
    target: str
    url: str


def links(options: NsqadminOptions, series: str, name: str) -> list[GraphiteLink]:
    """Return the pictures of a topic or a channel that nsqd's reports to statsd come to; none without Graphite.

    Args:
        series: ``topic`` or ``channel``; there are none of anything else.
        name: the topic, or ``topic/channel``.
    """
    if not options.graphite_url or series not in ("topic", "channel"):
        return []
    topic, _, channel = name.partition("/")
    place = f"topic.{_clean(topic)}." + (f"channel.{_clean(channel)}." if channel else "")
    prefix = options.statsd_prefix.replace("%s", "*")
    figures = {"depth": options.statsd_gauge_format, "message_count": options.statsd_counter_format}
    if channel:
        gauges = ("in_flight_count", "deferred_count", "clients")
        figures |= dict.fromkeys(gauges, options.statsd_gauge_format)
        figures |= dict.fromkeys(("requeue_count", "timeout_count"), options.statsd_counter_format)
    found = []
    for figure, form in figures.items():
        key = f"{prefix}{'.' if prefix else ''}{place}{figure}"
        target = f"sumSeries({form.replace('%s', key) if form else key})"
        query = urlencode({"target": target, "from": "-2hours", "width": 800, "height": 450})
        found.append(GraphiteLink(figure.replace("_", " "), target, f"{_shown_base(options)}?{query}"))
    return found


def _clean(name: str) -> str:
    """Return a name as nsqd reports it: what Graphite cannot have is left out."""
    return "".join(each for each in name if each.isalnum() or each in "-_.")


def _shown_base(options: NsqadminOptions) -> str:
    """Return where browsers find pictures, without user and password."""
    if options.proxy_graphite:
        return f"{options.base}/render"
    split = urlsplit(options.graphite_url)
    host = split.netloc.rpartition("@")[2]
    return f"{split.scheme}://{host}{split.path.rstrip('/')}/render"


class _Series(msgspec.Struct):
    target: str = ""
    datapoints: list[list[float | None]] = []


async def rate(upstream: Upstream, options: NsqadminOptions, target: str) -> str:
    """Return what a counter came to for each second of the last interval but one, or ``N/A``.

    Raises:
        Refused: 500, when Graphite does not answer, or not with any such series.
    """
    interval_s = options.statsd_interval_ns // SECOND
    query = urlencode(
        {"from": f"-{2 * interval_s}sec", "until": f"-{interval_s}sec", "format": "json", "target": target}
    )
    try:
        answer = await upstream.fetch("graphite", f"{_base(options)}?{query}", BYTES_MAX)
    except NotAnswered as error:
        raise Refused(500, "INTERNAL_ERROR") from error
    try:
        found = msgspec.json.decode(answer.body, type=list[_Series])
        value: Any = found[0].datapoints[0][0]
    except (*UNREADABLE_JSON, IndexError) as error:
        raise Refused(500, "INTERNAL_ERROR") from error
    if value is None or not math.isfinite(value) or value < 0:
        return "N/A"
    return f"{value / interval_s:.2f}"


async def picture(upstream: Upstream, options: NsqadminOptions, query: str) -> Response:
    """Return what Graphite's ``/render`` answers to a browser's query.

    Raises:
        Refused: 502, when Graphite does not answer.
    """
    try:
        answer = await upstream.fetch("graphite", f"{_base(options)}?{query}", BYTES_MAX)
    except NotAnswered as error:
        raise Refused(502, f"UPSTREAM_ERROR: graphite: {error.missing.text}") from error
    kind = _kind(answer.headers)
    if kind.partition(";")[0].strip().lower() not in _SAFE_KINDS:
        kind = "application/octet-stream"
    return Response(answer.body, answer.status, {"Content-Type": kind})


def _base(options: NsqadminOptions) -> str:
    if not options.graphite_url:
        raise Refused(500, "INTERNAL_ERROR")
    return options.graphite_url.rstrip("/") + "/render"


def _kind(headers: Any) -> str:
    for name, value in headers.items():
        text = name.decode("latin-1") if isinstance(name, bytes) else name
        if text.lower() == "content-type":
            return value.decode("latin-1") if isinstance(value, bytes) else str(value)
    return ""


__all__ = ["GraphiteLink", "links", "picture", "rate"]
