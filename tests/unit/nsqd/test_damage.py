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


def test_what_a_copy_gets_from_another_one_is_not_lost():
    register, _ = new_register()
    register.found(replace(gap(21), is_elsewhere=True))
    assert [(each.first, each.end, each.lost, each.elsewhere) for _, each in register.reports] == [(13, 21, 0, 8)]
    assert register.lost == 0 and register.health().startswith("NOK - damage: 1 reports, 0 messages lost")
    register.settled(PATH.rpartition("/")[0], is_lost=False)
    assert register.lost == 0 and register.count == 1, "it is told of until somebody has acknowledged it"


def test_what_came_from_another_copy_is_told_of_again_when_it_is_damaged_again():
    register, _ = new_register()
    found = replace(gap(21), is_elsewhere=True)
    register.found(found)
    register.found(found)
    register.acknowledge()
    assert register.count == 0
    register.settled(PATH.rpartition("/")[0], is_lost=False)
    later, _ = new_register()
    later.restore([(number, at_ns, damage._encode(each)) for number, (at_ns, each) in register._reports.items()])
    later.found(found)
    assert later.count == 1
    later.settled(PATH.rpartition("/")[0], is_lost=True)
    assert [each.lost for _, each in later.reports] == [8], "what came before is there"


def test_what_no_other_copy_has_is_lost_and_told_of():
    register, stored = new_register()
    register.found(replace(gap(21), is_elsewhere=True))
    register.found(replace(gap(13), path="other/1.log", is_elsewhere=True))  # nobody was promised that
    register.acknowledge()
    for directory in (PATH.rpartition("/")[0], "other"):
        register.settled(directory, is_lost=True)
    assert [(each.path, each.lost) for _, each in register.reports] == [(PATH, 8)]
    later, _ = new_register()
    later.restore([(number, at_ns, damage._encode(each)) for number, (at_ns, each) in register._reports.items()])
    assert later.lost == register.lost == 8 and len(stored) == 4
