"""Discovery nsqd through nsqlookupd: what is asked, what is read out of the answers, and when it is asked again.

Rules of this file:

- It waits for nothing: :mod:`flintmq.client.aio.lookup` and :mod:`flintmq.client.blocking.lookup` ask.
- Which nsqlookupd there are is asked first (``listlookup``); the configured ones stay whatever they say. NSQ's own
  answers 404 and is asked that rarely.
- All nsqlookupd are asked at the same time and their answers are united (:mod:`flintmq.client.core.topology`).
- One that fails again and again is asked last (:class:`Directory`). One that hangs holds up no answer of the others for
  longer than ``PATIENCE_S``, and that once (:meth:`Answers.note_slow`).
- What an nsqlookupd said last stands while it fails: its outage takes no nsqd away from us.

Source: NSQ's client guide, "Discovery"; Youzan's smart client, "Nsqd discovery service"; both nsqlookupds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from urllib.parse import quote, urlsplit

from flintmq.addresses import shown_url
from flintmq.client.core.topology import Node, Remembered, Topology, parse_answer, parse_members, parse_nodes, unite
from flintmq.client.options import NSQLOOKUPD_COUNT_MAX
from flintmq.errors import DiscoveryError, FlintError

__all__ = ["Answers", "Directory", "Node", "PollTimes", "Topology", "parse_nodes", "topic_path"]

log = logging.getLogger("flintmq.client")

CONCURRENT_MAX = 16  # questions at a time; a producer may have thousands of topics to refresh
PATIENCE_S = 1.0
"""So long those that have not answered yet are waited for when one of the others has."""

BLIND_POLL_S = 5.0
"""Between two polls that no nsqlookupd answers while something is missing: it is found so soon after their return."""

NODES_PATH = "/nodes"
LIST_PATH = "/listlookup"
LISTS_INTERVAL_S = 60.0
NO_LIST_S = 600.0  # until one that knows no listlookup is asked for it again: it may have been replaced
DEMOTED_AFTER = 4
DEMOTED_EVERY = 4
ANSWER_COUNT_MAX = 10_000  # remembered: one per nsqlookupd and topic; the one asked for longest ago goes first


class Answers:
    """The last answers of several nsqlookupd. Pure: whoever asks them does the IO and the waiting.

    Args:
        addresses: ``http://host:port`` each; may be replaced by others at any time.
    """

    def __init__(self, addresses: Iterable[str]) -> None:
        self.addresses = tuple(addresses)
        self._known: dict[tuple[str, str], Remembered] = {}
        self._failing: dict[str, str] = {}
        self._slow: dict[str, None] = {}
        self._count = 0

    def note(self, address: str, path: str, status: int, body: bytes) -> bool:
        """Keep an answer; False when it is none that can be used."""
        try:
            answer = parse_answer(status, body, path != NODES_PATH, has_password="@" in address)
        except DiscoveryError as error:
            return self.note_failure(address, error)
        self._slow.pop(address, None)
        if self._failing.pop(address, None) is not None:
            log.info("nsqlookupd %s answers again", shown_url(address))
        self._count += 1
        remembered = self._known.pop((address, path), None)
        if remembered is None:
            remembered = Remembered(answer)
        else:
            remembered.follow(answer, self._count)
        self._known[address, path] = remembered
        while len(self._known) > ANSWER_COUNT_MAX:
            del self._known[next(iter(self._known))]
        return True

    def note_failure(self, address: str, error: Exception) -> bool:
        """Note that there was no answer; False. What was said before stands.

        An error that no network has is a mistake, of ours or of a ``fetch`` that was given: it is logged with its
        trace.
        """
        self._slow.pop(address, None)
        if not isinstance(error, OSError | FlintError):
            log.error("asking nsqlookupd %s failed by a mistake: %r", shown_url(address), error, exc_info=error)
        if address not in self._failing:
            log.warning("nsqlookupd %s is skipped: %s", shown_url(address), error)
        while len(self._failing) > ANSWER_COUNT_MAX:
            del self._failing[next(iter(self._failing))]
        self._failing[address] = str(error)
        return False

    def note_slow(self, address: str) -> None:
        """Note that one was waited for long enough, and may still answer; what it said before stands."""
        while len(self._slow) > ANSWER_COUNT_MAX:
            del self._slow[next(iter(self._slow))]
        self._slow[address] = None

    def is_failing(self, address: str) -> bool:
        """Whether there was no answer the last time, or none yet: others are not held up by it."""
        return address in self._failing or address in self._slow

    def union(self, path: str) -> tuple[Node, ...]:
        """Return what all of them list together."""
        return self.topology(path).nodes

    def topology(self, path: str, distrusted: Collection[tuple[int, str]] = ()) -> Topology:
        """One picture from what all of them said; ``distrusted`` as for :func:`unite`."""
        known = []
        for address in self.addresses:
            if (remembered := self._known.get((address, path))) is not None:
                remembered.is_fresh = address not in self._failing
                known.append(remembered)
        return unite(known, distrusted)

    def no_answer(self, path: str) -> DiscoveryError:
        """The exception for a question that none of them answered."""
        reasons = "; ".join(
            f"{shown_url(address)}: {self._failing.get(address, 'no answer yet')}" for address in self.addresses
        )
        return DiscoveryError(f"no nsqlookupd answered {path}: {reasons}")


class Directory:
    """The nsqlookupd that there are, and which of them are asked next. Pure.

    One that failed ``DEMOTED_AFTER`` times on end is asked last: every ``DEMOTED_EVERY``-th time, or when no other
    answers. Its first answer gives it its place back.

    Args:
        seeds: the configured ones, which stay whatever others say.
    """

    def __init__(self, seeds: Iterable[str]) -> None:
        self._seeds = tuple(seeds)
        self._lists: dict[str, tuple[str, ...]] = {}
        self._fresh_lists: dict[str, tuple[str, ...]] = {}
        self._lists_at = 0.0
        self._without_list_until: dict[str, float] = {}
        self._failures: dict[str, int] = {}
        self._count = 0
        self.addresses = self._seeds

    def note(self, address: str, has_answered: bool) -> None:
        """Note whether one answered."""
        if has_answered:
            self._failures.pop(address, None)
        else:
            self._failures[address] = self._failures.get(address, 0) + 1

    def lists_due(self, now: float) -> tuple[str, ...]:
        """Return whom to ask now which nsqlookupd there are (``LIST_PATH``); they are not due again for a while.

        Args:
            now: seconds on the owner's clock.
        """
        if now < self._lists_at:
            return ()
        self._lists_at = now + LISTS_INTERVAL_S
        waiting = self._without_list_until
        self._without_list_until = {each: waiting[each] for each in self.addresses if each in waiting}
        return tuple(each for each in self.addresses if self._without_list_until.get(each, now) <= now)

    def note_list(self, address: str, status: int, body: bytes, now: float) -> None:
        """Note what one answered to that."""
        members = parse_members(body, urlsplit(address).scheme) if status == 200 else ()
        if members:
            self._fresh_lists[address] = members
        else:  # NSQ's own, which answers 404
            self._without_list_until[address] = now + NO_LIST_S

    def take_lists(self) -> None:
        """Go by the lists that came since the last time; without any, the former ones stand."""
        if self._fresh_lists:
            self._lists, self._fresh_lists = self._fresh_lists, {}
        listed = (member for members in self._lists.values() for member in members)
        self.addresses = tuple(dict.fromkeys((*self._seeds, *listed)))[:NSQLOOKUPD_COUNT_MAX]
        self._failures = {address: self._failures[address] for address in self.addresses if address in self._failures}

    def due(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Return whom to ask now, and whom only if none of those answers."""
        self._count += 1
        first = [each for each in self.addresses if self._failures.get(each, 0) < DEMOTED_AFTER]
        last = tuple(each for each in self.addresses if each not in first)
        if not first or self._count % DEMOTED_EVERY == 0:
            return (*first, *last), ()
        return tuple(first), last


def topic_path(topic: str, access: str = "", names_logs: bool = False) -> str:
    """Return what is asked for a topic's nsqd.

    Args:
        access: ``r`` for those that can be read from, ``w`` for those that can be written to; with the topic's
            metadata. NSQ's own nsqlookupd looks at neither.
        names_logs: something is told to each log, as sequences that are counted for it or where a channel begins; so
            logs are named also where a cluster keeps a topic that has no partitions for anybody else.
    """
    path = f"/lookup?topic={quote(topic, safe='')}"
    if not access:
        return path
    return f"{path}&access={access}&metainfo=true{'&logs=true' if names_logs else ''}"


class PollTimes:
    """Times to ask the nsqlookupd again: every ``interval_s``, but soon and then less and less often after a loss.

    Pure. An nsqd that is lost and then leaves the lists would otherwise be found again an interval after its return.
    """

    def __init__(self, interval_s: float, jitter: float, soon_s: float = 2.0) -> None:
        self._interval_s = interval_s
        self._jitter = jitter
        self._soon_s = min(soon_s, interval_s)
        self._next_s = self._soon_s
        self._waiting_s = 0.0

    def limit(self, interval_s: float, soon_s: float) -> None:
        """Wait no longer than this from now on: between two polls, and after a loss."""
        self._interval_s = min(self._interval_s, interval_s)
        self._soon_s = min(self._soon_s, soon_s)
        self._next_s = min(self._next_s, self._interval_s)

    def hurry(self) -> bool:
        """Note that an nsqd was lost or a poll failed; True when the present wait should be cut short."""
        self._next_s = self._soon_s
        return self._waiting_s > self._soon_s

    def next_s(self, jittered: Callable[[float, float], float], is_hasty: bool = False) -> float:
        """Seconds until the next poll; ``jittered(interval_s, jitter)`` spreads them.

        Args:
            is_hasty: nobody answered the last one, and something is missing: at most ``BLIND_POLL_S``.
        """
        if is_hasty:
            self._next_s = min(self._next_s, BLIND_POLL_S)
        self._waiting_s = self._next_s
        self._next_s = min(self._interval_s, 2 * self._next_s)
        return jittered(self._waiting_s, self._jitter)
