"""Publishes that a leader had written and not answered when another node was elected: what became of them is found out.

::

    deposed, with groups in the log --> the copy follows the next leader --> committed there: OK
                                                                         --> cut off here: refused, to be tried again
                                                                         --> neither in time: nobody knows

Rules of this file: what is told is certain, or is said not to be; nobody waits longer than ``KNOWN_NS_MAX``.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from flintmq.broker.partition import PublishGroup
from flintmq.errors import StorageError
from flintmq.nsqd.leadership import not_leader

KNOWN_NS_MAX = 1_000_000_000
"""Until publishers are told that nobody knows."""


class NotLedAnyMore(StorageError):
    """A publish may be stored or not: another node decides that."""

    def __str__(self) -> str:
        return "this node leads the partition no longer; whether it is stored is not known, publish it again"


class Unanswered:
    """Unanswered publishes of one copy.

    Args:
        topic, number: of the partition.
    """

    __slots__ = ("_groups", "_number", "_topic", "_until_ns")

    def __init__(self, topic: str, number: int) -> None:
        self._topic = topic
        self._number = number
        self._groups: list[PublishGroup] = []  # oldest first
        self._until_ns = 0

    def __bool__(self) -> bool:
        return bool(self._groups)

    def keep(self, groups: Iterable[PublishGroup], now_ns: int) -> None:
        """Find out what becomes of groups that are in the log."""
        self._groups += groups
        self._until_ns = now_ns + KNOWN_NS_MAX

    def committed(self, sequence: int) -> None:
        """The log, which is the leader's up to there, is committed up to a sequence."""
        if self._groups:
            self._end(lambda group: group.end_sequence <= sequence, None)

    def cut(self, sequence: int) -> None:
        """The log ends at a sequence from now on: what stood behind it is nowhere."""
        if self._groups:
            refusal = not_leader("PUB", self._topic, self._number, "is led by another node", fatal=False)
            self._end(lambda group: group.first_sequence >= sequence, refusal)
            self._end(lambda group: group.end_sequence > sequence, NotLedAnyMore())  # a part of it is there

    def tick(self, now_ns: int) -> None:
        """End what was not found out in time."""
        if self._groups and now_ns >= self._until_ns:
            self.give_up()

    def give_up(self) -> None:
        """Nothing can be found out any more."""
        self._end(lambda group: True, NotLedAnyMore())

    def _end(self, is_meant: Callable[[PublishGroup], bool], error: BaseException | None) -> None:
        ended = [group for group in self._groups if is_meant(group)]
        self._groups = [group for group in self._groups if not is_meant(group)]
        for group in ended:
            group.end(error)
