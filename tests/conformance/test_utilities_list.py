"""The list of behaviours of NSQ's utilities names tests that exist, and every row has one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conformance.test_seed_sentences import names_in

LIST = Path(__file__).with_name("utilities.md")
ROWS_MIN = 50
PROGRAMS = {"nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq", "nsq_stat"}


def rows() -> list[list[str]]:
    lines = LIST.read_text(encoding="utf-8").splitlines()
    found = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    return [row for row in found if row[0] != "program"]


def test_every_behaviour_is_shown_by_tests_that_exist():
    for row in rows():
        tests = re.findall(r"`(tests/[^`]+)`", row[3])
        assert len(row) == 4 and row[2] in ("same", "better") and tests, row
        for test in tests:
            path, _, name = test.partition("::")
            assert name in names_in(path), test


def test_no_behaviour_and_no_program_was_lost():
    found = rows()
    assert len(found) >= ROWS_MIN
    assert {name for row in found for name in row[0].split(", ")} == {*PROGRAMS, "all"}
