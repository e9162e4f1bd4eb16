"""What a consumer takes whose handlers are too slow for it, on a made-up clock."""

from __future__ import annotations

import pytest

from flintmq.client.core.pace import PATIENCE_MAX, Pace

TIMEOUT_S = 60.0
MOST = 200


class Handlers:
    """So many handlers, each of which takes its time, and a queue in front of them.

    Args:
        count: of handlers.
        each_s: that one needs for a message.
    """

    def __init__(self, count: int, each_s: float) -> None:
        self.pace = Pace()
        self.each_s = each_s
        self.now = 0.0
        self.dropped = 0
        self.finished = 0
        self._free_at = [0.0] * count
        self._queue: list[float] = []
        self._busy: list[float] = []

    def run(self, seconds: float) -> int:
        """Go on; return how many messages waited for too long meanwhile."""
        before = self.dropped
        step_s = min(self.each_s, 1.0)
        for _ in range(round(seconds / step_s)):
            self.now += step_s
            self._step()
        return self.dropped - before

    def _step(self) -> None:
        ended = [at for at in self._busy if at <= self.now]
        self._busy = [at for at in self._busy if at > self.now]
        if ended:
            self.finished += len(ended)
            self.pace.handled(len(ended), TIMEOUT_S, MOST)
        late = [at for at in self._queue if self.now - at >= TIMEOUT_S]
        if late:
            self.dropped += len(late)
            self._queue = [at for at in self._queue if self.now - at < TIMEOUT_S]
            self.pace.too_late(self.now, TIMEOUT_S, MOST)
        for number, free_at in enumerate(self._free_at):
            if free_at <= self.now and self._queue:
                if self.pace.limit is not None:
                    self.pace.began(self.now - self._queue[0])
                self._queue.pop(0)
                self._free_at[number] = self.now + self.each_s
                self._busy.append(self._free_at[number])
        room = (MOST if self.pace.limit is None else self.pace.limit) - len(self._queue) - len(self._busy)
        if room > 0:
            self.pace.read(self.now, TIMEOUT_S)
            self._queue += [self.now] * room


@pytest.mark.parametrize(("count", "each_s"), [(1, 0.05), (1, 0.25), (10, 2.0)])
def test_who_keeps_up_has_no_limit(count: int, each_s: float):
    handlers = Handlers(count, each_s)
    assert handlers.run(10 * TIMEOUT_S) == 0 and handlers.pace.limit is None


@pytest.mark.parametrize(("count", "each_s"), [(1, 1.0), (1, 7.0), (10, 20.0), (50, 45.0)])
def test_nothing_waits_too_long_after_the_first_time(count: int, each_s: float):
    handlers = Handlers(count, each_s)
    assert handlers.run(2.5 * TIMEOUT_S) > 0
    before = handlers.finished
    assert handlers.run(20 * TIMEOUT_S) == 0
    in_time = count * 20 * TIMEOUT_S / each_s
    assert handlers.finished - before >= 0.7 * in_time, "and hardly less is handled"


@pytest.mark.parametrize("each_s", [70.0, 300.0])
def test_who_needs_longer_than_the_timeout_has_ever_fewer_wait_in_vain(each_s: float):
    """It touches what it has; whatever waits behind that is too late."""
    handlers = Handlers(1, each_s)
    handlers.run(10 * each_s)
    assert handlers.pace.limit in (1, 2)
    before = handlers.finished
    wasted = handlers.run(60 * each_s)
    assert wasted <= (handlers.finished - before) / 8
    wasted = handlers.run(2 * PATIENCE_MAX * each_s)
    assert wasted <= 3


def test_who_is_quick_again_soon_has_no_limit():
    handlers = Handlers(1, 5.0)
    handlers.run(3 * TIMEOUT_S)
    assert handlers.pace.limit is not None and handlers.pace.limit <= 12
    handlers.each_s = 0.05
    assert handlers.run(2 * TIMEOUT_S) == 0
    assert handlers.pace.limit is None


def test_who_stood_still_for_once_takes_what_it_took():
    pace = Pace()
    now = 0.0
    while now < 2 * TIMEOUT_S:
        now += 0.1
        pace.read(now, TIMEOUT_S)
        pace.handled(10, TIMEOUT_S, MOST)
    pace.too_late(now + 2 * TIMEOUT_S, TIMEOUT_S, MOST)
    assert pace.limit is None, "it handles far more than that in a timeout"
