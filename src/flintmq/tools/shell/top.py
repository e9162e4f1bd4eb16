"""``flintmq top``: rates and depths of topics and channels, live.

Rules of this file: what is drawn is made by pure functions of two looks at ``/stats``; the terminal is put back as it
was, whatever ends it; an nsqd that does not answer is said so on the screen, and the rest stays.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import shutil
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from flintmq.errors import FlintError, UsageError
from flintmq.tools.shell.link import Link, NothingThere
from flintmq.tools.shell.output import count_of, is_terminal, plain_line, say, say_json, styled
from flintmq.tools.shell.stats import ChannelRow, rows_of
from flintmq.tools.tables import table

SORTS = ("depth", "in", "out", "lag", "requeued", "name")
_KEYS = {"d": "depth", "i": "in", "o": "out", "l": "lag", "r": "requeued", "n": "name"}
_HINT = "sort: d depth, i in, o out, l lag, r requeued, n name; space stops, q quits"
_NARROW = 72
_STDIN = 0


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all nsqd.

    Attributes:
        at: seconds on a clock that only grows.
        failures: of those that do not answer.
        nodes: HTTP addresses of those that do.
    """

    at: float
    rows: Sequence[ChannelRow]
    failures: Sequence[str] = ()
    nodes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Rate:
    """A topic or channel now, and since the look before.

    Attributes:
        incoming, outgoing: messages a second; None: there was no look before.
        lag_s: until its depth is worked off at this rate; None: nothing is.
    """

    row: ChannelRow
    incoming: float | None
    outgoing: float | None
    requeued: float | None
    lag_s: float | None

    @property
    def waiting(self) -> int:
        """Messages that are not finished."""
        return self.row.depth + self.row.in_flight_count + self.row.deferred_count


def rates(before: Look | None, now: Look) -> list[Rate]:
    """Return how everything has changed between two looks.

    A count that has become smaller is that of an nsqd that has started again: the rate is not known then.
    """
    old = {} if before is None else {(row.topic, row.channel): row for row in before.rows}
    span = 0.0 if before is None else now.at - before.at
    found = []
    for row in now.rows:
        last = old.get((row.topic, row.channel))
        if last is None or span <= 0 or row.message_count < last.message_count:
            found.append(Rate(row, None, None, None, None))
            continue
        incoming = (row.message_count - last.message_count) / span
        outgoing = max(0.0, row.finished_count - last.finished_count) / span if row.channel else None
        requeued = max(0, row.requeue_count - last.requeue_count) / span if row.channel else None
        lag = row.depth / outgoing if outgoing and row.depth else 0.0 if not row.depth else None
        found.append(Rate(row, incoming, outgoing, requeued, lag if row.channel else None))
    return found


def ordered(found: Sequence[Rate], sort: str) -> list[Rate]:
    """Return topics in an order, each followed by its channels in the same order."""

    def key(rate: Rate) -> tuple[float, str]:
        value = {
            "depth": rate.row.depth,
            "in": rate.incoming or 0.0,
            "out": rate.outgoing or 0.0,
            "lag": float("inf") if rate.row.channel and rate.row.depth and rate.lag_s is None else rate.lag_s or 0.0,
            "requeued": rate.requeued or 0.0,
            "name": 0.0,
        }[sort]
        return -value, rate.row.channel or rate.row.topic

    channels: dict[str, list[Rate]] = {}
    topics = []
    for rate in found:
        if rate.row.channel:
            channels.setdefault(rate.row.topic, []).append(rate)
        else:
            topics.append(rate)
    # a topic counts for as much as the first of its channels
    topics.sort(key=lambda topic: min([key(topic)[0], *(key(each)[0] for each in channels.get(topic.row.topic, ()))]))
    if sort == "name":
        topics.sort(key=lambda topic: topic.row.topic)
    return [each for topic in topics for each in (topic, *sorted(channels.get(topic.row.topic, ()), key=key))]


def short(number: float | None) -> str:
    """Return a number in at most six characters."""
    if number is None:
        return "-"
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= limit:
            scale = limit if unit != "k" else 1e3
            return f"{number / scale:.1f}{unit}" if number < 100 * scale else f"{number / scale:.0f}{unit}"
    return f"{number:.0f}" if number >= 10 or number == int(number) else f"{number:.1f}"


def _lag(rate: Rate) -> str:
    if not rate.row.channel:
        return "-"
    if rate.lag_s is None:
        return "stands" if rate.incoming is not None and rate.row.depth else "-"
    for limit, size, unit in ((86400.0, 86400, "d"), (3600.0, 3600, "h"), (60.0, 60, "m")):
        if rate.lag_s >= limit:
            return f"{rate.lag_s / size:.0f}{unit}"
    return f"{rate.lag_s:.0f}s" if rate.lag_s >= 10 or not rate.lag_s else f"{rate.lag_s:.1f}s"


def _name(rate: Rate) -> str:
    return plain_line(f"  {rate.row.channel}" if rate.row.channel else rate.row.topic)


def text_of(found: Sequence[Rate], width: int) -> str:
    """Return a table; a narrow one has fewer columns."""
    if width < _NARROW:
        titles: tuple[str, ...] = ("TOPIC", "IN/s", "OUT/s", "DEPTH", "LAG")
        rows = [
            (_name(each), short(each.incoming), short(each.outgoing), short(each.row.depth), _lag(each))
            for each in found
        ]
        return table(titles, rows, width)
    titles = ("TOPIC / CHANNEL", "IN/s", "OUT/s", "DEPTH", "LAG", "FLIGHT", "DEFER", "REQ/s", "CLIENTS", "")
    return table(
        titles,
        [
            (
                _name(each), short(each.incoming), short(each.outgoing), short(each.row.depth), _lag(each),
                short(each.row.in_flight_count), short(each.row.deferred_count), short(each.requeued),
                short(each.row.client_count) if each.row.channel else "-", "paused" if each.row.paused else "",
            )
            for each in found
        ],
        width,
    )  # fmt: skip


def _fields(rate: Rate) -> dict[str, Any]:
    row = rate.row
    found: dict[str, Any] = {"topic": row.topic}
    if row.channel:
        found["channel"] = row.channel
    return found | {
        "in_per_s": rate.incoming, "out_per_s": rate.outgoing, "depth": row.depth, "lag_s": rate.lag_s,
        "in_flight": row.in_flight_count, "deferred": row.deferred_count, "requeued_per_s": rate.requeued,
        "messages": row.message_count, "clients": row.client_count, "paused": row.paused,
    }  # fmt: skip


# -- the screen --------------------------------------------------------------------------------------------------------


def run(given: argparse.Namespace) -> int:
    """Show it; return the exit code.

    Raises:
        NothingThere: there is no such topic at the beginning.
        FlintError: no nsqd answers at the beginning.
    """
    link = Link(given)
    first = _look(link, given)
    if given.topic is not None and not first.rows:
        for failure in first.failures:
            link.tell(failure)
        raise NothingThere(f"{_nothing(given)} on nsqd {', '.join(first.nodes)}")
    if given.once or given.json:
        return _print(link, given, first)
    if not (is_terminal() and os.isatty(_STDIN)):
        raise UsageError("top needs a terminal; --once prints it once, --json goes on as lines")
    _Screen(link, given).run(first)
    return 0


def _look(link: Link, given: argparse.Namespace) -> Look:
    """Ask all nsqd.

    Raises:
        FlintError: none answers.
    """
    failures: list[str] = []

    def ask(admin: Any) -> Mapping[str, Any] | None:
        try:
            found: Mapping[str, Any] = admin.stats(given.topic, clients=False)
        except FlintError as error:
            failures.append(str(error))
            return None
        return found

    admins = link.nsqds(given.topic)
    answers = [(admin.address, found) for admin, found in link.each(admins, ask) if found is not None]
    if not answers:
        link.each(admins, lambda admin: admin.stats(given.topic, clients=False))  # says why, with what to do
    nodes = [address.removeprefix("http://") for address, _ in answers]
    return Look(time.monotonic(), rows_of(answers), failures, nodes)


def _nothing(given: argparse.Namespace) -> str:
    return "there are no topics" if given.topic is None else f"there is no topic {given.topic}"


def _print(link: Link, given: argparse.Namespace, before: Look) -> int:
    """Print it as lines, once or again and again."""
    left = 1 if given.once else given.count
    while left is None or left > 0:
        time.sleep(given.interval)
        now = _look(link, given)
        found = ordered(rates(before, now), given.sort)[: given.limit]
        for failure in now.failures:
            link.tell(failure)
        if given.json:
            say_json(map(_fields, found))
        elif found:
            say(text_of(found, shutil.get_terminal_size((120, 24)).columns if is_terminal() else 120))
        else:
            link.tell(_nothing(given))
        before, left = now, None if left is None else left - 1
    return 0


def _end(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    """Have keys come at once and unseen, on a screen of its own; all is put back afterwards."""
    before = termios.tcgetattr(_STDIN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        tty.setcbreak(_STDIN)
        sys.stdout.write("\x1b[?1049h\x1b[?25l")
        sys.stdout.flush()
        yield
    finally:
        termios.tcsetattr(_STDIN, termios.TCSADRAIN, before)
        with contextlib.suppress(OSError):  # the terminal may be gone
            sys.stdout.write("\x1b[?25h\x1b[?1049l")
            sys.stdout.flush()


class _Screen:
    """The live screen."""

    def __init__(self, link: Link, given: argparse.Namespace) -> None:
        self._link, self._given = link, given
        self._sort: str = given.sort
        self._from = 0
        self._is_stopped = False

    def run(self, first: Look) -> None:
        """Draw until somebody quits."""
        before, now = None, first
        try:
            with _raw_terminal():
                while True:
                    self._draw(rates(before, now), now.failures)
                    if self._wait(now, before):
                        return
                    if not self._is_stopped:
                        before, now = now, self._next(now)
        except KeyboardInterrupt:
            pass  # one of the usual ways to end it

    def _next(self, now: Look) -> Look:
        try:
            return _look(self._link, self._given)
        except FlintError as error:
            return Look(time.monotonic(), now.rows, (str(error),))

    def _wait(self, now: Look, before: Look | None) -> bool:
        """Obey keys until the next look is due; whether it is over."""
        due = time.monotonic() + self._given.interval
        while (left := due - time.monotonic()) > 0:
            if not select.select([_STDIN], [], [], left)[0]:
                continue
            keys = os.read(_STDIN, 64)
            if not keys:
                return True
            if self._obey(keys.decode("ascii", "replace")):
                return True
            self._draw(rates(before, now), now.failures)
        return False

    def _obey(self, keys: str) -> bool:
        lines = shutil.get_terminal_size().lines
        if "\x1b[B" in keys or "j" in keys:
            self._from += 1
        elif "\x1b[A" in keys or "k" in keys:
            self._from -= 1
        elif "\x1b[6~" in keys:
            self._from += lines - 3
        elif "\x1b[5~" in keys:
            self._from -= lines - 3
        for key in keys:
            if key in ("q", "\x04"):
                return True
            if key == " ":
                self._is_stopped = not self._is_stopped
            elif key in _KEYS and "\x1b" not in keys:
                self._sort, self._from = _KEYS[key], 0
        return False

    def _draw(self, found: Sequence[Rate], failures: Sequence[str]) -> None:
        columns, lines = shutil.get_terminal_size((80, 24))
        shown = ordered(found, self._sort)
        topics = [each for each in shown if not each.row.channel]
        incoming, depth = sum(each.incoming or 0 for each in topics), sum(each.row.depth for each in found)
        state = "stopped" if self._is_stopped else f"every {self._given.interval:g}s"
        head = (
            f"by {self._sort}, {state}; {count_of(len(topics), 'topic')}, {short(incoming)}/s in, depth {short(depth)}"
        )
        bad = [f"! {plain_line(failure)}" for failure in failures][: max(0, lines // 3)]
        body = text_of(shown, columns).split("\n") if shown else [_nothing(self._given)]
        room = max(1, lines - 2 - len(bad) - 1)
        self._from = max(0, min(self._from, len(body) - 1 - room))
        rows = [
            styled(head[: columns - 1], 1),
            *(styled(line[: columns - 1], 31) for line in bad),
            styled(body[0][: columns - 1], 2),
            *(line[: columns - 1] for line in body[1 + self._from : 1 + self._from + room]),
        ]
        rows += [""] * (lines - 1 - len(rows))
        rows = [*rows[: lines - 1], styled(_HINT[: columns - 1], 2)]
        sys.stdout.write("\x1b[H" + "\r\n".join(f"{row}\x1b[K" for row in rows) + "\x1b[J")
        sys.stdout.flush()
