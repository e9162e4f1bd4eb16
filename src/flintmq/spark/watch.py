"""Watches the queries of a session: their lag for Prometheus and nsqadmin, and their channels behind each micro-batch.

The source itself moves the channel of a query when Spark asks for the next micro-batch, so a query that is stopped, or
whose trigger comes seldom, shows the last one as unread until then. Spark tells a listener about each micro-batch when
it is committed.

The rules of this file: whatever fails here is logged, and never touches a query; what is kept has a bound, and what a
query leaves behind goes with it; a channel is moved to the place of a query whose source has that channel, as the
progress says, and of no other: retention removes what lies behind it.

Source: docs/decisions/0006.
"""

# ruff: noqa: N802 - method names are Spark's

from __future__ import annotations

import atexit
import errno
import json
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from flintmq.addresses import format_address
from flintmq.errors import UNREADABLE_JSON, FlintError, OptionError
from flintmq.spark.errors import SOURCE
from flintmq.spark.offsets import CHANNEL_KEY, LAG_KEY, LOG_KEY, MODE_KEY, Offsets, from_json
from flintmq.spark.options import SourceOptions, split_address
from flintmq.spark.report import QueryState, Reporter
from flintmq.spark.survey import Surveyor

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

QUERIES_MAX = 1000
LOGS_MAX = 10_000  # of one query
REQUEST_TIMEOUT_S = 10.0
_LAGS = {
    "messages": "Messages that are stored and that the query has not read.",
    "seconds": "Age of the oldest message that the query has not read.",
}

log = logging.getLogger("flintmq.spark")


@dataclass(slots=True)
class _Query:
    """The figures of one query as of its last micro-batch."""

    name: str
    epoch: int = 0
    row_count: int = 0
    lags: list[tuple[str, str, dict[str, Any]]] = field(default_factory=list)


class QueryWatch(StreamingQueryListener):
    """A listener for one session.

    Args:
        options: of the source, with the channel that is to be moved; None: no channel is.
        metrics: ``host:port`` that serves ``/metrics``; None: nobody does. Port 0 takes a free one.
        nsqadmin: URL of one that is told about each query; None: none is.
        nsqadmin_token: where the token for it is: ``env:NAME`` or ``file:/path``; empty: none.
        nsqadmin_ca_file: authorities to trust for ``https``; empty: those of the system.

    Attributes:
        metrics_address: where it listens; empty when it does not.

    Raises:
        OptionError: the address is none, or cannot be listened on.
    """

    def __init__(
        self,
        options: SourceOptions | None = None,
        metrics: str | None = None,
        nsqadmin: str | None = None,
        nsqadmin_token: str = "",
        nsqadmin_ca_file: str = "",
    ) -> None:
        self._surveyor = Surveyor(options) if options is not None and options.channel else None
        self._options = options
        self._queries: dict[str, _Query] = {}
        self._states: dict[str, QueryState] = {}
        self._lock = threading.Lock()
        self._has_told_of_others = False
        self._reporter: Reporter | None = None
        self._server = None if metrics is None else _listening(metrics, self.text)
        try:  # threads are started last, when nothing is left that could be refused
            if nsqadmin is not None:
                self._reporter = Reporter(nsqadmin, nsqadmin_token, nsqadmin_ca_file, self._reported)
        except BaseException:
            if self._server is not None:
                self._server.server_close()
            raise
        self.metrics_address = ""
        if self._server is not None:
            host, port = self._server.server_address[:2]
            self.metrics_address = format_address(str(host), int(port))
            threading.Thread(target=self._server.serve_forever, name="flintmq-metrics", daemon=True).start()

    def close(self) -> None:
        """Serve no more, and tell nsqadmin what it was not told yet, for at most 5 s."""
        if self._reporter is not None:
            self._reporter.close()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()

    def onQueryStarted(self, event: Any) -> None:
        """Tell nsqadmin that a query runs."""
        query = str(event.id)
        self._tell(query, state="running", error="", name=str(event.name or ""))

    def onQueryIdle(self, event: Any) -> None:
        """Nothing is new."""

    def onQueryProgress(self, event: Any) -> None:
        """Take the figures of a micro-batch, and move the channel to its end."""
        try:
            self._take(event.progress)
        except (FlintError, *UNREADABLE_JSON, KeyError, TypeError, ValueError, AttributeError) as error:
            log.warning("the progress of a query is not understood: %s", error)

    def onQueryTerminated(self, event: Any) -> None:
        """Forget a query, and tell nsqadmin why it has ended."""
        with self._lock:
            self._queries.pop(str(event.id), None)
        failure = str(getattr(event, "exception", None) or "")
        self._tell(str(event.id), state="failed" if failure else "stopped", error=failure)

    def _reported(self) -> list[QueryState]:
        with self._lock:
            return [replace(each) for each in self._states.values()]

    def _tell(self, query: str, **what: Any) -> None:
        """Change what nsqadmin is told of a query."""
        if self._reporter is None:
            return
        with self._lock:
            state = self._states.pop(query, None) or QueryState(query)
            for name, value in what.items():
                setattr(state, name, value)
            self._states[query] = state
            while len(self._states) > QUERIES_MAX:
                del self._states[next(iter(self._states))]
        self._reporter.wake()

    def text(self) -> str:
        """Return the figures as Prometheus reads them."""
        with self._lock:
            queries = list(self._queries.values())
        return "\n".join(_lines(queries)) + "\n"

    def _take(self, progress: Any) -> None:
        lags: list[tuple[str, str, dict[str, Any]]] = []
        ends: Offsets = {}
        ours: Offsets = {}
        for source in progress.sources:
            latest, end = (_parsed(text) for text in (source.latestOffset, source.endOffset))
            if LOG_KEY in end and MODE_KEY not in end:  # a spool's channel moves by itself
                read = from_json(end)
                ends |= read
                ours |= self._of_channel(read, latest, progress)
            for topic, labels in latest.get(LAG_KEY, {}).items():
                lags += [(str(topic), str(label), dict(figures)) for label, figures in labels.items()]
        with self._lock:
            query = self._queries.setdefault(str(progress.id), _Query(progress.name or str(progress.id)))
            query.epoch, query.row_count = progress.batchId, query.row_count + progress.numInputRows
            query.lags = lags[:LOGS_MAX]
            row_count = query.row_count
            while len(self._queries) > QUERIES_MAX:
                del self._queries[next(iter(self._queries))]
        ages = {
            (topic, label): figures.get("seconds") for topic, label, figures in lags if figures.get("messages") != 0
        }
        self._tell(
            str(progress.id),
            state="running",
            name=str(progress.name or ""),
            channel=self._options.channel if ours and self._options is not None else "",
            batch=progress.batchId,
            batch_at_s=time.monotonic(),
            row_count=row_count,
            logs={key: (read, _number(ages.get((key.topic, key.label)))) for key, read in ends.items()},
        )
        if self._surveyor is not None and ours:
            if any(not self._surveyor.place(key) for key in ours):
                self._surveyor.look(ours)
            self._surveyor.try_cursors(ours)

    def _of_channel(self, read: Offsets, latest: Mapping[str, Any], progress: Any) -> Offsets:
        """Return how far a source has read, if it has the channel that is to be moved; nothing of any other source.

        Args:
            latest: what the source said at the end of the micro-batch; nothing where it has repeated one and looked at
                nsqd not yet.
        """
        options = self._options
        if options is None or not latest:
            return {}
        ours = {key: end for key, end in read.items() if options.reads(key.topic, key.partition)}
        channel = latest.get(CHANNEL_KEY)
        if not ours or channel == options.channel:
            return ours
        if not self._has_told_of_others:
            self._has_told_of_others = True
            log.warning(
                "query %s reads %s, and its source has %s: channel %s is moved only for a query whose source was given "
                "channel=%s",
                progress.name or progress.id,
                ", ".join(sorted({key.topic for key in ours})),
                f"channel {channel}" if channel else "no channel",
                options.channel,
                options.channel,
            )
        return {}


def watch(
    spark: SparkSession,
    *,
    metrics: str | None = None,
    nsqadmin: str | None = None,
    nsqadmin_token: str = "",
    nsqadmin_ca_file: str = "",
    **options: str,
) -> QueryWatch:
    """Watch the queries of a session from now on.

    Args:
        metrics: ``host:port`` that serves ``/metrics`` for Prometheus.
        nsqadmin: URL of an nsqadmin that shows each query with its lag, also when it has ended.
        nsqadmin_token: where a token for it is whose role is ``operate``: ``env:NAME`` or ``file:/path``.
        nsqadmin_ca_file: authorities to trust for ``https``.
        options: of the source whose channel is to be moved right behind each micro-batch, as they were given to it:
            ``nsqd`` or ``lookupd``, ``topic``, ``channel`` and what secures connections. Without them none is moved,
            and queries whose source has not that channel never move it.

    Raises:
        OptionError: an option is wrong, or the address cannot be listened on.
    """
    parsed = SourceOptions.parse(options) if options else None
    if parsed is not None and not parsed.channel:
        raise OptionError("channel", "", "name the channel of the query, which is to be moved", SOURCE)
    listener = QueryWatch(parsed, metrics, nsqadmin, nsqadmin_token, nsqadmin_ca_file)
    spark.streams.addListener(listener)
    atexit.register(listener.close)  # what a script that ends has not told yet
    return listener


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _parsed(text: object) -> Mapping[str, Any]:
    value = json.loads(text) if isinstance(text, str) and text.startswith("{") else None
    return value if isinstance(value, dict) else {}


def _lines(queries: list[_Query]) -> Iterator[str]:
    for kind, about in _LAGS.items():
        name = f"flintmq_spark_lag_{kind}"
        yield f"# HELP {name} {about}\n# TYPE {name} gauge"
        for query in queries:
            for topic, label, figures in query.lags:
                partition, _, log_id = label.partition("/")
                if isinstance(figures.get(kind), int | float):
                    labels = {"query": query.name, "topic": topic, "partition": partition, "log_id": log_id}
                    yield f"{name}{_labels(labels)} {figures[kind]}"
    for name, kind, about, value in (
        ("flintmq_spark_batch", "gauge", "Number of the last micro-batch.", "epoch"),
        ("flintmq_spark_rows_total", "counter", "Rows read since the watch began.", "row_count"),
    ):
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}"
        for query in queries:
            yield f"{name}{_labels({'query': query.name})} {getattr(query, value)}"


def _labels(labels: Mapping[str, str]) -> str:
    shown = (value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") for value in labels.values())
    return "{" + ",".join(f'{name}="{value}"' for name, value in zip(labels, shown, strict=True)) + "}"


def _listening(address: str, text: Any) -> ThreadingHTTPServer:
    """Return a server of ``/metrics`` that listens, and serves when ``serve_forever`` is called."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            body = text().encode() if is_known else b"see /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing of each request."""

    try:
        host, port = split_address(address) if not address.endswith(":0") else (address[:-2], 0)
        server = ThreadingHTTPServer((host, port), Handler)
    except (OSError, ValueError) as error:
        allowed = f"host:port that can be listened on: {error}"
        if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
            allowed += "; if an earlier watch() of this driver listens there, call close() on what it has returned"
        raise OptionError("metrics", address, allowed, "argument") from error
    server.daemon_threads = True
    return server
