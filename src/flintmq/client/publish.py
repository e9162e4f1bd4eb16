"""A publish on its way: who waits for it, until when, and what is known of its fate.

Rules of this file:

- A waiter ends once: with None, :class:`PublishRefused` (definitely not stored) or :class:`PublishUnknown` (may be
  stored). What is not answered is unknown from the moment it was sent, and stays so when a later attempt is refused.
- Gathered publishes are those of one loop turn to one topic; each has its own waiter and its own fate when nsqd finds
  fault with one of them. An ``mpub`` is one publish with one waiter and stays whole.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, cast

from flintmq.client.bodies import encoded
from flintmq.client.connection import Connection
from flintmq.errors import FlintError, LocalProtocolError, NsqdError, PublishError, PublishRefused, PublishUnknown
from flintmq.names import is_valid_name
from flintmq.wire.codes import CODES

MESSAGE_OVERHEAD_BYTES = 64
"""What a message costs beside its body while it is on its way; bounds the number of tiny ones."""

DEADLINE_GRAIN_S = 0.05
"""Publishes whose deadlines differ by less are gathered; the earlier deadline holds for all."""

BAD_MESSAGE_CODES = ("E_BAD_MESSAGE", "E_BAD_BODY")


class Publish:
    """One or more messages to one topic that travel as one command.

    Attributes:
        waiters: one for all bodies, or one for each body of a gathered publish.
        deadline: seconds on the loop's clock.
        defer_ms: DPUB when not None.
        cost: bytes it counts for in the back-pressure.
        tries: how often nsqd refused it.
        is_unknown: it may have been stored by an attempt that was not answered.
        connection: where it waits for an answer, since ``sent_at``.
        error: why the last attempt failed.
    """

    __slots__ = (
        "topic", "bodies", "waiters", "deadline", "defer_ms", "cost", "tries", "is_gathered", "is_unknown", "is_done",
        "connection", "sent_at", "timer", "error",
    )  # fmt: skip

    def __init__(
        self,
        topic: str,
        bodies: list[bytes],
        waiters: list[asyncio.Future[None]],
        deadline: float,
        cost: int,
        *,
        defer_ms: int | None = None,
        is_gathered: bool = False,
    ) -> None:
        self.topic = topic
        self.bodies = bodies
        self.waiters = waiters
        self.deadline = deadline
        self.cost = cost
        self.defer_ms = defer_ms
        self.is_gathered = is_gathered
        self.is_unknown = False
        self.is_done = False
        self.tries = 0
        self.connection: Connection | None = None
        self.sent_at = 0.0
        self.timer: asyncio.TimerHandle | None = None
        self.error: FlintError | None = None

    def describe(self) -> str:
        """Say in one line what it is and where it is."""
        where = f"sent to {self.connection.address}" if self.connection else "waiting to be sent"
        return f"{len(self.bodies)} to {self.topic}, {where}, tries={self.tries} unknown={self.is_unknown}"

    def drop_cancelled(self) -> bool:
        """Leave out what nobody waits for any more; False when nothing is left to send."""
        if not any(waiter.done() for waiter in self.waiters):
            return True
        if self.is_gathered:
            kept = [pair for pair in zip(self.bodies, self.waiters, strict=True) if not pair[1].done()]
            self.bodies = [body for body, _ in kept]
            self.waiters = [waiter for _, waiter in kept]
            return bool(kept)
        return False

    def split(self) -> list[Publish]:
        """Each message as a publish of its own."""
        parts = [
            Publish(self.topic, [body], [waiter], self.deadline, message_cost(body), is_gathered=True)
            for body, waiter in zip(self.bodies, self.waiters, strict=True)
        ]
        for part in parts:
            part.is_unknown = self.is_unknown
        return parts

    def succeed(self) -> None:
        """Tell everybody who waits."""
        for waiter in self.waiters:
            if not waiter.done():
                waiter.set_result(None)

    def fail(self, make: Callable[[], PublishError]) -> None:
        """Tell everybody who waits; each is given an exception of its own, because tracebacks grow on them."""
        for waiter in self.waiters:
            if not waiter.done():
                error = make()
                error.__cause__ = self.error
                waiter.set_exception(error)

    def outcome(self, code: str, detail: str, nsqd: str = "", *, retryable: bool) -> Callable[[], PublishError]:
        """The exception that says what is known: :class:`PublishUnknown` or :class:`PublishRefused`."""
        kind = PublishUnknown if self.is_unknown else PublishRefused
        return lambda: kind(code, detail, nsqd, retryable)


class Gather:
    """Collects the publishes of one loop turn, by topic.

    Args:
        send: is handed each publish when the turn ends or it is full.
        count_max: messages of one MPUB.
        bytes_max: bytes of the bodies of one MPUB.
    """

    __slots__ = ("_loop", "_send", "_turn_ended", "_count_max", "_bytes_max", "_open", "_is_due")

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        send: Callable[[Publish], None],
        turn_ended: Callable[[], None],
        count_max: int,
        bytes_max: int,
    ) -> None:
        self._loop = loop
        self._send = send
        self._turn_ended = turn_ended
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._open: dict[str, Publish] = {}
        self._is_due = False

    def add(self, topic: str, body: bytes, deadline: float, cost: int) -> asyncio.Future[None]:
        """Add a message; the future ends with its fate."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        publish = self._open.get(topic)
        if publish is not None and self._fits(publish, cost, deadline):
            publish.bodies.append(body)
            publish.waiters.append(waiter)
            publish.cost += cost
            if deadline < publish.deadline:
                publish.deadline = deadline
            return waiter
        if publish is not None:
            self._send(publish)
        self._open[topic] = Publish(topic, [body], [waiter], deadline, cost, is_gathered=True)
        if not self._is_due:
            self._is_due = True
            self._loop.call_soon(self.flush)
        return waiter

    def _fits(self, publish: Publish, cost: int, deadline: float) -> bool:
        return (
            len(publish.bodies) < self._count_max
            and publish.cost + cost <= self._bytes_max
            and -DEADLINE_GRAIN_S < deadline - publish.deadline < DEADLINE_GRAIN_S
        )

    def flush(self) -> None:
        """Hand over everything that was gathered."""
        self._is_due = False
        collected, self._open = self._open, {}
        for publish in collected.values():
            self._send(publish)
        self._turn_ended()


def message_cost(body: bytes) -> int:
    """Bytes a message counts for in the back-pressure."""
    return len(body) + MESSAGE_OVERHEAD_BYTES


def messages_cost(bodies: Sequence[bytes]) -> int:
    """Bytes several messages count for in the back-pressure."""
    return sum(map(len, bodies)) + MESSAGE_OVERHEAD_BYTES * len(bodies)


@lru_cache(maxsize=4096)
def check_topic(topic: str) -> None:
    """Raise LocalProtocolError unless a topic can have this name."""
    if not is_valid_name(topic):
        raise LocalProtocolError(
            "E_BAD_TOPIC", f"topic name {topic!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
        )


def checked_body(body: Any) -> bytes:
    """Take a body as bytes; a value that is none becomes JSON.

    Raises:
        TypeError: it is text, which must be encoded, or nothing that JSON can say.
        LocalProtocolError: it is empty, which nsqd refuses.
    """
    if isinstance(body, bytes):
        data = body
    else:
        data = bytes(body) if isinstance(body, bytearray | memoryview) else encoded(body)
    if not data:
        raise LocalProtocolError("E_BAD_MESSAGE", "a body is empty; nsqd accepts 1 byte or more")
    return data


def checked_bodies(bodies: Iterable[Any]) -> list[bytes]:
    """Take several bodies as bytes.

    Raises:
        TypeError, LocalProtocolError: as :func:`checked_body`.
    """
    listed = list(bodies)
    if set(map(type, listed)) == {bytes} and all(listed):
        return cast(list[bytes], listed)  # the common case, checked without a call per body
    return [checked_body(body) for body in listed]


def is_bad_message(error: NsqdError, bodies: Sequence[bytes]) -> bool:
    """Whether nsqd refused several messages because of one of them."""
    return error.code in BAD_MESSAGE_CODES and len(bodies) > 1


def leaves_open(error: NsqdError) -> bool:
    """Whether a publish with this answer may have been stored."""
    row = CODES.get(error.code)
    return row is not None and row.unknown_outcome
