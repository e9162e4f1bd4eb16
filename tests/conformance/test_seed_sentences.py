"""The list of the seeds' sentences names tests that exist, and nothing is left out of the count.

``seed_sentences.md`` has a table for each seed: place, sentence, must or should, and what shows it: tests as
``path::name`` or ``path::Class::name``, all cases of it or one in brackets; or ``open`` and what is missing.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("seed_sentences.md")
ROW_COUNTS_MIN = {"000": 75, "001": 25, "002": 90, "004": 95}
"""Sentences of each seed; fewer means that some were lost."""
OPEN = "`open`:"


class Row(NamedTuple):
    """One sentence."""

    seed: str
    place: str
    sentence: str
    kind: str
    shown_by: str

    @property
    def tests(self) -> list[str]:
        """``path::name`` of each test."""
        return re.findall(r"`(tests/[^`]+)`", self.shown_by)

    @property
    def is_open(self) -> bool:
        """Whether something is missing."""
        return OPEN in self.shown_by


def read_rows() -> list[Row]:
    """All rows, of all seeds."""
    rows = []
    seed = ""
    for line in LIST.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            seed = line[3:6]
        elif line.startswith("| ") and not line.startswith("| place |"):
            cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            rows.append(Row(seed, *cells))
    return rows


@cache
def names_in(path: str) -> frozenset[str]:
    """The tests of a file: ``name`` or ``Class::name``."""
    names = set()
    for node in ast.parse((ROOT / path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{each.name}" for each in node.body if isinstance(each, _FUNCTIONS)}
        elif isinstance(node, _FUNCTIONS):
            names.add(node.name)
    return frozenset(names)


_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
ROWS = read_rows()


@pytest.mark.parametrize("seed", ROW_COUNTS_MIN)
def test_no_sentence_was_lost(seed: str):
    assert sum(row.seed == seed for row in ROWS) >= ROW_COUNTS_MIN[seed]


def test_every_row_is_complete():
    for row in ROWS:
        assert row.seed in ROW_COUNTS_MIN, row
        assert row.place and row.sentence, row
        assert row.kind in ("must", "should"), row
        assert row.tests or row.is_open, f"nothing shows it, and it is not open: {row}"


def test_every_test_exists():
    missing = []
    for row in ROWS:
        for test in row.tests:
            path, _, name = test.partition("::")
            if not (ROOT / path).is_file() or re.sub(r"\[.*\]$", "", name) not in names_in(path):
                missing.append(f"{row.seed} {row.place}: {test}")
    assert not missing, "\n".join(missing)


def test_the_counts_at_the_top_are_right():
    counts = re.search(r"^Rows: (\d+), open: (\d+)$", LIST.read_text(encoding="utf-8"), re.MULTILINE)
    assert counts is not None
    assert (int(counts[1]), int(counts[2])) == (len(ROWS), sum(row.is_open for row in ROWS))
