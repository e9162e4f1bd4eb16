"""The history: a ring that does not grow, whose it is, and a file that is damaged, in use or somebody else's."""

from __future__ import annotations

import math
import random
import sqlite3
from array import array
from pathlib import Path

import pytest

from flintmq.client.admin.results import Election
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.history import (
    ELECTIONS_MAX,
    FIGURES,
    MEMBERS_MAX,
    STEP_S,
    TIERS,
    HistoryFailed,
    HistoryFile,
    averaged,
    figures_of,
    until_next_s,
)
from flintmq.nsqadmin.snapshots import Known, merge
from flintmq.nsqadmin.views import Missing, NodeRow, NodeTopic

START_S = 1_800_000_000  # whole hours


def row(value: float) -> tuple[float, ...]:
    return (value,) * FIGURES


def depths(
    file: HistoryFile, name: str, tier: int = 0, from_s: int = 0, until_s: int = 2 * START_S
) -> dict[int, float]:
    return {at_s: values[0] for at_s, values in (file.read(name, tier, from_s, until_s) or {}).items()}


def test_what_was_written_is_there_after_a_restart(tmp_path: Path):
    path = str(tmp_path / "history")
    file = HistoryFile(path, 4)
    file.write(START_S, {"topic/t": row(1.0)})
    file.write(START_S + 13, {"topic/t": row(2.0), "topic/u": row(7.0)})
    file.close()
    file = HistoryFile(path, 4)
    assert depths(file, "topic/t") == {START_S: 1.0, START_S + 10: 2.0}
    assert depths(file, "topic/u") == {START_S + 10: 7.0}
    assert file.read("topic/v", 0, 0, 2 * START_S) is None
    file.close()


def test_coarser_tiers_have_averages_and_the_highest_latency():
    file = HistoryFile("", 2)
    for number in range(13):
        file.write(START_S + 10 * number, {"topic/t": row(float(number))})
    found = file.read("topic/t", 1, 0, 2 * START_S)
    assert found == {START_S: (2.5, 2.5, 2.5, 2.5, 5.0), START_S + 60: (8.5, 8.5, 8.5, 8.5, 11.0)}
    file.close()


def test_a_step_that_nobody_was_there_for_is_no_zero():
    file = HistoryFile("", 1)
    file.write(START_S, {"topic/t": row(6.0)})
    file.write(START_S + 600, {"topic/t": row(8.0)})
    assert depths(file, "topic/t", 1) == {}  # its minute was over while nothing was written
    file.write(START_S + 660, {"topic/t": row(1.0)})
    assert depths(file, "topic/t", 1) == {START_S + 600: 8.0}
    file.close()


def test_every_step_has_its_turn_though_timers_are_early_and_late():
    chance = random.Random(1)
    now_s = START_S + 3.0
    steps = []
    for _ in range(1000):
        now_s += until_next_s(round(now_s * 1e9)) + chance.uniform(-0.01, 2.0)  # a round takes some of it
        steps.append(int(now_s) // STEP_S)
    assert steps == [*range(steps[0], steps[0] + 1000)]


def test_the_file_stays_as_large_as_it_is(tmp_path: Path):
    path = tmp_path / "history"
    file = HistoryFile(str(path), 64)
    step_s, count = TIERS[0]
    for number in range(count):
        file.write(START_S + step_s * number, {f"topic/{each}": row(1.0) for each in range(64)})
    file.close()
    before = path.stat().st_size
    file = HistoryFile(str(path), 64)
    for number in range(count, 3 * count):
        file.write(START_S + step_s * number, {f"topic/{each}": row(1.0) for each in range(64)})
    assert len(depths(file, "topic/1")) == count
    file.close()
    assert count * 64 * FIGURES * 4 < before < path.stat().st_size < 1.6 * before  # coarser tiers are not full yet


def test_a_slot_is_given_to_another_only_when_its_owner_is_gone_and_with_none_of_its_past():
    file = HistoryFile("", 2)
    assert file.write(START_S, {"topic/a": row(1.0), "topic/b": row(2.0), "topic/c": row(3.0)}) == 1
    assert file.read("topic/c", 0, 0, 2 * START_S) is None
    assert file.write(START_S + 10, {"topic/b": row(2.0), "topic/c": row(3.0)}) == 0
    assert depths(file, "topic/c") == {START_S + 10: 3.0}
    assert depths(file, "topic/b") == {START_S: 2.0, START_S + 10: 2.0}
    assert file.read("topic/a", 0, 0, 2 * START_S) is None
    file.close()


def test_a_damaged_file_is_put_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    path = tmp_path / "history"
    path.write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    file = HistoryFile(str(path), 1)
    file.write(START_S, {"topic/t": row(1.0)})
    assert depths(file, "topic/t") == {START_S: 1.0}
    assert (tmp_path / "history.bad").exists()
    assert "is damaged" in caplog.text
    file.close()


def test_a_database_of_something_else_is_not_touched(tmp_path: Path):
    path = tmp_path / "books"
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE book (title TEXT)")
    database.close()
    before = path.read_bytes()
    with pytest.raises(HistoryFailed, match="something else"):
        HistoryFile(str(path), 1)
    assert path.read_bytes() == before


def test_two_do_not_use_one_file(tmp_path: Path):
    path = str(tmp_path / "history")
    file = HistoryFile(path, 1)
    file.write(START_S, {"topic/t": row(1.0)})
    with pytest.raises(HistoryFailed, match="another process has it open"):
        HistoryFile(path, 1)
    file.close()


def test_a_directory_that_is_not_there_is_said(tmp_path: Path):
    with pytest.raises(HistoryFailed, match="unable to open"):
        HistoryFile(str(tmp_path / "none" / "history"), 1)


def test_what_is_not_known_counts_for_nothing():
    found = averaged([array("f", row(1.0)), array("f", row(math.nan)), array("f", row(3.0))])
    assert list(found) == [2.0, 2.0, 2.0, 2.0, 3.0]
    assert all(math.isnan(value) for value in averaged([array("f", row(math.nan))]))


def test_a_part_is_not_stored_as_the_whole():
    nodes = {
        "a:1": NodeRow(address="a:1", topics=[NodeTopic("both"), NodeTopic("one")]),
        "b:1": NodeRow(address="b:1", topics=[NodeTopic("both")], problem=Missing("nsqd", "b:1", "down", "away")),
    }
    topics = [
        daemons.Topic("both", message_count=5, channels=[daemons.Channel("c", depth=4)]),
        daemons.Topic("one", message_count=5, channels=[daemons.Channel("c", depth=3, in_flight_count=1)]),
    ]
    found = figures_of(merge(1.0, Known(nodes, ["gone"], []), {"a:1": daemons.Stats(topics=topics)}, []))
    assert list(found)[:3] == ["total/", "node/a:1", "node/b:1"]
    assert math.isnan(found["total/"][0]) and math.isnan(found["topic/both"][0]) and math.isnan(found["node/b:1"][0])
    assert (found["topic/one"][0], found["topic/one"][3], found["channel/one/c"][0]) == (3.0, 1.0, 3.0)
    assert "topic/gone" not in found


def election(number: int, reason: str = "", at_s: float = 0.0) -> Election:
    return Election(at_s or START_S + number, "orders", 0, number, "a", f"node{number}", reason)


def test_elections_are_kept_once_with_their_reason_and_the_oldest_go(tmp_path: Path):
    path = str(tmp_path / "history")
    file = HistoryFile(path, 1)
    file.keep_elections([election(1), election(2, "gone")], {"node1": "127.0.0.1:1"})
    file.keep_elections([election(1, "late", START_S + 1.2), election(2, "", START_S + 2.1)], {})
    file.close()
    file = HistoryFile(path, 1)
    kept, members = file.kept_elections()
    assert [(each.epoch, each.reason) for each in kept] == [(2, "gone"), (1, "late")]
    assert members == {"node1": "127.0.0.1:1"}
    file.keep_elections([election(1, "of a topic of the same name", START_S + 9000)], {})
    assert [each.reason for each in file.kept_elections()[0]] == ["of a topic of the same name", "gone"]
    many = [election(number) for number in range(3, ELECTIONS_MAX + 3)]
    file.keep_elections(many, {str(number): "x" for number in range(MEMBERS_MAX + 7)})
    kept, members = file.kept_elections()
    assert (len(kept), len(members)) == (ELECTIONS_MAX, MEMBERS_MAX)
    assert kept[0].reason and kept[-1].epoch == 4
    file.close()


def test_a_file_of_before_takes_elections(tmp_path: Path):
    path = str(tmp_path / "history")
    file = HistoryFile(path, 1)
    file.write(START_S, {"topic/t": row(1.0)})
    file.close()
    database = sqlite3.connect(path)
    database.executescript("DROP TABLE election; DROP TABLE member;")
    database.close()
    file = HistoryFile(path, 1)
    file.keep_elections([election(1)], {})
    assert file.kept_elections()[0] == [election(1)]
    assert depths(file, "topic/t") == {START_S: 1.0}
    file.close()
