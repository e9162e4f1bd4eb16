"""Where messages go that nobody can process: published to a topic of their own, unchanged.

Rules of this file:

- The producer is made when the first message is to be buried, because most consumers never need it.
- A message is finished only after nsqd has its copy.
- Why it is there stands in its headers (:mod:`flintmq.client.core.unreadable`), where the topic has room for them;
  whether it has is found out by the first one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from flintmq.client.blocking.producer import Producer
from flintmq.client.core.unreadable import Letters
from flintmq.errors import LocalProtocolError, PublishRefused


class DeadLetters:
    """A dead-letter topic.

    Args:
        topic: where they are published.
        make: a producer that is not started yet.
    """

    def __init__(self, topic: str, make: Callable[[], Producer]) -> None:
        self.topic = topic
        self._make = make
        self._producer: Producer | None = None
        self._lock = threading.Lock()  # held while the producer is made, and while the first letter tries its headers
        self._letters = Letters()

    def bury(self, body: bytes, headers: Mapping[str, object]) -> None:
        """Publish a body; with headers, if the topic has room for them.

        Raises:
            NsqdError, ConnectionFailed: no nsqd has taken it.
        """
        with self._lock:
            if self._producer is None:
                self._producer = self._make()
        producer = self._producer
        takes_headers = producer.takes_headers(self.topic)
        if takes_headers is None:
            with self._lock:
                if self._letters.can_have_headers is None:
                    self._letters.can_have_headers = producer.try_headers(self.topic, body, headers)
                    if self._letters.can_have_headers:
                        return
            takes_headers = self._letters.can_have_headers
        if takes_headers:
            try:
                producer.pub(self.topic, body, headers=headers)
            except (PublishRefused, LocalProtocolError) as error:
                self._letters.note_refusal(error)
            else:
                return
        producer.pub(self.topic, body)

    def close(self) -> None:
        """End the producer, if there is one."""
        if self._producer is not None:
            self._producer.close()
