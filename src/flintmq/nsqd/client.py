"""A client: a TCP connection as the rest of nsqd knows it, and all of them together.

Rules of this file: what a connection is, not what it says; the protocol is :mod:`flintmq.nsqd.session`, which is a
client. Nothing here is done per message.

Source: NSQ's TCP protocol (IDENTIFY), NSQ's HTTP API (the row of a client).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

from flintmq.broker.channel import Channel
from flintmq.broker.ext_filter import ExtFilter
from flintmq.broker.shared_subscription import ChannelParts, SharedSubscription
from flintmq.broker.subscription import Subscription
from flintmq.broker.topic import Topic
from flintmq.clock import Clock
from flintmq.net.descriptors import descriptor_limit, is_scarce
from flintmq.net.isolation import for_each
from flintmq.net.problems import Problems
from flintmq.net.tls_engine import TlsSession
from flintmq.nsqd.auth import ClientAuth
from flintmq.wire.identify import Negotiated, ReceivedRequest

_UNIDENTIFIED = ReceivedRequest()


class Relay(Protocol):
    """A consumer's share of what other nodes of a cluster lead."""

    def close(self) -> None:
        """Let go of it: the consumer is gone."""
        ...


class Client(ABC):
    """One connection: who is at its other end, what it consumes and has published.

    Args:
        connected_ns: wall time.
        auth: what it may do; None where nobody is asked to prove anything.

    Attributes:
        peer: address and port.
        negotiated: by IDENTIFY; None before it.
        tls: None without.
        out: frames that are written at the end of the turn.
        pub_counts: messages published, by topic.
        topic, channel, subscription: what it consumes; set by :class:`flintmq.nsqd.subscribing.Subscribing`, which
            keeps topic and channel when the subscription has ended.
        ext_filter: which of the messages with headers it takes; None for all.
        has_hex_ids: it is sent ids as of a plain topic, whatever topic it consumes.
        relay: brings what other nodes lead of its topic; None: it consumes what is led here, and nothing else.
    """

    def __init__(self, connected_ns: int, auth: ClientAuth | None) -> None:
        self.peer = "@"
        self.connected_ns = connected_ns
        self.auth = auth
        self.negotiated: Negotiated | None = None
        self.tls: TlsSession | None = None
        self.out: list[bytes | memoryview] = []
        self.pub_counts: dict[str, int] = {}
        self.topic: Topic | None = None
        # of one kind, both of a single partition or both of several
        self.channel: Channel | ChannelParts | None = None
        self.subscription: Subscription | SharedSubscription | None = None
        self.ext_filter: ExtFilter | None = None
        self.has_hex_ids = False
        self.relay: Relay | None = None

    @property
    def request(self) -> ReceivedRequest:
        """Its words about itself; none before IDENTIFY."""
        return _UNIDENTIFIED if self.negotiated is None else self.negotiated.request

    @property
    @abstractmethod
    def state_number(self) -> int:
        """The state of its protocol as /stats has it."""

    @property
    @abstractmethod
    def codec_name(self) -> str:
        """The compression in force; empty for none."""

    @abstractmethod
    def flush(self) -> None:
        """Write what has gathered."""

    @abstractmethod
    def publish_ended(self) -> None:
        """Look at the answers that wait: something this client waits for has ended."""

    @abstractmethod
    def limit_ready(self, limit: int) -> None:
        """Let this client hold at most so many messages from now on, whatever its RDY says."""

    @abstractmethod
    def look_up_again(self) -> None:
        """Look at the next publish closely: where the last one went may take none now."""

    @abstractmethod
    def dismiss(self, code: str, detail: str) -> None:
        """Send an error that nothing was sent for, the last frame, and close; what it holds is queued again."""

    @abstractmethod
    def drain(self) -> None:
        """Send the last frames and the end of stream; what it has finished until it closes still counts."""

    @abstractmethod
    def abort(self) -> None:
        """Close at once."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line for humans."""


class Clients:
    """All clients that are connected.

    Args:
        count_max: how many may be; 0 for what the limit of open files allows.
        clock: by which a refusal is told seldom.
    """

    def __init__(self, count_max: int, clock: Clock) -> None:
        self._count_max = count_max or descriptor_limit()
        self._problems = Problems(clock)
        self._clients: dict[Client, None] = {}
        self._is_closed = False
        self._gone: asyncio.Event | None = None

    def __iter__(self) -> Iterator[Client]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def admit(self, client: Client, transport: asyncio.BaseTransport) -> bool:
        """Count a connection in; False when there are too many."""
        if self._is_closed:
            return False
        if is_scarce(transport):
            text = f"client refused: too few of {descriptor_limit()} files are left (see ulimit -n)"
            self._problems.tell(text, logging.WARNING, client.peer)
            return False
        if len(self._clients) >= self._count_max:
            text = f"client refused: {self._count_max} connections are the limit"
            self._problems.tell(text, logging.WARNING, client.peer)
            return False
        self._clients[client] = None
        return True

    def forget(self, client: Client) -> None:
        """Count a connection out."""
        self._clients.pop(client, None)
        if not self._clients and self._gone is not None:
            self._gone.set()

    def look_up_again(self) -> None:
        """Have all look at their next publish closely."""
        for client in self._clients:
            client.look_up_again()

    def close(self) -> None:
        """Admit no more."""
        self._is_closed = True

    def drain(self) -> None:
        """Send all of them their last frames."""
        for_each(self._clients, lambda client: client.drain(), "draining")

    async def abort(self, deadline_s: float) -> None:
        """Wait until the last one is gone; close those that are left after the deadline, and wait once more."""
        await self._all_gone(deadline_s)
        for_each(self._clients, lambda client: client.abort(), "aborting")
        await self._all_gone(deadline_s)

    async def _all_gone(self, deadline_s: float) -> None:
        if self._clients:
            self._gone = asyncio.Event()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(deadline_s):
                    await self._gone.wait()
