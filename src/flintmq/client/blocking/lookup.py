"""Finding nsqd through nsqlookupd, without waiting: questions are asked by a crew, answers are told.

Rules of this file:

- All methods are called with the owner's lock held, and so is ``done``.
- All nsqlookupd are asked at the same time. A question is over when all have answered or failed; or ``PATIENCE_S``
  after the first answer, or with it when only those are missing that failed the last time; or at its deadline. An
  answer that comes later is kept for the next question.
- What is read out of answers, and what stands while an nsqlookupd fails: :class:`flintmq.client.discovery.Answers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

from flintmq.client.blocking.crew import Crew
from flintmq.client.discovery import Answers, Node
from flintmq.client.flow import Timer, Timers
from flintmq.errors import DiscoveryError, FlintError

PATIENCE_S = 1.0
DEADLINE_SLACK_S = 0.5  # each request has the deadline itself; this one is for resolvers that hang

Fetch: TypeAlias = Callable[[str, float], tuple[int, bytes]]
"""Gets a URL within so many seconds: returns status and body, or raises OSError."""

Done: TypeAlias = Callable[[tuple[Node, ...] | DiscoveryError], object]


class Lookup:
    """Several nsqlookupd as one.

    Args:
        addresses: ``http://host:port`` each.
        timeout_s: until an nsqlookupd must have answered.
        fetch: called in the crew's threads.
        lock: the owner's.
        told: called, with the lock held, when something may have changed.
    """

    def __init__(
        self,
        addresses: Iterable[str],
        timeout_s: float,
        fetch: Fetch,
        crew: Crew,
        timers: Timers,
        lock: AbstractContextManager[object],
        told: Callable[[], object],
    ) -> None:
        self._answers = Answers(addresses)
        self._timeout_s = timeout_s
        self._fetch = fetch
        self._crew = crew
        self._timers = timers
        self._lock = lock
        self._told = told

    def end(self) -> None:
        """Ask no more."""
        self._crew.end()

    def ask(self, path: str, done: Done) -> None:
        """Ask all of them; ``done`` is called once with the union, or why there is none."""
        question = _Question(path, dict.fromkeys(self._answers.addresses), done)
        question.timer = self._timers.call_later(self._timeout_s + DEADLINE_SLACK_S, self._end, question)
        for address in self._answers.addresses:
            self._crew.run(partial(self._ask, question, address))

    def _ask(self, question: _Question, address: str) -> None:
        """Ask one of them, in a thread of the crew."""
        answer: tuple[int, bytes] | Exception
        try:
            answer = self._fetch(address + question.path, self._timeout_s)
        except (OSError, FlintError) as error:
            answer = error
        with self._lock:
            if isinstance(answer, Exception):
                self._answers.note_failure(address, answer)
            else:
                question.is_answered |= self._answers.note(address, question.path, *answer)
            del question.missing[address]
            self._judge(question)
            self._told()

    def _judge(self, question: _Question) -> None:
        if question.is_over:
            return
        if not question.missing or (question.is_answered and all(map(self._answers.is_failing, question.missing))):
            self._end(question)
        elif question.is_answered and not question.is_hurried:
            question.is_hurried = True
            self._cancel(question)
            question.timer = self._timers.call_later(min(PATIENCE_S, self._timeout_s), self._end, question)

    def _end(self, question: _Question) -> None:
        if question.is_over:
            return
        question.is_over = True
        self._cancel(question)
        if question.is_answered:
            question.done(self._answers.union(question.path))
        else:
            for address in question.missing:
                self._answers.note_failure(address, TimeoutError(f"no answer within {self._timeout_s:g} s"))
            question.done(self._answers.no_answer(question.path))

    @staticmethod
    def _cancel(question: _Question) -> None:
        if question.timer is not None:
            question.timer.cancel()


class _Question:
    """What is asked of all nsqlookupd.

    Attributes:
        missing: who has neither answered nor failed.
        is_answered: somebody gave a usable answer.
        is_hurried: the others do not have much time left.
    """

    def __init__(self, path: str, missing: dict[str, None], done: Done) -> None:
        self.path = path
        self.missing = missing
        self.done = done
        self.is_answered = False
        self.is_hurried = False
        self.is_over = False
        self.timer: Timer | None = None
