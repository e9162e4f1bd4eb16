"""``flintmq message``: where a message is stored, what it is, and its life as far as it was traced.

Rules of this file: without a topic all are searched, because ids are counted per topic; events of all nsqd stand in one
timeline, by their times.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from flintmq.client.admin.results import StoredMessage, Trace, TraceEvent
from flintmq.errors import FlintError, UsageError
from flintmq.tools.shell.lines import Line, fields_of, preview, time_text
from flintmq.tools.shell.link import Link, NothingThere
from flintmq.tools.shell.output import note, say, say_json, say_table
from flintmq.tools.shell.stats import stats

CANNOT = "find single messages"
_ID = re.compile("[0-9]{1,19}|[0-9a-fA-F]{16}|[0-9a-fA-F]{32}")
_TOPICS_MAX = 1000


def run(given: argparse.Namespace) -> int:
    """Print the message and its timeline; return the exit code.

    Raises:
        NothingThere: it is not stored, and nothing was traced of it.
        FlintError: no nsqd can tell.
    """
    if (given.id is None) == (given.trace_id is None):
        raise UsageError("give the id of a message, or --trace-id")
    if given.id is not None and not _ID.fullmatch(given.id):
        raise UsageError(f"{given.id!r} is no id: 16 or 32 hex digits, or a number")
    link = Link(given)
    topics = [given.topic] if given.topic else _topics(link)
    is_found = False
    for topic in topics:
        try:
            is_found |= _show(link, given, topic)
        except NothingThere:
            if given.topic:
                raise
    if not is_found:
        name = f"message {given.id}" if given.id else f"message with trace id {given.trace_id}"
        where = f"topic {given.topic}" if given.topic else f"{len(topics)} topics"
        raise NothingThere(f"there is no {name} in {where}: never published, deleted, or not traced")
    return 0


def _topics(link: Link) -> list[str]:
    names = [row.topic for row in stats(link) if not row.channel]
    if len(names) > _TOPICS_MAX:
        raise UsageError(f"there are {len(names):,} topics; name one: --topic")
    return names


def _show(link: Link, given: argparse.Namespace, topic: str) -> bool:
    """Print what is known of it in one topic; whether there is anything."""
    admins = link.nsqds(topic)
    messages: list[tuple[Any, StoredMessage]] = []
    if given.id is not None:
        messages = [
            (admin, message)
            for admin, found in link.each(admins, lambda admin: _get(admin, topic, given.id), cannot=CANNOT)
            for message in found
        ]
    events: list[TraceEvent] = []
    is_complete = True

    def trace(admin: Any) -> Trace:
        found: Trace = admin.find_trace(topic, given.id, trace_id=given.trace_id, limit=given.limit)
        return found

    try:
        for _, traced in link.each(admins, trace, cannot=CANNOT):
            events += traced.events
            is_complete &= traced.complete
    except FlintError as error:
        if not messages:
            raise
        link.tell(f"the trace cannot be read: {error}")
    events.sort(key=lambda event: event.timestamp_ns)
    if not messages and not events:
        return False
    for admin, message in messages:
        line = Line(
            topic, message.body, message.timestamp_ns, message.message_id, message.attempts, None,
            message.id >> 50 or None, message.offset, message.trace_id or None, message.headers or None,
            admin.address.removeprefix("http://"),
        )  # fmt: skip
        if given.json:
            say_json([{"message": fields_of(line)}])
            continue
        say(f"topic {topic}, message {message.message_id} (internal id {message.id}), on {line.nsqd}")
        say(f"published {time_text(message.timestamp_ns)}, {len(message.body):,} bytes at offset {message.offset:,}")
        if message.trace_id:
            say(f"trace id {message.trace_id}")
        for name, value in message.headers.items():
            say(f"header {name}={value}")
        say(f"body {preview(message.body, len(message.body), 2000)}")
    if given.json:
        say_json({"event": event} for event in events)
    elif events:
        _timeline(events)
    else:
        note(f"nothing was traced of it: flintmq admin enable-trace {topic} begins with that")
    if not is_complete:
        note("there may be older events: the search ended at its bound")
    return True


def _get(admin: Any, topic: str, message_id: str) -> list[StoredMessage]:
    """Return the message; none where it is not stored."""
    from flintmq.client.admin.question import HttpRefused

    try:
        return [admin.get_message(topic, message_id)]
    except HttpRefused as error:
        if error.status == 404 and error.text.endswith("_NOT_FOUND"):
            return []
        raise


def _timeline(events: list[TraceEvent]) -> None:
    begin = events[0].timestamp_ns
    say_table(
        ("TIME", "AFTER", "ACTION", "CHANNEL", "ATTEMPT", "CLIENT", "NODE", "ID"),
        [
            (
                time_text(event.timestamp_ns), f"{(event.timestamp_ns - begin) / 1e6:,.1f} ms", _action(event),
                event.channel or "-", str(event.attempts or "-"), event.client or "-", event.node or "-",
                event.message_id or "-",
            )
            for event in events
        ],
        "",
    )  # fmt: skip


def _action(event: TraceEvent) -> str:
    if event.delay_ms:
        return f"{event.action} {event.delay_ms / 1000:g} s"
    return f"{event.action} {event.count}" if event.count else event.action
