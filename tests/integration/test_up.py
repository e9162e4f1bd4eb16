"""flintmq up as a real process: what it prints works, it stops in order, and it says what is in its way."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration import forked, utilities
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.utilities import flintmq

from flintmq import cli

SOURCES = Path(__file__).resolve().parents[2] / "src"


class Up:
    """A running ``flintmq up``; what it prints is in ``said``."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.directory = directory
        self._output = directory / "up.log"
        self._start = self._output.stat().st_size if self._output.exists() else 0
        with self._output.open("ab") as output:
            streams: Any = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self.process = forked.start(["up", *flags], directory=directory, **streams)

    @property
    def said(self) -> str:
        return self._output.read_bytes()[self._start :].decode()

    def ready(self) -> Up:
        def is_up() -> bool:
            assert self.process.poll() is None, self.said
            return "Ctrl-C stops it" in self.said and self.said.endswith("/pub?topic=greetings'\n\n")

        wait_until(is_up, "flintmq up has greeted")
        return self

    def address(self, name: str, kind: str) -> str:
        found = re.search(rf"^  {name} +tcp (?P<tcp>\S+) +http://(?P<http>\S+)$", self.said, re.MULTILINE)
        assert found, self.said
        return found[kind]

    def to_try(self, words: str) -> str:
        """One of the commands to try, with what has to come before it."""
        lines = re.findall(r"^  (.*?)(?:  #.*)?$", self.said.partition("To try in another shell:\n\n")[2], re.MULTILINE)
        (found,) = [line for line in lines if f" {words}" in f" {line}"]
        (export,) = [line for line in lines if line.startswith("export ")]
        return f"{export}; exec {found}"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(PATIENCE_S)

    def discard(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(SOURCES)}


@pytest.fixture
def started() -> Iterator[list[Up]]:
    """Every process in the list is ended after the test."""
    each: list[Up] = []
    yield each
    for up in each:
        up.discard()


@pytest.fixture
def up(tmp_path: Path, started: list[Up]) -> Up:
    started.append(Up(tmp_path, "--free-ports"))
    return started[-1].ready()


@contextlib.contextmanager
def tried(up: Up, words: str) -> Iterator[subprocess.Popen[str]]:
    """Runs one of the printed commands; it is ended with the block."""
    with subprocess.Popen(
        ["sh", "-c", up.to_try(words)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(),
        cwd=up.directory,
    ) as shell:
        try:
            yield shell
        finally:
            shell.kill()


def publish(up: Up) -> None:
    with tried(up, "pub greetings") as pub:
        assert pub.wait(PATIENCE_S) == 0


def first_line(up: Up, words: str) -> str:
    """Runs one of the printed commands until it has printed a line; returns that."""
    with tried(up, words) as shell:
        assert shell.stdout is not None
        return shell.stdout.readline()


def failure(directory: Path, *flags: str, code: int = 1) -> str:
    """What a start that must fail says; it is one line on stderr."""
    done = flintmq("up", *flags, directory=directory)
    assert done.returncode == code, done
    assert done.stderr.startswith("flintmq up: ") and done.stderr.count("\n") == 1, done.stderr
    return done.stderr


def test_the_printed_commands_publish_look_on_and_consume(up: Up):
    publish(up)
    assert first_line(up, "tail greetings") == "hello\n"
    assert first_line(up, "sub greetings") == "hello\n"
    if shutil.which("curl"):
        assert first_line(up, "curl") == "OK"


def test_nsqadmin_shows_what_is_here(up: Up):
    publish(up)
    found = re.search(r"^  nsqadmin +http://(\S+)/$", up.said, re.MULTILINE)
    assert found, up.said
    host, _, port = found[1].rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=PATIENCE_S)
    connection.request("GET", "/api/topics")
    assert json.loads(connection.getresponse().read()) == {"topics": ["greetings"], "message": ""}

    def page() -> bytes:
        connection.request("GET", "/topics")
        return connection.getresponse().read()

    wait_until(lambda: b"greetings" in page(), "the page shows the topic")
    connection.close()
    assert up.stop() == 0


def test_it_runs_without_nsqadmin_where_that_is_not_wanted(tmp_path: Path, started: list[Up]):
    started.append(Up(tmp_path, "--free-ports", "--nsqadmin=false"))
    assert "  nsqadmin  " not in started[-1].ready().said


def test_nsqlookupd_knows_nsqd_when_it_is_up(up):
    """What needs a node, a topic with partitions, can be had at once."""
    connection = http.client.HTTPConnection(up.address("nsqlookupd", "http"), timeout=PATIENCE_S)
    try:
        connection.request("POST", "/topic/create?topic=parts&partition_num=2")
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
    finally:
        connection.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_it_stops_in_order_and_the_data_stays(number, tmp_path, started, up):
    assert f"created the data directory {tmp_path / 'flintmq-data'}\n" in up.said
    publish(up)
    assert up.stop(number) == 0
    assert "Traceback" not in up.said
    assert up.said.endswith("stopped; the messages stay in flintmq-data\n")
    started.append(Up(tmp_path, "--free-ports", "--durability=os"))
    again = started[-1].ready()
    assert f"using the data directory {tmp_path / 'flintmq-data'}\n" in again.said
    assert re.search("^  durability  os ", again.said, re.MULTILINE)
    assert first_line(again, "sub greetings") == "hello\n"


def test_it_stops_when_nobody_reads_what_it_prints(tmp_path):
    with utilities.started("flintmq", "up", "--free-ports", directory=tmp_path) as process:
        assert process.stdout is not None
        while b"Ctrl-C stops it" not in process.stdout.readline():
            pass
        process.stdout.close()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_second_one_says_that_the_directory_is_in_use(tmp_path, up):
    said = failure(tmp_path, "--free-ports")
    assert f"the data directory {tmp_path / 'flintmq-data'} is in use by another nsqd or flintmq up" in said
    assert "--data-path=DIRECTORY" in said
    publish(up)  # and the first one has not noticed


@pytest.mark.parametrize(
    ("flag", "who"),
    [
        ("--tcp-port", "nsqd (TCP)"),
        ("--http-port", "nsqd (HTTP)"),
        ("--lookupd-tcp-port", "nsqlookupd (TCP)"),
        ("--lookupd-http-port", "nsqlookupd (HTTP)"),
        ("--nsqadmin-port", "nsqadmin"),
    ],
)
def test_a_port_that_is_taken_is_named_with_its_flag(flag, who, tmp_path):
    others = ["--tcp-port=0", "--http-port=0", "--lookupd-tcp-port=0", "--lookupd-http-port=0", "--nsqadmin-port=0"]
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = failure(tmp_path, *others, f"{flag}={port}")
    assert f"{who} cannot listen on 127.0.0.1:{port}: Address already in use" in said
    assert f"{flag}=PORT" in said and "--free-ports" in said


def test_a_data_path_that_cannot_be_one(tmp_path):
    (tmp_path / "file").touch()
    said = failure(tmp_path, "--free-ports", "--data-path=file")
    assert f"cannot use {tmp_path / 'file'} as the data directory: " in said


def test_an_unknown_flag_has_a_neighbour(tmp_path):
    assert "did you mean --free-ports?" in failure(tmp_path, "--fre-ports", code=2)
    assert not (tmp_path / "flintmq-data").exists()


def test_several_nsqd_are_a_cluster(tmp_path: Path, started: list[Up], capsys: pytest.CaptureFixture[str]):
    started.append(Up(tmp_path, "--nsqd=2", "--free-ports", "--allow-same-host"))
    up = started[-1].ready()
    here = f"--lookupd-http-address={up.address('nsqlookupd', 'http')}"
    assert cli.main(["topic", "create", "spread", "--partitions=2", "--replicas=2", "--wait", here]) == 0
    capsys.readouterr()
    assert cli.main(["topic", "show", "spread", "--json", here]) == 0
    rows = json.loads(capsys.readouterr().out)["partitions"]
    leaders = {row["address"] for row in rows}
    assert len(leaders) == 2 and all(len(row["in_sync"]) == 2 for row in rows)
    publish(up)
    assert up.stop() == 0, up.said
    assert {path.name for path in (tmp_path / "flintmq-data").iterdir()} >= {"nsqd-1", "nsqd-2", "store"}
    for address in leaders:
        host, _, port = address.rpartition(":")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((host, int(port)), PATIENCE_S)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--allow-same-host"], "--allow-same-host is for several nsqd: add --nsqd=N"),
        (["--nsqd=2", "--cluster-store=127.0.0.1:4161"], "leave --cluster-store away"),
        (["--nsqd=0"], "--nsqd"),
    ],
)
def test_flags_of_several_nsqd_that_contradict_each_other(tmp_path: Path, flags: list[str], text: str):
    assert text in failure(tmp_path, *flags, code=2)
