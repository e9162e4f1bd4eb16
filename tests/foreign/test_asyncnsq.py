"""asyncnsq 1.2.1 against our daemons; 2.0 needs Python 3.12.

Its own defects: it takes what is in flight off its RDY count although nsqd does so too, so that messages held stop it;
it asks nsqlookupd once only; connections found that way are not even identified. Source: reference/clients.md B.
"""

from __future__ import annotations

import pytest
from tests.foreign import scenarios
from tests.foreign.scenarios import Client, python_client
from tests.integration.daemons import Daemons, Nsqd

CLIENT = Client(python_client("asyncnsq_client"), can_hold=False)


@pytest.mark.parametrize("scenario", scenarios.ON_ONE_NSQD, ids=lambda scenario: scenario.__name__)
def test_on_one_nsqd(nsqd: Nsqd, scenario: scenarios.Scenario):
    scenario(CLIENT, nsqd)


def test_touches(daemons: Daemons):
    scenarios.touches(CLIENT, daemons)


def test_discovers(daemons: Daemons):
    scenarios.discovers(CLIENT, daemons, joins_late=False)


@pytest.mark.xfail(strict=True, raises=AssertionError, reason="asyncnsq 1.2.1 asks nsqlookupd once and never again")
def test_discovers_what_comes_later(daemons: Daemons):
    scenarios.discovers(CLIENT, daemons, joins_late=True)
