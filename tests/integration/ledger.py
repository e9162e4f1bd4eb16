"""What consumers may hold and what they do hold, read off the wire by proxies in front of nsqd.

Rules of this file: it believes nobody: RDY, FIN and REQ are what passed on the way up, messages what passed on the way
down; a connection that is over holds nothing. Connections must be plain: no TLS, no compression.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from tests.integration.daemons import MESSAGE, FrameReader, message_of
from tests.integration.proxy import Proxy

_MAGIC_BYTES = 4
_WITH_BODY = (b"IDENTIFY", b"AUTH", b"PUB", b"MPUB", b"DPUB")


@dataclass
class _Seen:
    """One connection."""

    frames: FrameReader = field(default_factory=FrameReader)
    unparsed: bytes = b""
    has_magic: bool = False
    held: dict[bytes, None] = field(default_factory=dict)
    rdy_count: int = 0


class Ledger:
    """Watches several proxies at once.

    Attributes:
        held_max: the most messages that were on their way or unanswered at a time, over all connections.
        rdy_sums: the sum of the RDY counts of all connections, after each RDY that passed.
        rdy_counts: for each connection that sent any, in the order of their beginnings: the counts it sent.
        requeue_ms: the delays of all REQs, in the order they passed.
        commands: how often each command passed.
    """

    def __init__(self, *proxies: Proxy) -> None:
        self.held_max = 0
        self.rdy_sums: list[int] = []
        self.rdy_counts: dict[tuple[int, int], list[int]] = {}
        self.requeue_ms: list[int] = []
        self.commands: Counter[bytes] = Counter()
        self._lock = threading.Lock()
        self._connections: dict[tuple[int, int], _Seen] = {}
        self._over: set[tuple[int, int]] = set()
        for number, proxy in enumerate(proxies):
            proxy.watch = partial(self._watch, number)

    @property
    def held(self) -> int:
        """Messages on their way or unanswered now."""
        with self._lock:
            return sum(len(each.held) for each in self._connections.values())

    @property
    def rdy_sum_max(self) -> int:
        """The highest sum of the RDY counts of all connections."""
        return max(self.rdy_sums, default=0)

    @property
    def rdy_now(self) -> list[int]:
        """The last RDY count of each open connection that sent one."""
        with self._lock:
            return [self.rdy_counts[key][-1] for key in self._connections if key in self.rdy_counts]

    def _watch(self, proxy: int, connection: int, what: str, data: bytes) -> None:
        with self._lock:
            key = proxy, connection
            if what == "end":
                self._connections.pop(key, None)
                self._over.add(key)
            if key in self._over:
                return
            seen = self._connections.setdefault(key, _Seen())
            if what == "down":
                for kind, frame in seen.frames.receive(data):
                    if kind == MESSAGE:
                        seen.held[message_of(frame).id] = None
            else:
                self._commands(key, seen, data)
            self.held_max = max(self.held_max, sum(len(each.held) for each in self._connections.values()))

    def _commands(self, key: tuple[int, int], seen: _Seen, data: bytes) -> None:
        seen.unparsed += data
        if not seen.has_magic and len(seen.unparsed) >= _MAGIC_BYTES:
            seen.unparsed = seen.unparsed[_MAGIC_BYTES:]
            seen.has_magic = True
        while seen.has_magic and (end := seen.unparsed.find(b"\n") + 1):
            words = seen.unparsed[: end - 1].split(b" ")
            if words[0] in _WITH_BODY:
                if len(seen.unparsed) < end + 4:
                    return
                body_bytes = int.from_bytes(seen.unparsed[end : end + 4], "big")
                if len(seen.unparsed) < end + 4 + body_bytes:
                    return
                end += 4 + body_bytes
            seen.unparsed = seen.unparsed[end:]
            self._command(key, seen, words)

    def _command(self, key: tuple[int, int], seen: _Seen, words: list[bytes]) -> None:
        self.commands[words[0]] += 1
        if words[0] == b"REQ":
            self.requeue_ms.append(int(words[2]))
        if words[0] in (b"FIN", b"REQ"):
            seen.held.pop(words[1], None)
        elif words[0] == b"RDY":
            seen.rdy_count = int(words[1])
            self.rdy_counts.setdefault(key, []).append(seen.rdy_count)
            self.rdy_sums.append(sum(each.rdy_count for each in self._connections.values()))
