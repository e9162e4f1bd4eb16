"""One connection: handshake, heartbeats, gathered writes, and how it is lost."""

from __future__ import annotations

import asyncio
import ipaddress
import random
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
from tests.certificates import Certificates
from tests.sim.loop import SimTransport
from tests.unit.client.fake_nsqd import HANG_UP, OK, SILENCE
from tests.unit.client.world import World, until

from flintmq.client.aio.connection import Connection
from flintmq.client.aio.handshake import Opening
from flintmq.client.core.handshake import Handshake
from flintmq.client.core.link import AnswerLost
from flintmq.client.options import ConnectionOptions
from flintmq.client.security import TlsRefused
from flintmq.errors import ConnectionFailed, NsqdError, RemoteProtocolError, TouchFailed
from flintmq.net.layers import LayeredTransport
from flintmq.net.tls import ServerTls
from flintmq.wire.client import ClientConnection
from flintmq.wire.frames import HEARTBEAT_FRAME, error_frame, response_frame
from flintmq.wire.identify import ServerFeatures


class Owner:
    """Records what a connection tells."""

    def __init__(self) -> None:
        self.messages: list = []
        self.failures: list = []
        self.settled: list[tuple[int, int, int]] = []
        self.lost: list = []

    def on_messages(self, connection, messages):
        self.messages += messages.records

    def on_message_failed(self, connection, failure):
        self.failures.append(failure)

    def on_settled(self, connection, finished, requeued, dropped):
        self.settled.append((len(finished), requeued, dropped))

    def on_lost(self, connection, error):
        self.lost.append(error)


async def connected(world: World, **options) -> tuple[Connection, Owner]:
    owner = Owner()
    return await Connection.open("a:4150", owner, ConnectionOptions(**options), world.env), owner


async def subscribed(world: World, **options) -> tuple[Connection, Owner]:
    connection, owner = await connected(world, **options)
    await connection.request("SUB", partial(connection.sub, "t", "c"))
    return connection, owner


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        world.run(scenario(world))


# --- connecting ---


def test_names_are_looked_up_by_us(monkeypatch):
    """A loop that looks one up while it connects leaves an error behind, nobody's, when it is given up meanwhile."""

    async def scenario(world):
        loop = asyncio.get_running_loop()
        plain, resolve = loop.create_connection, loop.getaddrinfo
        resolved: list[object] = []
        hosts: list[str] = []

        async def found(host, *rest, **options):
            resolved.append(host)
            return [*await resolve("nobody", *rest, **options), *await resolve(host, *rest, **options)]

        async def connects(factory, host=None, *rest, **options):
            hosts.append(host)
            if len(hosts) == 1:
                raise OSError("the first address of the name does not take it")
            return await plain(factory, host, *rest, **options)

        monkeypatch.setattr(loop, "getaddrinfo", found)
        monkeypatch.setattr(loop, "create_connection", connects)
        connection, _ = await connected(world)
        assert resolved == ["a"]
        assert len(hosts) == 2 and all(ipaddress.ip_address(host) for host in hosts)
        connection.close()

    run(scenario, "a", "nobody")


# --- handshake ---


def test_what_is_negotiated():
    async def scenario(world):
        connection, _ = await connected(world, client_id="me", msg_timeout=5, heartbeat_interval=10)
        (request,) = world.fake.identified
        assert (request.client_id, request.msg_timeout, request.heartbeat_interval) == ("me", 5000, 10_000)
        assert request.hostname == "driver"
        assert connection.features.max_rdy_count == 100
        assert connection.msg_timeout_s == 5.0
        assert connection.max_msg_timeout_s == 900.0
        assert "a:4150 init" in connection.describe()
        connection.close()

    run(scenario, features=ServerFeatures(version="1.3.0", max_rdy_count=100))


def test_nobody_listens():
    async def scenario(world):
        world.kill("a")
        with pytest.raises(ConnectionFailed, match="a:4150"):
            await connected(world)

    run(scenario)


def test_an_unknown_host():
    async def scenario(world):
        with pytest.raises(ConnectionFailed, match="nowhere"):
            await Connection.open("nowhere:1", Owner(), ConnectionOptions(), world.env)

    run(scenario)


def test_a_machine_that_does_not_answer():
    async def scenario(world):
        world.kill("a", power_loss=True)
        began = world.now
        with pytest.raises(ConnectionFailed, match="no answer within 2 s"):
            await connected(world, connect_timeout=2)
        assert world.now - began < 2.5

    run(scenario)


def test_an_nsqd_that_accepts_and_says_nothing():
    async def scenario(world):
        world.sim.node("a").pause()
        owner = Owner()
        with pytest.raises(ConnectionFailed, match="no answer within 1 s"):
            await Connection.open("a:4150", owner, ConnectionOptions(connect_timeout=1), world.env)
        world.sim.node("a").resume()
        await until(lambda: not world.fake.sessions)

    run(scenario)


def test_auth_is_asked_for():
    async def scenario(world):
        with pytest.raises(NsqdError, match="E_AUTH_FIRST"):
            await connected(world)
        await until(lambda: not world.fake.sessions)

    run(scenario, features=ServerFeatures(version="1", auth_required=True))


def test_identify_refused():
    async def scenario(world):
        world.fake.refuse_identify = "E_BAD_BODY IDENTIFY msg timeout (5) is invalid"
        with pytest.raises(NsqdError, match="msg timeout") as caught:
            await connected(world)
        assert not caught.value.retryable

    run(scenario)


def test_not_an_nsqd():
    async def serve_http():
        class Http(asyncio.Protocol):
            def connection_made(self, transport):
                transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        await asyncio.get_running_loop().create_server(Http, "0.0.0.0", 80)
        await asyncio.get_running_loop().create_future()

    with World() as world:
        world.sim.node("web").start(serve_http)

        async def scenario():
            with pytest.raises((RemoteProtocolError, ConnectionFailed), match="not an nsqd"):
                await Connection.open("web:80", Owner(), ConnectionOptions(), world.env)

        world.run(scenario())


def test_sub_refused():
    async def scenario(world):
        connection, owner = await connected(world)
        world.fake.refuse_sub = "E_SUB_FAILED"
        with pytest.raises(NsqdError, match="E_SUB_FAILED") as caught:
            await connection.request("SUB", partial(connection.sub, "t", "c"))
        assert caught.value.retryable
        assert owner.lost
        assert connection.is_lost

    run(scenario)


def test_sub_not_answered():
    async def scenario(world):
        connection, _ = await connected(world, connect_timeout=1)
        world.sim.node("a").pause()
        with pytest.raises(ConnectionFailed, match="SUB was not answered within 1 s"):
            await connection.request("SUB", partial(connection.sub, "t", "c"))
        assert connection.is_lost

    run(scenario)


# --- heartbeats ---


def test_heartbeats_are_answered():
    async def scenario(world):
        connection, _ = await connected(world, heartbeat_interval=1)
        await asyncio.sleep(30)
        assert not connection.is_lost
        assert len(world.fake.sessions) == 1
        connection.close()

    run(scenario)


def test_two_heartbeats_missed():
    async def scenario(world):
        connection, owner = await connected(world, heartbeat_interval=1)
        await asyncio.sleep(3)
        world.fake.is_mute = True
        began = world.now
        error = await asyncio.shield(connection.lost)
        assert 1.0 <= world.now - began <= 2.1
        assert "nothing was received for 2 s" in str(error)
        assert owner.lost == [error]

    run(scenario)


# --- gathering ---


def test_answers_of_a_turn_are_one_write():
    async def scenario(world):
        connection, owner = await subscribed(world)
        connection.rdy(10)
        world.fake.add(b"1", b"2", b"3", b"4")
        await until(lambda: len(owner.messages) == 4)
        ids = [record[2] for record in owner.messages]
        writes: list[bytes] = []
        transport: Any = connection._transport
        transport.write = writes.append
        connection.touch(ids[0], lambda error: None)
        connection.finish(ids[0])
        connection.requeue(ids[1], 50)
        connection.finish_all(ids[2:])
        assert connection.unsent_count == 4
        await asyncio.sleep(0)
        assert writes == [
            b"TOUCH %s\n" % ids[0] + b"REQ %s 50\n" % ids[1] + b"FIN %s\nFIN %s\nFIN %s\n" % (ids[0], ids[2], ids[3])
        ]
        assert owner.settled == [(3, 1, 0)]
        assert connection.unsent_count == 0

    run(scenario)


def test_late_answers_are_told_and_the_connection_goes_on():
    async def scenario(world):
        connection, owner = await subscribed(world)
        connection.rdy(1)
        world.fake.late = "yes"
        world.fake.add(b"1")
        await until(lambda: owner.messages)
        message_id = owner.messages[0][2]
        failed: list[TouchFailed] = []
        connection.touch(message_id, failed.append)
        connection.finish(message_id)
        connection.requeue(message_id, 0)
        await until(lambda: len(owner.failures) == 3)
        assert [failure.code for failure in owner.failures] == ["E_TOUCH_FAILED", "E_REQ_FAILED", "E_FIN_FAILED"]
        assert {failure.message_id for failure in owner.failures} == {message_id}
        assert isinstance(failed[0], TouchFailed)
        assert not connection.is_lost
        connection.close()

    run(scenario)


def test_the_end_of_a_subscription_is_a_barrier():
    async def scenario(world):
        connection, owner = await subscribed(world)
        connection.rdy(5)
        world.fake.add(b"1", b"2")
        await until(lambda: len(owner.messages) == 2)
        connection.finish_all([record[2] for record in owner.messages])
        await connection.end_subscription()
        assert world.fake.finished == [b"1", b"2"]
        connection.close()
        assert isinstance(await connection.lost, ConnectionFailed)

    run(scenario)


# --- publishing and losing ---


def outcomes_of(connection: Connection, count: int) -> list:
    outcomes: list = [None] * count
    for number in range(count):
        connection.publish("t", [b"%d" % number], partial(outcomes.__setitem__, number))
    return outcomes


def test_every_publish_is_answered_once_when_the_connection_breaks():
    async def scenario(world):
        connection, owner = await connected(world)
        world.fake.answer = lambda command, bodies: OK if bodies == [b"0"] else SILENCE
        outcomes = outcomes_of(connection, 3)
        await until(lambda: outcomes[0] is not None)
        world.kill("a")
        await until(lambda: connection.is_lost)
        assert outcomes[0] == b"OK"
        for outcome in outcomes[1:]:
            assert isinstance(outcome, AnswerLost)
            assert outcome.maybe_executed
        assert len(owner.lost) == 1

    run(scenario)


def test_what_is_behind_a_fatal_error_was_not_executed():
    async def scenario(world):
        connection, _ = await connected(world)
        world.fake.answer = lambda command, bodies: OK if bodies == [b"0"] else "E_BAD_MESSAGE PUB message too big"
        outcomes = outcomes_of(connection, 3)
        await until(lambda: connection.is_lost)
        assert outcomes[0] == b"OK"
        assert isinstance(outcomes[1], NsqdError)
        assert not outcomes[1].retryable
        assert isinstance(outcomes[2], AnswerLost)
        assert not outcomes[2].maybe_executed
        assert world.fake.stored == [b"0"]

    run(scenario)


def test_a_hang_up_and_calls_on_a_lost_connection():
    async def scenario(world):
        connection, owner = await subscribed(world)
        connection.rdy(5)
        world.fake.add(b"1", b"2")
        await until(lambda: len(owner.messages) == 2)
        world.fake.answer = lambda command, bodies: HANG_UP
        outcomes = outcomes_of(connection, 1)
        await until(lambda: connection.is_lost)
        assert isinstance(outcomes[0], AnswerLost)
        connection.finish(owner.messages[0][2])
        connection.requeue(owner.messages[1][2], 0)
        connection.drop()
        connection.touch(owner.messages[1][2], lambda error: None)
        connection.rdy(1)
        await asyncio.sleep(1)
        assert owner.settled == [(1, 1, 1)], "counted, not sent"
        with pytest.raises(ConnectionFailed):
            await connection.end_subscription()
        connection.close()
        connection.abort("again")
        assert len(owner.lost) == 1

    run(scenario)


def test_an_error_for_nothing_that_was_asked():
    async def scenario(world):
        connection, owner = await subscribed(world)
        world.fake.deliver_unasked(error_frame("E_INVALID", "whatever"))
        error = await asyncio.shield(connection.lost)
        assert "E_INVALID whatever" in str(error)
        assert owner.lost == [error]

    run(scenario)


# --- layers and secrets ---


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def secured(world: World, certificates: Certificates, **options) -> dict[str, Any]:
    """Give the fake a certificate for ``localhost``; return what a client needs."""
    for fake in world.fakes.values():
        fake.new_tls = ServerTls(certificates.server.cert, certificates.server.key).engines()
    return {"tls": True, "tls_ca_file": certificates.ca, "tls_server_name": "localhost", **options}


EVERYTHING = ServerFeatures(version="1.3.0", tls=True, snappy=True, deflate=True, auth_required=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("has_tls", [False, True])
@pytest.mark.parametrize("codec", [None, "deflate", "snappy"])
def test_messages_and_publishes_through_layers(certificates, seed, has_tls, codec):
    """The simulated network cuts and glues as it likes."""

    async def scenario(world):
        world.fake.secrets = [b"s3cret"]
        options = secured(world, certificates) if has_tls else {}
        connection, owner = await subscribed(world, compression=codec, auth_secret="s3cret", **options)
        assert connection.layers == (*(["tls"] if has_tls else []), *([codec] if codec else []))
        assert isinstance(connection._transport, LayeredTransport) is bool(connection.layers)
        assert world.fake.secrets_given == [b"s3cret"]
        assert "s3cret" not in connection.describe() + repr(connection._options)
        connection.rdy(50)
        bodies = [random.Random(number).randbytes(5_000) for number in range(40)]
        world.fake.add(*bodies)
        await until(lambda: len(owner.messages) == 40)
        assert [record[3] for record in owner.messages] == bodies
        outcomes = outcomes_of(connection, 20)
        await until(lambda: None not in outcomes)
        assert outcomes == [b"OK"] * 20
        await asyncio.sleep(70)
        assert not connection.is_lost, "heartbeats go through the layers"
        connection.close()

    run(scenario, seed=seed, features=EVERYTHING)


def test_a_plain_connection_has_nothing_in_between():
    async def scenario(world):
        connection, _ = await connected(world)
        transport = connection._transport
        assert type(transport) is SimTransport
        assert transport.get_protocol() is connection
        connection.close()

    run(scenario, features=ServerFeatures(version="1", tls=True, snappy=True))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"compression": "snappy"}, "waiting for the OK inside snappy"),
        ({"tls": True}, "waiting for the TLS handshake"),
    ],
)
def test_layers_are_waited_for_as_long_as_anything(certificates, options, expected):
    async def scenario(world):
        world.fake.is_stuck = True
        secured(world, certificates)
        began = world.now
        with pytest.raises(ConnectionFailed, match=f"no answer within 2 s: {expected}") as caught:
            await connected(world, connect_timeout=2, **options)
        assert not isinstance(caught.value, TlsRefused)
        assert world.now - began < 2.5
        await until(lambda: not world.fake.sessions)

    run(scenario, features=EVERYTHING)


def test_a_certificate_that_is_not_trusted(certificates):
    async def scenario(world):
        options = {**secured(world, certificates), "tls_server_name": None}
        with pytest.raises(TlsRefused, match="its certificate is not for 'a'"):
            await connected(world, **options)
        await until(lambda: not world.fake.sessions)

    run(scenario, features=EVERYTHING)


def test_a_machine_that_goes_down_in_the_handshake_refuses_nothing(certificates):
    async def scenario(world):
        world.fake.is_stuck = True
        options = secured(world, certificates)
        opening = asyncio.ensure_future(connected(world, **options))
        await until(lambda: world.fake.identified)
        await asyncio.sleep(0.1)
        world.kill("a")
        with pytest.raises(ConnectionFailed) as caught:
            await opening
        assert not isinstance(caught.value, TlsRefused)

    run(scenario, features=EVERYTHING)


def test_damage_in_a_layer_is_told():
    async def scenario(world):
        connection, owner = await subscribed(world, compression="snappy")
        (session,) = world.fake.sessions
        session._transport._below.write(b"\xff\x06\x00\x00sNaPpX")
        error = await asyncio.shield(connection.lost)
        assert "snappy: bad stream identifier" in str(error)
        assert owner.lost == [error]

    run(scenario, features=ServerFeatures(version="1", snappy=True))


class Vault:
    """Gives another secret each time."""

    def __init__(self) -> None:
        self.count = 0

    def plain(self) -> str:
        self.count += 1
        return f"secret-{self.count}"

    async def waiting(self) -> bytes:
        await asyncio.sleep(0.5)
        return self.plain().encode()


@pytest.mark.parametrize("way", ["plain", "waiting"])
def test_a_secret_for_every_connection(way):
    async def scenario(world):
        world.fake.secrets = [b"secret-1", b"secret-3"]
        options = {"auth_secret": getattr(Vault(), way)}
        (await connected(world, **options))[0].close()
        with pytest.raises(NsqdError, match="refuses auth_secret") as caught:
            await connected(world, **options)
        assert caught.value.retryable
        (await connected(world, **options))[0].close()
        assert world.fake.secrets_given == [b"secret-1", b"secret-2", b"secret-3"]

    run(scenario, features=ServerFeatures(version="1", auth_required=True))


def test_secrets_that_are_none():
    async def never():
        await asyncio.get_running_loop().create_future()

    def raises():
        raise LookupError("the vault has no s3cret")

    async def scenario(world):
        for secret, expected in [
            (never, r"no answer within 1 s: waiting for auth_secret\(\)"),
            (raises, r"auth_secret\(\) raised LookupError$"),
            (lambda: 4711, r"must return text or bytes.*, not <int>"),
            (lambda: "", r"must return text or bytes.*, not <0 bytes>"),
        ]:
            with pytest.raises(ConnectionFailed, match=expected):
                await connected(world, auth_secret=secret, connect_timeout=1)
        await until(lambda: not world.fake.sessions)
        assert world.fake.secrets_given == []

    run(scenario, features=ServerFeatures(version="1", auth_required=True))


def test_nsqd_goes_while_the_secret_is_fetched():
    async def scenario(world):
        async def slow():
            await asyncio.sleep(2)
            return "s"

        opening = asyncio.ensure_future(connected(world, auth_secret=slow))
        await until(lambda: world.fake.identified)
        await asyncio.sleep(0.5)
        world.kill("a")
        with pytest.raises(ConnectionFailed, match=r"waiting for auth_secret\(\)|reset"):
            await opening

    run(scenario, features=ServerFeatures(version="1", auth_required=True))


def test_opening_is_given_up(certificates):
    async def scenario(world):
        world.fake.is_stuck = True
        options = secured(world, certificates)
        opening = asyncio.ensure_future(connected(world, **options))
        await until(lambda: world.fake.identified)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        await until(lambda: not world.fake.sessions)

    run(scenario, features=EVERYTHING)


def test_what_comes_in_one_piece_with_the_last_answer():
    async def serve():
        class Hasty(asyncio.Protocol):
            def connection_made(self, transport):
                self.transport = transport

            def data_received(self, data):
                self.transport.write(response_frame(b"{}") + HEARTBEAT_FRAME + error_frame("E_INVALID", "in a hurry"))

        await asyncio.get_running_loop().create_server(Hasty, "0.0.0.0", 80)
        await asyncio.get_running_loop().create_future()

    with World() as world:
        world.sim.node("hasty").start(serve)

        async def scenario():
            owner = Owner()
            connection = await Connection.open("hasty:80", owner, ConnectionOptions(), world.env)
            assert "E_INVALID in a hurry" in str(await asyncio.shield(connection.lost))
            assert len(owner.lost) == 1

        world.run(scenario())


def test_a_transport_that_comes_too_late():
    async def scenario(world):
        handshake = Handshake("a:4150", ClientConnection(), ConnectionOptions().identify_request("h", "1"))
        opening = Opening(handshake, lambda *_: None, asyncio.get_running_loop(), 1.0)
        opening.abort()
        transport = Mock(asyncio.Transport)
        opening.connection_made(transport)
        transport.abort.assert_called_once_with()
        transport.write.assert_not_called()

    run(scenario)
