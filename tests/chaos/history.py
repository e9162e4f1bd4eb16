"""The history of a run: what clients did and saw, and what is wrong with it.

Clients write down each publish with its outcome, each delivery and each FIN, with the time of one clock. When all is
mended and drained, a channel that existed from the beginning and that nobody consumed is read: it has the logs of all
partitions. :func:`check` is a pure function of that.

Rules of this file: only what no doubt of a client's can explain is a violation: what was under way when a connection
broke was stored or not, delivered or not, finished or not.

Source: docs/decisions/0017, I1, I2, I6, I7.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from tests.sim.checkers import Violation, order, strict_order, total_queue

SHOWN_COUNT = 20


class Outcome(StrEnum):
    """What a publisher was told."""

    OK = "ok"
    REFUSED = "refused"
    UNKNOWN = "unknown"


class Published(NamedTuple):
    """A publish that has ended.

    Attributes:
        writer: publishes one after the other.
        partition: that it named; -1: none.
        began_ns, ended_ns: when it began and ended.
    """

    writer: str
    topic: str
    partition: int
    body: str
    began_ns: int
    ended_ns: int
    outcome: Outcome


class Delivered(NamedTuple):
    """A message that a consumer received.

    Attributes:
        connection: on which; each has a name of its own.
    """

    time_ns: int
    topic: str
    channel: str
    connection: str
    partition: int
    offset: int
    attempts: int
    body: str


class Finished(NamedTuple):
    """A FIN that a consumer is about to send."""

    time_ns: int
    topic: str
    channel: str
    connection: str
    partition: int
    offset: int


@dataclass(slots=True)
class History:
    """All that was seen.

    Attributes:
        ordered: (topic, channel) that are consumed in order.
        repeating: writers whose client may send again what it does not know; anybody else's message is stored once.
        channels: (topic, channel) that were there before the first publish, and were consumed to the end.
        log: what the partitions hold at the end, as a channel that nobody consumed before delivers it.
    """

    published: list[Published] = field(default_factory=list)
    consumed: list[Delivered | Finished] = field(default_factory=list)
    log: list[Delivered] = field(default_factory=list)
    ordered: set[tuple[str, str]] = field(default_factory=set)
    repeating: set[str] = field(default_factory=set)
    channels: set[tuple[str, str]] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a history, and what was counted in it.

    Attributes:
        counts: of publishes by their outcome, and of deliveries.
        duplicates: (topic, channel) -> deliveries beyond the first of a message.
        stored_twice: messages of writers that repeat, beyond the first of each.
    """

    violations: list[Violation]
    counts: Mapping[str, int]
    duplicates: Mapping[tuple[str, str], int]
    stored_twice: int

    @property
    def is_ok(self) -> bool:
        return not self.violations

    def __str__(self) -> str:
        lines = [", ".join(f"{count} {what}" for what, count in self.counts.items())]
        duplicates = ", ".join(f"{topic}/{channel} {count}" for (topic, channel), count in self.duplicates.items())
        lines.append(f"delivered again: {duplicates or 'nothing'}; stored again by clients: {self.stored_twice}")
        kinds = Counter(violation.problem for violation in self.violations)
        lines += [f"VIOLATED {count} times: {problem}" for problem, count in kinds.items()]
        lines += [f"  {violation}" for violation in self.violations[:SHOWN_COUNT]]
        return "\n".join(lines)


def check(history: History) -> Verdict:
    """Say what is wrong with a history; everything has healed, and been consumed to the end."""
    violations = [*_log_violations(history)]
    duplicates: dict[tuple[str, str], int] = {}
    delivered: dict[tuple[str, str], list[Delivered]] = defaultdict(list)
    for event in history.consumed:
        if isinstance(event, Delivered):
            delivered[event.topic, event.channel].append(event)
    for where in sorted(history.channels | delivered.keys()):
        came = delivered.get(where, [])
        of_topic = [each for each in history.published if each.topic == where[0]]
        queue = total_queue(
            [each.body for each in of_topic],
            [each.body for each in of_topic if each.outcome is Outcome.OK and where in history.channels],
            [each.body for each in of_topic if each.outcome is Outcome.REFUSED],
            [each.body for each in came],
        )
        duplicates[where] = queue.duplicate_count
        violations += [Violation(where, "acknowledged and never delivered", (body,)) for body in queue.lost]
        violations += [Violation(where, "delivered and never published", (body,)) for body in queue.unexpected]
        violations += [Violation(where, "delivered although it was refused", (body,)) for body in queue.ghosts]
        if where in history.ordered:
            violations += _order_violations(where, came, history)
    violations += _identity_violations([*history.log, *(each for some in delivered.values() for each in some)])
    stored = Counter((each.topic, each.body) for each in history.log)
    outcomes = Counter(each.outcome for each in history.published)
    counts = {f"published {outcome}": outcomes[outcome] for outcome in Outcome}
    counts |= {"delivered": sum(map(len, delivered.values())), "in the logs": len(history.log)}
    return Verdict(violations, counts, duplicates, stored.total() - len(stored))


def _log_violations(history: History) -> Iterable[Violation]:
    """Yield what is wrong with what is stored: I1, and the order of each writer."""
    places: dict[tuple[str, str], list[Delivered]] = defaultdict(list)
    last: dict[tuple[str, int], int] = {}
    for each in history.log:
        places[each.topic, each.body].append(each)
        where = each.topic, each.partition
        if each.offset <= last.get(where, -1):
            yield Violation(where, "the log's offsets do not grow", (each.offset, last[where], each.body))
        last[where] = each.offset
    known = {(each.topic, each.body): each for each in history.published}
    for key, found in places.items():
        publish = known.get(key)
        if publish is None:
            yield Violation(key[0], "stored and never published", (key[1],))
        elif publish.outcome is Outcome.REFUSED:
            yield Violation(key[0], "stored although it was refused", (key[1],))
        elif len(found) > 1 and publish.writer not in history.repeating:
            yield Violation(key[0], "stored twice", (key[1], [(each.partition, each.offset) for each in found]))
        if publish is not None and publish.partition >= 0 and any(e.partition != publish.partition for e in found):
            yield Violation(key[0], "stored in a partition that was not named", (key[1], found[0].partition))
    before: dict[tuple[str, str, int], tuple[int, str]] = {}
    for publish in sorted(history.published, key=lambda each: each.began_ns):
        if publish.outcome is not Outcome.OK:
            continue
        found = places.get((publish.topic, publish.body), [])
        if not found:
            yield Violation(publish.topic, "acknowledged and lost", (publish.body,))
            continue
        if len(found) > 1 and publish.writer in history.repeating:
            continue  # which copy was acknowledged is not known, and another one may have been under way for long
        writer = publish.writer, publish.topic, found[0].partition
        earlier = before.get(writer)
        first = found[0].offset
        if earlier is not None and first <= earlier[0]:
            yield Violation(publish.topic, "stored before what its writer published earlier", (publish.body, earlier))
        before[writer] = first, publish.body


def _order_violations(where: tuple[str, str], came: list[Delivered], history: History) -> Iterable[Violation]:
    """Yield what is wrong with the order of one channel: I6."""
    steps: dict[int, list[tuple[int, str, str, int]]] = defaultdict(list)
    for event in history.consumed:
        if (event.topic, event.channel) == where:
            step = "deliver" if isinstance(event, Delivered) else "finish"
            steps[event.partition].append((event.time_ns, step, event.connection, event.offset))
    first: dict[int, list[tuple[str, int]]] = defaultdict(list)
    for each in came:
        first[each.partition].append((each.body, each.offset))
    yield from order(first, {})
    for partition, of_it in sorted(steps.items()):
        for found in strict_order(of_it, None, may_be_late=True):
            yield Violation((*where, partition), found.problem, (found.where, *found.evidence))


def _identity_violations(all_of_them: Iterable[Delivered]) -> Iterable[Violation]:
    """Yield the offsets that named different messages: I7."""
    bodies: dict[tuple[str, int, int], str] = {}
    for each in all_of_them:
        where = each.topic, each.partition, each.offset
        known = bodies.setdefault(where, each.body)
        if known != each.body:
            yield Violation(where, "one offset named two messages", (known, each.body, each.channel))
