"""Grants of consumers end: they are renewed before that, and deliveries end with them.

Rules of this file:

- The auth server is asked a while before the time is up, at another moment for each consumer, so that neither a restart
  of it nor the many consumers of one moment are noticed by any.
- What it refuses holds at once. While it does not answer, what was granted holds until its time is up and no longer:
  then deliveries wait for one more answer, and without one the consumer is closed.

Source: docs/operations.md (re-check at TTL on live connections); NSQ asks only before the next command.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from flintmq.nsqd.auth import AuthFailed, AuthRefused, ClientAuth, Grants

_EARLY_MIN, _EARLY_MAX = 0.75, 0.9  # parts of the time to live after which it is renewed
_RETRY_MIN_S, _RETRY_MAX_S = 5.0, 60.0  # what fails is tried again later and later

log = logging.getLogger(__name__)

Done = Callable[[Grants | AuthFailed], None]


@dataclass(frozen=True, slots=True)
class Consumer:
    """Ways to deal with the client that consumes.

    Attributes:
        ask: asks the auth server about it.
        refusal: code and detail of the error when it may not consume any more; None when it may.
        hold: lets no more be delivered.
        go_on: lets it be delivered again.
        refuse: closes it with an error.
    """

    ask: Callable[[Done], asyncio.Task[Grants]]
    refusal: Callable[[], tuple[str, str] | None]
    hold: Callable[[], None]
    go_on: Callable[[], None]
    refuse: Callable[[str, str], None]


class Renewal:
    """Looks after the grants of one consumer, from its subscription on until :meth:`close`."""

    def __init__(
        self, auth: ClientAuth, consumer: Consumer, loop: asyncio.AbstractEventLoop, random: Random, name: str
    ) -> None:
        self._auth = auth
        self._consumer = consumer
        self._loop = loop
        self._random = random
        self._name = name
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[Grants] | None = None
        self._retry_s = _RETRY_MIN_S
        self._is_held = False
        self._is_closed = False
        self._arm()

    def close(self) -> None:
        """Nobody consumes any more."""
        self._is_closed = True
        self._stop_timer()
        if self._task is not None:
            self._task.cancel()

    def renewed(self) -> None:
        """A command has had the grants renewed."""
        if not self._is_closed:
            self._decide()

    def _arm(self) -> None:
        left_s = self._auth.left_s(self._loop.time())
        self._at(left_s * self._random.uniform(_EARLY_MIN, _EARLY_MAX), self._renew)

    def _at(self, delay_s: float, do: Callable[[], None]) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(max(0.0, delay_s), do)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _renew(self) -> None:
        self._ask()
        self._at(self._auth.left_s(self._loop.time()), self._ended)

    def _ended(self) -> None:
        self._stop_timer()
        self._is_held = True
        self._consumer.hold()
        self._ask()

    def _ask(self) -> None:
        if self._task is None:
            self._task = self._consumer.ask(self._answered)

    def _answered(self, answer: Grants | AuthFailed) -> None:
        self._task = None
        if self._is_closed:
            return
        now_s = self._loop.time()
        if isinstance(answer, Grants):
            self._auth.set(answer, now_s)
            self._retry_s = _RETRY_MIN_S
            self._decide()
        elif self._is_held or isinstance(answer, AuthRefused):
            self._refuse("E_AUTH_FAILED", "AUTH failed", f"AUTH failed: {answer}")
        else:
            left_s = self._auth.left_s(now_s)
            log.warning("client %s: AUTH cannot be renewed, %.0f s are left: %s", self._name, left_s, answer)
            self._at(min(self._retry_s, left_s), self._ended if left_s <= self._retry_s else self._renew)
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)

    def _decide(self) -> None:
        refusal = self._consumer.refusal()
        if refusal is not None:
            self._refuse(*refusal, refusal[1])
            return
        if self._is_held:
            self._is_held = False
            self._consumer.go_on()
        self._arm()

    def _refuse(self, code: str, detail: str, reason: str) -> None:
        self.close()
        log.info("client %s: what it was granted has ended, deliveries end: %s", self._name, reason)
        self._consumer.hold()
        self._consumer.refuse(code, detail)


__all__ = ["Consumer", "Renewal"]
