"""The messages of an extended topic that a consumer takes, by their headers: ``ext_filter`` of IDENTIFY.

::

    {"type": 1, "filter_ext_key": "city", "filter_data": "berlin"}       the header is this text
    {"type": 2, "filter_ext_key": "city", "filter_data": "^(be|ha)"}     this regular expression is found in it
    {"type": 3, "filter_ext_key": "city", "filter_data": "b*{n,m}"}      this pattern matches it: * ? [] [!] {,} \\
    {"type": 4, "filter_ext_key": "any", "filter_data_list": [{"filter_ext_key": ..., "filter_data": ...}, ...]}
                                                                         any, or "all", of these headers are these texts
    with "inverse": true                                                 the other messages

For patterns a header that is missing or is no text counts as empty. A message whose headers are not JSON matches
nothing, so an inverse filter takes it.

Rules of this file: pure; patterns are matched by what the caller brings, in linear time; everything has a bound, and
what a look costs is told, so that a channel can stop before others have to wait.

Source: Youzan's NSQ.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import msgspec

from flintmq.message import JSON, NO_HEADERS, headers_of
from flintmq.wire.identify import ExtFilterRule

VALUE_SIZE_MAX = 1024
"""Characters of a header that patterns are matched against; a longer one matches none."""

_KNOWN_SIZE_MAX = 256  # of headers in bytes, whose answer is remembered
_KNOWN_MAX = 256
_UNIT = 64  # steps of a pattern times characters that cost as much as a look at one message

_decode = msgspec.json.Decoder(dict[str, Any]).decode
_Headers = dict[str, Any]
Search = Callable[[str], tuple[Callable[[str], bool], int]]
"""Compiles a regular expression: the search for it in a text, and how many steps it has; raises what it is told to."""


class ExtFilter:
    """A filter of one consumer.

    Args:
        search: compiles regular expressions of Go's syntax.
    """

    __slots__ = ("_ask", "_is_inverse", "_known", "_step_count")

    def __init__(self, rule: ExtFilterRule, search: Search) -> None:
        self._is_inverse = rule.inverse
        self._step_count = 0
        self._ask = self._compiled(rule, search)
        self._known = lru_cache(maxsize=_KNOWN_MAX)(self._matches)

    def _compiled(self, rule: ExtFilterRule, search: Search) -> Callable[[_Headers], bool]:
        key, text = rule.filter_ext_key, rule.filter_data
        if rule.type == 1:
            return lambda headers: headers.get(key) == text
        if rule.type == 4:
            pairs = [(each.filter_ext_key, each.filter_data) for each in rule.filter_data_list]
            among = any if key == "any" else all
            return lambda headers: among(headers.get(name) == wanted for name, wanted in pairs)
        find, self._step_count = search(text if rule.type == 2 else regex_of_glob(text))

        def is_found(headers: _Headers) -> bool:
            value = headers.get(key)
            value = value if isinstance(value, str) else ""
            return len(value) <= VALUE_SIZE_MAX and find(value)

        return is_found

    def takes(self, frame: bytes | memoryview, has_headers: bool = True) -> bool:
        """Whether the consumer wants a message, by its stored frame.

        Args:
            has_headers: False when it was stored before its topic had them.
        """
        version, headers = headers_of(frame) if has_headers else (NO_HEADERS, b"")
        if version != JSON:
            return self._is_inverse
        return (self._known(headers) if len(headers) <= _KNOWN_SIZE_MAX else self._matches(headers)) != self._is_inverse

    def _matches(self, headers: bytes) -> bool:
        try:
            return self._ask(_decode(headers))
        except (msgspec.MsgspecError, RecursionError, UnicodeError):
            return False

    def cost(self, frame: bytes | memoryview) -> int:
        """Bound the cost of a look at a message; 1 is a simple one."""
        return 1 + min(len(frame), VALUE_SIZE_MAX) * self._step_count // _UNIT


class BadGlob(ValueError):
    """A text is no glob pattern; the text says why."""


def regex_of_glob(glob: str) -> str:
    """The regular expression that finds what a glob pattern matches.

    ``*`` is any text, ``?`` a character, ``[ab]``, ``[a-z]``, ``[!a]`` one of some or none of them, ``{a,b}`` one of
    several patterns; a backslash takes the meaning from what follows it.

    Raises:
        BadGlob: a bracket or a brace is not closed, or has nothing in it.
    """
    parts = ["(?s)^"]
    depth = at = 0
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "*":
            parts.append(".*" if parts[-1] != ".*" else "")
        elif character == "?":
            parts.append(".")
        elif character == "[":
            end = glob.find("]", at)
            inside = glob[at : max(end, 0)]
            at = end + 1
            parts.append(_class_of(inside, end >= 0))
        elif character == "{":
            depth += 1
            parts.append("(?:")
        elif character == "}" and depth:
            depth -= 1
            parts.append(")")
        elif character == "," and depth:
            parts.append("|")
        elif character == "\\":
            if at >= len(glob):
                raise BadGlob("a backslash at the end")
            parts.append(_quoted(glob[at]))
            at += 1
        else:
            parts.append(_quoted(character))
    if depth:
        raise BadGlob("{ without }")
    return "".join((*parts, "$"))


def _class_of(inside: str, is_closed: bool) -> str:
    negation = "^" if inside.startswith("!") else ""
    inside = inside[len(negation) :]
    if not is_closed or not inside:
        raise BadGlob("[ without ]" if not is_closed else "[] with nothing in it")
    if len(inside) == 3 and inside[1] == "-":
        if inside[0] > inside[2]:
            raise BadGlob(f"range {inside!r}")
        return f"[{negation}{_quoted(inside[0])}-{_quoted(inside[2])}]"
    return f"[{negation}{''.join(map(_quoted, inside))}]"


def _quoted(character: str) -> str:
    return f"\\{character}" if character.isascii() and not character.isalnum() and character > " " else character
