"""docs/compatibility.md says what the tests declare, and its rows are all that the tests run."""

from __future__ import annotations

from tests.foreign import scenarios, upgrades
from tests.foreign.table import CLIENTS, PAGE, PARTS, SCENARIOS, page


def test_the_page_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert page(text) == text, "run: python -m tests.foreign.table"


def test_every_case_has_a_row():
    assert set(SCENARIOS) == {case.name for case in scenarios.CASES}
    assert set(PARTS) == {part for upgrade in upgrades.combinations() for part in upgrade.parts}


def test_what_is_declared_of_a_client_is_a_case():
    """A misspelt exception would excuse nothing and stand in the table."""
    for client in CLIENTS:
        names = {case.name for case in (*scenarios.CASES, *upgrades.cases(client))}
        assert set(client.absent) | set(client.defects) <= names
