"""Malformed streams on every port at once: nothing breaks, and a consumer beside them gets every message.

``FUZZ_SECONDS`` says for how long on each event loop (default 6), ``FUZZ_SEED`` which streams; a failure prints both
and the last cases.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import secrets
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, SOURCES, Daemons, Nsqd, pub, wait_until
from tests.integration.fuzzing import Targets, lookupd_answers, mutated, play

SECONDS = float(os.environ.get("FUZZ_SECONDS", "6"))
SEED = os.environ.get("FUZZ_SEED") or secrets.token_hex(4)
_PLAYERS = 3
_TOPICS_MAX = 200
_MEMORY_MAX = 500 * 1024 * 1024
_CONTROL = "control"

pytestmark = [pytest.mark.timeout(SECONDS + 300), pytest.mark.usefixtures("started_anew")]


class Players:
    """Plays cases from several threads until it is stopped."""

    def __init__(self, targets: Targets) -> None:
        self.recent: deque[str] = deque(maxlen=40)
        self.count = 0
        self.failures: list[BaseException] = []
        self._targets = targets
        self._stop = threading.Event()
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._context.check_hostname = False
        self._context.verify_mode = ssl.CERT_NONE
        self._threads = [threading.Thread(target=self._play, args=(number,)) for number in range(_PLAYERS)]
        for thread in self._threads:
            thread.start()

    def _play(self, number: int) -> None:
        for case in itertools.count():
            if self._stop.is_set():
                return
            name = f"{SEED}-{number}-{case}"
            self.recent.append(name)
            self.count += 1
            try:
                with contextlib.suppress(OSError):  # closed in the middle, or nothing to read
                    play(name, self._targets, self._context)
            except BaseException as error:  # noqa: BLE001  # shown by the test
                self.failures.append(error)
                return

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


class Control:
    """A consumer that behaves, and what is published for it."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._consuming = nsqd.connect().subscribe(_CONTROL, "c", 100)
        self._publishing = nsqd.connect()
        self.count = 0

    def turn(self) -> None:
        """One message goes through; nobody else publishes to the topic."""
        body = b"%d" % self.count
        self._publishing.ok(pub(_CONTROL, body))
        message = self._consuming.message()
        assert message.body == body
        self._consuming.finish(message)
        self.count += 1

    def close(self) -> None:
        self._consuming.close()
        self._publishing.close()


@contextlib.contextmanager
def broken_nsqlookupd() -> Iterator[int]:
    """A port that answers every nsqd with accidents."""
    chance = random.Random(SEED)

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listening.accept()
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(0.2)
                    connection.recv(65536)
                    connection.sendall(lookupd_answers(chance))
                    connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listening.getsockname()[1]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join(PATIENCE_S)


def clean(nsqd: Nsqd) -> None:
    """Delete the topics that accidents have made."""
    topics = [row["topic_name"] for row in nsqd.get("/stats?format=json&include_clients=false")["topics"]]
    if len(topics) > _TOPICS_MAX:
        for topic in topics:
            if topic != _CONTROL:
                nsqd.request("POST", "/topic/delete?topic=" + topic.replace("#", "%23"))  # others may be quicker


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_malformed_streams_on_every_port(daemons: Daemons, tmp_path: Path, loop: str):
    certificates = Certificates(tmp_path / "certificates")
    limits = []
    if loop == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError('as if it were not installed')")
        limits = ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{SOURCES}"]
    print(f"FUZZ_SEED={SEED} FUZZ_SECONDS={SECONDS:g}")
    with broken_nsqlookupd() as broken:
        nsqlookupd = daemons.nsqlookupd(limits=limits)
        nsqd = daemons.nsqd(
            "--durability=os",
            "--max-msg-size=32768",
            "--max-body-size=131072",
            "--retention-bytes=1000000",
            f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}",
            f"--lookupd-tcp-address=127.0.0.1:{broken}",
            f"--tls-cert={certificates.server.cert}",
            f"--tls-key={certificates.server.key}",
            "--https-address=127.0.0.1:0",
            limits=limits,
        )
        nsqd.post("/topic/create?topic=fuzz-parts&partition_num=2")
        nsqd.post("/topic/create?topic=fuzz-headers&extend=true")
        control = Control(nsqd)
        found = wait_until(lambda: re.search(r"HTTPS: listening on (\S+):(\d+)", nsqd.log), "HTTPS of nsqd")
        assert found is not None
        players = Players(Targets(nsqd, nsqlookupd, (found[1], int(found[2]))))
        try:
            deadline = time.monotonic() + SECONDS
            for turn in itertools.count():
                if time.monotonic() > deadline:
                    break
                control.turn()
                if turn % 20 == 0:
                    assert not players.failures, players.failures
                    assert not (nsqd.crashes() or nsqlookupd.crashes())
                    assert nsqd.is_running and nsqlookupd.is_running
                    assert max(nsqd.resident_bytes(), nsqlookupd.resident_bytes()) < _MEMORY_MAX
                    clean(nsqd)
                time.sleep(0.02)
        except BaseException:
            print(f"the last cases: {' '.join(players.recent)}")
            raise
        finally:
            players.stop()
        print(f"{players.count} streams, {control.count} control messages, nsqd {nsqd.resident_bytes() >> 20} MiB")
        assert players.count > 50
        control.turn()
        control.close()
        for daemon in (nsqd, nsqlookupd):
            assert daemon.request("GET", "/ping").body == b"OK"
            daemon.stop()
            assert not daemon.crashes()


def test_no_accident_names_another_machine():
    """nsqd asks the nsqlookupds that it knows, and nsqlookupd tells nsqds, at the addresses that these say."""
    chance = random.Random("addresses")
    stream = b'{"broadcast_address": "127.0.0.1"}'
    streams = [mutated(chance, stream, lambda: stream) for _ in range(5000)]
    assert len(set(streams)) > 1000
    for each in streams:
        with contextlib.suppress(ValueError):
            fields = json.loads(each)
            address = fields.get("broadcast_address") if isinstance(fields, dict) else None
            assert address == "127.0.0.1" or not isinstance(address, str), each


def test_a_case_is_known_by_its_name():
    """The bytes of a case depend on nothing else."""
    streams = []
    for _ in range(2):
        chance = random.Random("a-name")
        streams.append([lookupd_answers(chance) for _ in range(20)])
    assert streams[0] == streams[1]
