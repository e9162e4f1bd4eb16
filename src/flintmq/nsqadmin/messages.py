"""Looking at messages: what a channel has, one message and its life, and dead letters.

Rules of this file: nothing is disturbed, created or consumed by looking. Bodies and headers leave this file only for a
visitor who may see them. Counts and bodies have a bound, and so has the time in which everything is found. Nodes that
cannot show messages, because they are not ours, are left out and said. Where dead letters go is asked of nsqd, which
knows the settings and flags that say so; what there was no time to ask is said.

Source: Youzan's HTTP API (``/message/get``); docs/limits.md, docs/tracing.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Literal

from msgspec import json

from flintmq.client.admin import cluster as cluster_questions
from flintmq.client.admin import nsqd as questions
from flintmq.client.admin.question import Question
from flintmq.client.admin.results import PeekedMessage, SettingsState, StoredMessage
from flintmq.client.core.dead_letters import PREFIX
from flintmq.env import Env
from flintmq.names import shortened
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.access import Visitor
from flintmq.nsqadmin.daemons import TEXT_SIZE_MAX
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.snapshots import Snapshot, Snapshots
from flintmq.nsqadmin.upstream import LOOK_S, NotAnswered, Upstream
from flintmq.nsqadmin.views import (
    DeadLettersView,
    DeadTopicRow,
    DeadTopicsView,
    EventRow,
    MessageView,
    Missing,
    PeekRow,
    PeekView,
)
from flintmq.settings import DEAD_LETTER_TOPIC, dead_letter_topic

PEEK_COUNT = 20
PEEK_COUNT_MAX = 100
BODY_BYTES_MAX = 4096
HEADER_COUNT_MAX = 64
HEADER_SIZE_MAX = 1024
"""Headers of a message that are shown, and characters of the value of each."""
EVENT_COUNT_MAX = 1000
CHANNEL = "nsqadmin"
"""The channel with which nsqadmin looks at dead letters where nobody consumes them."""

REASON = f"{PREFIX}reason"
ORIGIN = f"{PREFIX}topic"
What = Literal["next", "in_flight", "deferred"]
By = Literal["id", "trace", "time"]
_NS_PER_S = 1_000_000_000
_STEPS_MAX = 64
_PARTITION_COUNT_MAX = 64
DEAD_TOPIC_COUNT_MAX = 500
CHANNEL_COUNT_MAX = 500
"""Channels of a topic whose settings are asked for."""

SETTINGS_S = 1.0
"""The time to ask for the settings of many topics or channels: no page takes more than 2 s in all."""

_SUFFIX = DEAD_LETTER_TOPIC.removeprefix("{topic}")
_ASKED_AT_ONCE = 8
"""Settings that are asked for at the same time, so that others who look have their turn too."""


@dataclass(frozen=True, slots=True)
class Places:
    """The topics that the dead letters of a topic go to.

    Attributes:
        own: by the topic's settings, or the flags of its nsqd; the topic itself, if it is one of dead letters, by its
            name as well. Where nothing is given up, the usual name; empty: channels alone do, and theirs go elsewhere.
        others: those of channels with settings of their own, or of an nsqd that has other ones.
        missing: who did not say.
        notes: what is not known, as sentences.
    """

    own: str
    others: list[str]
    missing: list[Missing]
    notes: list[str]


class Messages:
    """Looks."""

    def __init__(self, env: Env, upstream: Upstream, snapshots: Snapshots) -> None:
        self._env = env
        self._upstream = upstream
        self._snapshots = snapshots

    async def peek(self, topic: str, channel: str, what: What, visitor: Visitor, count: int = PEEK_COUNT) -> PeekView:
        """Return messages of a channel."""
        known = await self._known(topic)
        nodes, others = self.nodes_of(topic, known)
        rows, missing = await self._peek_all(nodes, topic, channel, what, visitor, count)
        notes = list(known.notes)
        if others and nodes:
            notes.append(f"not shown are the messages of {', '.join(others)}: no nsqd of FlintMQ")
        return PeekView(
            at_s=self._now_s(),
            missing=[*known.missing, *missing],
            notes=notes,
            topic=topic,
            channel=channel,
            what=what,
            can_peek=bool(nodes),
            are_bodies_hidden=not visitor.sees_bodies,
            messages=rows,
        )

    async def _known(self, topic: str) -> Snapshot:
        """Return a snapshot; for a topic that is new the daemons are asked."""
        found = await self._snapshots.get()
        return found if topic in found.topics else await self._snapshots.fresh()

    async def _peek_all(
        self, nodes: Iterable[str], topic: str, channel: str, what: What, visitor: Visitor, count: int
    ) -> tuple[list[PeekRow], list[Missing]]:
        count = max(1, min(count, PEEK_COUNT_MAX))
        question = questions.peek(topic, channel, what, count=count, max_body=BODY_BYTES_MAX)
        answers = await self._upstream.look_all("nsqd", nodes, question)
        rows = [_row(each, node, visitor) for node, found in answers.found.items() for each in found]
        rows.sort(key=lambda row: row.timestamp_ns)
        return rows[:count], [each.missing for each in answers.failures if each.status != 404]

    def nodes_of(self, topic: str, known: Snapshot) -> tuple[list[str], list[str]]:
        """Return the nodes with a topic that can show messages, and those that cannot."""
        holding = [address for address, topics in known.on_node.items() if topic in topics]
        ours = [each for each in holding if known.nodes[each].kind == "flintmq"]
        return ours, [each for each in holding if each not in ours]

    # -- one message --------------------------------------------------------------------------------------------------

    async def find(self, topic: str, by: By, value: str, visitor: Visitor) -> MessageView:
        """Return a message and its life, by its id, its trace id, or the time when it came.

        Raises:
            Refused: 400, when it is no id, trace id or time.
        """
        known = await self._known(topic)
        nodes, _ = self.nodes_of(topic, known)
        notes = list(known.notes)
        if not nodes:
            notes.append("no nsqd of FlintMQ has this topic, and others do not show messages")
        found: list[PeekRow] = []
        missing: list[Missing] = []
        trace_id = message_id = None
        if by == "trace":
            trace_id = _whole(value, "a trace id is a whole number")
        elif by == "id":
            message_id = _message_id(value)
            answers = await self._upstream.look_all("nsqd", nodes, questions.get_message(topic, message_id))
            found = [_row(each, node, visitor) for node, each in answers.found.items()]
            missing += [each.missing for each in answers.failures if each.status not in (400, 404)]
        else:
            at_ns = _time_ns(value)
            found, missing = await self._find_by_time(topic, at_ns, nodes, known, visitor)
            message_id = found[0].message_id if found else None
        events: list[EventRow] = []
        is_complete = True
        if trace_id is not None or message_id is not None:
            asked = nodes if trace_id is not None or not found else [row.node for row in found[:1]]
            events, is_complete, failed = await self._events(topic, asked, message_id, trace_id)
            missing += failed
        return MessageView(
            at_s=self._now_s(),
            missing=[*known.missing, *missing],
            notes=notes,
            topic=topic,
            by=by,
            value=value,
            are_bodies_hidden=not visitor.sees_bodies,
            found=found,
            events=events,
            is_complete=is_complete,
            is_traced=bool(events),
        )

    async def _events(
        self, topic: str, nodes: Iterable[str], message_id: str | None, trace_id: int | None
    ) -> tuple[list[EventRow], bool, list[Missing]]:
        question = questions.find_trace(topic, message_id, trace_id=trace_id, limit=EVENT_COUNT_MAX)
        answers = await self._upstream.look_all("nsqd", nodes, question)
        rows = [
            EventRow(
                timestamp_ns=each.timestamp_ns,
                action=each.action,
                channel=each.channel,
                partition=each.partition,
                message_id=each.message_id,
                trace_id=each.traceid or None,
                attempts=each.attempts,
                client=each.client,
                node=each.node or node,
                delay_ms=each.delay_ms,
                count=each.count,
            )
            for node, found in answers.found.items()
            for each in found.events
        ]
        rows.sort(key=lambda row: row.timestamp_ns)
        missing = [each.missing for each in answers.failures if each.status not in (400, 404)]
        return rows, all(found.complete for found in answers.found.values()), missing

    async def _find_by_time(
        self, topic: str, at_ns: int, nodes: list[str], known: Snapshot, visitor: Visitor
    ) -> tuple[list[PeekRow], list[Missing]]:
        """Return the first message of each partition that came then or later, the earliest first."""
        count = max(1, min(await self._partition_count(topic, known), _PARTITION_COUNT_MAX))
        places = [(node, number) for node in nodes for number in range(count)]
        rows: list[PeekRow] = []
        missing: list[Missing] = []
        try:
            async with asyncio.timeout(LOOK_S):
                found = await asyncio.gather(
                    *(self._first_at(node, topic, number, at_ns) for node, number in places), return_exceptions=True
                )
        except TimeoutError:
            return [], [Missing("nsqd", each, "slow", f"the search took longer than {LOOK_S:g} s") for each in nodes]
        for (node, _), answer in zip(places, found, strict=True):
            if isinstance(answer, NotAnswered):
                missing.append(answer.missing)
            elif isinstance(answer, BaseException):
                raise answer
            elif answer is not None:
                rows.append(_row(answer, node, visitor))
        rows.sort(key=lambda row: row.timestamp_ns)
        return rows, missing

    async def _partition_count(self, topic: str, known: Snapshot) -> int:
        """Return how many partitions a topic has; of one that a cluster made by itself nsqd tells as of a plain one."""
        if topic in known.topics and (told := known.topics[topic].partition_count):
            return told
        question = cluster_questions.cluster_status(topic=topic)
        answers = await self._upstream.look_all("nsqlookupd", self._snapshots.lookupds, question)
        rows = (row for status in answers.found.values() for row in status.topics if row.topic == topic)
        return max((row.partition_num for row in rows), default=0)

    async def _first_at(self, node: str, topic: str, partition: int, at_ns: int) -> StoredMessage | None:
        """Find by halves, over the bytes of the log, the first message that came then or later."""
        stats = await self._upstream.look("nsqd", node, daemons.partition_stats(topic, partition))
        rows = [each for each in stats.topics or () if each.topic_partition == str(partition)]
        if not rows:
            return None
        low, high = rows[0].backend_start, rows[0].backend_depth
        best: StoredMessage | None = None
        for _ in range(_STEPS_MAX):
            if low >= high:
                break
            middle = (low + high) // 2
            found = await self._at_offset(node, topic, partition, middle)
            if found is None:  # a hole: what is behind it is looked at
                low = middle + 1
            elif found.timestamp_ns >= at_ns:
                best, high = found, min(found.offset, middle)
            else:
                low = middle + 1
        return best

    async def _at_offset(self, node: str, topic: str, partition: int, offset: int) -> StoredMessage | None:
        try:
            question = questions.get_message(topic, offset=offset, partition=partition)
            return await self._upstream.look("nsqd", node, question)
        except NotAnswered as error:
            if error.status == 404:
                return None
            raise

    # -- dead letters -------------------------------------------------------------------------------------------------

    async def dead_letters(self, topic: str, visitor: Visitor, count: int = PEEK_COUNT_MAX) -> DeadLettersView:
        """Return the dead letters of a topic."""
        known = await self._snapshots.fresh()  # some may have died just now
        places = await self.places_of(topic, known)
        dead_topic, missing = places.own, list(places.missing)
        nodes, _ = self.nodes_of(dead_topic, known)
        channel = dead_channel(known, dead_topic)
        rows: list[PeekRow] = []
        waiting = _waiting(known, dead_topic) or 0
        notes = [*known.notes, *places.notes]
        if channel:
            rows, failed = await self._peek_all(nodes, dead_topic, channel, "next", visitor, count)
            missing += failed
        elif waiting:
            notes.append(f"topic {dead_topic} has no channel yet; a channel {CHANNEL} makes its messages visible")
        reasons: dict[str, int] = {}
        for row in rows:
            reason = str(row.headers.get(REASON, "")) or "not known"
            if not row.headers and not visitor.sees_bodies:
                continue
            reasons[reason] = reasons.get(reason, 0) + 1
        return DeadLettersView(
            at_s=self._now_s(),
            missing=[*known.missing, *missing],
            notes=notes,
            topic=topic,
            dead_topic=dead_topic,
            exists=dead_topic in known.topics,
            channel=channel,
            waiting=waiting,
            are_bodies_hidden=not visitor.sees_bodies,
            messages=rows,
            reasons=reasons,
            others={name: _waiting(known, name) for name in places.others},
        )

    async def places_of(self, topic: str, known: Snapshot) -> Places:
        """Return where the dead letters of a topic go."""
        nodes, _ = self.nodes_of(topic, known)
        answers = await self._upstream.look_all("nsqd", nodes, questions.topic_settings(topic))
        missing = {each.missing.address: each.missing for each in answers.failures if each.status != 404}
        if any(_is_marked(found) for found in answers.found.values()):
            return Places(topic, [], list(missing.values()), [])
        named = [name for found in answers.found.values() if (name := _dead_topic(found))]
        of_channels, notes = await self._places_of_channels(topic, nodes, known, missing)
        own = named[0] if named else usual_dead_topic(topic)
        if _is_named_so(topic) and topic in known.topics:
            own = topic
        elif of_channels and not named and own not in {*of_channels, *known.topics}:
            own = ""
        return Places(own, sorted({*named, *of_channels} - {own}), list(missing.values()), notes)

    async def _places_of_channels(
        self, topic: str, nodes: list[str], known: Snapshot, missing: dict[str, Missing]
    ) -> tuple[set[str], list[str]]:
        """Return where the dead letters of a topic's channels go, and what is not known.

        Args:
            missing: nodes that did not answer, which are asked no more; others are added.
        """
        found: set[str] = set()
        names = sorted(known.channels.get(topic, {}))

        async def ask(name: str) -> None:
            for node in nodes:
                if name not in known.on_node[node][topic]:
                    continue
                state = await self._settings(node, questions.channel_settings(topic, name), missing)
                if state is not None and (place := _dead_topic(state)):
                    found.add(place)

        left = len(names) - await _for_each(names[:CHANNEL_COUNT_MAX], ask)
        if not left:
            return found, []
        return found, [
            f"of {left} of {len(names)} channels it is not known where their dead letters go: too many to ask"
        ]

    async def _settings(
        self, node: str, question: Question[SettingsState], missing: dict[str, Missing]
    ) -> SettingsState | None:
        """Ask an nsqd for settings; None: it does not answer, or has no such topic or channel any more."""
        if node in missing:
            return None
        try:
            return await self._upstream.look("nsqd", node, question, SETTINGS_S)
        except NotAnswered as error:
            if error.status != 404:
                missing[node] = error.missing
            return None

    async def dead_topics(self) -> DeadTopicsView:
        """Return the topics of dead letters: by their name, or because an nsqd has published some to them.

        Nsqd marks them in their settings, for which it is asked topic by topic: first of those with headers, which it
        makes them with, and of all as far as there is time.
        """
        known = await self._snapshots.fresh()  # the first may have died just now
        ours = [address for address in known.on_node if known.nodes[address].kind == "flintmq"]
        found = {name for name in known.topics if _is_named_so(name)}
        missing: dict[str, Missing] = {}

        async def ask(name: str) -> None:
            for node in ours:
                if name in found or name not in known.on_node[node]:
                    continue
                state = await self._settings(node, questions.topic_settings(name), missing)
                if state is not None and _is_marked(state):
                    found.add(name)

        rest = [name for name in known.topics if name not in found]
        rest.sort(key=lambda name: (not known.topics[name].settings.get("extend_support"), name))
        unasked = len(rest) - await _for_each(rest, ask)
        notes = list(known.notes)
        if unasked:
            notes.append(
                f"of {unasked} of {len(known.topics)} topics it is not known whether they have dead letters, because "
                f"there are too many to ask: only those with a name that ends in {_SUFFIX} are listed"
            )
        if len(found) > DEAD_TOPIC_COUNT_MAX:
            notes.append(f"{len(found)} topics have dead letters; the first {DEAD_TOPIC_COUNT_MAX} by name are listed")
        return DeadTopicsView(
            at_s=known.at_s,
            missing=[*known.missing, *(each for each in missing.values() if each not in known.missing)],
            notes=notes,
            topics=[
                DeadTopicRow(name=name, topic=_origin(name, known), message_count=known.topics[name].message_count)
                for name in sorted(found)[:DEAD_TOPIC_COUNT_MAX]
            ],
            total=len(found),
            unasked=unasked,
        )

    def _now_s(self) -> float:
        return self._env.clock.wall_ns() / _NS_PER_S


def usual_dead_topic(topic: str) -> str:
    """Return where dead letters of a topic go unless its settings say otherwise."""
    return dead_letter_topic(DEAD_LETTER_TOPIC, topic)


def _is_named_so(topic: str) -> bool:
    return topic.endswith(_SUFFIX) and topic != _SUFFIX


def _is_marked(state: SettingsState) -> bool:
    """Whether nsqd has published dead letters to a topic: it notes that among the topic's settings."""
    return state.settings.get("dead_letters") is True


def _dead_topic(state: SettingsState) -> str:
    """Return where nsqd publishes what it gives up under settings; empty: it gives up nothing."""
    name = state.effective.get("dead_letter_topic")
    return name if isinstance(name, str) else ""


def _origin(dead_topic: str, known: Snapshot) -> str:
    """Return the topic whose dead letters are there by their usual name; empty: the letters themselves say it."""
    head, _, tail = dead_topic.rpartition(_SUFFIX)
    name = head + tail  # the tail is that of an ephemeral one
    return name if name in known.topics and usual_dead_topic(name) == dead_topic else ""


def _waiting(known: Snapshot, dead_topic: str) -> int | None:
    """Return how many dead letters wait in a topic; None: it is not there."""
    if dead_topic not in known.topics:
        return None
    channel = dead_channel(known, dead_topic)
    return known.channels[dead_topic][channel].depth if channel else known.topics[dead_topic].depth


async def _for_each(names: Sequence[str], ask: Callable[[str], Awaitable[None]]) -> int:
    """Ask about one name after the other, some at a time, for at most ``SETTINGS_S``; return how many are done."""
    left, done = iter(names), 0

    async def some() -> None:
        nonlocal done
        for name in left:
            await ask(name)
            done += 1

    try:
        async with asyncio.timeout(SETTINGS_S), asyncio.TaskGroup() as group:
            for _ in range(min(_ASKED_AT_ONCE, len(names))):
                group.create_task(some())
    except TimeoutError:
        pass  # the caller says what is left
    return done


def dead_channel(known: Snapshot, dead_topic: str) -> str:
    """Return the channel in which dead letters are looked at: nsqadmin's, else the first; empty: there is none."""
    names = known.channels.get(dead_topic, {})
    return CHANNEL if CHANNEL in names else min(names, default="")


def _row(message: StoredMessage, node: str, visitor: Visitor) -> PeekRow:
    body = message.body
    size = message.body_size if isinstance(message, PeekedMessage) and message.body_size else len(body)
    shown = body[:BODY_BYTES_MAX]
    text, is_binary = _text(shown, len(body) < size or len(shown) < len(body))
    more: dict[str, Any] = {}
    if isinstance(message, PeekedMessage):
        consumer = message.client
        more = {
            "partition": message.partition,
            "due_in_ms": message.due_in_ms,
            "timeout_in_ms": message.timeout_in_ms,
            "consumer": shortened(consumer.remote_address or consumer.client_id, TEXT_SIZE_MAX) if consumer else "",
        }
    return PeekRow(
        node=node,
        message_id=message.message_id,
        trace_id=message.trace_id,
        timestamp_ns=message.timestamp_ns,
        attempts=message.attempts,
        body_size=size,
        body=text if visitor.sees_bodies else None,
        is_cut=size > len(shown),
        is_binary=is_binary,
        headers=_shown(message.headers) if visitor.sees_bodies else {},
        **more,
    )


def _shown(headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers as far as they are shown; a value that is too long becomes the beginning of its text."""
    found: dict[str, Any] = {}
    for name, value in islice(headers.items(), HEADER_COUNT_MAX):
        text = value if isinstance(value, str) else json.encode(value).decode()
        is_long = len(text) > HEADER_SIZE_MAX
        found[shortened(name, TEXT_SIZE_MAX)] = shortened(text, HEADER_SIZE_MAX) if is_long else value
    if len(headers) > HEADER_COUNT_MAX:
        found["…"] = f"{len(headers) - HEADER_COUNT_MAX} more headers"
    return found


def _text(body: bytes, is_cut: bool) -> tuple[str, bool]:
    """Return a body to show, and whether it is shown as hex; a character that was cut in two is left away."""
    try:
        return body.decode(), False
    except UnicodeDecodeError as error:
        if is_cut and error.end == len(body) and len(body) - error.start < 4:
            return body[: error.start].decode(), False
        return body.hex(" "), True


def _whole(text: str, allowed: str) -> int:
    if text.isascii() and text.isdigit() and len(text) <= 20:
        return int(text)
    raise Refused(400, f"{text[:64]!r} cannot be searched for: {allowed}")


def _message_id(text: str) -> str:
    text = text.strip().lower()
    if text.isascii() and ((len(text) in (16, 32) and not set(text) - set("0123456789abcdef")) or text.isdigit()):
        return text
    raise Refused(400, f"{text[:64]!r} is no id of a message: 16 or 32 hex digits, or the internal id as a number")


def _time_ns(text: str) -> int:
    """Read a time: ISO 8601, UTC where it says no zone, or seconds since 1970."""
    try:
        if text.replace(".", "", 1).isdigit():
            seconds = float(text)
        else:
            found = datetime.fromisoformat(text.strip())
            seconds = (found if found.tzinfo is not None else found.replace(tzinfo=UTC)).timestamp()
    except (ValueError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds < 2**33:
        raise Refused(
            400, f"{text[:64]!r} is no time: 2026-11-23T14:00:00Z (UTC without a zone), or seconds since 1970"
        )
    return int(seconds * _NS_PER_S)


__all__ = ["CHANNEL", "ORIGIN", "PEEK_COUNT_MAX", "Messages", "Places", "dead_channel", "usual_dead_topic"]
