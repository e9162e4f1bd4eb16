"""When nsqd refuses the client itself, for its secret or its TLS: who is told, when, and what comes back."""

from __future__ import annotations

import asyncio

import pytest
from tests.unit.client.world import World, until

from flintmq.client.options import ConnectionOptions
from flintmq.client.security import TlsRefused
from flintmq.errors import NsqdError, PublishRefused
from flintmq.wire.identify import ServerFeatures

GUARDED = ServerFeatures(version="1", auth_required=True)
KNOWN = ConnectionOptions(auth_secret="known")


def run(scenario, *names, **options):
    with World(*names, **options) as world:
        for fake in world.fakes.values():
            fake.secrets = [b"known"]
        world.run(scenario(world))


# --- producer ---


@pytest.mark.parametrize(
    ("options", "code", "expected"),
    [
        (ConnectionOptions(), "E_AUTH_FIRST", "set auth_secret"),
        (ConnectionOptions(auth_secret="unknown"), "E_AUTH_FAILED", "refuses auth_secret"),
        (ConnectionOptions(tls=True), "TLS_REFUSED", "offers no TLS"),
    ],
)
def test_publishes_fail_at_once_when_every_nsqd_refuses(options, code, expected, client):
    async def scenario(world):
        async with world.producer(options=options, timeout=5) as producer:
            for publish in (producer.pub("t", b"1"), producer.mpub("t", [b"2"]), producer.dpub("t", b"3", 1)):
                began = world.now
                with pytest.raises(PublishRefused, match=expected) as caught:
                    await publish
                assert world.now - began < 0.1
                assert caught.value.code == code
                assert not caught.value.retryable
                assert caught.value.__cause__ is not None
            assert producer.stats().bytes_in_flight == 0
            assert producer.stats().failed == 3

    run(scenario, "a", "b", features=GUARDED, client=client)


def test_publishes_that_wait_already_fail_with_the_refusal(client):
    async def scenario(world):
        world.sim.node("a").pause()
        async with world.producer(options=ConnectionOptions(connect_timeout=1), timeout=60) as producer:
            publish = asyncio.ensure_future(producer.pub("t", b"1"))
            await asyncio.sleep(1)
            assert not publish.done(), "a machine that is down refuses nothing"
            world.sim.node("a").resume()
            with pytest.raises(PublishRefused, match="set auth_secret") as caught:
                await publish
            assert caught.value.code == "E_AUTH_FIRST", "not the end of its time"

    run(scenario, features=GUARDED, client=client)


def test_one_that_refuses_leaves_the_others(client):
    async def scenario(world):
        world.fakes["a"].secrets = [b"other"]
        async with world.producer(options=KNOWN) as producer:
            for number in range(10):
                await producer.pub("t", b"%d" % number)
        assert len(world.fakes["b"].stored) == 10

    run(scenario, "a", "b", features=GUARDED, client=client)


def test_a_refusal_passes_when_nsqd_changes_its_mind(client):
    async def scenario(world):
        world.fake.secrets = []
        async with world.producer(options=KNOWN, timeout=60) as producer:
            with pytest.raises(PublishRefused, match="E_AUTH_FAILED"):
                await producer.pub("t", b"1")
            world.fake.secrets = [b"known"]
            await until(lambda: producer.stats().connections)
            await producer.pub("t", b"2")
            world.fake.secrets = []
            world.fake.drop_all()
            publish = asyncio.ensure_future(producer.pub("t", b"3"))
            await asyncio.sleep(10)
            assert not publish.done(), "it has let us in before: this may be an outage of its auth server"
            world.fake.secrets = [b"known"]
            await publish
        assert world.fake.stored == [b"2", b"3"]

    run(scenario, features=GUARDED, client=client)


@pytest.mark.parametrize("options", [KNOWN, ConnectionOptions(auth_secret=lambda: "known")])
@pytest.mark.parametrize("code", ["E_AUTH_FAILED AUTH failed", "E_AUTH_ERROR internal error"])
def test_a_publish_that_finds_its_permission_ended_goes_again(options, code, client):
    """The auth server did not answer when nsqd asked it again after the ttl: that passes, whatever the secret is."""

    async def scenario(world):
        answers = iter([code] * 5)  # more often than a publish may be refused
        world.fake.answer = lambda command, bodies: next(answers, "OK")
        async with world.producer(options=options, timeout=60) as producer:
            await producer.pub("t", b"1")
            assert producer.stats().failed == 0
        assert world.fake.stored == [b"1"]
        assert len(world.fake.secrets_given) == 6

    run(scenario, features=GUARDED, client=client)


def test_a_permission_that_is_gone_and_does_not_come_back_is_told_at_the_deadline(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: "E_AUTH_FAILED AUTH failed"
        async with world.producer(options=KNOWN, timeout=5) as producer:
            began = world.now
            publish = asyncio.ensure_future(producer.pub("t", b"1"))
            await until(lambda: world.fake.commands)
            world.fake.secrets = []
            with pytest.raises(PublishRefused, match="refuses auth_secret, or does not answer") as caught:
                await publish
            assert caught.value.code == "TIMEOUT"
            assert caught.value.retryable
            assert world.now - began == pytest.approx(5, abs=0.5)

    run(scenario, features=GUARDED, client=client)


def test_what_the_auth_server_does_not_allow_is_final(client):
    async def scenario(world):
        world.fake.answer = lambda command, bodies: 'E_UNAUTHORIZED AUTH failed for PUB on "t" ""'
        async with world.producer(options=KNOWN, timeout=60) as producer:
            began = world.now
            with pytest.raises(PublishRefused, match="E_UNAUTHORIZED") as caught:
                await producer.pub("t", b"1")
            assert not caught.value.retryable
            assert world.now - began < 0.1

    run(scenario, features=GUARDED, client=client)


# --- consumer ---


def test_a_consumer_starts_unless_every_nsqd_refuses(client):
    async def scenario(world):
        world.fakes["a"].secrets = world.fakes["b"].secrets = []
        errors: list = []
        async with world.consumer(options=KNOWN, on_error=errors.append) as consumer:
            assert consumer.connections == ("c:4150",)
            iterating = asyncio.create_task(anext(aiter(consumer)))  # a thread that iterates calls on_error
            await until(lambda: len(errors) >= 2)
            assert {error.code for error in errors} == {"E_AUTH_FAILED"}
            iterating.cancel()
        world.fakes["c"].secrets = []
        with pytest.raises(NsqdError, match="E_AUTH_FAILED"):
            async with world.consumer(options=KNOWN):
                pass

    run(scenario, "a", "b", "c", features=GUARDED, client=client)


def test_one_that_is_down_may_accept_us_later(client):
    async def scenario(world):
        world.kill("b")
        world.fakes["a"].secrets = []
        async with world.consumer(options=KNOWN) as consumer:
            await asyncio.sleep(10)
            world.start("b")
            await until(lambda: consumer.connections == ("b:4150",))

    run(scenario, "a", "b", features=GUARDED, client=client)


def test_no_tls_where_tls_was_asked_for(client):
    async def scenario(world):
        with pytest.raises(TlsRefused, match="offers no TLS"):
            async with world.consumer(options=ConnectionOptions(tls=True)):
                pass

    run(scenario, client=client)


def test_a_secret_that_can_be_renewed_is_never_final(client):
    async def scenario(world):
        secrets = iter(["wrong", "wrong"])
        options = ConnectionOptions(auth_secret=lambda: next(secrets, "known"))
        async with world.consumer(options=options) as consumer:
            await until(lambda: consumer.connections)
        assert world.fake.secrets_given == [b"wrong", b"wrong", b"known"]

    run(scenario, features=GUARDED, client=client)


def test_an_outage_of_the_auth_server_does_not_end_a_consumer(client):
    async def scenario(world):
        async with world.consumer(options=KNOWN) as consumer:
            world.fake.secrets = []
            world.fake.drop_all()
            await asyncio.sleep(60)
            assert not consumer.connections
            world.fake.secrets = [b"known"]
            await until(lambda: consumer.connections)
            world.fake.refuse_sub = "E_UNAUTHORIZED AUTH failed for SUB"
            world.fake.drop_all()
            with pytest.raises(NsqdError, match="E_UNAUTHORIZED"):
                async for _ in consumer:
                    pass

    run(scenario, features=GUARDED, client=client)
