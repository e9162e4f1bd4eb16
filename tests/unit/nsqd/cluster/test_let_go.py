"""What was set aside is known by its directory, also to the next process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from flintmq.checksum import crc32
from flintmq.env import Env
from flintmq.nsqd.cluster.let_go import LetGo
from flintmq.testing.files import MemoryFiles


async def _at_once(work: Callable[..., Any], *args: Any) -> Any:
    return work(*args)


def started(files: MemoryFiles) -> LetGo:
    let_go = LetGo(Env(run_blocking=_at_once), files)
    asyncio.run(let_go.load())
    return let_go


def put_aside(files: MemoryFiles, name: str, log_id: int, is_whole: bool = True) -> None:
    files.make_directory("set-aside")
    files.make_directory(f"set-aside/{name}")
    data = b"FMQM" + (1).to_bytes(2, "big") + bytes(2) + bytes(4) + log_id.to_bytes(8, "big")
    file = files.open(f"set-aside/{name}/log.meta", create=True)
    file.write_at(0, data + (crc32(data) ^ (not is_whole)).to_bytes(4, "big"))
    file.close()


def test_what_was_set_aside_was_here(caplog: pytest.LogCaptureFixture) -> None:
    files = MemoryFiles()
    assert not started(files).aside_count and not caplog.text
    put_aside(files, "t-t.p-0000.1", 9)
    put_aside(files, "t-u.p-0000.1", 10, is_whole=False)
    put_aside(files, "removed-1", 11)
    let_go = started(files)
    assert [let_go.has(each) for each in (9, 10, 11)] == [True, False, False]
    assert let_go.aside_count == 2 and "t-t.p-0000.1" in caplog.text


def test_what_goes_is_known_to_this_process() -> None:
    let_go = started(MemoryFiles())
    let_go.note(9, is_aside=True)
    let_go.note(10, is_aside=False)
    assert let_go.has(9) and let_go.has(10) and let_go.aside_count == 1
    asyncio.run(let_go.recount())
    assert let_go.aside_count == 0 and let_go.has(9), "somebody removed it"
