"""Discovery nsqd through nsqlookupd, without waiting: questions are asked by a threads, answers are told.

Rules of this file:

- All methods are called with the owner's lock held, and so is ``done``.
- All nsqlookupd are asked at the same time. A question is over when all have answered or failed; or ``PATIENCE_S``
  after the first answer, or with it when only those are missing that failed or hung the last time; or at its deadline.
  An answer that comes later is kept for the next question.
- Now and then each is first asked which nsqlookupd there are (``listlookup``); those that are new are asked as well.
- Those that failed again and again are asked when no other answered, and every few times.
- What is asked, what is read out of answers, what stands while an nsqlookupd fails:
  :mod:`flintmq.client.core.discovery`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TypeAlias

from flintmq.client.blocking.thread_pool import ThreadPool, no_thread
from flintmq.client.core.discovery import LIST_PATH, PATIENCE_S, Answers, Directory
from flintmq.client.core.timers import Timer, Timers
from flintmq.client.core.topology import Topology
from flintmq.errors import DiscoveryError

DEADLINE_SLACK_S = 0.5  # each request has the deadline itself; this one is for resolvers that hang

Fetch: TypeAlias = Callable[[str, float], tuple[int, bytes]]
"""Gets a URL within so many seconds: returns status and body, or raises OSError."""

Done: TypeAlias = Callable[[Topology | DiscoveryError], object]


class Lookup:
    """Several nsqlookupd as one.

    Args:
        seeds: ``http://host:port`` each.
        timeout_s: until an nsqlookupd must have answered.
        fetch: called in the pool's threads.
        lock: the owner's.
        told: called, with the lock held, when something may have changed.
    """

    def __init__(
        self,
        seeds: Iterable[str],
        timeout_s: float,
        fetch: Fetch,
        threads: ThreadPool,
        timers: Timers,
        lock: AbstractContextManager[object],
        told: Callable[[], object],
    ) -> None:
        self._directory = Directory(seeds)
        self._answers = Answers(self._directory.addresses)
        self._timeout_s = timeout_s
        self._fetch = fetch
        self._threads = threads
        self._timers = timers
        self._lock = lock
        self._told = told
        self._unlisted: dict[str, None] = {}
        self._asking: dict[object, str] = {}  # whom each request that is under way asks
        self._is_ended = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """The nsqlookupd that are asked: the seeds, and those they list."""
        return self._directory.addresses

    @property
    def unanswered(self) -> tuple[str, ...]:
        """The nsqlookupd that are being asked and have not answered yet."""
        return tuple(dict.fromkeys(self._asking.values()))

    def end(self) -> None:
        """Ask no more. Who was asked and does not answer any more is not told of."""
        self._is_ended = True
        self._threads.end()

    def ask(self, path: str, done: Done, distrusted: Collection[tuple[int, str]] = ()) -> None:
        """Ask all of them; ``done`` is called once with one picture of what they said, or why there is none.

        Args:
            distrusted: (partition, address) that have been found wrong; believed only if nobody says anything else.
        """
        first, last = self._directory.due()
        question = _Question(path, done, distrusted, last)
        question.timer = self._timers.call_later(self._timeout_s + DEADLINE_SLACK_S, self._end, question)
        self._begin_lists(question)
        self._ask_these(question, first)

    def _ask_these(self, question: _Question, addresses: Iterable[str]) -> None:
        asked = [address for address in addresses if address not in question.missing]
        question.missing.update(dict.fromkeys(asked))
        for address in asked:
            request = object()
            try:
                self._asking[request] = address
                self._threads.run(partial(self._ask, question, address, request))
            except RuntimeError as error:
                failed = OSError(no_thread("ask", error))
                self._timers.call_later(0, self._answered, question, address, request, failed)  # not within the asking
            except BaseException:
                self._asking.pop(request, None)
                raise

    def _ask(self, question: _Question, address: str, request: object) -> None:
        """Ask one of them, in a thread of the threads."""
        answer: tuple[int, bytes] | Exception | None = None
        if question.lists.pop(address, False):
            answer = self._ask_list(question, address)
        if answer is None:
            answer = self._try_fetch(address + question.path)
        with self._lock:
            self._answered(question, address, request, answer)

    def _answered(
        self, question: _Question, address: str, request: object, answer: tuple[int, bytes] | Exception
    ) -> None:
        self._directory.note(address, self._note(question, address, answer))
        question.missing.pop(address, None)
        self._asking.pop(request, None)
        self._judge(question)
        self._told()

    def _try_fetch(self, url: str) -> tuple[int, bytes] | Exception:
        try:
            return self._fetch(url, self._timeout_s)
        except Exception as error:  # noqa: BLE001 - what is a mistake is told, and concerns this answer alone
            return error

    def _note(self, question: _Question, address: str, answer: tuple[int, bytes] | Exception) -> bool:
        if isinstance(answer, Exception):
            return self._failed(address, answer)
        is_usable = self._answers.note(address, question.path, *answer)
        question.is_answered |= is_usable
        return is_usable

    def _failed(self, address: str, error: Exception) -> bool:
        """Note that one gave no answer; False."""
        return False if self._is_ended else self._answers.note_failure(address, error)

    # --- which nsqlookupd there are ---

    def _begin_lists(self, question: _Question) -> None:
        """Have this question ask for lists, if they were not asked for long."""
        if due := self._directory.lists_due(self._timers.time()):
            question.lists = dict.fromkeys(due, True)
            self._unlisted = dict.fromkeys(due)

    def _ask_list(self, question: _Question, address: str) -> Exception | None:
        """Ask one of them who else there is, in a thread of the pool; returns why it gave no answer at all."""
        answer = self._try_fetch(address + LIST_PATH)
        with self._lock:
            self._unlisted.pop(address, None)
            if not isinstance(answer, Exception):
                self._directory.note_list(address, *answer, self._timers.time())
            if not self._unlisted:
                former = self._directory.addresses
                self._directory.take_lists()
                self._answers.addresses = self._directory.addresses
                if not question.is_over:
                    self._ask_these(question, [each for each in self._directory.addresses if each not in former])
        return answer if isinstance(answer, Exception) else None

    # --- when a question is over ---

    def _judge(self, question: _Question) -> None:
        if question.is_over:
            return
        if not question.missing and not question.is_answered and question.last:
            last, question.last = question.last, ()
            self._ask_these(question, last)
        elif not question.missing or (question.is_answered and all(map(self._answers.is_failing, question.missing))):
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
            for address in question.missing:
                if not self._answers.is_failing(address):
                    self._answers.note_slow(address)
            question.done(self._answers.topology(question.path, question.distrusted))
        else:
            for address in question.missing:
                self._failed(address, TimeoutError(f"no answer within {self._timeout_s:g} s"))
            question.done(self._answers.no_answer(question.path))

    @staticmethod
    def _cancel(question: _Question) -> None:
        if question.timer is not None:
            question.timer.cancel()


class _Question:
    """A question to all nsqlookupd.

    Attributes:
        last: who is asked only if nobody else answers.
        missing: who has neither answered nor failed.
        lists: who is to be asked first which nsqlookupd there are.
        is_answered: somebody gave a usable answer.
        is_hurried: the others do not have much time left.
    """

    def __init__(self, path: str, done: Done, distrusted: Collection[tuple[int, str]], last: tuple[str, ...]) -> None:
        self.path = path
        self.done = done
        self.distrusted = distrusted
        self.last = last
        self.missing: dict[str, None] = {}
        self.lists: dict[str, bool] = {}
        self.is_answered = False
        self.is_hurried = False
        self.is_over = False
        self.timer: Timer | None = None
