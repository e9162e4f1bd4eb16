"""The retry rules: what becomes of a publish, wherever it waits.

Both clients ask here and nowhere else: :mod:`.sending` (callbacks) and :mod:`flintmq.client.blocking.producer` (calls
that wait in threads). Each method notes in the publish what is known now and returns a :class:`Verdict`.

Rules of this file:

- The retry table of Youzan's smart client: an error in the message is final; "not here, not now" is tried again, up
  to ``tries_max``; where the leader of a partition has moved or moves now, nsqd drains, or its auth server does not
  answer, until the deadline.
- What was not answered may be stored: it is sent again only if the user wants that (``retries_unknown``), or if nsqd
  knows it again by its writer. It stays unknown when a later try is refused.
- An answer of nsqd to a publish with a writer is certain where nsqd would have known it again.
- An nsqd that answers nothing is left before the deadline, if the publish may be sent somewhere else, or again.

No clock, no IO; chance comes as ``env.random``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flintmq.addresses import shown_url
from flintmq.client.core import sharding
from flintmq.client.core.link import AnswerLost
from flintmq.client.core.once import GAP_CODE, Writers
from flintmq.client.core.publish import (
    CONGESTED_CODE,
    CONGESTED_FACTOR,
    STALLED_SHARE,
    Failure,
    Publish,
    is_bad_message,
    is_delay_too_long,
    is_draining,
    leaves_open,
    refreshes_lookup,
    retry_delay_s,
)
from flintmq.client.core.routing import Routes
from flintmq.client.security import OUTAGES, Refusals
from flintmq.env import Env
from flintmq.errors import ConnectionFailed, DiscoveryError, FlintError, NoNsqd, NsqdError, RemoteProtocolError
from flintmq.names import listed
from flintmq.wire.codes import LED_ELSEWHERE_CODES, MOVED_CODES

NAMED_MAX = 3  # addresses that an error names

_cached_partition = lru_cache(maxsize=8192, typed=True)(sharding.partition_of)


def partition_of(sharding_id: sharding.ShardingId, count: int, function: str) -> int:
    """As :func:`flintmq.client.core.sharding.partition_of`, and quick: the same ids come again and again.

    Raises:
        OptionError: likewise.
    """
    try:
        return _cached_partition(sharding_id, count, function)
    except TypeError:  # it cannot be hashed, so it is no sharding id
        return sharding.partition_of(sharding_id, count, function)


@dataclass(frozen=True, slots=True)
class Policy:
    """The decisions of a producer's user.

    Attributes:
        timeout_s: of a call, where the call says nothing else.
        retries_unknown: send again what was not answered.
        tries_max: how often a publish may be refused.
        count_max, bytes_max: of what is gathered in a line.
        sharding: from a sharding id to a partition.
        has_lookup: nsqlookupd know where topics are.
    """

    timeout_s: float
    retries_unknown: bool
    tries_max: int
    count_max: int
    bytes_max: int
    sharding: str
    has_lookup: bool

    @property
    def stalled_s(self) -> float:
        """Return how long an nsqd must have answered nothing before it is left."""
        return self.timeout_s / 2 * STALLED_SHARE


class Retry(NamedTuple):
    """A publish is tried again.

    Attributes:
        delay_s: not before.
        refreshes: the nsqlookupd may know by now where to publish instead.
    """

    delay_s: float = 0.0
    refreshes: bool = False


class Split(NamedTuple):
    """One of several messages is bad: each is sent alone, so that only the bad one fails."""


Verdict = Failure | Retry | Split


class RetryRules:
    """Says what becomes of the publishes of one producer.

    Args:
        moved: told the topic of which an nsqd is not the one to publish to, when the routes know it.
        writers: to publish idempotently with; None: not so.
        unanswered: the nsqlookupd that are being asked and have not answered yet.
    """

    def __init__(
        self,
        policy: Policy,
        env: Env,
        routes: Routes,
        refusals: Refusals,
        moved: Callable[[str], object],
        writers: Writers | None = None,
        unanswered: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        self._policy = policy
        self._env = env
        self._routes = routes
        self._refusals = refusals
        self._moved = moved
        self._writers = writers
        self._unanswered = unanswered

    # --- answers ---

    def refused(self, publish: Publish, error: NsqdError, address: str, now: float) -> Verdict:
        """nsqd refused it: follow the retry table."""
        policy = self._policy
        publish.error = error
        publish.tries += 1
        if publish.is_gathered and is_bad_message(error, publish.bodies):
            return Split()
        is_open = leaves_open(error)
        publish.is_unknown |= is_open
        is_out_of_sequence = publish.writer is not None and error.code == GAP_CODE
        if publish.writer is not None and (is_out_of_sequence or is_draining(error)):
            publish.is_unknown = False  # it would have been answered as a duplicate
        publish.is_out_of_sequence = is_out_of_sequence
        has_moved = publish.partition is not None and error.code in MOVED_CODES
        if has_moved:
            assert publish.partition is not None
            self._routes.drop(publish.topic, publish.partition, address, now)
            self._moved(publish.topic)
        is_elsewhere = has_moved or error.code in LED_ELSEWHERE_CODES
        may_wait = is_elsewhere or is_draining(error) or error.code in OUTAGES
        may_try = may_wait or publish.tries < policy.tries_max
        is_safe = policy.retries_unknown or not is_open or publish.writer is not None
        is_retryable = error.retryable and not is_delay_too_long(publish, error)
        if not (is_retryable or is_out_of_sequence) or not may_try or not is_safe:
            return Failure(error.code, error.detail, error.nsqd, is_retryable)
        delay_s = retry_delay_s(publish.tries, self._env.random.random())
        if error.code == CONGESTED_CODE:
            delay_s *= CONGESTED_FACTOR
        return Retry(delay_s, refreshes_lookup(error))

    def unanswered(self, publish: Publish, error: FlintError) -> Failure | Retry:
        """The connection was lost before nsqd answered."""
        is_open = not isinstance(error, AnswerLost) or error.maybe_executed
        publish.error = error
        publish.is_unknown |= is_open
        if is_open and not self._policy.retries_unknown and publish.writer is None:
            reason = error.reason if isinstance(error, ConnectionFailed) else str(error)
            return Failure("CONNECTION_LOST", f"nsqd did not answer: {reason}")
        return Retry()

    def senseless(self, publish: Publish, error: RemoteProtocolError, address: str) -> Failure:
        """nsqd gave an answer that is none."""
        publish.is_unknown = True
        return Failure(error.code, error.detail, address, retryable=False)

    # --- time ---

    def leaves_early(self, publish: Publish, has_choice: Callable[[], bool]) -> bool:
        """Whether an nsqd that does not answer it is left when half of its time is over.

        Args:
            has_choice: it could be sent somewhere else.
        """
        return publish.writer is not None or (self._policy.retries_unknown and has_choice())

    def late(self, publish: Publish, address: str, waited_s: float) -> Failure:
        """Its deadline has come, and nsqd has not answered."""
        publish.is_unknown = True
        return Failure("TIMEOUT", f"no answer within {waited_s:.3g} s", address)

    def unsent(
        self, publish: Publish, is_behind: bool, last_error: FlintError | None, up: Collection[str] = ()
    ) -> Failure:
        """Its deadline has come, and it was not under way.

        Args:
            is_behind: earlier ones to its partition were.
            last_error: why something else could not be done.
            up: ``host:port`` of every nsqd that is connected.
        """
        partition = publish.partition if publish.keys is not None else None
        if is_behind:
            detail = f"it waited behind earlier ones to partition {partition}, which were not answered"
            return Failure("TIMEOUT", detail)
        has_leader = partition is not None and self._routes.leader(publish.topic, partition) is not None
        if publish.needs_partition and self._policy.has_lookup and not has_leader:
            publish.error = publish.error or last_error
            return Failure("PARTITION_UNAVAILABLE", self._routes.why_not(publish.topic, partition))
        if not isinstance(last_error, DiscoveryError) and not self._routes.targets(publish.topic):
            last_error = None  # it is about an nsqd of another topic
        publish.error = publish.error or last_error or NoNsqd(publish.topic, self._why_none(publish.topic, up))
        return Failure("TIMEOUT", f"no nsqd took it in time: {publish.error}")

    def _why_none(self, topic: str, up: Collection[str]) -> str:
        """Say whom a publish to a topic waited for, where nothing has failed."""
        wanted = dict.fromkeys(target.address for target in self._routes.targets(topic))
        if not wanted:
            if gone := self._routes.why_gone(topic):
                return gone
            asked = listed([*map(shown_url, self._unanswered())], NAMED_MAX)
            return f"nothing is known of any nsqd{f', and there is no answer yet of {asked}' if asked else ''}"
        if missing := [address for address in wanted if address not in up]:
            return f"connecting to {listed(missing, NAMED_MAX)} takes long"
        return f"{listed(wanted, NAMED_MAX)} had enough to do with earlier ones"

    # --- what will never be ---

    def impossible(self, publish: Publish) -> Failure | None:
        """Return why its topic will never take it; None when there is hope."""
        if not publish.needs_partition:
            return self._placeless(publish)
        partition = publish.partition if publish.keys is not None else None
        if self._routes.lacks(publish.topic, partition):  # they may have been added since
            learned_count = self._routes.learned_count(publish.topic)
            if publish.learned_count is None:
                publish.learned_count = learned_count
            if publish.learned_count == learned_count:
                return None
        needs_only_headers = publish.headers is not None and publish.keys is None and not publish.is_trace_asked
        if needs_only_headers and self._routes.takes_headers_alone(publish.topic):
            publish.needs_partition = False
        elif refusal := self._routes.refusal(publish.topic, partition, publish.headers is not None):
            return Failure(*refusal, retryable=False)
        return None

    def _placeless(self, publish: Publish) -> Failure | None:
        """Return why a topic takes no single delayed message that may go to any partition; None when it may.

        It goes as NSQ's DPUB, which names no partition: nsqd would refuse it, and close the connection.
        """
        is_dpub = publish.defer_ms is not None and len(publish.bodies) == 1 and self._writers is None
        if not is_dpub or not self._routes.is_ordered(publish.topic):
            return None
        hint = "mpub([body], delay=..., sharding_id=...), or with partition=, does"
        detail = f"topic {publish.topic} is in order, and dpub says nothing of a partition: {hint}"
        return Failure("E_BAD_PARTITION", detail, retryable=False)

    def refused_by_all(self, publish: Publish) -> Failure | None:
        """Return why no nsqd of its topic will ever take it; None when there is hope."""
        if publish.keys is None:
            wanted = [target.address for target in self._routes.targets(publish.topic)]
        else:
            leader = None if publish.partition is None else self._routes.leader(publish.topic, publish.partition)
            wanted = [] if leader is None else [leader]
        error = self._refusals.of_all(wanted)
        if error is None:
            return None
        publish.error = error
        if isinstance(error, NsqdError):
            return Failure(error.code, error.detail, error.nsqd, retryable=False)
        assert isinstance(error, ConnectionFailed)
        return Failure("TLS_REFUSED", error.reason, error.address, retryable=False)

    # --- order and writers ---

    def place(self, publish: Publish) -> bool:
        """Find out the partition of one that keeps its order; False while it cannot be known."""
        if publish.partition is None:
            count = self._routes.partition_count(publish.topic)
            if not count:
                return False
            assert publish.sharding_id is not None
            publish.partition = partition_of(publish.sharding_id, count, self._policy.sharding)
        return True

    def overtaken(self, publish: Publish, earlier: str) -> Failure:
        """One that it must not overtake has failed.

        Args:
            earlier: the code that one failed with.
        """
        which = "sharding id" if publish.keys != [None] else "partition"
        detail = f"not sent: an earlier publish of the same {which} failed, and it must not be overtaken ({earlier})"
        return Failure("E_ORDER", detail)

    def free_writer(self, publish: Publish, stored_count: int = 0) -> bool:
        """Let others have its writer, unless nobody knows what became of its messages; True if it had one."""
        writer, publish.writer = publish.writer, None
        if writer is None or self._writers is None:
            return False
        is_open = not stored_count and (publish.is_unknown or publish.connection is not None)
        self._writers.release(writer, stored_count, is_open or publish.is_out_of_sequence)
        publish.is_out_of_sequence = False
        return True
