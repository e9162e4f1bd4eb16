"""The same behaviour in every kind of session: one's own, spark-submit, a cluster, Spark Connect, a notebook."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.ports import reserved_port
from tests.spark.processes import NsqdProcess, assert_each_once, environment, numbered, said
from tests.spark.session_job import SAME
from tests.spark.test_sink_once import stored

from flintmq import cli
from flintmq.options import resolve
from flintmq.pipeline import cluster

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(3 * SPARK_PATIENCE_S)]

JOB = Path(__file__).with_name("session_job.py")


def submitted(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run flintmq pipeline submit --run."""
    return subprocess.run(
        [sys.executable, "-m", "flintmq", "pipeline", "submit", "--run", "--conf=spark.ui.enabled=false", *words],
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
        env=environment(**more),
    )


@pytest.mark.long
def test_a_session_of_ones_own_behind_spark_submit(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Spark-submit itself, without our settings; session() then takes what runs, and says once what it lacks."""
    nsqd.publish(topic, numbered(0, 1000))
    submit = Path(sys.executable).with_name("spark-submit")
    options = ["--master", "local[2]", "--name", "mine", "--conf", "spark.ui.enabled=false", "--conf",
               "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"]  # fmt: skip
    done = subprocess.run(
        [str(submit), *options, str(JOB), nsqd.address, topic, str(tmp_path), "both"],
        capture_output=True,
        text=True,
        timeout=SPARK_PATIENCE_S,
        env=environment(PYSPARK_DRIVER_PYTHON=sys.executable),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert said(done.stdout) == SAME
    assert done.stdout.count("this session was started without settings") == 1
    assert "spark.python.unix.domain.socket.enabled=true: a Python task costs 70 ms" in done.stdout
    assert done.stderr.count("this session is without spark.python.unix.domain.socket.enabled=true") == 1


def test_a_notebook_through_spark_connect(remote: str, nsqd: NsqdProcess, topic: str, tmp_path: Path, monkeypatch):
    """Two cells, in the second of which session() returns what runs."""
    nsqd.publish(topic, numbered(0, 1000))
    monkeypatch.setenv("SPARK_REMOTE", remote)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(JOB.parents[2]), environment()["PYTHONPATH"]]))
    cells = [
        "import json\nfrom flintmq.spark import session\nfrom tests.spark.session_job import same\n"
        f"spark = session('notebook')\nresult = same(spark, {nsqd.address!r}, {topic!r}, {str(tmp_path)!r})",
        "zone = spark.conf.get('spark.sql.session.timeZone')\n"
        "assert session('again') is spark\nprint('said', json.dumps(result), zone)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=int(SPARK_PATIENCE_S), kernel_name="python3").execute()
    (output,) = notebook.cells[1].outputs
    assert output.text == f"said {json.dumps(SAME)} UTC\n"


@pytest.mark.long
def test_a_declarative_project_runs_twice(spark: object, remote: str, nsqd: NsqdProcess, topic: str, tmp_path: Path):
    project = tmp_path / "flights"
    words = ["pipeline", "init", "--declarative", str(project), f"--nsqd={nsqd.address}", f"--topic={topic}"]
    assert cli.main([*words, f"--to-topic={topic}-out"]) == 0
    assert cli.main(words) == 1, "nothing is overwritten"
    assert cli.main(words[:2] + words[3:]) == 2
    spec = project / "spark-pipeline.yml"
    for round_number in range(2):
        nsqd.publish(topic, numbered(100 * round_number, 100 * (round_number + 1)))
        done = subprocess.run(
            [sys.executable, "-m", "pyspark.pipelines.cli", "run", "--spec", str(spec)],
            capture_output=True,
            text=True,
            timeout=SPARK_PATIENCE_S,
            env=environment(SPARK_REMOTE=remote),
        )
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert_each_once([body for _, body in stored(nsqd.address, f"{topic}-out")], 200)


@pytest.mark.long
def test_a_cluster_of_ones_own_and_a_job_on_it(nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """Executors have flintmq from the pack alone, and nothing of the cluster is left in the end."""
    nsqd.publish(topic, numbered(0, 1000))
    place = tmp_path / "cluster"
    flags = ["--workers=1", "--port=0", "--ui-port=0", "--memory=1g", "--timeout=10m"]
    started = cluster.up(resolve(cluster.UpOptions, [f"--directory={place}", *flags], {}).options)
    try:
        assert [process.name for process in started.processes] == ["worker-0", "master"]
        assert all(process.is_there() for process in started.processes)
        with pytest.raises(cluster.ClusterError, match=f"runs already at {started.url}"):
            cluster.up(resolve(cluster.UpOptions, [f"--directory={place}", *flags], {}).options)
        done = submitted(
            f"--master={started.url}", "--jvm=quick", "--conf=spark.executor.memory=512m",
            "--conf=spark.driver.host=127.0.0.1", "--", str(JOB), nsqd.address, topic, str(tmp_path / "job"), "session",
            XDG_CACHE_HOME=str(tmp_path),
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr[-4000:]
        assert said(done.stdout) == SAME
        assert f"master {started.url} UTC ours" in done.stdout, "session() has taken what spark-submit was given"
    finally:
        ended = cluster.down(place)
    assert ended == started
    assert not any(process.is_there() for process in started.processes)
    assert [path.name for path in place.iterdir()] == [".lock"]
    assert cluster.down(place) is None


@pytest.mark.long
def test_a_cluster_that_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["pipeline", "cluster", "up", f"--directory={tmp_path / 'c'}"]
    with reserved_port() as port:
        port.listen()
        assert cli.main([*words, f"--port={port.getsockname()[1]}"]) == 1
        assert "cannot be listened on" in capsys.readouterr().err
    assert cli.main(["pipeline", "cluster", "sideways"]) == 2
    assert cli.main(["pipeline", "cluster", "down", f"--directory={tmp_path / 'none'}"]) == 0
    assert "no cluster runs" in capsys.readouterr().out
    (tmp_path / "c" / "cluster.json").write_text("{")
    assert cli.main([*words]) == 1
    assert "cannot be read" in capsys.readouterr().err
