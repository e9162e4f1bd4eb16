"""``flintmq tail``: the last messages of a topic, then those that come.

Rules of this file: FlintMQ's nsqd are read by their logs, so that no channel is made and nothing is taken from anybody;
of NSQ's own nothing but what comes from now on can be seen, by an ephemeral channel, and that is said.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from itertools import islice

from flintmq.errors import ConnectionFailed, OptionError, UsageError
from flintmq.names import is_valid_name
from flintmq.tools.shell.lines import Line, writer
from flintmq.tools.shell.link import Link, NothingThere, NotOurs
from flintmq.tools.shell.log import Log, LogReader
from flintmq.tools.shell.output import count_of, is_terminal, write_all

LOOK_EVERY_S = 0.1
LOOK_AGAIN_S = 1.0
AT_ONCE = 1000
"""Messages that are written together."""


def run(given: argparse.Namespace) -> int:
    """Print messages; return the exit code.

    Raises:
        FlintError: the command line is wrong, or there is no such topic.
    """
    if not is_valid_name(given.topic):
        raise OptionError("topic", given.topic, "1 to 64 of . a-z A-Z 0-9 _ -, and perhaps #ephemeral", "argument")
    if given.start is not None and given.start.kind in ("offset", "count"):
        raise UsageError("--from is a time, beginning or end here")
    link = Link(given)
    write = writer(given, is_terminal())
    try:
        with LogReader(link, given.topic) as reader:
            try:
                _Tail(given, link, reader, write).run()
            except KeyboardInterrupt:
                pass  # the usual way to end it
        return 0
    except NotOurs as error:
        if given.no_follow or given.start is not None:
            raise NotOurs(
                error.address, "show messages without consuming them; leave --no-follow and --from out"
            ) from None
        link.tell(f"nsqd {error.address} is not FlintMQ's: it cannot show the last messages, only those that come")
    from flintmq.tools.shell import sub

    more = {
        "channel": None,
        "count": None,
        "idle": None,
        "span": None,
        "command_line": None,
        "jobs": 1,
        "ordered": False,
    }
    return sub.run(argparse.Namespace(**{**vars(given), **more, "max_in_flight": 2500, "requeue": 0.0}))


class _Tail:
    """Reads on in every log of a topic."""

    def __init__(
        self, given: argparse.Namespace, link: Link, reader: LogReader, write: Callable[[Line], bytes]
    ) -> None:
        self._given, self._link, self._reader, self._write = given, link, reader, write
        self._places: dict[tuple[int, str], int] = {}

    def run(self) -> None:
        """Print what there is, and unless that is all, what comes.

        Raises:
            FlintError: there is no topic, or no nsqd.
        """
        self._begin()
        while not self._given.no_follow:
            time.sleep(LOOK_EVERY_S)
            try:
                self._print_news(self._reader.logs())
            except (ConnectionFailed, NothingThere) as error:
                self._link.tell(f"{error}; it is looked for again")
                time.sleep(LOOK_AGAIN_S)

    def _begin(self) -> None:
        given = self._given
        when = None if given.start is None else given.start.timestamp_ns(time.time_ns())
        try:
            logs = self._reader.logs(when)
        except NothingThere:
            if given.no_follow:
                raise
            self._link.tell(f"there is no topic {given.topic} yet; it is waited for")
            return
        if given.start is None:
            lines = [
                line for log in logs for line in self._reader.read(log, max(log.start, log.end - given.last), log.end)
            ]
            lines.sort(key=lambda line: line.timestamp_ns)  # of several partitions
            self._print(lines[max(0, len(lines) - given.last) :])
        for log in logs:
            self._places[log.partition, log.log_id] = log.at if when is not None and log.at is not None else log.end
        self._print_news(logs)

    def _print_news(self, logs: Sequence[Log]) -> None:
        """Print what has come to the logs since they were read last."""
        for log in logs:
            key = (log.partition, log.log_id)
            place = self._places.get(key, log.start)  # of a log that is new, everything is
            if place < log.start:
                self._link.tell(f"{count_of(log.start - place, 'message')} were deleted before they could be read")
            self._places[key] = max(place, log.end)
            lines = self._reader.read(log, max(place, log.start), log.end)
            while some := list(islice(lines, AT_ONCE)):
                self._print(some)

    def _print(self, lines: Sequence[Line]) -> None:
        if lines:
            write_all(b"".join(map(self._write, lines)))
