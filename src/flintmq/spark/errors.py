"""The failures only Spark jobs know.

The rules of this file: as in :mod:`flintmq.errors`: an exception carries fields and builds its text from them.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from flintmq.errors import FlintError

SOURCE = "option of format nsq"
"""The source of an option, for ``OptionError``."""

log = logging.getLogger("flintmq.spark")

P = ParamSpec("P")
R = TypeVar("R")


def line_first(method: Callable[P, R]) -> Callable[P, R]:
    """Log an error of ours as one line before Spark shows it below a traceback; for methods that Spark calls."""
    if inspect.isgeneratorfunction(method):

        @wraps(method)
        def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[object]:
            with _line_first():
                yield from cast(Iterator[object], method(*args, **kwargs))

        return cast(Callable[P, R], iterate)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _line_first():
            return method(*args, **kwargs)

    return call


@contextmanager
def _line_first() -> Iterator[None]:
    try:
        yield
    except FlintError as error:
        log.error("%s", error)
        raise


class SetupError(FlintError):
    """This machine lacks something Spark needs.

    Args:
        missing: what is missing or too old.
        remedy: what to do about it.
    """

    def __init__(self, missing: str, remedy: str) -> None:
        super().__init__(missing, remedy)
        self.missing = missing
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.missing}; {self.remedy}"


class DataLost(FlintError):
    """Messages that the query has to read are no longer there.

    Args:
        topic: the topic.
        label: ``<nsqd>/<partition>`` as in offsets JSON.
        start: first lost sequence.
        end: one past the last lost sequence, None when nobody can tell.
        reason: what happened to them.
    """

    def __init__(self, topic: str, label: str, start: int, end: int | None, reason: str) -> None:
        super().__init__(topic, label, start, end, reason)
        self.topic = topic
        self.label = label
        self.start = start
        self.end = end
        self.reason = reason

    def __str__(self) -> str:
        messages = f"from {self.start}" if self.end is None else f"{self.start} to {self.end} (exclusive)"
        return (
            f"topic {self.topic!r}, {self.label}: messages {messages} are lost: {self.reason}. "
            "Set failOnDataLoss=false to go on with what is there"
        )
