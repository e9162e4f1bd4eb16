"""Log lines of the daemons, in NSQ's format, on stderr.

::

    [nsqd] 2026/11/20 04:41:02.849159 INFO: text

Rules of this file: only daemons call :func:`configure`; libraries only get loggers. One record is one line, whatever
its text contains: control characters are shown escaped, so nothing a peer sends can fake a line. The lines of a
traceback each carry the prefix. Source: reference/nsq.md 4.3.
"""

from __future__ import annotations

import logging
import re
import sys
import time
from typing import TextIO

from flintmq.errors import OptionError

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warn": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}
"""NSQ's level words, as ``--log-level`` takes them."""

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
        whole_s = int(record.created)
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
    """The logging level of one of NSQ's level words, in any case.

    Raises:
        OptionError: not one of debug, info, warn, error, fatal.
    """
    level = LEVELS.get(word.lower())
    if level is None:
        raise OptionError("log-level", word, f"one of {', '.join(LEVELS)}")
    return level


def configure(prefix: str, level: str, stream: TextIO | None = None) -> None:
    """Send the log of this process to stderr in NSQ's format; for daemons only.

    Args:
        prefix: ``--log-prefix``, printed as it is.
        level: ``--log-level``; governs FlintMQ's own loggers, other libraries speak from ``warn`` upwards.
        stream: instead of stderr, in tests.

    Raises:
        OptionError: an unknown level.
    """
    chosen = level_of(level)
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(NsqFormatter(prefix))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(chosen, logging.WARNING))
    logging.getLogger("flintmq").setLevel(chosen)
