"""Times as people write them on command lines and in forms: ISO 8601, in UTC unless it says otherwise.

Rules of this file: one rule for every place where a time is written, whatever zone the machine is in: what one command
or page prints is understood in the same way by all others.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from flintmq.options.durations import parse_duration_ns

_DURATION = re.compile("-?([0-9.]+(ns|us|µs|ms|s|m|h))+")
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
TIME_NS_MAX = (1 << 63) - 1


def parse_moment(text: str) -> datetime | timedelta:
    """Read a time, such as ``2026-01-31T12:00``, ``2026-01-31T13:00+01:00`` or ``2026-01-31``; or ``1h30m`` (ago).

    Returns:
        A time is aware of its zone; a duration is 0 or more, in whole microseconds.

    Raises:
        ValueError: it is neither, is not from 1970 to 2262, or less than 0; the text says so.
    """
    if _DURATION.fullmatch(text):
        ago = timedelta(microseconds=parse_duration_ns(text) // 1000)
        if ago < timedelta():
            raise ValueError("how long ago is 0 or more")
        return ago
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it is neither a time such as 2026-01-31T12:00Z nor a duration such as 1h30m") from None
    found = found if found.tzinfo is not None else found.replace(tzinfo=UTC)
    if not 0 <= nanoseconds_of(found) <= TIME_NS_MAX:
        raise ValueError("it is a time before 1970, or after 2262-04-11")
    return found


def nanoseconds_of(time: datetime) -> int:
    """Return the nanoseconds since 1970 of a time that is aware of its zone, exactly."""
    return (time - _EPOCH) // _MICROSECOND * 1000


__all__ = ["TIME_NS_MAX", "nanoseconds_of", "parse_moment"]
