"""The changes that a visitor can make.

Rules of this file:

- Each asks for a role first, then checks what it was given, then asks all daemons concerned, and says who did not do
  it, and who could not be asked: an nsqd that may have the topic, or a nsqlookupd that may know who has it. It is
  refused when nobody did it.
- What loses messages asks for the name of what it is about (``confirm``), as the visitor has typed it; None: a script
  that has the name in its request.
- Every attempt is in the audit log, those that are refused included, and what was done is notified of.
- A daemon that answers that there is no such topic or channel has nothing to do; if all say so, it is a 404.
- Only daemons of the deployment are asked, whatever address a visitor names.

Source: NSQ's HTTP API, NSQ's nsqlookupd.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from flintmq.client.admin import cluster as cluster_questions
from flintmq.client.admin import nsqd as nsqd_questions
from flintmq.client.admin import nsqlookupd as lookupd_questions
from flintmq.client.admin.question import Question, nothing, post
from flintmq.client.admin.results import PeekedMessage, StoredMessage
from flintmq.client.core.dead_letters import headers_before
from flintmq.client.core.start import StartAt
from flintmq.env import Env
from flintmq.names import is_valid_name
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.access import Visitor
from flintmq.nsqadmin.audit import Audit
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.gather import Gather
from flintmq.nsqadmin.messages import ORIGIN, PEEK_COUNT_MAX, dead_channel
from flintmq.nsqadmin.notify import Notification, Notifier
from flintmq.nsqadmin.snapshots import Snapshot, with_away
from flintmq.nsqadmin.upstream import NotAnswered, Upstream
from flintmq.nsqadmin.views import DoneView, Missing
from flintmq.options import SECOND, parse_moment
from flintmq.topic_meta import PARTITION_NUM_MAX, REPLICATOR_MAX

RETENTION_DAYS_MAX = 3650
DEAD_LETTERS_MAX = 1000
REFUSALS_MAX = 20
"""Dead letters that a node refuses, behind which the others are left where they are."""
_NOT_THERE = ("TOPIC_NOT_FOUND", "CHANNEL_NOT_FOUND")
_FINISHED = "MESSAGE_NOT_FOUND"


class _Contended(NotAnswered):
    """A dead letter that was published has been finished by somebody else meanwhile."""


class Outcome:
    """The outcome of a change so far.

    Attributes:
        done_count: daemons that did it.
        failures: of those that did not; ``absent``: of those that have no such topic or channel.
        unasked: of those that it was not asked of, because they did not say whether it concerns them.
        text: what is told instead of what was to be done; empty: that.
    """

    def __init__(self) -> None:
        self.text = ""
        self.done_count = 0
        self.failures: list[NotAnswered] = []
        self.absent: list[NotAnswered] = []
        self.unasked: list[NotAnswered] = []

    @property
    def undone(self) -> list[NotAnswered]:
        """All that may not have done it: those that did not, and those that could not be asked."""
        unasked = {_who(each.missing): each for each in self.unasked}
        return [*(each for each in self.failures if _who(each.missing) not in unasked), *unasked.values()]

    def add(self, done_count: int, failures: Iterable[NotAnswered]) -> None:
        """Count what several daemons answered."""
        self.done_count += done_count
        for each in failures:
            is_absent = each.status == 404 and each.word in _NOT_THERE
            (self.absent if is_absent else self.failures).append(each)

    def add_unasked(self, missing: Iterable[Missing]) -> None:
        """Note who could not be asked."""
        for each in missing:
            text = each.text
            if each.daemon == "nsqlookupd":
                text = f"{text} (nsqd that only it knows were not asked)"
            self.unasked.append(NotAnswered(msgspec.structs.replace(each, text=text)))

    def settle(self, missing: Iterable[Missing]) -> None:
        """Note that these need not be asked."""
        settled = {_who(each) for each in missing}
        self.unasked = [each for each in self.unasked if _who(each.missing) not in settled]


class Actions:
    """Changes things.

    Args:
        hostname: of this host, for notifications.
    """

    def __init__(
        self, env: Env, upstream: Upstream, gather: Gather, audit: Audit, notifier: Notifier, hostname: str
    ) -> None:
        self._env = env
        self._upstream = upstream
        self._gather = gather
        self._audit = audit
        self._notifier = notifier
        self._hostname = hostname
        self._turns: dict[str, tuple[asyncio.Lock, int]] = {}  # by topic of dead letters, with how many want one

    @property
    def _lookupds(self) -> tuple[str, ...]:
        return self._gather.snapshots.lookupds

    # -- topics and channels, as NSQ has them ------------------------------------------------------------------------

    async def create_topic(
        self,
        visitor: Visitor,
        topic: str,
        channel: str = "",
        *,
        partitions: int = 0,
        replicas: int = 0,
        ordered: bool = False,
        headers: bool = False,
        multipart: bool = False,
        retention_days: int = 0,
        syncdisk: int = 0,
        auto_channels: bool = True,
    ) -> DoneView:
        """Create a topic, and a channel of it if one is named."""
        meta: dict[str, Any] = {
            "partitions": partitions,
            "ordered": ordered,
            "multipart": multipart,
            "headers": headers,
            "retention_days": retention_days,
            "syncdisk": syncdisk,
            "auto_channels": auto_channels,
        }
        is_plain = not any(value for name, value in meta.items() if name != "auto_channels") and auto_channels

        def check() -> None:
            check_topic(topic)
            if channel:
                check_channel(channel)
            check_range("partitions", partitions, 0, PARTITION_NUM_MAX)
            check_range("replicas", replicas, 0, REPLICATOR_MAX)
            check_range("retention_days", retention_days, 0, RETENTION_DAYS_MAX)
            check_range("syncdisk", syncdisk, 0, 2**31 - 1)
            if replicas and not self._lookupds:
                raise Refused(400, "replicas are of a cluster: nsqadmin needs --lookupd-http-address")

        async def work(outcome: Outcome) -> None:
            if topic in (await self._gather.snapshots.fresh()).topics and not channel:
                outcome.text = f"nothing has changed: there was a topic {topic} already, and it stays as it is"
            if not self._lookupds:
                await self._each(
                    "nsqd", self._gather.snapshots.sources, nsqd_questions.create_topic(topic, **meta), outcome
                )
            elif is_plain and not replicas:
                await self._each("nsqlookupd", self._lookupds, daemons_create(topic), outcome)
            else:
                question = lookupd_questions.create_topic(topic, replicas=replicas, **meta)
                await self._first("nsqlookupd", self._lookupds, question, outcome)
            if not outcome.done_count and any(each.word.startswith("MISSING_ARG_TOPIC_") for each in outcome.failures):
                outcome.failures.clear()  # Youzan's, which has no plain topics: one copy, if no more are asked for
                whole = {**meta, "partitions": partitions or 1}
                question = lookupd_questions.create_topic(topic, replicas=replicas or 1, **whole)
                await self._first("nsqlookupd", self._lookupds, question, outcome)
            if channel:
                await self._create_channel(topic, channel, outcome)

        name = f"{topic}/{channel}" if channel else topic
        done = await self._change(visitor, "operate", "create_topic", f"created {name}", work, check, topic=topic)
        if channel:
            self._tell(visitor, "create_channel", topic, channel)
        return done

    async def create_channel(self, visitor: Visitor, topic: str, channel: str) -> DoneView:
        """Create a channel of a topic."""

        async def work(outcome: Outcome) -> None:
            await self._create_channel(topic, channel, outcome)

        text = f"created channel {topic}/{channel}"
        check = checked(topic, channel)
        return await self._change(visitor, "operate", "create_channel", text, work, check, topic=topic, channel=channel)

    async def _create_channel(self, topic: str, channel: str, outcome: Outcome) -> None:
        holders = await self._holders(topic, outcome)
        await asyncio.gather(  # one of either that hangs keeps the others waiting once, not twice
            self._each("nsqlookupd", self._lookupds, lookupd_questions.create_channel(topic, channel), outcome),
            self._each("nsqd", holders, nsqd_questions.create_channel(topic, channel), outcome),
        )

    async def delete_topic(self, visitor: Visitor, topic: str, confirm: str | None = None) -> DoneView:
        """Delete a topic with its channels and messages, everywhere."""

        async def work(outcome: Outcome) -> None:
            holders = await self._holders(topic, outcome)  # first: nsqlookupd forgets who has it
            known = (await self._gather.snapshots.get()).topics.get(topic)
            if known is None and not holders and not outcome.unasked and not await self._is_registered(topic):
                raise Refused(404, "TOPIC_NOT_FOUND")
            if self._lookupds:
                if known is not None and known.partition_count:
                    question = lookupd_questions.delete_topic(topic, everywhere=True)
                    await self._first("nsqlookupd", self._lookupds, question, outcome)
                    found = await self._gather.snapshots.get()
                    nodes = found.nodes
                    if outcome.done_count:  # the cluster has those that are away set it aside when they come back
                        outcome.settle(found.away.get(topic, ()))
                    holders = [each for each in holders if each not in nodes or nodes[each].kind != "youzan"]
                    if outcome.done_count and not holders:
                        return  # Youzan's nsqlookupd deletes it everywhere, and takes no other request for it
                await self._each("nsqlookupd", self._lookupds, daemons_delete(topic), outcome)
            await self._each("nsqd", holders, nsqd_questions.delete_topic(topic), outcome)

        def check() -> None:
            check_topic(topic)
            check_confirmed(confirm, topic, "topic")

        return await self._change(visitor, "admin", "delete_topic", f"deleted topic {topic}", work, check, topic=topic)

    async def delete_channel(self, visitor: Visitor, topic: str, channel: str, confirm: str | None = None) -> DoneView:
        """Delete a channel, everywhere."""

        async def work(outcome: Outcome) -> None:
            holders = await self._holders(topic, outcome)
            if self._lookupds:
                question = lookupd_questions.delete_channel(topic, channel)
                await self._each("nsqlookupd", self._lookupds, question, outcome)
            await self._each("nsqd", holders, nsqd_questions.delete_channel(topic, channel), outcome)

        text = f"deleted channel {topic}/{channel}"
        check = checked(topic, channel, confirm)
        return await self._change(visitor, "admin", "delete_channel", text, work, check, topic=topic, channel=channel)

    async def pause_topic(self, visitor: Visitor, topic: str) -> DoneView:
        """Let no message of a topic reach its channels."""
        question = nsqd_questions.pause_topic(topic)
        return await self._everywhere(visitor, "operate", "pause_topic", f"paused topic {topic}", question, topic)

    async def unpause_topic(self, visitor: Visitor, topic: str) -> DoneView:
        """End :meth:`pause_topic`."""
        question = nsqd_questions.unpause_topic(topic)
        return await self._everywhere(visitor, "operate", "unpause_topic", f"unpaused topic {topic}", question, topic)

    async def empty_topic(self, visitor: Visitor, topic: str, confirm: str | None = None) -> DoneView:
        """Drop the messages of a topic that no channel has yet."""
        question = nsqd_questions.empty_topic(topic)
        text = f"emptied topic {topic}"
        return await self._everywhere(visitor, "admin", "empty_topic", text, question, topic, confirm=confirm)

    async def pause_channel(self, visitor: Visitor, topic: str, channel: str) -> DoneView:
        """Deliver nothing of a channel."""
        question = nsqd_questions.pause_channel(topic, channel)
        text = f"paused channel {topic}/{channel}"
        return await self._everywhere(visitor, "operate", "pause_channel", text, question, topic, channel)

    async def unpause_channel(self, visitor: Visitor, topic: str, channel: str) -> DoneView:
        """End :meth:`pause_channel`."""
        question = nsqd_questions.unpause_channel(topic, channel)
        text = f"unpaused channel {topic}/{channel}"
        return await self._everywhere(visitor, "operate", "unpause_channel", text, question, topic, channel)

    async def empty_channel(self, visitor: Visitor, topic: str, channel: str, confirm: str | None = None) -> DoneView:
        """Drop what waits in a channel, is in flight or deferred."""
        question = nsqd_questions.empty_channel(topic, channel)
        text = f"emptied channel {topic}/{channel}"
        return await self._everywhere(visitor, "admin", "empty_channel", text, question, topic, channel, confirm)

    async def tombstone(self, visitor: Visitor, node: str, topic: str, confirm: str | None = None) -> DoneView:
        """Hide a node from those who look for a topic, and delete the topic there."""

        async def work(outcome: Outcome) -> None:
            await self._node(node)
            if await self._gather.is_of_cluster(topic):
                raise Refused(400, of_the_cluster(topic))
            if self._lookupds:
                await self._each("nsqlookupd", self._lookupds, lookupd_questions.tombstone(topic, node), outcome)
            await self._each("nsqd", [node], nsqd_questions.delete_topic(topic), outcome)

        def check() -> None:
            check_topic(topic)
            check_confirmed(confirm, topic, "topic")

        return await self._change(
            visitor, "admin", "tombstone_topic_producer", f"tombstoned {node} for {topic}", work, check,
            topic=topic, node=node,
        )  # fmt: skip

    # -- beyond NSQ ---------------------------------------------------------------------------------------------------

    async def set_channel(
        self, visitor: Visitor, topic: str, channel: str, when: str, confirm: str | None = None
    ) -> DoneView:
        """Let a channel go on at another place: deliver again from then on, or drop what is before.

        Args:
            when: ``beginning``, ``end``, a time as ``2026-11-23T14:00:00Z``, or a duration such as ``1h30m`` (ago).
        """

        def check() -> None:
            checked(topic, channel, confirm)()
            read_start(when)

        async def work(outcome: Outcome) -> None:
            question = nsqd_questions.set_offset(topic, channel, read_start(when))
            await self._each("nsqd", await self._holders(topic, outcome), question, outcome)

        text = f"set channel {topic}/{channel} to {when}"
        return await self._change(visitor, "admin", "set_channel", text, work, check, topic=topic, channel=channel)

    async def enable_trace(self, visitor: Visitor, topic: str) -> DoneView:
        """Record what happens to the messages of a topic."""
        question = nsqd_questions.enable_trace(topic)
        return await self._everywhere(visitor, "operate", "enable_trace", f"tracing topic {topic}", question, topic)

    async def disable_trace(self, visitor: Visitor, topic: str) -> DoneView:
        """End :meth:`enable_trace`."""
        question = nsqd_questions.disable_trace(topic)
        text = f"tracing topic {topic} no more"
        return await self._everywhere(visitor, "operate", "disable_trace", text, question, topic)

    # -- a cluster ----------------------------------------------------------------------------------------------------

    async def _ordered(
        self,
        visitor: Visitor,
        action: str,
        text: str,
        make: Callable[[], Question[Any]],
        *,
        topic: str = "",
        node: str = "",
    ) -> DoneView:
        """Give an order to the cluster; any nsqlookupd hands it to the master, once.

        Args:
            make: checks what was given, and returns the order.
        """
        order: list[Question[Any]] = []

        def check() -> None:
            if topic:
                check_topic(topic)
            if not self._lookupds:
                raise Refused(400, "a cluster is asked through its nsqlookupd: nsqadmin needs --lookupd-http-address")
            order.append(make())

        async def work(outcome: Outcome) -> None:
            await self._order(order[0], text, outcome)

        return await self._change(visitor, "admin", action, text, work, check, topic=topic[:64], node=node[:128])

    async def _order(self, question: Question[Any], text: str, outcome: Outcome) -> None:
        """Give an order; say so if it was to be done no more.

        Raises:
            Refused: with 400, by the cluster.
        """
        plan = await self._first("nsqlookupd", self._lookupds, question, outcome)
        if isinstance(plan, dict) and plan.get("changes") is False:
            outcome.text = f"nothing was to be done, it was so already: {text}"
        elif isinstance(plan, dict):
            outcome.text = "; ".join([text, *self._gather.notes_of(plan)])
        refusals = [each for each in (*outcome.failures, *outcome.absent) if 400 <= each.status < 500]
        if refusals and not outcome.done_count:
            raise Refused(400, f"nothing was done: {refusals[-1].word[:2000]}")

    async def move_partition(self, visitor: Visitor, topic: str, partition: str, source: str, target: str) -> DoneView:
        """Move a copy of a partition to another node: it is made there first, then taken away here."""

        def make() -> Question[Any]:
            return move_order(topic, partition, source, target)

        text = f"{topic} {partition} is being moved from {source} to {target}"
        return await self._ordered(visitor, "move_partition", text, make, topic=topic)

    async def change_topic(
        self,
        visitor: Visitor,
        topic: str,
        confirm: str | None = None,
        replicas: str = "",
        min_in_sync: str = "",
        retention_days: str = "",
    ) -> DoneView:
        """Change how many copies of a topic there are, how many have to confirm, and how long it is kept."""
        given = {"copies": replicas, "copies that confirm": min_in_sync, "days": retention_days}
        said = ", ".join(f"{text} {name}" for name, text in given.items() if text)

        def make() -> Question[Any]:
            check_confirmed(confirm, topic, "topic")
            return change_order(topic, replicas, min_in_sync, retention_days)

        return await self._ordered(visitor, "change_topic", f"changed topic {topic}: {said}", make, topic=topic)

    async def expand_topic(self, visitor: Visitor, topic: str, partitions: str, confirm: str | None = None) -> DoneView:
        """Give a topic more partitions."""

        def make() -> Question[Any]:
            check_confirmed(confirm, topic, "topic")
            return expand_order(topic, partitions)

        text = f"topic {topic} has {partitions} partitions"
        return await self._ordered(visitor, "expand_topic", text, make, topic=topic)

    async def elect(self, visitor: Visitor, topic: str, partition: str, confirm: str | None = None) -> DoneView:
        """Let a node lead a partition that nobody can lead without losing something."""

        def make() -> Question[Any]:
            check_confirmed(confirm, topic, "topic")
            return cluster_questions.elect(topic, read_number("partition", partition, 0, PARTITION_NUM_MAX))

        return await self._ordered(visitor, "elect", f"{topic} {partition} is led", make, topic=topic)

    async def drain_member(self, visitor: Visitor, node: str, confirm: str | None = None) -> DoneView:
        """Have a node of a cluster lead nothing, and give its copies to others."""

        def make() -> Question[Any]:
            check_confirmed(confirm, node, "node")
            return cluster_questions.drain_node(node)

        text = f"node {node} gives what it has to others"
        return await self._ordered(visitor, "drain_member", text, make, node=node)

    async def stop_drain_member(self, visitor: Visitor, node: str) -> DoneView:
        """End :meth:`drain_member`, and :meth:`remove_member`."""
        text = f"node {node} may have partitions again"
        return await self._ordered(
            visitor, "stop_drain_member", text, lambda: cluster_questions.drain_node(node, undo=True), node=node
        )

    async def remove_member(self, visitor: Visitor, node: str, confirm: str | None = None) -> DoneView:
        """Drain a node of a cluster for good, and forget it when it has nothing any more."""

        def make() -> Question[Any]:
            check_confirmed(confirm, node, "node")
            return cluster_questions.remove_node(node)

        text = f"node {node} is forgotten when it has nothing any more"
        return await self._ordered(visitor, "remove_member", text, make, node=node)

    async def set_balance(self, visitor: Visitor, state: str) -> DoneView:
        """Let a cluster spread leaders and copies by itself (``on``), or not (``off``)."""

        def make() -> Question[Any]:
            if state not in ("on", "off"):
                raise Refused(400, "balancing is on or off")
            return cluster_questions.set_balance(enabled=state == "on")

        return await self._ordered(visitor, "set_balance", f"balancing is {state}", make, node="cluster")

    # -- queries on Spark ---------------------------------------------------------------------------------------------

    async def forget_query(self, visitor: Visitor, query: str, topic: str = "") -> DoneView:
        """Show a query on Spark no more, until it reports itself again; no daemon is asked."""

        async def work(outcome: Outcome) -> None:
            if not self._gather.forget_query(query):
                raise Refused(404, "there is no such query: it was forgotten already")
            outcome.add(1, ())

        text = f"forgot Spark query {query[:200]}"
        return await self._change(
            visitor, "operate", "forget_query", text, work, None, topic=topic, channel=query[:200]
        )

    async def requeue_dead_letters(self, visitor: Visitor, topic: str, message_id: str | None = None) -> DoneView:
        """Publish dead letters of a topic again, to the topic that they came from, and finish them among the dead.

        One that was published and then could not be finished stays, and is published again the next time: none is lost.
        Of this nsqadmin one at a time does so. One that was finished by somebody else meanwhile may have been published
        by them too: that is said, and the rest of its node is left to them.

        Args:
            message_id: only this one; None: the first ``DEAD_LETTERS_MAX``.
        """

        async def requeue(node: str, dead_topic: str, channel: str, found: PeekedMessage) -> None:
            question_of_it = nsqd_questions.get_message(dead_topic, found.message_id)
            stored = await self._upstream.change("nsqd", node, question_of_it)  # as patient: it may have 10 MB
            if topic == dead_topic and not _origin(stored):
                text = (
                    f"letter {found.message_id} does not say which topic it is of: requeue it on the page of that topic"
                )
                raise NotAnswered(Missing("nsqd", node, "refused", text), 400)
            await self._upstream.change("nsqd", node, publish_again(stored, topic))
            question = nsqd_questions.finish_message(dead_topic, channel, found.message_id)
            try:
                await self._upstream.change("nsqd", node, question)
            except NotAnswered as error:
                if error.word != _FINISHED:
                    raise
                text = (
                    f"letter {found.message_id} was published again, and somebody else has finished it meanwhile: if "
                    "they requeue the same letters it is published twice; those behind it are left where they are"
                )
                raise _Contended(Missing("nsqd", node, "refused", text), error.status, error.word) from error

        return await self._dead_letters(visitor, "operate", "requeue_dead_letters", topic, message_id, None, requeue)

    async def drop_dead_letters(
        self, visitor: Visitor, topic: str, confirm: str | None = None, message_id: str | None = None
    ) -> DoneView:
        """Finish dead letters of a topic, in the channel in which nsqadmin looks at them; they are gone from there.

        Args:
            message_id: only this one; None: the first ``DEAD_LETTERS_MAX``.
        """

        async def drop(node: str, dead_topic: str, channel: str, found: PeekedMessage) -> None:
            question = nsqd_questions.finish_message(dead_topic, channel, found.message_id)
            await self._upstream.change("nsqd", node, question)

        return await self._dead_letters(visitor, "admin", "drop_dead_letters", topic, message_id, confirm, drop)

    async def _dead_letters(
        self,
        visitor: Visitor,
        role: str,
        action: str,
        topic: str,
        message_id: str | None,
        confirm: str | None,
        act: Callable[[str, str, str, PeekedMessage], Awaitable[None]],
    ) -> DoneView:
        """Do something with each of the first dead letters, one after the other on each node."""
        verb = "requeued" if action.startswith("requeue") else "dropped"

        async def of_node(node: str, dead_topic: str, channel: str, outcome: Outcome) -> None:
            question = nsqd_questions.peek(dead_topic, channel, "next", count=PEEK_COUNT_MAX, max_body=0)
            left = DEAD_LETTERS_MAX
            tried: set[str] = set()
            refusals = 0
            while left > 0:
                found = await self._upstream.look("nsqd", node, question)
                wanted = [each for each in found if message_id in (None, each.message_id)]
                wanted = [each for each in wanted if each.message_id not in tried]
                for each in wanted[:left]:
                    tried.add(each.message_id)
                    try:
                        await act(node, dead_topic, channel, each)
                    except _Contended as error:
                        outcome.add(1, [error])
                        return
                    except NotAnswered as error:  # one that is refused keeps the others from nothing
                        refusals += 1
                        if not 400 <= error.status < 500 or refusals >= REFUSALS_MAX:
                            raise
                        outcome.add(0, [error])
                    else:
                        outcome.add(1, ())
                left -= len(wanted)
                if message_id is not None or len(found) < PEEK_COUNT_MAX or not wanted:
                    return

        async def work(outcome: Outcome) -> None:
            messages = self._gather.messages
            known = await self._gather.snapshots.fresh()
            places = await messages.places_of(topic, known)
            dead_topic = places.own
            if not dead_topic:
                raise Refused(404, f"only channels of {topic} give messages up: to {', '.join(places.others)}")
            nodes, _ = messages.nodes_of(dead_topic, known)
            unasked = self._unasked(dead_topic, known, nodes)
            channel = dead_channel(known, dead_topic)
            if not channel:
                outcome.add_unasked(unasked)
                if unasked:
                    return
                raise Refused(404, f"there are no dead letters of {topic} in a channel of {dead_topic}")
            async with self._alone_with(dead_topic):
                answers = await asyncio.gather(
                    *(of_node(node, dead_topic, channel, outcome) for node in nodes), return_exceptions=True
                )
            for answer in answers:
                if isinstance(answer, NotAnswered):
                    outcome.add(0, [answer])
                elif isinstance(answer, BaseException):
                    raise answer
            if message_id is None or not outcome.done_count:  # one that was found need be looked for nowhere else
                outcome.add_unasked(unasked)
            if not outcome.done_count and not outcome.undone:
                raise Refused(404, f"there is no such dead letter of {topic} that waits in {dead_topic}/{channel}")

        def check() -> None:
            check_topic(topic)
            check_confirmed(confirm, topic, "topic")

        outcome_text = f"{verb} {'message ' + message_id if message_id else 'dead letters'} of {topic}"
        return await self._change(visitor, role, action, outcome_text, work, check, topic=topic, is_counted=True)

    @asynccontextmanager
    async def _alone_with(self, dead_topic: str) -> AsyncIterator[None]:
        """Wait until nobody else here requeues or drops the letters of a topic."""
        lock, count = self._turns.get(dead_topic, (asyncio.Lock(), 0))
        self._turns[dead_topic] = lock, count + 1
        try:
            async with lock:
                yield
        finally:
            _, count = self._turns.pop(dead_topic)
            if count > 1:
                self._turns[dead_topic] = lock, count - 1

    async def drain_node(self, visitor: Visitor, node: str, confirm: str | None = None) -> DoneView:
        """Have a node of a cluster give its partitions to others; one that is in none empties itself and ends."""

        async def work(outcome: Outcome) -> None:
            await self._node(node)
            if await self._is_in_cluster(node):
                text = f"node {node} gives what it has to others"
                await self._order(cluster_questions.drain_node(node), text, outcome)
                outcome.text = outcome.text or text
            else:
                view = await self._gather.node(node)
                if view is not None and view.drain.get("draining"):
                    outcome.text = f"nothing has changed: node {node} was being drained already"
                await self._each("nsqd", [node], nsqd_questions.drain(), outcome)

        def check() -> None:
            check_confirmed(confirm, node, "node")

        return await self._change(visitor, "admin", "drain_node", f"node {node} drains", work, check, node=node)

    async def stop_drain_node(self, visitor: Visitor, node: str) -> DoneView:
        """Let a node take messages, or partitions, again."""

        async def work(outcome: Outcome) -> None:
            await self._node(node)
            if await self._is_in_cluster(node):
                text = f"node {node} may have partitions again"
                await self._order(cluster_questions.drain_node(node, undo=True), text, outcome)
                outcome.text = outcome.text or text
            else:
                await self._each("nsqd", [node], nsqd_questions.stop_drain(), outcome)

        return await self._change(
            visitor, "admin", "stop_drain_node", f"node {node} drains no more", work, None, node=node
        )

    async def _is_in_cluster(self, node: str) -> bool:
        return bool(self._lookupds) and await self._gather.member(node) is not None

    # -- how ----------------------------------------------------------------------------------------------------------

    async def _everywhere(
        self,
        visitor: Visitor,
        role: str,
        action: str,
        text: str,
        question: Question[Any],
        topic: str,
        channel: str = "",
        confirm: str | None = None,
    ) -> DoneView:
        async def work(outcome: Outcome) -> None:
            asking = asyncio.ensure_future(self._holders(topic, outcome))
            pauses = action.startswith(("pause", "unpause"))
            was_paused = await self._is_paused(topic, channel) if pauses else None
            holders = await asking
            if pauses and was_paused is (action[0] == "p"):
                name = f"{topic}/{channel}" if channel else topic
                state = "was paused already" if action[0] == "p" else "was not paused"
                outcome.text = f"nothing has changed: {name} {state}"
            await self._each("nsqd", holders, question, outcome)

        check = checked(topic, channel, confirm)
        return await self._change(visitor, role, action, text, work, check, topic=topic, channel=channel)

    async def _is_paused(self, topic: str, channel: str) -> bool | None:
        """Whether all nodes have it paused; None: some do, or not all have answered."""
        view = await (self._gather.channel(topic, channel) if channel else self._gather.topic(topic))
        states = {row.paused for row in view.nodes}
        return states.pop() if len(states) == 1 and not view.missing else None

    async def _change(
        self,
        visitor: Visitor,
        role: str,
        action: str,
        text: str,
        work: Callable[[Outcome], Awaitable[None]],
        check: Callable[[], None] | None,
        *,
        topic: str = "",
        channel: str = "",
        node: str = "",
        is_counted: bool = False,
    ) -> DoneView:
        subject = "/".join(each for each in (topic, channel) if each) or node
        if topic and node:
            subject = f"{topic} on {node}"
        outcome = Outcome()
        try:
            visitor.require(role)
            if check is not None:
                check()
            await work(outcome)
            if not outcome.done_count:
                raise _nobody(outcome)
        except Refused as refused:
            self._audit.note(visitor, action, subject, "failed" if refused.status >= 404 else "refused", [refused.text])
            raise
        finally:
            self._gather.snapshots.forget()
        text = outcome.text or text
        if is_counted:
            text = f"{text} ({outcome.done_count})"
        failures = [str(each) for each in outcome.undone]
        self._audit.note(visitor, action, subject, "partly" if failures else "done", failures)
        self._tell(visitor, action, topic, channel, node)
        return DoneView(
            at_s=self._env.clock.wall_ns() / SECOND,
            is_done=True,
            text=text,
            failures=[each.missing for each in outcome.undone],
        )

    def _tell(self, visitor: Visitor, action: str, topic: str, channel: str = "", node: str = "") -> None:
        self._notifier.tell(
            Notification(
                action=action,
                topic=topic,
                channel=channel,
                node=node,
                timestamp=self._env.clock.wall_ns() // SECOND,
                user=visitor.basic_user or (visitor.name if visitor.is_believed else ""),
                remote_ip=visitor.address,
                user_agent=visitor.user_agent,
                url=visitor.url,
                via=self._hostname,
            )
        )

    async def _each(self, daemon: str, addresses: Iterable[str], question: Question[Any], outcome: Outcome) -> None:
        answers = await self._upstream.change_all(daemon, addresses, question)
        outcome.add(len(answers.found), answers.failures)

    async def _first(self, daemon: str, addresses: Iterable[str], question: Question[Any], outcome: Outcome) -> Any:
        """Ask one after the other until one does it; each would do it for all. Return its answer."""
        failures = []
        for address in addresses:
            try:
                answer = await self._upstream.change(daemon, address, question)
            except NotAnswered as error:
                failures.append(error)
                if error.status in (400, 403, 409):
                    break
            else:
                outcome.add(1, ())
                return answer
        outcome.add(0, failures)
        return None

    async def _holders(self, topic: str, outcome: Outcome) -> list[str]:
        """Return the nodes that have a topic, as nsqlookupd and they themselves say now; note who does not say."""
        snapshots = self._gather.snapshots
        answers, _ = await asyncio.gather(
            self._upstream.look_all("nsqlookupd", snapshots.lookupds, daemons.lookup(topic)), snapshots.fresh()
        )
        holding, known = await self._gather.holders(topic)
        named = [each.address for found in answers.found.values() for each in found]
        holders = list(dict.fromkeys([*(each for each in named if each in known.nodes), *holding]))
        outcome.add_unasked(self._unasked(topic, known, holders))
        outcome.add_unasked(each for each in answers.missing if each.why != "refused")  # who knows no such topic
        return holders

    def _unasked(self, topic: str, known: Snapshot, asked: list[str]) -> list[Missing]:
        """Return who did not say whether a change of a topic concerns them: nsqlookupd, and nsqd that may have it, as
        those of a cluster have that are away with copies which nobody leads.
        """
        nodes = [
            node.problem
            for address, node in known.nodes.items()
            if node.problem is not None
            and address not in asked
            and (not self._lookupds or any(each.topic == topic for each in node.topics))
        ]
        lookupds = [each for each in known.missing if each.daemon == "nsqlookupd"]
        return with_away([*lookupds, *nodes], [known.away.get(topic, [])])

    async def _is_registered(self, topic: str) -> bool:
        """Whether a nsqlookupd knows a topic, or may: one that does not answer."""
        answers = await self._upstream.look_all("nsqlookupd", self._lookupds, daemons.topics())
        return bool(answers.missing) or any(topic in found for found in answers.found.values())

    async def _node(self, node: str) -> None:
        if node not in (await self._gather.snapshots.fresh()).nodes:
            raise Refused(404, "NODE_NOT_FOUND")


def of_the_cluster(topic: str) -> str:
    """Say why a topic is not taken from one node."""
    text = "is of the cluster, and is not deleted at one node: move its copies from there, or drain the node"
    return f"topic {topic} {text}"


def publish_again(message: StoredMessage, topic: str) -> Question[Any]:
    """Ask for a dead letter to be published as it was, headers that say how it died left out.

    Args:
        topic: where it goes; its headers name another one, if several topics share their dead letters.
    """
    target = _origin(message) or topic
    kept = headers_before(message.headers)
    if kept:
        ext = msgspec.json.encode(kept).decode()
        return post("/pub_ext", nothing, message.body, topic=target, ext=ext)
    return post("/pub", nothing, message.body, topic=target)


def _origin(message: StoredMessage) -> str:
    """Return the topic that a dead letter says it is of; empty: it does not."""
    origin = message.headers.get(ORIGIN)
    return origin if isinstance(origin, str) and is_valid_name(origin) else ""


def _who(missing: Missing) -> tuple[str, str]:
    return missing.daemon, missing.address


def _nobody(outcome: Outcome) -> Refused:
    if outcome.undone:
        return Refused(502, "UPSTREAM_ERROR: " + "; ".join(str(each) for each in outcome.undone))
    if outcome.absent:
        return Refused(404, outcome.absent[0].word)
    return Refused(404, "TOPIC_NOT_FOUND")


def move_order(topic: str, partition: str, source: str, target: str, *, dry_run: bool = False) -> Question[Any]:
    """Read what a form asks to be moved.

    Raises:
        Refused: with 400, it is not whole.
    """
    number = read_number("partition", partition, 0, PARTITION_NUM_MAX)
    if not source or not target:
        raise Refused(400, "say from which node the copy goes, and to which")
    return cluster_questions.move_partition(topic, number, source, target, dry_run=dry_run)


def change_order(
    topic: str, replicas: str, min_in_sync: str, retention_days: str, *, dry_run: bool = False
) -> Question[Any]:
    """Likewise what a form asks to be changed of a topic; what is empty stays as it is."""
    if not (replicas or min_in_sync or retention_days):
        raise Refused(400, "say what is to be changed: copies, how many have to confirm, or days")

    def read(name: str, text: str, minimum: int, maximum: int) -> int | None:
        return read_number(name, text, minimum, maximum) if text else None

    return lookupd_questions.change_topic(
        topic,
        replicas=read("replicas", replicas, 1, REPLICATOR_MAX),
        min_in_sync=read("min_in_sync", min_in_sync, 1, REPLICATOR_MAX),
        retention_days=read("retention_days", retention_days, 0, RETENTION_DAYS_MAX),
        dry_run=dry_run,
    )


def expand_order(topic: str, partitions: str, *, dry_run: bool = False) -> Question[Any]:
    """Likewise how many partitions a topic is to have."""
    number = read_number("partitions", partitions, 1, PARTITION_NUM_MAX)
    return cluster_questions.expand_topic(topic, number, dry_run=dry_run)


def daemons_create(topic: str) -> Question[Any]:
    """Register a plain topic with a nsqlookupd."""
    return lookupd_questions.create_topic(topic)


def daemons_delete(topic: str) -> Question[Any]:
    """Remove a topic from what a nsqlookupd has registered."""
    return lookupd_questions.delete_topic(topic)


def check_topic(topic: str) -> None:
    """Refuse what no topic can be called.

    Raises:
        Refused: with 400.
    """
    if not is_valid_name(topic):
        raise Refused(400, "INVALID_TOPIC")


def check_channel(channel: str) -> None:
    """Likewise of channels."""
    if not is_valid_name(channel):
        raise Refused(400, "INVALID_CHANNEL")


def checked(topic: str, channel: str = "", confirm: str | None = None) -> Callable[[], None]:
    """Check names, and that the visitor has typed the one that it is about."""

    def check() -> None:
        check_topic(topic)
        if channel:
            check_channel(channel)
        check_confirmed(confirm, channel or topic, "channel" if channel else "topic")

    return check


def check_confirmed(confirm: str | None, name: str, noun: str) -> None:
    """Refuse what was not confirmed.

    Raises:
        Refused: with 400.
    """
    if confirm is not None and confirm.strip() != name:
        raise Refused(400, f"nothing was done: type the name of the {noun}, {name}, to confirm it")


def check_range(name: str, value: int, minimum: int, maximum: int) -> None:
    """Refuse a number that is out of range."""
    if not minimum <= value <= maximum:
        raise Refused(400, f"{name} is {value}; it must be {minimum} to {maximum}")


def read_number(name: str, text: str, minimum: int, maximum: int) -> int:
    """Read a whole number of a form.

    Raises:
        Refused: it is none, or out of range.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise Refused(400, f"{name.replace('_', ' ')} must be a whole number from {minimum} to {maximum}")
    check_range(name.replace("_", " "), int(text), minimum, maximum)
    return int(text)


def read_start(when: str) -> StartAt:
    """Read where a channel is to go on.

    Raises:
        Refused: it is no place.
    """
    text = when.strip()
    if text in ("beginning", "end"):
        return text  # type: ignore[return-value]
    try:
        return parse_moment(text)
    except ValueError as error:
        allowed = "beginning, end, a time as 2026-11-23T14:00:00Z (UTC without a zone), or a duration as 1h30m (ago)"
        raise Refused(400, f"{text[:64]!r} is no place in a channel: {error}; allowed are {allowed}") from None


__all__ = ["Actions", "Outcome", "change_order", "expand_order", "move_order", "read_start"]
