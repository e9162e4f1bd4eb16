"""What nsqd tells of damage: what was promised and is lost, once, also over restarts."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

from flintmq.nsqd import damage
from flintmq.nsqd.damage import DamageRegister
from flintmq.storage import Corruption
from flintmq.testing import ManualClock

PATH = "topics/t-orders/p-0000/00000000000000000001.log"


def new_register() -> tuple[DamageRegister, list[Any]]:
    stored: list[Any] = []
    env, broker = SimpleNamespace(clock=ManualClock()), SimpleNamespace(remember=stored.append)
    return DamageRegister(cast(Any, env), cast(Any, broker)), stored


def gap(synced_before: int, reason: str = "CRC mismatch") -> Corruption:
    return Corruption(PATH, 2466, 2783, reason, 13, 21, "damage", synced_before)


def test_what_was_not_synced_is_no_damage_when_a_later_start_finds_it_again():
    first, stored = new_register()
    first.found(gap(13))
    assert first.reports == [] and first.health() == "OK"
    assert stored, "the next process is to know it"
    later, _ = new_register()
    later.restore([(number, at_ns, damage._encode(each)) for number, (at_ns, each) in first._reports.items()])
    later.found(gap(40, "set aside before"))  # what is behind it was synced meanwhile
    assert later.reports == [] and later.health() == "OK"


def test_what_was_synced_is_damage():
    register, _ = new_register()
    register.found(gap(21))
    assert [(each.first, each.end, each.lost) for _, each in register.reports] == [(13, 21, 8)]
    assert register.health().startswith("NOK - damage: 1 reports, 8 messages lost")


def test_known_gaps_do_not_count_where_the_list_is_full():
    register, _ = new_register()
    for number in range(damage.REPORTS_MAX):
        register.found(replace(gap(21), path=f"{number}.log"))
    register.found(gap(13))
    assert register.count == damage.REPORTS_MAX
