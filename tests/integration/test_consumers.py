"""What a consumer decides, on asyncio and on blocking sockets: the same cases with the same scripted nsqd.

The nsqd is :class:`tests.unit.client.fake_nsqd.FakeNsqd` on an event loop in a thread of its own. The cases in virtual
time are in ``tests/unit/client``; these see that both shells do what the core decides.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import (
    FLAVOURS,
    Flavour,
    address_of,
    connections_of,
    opened,
    set_max_in_flight,
    stats_of,
)
from tests.unit.client.fake_nsqd import FakeNsqd

import flintmq.sync
from flintmq import Consumer, Discard, FinFailed, Requeue
from flintmq.errors import ConnectionFailed, LocalProtocolError, NsqdError, OptionError
from flintmq.message import MESSAGE_HEADER

Found = TypeVar("Found")


class Server:
    """Scripted nsqds on a loop of their own; everything of theirs is touched there."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.fakes: list[FakeNsqd] = []
        self._thread = threading.Thread(target=self.loop.run_forever, name="fake nsqd", daemon=True)
        self._thread.start()

    def start(self) -> tuple[str, FakeNsqd]:
        """Start one more; returns its address."""
        fake = FakeNsqd(ledger=self.fakes[0].ledger if self.fakes else None)
        self.fakes.append(fake)
        return asyncio.run_coroutine_threadsafe(fake.listen(), self.loop).result(PATIENCE_S), fake

    def call(self, function: Callable[[], Found]) -> Found:
        """Call a function on the loop."""

        async def run() -> Found:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(PATIENCE_S)

    def close(self) -> None:
        for fake in self.fakes:
            self.call(fake.stop)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(PATIENCE_S)
        self.loop.close()


class One:
    """One scripted nsqd and the flavour of the client."""

    def __init__(self, server: Server, flavour: Flavour) -> None:
        self.server = server
        self.flavour = flavour
        self.address, self.fake = server.start()

    def consumer(self, handler: Callable[[Any], object], **options: Any) -> Any:
        options.setdefault("nsqd_tcp_addresses", self.address)
        return self.flavour.consumer("t", "c", handler, **options)

    def add(self, *bodies: bytes, attempts: int = 0) -> None:
        self.server.call(lambda: self.fake.add(*bodies, attempts=attempts))


@pytest.fixture(params=FLAVOURS)
def one(request: pytest.FixtureRequest) -> Iterator[One]:
    server = Server()
    try:
        with opened(request.param) as flavour:
            yield One(server, flavour)
            assert [violation for fake in server.fakes for violation in fake.violations] == []
    finally:
        server.close()


def test_rdy_begins_at_one_and_goes_to_its_share_with_the_first_message(one):
    with one.consumer(lambda message: None, max_in_flight=100) as consumer:
        wait_until(lambda: one.fake.rdy_history)
        assert one.fake.rdy_history == [1]
        one.add(*[b"x"] * 500)
        wait_until(lambda: len(one.fake.finished) == 500)
        assert one.fake.rdy_history[1] == 100
        assert one.fake.ledger.in_flight_max <= 100
        set_max_in_flight(consumer, 7)
        wait_until(lambda: one.fake.rdy_history[-1] == 7)


def test_max_in_flight_is_shared_by_two_nsqd(one):
    address, other = one.server.start()
    held: list[Any] = []

    def hold(message: Any) -> None:
        held.append(message)
        is_over.wait(PATIENCE_S)

    is_over = threading.Event()
    options = {"nsqd_tcp_addresses": [one.address, address], "may_block": True, "max_in_flight": 4}
    with one.consumer(hold, **options) as consumer:
        for fake in (one.fake, other):
            one.server.call(lambda fake=fake: fake.add(*[b"x"] * 20))
        wait_until(lambda: stats_of(consumer).in_flight == 4)
        is_over.set()
        wait_until(lambda: len(one.fake.finished) == len(other.finished) == 20)
    assert one.fake.ledger.in_flight_max == 4


def test_how_a_handler_ends_decides(one):
    def handler(message: Any) -> None:
        if message.body == b"requeue":
            raise Requeue(7)
        if message.body == b"discard":
            raise Discard("no use")
        if message.body == b"fail":
            raise ValueError("broken")
        if message.body == b"own":
            message.requeue(3)

    one.add(b"ok", b"requeue", b"discard", b"own", b"fail")
    with one.consumer(handler, max_in_flight=10, requeue_delay=2) as consumer:
        wait_until(lambda: len(one.fake.finished) + len(one.fake.requeued) == 5)
        assert one.fake.finished == [b"ok", b"discard"]
        assert sorted(one.fake.requeued) == [(b"fail", 2000), (b"own", 3000), (b"requeue", 7000)]
        assert stats_of(consumer).failed == 1


@pytest.mark.parametrize("may_block", [False, True])
@pytest.mark.parametrize("delay", [-0.001, float("nan"), "soon"])
def test_a_delay_that_is_none_is_a_failure_like_any_other(one, may_block, delay):
    class Later(Requeue):
        def __init__(self) -> None:
            self.delay = delay

    def handler(message: Any) -> None:
        if message.body == b"raised":
            raise Requeue(delay)
        if message.body == b"made":
            raise Later

    one.add(b"raised", b"made", b"good")
    options = {"requeue_delay": 2, "max_backoff": 0, "may_block": may_block}
    with one.consumer(handler, max_in_flight=10, **options) as consumer:
        wait_until(lambda: one.fake.finished == [b"good"] and len(one.fake.requeued) == 2)
        assert sorted(one.fake.requeued) == [(b"made", 2000), (b"raised", 2000)]
        assert stats_of(consumer).failed == 2
        assert one.fake.session_count == 1


def test_a_failure_backs_off_probes_and_comes_back(one):
    is_well = threading.Event()

    def handler(message: Any) -> None:
        if not is_well.is_set():
            raise ValueError("broken")

    one.add(b"first")
    with one.consumer(handler, max_in_flight=50, requeue_delay=0, backoff=0.2) as consumer:
        wait_until(lambda: stats_of(consumer).failed)
        is_well.set()
        one.add(*[b"x"] * 20)
        wait_until(lambda: len(one.fake.finished) == 21)
        wait_until(lambda: stats_of(consumer).backoff == "normal")
        history = one.fake.rdy_history
        assert 0 in history
        assert history[history.index(0) + 1] == 1, "one message at a time probes"
        assert history[-1] == 50


def test_too_many_attempts_go_to_the_callback_and_end(one):
    handled: list[bytes] = []
    given_up: list[bytes] = []
    one.add(b"old", attempts=5)
    one.add(b"fresh", attempts=4)
    options = {"max_attempts": 5, "on_giving_up": lambda message: given_up.append(message.body)}
    with one.consumer(lambda message: handled.append(message.body), **options) as consumer:
        wait_until(lambda: len(one.fake.finished) == 2)
        assert (handled, given_up) == ([b"fresh"], [b"old"])
        assert stats_of(consumer).given_up == 1


def test_a_callback_that_fails_gives_the_message_back(one):
    def fails(message: Any) -> None:
        raise ValueError("no heir")

    one.add(b"old", attempts=5)
    with one.consumer(lambda message: None, on_giving_up=fails):
        wait_until(lambda: one.fake.requeued)
    assert one.fake.finished == []


@pytest.mark.parametrize("attempts", [0, 50])
def test_a_body_that_cannot_be_read_is_never_finished_unhandled(one, attempts):
    one.add(b"no json", attempts=attempts)
    with one.consumer(lambda message: message.value, type=dict, requeue_delay=1):
        wait_until(lambda: one.fake.requeued)
    assert one.fake.finished == []


def test_messages_of_a_lost_connection_come_again(one):
    seen: list[bytes] = []
    with one.consumer(lambda message: seen.append(message.body)) as consumer:
        one.add(b"1")
        wait_until(lambda: one.fake.finished == [b"1"])
        one.server.call(one.fake.drop_all)
        one.add(b"2")
        wait_until(lambda: one.fake.finished == [b"1", b"2"])
        assert connections_of(consumer) == (one.address,)
        assert one.fake.session_count == 2


def test_a_refusal_that_can_pass_is_tried_again(one):
    one.fake.refuse_sub = "E_SUB_FAILED not now"
    errors: list[Exception] = []
    with one.consumer(lambda message: None, on_error=errors.append):
        one.fake.refuse_sub = ""
        one.add(b"x")
        wait_until(lambda: one.fake.finished)
    assert [type(error) for error in errors[:1]] == [NsqdError]


def test_a_refusal_for_good_ends_the_start(one):
    one.fake.refuse_sub = "E_BAD_TOPIC SUB topic name is not valid"
    with pytest.raises(NsqdError, match="E_BAD_TOPIC"), one.consumer(lambda message: None):
        pass
    wait_until(lambda: not one.fake.sessions)


def test_answers_that_come_too_late_are_told(one):
    errors: list[Exception] = []
    one.fake.late = "yes"
    one.add(b"x")
    with one.consumer(lambda message: None, on_error=errors.append) as consumer:
        wait_until(lambda: errors)
        assert stats_of(consumer).late == 1
        assert connections_of(consumer) == (one.address,)
    assert isinstance(errors[0], FinFailed)


@pytest.mark.parametrize("when", ["with the answer to SUB", "later"])
def test_an_nsqd_that_breaks_the_protocol_is_told(one, when):
    errors: list[Exception] = []
    frame = b"\0\0\0\4\0\0\0\x09"  # of a type that there is not
    if when != "later":
        one.fake.after_sub = frame
    with one.consumer(lambda message: None, on_error=errors.append) as consumer:
        one.server.call(lambda: one.fake.deliver_unasked(frame))
        wait_until(lambda: errors)
        one.fake.after_sub = b""
        wait_until(lambda: connections_of(consumer) == (one.address,))
    assert isinstance(errors[0], ConnectionFailed)
    assert one.address in str(errors[0]) and "not an nsqd?" in str(errors[0])


def test_an_nsqd_that_sends_what_nobody_asked_for_is_left(one):
    frame = MESSAGE_HEADER.pack(31, 2, 1, 1, b"f" * 16) + b"x"
    is_over = threading.Event()
    try:
        with one.consumer(lambda message: is_over.wait(PATIENCE_S), max_in_flight=1, may_block=True) as consumer:
            one.server.call(lambda: one.fake.deliver_unasked(frame * 5000))
            wait_until(lambda: one.fake.session_count == 2)
            assert stats_of(consumer).received <= 5000
            is_over.set()
    finally:
        is_over.set()


def test_an_nsqd_that_goes_silent_is_left_after_two_heartbeats(one):
    with one.consumer(lambda message: None, heartbeat_interval=1):
        wait_until(lambda: one.fake.session_count == 1)
        one.fake.is_mute = True
        wait_until(lambda: one.fake.session_count == 2)
        one.fake.is_mute = False


def test_pausing(one):
    with one.consumer(lambda message: None) as consumer:
        one.add(b"1")
        wait_until(lambda: one.fake.finished == [b"1"])
        consumer.call(lambda it: it.pause())
        wait_until(lambda: one.fake.rdy_history[-1] == 0)
        one.add(b"2")
        consumer.call(lambda it: it.unpause())
        wait_until(lambda: one.fake.finished == [b"1", b"2"])
        assert 0 in one.fake.rdy_history


def test_leaving_gives_back_what_was_not_handled(one):
    is_over = threading.Event()
    one.add(*[b"x"] * 20)
    with one.consumer(lambda message: is_over.wait(PATIENCE_S), max_in_flight=20, may_block=True) as consumer:
        wait_until(lambda: stats_of(consumer).received == 20)
        consumer.call(lambda it: it.stop())
        wait_until(lambda: one.fake.requeued)
        is_over.set()
    assert len(one.fake.finished) + len(one.fake.requeued) == 20
    assert not one.fake.sessions or not one.fake.sessions[0].in_flight


@pytest.mark.parametrize("name", FLAVOURS)
def test_two_nsqd_and_one_of_them_dies(daemons, name):
    first, second = daemons.nsqd("--durability=os"), daemons.nsqd("--durability=os")
    addresses = [address_of(first), address_of(second)]
    seen: dict[bytes, None] = {}
    with (
        opened(name) as flavour,
        flavour.producer(addresses) as producer,
        flavour.consumer("t", "c", lambda m: seen.update({m.body: None}), nsqd_tcp_addresses=addresses) as consumer,
    ):
        assert len(connections_of(consumer)) == 2
        for number in range(100):
            producer.submit("t", b"%d" % number).result(PATIENCE_S)
        assert first.stats("t")["message_count"] == second.stats("t")["message_count"] == 50
        first.kill()
        for number in range(100, 200):
            producer.submit("t", b"%d" % number).result(PATIENCE_S)
        first.start()
        wait_until(lambda: len(connections_of(consumer)) == 2)
        wait_until(lambda: len(seen) == 200)


# --- what both are told ---

KINDS = pytest.mark.parametrize("kind", [Consumer, flintmq.sync.Consumer], ids=FLAVOURS)


@KINDS
@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "nsqd_tcp_addresses"),
        ({"nsqd_tcp_addresses": "a:1", "nsqlookupd_http_addresses": "l:1"}, "not both"),
        ({"nsqd_tcp_addresses": "a:1", "max_in_flight": 0}, "max_in_flight"),
        ({"nsqd_tcp_addresses": "a:1", "max_attempts": -1}, "max_attempts"),
        ({"nsqd_tcp_addresses": "a:1", "requeue_delay": "1m"}, "requeue_delay"),
        ({"nsqd_tcp_addresses": "a:1", "lookup_jitter": 2}, "lookup_jitter"),
        ({"nsqd_tcp_addresses": "a:1", "msg_timeout": 0.1}, "msg_timeout"),
        ({"nsqd_tcp_addresses": "a:1", "desired_tag": "a b"}, "desired_tag"),
        ({"nsqd_tcp_addresses": "a:1", "ordered": True}, "nsqlookupd_http_addresses"),
        ({"nsqlookupd_http_addresses": "l:1", "ordered": True, "sample_rate": 5}, "sample_rate"),
        ({"nsqlookupd_http_addresses": "l:1", "ordered": True, "dead_letter": "d"}, "dead_letter"),
        ({"nsqd_tcp_addresses": "a:1", "dead_letter": "t"}, "another topic"),
    ],
)
def test_wrong_options(kind, options, named):
    with pytest.raises(OptionError, match=named):
        kind("t", "c", **options)


@KINDS
@pytest.mark.parametrize(("topic", "channel"), [("", "c"), ("a b", "c"), ("t", ""), ("t", "x" * 65)])
def test_wrong_names(kind, topic, channel):
    with pytest.raises(LocalProtocolError, match="is not valid"):
        kind(topic, channel, nsqd_tcp_addresses="a:1")
