"""``flintmq pipeline lag``: how far a query on Spark is behind, from its checkpoint and from nsqd; no Spark is started.

The rules of this file: the checkpoint is only read. A channel is moved only when that is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flintmq.clock import SystemClock
from flintmq.errors import FlintError, UsageError
from flintmq.options import SECOND, Duration, Repeated, Switch, Text, option, read_command, version_line
from flintmq.pipeline.options import SECURITY, WHERE, LinkFlags, pairs
from flintmq.pipeline.streams import JOB, ROWS
from flintmq.spark.lag import NoCheckpoint, PartitionLag, committed_offsets, measure
from flintmq.spark.offsets import Offsets
from flintmq.spark.options import DIRECT, OFFSET, SPOOL, SourceOptions
from flintmq.spark.spool import spooled_lag
from flintmq.spark.survey import Surveyor
from flintmq.version import __version__

_WHAT, _HOW = "What to look at", "How it is shown"
_HEADER = f"{'topic':<24} {'partition':>9} {'nsqd':<22} {'read':>13} {'end':>13} {'messages':>11} {'seconds':>9}"


@dataclass(frozen=True, kw_only=True)
class LagOptions(LinkFlags):
    """The flags of flintmq pipeline lag."""

    program: ClassVar[str] = "flintmq pipeline lag"
    summary: ClassVar[str] = "flintmq pipeline lag says how far a query on Spark is behind, by partition."

    last_groups: ClassVar[tuple[str, ...]] = (WHERE, SECURITY)

    checkpoint: str = option(Text("DIRECTORY"), "", "of a query or of a job, a local directory", group=_WHAT)
    source_option: tuple[str, ...] = option(
        Repeated(Text("NAME=VALUE")),
        (),
        "any other option of format nsq for reading, such as retries=3",
        group=WHERE,
    )
    spool: str = option(
        Text("DIRECTORY"), "", "with mode=spool: the query's spoolLocation, instead of nsqd", group=_WHAT
    )
    json: bool = option(Switch(), False, "print a line of JSON for each partition", group=_HOW)
    update_channel: str = option(
        Text("CHANNEL"),
        "",
        "move this channel of the query to where it is, so that its depth in nsqd is the lag",
        group=_WHAT,
    )
    interval_ns: int = option(Duration(0), 0, "say it again after so long; 0: once", default_text="once", group=_HOW)


@dataclass(frozen=True, slots=True)
class Lag:
    """The lag of a query, and where its channel was moved.

    Attributes:
        moved_count: logs in which the channel stands where the query does.
    """

    partitions: list[PartitionLag]
    moved_count: int = 0


def lag(checkpoint: str | Path, *, channel: str = "", spool: str | Path = "", **options: str) -> Lag:
    """Measure how far a query is behind.

    Args:
        checkpoint: its ``checkpointLocation``, in a local directory; or the checkpoint of a job.
        channel: moved to where the query is, so that nsqd shows the lag as its depth; empty: none.
        spool: of a query with ``mode=spool`` its ``spoolLocation``, whose files are looked at; what waits in nsqd
            besides is the depth of its channel there.
        options: of format nsq: ``nsqd`` or ``lookupd``, and what secures connections; none for a spool.

    Raises:
        UsageError: ``spool`` is missing, or the query has none.
        FlintError: the checkpoint says nothing, or an nsqd does not answer.
    """
    place = _query(Path(checkpoint))
    read = committed_offsets(place)
    if DIRECT in read:
        raise NoCheckpoint(
            place,
            "its query has mode=direct, whose log is in the driver's memory: its channel's depth in nsqd is the lag",
        )
    spooled = read.pop(SPOOL, None)
    if (spooled is None) == bool(spool):
        raise UsageError(
            "this query spools: give --spool, its spoolLocation" if spooled else "this query has no spool: leave it out"
        )
    if spooled is None:
        return _measured(read[OFFSET], channel, options)
    if channel:
        raise UsageError("the channel of a query that spools is moved by its spool: leave --update-channel out")
    if options and not read:
        raise UsageError(f"with --spool nobody is asked: leave out {', '.join(sorted(options))}")
    found = spooled_lag(spooled, str(spool), SystemClock().wall_ns())
    if read:  # another source of the same query
        found += _measured(read[OFFSET], channel, options).partitions
    return Lag(found)


def _query(directory: Path) -> Path:
    """Return the ``checkpointLocation`` that is meant: in a job's checkpoint it is that of the query that has the rows.

    Raises:
        NoCheckpoint: of a pipeline that is written down, which has several.
    """
    if (directory / JOB).is_file():
        return directory / ROWS
    if (directory / "commits").is_dir():
        return directory
    queries = sorted(str(path.parent) for path in directory.glob("*/commits"))
    if len(queries) > 1:
        raise NoCheckpoint(directory, f"there are several queries, name one: {', '.join(queries)}")
    return Path(queries[0]) if queries else directory


def _measured(read: Offsets, channel: str, options: Mapping[str, str]) -> Lag:
    topics = ",".join(sorted({key.topic for key in read}))
    given = {"retries": "3", **options, "topics": topics} | ({"channel": channel} if channel else {})
    parsed = SourceOptions.parse(given)
    surveyor = Surveyor(parsed)
    survey = surveyor.look(is_waiting=True, is_lenient=True)
    found = measure(read, survey, parsed, SystemClock().wall_ns())
    moved = surveyor.try_cursors({key: read[key] for key in survey.logs if key in read}) if channel else {}
    return Lag(found, len(moved))


def run(arguments: Sequence[str], sleep: Callable[[float], None] = time.sleep) -> int:
    """Run ``flintmq pipeline lag``; return 1 when a partition of the query is served by nobody."""
    options = read_command(LagOptions, arguments, LagOptions.program, version_line("flintmq", __version__))
    if options is None:
        return 0
    if not options.checkpoint:
        raise UsageError("give --checkpoint, the checkpointLocation of the query, or that of a job")
    where = options.where() if options.nsqd or options.lookupd or not options.spool else {}
    given = {**where, **options.link(), **pairs("--source-option", options.source_option)}
    while True:
        found = lag(options.checkpoint, channel=options.update_channel, spool=options.spool, **given)
        _show(found, options)
        if not options.interval_ns:
            return int(any(each.end is None for each in found.partitions))
        try:
            sleep(options.interval_ns / SECOND)
        except KeyboardInterrupt:
            return 0


def _show(found: Lag, options: LagOptions) -> None:
    if options.json:
        for each in found.partitions:
            topic, partition, log_id = each.key
            row = {"topic": topic, "partition": partition, "log_id": log_id, "nsqd": each.nsqd, "read": each.read}
            print(json.dumps({**row, "end": each.end, **each.figures}), flush=True)
        return
    print(_HEADER)
    for each in found.partitions:
        seconds = "?" if each.seconds is None else f"{each.seconds:.1f}"
        numbers = ["?" if number is None else str(number) for number in (each.read, each.end, each.messages)]
        print(
            f"{each.key.topic:<24} {each.key.partition:>9} {each.nsqd or '(away)':<22} "
            f"{numbers[0]:>13} {numbers[1]:>13} {numbers[2]:>11} {seconds:>9}"
        )
    if options.update_channel:
        total = len(found.partitions)
        print(f"channel {options.update_channel}: {found.moved_count} of {total} partitions are where the query is")
        if found.moved_count < sum(each.end is not None for each in found.partitions):
            raise FlintError("the channel was not moved everywhere; the log says why")


__all__ = ["Lag", "LagOptions", "PartitionLag", "lag", "run"]
