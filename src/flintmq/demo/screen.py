"""The output of the demo: steps, how far each stage is, the table at the end.

The rules of this file: on a terminal there are bars; elsewhere (a pipe, a log of CI) a plain line every two seconds
says the same. Nothing is computed here but rates: a meter starts with its first message and stops with its last
expected one, so its rate is that of the stage and not of what came before or after.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table

PLAIN_WIDTH = 110
_BARS_S = 0.1
_LINES_S = 2.0
_NAME_WIDTH = 12


@dataclass
class Meter:
    """One stage: how far it is, and how fast it was.

    Attributes:
        name: as shown.
        total: messages expected.
        count: messages done.
        until_first: what is going on as long as nothing is done, for people.
        source: the stage before this one; how far this one is behind it is its lag.
    """

    name: str
    total: int
    count: int = 0
    until_first: str = ""
    source: Meter | None = None
    began_s: float | None = None
    ended_s: float | None = None

    def begin(self, now_s: float) -> None:
        """Start the time before there is anything to count."""
        if self.began_s is None:
            self.began_s = now_s

    def reach(self, count: int, now_s: float) -> None:
        """Set the count; it never goes back."""
        self.begin(now_s)
        if count > self.count:
            self.count = count
            if count >= self.total and self.ended_s is None:
                self.ended_s = now_s

    @property
    def state(self) -> str:
        """Why there is nothing yet, or how many messages the stage before has done and this one has not."""
        if not self.count and self.until_first:
            return self.until_first
        return f"lag {max(0, self.source.count - self.count):,}" if self.source is not None else ""

    def rate(self, now_s: float) -> float:
        """Return messages per second, until now or until it was complete; 0.0 when nothing can be said."""
        if self.began_s is None:
            return 0.0
        elapsed_s = (self.ended_s or now_s) - self.began_s
        return self.count / elapsed_s if elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        counts: one for each run.
        meters: one for each run, whose rates stand beside the counts; none.
        is_detail: a part of what the line above says.
        is_bad: whether a number other than 0 is bad news.
    """

    label: str
    counts: Sequence[int]
    meters: Sequence[Meter] = ()
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
        """Return the screen of this process; bars if stdout is a terminal, unless ``plain``."""
        is_terminal = sys.stdout.isatty()
        console = Console(highlight=False, width=None if is_terminal else PLAIN_WIDTH)
        return cls(console, is_terminal and not plain)

    def step(self, text: str) -> None:
        """Print the title of a new part."""
        self._print(f"\n{text}", "bold")

    def say(self, text: str) -> None:
        """Print what happened."""
        self._print(f"  {text}", "")

    def code(self, text: str) -> None:
        """Print lines to copy into a shell: not indented, not wrapped."""
        self._print(text, "cyan")

    def loud(self, text: str, is_good: bool) -> None:
        """Print what must not be overlooked."""
        self._print(f"\n{text}", "bold green" if is_good else "bold red")

    def _print(self, text: str, style: str) -> None:
        self._console.print(text, style=style, markup=False, soft_wrap=True)

    def table(self, titles: Sequence[str], rows: Sequence[Row]) -> None:
        """Print a table with two columns, messages and messages per second, for each title."""
        table = Table("", box=None, padding=(0, 1), pad_edge=False)
        for title in titles:
            table.add_column(title, justify="right")
            table.add_column("msg/s", justify="right")
        now_s = time.monotonic()
        for row in rows:
            rates = [f"{meter.rate(now_s):,.0f}" for meter in row.meters] or [""] * len(row.counts)
            cells = [text for count, rate in zip(row.counts, rates, strict=True) for text in (f"{count:,}", rate)]
            style = "bold red" if row.is_bad and any(row.counts) else "dim" if row.is_detail else ""
            table.add_row(("  " if row.is_detail else "") + row.label, *cells, style=style)
        self._console.print(table)

    @asynccontextmanager
    async def watching(self, meters: Sequence[Meter]) -> AsyncIterator[None]:
        """Show how the meters move while the block runs."""
        with self._bars(meters) if self._has_bars else self._lines(meters) as update:
            # by the event loop itself: a thread would only compete with it
            ticker = asyncio.create_task(_tick(update, _BARS_S if self._has_bars else _LINES_S))
            try:
                yield
            finally:
                ticker.cancel()
                update()

    @contextmanager
    def _bars(self, meters: Sequence[Meter]) -> Iterator[Callable[[], None]]:
        """Show one bar per meter; yield what updates them."""
        columns = (
            TextColumn(f"  {{task.description:<{_NAME_WIDTH}}}"),
            BarColumn(bar_width=40, complete_style="cyan", finished_style="green"),
            TextColumn("{task.completed:>9,.0f} of {task.total:,.0f}"),
            TextColumn("{task.fields[rate]:>11,.0f} msg/s"),
            TextColumn("{task.fields[state]}"),
        )
        with Progress(*columns, console=self._console, auto_refresh=False) as progress:
            tasks = [(meter, progress.add_task(meter.name, rate=0, state=meter.state)) for meter in meters]

            def update() -> None:
                for meter, task in tasks:
                    total, rate = max(meter.total, meter.count), meter.rate(time.monotonic())
                    progress.update(task, completed=meter.count, total=total, rate=rate, state=meter.state)
                progress.refresh()

            yield update

    @contextmanager
    def _lines(self, meters: Sequence[Meter]) -> Iterator[Callable[[], None]]:
        """Show all meters in one line; yield what prints it, if it has changed."""
        said = ""

        def update() -> None:
            nonlocal said
            parts = (f"{meter.name} {meter.count:,}" + (f" ({meter.state})" if meter.state else "") for meter in meters)
            if (text := "   ".join(parts)) != said:
                self.say(text)
                said = text

        yield update


async def _tick(update: Callable[[], None], interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        update()
