"""Idempotent publishing: where a publish of a producer that counts goes, and how it is answered.

Rules of this file: it is a part of session.py and server.py, whose inner names it uses; nothing of it closes a
connection that could go on, because the publishes behind it are only told that they came too early; a duplicate is
answered although this nsqd takes nothing new any more.

Source: design/reliability.md R13.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from flintmq.broker.bounds import TopicFull
from flintmq.broker.partition import Partition, PublishGroup
from flintmq.broker.producers import SequenceGap
from flintmq.broker.topic import Topic
from flintmq.errors import Exiting, FlintError, RemoteProtocolError
from flintmq.limits import PRODUCER_ID_SIZE_MAX
from flintmq.net.http_messages import HttpError
from flintmq.nsqd import partitions
from flintmq.nsqd.drain import Drain
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.slots import Slot
from flintmq.wire.frames import OK_FRAME, error_frame
from flintmq.wire.once import is_producer_id, parse_sequence
from flintmq.wire.server import NOT_A_NUMBER, PublishOnce

GAP_CODE = "E_SEQUENCE_GAP"


class Nsqd(Protocol):
    """Of :class:`flintmq.nsqd.server.Nsqd` what is needed here."""

    engine: Engine
    drain: Drain
    _is_exiting: bool

    def wanted_topic(self, command: str, name: str) -> Topic: ...


class Session(Protocol):
    """Of :class:`flintmq.nsqd.session.Session` what is needed here."""

    engine: Engine
    peer: str
    _slots: deque[Slot | PublishGroup | bytes]

    @property
    def nsqd(self) -> Nsqd: ...

    def _may(self, event: PublishOnce, command: str, topic: str) -> bool: ...

    def _fail(self, code: str, detail: str, fatal: bool | None = None) -> None: ...

    def _reply(self, frame: bytes) -> None: ...

    def count_published(self, topic: str, bodies: Sequence[bytes]) -> None: ...

    def note_group(self, group: PublishGroup, bodies: Sequence[bytes]) -> None: ...

    def publish_ended(self) -> None: ...

    def flush(self) -> None: ...

    def abort(self) -> None: ...


def partition_of(topics: Mapping[str, Topic], command: str, name: str, number: int | None) -> Partition | None:
    """The partition that takes a publish; None for a plain topic that is to be created.

    Raises:
        RemoteProtocolError: there is none, or it has to be named.
    """
    if number == NOT_A_NUMBER:
        raise partitions.bad_partition(command, "is neither a number nor -")
    topic = topics.get(name)
    if number is None and topic is not None and topic.meta.partition_num > 1:
        raise partitions.bad_partition(command, f"is missing, and topic {name} has several")
    return partitions.to_publish(topics, command, name, number)


class OnceSlot(Slot):
    """The answers to a publish of a producer that counts."""

    __slots__ = ()

    @property
    def is_fatal(self) -> bool:
        """Never: it can be sent again."""
        return False

    def error_frame(self) -> bytes:
        """The answer when it failed."""
        error = self.source.error
        if isinstance(error, SequenceGap):
            return error_frame(GAP_CODE, f"{self.command} {error}")
        return super().error_frame()


def publish(nsqd: Nsqd, event: PublishOnce) -> PublishGroup | None:
    """Publish messages of a producer that counts them; what is returned ends when they are stored, None: they are.

    Raises:
        Exiting, Draining: this nsqd is shutting down, or about to.
        RemoteProtocolError: there is no such partition here, or it takes no messages.
        SequenceGap: the producer left out a sequence.
    """
    if nsqd._is_exiting:
        raise Exiting
    broker = nsqd.engine.broker
    found = partition_of(broker.topics, event.command, event.topic, event.partition)
    if nsqd.drain.is_on and not (found and found.has_published(event.producer_id, event.last)):
        nsqd.drain.check(event.command, event.topic, broker.topics)
    partition = found or nsqd.wanted_topic(event.command, event.topic).first_partition
    try:
        return broker.publish_once(partition, event.producer_id, event.sequence, event.bodies)
    except TopicFull as full:
        raise TopicFull(full.detail, False, event.command) from None


def execute(session: Session, event: PublishOnce) -> None:
    """Handle PUB_ONCE and MPUB_ONCE."""
    command = event.command
    if not session._may(event, command, event.topic):
        return
    try:
        group = publish(session.nsqd, event)
    except SequenceGap as gap:
        for index in range(event.replies):
            detail = SequenceGap(gap.producer_id, gap.sequence + index, gap.expected)
            session._fail(GAP_CODE, f"{command} {detail}")
    except RemoteProtocolError as refusal:
        for _ in range(1 if refusal.fatal else event.replies):
            session._fail(refusal.code, refusal.detail, refusal.fatal)
    except FlintError as error:
        for _ in range(event.replies):
            session._fail(f"E_{command}_FAILED", f"{command} failed {error}")
    else:
        session.count_published(event.topic, event.bodies)
        if group is None:
            session._reply(OK_FRAME * event.replies)
        else:
            _answer_later(session, event, group)


def _answer_later(session: Session, event: PublishOnce, group: PublishGroup) -> None:
    session.note_group(group, event.bodies)
    session._slots.append(OnceSlot(group, event.command, event.replies))
    group.waiters.append(session)
    session.engine.wants_output(session)


def is_asked_for(query: Mapping[str, str]) -> bool:
    """Whether a request to publish is of a producer that counts."""
    return "producer_id" in query or "sequence" in query


def publish_of(query: Mapping[str, str], topic: str, partition: int | None, bodies: Sequence[bytes]) -> PublishOnce:
    """A publish over HTTP, as it would have come over TCP.

    Raises:
        HttpError: 400, for a parameter that is missing, cannot be, or does not go with the others.
    """
    for name in ("producer_id", "sequence"):
        if name not in query:
            raise HttpError(400, f"MISSING_ARG_{name.upper()}")
    if "defer" in query:
        raise HttpError(400, "INVALID_DEFER: a publish with a sequence cannot be deferred")
    producer_id, text = query["producer_id"].encode("utf-8", "replace"), query["sequence"].encode("utf-8", "replace")
    if not is_producer_id(producer_id):
        raise HttpError(400, f"INVALID_ARG_PRODUCER_ID: 1 to {PRODUCER_ID_SIZE_MAX} of [A-Za-z0-9._:-]")
    sequence = parse_sequence(text, len(bodies))
    if sequence is None:
        raise HttpError(400, "INVALID_ARG_SEQUENCE: a number from 1 to 2^63-1")
    return PublishOnce("PUB_ONCE", topic, partition, producer_id, sequence, bodies, 1)


def gap_answer(gap: SequenceGap) -> HttpError:
    """The answer to a request that left out a sequence."""
    return HttpError(409, f"SEQUENCE_GAP: {gap}")
