"""``flintmq pipeline warm``, and that every driver that starts here takes the archive it has written."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import environment, finished
from tests.spark.standalone import Standalone

from flintmq.spark.home import linked_home

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(4 * SPARK_PATIENCE_S)]

JOB = Path(__file__).with_name("warm_job.py")


def flintmq(*words: str) -> str:
    command = [sys.executable, "-m", "flintmq", "pipeline", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SPARK_PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def said(output: str) -> dict[str, object]:
    return dict(json.loads(next(line for line in output.splitlines() if line.startswith("said "))[5:]))


@pytest.fixture(scope="module")
def archive() -> str:
    """Made here, unless it has been made for all tests."""
    path = json.loads(flintmq("warm", "--json"))["path"]
    again = json.loads(flintmq("warm", "--json"))
    assert again == {"path": path, "is_new": False, "bytes": Path(path).stat().st_size}
    assert again["bytes"] > 50_000_000, "Spark's classes, not only Java's"
    return str(path)


def test_a_local_session(archive: str):
    found = said(finished(JOB, "local[1]", "throughput"))
    assert found == {"archives": [archive], "home": str(linked_home(os.environ))}


def test_a_session_of_a_cluster_and_the_cluster(archive: str, tmp_path: Path):
    with Standalone(tmp_path, worker_count=0) as cluster:
        assert archive in Path(f"/proc/{cluster.master_process_id}/maps").read_text()
        found = said(finished(JOB, cluster.url, "quick"))
    assert found == {"archives": [archive], "home": str(linked_home(os.environ))}


def test_a_session_behind_submit(archive: str):
    flags = ["--run", "--master=local[1]", "--conf=spark.ui.enabled=false", "--pack=none"]
    found = said(flintmq("submit", *flags, "--", str(JOB)))
    assert found == {"archives": [archive], "home": str(linked_home(os.environ))}
