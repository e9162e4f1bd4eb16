"""Background work: what fails is told once, goes on, and ends when it is cancelled; and nothing runs unwatched."""

from __future__ import annotations

import ast
import asyncio
from pathlib import Path

import pytest

import flintmq
from flintmq.net.tasks import kept_up, tell

SOURCES = Path(flintmq.__file__).parent
_WATCHED = ("add_done_callback", "kept_up(", "await asyncio.wait(", "await asyncio.shield(")


async def test_work_that_fails_goes_on_and_is_told_once(caplog):
    failures = [ValueError("a"), ValueError("a"), ValueError("b"), ValueError("a")]
    seen: list[Exception] = []

    async def work() -> None:
        if failures:
            raise failures.pop(0)

    await kept_up(work, "counting", seen.append, pause_s=0)
    assert [str(error) for error in seen] == ["a", "a", "b", "a"]
    assert [record.getMessage() for record in caplog.records] == [
        f"counting ended unexpectedly, it goes on in 0 s: ValueError('{text}')" for text in "aba"
    ]
    assert all(record.exc_info for record in caplog.records)


async def test_work_can_be_cancelled_while_it_runs_and_while_it_pauses(caplog):
    begun = asyncio.Event()

    async def fails() -> None:
        begun.set()
        raise ValueError

    async def waits() -> None:
        begun.set()
        await asyncio.Event().wait()

    for work in (fails, waits):
        begun.clear()
        task = asyncio.create_task(kept_up(work, "it", pause_s=3600))
        await begun.wait()
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert len(caplog.records) == 1


async def test_a_task_that_fails_is_told(caplog):
    async def work(fails: bool) -> None:
        if fails:
            raise ValueError("no")

    for fails in (False, True):
        task = asyncio.create_task(work(fails))
        task.add_done_callback(tell("it"))
        await asyncio.wait([task])
        await asyncio.sleep(0)
    cancelled = asyncio.create_task(asyncio.sleep(3600))
    cancelled.add_done_callback(tell("it"))
    cancelled.cancel()
    await asyncio.wait([cancelled])
    await asyncio.sleep(0)
    assert [record.getMessage() for record in caplog.records] == ["it ended unexpectedly: ValueError('no')"]


@pytest.mark.parametrize("package", ["nsqd", "nsqlookupd", "net", "client"])
def test_no_task_is_started_that_nobody_watches(package):
    """Every function that starts one says what becomes of its exception."""
    started = 0
    for path in sorted((SOURCES / package).rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        for function in ast.walk(ast.parse(source)):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            names = [node.attr for node in ast.walk(function) if isinstance(node, ast.Attribute)]
            if "create_task" in names or "ensure_future" in names:
                started += 1
                text = ast.get_source_segment(source, function) or ""
                assert any(word in text for word in _WATCHED), f"{path.name}: {function.name}"
    assert started or package == "nsqlookupd"
