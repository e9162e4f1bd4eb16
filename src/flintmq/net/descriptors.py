"""The limit of open files, and the part of it that is kept from connections.

Rules of this file: a daemon that has no descriptor left can roll no segment, and its event loop can neither accept a
connection nor stop trying. So connections are refused while some are left for everything else.

Source: tests/sim/README.md; POSIX.1-2017 2.14 (a new descriptor is the lowest free number).
"""

from __future__ import annotations

import asyncio
import resource

_SHARE = 16
_LEAST = 16
_MOST = 64


def kept_count(limit: int) -> int:
    """Return how many of ``limit`` descriptors are for files only: a sixteenth, from 16 to 64."""
    return min(max(_LEAST, limit // _SHARE), _MOST)


def descriptor_limit() -> int:
    """Return the most files this process may have open at the moment."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


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


__all__ = ["descriptor_limit", "is_scarce", "kept_count"]
