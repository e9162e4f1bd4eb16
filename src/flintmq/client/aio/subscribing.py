"""Keeps a consumer subscribed, on an event loop; what is subscribed and how: :mod:`flintmq.client.core.subscribing`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from flintmq.client.aio.connection import Connection
from flintmq.client.aio.lookup import Lookup
from flintmq.client.aio.reconnect import Reconnector
from flintmq.client.core.consuming import Consuming
from flintmq.client.core.following import Wrong
from flintmq.client.core.routing import Target
from flintmq.client.core.settings import Settings
from flintmq.errors import DiscoveryError, FlintError


class Subscriptions:
    """The subscriptions of one consumer.

    Args:
        lookup: None: the nsqd are given.
        fail: is told of mistakes of ours.

    Attributes:
        reconnector: keeps connected what is wanted.
    """

    _consuming: Consuming

    def __init__(self, settings: Settings, lookup: Lookup | None, fail: Callable[[BaseException], None]) -> None:
        self.reconnector: Reconnector[Target] = Reconnector(self._connect, self._tried, fail, settings.env)
        self._settings = settings
        self._lookup = lookup
        self._fail = fail
        self._asking: asyncio.Task[None] | None = None

    async def start(self, consuming: Consuming) -> None:
        """Begin; returns when it is known where the topic is, or that nobody knows, or that nobody is to be asked."""
        self._consuming = consuming
        consuming.start(asyncio.get_running_loop())
        if self._asking is not None:
            await asyncio.wait([self._asking])

    def stop(self) -> None:
        """Connect no more, and ask no more; connections that are there stay."""
        self.reconnector.stop()
        if self._asking is not None:
            self._asking.cancel()

    async def close(self) -> None:
        """Stop and wait until nothing is being connected any more."""
        self.stop()
        await self.reconnector.close()

    async def close_lookup(self) -> None:
        """Close the connections to the nsqlookupd."""
        if self._lookup is not None:
            await self._lookup.close()

    # --- connecting ---

    async def _connect(self, target: Target) -> Connection:
        subscribing, settings = self._consuming.subscribing, self._settings
        tag = subscribing.tag
        connection = await Connection.open(
            target.address,
            self._consuming,
            settings.options,
            settings.env,
            extended=tag is not None,
            desired_tag=tag or "",
        )
        try:
            await connection.request("SUB", partial(subscribing.subscribe, connection, target))
        except BaseException as error:
            connection.abort("not subscribed")
            if subscribing.asks_again(target, error):
                return await self._connect(target)
            raise
        if connection.is_lost:  # nsqd sent it away, or broke the protocol, in the same breath
            assert connection.lost_because is not None
            raise connection.lost_because
        subscribing.join(connection, target)
        return connection

    def _tried(self, target: Target, error: FlintError | None) -> None:
        self._consuming.subscribing.note_attempt(target, error)

    # --- asking ---

    def ask(self, wrong: Wrong) -> None:
        """Ask the nsqlookupd where the topic is."""
        self._asking = asyncio.get_running_loop().create_task(self._ask(wrong))
        self._asking.add_done_callback(self._asked)

    async def _ask(self, wrong: Wrong) -> None:
        assert self._lookup is not None
        following = self._consuming.subscribing.following
        assert following is not None
        try:
            topology = await self._lookup.topic(self._settings.topic, wrong)
        except DiscoveryError as error:
            following.answered(error)
        else:
            following.answered(topology)

    def _asked(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)
