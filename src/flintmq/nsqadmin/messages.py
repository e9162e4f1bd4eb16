"""Looking at messages: what a channel has, one message and its life, and dead letters.

Rules of this file: nothing is disturbed, created or consumed by looking. Bodies and headers leave this file only for a
visitor who may see them. Counts and bodies have a bound, and so has the time in which everything is found. Nodes that
cannot show messages, because they are not ours, are left out and said.

Source: Youzan's HTTP API (``/message/get``); docs/limits.md, docs/tracing.md.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Literal

from flintmq.client.admin import nsqd as questions
from flintmq.client.admin.results import PeekedMessage, StoredMessage
from flintmq.client.core.dead_letters import PREFIX
from flintmq.env import Env
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.access import Visitor
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.snapshots import Snapshot, Snapshots
from flintmq.nsqadmin.upstream import LOOK_S, NotAnswered, Upstream
from flintmq.nsqadmin.views import DeadLettersView, EventRow, MessageView, Missing, PeekRow, PeekView

PEEK_COUNT = 20
PEEK_COUNT_MAX = 100
BODY_BYTES_MAX = 4096
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
        count = max(1, min(known.topics[topic].partition_count, _PARTITION_COUNT_MAX)) if topic in known.topics else 1
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
        known = await self._known(topic)
        dead_topic, missing = await self.dead_topic_of(topic, known)
        if dead_topic and not dead_channel(known, dead_topic):
            known = await self._snapshots.fresh()  # the first may have died just now
        nodes, _ = self.nodes_of(dead_topic, known)
        channel = dead_channel(known, dead_topic)
        rows: list[PeekRow] = []
        waiting = known.topics[dead_topic].depth if dead_topic in known.topics else 0
        notes = list(known.notes)
        if channel:
            rows, failed = await self._peek_all(nodes, dead_topic, channel, "next", visitor, count)
            missing += failed
            waiting = known.channels[dead_topic][channel].depth
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
        )

    async def dead_topic_of(self, topic: str, known: Snapshot) -> tuple[str, list[Missing]]:
        """Return where the dead letters of a topic go; a topic of dead letters is its own."""
        nodes, _ = self.nodes_of(topic, known)
        answers = await self._upstream.look_all("nsqd", nodes, questions.topic_settings(topic))
        for found in answers.found.values():
            if found.effective.get("dead_letters"):
                return topic, answers.missing
            name = found.effective.get("dead_letter_topic")
            if isinstance(name, str) and name:
                return name.replace("{topic}", topic), answers.missing
        return usual_dead_topic(topic), answers.missing

    def _now_s(self) -> float:
        return self._env.clock.wall_ns() / _NS_PER_S


def usual_dead_topic(topic: str) -> str:
    """Return where dead letters of a topic go unless its settings say otherwise."""
    return f"{topic}.dead"


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
            "consumer": (consumer.remote_address or consumer.client_id) if consumer else "",
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
        headers=message.headers if visitor.sees_bodies else {},
        **more,
    )


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


__all__ = ["CHANNEL", "ORIGIN", "PEEK_COUNT_MAX", "Messages", "dead_channel", "usual_dead_topic"]
