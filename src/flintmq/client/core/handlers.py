"""Handlers of a consumer: the ways to run one, and running it in place; what waits stands in the shells."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from typing import Any, TypeAlias, TypeGuard

from flintmq.client.core.attempts import Attempts
from flintmq.client.core.cancelling import cancelled_within
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


def check_functions(handler: object, on_giving_up: object, more: Mapping[str, Any], *, may_be_async: bool) -> None:
    """See that what a consumer is to call can be called, and does its work when it is.

    Args:
        more: what few consumers set; ``on_error`` is looked at.
        may_be_async: there is an event loop, on which ``handler`` and ``on_giving_up`` may be awaited.

    Raises:
        OptionError: one of them cannot be used.
    """
    for option, function in (("handler", handler), ("on_giving_up", on_giving_up)):
        if function is not None:
            check_function(option, function, may_be_async=may_be_async)
    if (on_error := more.get("on_error")) is not None:
        check_function("on_error", on_error)


def check_function(option: str, function: object, *, may_be_async: bool = False) -> None:
    """Raise OptionError unless calling a function does its work, or gives what can be awaited where that is done."""
    allowed = "a function, plain or async def" if may_be_async else "a plain function"
    if not callable(function):
        raise OptionError(option, function, allowed, SOURCE)
    if _is(function, inspect.isgeneratorfunction) or _is(function, inspect.isasyncgenfunction):
        allowed = f"{allowed}; this one has a yield in it, so that calling it runs nothing of it"
    elif may_be_async or not is_async(function):
        return
    else:
        allowed = f"{allowed}; this one is async def, and nothing here awaits it"
    raise OptionError(option, getattr(function, "__qualname__", repr(function)), allowed, SOURCE)


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
    """Whether calling the handler gives a coroutine, as far as can be told without calling it."""
    return _is(handler, inspect.iscoroutinefunction)


def _is(function: object, kind: Callable[[Any], bool]) -> bool:
    """Whether a function is of a kind, or an object is whose class makes it one."""
    return kind(function) or kind(getattr(function, "__call__", None))  # noqa: B004


def refuse_unrun(result: object) -> None:
    """Raise TypeError if what a function returned has yet to run, as a coroutine or a generator has: nobody runs it.

    Decorators hide what a function is, so that only its result tells. None, which most return, need not be asked about.
    """
    if not (inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)):
        return
    if callable(close := getattr(result, "close", None)):
        close()  # else Python warns of a coroutine that was never awaited
    kind = type(result).__name__
    raise TypeError(f"the function returned a {kind}, which does nothing before somebody runs it, and nobody does")


def refuse_unhandled(result: object, message: Message[Any]) -> None:
    """Raise TypeError if what a function returned says that its message is not handled, or not yet.

    That is what has yet to run, a pool's future, and an exception that was returned and not raised, perhaps a Requeue;
    of a message that the function has answered, it is only the first. False is warned of: it means a failure in pynsq.

    Args:
        result: not None, which most return and which need not be asked about.
    """
    refuse_unrun(result)
    if message.is_answered:
        return
    if result is False:
        message._delivery.owner.note_returned_false()
    elif isinstance(result, BaseException):
        raise TypeError(f"the function returned {result!r}, which does nothing: raise it instead")
    elif isinstance(result, type) and issubclass(result, BaseException):
        raise TypeError(f"the function returned the class {result.__name__}, which does nothing: raise it instead")
    elif _is_of_a_pool(result):
        kind = type(result).__name__
        raise TypeError(
            f"the function returned a {kind} of a pool, for which nobody waits: do the work in the handler "
            "(concurrency= runs several), or wait there until it is done"
        )


def _is_of_a_pool(result: object) -> bool:
    """Whether it stands for what runs elsewhere, in a pool of threads or processes."""
    kinds = (("concurrent.futures", "Future"), ("multiprocessing.pool", "AsyncResult"))
    # whoever has not imported one cannot return its results
    return any(isinstance(result, getattr(sys.modules.get(module), name, ())) for module, name in kinds)


def call_in_place(
    handler: Handler,
    delivery: Delivery,
    attempts: Attempts,
    give_up: Callable[[Message[Any]], None],
    cancelled: type[BaseException],
) -> None:
    """Call a plain function with every message of a read and finish what it leaves unanswered, all in one go.

    Args:
        cancelled: what is raised by whoever waits for something that was cancelled.
    """
    finished: list[bytes] = []
    maximum = attempts.maximum
    for record in delivery.records:
        message = Message(delivery, record)
        if record[1] > maximum and attempts.are_over(record):
            give_up(message)
            continue
        try:
            if (result := handler(message)) is not None:
                refuse_unhandled(result, message)
        except Exception as error:  # noqa: BLE001 - the application's error is answered with a requeue
            settle(message, error)
        except cancelled as error:
            settle(message, cancelled_within(error))
        else:
            if mark_finished(message):
                finished.append(message.id)
    if finished:
        delivery.link.finish_all(finished)
