"""``flintmq pipeline trace``: what the events of a trace say, as a table, as JSON, as files and as a report.

The rules of this file: what comes out is found by :mod:`flintmq.pipeline.lives`; here it is asked for and shown.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from flintmq.errors import FlintError, UsageError
from flintmq.options import MINUTE, SECOND, Choice, Duration, Items, Switch, Text, option
from flintmq.pipeline.lives import (
    QUANTILES,
    STAGES,
    TRACE_TOPIC,
    Found,
    Quality,
    Summary,
    expressions,
    lives,
    look_up,
    quality,
    read_events,
    summarize,
)
from flintmq.pipeline.options import SourceFlags, SparkFlags, Work, pairs
from flintmq.pipeline.runner import Runner, run_command
from flintmq.pipeline.topics import await_topics
from flintmq.spark.options import TIME_FORM, parse_timestamp_ns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_WHAT, _OUT = "What to look at", "What comes out"


@dataclass(frozen=True, kw_only=True)
class TraceOptions(SourceFlags, SparkFlags):
    """The flags of flintmq pipeline trace."""

    program: ClassVar[str] = "flintmq pipeline trace"
    summary: ClassVar[str] = (
        "flintmq pipeline trace puts the events of a trace together: the life of each message, latencies by stage, and "
        "which messages are lost, stuck or were delivered repeatedly. --topic is nsqd_trace unless you say another."
    )

    path: str = option(Text("PATH"), "", "an archive of the trace topic, in place of the topic", group=_WHAT)
    since: str = option(Text("TIME"), "", "events from then on: ISO 8601 (UTC), or ms since 1970", group=_WHAT)
    until: str = option(Text("TIME"), "", "events before it", group=_WHAT)
    of_topic: tuple[str, ...] = option(Items(Text("TOPIC")), (), "messages of this topic alone", group=_WHAT)
    trace_id: tuple[str, ...] = option(
        Items(Text("ID")), (), "show every event of the messages with this trace id", group=_WHAT
    )
    message_id: tuple[str, ...] = option(
        Items(Text("ID")),
        (),
        "show every event of the messages with this id, 32 hex digits, or 16 as clients of NSQ see it",
        group=_WHAT,
    )
    stuck_after_ns: int = option(
        Duration(0), MINUTE, "nothing for so long: stuck; overtaken by so much, and never sent: lost", group=_WHAT
    )
    format: str = option(Choice(("table", "json")), "table", "of what is printed", group=_OUT)
    to: str = option(Text("DIRECTORY"), "", "write every life there, for pandas, DuckDB, Spark", group=_OUT)
    to_format: str = option(Choice(("parquet", "json")), "parquet", "of what --to writes", group=_OUT)
    report: str = option(Text("DIRECTORY"), "", "write report.html and its plots there", group=_OUT)
    dry_run: bool = option(Switch(), False, "say how many events there are, of which topics and times", group=_OUT)


@contextmanager
def _kept(frame: DataFrame) -> Iterator[DataFrame]:
    frame.persist()
    try:
        yield frame
    finally:
        frame.unpersist()


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline trace``; return 1 when a message that was asked for is nowhere."""
    return run_command(TraceOptions, arguments, _run)


def _run(options: TraceOptions, runner: Runner) -> int:
    since_ns, until_ns = _time("--since", options.since), _time("--until", options.until)
    trace_ids = [_trace_id(each) for each in options.trace_id]
    message_ids = [_message_id(each) for each in options.message_id]
    for flag, place in (("--to", options.to), ("--report", options.report)):
        if place and Path(place).exists() and (not Path(place).is_dir() or any(Path(place).iterdir())):
            raise UsageError(f"{flag} {place} is there already, and not empty: name another directory")
    given: dict[str, str] = {}
    if options.path:
        if options.nsqd or options.lookupd or options.topic or options.channel or options.source_option:
            raise UsageError("give either --path, or the topic and where nsqd is")
        if not Path(options.path).exists():
            raise UsageError(f"--path {options.path} is not there")
    else:
        has_topic = bool(options.topic or pairs("--source-option", options.source_option).keys() & {"assign"})
        given = (options if has_topic else options.replace(topic=(TRACE_TOPIC,))).source()
    if options.report:
        from flintmq.pipeline.report import need_plots

        need_plots()
    if given:
        await_topics(given, options.wait_for_topic_ns / SECOND, runner.stop)
    work = Work()
    with runner.session("flintmq-trace", options, work) as spark:
        events = read_events(spark, options.path, since_ns, until_ns, **given)
        if options.of_topic:
            wanted = ", ".join(repr(_topic(each)) for each in options.of_topic)
            events = events.where(f"NOT is_event OR action = 'DROPPED' OR topic IN ({wanted})")
        with _kept(events):
            known = quality(events)
            work.rows = known.events
            work.more = {"bad": known.bad}
            runner.tell(work)
            if options.dry_run:
                _say_plan(events, known, options, runner)
                return 0
            if trace_ids or message_ids:
                return _say_events(look_up(events, trace_ids, message_ids), known, options, runner)
            with _kept(lives(events, options.stuck_after_ns / SECOND)) as found:
                summaries = summarize(found)
                if options.to:
                    writer = found.write.mode("append")
                    (writer.parquet if options.to_format == "parquet" else writer.json)(options.to)
                if options.report:
                    from flintmq.pipeline.report import write_report

                    write_report(Path(options.report), found, summaries, known)
    _say_summaries(summaries, known, options, runner)
    return 0


def _say_plan(events: DataFrame, known: Quality, options: TraceOptions, runner: Runner) -> None:
    rows = (
        events.where("is_event AND action != 'DROPPED'")
        .groupBy("topic")
        .agg(*expressions("count(*) AS events", "count(DISTINCT msgid, log_of) AS messages"))
        .orderBy("topic")
        .collect()
    )
    for row in rows:
        told = {"topic": row.topic, "events": row.events, "messages": row.messages}
        runner.say(json.dumps(told) if options.format == "json" else f"{row.events:>12} events of {row.topic}")
    seconds = (known.last_ns - known.first_ns) / 1e9
    if options.format == "table":
        runner.say(f"{known.events} events within {seconds:.1f} s")
    for note in known.notes():
        _note(note, options, runner)


def _note(note: str, options: TraceOptions, runner: Runner) -> None:
    runner.say(json.dumps({"note": note}) if options.format == "json" else note)


def _say_events(found: Found, known: Quality, options: TraceOptions, runner: Runner) -> int:
    if not found.events:
        reason = "no event of such a message; was it traced then, and is the time within --since and --until?"
        raise FlintError(" ".join((reason, *(f"({note})" for note in known.notes()))))
    first_ns = found.events[0]["timestamp"]
    for event in found.events:
        if options.format == "json":
            runner.say(json.dumps(event, default=int))
            continue
        after_ms = (event["timestamp"] - first_ns) / 1e6
        where = f"{event['topic']} {event.get('channel', '')}".strip()
        more = " ".join(f"{name}={event[name]}" for name in ("attempts", "delay_ms", "client", "node") if name in event)
        runner.say(f"{after_ms:>12.3f} ms  {event['action']:<11} {event.get('message_id', ''):<32} {where}  {more}")
    if found.has_more:
        note = (
            f"there are more events than these first {len(found.events):,}: narrow them by --since, --until, --of-topic"
        )
        _note_beside(note, options, runner, is_cut_off=True)
    for note in known.notes():
        _note_beside(note, options, runner)
    return 0


def _note_beside(note: str, options: TraceOptions, runner: Runner, **more: bool) -> None:
    """Say a note of events that were shown: on stderr, or as one more line of JSON."""
    if options.format == "json":
        runner.say(json.dumps({"note": note, **more}))
    else:
        print(note, file=sys.stderr, flush=True)


def _say_summaries(found: list[Summary], known: Quality, options: TraceOptions, runner: Runner) -> None:
    if options.format == "json":
        for each in found:
            runner.say(json.dumps(each.row()))
    else:
        for each in found:
            runner.say(f"{each.topic}, {'channel ' + each.channel if each.channel else 'no channel'}")
            states = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in each.states.items() if count)
            runner.say(f"  {each.messages} messages: {states}")
            runner.say(f"  {each.repeated} repeated, {each.requeued} requeued, {each.timed_out} timed out")
            runner.say(f"  {'ms':<10}" + "".join(f"{name:>12}" for name in (*QUANTILES, "max")))
            for stage in STAGES:
                values = ("-" if value is None else f"{value:.3f}" for value in each.latencies[stage].values())
                runner.say(f"  {stage:<10}" + "".join(f"{value:>12}" for value in values))
        runner.say(f"{known.events} events, {(known.last_ns - known.first_ns) / 1e9:.1f} s")
    for note in known.notes():
        _note(note, options, runner)


def _time(flag: str, text: str) -> int | None:
    try:
        return parse_timestamp_ns(text) if text else None
    except ValueError:
        raise UsageError(f"{flag} {text} is no time: give {TIME_FORM}") from None


def _trace_id(text: str) -> int:
    try:
        number = int(text, 0)
    except ValueError:
        number = 0
    if not 0 < number < 1 << 64:
        raise UsageError(f"--trace-id {text} is not a whole number from 1 to {(1 << 64) - 1}")
    return number


def _message_id(text: str) -> str:
    if len(text) not in (16, 32) or set(text.lower()) - set("0123456789abcdef"):
        raise UsageError(f"--message-id {text} is not 16 or 32 hex digits")
    return text.lower()


def _topic(text: str) -> str:
    from flintmq.names import is_valid_name

    if not is_valid_name(text):
        raise UsageError(f"--of-topic {text} is no topic name")
    return text


__all__ = ["TraceOptions", "run"]
