"""A message: answered once, on time, from whichever thread."""

from __future__ import annotations

import copy
import pickle
from datetime import timedelta
from typing import Any

import pytest

from flintmq.client.core.message import (
    Delivery,
    Discard,
    Message,
    Requeue,
    are_bare,
    finish_all,
    mark_finished,
    settle,
)
from flintmq.errors import BodyError, LocalProtocolError, OptionError, TouchFailed
from flintmq.wire.extended import Extension


class Link:
    """Records what a connection is asked to send."""

    address = "nsqd:4150"
    is_lost = False
    msg_timeout_s = 60.0
    max_msg_timeout_s = 100.0

    def __init__(self) -> None:
        self.sent: list[object] = []
        self.touched: dict[bytes, object] = {}

    def finish(self, message_id):
        self.sent.append("FIN")

    def finish_all(self, message_ids):
        self.sent.append(("FIN", len(message_ids)))

    def requeue(self, message_id, delay_ms):
        self.sent.append(("REQ", delay_ms))

    def touch(self, message_id, failed):
        self.sent.append("TOUCH")
        self.touched[message_id] = failed

    def forget_touched(self, message_id):
        self.touched.pop(message_id, None)

    def drop(self):
        self.sent.append("nothing")


class Owner:
    """A consumer's clock and policies."""

    now = 1000.0
    failures = 0

    def __init__(self, is_elsewhere: bool = False) -> None:
        self.calls: list = []
        self.is_elsewhere = is_elsewhere

    def time(self):
        return self.now

    def requeue_delay_s(self, attempts):
        return 90.0 * attempts

    def message_failed(self):
        self.failures += 1

    def call_in_loop(self, function):
        if self.is_elsewhere:
            self.calls.append(function)
        else:
            function()


@pytest.fixture
def link():
    return Link()


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def message(link, owner):
    return Message(Delivery(link, owner, owner.now, ()), (123, 2, b"0123456789abcdef", b"body"))


@pytest.fixture
def elsewhere(link):
    """A message in a thread that its consumer does not belong to."""
    owner: Any = Owner(is_elsewhere=True)
    return Message(Delivery(link, owner, owner.now, ()), (1, 1, b"i" * 16, b"x"))


def test_what_it_carries(message):
    assert (message.timestamp_ns, message.attempts, message.id) == (123, 2, b"0123456789abcdef")
    assert (message.body, message.nsqd) == (b"body", "nsqd:4150")
    assert "attempts=2" in repr(message)
    assert "open" in repr(message)


@pytest.mark.parametrize("handed", [pickle.dumps, copy.copy, copy.deepcopy])
def test_it_is_of_one_process(message, handed):
    with pytest.raises(TypeError, match=r"a Message cannot be pickled or copied: it is answered here.*its body"):
        handed(message)


def test_finish(message, link):
    message.finish()
    assert link.sent == ["FIN"]
    assert message.is_answered
    assert "finished" in repr(message)


@pytest.mark.parametrize(
    ("delay", "expected_ms"), [(None, 180_000), (0, 0), (1.5, 1500), (timedelta(minutes=1), 60_000)]
)
def test_requeue(message, link, owner, delay, expected_ms):
    message.requeue(delay)
    assert link.sent == [("REQ", expected_ms)]
    assert owner.failures == 0


def test_requeue_as_a_failure(message, owner):
    message.requeue(backoff=True)
    assert owner.failures == 1


def test_a_bad_delay_leaves_the_message_open(message, link):
    with pytest.raises(OptionError, match="delay"):
        message.requeue(-1)
    assert link.sent == []
    message.finish()


@pytest.mark.parametrize("first", ["finish", "requeue"])
@pytest.mark.parametrize("second", ["finish", "requeue", "touch"])
def test_a_second_answer_is_a_mistake(message, first, second):
    getattr(message, first)()
    with pytest.raises(LocalProtocolError, match=f"{first}e?d already"):
        getattr(message, second)()


# --- time ---


def test_time_left_and_touch(message, owner):
    assert message.time_left == 60.0
    owner.now += 50.0
    assert message.time_left == 10.0
    message.touch()
    assert message.time_left == 50.0, "not beyond max_msg_timeout since the delivery"
    owner.now += 50.5
    assert message.time_left == -0.5
    assert message.is_lost


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda message: message.finish(), ["FIN"]),
        (lambda message: message.requeue(5), ["nothing"]),
        (lambda message: message.touch(), []),
    ],
)
def test_after_its_time_only_a_finish_is_sent(message, link, owner, call, expected):
    """nsqd knows messages by id: the rest would hit a later delivery of the same message to us."""
    owner.now += 60.0
    call(message)
    assert link.sent == expected
    assert message.is_lost


def test_a_lost_connection_is_told(message, link):
    assert not message.is_lost
    link.is_lost = True
    assert message.is_lost
    message.finish()


def test_a_touch_that_came_too_late_is_told(message, link):
    message.touch()
    assert not message.is_lost
    link.touched[message.id](TouchFailed("E_TOUCH_FAILED", "TOUCH x failed ID not in flight", "nsqd:4150"))
    assert message.is_lost


@pytest.mark.parametrize("end", [Message.finish, Message.requeue, mark_finished])
def test_a_touched_message_is_forgotten_when_it_is_answered(message, link, end):
    message.touch()
    assert link.touched
    end(message)
    assert not link.touched


# --- async with, and what handlers raise ---


async def test_a_block_that_ends_finishes(message, link):
    async with message as same:
        assert same is message
    assert link.sent == ["FIN"]


async def test_a_block_that_fails_requeues_backs_off_and_goes_on(message, link, owner, caplog):
    async with message:
        raise ValueError("no such customer")
    assert link.sent == [("REQ", 180_000)]
    assert owner.failures == 1
    assert "no such customer" in caplog.text


async def test_requeue_and_discard_do_what_they_say(link, owner):
    for error, expected in [(Requeue(5), ("REQ", 5000)), (Requeue(), ("REQ", 90_000)), (Discard("old"), "FIN")]:
        async with Message(Delivery(link, owner, owner.now, ()), (1, 1, b"i" * 16, b"x")):
            raise error
        assert link.sent.pop() == expected
    assert owner.failures == 0


@pytest.mark.parametrize("delay", [-1, float("nan"), float("inf"), "soon", True])
async def test_a_wish_for_a_delay_that_is_none_is_a_failure(link, owner, message, delay):
    async with message:
        raise Requeue(delay)
    assert link.sent == [("REQ", 180_000)]
    assert owner.failures == 1


async def test_wishes_of_subclasses_that_say_nothing(link, owner):
    class Later(Requeue):
        def __init__(self, why: str) -> None:
            self.why = why

    class Old(Discard):
        def __init__(self, why: str) -> None:
            self.why = why

    for error, expected in [(Later("night"), ("REQ", 90_000)), (Old("age"), "FIN")]:
        async with Message(Delivery(link, owner, owner.now, ()), (1, 1, b"i" * 16, b"x")):
            raise error
        assert link.sent.pop() == expected
    assert owner.failures == 0


class Never(Requeue):
    delay = -1

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([Discard("old")], "FIN"),
        ([Discard("old"), ExceptionGroup("inner", [Discard("older")])], "FIN"),
        ([Requeue(5)], ("REQ", 5000)),
        ([Requeue()], ("REQ", 180_000)),
        ([Requeue(5), Requeue(), ExceptionGroup("inner", [Requeue(timedelta(seconds=7)), Requeue(6)])], ("REQ", 7000)),
        ([Discard("old"), Requeue(0)], ("REQ", 0)),
        ([Discard("old"), Requeue()], ("REQ", 180_000)),
    ],
)
async def test_a_group_of_nothing_but_wishes_is_one_of_them(link, owner, message, caplog, errors, expected):
    async with message:
        raise ExceptionGroup("of a TaskGroup", errors)
    assert link.sent == [expected]
    assert owner.failures == 0
    assert "failed" not in caplog.text


@pytest.mark.parametrize(
    "errors",
    [
        [Discard("old"), ValueError("no such customer")],
        [Requeue(5), ExceptionGroup("inner", [Discard("old"), ValueError("no such customer")])],
        [ExceptionGroup("inner", [BodyError("JSON", "no such customer")])],
        [Requeue(5), Never()],
    ],
)
async def test_a_group_with_anything_else_in_it_is_a_failure(link, owner, message, caplog, errors):
    async with message:
        raise ExceptionGroup("of a TaskGroup", errors)
    assert link.sent == [("REQ", 180_000)]
    assert owner.failures == 1
    assert "no such customer" in caplog.text or "delay=-1 is not allowed" in caplog.text


async def test_a_group_that_is_nested_deeply_is_understood(link, message):
    wish: Exception = Discard("old")
    for _ in range(3000):
        wish = ExceptionGroup("inner", [wish])
    settle(message, wish)
    assert link.sent == ["FIN"]


async def test_what_ends_the_worker_is_obeyed_in_a_group_too(link, owner, message):
    with pytest.raises(BaseExceptionGroup):
        async with message:
            raise BaseExceptionGroup("of a TaskGroup", [Discard("old"), KeyboardInterrupt()])
    assert link.sent == [("REQ", 0)]
    assert owner.failures == 0


async def test_what_is_no_exception_requeues_at_once_and_goes_its_way(message, link, owner):
    with pytest.raises(KeyboardInterrupt):
        async with message:
            raise KeyboardInterrupt
    assert link.sent == [("REQ", 0)]
    assert owner.failures == 0


async def test_an_answer_in_the_block_stands(message, link, owner):
    async with message:
        message.requeue(3)
        raise ValueError
    assert link.sent == [("REQ", 3000)]
    assert owner.failures == 1


def test_mark_finished(message, link):
    assert mark_finished(message)
    assert not mark_finished(message)
    assert link.sent == []


# --- threads ---


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda message: message.requeue(2), ("REQ", 2000)),
        (lambda message: message.touch(), "TOUCH"),
    ],
)
def test_calls_in_another_thread_travel_to_the_loop(link, elsewhere, call, expected):
    call(elsewhere)
    assert link.sent == []
    (function,) = elsewhere._delivery.owner.calls
    function()
    assert link.sent == [expected]


@pytest.mark.parametrize("finish", [Message.finish, lambda message: settle(message, None)])
def test_a_fin_is_gathered_in_any_thread(link, elsewhere, finish):
    finish(elsewhere)
    assert link.sent == ["FIN"] and elsewhere._delivery.owner.calls == []


def test_a_failure_in_another_thread_is_counted_in_the_loop(link, elsewhere):
    owner = elsewhere._delivery.owner
    with elsewhere:
        raise ValueError
    assert elsewhere.is_answered and (link.sent, owner.failures) == ([], 0)
    for call in owner.calls:
        call()
    assert (link.sent, owner.failures) == ([("REQ", 90_000)], 1)


@pytest.mark.parametrize("first", ["finish", "requeue"])
@pytest.mark.parametrize("second", ["finish", "requeue", "touch"])
def test_a_second_answer_is_a_mistake_in_a_thread_too(link, elsewhere, first, second):
    getattr(elsewhere, first)()
    assert elsewhere.is_answered
    with pytest.raises(LocalProtocolError, match=f"{first}e?d already"):
        getattr(elsewhere, second)()
    assert len(link.sent + elsewhere._delivery.owner.calls) == 1


def test_a_touch_that_comes_to_the_loop_behind_the_answer_is_not_sent(link, elsewhere):
    elsewhere.touch()
    elsewhere.finish()
    for call in elsewhere._delivery.owner.calls:
        call()
    assert link.sent == ["FIN"]


def test_a_bad_delay_is_told_in_the_thread(link, elsewhere):
    with pytest.raises(OptionError):
        elsewhere.requeue("soon")
    assert elsewhere._delivery.owner.calls == []


def test_several_are_finished_at_once_and_none_twice(link):
    other = Link()
    records = [(1, 1, b"%016x" % number, b"x") for number in range(4)]
    first = Delivery(link, Owner(), 1000.0, records)  # type: ignore[arg-type]
    second = Delivery(other, Owner(), 1000.0, records)  # type: ignore[arg-type]
    messages = [Message(first, records[0]), Message(second, records[1]), Message(first, records[2])]
    touched = Message(first, records[3])
    touched.touch()
    messages[0].requeue(0)
    finish_all([*messages, touched])
    assert link.sent == ["TOUCH", ("REQ", 0), ("FIN", 2)] and other.sent == [("FIN", 1)]
    assert not link.touched
    with pytest.raises(LocalProtocolError):
        messages[2].finish()
    assert are_bare(messages)
    second.extensions = {b"": Extension(0, b"", -1, 0)}
    assert not are_bare(messages)
