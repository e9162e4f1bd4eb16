"""pynsq 0.9.1 against our daemons."""

from __future__ import annotations

import pytest
from tests.foreign import scenarios, upgrades
from tests.foreign.harness import Ahead, Case, Client, Defect, parameters, python_client

CLIENT = Client(
    "pynsq 0.9.1",
    python_client("pynsq_client"),
    reconnects_by_nsqlookupd=True,
    defects={
        "consume-verified-snappy-large": Defect(
            "with snappy over TLS it closes the connection when a read ends within a chunk: its wrapper raises an "
            "error that Tornado 6 does not take for 'try again'",
            "not seen: every message",
        ),
    },
    notes=(
        "it reconnects to a given address after 15 s, to one from nsqlookupd at the next poll, at most every 10 s",
        "of several nsqlookupds it asks one at each poll",
        "close drops what is in flight; a publish is answered by callback only",
        "with snappy its luck without TLS depends on how the network cuts large messages",
    ),
)


@pytest.mark.parametrize("case", parameters(CLIENT, [*scenarios.CASES, *upgrades.cases(CLIENT)]))
def test_client(ahead: Ahead, case: Case):
    ahead.result(case)
