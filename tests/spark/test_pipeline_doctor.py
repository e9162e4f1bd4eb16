"""The doctor of the pipeline, and the pack that submit makes."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S
from tests.ports import reserved_port
from tests.spark.processes import NsqdProcess, environment

from flintmq import cli
from flintmq.options import resolve
from flintmq.pipeline import JOBS, doctor, flow, submit
from flintmq.pipeline.doctor import checkpoint
from flintmq.pipeline.plan_file import read_plan
from flintmq.pipeline.runner import Runner
from flintmq.spark.errors import SetupError


def options(*words: str) -> doctor.DoctorOptions:
    return resolve(doctor.DoctorOptions, words, {}).options


@pytest.mark.spark
def test_executors_reach_nsqd_or_not(spark: Any, nsqd: NsqdProcess):
    with reserved_port() as port:
        closed = f"127.0.0.1:{port.getsockname()[1]}"
        flags = options(f"--nsqd={nsqd.address}", f"--nsqd={closed}", "--master=local[2]", "--jvm=throughput")
        found = list(doctor.doctor(flags, Runner(spark=spark)))
    states = {finding.what: finding.state for finding in found}
    assert {states[name] for name in ("flintmq", "pyspark", "pyarrow", "numpy", "Java", "session")} == {"ok"}
    of_nsqd = [each for each in found if each.what.startswith(f"nsqd {nsqd.address}")]
    of_nobody = [each for each in found if each.what.startswith(f"nsqd {closed}")]
    assert [each.state for each in of_nsqd] == ["ok", "ok"], "from the driver, and from the executor"
    assert [each.state for each in of_nobody] == ["problem", "problem"]
    assert "refused" in of_nobody[1].seen.lower() and "--broadcast-address" in of_nobody[1].remedy
    (executor,) = [each for each in found if each.what.startswith("executor on ")]
    assert executor.state == "ok" and "pyarrow" in executor.seen


def test_without_starting_spark(nsqd: NsqdProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["pipeline", "doctor", f"--nsqd={nsqd.address}", "--start=false", f"--checkpoint={tmp_path / 'new'}"]
    assert cli.main([*words, "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {each["state"] for each in found} == {"ok"}
    assert cli.main(["pipeline", "doctor", "--lookupd=127.0.0.1:1", "--start=false"]) == 1
    assert "problem  nsqlookupd 127.0.0.1:1: " in capsys.readouterr().out
    assert cli.main(["pipeline", "doctor", "--nsqd=a:1", "--lookupd=b:1"]) == 2


def test_ports_taken_for_one_another(nsqd: NsqdProcess, capsys: pytest.CaptureFixture[str]):
    http = nsqd.http_address
    assert cli.main(["pipeline", "doctor", f"--lookupd={http}", "--start=false"]) == 1
    assert "no nsqlookupd is there" in capsys.readouterr().out
    assert cli.main(["pipeline", "doctor", f"--nsqd={http}", "--start=false"]) == 1
    assert "name nsqd's TCP port, 4150" in capsys.readouterr().out


def test_checkpoints(tmp_path: Path):
    assert checkpoint("hdfs://host/c").state == "note"
    assert checkpoint(str(tmp_path / "a" / "b")).seen == "is not there yet, and can be made"
    (tmp_path / "file").touch()
    assert checkpoint(str(tmp_path / "file" / "c")).state == "problem"
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "job.json").write_text('{"job": {"job": "dedupe", "topics": "t"}}')
    assert checkpoint(str(tmp_path / "job")).seen == "of the job dedupe, topics t"
    (tmp_path / "job" / "job.json").write_text("{")
    assert checkpoint(str(tmp_path / "job")).state == "problem"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "holiday.jpg").touch()
    assert "no checkpoint" in checkpoint(str(tmp_path / "other")).seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "job", "other"], "it only looks"


def test_the_pack_has_all_that_executors_import(tmp_path: Path):
    path = submit.pack(tmp_path / "pack.tgz", whole=False)
    with tarfile.open(path) as pack:
        pack.extractall(tmp_path / "env", filter="data")
    program = "import flintmq.spark.source, flintmq.spark.fetch, flintmq.spark.encode, pyspark_nsq, flintmq, msgspec\n"
    program += "print(flintmq.__file__, msgspec.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S,
        env=environment() | {"PYTHONPATH": str(tmp_path / "env")},
    )  # fmt: skip
    assert done.stdout.count(str(tmp_path / "env")) == 2, done.stderr
    with pytest.raises(SetupError, match="cannot write"):
        submit.pack(tmp_path / "pack.tgz" / "x")


def test_the_call_of_spark_submit(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["pipeline", "submit", "--master=spark://h:7077", "--conf=spark.executor.memory=4g", "--json"]
    assert cli.main([*words, "--", "dedupe", "--topic=t", "--key=body"]) == 0
    call = json.loads(capsys.readouterr().out)
    command = call["command"]
    assert command[0].endswith("bin/spark-submit") and command[1:3] == ["--master", "spark://h:7077"]
    (pack,) = tmp_path.glob("flintmq/flintmqenv-*.tgz")
    assert command[command.index("--archives") + 1] == f"{pack}#flintmqenv"
    assert {"spark.executorEnv.PYTHONPATH=flintmqenv", "spark.executor.memory=4g"} <= set(command)
    assert command[-5:] == ["pipeline", "dedupe", "--topic=t", "--key=body", "--master=spark://h:7077"]
    assert {"JAVA_HOME", "PYTHONPATH"} <= call["environment"].keys()
    program = tmp_path / "job.py"
    program.write_text("print()")
    assert cli.main(["pipeline", "submit", "--master=local[1]", "--pack=none", "--", str(program), "a b"]) == 0
    assert capsys.readouterr().out.endswith(f"{program} 'a b'\n")
    for more, said in (
        (["--", "dedupe"], "give --master"),
        (["--master=local"], "name what is to be submitted behind --"),
        (["--master=local", "--", "none.py"], "none.py is not there"),
        (["--master=local", "--", "dance"], "dance is neither a .py file nor a job"),
        (["--master=local", "--pack=none", "--archive=x", "--", "tail"], "has nothing to hold"),
        (["--master=local", "--conf=x=y", "--", "tail"], "names of Spark settings begin with spark."),
        (["--master=local", "--run", "--", "archive"], "archive does not run on a cluster: run flintmq pipeline arch"),
    ):
        assert cli.main(["pipeline", "submit", *more]) == 2, more
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", JOBS)
def test_what_is_submitted_takes_the_master_that_it_is_given(name: str, capsys: pytest.CaptureFixture[str]):
    """Whether a job is submitted or refused, its flags say the same."""
    has_master = cli.main(["pipeline", name, "--master=spark://h:7077", "--help"]) == 0
    assert "--master" in capsys.readouterr().out or not has_master
    assert JOBS[name].is_on_spark == (has_master and name != "submit")


def test_a_pipeline_is_submitted_with_its_file_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It runs at the master that submit was given, unless its file names another one."""
    plan = tmp_path / "x.toml"
    plan.write_text(f'name = "x"\nspark = {{ master = "local[1]" }}\n{PLAN}')
    submitting = ["pipeline", "submit", "--master=spark://h:7077", "--pack=none", "--json", "--"]
    for name in ("run", "check"):
        assert cli.main([*submitting, name, str(plan)]) == 0
        command = json.loads(capsys.readouterr().out)["command"]
        words = command[command.index("pipeline") :]
        assert words == ["pipeline", name, str(plan), "--master=spark://h:7077"]
        assert cli.main(words) == 2
        assert f"{plan}:2: master is local[1] here, and --master says spark://h:7077" in capsys.readouterr().err
    assert flow._session_of(read_plan(plan), "local[1]").master == "local[1]"
    plan.write_text(f'name = "x"\n{PLAN}')
    assert flow._session_of(read_plan(plan), "spark://h:7077").master == "spark://h:7077"
    assert flow._session_of(read_plan(plan)).master == "local[*]"


PLAN = """
checkpoint = "c"
[[source]]
name = "m"
options = { nsqd = "127.0.0.1:1", topic = "t" }
[[sink]]
from = "m"
format = "noop"
"""
