"""nsqd and nsqlookupd together: what one registers, the other tells. Source: NSQ's nsqlookupd."""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import Callable

import pytest
from tests.conformance.daemon_helpers import FakeNsqlookupd
from tests.integration.daemons import PATIENCE_S, SOON_S, Daemons, Nsqd, Nsqlookupd, pub, wait_until

from flintmq.env import Env
from flintmq.nsqd import lookup_peer
from flintmq.wire.lookup import PeerInfo

BACK_WITHIN_S = SOON_S


def flag(nsqlookupd: Nsqlookupd) -> str:
    return f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"


def pair(daemons: Daemons) -> tuple[Nsqlookupd, Nsqd]:
    """A nsqlookupd, and an nsqd that it knows."""
    nsqlookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os", flag(nsqlookupd))
    wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "nsqd known")
    return nsqlookupd, nsqd


def test_what_nsqd_says_of_itself(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    nsqd.post("/topic/create?topic=t")
    wait_until(lambda: nsqlookupd.producers("t"), "topic registered")
    (producer,) = nsqlookupd.get("/lookup?topic=t")["producers"]
    info = nsqd.get("/info")
    assert producer.pop("remote_address").startswith("127.0.0.1:")
    assert producer == {
        "hostname": socket.gethostname(),
        "broadcast_address": "127.0.0.1",
        "tcp_port": nsqd.tcp[1],
        "http_port": nsqd.http[1],
        "version": info["version"],
        "topology_zone": "",
        "topology_region": "",
    }


def test_broadcast_ports_and_address(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    daemons.nsqd(
        flag(nsqlookupd),
        "--broadcast-address=nsqd.example",
        "--broadcast-tcp-port=14150",
        "--broadcast-http-port=14151",
    )
    (node,) = wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "nsqd known")
    assert (node["broadcast_address"], node["tcp_port"], node["http_port"]) == ("nsqd.example", 14150, 14151)


def test_topics_and_channels_are_registered_and_unregistered(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "one")
        nsqd.publish("u", b"x")
        nsqd.post("/channel/create?topic=t&channel=two")
        wait_until(lambda: nsqlookupd.producers("u") and nsqlookupd.channels("t") == ["one", "two"], "registered")
        assert nsqlookupd.producers("t") == nsqlookupd.producers("u") == [nsqd.tcp[1]]
        nsqd.post("/channel/delete?topic=t&channel=two")
        nsqd.post("/topic/delete?topic=u")
        wait_until(lambda: nsqlookupd.producers("u") == [], "topic unregistered")
        (node,) = nsqlookupd.get("/nodes")["producers"]
        assert node["topics"] == ["t"]
        assert nsqlookupd.producers("t") == [nsqd.tcp[1]]


def test_ephemeral_channels_leave_nothing_behind(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    with nsqd.connect() as consumer:
        consumer.subscribe("t", "c#ephemeral")
        wait_until(lambda: nsqlookupd.channels("t") == ["c#ephemeral"], "registered")
    wait_until(lambda: nsqlookupd.channels("t") == [], "channel forgotten")
    assert nsqlookupd.producers("t") == [nsqd.tcp[1]]


def test_nsqd_that_stops_or_dies_is_forgotten(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    nsqd.publish("t", b"x")
    nsqd.post("/channel/create?topic=t&channel=c")
    for end in (nsqd.stop, nsqd.kill):
        wait_until(lambda: nsqlookupd.producers("t") == [nsqd.tcp[1]], "known")
        end()
        wait_until(lambda: nsqlookupd.producers("t") == [], "forgotten", BACK_WITHIN_S)
        assert nsqlookupd.channels("t") == ["c"], "the names stay"
        nsqd.start()
    wait_until(lambda: nsqlookupd.producers("t") == [nsqd.tcp[1]], "known again from its data directory", BACK_WITHIN_S)


def test_everything_is_registered_again_when_nsqlookupd_comes_back(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    nsqd.publish("t", b"x")
    nsqd.post("/channel/create?topic=t&channel=c")
    for end in (nsqlookupd.stop, nsqlookupd.kill):
        wait_until(lambda: nsqlookupd.channels("t") == ["c"], "registered")
        end()
        nsqlookupd.start()
        wait_until(lambda: nsqlookupd.channels("t") == ["c"], "registered again", BACK_WITHIN_S)
        assert nsqlookupd.producers("t") == [nsqd.tcp[1]]


def test_what_was_created_and_deleted_meanwhile(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    nsqd.publish("deleted", b"x")
    wait_until(lambda: nsqlookupd.producers("deleted"), "registered")
    tried = f"nsqlookupd 127.0.0.1:{nsqlookupd.tcp[1]}: "
    said = nsqd.log.count(tried)
    nsqlookupd.stop()
    wait_until(lambda: nsqd.log.count(tried) > said, "nsqd has tried in vain")
    nsqd.publish("created", b"x")
    nsqd.post("/topic/delete?topic=deleted")
    nsqlookupd.start()
    wait_until(lambda: nsqlookupd.producers("created") == [nsqd.tcp[1]], "registered", BACK_WITHIN_S)
    assert nsqlookupd.producers("deleted") == []


def test_many_topics_are_registered_again(daemons: Daemons):
    nsqlookupd, nsqd = pair(daemons)
    with nsqd.connect() as connection:
        connection.ok(b"".join(pub(f"t{number}#ephemeral", b"x") for number in range(1200)), 1200)
    wait_until(lambda: len(nsqlookupd.get("/topics")["topics"]) == 1200, "registered")
    nsqlookupd.kill()
    nsqlookupd.start()
    wait_until(lambda: len(nsqlookupd.get("/topics")["topics"]) == 1200, "registered again", BACK_WITHIN_S)


def test_several_nsqlookupds_one_of_them_dead(daemons: Daemons):
    one, two = daemons.nsqlookupd(), daemons.nsqlookupd()
    silent = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
    dead = daemons.nsqlookupd()
    dead.kill()
    addresses = [f"--lookupd-tcp-address=127.0.0.1:{port}" for port in (dead.tcp[1], silent.getsockname()[1])]
    nsqd = daemons.nsqd(*addresses, flag(one), flag(two))
    begun = time.monotonic()
    for number in range(10):  # were the silent one waited for, each would take its deadline
        nsqd.publish(f"t{number}", b"x")
        for nsqlookupd in (one, two):
            wait_until(lambda: nsqlookupd.producers(f"t{number}") == [nsqd.tcp[1]], "registered")  # noqa: B023 - at once
    assert time.monotonic() - begun < SOON_S, "the dead one delayed the others"
    dead.start()
    wait_until(lambda: dead.producers("t0") == [nsqd.tcp[1]], "registered", BACK_WITHIN_S)
    with silent:
        nsqd.stop(timeout_s=SOON_S)


def test_two_nsqds_with_one_topic(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()
    nsqds = [daemons.nsqd("--durability=os", flag(nsqlookupd)) for _ in range(2)]
    for nsqd in nsqds:
        nsqd.publish("t", b"x")
    wait_until(lambda: len(nsqlookupd.producers("t")) == 2, "both registered")
    assert nsqlookupd.producers("t") == sorted(nsqd.tcp[1] for nsqd in nsqds)
    node = f"127.0.0.1:{nsqds[0].http[1]}"
    nsqlookupd.post(f"/topic/tombstone?topic=t&node={node}")
    assert nsqlookupd.producers("t") == [nsqds[1].tcp[1]]


def test_who_introduces_itself_again_is_known_meanwhile(monkeypatch: pytest.MonkeyPatch):
    """The connection before ends when everything is said on the next one, and not before."""
    monkeypatch.setattr(lookup_peer, "_ANSWER_DEADLINE_S", PATIENCE_S)  # only the test decides when there is one
    me = PeerInfo(version="1", tcp_port=1, http_port=2, hostname="h", broadcast_address="b")
    served = [lookup_peer.Registration("t")]

    async def until(condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                await asyncio.sleep(0.001)

    async def main(fake: FakeNsqlookupd) -> None:
        peer = lookup_peer.LookupPeer(fake.address, Env(), lambda: me, lambda: served)
        await until(lambda: fake.lines == ["REGISTER t"])
        fake.may_answer.clear()
        peer.introduce_again()
        await until(lambda: len(fake.identities) == 2)
        assert fake.closed == []
        fake.may_answer.set()
        await until(lambda: fake.closed)
        assert fake.closed == [0]
        assert [each.connection for each in fake.told if each.line == "REGISTER t"] == [0, 1]
        await peer.close()

    with FakeNsqlookupd() as fake:
        asyncio.run(main(fake))


def test_a_name_that_is_looked_up_for_too_long_is_given_up_in_silence(monkeypatch: pytest.MonkeyPatch):
    """With uvloop the end of the lookup, which comes later, was logged as an error that nobody has asked for."""
    uvloop = pytest.importorskip("uvloop")
    monkeypatch.setattr(lookup_peer, "_CONNECT_DEADLINE_S", 0.0005)
    told: list[dict[str, object]] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: told.append(context))
        me = PeerInfo(version="1", tcp_port=1, http_port=2, hostname="h", broadcast_address="b")
        peer = lookup_peer.LookupPeer("no-such-host.invalid:4160", Env(), lambda: me, list)
        with pytest.raises((TimeoutError, socket.gaierror)):
            await peer._connect()
        with pytest.raises(socket.gaierror):  # behind the one that was given up
            await loop.getaddrinfo("no-such-host.invalid", 4160)
        gc.collect()
        await asyncio.sleep(0)

    uvloop.run(main())
    assert told == []
