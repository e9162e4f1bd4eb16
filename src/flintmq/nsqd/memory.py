"""The memory that nsqd lets clients use: the default of ``--memory-budget``, and what is done when it is short.

Rules of this file: what is read of the system is a number or nothing; while memory is not short nothing here runs.

Source: https://docs.kernel.org/admin-guide/cgroup-v2.html (memory.max), cgroup-v1/memory.html (memory.limit_in_bytes).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from flintmq.broker.broker import Broker
from flintmq.broker.channel import Channel
from flintmq.budget import Budget, Holder, Sender
from flintmq.limits import MEMORY_BUDGET_MAX, MEMORY_BUDGET_MIN
from flintmq.net.isolation import for_each

log = logging.getLogger(__name__)

SHARE = 4  # of the memory there is: a quarter
LOOK_S = 0.02  # between two looks while memory is short
INPUT_LOOK_S = 0.1  # and while connections are not read because of what they have sent
UNREAD_S_MAX = 5.0  # before a connection is closed whose output others wait for
STALLED_S_MAX = 5.0  # without a byte, or a turn, before connections are refused whose parts of bodies others wait for
OPEN_S_MAX = 30.0  # for one body, likewise
_ENOUGH = 0.5  # of what may be used: connections are closed until it is no more
_FILE_BYTES_MAX = 64 * 1024
_CONTROLLERS = ((2, "memory.max"), (1, "memory.limit_in_bytes"))


class Loop(Protocol):
    """Of an event loop what is needed here."""

    def time(self) -> float: ...

    def call_later(self, delay: float, callback: Callable[[], object]) -> object: ...


def default_budget_bytes(root: str = "/") -> int:
    """A quarter of the memory that this process may use, between bounds.

    Args:
        root: of the file system, for tests.
    """
    return min(MEMORY_BUDGET_MAX, max(MEMORY_BUDGET_MIN, memory_bytes(root) // SHARE))


def memory_bytes(root: str = "/") -> int:
    """The machine's memory, or the limit of the control group that this process is in, whichever is less."""
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *_group_limits(root)])


def _group_limits(root: str) -> Iterator[int]:
    """The limits of the group and those around it: in a container the innermost may be the root of what is seen."""
    for version, group in _groups(root):
        base = os.path.join(root, "sys/fs/cgroup") if version == 2 else os.path.join(root, "sys/fs/cgroup/memory")
        name = _CONTROLLERS[0][1] if version == 2 else _CONTROLLERS[1][1]
        directory = os.path.join(base, group.strip("/")).rstrip("/")
        while len(directory) >= len(base):
            limit = _number_in(os.path.join(directory, name))
            if limit is not None:
                yield limit
            directory = os.path.dirname(directory)


def _groups(root: str) -> Iterator[tuple[int, str]]:
    for line in (_read(os.path.join(root, "proc/self/cgroup")) or "").splitlines():
        number, controllers, group = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            yield 2, group
        elif "memory" in controllers.split(","):
            yield 1, group


def _number_in(path: str) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.isdigit() else None


def _read(path: str) -> str | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, _FILE_BYTES_MAX).decode("utf-8", "replace")
        finally:
            os.close(descriptor)
    except OSError:
        return None


class MemoryWatch:
    """Lets deliveries and publishes go on when memory is free again, and frees some when peers do not go on.

    Args:
        schedule: ends the turn soon, so that marked channels are looked at.
    """

    def __init__(self, budget: Budget, broker: Broker, loop: Loop, schedule: Callable[[], None]) -> None:
        self._budget = budget
        self._broker = broker
        self._loop = loop
        self._schedule = schedule
        self._is_on = False
        self._is_watching_input = False
        budget.on_receiving = self._begin_input

    def begin(self) -> None:
        """Memory is short; ask who has not shown that it reads, and watch it."""
        if self._budget.to_ask:
            self._ask()
        if self._is_on:
            return
        self._is_on = True
        for holder in self._budget.holders:
            holder.meter.unmark()
        self._loop.call_later(0, self._look)

    def _look(self) -> None:
        budget, now_s = self._budget, self._loop.time()
        self._count(budget.holders, now_s)
        if budget.is_full and budget.waiting:
            self._close_unread(now_s, budget.output_max_bytes)
        elif budget.newcomers and budget.output_bytes >= budget.newcomers_max_bytes:
            self._close_unread(now_s, budget.output_short_bytes)
        if budget.waiting and not budget.is_full:
            waiting, budget.waiting = budget.waiting, {}
            for channel in waiting:
                if isinstance(channel, Channel) and self._broker.has(channel):
                    self._broker.mark(channel)
            self._schedule()
        if budget.newcomers and budget.output_bytes < budget.newcomers_max_bytes:
            newcomers, budget.newcomers = budget.newcomers, {}
            self._count(newcomers, now_s)  # in the order of their coming
        if budget.is_short or budget.waiting:
            self._ask()
            self._loop.call_later(LOOK_S, self._look)
            return
        self._is_on = False
        budget.to_ask.clear()
        held_back, budget.held_back = budget.held_back, {}
        self._count(held_back, now_s)  # as above
        self._count(budget.holders, now_s)  # once more: those looked at first had to wait still

    def _ask(self) -> None:
        """Ask those that have been held back since the last time whether they read."""
        to_ask, self._budget.to_ask = self._budget.to_ask, {}
        for_each(to_ask, lambda each: each.ask_whether_it_reads(), "asking whether it reads:")

    def _count(self, holders: Iterable[Holder], now_s: float) -> None:
        for_each(holders, lambda holder: holder.look_at_output(now_s), "counting the output of")

    def _close_unread(self, now_s: float, max_bytes: int) -> None:
        """Close connections that do not read, those that hold most first, until less than ``max_bytes`` is used."""
        budget = self._budget
        unread = [each for each in budget.holders if each.meter.unread_for_s(now_s) >= UNREAD_S_MAX]
        unread.sort(key=lambda each: each.meter.held_bytes, reverse=True)
        left_bytes = budget.output_bytes
        for holder in unread:
            if left_bytes <= _ENOUGH * max_bytes:
                break
            left_bytes -= holder.meter.held_bytes
            self._close(holder)

    def _close(self, holder: Holder) -> None:
        budget = self._budget
        log.warning(
            "client %s has not read %d bytes in %.0f s, and others wait for memory (%d of %d bytes are unread output, "
            "see --memory-budget): closing",
            holder.peer,
            holder.meter.held_bytes,
            UNREAD_S_MAX,
            budget.output_bytes,
            budget.output_max_bytes,
        )
        budget.closed_count += 1
        for_each((holder,), lambda each: each.abort(), "closing")

    # -- bodies that are not complete --------------------------------------------------------------------------------

    def _begin_input(self) -> None:
        """Connections are not read because of what they have sent of a body; refuse some when it is far too much."""
        budget = self._budget
        if budget.receiving_bytes > budget.receiving_full_bytes:
            self._refuse(budget.excess_senders(), 0)
        if not self._is_watching_input:
            self._is_watching_input = True
            for sender in budget.senders:
                sender.input_meter.unmark()
            self._loop.call_later(0, self._look_at_input)

    def _look_at_input(self) -> None:
        budget, now_s = self._budget, self._loop.time()
        if budget.has_paused:
            for sender in budget.senders:
                sender.input_meter.look(now_s)
            is_stuck = budget.has_paused_for(STALLED_S_MAX, now_s)
            stalled = [each for each in budget.senders if is_stuck or _has_stalled(each, now_s)]
            stalled.sort(key=lambda each: each.input_meter.held_bytes, reverse=True)
            self._refuse(stalled, int(_ENOUGH * budget.receiving_short_bytes))
            budget.resume_senders()
        self._is_watching_input = budget.has_paused
        if self._is_watching_input:
            self._loop.call_later(INPUT_LOOK_S, self._look_at_input)

    def _refuse(self, senders: Iterable[Sender], until_bytes: int) -> None:
        """Refuse connections that sent parts of bodies, in their order, until there are so many bytes."""
        budget = self._budget
        receiving_bytes, count = budget.receiving_bytes, 0
        for sender in senders:
            if budget.receiving_bytes <= until_bytes:
                break
            reason = (
                f"{sender.input_meter.held_bytes} bytes have come of a body that is not complete, and others wait for "
                f"memory ({budget.receiving_bytes} of {budget.receiving_max_bytes} bytes for such are used, see "
                "--memory-budget): send it again, and all of it"
            )
            log.info("client %s: %s: closing", sender.peer, reason)
            count += 1
            for_each((sender,), lambda each, reason=reason: each.refuse_input(reason), "refusing")  # type: ignore[misc]
        if count:
            budget.refused_count += count
            log.warning(
                "%d of %d bytes for bodies that are not complete were used (--memory-budget): refused %d connections "
                "that had sent %d bytes of such",
                receiving_bytes,
                budget.receiving_max_bytes,
                count,
                receiving_bytes - budget.receiving_bytes,
            )


def _has_stalled(sender: Sender, now_s: float) -> bool:
    """Whether a connection could go on and does not."""
    meter = sender.input_meter
    if meter.is_paused or not sender.is_awaited:
        return False
    return meter.stalled_for_s(now_s) >= STALLED_S_MAX or meter.open_for_s(now_s) >= OPEN_S_MAX
