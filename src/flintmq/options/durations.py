"""Go's spelling of durations, which NSQ's flags and files use: ``250ms``, ``1.5s``, ``1h2m3s``.

The rules of this file: inside the program a duration is an int of nanoseconds, computed without floating point, so that
``parse_duration_ns(format_duration(n)) == n`` for every n. Source: Go's time.ParseDuration and Duration.String.
"""

from __future__ import annotations

import re

MICROSECOND = 1_000
MILLISECOND = 1_000_000
SECOND = 1_000_000_000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE

DURATION_NS_MAX = (1 << 63) - 1  # Go's int64: about 292 years
_UNIT_NS = {"ns": 1, "us": MICROSECOND, "µs": MICROSECOND, "μs": MICROSECOND, "ms": MILLISECOND}
_UNIT_NS |= {"s": SECOND, "m": MINUTE, "h": HOUR}
_PART = re.compile(r"([0-9]*)(?:\.([0-9]*))?(ns|us|µs|μs|ms|s|m|h)")
_EXPECTED = "a duration such as 250ms, 1.5s, 2m or 1h30m"


def parse_duration_ns(text: str) -> int:
    """Return the nanoseconds of a Go duration.

    Raises:
        ValueError: it is not one; the text says what is wrong and what would be right.
    """
    sign = -1 if text.startswith("-") else 1
    rest = text[1:] if text[:1] in ("-", "+") else text
    if rest == "0":
        return 0
    if rest.isascii() and rest.isdigit():
        raise ValueError(f"it needs a unit: {text}s or {text}ms")
    if not rest:
        raise ValueError(f"it must be {_EXPECTED}")
    total = 0
    position = 0
    while position < len(rest):
        part = _PART.match(rest, position)
        if part is None or not (part[1] or part[2]):
            raise ValueError(f"it must be {_EXPECTED}")
        unit_ns = _UNIT_NS[part[3]]
        fraction = part[2] or ""
        total += int(part[1] or 0) * unit_ns + (int(fraction or 0) * unit_ns // 10 ** len(fraction))
        position = part.end()
    if total > DURATION_NS_MAX:
        raise ValueError("it is longer than 2562047h")
    return sign * total


def format_duration(duration_ns: int) -> str:
    """Spell nanoseconds as Go does: ``1m0s``, ``1.5s``, ``250ms``, ``0s``."""
    if duration_ns < 0:
        return "-" + format_duration(-duration_ns)
    for unit, unit_ns, next_ns in (
        ("ns", 1, MICROSECOND),
        ("µs", MICROSECOND, MILLISECOND),
        ("ms", MILLISECOND, SECOND),
    ):
        if 0 < duration_ns < next_ns:
            return _decimal(duration_ns, unit_ns) + unit
    hours, rest = divmod(duration_ns, HOUR)
    minutes, rest = divmod(rest, MINUTE)
    text = f"{hours}h" if hours else ""
    text += f"{minutes}m" if hours or minutes else ""
    return text + _decimal(rest, SECOND) + "s"


def _decimal(amount_ns: int, unit_ns: int) -> str:
    whole, fraction = divmod(amount_ns, unit_ns)
    digits = str(fraction).rjust(len(str(unit_ns)) - 1, "0").rstrip("0") if fraction else ""
    return f"{whole}.{digits}" if digits else str(whole)
