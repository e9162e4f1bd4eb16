"""nsq_to_file as a process: when it finishes messages, its files, its signals, kill -9 and full disks.

Files by themselves: ``tests/unit/test_output_file.py``. Source: NSQ 1.3, apps/nsq_to_file.
"""

from __future__ import annotations

import asyncio
import gzip
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from itertools import count
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.mounts import mounted_tmpfs, needs_root
from tests.integration.utilities import at, end, is_finished, lookup, run, started

from flintmq import Producer

_topics = (f"files{number}" for number in count())
SOON = "--sync-interval=50ms"
CHANNEL = "nsq_to_file"
HOUR = "%Y-%m-%d_%H"
"""What names a file by default: one is begun with each hour, also by a test that runs when it strikes."""


@pytest.fixture
def topic() -> str:
    return next(_topics)


def lines(directory: Path) -> list[bytes]:
    """What is in all files, each of which must be whole."""
    found: list[bytes] = []
    for path in sorted(directory.rglob("*.log*")):
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert not data or data.endswith(b"\n"), path
        found += data.splitlines()
    return found


def _holds(directory: Path, bodies: list[bytes]) -> bool:
    return lines(directory) == bodies


def wait_finished(nsqd: Nsqd, topic: str, number: int) -> None:
    wait_until(lambda: is_finished(nsqd, topic, CHANNEL, number), "all are finished")


def test_messages_are_in_a_file_with_the_name_that_nsq_gives_it(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    shared_nsqd.publish(topic, b"one", b"two", b"\xff\x00")
    hours = {time.strftime(HOUR)}
    with started("nsq_to_file", at(shared_nsqd), f"--topic={topic}", f"--output-dir={tmp_path}", SOON) as process:
        wait_finished(shared_nsqd, topic, 3)
        log = end(process)
    hours.add(time.strftime(HOUR))
    paths = sorted(tmp_path.iterdir())
    host = socket.gethostname().split(".")[0]
    assert {path.name for path in paths} <= {f"{topic}.{host}.{hour}.log" for hour in hours}
    assert b"".join(path.read_bytes() for path in paths) == b"one\ntwo\n\xff\x00\n"
    for path in paths:
        assert re.search(rf"^\[nsq_to_file\] .* INFO: \[{topic}/{CHANNEL}\] opening {path}$", log, re.MULTILINE)
        assert path.stat().st_mode & 0o777 == 0o666 & ~_umask()


def _umask() -> int:
    before = os.umask(0)
    os.umask(before)
    return before


def test_nothing_is_finished_before_it_is_on_disk(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    """It is written at once, and finished when it is synced: the first alone, the second not before the end."""
    shared_nsqd.publish(topic, b"one")
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", "--sync-interval=1h", "--log-level=debug")
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        wait_finished(shared_nsqd, topic, 1)
        shared_nsqd.publish(topic, b"two")
        wait_until(lambda: lines(tmp_path) == [b"one", b"two"], "it is written")
        assert shared_nsqd.stats(topic, CHANNEL)["in_flight_count"] == 1
        log = end(process)
    assert f"[{topic}/{CHANNEL}] synced 1 records to disk" in log
    assert is_finished(shared_nsqd, topic, CHANNEL, 2)


def test_messages_are_finished_before_their_time_is_over(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    """NSQ's lets them time out, and writes them again and again, when --sync-interval is longer than that."""
    shared_nsqd.publish(topic, b"one")
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", "--sync-interval=1h", "--consumer-opt=msg_timeout,4s")
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        wait_finished(shared_nsqd, topic, 1)
        shared_nsqd.publish(topic, b"two")
        wait_finished(shared_nsqd, topic, 2)
        end(process)
    assert lines(tmp_path) == [b"one", b"two"]
    assert shared_nsqd.stats(topic, CHANNEL)["timeout_count"] == 0


def test_as_many_as_may_be_in_flight_are_synced_at_once(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    shared_nsqd.publish(topic, *[b"%d" % number for number in range(500)])
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", "--sync-interval=1h", "--max-in-flight=10")
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        wait_until(lambda: len(lines(tmp_path)) == 500, "all have come, though no more than 10 may be unfinished")
        end(process)
    assert sorted(lines(tmp_path), key=int) == [b"%d" % number for number in range(500)]


def test_rotation_gzip_and_the_work_directory_together(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    bodies = [b"%05d" % number for number in range(1000)]
    shared_nsqd.publish(topic, *bodies)
    out, work = tmp_path / "out", tmp_path / "work"
    (out / topic).mkdir(parents=True)
    (out / topic / "x-000001.log.gz").write_bytes(gzip.compress(b"not ours\n"))
    arguments = (
        f"--topic={topic}", f"--output-dir={out}", f"--work-dir={work}", "--gzip", "--gzip-level=1",
        "--rotate-size=3000", "--filename-format=<TOPIC>/x<REV>.log", "--skip-empty-files", SOON,
    )  # fmt: skip
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        wait_finished(shared_nsqd, topic, 1000)
        end(process)
    assert [*(work / topic).iterdir()] == []
    names = sorted(path.name for path in (out / topic).iterdir())
    assert names == ["x-000000.log.gz", "x-000001.log.gz", "x-000002.log.gz"]
    assert lines(out) == [*bodies[:501], b"not ours", *bodies[501:]], "501 messages of 6 bytes exceed 3000"


def test_a_hangup_ends_the_file_and_the_next_message_begins_another(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    """NSQ's ends with an error where there is a work directory: it writes to the file that it has closed."""
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = (f"--topic={topic}", f"--output-dir={out}", f"--work-dir={work}", "--sync-interval=1h")
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        for number, body in enumerate((b"0", b"1")):
            shared_nsqd.publish(topic, body)
            wait_until(partial(_holds, work, [body]), "it is written")
            process.send_signal(signal.SIGHUP)
            wait_until(partial(_holds, out, [b"0", b"1"][: number + 1]), "it is moved")
            wait_finished(shared_nsqd, topic, number + 1)
        end(process)
    assert lines(out) == [b"0", b"1"]


def test_a_log_rotator_takes_the_file_away(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", "--filename-format=a.log", SOON)
    with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
        shared_nsqd.publish(topic, b"0")
        wait_finished(shared_nsqd, topic, 1)
        (tmp_path / "a.log").rename(tmp_path / "a.log.1")
        process.send_signal(signal.SIGHUP)
        shared_nsqd.publish(topic, b"1")
        wait_until((tmp_path / "a.log").exists, "there is a new one")
        shared_nsqd.publish(topic, b"2")
        wait_finished(shared_nsqd, topic, 3)
        end(process)
    assert lines(tmp_path) == [b"2", b"0", b"1"] or lines(tmp_path) == [b"1", b"2", b"0"]


def test_a_log_rotator_that_comes_while_it_starts_does_not_end_it():
    """The signal comes when the program is imported, which takes most of a start."""
    code = """
import os, signal, sys
class Signal:
    def find_spec(self, name, *_):
        if name == "flintmq.tools.nsq_to_file":
            os.kill(os.getpid(), signal.SIGHUP)
sys.meta_path.insert(0, Signal())
import flintmq.cli
sys.exit(flintmq.cli.nsq_to_file(["--version"]))
"""
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0 and done.stdout.startswith(b"nsq_to_file v"), done


def test_topics_are_found_by_their_names_at_once(
    shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str, tmp_path: Path
):
    """NSQ's looks for the first time after --topic-refresh."""
    wanted, late, other = f"{topic}.yes", f"{topic}.yes.late", f"{topic}.no"
    for each in (wanted, other):
        shared_nsqd.publish(each, each.encode())
    wait_until(lambda: {wanted, other} <= {*shared_nsqlookupd.get("/topics")["topics"]}, "nsqlookupd knows both")
    arguments = (f"--topic-pattern=^{topic}.*s(.late)?$", f"--output-dir={tmp_path}", SOON)
    for refresh in ("1h", "50ms"):
        with started("nsq_to_file", lookup(shared_nsqlookupd), f"--topic-refresh={refresh}", *arguments) as process:
            wait_finished(shared_nsqd, wanted, 1)
            if refresh == "50ms":
                shared_nsqd.publish(late, late.encode())
                wait_finished(shared_nsqd, late, 1)
            log = end(process)
    assert sorted(lines(tmp_path)) == [wanted.encode(), late.encode()]
    skipped = [line for line in log.splitlines() if f"skipping topic {other} (doesn't match pattern" in line]
    assert len(skipped) == 1, "said once, not every time"
    assert not shared_nsqd.stats(other)["channels"]


def test_partitions_over_a_compressed_connection(
    shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str, tmp_path: Path
):
    made = shared_nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=3&replicator=1")
    assert made.status == 200, made
    bodies = [b"%d" % number for number in range(300)]

    async def publish() -> None:
        async with Producer(nsqlookupd_http_addresses="http://{}:{}".format(*shared_nsqlookupd.http)) as producer:
            for partition in range(3):
                await producer.mpub(topic, bodies[partition::3], partition=partition)

    asyncio.run(publish())
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", "--consumer-opt=snappy", SOON)
    with started("nsq_to_file", lookup(shared_nsqlookupd), *arguments) as process:
        wait_until(lambda: len(lines(tmp_path)) == 300, "all are written")
        log = end(process)
    assert Counter(lines(tmp_path)) == Counter(bodies)
    assert all(f"partition {number}" in log for number in range(3))


def test_a_topic_that_would_be_a_directory_above(shared: Daemons, shared_nsqlookupd: Nsqlookupd, tmp_path: Path):
    nsqd = shared.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:{shared_nsqlookupd.tcp[1]}")
    for each in ("..", "fine"):
        nsqd.publish(each, b"x")
    out = tmp_path / "a" / "out"
    arguments = ("--topic=..", "--topic=fine", f"--output-dir={out}", "--filename-format=<TOPIC>/x.log", SOON)
    with started("nsq_to_file", at(nsqd), *arguments) as process:
        wait_finished(nsqd, "fine", 1)
        assert "skipping topic ..: topic .. would be a directory" in end(process)
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*.log")] == [Path("a/out/fine/x.log")]


def test_every_nsqd_that_refuses_is_an_error(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    done = run("nsq_to_file", at(shared_nsqd), f"--topic={topic}", "--consumer-opt=tls_v1", f"--output-dir={tmp_path}")
    assert done.returncode == 1
    assert b"nsqd offers no TLS" in done.stderr.splitlines()[-1], done.stderr
    assert b"Traceback" not in done.stderr


def test_a_directory_that_cannot_be_written_is_one_line(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    shared_nsqd.publish(topic, b"kept")
    (tmp_path / "file").write_bytes(b"")
    done = run("nsq_to_file", at(shared_nsqd), f"--topic={topic}", f"--output-dir={tmp_path / 'file' / 'x'}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].endswith(
        f"{tmp_path / 'file' / 'x'} cannot be written: Not a directory".encode()
    )
    assert shared_nsqd.unfinished(topic, CHANNEL) == 1


@needs_root
def test_a_full_disk_stops_it_until_there_is_room(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    """NSQ's ends with an error, and leaves what it has half written."""
    with mounted_tmpfs(tmp_path / "small", 1_000_000) as mount:
        directory = mount.path
        shared_nsqd.publish(topic, b"first")
        arguments = (f"--topic={topic}", f"--output-dir={directory}", "--filename-format=x.log", SOON)
        with started("nsq_to_file", at(shared_nsqd), *arguments) as process:
            wait_finished(shared_nsqd, topic, 1)
            mount.fill()
            bodies = [b"%d" % number + b"x" * 20_000 for number in range(10)]
            shared_nsqd.publish(topic, *bodies)
            wait_until(lambda: shared_nsqd.stats(topic, CHANNEL)["requeue_count"], "there is no room")
            mount.empty()
            wait_finished(shared_nsqd, topic, 11)
            log = end(process)
        assert Counter(lines(directory)) == Counter([b"first", *bodies]), "each of them once"
    assert "cannot be written: No space left on device; " in log
    assert "there is room again" in log


@pytest.mark.parametrize("kind", ["plain", "gzip"])
def test_every_message_is_in_a_whole_file_after_kills(nsqd: Nsqd, kind: str, tmp_path: Path):
    out, work, chance = tmp_path / "out", tmp_path / "work", random.Random(kind)
    bodies = [b"%06d" % number for number in range(6000)]
    nsqd.request("POST", "/topic/create?topic=t")
    nsqd.request("POST", f"/channel/create?topic=t&channel={CHANNEL}")
    arguments = [
        "--topic=t", f"--output-dir={out}", f"--work-dir={work}", "--max-in-flight=50", "--rotate-size=2000",
        *(["--gzip"] if kind == "gzip" else []), SOON,
    ]  # fmt: skip
    for start in range(0, len(bodies), 2000):
        with started("nsq_to_file", at(nsqd), *arguments) as process:
            nsqd.publish("t", *bodies[start : start + 2000])
            wait_until(partial(_has_fewer, nsqd, nsqd.unfinished("t", CHANNEL)), "it works")
            time.sleep(chance.random() * 0.05)  # at any moment
            process.send_signal(signal.SIGKILL)
            process.wait(PATIENCE_S)
    with started("nsq_to_file", at(nsqd), *arguments) as process:
        wait_finished(nsqd, "t", len(bodies))
        wait_until(lambda: len(nsqd.stats("t", CHANNEL)["clients"]) == 1, "it has begun")
        end(process)
    assert [path for path in work.rglob("*") if path.is_file()] == []
    assert set(lines(out)) == set(bodies)


def _has_fewer(nsqd: Nsqd, count: int) -> bool:
    return nsqd.unfinished("t", CHANNEL) < count


def test_a_second_one_leaves_the_files_of_the_first_alone(shared_nsqd: Nsqd, topic: str, tmp_path: Path):
    out, work = tmp_path / "out", tmp_path / "work"
    arguments = (f"--topic={topic}", f"--output-dir={out}", f"--work-dir={work}", "--sync-interval=1h")
    shared_nsqd.publish(topic, b"1")
    with started("nsq_to_file", at(shared_nsqd), *arguments) as first:
        wait_until(lambda: lines(work) == [b"1"], "it is written")
        with started("nsq_to_file", at(shared_nsqd), *arguments) as second:
            wait_until(lambda: len(shared_nsqd.stats(topic, CHANNEL)["clients"]) == 2, "both consume")
            assert lines(work) == [b"1"]
            end(second)
        end(first)
    assert lines(out) == [b"1"]
