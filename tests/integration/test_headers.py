"""Trace ids and headers with the rest of nsqd: AUTH, clients that know nothing of them, long delays."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial

import pytest
from tests.conformance.protocol_helpers import consumer, fatal, fatal_on
from tests.conformance.redesigned_helpers import create, extended, headed, one, placed, several, stored, traced
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, Connection, Daemons, Message, Nsqd, pub, req, sized, wait_until

from flintmq.sync import Consumer, Producer

COMMANDS = {
    "PUB_TRACE": one("PUB_TRACE", "t", 0, traced(5, b"x")),
    "PUB_EXT": one("PUB_EXT", "t", 0, headed({"k": "v"}, b"x")),
    "MPUB_TRACE": several("MPUB_TRACE", "t", 0, [traced(5, b"x")]),
    "MPUB_EXT": several("MPUB_EXT", "t", 0, [headed({"k": "v"}, b"x")]),
}


# -- AUTH --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def auth_server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, auth_server: AuthServer) -> Iterator[Nsqd]:
    daemons = Daemons(tmp_path_factory.mktemp("headers"))
    try:
        nsqd = daemons.nsqd("--durability=os", f"--auth-http-address={auth_server.address}")
        for name in ("t", "no"):
            create(nsqd, name, 1, extend="true")
        yield nsqd
    finally:
        daemons.close()


def authorize(connection: Connection) -> None:
    connection.send(b"AUTH\n" + sized(SECRET.encode()))
    assert json.loads(connection.response())["permission_count"] > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_auth_first(guarded: Nsqd, command: str):
    assert fatal(guarded, COMMANDS[command]) == f"E_AUTH_FIRST AUTH required before {command}"


@pytest.mark.parametrize("command", COMMANDS)
def test_unauthorized(guarded: Nsqd, auth_server: AuthServer, command: str):
    auth_server.grant({"permissions": ["publish"], "topic": "^t$"})
    with guarded.connect() as connection:
        authorize(connection)
        connection.send(COMMANDS[command])
        assert connection.response()[:2] == b"OK"
        refused = COMMANDS[command].replace(b" t ", b" no ", 1)
        assert fatal_on(connection, refused) == f'E_UNAUTHORIZED AUTH failed for {command} on "no" ""'
    assert guarded.stats("no")["message_count"] == 0


@pytest.mark.parametrize("command", ["MPUB_TRACE", "MPUB_EXT"])
def test_several_are_checked_before_their_bodies(guarded: Nsqd, command: str):
    assert fatal(guarded, f"{command} t 0\n".encode()) == f"E_AUTH_FIRST AUTH required before {command}"


def test_grants_that_expire_within_a_burst(guarded: Nsqd, auth_server: AuthServer):
    """Commands wait for the new answer, and stay in their order."""
    auth_server.grant({"permissions": ["publish"], "topic": ".*"}, ttl=1)
    with guarded.connect() as connection:
        authorize(connection)
        asked = len(auth_server.questions)
        sequences = []
        while len(auth_server.questions) == asked:
            connection.send(COMMANDS["PUB_TRACE"] * 20)
            sequences += [stored(connection.response()).sequence for _ in range(20)]
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))


# -- clients that know nothing of headers ------------------------------------------------------------------------------

PYNSQ = """
import json, sys, nsq

address, topic, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
seen = []

def handle(message):
    message.enable_async()
    if message.attempts == 1:
        message.requeue(backoff=False, time_ms=0)
        return
    seen.append(message.body.decode())
    message.finish()
    if len(seen) == count:
        nsq_loop.call_later(0.1, stop)

def stop():
    print(json.dumps(sorted(seen)))
    nsq_loop.stop()

import tornado.ioloop
nsq_loop = tornado.ioloop.IOLoop.current()
nsq.Reader(topic, "c", message_handler=handle, nsqd_tcp_addresses=[address], max_in_flight=50)
nsq_loop.start()
"""


def test_pynsq_on_a_plain_topic_with_headers(nsqd: Nsqd):
    """Every message is given back once, so bodies alone come also when they come again."""
    pytest.importorskip("nsq")
    nsqd.post("/topic/create?topic=t&extend=true")
    with nsqd.connect() as connection:
        connection.ok(several("MPUB_EXT", "t", None, [headed({"k": "v" * n}, b"a%02d" % n) for n in range(20)]))
        connection.ok(b"".join(pub("t", b"b%02d" % n) for n in range(20)), count=20)
    address = f"{nsqd.tcp[0]}:{nsqd.tcp[1]}"
    command = [sys.executable, "-c", PYNSQ, address, "t", "40"]
    done = subprocess.run(command, capture_output=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert json.loads(done.stdout) == [f"{kind}{n:02d}" for kind in "ab" for n in range(20)]
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def test_our_clients_on_a_plain_topic_with_headers(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=t&extend=true")
    address = f"{nsqd.tcp[0]}:{nsqd.tcp[1]}"
    with nsqd.connect() as connection:
        connection.ok(one("PUB_EXT", "t", None, headed({"k": "v"}, b"a")))
    with Producer(address) as producer:
        producer.pub("t", b"b")
    with Consumer("t", "c", nsqd_tcp_addresses=address) as consuming:
        seen = []
        for message in consuming:
            seen.append((message.body, message.headers))
            message.finish()
            if len(seen) == 2:
                break
    assert seen == [(b"a", {}), (b"b", {})]


def is_deferred(nsqd: Nsqd, topic: str, count: int) -> bool:
    return bool(nsqd.stats(topic, "c")["deferred_count"] == count)


def is_done(nsqd: Nsqd, topic: str) -> bool:
    return nsqd.unfinished(topic, "c") == 0


# -- delays ------------------------------------------------------------------------------------------------------------


def test_long_delays_keep_trace_ids_and_headers(daemons: Daemons):
    """Set aside on the disk, over a kill -9, for a consumer that knows headers and for one that does not."""
    nsqd = daemons.nsqd()
    create(nsqd, "parted", 1, extend="true")
    nsqd.post("/topic/create?topic=plain&extend=true")
    for name in ("parted", "plain"):
        nsqd.post(f"/channel/create?topic={name}&channel=c")
    headers = {"k": "v", "##trace_id": "7"}
    with nsqd.connect() as connection:
        for name in ("parted", "plain"):
            connection.send(several("MPUB_EXT", name, 0, [headed(headers, b"%d" % n) for n in range(30)]))
            assert connection.response() == b"OK"
    for name in ("parted", "plain"):
        with consumer(nsqd, name, rdy_count=30, extend_support=True) as waiting:
            messages = waiting.messages(30)
            waiting.rdy(0)
            waiting.send(b"".join(req(message.id, 3_000_000) for message in messages[:15]))
            waiting.send(b"".join(req(message.id, 700) for message in messages[15:]))
            wait_until(partial(is_deferred, nsqd, name, 30))
    (row, *_) = nsqd.get("/channel/peek?topic=parted&channel=c&what=deferred&count=30")["messages"]
    assert (row["trace_id"], row["body_size"], json.loads(row["ext"])) == (7, 2, headers)
    nsqd.kill()
    nsqd.start()
    with consumer(nsqd, "parted", rdy_count=30, extend_support=True) as waiting:
        found = waiting.messages(15)
        assert {placed(each).trace_id for each in found} == {7}
        assert [json.loads(extended(each.body).headers) for each in found] == [headers] * 15
        assert sorted(int(extended(each.body).body) for each in found) == list(range(15, 30))
    with consumer(nsqd, "plain", rdy_count=30) as waiting:
        assert sorted(int(each.body) for each in waiting.messages(15)) == list(range(15, 30))


def test_delays_that_find_no_room_in_memory(nsqd: Nsqd):
    """More than a channel defers in memory: they come back from the disk with what they had."""
    count = 6000
    nsqd.post("/topic/create?topic=plain&extend=true")
    create(nsqd, "parted", 1, extend="true")
    for name in ("plain", "parted"):
        with nsqd.connect() as connection:
            for first in range(0, count, 1000):
                bodies = [headed({"##trace_id": str(n + 1)}, b"%d" % n) for n in range(first, first + 1000)]
                connection.ok(several("MPUB_EXT", name, 0, bodies))
        again: list[Message] = []
        with consumer(nsqd, name, rdy_count=2500, extend_support=name == "parted") as waiting:
            while len(again) < count:
                message = waiting.message()
                if message.attempts == 1:
                    waiting.send(req(message.id, 1000))
                else:
                    waiting.finish(message)
                    again.append(message)
        assert {message.attempts for message in again} == {2}
        if name == "plain":
            assert sorted(int(message.body) for message in again) == list(range(count))
        else:
            found = {int(extended(message.body).body): message for message in again}
            assert sorted(found) == list(range(count))
            assert all(placed(message).trace_id == number + 1 for number, message in found.items())
            assert all(
                extended(message.body).headers == b'{"##trace_id": "%d"}' % (number + 1)
                for number, message in found.items()
            )
        wait_until(partial(is_done, nsqd, name))
