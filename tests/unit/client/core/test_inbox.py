"""The queue of received messages: shared by takers, message by message."""

from __future__ import annotations

import asyncio

from flintmq.client.aio.handlers import wait
from flintmq.client.core.attempts import Attempts
from flintmq.client.core.inbox import Inbox
from flintmq.client.core.message import Delivery, Message
from flintmq.client.core.pace import Pace
from flintmq.wire.client import Record

NOW = 1000.0


class Place:
    """Stands for a connection or a consumer where nothing is asked of them."""

    address = "nsqd:4150"
    is_lost = False
    msg_timeout_s = 60.0


def delivery(link, *bodies: bytes, attempts: int = 1, at: float = NOW) -> Delivery:
    records: list[Record] = [(1, attempts, b"%016x" % number, body) for number, body in enumerate(bodies)]
    return Delivery(link, Place(), at, records)  # type: ignore[arg-type]


def inbox_of(given_up: list[Message] | None = None, attempts_max: int = 5, expired: list[int] | None = None) -> Inbox:
    def note_expired(delivery: Delivery, count: int) -> None:
        assert len(delivery.records) == count
        assert expired is not None, "nothing should expire here"
        expired.append(count)

    return Inbox(Message, Attempts(attempts_max), Pace(), ([] if given_up is None else given_up).append, note_expired)


def take_all(inbox: Inbox, now: float = NOW) -> list[bytes]:
    bodies = []
    while (message := inbox.take(now)) is not None:
        bodies.append(message.body)
    return bodies


def test_messages_come_out_in_order():
    inbox = inbox_of()
    assert inbox.take(NOW) is None
    inbox.put(delivery(Place(), b"a", b"b"))
    inbox.put(delivery(Place(), b"c"))
    assert inbox.count == 3
    assert take_all(inbox) == [b"a", b"b", b"c"]
    assert inbox.count == 0


def test_nothing_comes_out_when_it_is_about_to_end():
    inbox = inbox_of()
    inbox.put(delivery(Place(), b"a", b"b", b"c"))
    assert inbox.take(NOW) is not None
    inbox.is_closing = True
    assert inbox.take(NOW) is None and inbox.take_many(2, NOW) == [] and inbox.count == 2
    (rest,) = inbox.remove()
    assert [record[3] for record in rest.records] == [b"b", b"c"]


async def test_who_waits_meanwhile_lets_the_loop_turn():
    inbox = inbox_of()
    inbox.put(delivery(Place(), b"a"))
    inbox.is_closing = True
    turned: list[int] = []
    asyncio.get_running_loop().call_soon(turned.append, 1)
    await wait(inbox)
    assert turned


def test_many_come_out_as_one_by_one():
    given_up: list[Message] = []
    expired: list[int] = []
    inbox = inbox_of(given_up, attempts_max=5, expired=expired)
    inbox.put(delivery(Place(), b"a", b"b", b"c"))
    inbox.put(delivery(Place(), b"bad", attempts=6))
    inbox.put(delivery(Place(), b"d", b"e", at=NOW + 30))
    assert [message.body for message in inbox.take_many(2, NOW)] == [b"a", b"b"]
    assert inbox.count == 4
    assert [message.body for message in inbox.take_many(2, NOW)] == [b"c", b"d"]
    assert [message.body for message in given_up] == [b"bad"]
    assert inbox.take_many(2, NOW + 90) == [] and expired == [1] and inbox.count == 0


def test_a_message_with_too_many_attempts_is_given_up():
    given_up: list[Message] = []
    inbox = inbox_of(given_up, attempts_max=5)
    inbox.put(delivery(Place(), b"bad", attempts=6))
    inbox.put(delivery(Place(), b"good", attempts=5))
    assert take_all(inbox) == [b"good"]
    assert [message.body for message in given_up] == [b"bad"]


def test_what_came_over_a_lost_connection_goes_with_it():
    lost, alive = Place(), Place()
    inbox = inbox_of()
    inbox.put(delivery(lost, b"taken", b"1", b"2"))
    inbox.put(delivery(alive, b"3"))
    inbox.put(delivery(lost, b"4"))
    first = inbox.take(NOW)
    assert first is not None
    assert first.body == b"taken"
    removed = inbox.remove(lost)  # type: ignore[arg-type]
    assert [[record[3] for record in each.records] for each in removed] == [[b"1", b"2"], [b"4"]]
    assert inbox.count == 1
    assert take_all(inbox) == [b"3"]


def test_removing_the_others_keeps_what_was_begun():
    lost, alive = Place(), Place()
    inbox = inbox_of()
    inbox.put(delivery(alive, b"1", b"2"))
    inbox.put(delivery(lost, b"3"))
    inbox.take(NOW)
    inbox.remove(lost)  # type: ignore[arg-type]
    assert take_all(inbox) == [b"2"]


def test_remove_everything():
    inbox = inbox_of()
    inbox.put(delivery(Place(), b"1", b"2"))
    inbox.put(delivery(Place(), b"3"))
    inbox.take(NOW)
    assert sum(len(each.records) for each in inbox.remove()) == 2
    assert (inbox.count, take_all(inbox)) == (0, [])


async def test_waiters_are_woken_in_their_order_and_only_as_many_as_there_are_messages():
    inbox = inbox_of()
    woken: list[int] = []

    async def wait_for_turn(number: int) -> None:
        await wait(inbox)
        woken.append(number)
        inbox.take(NOW)

    tasks = [asyncio.create_task(wait_for_turn(number)) for number in range(3)]
    await asyncio.sleep(0)
    inbox.put(delivery(Place(), b"a", b"b"))
    await asyncio.gather(tasks[0], tasks[1])
    await asyncio.sleep(0)
    assert woken == [0, 1]
    inbox.end()
    await tasks[2]


async def test_a_cancelled_waiter_passes_its_turn_on():
    inbox = inbox_of()
    first = asyncio.create_task(wait(inbox))
    second = asyncio.create_task(wait(inbox))
    await asyncio.sleep(0)
    inbox.put(delivery(Place(), b"a"))
    first.cancel()  # woken already, and cancelled before it could run
    await asyncio.wait_for(second, 5)
    assert first.cancelled() or first.done()


async def test_waiting_ends_at_once_when_there_is_something_or_the_end():
    inbox = inbox_of()
    inbox.put(delivery(Place(), b"a"))
    await asyncio.wait_for(wait(inbox), 5)
    inbox.take(NOW)
    inbox.end()
    assert inbox.is_ended
    await asyncio.wait_for(wait(inbox), 5)


# --- messages whose time is over ---


def test_what_waited_too_long_is_not_handed_out():
    expired: list[int] = []
    inbox = inbox_of(expired=expired)
    inbox.put(delivery(Place(), b"1", b"2", b"3"))
    inbox.put(delivery(Place(), b"4", at=NOW + 30))
    assert inbox.take(NOW + 59.9) is not None
    assert take_all(inbox, NOW + 60) == [b"4"]
    assert expired == [2]
    assert inbox.count == 0


def test_what_waited_too_long_makes_room_for_what_comes():
    expired: list[int] = []
    inbox = inbox_of(expired=expired)
    for minute in range(100):
        inbox.put(delivery(Place(), *[b"x"] * 10, at=NOW + 60 * minute))
        assert inbox.count == 10
    assert sum(expired) == 990


def test_what_is_put_back_comes_first_and_as_it_was():
    inbox = inbox_of()
    first, second = delivery(Place(), b"a", b"b", b"c"), delivery(Place(), b"d", b"e", at=NOW + 1)
    first.partition = 7
    inbox.put(first)
    inbox.put(second)
    taken = inbox.take_many(4, NOW)
    inbox.put_back(taken[1:])
    inbox.put_back([])
    assert inbox.count == 4
    again = inbox.take_many(4, NOW)
    assert [message.body for message in again] == [b"b", b"c", b"d", b"e"]
    assert [message.partition for message in again] == [7, 7, None, None]
    assert [message.id for message in again[:3]] == [message.id for message in taken[1:]]
    assert inbox.take(NOW) is None


def test_what_is_put_back_wakes_and_goes_with_its_connection():
    inbox, link = inbox_of(), Place()
    woken: list[bool] = []

    def wake() -> bool:
        woken.append(True)
        return True

    inbox.put(delivery(link, b"a", b"b"))
    taken = inbox.take_many(2, NOW)
    inbox.add_waiter(wake)
    inbox.put_back(taken)
    assert woken == [True]
    assert [len(each.records) for each in inbox.remove(link)] == [2]  # type: ignore[arg-type]
    assert inbox.count == 0
