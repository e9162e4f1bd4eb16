"""``flintmq channel``: look at channels, create, delete, empty, pause and skip them, on every nsqd that has them.

Rules of this file: where messages or consumers are lost, they are counted, named, and asked about first.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from flintmq.tools.shell.link import Link
from flintmq.tools.shell.output import confirm, count_of, say, say_json, say_table
from flintmq.tools.shell.stats import ChannelRow, stats

_DONE = {
    "create": "is there{}",
    "delete": "is deleted{}",
    "empty": "is empty{}",
    "empty --deferred": "has nothing deferred{}",
    "pause": "is paused{}",
    "unpause": "is delivered again{}",
    "skip": "is skipped{}: flintmq channel unskip ends that",
    "unskip": "is delivered again{}",
}


def run(given: argparse.Namespace) -> int:
    """Run ``flintmq channel``; return the exit code: 1 if a change was not done everywhere.

    Raises:
        FlintError: there is no such channel, or nsqd refuses.
    """
    verb = given.command.partition(" ")[2]
    link = Link(given)
    if verb == "list":
        _list(link, given)
    elif verb == "show":
        _show(link, given)
    else:
        return _change(link, given, verb)
    return 0


def _state(row: ChannelRow) -> str:
    return ", ".join(word for word, is_so in (("paused", row.paused), ("skipped", row.skipped)) if is_so) or "-"


def channel_fields(row: ChannelRow) -> dict[str, Any]:
    """Return a channel as JSON has it."""
    return {
        "topic": row.topic, "channel": row.channel, "depth": row.depth, "in_flight": row.in_flight_count,
        "deferred": row.deferred_count, "messages": row.message_count, "requeued": row.requeue_count,
        "timed_out": row.timeout_count, "clients": row.client_count, "paused": row.paused, "skipped": row.skipped,
        "nodes": row.nodes,
    }  # fmt: skip


def _list(link: Link, given: argparse.Namespace) -> None:
    rows = [row for row in stats(link, given.topic, clients=True) if row.channel]
    if given.json:
        say_json(map(channel_fields, rows))
        return
    say_table(
        ("CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "REQUEUED", "TIMED OUT", "CLIENTS", "STATE"),
        [
            (
                row.channel, f"{row.depth:,}", f"{row.in_flight_count:,}", f"{row.deferred_count:,}",
                f"{row.requeue_count:,}", f"{row.timeout_count:,}", str(row.client_count), _state(row),
            )
            for row in rows
        ],
        f"topic {given.topic} has no channels",
    )  # fmt: skip


def _show(link: Link, given: argparse.Namespace) -> None:
    (row,) = stats(link, given.topic, given.channel, clients=True)
    if given.json:
        say_json([{**channel_fields(row), "consumers": row.clients}])
        return
    say(f"channel {row.channel} of topic {row.topic}, on {', '.join(row.nodes)}")
    say(
        f"{row.depth:,} waiting, {row.in_flight_count:,} in flight, {row.deferred_count:,} deferred; "
        f"{row.message_count:,} in all, {row.requeue_count:,} requeued, {row.timeout_count:,} timed out; {_state(row)}"
    )
    say_table(
        ("CONSUMER", "ADDRESS", "RDY", "IN FLIGHT", "FINISHED", "REQUEUED", "AGENT"),
        [
            tuple(
                str(client.get(name, ""))
                for name in (
                    "client_id", "remote_address", "ready_count", "in_flight_count", "finish_count", "requeue_count",
                    "user_agent",
                )
            )
            for client in row.clients
        ],
        "no consumers",
    )  # fmt: skip


def held(row: ChannelRow) -> str:
    """Return what a channel has that would be lost with it."""
    parts = [
        f"{count_of(row.depth, 'message')} that wait{'s' if row.depth == 1 else ''}",
        f"{row.in_flight_count:,} in flight",
        f"{row.deferred_count:,} deferred",
    ]
    return ", ".join(parts)


def _change(link: Link, given: argparse.Namespace, verb: str) -> int:
    topic, channel, partition = given.topic, given.channel, given.partition
    is_deferred = bool(getattr(given, "deferred", False))
    if verb in ("delete", "empty", "skip"):
        (row,) = stats(link, topic, channel, clients=True)
        lost = count_of(row.deferred_count, "deferred message") if is_deferred else held(row)
        if verb == "delete":
            lost += f", and {count_of(row.client_count, 'consumer')} disconnected"
        word = {"delete": "deleting", "empty": "emptying", "skip": "skipping"}[verb]
        count = row.deferred_count + (0 if is_deferred else row.depth + row.in_flight_count)
        if count or (verb == "delete" and row.client_count):
            confirm(f"{word} channel {channel} of topic {topic} loses {lost}", given.yes)
    name = "empty_deferred" if is_deferred else f"{verb}_channel"
    ours = {"skip", "unskip"}

    def ask(admin: Any) -> None:
        change: Callable[..., None] = getattr(admin, name)
        change(topic, channel, **({} if partition is None else {"partition": partition}))

    missing = f"topic {topic} or its channel {channel} is not there"
    cannot = f"{verb} a channel" if verb in ours else ""
    changed = link.change(link.nsqds(topic), ask, missing, cannot)
    open_still = link.unasked
    if verb == "delete" and link.lookupd and partition is None:
        open_still += forgotten(link, lambda admin: admin.delete_channel(topic, channel))
    if given.json:
        done = {"topic": topic, "channel": channel, "done": verb, "nodes": changed.nodes}
        say_json([{**done, "failed_nodes": list(link.failed)}])
    else:
        done_text = _DONE["empty --deferred" if is_deferred else verb].format(changed.where)
        say(f"channel {channel} of topic {topic} {done_text}{open_still}")
    return link.exit_code


def forgotten(link: Link, delete: Callable[[Any], None]) -> str:
    """Have every nsqlookupd forget what was deleted; return who may not have, behind the words that say what was done.

    One that knows nothing of it has nothing to forget.
    """
    from flintmq.client.admin.question import HttpRefused

    def ask(admin: Any) -> None:
        try:
            delete(admin)
        except HttpRefused as error:
            if error.status != 404:
                raise

    changed = link.change(link.lookups(), ask, kind="nsqlookupd", is_needed=False)
    return f"; it is forgotten{changed.where}" if changed.failed else ""
