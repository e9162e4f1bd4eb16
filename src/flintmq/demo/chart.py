"""The chart: mean departure delay by carrier and month, as computed from the archive.

The rules of this file: it draws what it is given; no window system is touched.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_DELAY_MAX = 45.0  # minutes; above, all cells have the last colour
_DARK_FROM = 24.0  # minutes; from here on the number in a cell is white

Delay = tuple[str, int, float, int]
"""Carrier, month, mean minutes, flights."""


def draw(delays: Sequence[Delay], names: Mapping[str, str], path: Path) -> None:
    """Write the chart as a PNG file.

    Args:
        names: of carriers, by their codes.
    """
    totals = _totals(delays)
    carriers = sorted(totals, key=lambda carrier: totals[carrier][0])
    minutes = np.full((len(carriers), len(MONTHS)), np.nan)
    for carrier, month, delay, _ in delays:
        minutes[carriers.index(carrier), month - 1] = delay
    figure = Figure(figsize=(11, 1.9 + 0.36 * len(carriers)), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    image = axes.imshow(minutes, aspect="auto", cmap="YlOrRd", vmin=0, vmax=_DELAY_MAX)
    axes.set_facecolor("#eeeeee")
    for (row, column), value in np.ndenumerate(minutes):
        if not np.isnan(value):
            color = "white" if value >= _DARK_FROM else "#333333"
            axes.text(column, row, f"{value:.0f}", ha="center", va="center", fontsize=8, color=color)
    axes.set_xticks(range(len(MONTHS)), MONTHS)
    axes.set_yticks(
        range(len(carriers)), [f"{names.get(carrier, carrier)}  ({totals[carrier][1]:,})" for carrier in carriers]
    )
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
    flights = sum(count for _, count in totals.values())
    axes.set_title(
        "Mean departure delay from New York in 2013, minutes\n",
        loc="left",
        fontsize=14,
        fontweight="bold",
    )
    axes.text(
        0,
        1.015,
        f"{flights:,} flights that left, by carrier (flights) and month; least delayed carrier first; "
        "computed by Spark from the archive",
        transform=axes.transAxes,
        fontsize=9,
        color="#555555",
    )
    figure.colorbar(image, ax=axes, extend="both", shrink=0.8, pad=0.01)
    figure.savefig(path)


def _totals(delays: Sequence[Delay]) -> dict[str, tuple[float, int]]:
    """Return mean delay and number of flights of each carrier over all months."""
    sums: dict[str, tuple[float, int]] = {}
    for carrier, _, delay, count in delays:
        minutes, flights = sums.get(carrier, (0.0, 0))
        sums[carrier] = (minutes + delay * count, flights + count)
    return {carrier: (minutes / flights, flights) for carrier, (minutes, flights) in sums.items()}
