"""flintmq.sync and peers that misbehave: nothing waits beyond its deadline, errors say what is wrong."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, SOON_S, wait_until
from tests.integration.test_sync import ROOT, address_of

from flintmq.client.blocking.http import get
from flintmq.client.blocking.stream import Stream, StreamEnded, connect
from flintmq.client.core.http import ANSWER_SIZE_MAX
from flintmq.sync import ConnectionFailed, ConnectionOptions, Consumer, FlintError, Producer, PublishRefused

Serve = Callable[[socket.socket], object]


@contextmanager
def server(serve: Serve) -> Iterator[tuple[str, int]]:
    """Serves each connection in a thread of its own."""
    threads: list[threading.Thread] = []

    def handle(connection: socket.socket) -> None:
        with connection:
            connection.settimeout(PATIENCE_S)
            try:
                serve(connection)
            except OSError:
                pass  # the client has left

    def accept() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=handle, args=(connection,), daemon=True))
            threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        try:
            yield listening.getsockname()[:2]
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            accepting.join(PATIENCE_S)


def drip(connection: socket.socket) -> None:
    """Send a byte now and then, for ever."""
    while True:
        connection.sendall(b"H")
        time.sleep(0.02)


def silent(connection: socket.socket) -> None:
    """Read what comes until the client has left."""
    while connection.recv(65536):
        pass


def answering(answer: bytes, body_bytes: int = 0) -> Serve:
    def serve(connection: socket.socket) -> None:
        while b"\r\n\r\n" not in connection.recv(65536):
            pass
        connection.sendall(answer + bytes(body_bytes))

    return serve


# --- HTTP ---

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (HEAD + b"Content-Length: 2\r\n\r\n{}", (200, b"{}")),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", (200, b"{}")),
        (HEAD + b"\r\n{}", (200, b"{}")),
        (b"HTTP/1.0 404 Not Found\r\nContent-Length: 0\r\n\r\n", (404, b"")),
    ],
    ids=["length", "chunked", "until the end", "404"],
)
def test_answers(answer, expected):
    with server(answering(answer)) as (host, port):
        assert get(f"http://{host}:{port}/lookup?topic=t", PATIENCE_S, ConnectionOptions(), time.monotonic) == expected


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (answering(HEAD + b"Content-Length: 20\r\n\r\n{}"), "before the answer was complete"),
        (answering(b""), "before the answer was complete"),
        (answering(b"  V2 nonsense\r\n\r\n"), "not HTTP"),
        (answering(HEAD + b"\r\n", ANSWER_SIZE_MAX + 100_000), "larger than"),
    ],
    ids=["cut", "nothing", "not HTTP", "too large"],
)
def test_what_is_no_answer(serve, reason):
    with server(serve) as (host, port), pytest.raises(OSError, match=reason):
        get(f"http://{host}:{port}/nodes", PATIENCE_S, ConnectionOptions(), time.monotonic)


@pytest.mark.parametrize(
    ("serve", "reason"),
    [(drip, "no answer within 0.5 s|not HTTP"), (silent, "no answer within 0.5 s")],
    ids=["drips", "silent"],
)
def test_what_does_not_end(serve, reason):
    with server(serve) as (host, port):
        began = time.monotonic()
        with pytest.raises(OSError, match=reason):
            get(f"http://{host}:{port}/nodes", 0.5, ConnectionOptions(), time.monotonic)
        assert time.monotonic() - began < 0.5 + SOON_S


def test_https_is_verified(tmp_path: Path):
    certificates = Certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)

    def serve(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as secured:
            answering(HEAD + b"Content-Length: 2\r\n\r\n{}")(secured)

    with server(serve) as (_, port):
        url = f"https://localhost:{port}/nodes"
        trusting = ConnectionOptions(tls_ca_file=certificates.ca)
        assert get(url, PATIENCE_S, trusting, time.monotonic) == (200, b"{}")
        with pytest.raises(OSError, match="set tls_ca_file"):
            get(url, PATIENCE_S, ConnectionOptions(), time.monotonic)


# --- streams ---


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Stream(ours, time.monotonic), theirs


def test_a_peer_that_does_not_read_ends_a_send_at_its_deadline(pair):
    stream, theirs = pair
    data = os.urandom(4_000_000)
    with pytest.raises(TimeoutError):
        stream.send(data, time.monotonic() + 0.1)
    assert stream.unsent_bytes > 0
    received = bytearray()

    def read() -> None:
        while len(received) < len(data):
            received.extend(theirs.recv(65536))

    reader = threading.Thread(target=read)
    reader.start()
    stream.send(b"", time.monotonic() + PATIENCE_S)
    reader.join(PATIENCE_S)
    assert received == data, "what was kept goes out, once and in order"


def test_reading(pair):
    stream, theirs = pair
    assert stream.read() == b""
    with pytest.raises(TimeoutError):
        stream.receive(time.monotonic() + 0.05)
    theirs.sendall(b"abc")
    assert stream.receive(time.monotonic() + PATIENCE_S) == b"abc"
    stream.give_back(b"c")
    assert stream.receive(time.monotonic()) == b"c"
    theirs.close()
    with pytest.raises(StreamEnded, match="closed by the peer"):
        stream.receive(time.monotonic() + PATIENCE_S)
    with pytest.raises(StreamEnded):
        stream.put(b"x")


def test_connecting_to_nobody():
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    with pytest.raises(ConnectionFailed, match="refused"):
        connect(f"127.0.0.1:{port}", time.monotonic() + PATIENCE_S, time.monotonic)


def test_an_nsqd_that_sends_a_consumer_away_with_the_answer_is_connected_again():
    """The subscription is answered, and in the same breath the partition is led elsewhere; later it is here again."""
    subscribed = threading.Semaphore(0)
    answers = [frame(0, b"OK") + frame(1, b"E_FAILED_ON_NOT_LEADER t/0 is led elsewhere now"), frame(0, b"OK")]

    def serve(connection: socket.socket) -> None:
        received = b""
        while b"IDENTIFY" not in received:
            received += connection.recv(65536)
        connection.sendall(frame(0, b'{"max_rdy_count": 2500, "version": "1.0"}'))
        while b"SUB t c" not in received:
            received += connection.recv(65536)
        connection.sendall(answers.pop(0))
        subscribed.release()
        if not answers:
            silent(connection)

    with server(serve) as (host, port):
        consumer = Consumer("t", "c", nsqd_tcp_addresses=f"{host}:{port}", handler=lambda message: None)
        consumer.start()
        running = threading.Thread(target=consumer.run, daemon=True)
        running.start()
        try:
            assert subscribed.acquire(timeout=PATIENCE_S), "it subscribes"
            assert subscribed.acquire(timeout=PATIENCE_S), "and again"
        finally:
            consumer.stop()
            running.join(PATIENCE_S)


def frame(kind: int, data: bytes) -> bytes:
    return struct.pack(">ii", len(data) + 4, kind) + data


# --- an nsqd that is none ---


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (silent, "waiting for the answer to IDENTIFY"),
        (lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n"), "not an nsqd"),
        (lambda connection: connection.recv(4), "while waiting for the answer to IDENTIFY"),
        (drip, "not an nsqd"),
    ],
    ids=["silent", "HTTP", "closes", "drips"],
)
def test_what_is_no_nsqd(serve, reason):
    """It is told, and not waited for; where it has something to say, there is time to hear it."""
    told: list[FlintError] = []
    options = ConnectionOptions(connect_timeout=0.4 if serve is silent else PATIENCE_S)
    with server(serve) as (host, port):
        began = time.monotonic()
        consumer = Consumer("t", "c", nsqd_tcp_addresses=f"{host}:{port}", options=options, on_error=told.append)
        with consumer:
            assert time.monotonic() - began < SOON_S
            consumer.stop()
            assert list(consumer) == []
        assert reason in str(told[0])
        with Producer(f"{host}:{port}", options=options) as producer:
            for timeout_s in (0.6, PATIENCE_S / 3):  # a busy machine may need more than the first to hear of it
                began = time.monotonic()
                with pytest.raises(PublishRefused) as refused:
                    producer.pub("t", b"x", timeout=timeout_s)
                assert timeout_s - 0.1 < time.monotonic() - began < timeout_s + SOON_S
                if reason in str(refused.value):
                    break
            assert reason in str(refused.value)


@pytest.mark.parametrize("daemon", ["nsqd_tcp_addresses", "nsqlookupd_http_addresses"])
def test_stop_in_a_signal_handler_ends_a_start_and_the_program(daemon):
    """Neither waits for a daemon that does not answer, nor for the threads that ask it."""
    code = """
import signal, sys
from flintmq.sync import ConnectionOptions, Consumer
options = ConnectionOptions(connect_timeout=600)
where = {sys.argv[1]: sys.argv[2]}
consumer = Consumer("t", "c", handler=print, options=options, lookup_timeout=600, **where)
signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
consumer.run()
print("ended", flush=True)
"""
    asked = threading.Event()

    def serve(connection: socket.socket) -> None:
        connection.recv(1)
        asked.set()
        silent(connection)

    with (
        server(serve) as (host, port),
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                daemon,
                f"{host}:{port}" if daemon.startswith("nsqd") else f"http://{host}:{port}",
            ],
            env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        try:
            assert asked.wait(PATIENCE_S)
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert (out, process.returncode) == ("ended\n", 0)


# --- what is left behind ---


def threads_of(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def test_a_producer_that_nobody_closes_leaves_no_thread_and_no_socket(nsqd):
    before = threads_of("flintmq-producer")
    producer = Producer(address_of(nsqd))
    producer.pub("t", b"x")
    assert threads_of("flintmq-producer") == before + 1
    wait_until(lambda: threads_of("flintmq-connect") == 0)
    del producer
    gc.collect()
    wait_until(lambda: threads_of("flintmq-producer") == before)
    wait_until(lambda: not nsqd.get("/stats?format=json")["producers"])


def test_closing_ends_all_threads_and_descriptors(nsqd):
    descriptors = len(os.listdir("/proc/self/fd"))
    with (
        Producer(address_of(nsqd), pool_size=3) as producer,
        Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer,
    ):
        producer.pub("t", b"x")
        for message in consumer:
            message.finish()
            break
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("flintmq")])
    assert len(os.listdir("/proc/self/fd")) == descriptors
    consumer.close()
    producer.close()
    with pytest.raises(RuntimeError, match="started once"):
        consumer.start()


def test_ctrl_c_in_a_publish_leaves_a_producer_that_works(nsqd):
    code = """
import sys, time
from flintmq.sync import Producer
producer = Producer(sys.argv[1], pool_size=1)
done = rounds = 0
print("ready", flush=True)
while rounds < 8:
    try:
        while True:
            producer.pub("t", b"x")
            done += 1
    except KeyboardInterrupt:
        rounds += 1
        print("caught", flush=True)
producer.pub("t", b"last", timeout=45)
assert producer.stats().bytes_in_flight == 0, producer.describe()
began = time.monotonic()
producer.close()
assert time.monotonic() - began < 15
print(done + 1, producer.stats().failed, flush=True)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code, address_of(nsqd)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            for number in range(8):
                time.sleep(0.05 + 0.003 * number)
                process.send_signal(signal.SIGINT)
                assert process.stdout.readline() == "caught\n"
            out, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    done, failed = map(int, out.split())
    assert done <= nsqd.stats("t")["message_count"] <= done + failed
    assert failed <= 8


@pytest.mark.parametrize("is_idempotent", [False, True])
def test_ctrl_c_at_any_instruction_of_a_publish(nsqd, is_idempotent: bool):
    """Python raises it where a function begins and where a call ends: each of these places of one publish is tried."""
    with Producer(address_of(nsqd), pool_size=1, idempotent=is_idempotent) as producer:
        producer.pub("t", b"first")
        for place in itertools.count():
            is_interrupted = _interrupt(partial(producer.pub, "t", b"x"), place)
            (pool,) = producer._pools.values()
            pool.retry_at = 0.0  # what was lost is opened again at once
            producer.pub("t", b"next", timeout=PATIENCE_S)
            assert producer.stats().bytes_in_flight == 0, f"place {place}"
            assert len(pool.idle) == len(pool.connections) == 1, f"place {place}: nobody else has this connection"
            assert not producer._calls
            assert producer._writers is None or not any(map(len, producer._writers._taken.values())), f"place {place}"
            if not is_interrupted:
                break
    assert place > 50


def _interrupt(call: Callable[[], object], place: int) -> bool:
    """Call, with Ctrl-C at one of the places of this package where it may come; False if there are fewer."""
    left = place
    is_over = False

    def look(frame: types.FrameType, event: str, _argument: object) -> None:
        nonlocal left, is_over
        if is_over or event not in ("call", "c_return") or "/flintmq/client/" not in frame.f_code.co_filename:
            return
        left -= 1
        if left < 0:
            is_over = True
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.setprofile(None)
    return is_over
