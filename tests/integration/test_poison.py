"""Messages that no consumer can handle, at a real nsqd: they hold up nothing, and nothing holds them up."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, pub, req

POISON = b"poison"

# Handles one message at a time in the order received, finishes it and says so; dies of the poison.
HANDLER = r"""
import os, socket, struct, sys

address, port, rdy = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
connection = socket.create_connection((address, port))
connection.sendall(b"  V2SUB t c\nRDY " + rdy + b"\n")
stream = connection.makefile("rb")
while True:
    (size,) = struct.unpack(">I", stream.read(4))
    frame = stream.read(size)
    if frame[:4] != b"\0\0\0\2":
        continue
    if frame[30:] == b"poison":
        os._exit(7)
    print(frame[30:].decode(), flush=True)
    connection.sendall(b"FIN " + frame[14:30] + b"\nNOP\n")
"""


def good(count: int) -> list[bytes]:
    return [b"good%d" % number for number in range(count)]


def published(daemons: Daemons, *bodies: bytes) -> Nsqd:
    nsqd = daemons.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    with nsqd.connect() as producer:
        for body in bodies:
            producer.ok(pub("t", body))
    return nsqd


def died_of(nsqd: Nsqd, rdy: int) -> list[bytes]:
    """Let a process consume until it dies of the poison; what it finished."""
    command = [sys.executable, "-S", "-c", HANDLER, nsqd.tcp[0], str(nsqd.tcp[1]), str(rdy)]
    done = subprocess.run(command, stdout=subprocess.PIPE, timeout=2 * PATIENCE_S, check=False)
    assert done.returncode == 7
    return done.stdout.split()


@pytest.mark.parametrize("rdy", [1, 3])
def test_of_a_handler_that_dies_of_one_message_all_others_are_through(daemons: Daemons, rdy: int):
    """Go's nsqd: one crash, and the poison is behind the others. Here: at most two for each of them."""
    nsqd = published(daemons, POISON, *good(20))
    finished: list[bytes] = []
    for _crash in range(40):
        finished += died_of(nsqd, rdy)
        if set(finished) == set(good(20)):
            break
    assert set(finished) == set(good(20))
    assert nsqd.unfinished("t", "c") == 1, "the poison is still there"


def test_what_comes_back_waits_behind_one_that_is_there(daemons: Daemons):
    """By REQ 0, a timeout or a lost connection, as in NSQ, which puts it at the end of the queue."""
    nsqd = published(daemons, b"first", b"second", b"third", b"fourth")
    with nsqd.connect() as consumer:
        consumer.identify(msg_timeout=1000)
        consumer.subscribe("t", "c", 1)
        message = consumer.message()
        assert message.body == b"first"
        consumer.send(req(message.id, 0))
        message = consumer.message()
        assert (message.body, message.attempts) == (b"second", 1)
        consumer.finish(message)
        message = consumer.message()
        assert (message.body, message.attempts) == (b"first", 2)
        message = consumer.message()  # when the time is out
        assert (message.body, message.attempts) == (b"third", 1)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        bodies: list[bytes] = []
        while len(bodies) < 3:
            message = consumer.message()
            bodies.append(message.body)
            consumer.finish(message)
    assert bodies == [b"first", b"fourth", b"third"] or bodies == [b"fourth", b"first", b"third"]


def test_a_message_that_is_always_given_back_takes_turns_with_the_others(daemons: Daemons):
    nsqd = published(daemons, POISON, *good(30))
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 1)
        bodies: list[bytes] = []
        for _ in range(60):
            message = consumer.message()
            bodies.append(message.body)
            if message.body == POISON:
                consumer.send(req(message.id, 0))
            else:
                consumer.finish(message)
    assert [body for body in bodies if body != POISON] == good(30)
    assert all(POISON in pair for pair in pairwise(bodies[1:])), "they take turns"


def test_three_such_messages_among_three_hundred(daemons: Daemons):
    nsqd = published(daemons, POISON, POISON, POISON, *good(300))
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c", 3)
        bodies: list[bytes] = []
        while len(set(bodies)) <= 300:
            message = consumer.message()
            bodies.append(message.body)
            assert len(bodies) <= 620
            if message.body == POISON:
                consumer.send(req(message.id, 0))
            else:
                consumer.finish(message)
    assert [body for body in bodies if body != POISON] == good(300)


def test_a_message_that_always_times_out_takes_turns_with_the_others(daemons: Daemons):
    nsqd = published(daemons, POISON, *good(3))
    with nsqd.connect() as consumer:
        consumer.identify(msg_timeout=1000)
        consumer.subscribe("t", "c", 1)
        bodies: list[bytes] = []
        while len(set(bodies)) <= 3:
            message = consumer.message()
            bodies.append(message.body)
            assert len(bodies) <= 8
            if message.body != POISON:
                consumer.finish(message)
    assert [body for body in bodies if body != POISON] == good(3)
