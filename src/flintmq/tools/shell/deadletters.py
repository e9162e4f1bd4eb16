"""``flintmq deadletters``: messages that were given up: list them, look at them, have them processed again, drop them.

Rules of this file: letters that are dealt with are finished in a channel of this command's own (``deadletters``), so
that whoever consumes them otherwise is not disturbed; looking makes no channel. A letter is finished only after its
copy is stored. It goes to its topic, and so to all of its channels: NSQ cannot publish to one of them, and that is
said.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

from flintmq.client.admin.results import PeekedMessage
from flintmq.errors import FlintError, UsageError
from flintmq.tools.shell.lines import Line, fields_of, preview, time_text
from flintmq.tools.shell.link import Link, NothingThere, NotOurs
from flintmq.tools.shell.log import LogReader
from flintmq.tools.shell.output import Progress, confirm, count_of, note, say, say_json, say_table
from flintmq.tools.shell.stats import ChannelRow, stats

CHANNEL = "deadletters"
SUFFIX = ".dead"
_CANNOT = "keep dead letters"
_REASON, _TOPIC, _FROM, _ATTEMPTS, _ID, _CLIENT = (
    f"##dead_letter_{word}" for word in ("reason", "topic", "channel", "attempts", "id", "client")
)
_OURS = "##"
_PEEKED_MAX = 100
_TOPICS_MAX = 1000
_IDLE_S = 2.0


def run(given: argparse.Namespace) -> int:
    """Run ``flintmq deadletters``; return the exit code.

    Raises:
        FlintError: there are no such letters, or nsqd refuses.
    """
    link = Link(given)
    verb = given.command.partition(" ")[2]
    if verb == "list":
        return _list(link, given)
    if verb == "show":
        return _show(link, given)
    if bool(given.id) == given.all:
        raise UsageError("name letters by their ids, or all of them: --all")
    if verb == "drop":
        return _drop(link, given)
    return _requeue_all(link, given) if given.all else _requeue(link, given)


# -- looking -----------------------------------------------------------------------------------------------------------


def _list(link: Link, given: argparse.Namespace) -> int:
    by_topic: dict[str, list[ChannelRow]] = {}
    for row in stats(link):
        by_topic.setdefault(row.topic, []).append(row)
    if len(by_topic) > _TOPICS_MAX:
        raise UsageError(f"there are {len(by_topic):,} topics; flintmq deadletters show TOPIC looks at one")
    admins = link.nsqds()
    progress = Progress("topics looked at", len(by_topic))
    found = []
    for number, (topic, rows) in enumerate(by_topic.items()):
        progress.at(number)
        if topic.endswith(SUFFIX) or _is_marked(link, admins, topic):
            found.append((topic, _count(rows), [row.channel for row in rows if row.channel]))
    progress.end()
    if given.json:
        say_json({"topic": topic, "letters": count, "channels": channels} for topic, count, channels in found)
    else:
        rows_text = [(topic, f"{count:,}", " ".join(channels) or "-") for topic, count, channels in found]
        say_table(("TOPIC", "LETTERS", "CHANNELS"), rows_text, "there are no dead letters")
    return 0


def _is_marked(link: Link, admins: Sequence[Any], topic: str) -> bool:
    """Whether an nsqd has published dead letters to a topic."""
    try:
        answers = link.each(admins, lambda admin: admin.topic_settings(topic), cannot=_CANNOT)
    except NothingThere:
        return False
    return any(state.settings.get("dead_letters") is True for _, state in answers)


def _count(rows: Sequence[ChannelRow]) -> int:
    """Return how many letters a topic has that nobody has dealt with."""
    for row in rows:
        if row.channel == CHANNEL:
            return row.depth + row.in_flight_count + row.deferred_count
    return max(row.depth for row in rows)


def _letters(link: Link, topic: str, count: int) -> list[Line]:
    """Return the first letters of a topic that nobody has dealt with."""
    rows = stats(link, topic)
    if any(row.channel == CHANNEL for row in rows):
        found = []
        for what in ("next", "in_flight", "deferred"):

            def ask(admin: Any, what: str = what) -> list[PeekedMessage]:
                peeked: list[PeekedMessage] = admin.peek(topic, CHANNEL, what, count=count, max_body=1 << 20)
                return peeked

            for admin, messages in link.each(link.nsqds(topic), ask, cannot=_CANNOT):
                for each in messages:
                    # the headers of a message are with the message, not with its place in the channel
                    message = admin.get_message(topic, each.message_id) if not each.ext else each
                    found.append(
                        Line(topic, each.body, each.timestamp_ns, each.message_id, each.attempts, CHANNEL,
                             headers=message.headers, nsqd=admin.address.removeprefix("http://"))
                    )  # fmt: skip
        return found[:count]
    try:
        with LogReader(link, topic) as reader:
            return [line for log in reader.logs() for line in islice(reader.read(log, log.start, log.end), count)][
                :count
            ]
    except NotOurs as error:
        raise NotOurs(error.address, _CANNOT) from None


def _show(link: Link, given: argparse.Namespace) -> int:
    topic = given.topic
    if given.id is not None:
        lines = [_letter(link, topic, given.id)]
    else:
        lines = _letters(link, topic, given.count)
    if given.json:
        say_json(map(fields_of, lines))
    elif given.id is not None:
        (line,) = lines
        say(f"dead letter {line.id} of {topic}, since {time_text(line.timestamp_ns)}")
        for name, value in (line.headers or {}).items():
            say(f"{name}={value}")
        say(f"body {preview(line.body, len(line.body), 100_000)}")
    else:
        say_table(
            ("ID", "SINCE", "FROM", "CHANNEL", "ATTEMPTS", "REASON", "BODY"),
            [
                (
                    line.id, time_text(line.timestamp_ns), _said(line, _TOPIC), _said(line, _FROM),
                    _said(line, _ATTEMPTS), _said(line, _REASON), preview(line.body, len(line.body), 40),
                )
                for line in lines
            ],
            f"topic {topic} has no letters that nobody has dealt with",
        )  # fmt: skip
    return 0


def _said(line: Line, name: str) -> str:
    return str((line.headers or {}).get(name, "-"))


def _letter(link: Link, topic: str, message_id: str) -> Line:
    missing = f"topic {topic} has no message {message_id}"
    answers = link.each(link.nsqds(topic), lambda admin: admin.get_message(topic, message_id), missing, _CANNOT)
    admin, message = answers[0]
    return Line(
        topic, message.body, message.timestamp_ns, message.message_id, message.attempts, headers=message.headers,
        nsqd=admin.address.removeprefix("http://"),
    )  # fmt: skip


# -- changing ----------------------------------------------------------------------------------------------------------


def _own_channel(link: Link, topic: str) -> ChannelRow:
    """Return the channel that letters are dealt with in; it is made if need be, with all letters that are stored."""
    rows = stats(link, topic)
    if not any(row.channel == CHANNEL for row in rows):

        def make(admin: Any) -> None:
            admin.create_channel(topic, CHANNEL)
            admin.set_offset(topic, CHANNEL, "beginning")

        link.each(link.nsqds(topic), make, f"there is no topic {topic}", _CANNOT)
        rows = stats(link, topic)
    return next(row for row in rows if row.channel == CHANNEL)


def _check_waiting(link: Link, topic: str, row: ChannelRow, ids: Sequence[str]) -> None:
    """Refuse letters that somebody has dealt with already, as far as that can be seen.

    Raises:
        NothingThere: one of them is.
    """
    if _count([row]) > _PEEKED_MAX:
        return  # nsqd shows no more than the first ones
    waiting = {line.id for line in _letters(link, topic, _PEEKED_MAX)}
    for each in ids:
        if _letter(link, topic, each).id not in waiting:
            raise NothingThere(f"letter {each} of {topic} was requeued or dropped already; nothing is changed")


def _origin(given: argparse.Namespace, headers: Mapping[str, Any], message_id: str) -> str:
    origin = given.to or str(headers.get(_TOPIC, ""))
    if not origin:
        raise NothingThere(f"letter {message_id} does not say where it comes from: name a topic with --to")
    return str(origin)


def _kept(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the headers that a letter had before it was one."""
    return {name: value for name, value in headers.items() if not name.startswith(_OURS)}


def _finish(link: Link, topic: str, message_id: str) -> None:
    link.each(
        link.nsqds(topic),
        lambda admin: admin.finish_message(topic, CHANNEL, message_id),
        f"letter {message_id} of {topic} was dealt with already",
        _CANNOT,
    )


def _requeue(link: Link, given: argparse.Namespace) -> int:
    """Publish some letters again."""
    from flintmq.sync import Producer

    topic = given.topic
    row = _own_channel(link, topic)
    _check_waiting(link, topic, row, given.id)
    with Producer(**link.addresses, options=link.options, timeout=link.timeout_s, pool_size=1) as producer:
        for each in given.id:
            line = _letter(link, topic, each)
            headers = line.headers or {}
            origin = _origin(given, headers, each)
            kept = _kept(headers)
            how: dict[str, Any] = {"headers": kept} if kept else {}
            producer.pub(origin, line.body, **how)
            _finish(link, topic, line.id)
            _tell(given, {"id": line.id, "topic": topic, "to": origin}, f"letter {line.id} is requeued to {origin}")
    return 0


def _tell(given: argparse.Namespace, what: dict[str, Any], text: str) -> None:
    if given.json:
        say_json([what])
    else:
        say(text)


def _drop(link: Link, given: argparse.Namespace) -> int:
    topic = given.topic
    row = _own_channel(link, topic)
    count = _count([row]) if given.all else len(given.id)
    if not given.all:
        _check_waiting(link, topic, row, given.id)
    if count:
        confirm(f"{count_of(count, 'dead letter')} of {topic} will be dropped for good", given.yes)
    if given.all:
        link.each(link.nsqds(topic), lambda admin: admin.empty_channel(topic, CHANNEL), cannot=_CANNOT)
    for each in given.id:
        _finish(link, topic, each)
    _tell(given, {"topic": topic, "dropped": count}, f"{count_of(count, 'dead letter')} of {topic} dropped")
    return 0


def _requeue_all(link: Link, given: argparse.Namespace) -> int:
    """Publish all letters again that are there now."""
    topic = given.topic
    count = _count([_own_channel(link, topic)])
    first = _letters(link, topic, 1)
    where = given.to or "the topics they come from"
    if count and first:
        _origin(given, first[0].headers or {}, first[0].id)
        confirm(f"{count_of(count, 'dead letter')} of {topic} go to {where}, and so to all channels there", given.yes)
    done, failures = asyncio.run(_move_all(link, given, count, bool(first and first[0].headers))) if count else (0, [])
    for text in failures[:20]:
        note(f"flintmq deadletters: {text}")
    _tell(
        given, {"topic": topic, "requeued": done, "failed": len(failures)},
        f"{count_of(done, 'dead letter')} of {topic} requeued" + (f", {len(failures):,} not" if failures else ""),
    )  # fmt: skip
    return 1 if failures or done < count else 0


async def _move_all(link: Link, given: argparse.Namespace, count: int, has_headers: bool) -> tuple[int, list[str]]:
    """Consume all letters, and finish each when its copy is stored; return how many, and what has failed."""
    from flintmq.client.aio.consumer import Consumer
    from flintmq.client.aio.producer import Producer

    done, failures, seen = 0, [], 0
    progress = Progress("dead letters requeued", count)
    loop = asyncio.get_running_loop()
    how: dict[str, Any] = {**link.addresses, "options": link.options}
    async with (
        Producer(**how, timeout=link.timeout_s) as producer,
        Consumer(given.topic, CHANNEL, **how, headers=has_headers, max_attempts=0) as consumer,
    ):
        idle = loop.call_later(link.timeout_s + _IDLE_S, consumer.stop)
        async for message in consumer:
            idle.cancel()
            idle = loop.call_later(_IDLE_S, consumer.stop)
            try:
                origin = _origin(given, message.headers, message.id.hex())
                kept = _kept(message.headers)
                more: dict[str, Any] = {"headers": kept} if kept else {}
                await producer.pub(origin, message.body, **more)
            except FlintError as error:
                failures.append(f"a letter of {len(message.body):,} bytes is not requeued: {error}")
                message.requeue(60)  # not again in this run
            else:
                message.finish()
                done += 1
            seen += 1
            progress.at(done)
            if seen >= count:
                break
        idle.cancel()
    progress.end()
    return done, failures
