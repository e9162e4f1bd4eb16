"""Numbers, sizes, times and names as the pages show them: filters of the templates.

Rules of this file: pure; what is not known (None) is an en dash; a unit stands behind a no-break space, so that columns
line up and no line is broken between both. Names and bodies are never made safe here: the templates escape everything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeGuard

from flintmq.names import shortened

UNKNOWN = "–"
NO_BREAK_SPACE = "\u00a0"
_SIZES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_LARGE = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_SPANS = ((86_400 * 365, "y"), (86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs"))
_EXACT_BELOW = 100_000
_UNSEEN = re.compile("[\\x00-\\x1f\\x7f-\\x9f\\u061c\\u200b-\\u200f\\u2028-\\u202e\\u2066-\\u2069\\ufeff]")


def count(value: float | None) -> str:
    """A whole number with separators: ``1,234,567``."""
    return UNKNOWN if not _is_number(value) else f"{value:,.0f}"


def compact(value: float | None) -> str:
    """A number in at most seven characters: ``12,345``, ``1.23 M``."""
    if not _is_number(value):
        return UNKNOWN
    if abs(value) < _EXACT_BELOW:
        return f"{value:,.0f}"
    size, unit = next(entry for entry in _LARGE if abs(value) >= entry[0])
    return f"{_three_digits(value / size)}{NO_BREAK_SPACE}{unit}"


def rate(value: float | None) -> str:
    """Something per second: ``0/s``, ``0.25/s``, ``12.5/s``, ``1,234/s``, ``2.5 M/s``."""
    if not _is_number(value):
        return UNKNOWN
    if abs(value) < 1_000:
        return f"{_three_digits(value)}/s"
    return f"{compact(value)}/s"


def size(value: float | None) -> str:
    """Bytes: ``512 B``, ``1.5 KiB``."""
    if not _is_number(value):
        return UNKNOWN
    power = 0
    while abs(value) >= 1024 and power < len(_SIZES) - 1:
        value /= 1024
        power += 1
    text = f"{value:.0f}" if power == 0 else _three_digits(value)
    return f"{text}{NO_BREAK_SPACE}{_SIZES[power]}"


def span(seconds: float | None) -> str:
    """A length of time in its largest unit that fits: ``350 µs``, ``1.5 s``, ``2.5 h``."""
    if not _is_number(seconds):
        return UNKNOWN
    if seconds <= 0:
        return f"0{NO_BREAK_SPACE}s"
    unit_s, unit = next((entry for entry in _SPANS if seconds >= entry[0]), _SPANS[-1])
    return f"{_three_digits(seconds / unit_s)}{NO_BREAK_SPACE}{unit}"


def percent(part: float | None, whole: float | None = 1.0) -> str:
    """A share: ``12 %``, and ``<1 %`` for what is not nothing."""
    if not _is_number(part) or not _is_number(whole) or not whole:
        return UNKNOWN
    share = 100 * part / whole
    if 0 < share < 1:
        return f"<1{NO_BREAK_SPACE}%"
    return f"{share:.0f}{NO_BREAK_SPACE}%"


def moment(seconds: float | None) -> str:
    """A time of the clock in UTC, from seconds since 1970: ``2026-11-23 14:05:09``."""
    instant = _instant(seconds)
    return UNKNOWN if instant is None else instant.strftime("%Y-%m-%d %H:%M:%S")


def exact_moment(seconds: float | None) -> str:
    """The same with milliseconds."""
    instant = _instant(seconds)
    return UNKNOWN if instant is None else f"{instant:%Y-%m-%d %H:%M:%S}.{instant.microsecond // 1000:03d}"


def iso(seconds: float | None) -> str:
    """The same for programs, as the attribute ``datetime`` of ``<time>`` takes it."""
    instant = _instant(seconds)
    return "" if instant is None else instant.strftime("%Y-%m-%dT%H:%M:%SZ")


def plural(number: float | None, one: str, many: str = "") -> str:
    """``1 message``, ``2 messages``, ``0 messages``."""
    return f"{count(number)}{NO_BREAK_SPACE}{one if number == 1 else many or one + 's'}"


def setting(value: object) -> str:
    """A setting of a topic or channel; 0 is no limit."""
    if value in (0, None):
        return "no limit"
    return "–" if value == "" else "yes" if value is True else "no" if value is False else str(value)


def alike(by_node: Mapping[str, Mapping[str, Any]]) -> list[tuple[list[str], Mapping[str, Any]]]:
    """Answers of nodes, with the nodes that gave each: those that say the same stand together."""
    groups: list[tuple[list[str], Mapping[str, Any]]] = []
    for node, answer in by_node.items():
        nodes = next((nodes for nodes, other in groups if other == answer), None)
        if nodes is None:
            groups.append(([node], answer))
        else:
            nodes.append(node)
    return groups


_WORDS = {
    "INVALID_TOPIC": "That is no name of a topic: 1 to 64 of . a-z A-Z 0-9 _ -, #ephemeral may follow.",
    "INVALID_CHANNEL": "That is no name of a channel: 1 to 64 of . a-z A-Z 0-9 _ -, #ephemeral may follow.",
    "TOPIC_NOT_FOUND": "No node has such a topic.",
    "CHANNEL_NOT_FOUND": "No node has such a channel.",
    "NODE_NOT_FOUND": "There is no such node.",
    "NOT_FOUND": "There is no such page.",
    "METHOD_NOT_ALLOWED": "This page cannot be used like that.",
    "INTERNAL_ERROR": "nsqadmin has failed; its log says why.",
}


def in_words(text: str) -> str:
    """A refusal for people, where it is one of the words of NSQ's JSON API."""
    return _WORDS.get(text, text)


def _is_number(value: float | None) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and math.isfinite(value)


def _three_digits(value: float) -> str:
    decimals = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _instant(seconds: float | None) -> datetime | None:
    if not _is_number(seconds):
        return None
    try:
        return datetime.fromtimestamp(float(seconds or 0), UTC)
    except (OverflowError, ValueError, OSError):  # a node can say anything
        return None


def visible(value: object, most: int = 80) -> str:
    """A text that a stranger has written: cut, and characters escaped that are not seen or turn round what is."""
    text = shortened(str(value), most)
    return _UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def readable(body: str) -> str:
    """A message's body with such characters escaped, but lines and tabs as they are."""
    return _UNSEEN.sub(lambda found: found[0] if found[0] in "\t\n\r" else visible(found[0]), body)


FILTERS = {
    "count": count, "compact": compact, "rate": rate, "size": size, "span": span, "percent": percent, "moment": moment,
    "exact_moment": exact_moment, "iso": iso, "plural": plural, "setting": setting, "alike": alike,
    "in_words": in_words, "visible": visible, "readable": readable,
}  # fmt: skip
