"""Filters of the templates for charts: what the drawing without JavaScript needs, and what charts.js reads.

Rules of this file: pure; numbers that are not known leave a gap and are never drawn as 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flintmq.nsqadmin.pages import wording
from flintmq.nsqadmin.views import HistoryView

WIDTH, HEIGHT = 600, 120
_MARGIN = 4


def _milliseconds(value: float) -> str:
    return wording.span(value / 1000)


_UNITS: dict[str, Callable[[float], str]] = {"rate": wording.rate, "count": wording.compact, "ms": _milliseconds}


def known(values: Sequence[float | None]) -> list[float]:
    """The values without gaps."""
    return [value for value in values if value is not None]


def has_values(history: HistoryView, names: Sequence[tuple[str, str]]) -> bool:
    """Whether any of these fields has a value that is known; ``names`` are fields with their labels."""
    return any(value is not None for field, _ in names for value in getattr(history, field))


def in_unit(value: float, unit: str) -> str:
    """A value as text; ``unit`` is rate, count or ms."""
    return _UNITS[unit](value)


def points(values: Sequence[float | None], fields: Sequence[str], history: HistoryView) -> str:
    """The attribute ``points`` of a line in a picture of 600 by 120.

    Args:
        fields: of all lines of the picture, which share its height.
    """
    highest = max((value for field in fields for value in known(getattr(history, field))), default=0) or 1
    last = max(len(values) - 1, 1)
    height = HEIGHT - 2 * _MARGIN
    return " ".join(
        f"{index * WIDTH / last:.0f},{HEIGHT - _MARGIN - value / highest * height:.1f}"
        for index, value in enumerate(values)
        if value is not None
    )
