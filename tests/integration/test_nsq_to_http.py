"""nsq_to_http as a process: its requests, which target gets them, and what becomes of messages that fail.

Source: NSQ 1.3, apps/nsq_to_http.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path

import pytest
from aiohttp import web
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, SOON_S, Nsqd, wait_until
from tests.integration.utilities import at, end, is_finished, started
from tests.ports import reserved_port

from flintmq.tools.nsq_to_http import ANSWER_BYTES_MAX

_topics = (f"http{number}" for number in count())
CHANNEL = "nsq_to_http"
AT_ONCE = ("--consumer-opt=default_requeue_delay,10ms", "--consumer-opt=backoff_multiplier,10ms")


class Target:
    """An HTTP server in a thread.

    Attributes:
        seen: method, target as it came, headers in lower case, and body of each request.
        statuses: by body, of the next answers; else ``status``.
        is_stalled: it takes requests and does not answer.
    """

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.seen: list[tuple[str, str, dict[str, str], bytes]] = []
        self.statuses: dict[bytes, list[int]] = {}
        self.status = 200
        self.is_stalled = False
        self.most = 0
        self._now = 0
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._ready, self._end = threading.Event(), asyncio.Event()
        self._thread = threading.Thread(target=lambda: self._loop.run_until_complete(self._serve()))
        self.port = 0

    def __enter__(self) -> Target:
        self._thread.start()
        assert self._ready.wait(SOON_S)
        return self

    def __exit__(self, *error: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(SOON_S)
        self._loop.close()

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}/in"

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, _, _, body in self.seen]

    async def _serve(self) -> None:
        runner = web.ServerRunner(web.Server(self._answer), shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=self._tls)
        await site.start()
        self.port = runner.addresses[0][1]
        self._ready.set()
        await self._end.wait()
        await runner.cleanup()

    async def _answer(self, request: web.BaseRequest) -> web.Response:
        body = await request.read()
        self.seen.append((request.method, request.raw_path, {k.lower(): v for k, v in request.headers.items()}, body))
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            while self.is_stalled:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.001)
        finally:
            self._now -= 1
        planned = self.statuses.get(body)
        return web.Response(status=planned.pop(0) if planned else self.status, text="an answer that nobody reads")


@pytest.fixture
def topic() -> str:
    return next(_topics)


@pytest.fixture
def target() -> Iterator[Target]:
    with Target() as target:
        yield target


@pytest.fixture
def pair() -> Iterator[tuple[Target, Target]]:
    with ExitStack() as stack:
        yield stack.enter_context(Target()), stack.enter_context(Target())


def wait_finished(nsqd: Nsqd, topic: str, number: int) -> None:
    wait_until(lambda: is_finished(nsqd, topic, CHANNEL, number), "all are finished")


def test_headers_that_follow_from_the_request_are_left_out(single_nsqd: Nsqd, target: Target, topic: str):
    single_nsqd.publish(topic, b"body")
    given = ["Host: other.example", "connection: X-Key", "Content-Length: 1", "Transfer-Encoding: chunked"]
    flags = [f"--topic={topic}", f"--post={target.url}", *(f"--header={each}" for each in given)]
    with started("nsq_to_http", at(single_nsqd), *flags) as process:
        wait_until(lambda: target.seen, "the request")
        log = end(process)
    ((_, _, headers, body),) = target.seen
    assert (headers["host"] in target.url, headers["content-length"], body) == (True, "4", b"body")
    assert headers.get("connection") != "X-Key" and "transfer-encoding" not in headers
    for each in ("Host", "Connection", "Content-Length", "Transfer-Encoding"):
        assert f"WARNING: --header={each} is not sent" in log


def test_a_post_has_the_body_and_the_headers(single_nsqd: Nsqd, target: Target, topic: str):
    sent = [b"%d" % number for number in range(200)] + [b"\xff\x00\n"]
    single_nsqd.publish(topic, *sent)
    arguments = (
        f"--topic={topic}", f"--post={target.url}?a=b", "--content-type=text/x", "--header=X-Key: a: b ",
        "--header=user-agent:mine", "--status-every=100",
    )  # fmt: skip
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, len(sent))
        log = end(process)
    assert sorted(target.bodies) == sorted(sent)
    method, path, headers, _ = target.seen[0]
    assert (method, path) == ("POST", "/in?a=b")
    assert (headers["content-type"], headers["x-key"], headers["user-agent"]) == ("text/x", "a: b", "mine")
    assert "[aggregate]: finished " in log


def test_a_get_has_the_body_in_its_address(single_nsqd: Nsqd, target: Target, topic: str):
    """NSQ's takes the address for a format: %2F in it becomes an error text in the request."""
    single_nsqd.publish(topic, b"a b&c=/\xff~")
    address = target.url + "?m=%s&path=%2Fx&percent=%%25"
    with started("nsq_to_http", at(single_nsqd), f"--topic={topic}", f"--get={address}") as process:
        wait_finished(single_nsqd, topic, 1)
        end(process)
    ((method, path, headers, body),) = target.seen
    assert (method, path, body) == ("GET", "/in?m=a+b%26c%3D%2F%FF~&path=%2Fx&percent=%25", b"")
    assert headers["user-agent"] == "nsq_to_http v1.3.0" and "content-type" not in headers


@pytest.mark.parametrize(("verb", "good", "bad"), [("post", (200, 202, 299), (302, 500)), ("get", (200,), (201, 404))])
def test_answers_that_finish_a_message(
    single_nsqd: Nsqd, target: Target, topic: str, verb: str, good: tuple[int, ...], bad: tuple[int, ...]
):
    target.statuses[b""] = [*bad, *good]  # of GET; the body is in the address
    target.statuses[b"x"] = [*bad, *good]
    single_nsqd.publish(topic, *[b"x"] * len(good))
    address = target.url + ("?%s" if verb == "get" else "")
    arguments = (f"--topic={topic}", f"--{verb}={address}", "-n=1", *AT_ONCE)
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, len(good))
        log = end(process)
    assert len(target.seen) == len(good) + len(bad)
    for status in bad:
        assert f"got status code {status}" in log


@pytest.mark.parametrize(
    ("answer", "number", "timeout"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok", 3, "1m"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok", 3, "1m"),
        (b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok", 3, "1m"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\nConnection: close\r\n\r\nok", 3, "1m"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nok", 1, "2s"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * (ANSWER_BYTES_MAX + 1), 3, "1m"),
    ],
    ids=["a length twice", "two lengths", "LF alone", "cut short", "slow", "large"],
)
def test_the_status_decides_whatever_follows_it(
    single_nsqd: Nsqd, topic: str, answer: bytes, number: int, timeout: str
):
    single_nsqd.publish(topic, *[b"x"] * number)
    requests = 0
    connections: list[socket.socket] = []

    def serve(listener: socket.socket) -> None:
        nonlocal requests
        with suppress(OSError):  # of the listener, at the end
            while True:
                connection, _ = listener.accept()
                connections.append(connection)
                data = b""
                while not data.endswith(b"\r\n\r\nx") and (piece := connection.recv(65536)):
                    data += piece
                requests += 1
                with suppress(OSError):  # it reads no more than it wants to
                    connection.sendall(answer)
                    if b"close" in answer:
                        connection.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/"
        arguments = (f"--topic={topic}", f"--post={url}", f"--http-client-request-timeout={timeout}", "-n=1", *AT_ONCE)
        try:
            with started("nsq_to_http", at(single_nsqd), *arguments) as process:
                wait_finished(single_nsqd, topic, number)
                log = end(process)
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(SOON_S)
            for connection in connections:
                connection.close()
    assert requests == number, "one request of each message, each on a connection of its own"
    assert "message" not in log, "it says of each that fails what was wrong"


def test_what_no_target_takes_is_kept_and_holds_up_no_other(single_nsqd: Nsqd, target: Target, topic: str):
    """NSQ's backs off from it, and drops it after five attempts."""
    target.statuses[b"bad"] = [400] * 1000
    single_nsqd.publish(topic, b"bad", *[b"%d" % number for number in range(50)])
    arguments = (f"--topic={topic}", f"--post={target.url}", "--consumer-opt=default_requeue_delay,1ms")
    with started("nsq_to_http", at(single_nsqd), *arguments, "--consumer-opt=backoff_multiplier,1h") as process:
        wait_until(lambda: target.bodies.count(b"bad") > 6, "it is tried again and again")
        wait_until(lambda: len(set(target.bodies)) == 51, "the others")
        end(process)
    assert single_nsqd.unfinished(topic, CHANNEL) == 1


def test_a_part_of_the_messages(single_nsqd: Nsqd, target: Target, topic: str):
    single_nsqd.publish(topic, *[b"x"] * 1000)
    arguments = (f"--topic={topic}", f"--post={target.url}", "--sample=0.1")
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_finished(single_nsqd, topic, 1000)
        end(process)
    assert 40 < len(target.seen) < 180


@pytest.mark.parametrize("mode", ["hostpool", "round-robin", "epsilon-greedy", "multicast"])
def test_which_target_gets_a_message(single_nsqd: Nsqd, pair: tuple[Target, Target], topic: str, mode: str):
    sent = [b"%d" % number for number in range(200)]
    single_nsqd.publish(topic, *sent)
    posts = [f"--post={target.url}" for target in pair]
    room = "-n=1000"  # for each, however slow it is: else the other one gets what it has no room for
    with started("nsq_to_http", at(single_nsqd), f"--topic={topic}", f"--mode={mode}", room, *posts) as process:
        wait_finished(single_nsqd, topic, 200)
        end(process)
    found = Counter(pair[0].bodies + pair[1].bodies)
    assert set(found) == {*sent}
    assert set(found.values()) == {2 if mode == "multicast" else 1}
    least = {"epsilon-greedy": 1, "multicast": 200}.get(mode, 100)
    assert min(len(target.seen) for target in pair) >= least


def test_no_more_requests_at_a_time_than_wanted(single_nsqd: Nsqd, target: Target, topic: str):
    single_nsqd.publish(topic, *[b"x"] * 200)
    with started("nsq_to_http", at(single_nsqd), f"--topic={topic}", f"--post={target.url}", "-n=3") as process:
        wait_finished(single_nsqd, topic, 200)
        end(process)
    assert 1 < target.most <= 3


@pytest.mark.parametrize("mode", ["hostpool", "round-robin"])
def test_a_target_that_stalls_does_not_delay_the_other(
    single_nsqd: Nsqd, pair: tuple[Target, Target], topic: str, mode: str
):
    stalled, well = pair
    stalled.is_stalled = True
    single_nsqd.publish(topic, *[b"%d" % number for number in range(1000)])
    posts = [f"--post={target.url}" for target in pair]
    arguments = (f"--topic={topic}", f"--mode={mode}", "-n=10", "--http-client-request-timeout=1h", *posts)
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_until(lambda: len(well.seen) == 995, "all but the share of the one that stalls")
        assert len(stalled.seen) == 5
        stalled.is_stalled = False
        wait_finished(single_nsqd, topic, 1000)
        end(process)
    assert set(stalled.bodies + well.bodies) == {b"%d" % number for number in range(1000)}


def test_a_target_that_is_down_is_left_out_and_nothing_is_lost(single_nsqd: Nsqd, target: Target, topic: str):
    with reserved_port() as reserved:
        down = f"--post=http://user:secret@127.0.0.1:{reserved.getsockname()[1]}/?token=secret"
        single_nsqd.publish(topic, *[b"%d" % number for number in range(100)])
        arguments = (f"--topic={topic}", down, f"--post={target.url}", "--consumer-opt=backoff_multiplier,1h")
        with started("nsq_to_http", at(single_nsqd), *arguments) as process:
            wait_finished(single_nsqd, topic, 100)
            log = end(process)
    assert sorted(target.bodies) == sorted(b"%d" % number for number in range(100))
    assert "Connection refused" in log
    assert "secret" not in log


def test_of_all_targets_only_those_without_a_message_get_it_again(
    single_nsqd: Nsqd, pair: tuple[Target, Target], topic: str
):
    """NSQ's asks one after the other, and begins anew with the first when one fails."""
    pair[1].statuses[b"x"] = [503, 503]
    single_nsqd.publish(topic, b"x")
    posts = [f"--post={target.url}" for target in pair]
    with started("nsq_to_http", at(single_nsqd), f"--topic={topic}", "--mode=multicast", *posts, *AT_ONCE) as process:
        wait_finished(single_nsqd, topic, 1)
        end(process)
    assert [len(target.seen) for target in pair] == [1, 3]


def test_a_request_that_takes_longer_than_the_message_timeout(single_nsqd: Nsqd, target: Target, topic: str):
    """NSQ's lets it time out, and makes the request again."""
    target.is_stalled = True
    single_nsqd.publish(topic, b"slow")
    arguments = (f"--topic={topic}", f"--post={target.url}", "--consumer-opt=msg_timeout,1s")
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_until(lambda: target.seen, "it is asked")
        threading.Event().wait(2.5)  # longer than the timeout
        target.is_stalled = False
        wait_finished(single_nsqd, topic, 1)
        end(process)
    assert len(target.seen) == 1
    assert single_nsqd.stats(topic, CHANNEL)["timeout_count"] == 0


def test_no_answer_in_time_is_a_failure(single_nsqd: Nsqd, target: Target, topic: str):
    target.is_stalled = True
    single_nsqd.publish(topic, b"x")
    arguments = (f"--topic={topic}", f"--post={target.url}", "--http-client-request-timeout=50ms", *AT_ONCE)
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_until(lambda: len(target.seen) > 1, "it is asked again")
        target.is_stalled = False
        wait_finished(single_nsqd, topic, 1)
        assert "no answer within 0.05 s" in end(process)


def test_the_first_signal_waits_for_requests_and_the_second_gives_them_up(
    single_nsqd: Nsqd, target: Target, topic: str
):
    target.is_stalled = True
    arguments = (f"--topic={topic}", f"--post={target.url}", "--http-client-request-timeout=1h")
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        single_nsqd.publish(topic, b"first")
        wait_until(lambda: target.seen, "it is asked")
        process.terminate()
        wait_until(lambda: _ready(single_nsqd, topic) == 0, "it wants no more")
        single_nsqd.publish(topic, b"second")
        target.is_stalled = False
        process.wait(PATIENCE_S)
    assert process.returncode == 0
    assert target.bodies == [b"first"] and single_nsqd.unfinished(topic, CHANNEL) == 1
    target.is_stalled = True
    with started("nsq_to_http", at(single_nsqd), *arguments) as process:
        wait_until(lambda: len(target.seen) == 2, "it is asked")
        process.terminate()
        wait_until(lambda: _ready(single_nsqd, topic) == 0, "it wants no more")
        process.terminate()
        process.wait(PATIENCE_S)
        target.is_stalled = False
    assert process.returncode == 0
    assert single_nsqd.unfinished(topic, CHANNEL) == 1


def _ready(nsqd: Nsqd, topic: str) -> int:
    (client,) = nsqd.stats(topic, CHANNEL)["clients"]
    return int(client["ready_count"])


def test_targets_with_tls(single_nsqd: Nsqd, topic: str, tmp_path: Path):
    certificates = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    single_nsqd.publish(topic, b"x")
    with Target(context) as target:
        arguments = (f"--topic={topic}", f"--post={target.url}", *AT_ONCE)
        with started("nsq_to_http", at(single_nsqd), *arguments) as process:
            wait_until(
                lambda: single_nsqd.get(f"/stats?format=json&topic={topic}")["topics"][0]["channels"], "subscribed"
            )
            wait_until(lambda: single_nsqd.stats(topic, CHANNEL)["requeue_count"], "nobody trusts it")
            end(process)
        assert not target.seen
        with started(
            "nsq_to_http", at(single_nsqd), *arguments, f"--http-client-tls-root-ca-file={certificates.ca}"
        ) as process:
            wait_finished(single_nsqd, topic, 1)
            end(process)
        assert target.bodies == [b"x"]
