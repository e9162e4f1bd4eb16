"""Reports of damage: the words, and how much is lost by it.

Rules of this file: data alone.

Source: docs/decisions/0011.
"""

from __future__ import annotations

import msgspec


class Damage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something in the data directory that is not as it was written.

    Attributes:
        path: the file, relative to the data directory.
        reason: what was found and what was done about it.
        topic, partition, channel: what it concerns, as far as it is about one.
        first, end: the sequences of messages that are lost (the end exclusive); both 0 when that is not known.
        lost: how many messages are lost.
        is_more_possible: whether there may be more than ``lost``.
        elsewhere: how many messages this copy of a partition had and is to get from another one; they are not lost.
    """

    path: str
    reason: str
    topic: str = ""
    partition: int = -1
    channel: str = ""
    first: int = 0
    end: int = 0
    lost: int = 0
    is_more_possible: bool = False
    elsewhere: int = 0

    def __str__(self) -> str:
        where = ""
        if self.topic:
            where = f"topic {self.topic}"
            where += f" partition {self.partition}" if self.partition >= 0 else ""
            where += f" channel {self.channel}" if self.channel else ""
            where = f" ({where})"
        text = f"{self.path}{where}: {self.reason}"
        if self.lost:
            text += f"; {'at least ' if self.is_more_possible else ''}{self.lost} messages are lost"
        elif self.is_more_possible:
            text += "; messages may be lost"
        if self.elsewhere:
            text += f"; {self.elsewhere} messages are to come from another replica"
        if self.first:
            text += f", sequences {self.first} to {self.end - 1}"
        return text
