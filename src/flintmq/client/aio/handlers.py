"""How a consumer's handler is run: in place, in worker tasks, or in threads. Never one task per message.

Rules of this file:

- A worker is one task for its whole life; ``concurrency`` workers take from one inbox, which is the limit for free.
- The event loop is never kept for longer than ``SLICE_S`` by messages that are there already, so that heartbeats are
  answered and FINs are sent while a long queue is worked off.
- A thread is handed several messages at once as long as they are fast, one by one when they are slow; what is done is
  reported at least every ``SLICE_S``, so that no FIN waits for the slow message behind it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from enum import Enum
from typing import Any, TypeAlias, TypeGuard

from flintmq.client.core.message import Delivery, Message
from flintmq.client.inbox import Inbox
from flintmq.client.options import SOURCE
from flintmq.clock import Clock
from flintmq.env import Env
from flintmq.errors import OptionError

AsyncHandler: TypeAlias = Callable[[Message[Any]], Awaitable[object]]
Handler: TypeAlias = Callable[[Message[Any]], object]
"""Called with each message. An ``async def`` runs in worker tasks, a plain function in threads (or in place)."""

Done = list[tuple[Message[Any], Exception | None]]

SLICE_S = 0.01
SLICE_NS = 10_000_000
THREAD_BATCH_MAX = 256


class Mode(Enum):
    """How a handler is run."""

    PULLED = "iterated over"
    INLINE = "called in place"
    TASKS = "worker tasks"
    THREADS = "worker threads"


def mode_of(handler: Handler | None, inline: bool) -> Mode:
    """Decide how a handler is run.

    Raises:
        OptionError: ``inline`` and ``async def`` do not go together.
    """
    if handler is None:
        return Mode.PULLED
    if not inline:
        return Mode.TASKS if is_async(handler) else Mode.THREADS
    if is_async(handler):
        raise OptionError("inline", True, "a plain function as the handler; this one is async def", SOURCE)
    return Mode.INLINE


def is_async(handler: Handler) -> TypeGuard[AsyncHandler]:
    """Whether calling the handler gives a coroutine."""
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(getattr(handler, "__call__", None))  # noqa: B004


def call_in_place(
    handler: Handler, delivery: Delivery, attempts_max: int, give_up: Callable[[Message[Any]], None]
) -> None:
    """Call a plain function with every message of a read and finish what it leaves unanswered, all in one go."""
    finished: list[bytes] = []
    for record in delivery.records:
        message = Message(delivery, record)
        if record[1] > attempts_max:
            give_up(message)
            continue
        try:
            result = handler(message)
            if inspect.iscoroutine(result):
                result.close()
                raise TypeError("an inline handler is a plain function; this one returned a coroutine")
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            message.settle(error)
        else:
            if message.mark_finished():
                finished.append(message.id)
    if finished:
        delivery.link.finish_all(finished)


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
            await inbox.wait()
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
            message.settle(error)
        except BaseException as error:
            message.settle(error)
            raise
        else:
            message.settle(None)


async def work_in_thread(inbox: Inbox, handler: Handler, env: Env) -> None:
    """Be one worker that calls a plain function in a thread."""
    loop = asyncio.get_running_loop()
    size = 1
    while True:
        batch = _take_several(inbox, size, loop.time())
        if not batch:
            if inbox.is_ended:
                return
            await inbox.wait()
            continue
        began = loop.time()
        try:
            _settle(await env.run_blocking(_run, handler, batch, env.clock, _reporter(loop)))
        except BaseException:
            # Ended by cancellation or by what is not an Exception: messages not handled yet go back at once. The thread
            # finds them answered; what it is working on may be delivered twice.
            for message in batch:
                if not message.is_answered:
                    message.settle(asyncio.CancelledError())
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
        message.settle(error)
