"""The connections to one nsqd. No waiting and no locking here: :mod:`flintmq.client.blocking.producer` does both."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from flintmq.client.blocking.request_connection import RequestConnection
from flintmq.client.core.backoff import ReconnectDelay, wanted_s
from flintmq.errors import FlintError


class Pool:
    """Connections that are free, and how many there are.

    Attributes:
        address: ``host:port``.
        idle: free connections; the one used last is taken first, so that the others may rest.
        connections: all of them. Weakly, because a call that is interrupted at the wrong instruction
            forgets its connection.
        openings: a mark for each connection that is being opened. A mark and no count, because it can be taken away
            twice: by the thread that opens, and by whoever was interrupted when it was to be started.
        error: why the last one could not be opened; None: it could.
        retry_at: not to be opened before, after a failure.
        wanted_at: the same while a call waits for a connection and there is none; not later than ``retry_at``.
        is_tried: opening has succeeded or failed once.
    """

    __slots__ = ("address", "idle", "connections", "openings", "error", "retry_at", "wanted_at", "is_tried", "_delay")

    def __init__(self, address: str) -> None:
        self.address = address
        self.idle: list[RequestConnection] = []
        self.connections: WeakKeyDictionary[RequestConnection, None] = WeakKeyDictionary()
        self.openings: dict[object, None] = {}
        self.error: FlintError | None = None
        self.retry_at = 0.0
        self.wanted_at = 0.0
        self.is_tried = False
        self._delay = ReconnectDelay()

    def describe(self) -> str:
        """Show the connections, each in a line."""
        head = f"{self.address} connections={len(self.connections)} idle={len(self.idle)} opening={len(self.openings)}"
        return "\n  ".join([head, *(connection.describe() for connection in self.idle)])

    @property
    def is_up(self) -> bool:
        """Whether there is a connection."""
        return len(self.connections) > 0

    def may_open(self, size: int, now: float, is_wanted: bool = False) -> bool:
        """Whether one more connection may be opened.

        Args:
            is_wanted: a call waits for it, and there is no other it could have.
        """
        due_at = self.wanted_at if is_wanted else self.retry_at
        return len(self.connections) + len(self.openings) < size and now >= due_at

    def add(self, connection: RequestConnection) -> None:
        """Take in a fresh connection."""
        self.error = None
        self.connections[connection] = None
        self.idle.append(connection)

    def take(self) -> RequestConnection | None:
        """A free connection, or None."""
        return self.idle.pop() if self.idle else None

    def lose(self, connection: RequestConnection, now: float, chance: float) -> None:
        """Forget a connection that was lost."""
        self.connections.pop(connection, None)
        if not connection.was_refused:  # else it was closed as the protocol has it, and others should not have to wait
            self.wait(now, chance, now - connection.opened_at)

    def wait(self, now: float, chance: float, lived_s: float = 0.0) -> None:
        """Open nothing for a while; connections that are lost together count once.

        Args:
            lived_s: how long the connection that was lost had been there.
        """
        if now >= self.wanted_at:
            delay_s = self._delay.next_s(chance, lived_s)
            self.retry_at = now + delay_s
            self.wanted_at = now + wanted_s(delay_s, chance)

    def close(self) -> None:
        """Close what is free."""
        while self.idle:
            self.idle.pop().close()
