"""A short run of chaos for everybody, with fixed seeds; ``make chaos`` runs it for long, with others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.chaos.network import problem
from tests.integration import etcd
from tests.integration.daemons import SOURCES

RUNS = {"etcd": ("--etcd=1", "--seed=1", "--seconds=25"), "nsqlookupd": ("--etcd=0", "--seed=2", "--seconds=15")}
"""Which store, and how: with the cluster's start and end less than a minute each on a machine that is not busy."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("store", RUNS)
def test_whatever_fails_what_is_acknowledged_is_there_and_delivered_in_order(tmp_path: Path, store: str):
    if "CHAOS" not in os.environ:
        pytest.skip("with CHAOS=1, and make chaos runs it for longer: it needs a machine that is not busy")
    if problem():
        pytest.skip(problem())
    if store == "etcd":
        etcd.binary()
    command = [sys.executable, "-m", "tests.chaos.run", *RUNS[store], str(tmp_path / "run")]
    done = subprocess.run(command, cwd=SOURCES.parent, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
