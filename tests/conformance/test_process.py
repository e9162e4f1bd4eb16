"""Both daemons as processes, one case per rule: version, stderr, signals, exit codes, lock, clean stop, log file.

Source: NSQ's options, NSQ's data files.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.daemon_helpers import LookupConnection, identified, run_to_end, start_program, topics_of
from tests.integration.daemons import PATIENCE_S, Daemon, Daemons, Nsqd, Nsqlookupd, a_few_times, dpub, wait_until

PROGRAMS = ("nsqd", "nsqlookupd")
READY_WITHIN_PYTHONS = 6.0  # nsqd takes 2.5 to 4 of them, nsqlookupd 2
LINE = r"\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6} (DEBUG|INFO|WARNING|ERROR|FATAL): ."
both = pytest.mark.parametrize("program", PROGRAMS)
both_on_unix_sockets = pytest.mark.parametrize(
    "program", ["nsqd", pytest.param("nsqlookupd", marks=pytest.mark.improvement)]
)


class Process:
    """A daemon whose stdout and stderr are kept apart.

    Attributes:
        directory: where it runs, and nsqd's data path unless a flag says otherwise.
    """

    def __init__(self, program: str, directory: Path, flags: tuple[str, ...]) -> None:
        self.directory = directory
        self._out, self._err = directory / "stdout", directory / "stderr"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.popen = start_program(program, flags, directory, out, err)

    @property
    def out(self) -> str:
        return self._out.read_text(encoding="utf-8")

    @property
    def err(self) -> str:
        return self._err.read_text(encoding="utf-8")

    def wait_for(self, text: str) -> None:
        """Wait until stderr has ``text``."""
        wait_until(lambda: text in self.err or self.popen.poll() is not None, f"{text} on stderr")
        assert text in self.err, self.err

    def listening(self, what: str) -> list[str]:
        """Every address that stderr says is listened on."""
        return re.findall(rf"\b{what}: listening on (\S+)\n", self.err)

    def end(self, number: signal.Signals) -> int:
        """Send a signal and return the exit code."""
        self.popen.send_signal(number)
        return self.popen.wait(PATIENCE_S)


@contextlib.contextmanager
def running(program: str, directory: Path, *flags: str, addresses: bool = True) -> Iterator[Process]:
    """A daemon in a directory of its own, which need not be listening yet."""
    directory.mkdir(exist_ok=True)
    free = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0") if addresses else ()
    process = Process(program, directory, (*(quick_flags() if program == "nsqd" else ()), *free, *flags))
    try:
        yield process
    finally:
        if process.popen.poll() is None:
            process.popen.kill()
        process.popen.wait()
    assert "Traceback" not in process.err, process.err


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def daemon(nsqd: Nsqd, nsqlookupd: Nsqlookupd) -> dict[str, Daemon]:
    """The shared daemons by name."""
    return {"nsqd": nsqd, "nsqlookupd": nsqlookupd}


def on_unix_socket(path: Path) -> bool:
    """Whether somebody accepts connections at a path."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect(str(path))
        except OSError:
            return False
    return True


# -- version -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("flag", ["-version", "--version", "--version=true"])
def test_version(program: str, flag: str):
    ended = run_to_end(program, flag)
    assert (ended.code, ended.err) == (0, "")
    assert re.fullmatch(rf"{program} v\d+\.\d+\.\d+\S* \(built w/(go|python)\d+\.\d+\.\d+\).*\n", ended.out)


@both
def test_version_begins_with_that_of_the_NSQ_it_is_like(program: str):
    """What scripts and clients' suites read; FlintMQ's own stands behind it."""
    assert run_to_end(program, "--version").out.startswith(f"{program} v1.3.0 (built w/")


@both
def test_version_starts_nothing(program: str):
    ended = run_to_end(program, "--version", "--tcp-address=127.0.0.1:0")
    assert (ended.code, ended.err) == (0, "")


# -- stderr ------------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("what", ["TCP", "HTTP"])
def test_one_line_says_where_it_listens(daemon: dict[str, Daemon], program: str, what: str):
    lines = [line for line in daemon[program].log.splitlines() if f"{what}: listening on" in line]
    assert len(lines) == 1
    host, port = daemon[program].tcp if what == "TCP" else daemon[program].http
    assert lines[0].endswith(f" INFO: {what}: listening on {host}:{port}")
    assert port > 0
    socket.create_connection((host, port), PATIENCE_S).close()


@both
def test_the_lines_are_on_stderr_and_stdout_is_silent(tmp_path: Path, program: str):
    with running(program, tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        assert len(process.listening("TCP")) == len(process.listening("HTTP")) == 1
        assert process.out == ""


def test_nsqd_without_http_says_nothing_of_it(tmp_path: Path):
    with running("nsqd", tmp_path / "d", "--tcp-address=127.0.0.1:0", "--http-address=", addresses=False) as process:
        process.wait_for("TCP: listening on")
        time.sleep(0.05)
        assert process.listening("HTTP") == []


def test_nsqd_without_a_certificate_has_no_https(nsqd: Nsqd):
    assert "HTTPS: listening on" not in nsqd.log


def test_nsqd_with_a_certificate_says_where_https_is(tmp_path: Path, certificates: Certificates):
    flags = (f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}")
    with running("nsqd", tmp_path / "d", *flags, "--https-address=127.0.0.1:0") as process:
        process.wait_for("HTTPS: listening on")
        (address,) = process.listening("HTTPS")
        host, _, port = address.rpartition(":")
        socket.create_connection((host, int(port)), PATIENCE_S).close()
        assert len(process.listening("TCP")) == len(process.listening("HTTP")) == 1


@both
def test_ipv6_is_shown_in_brackets(tmp_path: Path, program: str):
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 here")
    flags = ("--tcp-address=[::1]:0", "--http-address=[::1]:0")
    with running(program, tmp_path / "d", *flags, addresses=False) as process:
        process.wait_for("HTTP: listening on")
        for what in ("TCP", "HTTP"):
            (address,) = process.listening(what)
            assert re.fullmatch(r"\[::1\]:[1-9]\d*", address)
            socket.create_connection(("::1", int(address.rpartition(":")[2])), PATIENCE_S).close()


@both
@pytest.mark.parametrize("host", ["", "0.0.0.0"])
def test_every_interface(tmp_path: Path, program: str, host: str):
    flags = (f"--tcp-address={host}:0", f"--http-address={host}:0")
    with running(program, tmp_path / "d", *flags, addresses=False) as process:
        process.wait_for("HTTP: listening on")
        for what in ("TCP", "HTTP"):
            (address,) = process.listening(what)
            socket.create_connection(("127.0.0.1", int(address.rpartition(":")[2])), PATIENCE_S).close()


@both
def test_log_lines_have_nsq_s_form(daemon: dict[str, Daemon], program: str):
    assert all(re.match(rf"\[{program}\] {LINE}", line) for line in daemon[program].log.splitlines())


@pytest.mark.usefixtures("started_anew")
@both
def test_it_is_ready_soon(shared_daemons: Daemons, program: str):
    """Within a few times what Python itself takes: ``benchmarks/bench_topics.py`` says how many seconds that is."""

    def attempt(_number: int) -> None:
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", "import asyncio, ssl"], check=True, timeout=PATIENCE_S)
        python_s = time.monotonic() - began
        started = shared_daemons.nsqd(*quick_flags()) if program == "nsqd" else shared_daemons.nsqlookupd()
        assert started.request("GET", "/ping").body == b"OK"
        started.stop()
        assert started.started_in_s < READY_WITHIN_PYTHONS * python_s

    a_few_times(attempt)


# -- unix sockets ------------------------------------------------------------------------------------------------------


def unix_flags(directory: Path) -> tuple[str, ...]:
    return f"--tcp-address={directory / 'tcp'}", f"--http-address={directory / 'http'}"


@both_on_unix_sockets
def test_unix_sockets_are_shown_as_paths(tmp_path: Path, program: str):
    with running(program, tmp_path, *unix_flags(tmp_path), addresses=False) as process:
        process.wait_for("HTTP: listening on")
        assert (process.listening("TCP"), process.listening("HTTP")) == (
            [str(tmp_path / "tcp")],
            [str(tmp_path / "http")],
        )


@pytest.mark.improvement
@both_on_unix_sockets
def test_the_first_line_means_that_every_address_is_listened_on(tmp_path: Path, program: str):
    """NSQ promises nothing of the kind."""
    with running(program, tmp_path, *unix_flags(tmp_path), addresses=False) as process:
        process.wait_for("TCP: listening on")
        assert on_unix_socket(tmp_path / "http")
        assert on_unix_socket(tmp_path / "tcp")


@both_on_unix_sockets
def test_a_clean_stop_removes_the_sockets(tmp_path: Path, program: str):
    with running(program, tmp_path, *unix_flags(tmp_path), addresses=False) as process:
        process.wait_for("HTTP: listening on")
        assert process.end(signal.SIGTERM) == 0
        assert not (tmp_path / "tcp").exists()
        assert not (tmp_path / "http").exists()


@pytest.mark.improvement
@both_on_unix_sockets
def test_sockets_of_a_killed_daemon_are_in_nobody_s_way(tmp_path: Path, program: str):
    """NSQ does not start until somebody has removed them."""
    for number in (signal.SIGKILL, signal.SIGTERM):
        with running(program, tmp_path, *unix_flags(tmp_path), addresses=False) as process:
            process.wait_for("HTTP: listening on")
            assert on_unix_socket(tmp_path / "tcp")
            process.end(number)


@both_on_unix_sockets
def test_a_socket_that_somebody_listens_on_is_not_taken(tmp_path: Path, program: str):
    with running(program, tmp_path, *unix_flags(tmp_path), addresses=False) as process:
        process.wait_for("HTTP: listening on")
        (tmp_path / "other").mkdir()
        ended = run_to_end(program, *unix_flags(tmp_path), cwd=tmp_path / "other")
        assert ended.code == 1
        assert f"FATAL: failed to instantiate {program} - listen ({tmp_path}/" in ended.err
        assert on_unix_socket(tmp_path / "tcp")
        assert on_unix_socket(tmp_path / "http")


@both_on_unix_sockets
def test_a_file_that_is_no_socket_is_not_removed(tmp_path: Path, program: str):
    (tmp_path / "tcp").write_text("precious", encoding="utf-8")
    ended = run_to_end(program, *unix_flags(tmp_path), cwd=tmp_path)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate {program} - listen ({tmp_path / 'tcp'}) failed - " in ended.err
    assert (tmp_path / "tcp").read_text(encoding="utf-8") == "precious"


# -- signals -----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_stops_it_cleanly(tmp_path: Path, program: str, number: signal.Signals):
    with running(program, tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        assert process.end(number) == 0


@both
def test_a_stop_closes_connections_and_listeners(shared_daemons: Daemons, program: str):
    stopping = shared_daemons.nsqd(*quick_flags()) if program == "nsqd" else shared_daemons.nsqlookupd()
    magic = b"  V2" if program == "nsqd" else b"  V1"
    with socket.create_connection(stopping.tcp, PATIENCE_S) as client:
        client.sendall(magic)
        stopping.request("GET", "/ping")
        stopping.stop()
        assert client.recv(1) == b""
    for address in (stopping.tcp, stopping.http):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, PATIENCE_S)


@both
def test_a_second_signal_changes_nothing(tmp_path: Path, program: str):
    with running(program, tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        deadline = time.monotonic() + PATIENCE_S
        while process.popen.poll() is None and time.monotonic() < deadline:  # to the very end of the process
            process.popen.send_signal(signal.SIGTERM)
            time.sleep(0.001)
        assert process.popen.poll() == 0


@pytest.mark.usefixtures("started_anew")
@pytest.mark.improvement
@both
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_a_signal_that_comes_early_is_a_clean_stop(tmp_path: Path, program: str, number: signal.Signals):
    """NSQ dies of a signal that comes before it listens."""
    with running(program, tmp_path / "d") as process:
        status = Path(f"/proc/{process.popen.pid}/status")

        def is_caught() -> bool:
            found = re.search(r"SigCgt:\s+(\w+)", status.read_text(encoding="ascii"))
            return found is not None and bool(int(found[1], 16) >> (signal.SIGTERM - 1) & 1)

        wait_until(is_caught, "a handler of SIGTERM")
        assert process.end(number) == 0


@pytest.mark.improvement
@both
def test_sighup_does_not_end_it(tmp_path: Path, program: str):
    """NSQ dies of it."""
    with running(program, tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        process.popen.send_signal(signal.SIGHUP)
        process.wait_for("SIGHUP: nothing to reopen, the log is on stderr")
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("program", "number"),
    [("nsqd", signal.SIGUSR2), ("nsqlookupd", signal.SIGUSR1), ("nsqlookupd", signal.SIGUSR2)],
)
def test_a_signal_that_means_nothing_does_not_end_it(tmp_path: Path, program: str, number: signal.Signals):
    with running(program, tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        process.popen.send_signal(number)
        assert process.end(signal.SIGTERM) == 0  # of several signals the lower number comes first


# -- it cannot start ---------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("flag", ["--tcp-address", "--http-address"])
def test_an_address_in_use_ends_it(tmp_path: Path, program: str, flag: str):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        flags = {"--tcp-address": "127.0.0.1:0", "--http-address": "127.0.0.1:0", flag: address}
        ended = run_to_end(program, *(f"{name}={value}" for name, value in flags.items()), cwd=tmp_path)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate {program} - listen ({address}) failed - " in ended.err
    assert "in use" in ended.err


@both
def test_an_address_that_is_not_ours_ends_it(tmp_path: Path, program: str):
    ended = run_to_end(program, "--tcp-address=192.0.2.1:0", "--http-address=127.0.0.1:0", cwd=tmp_path)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate {program} - listen (192.0.2.1:0) failed - " in ended.err


@pytest.mark.improvement
@both
def test_what_cannot_start_says_nothing_of_listening(tmp_path: Path, program: str):
    """NSQ may say that it listens for TCP first."""
    ended = run_to_end(program, "--tcp-address=127.0.0.1:0", "--http-address=192.0.2.1:0", cwd=tmp_path)
    assert ended.code == 1
    assert "listening on" not in ended.err


# -- data path ---------------------------------------------------------------------------------------------------------

FREE = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")


def test_a_data_path_in_use_ends_it(nsqd: Nsqd):
    ended = run_to_end("nsqd", *FREE, f"--data-path={nsqd.data_path}")
    assert ended.code == 1
    assert (
        f"FATAL: failed to instantiate nsqd - failed to lock data-path: cannot flock directory {nsqd.data_path} - "
        in ended.err
    )
    assert "(possibly in use by another instance of nsqd)" in ended.err
    assert nsqd.request("GET", "/ping").body == b"OK"


def is_locked(directory: Path) -> bool:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_the_lock_is_on_the_directory_and_goes_with_the_process(shared_daemons: Daemons, end: str):
    nsqd = shared_daemons.nsqd(*quick_flags())
    assert is_locked(nsqd.data_path)
    getattr(nsqd, end)()
    assert not is_locked(nsqd.data_path)


def test_a_locked_directory_is_refused(tmp_path: Path):
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        ended = run_to_end("nsqd", *FREE, f"--data-path={tmp_path}")
    finally:
        os.close(descriptor)
    assert ended.code == 1
    assert f"failed to lock data-path: cannot flock directory {tmp_path} - " in ended.err


def test_the_directory_must_exist(tmp_path: Path):
    ended = run_to_end("nsqd", *FREE, f"--data-path={tmp_path / 'missing'}")
    assert ended.code == 1
    assert "FATAL: failed to instantiate nsqd - " in ended.err
    assert str(tmp_path / "missing") in ended.err
    assert not (tmp_path / "missing").exists()


def test_the_default_is_the_current_directory(tmp_path: Path):
    with running("nsqd", tmp_path / "d") as process:
        process.wait_for("HTTP: listening on")
        assert is_locked(tmp_path / "d")
        assert len(list((tmp_path / "d").iterdir())) > 2  # besides stdout and stderr


# -- a clean stop keeps ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def restarted(shared_daemons: Daemons) -> tuple[Nsqd, dict[bytes, tuple[bytes, int, int]]]:
    """An nsqd that was stopped cleanly and started again; what a consumer held before: body -> id, time, attempts."""
    nsqd = shared_daemons.nsqd(*quick_flags())
    for target in (
        *("topic/create?topic=t", "channel/create?topic=t&channel=c", "channel/create?topic=t&channel=empty"),
        *("topic/create?topic=paused", "topic/pause?topic=paused"),
        *("channel/create?topic=t&channel=paused", "channel/pause?topic=t&channel=paused"),
        *("topic/create?topic=gone%23ephemeral", "channel/create?topic=t&channel=gone%23ephemeral"),
        "topic/create?topic=bare",
    ):
        nsqd.post(f"/{target}")
    nsqd.publish("t", b"in-flight-1", b"in-flight-2", b"waiting")
    nsqd.publish("paused", b"stays")
    nsqd.publish("bare", b"in-the-topic")
    with nsqd.connect() as consumer:
        consumer.ok(dpub("t", 60_000, b"deferred"))
        consumer.subscribe("t", "c", 2)
        first = consumer.messages(2)
        held = {message.body: (message.id, message.timestamp_ns, message.attempts) for message in first}
        nsqd.stop()
    nsqd.start()
    return nsqd, held


@pytest.mark.parametrize(
    ("topic", "channels"),
    [("t", ["c", "empty", "paused"]), ("paused", []), ("bare", [])],
)
def test_topics_and_channels_are_kept(restarted, topic: str, channels: list[str]):
    row = restarted[0].stats(topic)
    assert [each["channel_name"] for each in row["channels"]] == channels


def test_pause_flags_are_kept(restarted):
    nsqd, _ = restarted
    assert (nsqd.stats("paused")["paused"], nsqd.stats("t")["paused"]) == (True, False)
    assert (nsqd.stats("t", "paused")["paused"], nsqd.stats("t", "c")["paused"]) == (True, False)


def test_ephemeral_things_are_lost(restarted):
    nsqd, _ = restarted
    assert nsqd.get("/stats?format=json&topic=gone%23ephemeral")["topics"] in (None, [])
    assert "gone#ephemeral" not in [each["channel_name"] for each in nsqd.stats("t")["channels"]]


@pytest.mark.parametrize("channel", ["c", "empty", "paused"])
def test_every_message_is_kept_in_every_channel(restarted, channel: str):
    assert restarted[0].unfinished("t", channel) == 4


def test_messages_of_a_topic_without_channels_are_kept(restarted):
    assert restarted[0].stats("bare")["depth"] == 1
    assert restarted[0].stats("paused")["depth"] == 1


def test_counters_are_lost(restarted):
    nsqd, _ = restarted
    assert (nsqd.stats("t")["message_count"], nsqd.stats("t")["message_bytes"]) == (0, 0)
    row = nsqd.stats("t", "empty")
    assert (row["requeue_count"], row["timeout_count"]) == (0, 0)


@pytest.mark.improvement
def test_the_delay_of_a_deferred_message_is_kept(restarted):
    """NSQ delivers it at once after a restart."""
    nsqd, _ = restarted
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "empty", 10)
        assert {message.body for message in consumer.messages(3)} == {b"in-flight-1", b"in-flight-2", b"waiting"}
        consumer.nothing_comes()
        wait_until(lambda: nsqd.stats("t", "empty")["deferred_count"] == 1, "the message deferred")


def test_messages_in_flight_come_again_with_id_time_and_attempts(restarted):
    nsqd, held = restarted
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 10)
        again = {message.body: message for message in consumer.messages(3)}
        assert set(again) >= {b"waiting", *held}
        for body, (message_id, timestamp_ns, attempts) in held.items():
            message = again[body]
            assert (message.id, message.timestamp_ns, message.attempts) == (message_id, timestamp_ns, attempts + 1)
        assert again[b"waiting"].attempts == 1


def test_what_was_finished_does_not_come_again(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.publish("t", b"1", b"2", b"3")
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 3)
        one, _, three = consumer.messages(3)
        consumer.finish(one, three)
        consumer.settle()
        nsqd.stop()
    nsqd.start()
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 3)
        assert consumer.message().body == b"2"
        consumer.nothing_comes()


def test_a_stop_stores_what_was_acknowledged_last(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.publish("t", *(b"%d" % number for number in range(1000)))
    nsqd.stop()
    nsqd.start()
    assert nsqd.stats("t")["depth"] == 1000


def test_nsqlookupd_keeps_nothing(shared_daemons: Daemons):
    nsqlookupd = shared_daemons.nsqlookupd()
    with identified(nsqlookupd) as peer:
        peer.ok(b"REGISTER t c\n")
        nsqlookupd.post("/topic/create?topic=by-hand")
        assert topics_of(nsqlookupd) == ["by-hand", "t"]
        nsqlookupd.stop()
        assert peer.is_closed()
    nsqlookupd.start()
    assert topics_of(nsqlookupd) == []
    assert nsqlookupd.get("/nodes") == {"producers": []}


# -- the log file ------------------------------------------------------------------------------------------------------


@pytest.mark.improvement
@both
def test_a_log_file_takes_the_log_and_stderr_says_where_it_listens(tmp_path: Path, program: str):
    """NSQ logs to stderr only, and so for all cases of the log file."""
    path = tmp_path / "daemon.log"
    with running(program, tmp_path / "d", f"--log-file={path}") as process:
        process.wait_for("HTTP: listening on")
        assert process.end(signal.SIGTERM) == 0
        lines = path.read_text(encoding="utf-8").splitlines()
        on_stderr = process.err.splitlines()
    assert [line.rpartition(": listening on ")[0][-4:].strip(" :") for line in on_stderr] == ["TCP", "HTTP"]
    assert set(on_stderr) < set(lines)
    assert all(re.match(rf"\[{program}\] {LINE}", line) for line in lines)


@pytest.mark.improvement
@both
def test_a_log_file_is_appended_to(tmp_path: Path, program: str):
    path = tmp_path / "daemon.log"
    path.write_text("from before\n", encoding="utf-8")
    with running(program, tmp_path / "d", f"--log-file={path}") as process:
        process.wait_for("HTTP: listening on")
    assert path.read_text(encoding="utf-8").startswith("from before\n[")


@pytest.mark.improvement
@both
def test_sighup_goes_on_in_a_new_file(tmp_path: Path, program: str):
    path, rotated = tmp_path / "daemon.log", tmp_path / "daemon.log.1"
    with running(program, tmp_path / "d", f"--log-file={path}") as process:
        process.wait_for("HTTP: listening on")
        path.rename(rotated)
        process.popen.send_signal(signal.SIGHUP)
        wait_until(lambda: path.exists() and "SIGHUP: log file reopened" in path.read_text(encoding="utf-8"))
        assert "listening on" in rotated.read_text(encoding="utf-8")
        assert process.end(signal.SIGTERM) == 0
        assert "stopp" in path.read_text(encoding="utf-8")
        assert "stopp" not in rotated.read_text(encoding="utf-8")
        assert f"{len(os.listdir(tmp_path))} files" == "3 files"


@pytest.mark.improvement
def test_rotation_loses_no_line(shared_daemons: Daemons, tmp_path: Path):
    path = tmp_path / "nsqd.log"
    nsqd = shared_daemons.nsqd(*quick_flags(), f"--log-file={path}")
    made = 0
    stop = threading.Event()

    def make_topics() -> None:
        nonlocal made
        while not stop.is_set():
            nsqd.post(f"/topic/create?topic=rotated-{made}%23ephemeral")
            made += 1

    thread = threading.Thread(target=make_topics)
    thread.start()
    try:
        for number in range(8):
            before = made
            wait_until(lambda: made > before + 5, "lines")  # noqa: B023 - called at once
            path.rename(tmp_path / f"nsqd.log.{number}")
            nsqd.send_signal(signal.SIGHUP)
            wait_until(path.exists, "the new file")
    finally:
        stop.set()
        thread.join(PATIENCE_S)
    nsqd.stop()
    text = "".join(each.read_text(encoding="utf-8") for each in tmp_path.glob("nsqd.log*"))
    assert sorted(map(int, re.findall(r"TOPIC\(rotated-(\d+)#ephemeral\): created\n", text))) == list(range(made))


@pytest.mark.improvement
def test_a_log_file_that_cannot_be_opened_again_stays_in_use(tmp_path: Path):
    directory = tmp_path / "logs"
    directory.mkdir()
    path = directory / "nsqlookupd.log"
    with running("nsqlookupd", tmp_path / "d", f"--log-file={path}") as process:
        process.wait_for("HTTP: listening on")
        moved = tmp_path / "moved"
        directory.rename(moved)
        process.popen.send_signal(signal.SIGHUP)
        kept = moved / path.name
        wait_until(lambda: "SIGHUP: the log goes on in the old file" in kept.read_text(encoding="utf-8"))
        assert process.end(signal.SIGTERM) == 0


@pytest.mark.improvement
@both
def test_a_log_file_that_cannot_be_opened_ends_it(tmp_path: Path, program: str):
    ended = run_to_end(program, *FREE, f"--log-file={tmp_path / 'missing' / 'log'}", cwd=tmp_path)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate {program} - cannot open the log file {tmp_path}/missing/log - " in ended.err


@pytest.mark.improvement
@both
def test_with_a_log_file_stderr_still_says_why_it_ended(tmp_path: Path, program: str):
    path = tmp_path / "daemon.log"
    flags = ("--tcp-address=192.0.2.1:0", "--http-address=127.0.0.1:0", f"--log-file={path}")
    ended = run_to_end(program, *flags, cwd=tmp_path)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate {program} - listen (192.0.2.1:0) failed - " in ended.err
    assert f"FATAL: failed to instantiate {program} - " in path.read_text(encoding="utf-8")


@pytest.mark.improvement
def test_a_full_disk_under_the_log_file_stops_nothing(tmp_path: Path):
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    with running("nsqlookupd", tmp_path / "d", "--log-file=/dev/full") as process:
        process.wait_for("HTTP: listening on")
        (address,) = process.listening("TCP")
        host, _, port = address.rpartition(":")
        with LookupConnection((host, int(port))) as connection:
            connection.identify()
            connection.ok(b"REGISTER t\n")
        assert process.end(signal.SIGTERM) == 0
        assert process.err.count("cannot write the log file /dev/full - No space left on device\n") == 1
