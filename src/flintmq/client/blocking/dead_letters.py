"""Dead letters: messages that nobody can process, published to a topic of their own, unchanged.

What a letter says and in which form it is published: :mod:`flintmq.client.core.dead_letters`.

Rules of this file:

- The producer is made when the first message is to be published, because most consumers never need it.
- A message is finished only after nsqd has its copy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext

from flintmq.client.blocking.lock import Lock
from flintmq.client.blocking.producer import Producer
from flintmq.client.blocking.request_connection import RequestConnection
from flintmq.client.core.dead_letters import Form, Letters
from flintmq.client.core.publish import checked_headers
from flintmq.errors import FlintError


class LetterProducer(Producer):
    """A producer that finds out whether a topic has room for headers."""

    def takes_headers(self, topic: str) -> bool | None:
        """Whether messages of a topic may carry headers; None: only a try can tell.

        Waits for the nsqlookupd, at most for ``lookup_timeout``, if they were not asked yet.
        """
        if not self._settings.lookups:
            return None if len(self._settings.nsqd) == 1 else False
        self._begin()
        with self._lock:
            if not self._routes.knows(topic):
                self._look_up(topic)
                self._changed.wait_for(lambda: self._routes.knows(topic), self._settings.lookup_timeout_s)
            return self._routes.is_extended(topic)

    def publish(self, form: Form, topic: str, body: bytes, headers: Mapping[str, object]) -> None:
        """Publish a dead letter in one form.

        Raises:
            LocalProtocolError: the headers are too large.
            NsqdError: it is refused.
            ConnectionFailed: there was no answer, so it may be stored.
        """
        if form is not Form.ALONE:
            self.pub(topic, body, headers=headers if form is Form.HEADED else None)
            return
        data = checked_headers(headers, None)
        connection = RequestConnection(self._settings.nsqd[0], self._settings.options, self._env, self._time)
        try:
            connection.answer_to(
                lambda answered: connection.publish(topic, [body], answered, headers=[data]),
                self._time() + self._timeout_s,
            )
        finally:
            connection.close()


class DeadLetters:
    """A dead-letter topic.

    Args:
        topic: where they are published.
        make: a producer that is not started yet.
    """

    def __init__(self, topic: str, make: Callable[[], LetterProducer]) -> None:
        self.topic = topic
        self._make = make
        self._producer: LetterProducer | None = None
        self._lock = Lock()  # held while the producer is made, and while the first letter tries its headers
        self._letters = Letters()

    def publish(self, body: bytes, headers: Mapping[str, object]) -> None:
        """Publish a body; with headers, if the topic has room for them.

        Raises:
            NsqdError, ConnectionFailed: no nsqd has taken it.
        """
        producer = self._made()
        takes_headers = producer.takes_headers(self.topic)
        with self._lock if self._letters.needs_try(takes_headers) else nullcontext():
            for form in self._letters.forms(takes_headers):
                try:
                    producer.publish(form, self.topic, body, headers)
                except FlintError as error:
                    self._letters.refused(form, error)
                else:
                    self._letters.taken(form)
                    return

    def _made(self) -> LetterProducer:
        with self._lock:
            if self._producer is None:
                self._producer = self._make()
            return self._producer

    def close(self) -> None:
        """End the producer, if there is one."""
        if self._producer is not None:
            self._producer.close()
