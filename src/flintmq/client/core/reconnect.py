"""Targets that are to be connected, and when each is tried. Connecting itself is the shell's.

A target is an address, or a partition on an address (:class:`flintmq.client.core.routing.Target`): one connection each.

Rules of this file:

- The first attempt after a loss comes within 1 s, later ones less and less often, with jitter.
- While something waits for a connection (a publish), attempts come within 1 s of each other, however often they failed;
  what begins to wait later has the next one 1 s after the last one at the latest, so at once most often.
- A target that is no longer listed stays connected as long as its connection holds, and is not tried again after that.
- A failure is told at length once; while it stays the same only now and then (:class:`FailureLog`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from flintmq.client.core.backoff import ReconnectDelay, wanted_s
from flintmq.client.core.timers import Timer, Timers
from flintmq.env import Env
from flintmq.errors import FlintError

TOLD_EVERY_S = 15.0
TOLD_COUNT_MAX = 10_000

Key = TypeVar("Key", bound=Hashable)


class Reconnector(Generic[Key]):
    """The targets that should be connected.

    Args:
        connect: begins to connect to a target; :meth:`opened` or :meth:`failed` is to follow, unless it raises.
        is_wanted: whether something waits for a connection now.

    Attributes:
        listed: what is wanted now.
        is_stopped: nothing is connected any more.
    """

    def __init__(self, connect: Callable[[Key], object], env: Env, is_wanted: Callable[[], bool] = bool) -> None:
        self.listed: tuple[Key, ...] = ()
        self.is_stopped = False
        self._connect = connect
        self._env = env
        self._is_wanted = is_wanted
        self._timers: Timers | None = None
        self._states: dict[Key, _State[Key]] = {}

    def start(self, timers: Timers) -> None:
        """Begin, with these timers."""
        self._timers = timers

    @property
    def are_all_tried(self) -> bool:
        """Whether every target was tried once."""
        return all(state.was_tried for state in self._states.values())

    def keep(self, targets: Iterable[Key]) -> None:
        """Want these targets from now on, and no others."""
        if self.is_stopped:
            return
        self.listed = tuple(dict.fromkeys(targets))
        for target in [target for target, state in self._states.items() if not state.is_busy]:
            if target not in self.listed:
                del self._states[target]
        for target in self.listed:
            if target not in self._states:
                state = self._states[target] = _State(target)
                self._try(state)

    def opened(self, target: Key) -> None:
        """Note that a target is connected, until :meth:`lost`."""
        if (state := self._states.get(target)) is not None:
            state.was_tried = True

    def failed(self, target: Key) -> None:
        """Note that a target could not be connected."""
        if (state := self._states.get(target)) is not None:
            state.was_tried = True
            self._try_later(state)

    def lost(self, target: Key, lived_s: float, at_once: bool = False) -> None:
        """Note that a connection is gone.

        Args:
            lived_s: how long it could be used.
            at_once: connect again without delay, because nsqd is well.
        """
        state = self._states.get(target)
        if state is None:
            return
        if at_once:
            state.is_busy = False
            self._try(state)
        else:
            self._try_later(state, lived_s)

    def hasten(self) -> None:
        """Note that something waits for a connection from now on."""
        assert self._timers is not None
        now = self._timers.time()
        for state in [*self._states.values()]:
            if state.timer is not None and not state.is_busy and state.wanted_at < state.due_at:
                state.timer.cancel()
                state.due_at = max(now, state.wanted_at)
                state.timer = self._timers.call_at(state.due_at, self._try, state)

    def forget(self, target: Key) -> None:
        """Note that connecting to a target has ended by a mistake of ours: it is tried again when it is listed anew."""
        self._states.pop(target, None)

    def stop(self) -> None:
        """Connect no more; connections that are there stay."""
        self.is_stopped = True
        self.listed = ()

    def _try_later(self, state: _State[Key], lived_s: float = 0.0) -> None:
        state.is_busy = False
        if self.is_stopped:
            return
        assert self._timers is not None
        chance = self._env.random.random()
        delay_s = state.delay.next_s(chance, lived_s)
        now = self._timers.time()
        state.wanted_at = now + wanted_s(delay_s, chance)
        state.due_at = state.wanted_at if self._is_wanted() else now + delay_s
        state.timer = self._timers.call_at(state.due_at, self._try, state)

    def _try(self, state: _State[Key]) -> None:
        state.timer = None
        if self.is_stopped or self._states.get(state.target) is not state or state.is_busy:
            return
        if state.target not in self.listed:
            del self._states[state.target]
            return
        state.is_busy = True
        try:
            self._connect(state.target)
        except BaseException:  # Ctrl-C, say, before it began: nothing is to follow
            self._try_later(state)
            raise


class _State(Generic[Key]):
    """One target.

    Attributes:
        is_busy: it is being connected, or is connected.
        timer: tries it at ``due_at``; None: nothing is planned.
        wanted_at: when it may be tried if something waits for it.
    """

    __slots__ = ("target", "delay", "is_busy", "was_tried", "timer", "due_at", "wanted_at")

    def __init__(self, target: Key) -> None:
        self.target = target
        self.delay = ReconnectDelay()
        self.is_busy = False
        self.was_tried = False
        self.timer: Timer | None = None
        self.due_at = 0.0
        self.wanted_at = 0.0


class FailureLog:
    """Says which failures are worth a line, to connect or to find a topic: new ones, and those that last every
    ``TOLD_EVERY_S``.
    """

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}

    def is_new(self, what: str, error: FlintError, now: float) -> bool:
        """Whether a failure is to be told.

        Args:
            what: has failed: an address, a topic.
            now: seconds on the owner's clock.
        """
        text, told_at = self._told.get(what, ("", 0.0))
        if text == str(error) and now < told_at + TOLD_EVERY_S:
            return False
        self._told.pop(what, None)
        self._told[what] = str(error), now
        while len(self._told) > TOLD_COUNT_MAX:
            del self._told[next(iter(self._told))]
        return True

    def last(self, what: str) -> str:
        """Return how it failed last, empty: it is well, or was not tried."""
        return self._told.get(what, ("", 0.0))[0]

    def clear(self, what: str) -> None:
        """Note that it is well again."""
        self._told.pop(what, None)
