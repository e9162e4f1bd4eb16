"""``flintmq pipeline warm``, and that every driver that starts here takes the archive it has written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, wait_until
from tests.spark.processes import environment, finished, said
from tests.spark.standalone import Standalone, command_lines

from flintmq.pipeline import warm
from flintmq.spark.errors import SetupError
from flintmq.spark.home import linked_home
from flintmq.spark.java import find_java_home
from flintmq.spark.session_settings import class_archive, length_note

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(4 * SPARK_PATIENCE_S)]

JOB = Path(__file__).with_name("warm_job.py")


def flintmq(*words: str) -> str:
    command = [sys.executable, "-m", "flintmq", "pipeline", *words]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=SPARK_PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


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


def test_flags_of_the_defaults_stay_in_force_beside_the_archive(archive: str, tmp_path: Path):
    (tmp_path / "spark-defaults.conf").write_text("spark.driver.extraJavaOptions -Dof=defaults\n")
    output = finished(JOB, "local[1]", "throughput", SPARK_CONF_DIR=str(tmp_path))
    assert next(line for line in output.splitlines() if line.startswith("flags ")).endswith(" -Dof=defaults")


def emptied_third(content: bytes) -> bytes:
    third = len(content) // 3
    return content[:third] + bytes(200_000) + content[third + 200_000 :]


def without_end(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


@pytest.mark.parametrize("damage", [emptied_third, without_end])
def test_a_damaged_archive_is_done_without(archive: str, tmp_path: Path, damage: Callable[[bytes], bytes]):
    """A JVM crashes over it: each page is mapped as it is."""
    given = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    damaged = class_archive(find_java_home(given), given)
    damaged.parent.mkdir(parents=True, exist_ok=True)
    damaged.write_bytes(damage(Path(archive).read_bytes()))
    shutil.copy(length_note(Path(archive)), length_note(damaged))
    found = said(finished(JOB, "local[1]", XDG_CACHE_HOME=str(tmp_path)))
    assert found == {"archives": [], "home": str(linked_home(given))}


def test_a_session_of_a_cluster_and_the_cluster(archive: str, tmp_path: Path):
    with Standalone(tmp_path, worker_count=0) as cluster:
        assert archive in Path(f"/proc/{cluster.master_process_id}/maps").read_text()
        found = said(finished(JOB, cluster.url, "quick"))
    assert found == {"archives": [archive], "home": str(linked_home(os.environ))}


def free_bytes(monkeypatch: pytest.MonkeyPatch, *free: int) -> None:
    """Have the disk so many bytes free, look by look."""
    looks = iter(free)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=next(looks)))


def instead_of_a_jvm(monkeypatch: pytest.MonkeyPatch, run: Callable[..., object]) -> None:
    """Have warm call this for the process that would write the archive; Java itself is looked for as ever."""
    monkeypatch.setattr(warm, "subprocess", SimpleNamespace(run=run, TimeoutExpired=subprocess.TimeoutExpired))


def test_a_full_disk_is_named_before_anything_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    free_bytes(monkeypatch, 100 << 20)
    instead_of_a_jvm(monkeypatch, lambda *_, **__: pytest.fail("a JVM is started"))
    with pytest.raises(SetupError) as caught:
        warm.warm()
    assert str(caught.value) == (
        f"an archive takes 209715200 bytes, and {tmp_path}/flintmq has 104857600 bytes free; make room, or set "
        "XDG_CACHE_HOME to a directory that has it"
    )


STACK = """26/11/29 19:50:16 WARN NativeCodeLoader: Unable to load native-hadoop library
Traceback (most recent call last):
  File "daemon.py", line 95, in worker
    outfile.flush()
BrokenPipeError: [Errno 32] Broken pipe
Unable to write to shared archive file.
the JVM ended with 1, the archive may not be whole
"""


@pytest.mark.parametrize(
    ("left", "said"),
    [
        (
            1 << 20,
            r"an archive takes 209715200 bytes, and \S+ has 1048577 bytes free; make room, or set XDG_CACHE_HOME",
        ),
        (
            1 << 40,
            "no archive was written; Spark said: Unable to write to shared archive file.; the JVM ended with 1, the",
        ),
    ],
)
def test_what_is_said_when_it_fails_has_no_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: int, said: str):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    free_bytes(monkeypatch, 1 << 40, left)

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        Path(command[-1]).write_bytes(b"x")
        return subprocess.CompletedProcess(command, 1, "", STACK)

    instead_of_a_jvm(monkeypatch, run)
    with pytest.raises(SetupError, match=said) as caught:
        warm.warm()
    assert "BrokenPipe" not in str(caught.value)
    assert not list(tmp_path.rglob("*.jsa"))


@pytest.mark.long
def test_a_jvm_that_is_killed_while_it_writes_leaves_no_archive(tmp_path: Path):
    """As by a limit of memory, which it reaches then if ever."""
    with subprocess.Popen(
        [sys.executable, "-m", "flintmq", "pipeline", "warm"],
        env=environment(XDG_CACHE_HOME=str(tmp_path)), stderr=subprocess.PIPE, text=True,
    ) as warming:  # fmt: skip
        wait_until(lambda: any(tmp_path.glob("flintmq/.warm-*/classes.jsa")), "no archive is begun", SPARK_PATIENCE_S)
        (jvm,) = [
            process_id
            for process_id, words in command_lines()
            if f"ArchiveClassesAtExit={tmp_path}".encode() in words and words.partition(b"\0")[0].endswith(b"java")
        ]
        os.kill(jvm, signal.SIGKILL)
        assert "the JVM ended with -9, the archive may not be whole" in warming.communicate(timeout=PATIENCE_S)[1]
    assert warming.returncode == 1
    assert not list(tmp_path.rglob("*.jsa"))


def test_a_session_behind_submit(archive: str):
    flags = ["--run", "--master=local[1]", "--conf=spark.ui.enabled=false", "--pack=none"]
    found = said(flintmq("submit", *flags, "--", str(JOB)))
    assert found == {"archives": [archive], "home": str(linked_home(os.environ))}
