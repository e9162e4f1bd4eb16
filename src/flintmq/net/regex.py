"""Regular expressions for topic and channel names, and for headers: Go's syntax, matched in linear time.

RE2, of which Go's are a port, does the work (the package google-re2); it is imported when the first pattern needs it.
What is no pattern at all needs none: a name, with ``^`` and ``$`` or without, and ``.*``. Without the package any other
one is refused. Python's own :mod:`re` is no way out: it backtracks, so one pattern such as ``^(a+)+$`` stops the event
loop for ever, and its syntax is not Go's.

Searches are unanchored, as nsqd's are: ``orders`` matches ``private_orders_x``.

Source: NSQ's TCP protocol; Go's regexp/syntax; docs/decisions/0013.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from flintmq.errors import FlintError

PATTERN_SIZE_MAX = 1024
PATTERN_MEMORY_MAX_BYTES = 128 * 1024
"""Of a compiled pattern; a larger one is refused, and matching that would need more gets slower instead."""

_SIMPLE = re.compile(r"(\^?)([^\\.+*?()|\[\]{}^$]*)(\$?)")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)


class BadPattern(FlintError):
    """A regular expression that Go would refuse, or that is beyond our bounds.

    Args:
        pattern: the whole of it.
        reason: what is wrong.
    """

    def __init__(self, pattern: str, reason: str) -> None:
        super().__init__(pattern, reason)
        self.pattern = pattern
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} in the regular expression {self.pattern[:100]!r}"


class PatternsMissing(BadPattern):
    """The library that matches regular expressions is not installed."""

    def __init__(self, pattern: str) -> None:
        super().__init__(pattern, "google-re2 is not installed")

    def __str__(self) -> str:
        return (
            f"the regular expression {self.pattern[:100]!r} needs the package google-re2, which is not installed here: "
            "pip install 'flintmq[auth]', or use plain names and .* alone"
        )


def is_available() -> bool:
    """Whether more than plain names can be matched."""
    from importlib.util import find_spec  # asked once, at the start

    return find_spec("re2") is not None


class Pattern:
    """A compiled expression.

    Args:
        is_whole: it has to match a text as a whole; else it is searched for anywhere in it.

    Attributes:
        step_count: what a character costs at most.

    Raises:
        BadPattern: its syntax is wrong, it is too big, or it needs what is not installed.
    """

    __slots__ = ("_find", "step_count")

    def __init__(self, text: str, is_whole: bool = False) -> None:
        if len(text) > PATTERN_SIZE_MAX:
            raise BadPattern(text, f"more than {PATTERN_SIZE_MAX} characters")
        self.step_count = 1
        simple = _simple(text, is_whole)
        if simple is not None:
            self._find = simple
            return
        expression = _compile(text, is_whole)
        self.step_count = expression.programsize
        search = expression.search
        self._find = lambda name: search(name) is not None

    def search(self, name: str) -> bool:
        """Whether the expression matches anywhere in a text, or all of it."""
        return self._find(name)


def _simple(text: str, is_whole: bool) -> Callable[[str], bool] | None:
    """Return the search for a pattern that needs no engine; None for all others."""
    if text == ".*":
        return (lambda name: "\n" not in name) if is_whole else (lambda _name: True)
    match = _SIMPLE.fullmatch(text)
    if match is None:
        return None
    begin, literal, end = match.groups()
    if is_whole or (begin and end):
        return lambda name: name == literal
    if begin:
        return lambda name: name.startswith(literal)
    if end:
        return lambda name: name.endswith(literal)
    return lambda name: literal in name


def _compile(text: str, is_whole: bool) -> Any:
    try:
        import re2  # 7 ms and 3 MiB, for those who have such patterns
    except ImportError:
        raise PatternsMissing(text) from None
    options = re2.Options()
    options.max_mem = PATTERN_MEMORY_MAX_BYTES
    options.log_errors = False
    options.never_capture = True
    if any(escaped.group(1) == "C" for escaped in _ESCAPED.finditer(text)):
        raise BadPattern(text, r"invalid escape sequence \C")  # a byte, which Go does not have
    try:
        expression = re2.compile(text, options)  # on its own, so that its brackets close what they open
        return re2.compile(rf"\A(?:{text})\z", options) if is_whole else expression
    except re2.error as error:
        reason = error.args[0] if error.args else ""
        what = reason.decode("utf-8", "replace") if isinstance(reason, bytes) else str(reason)
        raise BadPattern(text, what[:100] or "error") from None
    except UnicodeError:
        raise BadPattern(text, "half a character") from None


@lru_cache(maxsize=1024)
def compiled(text: str, is_whole: bool = False) -> Pattern:
    """Compile an expression, or remember that it was.

    Raises:
        BadPattern: as :class:`Pattern`.
    """
    return Pattern(text, is_whole)
