"""Heartbeats, and deadlines of reading, writing and handshakes (NSQ's TCP protocol).

A second is the shortest interval there is, so all cases are watched at the same time, each by a thread of its own, and
judged afterwards. Times are in seconds from the first command of a case.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import clients, identify, tls_flags
from tests.integration.daemons import HEARTBEAT, PATIENCE_S, RESPONSE, Connection, Daemons, Frame, Nsqd, pub
from tests.integration.upgraded import Upgraded

INTERVAL_S = 1.0
WATCH_S = 3.6
"""Long enough for three heartbeats, and for a read deadline of two intervals."""
_STEP_S = 0.02


@dataclass
class Seen:
    """What one connection saw.

    Attributes:
        heartbeats: when they came.
        others: other frames that came.
        closed_at: when nsqd closed; None when it was open to the end.
    """

    heartbeats: list[float] = field(default_factory=list)
    others: list[Frame] = field(default_factory=list)
    closed_at: float | None = None


def watch(
    connection: Connection,
    for_s: float = WATCH_S,
    answer: Callable[[], bytes] | None = None,
    each_s: float = 0.0,
    send: Callable[[], bytes] | None = None,
) -> Seen:
    """Look at a connection for a while.

    Args:
        answer: makes what every heartbeat is answered with.
        each_s: how often ``send`` is asked for something to send.
    """
    begun = time.monotonic()
    seen, next_send = Seen(), each_s
    while (now := time.monotonic() - begun) < for_s:
        if send is not None and now >= next_send:
            connection.send(send())
            next_send += each_s
        try:
            frame = connection.any_frame(_STEP_S)
        except TimeoutError:
            continue
        now = time.monotonic() - begun
        if frame is None:
            seen.closed_at = now
            break
        if frame != (RESPONSE, HEARTBEAT):
            seen.others.append(frame)
            continue
        seen.heartbeats.append(now)
        if answer is not None:
            connection.send(answer())
    return seen


def nop() -> bytes:
    return b"NOP\n"


_numbers = itertools.count()


def someone(nsqd: Nsqd) -> Connection:
    """A client that asked for a heartbeat every second."""
    connection = nsqd.connect()
    connection.ok(identify(heartbeat_interval=int(INTERVAL_S * 1000)))
    return connection


# -- what is watched ---------------------------------------------------------------------------------------------------


def silent(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(someone(nsqd))


def answering(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(someone(nsqd), answer=nop)


def publishing(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(someone(nsqd), each_s=0.7, send=lambda: pub("heartbeats", b"x"))


def consuming(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(someone(nsqd).subscribe("heartbeats-consumed", "c", 1), answer=nop)


def closing(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = someone(nsqd).subscribe("heartbeats-consumed", "d")
    connection.send(b"CLS\n")
    assert connection.response() == b"CLOSE_WAIT"
    return watch(connection, answer=nop)


def unidentified(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = nsqd.connect()
    connection.ok(pub("heartbeats", b"x"))
    return watch(connection)


def without_negotiation_of_it(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = nsqd.connect()
    connection.identify()
    return watch(connection)


def disabled(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = nsqd.connect()
    connection.ok(identify(heartbeat_interval=-1))
    seen = watch(connection)
    connection.ok(pub("heartbeats", b"x"))
    return seen


def half_a_line(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = someone(nsqd)
    connection.send(b"PUB heartb")
    return watch(connection)


def half_a_body(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = someone(nsqd)
    connection.send(pub("heartbeats", b"xy")[:-1])
    return watch(connection)


def slow_body(nsqd: Nsqd, _: Nsqd) -> Seen:
    connection = someone(nsqd)
    connection.send(b"PUB heartbeats\n" + (100).to_bytes(4, "big"))
    return watch(connection, each_s=0.3, send=lambda: b"x")


def no_magic(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(nsqd.connect(b""), for_s=WATCH_S)


def no_magic_for_long(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(nsqd.connect(b""), for_s=7)


def half_a_magic(nsqd: Nsqd, _: Nsqd) -> Seen:
    return watch(nsqd.connect(b"  V"), for_s=7)


def no_handshake(_: Nsqd, tls_nsqd: Nsqd) -> Seen:
    connection = Upgraded(tls_nsqd.tcp)
    connection.negotiate(tls_v1=True)
    return watch(connection, for_s=8)


def not_reading(nsqd: Nsqd, _: Nsqd) -> Seen:
    """A consumer with much in flight that only sends NOPs."""
    topic = f"heartbeats-unread-{next(_numbers)}"
    for _number in range(24):
        nsqd.publish(topic, bytes(1_000_000))
    begun = time.monotonic()
    with nsqd.connect(receive_buffer_bytes=4096) as connection:
        connection.ok(identify(heartbeat_interval=1000))
        connection.ok(b"SUB %s c\n" % topic.encode())
        connection.rdy(24)
        while time.monotonic() - begun < PATIENCE_S:
            try:
                connection.send(b"NOP\n")
            except ConnectionError:
                pass
            time.sleep(0.2)
            if not clients(nsqd, topic):
                return Seen(closed_at=time.monotonic() - begun)
    return Seen()


SCENARIOS = (
    silent,
    answering,
    publishing,
    consuming,
    closing,
    unidentified,
    without_negotiation_of_it,
    disabled,
    half_a_line,
    half_a_body,
    slow_body,
    no_magic,
    no_magic_for_long,
    half_a_magic,
    no_handshake,
    not_reading,
)


@pytest.fixture(scope="module")
def watched(
    nsqd: Nsqd, shared_daemons: Daemons, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Seen]]:
    """Watches all scenarios at once; the outcome of one by its function."""
    certificates = Certificates(tmp_path_factory.mktemp("certificates"))
    tls_nsqd = shared_daemons.nsqd(*quick_flags(), *tls_flags(certificates))
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        futures: dict[Callable[..., Seen], Future[Seen]] = {
            scenario: pool.submit(scenario, nsqd, tls_nsqd) for scenario in SCENARIOS
        }

        def outcome(scenario: Callable[..., Seen], is_right: Callable[[Seen], object] = bool) -> Seen:
            seen = futures[scenario].result(2 * PATIENCE_S)
            for _ in range(5):
                if is_right(seen):
                    break
                seen = scenario(nsqd, tls_nsqd)
            return seen

        yield outcome


class Watched(Protocol):
    """Tells what was seen in a scenario.

    When that is not right it is watched again, a few times: a busy machine is late now and then, an nsqd that does it
    at another time is never right.
    """

    def __call__(self, scenario: Callable[..., Seen], is_right: Callable[[Seen], object] = ...) -> Seen: ...


def is_open(seen: Seen) -> bool:
    return seen.closed_at is None


def is_every_second(seen: Seen) -> bool:
    return [round(at) for at in seen.heartbeats] == [1, 2, 3]


# -- heartbeats --------------------------------------------------------------------------------------------------------


def test_heartbeat_every_interval(watched: Watched):
    seen = watched(answering, is_every_second)
    assert is_open(seen)
    assert is_every_second(seen)
    assert seen.others == []


def test_heartbeat_is_a_response_frame(watched: Watched, connection: Connection):
    connection.ok(identify(heartbeat_interval=1000))
    assert connection.socket.recv(100) == b"\x00\x00\x00\x0f\x00\x00\x00\x00_heartbeat_"


def test_heartbeat_to_producers_too(watched: Watched):
    seen = watched(publishing, is_every_second)
    assert is_every_second(seen)
    assert set(seen.others) == {Frame(RESPONSE, b"OK")}


def test_heartbeat_to_consumers(watched: Watched):
    assert is_every_second(watched(consuming, is_every_second))


def test_heartbeat_behind_CLS(watched: Watched):
    assert is_every_second(watched(closing, is_every_second))


def test_heartbeat_default_interval_is_longer(watched: Watched):
    assert watched(unidentified) == Seen()


def test_heartbeat_default_interval_when_the_field_is_absent(watched: Watched):
    assert watched(without_negotiation_of_it) == Seen()


def test_heartbeat_disabled(watched: Watched):
    assert watched(disabled).heartbeats == []


def test_heartbeat_not_before_the_magic(watched: Watched):
    assert watched(no_magic).heartbeats == []


# -- read deadline -----------------------------------------------------------------------------------------------------


def is_two_intervals(seen: Seen) -> bool:
    return seen.closed_at is not None and 1.9 <= seen.closed_at <= 3.3


def test_silent_client_is_closed_after_two_intervals(watched: Watched):
    assert is_two_intervals(watched(silent, is_two_intervals))


def test_silent_client_is_closed_without_an_error(watched: Watched):
    assert watched(silent).others == []


def test_silent_client_gets_heartbeats_before(watched: Watched):
    seen = watched(silent, lambda seen: seen.heartbeats and round(seen.heartbeats[0]) == 1)
    assert round(seen.heartbeats[0]) == 1


def test_any_command_keeps_the_connection(watched: Watched):
    assert is_open(watched(publishing, is_open))


def test_nop_keeps_the_connection(watched: Watched):
    for scenario in (answering, consuming, closing):
        assert is_open(watched(scenario, is_open))


def test_disabled_heartbeats_have_no_read_deadline(watched: Watched):
    assert watched(disabled).closed_at is None


def test_half_a_line_does_not_keep_the_connection(watched: Watched):
    seen = watched(half_a_line, is_two_intervals)
    assert is_two_intervals(seen)
    assert seen.others == []


def test_half_a_body_does_not_keep_the_connection(watched: Watched):
    assert is_two_intervals(watched(half_a_body, is_two_intervals))


@pytest.mark.improvement
def test_a_body_that_keeps_coming_keeps_the_connection(watched: Watched):
    """Upstream closes unless the whole body is there two intervals after its command began."""
    assert is_open(watched(slow_body, is_open))


def test_no_read_deadline_at_once_before_the_magic(watched: Watched):
    assert watched(no_magic).closed_at is None


@pytest.mark.improvement
@pytest.mark.parametrize("scenario", [no_magic_for_long, half_a_magic])
def test_without_a_magic_the_connection_ends_after_5_s(watched: Watched, scenario: Callable[..., Seen]):
    """Upstream waits for the four bytes without end."""

    def is_5_s(seen: Seen) -> bool:
        return seen.closed_at is not None and 4.5 <= seen.closed_at <= 6.5

    seen = watched(scenario, is_5_s)
    assert is_5_s(seen)
    assert seen.others == []


# -- write deadline ----------------------------------------------------------------------------------------------------


def test_client_that_does_not_read_is_closed(watched: Watched):
    seen = watched(not_reading, lambda seen: seen.closed_at is not None and seen.closed_at < 10)
    assert seen.closed_at is not None and seen.closed_at < 10


# -- handshake deadline ------------------------------------------------------------------------------------------------


def test_handshake_deadline(watched: Watched):
    def is_5_s(seen: Seen) -> bool:
        return seen.closed_at is not None and 4.5 <= seen.closed_at <= 7.5

    seen = watched(no_handshake, is_5_s)
    assert is_5_s(seen)
    assert all(frame.data.startswith(b"E_IDENTIFY_FAILED IDENTIFY failed ") for frame in seen.others)
    assert len(seen.others) == 1
