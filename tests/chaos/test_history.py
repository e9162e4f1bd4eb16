"""The checker finds each kind of violation, and nothing in a history without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from tests.chaos.history import Delivered, Finished, History, Outcome, Published, check

_T, _CH = "t", "ch"


def _history() -> History:
    """One writer, three messages, one channel in order and one that is not: everything as it should be."""
    history = History(channels={(_T, _CH), (_T, "any")}, ordered={(_T, _CH)})
    for number in range(3):
        at = 10 * number
        history.published.append(Published("w", _T, 0, f"w:{number}", at, at + 1, Outcome.OK))
        history.log.append(Delivered(1000, _T, "replay", "r", 0, number, 1, f"w:{number}"))
        for channel in (_CH, "any"):
            history.consumed.append(Delivered(at + 2, _T, channel, "c1", 0, number, 1, f"w:{number}"))
            history.consumed.append(Finished(at + 3, _T, channel, "c1", 0, number))
    return history


def _replace_published(history: History, index: int, **fields: object) -> None:
    history.published[index] = history.published[index]._replace(**fields)  # type: ignore[arg-type]


def _without(history: History, channel: str, number: int) -> None:
    history.consumed = [e for e in history.consumed if not (e.channel == channel and e.offset == number)]


def _lose(history: History) -> None:
    del history.log[1]
    history.consumed = [each for each in history.consumed if each.offset != 1]


def _swap_log(history: History) -> None:
    first, second, *rest = history.log
    history.log = [second._replace(offset=0), first._replace(offset=1), *rest]
    history.consumed = [e for e in history.consumed if e.offset == 2]


def _two_at_once(history: History) -> None:
    history.consumed = [e for e in history.consumed if not (isinstance(e, Finished) and e.offset == 1)]


def _behind(history: History) -> None:
    """Skipped at first, and delivered when its successor had been."""
    late = [e._replace(time_ns=e.time_ns + 100) for e in history.consumed if e.channel == _CH and e.offset == 1]
    _without(history, _CH, 1)
    history.consumed += late


def _ghost(history: History) -> None:
    _replace_published(history, 2, outcome=Outcome.REFUSED)
    del history.log[2]


def _strange(history: History) -> None:
    history.consumed.append(Delivered(50, _T, "any", "c1", 0, 9, 1, "nobody's"))


BROKEN: dict[str, Callable[[History], None]] = {
    "acknowledged and lost": _lose,
    "acknowledged and never delivered": lambda h: _without(h, "any", 1),
    "delivered and never published": _strange,
    "delivered although it was refused": _ghost,
    "stored although it was refused": lambda h: _replace_published(h, 1, outcome=Outcome.REFUSED),
    "stored and never published": lambda h: h.log.append(h.log[-1]._replace(offset=7, body="nobody's")),
    "stored twice": lambda h: h.log.append(h.log[-1]._replace(offset=7)),
    "stored in a partition that was not named": lambda h: _replace_published(h, 0, partition=1),
    "stored before what its writer published earlier": _swap_log,
    "the log's offsets do not grow": lambda h: h.log.reverse(),
    "delivered before the one in front was finished": _two_at_once,
    "offset went back on a first delivery": _behind,
    "one offset named two messages": lambda h: h.consumed.append(
        Delivered(40, _T, "any", "c2", 0, 1, 1, "w:2"),
    ),
}


def test_a_history_as_it_should_be_has_nothing_wrong():
    verdict = check(_history())
    assert verdict.is_ok, str(verdict)
    assert verdict.counts == {
        "published ok": 3,
        "published refused": 0,
        "published unknown": 0,
        "delivered": 6,
        "in the logs": 3,
    }


@pytest.mark.parametrize("problem", BROKEN)
def test_each_violation_is_found(problem: str):
    history = _history()
    BROKEN[problem](history)
    verdict = check(history)
    assert problem in {violation.problem for violation in verdict.violations}, str(verdict)
    assert problem in str(verdict)


def test_what_nobody_can_know_is_no_violation():
    history = _history()
    for number, stored in ((3, True), (4, False)):
        history.published.append(Published("w", _T, 0, f"w:{number}", 40, 60, Outcome.UNKNOWN))
        if stored:
            history.log.append(Delivered(1000, _T, "replay", "r", 0, number, 1, f"w:{number}"))
    assert check(history).is_ok


def test_duplicates_are_counted_and_no_violation():
    history = _history()
    again = history.consumed[0]
    assert isinstance(again, Delivered)
    history.consumed.insert(1, replace_connection(again))
    history.consumed.append(Delivered(70, _T, "any", "c3", 0, 0, 2, "w:0"))
    verdict = check(history)
    assert verdict.is_ok, str(verdict)
    assert verdict.duplicates == {(_T, _CH): 1, (_T, "any"): 1}


def replace_connection(delivered: Delivered) -> Delivered:
    """The same once more, on another connection."""
    return delivered._replace(connection="c2", attempts=delivered.attempts + 1)


def test_a_writer_that_repeats_may_have_a_message_stored_twice():
    history = replace(_history(), repeating={"w"})
    history.log.append(history.log[-1]._replace(offset=7))
    verdict = check(history)
    assert verdict.is_ok, str(verdict)
    assert verdict.stored_twice == 1


def test_a_channel_that_came_late_need_not_have_what_was_published_before():
    history = _history()
    history.consumed = [each for each in history.consumed if each.channel == _CH or each.offset != 0]
    history.channels = {(_T, _CH)}
    assert check(history).is_ok
