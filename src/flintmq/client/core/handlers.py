"""Handlers of a consumer: the ways to run one, and running it in place; what waits stands in the shells."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from enum import Enum
from typing import Any, TypeAlias, TypeGuard

from flintmq.client.core.message import Delivery, Message, mark_finished, settle
from flintmq.client.options import SOURCE
from flintmq.errors import OptionError

AsyncHandler: TypeAlias = Callable[[Message[Any]], Awaitable[object]]
Handler: TypeAlias = Callable[[Message[Any]], object]
"""Called with each message. An ``async def`` runs in worker tasks, a plain function in threads (or in place)."""


class Mode(Enum):
    """The ways to run a handler."""

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
            settle(message, error)
        else:
            if mark_finished(message):
                finished.append(message.id)
    if finished:
        delivery.link.finish_all(finished)
