"""The limit of open files, and the part of it that is kept from connections, and from new topics.

Rules of this file: a daemon that has no descriptor left can roll no segment, and its event loop can neither accept a
connection nor stop trying. So connections are refused while some are left for everything else. What keeps a file open
as long as it is there, a topic or a partition, is refused while twice as many are left, so that clients have their
share; and of what is kept from clients half is for HTTP, so that topics can be deleted.

Source: tests/sim/README.md; POSIX.1-2017 2.14 (a new descriptor is the lowest free number).
"""

from __future__ import annotations

import asyncio
import os
import resource

from flintmq.errors import FlintError

_SHARE = 16
_LEAST = 16
_MOST = 64
_KEPT_FROM_TOPICS = 2  # times what is kept from clients
_OWN = 100  # of a daemon that has no topics and no clients: what it listens on, its databases, other nodes
_LOGS_LEAST = 8


class TooFewDescriptors(FlintError):
    """Something that keeps a file open cannot be made now.

    Args:
        what: is not made, such as ``topic t``.
        limit: the most files this process may have open.
    """

    def __init__(self, what: str, limit: int) -> None:
        super().__init__(what, limit)
        self.what = what
        self.limit = limit

    def __str__(self) -> str:
        return (
            f"{self.what} cannot be created: too few of {self.limit} open files are left, and each topic or partition "
            "takes one: delete topics, or raise the limit (LimitNOFILE of systemd, ulimit -n) and start nsqd again"
        )


def kept_count(limit: int) -> int:
    """Return how many of ``limit`` descriptors are for files only: a sixteenth, from 16 to 64."""
    return min(max(_LEAST, limit // _SHARE), _MOST)


def descriptor_limit() -> int:
    """Return the most files this process may have open at the moment."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def room(wanted: int) -> int:
    """Return how many of ``wanted`` files can be opened and kept without one of those that are kept from topics.

    They are opened, because descriptors that are free lie between others, and closed again: the lowest free number is
    given out. Takes about 1 us each; other threads have the rest meanwhile.
    """
    limit = descriptor_limit()
    if limit < 0:  # there is none
        return wanted
    end = limit - kept_count(limit) * _KEPT_FROM_TOPICS
    opened: list[int] = []
    try:
        number = os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        opened.append(number)
        while number < end and len(opened) < wanted:
            number = os.dup(number)
            opened.append(number)
    except OSError:
        pass  # all are in use
    for each in opened:
        os.close(each)
    return sum(each < end for each in opened)


def logs_max() -> int:
    """Return how many logs, each of which keeps one file open, go well with the limit of open files; 0: it has none."""
    limit = descriptor_limit()
    return 0 if limit < 0 else max(_LOGS_LEAST, limit - kept_count(limit) * _KEPT_FROM_TOPICS - _OWN)


def is_scarce(transport: asyncio.BaseTransport, kept_share: float = 1.0) -> bool:
    """Whether a connection that was just accepted should be refused, because it took one of the last descriptors.

    As the lowest free number is given out, its own number tells how many are in use, without counting them.

    Args:
        kept_share: of the descriptors that are kept, how many are kept from this connection too: 0 to 1.
    """
    connection = transport.get_extra_info("socket")
    if connection is None:  # a simulated connection
        return False
    limit = descriptor_limit()
    number: int = connection.fileno()
    return number >= limit - kept_count(limit) * kept_share


__all__ = ["TooFewDescriptors", "descriptor_limit", "is_scarce", "kept_count", "logs_max", "room"]
