"""Keeps a consumer subscribed: on every nsqd that has the topic, or on every partition of it.

Rules of this file:

- All methods are called with the owner's lock held, except what a crew's thread does: connecting waits.
- A partition has one connection: that to the nsqd which leads it as far as is known. When another one leads it, the
  former connection is given up.
- In order means ``SUB_ORDER``, or ``SUB_ORDERED`` where nsqd is Youzan's (:class:`OrderCommands`); an nsqd that answers
  E_INVALID to the one is asked again as the other, on a new connection, and that is remembered.
- nsqd is told that headers are understood where the nsqlookupd say that the topic has them: it refuses anything else.
- Where the channel begins is said with ``SUB_ADVANCED``, to each nsqd or partition once.
- What is said of the topic ends the consumer (``TOPIC_CODES``), what is said of an nsqd only when all say so.
- A topic with partitions is looked up at least every ``PARTITIONED_POLL_S``, and every ``SOON_S`` while one is missing.

Source: seed 000 "Nsqd Connection Handling" and "Ordered Message Consumption", reference/youzan.md 1.3 and 1.8.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager
from typing import Protocol

from flintmq.client.blocking.connection import Connection, ConnectionOwner
from flintmq.client.blocking.crew import Crew
from flintmq.client.blocking.links import Links
from flintmq.client.blocking.lookup import Lookup
from flintmq.client.blocking.timers import CallTimer, Timers
from flintmq.client.core.backoff import jittered_s
from flintmq.client.core.discovery import PollTimes, topic_path
from flintmq.client.core.publish import MOVED_CODES
from flintmq.client.core.routing import DISTRUST_S, Target
from flintmq.client.core.start import NS_PER_S, Beginning
from flintmq.client.core.topology import PARTITION_COUNT_MAX, Topology
from flintmq.client.options import ConnectionOptions
from flintmq.client.security import Refusals
from flintmq.client.subscription import (
    DOUBT_S,
    EXTEND_CODES,
    PARTITIONED_POLL_S,
    SOON_S,
    TOPIC_CODES,
    OrderCommands,
)
from flintmq.env import Env
from flintmq.errors import DiscoveryError, FlintError, NsqdError

log = logging.getLogger("flintmq.client")


class SubscriptionOwner(ConnectionOwner, Protocol):
    """Whose subscriptions these are."""

    @property
    def has_connections(self) -> bool:
        """Whether something is subscribed now."""

    def join(self, connection: Connection) -> None:
        """Take in a connection that is subscribed."""

    def give_up_wrong(self, topology: Topology) -> None:
        """Give up the connections to nsqd that do not lead their partition any more."""

    def note_error(self, error: FlintError) -> None:
        """Note what went wrong."""

    def fail(self, error: FlintError) -> None:
        """End, for good."""


class Subscriptions:
    """The subscriptions of one consumer.

    Args:
        lookup: None: the nsqd are given.
        times: when it is asked.
        lock: the owner's.
        is_ordered: subscribe in order.
        desired_tag: empty: none.
        wants_headers: also where nobody says that the topic has some.
        beginning: where the channel begins; None: where it is.

    Attributes:
        is_polled: the nsqlookupd were asked once.
    """

    def __init__(
        self,
        topic: str,
        channel: str,
        owner: SubscriptionOwner,
        options: ConnectionOptions,
        env: Env,
        timers: Timers,
        lock: AbstractContextManager[object],
        lookup: Lookup | None,
        times: PollTimes,
        *,
        is_ordered: bool,
        desired_tag: str,
        wants_headers: bool,
        beginning: Beginning | None,
    ) -> None:
        self.is_polled = False
        self._topic = topic
        self._channel = channel
        self._owner = owner
        self._options = options
        self._env = env
        self._timers = timers
        self._lock = lock
        self._lookup = lookup
        self._times = times
        self._is_ordered = is_ordered
        self._desired_tag = desired_tag
        self._wants_headers = wants_headers
        self._beginning = beginning
        crew = Crew("flintmq-connect")
        self._links: Links[Target, Connection] = Links(
            self._open, owner.join, self._note_attempt, _drop, crew, timers, lock, env
        )
        self._topology = Topology()
        self._distrusted: dict[tuple[int, str], float] = {}
        self._refusals = Refusals()
        self._order_commands = OrderCommands()
        self._doubted_since: float | None = None
        self._poll_timer: CallTimer | None = None
        self._is_blind = False
        self._is_stopped = False

    # --- life ---

    @property
    def are_all_tried(self) -> bool:
        """Whether everything that is wanted was tried once."""
        return self._links.are_all_tried

    def keep(self, nsqd: tuple[str, ...]) -> None:
        """Want these nsqd, and no others."""
        self._links.keep(Target(address) for address in nsqd)

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self._is_stopped = True
        self._links.stop()

    def end(self) -> None:
        """Ask no nsqlookupd any more."""
        self.stop()
        if self._lookup is not None:
            self._lookup.end()

    def note_lost(self, target: Target, lived_s: float) -> None:
        """Note that a connection was lost: its nsqd may be somewhere else soon."""
        self._links.lost(target, lived_s)
        self._hurry()

    def leads(self, target: Target) -> bool:
        """Whether nobody else is known to lead the partition of a target."""
        if target.partition is None:
            return True
        return self._topology.leaders.get(target.partition, target.address) == target.address

    # --- connecting ---

    def _open(self, target: Target) -> Connection:
        """Connect and subscribe; in a thread of the crew, without the lock."""
        wants = self._wants_headers or (self._lookup is None and bool(self._desired_tag))
        is_extended = wants or (self._lookup is not None and self._topology.is_extended)
        connection = Connection.open(
            target.address,
            self._owner,
            self._options,
            self._env,
            self._timers.time,
            self._lock,
            extended=is_extended,
            desired_tag=self._desired_tag if is_extended else "",
        )
        try:
            self._subscribe(connection, target)
        except BaseException as error:
            connection.abort("not subscribed")
            if self._may_know_other_name(error, target.address) or self._has_no_topic(error, target):
                return self._open(target)
            raise
        self._note_begun(target)
        return connection

    def _subscribe(self, connection: Connection, target: Target) -> None:
        if self._beginning is not None:
            with self._lock:
                named, start = self._beginning.words(*target, self._env.clock.wall_ns() / NS_PER_S)
            connection.subscribe_from(self._topic, self._channel, target.partition, named, start)
        elif not self._is_ordered:
            connection.subscribe(self._topic, self._channel, target.partition)
        else:
            assert target.partition is not None
            command = self._order_commands.name(target.address, connection.features.version)
            connection.subscribe_in_order(self._topic, self._channel, target.partition, command)

    def _note_begun(self, target: Target) -> bool:
        """Note that a channel has begun where it was told; False if that is not to be told, or was before."""
        with self._lock:
            return self._beginning is not None and self._beginning.note(*target)

    def _has_no_topic(self, error: BaseException, target: Target) -> bool:
        """Whether an nsqd that does not have the topic yet is to make it: then there is one place to begin only."""
        is_missing = isinstance(error, NsqdError) and error.code == "E_TOPIC_NOT_EXIST"
        return is_missing and target.partition is None and self._note_begun(target)

    def _may_know_other_name(self, error: BaseException, address: str) -> bool:
        """Whether an nsqd that does not know a command is to be asked under the other name for it."""
        with self._lock:
            return self._is_ordered and self._order_commands.may_know_other(address, error)

    def _note_attempt(self, target: Target, error: FlintError | None) -> None:
        self._refusals.note(str(target), error, self._wanted)
        if error is None:
            self._doubted_since = None
        else:
            self._note_failure(target, error)
        self._owner.wake()

    def _note_failure(self, target: Target, error: FlintError) -> None:
        log.warning("cannot consume from nsqd %s: %s", target, error)
        self._owner.note_error(error)
        code = error.code if isinstance(error, NsqdError) else ""
        if target.partition is not None:
            if code in MOVED_CODES and len(self._distrusted) < PARTITION_COUNT_MAX:
                self._distrusted[target.partition, target.address] = self._timers.time() + DISTRUST_S
            self._hurry()
        if code in TOPIC_CODES or (code in EXTEND_CODES and not self._is_in_doubt()):
            self._owner.fail(error)
        refusal = self._refusals.of_all(self._wanted)
        if refusal is not None and not self._owner.has_connections and code not in EXTEND_CODES:
            self._owner.fail(refusal)

    @property
    def _wanted(self) -> list[str]:
        return [str(target) for target in self._links.listed]

    def _is_in_doubt(self) -> bool:
        """Whether the next poll of the nsqlookupd may still explain what nsqd says about headers."""
        if self._lookup is None:
            return False
        now = self._timers.time()
        if self._doubted_since is None:
            self._doubted_since = now
        return now - self._doubted_since < DOUBT_S

    # --- following the topic ---

    def poll(self) -> None:
        """Ask the nsqlookupd, if there are any, where the topic is."""
        if self._lookup is None or self._is_stopped:
            return
        now = self._timers.time()
        self._distrusted = {wrong: until for wrong, until in self._distrusted.items() if until > now}
        self._lookup.ask(topic_path(self._topic, "r"), self._polled, tuple(self._distrusted))

    def _polled(self, outcome: Topology | DiscoveryError) -> None:
        self.is_polled = True
        if isinstance(outcome, DiscoveryError):
            log.warning("discovery of %s failed: %s", self._topic, outcome)
            if not self._is_blind:
                self._times.hurry()
            self._is_blind = True
        else:
            self._is_blind = False
            self._topology = outcome
            if outcome.is_partitioned:
                self._times.limit(PARTITIONED_POLL_S, SOON_S)
                if not outcome.is_complete:
                    self._times.hurry()
            self._found(outcome)
        self._poll_later()

    def _found(self, topology: Topology) -> None:
        """Follow the topic to where it is."""
        if self._is_ordered and topology.nodes and not topology.is_partitioned:
            detail = f"topic {self._topic} has no partitions, so it cannot be consumed in order: drop ordered=True"
            self._owner.fail(DiscoveryError(detail))
            return
        targets = [Target(address, partition) for partition, address in topology.leaders.items()]
        if not self._is_ordered:
            targets += [Target(address) for address in topology.plain]
        self._links.keep(targets)
        self._owner.give_up_wrong(topology)

    def _hurry(self) -> None:
        """Ask soon: something was lost."""
        if self._times.hurry() and self._lookup is not None and self.is_polled:
            self._poll_later()

    def _poll_later(self) -> None:
        if self._poll_timer is not None:
            self._poll_timer.cancel()
        self._poll_timer = self._timers.call_later(self._times.next_s(self._jittered), self.poll)

    def _jittered(self, interval_s: float, jitter: float) -> float:
        return jittered_s(interval_s, jitter, self._env.random.random())


def _drop(connection: Connection) -> None:
    connection.close()
