"""A real nsqd is started where NSQ's nsqd was: nothing is lost, whatever state the files are in and whatever kills it.

Source: NSQ's data files, NSQ's defects.
"""

from __future__ import annotations

import json
import random
import re
import stat
import struct
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.integration.daemons import Daemons, Message, Nsqd, req, wait_until
from tests.integration.load import body_of, drain
from tests.nsq_files import Queued, bodies, meta, nsqd_dat, numbered, queue_files, write_path

ARCHIVE = "nsq-data-before-flintmq"
MIB = 1024 * 1024
NOWHERE = "cannot be read: it is a symbolic link that leads to no file; put the file itself there"
DAMAGED = "nsqd.dat is damaged, and is written again from channels.db: nothing is missing"
CHANGED = "WARNING: nsqd.dat is not as this nsqd wrote it, which changes: "


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of a directory, by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def nsq_files_of(directory: Path) -> dict[str, bytes]:
    return {name: data for name, data in files_of(directory).items() if "diskqueue" in name or name == "nsqd.dat"}


def take(nsqd: Nsqd, topic: str, channel: str, count: int) -> list[Message]:
    """Receive and finish so many messages, and see that there are no more."""
    with nsqd.connect() as connection:
        messages = connection.subscribe(topic, channel, 2500).messages(count)
        connection.finish(*messages)
        connection.settle()
    assert nsqd.unfinished(topic, channel) == 0
    return messages


def taken(nsqd: Nsqd, topic: str, channel: str, count: int) -> list[bytes]:
    return [message.body for message in take(nsqd, topic, channel, count)]


def listed(nsqd: Nsqd) -> dict[str, tuple[bool, dict[str, bool]]]:
    """What nsqd.dat says now."""
    content = json.loads((nsqd.data_path / "nsqd.dat").read_bytes())
    assert content["version"] == "1.3.0"
    return {
        topic["name"]: (topic["paused"], {row["name"]: row["paused"] for row in topic["channels"] or ()})
        for topic in content["topics"]
    }


def test_topics_channels_pauses_and_everything_queued(daemons: Daemons):
    nsqd = daemons.new_nsqd("--durability=os")
    in_topic, in_a, in_b = numbered("topic", 20), numbered("a", 300, attempts=2), numbered("b", 10)
    content = {
        "nsqd.dat": nsqd_dat(
            {
                "orders": (False, {"a": False, "b": True, "c": False}),
                "quiet": (True, {"x": False}),
                "bare": (False, {}),
            }
        ),
        **queue_files("orders", in_topic),
        **queue_files("orders:a", in_a, file_bytes_max=1000, read_count=95),
        **queue_files("orders:b", in_b, unsynced_count=4),
        **queue_files("orders:c", []),
        **queue_files("quiet", numbered("quiet", 5)),
        **queue_files("quiet:x", numbered("x", 2)),
        **queue_files("bare", numbered("bare", 7)),
    }
    write_path(nsqd.data_path, content)
    nsqd.start()

    assert nsqd.stats("orders", "a")["depth"] == 205 + 20
    assert nsqd.stats("orders", "b")["paused"] is True
    assert nsqd.stats("orders", "b")["depth"] == 10 + 20
    assert nsqd.stats("quiet")["paused"] is True
    assert nsqd.stats("quiet")["depth"] == 5
    assert nsqd.stats("bare")["depth"] == 7
    assert nsqd.stats("bare")["channels"] == []
    size = sum(len(m.record) for m in [*in_topic, *in_a[95:], *in_b, *numbered("quiet", 5), *numbered("x", 2)])
    size += sum(len(m.record) for m in numbered("bare", 7))
    assert f"3 topics, 4 channels, 249 messages, {size} bytes; no damage" in nsqd.log
    assert f"the old files are in {nsqd.data_path}/{ARCHIVE}" in nsqd.log
    assert files_of(nsqd.data_path / ARCHIVE) == content

    # timestamps and attempts go on; ids are ours
    with nsqd.connect() as connection:
        messages = connection.subscribe("orders", "a", 2500).messages(225)
        assert [(m.body, m.timestamp_ns, m.attempts) for m in messages] == [
            *((m.body, m.timestamp_ns, 3) for m in in_a[95:]),
            *((m.body, m.timestamp_ns, 1) for m in in_topic),
        ]
        assert len({m.id for m in messages}) == 225
        connection.send(req(messages[0].id, 0))
        again = connection.message()
        assert (again.body, again.attempts, again.id) == (messages[0].body, 4, messages[0].id)
        connection.finish(*messages)
        connection.settle()
    assert taken(nsqd, "orders", "c", 20) == bodies(in_topic)
    assert taken(nsqd, "quiet", "x", 2) == bodies(numbered("x", 2))
    assert taken(nsqd, "bare", "first", 7) == bodies(numbered("bare", 7))
    nsqd.post("/channel/unpause?topic=orders&channel=b")
    assert taken(nsqd, "orders", "b", 30) == bodies(in_b) + bodies(in_topic)
    nsqd.publish("orders", b"new")
    nsqd.post("/topic/unpause?topic=quiet")
    assert taken(nsqd, "quiet", "x", 5) == bodies(numbered("quiet", 5))

    nsqd.restart()
    assert "took over" not in nsqd.log
    for channel in "abc":
        assert taken(nsqd, "orders", channel, 1) == [b"new"]
    assert [nsqd.unfinished("quiet", "x"), nsqd.unfinished("bare", "first")] == [0, 0]


def test_damaged_files(daemons: Daemons):
    """A torn last record, a bad length in the middle, no meta file: what is readable comes, the rest is kept."""
    torn = queue_files("torn:c", numbered("torn", 30))
    torn["torn:c.diskqueue.000000.dat"] = torn["torn:c.diskqueue.000000.dat"][:-2]
    middle = queue_files("middle:c", numbered("m", 60, size=40), file_bytes_max=1400)  # 20 records of 70 bytes each
    second = bytearray(middle["middle:c.diskqueue.000001.dat"])
    second[10 * 70 : 10 * 70 + 4] = struct.pack(">i", 12)
    middle["middle:c.diskqueue.000001.dat"] = bytes(second)
    missing = queue_files("missing:c", numbered("missing", 30), file_bytes_max=500, read_count=3)
    del missing["missing:c.diskqueue.meta.dat"]
    nsqd = daemons.new_nsqd("--durability=os", "--max-msg-size=1000")
    large = queue_files("large:c", [Queued(b"small"), Queued(b"L" * 1001), Queued(b"fits".ljust(1000))])
    write_path(nsqd.data_path, {**torn, **middle, **missing, **large})
    nsqd.start()
    assert taken(nsqd, "torn", "c", 29) == bodies(numbered("torn", 29))
    messages = bodies(numbered("m", 60, size=40))
    assert taken(nsqd, "middle", "c", 50) == messages[:30] + messages[40:]
    assert taken(nsqd, "missing", "c", 30) == bodies(numbered("missing", 30))
    assert taken(nsqd, "large", "c", 2) == [b"small", b"fits".ljust(1000)]
    assert "middle:c.diskqueue.000001.dat at byte 700: length 12 is not a record's" in nsqd.log
    assert re.search(r"torn:c\.diskqueue\.000000\.dat at byte \d+: a record of \d+ bytes is cut off", nsqd.log)
    assert "no meta file" in nsqd.log
    assert "1001 bytes is larger than --max-msg-size=1000" in nsqd.log
    bad = sorted(name for name in files_of(nsqd.data_path / ARCHIVE) if name.endswith(".bad"))
    assert bad == [
        "large:c.diskqueue.000000.dat.bad",
        "middle:c.diskqueue.000001.dat.bad",
        "torn:c.diskqueue.000000.dat.bad",
    ]
    assert nsqd.request("GET", "/ping").body == b"OK"


def test_two_rounds(daemons: Daemons):
    """To ours, back to NSQ's nsqd for a day, and to ours again: both backlogs are there, NSQ's pauses count."""
    nsqd = daemons.new_nsqd("--durability=os")
    write_path(nsqd.data_path, {"nsqd.dat": nsqd_dat({"t": (False, {"a": False, "b": False})})})
    nsqd.start()
    nsqd.publish("t", b"ours-0", b"ours-1")
    nsqd.publish("solo", b"solo")
    nsqd.stop()
    assert listed(nsqd) == {"t": (False, {"a": False, "b": False}), "solo": (False, {})}

    day = {"t": (False, {"a": True, "b": False}), "solo": (False, {"s": False}), "fresh": (True, {"f": False})}
    write_path(
        nsqd.data_path,
        {
            "nsqd.dat": nsqd_dat(day),
            **queue_files("t:a", numbered("a", 3)),
            **queue_files("t", numbered("t", 2)),
            **queue_files("solo:s", numbered("s", 1)),
            **queue_files("fresh:f", numbered("f", 1)),
        },
    )
    nsqd.start()
    assert listed(nsqd) == day
    assert nsqd.stats("t", "a")["paused"] is True
    nsqd.post("/channel/unpause?topic=t&channel=a")
    ours, theirs = [b"ours-0", b"ours-1"], bodies(numbered("t", 2))
    assert taken(nsqd, "t", "a", 7) == [*ours, *bodies(numbered("a", 3)), *theirs]
    assert taken(nsqd, "t", "b", 4) == [*ours, *theirs]
    assert taken(nsqd, "solo", "s", 2) == [b"solo", b"s-0"]
    assert taken(nsqd, "fresh", "f", 1) == [b"f-0"]
    assert sorted(path.name for path in nsqd.data_path.glob(f"{ARCHIVE}*")) == [ARCHIVE, f"{ARCHIVE}-2"]
    # NSQ's nsqd only looked in and changed nothing
    nsqd.stop()
    nsqd.start()
    assert "found data" not in nsqd.log


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda path: (path / "nsqd.dat").write_bytes(b'{"topics":[{"name"'), r"nsqd\.dat: not a list of topics"),
        (lambda path: lose(path / "t:c.diskqueue.000000.dat"), rf"t:c\.diskqueue\.000000\.dat: {NOWHERE}"),
        (lambda path: lose(path / "t:c.diskqueue.meta.dat"), rf"t:c\.diskqueue\.meta\.dat: {NOWHERE}"),
        (lambda path: lose(path / "nsqd.dat"), rf"nsqd\.dat: {NOWHERE}"),
        (
            lambda path: (path / "nsqd.dat").unlink() or (path / "nsqd.dat").mkdir(),
            r"nsqd\.dat: cannot be read: not a ",
        ),
    ],
    ids=["list", "queue", "meta", "link", "directory"],
)
def test_what_cannot_be_read_stops_the_start(daemons: Daemons, spoil, complaint: str):
    nsqd = daemons.new_nsqd()
    write_path(
        nsqd.data_path, {"nsqd.dat": nsqd_dat({"t": (False, {"c": False})}), **queue_files("t:c", numbered("m", 9))}
    )
    good = nsq_files_of(nsqd.data_path)
    spoil(nsqd.data_path)
    before = nsq_files_of(nsqd.data_path)
    nsqd.launch()
    assert nsqd.wait() == 1
    assert re.search(rf"FATAL: failed to instantiate nsqd - cannot take over .*{complaint}.* start again", nsqd.log)
    assert nsq_files_of(nsqd.data_path) == before
    assert not (nsqd.data_path / "topics").exists()
    for path in nsqd.data_path.iterdir():
        if path.is_symlink():
            path.unlink()
        elif path.is_dir():
            path.rmdir()
    write_path(nsqd.data_path, good)
    nsqd.start()
    assert taken(nsqd, "t", "c", 9) == bodies(numbered("m", 9))


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda data: data.replace(b"orders", b"ordesr"), CHANGED + "topic ordesr is new; channel ordesr/c is new"),
        (lambda data: data.replace(b'"paused":false,"ch', b'"paused":true,"ch'), CHANGED + "topic orders is paused"),
        (lambda data: data.replace(b"topics", b"topicz"), CHANGED + "nothing by it"),
        (lambda data: data[: len(data) // 2], "WARNING: nsqd.dat is damaged"),
        (lambda data: b"", DAMAGED),
        (lambda data: b"\xff" * 500, DAMAGED),
        (lambda data: b'{"x":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}", DAMAGED),
    ],
    ids=["name", "pause", "key", "half", "empty", "garbage", "deep"],
)
def test_a_damaged_list_of_ours_warns_and_nothing_depends_on_it(daemons: Daemons, spoil, says: str):
    nsqd = daemons.nsqd("--durability=os")
    with nsqd.connect() as connection:
        connection.subscribe("orders", "c", 0)
    nsqd.publish("orders", b"kept")
    nsqd.stop()
    path = nsqd.data_path / "nsqd.dat"
    good = path.read_bytes()
    path.write_bytes(spoil(good))
    nsqd.start()
    assert says in nsqd.log, nsqd.log
    if "not a list" in says or "ERROR" in says:
        assert path.read_bytes() == good and (nsqd.data_path / ARCHIVE / "nsqd.dat.bad").exists()
    nsqd.post("/topic/unpause?topic=orders")
    assert taken(nsqd, "orders", "c", 1) == [b"kept"]
    nsqd.restart()
    assert "nsqd.dat is not" not in nsqd.log and "taking over" not in nsqd.log


def lose(path: Path) -> None:
    """A symbolic link that leads to no file; as root, permissions would keep nobody out."""
    path.unlink()
    path.symlink_to("elsewhere")


def test_links_are_read_through_and_what_they_lead_to_stays(daemons: Daemons, tmp_path: Path):
    """A queue on another disk, and the nsqd.dat of configuration management."""
    nsqd = daemons.new_nsqd("--durability=os")
    elsewhere = tmp_path / "elsewhere"
    listed_there = nsqd_dat({"t": (False, {"c": False}), "by-link": (True, {"x": False})})
    files = {"nsqd.dat": listed_there, **queue_files("t:c", numbered("m", 9), file_bytes_max=200)}
    write_path(elsewhere, files)
    nsqd.data_path.mkdir(parents=True, exist_ok=True)
    for name in files:
        (nsqd.data_path / name).symlink_to(elsewhere / name)
    nsqd.start()
    assert taken(nsqd, "t", "c", 9) == bodies(numbered("m", 9))
    assert listed(nsqd) == {"t": (False, {"c": False}), "by-link": (True, {"x": False})}
    assert files_of(elsewhere) == files
    assert {path.name for path in (nsqd.data_path / ARCHIVE).iterdir() if path.is_symlink()} == set(files)
    assert not (nsqd.data_path / "nsqd.dat").is_symlink()
    nsqd.stop()

    ours = nsqd.data_path / "nsqd.dat"
    ours.rename(elsewhere / "ours.dat")
    ours.symlink_to(elsewhere / "ours.dat")  # what this nsqd wrote is its own, wherever it is
    before = files_of(elsewhere)
    nsqd.start()
    nsqd.post("/topic/create?topic=later")
    wait_until(lambda: "later" in listed(nsqd), "the topic is listed")
    assert "found data" not in nsqd.log
    nsqd.stop()
    assert files_of(elsewhere) == before
    ours.unlink()
    ours.symlink_to(elsewhere / "nsqd.dat")
    nsqd.start()
    assert "found data" in nsqd.log
    assert files_of(elsewhere) == before
    assert sorted(listed(nsqd)) == ["by-link", "later", "t"]


def big_backlog(directory: Path, count: int, size: int) -> dict[tuple[str, str], Counter[int]]:
    """Queues of two topics with ``count`` numbered messages each; returns what each channel must get."""
    expected: dict[tuple[str, str], Counter[int]] = {}
    number = 0
    for topic in ("t", "u"):
        numbers: dict[str, range] = {}
        for queue in (f"{topic}:a", f"{topic}:b", topic):
            numbers[queue] = range(number, number + count)
            number += count
            queued = [Queued(body_of(n, size)) for n in numbers[queue]]
            write_path(directory, queue_files(queue, queued, file_bytes_max=8 * MIB))
        for channel in "ab":
            expected[topic, channel] = Counter([*numbers[f"{topic}:{channel}"], *numbers[topic]])
    topics = {topic: (False, {"a": False, "b": False}) for topic in ("t", "u")}
    write_path(directory, {"nsqd.dat": nsqd_dat(topics)})
    return expected


def test_kill_during_the_import(daemons: Daemons):
    """At random moments, six times in a row: in the end everything is there once."""
    nsqd = daemons.new_nsqd("--durability=os")
    expected = big_backlog(nsqd.data_path, 12_000, 1000)
    chance = random.Random(20)
    killed_before_the_end = 0
    for longest_s in (0.0, 0.02, 0.05, 0.1, 0.2, 0.4):  # the first in any case before the import is over
        nsqd.launch()
        wait_until(lambda: "found data" in nsqd.log or "listening" in nsqd.log, "the import begins")
        time.sleep(chance.random() * longest_s)
        nsqd.kill()
        killed_before_the_end += "took over" not in nsqd.whole_log
    assert killed_before_the_end, "every kill came too late"
    nsqd.start()
    for (topic, channel), numbers in expected.items():
        assert Counter(drain(nsqd, topic, channel).numbers) == numbers, (topic, channel)
    assert "took over" in nsqd.whole_log
    assert not [name for name in nsq_files_of(nsqd.data_path) if name != "nsqd.dat"]
    assert len(list((nsqd.data_path / ARCHIVE).glob("*.diskqueue.00*.dat"))) == 12


def test_sigterm_during_the_import(daemons: Daemons):
    """It ends at once and well, and the next start goes on."""
    nsqd = daemons.new_nsqd("--durability=os")
    expected = big_backlog(nsqd.data_path, 12_000, 1000)
    before = nsq_files_of(nsqd.data_path)
    nsqd.launch()
    wait_until(lambda: "found data" in nsqd.log, "the import begins")
    nsqd.stop()
    assert "the next start goes on with it" in nsqd.log
    assert nsq_files_of(nsqd.data_path) == before
    nsqd.start()
    assert Counter(drain(nsqd, "u", "b").numbers) == expected["u", "b"]


def test_memory_while_200_mb_are_taken_over(daemons: Daemons):
    nsqd = daemons.new_nsqd("--durability=os")
    # two files, the size at which NSQ's nsqd begins another, made in pieces: this process keeps what it once took
    for number in range(2):
        for first in range(0, 100_000, 10_000):
            records = [Queued(body_of(n, 1000)).record for n in range(first, first + 10_000)]
            with (nsqd.data_path / f"t:c.diskqueue.{number:06d}.dat").open("ab") as file:
                file.write(b"".join(records))
    write_path(nsqd.data_path, {"t:c.diskqueue.meta.dat": meta(200_000, (0, 0), (1, 100_000 * len(records[0])))})
    nsqd.start()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{nsqd.pid}/status").read_text(encoding="ascii"))
    assert peak is not None
    assert int(peak[1]) * 1024 < 90 * MIB
    assert nsqd.stats("t", "c")["depth"] == 200_000


# -- nsqd.dat ----------------------------------------------------------------------------------------------------------


def test_nsqd_dat_follows_topics_channels_and_pauses(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    path = nsqd.data_path / "nsqd.dat"
    assert path.read_bytes() == b'{"topics":[],"version":"1.3.0"}'
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for target in (
        "/topic/create?topic=t",
        "/channel/create?topic=t&channel=c",
        "/channel/create?topic=t&channel=gone%23ephemeral",
        "/topic/create?topic=gone%23ephemeral",
        "/channel/pause?topic=t&channel=c",
        "/topic/create?topic=p",
        "/topic/pause?topic=p",
        "/topic/create?topic=deleted",
    ):
        nsqd.post(target)
    expected = {"t": (False, {"c": True}), "p": (True, {}), "deleted": (False, {})}
    wait_until(lambda: listed(nsqd) == expected, "nsqd.dat follows")
    assert b'"channels":null' in path.read_bytes()
    nsqd.post("/channel/unpause?topic=t&channel=c")
    nsqd.post("/topic/delete?topic=deleted")
    expected = {"t": (False, {"c": False}), "p": (True, {})}
    wait_until(lambda: listed(nsqd) == expected, "nsqd.dat follows")
    nsqd.publish("last", b"x")
    nsqd.stop()
    expected["last"] = (False, {})
    assert listed(nsqd) == expected
    assert stat.S_IMODE(path.stat().st_mode) == 0o600

    # one that is older than our last changes, because of a kill, is known to be ours
    nsqd.start()
    nsqd.post("/topic/delete?topic=last")
    wait_until(lambda: "last" not in listed(nsqd), "nsqd.dat follows")
    nsqd.kill()
    nsqd.start()
    assert "found data" not in nsqd.log
    assert "last" not in listed(nsqd)


def test_an_empty_meta_file_and_a_used_up_queue_are_cleared_away(daemons: Daemons):
    """What NSQ's nsqd leaves when everything was consumed."""
    nsqd = daemons.new_nsqd("--durability=os")
    done = {"t.diskqueue.meta.dat": meta(0, (3, 0), (3, 0)), "t:c.diskqueue.meta.dat": meta(0, (0, 0), (0, 0))}
    write_path(nsqd.data_path, {"nsqd.dat": nsqd_dat({"t": (False, {"c": False})}), **done})
    nsqd.start()
    assert nsqd.stats("t", "c")["depth"] == 0
    assert nsq_files_of(nsqd.data_path).keys() == {"nsqd.dat"}
