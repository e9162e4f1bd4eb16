"""Subscriptions of a consumer: to every nsqd that has the topic, or every partition of it; and how it asks for that.

Rules of this file:

- A partition has one connection: that to the nsqd which leads it as far as is known. When another one leads it, the
  former connection is given up.
- In order means ``SUB_ORDER``, or ``SUB_ORDERED`` where nsqd is Youzan's (:class:`OrderCommands`); an nsqd that answers
  E_INVALID to the one is asked again as the other, on a new connection, and that is remembered.
- nsqd is told that headers are understood where the nsqlookupd say that the topic has them: it refuses anything else.
- Where the channel begins is said with ``SUB_ADVANCED``, to each nsqd or partition once. So in a cluster the partitions
  of every topic are asked for (:attr:`Settings.names_logs`); an nsqd that has to be told so refuses what names none.
- What is said of the topic ends the consumer (``TOPIC_CODES``), what is said of an nsqd only when all say so.

Source: Youzan's smart client, "Nsqd Connection Handling" and "Ordered Message Consumption"; Youzan's TCP protocol.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

from flintmq.client.core.flow import Flow
from flintmq.client.core.following import Following
from flintmq.client.core.link import Answered, Link
from flintmq.client.core.reconnect import FailureLog
from flintmq.client.core.routing import Target
from flintmq.client.core.settings import Settings
from flintmq.client.core.start import NS_PER_S
from flintmq.client.core.timers import Timers
from flintmq.client.core.topology import Topology
from flintmq.client.security import Refusals
from flintmq.errors import ConnectionFailed, DiscoveryError, FlintError, NsqdError, ProtocolError
from flintmq.wire.codes import MOVED_CODES
from flintmq.wire.extended import SUB_ORDER, SUB_ORDERED

log = logging.getLogger("flintmq.client")

OTHER_NAME_COUNT_MAX = 10_000
SAID_MAX = 5  # of those that are not connected
TOPIC_CODES = ("E_SUB_ORDER_IS_MUST", "E_SUB_CHANNEL_NOT_REGISTERED")
"""Codes that say something of the topic, not of the nsqd that answers: trying another one is of no use."""

NO_PARTITION_CODE = "E_BAD_PARTITION"
"""The answer to a start where the topic has several partitions and none was named."""

EXTEND_CODES = ("E_SUB_EXTEND_NEED", "E_SUB_EXTEND_FORBIDDON")
DOUBT_S = 10.0
"""Seconds for which nsqd and nsqlookupd may disagree on whether the topic has headers: it may be changing just now."""

YOUZAN_MARK = "-HA"
"""In the versions of Youzan's daemons, such as 0.3.7-HA.1.13.0."""


class Targets(Protocol):
    """The part of a shell that keeps targets connected."""

    @property
    def listed(self) -> tuple[Target, ...]:
        """Return what is wanted now."""

    def keep(self, targets: Iterable[Target]) -> None:
        """Want these targets from now on, and no others."""


class Subscribing:
    """The subscriptions of one consumer.

    Args:
        flow: is told of each connection that is subscribed.
        following: where the topic is; None: the nsqd are given.
        targets: connects, and asks this object what to say.
        lock: held by who touches any state; connections may be opened in any thread.
        tell: is told what went wrong.
        fail: is told why the consumer must end.
    """

    def __init__(
        self,
        settings: Settings,
        flow: Flow[Link],
        following: Following | None,
        targets: Targets,
        lock: AbstractContextManager[object],
        tell: Callable[[FlintError], object],
        fail: Callable[[FlintError], object],
    ) -> None:
        self.following = following
        self._settings = settings
        self._flow = flow
        self._targets = targets
        self._lock = lock
        self._tell = tell
        self._fail = fail
        self._timers: Timers | None = None
        self._refusals = Refusals()
        self._failure_log = FailureLog()
        self._order_commands = OrderCommands()
        self._doubted_since: float | None = None

    def start(self, timers: Timers) -> None:
        """Begin to subscribe."""
        self._timers = timers
        if self.following is not None:
            self.following.start(timers)
        else:
            self._targets.keep(Target(address) for address in self._settings.nsqd)

    def stop(self) -> None:
        """Ask no nsqlookupd any more."""
        if self.following is not None:
            self.following.stop()

    # --- what is said on one connection ---

    @property
    def tag(self) -> str | None:
        """The tag to be desired (empty: none) if nsqd is told that headers are understood, which it refuses on a topic
        without; None if it is not told.
        """
        settings = self._settings
        if self.following is None:
            wants = settings.wants_headers or bool(settings.desired_tag)
        else:
            wants = settings.wants_headers or self.following.topology.is_extended
        return settings.desired_tag if wants else None

    def subscribe(self, link: Link, target: Target, answered: Answered) -> None:
        """Send the command that subscribes to a target."""
        settings = self._settings
        topic, channel, partition = settings.topic, settings.channel, target.partition
        with self._lock:
            if settings.beginning is not None:
                now_s = settings.env.clock.wall_ns() / NS_PER_S
                start = settings.beginning.word(*target, now_s)
                is_only_one = partition is None and start is not None and YOUZAN_MARK in link.features.version
                named = 0 if is_only_one else partition
                link.sub_advanced(topic, channel, partition, named, start, answered)
            elif settings.is_ordered:
                assert partition is not None
                command = self._order_commands.name(target.address, link.features.version)
                link.sub_order(topic, channel, partition, answered, command)
            else:
                link.sub(topic, channel, answered, partition)

    def asks_again(self, target: Target, error: BaseException) -> bool:
        """Whether an nsqd that has refused a subscription is to be asked otherwise at once, on a new connection.

        That is one that knows ``SUB_ORDER`` by its other name; or one that does not have the topic yet and is to make
        it: then there is one place to begin only.
        """
        with self._lock:
            if self._settings.is_ordered and self._order_commands.may_know_other(target.address, error):
                return True
            is_missing = isinstance(error, NsqdError) and error.code == "E_TOPIC_NOT_EXIST"
            return is_missing and target.partition is None and self._note_begun(target)

    def _note_begun(self, target: Target) -> bool:
        """Note that a channel has begun where it was told; False if that is not to be told, or was before."""
        beginning = self._settings.beginning
        return beginning is not None and beginning.note(*target)

    def join(self, link: Link, target: Target) -> None:
        """Take in a connection that is subscribed."""
        self._note_begun(target)
        if self.following is not None and not self.following.leads(target):
            link.abort("another nsqd leads the partition by now")
        if not link.is_lost:
            log.info("subscribed to %s/%s on %s", self._settings.topic, self._settings.channel, target)
            self._flow.join(link)

    @property
    def lacking(self) -> str:
        """Say where the topic is and this consumer is not, as far as can be known; empty: nowhere."""
        following, targets = self.following, self._targets.listed
        if following is None:
            targets = targets or tuple(Target(address) for address in self._settings.nsqd)
        elif following.is_blind:
            return f"no nsqlookupd answers{_because(following.failure)}"
        elif not targets:
            return f"the nsqlookupd know no nsqd with the topic{_because(following.topology.reason)}"
        elif following.topology.missing:
            partitions = ", ".join(map(str, following.topology.missing))
            return f"the nsqlookupd know no leader of partition {partitions}"
        joined = {(link.address, link.partition) for link in self._flow.connections}
        lacking = [str(target) for target in targets if target not in joined]
        last = self._failure_log.last
        said = [f"nsqd {each} is not connected{_because(last(each))}" for each in lacking[:SAID_MAX]]
        return ", ".join(said) + (f", and {len(lacking) - SAID_MAX} more" if len(lacking) > SAID_MAX else "")

    # --- how it ends ---

    def note_lost(self) -> None:
        """Note that a connection was lost: its nsqd may be somewhere else soon."""
        if self.following is not None:
            self.following.hurry()

    def note_attempt(self, target: Target, error: FlintError | None) -> None:
        """Note how an attempt ended (None: well)."""
        wanted = [str(target) for target in self._targets.listed]
        self._refusals.note(str(target), error, wanted)
        if error is None:
            self._failure_log.clear(str(target))
            self._doubted_since = None
            return
        assert self._timers is not None
        if self._failure_log.is_new(str(target), error, self._timers.time()):
            log.warning("cannot consume from nsqd %s: %s", target, error)
        self._tell(with_address(error, target.address))
        code = error.code if isinstance(error, NsqdError) else ""
        if self.following is not None and target.partition is not None:
            if code in MOVED_CODES:
                self.following.distrust(target)
            else:
                self.following.hurry()
        if code == NO_PARTITION_CODE and target.partition is None:
            if self.following is None:
                self._fail(has_partitions(self._settings.topic))
            else:  # the nsqlookupd that was asked does not know of them yet
                self.following.hurry()
            return
        if code in TOPIC_CODES or (code in EXTEND_CODES and not self._is_in_doubt()):
            self._fail(error)
        refusal = self._refusals.of_all(wanted)
        if refusal is not None and not self._flow.connections and code not in EXTEND_CODES:
            self._fail(refusal)

    def _is_in_doubt(self) -> bool:
        """Whether the next poll of the nsqlookupd may still explain what nsqd says about headers."""
        if self.following is None:
            return False
        assert self._timers is not None
        now = self._timers.time()
        if self._doubted_since is None:
            self._doubted_since = now
        return now - self._doubted_since < DOUBT_S

    # --- where the topic is ---

    def found(self, topology: Topology) -> None:
        """Follow the topic to where it is."""
        is_ordered, topic = self._settings.is_ordered, self._settings.topic
        if is_ordered and topology.nodes and not topology.is_partitioned:
            detail = f"topic {topic} has no partitions, so it cannot be consumed in order: drop ordered=True"
            self._fail(DiscoveryError(detail))
            return
        targets = [Target(address, partition) for partition, address in topology.leaders.items()]
        if not is_ordered:
            targets += [Target(address) for address in topology.plain]
        self._targets.keep(targets)
        for link in self._flow.connections:
            if link.partition is None:
                continue
            leader = topology.leaders.get(link.partition, link.address)
            if leader != link.address:
                link.abort(f"partition {link.partition} is led by {leader} now")


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""


def has_partitions(topic: str) -> DiscoveryError:
    """Return what ends a consumer with ``start`` that was given the address of an nsqd whose topic has partitions."""
    detail = "start= has to be told for each of them: give nsqlookupd_http_addresses, which know where they are"
    return DiscoveryError(f"topic {topic} has partitions: {detail}")


def with_address(error: FlintError, address: str) -> FlintError:
    """An error as the application is told of it: one of the protocol does not say itself which nsqd has broken it."""
    return ConnectionFailed(address, str(error)) if isinstance(error, ProtocolError) else error


class OrderCommands:
    """Under which name each nsqd knows ``SUB_ORDER``.

    Youzan's daemons know it as ``SUB_ORDERED`` alone, and answer E_INVALID and close to what they do not know. What
    nsqd says of itself decides which name is tried first; where that is refused the other one is tried, once, and
    remembered for the address.
    """

    def __init__(self) -> None:
        self._others: dict[str, None] = {}  # addresses at which the name that is tried first was refused

    def name(self, address: str, version: str) -> str:
        """The name to try at an nsqd.

        Args:
            version: as it answered IDENTIFY.
        """
        return SUB_ORDERED if (YOUZAN_MARK in version) != (address in self._others) else SUB_ORDER

    def may_know_other(self, address: str, error: BaseException) -> bool:
        """Whether an nsqd that has refused is to be asked again, under the other name."""
        if not isinstance(error, NsqdError) or error.code != "E_INVALID":
            return False
        if address in self._others:  # it knows neither; it may be another nsqd next time
            del self._others[address]
            return False
        while len(self._others) >= OTHER_NAME_COUNT_MAX:
            del self._others[next(iter(self._others))]
        self._others[address] = None
        return True
