"""The audit log: what strangers can have written into it, and what they cannot displace."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from flintmq.env import Env
from flintmq.nsqadmin import audit as audits
from flintmq.nsqadmin.access import Visitor
from flintmq.nsqadmin.audit import (
    ADDRESS_COUNT_MAX,
    KEPT_MAX,
    LINES_AT_ONCE,
    LINES_PER_MINUTE,
    STRANGERS_KEPT_MAX,
    Audit,
)
from flintmq.nsqadmin.views import AuditRow
from flintmq.options import HOUR, MINUTE
from flintmq.testing.clock import ManualClock

ANN = Visitor("ann", "admin", "password", "", "10.0.0.1:5000", sees_bodies=True)
STRANGER = Visitor("", "none", "open", "", "10.0.0.9:5000", sees_bodies=False, is_known=False)


class Log:
    """An audit log in a file, and a clock that stands still."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "audit.log"
        self.clock = ManualClock()
        self.audit = self.opened()

    def opened(self) -> Audit:
        return Audit(str(self.path), Env(clock=self.clock))

    def lines(self) -> list[AuditRow]:
        return [msgspec.json.decode(line, type=AuditRow) for line in self.path.read_bytes().splitlines()]

    def change(self, subject: str, visitor: Visitor = ANN) -> None:
        self.audit.note(visitor, "pause_topic", subject, "done")

    def refuse(self, count: int = 1, visitor: Visitor = STRANGER) -> None:
        for _ in range(count):
            self.audit.note(visitor, "log_in_failed", "x", "refused", ["too many log-ins"], who="x")


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path)


def test_refusals_of_strangers_have_a_few_lines_and_then_one_with_their_number(log: Log):
    log.refuse(500)
    assert len(log.lines()) == LINES_AT_ONCE
    log.clock.advance(MINUTE)
    log.change("t")
    *_, more, last = log.lines()
    assert len(log.lines()) == LINES_AT_ONCE + 2 and last.subject == "t"
    assert (more.action, more.subject, more.outcome) == ("more_refusals", str(500 - LINES_AT_ONCE), "refused")
    assert (more.who, more.role, more.address, more.is_known) == ("", "none", STRANGER.address, False)


def test_whoever_goes_on_has_a_few_lines_a_minute(log: Log):
    log.refuse(500)
    for minute in range(1, 5):
        before = len(log.lines())
        log.clock.advance(MINUTE)
        log.refuse(500)
        assert len(log.lines()) - before == LINES_PER_MINUTE + 1, minute
    log.clock.advance(HOUR)
    log.refuse(500)
    assert [row.action for row in log.lines()[-LINES_AT_ONCE - 1 :]] == ["more_refusals"] + ["log_in_failed"] * 20


def test_a_guesser_hides_nobody_elses_refusals(log: Log):
    log.refuse(500)
    for address in ("10.0.0.8:1", "[2001:db8::1]:1"):
        log.refuse(visitor=replace(STRANGER, address=address))
        assert log.lines()[-1].address == address
    log.refuse(visitor=replace(STRANGER, forwarded_for="203.0.113.7"))  # by the same proxy as the guesser
    assert log.lines()[-1].forwarded_for == "203.0.113.7"
    before = len(log.lines())
    for host in range(1, 1001):  # of one network, which counts as one address
        log.refuse(visitor=replace(STRANGER, address=f"[2001:db8::{host:x}]:1"))
    assert len(log.lines()) - before < LINES_AT_ONCE


def test_many_addresses_that_are_refused_have_no_more_lines_than_a_bound(log: Log):
    for host in range(20_000):
        log.refuse(visitor=replace(STRANGER, address=f"10.1.{host // 250}.{host % 250}:1"))
    assert len(log.lines()) == ADDRESS_COUNT_MAX + LINES_AT_ONCE
    log.clock.advance(HOUR)
    log.change("t")  # and they are forgotten
    log.refuse(visitor=replace(STRANGER, address="10.2.0.1:1"))
    assert log.lines()[-1].address == "10.2.0.1:1"


def test_every_refusal_of_somebody_known_has_a_line(log: Log):
    for _ in range(100):
        log.audit.note(replace(ANN, role="read"), "pause_topic", "t", "refused", ["FORBIDDEN"])
    assert len(log.lines()) == 100
    log.refuse(100, visitor=ANN)  # who is logged in, and tries others' passwords
    assert len(log.lines()) == 100 + LINES_AT_ONCE


def test_strangers_displace_no_change_from_the_page_or_over_a_restart(log: Log, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(audits, "_PIECE_BYTES", 4096)  # lines lie across several
    for number in range(5):
        log.change(f"t{number}")
    for minute in range(3 * KEPT_MAX):
        log.clock.advance(MINUTE)
        log.refuse(5)
        if minute == KEPT_MAX:
            log.change("t5")
    log.audit.close()
    for audit in (log.audit, log.opened()):
        rows = audit.latest(KEPT_MAX)
        assert [row.subject for row in rows if row.outcome == "done"] == ["t5", "t4", "t3", "t2", "t1", "t0"]
        assert len(rows) == STRANGERS_KEPT_MAX + 6
        assert [row.at_s for row in rows] == sorted((row.at_s for row in rows), reverse=True)
        assert [row.subject for row in audit.latest(2, "pause")] == ["t5", "t4"]
        few = audit.latest(3)
        assert [row.outcome for row in few] == ["refused"] * 3 + ["done"] * 3


def test_of_a_long_file_the_last_rows_are_read(log: Log, monkeypatch: pytest.MonkeyPatch):
    for number in range(KEPT_MAX + 10):
        log.change(f"t{number}")
    assert [row.subject for row in log.opened().latest(KEPT_MAX)] == [f"t{n}" for n in range(KEPT_MAX + 9, 9, -1)]
    monkeypatch.setattr(audits, "READ_BYTES_MAX", 1000)
    assert 0 < len(log.opened().latest(KEPT_MAX)) < 10
    with log.path.open("ab") as file:
        file.write(b"\0" * 10_000)
    assert log.opened().latest(KEPT_MAX) == []


def test_lines_from_before_there_was_an_address_behind_a_proxy_are_read(log: Log):
    log.path.write_text(
        '{"at_s":1.5,"who":"ann","role":"admin","how":"token","address":"10.0.0.1:5","action":"pause_topic",'
        '"subject":"t","outcome":"done","failures":[]}\n'
    )
    (row,) = log.opened().latest(10)
    assert (row.who, row.is_known, row.forwarded_for) == ("ann", True, "")


def test_what_was_only_counted_is_written_when_nsqadmin_ends(log: Log):
    log.refuse(LINES_AT_ONCE + 7)
    log.audit.close()
    assert (log.lines()[-1].action, log.lines()[-1].subject) == ("more_refusals", "7")


def test_a_look_at_the_page_has_the_number_of_the_minute_before(log: Log):
    log.refuse(LINES_AT_ONCE + 7)
    log.clock.advance(MINUTE)
    assert log.audit.latest(1)[0].action == "more_refusals"


def test_names_that_somebody_says_are_cut(log: Log):
    log.audit.note(STRANGER, "log_in_failed", "x", "refused", who="x" * 500)
    assert log.lines()[0].who == "x" * 64
