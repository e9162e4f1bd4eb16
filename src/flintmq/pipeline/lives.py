"""Lives of messages: from the events of a trace (docs/tracing.md) to what became of each message.

A *life* is one message on one channel: when it was due, first sent, last sent and finished. It is due when it was
published, or so much later as its publisher asked for. Its stages add up::

    due --wait--> first sent --repeats--> last sent --process--> finished          total is all of it

The rules of this file: everything is SQL over the events, so it runs on as many machines as Spark has; a row that is no
event is counted and named; times are of the nsqd that told of them; what tracing left out is said beside the result.

Source: docs/tracing.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.errors import FlintError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TRACE_TOPIC = "nsqd_trace"
STAGES = ("wait", "repeats", "process", "total")
QUANTILES = {"p50": 0.5, "p99": 0.99, "p999": 0.999}
STATES = ("finished", "in_flight", "waiting", "deferred", "stuck", "lost", "unknown", "dead_letter", "expired")
_DROPPED_FOR_NS = 2_000_000_000  # nsqd tells of what it has left out a second later
EVENTS_SHOWN_MAX = 10_000
HALF_ID_DIGITS = 16  # all that clients of NSQ see of the id of a message on a topic with partitions

_FIELDS = (
    "timestamp bigint, action string, topic string, msgid bigint, traceid decimal(20,0), partition int, "
    "channel string, message_id string, offset bigint, attempts int, client string, node string, "
    "delay_ms bigint, count bigint"
)
# a plain topic has a log on each nsqd, so its numbers mean something there alone; 32 digits: a topic with partitions
_EVENTS = """
SELECT e.*, if(length(e.message_id) = 32, '', e.node) AS log_of, at_topic, at_partition, at_offset,
       e.timestamp IS NOT NULL AND e.action IS NOT NULL
         AND (e.action = 'DROPPED' OR (e.topic IS NOT NULL AND e.msgid IS NOT NULL)) AS is_event
FROM (SELECT from_json(cast(body AS string), '{fields}') AS e, {places} FROM {rows})
"""
# one shuffle of all events; what the others have is as small as there are channels and partitions
_LIVES = """
WITH messages AS (
  SELECT topic, log_of, msgid, min(timestamp) FILTER (WHERE action = 'PUB') AS published_ns,
         max(client) FILTER (WHERE action = 'PUB') AS publisher, max(traceid) AS trace_id,
         max(delay_ms) FILTER (WHERE action = 'PUB') AS delay_ms,
         max(partition) AS partition, max(message_id) AS message_id, max_by(node, timestamp) AS node,
         collect_list(struct(timestamp, action, channel, client, attempts, delay_ms))
           FILTER (WHERE channel IS NOT NULL) AS steps
  FROM {events} GROUP BY topic, log_of, msgid
), channels AS (
  SELECT topic, collect_list(struct(channel, since_ns)) AS channels FROM (
    SELECT topic, channel, min(timestamp) AS since_ns FROM {events} WHERE channel IS NOT NULL GROUP BY topic, channel
  ) GROUP BY topic
), by_channel AS (
  SELECT *, filter(steps, s -> s.channel = channel) AS own FROM (
    SELECT /*+ BROADCAST(c) */ m.*, c.channels IS NOT NULL AS has_channels, explode_outer(array_union(
      transform(steps, s -> s.channel),
      transform(filter(coalesce(c.channels, array()), e -> m.published_ns >= e.since_ns), e -> e.channel)
    )) AS channel
    FROM messages m LEFT JOIN channels c ON m.topic = c.topic
  ) WHERE channel IS NOT NULL OR NOT has_channels
), counted AS (
  SELECT *, transform(filter(own, s -> s.action = 'START'), s -> s.timestamp) AS starts,
         array_min(transform(filter(own, s -> s.action = 'FIN'), s -> s.timestamp)) AS finished_ns,
         array_max(transform(own, s -> struct(s.timestamp AS at, s.action AS action, s.delay_ms AS delay_ms)))
           AS last_step,
         array_max(filter(own, s -> s.action = 'START')).client AS consumer
  FROM by_channel
), joined AS (
  -- a delay counts from when nsqd received the message, and PUB is told of when it is stored
  SELECT *, if(delay_ms IS NULL, published_ns, least(published_ns + delay_ms * 1000000, array_min(starts))) AS due_ns,
         array_min(starts) AS first_sent_ns,
         array_max(filter(starts, t -> finished_ns IS NULL OR t <= finished_ns)) AS last_sent_ns,
         coalesce(size(starts), 0) AS deliveries, {counts},
         array_max(transform(own, s -> s.attempts)) AS attempts,
         coalesce(last_step.action, 'PUB') AS last_action, greatest(last_step.at, published_ns) AS last_ns,
         if(last_step.action = 'REQ_DEFER', coalesce(last_step.delay_ms, 0) * 1000000, 0) AS put_off_ns
  FROM counted
), overtaken AS (
  SELECT topic, channel, log_of, partition, delay_ms IS NULL AS is_prompt, max(due_ns) AS through_ns
  FROM joined WHERE deliveries > 0 GROUP BY topic, channel, log_of, partition, delay_ms IS NULL
), gaps AS (
  -- times in which events were left out, those that are near one another as one: as many as a list can hold
  SELECT coalesce(collect_list(struct(node, since_ns, through_ns)), array()) AS gaps FROM (
    SELECT node, min(timestamp) - {dropped_for_ns} AS since_ns, max(timestamp) AS through_ns FROM (
      SELECT node, timestamp, sum(is_first) OVER (PARTITION BY node ORDER BY timestamp) AS number FROM (
        SELECT node, timestamp,
               if(timestamp - lag(timestamp) OVER (PARTITION BY node ORDER BY timestamp) > {quiet_ns}, 1, 0) AS is_first
        FROM {drops}
      )
    ) GROUP BY node, number
  )
), judged AS (
  SELECT /*+ BROADCAST(o), BROADCAST(g) */ j.*,
         CASE WHEN finishes > 0 THEN 'finished' WHEN dead_letters > 0 THEN 'dead_letter'
              WHEN expiries > 0 THEN 'expired'
              WHEN deliveries = 0 AND j.due_ns > {now_ns} THEN 'deferred'
              WHEN deliveries = 0 AND o.through_ns - j.due_ns > {quiet_ns} THEN 'lost'
              WHEN deliveries = 0 AND last_action = 'PUB' THEN 'waiting'
              WHEN j.last_ns + put_off_ns > {now_ns} THEN 'deferred'
              WHEN {now_ns} - j.last_ns - put_off_ns > {quiet_ns} THEN 'stuck'
              ELSE 'in_flight' END AS state,
         exists(g.gaps, e -> (j.log_of = '' OR e.node = j.log_of)
                             AND j.last_ns + put_off_ns BETWEEN e.since_ns - {quiet_ns} AND e.through_ns) AS lacks_some
  FROM joined j LEFT JOIN overtaken o
    ON j.topic = o.topic AND j.channel = o.channel AND j.log_of = o.log_of AND j.partition <=> o.partition
    AND (j.delay_ms IS NULL) = o.is_prompt
  CROSS JOIN gaps g
)
SELECT topic, channel, partition, msgid, message_id, trace_id, node, publisher,
       consumer, published_ns, delay_ms, first_sent_ns, last_sent_ns, finished_ns, last_ns, last_action,
       if(state IN ('stuck', 'lost') AND lacks_some, 'unknown', state) AS state,
       deliveries, finishes, requeues, timeouts, disconnects, touches, attempts,
       (first_sent_ns - due_ns) / 1e6 AS wait_ms,
       if(deliveries > 1, (last_sent_ns - first_sent_ns) / 1e6, NULL) AS repeats_ms,
       (finished_ns - last_sent_ns) / 1e6 AS process_ms, (finished_ns - due_ns) / 1e6 AS total_ms
FROM judged
"""
_COUNTS = {
    "finishes": ("FIN",),
    "requeues": ("REQ", "REQ_DEFER"),
    "timeouts": ("TIMEOUT",),
    "disconnects": ("DISCONNECT",),
    "touches": ("TOUCH",),
    "dead_letters": ("DEAD_LETTER",),
    "expiries": ("EXPIRED",),
}


@dataclass(slots=True)
class Summary:
    """The lives of one topic on one channel.

    Attributes:
        channel: None where the topic has none.
        states: number of messages by state.
        repeated: messages that were delivered more than once.
        latencies: by stage, milliseconds by quantile; None where no message came through that stage.
    """

    topic: str
    channel: str | None
    messages: int
    states: dict[str, int]
    repeated: int
    requeued: int
    timed_out: int
    latencies: dict[str, dict[str, float | None]]

    def row(self) -> dict[str, Any]:
        """Return it as a line of JSON has it."""
        told = {"topic": self.topic, "channel": self.channel, "messages": self.messages, **self.states}
        told |= {"repeated": self.repeated, "requeued": self.requeued, "timed_out": self.timed_out}
        return told | {f"{stage}_ms": self.latencies[stage] for stage in STAGES}


@dataclass(slots=True)
class Quality:
    """The events themselves: how many, and how whole.

    Attributes:
        events: that are used.
        dropped: events that nsqd did not record, because there were too many.
        bad: rows that are no events.
        bad_place: where the first of them is.
    """

    events: int
    dropped: int
    bad: int
    bad_place: str
    first_ns: int
    last_ns: int

    def notes(self) -> Iterator[str]:
        """Say what one has to know about the result."""
        if self.bad:
            yield f"{self.bad} rows are no events of a trace, the first of them at {self.bad_place}"
        if self.dropped:
            yield (
                f"{self.dropped} events were not recorded, of whichever topics (--trace-max-rate): lives of that time "
                "lack stages, and what seems stuck or lost then is unknown"
            )


def read_events(
    spark: SparkSession, path: str | Path = "", since_ns: int | None = None, until_ns: int | None = None, **options: str
) -> DataFrame:
    """Read the events of a trace, from its topic or from an archive of it.

    Args:
        path: of the archive, also one in a table; without it the topic is read.
        options: of format nsq for reading; ``topic`` is ``nsqd_trace`` unless it is given.

    Returns:
        A row for each event, with the fields of docs/tracing.md; rows with ``is_event`` false are something else.

    Raises:
        FlintError: the archive is a table that cannot be read by its files, or its rows have no body.
    """
    if path:
        rows = spark.read.parquet(*_files(str(path)))
        if since_ns is not None:
            rows = rows.where(f"timestamp >= timestamp_micros({since_ns // 1000})")
    else:
        given = {"columns": "topic,partition,offset,body", **options}
        if not any(name.lower() in ("topic", "topics", "topicpattern", "assign", "subscribe") for name in given):
            given["topic"] = TRACE_TOPIC
        if since_ns is not None:
            given["startingTimestamp"] = str(since_ns // 1_000_000)
        rows = spark.read.format("nsq").options(**given).load()
    if "body" not in rows.columns:
        raise FlintError(f"{path} has no column body, but {', '.join(rows.columns)}: it is no archive of a trace")
    places = ", ".join(
        f"{name if name in rows.columns else 'NULL'} AS at_{name}" for name in ("topic", "partition", "offset")
    )
    events = spark.sql(_EVENTS.replace("{fields}", _FIELDS).replace("{places}", places), rows=rows)
    bounds = []
    if since_ns is not None:
        bounds.append(f"timestamp >= {since_ns}")
    if until_ns is not None:
        bounds.append(f"timestamp < {until_ns}")
    return events.where(f"NOT is_event OR ({' AND '.join(bounds)})") if bounds else events


def _files(path: str) -> list[str]:
    """Return what Spark is to read of an archive: of a table its files alone, not what it has left behind.

    Raises:
        FlintError: it is in a table whose files cannot be told, or has tables below it.
    """
    from flintmq.pipeline.parquet import Wanted, check_no_table_below, find_files
    from flintmq.spark.lake.table import table_around

    name = path.removeprefix("file://")
    local = Path(name)
    if "://" in name or not local.exists():
        return [path]  # Spark knows whether it is there
    if table_around(local.resolve()) is not None:
        return [str(each) for each in find_files(local, Wanted())]
    check_no_table_below(local, local.glob("**/*.parquet"))
    return [path]


def quality(events: DataFrame) -> Quality:
    """Count events, and what is no event."""
    (row,) = events.selectExpr(
        "count_if(is_event AND action != 'DROPPED') AS events",
        "coalesce(sum(count) FILTER (WHERE action = 'DROPPED'), 0) AS dropped",
        "count_if(NOT is_event) AS bad",
        "min(struct(at_topic, at_partition, at_offset)) FILTER (WHERE NOT is_event) AS place",
        "coalesce(min(timestamp) FILTER (WHERE is_event), 0) AS first_ns",
        "coalesce(max(timestamp) FILTER (WHERE is_event), 0) AS last_ns",
    ).collect()
    found = row.place.asDict() if row.place else {}
    place = ", ".join(f"{name.removeprefix('at_')} {value}" for name, value in found.items())
    return Quality(row.events, int(row.dropped), row.bad, place, row.first_ns, row.last_ns)


def lives(events: DataFrame, stuck_after_s: float = 60.0, now_ns: int | None = None) -> DataFrame:
    """Put events together to lives, one row for each message on each channel.

    Args:
        stuck_after_s: a message that was sent and of which nothing was heard for so long is stuck; one that was never
            sent, though messages that were due so much later were, is lost. Deferred ones are no measure of others.
            Where events were left out so soon after its last one, either is unknown.
        now_ns: the time that "so long" ends at; the last event's unless it is given.
    """
    used = events.where("is_event AND action != 'DROPPED'")
    if now_ns is None:
        (row,) = used.selectExpr("coalesce(max(timestamp), 0) AS last_ns").collect()
        now_ns = row.last_ns
    quiet_ns = int(stuck_after_s * 1e9)
    counts = ", ".join(
        f"coalesce(size(filter(own, s -> s.action IN ({', '.join(map(repr, actions))}))), 0) AS {name}"
        for name, actions in _COUNTS.items()
    )
    numbers = {"quiet_ns": quiet_ns, "now_ns": now_ns, "dropped_for_ns": _DROPPED_FOR_NS}
    text = _LIVES.replace("{counts}", counts)
    for name, number in numbers.items():
        text = text.replace(f"{{{name}}}", str(number))
    return events.sparkSession.sql(text, events=used, drops=events.where("is_event AND action = 'DROPPED'"))


def summarize(found: DataFrame) -> list[Summary]:
    """Count lives by topic, channel and state, and find the quantiles of their stages."""
    quantiles = f"array({', '.join(map(str, QUANTILES.values()))})"
    rows = (
        found.groupBy("topic", "channel")
        .agg(*expressions(
            "count(*) AS messages",
            *(f"count_if(state = '{state}') AS {state}" for state in STATES),
            "count_if(deliveries > 1) AS repeated",
            "count_if(requeues > 0) AS requeued",
            "count_if(timeouts > 0) AS timed_out",
            *(f"percentile({stage}_ms, {quantiles}) AS {stage}" for stage in STAGES),
            *(f"max({stage}_ms) AS {stage}_max" for stage in STAGES),
        ))
        .orderBy("topic", "channel")
        .collect()
    )  # fmt: skip
    return [
        Summary(
            row.topic, row.channel, row.messages, {state: row[state] for state in STATES}, row.repeated, row.requeued,
            row.timed_out, {stage: _latencies(row, stage) for stage in STAGES},
        )
        for row in rows
    ]  # fmt: skip


def _latencies(row: Any, stage: str) -> dict[str, float | None]:
    values = row[stage] or [None] * len(QUANTILES)
    return {**dict(zip(QUANTILES, values, strict=True)), "max": row[f"{stage}_max"]}


def expressions(*texts: str) -> list[Any]:
    """Return columns that are SQL."""
    from pyspark.sql import functions

    return [functions.expr(text) for text in texts]


@dataclass(slots=True)
class Found:
    """The events of some messages.

    Attributes:
        events: in the order of time, the first 10,000 at most; each without the fields that it does not have.
        has_more: whether there are more.
    """

    events: list[dict[str, Any]]
    has_more: bool


def look_up(events: DataFrame, trace_ids: Sequence[int] = (), message_ids: Sequence[str] = ()) -> Found:
    """Find the events of some messages.

    Args:
        message_ids: 32 hex digits, lower-case; or 16, which are a whole id of a plain topic, and the first half of one
            of a topic with partitions: messages of several topics can have the same.
    """
    tests = []
    if trace_ids:
        tests.append(f"traceid IN ({', '.join(f'{each}BD' for each in trace_ids)})")
    if message_ids:
        ids = ", ".join(repr(each) for each in message_ids)
        tests.append(f"message_id IN ({ids}) OR substr(message_id, 1, {HALF_ID_DIGITS}) IN ({ids})")
    fields = [each.split()[0] for each in _FIELDS.split(", ")]
    chosen = events.where("is_event AND action != 'DROPPED'").where(" OR ".join(tests)).orderBy("timestamp")
    rows = chosen.select(*fields).limit(EVENTS_SHOWN_MAX + 1).collect()
    found = [{name: value for name, value in row.asDict().items() if value is not None} for row in rows]
    return Found(found[:EVENTS_SHOWN_MAX], len(found) > EVENTS_SHOWN_MAX)
