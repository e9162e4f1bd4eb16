"""The data path is looked at, and what it leads to is told once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from flintmq.env import Env
from flintmq.nsqd import data_path
from flintmq.nsqd.data_path import DataPathWatch
from flintmq.storage import OsFiles


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


async def test_each_change_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(data_path, "LOOK_S", 0.001)
    path = tmp_path / "data"
    path.mkdir()
    with contextlib.closing(OsFiles(str(path))) as files:
        looks = []
        displaced = files.displaced

        def look() -> str:
            looks.append(displaced())
            return looks[-1]

        monkeypatch.setattr(files, "displaced", look)
        watch = DataPathWatch(Env(), files)
        watch.start()
        await until(lambda: len(looks) > 3)
        assert watch.problem == "" and caplog.records == []
        path.rename(tmp_path / "elsewhere")
        await until(lambda: "is not there any more" in watch.problem)
        path.mkdir()
        await until(lambda: "is another directory" in watch.problem)
        path.rmdir()
        (tmp_path / "elsewhere").rename(path)
        await until(lambda: not watch.problem)
        await watch.close()
        assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]


async def test_a_file_system_that_does_not_answer_holds_nobody(tmp_path: Path):
    asked = asyncio.Event()

    async def run_blocking(*_: object) -> str:
        asked.set()
        await asyncio.Event().wait()
        return ""

    with contextlib.closing(OsFiles(str(tmp_path))) as files:
        watch = DataPathWatch(Env(run_blocking=run_blocking), files)
        watch.start()
        await asked.wait()
        await watch.close()
        assert watch.problem == ""
