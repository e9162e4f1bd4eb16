"""What the user sees: steps, progress bars, the table at the end.

The rules of this file: on a terminal there are bars; elsewhere (a pipe, a log of CI) a plain line every two seconds
says the same. Nothing is computed here.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table

from flintmq.demo.meters import Meter

PLAIN_WIDTH = 110
_BARS_S = 0.1
_LINES_S = 2.0
_NAME_WIDTH = 12


@dataclass(frozen=True)
class Row:
    """One line of the table: a label, and for each run a number and perhaps a rate.

    Attributes:
        is_detail: a part of what the line above says.
        is_bad: whether a number other than 0 is bad news.
    """

    label: str
    cells: Sequence[tuple[int, float | None]]
    is_detail: bool = False
    is_bad: bool = False


class Screen:
    """Prints to a console.

    Args:
        has_bars: bars instead of lines.
    """

    def __init__(self, console: Console, has_bars: bool) -> None:
        self._console = console
        self._has_bars = has_bars

    @classmethod
    def on_stdout(cls, plain: bool) -> Screen:
        """The screen of this process; bars if stdout is a terminal, unless ``plain``."""
        is_terminal = sys.stdout.isatty()
        console = Console(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
        return cls(console, is_terminal and not plain)

    def step(self, text: str) -> None:
        """A new part begins."""
        self._console.print()
        self._print(text, "bold")

    def say(self, text: str) -> None:
        """Something happened."""
        self._print(f"  {text}", "")

    def code(self, text: str) -> None:
        """Lines to copy into a shell: not indented, not wrapped."""
        self._print(text, "cyan")

    def loud(self, text: str, is_good: bool) -> None:
        """Something that must not be overlooked."""
        self._console.print()
        self._print(text, "bold green" if is_good else "bold red")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    @asynccontextmanager
    async def watching(self, meters: Sequence[Meter]) -> AsyncIterator[None]:
        """Show how the meters move while the block runs."""
        view: _Bars | _Lines = _Bars(self._console, meters) if self._has_bars else _Lines(self, meters)
        ticker = asyncio.create_task(_tick(view))
        try:
            yield
        finally:
            ticker.cancel()
            view.update()
            view.close()

    def table(self, titles: Sequence[str], rows: Iterable[Row]) -> None:
        """Show a table with two columns, messages and messages per second, for each title."""
        table = Table(box=None, padding=(0, 1), pad_edge=False)
        table.add_column("")
        for title in titles:
            table.add_column(title, justify="right")
            table.add_column("msg/s", justify="right")
        for row in rows:
            cells = [text for count, rate in row.cells for text in (f"{count:,}", f"{rate:,.0f}" if rate else "")]
            is_alarm = row.is_bad and any(count for count, _ in row.cells)
            style = "bold red" if is_alarm else "dim" if row.is_detail else ""
            table.add_row(("  " if row.is_detail else "") + row.label, *cells, style=style)
        self._console.print(table)


async def _tick(view: _Bars | _Lines) -> None:
    while True:
        await asyncio.sleep(view.interval_s)
        view.update()


class _Bars:
    """One bar per meter. Drawn by the event loop itself: a thread of its own would only compete with it."""

    interval_s = _BARS_S

    def __init__(self, console: Console, meters: Sequence[Meter]) -> None:
        self._progress = Progress(
            TextColumn(f"  {{task.description:<{_NAME_WIDTH}}}"),
            BarColumn(bar_width=40, complete_style="cyan", finished_style="green"),
            TextColumn("{task.completed:>9,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[rate]:>11,.0f} msg/s"),
            TextColumn("{task.fields[state]}"),
            console=console,
            auto_refresh=False,
        )
        self._tasks: list[tuple[Meter, TaskID]] = [
            (meter, self._progress.add_task(meter.name, total=meter.total, rate=0, state=meter.state))
            for meter in meters
        ]
        self._progress.start()

    def update(self) -> None:
        now_s = time.monotonic()
        for meter, task in self._tasks:
            self._progress.update(
                task,
                completed=meter.count,
                total=max(meter.total, meter.count),
                rate=meter.rate(now_s),
                state=meter.state,
            )
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


class _Lines:
    """All meters in one line, now and then."""

    interval_s = _LINES_S

    def __init__(self, screen: Screen, meters: Sequence[Meter]) -> None:
        self._screen = screen
        self._meters = meters
        self._said = ""

    def update(self) -> None:
        text = "   ".join(_described(meter) for meter in self._meters)
        if text != self._said:
            self._screen.say(text)
            self._said = text

    def close(self) -> None:
        pass


def _described(meter: Meter) -> str:
    state = f" ({meter.state})" if meter.state else ""
    return f"{meter.name} {meter.count:,}{state}"
