"""Where messages go that nobody can process: published to a topic of their own, unchanged.

Rules of this file:

- The producer is made when the first message is to be buried, because most consumers never need it.
- A message is finished only after nsqd has its copy.
- Why it is there stands in its headers (:mod:`flintmq.client.unreadable`), where the topic has room for them; whether
  it has is found out by the first one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from flintmq.client.producer import Producer
from flintmq.client.unreadable import Letters
from flintmq.errors import LocalProtocolError, PublishRefused

log = logging.getLogger("flintmq.client")


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
        self._beginning = asyncio.Lock()
        self._letters = Letters(topic)

    async def bury(self, body: bytes, headers: Mapping[str, object]) -> None:
        """Publish a body; with headers, if the topic has room for them.

        Raises:
            PublishError: no nsqd has taken it.
        """
        async with self._beginning:
            if self._producer is None:
                producer = self._make()
                await producer.start()
                self._producer = producer
            if self._letters.can_have_headers is None and await self._publish(self._producer, body, headers):
                return
        if self._letters.can_have_headers and await self._publish(self._producer, body, headers):
            return
        await self._producer.pub(self.topic, body)

    async def _publish(self, producer: Producer, body: bytes, headers: Mapping[str, object]) -> bool:
        """Publish a body with headers; False if the topic has no room for them."""
        if not await producer.takes_headers(self.topic):
            return False
        try:
            await producer.pub(self.topic, body, headers=headers)
        except (PublishRefused, LocalProtocolError) as error:
            self._letters.note_refusal(error)
            return False
        self._letters.can_have_headers = True
        return True

    async def close(self) -> None:
        """End the producer, if there is one."""
        if self._producer is not None:
            await self._producer.close()
