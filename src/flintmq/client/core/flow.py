"""A consumer's flow control: applies the policies of :mod:`.rdy` and :mod:`.backoff`.

Rules of this file: it is the only one that sends RDY and the single owner of what is in flight; it decides nothing
itself. A connection *joins* when it is subscribed and *leaves* when it is lost; messages of a lost connection that the
application still holds stay counted until they are answered, at most for a message timeout.
"""

from __future__ import annotations

import logging
from typing import Generic, Protocol, TypeVar

from flintmq.client.core.backoff import Backoff, BackoffState, jittered_s
from flintmq.client.core.rdy import PROMPT_S, RdyPolicy, Share
from flintmq.client.core.timers import Timer, Timers
from flintmq.env import Env
from flintmq.wire.client import Features

log = logging.getLogger("flintmq.client")

BACKOFF_JITTER = 0.2
QUEUE_SLACK = 1000


class Source(Protocol):
    """A connection as far as it is needed here."""

    address: str
    features: Features
    msg_timeout_s: float

    @property
    def unsent_count(self) -> int: ...
    def rdy(self, count: int) -> None: ...
    def describe(self) -> str: ...


Link = TypeVar("Link", bound=Source)


class Flow(Generic[Link]):
    """Decides how much may come over which connection, and says so to nsqd.

    Attributes:
        is_paused: the application wants nothing for now.
        is_stopped: nothing will be wanted any more.
        pace: messages in flight that are handled in time; None: no limit by that.
    """

    def __init__(self, rdy: RdyPolicy, backoff: Backoff, env: Env) -> None:
        self.is_paused = False
        self.is_stopped = False
        self.pace: int | None = None
        self._rdy = rdy
        self._max_in_flight_highest = rdy.max_in_flight
        self._backoff = backoff
        self._env = env
        self._loop: Timers | None = None
        self._joined: dict[Link, Share] = {}
        self._orphaned: dict[Link, Share] = {}
        self._holds: dict[Link, Timer] = {}
        self._plan_timer: Timer | None = None
        self._backoff_timer: Timer | None = None

    def describe(self) -> str:
        """Show backoff, levels and connections, a line each."""
        lines = [f"backoff: {self._backoff.describe()}", self._rdy.describe()]
        return "\n".join([*lines, *(connection.describe() for connection in self._joined)])

    def start(self, loop: Timers) -> None:
        """Begin, on this loop."""
        self._loop = loop

    def stop(self) -> None:
        """Ask for no more messages, for good."""
        self.is_stopped = True
        self.replan()

    def close(self) -> None:
        """Cancel all timers."""
        for timer in (self._plan_timer, self._backoff_timer, *self._holds.values()):
            if timer is not None:
                timer.cancel()

    # --- state ---

    @property
    def connections(self) -> tuple[Link, ...]:
        """All that are subscribed now."""
        return tuple(self._joined)

    @property
    def in_flight(self) -> int:
        """Messages delivered and not answered, lost connections included."""
        return sum(share.in_flight for share in (*self._joined.values(), *self._orphaned.values()))

    @property
    def is_starved(self) -> bool:
        """Whether some nsqd soon cannot deliver more before messages are answered."""
        return any(share.is_starved(connection.unsent_count) for connection, share in self._joined.items())

    def ends_in_s(self, now: float) -> float | None:
        """Seconds after which no more will come before messages are answered; None: at any time something may.

        Some nsqd can deliver no more; the others have nothing, as they do not hesitate (``PROMPT_S``) when they have.
        """
        prompt_s, is_held_up = 0.0, False
        for connection, share in self._joined.items():
            unsent_count = connection.unsent_count
            if share.is_full(unsent_count):
                is_held_up |= share.in_flight > unsent_count
            else:
                prompt_s = max(prompt_s, PROMPT_S if unsent_count else share.prompt_until - now)
        return prompt_s if is_held_up else None

    @property
    def backoff_state(self) -> BackoffState:
        """Return where the backoff stands."""
        return self._backoff.state

    @property
    def max_in_flight(self) -> int:
        """Messages in flight over all connections."""
        return self._rdy.max_in_flight

    @max_in_flight.setter
    def max_in_flight(self, count: int) -> None:
        self._rdy.max_in_flight = count
        self._max_in_flight_highest = max(self._max_in_flight_highest, count)
        self.replan()

    @property
    def queue_count_max(self) -> int:
        """More than any nsqd sends that respects RDY: what is queued beyond it was never asked for."""
        return 2 * self._max_in_flight_highest + QUEUE_SLACK

    def has_joined(self, connection: Link) -> bool:
        """Whether messages may come over a connection."""
        return connection in self._joined

    def may_deliver(self, connection: Link) -> bool:
        """Whether nsqd is to deliver over a connection what it has."""
        share = self._joined.get(connection)
        return share is not None and share.rdy_count > 0

    def held(self, connection: Link) -> int:
        """Return how many messages of a connection the application has not answered."""
        share = self._joined.get(connection)
        return 0 if share is None else share.in_flight - connection.unsent_count

    # --- what happens ---

    def join(self, connection: Link) -> None:
        """Take in a connection that is subscribed."""
        share = Share(connection.address, connection.features.max_rdy_count, connection.msg_timeout_s)
        self._joined[connection] = share
        self._rdy.shares.append(share)
        self.replan()

    def leave(self, connection: Link, dropped: int) -> None:
        """Let a lost connection go; ``dropped`` of its messages were never handed out."""
        share = self._joined.pop(connection, None)
        if share is None:
            return
        self._end_hold(connection)
        self._rdy.shares.remove(share)
        share.settled(dropped)
        if share.in_flight > 0:
            self._orphaned[connection] = share
            self._rdy.orphan_count += share.in_flight
            assert self._loop is not None
            # What the application forgot must not hold back the others for longer than nsqd would wait.
            self._loop.call_later(connection.msg_timeout_s, self._forget_orphans, connection)
        self.replan()

    def received(self, connection: Link, count: int, now: float) -> bool:
        """Note that messages came; True when they are the first of their connection, which may then get its share."""
        share = self._joined[connection]
        is_first = not share.is_started
        share.received(count, now)
        return is_first

    def settled(self, connection: Link, finished: int, others: int) -> bool:
        """Note that messages are done with and adapt levels; False when their connection was lost before."""
        if finished:
            self.note_success()
        share = self._joined.get(connection)
        if share is None:
            self._settle_orphans(connection, finished + others)
            return False
        share.settled(finished + others, self._now())
        if self._rdy.is_short:
            self.replan()
        if share.needs_refresh():
            assert self._loop is not None
            share.sent(share.rdy_count, self._loop.time())
            connection.rdy(share.rdy_count)
        return True

    def forget(self, connection: Link, count: int) -> None:
        """Note that messages will never be answered, because nsqd has taken them back."""
        share = self._joined.get(connection)
        if share is not None:
            share.settled(count, self._now())
            if self._rdy.is_short:
                self.replan()

    def _now(self) -> float:
        assert self._loop is not None
        return self._loop.time()

    def note_success(self) -> None:
        """Count a finished message for the backoff."""
        if self._backoff.state is BackoffState.PROBING:
            self._back_off(self._backoff.success())

    def note_failure(self) -> None:
        """Count a failed message for the backoff."""
        if self._backoff.state is not BackoffState.WAITING:
            self._back_off(self._backoff.failure())

    def set_pace(self, count: int | None) -> None:
        """Have no more messages in flight than so many; None: as many as otherwise."""
        if count != self.pace:
            self.pace = count
            self.replan()

    def hold(self, connection: Link, wait_s: float) -> None:
        """Want nothing over one connection for a while; the others go on."""
        share = self._joined.get(connection)
        if share is None or self._loop is None:
            return
        share.is_paused = True
        self.replan()
        self._end_hold(connection)
        self._holds[connection] = self._loop.call_later(wait_s, self._unhold, connection)

    def _unhold(self, connection: Link) -> None:
        self._end_hold(connection)
        if (share := self._joined.get(connection)) is not None:
            share.is_paused = False
            self.replan()

    def _end_hold(self, connection: Link) -> None:
        if (timer := self._holds.pop(connection, None)) is not None:
            timer.cancel()

    def replan(self) -> None:
        """Let the policy decide and send what it says."""
        if self._loop is None:
            return
        limits = [limit for limit in (self._backoff.limit, self.pace) if limit is not None]
        self._rdy.limit = 0 if self.is_stopped or self.is_paused else min(limits, default=None)
        now = self._loop.time()
        order = self._rdy.shares.copy()
        self._env.random.shuffle(order)
        if changes := self._rdy.plan(now, order):
            connections = {id(share): connection for connection, share in self._joined.items()}
            for share, count in changes:
                connections[id(share)].rdy(count)
        if self._plan_timer is not None:
            self._plan_timer.cancel()
        next_at = None if self.is_stopped else self._rdy.next_at(now)
        self._plan_timer = None if next_at is None else self._loop.call_at(next_at, self.replan)

    def _back_off(self, wait_s: float | None) -> None:
        if wait_s is not None:
            log.info("backing off for %.3g s", wait_s)
            assert self._loop is not None
            chance = self._env.random.random()
            self._backoff_timer = self._loop.call_later(jittered_s(wait_s, BACKOFF_JITTER, chance), self._probe)
        self.replan()

    def _probe(self) -> None:
        self._backoff.elapsed()
        self.replan()

    def _forget_orphans(self, connection: Link) -> None:
        share = self._orphaned.get(connection)
        if share is not None:
            self._settle_orphans(connection, share.in_flight)

    def _settle_orphans(self, connection: Link, count: int) -> None:
        share = self._orphaned.get(connection)
        if share is None:
            return
        count = min(count, share.in_flight)
        share.settled(count)
        self._rdy.orphan_count -= count
        if share.in_flight == 0:
            del self._orphaned[connection]
        self.replan()
