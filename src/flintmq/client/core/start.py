"""The place where a channel begins, or goes on: what a consumer and an operator ask for, and how nsqd reads it. Pure.

Texts, as nsqd reads them::

    timestamp:<seconds since 1970>   the first message that was published then or later
    virtual_queue:<bytes>            the message at this virtual offset of its partition, or the first one behind it
    msgcount:<number>                the message with this number in its partition, counted from 1; 0 is the first, too
    special:-1                       the end

Rules of this file: no clock is read, now comes in; a time is rounded down to the second, as nsqd knows no finer ones,
so that nothing is left out.

Source: Youzan's TCP protocol (SUB_ADVANCED), Youzan's HTTP API (``/channel/setoffset``).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from math import floor
from typing import Literal, TypeAlias

from flintmq.client.options import SOURCE, whole
from flintmq.errors import OptionError

VALUE_MAX = 10**18 - 1
BEGINNING, END = "beginning", "end"
AT_THE_END = "special:-1"
NS_PER_S = 1_000_000_000
PROMPT_S = 5.0
PART_COUNT_MAX = 10_000


@dataclass(frozen=True, slots=True)
class Start:
    """A place in the partitions of a topic. Make it with :meth:`offset` or :meth:`count`.

    Attributes:
        text: as nsqd reads it.
    """

    text: str

    @classmethod
    def offset(cls, offset: int) -> Start:
        """The message at this virtual offset, as in :attr:`Message.offset`; of one partition.

        Raises:
            OptionError: it is negative.
        """
        return cls(f"virtual_queue:{whole(offset, 'offset', 0, VALUE_MAX)}")

    @classmethod
    def count(cls, count: int) -> Start:
        """The message with this number in its partition, which counts from 1; 0 is the first, too; of one partition.

        Raises:
            OptionError: it is negative.
        """
        return cls(f"msgcount:{whole(count, 'count', 0, VALUE_MAX)}")


StartAt: TypeAlias = Start | datetime | timedelta | Literal["beginning", "end"]
"""A :class:`Start`; a datetime with a time zone; a timedelta: so long ago; the oldest stored message; the end."""


def start_text(start: StartAt, now_s: float) -> str:
    """A start as nsqd reads it.

    Args:
        now_s: since 1970.

    Raises:
        OptionError: it is none.
    """
    if isinstance(start, Start):
        return start.text
    if start == BEGINNING:
        return "timestamp:0"
    if start == END:
        return AT_THE_END
    if isinstance(start, timedelta):
        at_s = now_s - start.total_seconds()
    elif isinstance(start, datetime) and start.tzinfo is not None:
        at_s = start.timestamp()
    else:
        allowed = "a datetime with a time zone, a timedelta, 'beginning', 'end', Start.offset(n) or Start.count(n)"
        raise OptionError("start", start, allowed, SOURCE)
    if isinstance(start, timedelta) and start < timedelta(0):
        raise OptionError("start", start, "a timedelta of 0 or more: so long ago", SOURCE)
    return f"timestamp:{max(0, floor(at_s))}"


class Beginning:
    """The beginning of each part of a channel; said once for each, or a connection that breaks would begin anew.

    The end is where it was when the consumer was made: a part that is subscribed late begins with what was published
    since then.

    Args:
        now_s: since 1970, when the consumer is made.

    Raises:
        OptionError: the start is none.
    """

    def __init__(self, start: StartAt, now_s: float) -> None:
        self._text = start_text(start, now_s)
        self._late_text = f"timestamp:{floor(now_s)}" if self._text == AT_THE_END else self._text
        self._prompt_until_s = now_s + PROMPT_S
        self._begun: dict[str | int, None] = {}

    def word(self, address: str, partition: int | None, now_s: float) -> str | None:
        """Start for a ``SUB_ADVANCED``; None: the part goes on where it is."""
        if _part(address, partition) in self._begun:
            return None
        return self._text if now_s <= self._prompt_until_s else self._late_text

    def note(self, address: str, partition: int | None) -> bool:
        """Note that a part has begun; False if it had already."""
        part = _part(address, partition)
        if part in self._begun:
            return False
        while len(self._begun) >= PART_COUNT_MAX:
            del self._begun[next(iter(self._begun))]
        self._begun[part] = None
        return True


def _part(address: str, partition: int | None) -> str | int:
    return address if partition is None else partition
