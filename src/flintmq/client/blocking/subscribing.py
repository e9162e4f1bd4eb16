"""Keeps a consumer subscribed, on blocking sockets; what is subscribed and how: :mod:`flintmq.client.core.subscribing`.

Rules of this file: all methods are called with the lock held, except what a thread of the pool does: connecting waits.
"""

from __future__ import annotations

import logging
from functools import partial

from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.lookup import Lookup
from flintmq.client.blocking.pump import Pump
from flintmq.client.blocking.reconnect import Reconnector
from flintmq.client.blocking.thread_pool import ThreadPool
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.consuming import Consuming
from flintmq.client.core.discovery import topic_path
from flintmq.client.core.following import Wrong
from flintmq.client.core.routing import Target
from flintmq.client.core.settings import Settings
from flintmq.errors import FlintError

log = logging.getLogger("flintmq.client")


class Subscriptions:
    """The subscriptions of one consumer.

    Args:
        lookup: None: the nsqd are given.
        pump: takes over what is subscribed.

    Attributes:
        reconnector: keeps connected what is wanted.
    """

    _consuming: Consuming

    def __init__(self, settings: Settings, lookup: Lookup | None, pump: Pump, timers: Timers) -> None:
        self.reconnector: Reconnector[Target, Connection] = Reconnector(
            self._open, self._join, self._tried, Connection.close, ThreadPool("flintmq-connect"), timers, pump.lock,
            settings.env,
        )  # fmt: skip
        self._settings = settings
        self._lookup = lookup
        self._pump = pump
        self._timers = timers

    def start(self, consuming: Consuming) -> None:
        """Begin."""
        self._consuming = consuming
        consuming.start(self._timers)

    @property
    def is_located(self) -> bool:
        """Whether it is known where the topic is, or that nobody knows."""
        following = self._consuming.subscribing.following
        return following is None or following.is_polled

    def stop(self) -> None:
        """Connect no more, and ask no more; connections that are there stay."""
        self.reconnector.stop()
        if self._lookup is not None:
            self._lookup.end()

    # --- connecting ---

    def _open(self, target: Target) -> Connection:
        """Connect and subscribe; in a thread of the threads, without the lock."""
        subscribing, settings = self._consuming.subscribing, self._settings
        tag = subscribing.tag
        connection = Connection.open(
            target.address,
            self._consuming,
            settings.options,
            settings.env,
            self._timers.time,
            self._pump.lock,
            self._pump,
            extended=tag is not None,
            desired_tag=tag or "",
        )
        try:
            connection.request("SUB", partial(subscribing.subscribe, connection, target))
        except BaseException as error:
            connection.abort("not subscribed")
            if subscribing.asks_again(target, error):
                return self._open(target)
            raise
        if connection.is_lost:  # nsqd sent it away in the same breath: the partition is led elsewhere by now
            assert connection.lost_because is not None
            raise connection.lost_because
        return connection

    def _join(self, connection: Connection) -> None:
        connection.begin_pumping(self._timers)
        self._consuming.subscribing.join(connection, Target(connection.address, connection.partition))

    def _tried(self, target: Target, error: FlintError | None) -> None:
        self._consuming.subscribing.note_attempt(target, error)
        self._pump.wake()

    def note_lost(self, connection: Connection) -> None:
        """Connect again when it is time."""
        target = Target(connection.address, connection.partition)
        if target in self.reconnector.listed:
            log.warning("lost nsqd %s: %s", target, connection.lost_because)
        self.reconnector.lost(target, self._timers.time() - connection.opened_at)

    # --- asking ---

    def ask(self, wrong: Wrong) -> None:
        """Ask the nsqlookupd where the topic is."""
        following = self._consuming.subscribing.following
        assert self._lookup is not None
        assert following is not None
        path = topic_path(self._settings.topic, "r", self._settings.names_logs)
        self._lookup.ask(path, following.answered, wrong)
