"""Log lines of the daemons, in NSQ's format, on stderr or in a file.

::

    [nsqd] 2026/11/20 04:41:02.849159 INFO: text

With a file, stderr still gets what whoever started the daemon waits for: where it listens, and why it ended.

Rules of this file: only daemons call :func:`configure`; libraries only get loggers. One record is one line, whatever
its text contains: control characters are shown escaped, so nothing a peer sends can fake a line. The lines of a
traceback each carry the prefix. Source: NSQ's options.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import time
from collections.abc import Callable
from io import BufferedWriter, FileIO, TextIOWrapper
from typing import TextIO

from flintmq.errors import FlintError, OptionError

LOG_FILE_HELP = "file to append the log to, which SIGHUP opens anew; stderr then has only addresses and fatal errors"

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""NSQ's level words, as ``--log-level`` takes them."""

_log = logging.getLogger(__name__)
_WORDS = {
    logging.DEBUG: "DEBUG",
    logging.INFO: "INFO",
    logging.WARNING: "WARNING",
    logging.ERROR: "ERROR",
    logging.CRITICAL: "FATAL",
}
# C0, DEL, C1, line and paragraph separators, characters that reorder text, and lone surrogates (undecodable bytes).
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    if 0xDC80 <= code <= 0xDCFF:  # a byte that was not UTF-8, carried by surrogateescape
        return f"\\x{code - 0xDC00:02x}"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def escape(text: str) -> str:
    """Show control characters, line separators and undecodable bytes as ``\\xNN`` or ``\\uNNNN``."""
    return _UNSAFE.sub(_escape, text)


class NsqFormatter(logging.Formatter):
    """Formats a record as NSQ's daemons do.

    Args:
        prefix: what every line starts with, such as ``"[nsqd] "``.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = escape(prefix)

    def format(self, record: logging.LogRecord) -> str:
        whole_s = math.floor(record.created)  # also before 1970
        micros = int((record.created - whole_s) * 1_000_000)  # cut, not rounded: 0.9999996 s is not 1000000 us
        stamp = time.strftime("%Y/%m/%d %H:%M:%S", time.localtime(whole_s))
        word = _WORDS.get(record.levelno, record.levelname)
        start = f"{self._prefix}{stamp}.{micros:06d} {word}: "
        lines = [start + escape(record.getMessage())]
        if record.exc_info:
            trace = self.formatException(record.exc_info).splitlines()
            lines.extend(f"{start}  {escape(line)}" for line in trace)
        return "\n".join(lines)


def level_of(word: str) -> int:
    """Return the logging level of one of NSQ's level words, in any case.

    Raises:
        OptionError: not one of debug, info, warn, error, fatal.
    """
    level = LEVELS.get(word.lower())
    if level is None:
        raise OptionError("log-level", word, f"one of {', '.join(LEVELS)}")
    return level


class LogFileFailed(FlintError):
    """The log file cannot be opened.

    Args:
        path: ``--log-file``.
        reason: what the operating system said.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path = path
        self.reason = reason

    def __str__(self) -> str:
        return f"cannot open the log file {self.path} - {self.reason}; its directory must exist"


class LogFile(logging.FileHandler):
    """Appends to a file that may be renamed at any time: after :meth:`reopen` there is a new one under its name.

    A line that cannot be written is told on stderr, once until one can be written again; the daemon goes on.

    Raises:
        LogFileFailed: it cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self._is_failing = False
        try:
            super().__init__(path, encoding="utf-8", errors="backslashreplace")
        except OSError as error:
            raise LogFileFailed(path, error.strerror or str(error)) from error

    def reopen(self) -> None:
        """Go on in the file that now has the name.

        Raises:
            OSError: there is none and it cannot be made; the old one stays in use.
        """
        opened = self._open()
        self.acquire()
        try:
            before, self.stream = self.stream, opened
        finally:
            self.release()
        if before is not None:
            before.close()

    def _open(self) -> TextIOWrapper:
        """Open the file: a new one is for its owner and their group, one that is there keeps its mode."""
        descriptor = os.open(self.baseFilename, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)
        return TextIOWrapper(BufferedWriter(FileIO(descriptor, "a")), encoding=self.encoding, errors=self.errors)

    def emit(self, record: logging.LogRecord) -> None:
        stream = self.stream
        if stream is None:
            return  # the process ends, and logging has closed it
        try:
            stream.write(self.format(record) + self.terminator)
            stream.flush()
        except OSError as error:
            if not self._is_failing:
                sys.stderr.write(f"cannot write the log file {self.baseFilename} - {error.strerror or error}\n")
            self._is_failing = True
        else:
            self._is_failing = False


_ANNOUNCEMENT = {"is_announcement": True}


def announce(log: logging.Logger, what: str, address: str) -> None:
    """Log the line that scripts wait for; it also goes to stderr when the log is in a file.

    Args:
        what: TCP, HTTP or HTTPS.
        address: the real one: ``ip:port`` or the path of a unix socket.
    """
    log.info("%s: listening on %s", what, address, extra=_ANNOUNCEMENT)


def _is_for_everybody(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.CRITICAL or hasattr(record, "is_announcement")


def configure(prefix: str, level: str, stream: TextIO | None = None, path: str = "") -> Callable[[], None]:
    """Send the log of this process to stderr or a file in NSQ's format; for daemons only.

    Args:
        prefix: ``--log-prefix``, printed as it is.
        level: ``--log-level``; governs FlintMQ's own loggers, other libraries speak from ``warn`` upwards.
        stream: instead of stderr, in tests.
        path: ``--log-file``; empty for stderr.

    Returns:
        What to do when SIGHUP asks for the log to be opened anew.

    Raises:
        OptionError: an unknown level.
        LogFileFailed: the file cannot be opened.
    """
    chosen = level_of(level)
    log_file = LogFile(path) if path else None
    handlers: list[logging.Handler] = [logging.StreamHandler(stream if stream is not None else sys.stderr)]
    if log_file is not None:
        handlers[0].addFilter(_is_for_everybody)
        handlers.append(log_file)
    for handler in handlers:
        handler.setFormatter(NsqFormatter(prefix))
    root = logging.getLogger()
    root.handlers[:] = handlers
    root.setLevel(max(chosen, logging.WARNING))
    logging.getLogger("flintmq").setLevel(chosen)
    return lambda: _reopen(log_file)


def _reopen(log_file: LogFile | None) -> None:
    if log_file is None:
        _log.info("SIGHUP: nothing to reopen, the log is on stderr")
        return
    try:
        log_file.reopen()
    except OSError as error:
        _log.error("SIGHUP: the log goes on in the old file, %s cannot be opened - %s", log_file.baseFilename, error)
    else:
        _log.info("SIGHUP: log file reopened")
