"""ansq 0.3.0 against our daemons.

Its own defects, which these tests live with: RDY is 1 for ever, so that one message held stops its connection, errors
are returned instead of raised, and topic names need two characters. Source: reference/clients.md B.
"""

from __future__ import annotations

import pytest
from tests.foreign import scenarios
from tests.foreign.scenarios import Client, python_client
from tests.integration.daemons import Daemons, Nsqd

CLIENT = Client(python_client("ansq_client"), can_hold=False)


@pytest.mark.parametrize("scenario", scenarios.ON_ONE_NSQD, ids=lambda scenario: scenario.__name__)
def test_on_one_nsqd(nsqd: Nsqd, scenario: scenarios.Scenario):
    scenario(CLIENT, nsqd)


def test_touches(daemons: Daemons):
    scenarios.touches(CLIENT, daemons)


@pytest.mark.parametrize("joins_late", [False, True], ids=["at-once", "late"])
def test_discovers(daemons: Daemons, joins_late: bool):
    scenarios.discovers(CLIENT, daemons, joins_late)
