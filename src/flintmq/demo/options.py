"""The flags of ``flintmq demo``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flintmq.demo.flights import FLIGHT_COUNT
from flintmq.options import Integer, Options, Switch, Text, option


@dataclass(frozen=True, kw_only=True)
class DemoOptions(Options):
    """The flags of ``flintmq demo``."""

    program: ClassVar[str] = "demo"
    summary: ClassVar[str] = (
        "flintmq demo publishes the flights that left New York in 2013 to a topic, counts them with three consumers, "
        "archives them with Spark, then does it again and kills nsqd in the middle. It exits with 0 only if every "
        "acknowledged flight is in the archive exactly once."
    )

    rows: int = option(Integer(100, FLIGHT_COUNT, "flights"), FLIGHT_COUNT, "how many flights to publish", group="Demo")
    kills: int = option(Integer(0, 20), 1, "how often nsqd is killed in the second run", group="Demo")
    data_path: str = option(
        Text("DIRECTORY"),
        "",
        "where everything is written; it must be new or empty",
        group="Demo",
        default_text="a new temporary directory, which is kept",
    )
    chart: str = option(
        Text("FILE"), "", "where the chart goes", group="Demo", default_text="departure-delays.png in that directory"
    )
    no_chart: bool = option(Switch(), False, "draw no chart", group="Demo")
    plain: bool = option(Switch(), False, "print lines instead of progress bars, on a terminal too", group="Demo")
