"""nsqjs 0.13.0 against our daemons, when node and its modules are there.

Its own defects, which these tests live with: ``deferPublish`` throws unless the one message stands in a list, ``close``
does not wait for answers that are on their way. Source: reference/clients.md B.
"""

from __future__ import annotations

import shutil

import pytest
from tests.foreign import scenarios
from tests.foreign.scenarios import CLIENTS, Client
from tests.integration.daemons import Daemons, Nsqd

MODULES = CLIENTS.parent / "node_modules" / "nsqjs"
pytestmark = [
    pytest.mark.skipif(shutil.which("node") is None, reason="needs node"),
    pytest.mark.skipif(not MODULES.is_dir(), reason="needs nsqjs: run npm ci in tests/foreign"),
]


CLIENT = Client((shutil.which("node") or "node", str(CLIENTS / "nsqjs_client.js")))


@pytest.mark.parametrize("scenario", scenarios.ON_ONE_NSQD, ids=lambda scenario: scenario.__name__)
def test_on_one_nsqd(nsqd: Nsqd, scenario: scenarios.Scenario):
    scenario(CLIENT, nsqd)


def test_touches(daemons: Daemons):
    scenarios.touches(CLIENT, daemons)


@pytest.mark.parametrize("joins_late", [False, True], ids=["at-once", "late"])
def test_discovers(daemons: Daemons, joins_late: bool):
    scenarios.discovers(CLIENT, daemons, joins_late)
