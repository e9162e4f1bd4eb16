"""``flintmq backup`` of nsqds that work, and ``flintmq restore``: what is there afterwards, and what is refused."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.daemons import PATIENCE_S, Cluster, Daemons, Nsqd, dpub, mpub, running_cluster, wait_until
from tests.integration.test_damage import consume
from tests.integration.utilities import flintmq

SEGMENTS = "--max-bytes-per-file=65536"


@pytest.fixture
def daemons(tmp_path: Path) -> Iterator[Daemons]:
    started = Daemons(tmp_path)
    try:
        yield started
    finally:
        started.close()


def _run(*words: object) -> subprocess.CompletedProcess[str]:
    return flintmq(*map(str, words))


def _done(*words: object) -> Any:
    ended = _run(*words, "--json")
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def _refused(*words: object, code: int = 1) -> str:
    ended = _run(*words)
    assert (ended.returncode, ended.stderr.count("\n")) == (code, 1), (ended.returncode, ended.stderr)
    return ended.stderr


def _restored(daemons: Daemons, backup: Path, *flags: str) -> Nsqd:
    """An nsqd on what was restored, which finds nothing wrong with it."""
    data_path = daemons.new_directory("restored")
    _done("restore", backup, f"--data-path={data_path}")
    nsqd = daemons.nsqd(*flags, data_path=data_path)
    assert nsqd.get("/damage")["reports"] == []
    assert nsqd.get("/stats?format=json")["health"] == "OK"
    return nsqd


class _Publishing:
    """Publishes batches of numbered messages until it is told to end."""

    def __init__(self, nsqd: Nsqd, topic: str) -> None:
        self.acknowledged = 0
        self._nsqd, self._topic = nsqd, topic
        self._is_ended = threading.Event()
        self._thread = threading.Thread(target=self._publish)
        self._thread.start()

    def _publish(self) -> None:
        with self._nsqd.connect() as connection:
            while not self._is_ended.is_set():
                first = self.acknowledged
                connection.ok(mpub(self._topic, [b"%d" % number for number in range(first, first + 50)]))
                self.acknowledged = first + 50

    def end(self) -> None:
        self._is_ended.set()
        self._thread.join()


@contextlib.contextmanager
def _publishing(nsqd: Nsqd, topic: str) -> Iterator[_Publishing]:
    publishing = _Publishing(nsqd, topic)
    try:
        yield publishing
    finally:
        publishing.end()


def test_all_that_was_acknowledged_before_it_began_is_there_and_channels_are_where_they_were(
    daemons: Daemons, tmp_path: Path
) -> None:
    nsqd = daemons.nsqd(SEGMENTS)
    for topic in ("busy", "read", "later"):
        nsqd.post(f"/topic/create?topic={topic}")
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
    nsqd.post("/topic/create?topic=parts&partition_num=2")
    nsqd.post("/channel/create?topic=parts&channel=c")
    nsqd.post("/mpub?topic=parts&partition=1", b"0\n1\n2")
    nsqd.post("/channel/pause?topic=later&channel=c")
    nsqd.publish("read", *(b"%d" % number for number in range(100)))
    with nsqd.connect() as consumer:
        consumer.subscribe("read", "c", 1)
        for _ in range(60):
            consumer.finish(consumer.message())
    left = nsqd.left("read", "c")["depth"]
    with nsqd.connect() as connection:
        connection.ok(dpub("later", 3_000_000, b"in an hour"))
    nsqd.write_progress()
    with _publishing(nsqd, "busy") as publishing:
        wait_until(lambda: len(nsqd.segment_paths("busy")) > 3)
        acknowledged = publishing.acknowledged
        _done("backup", tmp_path / "backup", f"--data-path={nsqd.data_path}")
        wait_until(lambda: publishing.acknowledged > acknowledged + 1000)
    nsqd.kill()
    restored = _restored(daemons, tmp_path / "backup")
    bodies = consume(restored, "busy", "c", publishing.acknowledged)
    assert bodies >= {b"%d" % number for number in range(acknowledged)}
    assert restored.stats("read", "c")["depth"] == left
    assert restored.stats("later", "c") | {"deferred_count": 1, "paused": True} == restored.stats("later", "c")
    assert consume(restored, "parts", "c", 3) == {b"0", b"1", b"2"}


def test_a_second_run_copies_what_is_new_and_goes_on_after_one_that_was_killed(
    daemons: Daemons, tmp_path: Path
) -> None:
    nsqd, backup = daemons.nsqd(SEGMENTS), tmp_path / "backup"
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    words = ("backup", backup, f"--data-path={nsqd.data_path}")
    body = b"x" * 1000
    nsqd.publish("t", *(b"%d %s" % (number, body) for number in range(500)))
    first = _done(*words)
    assert first["written_bytes"] > 500_000
    nsqd.publish("t", b"more")
    (backup / "run-000002" / "topics").mkdir(parents=True)
    (backup / "run-000002" / "topics" / "half").write_bytes(b"of a run that was killed")
    with (backup / max(each["stored"] for each in _files(backup) if each["path"].endswith(".log"))).open("ab") as file:
        file.write(b"the same")
    second = _done(*words)
    assert (second["run"], second["written_bytes"] < 200_000) == (2, True), second
    assert _done("backup", backup, "--check")["run"] == 2
    kept = {path.relative_to(backup).as_posix() for path in backup.rglob("*") if path.is_file()}
    assert kept == {each["stored"] for each in _files(backup)} | {"backup.json", "flintmq-backup", "README.txt"}
    restored = _restored(daemons, backup)
    assert len(consume(restored, "t", "c", 501)) == 501


def test_what_has_gone_from_a_backup_is_copied_anew(daemons: Daemons, tmp_path: Path) -> None:
    """By whatever hand: files that did not change in the data directory, and one that has grown since."""
    nsqd, backup = daemons.nsqd(SEGMENTS), tmp_path / "backup"
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", *(b"%d %s" % (number, b"x" * 1000) for number in range(300)))
    words = ("backup", backup, f"--data-path={nsqd.data_path}")
    whole = _run(*words)
    assert (whole.returncode, whole.stderr) == (0, "")
    assert whole.stdout.endswith(": complete, and read back\n"), whole.stdout
    (backup / "README.txt").unlink()
    again = _run(*words)
    assert again.stderr == ""
    assert "of earlier runs are there and were not read: --check does" in again.stdout
    assert "run-000001 and its like are not backups" in (backup / "README.txt").read_text()

    def logs() -> list[Path]:
        return [backup / each["stored"] for each in _files(backup) if each["path"].endswith(".log")]

    def lose_all() -> None:
        shutil.rmtree(backup / "run-000001")

    def cut_the_first() -> None:
        with logs()[0].open("r+b") as file:
            file.truncate(100)

    def lose_the_last_that_grows() -> None:
        logs()[-1].unlink()
        nsqd.publish("t", b"more")

    for lose in (lose_all, cut_the_first, lose_the_last_that_grows):
        lose()
        assert _run("backup", backup, "--check").returncode == 1
        mended = _run(*words)
        assert mended.returncode == 0, mended.stderr
        assert "of earlier runs were not there any more, too short or damaged, and were copied anew" in mended.stderr
        assert _run("backup", backup, "--check").returncode == 0, lose
    assert len(consume(_restored(daemons, backup), "t", "c", 301)) == 301


def test_what_is_continued_and_was_damaged_in_the_backup_is_copied_anew(daemons: Daemons, tmp_path: Path) -> None:
    """What is damaged and has not grown no run reads; that is for --check."""
    nsqd, backup = daemons.nsqd(), tmp_path / "backup"
    for topic in ("t", "same"):
        nsqd.post(f"/topic/create?topic={topic}")
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
        nsqd.publish(topic, *(b"%d %s" % (number, b"x" * 1000) for number in range(100)))
    words = ("backup", backup, f"--data-path={nsqd.data_path}")
    _done(*words)
    last = max(each["stored"] for each in _files(backup) if "t-t/" in each["path"] and each["path"].endswith(".log"))
    data = bytearray((backup / last).read_bytes())
    data[-10] ^= 1
    (backup / last).write_bytes(data)
    nsqd.publish("t", b"more")
    mended = _run(*words)
    assert mended.returncode == 0, mended.stderr
    assert f"were copied anew, such as {last}: " in mended.stderr
    assert not (backup / last).exists()
    assert _run("backup", backup, "--check").returncode == 0
    nsqd.publish("t", b"and more")
    assert _done(*words)["replaced_files"] == 0
    restored = _restored(daemons, backup)
    assert len(consume(restored, "t", "c", 102)) == 102
    assert len(consume(restored, "same", "c", 100)) == 100


def test_a_run_that_fails_leaves_nothing_and_names_the_file_that_it_could_not_write(
    daemons: Daemons, tmp_path: Path
) -> None:
    """On a disk that nsqd writes to as well, what is left would keep it from publishing."""
    nsqd, backup, first = daemons.nsqd(), tmp_path / "backup", tmp_path / "first"
    nsqd.post("/topic/create?topic=t")
    nsqd.publish("t", b"x" * 1000)
    data_path = f"--data-path={nsqd.data_path}"
    _done("backup", backup, data_path)
    before = _tree(backup)
    nsqd.publish("t", b"x" * 1_000_000, b"y" * 1_000_000)
    nsqd.publish("new", b"x")

    def failed(directory: Path, size_max: int) -> str:
        ended = _limited(size_max, "backup", str(directory), data_path)
        assert ended.returncode == 1, ended.stdout
        return ended.stderr

    assert f"{backup}: File too large; nothing of an earlier backup was changed" in failed(backup, 500_000)
    assert _tree(backup) == before
    assert f"{backup}/run-000002/database/channels.db: " in failed(backup, 20_000)
    assert _tree(backup) == before
    failed(first, 500_000)
    assert set(_tree(first)) == {"flintmq-backup", "README.txt"}
    _done("backup", backup, data_path)
    assert _run("backup", backup, "--check").returncode == 0


def test_a_restore_that_fails_leaves_its_directory_empty(daemons: Daemons, tmp_path: Path) -> None:
    nsqd, backup, target = daemons.nsqd(), tmp_path / "backup", tmp_path / "target"
    nsqd.publish("t", *(b"x" * 1_000_000 for _ in range(2)))
    _done("backup", backup, f"--data-path={nsqd.data_path}")
    full = _limited(1_000_000, "restore", str(backup), f"--data-path={target}")
    assert full.returncode == 1
    assert full.stderr.endswith(f"{target}: File too large; {target} is empty again\n"), full.stderr
    (stored,) = (backup / each["stored"] for each in _files(backup) if each["path"].endswith(".log"))
    data = stored.read_bytes()
    stored.write_bytes(data[:-1])
    assert "is not what was stored" in _refused("restore", backup, f"--data-path={target}")
    assert list(target.iterdir()) == []
    stored.write_bytes(data)
    _done("restore", backup, f"--data-path={target}")


def test_what_is_damaged_is_copied_as_it_is_and_said_with_what_nsqd_does_about_it(
    daemons: Daemons, tmp_path: Path
) -> None:
    nsqd, backup = daemons.nsqd(SEGMENTS), tmp_path / "backup"
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    for part in range(5):
        nsqd.publish("t", *(b"%d %s" % (number, b"x" * 1000) for number in range(60 * part, 60 * part + 60)))
    nsqd.stop()
    headless, damaged = nsqd.segment_paths("t")[:2]
    for path, position in ((headless, 30), (damaged, 500)):
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
    for _ in range(2):
        notes = {
            note.split(":")[0].split()[0]: note
            for note in _done("backup", backup, f"--data-path={nsqd.data_path}")["notes"]
        }
        told = {Path(path).name: note for path, note in notes.items()}
        assert told.keys() == {headless.name, damaged.name}
        assert "its first 64 bytes are no header" in told[headless.name]
        assert "nsqd skips that, and tells of it, when it comes to read it" in told[damaged.name]
    nsqd.start()
    assert nsqd.get("/damage")["reports"] == [], "neither was looked at"
    assert 0 < len(consume(nsqd, "t", "c", 300)) < 300
    (report,) = nsqd.get("/damage")["reports"]
    assert report["path"].endswith(damaged.name)


def _limited(size_max: int, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs flintmq as on a disk on which no file gets longer."""
    command = ["prlimit", f"--fsize={size_max}:{size_max}", sys.executable, "-m", "flintmq", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def _tree(directory: Path) -> dict[str, bytes]:
    """All files below a directory, and what is in them."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def _files(backup: Path) -> Any:
    return json.loads((backup / "backup.json").read_text())["files"]


def test_topics_that_come_and_go_meanwhile_leave_nothing_damaged(daemons: Daemons, tmp_path: Path) -> None:
    nsqd = daemons.nsqd()
    nsqd.publish("stays", b"a", b"b")
    is_ended = threading.Event()

    def come_and_go() -> None:
        number = 0
        while not is_ended.wait(0.02):
            nsqd.publish(f"comes{number % 20}", b"x")
            nsqd.post(f"/topic/delete?topic=comes{number % 20}")
            number += 1

    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(3):
            _done("backup", tmp_path / "backup", f"--data-path={nsqd.data_path}")
    finally:
        is_ended.set()
        thread.join()
    nsqd.stop()
    restored = _restored(daemons, tmp_path / "backup")
    restored.post("/channel/create?topic=stays&channel=c")
    assert consume(restored, "stays", "c", 2) == {b"a", b"b"}


def test_what_is_no_backup_or_not_as_it_was_is_refused(daemons: Daemons, tmp_path: Path) -> None:
    nsqd, other = daemons.nsqd(), daemons.nsqd()
    nsqd.publish("t", *(b"%d" % number for number in range(100)))
    backup, foreign, target = tmp_path / "backup", tmp_path / "foreign", tmp_path / "target"
    foreign.mkdir()
    (foreign / "precious").write_text("not ours")
    data_path = f"--data-path={nsqd.data_path}"
    assert "has something in it" in _refused("backup", foreign, data_path)
    assert (foreign / "precious").read_text() == "not ours"
    assert "inside each other" in _refused("backup", nsqd.data_path / "backup", data_path)
    assert "has no channels.db" in _refused("backup", backup, f"--data-path={foreign}")
    assert "--data-path" in _refused("backup", backup, code=2)
    assert "is no directory" in _refused("restore", tmp_path / "none", f"--data-path={target}")
    _done("backup", backup, data_path)
    assert "of another data directory" in _refused("backup", backup, f"--data-path={other.data_path}")
    assert "is in use" in _refused("restore", backup, data_path)
    assert "has something in it" in _refused("restore", backup, f"--data-path={foreign}")
    (stored,) = (backup / each["stored"] for each in _files(backup) if each["path"].endswith(".log"))
    data = bytearray(stored.read_bytes())
    data[500] ^= 1
    stored.write_bytes(data)
    assert "is not what was stored" in _refused("backup", backup, "--check")
    assert "is not what was stored" in _refused("restore", backup, f"--data-path={target}")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    (tmp_path / "cluster").mkdir()
    with running_cluster(tmp_path / "cluster", copies_on=2) as cluster:
        yield cluster


def test_a_restored_copy_of_a_cluster_stands_for_nothing_that_the_cluster_has(
    cluster: Cluster, daemons: Daemons, tmp_path: Path
) -> None:
    cluster.create("orders", copies=2)
    cluster.wait_in_sync("orders", 2)
    leader = cluster.leader("orders")
    leader.post("/channel/create?topic=orders&channel=c")
    leader.post("/mpub?topic=orders&partition=0", b"0\n1\n2")
    follower = next(node for node in cluster.nodes if node is not leader)
    node_id = {row["tcp_port"]: row["node"] for row in cluster.status()["nodes"]}
    _done("backup", tmp_path / "backup", f"--data-path={follower.data_path}")
    leader.post("/mpub?topic=orders&partition=0", b"3\nthe fourth")

    data_path = tmp_path / "restored"
    told = _done("restore", tmp_path / "backup", f"--data-path={data_path}")
    assert told["copies"] == {"orders": [0]}
    before = daemons.nsqd(data_path=data_path)
    before.post("/mpub?topic=orders&partition=0", b"of this one\nalone")
    before.stop()
    host, port = cluster.nsqlookupd.http
    joined = daemons.nsqd(f"--cluster-store={host}:{port}", "--peer-address=127.0.0.1:0", data_path=data_path)
    wait_until(lambda: "topic orders stays this node's alone" in joined.log, lambda: joined.log)
    state = cluster.partition("orders")
    assert state["leader"] == node_id[leader.tcp[1]] and len(state["in_sync"]) == 2, "as if nothing had been"
    nodes = {row["tcp_port"]: row["node"] for row in cluster.status()["nodes"]}
    assert len(nodes) == 3, "it is a node of its own"

    # what would be acknowledged here nobody else would have
    for path in ("/mpub?topic=orders&partition=0", "/pub?topic=orders"):
        refused = joined.request("POST", path, b"z")
        assert refused.status != 200 and b"E_FAILED_ON_NOT_WRITABLE" in refused.body, refused
    address = "{}:{}".format(*joined.tcp)
    told_why = flintmq("pub", "orders", f"--nsqd-tcp-address={address}", text=b"z\n")
    assert f"is node {nodes[joined.tcp[1]]}'s alone" in told_why.stderr, told_why
    assert joined.get("/stats?format=json")["cluster"]["double_topics"] == ["orders"]
    assert leader.get("/stats?format=json")["cluster"]["double_topics"] == []
    doctor = _run("doctor", f"--nsqd-tcp-address={address}", "--nsqd-http-address={}:{}".format(*joined.http))
    assert "it has orders alone, and the cluster has topics of the same names" in doctor.stdout, doctor
    both = [f"--nsqd-{kind}-address={'{}:{}'.format(*address)}" for node in (joined, leader) for kind, address in
            (("tcp", node.tcp), ("http", node.http))]  # fmt: skip
    with leader.connect() as connection:
        connection.subscribe("orders", "c")
        doctor = _run("doctor", *both)
    assert "it has orders alone" in doctor.stdout, doctor
    assert "consumers are at" not in doctor.stdout, "what is there nsqlookupd leads nobody to"

    # nor when the cluster gives it a place for a copy: what it has had alone is none
    path = "/topic/meta/update?topic=orders&replicator=3"
    assert cluster.nsqlookupd.request("POST", path).status == 200
    restored = nodes[joined.tcp[1]]
    wait_until(lambda: restored in cluster.partition("orders")["replicas"], lambda: str(cluster.partition("orders")))
    wait_until(lambda: joined.log.count("topic orders stays this node's alone") > 1, lambda: joined.log)
    assert restored not in cluster.partition("orders")["in_sync"]
    assert f"delete it on this node, {restored} (flintmq topic delete orders --nsqd-http-address=" in joined.log
    joined.post("/topic/delete?topic=orders")
    cluster.wait_in_sync("orders", 3)
    stored = b"".join(path.read_bytes() for path in joined.segment_paths("orders"))
    assert b"the fourth" in stored and b"of this one" not in stored
    joined.stop()

    # and where nobody has it any more, the cluster takes it
    bodies = {b"plain %d" % number for number in range(10)}
    for body in bodies:
        leader.publish("plain", body)
    for number in range(partition_num := cluster.status("plain")["topics"][0]["partition_num"]):
        cluster.wait_in_sync("plain", 2, number)
    assert partition_num > 1, "one for each node"
    _done("backup", tmp_path / "backup", f"--data-path={follower.data_path}")
    nsqlookupd = daemons.nsqlookupd("--cluster-store=own", f"--store-path={daemons.new_directory('store')}")
    data_path = tmp_path / "again"
    _done("restore", tmp_path / "backup", f"--data-path={data_path}")
    address = f"127.0.0.1:{nsqlookupd.http[1]}"
    alone = daemons.nsqd(
        f"--cluster-store={address}", "--peer-address=127.0.0.1:0",
        f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}", data_path=data_path,
    )  # fmt: skip
    wait_until(lambda: "topic orders of this node is the cluster's now" in alone.log, lambda: alone.log)
    wait_until(lambda: alone.request("GET", "/stats?format=json&topic=orders").json["topics"])
    assert consume(alone, "orders", "c", 5) == {b"0", b"1", b"2", b"3", b"the fourth"}
    # a plain one when that is asked for, with all partitions that were restored
    assert alone.stats("plain")["replicated"] is False
    lookupd = f"--lookupd-http-address=127.0.0.1:{nsqlookupd.http[1]}"
    for _ in range(2):
        replicated = flintmq("topic", "replicate", "plain", lookupd, "--wait")
        assert replicated.returncode == 0, (replicated.stderr, alone.log)
    (row,) = nsqlookupd.get("/cluster/status?topic=plain")["topics"]
    assert row["partition_num"] == len([each for each in row["partitions"] if each["is_ready"]]) == partition_num
    assert [each["tcp_port"] for each in nsqlookupd.get("/lookup?topic=plain")["producers"]] == [alone.tcp[1]]
    alone.post("/channel/create?topic=plain&channel=c")
    alone.publish("plain", b"new")
    assert consume(alone, "plain", "c", 11) == bodies | {b"new"}
