"""gnsq 1.0.2 against our daemons."""

from __future__ import annotations

import pytest
from tests.foreign import scenarios, upgrades
from tests.foreign.harness import Ahead, Case, Client, Defect, parameters, python_client

CLIENT = Client(
    "gnsq 1.0.2",
    python_client("gnsq_client"),
    absent={"max-in-flight": "max_in_flight cannot be changed while it runs"},
    defects={
        f"publish-{part}": Defect("its Producer takes the OK of an upgrade for the answer of a publish", "KeyError")
        for part in ("unverified", "verified", "require", "require-verify", "deflate", "snappy")
    },
    notes=(
        "when a poll finds two new nsqds at once, the greenlet that sends RDY may die, and nothing more comes",
        "of several nsqlookupds it asks one at each poll",
        "close ends the connections at once",
    ),
)


@pytest.mark.parametrize("case", parameters(CLIENT, [*scenarios.CASES, *upgrades.cases(CLIENT)]))
def test_client(ahead: Ahead, case: Case):
    ahead.result(case)
