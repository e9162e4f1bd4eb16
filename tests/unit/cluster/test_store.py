"""What is made of any store: a swap whose answer is missing, and how long a lease may be relied on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from flintmq.cluster.store import (
    Delete,
    Fate,
    KeyValue,
    Lapses,
    LeaseNotFound,
    OutcomeUnknown,
    Put,
    Store,
    StoreUnavailable,
    Swapped,
    Tenure,
    Txn,
    TxnResult,
    swap,
)
from flintmq.cluster.store_state import StoreState

LOST = OutcomeUnknown("lost")
AWAY = StoreUnavailable("away")
Meanwhile = Callable[[StoreState], Any]


class Unreliable:
    """A store whose first answers go as ``steps`` say: carried out or not, and what others do before the next."""

    def __init__(self, *steps: tuple[bool, Exception | None, Meanwhile | None]) -> None:
        self.state = StoreState()
        self.steps = list(steps)
        self.txn_count = 0

    async def txn(self, txn: Txn) -> TxnResult:
        self.txn_count += 1
        is_done, error, meanwhile = self.steps.pop(0) if self.steps else (True, None, None)
        result = self.state.apply(txn) if is_done else None
        if meanwhile is not None:
            meanwhile(self.state)
        if error is not None:
            raise error
        assert result is not None
        return result

    async def swap(self, key: str, before: KeyValue | None, value: bytes | None, **options: Any) -> Swapped:
        return await swap(cast(Store, self), key, before, value, **options)  # it asks for nothing else


def put(key: str, value: bytes) -> Meanwhile:
    return lambda state: state.apply(Txn((), (Put(key, value),)))


def delete(key: str) -> Meanwhile:
    return lambda state: state.apply(Txn((), (Delete(key),)))


def both(*steps: Meanwhile) -> Meanwhile:
    return lambda state: [step(state) for step in steps]


OURS, THEIRS = b"ours", b"theirs"


@pytest.mark.parametrize(
    ("is_there", "value", "is_done", "meanwhile", "fate", "now"),
    [
        (True, OURS, True, None, Fate.APPLIED, OURS),
        (True, OURS, False, None, Fate.APPLIED, OURS),  # by the second try
        (True, OURS, False, put("k", THEIRS), Fate.REFUSED, THEIRS),
        (True, OURS, True, put("k", THEIRS), Fate.SUPERSEDED, THEIRS),
        (True, OURS, True, delete("k"), Fate.SUPERSEDED, None),
        (True, OURS, False, delete("k"), Fate.SUPERSEDED, None),
        (True, OURS, False, both(delete("k"), put("k", OURS)), Fate.SUPERSEDED, OURS),  # not of this key's life
        (False, OURS, True, None, Fate.APPLIED, OURS),
        (False, OURS, False, None, Fate.APPLIED, OURS),
        (False, OURS, False, put("k", THEIRS), Fate.SUPERSEDED, THEIRS),  # ours may have come, gone, and then theirs
        (False, OURS, True, both(delete("k"), put("k", THEIRS)), Fate.SUPERSEDED, THEIRS),
        (True, None, True, None, Fate.APPLIED, None),
        (True, None, False, None, Fate.APPLIED, None),
        (True, None, False, put("k", THEIRS), Fate.REFUSED, THEIRS),
        (True, None, True, put("k", THEIRS), Fate.SUPERSEDED, THEIRS),
    ],
)
async def test_what_became_of_a_change_without_an_answer(is_there, value, is_done, meanwhile, fate, now):
    store = Unreliable((is_done, LOST, meanwhile), (False, AWAY, None))
    if is_there:
        put("k", b"before")(store.state)
    swapped = await store.swap("k", store.state.get("k"), value)
    assert swapped.fate is fate
    assert swapped.now == store.state.get("k")
    assert (None if swapped.now is None else swapped.now.value) == now
    assert store.txn_count == 3, "it is sent once more after the lost answer, and after nobody was there"


async def test_a_swap_with_answers():
    store = Unreliable()
    one = await store.swap("k", None, b"1")
    assert one.fate is Fate.APPLIED and one.now == KeyValue("k", b"1", 2, 2, 1)
    assert (await store.swap("k", None, b"2")).fate is Fate.REFUSED
    assert (await store.swap("k", one.now, None)).fate is Fate.APPLIED


async def test_a_swap_ends_when_nothing_is_answered():
    store = Unreliable(*[(False, LOST, None)] * 9)
    with pytest.raises(OutcomeUnknown):
        await store.swap("k", None, b"1", tries=3)
    assert store.txn_count == 3
    with pytest.raises(StoreUnavailable):
        await Unreliable((False, AWAY, None)).swap("k", None, b"1")
    with pytest.raises(LeaseNotFound):
        await Unreliable().swap("k", None, b"1", lease_id=5)


def test_a_tenure_counts_from_when_it_was_sent():
    tenure = Tenure(ttl_ns=3000, sent_at_ns=100, margin_ns=500)
    assert tenure.is_held(2599) and not tenure.is_held(2600)
    tenure.renewed(1000, 3000)
    assert tenure.until_ns == 3500
    tenure.renewed(900, 3000)
    assert tenure.until_ns == 3500, "an answer that was overtaken"
    tenure.renewed(1100, 2000)
    assert tenure.until_ns == 3500, "a shorter lifetime takes nothing back that was promised"


# -- what is told of a store that is not followed ----------------------------------------------------------------------


def test_of_a_store_that_ends_every_watch_is_told_once() -> None:
    lapses, second = Lapses(lasting_ns=10), 1
    assert lapses.is_news(AWAY, 0)
    for now_ns in range(0, 100, second + 1):  # it is read, and its watch ends at once
        lapses.followed(now_ns)
        assert not lapses.is_news(AWAY, now_ns + second)
    lapses.followed(100)
    lapses.followed(109)
    assert lapses.is_news(AWAY, 110)
    assert not lapses.is_news(AWAY, 500)  # it was not heard of meanwhile


def test_another_failure_of_a_store_is_told_and_many_are_not() -> None:
    lapses = Lapses()
    assert lapses.is_news(AWAY, 0)
    assert lapses.is_news(LOST, 0)
    assert not lapses.is_news(AWAY, 0)  # two endpoints of which each says its own by turns
    told = [lapses.is_news(StoreUnavailable(f"away for {ms} ms"), 0) for ms in range(100)]
    assert sum(told) == Lapses.TOLD_MAX - 2
