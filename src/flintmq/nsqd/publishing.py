"""Publishing: where a publish goes, what is stored of it, and what it is answered with once it is.

Every publish comes this way, over TCP and over HTTP: plain, with a delay, with trace ids or headers, or of a producer
that counts its messages.

Rules of this file: the order of the checks is the one that clients know, see :meth:`Publishing.publish`; what is
refused is a :class:`FlintError` that says whether the connection is closed; a duplicate of a producer that counts is
answered although this nsqd takes nothing new any more, and nothing of such a producer closes a connection that could go
on, because the publishes behind it are only told that they came too early.

Source: NSQ's TCP protocol, Youzan's TCP protocol, docs/idempotent.md.
"""

from __future__ import annotations

from flintmq.broker.bounds import TopicFull
from flintmq.nsqd import extended, partitions
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.leadership import Leadership, not_writable
from flintmq.nsqd.pending_reply import PendingReply, Receipt
from flintmq.nsqd.topics import Topics
from flintmq.wire.bodies import Kind
from flintmq.wire.commands import COMMANDS
from flintmq.wire.server import Publish


class Publishing:
    """Takes what is published to one nsqd.

    Attributes:
        leadership: asked which partitions are led here; None: all that are here.
    """

    def __init__(self, engine: Engine, drain: Drain, topics: Topics) -> None:
        self._engine = engine
        self._drain = drain
        self._topics = topics
        self.leadership: Leadership | None = None

    def publish(self, event: Publish) -> PendingReply:
        """Take messages; they are written at the end of the turn. What is returned ends when they are stored.

        In a cluster they may be another node's to store: then it ends when that has answered.

        Raises:
            Exiting: this nsqd is shutting down.
            Draining: it is about to.
            RemoteProtocolError: there is no such partition here, or it takes no messages; trace ids or headers cannot
                be stored; TopicFull: no more of them.
            SequenceGap: a producer left out a sequence.
        """
        broker, drain = self._engine.broker, self._drain
        command, name, row = event.command, event.topic, COMMANDS[event.command]
        if drain.is_exiting and self.leadership is not None:  # others lead, and it is certain that nothing is stored
            raise not_writable(command, name, None, "is not published to here: this node ends")
        drain.check_exiting()
        producer = None if event.producer_id is None else (event.producer_id, event.sequence)
        if drain.is_on and producer is None:
            drain.check(command, name, broker.topics)
        leadership = self.leadership
        if leadership is not None and (elsewhere := leadership.elsewhere(event)) is not None:
            return elsewhere
        found = partitions.to_publish(broker.topics, event) if leadership is None else leadership.to_publish(event)
        if drain.is_on and producer and not (found and found.has_published(producer[0], event.last)):
            drain.check(command, name, broker.topics)
        bodies, form = event.bodies, None
        if event.front and found is not None:
            form = extended.stored_form(event, found.meta)
            bodies = form.bodies
        due_ns = self._engine.due_clock_ns() + event.defer_ms * 1_000_000 if event.defer_ms else 0
        partition = found or self._topics.wanted(command, name).first_partition
        try:
            group = broker.publish_to(partition, bodies, due_ns, form is not None, producer)
        except TopicFull as full:
            raise TopicFull(full.detail, full.fatal and row.closes(row.failure), row.family) from None
        reply = PendingReply(group, command, event.replies)
        if form is not None and row.reply != "OK":
            reply.receipt = Receipt(group, form.traces, form.bodies, row.body.kind is Kind.MESSAGES)
        return reply
