"""Tables of text that fit a terminal.

Rules of this file: no IO; a column that is too wide is cut with an ellipsis, the widest first; numbers stand at the
right.
"""

from __future__ import annotations

from collections.abc import Sequence

from flintmq.names import shortened

WIDTH_MIN = 40
_LEAST = 6
_NUMBER_MARKS = str.maketrans("", "", ".,-")


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return rows under their titles, in columns, no line wider than ``width``; numbers stand at the right."""
    cells = [list(map(str, row)) for row in (titles, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(titles))]
    room = max(width, WIDTH_MIN) - 2 * (len(titles) - 1)
    while sum(widths) > room and max(widths) > _LEAST:
        widths[widths.index(max(widths))] -= 1
    is_number = [all(_is_number(row[column]) for row in cells[1:]) for column in range(len(titles))]
    lines = []
    for row in cells:
        parts = [
            shortened(text, size).rjust(size) if right else shortened(text, size).ljust(size)
            for text, size, right in zip(row, widths, is_number, strict=True)
        ]
        lines.append("  ".join(parts).rstrip())
    return "\n".join(lines)


def _is_number(text: str) -> bool:
    return text == "-" or text.translate(_NUMBER_MARKS).isdigit()
