"""``flintmq topic`` where there is no cluster: topics of single nsqds, of every one that is named or known.

Rules of this file: where messages or channels are lost, they are counted, named, and asked about first.
"""

from __future__ import annotations

import argparse
from typing import Any

from flintmq.tools.shell.channel import channel_fields, forgotten, held
from flintmq.tools.shell.link import Link
from flintmq.tools.shell.output import confirm, count_of, say, say_json, say_table
from flintmq.tools.shell.stats import ChannelRow, stats

_DONE = {
    "create": "is created{}",
    "delete": "is deleted{}",
    "empty": "has nothing that waits for its channels{}",
    "pause": "is paused{}",
    "unpause": "is delivered again{}",
}


def run(given: argparse.Namespace) -> int:
    """Run ``flintmq topic``; return the exit code: 1 if a change was not done everywhere.

    Raises:
        FlintError: there is no such topic, or nsqd refuses.
    """
    verb = given.command.partition(" ")[2]
    link = Link(given)
    if verb == "list":
        _list(link, given)
    elif verb == "show":
        _show(link, given)
    elif verb == "create":
        return _create(link, given)
    else:
        return _change(link, given, verb)
    return 0


def _fields(row: ChannelRow, channels: list[ChannelRow]) -> dict[str, Any]:
    return {
        "topic": row.topic, "depth": row.depth, "messages": row.message_count, "paused": row.paused,
        "channels": [each.channel for each in channels], "nodes": row.nodes,
    }  # fmt: skip


def _list(link: Link, given: argparse.Namespace) -> None:
    rows = stats(link)
    channels: dict[str, list[ChannelRow]] = {}
    for row in rows:
        if row.channel:
            channels.setdefault(row.topic, []).append(row)
    topics = [row for row in rows if not row.channel]
    if given.json:
        say_json(_fields(row, channels.get(row.topic, [])) for row in topics)
        return
    say_table(
        ("TOPIC", "DEPTH", "MESSAGES", "CHANNELS", "WAITING", "NODES", "STATE"),
        [
            (
                row.topic, f"{row.depth:,}", f"{row.message_count:,}", str(len(channels.get(row.topic, []))),
                f"{sum(each.depth for each in channels.get(row.topic, [])):,}", str(len(row.nodes)),
                "paused" if row.paused else "-",
            )
            for row in topics
        ],
        "there are no topics",
    )  # fmt: skip


def _show(link: Link, given: argparse.Namespace) -> None:
    row, *channels = stats(link, given.topic, clients=True)
    if given.json:
        say_json([{**_fields(row, channels), "channels": [channel_fields(each) for each in channels]}])
        return
    state = ", paused" if row.paused else ""
    say(f"topic {row.topic}, on {', '.join(row.nodes)}: {row.message_count:,} messages{state}")
    say_table(
        ("CHANNEL", "DEPTH", "IN FLIGHT", "DEFERRED", "CLIENTS", "STATE"),
        [
            (
                each.channel, f"{each.depth:,}", f"{each.in_flight_count:,}", f"{each.deferred_count:,}",
                str(each.client_count), "paused" if each.paused else "-",
            )
            for each in channels
        ],
        f"topic {row.topic} has no channels; {row.depth:,} messages wait for the first one",
    )  # fmt: skip


def _create(link: Link, given: argparse.Namespace) -> int:
    more: dict[str, Any] = {}
    for name in ("partitions", "headers", "ordered"):
        if getattr(given, name):
            more[name] = getattr(given, name)
    if more:
        link.check_ours(f"create topics with --{', --'.join(more)}")
    asked, kind = (link.lookups(), "nsqlookupd") if link.lookupd else (link.nsqds(), "nsqd")
    created = link.change(asked, lambda admin: admin.create_topic(given.topic, **more), kind=kind)
    return _done(link, given, "create", created.where)


def _change(link: Link, given: argparse.Namespace, verb: str) -> int:
    topic = given.topic
    if verb in ("delete", "empty"):
        row, *channels = stats(link, topic)
        if verb == "delete":
            lost = [f"{count_of(row.depth, 'message')} that wait for channels"] if row.depth else []
            lost += [f"channel {each.channel} with {held(each)}" for each in channels]
            loses = "; ".join(lost)
        else:
            loses = f"{count_of(row.depth, 'message')} that no channel has yet" if row.depth else ""
        if loses:
            word = "deleting" if verb == "delete" else "emptying"
            confirm(f"{word} topic {topic} loses {loses}", given.yes)
    missing = f"there is no topic {topic}"
    changed = link.change(link.nsqds(topic), lambda admin: getattr(admin, f"{verb}_topic")(topic), missing)
    open_still = link.unasked
    if verb == "delete" and link.lookupd:
        open_still += forgotten(link, lambda admin: admin.delete_topic(topic))
    return _done(link, given, verb, changed.where, open_still)


def _done(link: Link, given: argparse.Namespace, verb: str, where: str, open_still: str = "") -> int:
    """Say what was done; return the exit code.

    Args:
        where: only there; empty: everywhere.
        open_still: what is said behind that.
    """
    if given.json:
        say_json([{"topic": given.topic, "done": verb, "failed_nodes": list(link.failed)}])
    else:
        say(f"topic {given.topic} {_DONE[verb].format(where)}{open_still}")
    return link.exit_code
