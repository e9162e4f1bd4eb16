"""The audit log: every change, log-in and refusal of a change, as one JSON object a line.

Rules of this file:

- A line is written before the visitor is answered; a file that cannot be written is told in the log and on every page,
  never silently. The file is opened anew when it was moved away. Bodies, tokens and passwords are never in it.
- Whoever reaches the port can be refused as often as they like. So refusals of strangers, failed log-ins among them,
  have ``LINES_AT_ONCE`` lines an address, then ``LINES_PER_MINUTE``, and the others are one line a minute with their
  number. It is written with the next line, look or end after that minute; no task waits for it.
- The latest ``KEPT_MAX`` are kept in memory for the page, those from before the start too. Refusals of strangers are
  kept apart, so that they displace none; when the file is read back, it is read until it has that many without them.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING

import msgspec

from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, OptionError
from flintmq.net.http_auth import failure_address
from flintmq.net.log import escape
from flintmq.nsqadmin.access import NAME_SIZE_MAX
from flintmq.nsqadmin.views import AuditRow
from flintmq.options import MINUTE

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flintmq.nsqadmin.access import Visitor

KEPT_MAX = 1000
STRANGERS_KEPT_MAX = 200
READ_BYTES_MAX = 32 * 1024 * 1024
LINES_AT_ONCE = 20
LINES_PER_MINUTE = 3
ADDRESS_COUNT_MAX = 256
_PIECE_BYTES = 256 * 1024
_LINE_BYTES_MAX = 128 * 1024
_TEXT_MAX = 500
_OTHERS = ""

_log = logging.getLogger(__name__)


class Audit:
    """Writes.

    Args:
        path: of the file; empty: only the log has the lines.

    Attributes:
        failure: why the last line could not be written; empty: it was.

    Raises:
        OptionError: the file cannot be opened.
    """

    def __init__(self, path: str, env: Env) -> None:
        self.path = path
        self.failure = ""
        self._env = env
        self._kept: deque[AuditRow] = deque(maxlen=KEPT_MAX)
        self._strangers: deque[AuditRow] = deque(maxlen=STRANGERS_KEPT_MAX)
        self._tally = _Tally(env.clock.monotonic_ns())
        self._handler: WatchedFileHandler | None = None
        if path:
            try:
                self._handler = _File(path, self)
                self._read_back(path)
            except OSError as error:
                raise OptionError("audit_log", path, f"it cannot be opened: {error.strerror}", "argument") from error

    def note(
        self, visitor: Visitor, action: str, subject: str, outcome: str, failures: Iterable[str] = (), who: str = ""
    ) -> None:
        """Write one down; of refusals of strangers only their number, where there are too many from one address.

        Args:
            who: whoever was named, where the visitor is not known.
        """
        now_ns = self._env.clock.monotonic_ns()
        self._settle(now_ns)
        row = AuditRow(
            at_s=self._env.clock.wall_ns() / 1e9,
            who=visitor.name[:_TEXT_MAX] or who[:NAME_SIZE_MAX],
            role=visitor.role,
            how=visitor.how,
            address=visitor.address,
            action=action,
            subject=subject[:_TEXT_MAX],
            outcome=outcome,
            failures=[each[:_TEXT_MAX] for each in failures][:20],
            is_known=visitor.is_known,
            forwarded_for=visitor.forwarded_for,
        )
        if not _is_strangers(row) or self._tally.takes(failure_address(visitor.source), row, now_ns):
            self._write(row)

    def _settle(self, now_ns: int) -> None:
        for row in self._tally.settle(now_ns):
            self._write(row)

    def _kept_with(self, row: AuditRow) -> deque[AuditRow]:
        return self._strangers if _is_strangers(row) else self._kept

    def _write(self, row: AuditRow) -> None:
        self._kept_with(row).append(row)
        line = msgspec.json.encode(row).decode()
        if self._handler is None:
            _log.info("audit: %s", line)
            return
        self.failure = ""
        self._handler.emit(logging.LogRecord(__name__, logging.INFO, "", 0, "%s", (line,), None))

    def latest(self, count: int, text: str = "") -> list[AuditRow]:
        """Return the latest, the newest first, which have some text in them.

        Args:
            count: at most so many, up to ``KEPT_MAX``; refusals of strangers come on top, as many again at most, and up
                to ``STRANGERS_KEPT_MAX``.
        """
        self._settle(self._env.clock.monotonic_ns())
        wanted, most = text.lower(), max(0, count)
        found = [
            row
            for kept in (self._kept, self._strangers)
            for row in islice((row for row in reversed(kept) if wanted in _searched(row)), most)
        ]
        return sorted(found, key=lambda row: row.at_s, reverse=True)

    def _read_back(self, path: str) -> None:
        """Keep the last rows of a file, as far as they are rows; none of a pipe or a terminal."""
        if not os.path.isfile(path):
            return
        for line in _lines_back(path):
            try:
                row = msgspec.json.decode(line, type=AuditRow)
            except UNREADABLE_JSON:
                continue  # the beginning of it is not in what was read, or it is no line of ours
            kept = self._kept_with(row)
            if len(kept) < (kept.maxlen or 0):
                kept.appendleft(row)
            if len(self._kept) == KEPT_MAX:
                return

    def close(self) -> None:
        """Write what was only counted so far, and close the file."""
        for row in self._tally.take():
            self._write(row)
        if self._handler is not None:
            self._handler.close()


def _is_strangers(row: AuditRow) -> bool:
    """Whether anybody who reaches the port could have as many rows like this one as they like."""
    return row.outcome == "refused" and (not row.is_known or row.action == "log_in_failed")


def _searched(row: AuditRow) -> str:
    return f"{row.who} {row.action} {row.subject} {row.outcome} {row.forwarded_for} {row.address}".lower()


def _lines_back(path: str) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first, as far as they are in its last ``READ_BYTES_MAX``."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        end = os.fstat(descriptor).st_size
        floor, rest = max(0, end - READ_BYTES_MAX), b""
        while end > floor:
            begin = max(floor, end - _PIECE_BYTES)
            rest, *lines = (os.pread(descriptor, end - begin, begin) + rest).split(b"\n")
            yield from reversed(lines)
            if len(rest) > _LINE_BYTES_MAX:
                rest = b""  # no line of ours is that long
            end = begin
        yield rest
    finally:
        os.close(descriptor)


@dataclass(slots=True)
class _Count:
    """Lines that an address may still have, as of a time; how many it did not get, and what the last was about."""

    left: float
    at_ns: int
    more: int = 0
    last: AuditRow | None = None


class _Tally:
    """Counts refusals of strangers by address, and says which have a line of their own.

    Addresses beyond the first ``ADDRESS_COUNT_MAX`` are counted together; one that is quiet is forgotten.
    """

    def __init__(self, now_ns: int) -> None:
        self._counts: dict[str, _Count] = {}
        self._settled_ns = now_ns

    def takes(self, address: str, row: AuditRow, now_ns: int) -> bool:
        """Whether this one is written down; otherwise it is counted."""
        if address not in self._counts and len(self._counts) >= ADDRESS_COUNT_MAX:
            address = _OTHERS
        count = self._counts.setdefault(address, _Count(LINES_AT_ONCE, now_ns))
        _regain(count, now_ns)
        if count.left >= 1:
            count.left -= 1
            return True
        count.more += 1
        count.last = row
        return False

    def settle(self, now_ns: int) -> list[AuditRow]:
        """Return what :meth:`take` does where a minute has passed since, else nothing."""
        if now_ns - self._settled_ns < MINUTE:
            return []
        self._settled_ns = now_ns
        for address, count in list(self._counts.items()):
            _regain(count, now_ns)
            if not count.more and count.left >= LINES_AT_ONCE:
                del self._counts[address]
        return self.take()

    def take(self) -> list[AuditRow]:
        """Return a row for each address of which some were only counted; count from 0 again."""
        found = []
        for count in self._counts.values():
            if count.last is not None:
                found.append(_more(count.last, count.more))
                count.more, count.last = 0, None
        return found


def _regain(count: _Count, now_ns: int) -> None:
    count.left = min(LINES_AT_ONCE, count.left + (now_ns - count.at_ns) / MINUTE * LINES_PER_MINUTE)
    count.at_ns = now_ns


def _more(last: AuditRow, count: int) -> AuditRow:
    """Return the row for so many that have none; time and address are those of the last of them."""
    why = f"{LINES_AT_ONCE} at once are written down for an address, then {LINES_PER_MINUTE} a minute; these are more"
    return msgspec.structs.replace(
        last,
        who="",
        role="none",
        how="open",
        action="more_refusals",
        subject=str(count),
        failures=[why],
        is_known=False,
    )


class _File(WatchedFileHandler):
    """The file; whoever wrote last is told that it did not work."""

    def __init__(self, path: str, audit: Audit) -> None:
        super().__init__(path, encoding="utf-8")
        self._audit = audit

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's word
        import sys

        error = sys.exc_info()[1]
        self._audit.failure = f"the audit log {self._audit.path} cannot be written: {error}"
        _log.error("%s; what was to be written: %s", escape(self._audit.failure), record.getMessage())


__all__ = ["Audit"]
