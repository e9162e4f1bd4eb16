"""What every foreign client is put through, and how it is run: a process of its own, with a JSON argument.

Rules of this file: what a client says of itself is only half of the proof; the other half is what our daemons count and
what a raw connection then finds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tests.foreign.clients.task import Task
from tests.integration.daemons import PATIENCE_S, Daemons, Message, Nsqd, wait_until

ROOT = Path(__file__).resolve().parents[2]
CLIENTS = Path(__file__).resolve().parent / "clients"
MSG_TIMEOUT_S = 1.0


class Run:
    """One client process and the events it printed."""

    def __init__(self, command: Sequence[str], task: Task) -> None:
        self.events: list[dict[str, Any]] = []
        self._process = subprocess.Popen(
            [*command, json.dumps(asdict(task))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=CLIENTS.parent,
            text=True,
        )
        self.errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read_events, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):  # asyncnsq prints texts of its own
                self.events.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        self.errors += list(self._process.stderr)

    def end(self, timeout_s: float = PATIENCE_S) -> list[dict[str, Any]]:
        """Wait until it ends by itself with exit code 0; return its events."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.discard()
            raise AssertionError(f"client did not end; {self.described}") from None
        for reader in self._readers:
            reader.join(PATIENCE_S)
        assert code == 0, f"client ended with {code}; {self.described}"
        return self.events

    def discard(self) -> None:
        """End it, whatever it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()

    @property
    def described(self) -> str:
        return f"it said {self.events[-5:]}, and on stderr:\n{''.join(self.errors[-15:])}"

    def of(self, event: str) -> list[dict[str, Any]]:
        """Its events of one kind so far."""
        return [each for each in self.events if each["event"] == event]

    @property
    def messages(self) -> list[tuple[str, int]]:
        """Body and attempts of every message so far."""
        return [(each["body"], each["attempts"]) for each in self.of("message")]


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody else's client.

    Attributes:
        command: what runs it; the task is appended.
        can_hold: whether it goes on while a message is held. One that does not is tested without.
    """

    command: tuple[str, ...]
    can_hold: bool = True

    def start(self, task: Task) -> Run:
        return Run(self.command, task)


def python_client(name: str) -> tuple[str, ...]:
    """The command of a client in Python."""
    return (sys.executable, "-m", f"tests.foreign.clients.{name}")


def address(where: tuple[str, int]) -> str:
    return f"{where[0]}:{where[1]}"


def rest_of(nsqd: Nsqd, topic: str, channel: str) -> list[Message]:
    """Finish what a channel still holds and return it."""
    count = nsqd.unfinished(topic, channel)
    with nsqd.connect() as connection:
        connection.subscribe(topic, channel, max(1, count))
        messages = connection.messages(count)
        connection.silence(0.1)
        connection.finish(*messages)
        connection.settle()
    return messages


# -- scenarios ---------------------------------------------------------------------------------------------------------


def publishes(client: Client, nsqd: Nsqd) -> None:
    """PUB, MPUB and DPUB arrive byte for byte; the deferred message not before its time."""
    single = ["one", "two", "unicode: Grüße", "\0\n\r", "x" * 70_000]
    batch = [f"batch {number}" for number in range(250)]
    with nsqd.connect() as consumer:
        consumer.subscribe("topic", "check", 1000)
        begun = time.monotonic()
        run = client.start(
            Task(
                "publish",
                "topic",
                nsqd=[address(nsqd.tcp)],
                single=single,
                batch=batch,
                deferred=["deferred"],
                defer_ms=1500,
            )
        )
        published = [event["ok"] for event in run.end() if event["event"] == "published"]
        assert published == [True] * (len(single) + 2), run.described
        messages = consumer.messages(len(single) + len(batch))
        assert [message.body.decode() for message in messages] == single + batch
        assert nsqd.stats("topic", "check")["deferred_count"] == 1
        deferred = consumer.message()
        assert (deferred.body, deferred.attempts) == (b"deferred", 1)
        assert time.monotonic() - begun >= 1.5
    wait_until(lambda: nsqd.get("/stats?format=json")["producers"] is None, "producer gone")


def consumes(client: Client, nsqd: Nsqd) -> None:
    """A few hundred messages, each delivered once and finished, and the connection said goodbye."""
    bodies = [f"message {number}" for number in range(400)]
    nsqd.publish("topic", *(body.encode() for body in bodies))
    run = client.start(
        Task("consume", "topic", [address(nsqd.tcp)], channel="channel", max_in_flight=50, finish_count=400)
    )
    run.end()
    assert run.messages == [(body, 1) for body in bodies], run.described
    wait_until(lambda: nsqd.stats("topic", "channel")["client_count"] == 0, "consumer gone")
    stats = nsqd.stats("topic", "channel")
    counts = {name: stats[name] for name in ("depth", "in_flight_count", "requeue_count", "timeout_count")}
    assert counts == dict.fromkeys(counts, 0), run.described


def requeues(client: Client, nsqd: Nsqd) -> None:
    """A message given back comes again after its delay, with the attempts counted."""
    nsqd.publish("topic", b"requeue me", b"finish me")
    run = client.start(
        Task(
            "consume",
            "topic",
            [address(nsqd.tcp)],
            channel="channel",
            max_in_flight=10,
            finish_count=2,
            requeue_ms=700,
        )
    )
    wait_until(lambda: nsqd.stats("topic")["channels"] and nsqd.stats("topic", "channel")["deferred_count"] == 1)
    deferred_at = time.monotonic()
    run.end()
    assert run.messages == [("requeue me", 1), ("finish me", 1), ("requeue me", 2)], run.described
    assert time.monotonic() - deferred_at > 0.5
    stats = nsqd.stats("topic", "channel")
    assert (stats["requeue_count"], stats["timeout_count"]) == (1, 0)
    wait_until(lambda: nsqd.unfinished("topic", "channel") == 0, "all finished")


def touches(client: Client, daemons: Daemons) -> None:
    """A message held for three of its timeouts stays with its consumer, which also answers heartbeats meanwhile."""
    nsqd = daemons.nsqd("--durability=os", f"--msg-timeout={MSG_TIMEOUT_S:g}s")
    nsqd.publish("topic", b"slow")
    run = client.start(
        Task(
            "consume",
            "topic",
            [address(nsqd.tcp)],
            channel="channel",
            max_in_flight=2,
            heartbeat_s=1,
            finish_count=1,
            slow_s=3.2 * MSG_TIMEOUT_S,
            touch_s=0.4 * MSG_TIMEOUT_S,
        )
    )
    run.end()
    assert run.messages == [("slow", 1)], run.described
    wait_until(lambda: nsqd.unfinished("topic", "channel") == 0, "finished")
    stats = nsqd.stats("topic", "channel")
    assert (stats["timeout_count"], stats["requeue_count"]) == (0, 0)


def discovers(client: Client, daemons: Daemons, joins_late: bool) -> None:
    """Every nsqd that our nsqlookupd knows for the topic is found.

    Args:
        joins_late: the second nsqd gets the topic only after the client has asked.
    """
    nsqlookupd = daemons.nsqlookupd()
    flag = f"--lookupd-tcp-address={address(nsqlookupd.tcp)}"
    nsqds = [daemons.nsqd("--durability=os", flag) for _ in range(2)]
    nsqds[0].publish("topic", b"from 0")
    if not joins_late:
        nsqds[1].publish("topic", b"from 1")
    wait_until(lambda: len(nsqlookupd.producers("topic")) == (1 if joins_late else 2), "registered")
    run = client.start(
        Task(
            "consume",
            "topic",
            nsqlookupd=[address(nsqlookupd.http)],
            channel="channel",
            max_in_flight=10,
            finish_count=2,
        )
    )
    try:
        if joins_late:
            wait_until(lambda: run.messages, "first message")
            nsqds[1].publish("topic", b"from 1")
        run.end(6.0)
    finally:
        run.discard()
    assert sorted(run.messages) == [("from 0", 1), ("from 1", 1)], run.described
    assert nsqlookupd.channels("topic") == ["channel"]


def drains(client: Client, nsqd: Nsqd) -> None:
    """A consumer that stops in the middle leaves exactly what it did not finish, also what it held."""
    bodies = [f"message {number}" for number in range(100)]
    if client.can_hold:
        bodies[3] = "hold this"
    nsqd.publish("topic", *(body.encode() for body in bodies))
    run = client.start(
        Task("consume", "topic", [address(nsqd.tcp)], channel="check", max_in_flight=20, finish_count=40)
    )
    run.end()
    assert run.of("closed"), run.described
    wait_until(lambda: nsqd.stats("topic", "check")["client_count"] == 0, "consumer gone")
    seen = [body for body, _ in run.messages]
    finished = [body for body in seen if not body.startswith("hold")][:40]
    left = {message.body.decode(): message.attempts for message in rest_of(nsqd, "topic", "check")}
    assert set(left) | set(seen) == set(bodies), "lost"
    assert not set(left) & set(finished), "finished before it said that it stops, and delivered again"
    assert left.get("hold this") == (2 if client.can_hold else None)


Scenario = Callable[[Client, Nsqd], None]
ON_ONE_NSQD: list[Scenario] = [publishes, consumes, requeues, drains]
