"""Messages whose body cannot be read: what the log says of them.

Rules of this file: no clock, no IO but the log; the log is bounded, because a deployment that cannot read its topic any
more cannot read any message of it.
"""

from __future__ import annotations

import logging
from typing import Any

from flintmq.client.core.message import Message, is_hex
from flintmq.errors import BodyError

log = logging.getLogger("flintmq.client")

EVERY_S = 10.0
COUNT_MAX = 5
"""Lines in so many seconds; how many more there were is said with the next one, and at the end."""
SHOWN_BYTES_MAX = 64

REQUEUED = "it is requeued; a dead_letter topic would take such messages"
BLOCKING = "it blocks its partition until it can be read"


class Unreadable:
    """Tells of the bodies that one consumer cannot read.

    Args:
        topic, channel: for the log.
    """

    def __init__(self, topic: str, channel: str) -> None:
        self._where = f"{topic}/{channel}"
        self._until = 0.0
        self._count = 0
        self._left_out = 0

    def tell(self, message: Message[Any], error: BodyError, now: float, what_next: str) -> None:
        """Log one, unless there have been many of late.

        Args:
            now: seconds on the consumer's clock.
            what_next: what becomes of the message.
        """
        if now >= self._until:
            self.tell_rest()
            self._until = now + EVERY_S
            self._count = 0
        self._count += 1
        if self._count > COUNT_MAX:
            self._left_out += 1
            return
        body = bytes(message.body[:SHOWN_BYTES_MAX])
        dots = "..." if len(message.body) > SHOWN_BYTES_MAX else ""
        log.error(
            "cannot read message %s of %s from %s, attempts %d: %s; body of %d bytes: %r%s; %s",
            shown_id(message), self._where, message.nsqd, message.attempts, error, len(message.body), body, dots,
            what_next,
        )  # fmt: skip

    def tell_rest(self) -> None:
        """Say how many were not logged one by one."""
        if self._left_out:
            log.error("cannot read %d more messages of %s", self._left_out, self._where)
            self._left_out = 0


def read_error(message: Message[Any]) -> BodyError | None:
    """Return why a body cannot be read; None if it can, or if reading it says already what to do with its message."""
    try:
        message.value  # noqa: B018
    except BodyError as error:
        return error
    except Exception:  # noqa: BLE001 - a wish of the application's, as its handler would have got to see
        return None
    return None


def shown_id(message: Message[Any]) -> str:
    """A message's id as nsqd shows it, 16 hex digits."""
    return message.id.decode() if is_hex(message.id) else message.id[:8].hex()
