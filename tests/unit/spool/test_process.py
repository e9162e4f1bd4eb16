"""The spool as a whole, on a disk in memory: what it writes down of itself, and when."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest

from flintmq.env import Env
from flintmq.spool import process as module
from flintmq.spool.process import STATE, Settings, Spool
from flintmq.storage import OsFiles
from flintmq.testing import MemoryDisk
from flintmq.testing.files import MemoryFiles


class World:
    """A spool without topics; its writes of ``spool.json`` wait until a test lets them, as on a slow disk.

    Attributes:
        going: how many writes are under way.
        most: as many were at the same time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "STATE_INTERVAL_S", 0.001)
        monkeypatch.setattr(module, "LOOK_S", 3600.0)  # a disk in memory does not go away
        monkeypatch.setattr(module, "_wait_for_end", lambda *_: None)  # standard input is pytest's
        settings = Settings(
            directory="/spool", token_file="", topics=[], channel="c", nsqd=[], lookupd=[], max_in_flight=1,
            bytes_max=1 << 20, host="127.0.0.1", port=0, msg_timeout=1.0, connect_timeout=1.0,
            lookupd_poll_interval=1.0, link={},
        )  # fmt: skip
        self.disk = MemoryDisk()
        self.files: MemoryFiles = self.disk.attach()
        self.going = self.most = 0
        self.is_free = asyncio.Event()
        self.is_free.set()
        self.end = asyncio.get_running_loop().create_future()
        state = module._read_state(cast(OsFiles, self.files), settings)
        self.spool = Spool(Env(run_blocking=self._run), settings, cast(OsFiles, self.files), state, self.end)

    async def _run(self, function: Callable[..., Any], /, *arguments: Any) -> Any:
        """Who is cancelled waits no more, and the thread goes on."""
        return await asyncio.shield(asyncio.ensure_future(self._in_thread(function, *arguments)))

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.going += 1
        self.most = max(self.most, self.going)
        try:
            await self.is_free.wait()
            return function(*arguments)
        finally:
            self.going -= 1

    async def started(self) -> asyncio.Task[None]:
        """Run the spool until a write of its state is under way that does not end."""
        task = asyncio.create_task(self.spool.run(b"token", self.end))
        await until(lambda: self.state()["is_ended"] is False)
        self.is_free.clear()
        self.spool._moved()
        await until(lambda: self.going == 1)
        return task

    def state(self) -> dict[str, Any]:
        file = self.files.open(STATE)
        try:
            return cast(dict[str, Any], json.loads(file.read_at(0, 1 << 20)))
        finally:
            file.close()


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.001)


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_the_last_state_is_written_behind_the_one_that_is_being_written(monkeypatch):
    """A thread cannot be cancelled, and both would write the same file before they rename it."""
    world = World(monkeypatch)
    task = await world.started()
    world.end.set_result(None)
    await settle()
    assert world.most == 1 and not task.done()
    world.is_free.set()
    async with asyncio.timeout(60):
        await task
    assert world.most == 1 and world.state()["is_ended"] is True
    assert f"{STATE}.tmp" not in world.files.list("")


async def test_a_disk_that_does_not_take_it_is_told_of_and_waited_for(monkeypatch, caplog):
    """Who has the directory next would write the same file."""
    monkeypatch.setattr(module, "STATE_SLOW_S", 0.01)
    world = World(monkeypatch)
    task = await world.started()
    world.end.set_result(None)
    with caplog.at_level(logging.ERROR):
        await until(lambda: "spool.json of the spool is being written for 0.01 s" in caplog.text)
    assert world.going == 1 and not task.done()
    world.is_free.set()
    async with asyncio.timeout(60):
        await task
    assert world.state()["is_ended"] is True


async def test_a_directory_whose_first_write_was_cut_short_by_a_kill_is_begun_anew(monkeypatch):
    settings = World(monkeypatch).spool._settings
    files = MemoryDisk().attach()
    file = files.open(f"{STATE}.tmp", create=True)
    file.write_at(0, b'{"versi')
    file.close()
    assert module._read_state(cast(OsFiles, files), settings).channel == "c"
    assert files.list("") == [STATE]


async def test_a_state_that_cannot_be_written_leaves_the_one_before(monkeypatch, caplog):
    world = World(monkeypatch)
    task = await world.started()
    world.disk.fail("write", times=100, error=errno.ENOSPC)
    world.end.set_result(None)
    world.is_free.set()
    async with asyncio.timeout(60):
        await task
    assert world.state()["is_ended"] is False, "so the next one waits for what nsqd may still have in flight"
    assert "spool.json of the spool cannot be written" in caplog.text
