"""Our client against real nsqd processes with TLS, compression and AUTH, in every combination; and what it refuses."""

from __future__ import annotations

import asyncio
import json
import logging
import random
import re
import ssl
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import pytest
from aiohttp import web
from tests.certificates import Certificates
from tests.integration.auth_server import EVERYTHING, SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd
from tests.integration.test_client import address_of, has_grown, until

from flintmq import ConnectionFailed, ConnectionOptions, Consumer, NsqdError, Producer, PublishRefused, sync
from flintmq.client.security import TlsRefused

NOISE = random.Random(4711).randbytes(900_000)
"""Larger than every buffer and chunk, and nothing that could be made smaller."""

COUNT = 300
REQUEUED_EVERY, TOUCHED_EVERY = 10, 7
BACK_S = SOON_S
SETTLED_S = 1.1  # a connection that breaks sooner does not count as a good one, and is tried again later
TRANSPORTS = ("clear", "verified", "unverified", "require", "require-verify")
CODECS = (None, "deflate", "snappy")


class Guard(AuthServer):
    """An auth server that knows one secret at a time.

    Attributes:
        secret: what is let in.
    """

    def __init__(self) -> None:
        self.secret = SECRET
        super().__init__()

    def reset(self) -> None:
        super().reset()
        self.secret = SECRET

    async def _handle(self, request: web.Request) -> web.Response:
        secret = request.query["secret"]
        self.questions.append({"secret": secret})
        return web.json_response(self.answer, status=200 if secret == self.secret else 403)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def one_guard() -> Iterator[Guard]:
    guard = Guard()
    with guard:
        yield guard


@pytest.fixture(autouse=True)
def guard(one_guard: Guard) -> Guard:
    one_guard.reset()
    return one_guard


NsqdFor = Callable[[str, bool], Nsqd]


def tls_flags(certificates: Certificates, policy: str = "") -> list[str]:
    files = certificates.server
    flags = [f"--tls-cert={files.cert}", f"--tls-key={files.key}", f"--tls-root-ca-file={certificates.ca}"]
    flags.append("--https-address=127.0.0.1:0")
    return [*flags, f"--tls-client-auth-policy={policy}", "--tls-required=tcp-https"] if policy else flags


@pytest.fixture(scope="module")
def nsqd_for(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates, one_guard: Guard
) -> Iterator[NsqdFor]:
    """An nsqd for each client-auth policy, with and without AUTH; the tests share them, each has a topic of its own."""
    daemons = Daemons(tmp_path_factory.mktemp("shared"))
    running: dict[tuple[str, bool], Nsqd] = {}

    def get(transport: str, has_auth: bool) -> Nsqd:
        policy = transport if transport.startswith("require") else ""
        if (policy, has_auth) not in running:
            flags = [*tls_flags(certificates, policy), "--durability=os"]
            if has_auth:
                flags.append(f"--auth-http-address={one_guard.address}")
            running[policy, has_auth] = daemons.nsqd(*flags)
        return running[policy, has_auth]

    try:
        yield get
    finally:
        daemons.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"t{zlib.crc32(request.node.name.encode()):08x}"


def tls_options(certificates: Certificates, transport: str) -> dict[str, Any]:
    own = certificates.client("good" if transport == "require-verify" else "stranger")
    options: dict[str, dict[str, Any]] = {
        "clear": {},
        "verified": {"tls": True, "tls_ca_file": certificates.ca},
        "unverified": {"tls": True, "tls_verify": False},
        "require": {"tls": True, "tls_ca_file": certificates.ca, "tls_cert": own.cert, "tls_key": own.key},
        "require-verify": {"tls": certificates.client_context("good")},
    }
    return options[transport]


def rows_of_clients(nsqd: Nsqd, topic: str) -> list[dict[str, Any]]:
    """The rows of the producers and consumers of a topic."""
    stats = nsqd.get(f"/stats?format=json&include_mem=false&topic={topic}")
    consumers = [row for each in stats["topics"] for channel in each["channels"] for row in channel["clients"]]
    producers = [row for row in stats["producers"] if any(each["topic"] == topic for each in row["pub_counts"])]
    return [*producers, *consumers]


# --- every combination ---


@pytest.mark.parametrize(
    ("transport", "codec", "has_auth"),
    [*product(TRANSPORTS, CODECS, (False, True))],
    ids=str,
)
def test_publish_consume_requeue_touch(
    nsqd_for: NsqdFor, certificates: Certificates, topic: str, transport: str, codec: str | None, has_auth: bool
):
    nsqd = nsqd_for(transport, has_auth)
    options = ConnectionOptions(
        **tls_options(certificates, transport), compression=codec, auth_secret=SECRET if has_auth else None
    )

    async def main() -> None:
        bodies = [b"%d" % number * 20 for number in range(COUNT)]
        async with (
            Producer(address_of(nsqd), options=options) as producer,
            Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options, max_in_flight=50) as consumer,
        ):
            await producer.mpub(topic, bodies[:200])
            await producer.pub(topic, NOISE)
            await asyncio.gather(*(producer.pub(topic, body) for body in bodies[200:]))
            finished: list[bytes] = []
            requeued: list[bytes] = []
            async with asyncio.timeout(PATIENCE_S):
                async for message in consumer:
                    number = len(finished) + len(requeued)
                    if message.attempts == 1 and (number % REQUEUED_EVERY == 0 or message.body == NOISE):
                        requeued.append(message.body)
                        message.requeue(0)
                        continue
                    if number % TOUCHED_EVERY == 0:
                        message.touch()
                    finished.append(message.body)
                    message.finish()
                    if len(finished) == COUNT + 1:
                        break
            assert sorted(finished) == sorted([*bodies, NOISE])
            assert len(requeued) > COUNT // REQUEUED_EVERY // 2
            assert NOISE in requeued
            rows = rows_of_clients(nsqd, topic)
            assert len(rows) == 2
            for row in rows:
                assert (row["tls"], row["snappy"], row["deflate"]) == (
                    transport != "clear", codec == "snappy", codec == "deflate",
                )  # fmt: skip
                assert row.get("authed", False) is has_auth
        assert consumer.stats().late == 0

    asyncio.run(main())
    assert nsqd.unfinished(topic, "c") == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_both_event_loops_and_a_slow_consumer(nsqd_for: NsqdFor, certificates: Certificates, topic: str, loop: str):
    """Back-pressure in both directions through TLS and snappy."""
    factory = None if loop == "asyncio" else pytest.importorskip("uvloop").new_event_loop
    nsqd = nsqd_for("verified", True)
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca, compression="snappy", auth_secret=SECRET)

    async def main() -> None:
        count = 40
        sizes = []
        async with (
            Producer(address_of(nsqd), options=options, batch=False) as producer,
            Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options) as consumer,
        ):
            await asyncio.gather(*(producer.pub(topic, NOISE[number:], timeout=20) for number in range(count)))
            async with asyncio.timeout(PATIENCE_S):
                async for message in consumer:
                    sizes.append(len(message.body))
                    message.finish()
                    if len(sizes) == count:
                        break
        assert sorted(sizes) == sorted(len(NOISE) - number for number in range(count))

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())


# --- what is refused ---


def refused(nsqd: Nsqd, topic: str, options: ConnectionOptions) -> tuple[BaseException, PublishRefused]:
    """How a consumer and a producer fail; both at once, not by a deadline."""

    async def main() -> tuple[BaseException, PublishRefused]:
        began = time.monotonic()
        with pytest.raises((ConnectionFailed, NsqdError)) as consuming:
            async with Consumer(topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options):
                pass
        async with Producer(address_of(nsqd), options=options, timeout=PATIENCE_S) as producer:
            with pytest.raises(PublishRefused) as publishing:
                await producer.pub(topic, b"x")
        assert time.monotonic() - began < PATIENCE_S / 2
        return consuming.value, publishing.value

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"tls_ca_file": None}, "not from an authority that is trusted here: set tls_ca_file"),
        ({"tls_server_name": "nsqd.example"}, "certificate is not for 'nsqd.example'.*set tls_server_name"),
        ({"tls_min_version": "tls1.3", "tls_server_name": "127.0.0.2"}, "certificate is not for '127.0.0.2'"),
    ],
)
def test_a_server_that_cannot_be_verified(
    nsqd_for: NsqdFor, certificates: Certificates, topic: str, changed: dict[str, Any], expected: str
):
    options = ConnectionOptions(**{"tls": True, "tls_ca_file": certificates.ca, **changed})
    consuming, publishing = refused(nsqd_for("verified", False), topic, options)
    assert isinstance(consuming, TlsRefused)
    assert re.search(expected, str(consuming))
    assert publishing.code == "TLS_REFUSED"
    assert not publishing.retryable
    assert re.search(expected, str(publishing))


def test_the_name_can_be_given(nsqd_for: NsqdFor, certificates: Certificates, topic: str):
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca, tls_server_name="localhost")

    async def main() -> None:
        async with Producer(address_of(nsqd_for("verified", False)), options=options) as producer:
            await producer.pub(topic, b"x")

    asyncio.run(main())


def test_an_expired_certificate(daemons: Daemons, certificates: Certificates, topic: str):
    files = certificates.expired_server()
    nsqd = daemons.nsqd(f"--tls-cert={files.cert}", f"--tls-key={files.key}", "--https-address=127.0.0.1:0")
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca)
    consuming, publishing = refused(nsqd, topic, options)
    assert "its certificate has expired: renew it" in str(consuming)
    assert "its certificate has expired: renew it" in str(publishing)


@pytest.mark.parametrize(
    ("policy", "kind", "version", "expected"),
    [
        ("require", "none", "tls1.3", "it wants a certificate of this client: set tls_cert and tls_key"),
        ("require", "none", "tls1.2", "may want a certificate of it, see tls_cert"),
        ("require-verify", "none", "tls1.3", "it wants a certificate of this client: set tls_cert and tls_key"),
        ("require-verify", "stranger", "tls1.3", "does not accept this client's certificate: tls_cert must be from"),
        ("require-verify", "expired", "tls1.3", "this client's certificate has expired, .*: renew tls_cert"),
    ],
)
def test_a_client_that_is_not_let_in(
    nsqd_for: NsqdFor, certificates: Certificates, topic: str, policy: str, kind: str, version: str, expected: str
):
    own = certificates.client(kind)
    context = ssl.create_default_context(cafile=certificates.ca)
    options = ConnectionOptions(
        tls=True, tls_ca_file=certificates.ca, tls_cert=own.cert or None, tls_key=own.key or None
    )
    if version == "tls1.2":
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        options = ConnectionOptions(tls=context)
    consuming, publishing = refused(nsqd_for(policy, False), topic, options)
    assert isinstance(consuming, TlsRefused)
    assert re.search(expected, str(consuming))
    assert re.search(expected, str(publishing))


def test_an_nsqd_without_tls(nsqd: Nsqd, topic: str):
    consuming, publishing = refused(nsqd, topic, ConnectionOptions(tls=True))
    assert isinstance(consuming, TlsRefused)
    assert "offers no TLS: start it with --tls-cert" in str(consuming)
    assert "offers no TLS: start it with --tls-cert" in str(publishing)


def test_an_nsqd_that_wants_tls(nsqd_for: NsqdFor, topic: str):
    consuming, publishing = refused(nsqd_for("require", False), topic, ConnectionOptions())
    assert "this nsqd wants TLS: connect with tls=True" in str(consuming)
    assert "this nsqd wants TLS: connect with tls=True" in str(publishing)


def test_compression_that_is_not_offered(daemons: Daemons, topic: str, caplog: pytest.LogCaptureFixture):
    nsqd = daemons.nsqd("--snappy=false", "--durability=os")

    async def main() -> None:
        async with Producer(address_of(nsqd), options=ConnectionOptions(compression="snappy")) as producer:
            await producer.pub(topic, b"x")

    with caplog.at_level(logging.WARNING, "flintmq.client"):
        asyncio.run(main())
    assert f"nsqd {address_of(nsqd)} offers no snappy: it goes on without compression" in caplog.text


# --- AUTH ---


@pytest.mark.parametrize("secret", [None, "a-wrong-one"])
def test_a_wrong_secret(nsqd_for: NsqdFor, topic: str, secret: str | None, caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.DEBUG):
        consuming, publishing = refused(nsqd_for("clear", True), topic, ConnectionOptions(auth_secret=secret))
    code, expected = ("E_AUTH_FIRST", "set auth_secret") if secret is None else ("E_AUTH_FAILED", "refuses auth_secret")
    for error in (consuming, publishing):
        assert isinstance(error, NsqdError)
        assert error.code == code
        assert expected in str(error)
        assert not error.retryable
        assert "a-wrong-one" not in repr(error)
    logged = [record.getMessage() for record in caplog.records if not record.name.startswith("aiohttp")]
    assert any(code in line for line in logged)
    assert not any("a-wrong-one" in line for line in logged)


def test_a_topic_that_is_not_allowed(nsqd_for: NsqdFor, guard: Guard, topic: str):
    guard.grant({**EVERYTHING[0], "topic": "^other$"})
    consuming, publishing = refused(nsqd_for("clear", True), topic, ConnectionOptions(auth_secret=SECRET))
    assert isinstance(consuming, NsqdError)
    assert consuming.code == publishing.code == "E_UNAUTHORIZED"
    assert topic in str(consuming)


def test_one_nsqd_that_refuses_is_no_reason_to_stop(nsqd: Nsqd, nsqd_for: NsqdFor, topic: str):
    closed = nsqd_for("clear", True)

    async def main() -> None:
        both = [address_of(closed), address_of(nsqd)]
        errors: list[Exception] = []
        async with (
            Producer(both) as producer,
            Consumer(topic, "c", nsqd_tcp_addresses=both, on_error=errors.append) as consumer,
        ):
            for _ in range(5):
                await producer.pub(topic, b"x")
            assert consumer.connections == (address_of(nsqd),)
            await until(lambda: errors)
            assert "E_AUTH_FIRST" in str(errors[0])
            await until(lambda: consumer.stats().received == 5)

    asyncio.run(main())


def test_a_secret_that_is_renewed(daemons: Daemons, guard: Guard, topic: str):
    """Every connection asks for the secret anew; an old one is refused, and that is not the end."""
    nsqd = daemons.nsqd(f"--auth-http-address={guard.address}", "--durability=os")
    given: list[str] = []
    current = ["first"]

    async def from_vault() -> str:
        await asyncio.sleep(0)
        given.append(current[0])
        return current[0]

    guard.secret = "first"

    async def main() -> None:
        options = ConnectionOptions(auth_secret=from_vault)
        errors: list[Exception] = []
        async with (
            Producer(address_of(nsqd), options=options, timeout=PATIENCE_S) as producer,
            Consumer(
                topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options, on_error=errors.append
            ) as consumer,
        ):
            await producer.pub(topic, b"1")
            await until(lambda: consumer.stats().received == 1)
            assert given == ["first", "first"]
            guard.secret = "second"
            nsqd.kill()
            await asyncio.to_thread(nsqd.start)
            await until(lambda: any("E_AUTH_FAILED" in str(error) for error in errors))
            current[0] = "second"
            await producer.pub(topic, b"2")
            await until(lambda: consumer.stats().received >= 2)
            assert set(given[2:]) == {"first", "second"}
            assert producer.stats().failed == 0

    asyncio.run(main())


def test_a_permission_that_ends_while_publishing(daemons: Daemons, guard: Guard, topic: str):
    """nsqd asks again after the ttl, with the old secret: the publish goes out over a new connection with a new one."""
    nsqd = daemons.nsqd(f"--auth-http-address={guard.address}", "--durability=os")
    guard.grant(*EVERYTHING, ttl=1)

    async def main() -> None:
        async with Producer(address_of(nsqd), options=ConnectionOptions(auth_secret=lambda: guard.secret)) as producer:
            await producer.pub(topic, b"1")
            guard.secret = "another"
            await asyncio.sleep(1.1)
            await producer.pub(topic, b"2")
            assert producer.stats().retries == 1

    asyncio.run(main())
    assert nsqd.stats(topic)["message_count"] == 2


def test_an_outage_of_the_auth_server_when_a_permission_ends(daemons: Daemons, guard: Guard, topic: str):
    """nsqd asks again after the ttl, and is not answered well: publishes wait until it is, with a fixed secret too."""
    nsqd = daemons.nsqd(f"--auth-http-address={guard.address}", "--durability=os")
    guard.grant(*EVERYTHING, ttl=1)
    options = ConnectionOptions(auth_secret=SECRET)

    async def main() -> None:
        with sync.Producer(address_of(nsqd), options=options, timeout=PATIENCE_S) as blocking:
            async with Producer(address_of(nsqd), options=options, timeout=PATIENCE_S) as producer:
                await producer.pub(topic, b"1")
                await asyncio.to_thread(blocking.pub, topic, b"2")
                await asyncio.sleep(1.1)
                guard.secret = "nobody's"
                publishes = [producer.pub(topic, b"3"), asyncio.to_thread(blocking.pub, topic, b"4")]
                waiting = asyncio.gather(*publishes)
                await until(lambda: producer.stats().retries and blocking.stats().retries)
                assert not waiting.done()
                guard.secret = SECRET
                await waiting

    asyncio.run(main())
    assert nsqd.stats(topic)["message_count"] == 4


# --- kill -9 ---


def test_back_after_kill_under_tls_snappy_and_auth(
    daemons: Daemons, certificates: Certificates, guard: Guard, topic: str
):
    nsqd = daemons.nsqd(*tls_flags(certificates), f"--auth-http-address={guard.address}", "--durability=os")
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca, compression="snappy", auth_secret=SECRET.encode)
    acknowledged: set[bytes] = set()
    seen: set[bytes] = set()
    down_s: list[float] = []
    back_s: list[float] = []

    async def publish(producer: Producer, number: int) -> None:
        body = b"%d" % number
        await producer.pub(topic, body)
        acknowledged.add(body)

    async def main() -> None:
        is_over = False

        async def publish_all(producer: Producer) -> None:
            number = 0
            while not is_over:
                await asyncio.gather(*(publish(producer, number + each) for each in range(50)))
                number += 50
                await asyncio.sleep(0.02)

        async with (
            Producer(address_of(nsqd), options=options, timeout=PATIENCE_S) as producer,
            Consumer(
                topic, "c", nsqd_tcp_addresses=address_of(nsqd), options=options, inline=True, max_backoff=0,
                handler=lambda message: seen.add(message.body),
            ) as consumer,
        ):  # fmt: skip
            publishing = asyncio.create_task(publish_all(producer))
            for _ in range(2):
                before = len(acknowledged)
                await until(partial(has_grown, acknowledged, before + 300))
                await asyncio.sleep(SETTLED_S)
                killed = time.monotonic()
                nsqd.kill()
                await asyncio.to_thread(nsqd.start)
                began = time.monotonic()
                down_s.append(began - killed)
                count = len(seen)
                await until(lambda: consumer.connections)
                await until(partial(has_grown, seen, count))
                back_s.append(time.monotonic() - began)
            is_over = True
            await publishing
            await until(lambda: acknowledged <= seen)
            assert producer.stats().failed == 0

    asyncio.run(main())
    assert len(acknowledged) > 600
    for down, back in zip(down_s, back_s, strict=True):
        assert back < BACK_S + down, "attempts become rarer as the outage lasts"


# --- nsqlookupd over HTTPS ---


async def lookup_over_https(
    certificates: Certificates, options: ConnectionOptions, nsqd: Nsqd, topic: str, timeout_s: float = PATIENCE_S
) -> None:
    """Publish through an nsqlookupd behind HTTPS, as a reverse proxy makes it."""
    node = {"broadcast_address": nsqd.tcp[0], "tcp_port": nsqd.tcp[1]}

    async def answer(request: web.BaseRequest) -> web.Response:
        return web.Response(body=json.dumps({"producers": [node]}), content_type="application/json")

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    runner = web.ServerRunner(web.Server(answer), shutdown_timeout=0.05)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    url = f"https://127.0.0.1:{runner.addresses[0][1]}"
    try:
        async with Producer(nsqlookupd_http_addresses=url, options=options, timeout=timeout_s) as producer:
            await producer.pub(topic, b"x")
    finally:
        await runner.cleanup()


def test_lookup_over_https(nsqd: Nsqd, certificates: Certificates, topic: str):
    asyncio.run(lookup_over_https(certificates, ConnectionOptions(tls_ca_file=certificates.ca), nsqd, topic))
    assert nsqd.stats(topic)["message_count"] == 1


def test_lookup_over_https_is_verified(nsqd: Nsqd, certificates: Certificates, topic: str):
    with pytest.raises(PublishRefused, match="trusted here: set tls_ca_file"):
        asyncio.run(lookup_over_https(certificates, ConnectionOptions(), nsqd, topic, timeout_s=2))
