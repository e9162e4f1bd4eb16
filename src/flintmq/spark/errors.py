"""The failures only Spark jobs know.

The rules of this file: as in :mod:`flintmq.errors`: an exception carries fields and builds its text from them.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar, cast

from flintmq.errors import FlintError

SOURCE = "option of format nsq"
"""The source of an option, for ``OptionError``."""

GONE = "the topic no longer exists, or the data directory is gone"
NOT_THIS_SPOOL = "they are not in this spoolLocation, which is another one than the checkpoint was made with"
CREATED_AGAIN = "the topic was deleted and created again"
NOT_CHOSEN = "the checkpoint has it, and the options leave it out: add it, or choose another checkpointLocation"
TAKEN_BACK = "messages were taken back (restored from a backup?), and their numbers are given again"
TAKEN_BACK_UNSEEN = f"{TAKEN_BACK}, which the checkpoint does not show"
"""Why the messages of a log are lost."""

UNCONFIRMED = "the leader of its partition may not know yet how far it is"
"""Why a log of a cluster ends before what was read of it."""

EXIT_TAKEN = 75
"""Exit code of a spool whose directory another process has."""

log = logging.getLogger("flintmq.spark")

P = ParamSpec("P")
R = TypeVar("R")


def line_first(method: Callable[P, R]) -> Callable[P, R]:
    """Log an error of ours as one line before Spark shows it below a traceback; for methods that Spark calls."""
    if inspect.isgeneratorfunction(method):

        @wraps(method)
        def iterate(*args: P.args, **kwargs: P.kwargs) -> Iterator[object]:
            with closing(cast(Generator[object, None, None], method(*args, **kwargs))) as items:
                while True:
                    with _line_first():  # not around the yield: meanwhile others call
                        try:
                            item = next(items)
                        except StopIteration:
                            return
                    yield item

        return cast(Callable[P, R], iterate)

    @wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        with _line_first():
            return method(*args, **kwargs)

    return call


@contextmanager
def _line_first() -> Iterator[None]:
    """Log what leaves the outermost of these blocks: a reader that calls another may do without its answer."""
    is_outermost, _calling.depth = not _calling.depth, _calling.depth + 1
    try:
        yield
    except FlintError as error:
        if is_outermost:
            log.error("%s", error)
        raise
    finally:
        _calling.depth -= 1


class _Calling(threading.local):
    depth = 0


_calling = _Calling()


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
        label: ``<nsqd>/<partition>``, or ``<partition>/<log id>`` as in offsets JSON where no nsqd has it.
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

    @property
    def loss(self) -> str:
        """The messages that are lost, and why, without advice."""
        messages = f"from {self.start}" if self.end is None else f"{self.start} to {self.end} (exclusive)"
        return f"topic {self.topic!r}, {self.label}: messages {messages} are lost: {self.reason}"

    def forgiven(self, at: int | None = None) -> str:
        """Return what to log with ``failOnDataLoss=false``: what is lost, and where reading goes on.

        Args:
            at: the sequence where it goes on; None: behind what is lost.
        """
        at = self.end if at is None else at
        later = ""
        if self.reason.startswith(TAKEN_BACK_UNSEEN):
            later = (
                f"; a later run with this checkpointLocation may skip what is stored up to {self.end}: begin with a "
                "new one"
            )
        return f"{self.loss}; going on {'without that log' if at is None else f'at {at}'}{later}"

    def __str__(self) -> str:
        advice = "Set failOnDataLoss=false to go on with what is there"
        if self.end is None and self.reason in (GONE, CREATED_AGAIN):
            advice = f"Nobody can tell any more whether there were any, also if all that was seen was read. {advice}"
        if self.reason.startswith(TAKEN_BACK):
            advice = (
                f"Set failOnDataLoss=false to go on with what is stored from {self.start} on, or begin with a new "
                "checkpointLocation"
            )
        if self.reason.startswith(TAKEN_BACK_UNSEEN):  # the next run does not know that a log has ended before
            advice = (
                "Begin with a new checkpointLocation: with this one a later run may skip what is stored up to "
                f"{self.end}"
            )
        return f"{self.loss}. {advice}"


class BadCheckpoint(FlintError):
    """Spark handed over offsets that this source did not write.

    Args:
        reason: what is wrong with them.
        version: of the form that this release writes.
    """

    def __init__(self, reason: str, version: int) -> None:
        super().__init__(reason, version)
        self.reason = reason
        self.version = version

    def __str__(self) -> str:
        return (
            f"the offsets in the checkpoint are not of format nsq, or a later release of flintmq wrote them: "
            f"{self.reason}; here forms up to {self.version} are known. Upgrade, or choose another checkpointLocation"
        )


class LogTwice(FlintError):
    """Two nsqds have a log with the same id, and neither is a copy that a cluster keeps.

    Args:
        topic, partition, log_id: of the log.
        first, second: addresses of the nsqds.
    """

    def __init__(self, topic: str, partition: int, log_id: str, first: str, second: str) -> None:
        super().__init__(topic, partition, log_id, first, second)
        self.topic = topic
        self.partition = partition
        self.log_id = log_id
        self.first = first
        self.second = second

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r}, partition {self.partition}: nsqd {self.first} and nsqd {self.second} both have log "
            f"{self.log_id}. If this is one nsqd with two addresses, name one of them; if one runs on a copy of the "
            "other's data directory, stop it: what the two have stored since cannot be told apart"
        )


class LogAway(FlintError):
    """No nsqd that can be asked serves a log now.

    Args:
        topic: the topic.
        label: of the log, as in :class:`DataLost`.
        reason: who could have it, and why it does not serve it.
    """

    def __init__(self, topic: str, label: str, reason: str) -> None:
        super().__init__(topic, label, reason)
        self.topic = topic
        self.label = label
        self.reason = reason

    def __str__(self) -> str:
        return f"topic {self.topic!r}, {self.label}: no nsqd serves it now: {self.reason}"


class RowsCutOff(FlintError):
    """Spark has failed or cancelled a task before it had given it all of its rows."""

    def __str__(self) -> str:
        return "Spark has ended this task before all of its rows were there: what it says of the task is why"


class NotAllTaken(FlintError):
    """A query that is to end with all that waits in nsqd cannot have it, or nobody knows whether it has.

    Args:
        topic: the topic.
        reason: what keeps the spool from it.
        waited_s: for so long.
    """

    def __init__(self, topic: str, reason: str, waited_s: float) -> None:
        super().__init__(topic, reason, waited_s)
        self.topic = topic
        self.reason = reason
        self.waited_s = waited_s

    @property
    def reason_said(self) -> str:
        """The reason, without advice."""
        return f"topic {self.topic!r}: there may be more than was read: {self.reason}, for {self.waited_s:.0f} s"

    def __str__(self) -> str:
        return (
            f"{self.reason_said}. What was not read waits in nsqd or in the spool: start the query again when that is "
            "mended, wait longer with nsqdDownTimeout, or set failOnDataLoss=false to end with what there is"
        )


class SpoolFailed(FlintError):
    """The process that takes messages from nsqd has ended, or cannot start.

    Args:
        reason: what it said last.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"the spool does not run: {self.reason}"
