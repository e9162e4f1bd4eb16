"""A subscribed connection on a stream that the test holds: FINs, order of what is sent, losing it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from flintmq.client.blocking.connection import Connection
from flintmq.client.blocking.stream import Stream, StreamEnded
from flintmq.client.blocking.timers import Timers
from flintmq.client.core.handshake import Handshake
from flintmq.client.options import ConnectionOptions
from flintmq.errors import ConnectionFailed, FlintError, NsqdError
from flintmq.message import FRAME_HEADER, MESSAGE_HEADER
from flintmq.testing import ManualClock
from flintmq.wire.client import Features, MessageFailed, Messages, Record

OK = FRAME_HEADER.pack(6, 0) + b"OK"


def frame(kind: int, data: bytes) -> bytes:
    return FRAME_HEADER.pack(len(data) + 4, kind) + data


def message_frame(message_id: bytes, body: bytes) -> bytes:
    return MESSAGE_HEADER.pack(30 + len(body), 2, 1, 1, message_id) + body


class FakeStream:
    """Gives what the test puts into ``pieces``; takes ``room`` bytes."""

    def __init__(self) -> None:
        self.pieces: list[bytes | FlintError] = []
        self.sent: list[bytes] = []
        self.unsent_bytes = 0
        self.is_open = True
        self.error: FlintError | None = None

    def fileno(self) -> int:
        return 7 if self.is_open else -1

    def read(self) -> bytes:
        piece = self.pieces.pop(0) if self.pieces else b""
        if isinstance(piece, FlintError):
            raise piece
        return piece

    more = read

    def receive(self, deadline: float) -> bytes:
        if not self.pieces:
            raise TimeoutError
        return self.read()

    def send(self, data: bytes, deadline: float) -> None:
        self.put(data)

    def put(self, data: bytes) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(data)

    def send_unsent(self) -> None:
        self.unsent_bytes = 0

    def close(self) -> None:
        self.is_open = False

    abort = close


class Owner:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.is_waiting = False
        self.woken = 0
        self.records: list[Record] = []
        self.failures: list[MessageFailed] = []
        self.settled: list[tuple[int, int, int]] = []
        self.lost: list[str] = []
        self.watched: list[bool | None] = []

    def wake(self) -> None:
        self.woken += 1

    def watch(self, connection: Connection, is_choked: bool) -> None:
        self.watched.append(is_choked)

    def unwatch(self, connection: Connection) -> None:
        assert connection.fileno() == 7, "the selector still needs its number"
        self.watched.append(None)

    def on_messages(self, connection: Connection, messages: Messages) -> None:
        self.records += messages.records

    def on_message_failed(self, connection: Connection, failure: MessageFailed) -> None:
        self.failures.append(failure)

    def on_settled(self, connection: Connection, finished: Sequence[bytes], requeued: int, dropped: int) -> None:
        self.settled.append((len(finished), requeued, dropped))
        if finished:
            connection.rdy(50)

    def on_lost(self, connection: Connection, error: FlintError) -> None:
        self.lost.append(str(error))


def subscribe(connection: Connection) -> None:
    connection.request("SUB", partial(connection.sub, "t", "c"))


class World:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.timers = Timers(self.clock)
        self.stream = FakeStream()
        self.owner = Owner()
        self.connection = self.connected()
        self.stream.pieces.append(OK)
        subscribe(self.connection)
        self.stream.sent.clear()
        self.connection.begin_pumping(self.timers)

    def connected(self) -> Connection:
        connection = Connection(
            "n:4150",
            self.owner,
            ConnectionOptions(heartbeat_interval=1),
            self.timers.time,
            threading.RLock(),
            self.owner,
        )
        connection._stream = cast(Stream, self.stream)
        connection._begin(cast(Handshake, SimpleNamespace(features=Features(), layers=())))
        return connection

    def pass_time(self, seconds: float) -> None:
        self.clock.advance(round(seconds * 1e9))
        self.timers.run_due()

    def receive(self, *pieces: bytes | FlintError) -> None:
        self.stream.pieces += pieces
        self.connection.on_readable()


@pytest.fixture
def world():
    return World()


A, B, C = (letter * 16 for letter in (b"a", b"b", b"c"))


def test_answers_are_one_write_with_rdy_last(world):
    world.connection.requeue(A, 100)
    world.connection.finish(B)
    world.connection.finish_all([C])
    assert world.connection.unsent_count == 3
    world.connection.flush()
    assert world.stream.sent == [b"REQ %s 100\nFIN %s\nFIN %s\nRDY 50\n" % (A, B, C)]
    assert world.owner.settled == [(2, 1, 0)]
    world.connection.flush()
    assert len(world.stream.sent) == 1
    assert world.connection.unsent_count == 0


def test_a_finish_in_the_middle_of_a_flush_is_not_lost(world):
    """Another thread may finish at any instruction; here it does while the owner is told."""

    def settle(connection: Connection, finished: Sequence[bytes], requeued: int, dropped: int) -> None:
        if len(finished) == 1:
            connection.finish(B)

    world.owner.on_settled = settle
    world.connection.finish(A)
    world.owner.is_waiting = True
    world.connection.flush()
    assert world.connection.unsent_count == 1
    assert world.owner.woken == 1, "or it would lie there for as long as nothing comes"
    world.owner.on_settled = lambda *_: None
    world.connection.flush()
    assert world.stream.sent == [b"FIN %s\n" % A, b"FIN %s\n" % B]


def test_no_finish_is_lost_between_threads(world):
    """Four threads finish while a fifth flushes all the time: every id is sent once."""
    ids = [[b"%02d%014d" % (worker, number) for number in range(3000)] for worker in range(4)]
    world.owner.on_settled = lambda *_: None

    def work(own: list[bytes]) -> None:
        for message_id in own:
            world.connection.finish(message_id)

    threads = [threading.Thread(target=work, args=(own,)) for own in ids]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        world.connection.flush()
    world.connection.flush()
    sent = [line[4:] for line in b"".join(world.stream.sent).split(b"\n")[:-1]]
    assert sorted(sent) == sorted(message_id for own in ids for message_id in own)


def test_finishing_wakes_who_waits(world):
    world.connection.finish(A)
    assert world.owner.woken == 0
    world.owner.is_waiting = True
    world.connection.flush()  # as it is before anybody waits
    world.connection.finish(B)
    assert world.owner.woken == 1


def test_messages_heartbeats_and_failures(world):
    failed: list[Any] = []
    world.connection.touch(A, failed.append)
    assert world.stream.sent == [b"TOUCH %s\n" % A], "at once: the application may compute for long"
    late = b"E_TOUCH_FAILED TOUCH %s failed ID not in flight" % A
    pieces = message_frame(A, b"1") + message_frame(B, b"2") + frame(0, b"_heartbeat_") + frame(1, late)
    world.receive(pieces[:50], pieces[50:])
    assert [record[2:] for record in world.owner.records] == [(A, b"1"), (B, b"2")]
    assert world.connection.has_output
    world.connection.flush()
    assert world.stream.sent[-1] == b"NOP\n"
    assert len(failed) == 1
    assert [failure.command for failure in world.owner.failures] == ["TOUCH"]


@pytest.mark.parametrize(
    "piece",
    [
        StreamEnded("closed by the peer"),
        frame(1, b"E_INVALID whatever"),
        b"HTTP/1.1 400 Bad Request",
        frame(0, b"OK"),
    ],
    ids=["end", "fatal error", "not nsqd", "answer to nothing"],
)
def test_what_ends_a_connection_ends_it_once(world, piece):
    world.connection.finish(A)
    world.receive(piece)
    assert len(world.owner.lost) == 1
    assert world.connection.is_lost
    assert not world.stream.is_open
    world.connection.abort("again")
    world.connection.finish(B)
    world.connection.requeue(C, 0)
    world.connection.flush()
    assert len(world.owner.lost) == 1
    assert world.stream.sent == []
    assert world.owner.settled == [(2, 1, 0)], "what the application answers still counts"


def test_a_failing_write_ends_it(world):
    world.stream.error = StreamEnded("Broken pipe")
    world.connection.finish(A)
    world.connection.flush()
    assert "Broken pipe" in world.owner.lost[0]


def test_silence_of_two_heartbeat_intervals_ends_it(world):
    world.pass_time(1.5)
    world.receive(frame(0, b"_heartbeat_"))
    world.pass_time(1.9)
    assert not world.connection.is_lost
    world.pass_time(0.2)
    assert "nothing was received for 2 s" in world.owner.lost[0]
    assert world.timers.next_at() is None


def test_what_the_kernel_does_not_take_is_waited_for(world):
    world.stream.unsent_bytes = 10
    world.connection.rdy(5)
    world.connection.flush()
    world.connection.rdy(6)
    world.connection.flush()
    assert world.owner.watched == [False, True]
    world.connection.on_writable()
    assert world.owner.watched == [False, True, False]
    world.connection.abort("no longer")
    assert world.owner.watched[-1] is None


def test_leaving(world):
    world.connection.finish(A)
    world.connection.end_subscription()
    assert b"".join(world.stream.sent).endswith(b"CLS\n")
    assert not world.connection.has_left
    world.receive(frame(0, b"CLOSE_WAIT"))
    assert world.connection.has_left


def test_what_stands_in_front_of_bodies_and_how_many_may_come(world):
    plain = world.connection
    assert (plain.partition, plain.is_located, plain.is_extended) == (None, False, False)
    ordered = world.connected()
    world.stream.pieces.append(OK)
    ordered.request("SUB", partial(ordered.sub_order, "t", "c", 3))
    assert (ordered.partition, ordered.is_located, ordered.features.max_rdy_count) == (3, True, 1)
    assert ordered.describe().startswith("n:4150/3 ")


def test_a_subscription_that_is_refused_or_not_answered_ends_the_connection(world):
    refused = world.connected()
    world.stream.pieces.append(frame(1, b"E_BAD_TOPIC no"))
    with pytest.raises(NsqdError, match="E_BAD_TOPIC"):
        subscribe(refused)
    assert refused.is_lost
    late = world.connected()
    with pytest.raises(ConnectionFailed, match="SUB was not answered within"):
        subscribe(late)
    assert late.is_lost
    with pytest.raises(ConnectionFailed, match="closed"):
        subscribe(late)


def test_an_error_that_no_command_has_caused_ends_the_connection():
    """For a FIN, say: another nsqd leads the partition now."""
    world = World()
    world.receive(frame(1, b"E_FAILED_ON_NOT_LEADER "))
    assert "E_FAILED_ON_NOT_LEADER" in world.owner.lost[0]
