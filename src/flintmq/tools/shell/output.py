"""Stdout and stderr of the commands for people.

Rules of this file: stdout has the answer and nothing else; colours, progress and questions are for terminals only; what
somebody else wrote (bodies, names, headers) is shown without its control characters on a terminal, for which they are
commands, and untouched everywhere else.
"""

from __future__ import annotations

import os
import re
import select
import shutil
import sys
from collections.abc import Iterable, Sequence
from time import monotonic
from typing import Any

from flintmq.errors import FlintError, UsageError
from flintmq.tools.tables import table

STDOUT = 1
WIDTH_ELSEWHERE = 120
PROGRESS_EVERY_S = 0.2
_BAR = 24
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


class OutputError(FlintError):
    """Stdout cannot be written to."""


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return os.isatty(STDOUT)


def width() -> int:
    """Columns of the terminal; 120 where stdout is none."""
    return shutil.get_terminal_size((WIDTH_ELSEWHERE, 24)).columns if is_terminal() else WIDTH_ELSEWHERE


def plain(text: str) -> str:
    """Return a text whose control characters are visible: ``\\x1b``; tabs and newlines stay."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def plain_line(text: str) -> str:
    """Return a text as one line."""
    return plain(text).replace("\n", "\\n").replace("\t", "\\t")


def plain_bytes(data: bytes) -> bytes:
    """Return bytes as a terminal may have them."""
    return plain(data.decode("utf-8", "backslashreplace")).encode()


def write_all(data: bytes) -> None:
    """Write to stdout at once.

    Raises:
        BrokenPipeError: nobody reads.
        OutputError: it cannot be written.
    """
    view = memoryview(data)
    try:
        while view:
            view = view[os.write(STDOUT, view) :]
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"the output cannot be written: {error.strerror}") from error


def is_read() -> bool:
    """Whether somebody may still read stdout; a file has no reader, and is always fine."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return not any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def json_bytes(thing: Any) -> bytes:
    """Return one line of JSON."""
    import msgspec

    return msgspec.json.encode(thing) + b"\n"


def say(text: str) -> None:
    """Print a line of the answer."""
    write_all((plain(text) + "\n").encode("utf-8", "backslashreplace"))


def say_json(things: Iterable[Any]) -> None:
    """Print things as JSON, one line each."""
    write_all(b"".join(map(json_bytes, things)))


def say_table(titles: Sequence[str], rows: Sequence[Sequence[str]], nothing: str) -> None:
    """Print rows under their titles; ``nothing`` on stderr if there are none."""
    if rows:
        say(table(titles, [[plain_line(cell) for cell in row] for row in rows], width()))
    else:
        note(nothing)


def note(text: str) -> None:
    """Say something on stderr that is not the answer."""
    sys.stderr.write(f"{plain(text)}\n")
    sys.stderr.flush()


def styled(text: str, *codes: int) -> str:
    """Return a text with colours, where stdout is a terminal that wants some."""
    if not is_terminal() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{';'.join(map(str, codes))}m{text}\x1b[0m"


class Progress:
    """A line on stderr that says how far a long work is; nothing where that is no terminal.

    Args:
        what: is counted, such as ``messages copied``.
        total: None: nobody knows.
    """

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._is_shown = sys.stderr.isatty()
        self._began = self._said_at = monotonic()
        self._is_there = False

    def at(self, done: int) -> None:
        """Say how far it is, now and then."""
        now = monotonic()
        if not self._is_shown or now - self._said_at < PROGRESS_EVERY_S:
            return
        self._said_at = now
        self._is_there = True
        text = f"{done:,} {self._what}, {done / max(now - self._began, 1e-9):,.0f}/s"
        if self._total:
            share = min(1.0, done / self._total)
            text = f"[{'#' * round(share * _BAR):<{_BAR}}] {share:4.0%} {text}"
        columns = shutil.get_terminal_size((80, 24)).columns - 1
        sys.stderr.write(f"\r\x1b[K{text[:columns]}")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self._is_there:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_there = False


def confirm(question: str, is_yes: bool) -> None:
    """Ask before something is lost; go on only with a yes.

    Args:
        question: names what will be lost.
        is_yes: it was said on the command line.

    Raises:
        UsageError: nobody can be asked.
        NotConfirmed: the answer is no.
    """
    if is_yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UsageError(f"{plain_line(question)}: say --yes if that is meant; there is no terminal to ask on")
    sys.stderr.write(f"{plain(question)}. Go on? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise NotConfirmed("nothing is changed")


class NotConfirmed(FlintError):
    """Somebody was asked, and said no."""


def count_of(number: int, what: str) -> str:
    """Return ``1 message`` or ``2 messages``."""
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
