"""What a program around somebody else's client is told to do, and how it tells what happened.

Every program takes one JSON argument (:class:`Task`) and prints one JSON object per event on stdout. A body says what a
consumer does with it: ``requeue...`` is given back on the first attempt, ``slow...`` is held and touched before it is
finished, ``hold...`` is never answered, and everything else is finished.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Task:
    """What to do.

    Attributes:
        role: ``publish`` or ``consume``.
        nsqd: TCP addresses as ``host:port``.
        nsqlookupd: HTTP addresses, instead of ``nsqd``.
        finish_count: messages to finish before the consumer stops.
        requeue_ms: delay of a message given back.
        slow_s, touch_s: how long a slow message is held, and how often it is touched meanwhile.
        single, batch, deferred: bodies to publish with PUB, MPUB and DPUB.
        defer_ms: delay of the deferred ones.
    """

    role: str
    topic: str
    nsqd: list[str] = field(default_factory=list)
    nsqlookupd: list[str] = field(default_factory=list)
    channel: str = ""
    max_in_flight: int = 1
    heartbeat_s: int = 30
    finish_count: int = 0
    requeue_ms: int = 0
    slow_s: float = 0.0
    touch_s: float = 0.0
    single: list[str] = field(default_factory=list)
    batch: list[str] = field(default_factory=list)
    deferred: list[str] = field(default_factory=list)
    defer_ms: int = 0

    @property
    def touch_count(self) -> int:
        """How often a slow message is touched."""
        return int(self.slow_s / self.touch_s)


def task() -> Task:
    """The task this program was started with."""
    return Task(**json.loads(sys.argv[1]))


def say(event: str, **fields: object) -> None:
    """Tell the test what happened."""
    print(json.dumps({"event": event, **fields}), flush=True)


def received(body: bytes, attempts: int) -> str:
    """Tell of a message; return what is to be done with it: ``requeue``, ``slow``, ``hold`` or ``finish``."""
    text = body.decode()
    say("message", body=text, attempts=attempts)
    if text.startswith("requeue") and attempts == 1:
        return "requeue"
    return next((word for word in ("slow", "hold") if text.startswith(word)), "finish")
