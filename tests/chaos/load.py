"""Publishers and consumers of a run, on plain sockets and with the clients of this project, in order and not.

Each is a thread that goes on until it is told to end, whatever happens to the cluster; it writes down what it did and
saw.

Rules of this file: a publisher has one publish under way, so that its messages have an order; each attempt of a plain
socket has a body of its own; a FIN is written down before it is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from struct import unpack
from typing import Any

from tests.chaos.history import Delivered, Finished, History, Outcome, Published
from tests.chaos.machines import find_leader, now_ns
from tests.integration.daemons import (
    ERROR,
    HEARTBEAT,
    MESSAGE,
    RESPONSE,
    Closed,
    Connection,
    fin,
    message_of,
    req,
    sized,
)

import flintmq.sync
from flintmq import Consumer, Producer, PublishRefused, PublishUnknown
from flintmq.errors import FlintError

ANSWER_S = 6.0
CONNECT_S = 1.0
SILENT_S = 3.5
"""After which a consumer thinks its connection dead; it asked for a heartbeat each second."""
_PAUSE_S = 0.05
_SEQUENCE_MASK = (1 << 50) - 1
REFUSALS = (b"E_FAILED_ON_NOT_LEADER", b"E_FAILED_ON_NOT_WRITABLE")
"""What a node answers that does not lead, or not any more: nothing is stored, ask who does."""
_UNKNOWN = (b"E_PUB_FAILED", b"E_MPUB_FAILED")
CLIENT_TIMEOUT_S = 20.0


class Record:
    """What the clients write down, and what the run asks of it while it goes on.

    Attributes:
        answers: errors by what they say, for the report.
        acknowledged: (topic, partition or -1) -> bodies that were acknowledged.
        last_ok_ns: writer -> when its last publish was acknowledged.
        longest_ns: writer -> its longest time between two acknowledgements since :meth:`begin_window`.
    """

    def __init__(self) -> None:
        self.history = History()
        self.answers: Counter[str] = Counter()
        self.acknowledged: dict[str, set[str]] = defaultdict(set)
        self.seen: dict[tuple[str, str], set[str]] = defaultdict(set)
        self.last_ok_ns: dict[str, int] = {}
        self.longest_ns: dict[str, int] = {}

    def published(self, writer: str, topic: str, partition: int, body: str, began_ns: int, outcome: Outcome) -> None:
        """Write down a publish that has ended."""
        ended_ns = now_ns()
        self.history.published.append(Published(writer, topic, partition, body, began_ns, ended_ns, outcome))
        if outcome is Outcome.OK:
            self.acknowledged[topic].add(body)
            gap_ns = ended_ns - self.last_ok_ns.get(writer, ended_ns)
            self.longest_ns[writer] = max(self.longest_ns.get(writer, 0), gap_ns)
            self.last_ok_ns[writer] = ended_ns

    def delivered(self, delivered: Delivered) -> None:
        """Write down a delivery."""
        self.history.consumed.append(delivered)
        self.seen[delivered.topic, delivered.channel].add(delivered.body)

    def begin_window(self) -> None:
        """Measure the longest gaps from now on."""
        at = now_ns()
        for writer in self.last_ok_ns:
            self.last_ok_ns[writer] = at
        self.longest_ns = {}

    def missing(self) -> dict[tuple[str, str], int]:
        """Count what is acknowledged and was not delivered yet, by channel."""
        counts = {where: len(self.acknowledged[where[0]] - self.seen[where]) for where in sorted(self.history.channels)}
        return {where: count for where, count in counts.items() if count}


class Worker(threading.Thread):
    """A client in a thread."""

    def __init__(self, record: Record, name: str, lookupds: list[tuple[str, int]], seed: int) -> None:
        super().__init__(name=name, daemon=True)
        self.record = record
        self.lookupds = lookupds
        self.chance = random.Random(f"{seed} {name}")
        self.is_over = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            self.work()
        except BaseException as error:  # noqa: BLE001 - told at the end of the run
            self.failure = error

    def work(self) -> None:
        raise NotImplementedError

    def leader(self, topic: str, number: int, access: str) -> tuple[str, int] | None:
        lookupds = self.lookupds[:]
        self.chance.shuffle(lookupds)
        return find_leader(lookupds, topic, number, access)

    def rest(self, longest_s: float = _PAUSE_S) -> None:
        self.is_over.wait(self.chance.uniform(0, longest_s))


class PlainPublisher(Worker):
    """Publishes to one partition over a plain socket, and looks its leader up when it is refused.

    Attributes:
        answer_s: how long it waits for an answer, at most; it draws its patience from half of that on.
    """

    def __init__(self, record: Record, topic: str, number: int, lookupds: list[tuple[str, int]], seed: int) -> None:
        super().__init__(record, f"plain-{topic}-{number}", lookupds, seed)
        self.answer_s = ANSWER_S
        self._topic, self._number = topic, number
        self._connection: Connection | None = None

    def work(self) -> None:
        count = 0
        while not self.is_over.is_set():
            count += 1
            self.publish(f"{self.name}:{count}")
            self.rest()
        self.close()

    def publish(self, body: str) -> Outcome | None:
        """Publish once; None: nothing was sent."""
        began_ns = now_ns()
        outcome = self._try(body)
        if outcome is None:
            self.close()
            self.rest(0.1)
            return None
        self.record.published(self.name, self._topic, self._number, body, began_ns, outcome)
        if outcome is not Outcome.OK:
            self.close()
        return outcome

    def _try(self, body: str) -> Outcome | None:
        if self._connection is None:
            leader = self.leader(self._topic, self._number, "w")
            if leader is None:
                return None
            try:
                self._connection = Connection(leader, connect_s=CONNECT_S)
            except OSError:
                return None
        data = body.encode()
        try:
            self._connection.send(b"PUB %s %d\n%s" % (self._topic.encode(), self._number, sized(data)))
            kind, answer = self._connection.frame(self.chance.uniform(self.answer_s / 2, self.answer_s))
        except (OSError, AssertionError) as error:
            self.record.answers[f"publish: {type(error).__name__}"] += 1
            return Outcome.UNKNOWN
        if kind != ERROR:
            assert answer == b"OK", answer
            return Outcome.OK
        self.record.answers[answer.split()[0].decode()] += 1
        if answer.startswith(REFUSALS):
            return Outcome.REFUSED
        assert answer.startswith(_UNKNOWN), f"a publisher was told {answer!r}, which it cannot just try again"
        return Outcome.UNKNOWN

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


class PlainConsumer(Worker):
    """Consumes one partition over a plain socket; requeues some."""

    def __init__(
        self,
        record: Record,
        topic: str,
        channel: str,
        number: int,
        is_ordered: bool,
        lookupds: list[tuple[str, int]],
        seed: int,
    ) -> None:
        super().__init__(record, f"plain-{topic}-{channel}-{number}", lookupds, seed)
        self._topic, self._channel, self._number, self._is_ordered = topic, channel, number, is_ordered
        self._connection_count = 0

    def work(self) -> None:
        while not self.is_over.is_set():
            leader = self.leader(self._topic, self._number, "r")
            if leader is not None:
                with contextlib.suppress(OSError, Closed), Connection(leader, connect_s=CONNECT_S) as connection:
                    self._connection_count += 1
                    connection.identify(heartbeat_interval=1000, msg_timeout=15_000)
                    self._consume(connection, f"{self.name}/{self._connection_count}")
            self.rest(0.2)

    def _consume(self, connection: Connection, name: str) -> None:
        command = "SUB_ORDER" if self._is_ordered else "SUB"
        connection.send(f"{command} {self._topic} {self._channel} {self._number}\n".encode())
        try:
            kind, answer = connection.frame(SILENT_S * 2)
        except AssertionError:  # the node is cut off, or stands still: another one may lead by now
            self.record.answers["subscribe: no answer"] += 1
            return
        if kind == ERROR:
            self.record.answers[answer.split()[0].decode()] += 1
            return
        connection.rdy(self.chance.choice((1, 5, 50)))
        while not self.is_over.is_set():
            frame = connection.any_frame(SILENT_S)
            if frame is None:
                return
            if frame.kind == MESSAGE:
                self._take(connection, name, frame.data)
            elif frame == (RESPONSE, HEARTBEAT):
                connection.send(b"NOP\n")
            elif frame.kind == ERROR and not frame.data.startswith((b"E_FIN_FAILED", b"E_REQ_FAILED")):
                self.record.answers[frame.data.split()[0].decode()] += 1
                return

    def _take(self, connection: Connection, name: str, data: bytes) -> None:
        delivered = delivery_of(data, self._topic, self._channel, name, self._is_ordered)
        self.record.delivered(delivered)
        message_id = message_of(data).id
        if self.chance.random() < 0.01:
            connection.send(req(message_id, 0))
            return
        self.record.history.consumed.append(finished(delivered))
        connection.send(fin(message_id))


def delivery_of(data: bytes, topic: str, channel: str, connection: str, is_ordered: bool = False) -> Delivered:
    """Read a message frame of a topic with partitions."""
    message = message_of(data)
    (internal_id,) = unpack(">Q", message.id[:8])
    body = message.body[12:] if is_ordered else message.body  # its offset in bytes and its size stand in front
    partition, offset = internal_id >> 50, internal_id & _SEQUENCE_MASK
    return Delivered(now_ns(), topic, channel, connection, partition, offset, message.attempts, body.decode())


def finished(delivered: Delivered) -> Finished:
    """Its FIN, now."""
    return Finished(now_ns(), *delivered[1:6])


class ClientPublisher(Worker):
    """Publishes with a client of this project, which finds the leaders itself.

    Args:
        is_blocking: with the one that has no event loop.
        options: of the producer.
    """

    def __init__(
        self,
        record: Record,
        name: str,
        topic: str,
        lookupds: list[tuple[str, int]],
        seed: int,
        is_blocking: bool,
        is_sharded: bool = False,
        **options: object,
    ) -> None:
        super().__init__(record, name, lookupds, seed)
        self._topic, self._is_blocking, self._is_sharded, self._options = topic, is_blocking, is_sharded, options

    def work(self) -> None:
        addresses = [f"http://{host}:{port}" for host, port in self.lookupds]
        options: dict[str, Any] = {"nsqlookupd_http_addresses": addresses, "timeout": CLIENT_TIMEOUT_S, **self._options}
        more: dict[str, Any] = {"sharding_id": self.name} if self._is_sharded else {}
        if self._is_blocking:
            with flintmq.sync.Producer(**options) as producer:
                self._publish(lambda body: producer.pub(self._topic, body, **more))
        else:
            asyncio.run(self._publish_on_a_loop(options, more))

    async def _publish_on_a_loop(self, options: dict[str, Any], more: dict[str, Any]) -> None:
        async with Producer(**options) as producer:
            loop = asyncio.get_running_loop()

            def publish(body: bytes) -> object:
                return asyncio.run_coroutine_threadsafe(producer.pub(self._topic, body, **more), loop).result()

            await asyncio.to_thread(self._publish, publish)

    def _publish(self, publish: Callable[[bytes], object]) -> None:
        count = 0
        while not self.is_over.is_set():
            count += 1
            body = f"{self.name}:{count}"
            began_ns = now_ns()
            try:
                publish(body.encode())
                outcome = Outcome.OK
            except PublishUnknown as error:
                outcome = Outcome.UNKNOWN
                self.record.answers[f"{self.name}: unknown: {str(error)[:80]}"] += 1
            except (PublishRefused, FlintError) as error:
                outcome = Outcome.REFUSED
                self.record.answers[f"{self.name}: refused: {str(error)[:80]}"] += 1
            self.record.published(self.name, self._topic, -1, body, began_ns, outcome)
            self.rest()


class ClientConsumer(Worker):
    """Consumes with a client of this project."""

    def __init__(
        self,
        record: Record,
        topic: str,
        channel: str,
        lookupds: list[tuple[str, int]],
        seed: int,
        is_blocking: bool,
        is_ordered: bool = False,
    ) -> None:
        super().__init__(record, f"{topic}-{channel}", lookupds, seed)
        self._topic, self._channel, self._is_blocking, self._is_ordered = topic, channel, is_blocking, is_ordered

    def work(self) -> None:
        addresses = [f"http://{host}:{port}" for host, port in self.lookupds]
        options: dict[str, Any] = {
            "nsqlookupd_http_addresses": addresses,
            "handler": self._handle,
            "ordered": self._is_ordered,
            "max_attempts": 0,
            "heartbeat_interval": 1.0,
            "msg_timeout": 15.0,
            "lookup_interval": 5.0,
            "requeue_delay": 0.1,
        }
        if self._is_blocking:
            consumer = flintmq.sync.Consumer(self._topic, self._channel, **options)
            consumer.start()

            def stop() -> None:
                self.is_over.wait()
                consumer.stop()

            threading.Thread(target=stop, daemon=True).start()
            consumer.run()
        else:
            asyncio.run(self._consume_on_a_loop(options))

    async def _consume_on_a_loop(self, options: dict[str, Any]) -> None:
        async with Consumer(self._topic, self._channel, inline=True, **options):
            await asyncio.to_thread(self.is_over.wait)

    def _handle(self, message: flintmq.Message[bytes]) -> None:
        internal_id = message.internal_id
        assert internal_id is not None
        delivered = Delivered(
            now_ns(),
            self._topic,
            self._channel,
            f"{self.name}@{message.nsqd}",
            internal_id >> 50,
            internal_id & _SEQUENCE_MASK,
            message.attempts,
            message.body.decode(),
        )
        self.record.delivered(delivered)
        self.record.history.consumed.append(finished(delivered))
