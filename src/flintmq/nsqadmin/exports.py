"""Every view as JSON, below ``/api/v2``, and with ``format=csv`` each table of it, which ``table`` names.

Rules of this file: the fields are those of :mod:`flintmq.nsqadmin.views`, and a table is called as its field; a query
says what a page's query says, and what cannot be read is refused. In CSV no text begins with a character that makes a
spreadsheet compute.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from flintmq.nsqadmin.admin import Admin
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.guard import api_response
from flintmq.nsqadmin.history import SeriesKind
from flintmq.nsqadmin.messages import PEEK_COUNT, By, What
from flintmq.nsqadmin.views import STATES, TOPIC_SORTS, State, TopicsQuery, View

EXPORTED_MAX = 20_000
_SERIES = ("total", "node", "topic", "channel")
_HISTORY = ("times_s", "depth", "in_per_s", "out_per_s", "in_flight", "latency_ms")
_COMPUTING = ("=", "+", "-", "@", "\t", "\r")


class Exports:
    """These routes."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._gather = admin.gather

    def routes(self) -> list[Route]:
        """Return them."""
        return [
            Route("/api/v2/topics", self._topics),
            Route("/api/v2/topics/{topic}", self._topic),
            Route("/api/v2/topics/{topic}/{channel}", self._channel),
            Route("/api/v2/nodes", self._nodes),
            Route("/api/v2/nodes/{node}", self._node),
            Route("/api/v2/queries", self._queries),
            Route("/api/v2/queries", self._report, methods=["POST"]),
            Route("/api/v2/counter", self._counter),
            Route("/api/v2/lookup", self._lookup),
            Route("/api/v2/cluster", self._cluster),
            Route("/api/v2/problems", self._problems),
            Route("/api/v2/peek/{topic}/{channel}", self._peek),
            Route("/api/v2/messages/{topic}", self._message),
            Route("/api/v2/dead-letters/{topic}", self._dead_letters),
            Route("/api/v2/top", self._top),
            Route("/api/v2/history", self._history),
            Route("/api/v2/graphite", self._graphite),
            Route("/api/v2/audit", self._audit),
        ]

    async def _topics(self, request: Request) -> Response:
        is_csv = _is_csv(request)
        query = topics_query(request.query_params, EXPORTED_MAX if is_csv else 50)
        view = await self._gather.topics(query, EXPORTED_MAX if is_csv else None)
        return _answer(request, view, "topics")

    async def _topic(self, request: Request) -> Response:
        view = await self._gather.topic(request.path_params["topic"])
        if not view.is_found:
            raise Refused(404, "TOPIC_NOT_FOUND")
        return _answer(request, view, "channels", "partitions", "queries", "nodes", "producers")

    async def _channel(self, request: Request) -> Response:
        view = await self._gather.channel(request.path_params["topic"], request.path_params["channel"])
        if not view.is_found:
            raise Refused(404, "CHANNEL_NOT_FOUND")
        return _answer(request, view, "clients", "partitions", "nodes")

    async def _nodes(self, request: Request) -> Response:
        view = await self._gather.nodes()
        return _answer(request, view, "nodes")

    async def _node(self, request: Request) -> Response:
        query = request.query_params
        page, size = number(query, "page", 1), number(query, "page_size", 50)
        view = await self._gather.node(request.path_params["node"], page, size, query.get("text", ""))
        if view is None:
            raise Refused(404, "NODE_NOT_FOUND")
        return _answer(request, view, "topics", "channels", "producers")

    async def _queries(self, request: Request) -> Response:
        view = await self._gather.queries()
        return _answer(request, view, "queries")

    async def _report(self, request: Request) -> Response:
        request.state.visitor.require("operate")
        self._admin.queries.report(request.state.body)
        return api_response({})

    async def _counter(self, request: Request) -> Response:
        view = await self._gather.counter()
        return _answer(request, view, "rows")

    async def _lookup(self, request: Request) -> Response:
        return _answer(request, await self._gather.lookup(), "lookupds", "inactive")

    async def _cluster(self, request: Request) -> Response:
        view = await self._gather.cluster()
        return _answer(request, view, "nodes", "moves", "troubled", "elections")

    async def _problems(self, request: Request) -> Response:
        view = await self._gather.problems()
        return _answer(request, view, "findings")

    async def _peek(self, request: Request) -> Response:
        path, query = request.path_params, request.query_params
        what = _choice(query, "what", ("next", "in_flight", "deferred"))
        view = await self._gather.peek(
            path["topic"], path["channel"], cast(What, what), request.state.visitor, number(query, "count", PEEK_COUNT)
        )
        return _answer(request, view, "messages")

    async def _message(self, request: Request) -> Response:
        query = request.query_params
        by = _choice(query, "by", ("id", "trace", "time"))
        value = query.get("value", "")[:200]
        view = await self._gather.message(request.path_params["topic"], cast(By, by), value, request.state.visitor)
        return _answer(request, view, "events", "found")

    async def _dead_letters(self, request: Request) -> Response:
        view = await self._gather.dead_letters(request.path_params["topic"], request.state.visitor)
        return _answer(request, view, "messages")

    async def _top(self, request: Request) -> Response:
        view = await self._gather.top(number(request.query_params, "count", 10))
        return _answer(request, view, "deepest", "slowest", "most_requeued", "growing", "behind")

    async def _history(self, request: Request) -> Response:
        query = request.query_params
        series = _choice(query, "series", _SERIES)
        span_s = number(query, "span_s", 1800)
        view = await self._gather.history(cast(SeriesKind, series), query.get("name", "")[:200], span_s)
        if not _is_csv(request):
            return api_response(view)
        columns = [getattr(view, name) for name in _HISTORY]
        return _csv(_HISTORY, zip(*columns, strict=True), "history")

    async def _graphite(self, request: Request) -> Response:
        series = _choice(request.query_params, "series", ("topic", "channel"))
        return api_response(self._admin.graphite(series, request.query_params.get("name", "")[:200]))

    async def _audit(self, request: Request) -> Response:
        request.state.visitor.require("admin")
        query = request.query_params
        view = await self._gather.audit(number(query, "count", 200), query.get("text", ""))
        return _answer(request, view, "rows")


def topics_query(query: Any, page_size: int = 50) -> TopicsQuery:
    """Read which topics are wanted.

    Raises:
        Refused: something of it cannot be.
    """
    sort = query.get("sort", "name") or "name"
    if sort.removeprefix("-") not in TOPIC_SORTS:
        raise Refused(400, f"sort must be one of {', '.join(TOPIC_SORTS)}, with - before it for the greatest first")
    state = query.get("state", "all") or "all"
    if state not in STATES:
        raise Refused(400, f"state must be one of {', '.join(STATES)}")
    return TopicsQuery(
        text=query.get("text", "")[:64],
        sort=sort,
        page=number(query, "page", 1),
        page_size=number(query, "page_size", page_size),
        state=cast(State, state),
    )


def number(query: Any, name: str, default: int) -> int:
    """Read a whole number from 1.

    Raises:
        Refused: it is none.
    """
    text = query.get(name, "")
    if not text:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 10) or not int(text):
        raise Refused(400, f"{name} must be a whole number from 1")
    return int(text)


def _choice(query: Any, name: str, allowed: Sequence[str]) -> str:
    """Read one of several words; the first where nothing is said."""
    word: str = query.get(name, "") or allowed[0]
    if word not in allowed:
        raise Refused(400, f"{name} must be one of {', '.join(allowed)}")
    return word


def _is_csv(request: Request) -> bool:
    kind = request.query_params.get("format", "json")
    if kind not in ("json", "csv"):
        raise Refused(400, "format must be json or csv")
    return kind == "csv"


def _answer(request: Request, view: View, *tables: str) -> Response:
    """Return a view as JSON, or one of its tables as CSV: the first, unless ``table`` names another one."""
    table = _choice(request.query_params, "table", tables)
    if not _is_csv(request):
        return api_response(view)
    found = getattr(view, table)
    if table == "inactive":  # names of channels by topic
        return _csv(("topic", "channels"), found.items(), table)
    is_by_topic = isinstance(found, dict)
    rows = [(name, row) for name, those in found.items() for row in those] if is_by_topic else [("", r) for r in found]
    if not rows:
        return _csv((), (), table)
    fields: tuple[str, ...] = rows[0][1].__struct_fields__
    if "topic" in fields or not is_by_topic:
        return _csv(fields, ([getattr(row, field) for field in fields] for _, row in rows), table)
    lines = ([name, *(getattr(row, field) for field in fields)] for name, row in rows)
    return _csv(("topic", *fields), lines, table)


def _csv(fields: Sequence[str], rows: Iterable[Iterable[Any]], name: str) -> Response:
    """Return rows as CSV; lists and objects in a cell are JSON."""
    text = io.StringIO()
    writer = csv.writer(text)
    if fields:
        writer.writerow(fields)
    for row in rows:
        writer.writerow([_cell(value) for value in row])
    headers = {
        "Content-Type": "text/csv; charset=utf-8",
        "Content-Disposition": f'attachment; filename="{name.replace("_", "-")}.csv"',
    }
    return Response(text.getvalue(), headers=headers)


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return f"'{text}" if text.startswith(_COMPUTING) else text


__all__ = ["Exports", "number", "topics_query"]
