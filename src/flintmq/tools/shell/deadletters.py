"""``flintmq deadletters``: messages that were given up: list them, look at them, have them processed again, drop them.

Rules of this file: letters that are dealt with are finished in a channel of this command's own (``deadletters``), so
that whoever consumes them otherwise is not disturbed; it is made when everything is checked and confirmed, because
nobody else consumes it: looking makes none, and what is refused makes none. A letter is finished only after its copy is
stored, with all headers that the message had. It goes to its topic, and so to all of its channels: NSQ cannot publish
to one of them, and that is said.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from flintmq.client.admin.results import PeekedMessage
from flintmq.client.core.dead_letters import PREFIX, headers_before
from flintmq.errors import FlintError, NsqdError, PublishRefused, UsageError
from flintmq.limits import SEQUENCE_BITS
from flintmq.message import TAG_HEADER, TRACE_ID_HEADER
from flintmq.tools.shell.lines import Line, fields_of, id_text, preview, time_text
from flintmq.tools.shell.link import Link, NothingThere, NotOurs
from flintmq.tools.shell.log import Log, LogReader
from flintmq.tools.shell.output import Progress, confirm, count_of, note, say, say_json, say_table
from flintmq.tools.shell.stats import ChannelRow, rows_of, stats

if TYPE_CHECKING:
    from flintmq.client.aio.consumer import Consumer
    from flintmq.client.aio.producer import Producer
    from flintmq.client.core.message import Message

CHANNEL = "deadletters"
SUFFIX = ".dead"
_CANNOT = "keep dead letters"
_REASON, _TOPIC, _FROM, _ATTEMPTS, _ID, _CLIENT = (
    f"{PREFIX}{word}" for word in ("reason", "topic", "channel", "attempts", "id", "client")
)
_NO_HEADERS, _NO_PARTITIONS = "E_SUB_EXTEND_FORBIDDON", "NO_PARTITIONS"
_PEEKED_MAX = 100
_TOPICS_MAX = 1000
_FAILURES_SHOWN = 20
_HEX_ID_DIGITS = 16
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
        return _drop_all(link, given) if given.all else _drop(link, given)
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
        if _is_for_letters(link, admins, topic):
            found.append((topic, _count(rows), [row.channel for row in rows if row.channel]))
    progress.end()
    if given.json:
        say_json({"topic": topic, "letters": count, "channels": channels} for topic, count, channels in found)
    else:
        rows_text = [(topic, f"{count:,}", " ".join(channels) or "-") for topic, count, channels in found]
        say_table(("TOPIC", "LETTERS", "CHANNELS"), rows_text, "there are no dead letters")
    return 0


def _is_for_letters(link: Link, admins: Sequence[Any], topic: str) -> bool:
    """Whether a topic is one of dead letters, by its name or because an nsqd has published some to it."""
    if topic.endswith(SUFFIX):
        return True
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
    return _stored(link, topic, count)[1]


def _stored(link: Link, topic: str, count: int = 0) -> tuple[list[Log], list[Line]]:
    """Return the logs of a topic, and so many of the letters that they begin with."""
    try:
        with LogReader(link, topic) as reader:
            logs = reader.logs(is_whole=False)
            lines = [line for log in logs for line in islice(reader.read(log, log.start, log.end), count)]
            return logs, lines[:count]
    except NotOurs as error:
        raise NotOurs(error.address, _CANNOT) from None


def _show(link: Link, given: argparse.Namespace) -> int:
    topic = given.topic
    if given.id is not None:
        lines = _with_id(link, topic, given.id)
    else:
        lines = _letters(link, topic, given.count)
    if given.json:
        say_json(map(fields_of, lines))
    elif given.id is not None:
        for line in lines:
            where = f" on nsqd {line.nsqd}" if len(lines) > 1 else ""
            say(f"dead letter {line.id} of {topic}{where}, since {time_text(line.timestamp_ns)}")
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


def _with_id(link: Link, topic: str, message_id: str, node: str = "") -> list[Line]:
    """Return the letters that have an id: each nsqd counts those of a plain topic for itself.

    Args:
        node: only that of this nsqd.
    """
    missing = f"topic {topic} has no message {message_id}"
    admins = [each for each in link.nsqds(topic) if not node or _node_of(each) == node]
    answers = link.each(admins, lambda admin: admin.get_message(topic, message_id), missing, _CANNOT)
    return [
        Line(
            topic, message.body, message.timestamp_ns, message.message_id, message.attempts, headers=message.headers,
            nsqd=_node_of(admin),
        )
        for admin, message in answers
    ]  # fmt: skip


def _node_of(admin: Any) -> str:
    return str(admin.address).removeprefix("http://")


# -- checking ----------------------------------------------------------------------------------------------------------


def _own_channel(link: Link, topic: str) -> tuple[ChannelRow | None, list[str]]:
    """Return the channel that letters are dealt with in, and the nsqd that have the topic without it.

    Raises:
        NothingThere: there is no such topic.
    """
    rows = stats(link, topic)
    own = next((row for row in rows if row.channel == CHANNEL), None)
    nodes = dict.fromkeys(node for row in rows if not row.channel for node in row.nodes)
    return own, [node for node in nodes if own is None or node not in own.nodes]


def _waiting(link: Link, topic: str, own: ChannelRow | None) -> int:
    """Return how many letters can be dealt with, those of nsqd without the channel left out if others have it."""
    return _count([own]) if own is not None else sum(log.end - log.start for log in _stored(link, topic)[0])


def _named(link: Link, given: argparse.Namespace, own: ChannelRow | None) -> list[Line]:
    """Return the letters that are named by their ids, without their bodies.

    Raises:
        NothingThere: one is not there, or was dealt with already, as far as that can be seen.
    """
    topic, waiting = given.topic, None
    if own is not None and _count([own]) <= _PEEKED_MAX:  # nsqd shows no more than the first ones
        waiting = {(line.nsqd, line.id) for line in _letters(link, topic, _PEEKED_MAX)}
    found: dict[tuple[str | None, str], Line] = {}
    for each in given.id:
        lines = _with_id(link, topic, each)
        if own is not None and waiting is not None:
            lines = [line for line in lines if line.nsqd not in own.nodes or (line.nsqd, line.id) in waiting]
        if not lines:
            raise NothingThere(f"letter {each} of {topic} was requeued or dropped already; nothing is changed")
        for line in lines:
            line.body = b""
            found[line.nsqd, line.id] = line
    return list(found.values())


def _check_letters(topic: str, lines: Sequence[Line]) -> None:
    """Refuse other messages than dead letters, of a topic that need not be one of those.

    Raises:
        NothingThere: one does not say that it is a letter.
    """
    for line in lines:
        if not any(name.startswith(PREFIX) for name in line.headers or ()):
            what = f"message {line.id} of {topic} is no dead letter: it does not say where it comes from"
            raise NothingThere(f"{what}; flintmq topic empty and flintmq channel empty drop any message")


def _origin(given: argparse.Namespace, headers: Mapping[str, Any], message_id: str) -> str:
    origin = given.to or str(headers.get(_TOPIC, ""))
    if not origin:
        raise NothingThere(f"letter {message_id} does not say where it comes from: name a topic with --to")
    return str(origin)


def _amount(topic: str, count: int, own: ChannelRow | None, lacking: Sequence[str]) -> str:
    """Return what a change of all letters is about, in words."""
    text = f"{count_of(count, 'dead letter')} of {topic}"
    if own is None or not lacking:
        return text
    return f"{text} on nsqd {', '.join(own.nodes)} and all that are stored on nsqd {', '.join(lacking)}"


# -- changing ----------------------------------------------------------------------------------------------------------


def _make_channel(link: Link, topic: str, nodes: Sequence[str], *, is_needed: bool = True) -> None:
    """Make the channel that letters are dealt with in, with all that are stored.

    Args:
        nodes: the nsqd to make it on.
        is_needed: it must be made on one of them.
    """

    def make(admin: Any) -> None:
        admin.create_channel(topic, CHANNEL)
        admin.set_offset(topic, CHANNEL, "beginning")

    admins = [each for each in link.nsqds(topic) if _node_of(each) in nodes]
    if admins:
        link.change(admins, make, f"there is no topic {topic}", _CANNOT, is_needed=is_needed)


def _make_needed(link: Link, letter: Line, lacking: list[str]) -> None:
    """Make the channel on the nsqd that has a letter, if that is one of those that lack it."""
    if letter.nsqd in lacking:
        _make_channel(link, letter.topic, [letter.nsqd])
        lacking.remove(letter.nsqd)


def _finish(link: Link, letter: Line) -> None:
    link.change(
        [each for each in link.nsqds(letter.topic) if _node_of(each) == letter.nsqd],
        lambda admin: admin.finish_message(letter.topic, CHANNEL, letter.id),
        f"letter {letter.id} of {letter.topic} was dealt with already",
        _CANNOT,
    )


def _tell(link: Link, given: argparse.Namespace, what: dict[str, Any], text: str) -> None:
    if given.json:
        say_json([{**what, "failed_nodes": list(link.failed)}])
    else:
        say(text)


def _drop(link: Link, given: argparse.Namespace) -> int:
    """Drop some letters."""
    topic, done = given.topic, 0
    own, lacking = _own_channel(link, topic)
    letters = _named(link, given, own)
    if not _is_for_letters(link, link.nsqds(topic), topic):
        _check_letters(topic, letters)
    confirm(f"{count_of(len(letters), 'dead letter')} of {topic} will be dropped for good", given.yes)
    for letter in letters:
        try:
            _make_needed(link, letter, lacking)
            _finish(link, letter)
        except FlintError as error:
            link.tell(str(error))
        else:
            done += 1
    text = f"{count_of(done, 'dead letter')} of {topic} dropped"
    text += f", {len(letters) - done:,} not" if done < len(letters) else ""
    _tell(link, given, {"topic": topic, "dropped": done, "failed": len(letters) - done}, f"{text}{link.unasked}")
    return 1 if done < len(letters) else link.exit_code


def _drop_all(link: Link, given: argparse.Namespace) -> int:
    """Drop all letters that are there now."""
    topic = given.topic
    own, lacking = _own_channel(link, topic)
    if not _is_for_letters(link, link.nsqds(topic), topic):
        _check_letters(topic, _letters(link, topic, _PEEKED_MAX))
    count = _waiting(link, topic, own)
    if count or (own is not None and lacking):
        confirm(f"{_amount(topic, count, own, lacking)} will be dropped for good", given.yes)
        _make_channel(link, topic, lacking, is_needed=own is None)

    def empty(admin: Any) -> int:
        rows = rows_of([(admin.address, admin.stats(topic, CHANNEL, clients=False))])
        admin.empty_channel(topic, CHANNEL)
        return sum(_count([row]) for row in rows if row.channel == CHANNEL)

    dropped, where = 0, ""
    if count or own is not None:
        changed = link.change(link.nsqds(topic), empty, cannot=_CANNOT)
        dropped, where = sum(each for _, each in changed.answers), changed.where
    text = f"{count_of(dropped, 'dead letter')} of {topic} dropped{where}{link.unasked}"
    _tell(link, given, {"topic": topic, "dropped": dropped, "failed": 0}, text)
    return link.exit_code


def _requeue(link: Link, given: argparse.Namespace) -> int:
    """Publish some letters again."""
    own, lacking = _own_channel(link, given.topic)
    letters = _named(link, given, own)
    for letter in letters:
        _origin(given, letter.headers or {}, letter.id)

    async def move() -> None:
        async with _Copies(link) as copies:
            for letter in letters:
                (line,) = _with_id(link, letter.topic, letter.id, str(letter.nsqd))
                headers = line.headers or {}
                origin = _origin(given, headers, line.id)
                _make_needed(link, line, lacking)
                await copies.publish(origin, line.body, headers)
                _finish(link, line)
                what = {"id": line.id, "topic": line.topic, "to": origin}
                _tell(link, given, what, f"letter {line.id} is requeued to {origin}")

    asyncio.run(move())
    return link.exit_code


def _requeue_all(link: Link, given: argparse.Namespace) -> int:
    """Publish all letters again that are there now."""
    topic = given.topic
    own, lacking = _own_channel(link, topic)
    count = _waiting(link, topic, own)
    first = _letters(link, topic, 1)
    move = _Move(link, given)
    if count or (own is not None and lacking):
        for line in first:
            _origin(given, line.headers or {}, line.id)
        where = given.to or "the topics they come from"
        confirm(f"{_amount(topic, count, own, lacking)} go to {where}, and so to all channels there", given.yes)
        _make_channel(link, topic, lacking, is_needed=own is None)
        own, _ = _own_channel(link, topic)
        count = 0 if own is None else _count([own])
        addresses = list(dict.fromkeys(log.nsqd for log in _stored(link, topic)[0]))
        has_parts = any(len(line.id) > _HEX_ID_DIGITS for line in first)
        asyncio.run(move.run(count, [] if has_parts and link.lookupd else addresses))
    for text in move.failures[:_FAILURES_SHOWN]:
        note(f"flintmq deadletters: {text}")
    done, failed = move.done, len(move.failures)
    _tell(
        link, given, {"topic": topic, "requeued": done, "failed": failed},
        f"{count_of(done, 'dead letter')} of {topic} requeued" + (f", {failed:,} not" if failed else "") + link.unasked,
    )  # fmt: skip
    return 1 if failed or done < count else link.exit_code


class _Copies:
    """Publishes letters again, as they were.

    Args:
        link: says where to.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._producers: dict[str, Producer] = {}

    async def __aenter__(self) -> _Copies:
        return self

    async def __aexit__(self, *error: object) -> None:
        for producer in self._producers.values():
            await producer.close()

    async def publish(self, topic: str, body: bytes, headers: Mapping[str, Any]) -> None:
        """Publish one, with the headers that it had before it was a letter.

        Raises:
            FlintError: it is not stored, or may not be.
        """
        kept = headers_before(headers)
        trace = str(kept.pop(TRACE_ID_HEADER, ""))  # nsqd's own: no header for a producer
        producer = await self._producer("", self._link.addresses)
        if not trace.isdecimal():
            await producer.pub(topic, body, headers=kept or None)
            return
        if self._link.lookupd:
            try:
                await producer.pub(topic, body, trace_id=int(trace), headers=kept)
                return
            except PublishRefused as error:
                if error.code != _NO_PARTITIONS:
                    raise
            addresses = self._link.tcp_addresses(topic)
            producer = await self._producer(topic, {"nsqd_tcp_addresses": addresses})
        partition = _partition_of(headers) if headers.get(_TOPIC) == topic else 0
        await producer.pub(topic, body, trace_id=int(trace), headers=kept, partition=partition)

    async def _producer(self, name: str, addresses: Mapping[str, Any]) -> Producer:
        from flintmq.client.aio.producer import Producer

        if name not in self._producers:
            link = self._link
            self._producers[name] = Producer(**addresses, options=link.options, timeout=link.timeout_s)
            await self._producers[name].start()
        return self._producers[name]


def _partition_of(headers: Mapping[str, Any]) -> int:
    """Return the partition that a letter is from; 0 also where there are none."""
    try:
        return int(str(headers.get(_ID, "0"))[:_HEX_ID_DIGITS], 16) >> SEQUENCE_BITS
    except ValueError:
        return 0


class _Move:
    """Publishes all letters of a topic again: consumes them, and finishes each when its copy is stored.

    Attributes:
        done: letters that are published again.
        failures: why others are not.
    """

    def __init__(self, link: Link, given: argparse.Namespace) -> None:
        self._link, self._given = link, given
        self._consumers: list[Consumer] = []
        self._seen = 0
        self.done = 0
        self.failures: list[str] = []

    async def run(self, count: int, addresses: Sequence[str]) -> None:
        """Do it.

        Args:
            count: so many letters.
            addresses: the nsqd that have them; none: nsqlookupd know.
        """
        progress = Progress("dead letters requeued", count)
        async with _Copies(self._link) as copies:
            if addresses:
                await asyncio.gather(*(self._of(each, copies, count, progress) for each in addresses))
            else:  # they say whether there are headers as well
                await self._consume(copies, count, progress, headers=False, **self._link.addresses)
        progress.end()

    async def _of(self, address: str, copies: _Copies, count: int, progress: Progress) -> None:
        """Move the letters of one nsqd; it refuses a consumer that reads headers where there are none."""
        try:
            try:
                await self._consume(copies, count, progress, headers=True, nsqd_tcp_addresses=address)
            except NsqdError as error:
                if error.code != _NO_HEADERS:
                    raise
                await self._consume(copies, count, progress, headers=False, nsqd_tcp_addresses=address)
        except FlintError as error:
            self._link.note_failed(address, error)

    async def _consume(self, copies: _Copies, count: int, progress: Progress, **how: Any) -> None:
        from flintmq.client.aio.consumer import Consumer

        if self._seen >= count:
            return
        loop, topic, options = asyncio.get_running_loop(), self._given.topic, self._link.options
        async with Consumer(topic, CHANNEL, **how, options=options, max_attempts=0) as consumer:
            self._consumers.append(consumer)
            idle = loop.call_later(self._link.timeout_s + _IDLE_S, consumer.stop)
            async for message in consumer:
                idle.cancel()
                idle = loop.call_later(_IDLE_S, consumer.stop)
                await self._move(message, copies)
                progress.at(self.done)
                if self._seen >= count:
                    for each in self._consumers:
                        each.stop()
                    break
            idle.cancel()

    async def _move(self, message: Message[bytes], copies: _Copies) -> None:
        self._seen += 1
        try:
            headers = {**({TAG_HEADER: message.tag} if message.tag else {}), **message.headers}
            await copies.publish(_origin(self._given, headers, id_text(message.id)), message.body, headers)
        except FlintError as error:
            self.failures.append(f"a letter of {len(message.body):,} bytes is not requeued: {error}")
            message.requeue(60)  # not again in this run
        else:
            message.finish()
            self.done += 1
