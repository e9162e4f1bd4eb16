"""nsqd's side of discovery, one case per rule: what it tells nsqlookupds and what it asks (NSQ's nsqlookupd)."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.daemon_helpers import FakeNsqlookupd, LookupConnection, unused_port, wait_for_lines
from tests.conformance.protocol_helpers import quickest
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, pub, wait_until

PING_INTERVAL_S = 15.0
DEADLINE_S = 1.0
BACK_WITHIN_S = 2.0


@pytest.fixture(scope="module", autouse=True)
def quiet(shared_daemons: Daemons) -> Iterator[tuple[FakeNsqlookupd, Nsqd]]:
    """A nsqlookupd and an nsqd that nobody disturbs; started before all cases, because its pings take time."""
    with FakeNsqlookupd() as fake:
        flags = ("--broadcast-address=nsqd.example", "--broadcast-tcp-port=14150", "--broadcast-http-port=14151")
        nsqd = shared_daemons.nsqd(*quick_flags(), fake.flag, *flags)
        wait_until(lambda: fake.identities, "IDENTIFY")
        yield fake, nsqd


@pytest.fixture(scope="module")
def lookupd() -> Iterator[FakeNsqlookupd]:
    """A nsqlookupd that notes what nsqd says."""
    with FakeNsqlookupd() as fake:
        yield fake


@pytest.fixture(scope="module")
def registered(shared_daemons: Daemons, lookupd: FakeNsqlookupd) -> Nsqd:
    """An nsqd that tells ``lookupd`` of its topics; leave it as it is."""
    return start(shared_daemons, lookupd)


@pytest.fixture
def fake() -> Iterator[FakeNsqlookupd]:
    """A nsqlookupd of the case's own."""
    with FakeNsqlookupd() as fake:
        yield fake


def start(daemons: Daemons, *fakes: FakeNsqlookupd, flags: tuple[str, ...] = ()) -> Nsqd:
    """An nsqd that has introduced itself to all of ``fakes`` that answer."""
    nsqd = daemons.nsqd(*quick_flags(), *(fake.flag for fake in fakes), *flags)
    for fake in fakes:
        wait_until(lambda: fake.identities or fake.is_mute, "IDENTIFY")  # noqa: B023 - called at once
    return nsqd


def configure(nsqd: Nsqd, *addresses: str) -> None:
    answer = nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", json.dumps(addresses).encode())
    assert answer.status == 200, answer


def known(nsqlookupd: Nsqlookupd, topic: str, nsqd: Nsqd) -> Callable[[], bool]:
    return lambda: nsqd.tcp[1] in nsqlookupd.producers(topic)


def flag_of(nsqlookupd: Nsqlookupd) -> str:
    return f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"


# -- introduction ------------------------------------------------------------------------------------------------------


def test_a_connection_begins_with_the_magic(quiet: tuple[FakeNsqlookupd, Nsqd]):
    assert quiet[0].magics == [b"  V1"]


def test_identify_comes_first(quiet: tuple[FakeNsqlookupd, Nsqd]):
    assert quiet[0].told[0].line == "IDENTIFY"


def test_identify_says_all_fields(quiet: tuple[FakeNsqlookupd, Nsqd]):
    (identity,) = quiet[0].identities
    assert identity == {
        "version": "1.3.0",
        "tcp_port": 14150,
        "http_port": 14151,
        "hostname": socket.gethostname(),
        "broadcast_address": "nsqd.example",
        "topology_zone": "",
        "topology_region": "",
    }


def test_the_broadcast_ports_are_those_that_are_listened_on(registered: Nsqd, lookupd: FakeNsqlookupd):
    identity = lookupd.identities[0]
    assert (identity["tcp_port"], identity["http_port"]) == (registered.tcp[1], registered.http[1])


def test_the_broadcast_address_is_the_name_of_the_host(shared_daemons: Daemons, fake: FakeNsqlookupd):
    start(shared_daemons, fake, flags=("--broadcast-address=",))
    assert fake.identities[0]["broadcast_address"] == socket.gethostname()


def test_an_address_that_is_given_twice_is_one(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake, fake)
    nsqd.post("/topic/create?topic=once")
    wait_for_lines(fake, "REGISTER once")
    assert (len(fake.magics), fake.lines.count("REGISTER once")) == (1, 1)


@pytest.mark.parametrize("answer", [b"OK", b'{"version":"1.3.0"}', b"{}"], ids=["bare-ok", "few-fields", "no-fields"])
def test_an_answer_to_identify_that_says_little(shared_daemons: Daemons, fake: FakeNsqlookupd, answer: bytes):
    fake.answers["IDENTIFY"] = answer
    nsqd = start(shared_daemons, fake)
    nsqd.publish("t", b"x")
    wait_for_lines(fake, "REGISTER t")


@pytest.mark.parametrize("answer", [b"E_INVALID go away", b"nonsense"], ids=["error", "nonsense"])
def test_a_refused_identify_is_tried_again(shared_daemons: Daemons, fake: FakeNsqlookupd, answer: bytes):
    fake.answers["IDENTIFY"] = answer
    nsqd = start(shared_daemons, fake)
    nsqd.publish("t", b"x")
    fake.answers.clear()
    nsqd.publish("u", b"x")  # upstream connects again when it has something to say
    wait_for_lines(fake, "REGISTER t", "REGISTER u")
    assert len(fake.identities) > 1


# -- registering -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["http", "pub", "sub"])
def test_a_new_topic_is_registered(registered: Nsqd, lookupd: FakeNsqlookupd, topic: str, how: str):
    if how == "http":
        registered.post(f"/topic/create?topic={topic}")
    else:
        with registered.connect() as connection:
            connection.ok(pub(topic, b"x") if how == "pub" else b"SUB %s c\n" % topic.encode())
    wait_for_lines(lookupd, f"REGISTER {topic}")


@pytest.mark.parametrize("how", ["http", "sub"])
def test_a_new_channel_is_registered(registered: Nsqd, lookupd: FakeNsqlookupd, topic: str, how: str):
    registered.post(f"/topic/create?topic={topic}")
    if how == "http":
        registered.post(f"/channel/create?topic={topic}&channel=c")
    else:
        with registered.connect() as connection:
            connection.subscribe(topic, "c")
    wait_for_lines(lookupd, f"REGISTER {topic} c")


def test_a_deleted_channel_is_unregistered(registered: Nsqd, lookupd: FakeNsqlookupd, topic: str):
    registered.post(f"/topic/create?topic={topic}")
    registered.post(f"/channel/create?topic={topic}&channel=c")
    registered.post(f"/channel/delete?topic={topic}&channel=c")
    wait_for_lines(lookupd, f"UNREGISTER {topic} c")
    assert f"UNREGISTER {topic}" not in lookupd.lines


def test_a_deleted_topic_is_unregistered(registered: Nsqd, lookupd: FakeNsqlookupd, topic: str):
    registered.post(f"/topic/create?topic={topic}")
    registered.post(f"/channel/create?topic={topic}&channel=c")
    registered.post(f"/topic/delete?topic={topic}")
    wait_for_lines(lookupd, f"UNREGISTER {topic}")


def test_what_happens_is_told_in_order(registered: Nsqd, lookupd: FakeNsqlookupd, topic: str):
    registered.post(f"/topic/create?topic={topic}")
    registered.post(f"/channel/create?topic={topic}&channel=c")
    registered.post(f"/channel/delete?topic={topic}&channel=c")
    registered.post(f"/topic/delete?topic={topic}")
    wait_for_lines(lookupd, f"UNREGISTER {topic}")
    told = [line for line in lookupd.lines if line.split()[1] == topic]
    assert told == [f"REGISTER {topic}", f"REGISTER {topic} c", f"UNREGISTER {topic} c", f"UNREGISTER {topic}"]


def test_an_ephemeral_channel_is_unregistered_when_its_consumer_goes(
    registered: Nsqd, lookupd: FakeNsqlookupd, topic: str
):
    with registered.connect() as consumer:
        consumer.subscribe(topic, "c#ephemeral")
        wait_for_lines(lookupd, f"REGISTER {topic} c#ephemeral")
    wait_for_lines(lookupd, f"UNREGISTER {topic} c#ephemeral")


def test_an_ephemeral_topic_is_unregistered_with_its_last_channel(
    registered: Nsqd, lookupd: FakeNsqlookupd, topic: str
):
    name = f"{topic}#ephemeral"
    with registered.connect() as consumer:
        consumer.subscribe(name, "c#ephemeral")
    wait_for_lines(lookupd, f"REGISTER {name}", f"UNREGISTER {name} c#ephemeral", f"UNREGISTER {name}")


def test_all_nsqlookupds_are_told(shared_daemons: Daemons, fake: FakeNsqlookupd):
    with FakeNsqlookupd() as second, FakeNsqlookupd() as third:
        nsqd = start(shared_daemons, fake, second, third)
        nsqd.post("/topic/create?topic=t")
        nsqd.post("/topic/delete?topic=t")
        for each in (fake, second, third):
            wait_for_lines(each, "REGISTER t", "UNREGISTER t")


def test_everything_is_registered_at_the_start(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = shared_daemons.nsqd(*quick_flags())
    nsqd.post("/topic/create?topic=bare")
    nsqd.post("/topic/create?topic=full")
    for channel in ("c", "d"):
        nsqd.post(f"/channel/create?topic=full&channel={channel}")
    nsqd.stop()
    nsqd.flags.append(fake.flag)
    nsqd.start()
    wait_for_lines(fake, "REGISTER bare", "REGISTER full c", "REGISTER full d")
    assert fake.told[0].line == "IDENTIFY"


# -- deadlines, failures, return ---------------------------------------------------------------------------------------


def test_an_answer_has_one_second(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    fake.is_mute = True
    begun = time.monotonic()
    nsqd.post("/topic/create?topic=unheard")
    wait_until(lambda: 0 in fake.closed, "the connection given up")
    assert time.monotonic() - begun >= DEADLINE_S


def test_the_answer_to_identify_has_one_second(shared_daemons: Daemons, fake: FakeNsqlookupd):
    fake.is_mute = True
    begun = time.monotonic()
    start(shared_daemons, fake)
    wait_until(lambda: 0 in fake.closed, "the connection given up")
    assert time.monotonic() - begun >= DEADLINE_S


@pytest.mark.improvement
def test_a_slow_nsqlookupd_delays_nobody(shared_daemons: Daemons, fake: FakeNsqlookupd):
    """NSQ tells them one after the other."""
    with FakeNsqlookupd() as mute:
        mute.is_mute = True
        nsqd = start(shared_daemons, mute, fake)
        numbers = itertools.count()

        def measure() -> float:
            begun = time.monotonic()
            line = f"REGISTER t{next(numbers)}"
            nsqd.publish(line.split()[1], b"x")
            wait_until(lambda: line in fake.lines, "told")
            return time.monotonic() - begun

        assert quickest(measure, DEADLINE_S / 2) < DEADLINE_S / 2


def test_a_nsqlookupd_that_is_away_stops_nothing(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake, flags=(f"--lookupd-tcp-address=127.0.0.1:{unused_port()}",))
    nsqd.publish("t", b"x")
    wait_for_lines(fake, "REGISTER t")
    assert nsqd.request("GET", "/ping").body == b"OK"


@pytest.mark.improvement
def test_everything_is_registered_within_2_s_of_a_return(shared_daemons: Daemons):
    """NSQ connects again at its next ping, up to 15 s later."""
    fake = FakeNsqlookupd()
    nsqd = start(shared_daemons, fake)
    nsqd.post("/topic/create?topic=bare")
    nsqd.post("/topic/create?topic=full")
    nsqd.post("/channel/create?topic=full&channel=c")
    wait_for_lines(fake, "REGISTER full c")
    fake.close()
    nsqd.post("/topic/create?topic=later")
    nsqd.post("/topic/delete?topic=bare")
    wait_until(lambda: "trying again" in nsqd.log, "the loss noticed")
    with FakeNsqlookupd(fake.port) as back:
        wait_until(lambda: "REGISTER full c" in back.lines, "registered again", BACK_WITHIN_S)
        wait_for_lines(back, "REGISTER later")
        assert back.told[0].line == "IDENTIFY"
        assert not [line for line in back.lines if "bare" in line]


def test_after_a_lost_connection_everything_is_registered_anew(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    nsqd.post("/topic/create?topic=t")
    wait_for_lines(fake, "REGISTER t")
    fake.disconnect()
    wait_until(lambda: 0 in fake.closed, "the loss")

    def is_back() -> bool:
        nsqd.request("POST", f"/topic/create?topic=t{time.monotonic_ns()}")  # upstream connects when it has news
        return len(fake.identities) > 1

    wait_until(is_back, "IDENTIFY again")
    wait_until(lambda: "REGISTER t" in [each.line for each in fake.told if each.connection == 1], "registered again")


def test_a_clean_stop_closes_the_connection(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    nsqd.stop()
    wait_until(lambda: fake.closed == [0], "the connection closed")


def test_the_topics_of_a_stopped_nsqd_are_not_unregistered(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    nsqd.post("/topic/create?topic=t")
    wait_for_lines(fake, "REGISTER t")
    nsqd.stop()
    wait_until(lambda: fake.closed == [0], "the connection closed")
    assert "UNREGISTER t" not in fake.lines


# -- changing addresses at run time ------------------------------------------------------------------------------------


def test_addresses_can_be_added(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons)
    nsqd.post("/topic/create?topic=t")
    configure(nsqd, fake.address)
    wait_for_lines(fake, "REGISTER t")
    assert nsqd.get("/config/nsqlookupd_tcp_addresses") == [fake.address]


def test_addresses_can_be_removed(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    configure(nsqd)
    wait_until(lambda: fake.closed == [0], "the connection closed")
    nsqd.post("/topic/create?topic=t")
    assert nsqd.get("/config/nsqlookupd_tcp_addresses") == []
    assert fake.lines == []


def test_an_address_that_stays_keeps_its_connection(shared_daemons: Daemons, fake: FakeNsqlookupd):
    nsqd = start(shared_daemons, fake)
    with FakeNsqlookupd() as second:
        configure(nsqd, second.address, fake.address)
        wait_until(lambda: second.identities, "IDENTIFY")
        nsqd.post("/topic/create?topic=t")
        for each in (fake, second):
            wait_for_lines(each, "REGISTER t")
        assert (len(fake.magics), fake.closed) == (1, [])


# -- channels of a new topic -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def telling(shared_daemons: Daemons, nsqlookupd: Nsqlookupd) -> Nsqd:
    """An nsqd that registers with the real ``nsqlookupd``."""
    nsqd = shared_daemons.nsqd(*quick_flags(), flag_of(nsqlookupd))
    wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "nsqd known")
    return nsqd


def ports_of(nsqlookupd: Nsqlookupd) -> list[int]:
    return [node["tcp_port"] for node in nsqlookupd.get("/nodes")["producers"]]


def channels_of(nsqd: Nsqd, topic: str) -> dict[str, int]:
    return {row["channel_name"]: row["depth"] for row in nsqd.stats(topic)["channels"]}


def test_channels_that_nsqlookupd_knows_get_the_first_message(telling: Nsqd, nsqlookupd: Nsqlookupd, topic: str):
    for channel in ("c", "d"):
        nsqlookupd.post(f"/channel/create?topic={topic}&channel={channel}")
    telling.publish(topic, b"x")
    wait_until(lambda: channels_of(telling, topic) == {"c": 1, "d": 1}, "the message in both channels")


def test_ephemeral_channels_are_not_created_ahead(telling: Nsqd, nsqlookupd: Nsqlookupd, topic: str):
    for channel in ("c", "d%23ephemeral"):
        nsqlookupd.post(f"/channel/create?topic={topic}&channel={channel}")
    telling.publish(topic, b"x")
    wait_until(lambda: channels_of(telling, topic) == {"c": 1}, "the message in the lasting channel")


def test_channels_of_all_nsqlookupds_are_united(shared_daemons: Daemons, nsqlookupd: Nsqlookupd, topic: str):
    second = shared_daemons.nsqlookupd()
    nsqd = shared_daemons.nsqd(*quick_flags(), flag_of(nsqlookupd), flag_of(second))
    for each, channels in ((nsqlookupd, "ab"), (second, "bc")):
        wait_until(lambda: nsqd.tcp[1] in ports_of(each), "nsqd known")  # noqa: B023 - called at once
        for channel in channels:
            each.post(f"/channel/create?topic={topic}&channel={channel}")
    nsqd.publish(topic, b"x")
    wait_until(lambda: channels_of(nsqd, topic) == {"a": 1, "b": 1, "c": 1}, "the message in every channel")


def test_a_nsqlookupd_without_an_answer_does_not_stop_a_topic(
    shared_daemons: Daemons, fake: FakeNsqlookupd, topic: str
):
    nsqd = start(shared_daemons, fake)  # nobody listens on the HTTP port that it names
    nsqd.publish(topic, b"x")
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        assert consumer.message().body == b"x"


# -- both together -----------------------------------------------------------------------------------------------------


def test_what_nsqd_has_can_be_looked_up(telling: Nsqd, nsqlookupd: Nsqlookupd, topic: str):
    telling.publish(topic, b"x")
    wait_until(known(nsqlookupd, topic, telling), "registered")
    (producer,) = nsqlookupd.get(f"/lookup?topic={topic}")["producers"]
    assert producer.pop("remote_address").startswith("127.0.0.1:")
    assert producer == {
        "hostname": socket.gethostname(),
        "broadcast_address": "127.0.0.1",
        "tcp_port": telling.tcp[1],
        "http_port": telling.http[1],
        "version": "1.3.0",
        "topology_zone": "",
        "topology_region": "",
    }


def test_a_tombstone_ends_nothing_but_discovery(telling: Nsqd, nsqlookupd: Nsqlookupd, topic: str):
    telling.publish(topic, b"x")
    wait_until(known(nsqlookupd, topic, telling), "registered")
    nsqlookupd.post(f"/topic/tombstone?topic={topic}&node=127.0.0.1:{telling.http[1]}")
    assert nsqlookupd.producers(topic) == []
    telling.publish(topic, b"y")
    assert telling.stats(topic)["message_count"] == 2


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_an_nsqd_that_ends_is_forgotten(shared_daemons: Daemons, nsqlookupd: Nsqlookupd, topic: str, end: str):
    nsqd = shared_daemons.nsqd(*quick_flags(), flag_of(nsqlookupd))
    nsqd.publish(topic, b"x")
    wait_until(known(nsqlookupd, topic, nsqd), "registered")
    getattr(nsqd, end)()
    wait_until(lambda: nsqlookupd.producers(topic) == [], "forgotten")
    assert topic in nsqlookupd.get("/topics")["topics"]


# -- without HTTP, on unix sockets -------------------------------------------------------------------------------------


def without_http(daemons: Daemons, *flags: str) -> Nsqd:
    nsqd = daemons.new_nsqd(*quick_flags(), "--http-address=", *flags)
    nsqd.launch()
    wait_until(lambda: "TCP: listening on" in nsqd.log, "nsqd listening")
    return nsqd


def test_without_http_the_broadcast_port_is_told(shared_daemons: Daemons, fake: FakeNsqlookupd):
    without_http(shared_daemons, fake.flag, "--broadcast-http-port=14151")
    wait_until(lambda: fake.identities, "IDENTIFY")
    assert fake.identities[0]["http_port"] == 14151


@pytest.mark.improvement
def test_without_http_and_its_broadcast_port_nsqd_says_why_it_registers_nowhere(
    shared_daemons: Daemons, nsqlookupd: Nsqlookupd
):
    """NSQ logs what nsqlookupd answers."""
    nsqd = without_http(shared_daemons, flag_of(nsqlookupd))
    wait_until(lambda: "IDENTIFY missing fields" in nsqd.log, "the reason")
    assert "broadcast_address, tcp_port, http_port, version are required" in nsqd.log


@pytest.mark.improvement
def test_nsqlookupd_on_unix_sockets(shared_daemons: Daemons, tmp_path: Path):
    """NSQ has nsqd on unix sockets, not nsqlookupd."""
    tcp, http = tmp_path / "tcp", tmp_path / "http"
    nsqlookupd = shared_daemons.nsqlookupd()
    nsqlookupd.stop()
    nsqlookupd.flags += [f"--tcp-address={tcp}", f"--http-address={http}"]
    nsqlookupd.launch()
    wait_until(lambda: "HTTP: listening on" in nsqlookupd.log, "nsqlookupd listening")
    with LookupConnection(str(tcp)) as connection:
        answer = connection.identify()
        assert (answer["tcp_port"], answer["http_port"]) == (-1, -1)
    nsqd = shared_daemons.nsqd(*quick_flags(), f"--lookupd-tcp-address={tcp}")
    nsqd.publish("t", b"x")

    def producers() -> str:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(http))
            client.sendall(b"GET /lookup?topic=t HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            with client.makefile("rb") as received:
                return received.read().decode()

    wait_until(lambda: f'"tcp_port":{nsqd.tcp[1]}' in producers(), "registered")
    assert '"remote_address":"@"' in producers()
    nsqd.publish("u", b"x")  # its channels cannot be asked for, which must not hold it up
    with nsqd.connect() as consumer:
        consumer.subscribe("u", "c", 1)
        assert consumer.message().body == b"x"


# -- pings (last, because they have taken place meanwhile) -------------------------------------------------------------


def test_a_quiet_nsqd_pings_every_15_s(quiet: tuple[FakeNsqlookupd, Nsqd]):
    fake, _ = quiet
    wait_until(lambda: [each for each in fake.told if each.line == "PING"], "a ping", 2 * PING_INTERVAL_S)
    first = next(each for each in fake.told if each.line == "PING")
    assert PING_INTERVAL_S - 1.5 < first.at_s - fake.told[0].at_s < 2 * PING_INTERVAL_S
    assert fake.closed == []
