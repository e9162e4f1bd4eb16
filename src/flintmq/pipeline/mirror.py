"""``flintmq pipeline mirror``: topics of one cluster in another, each message once, with where it came from.

The rules of this file: nothing is mirrored onto itself; where a message came from is in headers, in a topic that can
have them, behind those that the message has, which stay the JSON they are.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flintmq.errors import UsageError
from flintmq.names import is_valid_name
from flintmq.options import SECOND, Switch, Text, option
from flintmq.pipeline.options import NO_END, SinkFlags, SourceFlags, StreamFlags, Work
from flintmq.pipeline.runner import Runner, run_command
from flintmq.pipeline.streams import COLUMNS, Queries, claimed, read_stream, target_of
from flintmq.pipeline.topics import Target, await_topics
from flintmq.spark.options import SourceOptions

HEADERS = {
    "source_topic": "topic",
    "source_partition": "partition",
    "source_log": "log_id",
    "source_offset": "offset",
    "source_timestamp_ms": "unix_millis(timestamp)",
}
_HOW = "How it is mirrored"


@dataclass(frozen=True, kw_only=True)
class MirrorOptions(SourceFlags, SinkFlags, StreamFlags):
    """The flags of flintmq pipeline mirror."""

    program: ClassVar[str] = "flintmq pipeline mirror"
    summary: ClassVar[str] = (
        "flintmq pipeline mirror copies topics from one cluster to another, each message once, in the order of its "
        "partition. --to-topic is the same topic unless you name another."
    )

    headers: bool = option(
        Switch(),
        True,
        f"keep headers, and add {', '.join(HEADERS)}; needs a topic with headers (--headers=false: bodies alone)",
        group=_HOW,
    )
    keep_partition: bool = option(Switch(), False, "into the partition of the same number", group=_HOW)
    prefix: str = option(Text("TEXT"), "", "the copy's topic is named so, followed by its own name", group=_HOW)
    dry_run: bool = option(Switch(), False, "count what there is, write nothing", group=_HOW)
    json: bool = option(Switch(), False, "print the result as a line of JSON", group=_HOW)


def mirror(options: MirrorOptions, runner: Runner | None = None) -> Work:
    """Copy topics from one cluster to another.

    Raises:
        UsageError: options are missing, or contradict each other.
        JobFailed: Spark failed.
        CheckpointError: the checkpoint is another job's, or in use.
        StoppedEarly: it was told to stop while a topic was waited for.
    """
    runner, work = runner or Runner(), Work()
    source = options.source()
    sink = options.sink(options)
    if options.prefix and options.to_topic:
        raise UsageError("give either --prefix or --to-topic")
    if options.prefix and not is_valid_name(options.prefix):
        raise UsageError(f"--prefix {options.prefix} is no beginning of a topic name")
    if not options.dry_run:
        options.trigger()
        SourceOptions.parse(source).check_stream(NO_END)
    other = "another --prefix" if options.prefix else "another --to-topic or --prefix"
    targets = [Target(sink, f"give --to-nsqd, --to-lookupd or {other}, or read other topics", options.prefix)]
    await_topics(
        source, options.wait_for_topic_ns / SECOND, runner.stop, checkpoint=options.checkpoint, targets=targets
    )
    with runner.session("flintmq-mirror", options, work) as spark:
        if options.dry_run:
            rows = spark.read.format("nsq").options(**{"columns": "topic,partition", **source}).load()
            counts = rows.groupBy("topic", "partition").count().orderBy("topic", "partition").collect()
            work.rows = sum(each["count"] for each in counts)
            work.more = {f"{each.topic}/{each.partition}": each["count"] for each in counts}
            return work
        job = {
            "job": "mirror",
            "topics": options.topics_told(),
            "to_topic": options.to_topic,
            "prefix": options.prefix,
        }
        how = {"headers": str(options.headers).lower(), "keep_partition": str(options.keep_partition).lower()}
        with claimed(options.checkpoint, job, target_of(sink, **how)) as name:
            columns = f"{COLUMNS},headers_json" if options.headers else COLUMNS
            frame = read_stream(spark, **{**source, "columns": columns})
            chosen = ["body"]
            if "topic" not in sink:
                chosen.append(f"concat('{options.prefix}', topic) AS topic")
            if options.keep_partition:
                chosen.append("partition")
            if options.headers:
                ours = ", ".join(f"'{header}', cast({value} AS string)" for header, value in HEADERS.items())
                chosen += ["headers_json", f"map({ours}) AS headers", "trace_id"]
            queries = Queries(options, name)
            queries.to_topic(frame.selectExpr(*chosen), sink)
            queries.wait(runner, work)
    return work


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline mirror``; a signal ends it, and the next run goes on there."""
    return run_command(MirrorOptions, arguments, _run)


def _run(options: MirrorOptions, runner: Runner) -> None:
    work = mirror(options, runner)
    if options.json:
        runner.say(json.dumps({"rows": work.rows, **work.more, "lag": work.lag}))
        return
    for place, count in work.more.items():
        runner.say(f"{count:>12}  {place}")
    runner.say(f"{work.rows} messages {'would be ' if options.dry_run else ''}mirrored")


__all__ = ["MirrorOptions", "mirror", "run"]
