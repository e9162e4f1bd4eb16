"""A consumer's handler where it waits: in worker tasks, or in threads. Never one task per message.

Rules of this file:

- A worker is one task for its whole life; ``concurrency`` workers take from one inbox, which is the limit for free.
- The event loop is never kept for longer than ``SLICE_S`` by messages that are there already, so that heartbeats are
  answered and FINs are sent while a long queue is worked off.
- A thread is handed several messages at once as long as they are fast, one by one when they are slow; what is done is
  reported at least every ``SLICE_S``, so that no FIN waits for the slow message behind it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

from flintmq.client.core.handlers import AsyncHandler, Handler, Mode, is_async
from flintmq.client.core.inbox import Inbox
from flintmq.client.core.message import Message, settle
from flintmq.clock import Clock
from flintmq.env import Env

Done = list[tuple[Message[Any], Exception | None]]

SLICE_S = 0.01
SLICE_NS = 10_000_000
THREAD_BATCH_MAX = 256


async def wait(inbox: Inbox) -> None:
    """Wait until there may be something to take, or the inbox has ended."""
    if inbox.count or inbox.is_ended:
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inbox.add_waiter(partial(_wake, waiter))
    try:
        await waiter
    except asyncio.CancelledError:
        inbox.pass_on()  # it may have been our turn
        raise


def _wake(waiter: asyncio.Future[None]) -> bool:
    if waiter.done():
        return False
    waiter.set_result(None)
    return True


async def iterate(inbox: Inbox) -> AsyncIterator[Message[Any]]:
    """Yield messages until the inbox has ended; waits only when there is none, or the loop had no turn for long."""
    time = asyncio.get_running_loop().time
    take = inbox.take
    slice_end = time() + SLICE_S
    while True:
        now = time()
        if now > slice_end:
            await asyncio.sleep(0)
            now = time()
            slice_end = now + SLICE_S
        message = take(now)
        if message is not None:
            yield message
        elif inbox.is_ended:
            return
        else:
            await wait(inbox)
            slice_end = time() + SLICE_S


def worker(mode: Mode, inbox: Inbox, handler: Handler, env: Env) -> Coroutine[Any, Any, None]:
    """The coroutine of one worker."""
    if mode is Mode.TASKS and is_async(handler):
        return work(inbox, handler)
    return work_in_thread(inbox, handler, env)


async def work(inbox: Inbox, handler: AsyncHandler) -> None:
    """Be one worker that awaits an ``async def`` handler."""
    async for message in iterate(inbox):
        try:
            await handler(message)
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            settle(message, error)
        except BaseException as error:
            settle(message, error)
            raise
        else:
            settle(message, None)


async def work_in_thread(inbox: Inbox, handler: Handler, env: Env) -> None:
    """Be one worker that calls a plain function in a thread."""
    loop = asyncio.get_running_loop()
    size = 1
    while True:
        batch = _take_several(inbox, size, loop.time())
        if not batch:
            if inbox.is_ended:
                return
            await wait(inbox)
            continue
        began = loop.time()
        try:
            _settle(await env.run_blocking(_run, handler, batch, env.clock, _reporter(loop)))
        except BaseException:
            # Ended by cancellation or by what is not an Exception: messages not handled yet go back at once. The thread
            # finds them answered; what it is working on may be delivered twice.
            for message in batch:
                if not message.is_answered:
                    settle(message, asyncio.CancelledError())
            raise
        size = min(2 * size, THREAD_BATCH_MAX) if loop.time() - began < SLICE_S else max(1, size // 4)


def _take_several(inbox: Inbox, count: int, now: float) -> list[Message[Any]]:
    batch: list[Message[Any]] = []
    while len(batch) < count and (message := inbox.take(now)) is not None:
        batch.append(message)
    return batch


def _reporter(loop: asyncio.AbstractEventLoop) -> Callable[[Done], Any]:
    return lambda done: loop.call_soon_threadsafe(_settle, done)


def _run(handler: Handler, batch: Sequence[Message[Any]], clock: Clock, report: Callable[[Done], Any]) -> Done:
    """Call the handler with each message; runs in a thread. Returns what was not reported yet."""
    done: Done = []
    report_at = clock.monotonic_ns() + SLICE_NS
    for message in batch:
        if message.is_answered:  # taken back meanwhile
            continue
        try:
            handler(message)
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            done.append((message, error))
        else:
            done.append((message, None))
        if clock.monotonic_ns() > report_at:
            report(done)
            done = []
            report_at = clock.monotonic_ns() + SLICE_NS
    return done


def _settle(done: Done) -> None:
    for message, error in done:
        settle(message, error)
