"""The queries on Spark that report themselves, as consumers: how far each is, and how far that is behind by now.

A driver reports after each micro-batch, when a query ends, and now and then in between
(:mod:`flintmq.spark.report`). What is behind is compared with what nsqd has now: it is right after the last
micro-batch, while a query is stopped, and when its driver is gone.

Rules of this file:

- What a driver says may be wrong: it is read with bounds, and shown as text. A query is known by the id of its
  checkpoint; who reports an id again takes its place.
- Queries, logs and questions have a bound; the one that was heard of longest ago goes first.
- The age of the oldest unread message follows from the report, or is asked of nsqd once for each place.
- Nothing of this outlives the process: drivers that run report again, by themselves.

Source: docs/decisions/0030; docs/spark.md.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from flintmq.client.admin import nsqd as nsqd_questions
from flintmq.env import Env
from flintmq.names import is_valid_name
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.snapshots import Snapshot, Snapshots
from flintmq.nsqadmin.upstream import NotAnswered, Upstream
from flintmq.nsqadmin.views import QueryLogRow, QueryRow

QUERY_COUNT_MAX = 500
LOG_COUNT_MAX = 1024
LOGS_KEPT_MAX = 16_384
ASKED_MAX = 256
SILENT_S = 60.0
MEASURED_S = 3.0
_NS_PER_S = 1_000_000_000
_TEXT_MAX = 200
_ERROR_MAX = 1000

_Word = Annotated[str, msgspec.Meta(max_length=_TEXT_MAX)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Seconds = Annotated[float, msgspec.Meta(ge=0)]


class ReportedLog(msgspec.Struct, frozen=True):
    """One partition log of a query.

    Attributes:
        log_id: 16 hex digits.
        read: the next message to read.
        seconds: age of the oldest unread message when this was reported; None: not known, or none is unread.
    """

    topic: _Word
    partition: Annotated[int, msgspec.Meta(ge=0, le=2**31)]
    log_id: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{16}$")]
    read: _Count
    seconds: _Seconds | None = None


class Reported(msgspec.Struct, frozen=True):
    """A query as its driver reports it.

    Attributes:
        id: of its checkpoint, which a restart keeps.
        batch: number of the last micro-batch; None: none has ended yet.
        batch_age_s: since it ended.
        row_count: rows read since the driver began to watch.
        error: why it failed.
    """

    id: Annotated[str, msgspec.Meta(min_length=1, max_length=_TEXT_MAX)]
    name: _Word = ""
    state: Literal["running", "stopped", "failed"] = "running"
    channel: _Word = ""
    batch: _Count | None = None
    batch_age_s: _Seconds | None = None
    row_count: _Count = 0
    error: Annotated[str, msgspec.Meta(max_length=_ERROR_MAX)] = ""
    logs: Annotated[list[ReportedLog], msgspec.Meta(max_length=LOG_COUNT_MAX)] = []


class Report(msgspec.Struct, frozen=True):
    """The queries of a driver."""

    queries: Annotated[list[Reported], msgspec.Meta(max_length=QUERY_COUNT_MAX)]


@dataclass(slots=True)
class _Query:
    reported: Reported
    heard_ns: int
    stored_ns: dict[tuple[str, str], int | None] = field(default_factory=dict)
    """The time at which the oldest unread message was stored, by topic and log; None: nobody tells."""


class Queries:
    """Remembers them."""

    def __init__(self, env: Env, upstream: Upstream, snapshots: Snapshots) -> None:
        self._env = env
        self._upstream = upstream
        self._snapshots = snapshots
        self._queries: OrderedDict[str, _Query] = OrderedDict()
        self._rows: list[QueryRow] = []
        self._measured_ns = 0
        self._turn = asyncio.Lock()

    def report(self, body: bytes) -> None:
        """Take a report.

        Raises:
            Refused: it cannot be read.
        """
        try:
            report = msgspec.json.decode(body, type=Report)
        except (msgspec.DecodeError, RecursionError) as error:
            raise Refused(400, f"INVALID_BODY: {error}") from None
        now_ns = self._env.clock.wall_ns()
        for each in report.queries:
            for log in each.logs:
                if not is_valid_name(log.topic):
                    raise Refused(400, f"INVALID_TOPIC: {log.topic!r}")
            found = _Query(each, now_ns)
            for log in each.logs:
                if log.seconds is not None and math.isfinite(log.seconds):
                    found.stored_ns[log.topic, log.log_id] = now_ns - int(min(log.seconds, 1e9) * _NS_PER_S)
            self._remember_places(found)
            self._queries[each.id] = found
            self._queries.move_to_end(each.id)
        self._measured_ns = 0
        kept = sum(len(one.reported.logs) for one in self._queries.values())
        while len(self._queries) > QUERY_COUNT_MAX or (kept > LOGS_KEPT_MAX and len(self._queries) > 1):
            kept -= len(self._queries.popitem(last=False)[1].reported.logs)

    def _remember_places(self, found: _Query) -> None:
        """Take over what was asked of nsqd about places where the query still is."""
        before = self._queries.get(found.reported.id)
        if before is None:
            return
        places = {(log.topic, log.log_id): log.read for log in before.reported.logs}
        for log in found.reported.logs:
            key = (log.topic, log.log_id)
            if key not in found.stored_ns and places.get(key) == log.read and key in before.stored_ns:
                found.stored_ns[key] = before.stored_ns[key]

    def forget(self, query: str) -> bool:
        """Forget a query until it is reported again; whether it was known."""
        self._measured_ns = 0
        return self._queries.pop(query, None) is not None

    async def rows(self) -> list[QueryRow]:
        """Return every query with its lag as of now, those that are furthest behind first; at most 3 s old."""
        if not self._queries:
            return []
        async with self._turn:
            now_ns = self._env.clock.wall_ns()
            if not 0 <= now_ns - self._measured_ns < MEASURED_S * _NS_PER_S:
                self._rows = await self._measure()
                self._measured_ns = now_ns
            return self._rows

    async def _measure(self) -> list[QueryRow]:
        snapshot = await self._snapshots.get()
        ends = await self._ends(snapshot)
        await self._ask_ages(ends)
        now_ns = self._env.clock.wall_ns()
        rows = [_row(query, ends, now_ns) for query in self._queries.values()]
        return sorted(rows, key=lambda row: (-(row.seconds or 0), -(row.messages or 0), row.name))

    async def _ends(self, snapshot: Snapshot) -> dict[tuple[str, str], tuple[str, int, int]]:
        """Ask our own nsqd where each log ends: by topic and log the node, the partition, and the next message."""
        holders: dict[str, list[str]] = {}
        for address, topics in snapshot.on_node.items():
            if snapshot.nodes[address].kind == "flintmq":
                for name in topics:
                    holders.setdefault(name, []).append(address)
        wanted = dict.fromkeys(
            (log.topic, log.partition) for query in reversed(self._queries.values()) for log in query.reported.logs
        )
        asked = list(wanted)[:ASKED_MAX]
        answers = await asyncio.gather(
            *(
                self._upstream.look_all("nsqd", holders.get(topic, ()), daemons.partition_stats(topic, number))
                for topic, number in asked
            )
        )
        found: dict[tuple[str, str], tuple[str, int, int]] = {}
        for (topic, number), answer in zip(asked, answers, strict=True):
            for address, stats in answer.found.items():
                for each in stats.topics or ():
                    if each.topic_name == topic and each.log_id and each.topic_partition == str(number):
                        found[topic, each.log_id] = (address, number, each.message_count + 1)
        return found

    async def _ask_ages(self, ends: dict[tuple[str, str], tuple[str, int, int]]) -> None:
        """Ask when the oldest unread messages were stored, where no report has said it, once for each place."""
        asked: list[Coroutine[Any, Any, None]] = []
        for query in self._queries.values():
            for log in query.reported.logs:
                key = (log.topic, log.log_id)
                if key in ends and log.read < ends[key][2] and key not in query.stored_ns and len(asked) < ASKED_MAX:
                    query.stored_ns[key] = None
                    asked.append(self._ask_age(query, log, *ends[key][:2]))
        await asyncio.gather(*asked)

    async def _ask_age(self, query: _Query, log: ReportedLog, address: str, partition: int) -> None:
        question = nsqd_questions.get_message(log.topic, count=max(1, log.read), partition=partition)
        try:
            found = await self._upstream.look("nsqd", address, question)
        except NotAnswered:
            return  # its age stays unknown until it is somewhere else
        query.stored_ns[log.topic, log.log_id] = found.timestamp_ns


def _row(query: _Query, ends: dict[tuple[str, str], tuple[str, int, int]], now_ns: int) -> QueryRow:
    reported = query.reported
    logs = []
    for log in reported.logs:
        address, _, end = ends.get((log.topic, log.log_id), ("", 0, None))
        messages = None if end is None else max(0, end - log.read)
        stored_ns = query.stored_ns.get((log.topic, log.log_id))
        seconds = None if messages is None or stored_ns is None else max(0.0, (now_ns - stored_ns) / _NS_PER_S)
        logs.append(
            QueryLogRow(
                topic=log.topic,
                partition=log.partition,
                log_id=log.log_id,
                node=address,
                read=log.read,
                end=end,
                messages=messages,
                seconds=0.0 if messages == 0 else seconds,
            )
        )
    silent_s = (now_ns - query.heard_ns) / _NS_PER_S
    batch_at_s = None
    if reported.batch_age_s is not None and math.isfinite(reported.batch_age_s):
        batch_at_s = query.heard_ns / _NS_PER_S - min(reported.batch_age_s, 1e9)
    messages, seconds = _lag(logs)
    return QueryRow(
        id=reported.id,
        name=reported.name or reported.id,
        state="silent" if reported.state == "running" and silent_s > SILENT_S else reported.state,
        heard_at_s=query.heard_ns / _NS_PER_S,
        channel=reported.channel if is_valid_name(reported.channel) else "",
        batch=reported.batch,
        batch_at_s=batch_at_s,
        row_count=reported.row_count,
        error=reported.error,
        messages=messages,
        seconds=seconds,
        logs=logs,
    )


def _lag(logs: list[QueryLogRow]) -> tuple[int | None, float | None]:
    """Return messages and seconds of several logs together; None: nobody knows."""
    counts = [log.messages for log in logs if log.messages is not None]
    ages = [log.seconds for log in logs if log.seconds is not None and log.messages]
    if not counts:
        return (None, None) if logs else (0, 0.0)
    return sum(counts), max(ages) if ages else None if sum(counts) else 0.0


def query_of(topic: str, row: QueryRow) -> QueryRow:
    """Return a query with its logs of one topic, and the lag in these."""
    logs = [log for log in row.logs if log.topic == topic]
    messages, seconds = _lag(logs)
    return msgspec.structs.replace(row, logs=logs, messages=messages, seconds=seconds)


__all__ = ["Queries", "Report", "query_of"]
