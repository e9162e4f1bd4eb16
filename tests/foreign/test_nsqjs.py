"""nsqjs 0.13.0 against our daemons, when node and its modules are there."""

from __future__ import annotations

import shutil

import pytest
from tests.foreign import scenarios, upgrades
from tests.foreign.harness import CLIENTS, Ahead, Case, Client, Defect, parameters

MODULES = CLIENTS.parent / "node_modules" / "nsqjs"
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(not MODULES.is_dir(), reason="needs nsqjs: run npm ci in tests/foreign"),
]

CLIENT = Client(
    "nsqjs 0.13.0",
    (shutil.which("node") or "node", str(CLIENTS / "nsqjs_client.js")),
    max_in_flight_changes=(0, 4),
    defects={
        "survive-publishing": Defect("its Writer does not come back", "nothing published after the restart"),
    },
    notes=(
        "deferPublish takes the one message in a list only",
        "of several nsqlookupds it asks one at each poll",
        "close does not wait for answers that are on their way",
        "its snappy comes compiled for the usual machines; npm leaves it out where it does not",
    ),
)


@pytest.mark.parametrize("case", parameters(CLIENT, [*scenarios.CASES, *upgrades.cases(CLIENT)]))
def test_client(ahead: Ahead, case: Case):
    ahead.result(case)
