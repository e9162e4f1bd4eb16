"""What nsqd does in the background meets errors that nobody thought of: it is told, /ping says so, and it goes on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from flintmq.broker.broker import Broker, BrokerOptions
from flintmq.env import Env, run_in_thread
from flintmq.errors import WriteFailed
from flintmq.net import http_auth
from flintmq.net.http_auth import HttpAuth
from flintmq.net.http_router import Router
from flintmq.net.tasks import kept_up
from flintmq.nsqd import drain, engine, lookup_peer
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.figures import statsd
from flintmq.storage import ChannelStore
from flintmq.testing import ManualClock, MemoryDisk
from flintmq.wire.lookup import PeerInfo


class Failing:
    """``run_blocking`` that raises what nobody expects, as often as it is told to, for functions of one name."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.count = name, count

    async def __call__(self, function: Callable[..., Any], /, *args: Any) -> Any:
        if self.count and function.__name__ == self.name:
            self.count -= 1
            raise ZeroDivisionError(self.name)
        return await run_in_thread(function, *args)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


def new_engine(run_blocking: Any, durability: str = "os") -> Engine:
    files = MemoryDisk().attach()
    broker = Broker(files, ChannelStore(files), BrokerOptions(), random.Random(1), print)
    broker.open(1)
    return Engine(Env(run_blocking=run_blocking), broker, durability=durability, sync_every=1, sync_timeout_ns=1)


async def test_writing_progress_goes_on(caplog, monkeypatch):
    monkeypatch.setattr(engine, "_RETRY_S", 0.01)
    failing = Failing("run_flush", 2)
    running = new_engine(failing)
    broker = running.broker
    running.start()
    topic = broker.topic("t", 1)
    broker.channel(topic, "c")
    running.schedule()
    stored: list[BaseException | None] = []
    await until(lambda: running.health)
    assert running.health == "writing progress failed: ZeroDivisionError('run_flush')"
    await until(lambda: broker.when_metadata_durable(stored.append, topic) is False and running.health is None)
    await running.close()
    assert sum("writing progress ended unexpectedly" in record.getMessage() for record in caplog.records) == 1


async def test_a_sync_that_ends_unexpectedly_is_an_error_for_who_published(caplog):
    failing = Failing("run_tickets", 0)
    running = new_engine(failing, "fsync")
    running.start()
    topic = running.broker.topic("t", 1)
    first = running.broker.publish_to(topic.first_partition, [b"x"])
    running.schedule()
    await until(lambda: first.ended)
    assert first.error is None
    failing.count = 1
    second = running.broker.publish_to(topic.first_partition, [b"y"])
    running.schedule()
    await until(lambda: second.ended)
    assert isinstance(second.error, WriteFailed) and "run_tickets" in str(second.error)
    assert topic.first_partition.log.failed  # /ping says so, until nsqd is started again
    assert "syncing ended unexpectedly" in caplog.text
    await running.close()


async def test_what_comes_after_a_sync_fails(caplog, monkeypatch):
    running = new_engine(run_in_thread, "fsync")
    running.start()
    topic = running.broker.topic("t", 1)

    def fails(_groups: object) -> None:
        raise ZeroDivisionError("commit")

    with monkeypatch.context() as patch:
        patch.setattr(running.broker, "commit_groups", fails)
        group = running.broker.publish_to(topic.first_partition, [b"x"])
        running.schedule()
        await until(lambda: group.ended)
    assert isinstance(group.error, WriteFailed)
    await until(lambda: running.health)
    assert "sync ended unexpectedly: ZeroDivisionError('commit')" in caplog.text
    again = running.broker.publish_to(topic.first_partition, [b"y"])
    running.schedule()
    await until(lambda: again.ended)
    assert again.error is None
    await running.close()


async def test_registration_goes_on(caplog, monkeypatch):
    monkeypatch.setattr("flintmq.nsqd.lookup_peer.kept_up", quick(kept_up))
    asked = []

    def me() -> PeerInfo:
        asked.append(1)
        if len(asked) < 3:
            raise ZeroDivisionError("me")
        return PeerInfo(version="1", tcp_port=1, http_port=2, hostname="h", broadcast_address="b")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(len(b"OK").to_bytes(4, "big") + b"OK")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    peer = lookup_peer.LookupPeer(f"127.0.0.1:{port}", Env(), me, list)
    await until(lambda: peer.info is not None)
    await peer.close()
    server.close()
    assert caplog.text.count("ended unexpectedly") == 1


async def test_why_registering_fails_is_said_when_that_changes(caplog, monkeypatch):
    """A nsqlookupd that was away and refuses this nsqd once it is back; and one that refuses in turns."""
    monkeypatch.setattr(lookup_peer, "_RETRY_MIN_S", 0.0)
    monkeypatch.setattr(lookup_peer, "_RETRY_MAX_S", 0.001)
    refusal = b"E_BAD_BODY IDENTIFY missing fields"
    asked: list[bool] = []
    refuses = [False]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(4)
        if refuses[0]:
            writer.write(len(refusal).to_bytes(4, "big") + refusal)
        asked.append(refuses[0])
        writer.close()

    clock = ManualClock()
    me = PeerInfo(version="1", tcp_port=1, http_port=2, hostname="h", broadcast_address="b")
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    peer = lookup_peer.LookupPeer(address, Env(clock=clock), lambda: me, list)

    def said(reason: str = "") -> int:
        return caplog.text.count(f"nsqlookupd {address}: {reason}")

    async def tried(count: int = 5) -> None:
        end = len(asked) + count
        await until(lambda: len(asked) > end)

    await until(said)
    refuses[0] = True
    await tried()
    assert said() == 1, "it was said a moment ago"
    clock.advance(5_000_000_000)
    await until(lambda: said(refusal.decode()))
    for _ in range(20):
        refuses[0] = not refuses[0]
        await tried()
    assert said() == 2, "no time has passed since it was said"
    clock.advance(5_000_000_000)
    await tried()
    assert said() == 2, "it is what was said last"
    await peer.close()
    server.close()
    assert caplog.text.count("trying again until it answers") == 2


async def test_the_file_of_tokens_is_still_looked_at(caplog, monkeypatch, tmp_path):
    monkeypatch.setattr(http_auth, "WATCH_INTERVAL_S", 0.001)
    path = tmp_path / "tokens.json"
    path.write_text(json.dumps({"client": [{"name": "a", "token": "a" * 20, "permissions": []}]}))
    auth = HttpAuth(str(path), Router(), {}, Env(run_blocking=Failing("file_stamp", 2)), False, "nsqd")
    auth.start()
    path.write_text(json.dumps({"client": []}))
    await until(lambda: auth._clients.count == 0)
    await auth.close()
    assert caplog.text.count("ended unexpectedly") == 1


async def test_draining_goes_on(caplog, monkeypatch):
    running = new_engine(run_in_thread)
    finished: list[int] = []
    draining = drain.Drain(Env(), running, 0, lambda: None)
    draining.finished = lambda: finished.append(1)
    failures = [ZeroDivisionError("busy")] * 2
    is_empty = draining._is_empty

    def fails() -> bool:
        if failures:
            raise failures.pop()
        return is_empty()

    monkeypatch.setattr(draining, "_is_empty", fails)
    draining.begin()
    await until(lambda: finished)
    assert caplog.text.count("draining ended unexpectedly") == 1
    await running.close()


async def test_reports_to_statsd_go_on(caplog):
    reports = []

    def topics() -> list[Any]:
        reports.append(1)
        if len(reports) < 3:
            raise ZeroDivisionError("rows")
        return []

    reporter = statsd.Reporter("127.0.0.1:9", 0.001, 508, statsd.Lines("nsq.", False), topics)
    await until(lambda: len(reports) > 3)
    await reporter.close()
    assert caplog.text.count("ended unexpectedly") == 1


def quick(work_of: Any) -> Any:
    def without_pause(work: Any, what: str, failed: Any = None, pause_s: float = 0) -> Any:
        return work_of(work, what, failed, 0)

    return without_pause


@pytest.fixture(autouse=True)
def _log_level(caplog):
    caplog.set_level("INFO")
