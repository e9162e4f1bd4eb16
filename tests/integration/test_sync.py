"""flintmq.sync against real nsqd and nsqlookupd processes: kills, restarts, long handlers, threads, fork, Ctrl-C."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
import weakref
import zlib
from collections.abc import Callable, Iterator, Sized
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from tests.certificates import Certificates
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, a_few_times, mpub, wait_until

from flintmq.client.blocking.stream import Stream
from flintmq.client.security import TlsRefused
from flintmq.client.telemetry import Telemetry
from flintmq.sync import (
    ConnectionOptions,
    Consumer,
    Discard,
    FinFailed,
    FlintError,
    Message,
    NsqdError,
    OptionError,
    Producer,
    PublishError,
    PublishRefused,
    PublishUnknown,
    Requeue,
)
from flintmq.testing import MemoryNsqd

ROOT = Path(__file__).resolve().parents[2]


def address_of(nsqd: Nsqd) -> str:
    return f"{nsqd.tcp[0]}:{nsqd.tcp[1]}"


def take(consumer: Consumer[Any], count: int) -> list[Message[Any]]:
    """The next messages; the test's own timeout ends it."""
    taken: list[Message[Any]] = []
    for message in consumer:
        taken.append(message)
        if len(taken) == count:
            break
    return taken


def has_grown(found: Sized, count: int) -> bool:
    return len(found) > count


def run_python(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done


class Running:
    """A call in a thread, whose exception is the test's."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.error: BaseException | None = None
        self._function = partial(function, *args)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:  # noqa: BLE001 - raised again by join()
            self.error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error


# --- the main road ---


def test_publish_and_consume(nsqd):
    address = address_of(nsqd)
    with Producer(address) as producer:
        producer.pub("t", b"1")
        producer.mpub("t", [b"2", b"3"])
        began = time.monotonic()
        producer.dpub("t", b"4", delay=0.3)
        producer.pub("t", {"number": 5})
        assert producer.stats().published == 5
    bodies = []
    with Consumer("t", "c", nsqd_tcp_addresses=address) as consumer:
        assert consumer.connections == (address,)
        for message in consumer:
            with message:
                bodies.append(message.body)
                assert message.attempts == 1
                assert 60 - SOON_S < message.time_left <= 60
            if message.body == b"4":
                assert time.monotonic() - began > 0.29
                break
    assert sorted(bodies) == [b"1", b"2", b"3", b"4", b'{"number":5}']
    assert nsqd.unfinished("t", "c") == 0


@pytest.mark.parametrize("style", ["iterator", "handler", "batches", "threads"])
def test_every_style_of_consuming_sees_every_message(nsqd, style):
    count = 5000
    seen: list[bytes] = []
    handler = (lambda message: seen.append(message.body)) if style == "handler" else None

    def iterate() -> None:
        for message in consumer:
            with message:
                seen.append(message.body)

    with (
        Producer(address_of(nsqd)) as producer,
        Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=500, handler=handler) as consumer,
    ):
        for start in range(0, count, 100):
            producer.mpub("t", [b"%d" % number for number in range(start, start + 100)])
        if style == "batches":
            for batch in consumer.batches(300, timeout=0.1):
                assert len(batch) <= 300
                seen.extend(message.body for message in batch)
                for message in batch:
                    message.finish()
                if len(seen) == count:
                    break
        else:
            target = consumer.run if style == "handler" else iterate
            threads = [Running(target) for _ in range(4 if style == "threads" else 1)]
            wait_until(lambda: len(seen) == count)
            consumer.stop()
            for thread in threads:
                thread.join()
    assert sorted(map(int, seen)) == list(range(count))
    assert nsqd.unfinished("t", "c") == 0


def test_messages_may_be_answered_in_other_threads(nsqd):
    """A pool of threads handles what one thread takes; FINs go out while that one waits."""
    with (
        ThreadPoolExecutor(4) as pool,
        Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=4) as consumer,
    ):
        nsqd.publish("t", *[b"%d" % number for number in range(200)])

        def handle(message: Message) -> None:
            time.sleep(0.001)
            message.finish()

        began = time.monotonic()
        for number, message in enumerate(consumer, 1):
            pool.submit(handle, message)
            if number == 200:
                break
        assert time.monotonic() - began < PATIENCE_S, "every FIN wakes whoever waits for the next message"
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def test_a_batch_ends_with_its_time_or_when_no_more_can_come(nsqd):
    nsqd.publish("t", *[b"%d" % number for number in range(30)])
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=20) as consumer:
        batches = consumer.batches(1000, timeout=30)
        first = next(batches)
        assert len(first) == 20, "what may be in flight"
        for message in first:
            message.finish()
        began = time.monotonic()
        rest = next(consumer.batches(1000, timeout=0.2))
        assert 0.15 < time.monotonic() - began < SOON_S
        assert len(first) + len(rest) == 30


# --- time ---


def test_requeue_touch_and_timeouts(nsqd):
    late: list[FlintError] = []
    nsqd.publish("t", b"requeued", b"touched", b"forgotten")
    options: dict[str, Any] = {"msg_timeout": 3, "max_in_flight": 10, "on_error": late.append}
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), **options) as consumer:
        began = time.monotonic()
        first = {message.body: message for message in take(consumer, 3)}
        requeued_at = time.monotonic()
        first[b"requeued"].requeue(0.3)
        (requeued,) = take(consumer, 1)
        assert (requeued.body, requeued.attempts) == (b"requeued", 2), "before the others are over"
        assert time.monotonic() - requeued_at > 0.29
        requeued.finish()
        time.sleep(max(0.0, began + 1.5 - time.monotonic()))
        first[b"touched"].touch()
        (forgotten,) = take(consumer, 1)
        assert (forgotten.body, forgotten.attempts) == (b"forgotten", 2), "the one that was not touched"
        first[b"touched"].finish()
        time.sleep(max(0.0, first[b"forgotten"].time_left))  # its time began at nsqd a moment before it arrived
        assert first[b"forgotten"].is_lost
        forgotten.finish()
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
        assert late == []
        first[b"forgotten"].finish()
        wait_until(lambda: consumer.stats().late)
        consumer.stop()
        assert list(consumer) == []
        assert isinstance(late[0], FinFailed)
        assert consumer.connections, "and the connection lives on"


def test_a_handler_of_three_heartbeat_intervals_keeps_its_connection(nsqd):
    """nsqd closes a connection that has answered nothing for two of them."""

    def attempt(number: int) -> None:
        topic = f"t{number}"
        nsqd.publish(topic, b"slow", b"next")
        options: dict[str, Any] = {"heartbeat_interval": 1, "max_in_flight": 2}
        with Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), **options) as consumer:
            for count, message in enumerate(consumer, 1):
                with message:
                    if count == 1:
                        time.sleep(3.2)
                        nsqd.publish(topic, b"while it slept")
                if count == 3:
                    break
            assert consumer.stats().dropped == 0
        assert nsqd.unfinished(topic, "c") == 0
        assert nsqd.stats(topic, "c")["requeue_count"] == 0

    a_few_times(attempt)


def test_answers_go_out_while_the_application_does_something_else(nsqd):
    nsqd.publish("t", b"x")
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer:
        (message,) = take(consumer, 1)
        message.finish()
        wait_until(lambda: nsqd.unfinished("t", "c") == 0, timeout_s=SOON_S)  # before the next heartbeat


def test_an_idle_producer_never_loses_its_first_message(nsqd):
    """Not even where an unanswered publish would be an error: free connections are looked after."""

    def stays_connected(number: int) -> None:
        with Producer(address_of(nsqd), heartbeat_interval=1, retry_unknown=False) as producer:
            producer.pub(f"t{number}", b"1")
            time.sleep(3.2)
            producer.pub(f"t{number}", b"2")
            assert producer.stats().retries == 0

    a_few_times(stays_connected)
    with Producer(address_of(nsqd), heartbeat_interval=1, retry_unknown=False) as producer:
        producer.pub("t", b"1")
        nsqd.kill()
        nsqd.start()
        producer.pub("t", b"2")
        nsqd.restart()
        wait_until(lambda: producer.stats().connections)
        producer.pub("t", b"3")
    assert nsqd.stats("t")["message_count"] >= 1
    assert nsqd.stats("t")["depth"] == 3


def test_a_free_connection_is_looked_at_before_it_is_used(nsqd, monkeypatch):
    """Also when nothing looks after it: what is sent to an nsqd that has gone would be lost without a word."""
    monkeypatch.setattr("flintmq.client.blocking.producer.TICK_S", 1000.0)
    with Producer(address_of(nsqd), retry_unknown=False) as producer:
        producer.pub("t", b"1")
        nsqd.restart()
        producer.pub("t", b"2")
        assert producer.stats().retries == 0
    assert nsqd.stats("t")["depth"] == 2


# --- kill -9 ---


def test_kill_9_under_load_loses_nothing_that_was_acknowledged(nsqd):
    """Publishing threads and a consumer go through two kills, and are back each time."""
    acknowledged: dict[bytes, None] = {}
    seen: dict[bytes, None] = {}
    is_over = threading.Event()
    outages: list[float] = []
    address = address_of(nsqd)

    def publish(worker: int) -> None:
        number = 0
        while not is_over.is_set():
            number += 1
            body = b"%d-%d" % (worker, number)
            producer.pub("t", body, timeout=PATIENCE_S)
            acknowledged[body] = None

    def consume() -> None:
        for message in consumer:
            seen[message.body] = None
            message.finish()

    with (
        Producer(address, pool_size=3) as producer,
        Consumer("t", "c", nsqd_tcp_addresses=address, max_in_flight=500) as consumer,
    ):
        threads = [Running(publish, worker) for worker in range(6)] + [Running(consume)]
        for _ in range(2):
            wait_until(partial(has_grown, acknowledged, len(acknowledged) + 300))
            time.sleep(1.2)  # a connection that breaks sooner does not count as a good one
            nsqd.kill()
            nsqd.start()
            began = time.monotonic()
            enough = len(acknowledged) + 20
            wait_until(lambda: consumer.connections)
            wait_until(partial(has_grown, acknowledged, enough))
            outages.append(time.monotonic() - began)
        is_over.set()
        for thread in threads[:-1]:
            thread.join()
        wait_until(lambda: acknowledged.keys() <= seen.keys(), "every acknowledged message")
        consumer.stop()
        threads[-1].join()
    assert len(acknowledged) > 500
    assert max(outages) < SOON_S, outages


def test_a_publish_during_an_outage_ends_within_its_deadline(nsqd):
    with Producer(address_of(nsqd), timeout=1) as producer, ThreadPoolExecutor(20) as pool:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        nsqd.kill()
        began = time.monotonic()
        calls = [pool.submit(producer.pub, "t", b"x") for _ in range(20)]
        errors = [call.exception(PATIENCE_S) for call in calls]
        assert time.monotonic() - began < 1 + SOON_S
        assert all(isinstance(error, PublishError) and error.retryable for error in errors), errors
    with pytest.raises(PublishRefused, match="closed"):
        producer.pub("t", b"x")


def test_a_stopped_nsqd_is_noticed(nsqd):
    with Producer(address_of(nsqd), timeout=0.5) as producer:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        nsqd.send_signal(signal.SIGSTOP)
        with pytest.raises(PublishUnknown, match="no answer within"):
            producer.pub("t", b"y")
        nsqd.send_signal(signal.SIGCONT)
        producer.pub("t", b"z", timeout=PATIENCE_S)


def test_a_stopped_nsqd_is_left_for_another(daemons):
    first, second = daemons.nsqd("--durability=os"), daemons.nsqd("--durability=os")
    with Producer([address_of(first), address_of(second)], timeout=5) as producer:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        first.send_signal(signal.SIGSTOP)
        for number in range(4):
            producer.pub("t", b"%d" % number)
        assert producer.stats().retries == 1, "it is waited for once, for half the deadline"
        first.send_signal(signal.SIGCONT)


def test_more_threads_than_connections_wait_for_each_other(nsqd):
    with Producer(address_of(nsqd), pool_size=1, timeout=0.4) as producer:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        nsqd.send_signal(signal.SIGSTOP)
        with ThreadPoolExecutor(2) as pool:
            calls = [pool.submit(producer.pub, "t", b"%d" % number) for number in range(2)]
            errors = [call.exception(PATIENCE_S) for call in calls]
        nsqd.send_signal(signal.SIGCONT)
        assert sorted(type(error).__name__ for error in errors) == ["PublishRefused", "PublishUnknown"]
        assert any("pool_size" in str(error) or "in time" in str(error) for error in errors)
        assert producer.stats().bytes_in_flight == 0


def test_connections_that_cannot_be_opened_are_not_blamed_on_pool_size(nsqd):
    """The one that there is waits for an nsqd that does not answer, and so does the second, which is being opened."""
    with Producer(address_of(nsqd), pool_size=4) as producer, ThreadPoolExecutor(1) as pool:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        nsqd.send_signal(signal.SIGSTOP)
        call = pool.submit(producer.pub, "t", b"x", timeout=PATIENCE_S)
        wait_until(lambda: "connections=1 idle=0" in producer.describe())
        with pytest.raises(PublishRefused, match="all 1 connections are busy, and opening more takes long"):
            producer.pub("t", b"x", timeout=0.2)
        nsqd.send_signal(signal.SIGCONT)
        call.result(PATIENCE_S)


def test_why_no_more_connections_can_be_opened_is_said(nsqd, monkeypatch):
    refused = Refused(monkeypatch, RuntimeError("can't start new thread"))
    with Producer(address_of(nsqd), pool_size=4) as producer, ThreadPoolExecutor(1) as pool:
        producer.pub("t", b"x", timeout=PATIENCE_S)
        nsqd.send_signal(signal.SIGSTOP)
        call = pool.submit(producer.pub, "t", b"x", timeout=PATIENCE_S)
        wait_until(lambda: "connections=1 idle=0" in producer.describe())
        refused.is_due = True
        with pytest.raises(PublishRefused, match=r"busy, and no more could be opened: .*can't start new thread"):
            producer.pub("t", b"x", timeout=0.01)
        nsqd.send_signal(signal.SIGCONT)
        call.result(PATIENCE_S)


# --- errors of nsqd ---


def test_what_nsqd_refuses(daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-msg-size=100")
    with Producer(address_of(nsqd)) as producer:
        with pytest.raises(PublishRefused) as caught:
            producer.pub("t", b"x" * 200)
        assert caught.value.code == "E_BAD_MESSAGE"
        assert not caught.value.retryable
        with pytest.raises(PublishRefused, match="out of range"):
            producer.dpub("t", b"x", delay=7200)
        producer.pub("t", b"fits")
        assert producer.stats().failed == 2
    assert nsqd.stats("t")["message_count"] == 1


def test_an_async_secret_is_refused_at_once():
    async def secret() -> str:
        return "x"

    with pytest.raises(OptionError, match="no event loop"):
        Producer("127.0.0.1:1", options=ConnectionOptions(auth_secret=secret))


# --- several nsqd, discovery ---


def test_max_in_flight_holds_over_all_connections_and_can_be_changed(daemons):
    nsqds = [daemons.nsqd("--durability=os") for _ in range(3)]
    for nsqd in nsqds:
        nsqd.publish("t", *[b"x"] * 100)
    addresses = [address_of(nsqd) for nsqd in nsqds]

    def in_flight() -> int:
        return sum(nsqd.stats("t", "c")["in_flight_count"] for nsqd in nsqds)

    with Consumer("t", "c", nsqd_tcp_addresses=addresses, max_in_flight=9) as consumer:
        held = take(consumer, 9)
        assert in_flight() == 9
        assert consumer.is_starved
        consumer.max_in_flight = 20
        held += take(consumer, 9)
        assert 18 <= in_flight() <= 20
        consumer.pause()
        wait_until(lambda: consumer.stats().queued + len(held) == in_flight(), "all that came is here")
        held += take(consumer, queued) if (queued := consumer.stats().queued) else []
        for message in held:
            message.finish()
        wait_until(lambda: in_flight() == 0)
        consumer.max_in_flight = 2  # fewer than connections: they take turns
        consumer.unpause()
        for number, message in enumerate(consumer):
            assert in_flight() <= 2
            message.finish()
            if number == 10:
                break


def url_of(daemon: Any) -> str:
    return f"http://{daemon.http[0]}:{daemon.http[1]}"


def test_discovery_with_one_nsqlookupd_dead_and_one_that_hangs(daemons):
    lookup = daemons.nsqlookupd()

    def new_nsqd() -> Nsqd:
        return daemons.nsqd("--durability=os", f"--lookupd-tcp-address={lookup.tcp[0]}:{lookup.tcp[1]}")

    first = new_nsqd()
    first.publish("t", b"1")
    wait_until(partial(lookup.producers, "t"))
    with socket.create_server(("127.0.0.1", 0)) as hung, socket.create_server(("127.0.0.1", 0)) as closed:
        dead_url = f"http://127.0.0.1:{closed.getsockname()[1]}"
        closed.close()
        urls = [f"http://127.0.0.1:{hung.getsockname()[1]}", dead_url, url_of(lookup)]
        seen: list[bytes] = []
        began = time.monotonic()
        options: dict[str, Any] = {"nsqlookupd_http_addresses": urls, "lookup_interval": 0.4}
        with (
            Consumer("t", "c", **options, handler=lambda m: seen.append(m.body)) as consumer,
            Producer(**options, lookup_timeout=1) as producer,
        ):
            assert time.monotonic() - began < SOON_S, "the one that hangs is not waited for"
            assert len(consumer.connections) == 1
            running = Running(consumer.run)
            second = new_nsqd()
            second.publish("t", b"2")
            wait_until(lambda: len(consumer.connections) == 2)
            producer.pub("t", b"known topic")
            producer.pub("new-topic", b"unknown topic")
            wait_until(lambda: len(seen) == 3)
            lookup.kill()
            producer.pub("t", b"without nsqlookupd")
            wait_until(lambda: len(seen) == 4)
            consumer.stop()
            running.join()


# --- TLS, compression, AUTH ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


class Guard(AuthServer):
    """An auth server that lets in who knows the secret."""

    async def _handle(self, request: web.Request) -> web.Response:
        return web.json_response(self.answer, status=200 if request.query["secret"] == SECRET else 403)


@pytest.fixture(scope="module")
def auth_server() -> Iterator[AuthServer]:
    with Guard() as server:
        yield server


@pytest.fixture(scope="module")
def nsqd_for(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, auth_server: AuthServer
) -> Iterator[Callable[[bool], Nsqd]]:
    """An nsqd with TLS, with and without AUTH; each test has a topic of its own."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    running: dict[bool, Nsqd] = {}

    def get(has_auth: bool) -> Nsqd:
        if has_auth not in running:
            flags = ["--durability=os", f"--tls-cert={certificates.server.cert}"]
            flags += [f"--tls-key={certificates.server.key}", f"--tls-root-ca-file={certificates.ca}"]
            flags += ["--https-address=127.0.0.1:0"]
            running[has_auth] = daemons.nsqd(
                *flags, *([f"--auth-http-address={auth_server.address}"] if has_auth else [])
            )
        return running[has_auth]

    try:
        yield get
    finally:
        daemons.close()


@pytest.mark.parametrize("has_auth", [False, True], ids=["open", "auth"])
@pytest.mark.parametrize("codec", [None, "deflate", "snappy"])
@pytest.mark.parametrize("transport", ["clear", "tls"])
def test_every_combination(nsqd_for, certificates, request, transport, codec, has_auth):
    nsqd = nsqd_for(has_auth)
    topic = f"t{zlib.crc32(request.node.name.encode()):08x}"
    secrets: list[str] = []

    def secret() -> str:
        secrets.append(SECRET)
        return SECRET

    options = ConnectionOptions(
        tls=transport == "tls",
        tls_ca_file=certificates.ca if transport == "tls" else None,
        compression=codec,
        auth_secret=secret if has_auth else None,
    )
    bodies = [b"%d" % number * 20 for number in range(300)]
    noise = os.urandom(900_000)
    with (
        Producer(address_of(nsqd), options=options) as producer,
        Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options, max_in_flight=50) as consumer,
    ):
        producer.mpub(topic, bodies[:250])
        for body in bodies[250:]:
            producer.pub(topic, body)
        producer.pub(topic, noise)
        seen: list[bytes] = []
        for message in consumer:
            if message.attempts == 1 and len(seen) % 10 == 3:
                message.requeue(0)
                continue
            if len(seen) % 7 == 3:
                message.touch()
            message.finish()
            seen.append(message.body)
            if len(seen) == 301:
                break
        layers = (["tls"] if transport == "tls" else []) + ([codec] if codec else [])
        assert f"layers={'+'.join(layers) or '-'}" in consumer.describe()
        assert f"layers={'+'.join(layers) or '-'}" in producer.describe()
    assert sorted(seen) == sorted([*bodies, noise])
    assert nsqd.unfinished(topic, "c") == 0
    assert bool(secrets) == has_auth


@pytest.mark.parametrize("case", ["unknown authority", "no secret", "wrong secret", "secret raises"])
def test_what_is_refused_for_good_is_said_at_once(nsqd_for, certificates, case):
    has_auth = "secret" in case
    nsqd = nsqd_for(has_auth)

    def failing() -> str:
        raise ValueError(SECRET)

    options = {
        "unknown authority": ConnectionOptions(tls=True),
        "no secret": ConnectionOptions(),
        "wrong secret": ConnectionOptions(auth_secret="wrong"),
        "secret raises": ConnectionOptions(auth_secret=failing),
    }[case]
    if case == "secret raises":  # the vault may be back in a moment: tried again, and told
        told: list[FlintError] = []
        with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), options=options, on_error=told.append) as consumer:
            consumer.stop()
            assert list(consumer) == []
            assert "ValueError" in str(told[0])
            assert SECRET not in str(told[0])
        return
    began = time.monotonic()
    with pytest.raises(TlsRefused if case == "unknown authority" else NsqdError) as caught:
        Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), options=options).start()
    assert "set " in str(caught.value) or "refuses auth_secret" in str(caught.value), "it says what to do"
    with (
        Producer(address_of(nsqd), options=options, timeout=2 * PATIENCE_S) as producer,
        pytest.raises(PublishRefused) as refused,
    ):
        producer.pub("t", b"x")
    assert refused.value.code == ("TLS_REFUSED" if case == "unknown authority" else getattr(caught.value, "code", ""))
    assert time.monotonic() - began < PATIENCE_S, "the deadline is not waited for"


# --- threads, fork, Ctrl-C ---


def test_threads_share_one_producer(nsqd):
    with Producer(address_of(nsqd), pool_size=3) as producer, ThreadPoolExecutor(12) as pool:

        def work(worker: int) -> None:
            for number in range(100):
                producer.pub("t", b"%d-%d" % (worker, number))

        list(pool.map(work, range(12)))
        assert producer.stats().published == 1200
        assert len(nsqd.stats("t")["channels"]) == 0
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=2000) as consumer:
        seen = [message.body for message in take(consumer, 1200)]
    assert len(set(seen)) == 1200


@pytest.mark.parametrize("kind", ["producer", "consumer"])
def test_what_nothing_refers_to_closes_its_connections_and_ends_its_threads(nsqd, kind):
    def flintmq_threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("flintmq")]

    def is_gone() -> bool:
        gc.collect()  # a thread may refer to it for a moment
        return gone() is None and not flintmq_threads() and len(os.listdir("/proc/self/fd")) <= file_count

    gc.collect()
    wait_until(lambda: not flintmq_threads(), "those of other tests have ended")
    file_count = len(os.listdir("/proc/self/fd"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        client: Any
        if kind == "producer":
            client = Producer(address_of(nsqd))
            client.pub("t", b"x")
        else:
            client = Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd))
            client.start()
        gone = weakref.ref(client)
        del client
        wait_until(is_gone, lambda: f"{gone()} {flintmq_threads()}")
    assert [str(each.message) for each in told if each.category is ResourceWarning] == []


def test_a_fork_shares_no_connection(nsqd):
    """As in a server that forks its workers after the application was loaded."""
    code = """
import os, sys, threading, time
from flintmq.sync import Consumer, Producer
address = sys.argv[1]
producer = Producer(address)
consumer = Consumer("t", "c", nsqd_tcp_addresses=address, heartbeat_interval=1)
consumer.start()
is_over = threading.Event()
def publish():
    while not is_over.is_set():
        producer.pub("parent", b"x")
threads = [threading.Thread(target=publish) for _ in range(3)]
for thread in threads:
    thread.start()
time.sleep(0.1)
children = []
for number in range(4):
    child = os.fork()
    if child == 0:
        try:
            for _ in range(50):
                producer.pub("child", b"x")
            assert producer.stats().connections == 1
            try:
                next(iter(consumer))
            except RuntimeError as error:
                assert "os.fork()" in str(error)
            else:
                raise AssertionError("it iterates over its parent's connection")
            consumer.close()
            producer.close()
        except BaseException as error:
            print(repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
for child in children:
    assert os.waitpid(child, 0)[1] == 0
is_over.set()
for thread in threads:
    thread.join()
producer.pub("t", b"still there")
for message in consumer:
    message.finish()
    break
assert consumer.stats().dropped == 0 and len(consumer.connections) == 1
consumer.close()
print(producer.stats().published, producer.stats().retries)
producer.close()
"""
    done = run_python(code, address_of(nsqd))
    published, retries = map(int, done.stdout.split())
    assert retries == 0
    assert nsqd.stats("child")["message_count"] == 200
    assert nsqd.stats("parent")["message_count"] == published - 1
    assert nsqd.unfinished("t", "c") == 0


@pytest.mark.parametrize("transport", ["clear", "tls"])
def test_a_child_closes_its_copy_of_each_descriptor(nsqd_for, certificates, transport):
    """Python warns of a socket that is destroyed instead; the peer hears nothing of either."""
    nsqd, topic = nsqd_for(False), f"fork_{transport}"
    code = """
import gc, os, sys, time, warnings
from flintmq.sync import ConnectionOptions, Consumer, Producer
address, topic, ca = sys.argv[1:]
warnings.simplefilter("always")
def connections():
    found = []
    for number in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{number}")
        except FileNotFoundError:  # of the listing itself
            continue
        found += [link] if link.startswith(("socket:", "anon_inode:")) else []
    return found
options = ConnectionOptions(tls=bool(ca), tls_ca_file=ca or None)
producer, idle = Producer(address, options=options), Producer(address, options=options)
idle.pub(topic, b"x")
producer.pub(topic, b"x")
consumer = Consumer(topic, "c", nsqd_tcp_addresses=address, options=options)
consumer.start()
while not all("opening=0" in each.describe() for each in (producer, idle)):
    time.sleep(0.01)  # where nsqd is slow another one is begun, in a thread that the child does not have
assert len(connections()) >= 4, "two of producers, one of the consumer, and what it waits with"
child = os.fork()
if child == 0:
    try:
        assert not connections(), connections()
        producer.pub(topic, b"of the child")
        producer.close()
        del producer, idle, consumer
        gc.collect()
        assert not connections(), connections()
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
idle.pub(topic, b"x")
producer.pub(topic, b"x")
seen = []
for message in consumer:
    message.finish()
    seen.append(message.body)
    if len(seen) == 5:
        break
print(sorted(seen), producer.stats().retries, idle.stats().retries, consumer.stats().dropped)
for each in (producer, idle, consumer):
    each.close()
"""
    done = run_python(code, address_of(nsqd), topic, str(certificates.ca) if transport == "tls" else "")
    assert done.stdout == f"{sorted([b'x'] * 4 + [b'of the child'])} 0 0 0\n"
    assert done.stderr == ""


INTERRUPTED = """
import sys
from flintmq.sync import Consumer
count = 0
try:
    with Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1], max_in_flight=int(sys.argv[2])) as consumer:
        print("ready", flush=True)
        for message in consumer:
            message.finish()
            count += 1
except KeyboardInterrupt:
    print(count, consumer.stats().finished, consumer.stats().dropped, flush=True)
"""


def interrupted(nsqd: Nsqd, max_in_flight: int, wait: Callable[[], object]) -> list[int]:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, address_of(nsqd), str(max_in_flight)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            wait()
            process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, errors
    return [int(part) for part in out.split()]


def test_ctrl_c_while_waiting_loses_no_answer(nsqd):
    nsqd.publish("t", *[b"x"] * 10)
    all_finished = partial(wait_until, lambda: nsqd.unfinished("t", "c") == 0)
    assert interrupted(nsqd, 5, all_finished) == [10, 10, 0]
    row = nsqd.left("t", "c")
    assert (row["depth"], row["in_flight_count"], row["requeue_count"]) == (0, 0, 0)


def test_ctrl_c_under_load_leaves_every_message_somewhere(nsqd):
    """Wherever it hits: what nsqd has not seen finished is there to be delivered again, at once."""
    bodies = [b"%d" % number for number in range(1000)]
    handled = 0
    total = 0
    for round_number in range(4):
        for _ in range(60):
            nsqd.publish("t", *bodies)
        total += 60_000
        count, finished, _ = interrupted(nsqd, 2500, partial(time.sleep, 0.02 + 0.013 * round_number))
        assert finished <= count
        handled += finished
        row = nsqd.left("t", "c")
        assert row["in_flight_count"] == 0
        assert row["depth"] + row["deferred_count"] + handled >= total, "a message is gone"
        assert row["timeout_count"] == 0


UNCLOSED = """
import sys
from flintmq.sync import Consumer
consumer = Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1])
consumer.start()
for number, message in enumerate(consumer, 1):
    message.finish()
    if number == 10:
        break
"""


def test_a_program_that_closes_no_consumer_has_sent_what_it_finished(nsqd):
    nsqd.publish("t", *[b"x"] * 20)
    done = run_python(UNCLOSED, address_of(nsqd))
    assert "<Consumer t/c on 1 nsqd> was not closed before the program ended" in done.stderr
    assert "did not confirm" not in done.stderr
    row = nsqd.left("t", "c")
    assert (row["depth"], row["in_flight_count"]) == (10, 0)


def test_a_program_that_closes_no_consumer_waits_for_no_nsqd_that_is_stopped(nsqd):
    nsqd.publish("t", *[b"x"] * 10)
    code = UNCLOSED + "import os, signal; os.kill(int(sys.argv[2]), signal.SIGSTOP)"
    done = run_python(code, address_of(nsqd), str(nsqd.pid))
    nsqd.send_signal(signal.SIGCONT)
    assert "did not confirm the end of the subscription" in done.stderr


class Refused:
    """Makes starting the next thread that connects fail, once.

    Attributes:
        is_due: it is to fail.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
        self.is_due = False
        start = threading.Thread.start

        def refuse(thread: threading.Thread) -> None:
            if self.is_due and thread.name == "flintmq-connect":
                self.is_due = False
                raise error
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")])
def test_a_producer_goes_on_after_a_connect_thread_that_could_not_be_started(nsqd, monkeypatch, error):
    refused = Refused(monkeypatch, error)
    producer = Producer(address_of(nsqd), timeout=PATIENCE_S)
    refused.is_due = True
    try:
        producer.pub("t", b"x")
    except KeyboardInterrupt:
        assert isinstance(error, KeyboardInterrupt)
    assert not refused.is_due
    producer.pub("t", b"y")
    wait_until(lambda: "opening=0" in producer.describe())
    producer.close()


def test_a_consumer_goes_on_after_a_connect_thread_that_could_not_be_started(nsqd, monkeypatch, caplog):
    refused = Refused(monkeypatch, RuntimeError("can't start new thread"))
    nsqd.publish("t", b"1")
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer:
        (message,) = take(consumer, 1)
        message.finish()
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
        refused.is_due = True
        nsqd.kill()
        nsqd.start()
        nsqd.publish("t", b"2")
        for message in consumer:
            message.finish()
            if message.body == b"2":  # nsqd may have forgotten in its death that the first was finished
                break
    assert "no thread could be started to connect: can't start new thread" in caplog.text


def test_ctrl_c_while_a_connection_is_closed_leaves_nothing_of_it(nsqd, monkeypatch):
    abort = Stream.abort

    def interrupted(stream: Stream) -> None:
        abort(stream)
        monkeypatch.undo()
        raise KeyboardInterrupt

    nsqd.publish("t", b"1")
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=1) as consumer:
        take(consumer, 1)[0].finish()
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
        with consumer._pump.lock:
            (connection,) = consumer._pump._watched
            monkeypatch.setattr(Stream, "abort", interrupted)
            with pytest.raises(KeyboardInterrupt):
                connection.abort("the test has it lost")
        nsqd.publish("t", b"2")
        take(consumer, 1)[0].finish()
        assert len(consumer._consuming.flow._joined) == 1, "it has no part of max_in_flight any more"


def test_an_application_may_go_on_after_ctrl_c(nsqd):
    code = """
import signal, sys
from flintmq.sync import Consumer
seen = {}
count = int(sys.argv[2])
interrupts = 0
armed = False  # one interrupt for each try, so that none hits what is not tried
def interrupt(*_):
    global armed
    if armed:
        armed = False
        raise KeyboardInterrupt
signal.signal(signal.SIGINT, interrupt)
consumer = Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1], max_in_flight=500, msg_timeout=1)
consumer.start()
print("ready", flush=True)
def consume():
    for message in consumer:
        with message:
            seen[message.body] = None
        if len(seen) == count:
            break
while len(seen) < count:
    try:
        armed = True
        consume()
        armed = False
    except KeyboardInterrupt:
        interrupts += 1
        print("interrupted", flush=True)
print("all", interrupts, flush=True)
consumer.close()
"""
    count = 60_000
    with nsqd.connect() as connection:
        for start in range(0, count, 1000):
            connection.ok(mpub("t", [b"%d" % number for number in range(start, start + 1000)]))
    with subprocess.Popen(
        [sys.executable, "-c", code, address_of(nsqd), str(count)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            said = [""]

            def listen() -> None:
                assert process.stdout is not None
                said.extend(process.stdout)

            listening = Running(listen)
            while said.count("interrupted\n") < 5 and not said[-1].startswith("all"):
                time.sleep(0.013)
                process.send_signal(signal.SIGINT)  # those that come while one is told are none
            listening.join()
            assert process.stderr is not None
            errors = process.stderr.read()
        finally:
            process.kill()
    assert process.returncode == 0, errors
    assert int(said[-1].split()[1]) >= 5


def test_stop_in_a_signal_handler_ends_run(nsqd):
    code = """
import signal, sys
from flintmq.sync import Consumer
seen = []
def handler(message):
    seen.append(message.body)
    print("seen", flush=True)
consumer = Consumer("t", "c", nsqd_tcp_addresses=sys.argv[1], handler=handler)
signal.signal(signal.SIGTERM, lambda *_: consumer.stop())
consumer.run()
print("drained", len(seen), consumer.stats().finished, flush=True)
"""
    nsqd.publish("t", b"x")
    with subprocess.Popen(
        [sys.executable, "-c", code, address_of(nsqd)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "seen\n"
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert out == "drained 1 1\n"


# --- leaving ---


def test_leaving_leaves_nothing_in_flight(nsqd):
    nsqd.publish("t", *[b"%d" % number for number in range(100)])
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), max_in_flight=50) as consumer:
        for message in take(consumer, 10):
            message.finish()
    row = nsqd.left("t", "c")
    assert (row["in_flight_count"], row["depth"], row["deferred_count"]) == (0, 90, 0)


def test_closing_waits_for_the_handler_that_runs(nsqd):
    began = threading.Event()

    def handler(message: Message) -> None:
        began.set()
        time.sleep(0.5)

    nsqd.publish("t", b"x", b"y")
    consumer = Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd), handler=handler)
    running = Running(consumer.run)
    assert began.wait(PATIENCE_S)
    consumer.close()
    row = nsqd.left("t", "c")
    assert (row["in_flight_count"], row["depth"]) == (0, 1), "one was handled, the other given back"
    running.join()


def test_closing_is_bounded_when_nsqd_does_not_answer(nsqd):
    nsqd.publish("t", b"x")
    with Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer, Producer(address_of(nsqd)) as producer:
        take(consumer, 1)
        producer.pub("other", b"x")
        nsqd.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        consumer.close()
        producer.close()
        assert time.monotonic() - began < SOON_S
        nsqd.send_signal(signal.SIGCONT)


# --- failures ---


def test_failures_back_off_and_end_in_the_dead_letter_topic(nsqd):
    told: list[bytes] = []
    tries: list[bytes] = []

    def handler(message: Message) -> None:
        tries.append(message.body)
        if message.body == b"discard":
            raise Discard("no use")
        if message.body == b"later" and message.attempts == 1:
            raise Requeue(0.1)
        if message.body == b"bad":
            raise ValueError("no good")

    nsqd.publish("t", b"bad", b"discard", b"later", b"good")
    consumer = Consumer(
        "t",
        "c",
        nsqd_tcp_addresses=address_of(nsqd),
        handler=handler,
        max_attempts=2,
        requeue_delay=0.05,
        backoff=0.05,
        dead_letter="dead",
        on_giving_up=lambda message: told.append(message.body),
    )
    running = Running(consumer.run)
    wait_until(lambda: consumer.stats().finished == 4)
    consumer.stop()
    running.join()
    assert told == [b"bad"]
    assert sorted(tries) == [b"bad", b"bad", b"discard", b"good", b"later", b"later"]
    stats = consumer.stats()
    assert (stats.failed, stats.given_up) == (2, 1)
    with Consumer("dead", "c", nsqd_tcp_addresses=address_of(nsqd)) as dead:
        (message,) = take(dead, 1)
        assert message.body == b"bad"
        message.finish()


class Order(msgspec.Struct):
    number: int


def test_typed_bodies(nsqd):
    with Producer(address_of(nsqd)) as producer:
        producer.pub("orders", b"not JSON")
        producer.pub("orders", Order(7))
        with pytest.raises(TypeError):
            producer.pub("orders", "text")
    orders: list[Order] = []
    with Consumer("orders", "c", nsqd_tcp_addresses=address_of(nsqd), type=Order, dead_letter="bad-orders") as consumer:
        for message in consumer:
            with message:
                orders.append(message.value)
            if orders:
                break
        wait_until(lambda: consumer.stats().finished == 2)
    assert orders == [Order(7)]
    assert nsqd.stats("bad-orders")["message_count"] == 1


# --- for users' tests, and what it costs ---


def test_with_the_nsqd_of_flintmq_testing():
    with MemoryNsqd() as nsqd:
        with (
            Producer(nsqlookupd_http_addresses=nsqd.nsqlookupd_http_address) as producer,
            Consumer("orders", "billing", nsqd_tcp_addresses=nsqd.tcp_address) as consumer,
        ):
            producer.pub("orders", b"1")
            nsqd.cut_connections()
            producer.pub("orders", b"2")
            bodies = set()
            for message in consumer:
                with message:
                    bodies.add(message.body)
                    producer.pub("invoices", b"invoice of " + message.body)
                if len(bodies) == 2:
                    break
            nsqd.wait_drained("orders", "billing")
        assert set(nsqd.published("invoices")) == {b"invoice of 1", b"invoice of 2"}


def test_one_trace_from_the_producer_to_the_handler():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry = Telemetry(provider, envelope=True)
    seen: list[Message[bytes]] = []

    def handle(message: Message[bytes]) -> None:
        seen.append(message)
        if len(seen) == 4:
            consumer.stop()

    with MemoryNsqd() as nsqd, Producer(nsqd.tcp_address, telemetry=telemetry) as producer:
        options: dict[str, Any] = {"handler": handle, "telemetry": telemetry, "max_in_flight": 1}
        consumer = Consumer("orders", "billing", nsqd_tcp_addresses=nsqd.tcp_address, **options)
        producer.pub("orders", b"1")
        producer.mpub("orders", [b"2", b"3"])
        producer.dpub("orders", b"4", delay=0)
        consumer.run()
    assert sorted(message.body for message in seen) == [b"1", b"2", b"3", b"4"]
    assert all(set(message.headers) == {"traceparent"} for message in seen)
    spans = exporter.get_finished_spans()
    sent = {span.context.trace_id for span in spans if span.name == "send orders" and span.context}
    processed = [span.context.trace_id for span in spans if span.name == "process orders" and span.context]
    assert (len(sent), len(processed)) == (3, 4)
    assert set(processed) == sent


def test_no_event_loop_is_imported_and_memory_stays_small(nsqd):
    code = """
import sys
from flintmq.sync import Consumer, Producer
seen = 0
address = sys.argv[1]
with Producer(address) as producer, Consumer("t", "c", nsqd_tcp_addresses=address, max_in_flight=2500) as consumer:
    for _ in range(500):
        producer.mpub("t", [bytes([120]) * 200] * 200)
    for message in consumer:
        message.finish()
        seen += 1
        if seen == 100_000:
            break
for name in ("asyncio", "aiohttp", "concurrent.futures", "http.client", "cryptography", "cramjam"):
    assert name not in sys.modules, name
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""
    done = run_python(code, address_of(nsqd))
    assert int(done.stdout) < 34 * 1024, f"{done.stdout} KiB"


def test_stats_are_json(nsqd):
    with Producer(address_of(nsqd)) as producer, Consumer("t", "c", nsqd_tcp_addresses=address_of(nsqd)) as consumer:
        producer.pub("t", b"x")
        take(consumer, 1)[0].requeue(60)
        wait_until(lambda: consumer.stats().requeued == 1)
        assert json.loads(msgspec.json.encode(consumer.stats()))["received"] == 1
        assert json.loads(msgspec.json.encode(producer.stats()))["connections"] == 1
        assert "1 nsqd" in repr(consumer) + repr(producer)
