"""What a program around somebody else's client is told to do, and how it tells what happened.

A program does many runs at the same time, because starting an interpreter costs more than most of them. It reads orders
from stdin and prints events to stdout, one JSON object per line, each with the number of its run:

    orders   start (with a Task), publish (single, batch, deferred, defer_ms), release, max_in_flight (value), end
    events   ready, published (ok, answer), message (body, attempts), closed; the last one is ended or failed (error)

What a consumer does with a message stands in its body: ``requeue...`` is given back when it comes first, ``fail...``
also, as the failure that a client backs off after, ``slow...`` is touched a few times and then finished, ``hold...`` is
kept when it comes first, until an order releases it, and everything else is finished.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64decode
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SHOWN_BYTES_MAX = 64


@dataclass(frozen=True, slots=True)
class Task:
    """What to do.

    Attributes:
        role: ``publish`` or ``consume``.
        nsqd: TCP addresses as ``host:port``.
        nsqlookupd: HTTP addresses, instead of ``nsqd``; asked once a second.
        finish_count: messages to finish before the consumer stops by itself; 0: it waits for an order.
        requeue_ms: delay of a message given back.
        touch_s, touch_count: how often a slow message is touched before it is finished.
        sample_rate: percent of the messages that a consumer wants; 0: all.
        max_backoff_s, msg_timeout_ms: as the client's own option; 0: not given.
        tls: empty for none, or ``unverified``, or ``verified`` by ``ca``; with a certificate when ``cert`` is there.
        codec: ``deflate``, ``snappy`` or empty.
        secret: for AUTH.
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
    touch_s: float = 0.0
    touch_count: int = 0
    sample_rate: int = 0
    max_backoff_s: int = 0
    msg_timeout_ms: int = 0
    tls: str = ""
    ca: str = ""
    cert: str = ""
    key: str = ""
    codec: str = ""
    secret: str = ""


class Run:
    """One task that is being done.

    Attributes:
        orders: a queue of asyncio or of gevent.
    """

    def __init__(self, number: int, task: Task, orders: Any) -> None:
        self.task = task
        self.orders = orders
        self._number = number

    def say(self, event: str, **fields: object) -> None:
        """Tell the test what happened."""
        print(json.dumps({"run": self._number, "event": event, **fields}), flush=True)


def shown(body: bytes) -> str:
    """A body as events show it: one character per byte when it is short, else its MD5."""
    return body.decode("latin-1") if len(body) <= SHOWN_BYTES_MAX else hashlib.md5(body).hexdigest()


def publications(order: dict[str, Any]) -> list[tuple[str, Any]]:
    """The commands of a publish order: ``pub`` and ``dpub`` with a body, ``mpub`` with a list of them."""
    single, batch, deferred = ([b64decode(body) for body in order[name]] for name in ("single", "batch", "deferred"))
    return [
        *(("pub", body) for body in single),
        *([("mpub", batch)] if batch else []),
        *(("dpub", b) for b in deferred),
    ]


class Handling:
    """What a consumer does with the messages of its run.

    Args:
        finish, touch: called with a message of the client.
        requeue: called with a message, a delay in milliseconds, and whether to back off.
        later: calls a function after some seconds.
    """

    def __init__(
        self,
        run: Run,
        finish: Callable[[Any], object],
        requeue: Callable[[Any, int, bool], object],
        touch: Callable[[Any], object],
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._run = run
        self._finish = finish
        self._requeue = requeue
        self._touch = touch
        self._later = later
        self._seen: set[bytes] = set()
        self._held: list[Any] = []
        self._finished_count = 0

    def handle(self, message: Any, body: bytes, attempts: int) -> None:
        """Do what the body says."""
        self._run.say("message", body=shown(body), attempts=attempts)
        is_first = body not in self._seen
        self._seen.add(body)
        if is_first and body.startswith((b"requeue", b"fail")):
            self._requeue(message, self._run.task.requeue_ms, body.startswith(b"fail"))
        elif is_first and body.startswith(b"hold"):
            self._held.append(message)
        elif body.startswith(b"slow"):
            self._touch_later(message, self._run.task.touch_count)
        else:
            self._done(message)

    def release(self) -> None:
        """Finish what is held."""
        held, self._held = self._held, []
        for message in held:
            self._done(message)

    def _touch_later(self, message: Any, count: int) -> None:
        def touch() -> None:
            self._touch(message)
            self._touch_later(message, count - 1)

        self._later(self._run.task.touch_s, touch if count else lambda: self._done(message))

    def _done(self, message: Any) -> None:
        self._finish(message)
        self._finished_count += 1
        if self._finished_count == self._run.task.finish_count:
            self._run.orders.put_nowait({"order": "end"})
