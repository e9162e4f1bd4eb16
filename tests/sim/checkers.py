"""Checks of what clients saw. Each takes a history and returns what is wrong with it; an empty answer is a pass.

Histories are written by test clients, never by the daemon under test, and a client does not see everything: what is on
its way when a connection breaks was sent or not, arrived or not. A checker reports only what no such doubt can explain.
Message ids are whatever the test uses, as long as they can be hashed. Times are nanoseconds of one clock, such as
``loop.time()`` of a simulation.

I1, I2: :func:`total_queue`; I4, I5: :func:`order`, :func:`strict_order`; I6: :func:`in_flight`; I7: :func:`timeline`
(tests/sim/README.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

Message = Hashable
SHOWN_COUNT = 10


@dataclass(frozen=True, slots=True)
class TotalQueue:
    """What became of the messages of one channel.

    Attributes:
        attempted_count, acked_count: publishes begun, and those answered with OK.
        lost: acknowledged and never delivered.
        unexpected: delivered and never published.
        ghosts: delivered although their publish was definitely refused.
        recovered_count: delivered, and nobody knows whether the publish was acknowledged. Fine.
        duplicate_count: deliveries beyond the first of a message. At-least-once allows them.
    """

    attempted_count: int
    acked_count: int
    lost: list[Message]
    unexpected: list[Message]
    ghosts: list[Message]
    recovered_count: int
    duplicate_count: int

    @property
    def is_ok(self) -> bool:
        return not (self.lost or self.unexpected or self.ghosts)

    def __str__(self) -> str:
        return (
            f"{self.attempted_count} attempted, {self.acked_count} acknowledged, {self.duplicate_count} duplicates, "
            f"lost {_shown(self.lost)}, unexpected {_shown(self.unexpected)}, ghosts {_shown(self.ghosts)}"
        )


def _shown(messages: Sequence[Message]) -> str:
    more = f" and {len(messages) - SHOWN_COUNT} more" if len(messages) > SHOWN_COUNT else ""
    return f"{list(messages[:SHOWN_COUNT])}{more}"


def total_queue(
    attempted: Iterable[Message], acked: Iterable[Message], refused: Iterable[Message], delivered: Iterable[Message]
) -> TotalQueue:
    """Compare what was published with what one channel delivered, after everything healed and drained.

    Args:
        attempted: every publish that was begun.
        acked: those answered with OK. Neither acked nor refused means unknown: it may be delivered or not.
        refused: those that definitely did not happen (``E_BAD_...``, ``E_PUB_FAILED`` before a write).
        delivered: every delivery, with repeats.
    """
    counts = Counter(delivered)
    tried = dict.fromkeys(attempted)
    known = dict.fromkeys(acked)
    denied = dict.fromkeys(refused)
    return TotalQueue(
        attempted_count=len(tried),
        acked_count=len(known),
        lost=[message for message in known if message not in counts],
        unexpected=[message for message in counts if message not in tried],
        ghosts=[message for message in denied if message in counts],
        recovered_count=sum(1 for message in tried if message in counts and message not in known),
        duplicate_count=counts.total() - len(counts),
    )


class Violation(NamedTuple):
    """One broken promise.

    Attributes:
        where: the partition, connection or message it is about.
        problem: what is wrong.
        evidence: the values that show it.
    """

    where: Hashable
    problem: str
    evidence: tuple[object, ...]


def order(
    deliveries: Mapping[Any, Iterable[tuple[Message, int]]],
    published: Mapping[Any, Sequence[Message]],
) -> list[Violation]:
    """Check ordered consumption: first deliveries follow the order of publish in each partition, and none is skipped.

    A message may be delivered again at any time; only first deliveries are in order. A message whose publish was not
    acknowledged may come at any place, as long as offsets grow.

    Args:
        deliveries: partition -> (message, offset) in the order they were delivered.
        published: partition -> acknowledged messages in the order of their acknowledgements (one producer at a time).
    """
    violations: list[Violation] = []
    for partition, sequence in deliveries.items():
        first: dict[Message, int] = {}
        highest = -1
        for message, offset in sequence:
            if message in first:
                continue
            if offset <= highest:
                violations.append(
                    Violation(partition, "offset went back on a first delivery", (message, offset, highest))
                )
            first[message] = len(first)
            highest = max(highest, offset)
        violations += _order_of_publish(partition, first, published.get(partition, ()))
    return violations


def _order_of_publish(
    partition: Hashable, first: Mapping[Message, int], published: Sequence[Message]
) -> Iterable[Violation]:
    last_place = -1
    last: Message = None
    skipped: Message | None = None
    for message in published:
        place = first.get(message)
        if place is None:
            skipped = message if skipped is None else skipped
            continue
        if skipped is not None:
            yield Violation(partition, "skipped, and a later message was delivered", (skipped, message))
            skipped = None
        if place < last_place:
            yield Violation(partition, "delivered before a message published earlier", (message, last))
        else:
            last_place, last = place, message


def strict_order(
    events: Iterable[tuple[int, str, Hashable, int]], repeated_ns: int | None, may_be_late: bool = False
) -> list[Violation]:
    """Check one channel of one partition that is consumed in order, over all of its consumers.

    - a message is delivered when the one that was delivered before it has been finished by who got it last;
    - a message behind which another one was delivered comes again only after a power loss, which may repeat what was
      finished last, in order.

    Args:
        events: (time_ns, step, connection, sequence) in the order the clients saw them. ``deliver``: a living nsqd sent
            it; ``finish``: FIN was sent; ``power``: the power went then, or later, but before the next ``start``.
        repeated_ns: how long before a power loss a FIN may have been sent and still be forgotten; None: any time.
        may_be_late: deliveries may have been under way for longer than a timeout, and are seen behind later ones.
    """
    violations: list[Violation] = []
    current = 0
    holder: Hashable = None
    finished: dict[int, int] = {}
    goes_ns: int | None = None  # when the power may go, at the earliest
    gone_ns: int | None = None  # since when it may have been gone, before the present start
    for time_ns, step, connection, sequence in events:
        if step == "power":
            goes_ns = time_ns if goes_ns is None else goes_ns
        elif step == "start":
            gone_ns, goes_ns = goes_ns if gone_ns is None else gone_ns, None
        elif step == "finish":
            if connection == holder or may_be_late or sequence < current:
                finished[sequence] = time_ns
        elif step != "deliver":
            raise ValueError(f"unknown step {step!r}")
        else:
            evidence = (time_ns, sequence, current)
            if sequence > current:
                if current and current not in finished:
                    violations.append(Violation(connection, "delivered before the one in front was finished", evidence))
            elif sequence < current and may_be_late:
                continue
            elif sequence < current and (gone_ns is None or sequence not in finished):
                violations.append(Violation(connection, "delivered again behind its successor", evidence))
            elif sequence < current and repeated_ns is not None and finished[sequence] < (gone_ns or 0) - repeated_ns:
                violations.append(Violation(connection, "repeated long after it was finished", evidence))
            if not may_be_late:
                finished = {each: at for each, at in finished.items() if each < sequence}
            current, holder, gone_ns = sequence, connection, None
    return violations


def in_flight(
    events: Iterable[tuple[int, str, Hashable, Hashable]],
    tolerance_ns: int = 0,
    max_in_flight: int | None = None,
) -> list[Violation]:
    """Check that no connection holds more unanswered messages than its RDY count allows.

    Args:
        events: (time_ns, step, connection, value) in the order the client saw them. ``rdy``: it sent count ``value``;
            ``message``: it received message ``value``; ``done``: it sent FIN or REQ for it, or let it time out;
            ``close``: the connection is gone.
        tolerance_ns: how long after a lower RDY messages may arrive that were sent before nsqd knew: a round trip.
        max_in_flight: bound of the client over all of its connections.
    """
    violations: list[Violation] = []
    held: dict[Hashable, dict[Hashable, None]] = {}
    allowed: dict[Hashable, int] = {}
    lowered: dict[Hashable, tuple[int, int]] = {}  # connection -> (since when, to what)
    total = 0
    for time_ns, step, connection, value in events:
        messages = held.setdefault(connection, {})
        if step == "message":
            if connection in lowered and time_ns > lowered[connection][0]:
                allowed[connection] = lowered.pop(connection)[1]
            total += value not in messages
            messages[value] = None
            if len(messages) > allowed.get(connection, 0):
                evidence = (time_ns, len(messages), allowed.get(connection, 0))
                violations.append(Violation(connection, "more in flight than RDY", evidence))
            if max_in_flight is not None and total > max_in_flight:
                violations.append(Violation(connection, "more in flight than max_in_flight", (time_ns, total)))
        elif step == "done":
            total -= value in messages
            messages.pop(value, None)
        elif step == "rdy":
            assert isinstance(value, int)
            if value < allowed.get(connection, 0):
                lowered[connection] = (time_ns + tolerance_ns, value)
            else:
                allowed[connection] = value
                lowered.pop(connection, None)
        elif step == "close":
            total -= len(messages)
            for state in (held, allowed, lowered):
                state.pop(connection, None)
        else:
            raise ValueError(f"unknown step {step!r}")
    return violations


@dataclass(slots=True)
class _Life:
    """What is known of one message of one channel.

    Attributes:
        attempts: of the last delivery seen; 0 before the first.
        connection: where that was.
        delivered_ns: when that was.
        due_ns: not to be delivered again before.
        is_held: delivered and not answered; then ``due_ns`` is its timeout.
        is_waiting: whether nothing but the time keeps it from being delivered at ``due_ns``.
        close_count, restart_count: how many there had been when it was delivered.
    """

    attempts: int = 0
    connection: Hashable = None
    delivered_ns: int = 0
    due_ns: int = 0
    is_held: bool = False
    is_waiting: bool = False
    close_count: int = 0
    restart_count: int = 0

    def release(self) -> None:
        """The connection it was delivered on is gone, and with it perhaps the answer: it may come at once."""
        self.due_ns, self.is_held, self.is_waiting = 0, False, False


def timeline(
    events: Iterable[tuple[int, str, Hashable, Message, int]],
    msg_timeout_ns: int,
    max_msg_timeout_ns: int | None = None,
    tolerance_ns: int = 0,
    late_ns: int | None = None,
) -> list[Violation]:
    """Check attempts and delivery times of the messages of one channel.

    Only for histories in which nothing was under way for longer than ``tolerance_ns``: kills and resets are fine, a cut
    network or a paused node is not, because a message can then be seen after its own timeout.

    - attempts count 1, 2, 3, ...; a broken connection may hide some, a restart of nsqd may forget some;
    - nothing is delivered before its due time, nor while a connection holds it and its timeout has not passed;
    - with ``late_ns``: what timed out, was deferred or requeued is delivered within so much of its due time. Only for
      histories in which a consumer was always ready and no connection broke.

    Args:
        events: (time_ns, step, connection, message, value) as the clients saw them, in order of time. ``defer``: DPUB
            sent, value is the delay in ns. ``deliver``: value is attempts. ``requeue``: REQ sent, value is the delay in
            ns. ``touch``, ``finish``: sent. ``close``: the connection is gone, whatever its messages were; ``restart``:
            nsqd died and was started again. What a step does not need is ignored.
        tolerance_ns: how much later than the client nsqd may see something: an answer sent less than this before the
            timeout may have come too late.
    """
    violations: list[Violation] = []
    lives: dict[Message, _Life] = {}
    delivered: dict[Hashable, dict[Message, None]] = {}
    close_count = restart_count = 0
    for time_ns, step, connection, message, value in events:
        if step == "close":
            close_count += 1
            for one in delivered.pop(connection, ()):
                if lives[one].connection == connection:
                    lives[one].release()
            continue
        if step == "restart":
            restart_count += 1
            for life in lives.values():
                if life.attempts:
                    life.release()
            continue
        life = lives.setdefault(message, _Life())
        is_in_time = life.is_held and time_ns <= life.due_ns - tolerance_ns
        if step == "deliver":
            has_gap = life.close_count != close_count
            has_forgotten = life.restart_count != restart_count
            problems = _delivery_problems(life, time_ns, value, has_gap, has_forgotten, tolerance_ns, late_ns)
            violations += [Violation(message, problem, (time_ns, value, replace(life))) for problem in problems]
            life.attempts, life.connection, life.delivered_ns = value, connection, time_ns
            life.due_ns, life.is_held, life.is_waiting = time_ns + msg_timeout_ns, True, True
            life.close_count, life.restart_count = close_count, restart_count
            delivered.setdefault(connection, {})[message] = None
        elif step == "defer":
            life.due_ns, life.is_waiting = time_ns + value, True
        elif step == "finish":
            life.release()
        elif step == "requeue":
            if is_in_time:
                life.due_ns, life.is_held = time_ns + value, False
        elif step != "touch":
            raise ValueError(f"unknown step {step!r}")
        elif is_in_time:
            latest_ns = life.delivered_ns + max_msg_timeout_ns if max_msg_timeout_ns is not None else None
            life.due_ns = time_ns + msg_timeout_ns if latest_ns is None else min(time_ns + msg_timeout_ns, latest_ns)
    return violations


def _delivery_problems(
    life: _Life,
    time_ns: int,
    attempts: int,
    has_gap: bool,
    has_forgotten: bool,
    tolerance_ns: int,
    late_ns: int | None,
) -> Iterable[str]:
    expected = life.attempts + 1
    lowest = 1 if has_forgotten else expected
    if attempts < lowest or (attempts > expected and not has_gap):
        yield f"attempts {attempts} where {expected} was due"
    if time_ns < life.due_ns - (tolerance_ns if life.is_held else 0):
        yield "delivered while a connection held it" if life.is_held else "delivered before it was due"
    if late_ns is not None and life.is_waiting and time_ns > life.due_ns + late_ns:
        yield "delivered late"
