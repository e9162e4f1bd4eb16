"""asyncnsq 1.2.1 against our daemons."""

from __future__ import annotations

import pytest
from tests.foreign import scenarios, upgrades
from tests.foreign.harness import Ahead, Case, Client, Defect, parameters, python_client

CLIENT = Client(
    "asyncnsq 1.2.1",
    python_client("asyncnsq_client"),
    can_hold=False,
    absent={
        "verified": "TLS is never verified",
        **dict.fromkeys(("require", "require-verify"), "no certificate can be shown"),
        "max-in-flight": "max_in_flight cannot be changed while it runs",
        "backoff": "it does not back off",
        "discover-dead": "it asks one nsqlookupd, drawn by chance",
    },
    defects={
        "survive-consuming": Defect("its reader does not come back", "not seen: reconnected"),
        **dict.fromkeys(
            ("discover-two", "discover-late"),
            Defect("it asks one nsqlookupd, and once", "not seen: a message from each"),
        ),
        **dict.fromkeys(
            ("publish-unverified", "consume-unverified"),
            Defect("its TLS needs an argument that asyncio has not had since Python 3.10", "argument .*loop"),
        ),
    },
    notes=(
        "what is in flight is taken off its RDY count, although nsqd does so too: messages held make it slower",
        "connections found by nsqlookupd send no IDENTIFY",
        "2.0 needs Python 3.12 and was not run",
    ),
)


@pytest.mark.parametrize("case", parameters(CLIENT, [*scenarios.CASES, *upgrades.cases(CLIENT)]))
def test_client(ahead: Ahead, case: Case):
    ahead.result(case)
