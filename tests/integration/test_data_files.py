"""Files that real daemons make: who may read them, and what a link in the data directory leads to."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat
from pathlib import Path

import pytest
from tests.integration.daemons import Daemons, Nsqd, dpub, pub, req, sized, wait_until
from tests.integration.mounts import mounted_tmpfs, needs_root


def modes(root: Path) -> dict[str, int]:
    found = {}
    for directory, names, file_names in os.walk(root):
        for name in (*names, *file_names):
            path = Path(directory, name)
            found[str(path.relative_to(root))] = stat.S_IMODE(path.lstat().st_mode)
    return found


@pytest.mark.parametrize("umask", ["000", "022"])
def test_nobody_else_may_read_what_nsqd_makes(daemons: Daemons, tmp_path: Path, umask: str):
    """Database, journals, log, index, floors, nsqd.dat, what was damaged, snapshots: also after a kill and a start."""
    shell = ["sh", "-c", f'umask {umask}; exec "$@"', "sh"]
    log_file = tmp_path / "nsqd-own.log"
    nsqd = daemons.new_nsqd(f"--log-file={log_file}", "--max-bytes-per-file=2000", limits=shell)
    nsqd.start()
    with nsqd.connect() as connection:
        for _ in range(20):
            connection.ok(pub("t", b"x" * 300))
        connection.ok(dpub("t", 3_000_000, b"later"))
        connection.subscribe("t", "c", 1)
        connection.send(req(connection.message().id, 1_000_000))
        for _ in range(10):
            connection.finish(connection.message())
        wait_until(lambda: nsqd.unfinished("t", "c") == 11, "ten messages are finished")
    nsqd.kill()
    with nsqd.segment_paths("t")[-1].open("r+b") as segment:
        segment.seek(-10, os.SEEK_END)
        segment.write(b"damaged")
    nsqd.start()
    wait_until((nsqd.data_path / "channels.db-wal").exists, "the database is in use")
    found = modes(nsqd.data_path)
    assert {"channels.db", "channels.db-wal", "channels.db-shm", "nsqd.dat", "nsqd.dat.flintmq"} <= set(found)
    assert any(path.endswith(".bad") for path in found) and any(path.endswith(".index") for path in found), found
    assert found == {path: 0o700 if (nsqd.data_path / path).is_dir() else 0o600 for path in found}
    assert stat.S_IMODE(log_file.stat().st_mode) == 0o640


def test_deleting_a_topic_leaves_alone_what_its_link_leads_to(nsqd: Nsqd, tmp_path: Path):
    nsqd.publish("moved", b"body")
    nsqd.stop()
    (directory,) = [path for path in (nsqd.data_path / "topics").iterdir() if "moved" in path.name]
    elsewhere = directory.rename(tmp_path / "elsewhere")
    directory.symlink_to(elsewhere)
    (elsewhere / "of-somebody").write_bytes(b"x")
    nsqd.start()
    assert nsqd.stats("moved")["message_count"] == 0 and nsqd.post("/topic/delete?topic=moved").status == 200
    wait_until(lambda: list((nsqd.data_path / "topics").iterdir()) == [], "the link is removed")
    assert (elsewhere / "of-somebody").read_bytes() == b"x" and list(elsewhere.glob("p-0000/*.log"))
    assert f"leads to {elsewhere}: the link is removed" in nsqd.log
    nsqd.restart()
    assert nsqd.get("/stats?format=json")["topics"] == []


def test_a_partition_that_takes_no_more_messages_says_until_when(daemons: Daemons):
    """To its publishers, of a plain topic and of one with partitions, in /ping and in the log."""
    nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=1000")
    assert nsqd.post("/topic/create?topic=parts&partition_num=2").status == 200
    to_parts = b"PUB parts 0\n" + sized(b"x" * 900)
    nsqd.publish("plain", b"x" * 900)
    with nsqd.connect() as connection:
        connection.ok(to_parts)
    for directory in (nsqd.data_path / "topics").glob("*/p-0000"):
        shutil.rmtree(directory)  # the next segment cannot be begun there
    until = "; the partition takes no more messages until nsqd is restarted"
    for publish in (pub("plain", b"x" * 900), to_parts):
        for code in ("E_PUB_FAILED", "E_FAILED_ON_NOT_WRITABLE" if b"parts" in publish else "E_PUB_FAILED"):
            with nsqd.connect() as connection:
                error = connection.error(publish)
                assert error.startswith(f"{code} ") and error.endswith(until), error
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.endswith(until)
    for topic in ("plain", "parts"):
        assert nsqd.log.count(f"ERROR: writing to topics/t-{topic}/p-0000 failed: ") == 1


@pytest.mark.parametrize("how", ["link", "moved", pytest.param("mounted", marks=needs_root)])
def test_what_the_data_path_leads_to_later_splits_nothing(daemons: Daemons, tmp_path: Path, how: str):
    """Old and new topics, full segments, deletions: all of it is in the directory of the start, and /ping tells."""
    path, real, other = tmp_path / "path", tmp_path / "real", tmp_path / "other"
    for each in (real, other):
        each.mkdir()
    if how == "link":
        path.symlink_to(real)
    nsqd = daemons.new_nsqd("--max-bytes-per-file=1000", data_path=path)
    nsqd.start()
    for topic in ("t", "gone"):
        nsqd.publish(topic, *[b"before" + b"x" * 900] * 3)
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
    with contextlib.ExitStack() as changes:
        if how == "link":
            (tmp_path / "new").symlink_to(other)
            (tmp_path / "new").rename(path)
        elif how == "moved":
            path.rename(tmp_path / "elsewhere")
            path.mkdir()
        else:
            changes.enter_context(mounted_tmpfs(path, 10 * 1024 * 1024))
        wait_until(lambda: "is another directory than at the start" in nsqd.log, "it is noticed")
        answer = nsqd.request("GET", "/ping")
        assert answer.status == 500 and f"NOK - the data path {path} is another directory" in answer.text
        for topic in ("t", "new"):
            for _ in range(3):
                nsqd.publish(topic, b"after" + b"x" * 900)
            assert nsqd.post(f"/channel/create?topic={topic}&channel=c").status == 200
        assert nsqd.post("/topic/delete?topic=gone").status == 200
        with nsqd.connect() as connection:
            connection.subscribe("t", "c", 1)
            connection.finish(connection.message())
        wait_until(lambda: nsqd.unfinished("t", "c") == 5, "it is finished")
        assert nsqd.log.count("ERROR: the data path") == 1
        nsqd.kill()
        assert list(path.iterdir()) == []
    if how == "link":
        path.unlink()
        path.symlink_to(real)
    elif how == "moved":
        path.rmdir()
        (tmp_path / "elsewhere").rename(path)
    nsqd.start()
    assert nsqd.request("GET", "/ping").body == b"OK"
    rows = nsqd.get("/stats?format=json")["topics"]
    assert {row["topic_name"] for row in rows} == {"new", "t"}
    assert nsqd.unfinished("new", "c") == 3 and nsqd.unfinished("t", "c") in (5, 6)


def test_nothing_is_acknowledged_once_the_data_directory_was_removed(daemons: Daemons):
    nsqd = daemons.new_nsqd()
    nsqd.start()
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", *(b"%d" % number for number in range(10)))
    shutil.rmtree(nsqd.data_path, ignore_errors=True)  # which writes there meanwhile
    wait_until(lambda: nsqd.request("POST", "/pub?topic=t", b"x").status == 503, lambda: nsqd.log)
    health = nsqd.request("GET", "/ping")
    assert health.status == 500 and b"was removed while nsqd ran" in health.body, health
    with nsqd.connect() as connection:
        connection.send(pub("t", b"x"))
        assert b"E_PUB_FAILED" in connection.frame()[1]
    unfinished = nsqd.unfinished("t", "c") - 4
    with nsqd.connect() as connection:  # what can still be read may be saved
        connection.subscribe("t", "c", 4)
        for _ in range(4):
            connection.finish(connection.message())
        wait_until(lambda: nsqd.unfinished("t", "c") == unfinished, "four are finished")
    nsqd.send_signal(signal.SIGTERM)
    assert nsqd.wait() == 1
    assert f"{unfinished} messages that were not finished are gone" in nsqd.log


def test_a_topic_whose_files_were_removed_takes_nothing_more(daemons: Daemons):
    nsqd = daemons.new_nsqd()
    nsqd.start()
    nsqd.publish("gone", b"body")
    nsqd.publish("kept", b"body")
    (segment,) = nsqd.segment_paths("gone")
    shutil.rmtree(segment.parent.parent)
    wait_until(lambda: nsqd.request("POST", "/pub?topic=gone", b"x").status == 503, lambda: nsqd.log)
    health = nsqd.request("GET", "/ping")
    assert health.status == 500 and b"its files were removed while nsqd ran" in health.body, health
    nsqd.publish("kept", b"more")
    nsqd.stop()


@needs_root
def test_nsqd_starts_on_a_full_disk(daemons: Daemons, tmp_path: Path):
    """What is stored has to be consumed before it can be deleted; NSQ's nsqd does not start."""
    with mounted_tmpfs(tmp_path / "small", 100 * 1024 * 1024) as mount:
        (mount.path / "data").mkdir()
        nsqd = daemons.new_nsqd(data_path=mount.path / "data")
        nsqd.start()
        with nsqd.connect() as connection:
            connection.subscribe("t", "c", 0)
            nsqd.publish("t", *(b"%d" % number for number in range(20)))
        nsqd.kill()
        mount.fill()
        assert mount.free_bytes() == 0
        nsqd.start()
        with nsqd.connect() as connection:
            connection.subscribe("t", "c", 5)
            for number in range(20):
                message = connection.message()
                assert message.body == b"%d" % number
                connection.finish(message)
            assert connection.error(pub("t", b"no room")).startswith("E_PUB_FAILED")
        wait_until(lambda: nsqd.unfinished("t", "c") == 0)
        nsqd.stop()
        mount.empty()
        nsqd.start()
        nsqd.publish("t", b"there is room again")
        assert (nsqd.data_path / "room-to-start").stat().st_size == 1024 * 1024
        assert nsqd.unfinished("t", "c") == 1


@needs_root
def test_nsqlookupd_starts_on_a_full_disk(daemons: Daemons, tmp_path: Path):
    with mounted_tmpfs(tmp_path / "small", 100 * 1024 * 1024) as mount:
        nsqlookupd = daemons.nsqlookupd("--cluster-store=own", f"--store-path={mount.path}")
        nsqlookupd.kill()
        mount.fill()
        nsqlookupd.start()
        assert nsqlookupd.request("GET", "/ping").status == 200
        nsqlookupd.stop()
