"""RDY: how many messages each connection may have in flight. Pure: no clock, no random numbers, no IO.

nsqd's RDY is a level: it delivers while fewer than RDY messages are in flight on the connection. The levels of all
connections together must never exceed ``max_in_flight``, also while they change:

- I1  the sum of what all connections *reserve* is at most ``max_in_flight`` when a level is raised.
- I2  a connection reserves its level; after the level was lowered it reserves the old one until nsqd must have read the
  new one (``SETTLE_S``) and what was delivered before is answered, at most for one message timeout: an application that
  forgets a message must not stop the others for ever.
- I3  messages of a lost connection that the application still holds (``orphan_count``) count as well.
- I4  no level exceeds the ``max_rdy_count`` of its nsqd.

Levels: an even share each; a new connection starts at 1 and gets its share with its first message; with fewer permits
than connections (``max_in_flight < connections``, or the single probe of a backoff) some connections have 1 and the
others 0, and a permit moves on when nothing came over it for ``idle_timeout_s`` or when it was held for
``tenure_s``. A level is sent again when 25 % or less of it is left.

Source: NSQ's client guide, "RDY State", NSQ's TCP protocol (RDY is a level, not a credit).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

SETTLE_S = 0.25
REFRESH_AT = 0.25
STARVED_AT = 0.85
PROMPT_S = 0.05  # in which an nsqd that has messages begins, or goes on, to deliver them once it may


@dataclass(slots=True, eq=False)
class Share:
    """One connection as the policy sees it.

    Attributes:
        rdy_count: the level sent last.
        remaining: that level minus the messages that came since.
        in_flight: messages delivered and not answered.
        is_started: a message has come, or nothing needs to be waited for.
        is_paused: nothing is wanted over this connection for now.
        prompt_until: until then more may be on its way, because nsqd could not deliver before, or is at it.
    """

    name: str
    max_rdy_count: int = 2500
    msg_timeout_s: float = 60.0
    rdy_count: int = 0
    remaining: int = 0
    in_flight: int = 0
    is_started: bool = False
    is_paused: bool = False
    last_message_at: float = 0.0
    granted_at: float = 0.0
    held_count: int = 0
    held_since: float = 0.0
    prompt_until: float = 0.0

    def describe(self) -> str:
        """Say in one line what the connection may do and does."""
        held = f" held={self.held_count}" if self.held_count else ""
        return f"{self.name} rdy={self.rdy_count} remaining={self.remaining} in_flight={self.in_flight}{held}"

    def received(self, count: int, now: float) -> None:
        """Note that ``count`` messages came."""
        self.in_flight += count
        self.remaining -= count
        self.last_message_at = now
        self.is_started = True
        if now < self.prompt_until:
            self.prompt_until = now + PROMPT_S

    def settled(self, count: int, now: float = 0.0) -> None:
        """Note that ``count`` messages were answered."""
        if self.in_flight >= self.rdy_count:
            self.prompt_until = now + PROMPT_S
        self.in_flight -= count

    def needs_refresh(self) -> bool:
        """Whether the level should be sent again (the 25 % rule)."""
        return self.rdy_count > 0 and self.remaining <= self.rdy_count * REFRESH_AT

    def is_starved(self, unsent_answers: int = 0) -> bool:
        """Whether nsqd soon cannot deliver more over this connection (NSQ's client guide, "is_starved")."""
        in_flight = self.in_flight - unsent_answers
        return in_flight > 0 and in_flight >= self.rdy_count * STARVED_AT

    def is_full(self, unsent_answers: int = 0) -> bool:
        """Whether nsqd cannot deliver any more over this connection before messages are answered."""
        return self.in_flight - unsent_answers >= self.rdy_count

    def reserved(self, now: float) -> int:
        """Return how many of ``max_in_flight`` this connection takes (I2)."""
        if self.held_count <= self.rdy_count:
            return self.rdy_count
        if now < self.settled_at:
            return self.held_count
        if now >= self.released_at or self.in_flight <= self.rdy_count:
            self.held_count = 0
            return self.rdy_count
        return min(self.held_count, self.in_flight)

    @property
    def settled_at(self) -> float:
        """Return when nsqd must have read the lowered level."""
        return self.held_since + SETTLE_S

    @property
    def released_at(self) -> float:
        """Return when nsqd has taken back what was delivered before."""
        return self.held_since + self.msg_timeout_s

    def sent(self, count: int, now: float) -> None:
        """Note that ``RDY count`` was sent."""
        if count < self.rdy_count:
            self.held_count = max(self.reserved(now), self.rdy_count)
            self.held_since = now
        elif self.rdy_count == 0 and count > 0:
            self.granted_at = now
        if count > self.rdy_count:
            self.prompt_until = now + PROMPT_S
        self.rdy_count = count
        self.remaining = count


@dataclass(slots=True)
class RdyPolicy:
    """Distributes ``max_in_flight`` over connections.

    Attributes:
        max_in_flight: messages in flight over all connections.
        limit: a lower number that holds for now (0: stop, 1: probe), or None.
        orphan_count: messages of lost connections that the application still holds (I3).
        is_short: the last plan left a connection below what it should have; plan again when something was answered.
    """

    max_in_flight: int
    idle_timeout_s: float = 10.0
    tenure_s: float = 30.0
    limit: int | None = None
    orphan_count: int = 0
    shares: list[Share] = field(default_factory=list)
    is_short: bool = False

    def describe(self) -> str:
        """Show every connection."""
        head = (
            f"max_in_flight={self.max_in_flight} limit={self.limit} orphans={self.orphan_count} short={self.is_short}"
        )
        return "\n  ".join([head, *(share.describe() for share in self.shares)])

    def is_starved(self) -> bool:
        """Whether any connection is starved."""
        return any(share.is_starved() for share in self.shares)

    def plan(self, now: float, order: Sequence[Share]) -> list[tuple[Share, int]]:
        """Decide which levels to send, lowered ones first; the caller sends them all.

        Args:
            now: seconds on the loop's clock.
            order: all shares in a random order: decides who gets a permit where nothing else does.
        """
        budget = max(0, self.max_in_flight - self.orphan_count)
        permits = budget if self.limit is None else min(budget, self.limit)
        active = self._active
        if permits < len(active):
            wanted = self._permits(now, [share for share in order if not share.is_paused], permits)
        else:
            wanted = self._even(active, permits)
        wanted += [(share, 0) for share in self.shares if share.is_paused]
        changes = [(share, count) for share, count in wanted if count < share.rdy_count]
        for share, count in changes:
            share.sent(count, now)
        return changes + self._raise(now, wanted, budget)

    def next_at(self, now: float) -> float | None:
        """Return when to plan again although nothing happened, or None."""
        times = [
            share.settled_at if now < share.settled_at else share.released_at
            for share in self.shares
            if share.held_count > share.rdy_count
        ]
        permits = self.max_in_flight if self.limit is None else min(self.limit, self.max_in_flight)
        if 0 < permits < len(self._active):
            times.extend(self._expires_at(share) for share in self.shares if share.rdy_count)
        return max(now, min(times)) if times else None

    @property
    def _active(self) -> list[Share]:
        return [share for share in self.shares if not share.is_paused]

    def _even(self, shares: list[Share], permits: int) -> list[tuple[Share, int]]:
        """Divide evenly; what a connection with a low maximum cannot take goes to the others."""
        wanted: dict[int, int] = {}
        left = permits
        for number, share in enumerate(sorted(shares, key=lambda share: share.max_rdy_count)):
            count = min(share.max_rdy_count, left // (len(shares) - number))
            left -= count
            wanted[id(share)] = count if share.is_started else min(count, 1)
        return [(share, wanted[id(share)]) for share in shares]

    def _permits(self, now: float, order: Sequence[Share], permits: int) -> list[tuple[Share, int]]:
        """Choose who has one message in flight: who has a permit and uses it, then who had none for longest."""
        holders = [share for share in order if share.rdy_count and now < self._expires_at(share)]
        others = sorted((share for share in order if not share.rdy_count), key=lambda share: share.granted_at)
        expired = [share for share in order if share.rdy_count and now >= self._expires_at(share)]
        chosen = [*holders, *others, *expired][:permits]
        for share in expired:
            if share in chosen:
                share.granted_at = now  # nobody else is there: another turn
        return [(share, 1 if share in chosen and share.max_rdy_count else 0) for share in order]

    def _expires_at(self, share: Share) -> float:
        idle_at = max(share.last_message_at, share.granted_at) + self.idle_timeout_s
        return min(idle_at, share.granted_at + self.tenure_s)

    def _raise(self, now: float, wanted: Iterable[tuple[Share, int]], budget: int) -> list[tuple[Share, int]]:
        """Raise levels as far as what the others reserve allows (I1)."""
        changes: list[tuple[Share, int]] = []
        free = budget - sum(share.reserved(now) for share in self.shares)
        self.is_short = False
        # Who had none for longest comes first here too, or one may never have its turn while others change places.
        for share, target in sorted(wanted, key=lambda pair: (pair[0].rdy_count, pair[0].granted_at)):
            if target <= share.rdy_count:
                continue
            reserved = share.reserved(now)
            count = min(target, reserved + max(0, free))
            # Below the target a level is raised in doublings, or a connection that empties slowly would cause a
            # command per message.
            if count > share.rdy_count and (count == target or count >= 2 * share.rdy_count):
                free -= max(0, count - reserved)
                share.sent(count, now)
                changes.append((share, count))
            self.is_short |= share.rdy_count < target
        return changes
