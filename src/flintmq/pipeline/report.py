"""The report of ``flintmq pipeline trace``: report.html, a file that needs no other one, and its plots as PNG.

The rules of this file: figures are counted by Spark, drawn here; what comes from messages is escaped.
"""

from __future__ import annotations

import base64
import html
import importlib.util
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flintmq.pipeline.lives import QUANTILES, STAGES, STATES, Quality, Summary, expressions
from flintmq.spark.errors import SetupError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WORST_SHOWN = 20
CHANNELS_DRAWN_MAX = 20
TIME_STEPS = 120
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .75rem; text-align: right; border-bottom: 1px solid #ddd }
th:first-child, td:first-child { text-align: left }
img { max-width: 100%; height: auto } .bad { color: #b00020; font-weight: 600 }
"""


def need_plots() -> None:
    """See that there is something to draw with.

    Raises:
        SetupError: there is not.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise SetupError("the Python package matplotlib, which draws the report, is missing", "pip install matplotlib")


def write_report(directory: Path, lives: DataFrame, summaries: Sequence[Summary], quality: Quality) -> Path:
    """Write the report.

    Args:
        lives: as :func:`flintmq.pipeline.lives.lives` returns them; read three times.

    Returns:
        The path of report.html.

    Raises:
        SetupError: matplotlib is missing.
    """
    need_plots()
    directory.mkdir(parents=True, exist_ok=True)
    plots = {
        "latency": _latency(summaries),
        "distribution": _distribution(lives),
        "over-time": _over_time(lives, quality),
    }
    for name, data in plots.items():
        (directory / f"{name}.png").write_bytes(data)
    path = directory / "report.html"
    path.write_text("\n".join(_page(lives, summaries, quality, plots)), encoding="utf-8")
    return path


def _page(lives: DataFrame, summaries: Sequence[Summary], quality: Quality, plots: dict[str, bytes]) -> Iterator[str]:
    yield "<!doctype html><html lang='en'><meta charset='utf-8'><title>Life of messages</title>"
    yield f"<meta name='viewport' content='width=device-width'><style>{_STYLE}</style><h1>Life of messages</h1>"
    seconds = (quality.last_ns - quality.first_ns) / 1e9
    yield f"<p>{quality.events} events within {seconds:.1f} s.</p>"
    for note in quality.notes():
        yield f"<p class='bad'>{html.escape(note)}.</p>"
    heads = ["topic, channel", "messages", *(state.replace("_", " ") for state in STATES), "repeated", "requeued",
             "timed out"]  # fmt: skip
    yield _row("th", heads, "<table>")
    for each in summaries:
        counts = [each.messages, *each.states.values(), each.repeated, each.requeued, each.timed_out]
        yield _row("td", [_label(each), *counts])
    yield "</table><h2>Latency by stage, ms</h2>"
    yield _row("th", ["topic, channel, stage", *QUANTILES, "max"], "<table>")
    for each in summaries:
        for stage in STAGES:
            values = ["-" if value is None else f"{value:.3f}" for value in each.latencies[stage].values()]
            yield _row("td", [f"{_label(each)}, {stage}", *values])
    yield "</table>"
    for name, data in plots.items():
        yield f"<img alt='{name}' src='data:image/png;base64,{base64.b64encode(data).decode()}'>"
    yield f"<h2>The {WORST_SHOWN} that one should look at first</h2>"
    columns = ["topic", "channel", "message_id", "trace_id", "state", "last_action", "deliveries", "total_ms"]
    yield _row("th", columns, "<table>")
    worst = lives.orderBy(*expressions(
        "CASE state WHEN 'lost' THEN 0 WHEN 'stuck' THEN 1 WHEN 'dead_letter' THEN 2 WHEN 'expired' THEN 3 ELSE 4 END",
        "-deliveries", "-coalesce(total_ms, 0)",
    ))  # fmt: skip
    for row in worst.select(*columns).limit(WORST_SHOWN).collect():
        yield _row("td", list(row))
    yield "</table></html>"


def _row(cell: str, values: Sequence[object], before: str = "") -> str:
    shown = ("" if value is None else f"{value:.3f}" if isinstance(value, float) else value for value in values)
    return f"{before}<tr>{''.join(f'<{cell}>{html.escape(str(value))}</{cell}>' for value in shown)}</tr>"


def _label(each: Summary) -> str:
    return f"{each.topic}, {each.channel}" if each.channel else each.topic


def _latency(summaries: Sequence[Summary]) -> bytes:
    figure, axes = _axes("Latency by stage: p50, p99, p999", "ms")
    labels: list[str] = []
    for each in summaries[:CHANNELS_DRAWN_MAX]:
        for stage in STAGES:
            values = [each.latencies[stage][name] for name in QUANTILES]
            if values[0] is None:
                continue
            place = len(labels)
            labels.append(f"{_label(each)}: {stage}")
            shown = [max(value or 0.0, 1e-3) for value in values]
            axes.plot(shown, [place] * len(shown), "o-", markersize=5)
    axes.set_xscale("log")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    figure.set_figheight(1.5 + 0.3 * max(4, len(labels)))
    return _png(figure)


def _distribution(lives: DataFrame) -> bytes:
    figure, axes = _axes("How long messages took, from published to finished", "ms")
    counts = (
        lives.where("total_ms IS NOT NULL")
        .groupBy(*expressions("round(log10(greatest(total_ms, 0.001)) * 10) AS tenth"))
        .count()
        .orderBy("tenth")
        .collect()
    )
    axes.bar([10 ** (row.tenth / 10) for row in counts], [row["count"] for row in counts],
             width=[10 ** (row.tenth / 10) * 0.2 for row in counts])  # fmt: skip
    axes.set_xscale("log")
    axes.set_ylabel("messages")
    return _png(figure)


def _over_time(lives: DataFrame, quality: Quality) -> bytes:
    figure, axes = _axes("Messages that were published, by what became of them", "s since the first event")
    step_s = max((quality.last_ns - quality.first_ns) / 1e9 / TIME_STEPS, 1e-3)
    rows = (
        lives.where("published_ns IS NOT NULL")
        .groupBy(*expressions(f"floor((published_ns - {quality.first_ns}) / 1e9 / {step_s}) AS step", "state"))
        .count()
        .collect()
    )
    steps = sorted({row.step for row in rows})
    below = [0] * len(steps)
    for state in STATES:
        counts = {row.step: row["count"] for row in rows if row.state == state}
        if counts:
            heights = [counts.get(step, 0) for step in steps]
            axes.bar([step * step_s for step in steps], heights, width=step_s, bottom=below,
                     label=state.replace("_", " "))  # fmt: skip
            below = [low + height for low, height in zip(below, heights, strict=True)]
    if rows:
        axes.legend()
    axes.set_ylabel("messages")
    return _png(figure)


def _axes(title: str, unit: str) -> tuple[Any, Any]:
    from matplotlib.figure import Figure  # without pyplot, which keeps figures and looks for a display

    figure = Figure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_xlabel(unit)
    return figure, axes


def _png(figure: Any) -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
