"""The audit log: every change, log-in and refusal, as one JSON object a line.

Rules of this file: a line is written before the visitor is answered; a file that cannot be written is told in the log
and on every page, never silently. The file is opened anew when it was moved away. Bodies, tokens and passwords are
never in it. The latest ``KEPT_MAX`` are kept in memory for the page, those from before the start too.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from logging.handlers import WatchedFileHandler
from typing import TYPE_CHECKING

import msgspec

from flintmq.env import Env
from flintmq.errors import UNREADABLE_JSON, OptionError
from flintmq.net.log import escape
from flintmq.nsqadmin.views import AuditRow

if TYPE_CHECKING:
    from collections.abc import Iterable

    from flintmq.nsqadmin.access import Visitor

KEPT_MAX = 1000
READ_BYTES_MAX = 512 * 1024
_TEXT_MAX = 500

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
        self._handler: WatchedFileHandler | None = None
        if path:
            try:
                self._handler = _File(path, self)
                self._kept.extend(_last_rows(path))
            except OSError as error:
                raise OptionError("audit_log", path, f"it cannot be opened: {error.strerror}", "argument") from error

    def note(
        self, visitor: Visitor, action: str, subject: str, outcome: str, failures: Iterable[str] = (), who: str = ""
    ) -> None:
        """Write one down.

        Args:
            who: whoever was named, where the visitor is not known.
        """
        row = AuditRow(
            at_s=self._env.clock.wall_ns() / 1e9,
            who=(visitor.name or who)[:_TEXT_MAX],
            role=visitor.role,
            how=visitor.how,
            address=visitor.address,
            action=action,
            subject=subject[:_TEXT_MAX],
            outcome=outcome,
            failures=[each[:_TEXT_MAX] for each in failures][:20],
        )
        self._kept.append(row)
        line = msgspec.json.encode(row).decode()
        if self._handler is None:
            _log.info("audit: %s", line)
            return
        self.failure = ""
        self._handler.emit(logging.LogRecord(__name__, logging.INFO, "", 0, "%s", (line,), None))

    def latest(self, count: int, text: str = "") -> list[AuditRow]:
        """Return the latest, the newest first, of which some text is part of ``text``."""
        wanted = text.lower()
        found = (
            row for row in reversed(self._kept)
            if wanted in f"{row.who} {row.action} {row.subject} {row.outcome} {row.address}".lower()
        )  # fmt: skip
        return [row for _, row in zip(range(max(0, min(count, KEPT_MAX))), found, strict=False)]

    def close(self) -> None:
        """Close the file."""
        if self._handler is not None:
            self._handler.close()


def _last_rows(path: str) -> list[AuditRow]:
    """Return the last rows of a file, as far as they are rows; none of a pipe or a terminal."""
    if not os.path.isfile(path):
        return []
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(descriptor).st_size
        data = os.pread(descriptor, READ_BYTES_MAX, max(0, size - READ_BYTES_MAX))
    finally:
        os.close(descriptor)
    found = []
    for line in data.splitlines():
        try:
            found.append(msgspec.json.decode(line, type=AuditRow))
        except UNREADABLE_JSON:
            continue  # the beginning of it is not in what was read, or it is no line of ours
    return found[-KEPT_MAX:]


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
