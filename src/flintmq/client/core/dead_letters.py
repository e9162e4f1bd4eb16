"""Messages that nobody can process: what their dead letters say, and in which form they are published.

Headers of a dead letter, where its topic has room for them; names and values are those of nsqd's own, all texts::

    ##dead_letter_reason       unreadable_body, or max_attempts
    ##dead_letter_error        of an unreadable body: what is wrong with it
    ##dead_letter_topic        topic and channel whose consumer gave the message up
    ##dead_letter_channel
    ##dead_letter_attempts     deliveries
    ##dead_letter_id           16 hex digits
    ##dead_letter_timestamp    when it was published, ns

Headers that the message had are kept, and are all that it has when it is published again.

Rules of this file:

- No clock, no IO: shells publish (:mod:`flintmq.client.aio.dead_letters`, :mod:`flintmq.client.blocking.dead_letters`).
- A letter that cannot be published with headers is published without; it is never lost because of them.
- nsqd closes the connection over headers where there is no such topic, or where it knows none: where only a try can
  tell, the first letter is published over a connection of its own, so that publishes under way elsewhere do not suffer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

from flintmq.client.core.bodies import encoded
from flintmq.client.core.message import Message
from flintmq.client.core.unreadable import shown_id
from flintmq.errors import BodyError, FlintError, LocalProtocolError, NsqdError, PublishUnknown
from flintmq.message import HEADERS_SIZE_MAX, TAG_HEADER, TRACE_ID_HEADER

PREFIX = "##dead_letter_"
UNREADABLE, MAX_ATTEMPTS = "unreadable_body", "max_attempts"
_KEPT_SIZE_MAX = HEADERS_SIZE_MAX - 4096


class Form(Enum):
    """The forms a dead letter can be published in."""

    ALONE = "with headers, over a connection of its own"
    HEADED = "with headers"
    PLAIN = "without headers"


_NOT_SUPPORTED = "E_EXT_NOT_SUPPORT"
_BY_FORM = {
    Form.ALONE: (_NOT_SUPPORTED, "E_TOPIC_NOT_EXIST", "E_INVALID"),
    Form.HEADED: (_NOT_SUPPORTED,),
    Form.PLAIN: (),
}
"""Codes that nsqd refuses headers with: the topic has none, it is not there, there is no such command."""


class Letters:
    """In which form the dead letters of one topic are published.

    Attributes:
        can_have_headers: what a try has shown; None: nobody has tried yet.
    """

    def __init__(self) -> None:
        self.can_have_headers: bool | None = None

    def needs_try(self, takes_headers: bool | None) -> bool:
        """Whether others have to wait for what becomes of this letter.

        Args:
            takes_headers: what is known of the topic; None: only a try can tell.
        """
        return takes_headers is None and self.can_have_headers is None

    def forms(self, takes_headers: bool | None) -> Iterator[Form]:
        """The forms to publish a letter in, one after the other, until nsqd takes it.

        After each tell :meth:`taken` or :meth:`refused`.
        """
        if self.needs_try(takes_headers):
            yield Form.ALONE
        if takes_headers or (takes_headers is None and self.can_have_headers):
            yield Form.HEADED
        yield Form.PLAIN

    def taken(self, form: Form) -> None:
        """Note that a letter was published."""
        if form is Form.ALONE:
            self.can_have_headers = True

    def refused(self, form: Form, error: FlintError) -> None:
        """Note that a letter was refused because of its headers, so that the next form is tried.

        Raises:
            FlintError: the same error: it was refused for another reason, or there was no answer.
        """
        if isinstance(error, LocalProtocolError) and form is not Form.PLAIN:
            return  # more headers than there can be: it says nothing of the topic
        if isinstance(error, PublishUnknown) or not isinstance(error, NsqdError) or error.code not in _BY_FORM[form]:
            raise error
        self.can_have_headers = False


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


def headers_before(headers: Mapping[str, Any]) -> dict[str, Any]:
    """The headers that a message had before it was a dead letter, its dispatch tag among them."""
    return {name: value for name, value in headers.items() if not name.startswith(PREFIX)}
