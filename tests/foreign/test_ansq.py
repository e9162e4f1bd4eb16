"""ansq 0.3.0 against our daemons."""

from __future__ import annotations

import pytest
from tests.foreign import scenarios, upgrades
from tests.foreign.harness import Ahead, Case, Client, Defect, parameters, python_client

CLIENT = Client(
    "ansq 0.3.0",
    python_client("ansq_client"),
    can_hold=False,
    absent={
        **dict.fromkeys(("unverified", "verified", "require", "require-verify"), "TLS is not implemented"),
        **dict.fromkeys(("deflate", "snappy"), "compression is not implemented"),
        "max-in-flight": "RDY is 1 for ever, set_max_in_flight is not implemented",
        "backoff": "it does not back off",
    },
    defects={
        "survive-publishing": Defect(
            "its writer does not come back when an answer was outstanding", "nothing published after the restart"
        ),
        **dict.fromkeys(
            ("publish-auth", "consume-auth"),
            Defect("it never notes that it is authorized, and refuses every command after AUTH", "NSQUnauthorized"),
        ),
    },
    notes=(
        "it returns errors instead of raising them",
        "of several nsqlookupds it asks one at each poll",
        "it refuses names of one letter",
    ),
)


@pytest.mark.parametrize("case", parameters(CLIENT, [*scenarios.CASES, *upgrades.cases(CLIENT)]))
def test_client(ahead: Ahead, case: Case):
    ahead.result(case)
