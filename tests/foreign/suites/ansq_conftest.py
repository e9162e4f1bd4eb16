"""What ansq's tests ask for and its release leaves out: daemons on the ports that its tests name, and patience.

Some of them see a reader's connection before it has subscribed, and kill nsqd then, or while nsqlookupd still sends the
reader there, which it does not survive: whoever is quicker decides. So what they wait for has come when nobody waits
for an answer, too, and an nsqd has stopped when nsqlookupd knows it no more.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import inspect
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
from ansq.tcp.connection import NSQConnection
from ansq.tcp.reader import Lookupd

_PATIENCE_S = float(os.environ["SUITE_PATIENCE_S"])


class Daemon:
    """A daemon found by its name in PATH."""

    host = "127.0.0.1"

    def __init__(
        self, program: str, port: int, http_port: int, flags: Sequence[str], lookupd_http_ports: Sequence[int] = ()
    ) -> None:
        self._lookupd_http_ports = lookupd_http_ports
        self.port = port
        self.http_port = http_port
        self.tcp_address = f"{self.host}:{port}"
        self.http_address = f"{self.host}:{http_port}"
        self._command = [program, f"--tcp-address={self.tcp_address}", f"--http-address={self.http_address}", *flags]
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> None:
        self._process = subprocess.Popen(self._command)
        deadline = time.monotonic() + _PATIENCE_S
        while not self._answers():
            assert time.monotonic() < deadline, f"{self._command} does not answer"
            await asyncio.sleep(0.05)

    def _answers(self) -> bool:
        with contextlib.closing(http.client.HTTPConnection(self.host, self.http_port, timeout=5)) as connection:
            try:
                connection.request("GET", "/ping")
                return connection.getresponse().read() == b"OK"
            except OSError:
                return False

    async def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
            deadline = time.monotonic() + _PATIENCE_S
            while any(self._is_known_to(port) for port in self._lookupd_http_ports):  # before the reader asks again
                assert time.monotonic() < deadline, f"nsqlookupd still names {self.tcp_address}"
                time.sleep(0.005)

    def _is_known_to(self, lookupd_http_port: int) -> bool:
        with contextlib.closing(http.client.HTTPConnection(self.host, lookupd_http_port, timeout=5)) as connection:
            try:
                connection.request("GET", "/nodes")
                nodes = json.load(connection.getresponse())["producers"]
            except OSError:
                return False
            return any(node["tcp_port"] == self.port for node in nodes)


@contextlib.asynccontextmanager
async def _running(daemon: Daemon) -> AsyncIterator[Daemon]:
    try:
        await daemon.start()
        yield daemon
    finally:
        await daemon.stop()


Create = Callable[..., AbstractAsyncContextManager[Daemon]]


@pytest.fixture
def create_nsqd(tmp_path: Path) -> Create:
    def create(
        port: int = 4150, http_port: int = 4151, lookupd_tcp_addresses: Sequence[str] = (), **addresses: str
    ) -> AbstractAsyncContextManager[Daemon]:
        data_path = tmp_path / f"nsqd-{port}"
        data_path.mkdir()
        flags = [f"--data-path={data_path}", "--broadcast-address=127.0.0.1"]
        flags += [f"--lookupd-tcp-address={address}" for address in lookupd_tcp_addresses]
        lookupd_http_ports = [int(address.rpartition(":")[2]) + 1 for address in lookupd_tcp_addresses]
        return _running(Daemon("nsqd", port, http_port, flags, lookupd_http_ports))

    return create


@pytest.fixture
def create_nsqlookupd() -> Create:
    def create(port: int = 4160, http_port: int = 4161) -> AbstractAsyncContextManager[Daemon]:
        return _running(Daemon("nsqlookupd", port, http_port, ()))

    return create


@pytest.fixture
async def nsqd(create_nsqd: Create) -> AsyncIterator[Daemon]:
    async with create_nsqd() as daemon:
        yield daemon


@pytest.fixture
async def event_loop() -> asyncio.AbstractEventLoop:
    """What pytest-asyncio had before 1.0."""
    return asyncio.get_running_loop()


@pytest.fixture(autouse=True)
def unanswered(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What connections have asked nsqd, and readers nsqlookupd, and are not through with."""
    waiting: list[object] = []

    def counted(ask: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def asked(*args: Any, **options: Any) -> Any:
            question = object()
            waiting.append(question)
            try:
                return await ask(*args, **options)
            finally:
                waiting.remove(question)

        return asked

    monkeypatch.setattr(NSQConnection, "execute", counted(NSQConnection.execute))
    monkeypatch.setattr(Lookupd, "query_lookup", counted(Lookupd.query_lookup))
    return waiting


@pytest.fixture
def wait_for(unanswered: list[object]) -> Callable[[Callable[[], Any]], Awaitable[None]]:
    async def wait(condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            found = condition()
            if (await found if inspect.isawaitable(found) else found) and not unanswered:
                return
            assert time.monotonic() < deadline, f"waited {_PATIENCE_S:g} s for {inspect.getsource(condition)}"
            await asyncio.sleep(0.1)  # as ansq's own: what it looks at again meanwhile goes on

    return wait
