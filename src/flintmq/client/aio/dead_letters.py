"""Where messages go that nobody can process: published to a topic of their own, unchanged.

Rules of this file:

- The producer is made when the first message is to be buried, because most consumers never need it.
- A message is finished only after nsqd has its copy.
- Why it is there stands in its headers (:mod:`flintmq.client.core.unreadable`), where the topic has room for them;
  whether it has is found out by the first one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from flintmq.client.aio.producer import Producer
from flintmq.client.core.unreadable import Letters
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
        self._lock = asyncio.Lock()  # held while the producer is made, and while the first letter tries its headers
        self._letters = Letters()

    async def bury(self, body: bytes, headers: Mapping[str, object]) -> None:
        """Publish a body; with headers, if the topic has room for them.

        Raises:
            NsqdError, ConnectionFailed: no nsqd has taken it.
        """
        producer = await self._started()
        takes_headers = await producer.takes_headers(self.topic)
        if takes_headers is None:
            async with self._lock:
                if self._letters.can_have_headers is None:
                    self._letters.can_have_headers = await producer.try_headers(self.topic, body, headers)
                    if self._letters.can_have_headers:
                        return
            takes_headers = self._letters.can_have_headers
        if takes_headers:
            try:
                await producer.pub(self.topic, body, headers=headers)
            except (PublishRefused, LocalProtocolError) as error:
                self._letters.note_refusal(error)
            else:
                return
        await producer.pub(self.topic, body)

    async def _started(self) -> Producer:
        async with self._lock:
            if self._producer is None:
                producer = self._make()
                await producer.start()
                self._producer = producer
            return self._producer

    async def close(self) -> None:
        """End the producer, if there is one."""
        if self._producer is not None:
            await self._producer.close()
