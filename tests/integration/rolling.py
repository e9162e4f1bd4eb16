"""Load for an upgrade of a cluster, one node after the other: every kind of client, and what each of them was told.

Rules of this file: what was answered is written down as it came; a client asks no daemon what happened. A client of
others' knows some fixed addresses, and does what NSQ's clients leave to their callers: what was refused is published
again, at the next address.
"""

from __future__ import annotations

import http.client
import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from tests.integration.daemons import ERROR, MESSAGE, PATIENCE_S, Closed, Connection, Nsqd, message_of, wait_until

from flintmq.errors import FlintError

RETRYABLE = ("E_FAILED_ON_NOT_WRITABLE", "E_FAILED_ON_NOT_LEADER")
"""Answers of a publish that is certainly not stored, and is taken elsewhere or a moment later."""
PAUSE_S = 0.002
"""Between two publishes of one publisher."""


class Publisher:
    """Publishes ``<name>-<number>``, each until it is acknowledged.

    Attributes:
        count: acknowledged ones.
        longest_s: from the first try of a message to its acknowledgement.
        refused: answers of publishes that were refused, by what to do about them.
        unanswered: publishes whose connection ended before their answer came.
        errors: what no caller should have got.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self.longest_s = 0.0
        self.refused: Counter[str] = Counter()
        self.unanswered = 0
        self.errors: list[str] = []
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def begin(self) -> Publisher:
        self._thread.start()
        return self

    def more(self, count: int) -> None:
        """Wait until so many more are acknowledged."""
        wanted = self.count + count
        wait_until(lambda: self.count >= wanted or self.errors, lambda: f"{self} goes on")
        assert not self.errors, str(self)

    def end(self) -> None:
        self._is_ending.set()
        self._thread.join(2 * PATIENCE_S)
        assert not self._thread.is_alive(), f"{self} hangs"
        assert not self.errors, str(self)

    def __str__(self) -> str:
        refused = ", ".join(f"{count} times {code}" for code, count in self.refused.items()) or "never"
        return (
            f"{self.name}: {self.count} acknowledged, longest wait {self.longest_s:.3f} s, refused {refused}, "
            f"{self.unanswered} without an answer {self.errors}"
        )

    def _run(self) -> None:
        while not self._is_ending.is_set() and not self.errors:
            began, body = time.monotonic(), f"{self.name}-{self.count}".encode()
            deadline = began + PATIENCE_S
            while not self.publish(body):
                if self.errors or time.monotonic() > deadline:
                    self.errors.append(f"{body!r} was not taken")
                    return
            self.longest_s = max(self.longest_s, time.monotonic() - began)
            self.count += 1
            time.sleep(PAUSE_S)
        self.close()

    def publish(self, body: bytes) -> bool:
        """Publish a message; False: it is to be published again."""
        raise NotImplementedError

    def close(self) -> None:
        """Let go of what is open."""


class OurPublisher(Publisher):
    """A producer of this project: its callers get no error."""

    def __init__(self, name: str, producer: Any, topic: str) -> None:
        super().__init__(name)
        self._producer = producer
        self._topic = topic

    def publish(self, body: bytes) -> bool:
        try:
            self._producer.call(lambda it: it.pub(self._topic, body, timeout=PATIENCE_S))
        except (FlintError, TimeoutError) as error:
            self.errors.append(repr(error))
            return False
        return True


class PlainPublisher(Publisher):
    """One of others', with fixed addresses.

    Args:
        encode: what is sent for a body.
    """

    def __init__(self, name: str, nodes: Sequence[Nsqd], encode: Callable[[bytes], bytes]) -> None:
        super().__init__(name)
        self._addresses = itertools.cycle([node.tcp for node in nodes])
        self._encode = encode
        self._connection: Connection | None = None

    def publish(self, body: bytes) -> bool:
        if self._connection is None:
            try:
                self._connection = Connection(next(self._addresses))
            except OSError:  # nobody listens there now
                time.sleep(PAUSE_S)
                return False
        try:
            self._connection.send(self._encode(body))
            kind, data = self._connection.frame()
        except (OSError, Closed):
            self.unanswered += 1
            self.close()
            return False
        if kind != ERROR:
            if data != b"OK":
                self.errors.append(repr(data))
            return data == b"OK"
        code = data.decode().partition(" ")[0]
        if code not in RETRYABLE:
            self.errors.append(data.decode())
        self.refused[code] += 1
        self.close()
        return False

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class CurlPublisher(Publisher):
    """Publishes over HTTP, with a connection for each request."""

    def __init__(self, name: str, nodes: Sequence[Nsqd], topic: str) -> None:
        super().__init__(name)
        self._addresses = itertools.cycle([node.http for node in nodes])
        self._address = next(self._addresses)
        self._topic = topic

    def publish(self, body: bytes) -> bool:
        connection = http.client.HTTPConnection(*self._address, timeout=PATIENCE_S)
        try:
            connection.connect()
        except OSError:
            self._address = next(self._addresses)
            time.sleep(PAUSE_S)
            return False
        try:
            connection.request("POST", f"/pub?topic={self._topic}", body)
            answer = connection.getresponse()
            said = answer.read().decode()
        except (OSError, http.client.HTTPException):
            self.unanswered += 1
            self._address = next(self._addresses)
            return False
        finally:
            connection.close()
        if answer.status == 200:
            return True
        if not any(code in said for code in RETRYABLE):
            self.errors.append(f"{answer.status} {said}")
        self.refused[f"{answer.status}"] += 1
        self._address = next(self._addresses)
        return False


class Came:
    """A handler that notes what came; it finishes everything."""

    def __init__(self) -> None:
        self.bodies: Counter[bytes] = Counter()

    def __call__(self, message: Any) -> None:
        self.bodies[message.body] += 1

    def lacks(self, publishers: Sequence[Publisher]) -> list[bytes]:
        """What was acknowledged and did not come."""
        wanted = (f"{each.name}-{number}".encode() for each in publishers for number in range(each.count))
        return [body for body in wanted if body not in self.bodies]


class PlainConsumer:
    """One of others' with fixed addresses: a connection to each, made again when it is lost."""

    def __init__(self, nodes: Sequence[Nsqd], topic: str, channel: str) -> None:
        self.came = Came()
        self.told: Counter[str] = Counter()
        self.errors: list[str] = []
        self._topic, self._channel = topic, channel
        self._is_ending = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(node,), daemon=True) for node in nodes]
        self._begun = threading.Semaphore(0)
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            assert self._begun.acquire(timeout=PATIENCE_S), "a consumer is not subscribed"

    def _run(self, node: Nsqd) -> None:
        while not self._is_ending.is_set():
            try:
                with Connection(node.tcp) as connection:
                    self._consume(connection)
            except (OSError, Closed):
                time.sleep(0.02)

    def _consume(self, connection: Connection) -> None:
        connection.send(b"SUB %s %s\n" % (self._topic.encode(), self._channel.encode()))
        kind, data = connection.frame()
        if kind == ERROR:
            self._told(data)
            return
        connection.rdy(100)
        self._begun.release()
        while not self._is_ending.is_set():
            try:
                found = connection.any_frame(0.2)
            except TimeoutError:
                continue
            if found is None:
                return
            kind, data = found
            if kind == MESSAGE:
                message = message_of(data)
                self.came(message)
                connection.finish(message)
            elif kind == ERROR:
                self._told(data)
            else:
                connection.send(b"NOP\n")

    def _told(self, data: bytes) -> None:
        code = data.decode().partition(" ")[0]
        self.told[code] += 1
        if code not in (*RETRYABLE, "E_SUB_FAILED", "E_FIN_FAILED"):  # the last: it comes again
            self.errors.append(data.decode())

    def end(self) -> None:
        self._is_ending.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)
        assert not self.errors, self.errors
