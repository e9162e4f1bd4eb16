"""``flintmq peek``: messages of a channel that wait, are in flight or deferred, without disturbing any.

Rules of this file: of several nsqd each shows its own; NSQ's own cannot, and that is said.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from flintmq.client.admin.results import PeekedMessage
from flintmq.tools.shell.lines import Line, fields_of, preview, time_text
from flintmq.tools.shell.link import Link
from flintmq.tools.shell.output import say_json, say_table
from flintmq.tools.shell.stats import only_channel

CANNOT = "show the messages of a channel"
_WORDS = {"next": "waits", "in_flight": "in flight", "deferred": "deferred"}
WHATS = tuple(_WORDS)


def run(given: argparse.Namespace) -> int:
    """Print the messages; return the exit code.

    Raises:
        FlintError: there is no such channel, or no nsqd that can show it.
    """
    link = Link(given)
    channel = given.channel or only_channel(link, given.topic)
    rows: list[tuple[str, str, PeekedMessage]] = []
    admins = link.nsqds(given.topic)
    for what in [given.what] if given.what else WHATS:
        shown = peeked(link, admins, given, channel, what, given.count, given.max_body)
        rows += [(what, admin.address, message) for admin, messages in shown for message in messages]
    if given.json:
        say_json(
            {"state": _WORDS[what], **peeked_fields(message, given.topic, channel, node)}
            for what, node, message in rows
        )
    else:
        say_table(
            ("STATE", "ID", "ATTEMPTS", "PUBLISHED", "UNTIL", "BODY"),
            [
                (
                    _WORDS[what], message.message_id, str(message.attempts), time_text(message.timestamp_ns),
                    _until(message), preview(message.body, message.body_size),
                )
                for what, _, message in rows
            ],
            f"channel {channel} of topic {given.topic} has nothing",
        )  # fmt: skip
    return 0


def peeked(
    link: Link, admins: Sequence[Any], given: argparse.Namespace, channel: str, what: str, count: int, max_body: int
) -> list[tuple[Any, list[PeekedMessage]]]:
    """Return the messages of a channel that nsqds show, by nsqd; one that does not answer is told.

    Args:
        given: names topic and partition.
        what: one of ``WHATS``.
        count: at most so many of each nsqd, 1 to 100.
        max_body: at most so many bytes of each body.

    Raises:
        FlintError: there is no such channel, or no nsqd that can show it.
    """

    def ask(admin: Any) -> list[PeekedMessage]:
        found: list[PeekedMessage] = admin.peek(
            given.topic, channel, what, count=count, max_body=max_body, partition=given.partition
        )
        return found

    return link.each(admins, ask, f"topic {given.topic} or its channel {channel} is not there", CANNOT)


def peeked_fields(message: PeekedMessage, topic: str, channel: str, node: str) -> dict[str, Any]:
    """Return a message of a channel as JSON has it."""
    line = Line(
        topic, message.body, message.timestamp_ns, message.message_id, message.attempts, channel, message.partition,
        message.offset, message.trace_id or None, message.headers or None, node.removeprefix("http://"),
    )  # fmt: skip
    found = {**fields_of(line), "size": message.body_size}
    if message.due_in_ms is not None:
        found["due_in_ms"] = message.due_in_ms
    if message.timeout_in_ms is not None:
        found["timeout_in_ms"] = message.timeout_in_ms
    if message.client is not None:
        found["client"] = message.client
    return found


def _until(message: PeekedMessage) -> str:
    """Return until when it is deferred, or with whom it is and for how long."""
    if message.due_in_ms is not None:
        return f"in {message.due_in_ms / 1000:,.1f} s"
    if message.client is not None:
        return (
            f"{message.client.client_id or message.client.remote_address}, {(message.timeout_in_ms or 0) / 1000:,.1f} s"
        )
    return "-"
