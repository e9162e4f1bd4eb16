"""What docs/guarantees.md promises is shown by tests that there are."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/guarantees.md"
_NAME = re.compile(r"`(?:(tests/[\w/]+\.py)::)?(test_\w+)`")
NO_TEST = "there is no copy: use a cluster"


def _rows() -> list[list[str]]:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return [row for row in rows if row[-1] != "shown by"]


def _tests_of(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_line_names_tests_that_there_are():
    rows = _rows()
    assert len(rows) > 25
    for row in rows:
        if row[-1] == NO_TEST:
            continue
        path = ""
        names = _NAME.findall(row[-1])
        assert names, f"no test for: {row[0]}"
        for where, name in names:
            path = where or path  # the file of the one before unless it says another
            assert path, f"{name} has no file: {row[0]}"
            assert name in _tests_of(path), f"{path} has no {name}: {row[0]}"


def test_every_cell_says_something():
    for row in _rows():
        assert all(row), row
