"""``flintmq replay``, ``flintmq channel to-time``: a channel goes on elsewhere, or a range is copied to another topic.

Rules of this file: before a channel moves it is counted what will come again and what will never come, by the log, by
``/stats`` and by peeking; the latter is asked about. A copy is read from the log, so no channel notices it; messages
keep body and headers, and get ids, times and places of their own.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from flintmq.errors import FlintError, PublishError, UsageError
from flintmq.tools.shell.arguments import NS_PER_S, Place
from flintmq.tools.shell.lines import Line
from flintmq.tools.shell.link import Link, NothingThere, NotOurs
from flintmq.tools.shell.log import Log, LogReader
from flintmq.tools.shell.output import Progress, confirm, count_of, say, say_json
from flintmq.tools.shell.peek import WHATS, peeked
from flintmq.tools.shell.stats import stats

BATCH = 1000
_BATCH_BYTES = 1024 * 1024
CANNOT = "move a channel to another place"
PEEKED = 100  # of each kind, on each nsqd; of more, only some are known to lie before a place


class CopyStopped(FlintError):
    """A copy ended before it was whole."""


def run(given: argparse.Namespace) -> int:
    """Move a channel, or copy; return the exit code.

    Raises:
        FlintError: the command line is wrong, there is no such thing, or nsqd refuses.
    """
    if given.start is None:
        raise UsageError(f"--from is needed: {_PLACES}")
    link = Link(given)
    if getattr(given, "to", None) is not None:
        if given.channel is not None:
            raise UsageError("a channel moves, or --to copies to another topic; not both")
        return _copy(link, given)
    if given.channel is None:
        raise UsageError("name the channel that goes on elsewhere, or a topic to copy to: --to")
    if getattr(given, "until", None) is not None or bool(getattr(given, "rate", 0)):
        raise UsageError("--until and --rate are for copies: --to")
    return _move(link, given)


_PLACES = "beginning, end, a time, or how long ago, such as 1h"


def _begin(log: Log, place: Place) -> int | None:
    """Return the sequence at a place of a log whose ``at`` was asked for; None: it cannot be told."""
    if place.kind == "beginning":
        return log.start
    if place.kind == "end":
        return log.end
    if place.kind in ("ago", "time"):
        return log.end if log.at is None else max(log.start, log.at)
    return None


def _move(link: Link, given: argparse.Namespace) -> int:
    topic, channel, place = given.topic, given.channel, given.start
    (row,) = stats(link, topic, channel)
    time_ns = place.timestamp_ns(time.time_ns())
    if time_ns is not None:
        time_ns -= time_ns % NS_PER_S  # nsqd takes whole seconds
        if place.kind == "ago":
            place = Place("time", time_ns, place.text)
    with LogReader(link, topic) as reader:
        try:
            logs = reader.logs(time_ns)
        except NotOurs as error:
            raise NotOurs(error.address, CANNOT) from None
    if given.partition is not None:
        logs = [log for log in logs if log.partition == given.partition]
        if not logs:
            raise NothingThere(f"topic {topic} has no partition {given.partition}")
    begins = [_begin(log, place) for log in logs]
    is_known = None not in begins
    coming = sum(log.end - (begin or 0) for log, begin in zip(logs, begins, strict=True)) if is_known else None
    held = row.depth + row.in_flight_count + row.deferred_count
    stored = sum(log.end - log.start for log in logs)
    admins = link.nsqds(topic)
    least, most = (0, held) if coming is None else _lost(link, given, admins, time_ns, held)
    most = most if coming is None else min(most, stored - coming)
    what = {
        "topic": topic, "channel": channel, "place": place.text, "dry_run": given.dry_run,
        "waiting": row.depth + row.in_flight_count, "deferred": row.deferred_count, "will_be_delivered": coming,
        "lost_at_least": least, "lost_at_most": most, "stored": stored,
    }  # fmt: skip
    text = f"channel {channel} of topic {topic} goes on at {place.text}: "
    if coming is None:
        text += f"{count_of(held, 'message')} wait now"
    else:
        text += f"{count_of(coming, 'message')} will be delivered, {held:,} would be without that"
    if most:
        number = f"{least:,}" if least == most else f"{least:,} to {most:,}" if least else f"up to {most:,}"
        text += f"; {number} of those lie before that place and will never be delivered"
    if given.dry_run:
        _answer(given, what, f"{text}; nothing is changed")
        return 0
    if most:
        confirm(text, given.yes)
    from flintmq.tools.shell.sub import start_at

    start = start_at(place)

    def ask(admin: Any) -> None:
        admin.set_offset(topic, channel, start, partition=given.partition)

    changed = link.change(admins, ask, f"topic {topic} or its channel {channel} is not there", CANNOT)
    _answer(given, what | {"failed_nodes": list(link.failed)}, f"{text}{changed.where}{link.unasked}")
    return link.exit_code


def _lost(
    link: Link, given: argparse.Namespace, admins: Sequence[Any], time_ns: int | None, held: int
) -> tuple[int, int]:
    """Return how many messages a channel will have finished unseen when it goes on at a place: at least, at most.

    Deferred messages before the place stay deferred if nothing else that the channel waits for lies there, as a rule.

    Args:
        time_ns: of the place; None: the end.
        held: messages that wait, are in flight or deferred, in all partitions.
    """
    if time_ns == 0:
        return 0, 0
    if time_ns is None and given.partition is None:
        return held, held
    seen = 0
    before: dict[str, int] = {}
    for what in WHATS:
        for _, messages in peeked(link, admins, given, given.channel, what, PEEKED, 0):
            seen += len(messages)
            earlier = sum(time_ns is None or each.timestamp_ns < time_ns for each in messages)
            before[what] = before.get(what, 0) + earlier
    at_most = sum(before.values()) + max(0, held - seen)
    return sum(before.values()) if before["next"] or before["in_flight"] or time_ns is None else 0, at_most


def _answer(given: argparse.Namespace, what: dict[str, Any], text: str) -> None:
    if given.json:
        say_json([what])
    else:
        say(text)


def _copy(link: Link, given: argparse.Namespace) -> int:
    """Copy a range of messages to another topic.

    Raises:
        CopyStopped: some are not copied.
    """
    for flag, place in (("--from", given.start), ("--until", given.until)):
        if place is not None and place.kind in ("offset", "count"):
            raise UsageError(f"{flag} is a time, beginning or end where messages are copied")
    if given.to == given.topic:
        raise UsageError("a topic cannot be copied to itself: the copy would be copied, too")
    now_ns = time.time_ns()
    with LogReader(link, given.topic) as reader:
        try:
            logs = _chosen(reader.logs(given.start.timestamp_ns(now_ns)), given.partition)
            ends = {log.partition: log.end for log in logs}
            if given.until is not None and given.until.kind != "end":
                for log in reader.logs(given.until.timestamp_ns(now_ns)):
                    ends[log.partition] = log.end if log.at is None else log.at
        except NotOurs as error:
            raise NotOurs(error.address, "be read by offset, which a copy needs") from None
        ranges = []
        for log in logs:
            begin = _begin(log, given.start)
            assert begin is not None, "offsets and counts were refused"
            ranges.append((log, begin, max(begin, ends[log.partition])))
        total = sum(end - begin for _, begin, end in ranges)
        what = {"topic": given.topic, "to": given.to, "messages": total, "dry_run": given.dry_run, "copied": 0}
        if given.dry_run:
            _answer(given, what, f"{count_of(total, 'message')} of {given.topic} would be copied to {given.to}")
            return 0
        copied = _publish(link, given, reader, ranges, total)
    what["copied"] = copied
    missing = f"; {total - copied:,} were damaged or deleted before they could be read" if copied < total else ""
    _answer(given, what, f"{count_of(copied, 'message')} of {given.topic} copied to {given.to}{missing}")
    return 0 if copied == total else 1


def _chosen(logs: list[Log], partition: int | None) -> list[Log]:
    return [log for log in logs if partition is None or log.partition == partition]


def _publish(
    link: Link, given: argparse.Namespace, reader: LogReader, ranges: list[tuple[Log, int, int]], total: int
) -> int:
    from flintmq.sync import Producer

    copied, began = 0, time.monotonic()
    progress = Progress("messages copied", total)
    with Producer(**link.addresses, options=link.options, timeout=link.timeout_s, pool_size=1) as producer:
        try:
            for log, begin, end in ranges:
                for batch in _batches(reader.read(log, begin, end)):
                    headers = [dict(line.headers or {}) for line in batch]
                    how: dict[str, Any] = {"headers": headers} if any(headers) else {}
                    producer.mpub(given.to, [line.body for line in batch], **how)
                    copied += len(batch)
                    progress.at(copied)
                    if given.rate:
                        time.sleep(max(0.0, copied / given.rate - (time.monotonic() - began)))
        except (PublishError, FlintError) as error:
            progress.end()
            raise CopyStopped(f"{copied:,} of {count_of(total, 'message')} are copied, then: {error}") from error
        except KeyboardInterrupt:
            progress.end()
            raise CopyStopped(f"interrupted: {copied:,} of {count_of(total, 'message')} are copied") from None
    progress.end()
    return copied


def _batches(lines: Iterator[Line]) -> Iterator[list[Line]]:
    """Yield messages as they may travel together."""
    while some := list(islice(lines, BATCH)):
        size = 0
        batch: list[Line] = []
        for line in some:
            if batch and size + len(line.body) > _BATCH_BYTES:
                yield batch
                size, batch = 0, []
            batch.append(line)
            size += len(line.body)
        yield batch
