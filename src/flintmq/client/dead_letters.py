"""Where messages go that nobody can process: published to a topic of their own, unchanged.

Rules of this file: the producer is made when the first message is to be buried, because most consumers never need it;
a message is finished only after nsqd has its copy.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from flintmq.client.producer import Producer

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
        self._starting = asyncio.Lock()

    async def bury(self, body: bytes) -> None:
        """Publish a body.

        Raises:
            PublishError: no nsqd has taken it.
        """
        async with self._starting:
            if self._producer is None:
                producer = self._make()
                await producer.start()
                self._producer = producer
        await self._producer.pub(self.topic, body)

    async def close(self) -> None:
        """End the producer, if there is one."""
        if self._producer is not None:
            await self._producer.close()
