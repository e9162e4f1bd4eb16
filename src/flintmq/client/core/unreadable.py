"""Messages whose body cannot be read: what the log says of them, and what their dead letter says.

Headers of a dead letter, where its topic has room for them; names and values are those of nsqd's own, all texts::

    ##dead_letter_reason       unreadable_body, or max_attempts
    ##dead_letter_error        of an unreadable body: what is wrong with it
    ##dead_letter_topic        topic and channel whose consumer gave the message up
    ##dead_letter_channel
    ##dead_letter_attempts     deliveries
    ##dead_letter_id           16 hex digits
    ##dead_letter_timestamp    when it was published, ns

Headers that the message had are kept. Rules of this file: no clock, no IO but the log; the log is bounded, because a
deployment that cannot read its topic any more cannot read any message of it.
"""

from __future__ import annotations

import logging
from typing import Any

from flintmq.client.core.bodies import encoded
from flintmq.client.core.message import Message, is_hex
from flintmq.errors import BodyError, LocalProtocolError, PublishRefused
from flintmq.message import HEADERS_SIZE_MAX, TAG_HEADER, TRACE_ID_HEADER

log = logging.getLogger("flintmq.client")

PREFIX = "##dead_letter_"
UNREADABLE, MAX_ATTEMPTS = "unreadable_body", "max_attempts"

EVERY_S = 10.0
COUNT_MAX = 5
"""Lines in so many seconds; how many more there were is said with the next one, and at the end."""
SHOWN_BYTES_MAX = 64
_KEPT_SIZE_MAX = HEADERS_SIZE_MAX - 4096

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


HEADERS_REFUSED_CODES = ("E_EXT_NOT_SUPPORT", "E_TOPIC_NOT_EXIST", "E_INVALID")
"""What nsqd answers to headers: the topic has none, it is not there, there is no such command."""


class Letters:
    """Whether the dead letters of one topic can have headers, where only a try can tell.

    nsqd closes the connection over a try where there is no such topic, or where it knows no headers: so the first
    letter is published over a connection of its own.

    Attributes:
        can_have_headers: None: nobody has tried yet.
    """

    def __init__(self) -> None:
        self.can_have_headers: bool | None = None

    def note_refusal(self, error: PublishRefused | LocalProtocolError) -> None:
        """Note that headers were refused, so that the body is published without.

        Raises:
            PublishRefused: it was refused for another reason.
        """
        if isinstance(error, PublishRefused):
            if error.code != "E_EXT_NOT_SUPPORT":
                raise error
            self.can_have_headers = False


def read_error(message: Message[Any]) -> BodyError | None:
    """Why the body of a message cannot be read; None if it can, or if reading it already says what to do with it."""
    try:
        message.value  # noqa: B018
    except BodyError as error:
        return error
    except Exception:  # noqa: BLE001 - a wish of the application's, as its handler would have got to see
        return None
    return None


def letter_headers(message: Message[Any], topic: str, channel: str, error: BodyError | None) -> dict[str, object]:
    """The headers of a dead letter.

    Those of the message are left out if there would be too many.

    Args:
        error: what is wrong with its body; None: it had too many attempts.
    """
    headers: dict[str, object] = {}
    try:
        headers |= {TAG_HEADER: message.tag} if message.tag else {}
        headers |= message.headers
    except BodyError:
        pass  # what is wrong with them is why it is here; a JSON object they are not
    headers.pop(TRACE_ID_HEADER, None)
    about = {
        "reason": MAX_ATTEMPTS if error is None else UNREADABLE,
        **({} if error is None else {"error": str(error)}),
        "topic": topic,
        "channel": channel,
        "attempts": str(message.attempts),
        "id": shown_id(message),
        "timestamp": str(message.timestamp_ns),
    }
    own: dict[str, object] = {f"{PREFIX}{name}": value for name, value in about.items()}
    return own if len(encoded(headers)) > _KEPT_SIZE_MAX else headers | own


def shown_id(message: Message[Any]) -> str:
    """A message's id as nsqd shows it, 16 hex digits."""
    return message.id.decode() if is_hex(message.id) else message.id[:8].hex()
