"""A short run of chaos for everybody, with fixed seeds; ``make chaos`` runs it for long, with others."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos.network import problem
from tests.integration import etcd
from tests.integration.daemons import SOURCES

RUNS = {"etcd": ("--etcd=1", "--seed=1", "--seconds=20"), "nsqlookupd": ("--etcd=0", "--seed=2", "--seconds=15")}
"""Which store, and how: with the cluster's start and end less than a minute each on a machine that is not busy."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", RUNS)
def test_whatever_fails_what_is_acknowledged_is_there_and_delivered_in_order(tmp_path: Path, store: str):
    if problem():
        pytest.skip(problem())
    if store == "etcd":
        etcd.binary()
    _run("run", *RUNS[store], str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_leader_that_reaches_the_store_and_no_other_node_holds_nobody(tmp_path: Path):
    """Cut both ways, and one way and the other; each cut lasts until everybody publishes again, and nothing is lost."""
    if problem():
        pytest.skip(problem())
    etcd.binary()
    printed = _run("figures", "--only=other nodes", "--times=1", str(tmp_path / "run"))
    assert len(re.findall(r"^a leader .* s ", printed, re.MULTILINE)) == 3, printed


def _run(module: str, *arguments: str) -> str:
    """Run it to its end; return what it printed."""
    command = [sys.executable, "-m", f"tests.chaos.{module}", *arguments]
    done = subprocess.run(command, cwd=SOURCES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
    return done.stdout
