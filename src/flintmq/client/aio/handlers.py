"""A consumer's handler where it waits: in worker tasks, or in threads. Never one task per message.

Rules of this file:

- A worker is one task for its whole life; ``concurrency`` workers take from one inbox, which is the limit for free.
- The event loop is never kept for longer than ``SLICE_S`` by messages that are there already, so that heartbeats are
  answered and FINs are sent while a long queue is worked off.
- A worker that calls a plain function has a thread of its own, so that no handler waits for what else runs in threads.
- A thread is handed several messages at once as long as they are fast, one by one when they are slow. After ``SLICE_S``
  what is done is answered, and what has not begun is for others: nothing waits for the slow message in front of it.
- A handler may return what has yet to run, behind a decorator say: what can be awaited is awaited on the event loop, by
  the same worker, everything else is a failure. So is an exception that is returned, and the future of a pool. Nothing
  is finished that was not handled.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from flintmq.client.aio.handler_thread import HandlerThread
from flintmq.client.core.cancelling import cancelled_within
from flintmq.client.core.handlers import AsyncHandler, Handler, Mode, is_async, refuse_unhandled
from flintmq.client.core.inbox import Inbox
from flintmq.client.core.message import Message, let_go, settle, was_lost
from flintmq.env import Env

log = logging.getLogger("flintmq.client")

SLICE_S = 0.01
THREAD_BATCH_MAX = 256
_LOST = Exception("nsqd has taken the message back before the handler was called")


async def wait(inbox: Inbox) -> None:
    """Wait until there may be something to take, or the inbox has ended."""
    if inbox.is_closing:  # there is more, and it is not for us; it has ended when the loop has turned
        await asyncio.sleep(0)
        return
    if inbox.count or inbox.is_ended:
        return
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    inbox.add_waiter(partial(_wake, waiter))
    try:
        await waiter
    except asyncio.CancelledError:
        inbox.pass_on()  # it may have been our turn
        raise


async def wait_shortly(inbox: Inbox, timeout_s: float) -> None:
    """Wait like :func:`wait`, at most so long."""
    try:
        async with asyncio.timeout(timeout_s):
            await wait(inbox)
    except TimeoutError:
        pass


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


def worker(mode: Mode, inbox: Inbox, handler: Handler, env: Env, name: str) -> Coroutine[Any, Any, None]:
    """The coroutine of one worker.

    Args:
        name: of its thread, if it has one.
    """
    if mode is Mode.TASKS and is_async(handler):
        return work(inbox, handler)
    return work_in_thread(inbox, handler, HandlerThread(name) if env.has_threads else None, env)


async def work(inbox: Inbox, handler: AsyncHandler) -> None:
    """Be one worker that awaits an ``async def`` handler."""
    task = asyncio.current_task()
    async for message in iterate(inbox):
        try:
            if (result := await handler(message)) is not None:
                await run_out(result, message)
        except BaseException as error:  # noqa: BLE001 - what is not to be answered is raised again
            settle_raised(message, error, task)
        else:
            settle(message, None)


async def run_out(result: object, message: Message[Any]) -> None:
    """Await what a function returned, and what that gives, until nothing is left that has yet to run.

    Raises:
        TypeError: it says that the message is not handled: a generator, which cannot be awaited, or an exception.
    """
    while inspect.isawaitable(result):
        result = await result
    if result is not None:
        refuse_unhandled(result, message)


def settle_raised(
    message: Message[Any], error: BaseException, task: asyncio.Task[Any] | None, *, is_given_up: bool = False
) -> None:
    """Answer a message whose handler has raised; what ends the worker too is raised again.

    A cancellation is the application's failure like any other, unless this very task is cancelled.

    Args:
        task: that runs the handler.
    """
    if isinstance(error, GeneratorExit) and not _is_running(task):
        raise error  # it is destroyed, because its event loop was closed: nobody can be answered any more
    if isinstance(error, asyncio.CancelledError) and not (task is not None and task.cancelling()):
        error = cancelled_within(error)
    settle(message, error, is_given_up=is_given_up)
    if not isinstance(error, Exception):
        raise error


def _is_running(task: asyncio.Task[Any] | None) -> bool:
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


class _Batch:
    """Messages in the hands of a thread, which takes them out on the left; the event loop may take the rest back.

    Attributes:
        current: the handler is called with it now, or was last; the first one is never taken back.
        waiting: the handler has not been called with these.
        done: messages, and how the handler ended; for the event loop to answer.
    """

    __slots__ = ("current", "waiting", "done")

    def __init__(self, messages: list[Message[Any]]) -> None:
        self.waiting = deque(messages)
        self.current = self.waiting.popleft()
        self.done: deque[tuple[Message[Any], BaseException | None]] = deque()

    def settle_done(self) -> None:
        """Answer what is done."""
        done = self.done
        while done:
            message, error = done.popleft()
            if error is _LOST:
                let_go(message)
            else:
                settle(message, error)

    def settle_slice(self, inbox: Inbox) -> None:
        """Answer what is done, and let other workers have what has not begun, or nsqd when the inbox has ended."""
        self.settle_done()
        rest: list[Message[Any]] = []
        try:
            while True:
                rest.append(self.waiting.popleft())
        except IndexError:  # an end that the thread may have come to first
            pass
        if not inbox.is_ended:
            inbox.put_back(rest)
        else:
            for message in rest:
                message.requeue(0)


async def work_in_thread(inbox: Inbox, handler: Handler, thread: HandlerThread | None, env: Env) -> None:
    """Be one worker that calls a plain function in a thread of its own.

    Args:
        thread: None: there are none, and ``env`` says how what blocks is run.
    """
    run_blocking = env.run_blocking if thread is None else thread.run
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    size = 1
    try:
        while True:
            messages = _take_several(inbox, size, loop.time())
            if not messages:
                if inbox.is_ended:
                    return
                await wait(inbox)
                continue
            batch = _Batch(messages)
            began = loop.time()
            timer = loop.call_later(SLICE_S, batch.settle_slice, inbox) if batch.waiting else None
            try:
                returned = await run_blocking(_run, handler, batch, loop.time)
            except BaseException as error:
                batch.settle_slice(inbox)
                _leave(batch.current, error)
                raise
            finally:
                if timer is not None:
                    timer.cancel()
            if returned is None:
                batch.settle_done()
                size = min(2 * size, THREAD_BATCH_MAX) if loop.time() - began < SLICE_S else max(1, size // 4)
            else:
                batch.settle_slice(inbox)
                size = 1
                try:
                    await run_out(returned, batch.current)
                except BaseException as error:  # noqa: BLE001 - what is not to be answered is raised again
                    settle_raised(batch.current, error, task)
                else:
                    settle(batch.current, None)
    finally:
        if thread is not None:
            thread.end()


def _take_several(inbox: Inbox, count: int, now: float) -> list[Message[Any]]:
    batch: list[Message[Any]] = []
    while len(batch) < count and (message := inbox.take(now)) is not None:
        batch.append(message)
    return batch


def _leave(message: Message[Any], error: BaseException) -> None:
    """Give back the message that a handler is left with, because its worker is cancelled or what it raised ends it."""
    if isinstance(error, asyncio.CancelledError):
        log.warning(
            "a thread still runs the handler with message %r of %s, attempts %d: it is not waited for",
            message.id, message.nsqd, message.attempts,
        )  # fmt: skip
    if not message.is_answered:
        settle(message, asyncio.CancelledError())


def _run(handler: Handler, batch: _Batch, time: Callable[[], float]) -> Awaitable[object] | None:
    """Call the handler with each message; runs in a thread. Returns what the current one is to await, if so."""
    done, waiting = batch.done, batch.waiting
    message = batch.current
    while True:
        try:
            if was_lost(message, time()):
                done.append((message, _LOST))
            elif (result := handler(message)) is None:
                done.append((message, None))
            elif inspect.isawaitable(result):
                return result
            else:
                refuse_unhandled(result, message)
                done.append((message, None))
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            done.append((message, error))
        except asyncio.CancelledError as error:  # of something that the handler waited for: nobody cancels a thread
            done.append((message, cancelled_within(error)))
        try:
            message = batch.current = waiting.popleft()
        except IndexError:
            return None
