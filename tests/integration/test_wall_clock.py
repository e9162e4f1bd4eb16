"""Daemons on machines whose wall clock is far off: they start, answer and deliver, and log no traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.integration.daemons import Daemons, Nsqd, dpub, pub, req, wait_until

YEAR_S = 31_557_600

# What a daemon is started through: its wall clock is as far off as the file says, which may change.
_SHIFTED = """
import runpy, sys, time
path, arguments = sys.argv[1], sys.argv[2:]
real, real_ns = time.time, time.time_ns
def shift():
    with open(path) as file:
        return int(file.read() or 0)
time.time = lambda: real() + shift()
time.time_ns = lambda: real_ns() + shift() * 1_000_000_000
sys.argv = arguments[arguments.index("-m") + 1 :]
runpy.run_module("flintmq", run_name="__main__", alter_sys=False)
"""


@pytest.fixture
def shift(tmp_path: Path) -> Path:
    return tmp_path / "shift"


@pytest.fixture
def limits(shift: Path, tmp_path: Path) -> list[str]:
    program = tmp_path / "shifted.py"
    program.write_text(_SHIFTED, encoding="utf-8")
    shift.write_text("0", encoding="ascii")
    return [sys.executable, str(program), str(shift)]


def use(nsqd: Nsqd, topic: str) -> None:
    """Publish, defer, requeue, consume and look at everything."""
    with nsqd.connect() as connection:
        connection.identify()
        connection.ok(pub(topic, b"now"))
        connection.ok(dpub(topic, 100, b"soon"))
        connection.ok(dpub(topic, 3_500_000, b"in an hour"))
        connection.subscribe(topic, "c", 1)
        first = connection.message()
        connection.send(req(first.id, 50))
        bodies = [first.body]
        while len(bodies) < 3:
            message = connection.message()
            bodies.append(message.body)
            connection.finish(message)
        assert sorted(bodies) == [b"now", b"now", b"soon"]
    targets = ["/stats", "/stats?format=json", "/info", "/metrics", "/ping", "/drain"]
    targets += [f"/topic/settings?topic={topic}", f"/channel/peek?topic={topic}&channel=c", "/debug/state"]
    for target in targets:
        answer = nsqd.request("GET", target)
        assert answer.status == 200 and answer.headers["Date"], (target, answer.text)
    wait_until(lambda: nsqd.unfinished(topic, "c") == 1, "one message is left")


@pytest.mark.parametrize("years", [-60, -200, 300, 5000], ids=lambda years: f"{2026 + years}")
def test_a_wall_clock_that_is_far_off(daemons: Daemons, shift: Path, limits: list[str], years: int):
    shift.write_text(str(years * YEAR_S), encoding="ascii")
    nsqd = daemons.new_nsqd("--message-ttl=100h", limits=limits)
    nsqd.start()
    use(nsqd, "t")
    nsqd.restart()
    use(nsqd, "u")
    assert nsqd.unfinished("t", "c") == 1
    nsqd.stop()


@pytest.mark.parametrize("years", [-60, 300], ids=lambda years: f"{2026 + years}")
def test_a_wall_clock_that_is_set_far_off_and_back(daemons: Daemons, shift: Path, limits: list[str], years: int):
    nsqd = daemons.new_nsqd("--e2e-processing-latency-percentile=0.99", limits=limits)
    nsqd.start()
    use(nsqd, "t")
    shift.write_text(str(years * YEAR_S), encoding="ascii")
    wait_until(lambda: "the wall clock moved by" in nsqd.log, "it is noticed")
    use(nsqd, "u")
    shift.write_text("0", encoding="ascii")
    use(nsqd, "v")
    nsqd.restart()
    assert [nsqd.unfinished(topic, "c") for topic in "tuv"] == [1, 1, 1]


def test_no_step_of_the_wall_clock_makes_a_message_old(daemons: Daemons, shift: Path, limits: list[str]):
    nsqd = daemons.new_nsqd("--message-ttl=1h", limits=limits)
    nsqd.start()
    steps_h = (2, -3, 5, 0)
    nsqd.post("/topic/create?topic=t")
    for hours in steps_h:
        nsqd.post(f"/channel/create?topic=t&channel=at{hours}")
    expected: list[bytes] = []
    for hours in steps_h:
        shift.write_text(str(hours * 3600), encoding="ascii")
        bodies = [f"{number} at {hours}".encode() for number in range(3)]  # the first meets a clock that was just set
        for body in bodies:
            nsqd.publish("t", body)
        expected += bodies
        with nsqd.connect() as connection:
            connection.subscribe("t", f"at{hours}", 100)
            for message in connection.messages(len(expected)):
                connection.finish(message)
    assert nsqd.log.count("the wall clock moved by") >= len(steps_h)


@pytest.mark.parametrize("is_clean", [True, False], ids=["clean", "killed"])
@pytest.mark.parametrize("hours", [-1, 1])
def test_what_is_deferred_behind_a_step_keeps_its_delay_over_a_restart(
    daemons: Daemons, shift: Path, limits: list[str], hours: int, is_clean: bool
):
    delay_ms = 3_000_000
    nsqd = daemons.new_nsqd(limits=limits)
    nsqd.start()
    for topic in "tu":
        nsqd.post(f"/topic/create?topic={topic}")
    nsqd.post("/channel/create?topic=u&channel=c")
    shift.write_text(str(hours * 3600), encoding="ascii")
    for topic in "tu":  # no channel is there to reach them, or a kill may come before it has
        nsqd.post(f"/pub?topic={topic}&defer={delay_ms}", b"posted")
        nsqd.post(f"/mdpub?topic={topic}&defer={delay_ms}", b"several")
        with nsqd.connect() as connection:
            connection.ok(dpub(topic, 1, b"soon"))
            connection.ok(dpub(topic, delay_ms, b"late"))
    assert "the wall clock moved by" in nsqd.log
    if is_clean:
        nsqd.stop()
    else:
        nsqd.kill()
    nsqd.start()
    for topic in "tu":
        with nsqd.connect() as connection:
            connection.subscribe(topic, "c", 10)
            assert connection.message().body == b"soon"
            wait_until(lambda: nsqd.stats(topic, "c")["deferred_count"] == 3, "the others are deferred")  # noqa: B023
            connection.nothing_comes()
        rows = nsqd.get(f"/channel/peek?topic={topic}&channel=c&what=deferred")["messages"]
        assert sorted(row["body"] for row in rows) == ["late", "posted", "several"]
        for row in rows:
            assert abs(row["due"] - row["timestamp"] - delay_ms * 1_000_000) < 60_000_000_000, row
            assert 0 < row["due_in_ms"] <= delay_ms, row


def test_nsqlookupd_before_1970(daemons: Daemons, shift: Path, limits: list[str], monkeypatch: pytest.MonkeyPatch):
    shift.write_text(str(-60 * YEAR_S), encoding="ascii")
    monkeypatch.setenv("CONFORMANCE_NSQLOOKUPD", " ".join([*limits, sys.executable, "-m", "flintmq", "nsqlookupd"]))
    nsqlookupd = daemons.nsqlookupd()
    nsqd = daemons.new_nsqd(f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}", limits=limits)
    nsqd.start()
    nsqd.publish("t", b"x")
    wait_until(lambda: nsqlookupd.producers("t"), "the topic is registered")
    for target in ("/nodes", "/topics", "/debug", "/metrics", "/info", "/ping"):
        assert nsqlookupd.request("GET", target).status == 200, target
