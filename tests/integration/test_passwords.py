"""Passwords in addresses, ``http://user:password@host:port``: no program shows one, whatever comes of the address."""

from __future__ import annotations

import http.server
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.utilities import end, run, started

PASSWORD = "Pass@w0rd"
NOWHERE = f"somebody:{PASSWORD}@127.0.0.1:1"


class _Refusing(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """Where a nsqlookupd is that answers everything with 401, with a password in the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"somebody:{PASSWORD}@127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    "words",
    [
        ("flintmq", "channel", "list", "t", f"--lookupd={NOWHERE}"),
        ("flintmq", "cluster", "status", f"--lookupd={NOWHERE}"),
        ("flintmq", "admin", "topics", f"--lookupd-http-address={NOWHERE}"),
        ("flintmq", "doctor", "--lookupd-http-address=http://some,body:Pass'@w0rd@127.0.0.1"),
        ("nsq_stat", "--topic=t", "--channel=c", f"--lookupd-http-address={NOWHERE}"),
        ("nsqadmin", f"--lookupd-http-address={NOWHERE}"),
        ("nsqadmin", "--nsqd-http-address=127.0.0.1:1", f"--notification-http-endpoint={NOWHERE}"),
        ("nsqd", f"--lookupd-tcp-address={NOWHERE}"),
        ("nsqd", f"--statsd-address={NOWHERE}"),
        ("nsqlookupd", f"--cluster-store=ftp://{NOWHERE}"),
    ],
    ids=lambda words: " ".join(word.partition("=")[0] for word in words),
)
def test_a_refused_address_is_told_without_its_password(words):
    done = run(*words)
    told = (done.stdout + done.stderr).decode()
    assert done.returncode != 0 and "w0rd@" not in told, told
    assert "***@127.0.0.1" in told or "address 1 of 1 cannot be read" in told, told


def test_doctor_shows_no_password_of_an_nsqlookupd(refusing: str):
    done = run("flintmq", "doctor", f"--lookupd-http-address=http://{refusing}", "--lookupd-http-address=" + NOWHERE)
    told = (done.stdout + done.stderr).decode()
    assert "http://***@127.0.0.1:1\n" in told and "asks for a token" in told, told
    assert "w0rd@" not in told, told


def test_a_utility_logs_no_password_of_an_nsqlookupd(refusing: str, tmp_path: Path):
    flags = ["--topic-pattern=t.*", "--channel=c", f"--output-dir={tmp_path}", f"--lookupd-http-address={refusing}"]
    log = tmp_path / "log"
    with started("nsq_to_file", *flags, log=log) as process:
        wait_until(lambda: "answers 401 to /topics" in log.read_text() or process.poll() is not None)
        if process.poll() is None:
            end(process)
    assert "***@127.0.0.1" in log.read_text() and "w0rd@" not in log.read_text(), log.read_text()
