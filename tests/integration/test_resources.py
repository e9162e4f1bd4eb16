"""What nsqd does when something runs out, breaks or is abused: disk, files, readers, connections, descriptors.

Tests on a file system of their own mount it and need root; without, they are skipped. Source: tests/sim/README.md
(S8, S9, S11), 6; the figures of Go's nsqd in the same situations are in its table 1, rows 14 to 19.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import (
    ERROR,
    SOURCES,
    Answer,
    Connection,
    Daemons,
    Nsqd,
    mpub,
    mpub_body,
    pub,
    sized,
    wait_until,
)
from tests.integration.load import Consumer, Numbers, Publisher, body_of, broken, check, drain, held, number_of
from tests.integration.mounts import Mount, mounted_tmpfs, needs_root

MEBIBYTE = 1024 * 1024
RESERVE_BYTES = 64 * MEBIBYTE  # kept free for the progress of consumers; publishing stops before
BATCH_HEADER_BYTES = 72
SEGMENT_HEADER_BYTES = 64
BODY_SIZE = 2000


# -- disk full ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Mount]:
    with mounted_tmpfs(tmp_path / "disk", RESERVE_BYTES + 12 * MEBIBYTE) as mount:
        yield mount


def publish_until_refused(nsqd: Nsqd, numbers: Numbers, publishers: list[Publisher]) -> list[str]:
    """Publish on several connections until each was told no; return what they were told."""
    more = [Publisher(nsqd.tcp, "t", numbers, size=BODY_SIZE, window=20, **how) for how in ({}, {}, {"batch": 20})]
    for publisher in more:
        publisher.start()
    for publisher in more:
        publisher.finish()
    last = Publisher(nsqd.tcp, "t", numbers, size=BODY_SIZE, window=1)  # until not even one message fits
    last.start()
    more.append(last.finish())
    publishers += more
    return [error for publisher in more for error in publisher.errors]


@needs_root
def test_a_full_disk_refuses_publishes_and_nothing_else(daemons: Daemons, small_disk: Mount):
    """Refused at once with a reason, nothing acknowledged is lost, consumers go on, and it ends by itself."""
    nsqd = daemons.nsqd("--max-bytes-per-file=1048576", data_path=small_disk.path / "data")
    numbers = Numbers()
    publishers: list[Publisher] = []
    before = Publisher(nsqd.tcp, "t", numbers, size=BODY_SIZE, count_max=1000)
    before.start()
    publishers.append(before.finish())
    consumer = Consumer(nsqd.tcp, "t", "c", 200, held).begin()
    wait_until(lambda: len(consumer.deliveries) == 200, "200 in flight")

    errors = publish_until_refused(nsqd, numbers, publishers)
    assert len(errors) == 4
    for error in errors:
        assert re.match(r"E_M?PUB_FAILED M?PUB failed disk full: \S+ has \d+ bytes free and 67108864 are kept", error)
    with nsqd.connect() as connection:
        assert connection.error(pub("t", body_of(10**9, BODY_SIZE))).startswith("E_PUB_FAILED PUB failed disk full")
    answer = nsqd.request("POST", "/pub?topic=t", body_of(10**9, BODY_SIZE))
    assert answer.error == (503, "EXITING")
    assert small_disk.free_bytes() < RESERVE_BYTES + MEBIBYTE

    consumer.stop()
    drained = drain(nsqd, "t", "c")
    check(publishers, consumer, drained)
    wait_until(lambda: small_disk.free_bytes() > RESERVE_BYTES + 5 * MEBIBYTE, "finished segments deleted")
    wait_until(lambda: " has room again: " in nsqd.log, "it is told")
    assert re.search(
        rf" WARNING: publishes are refused, the disk of {re.escape(str(small_disk.path))}/data is full: it has \d+ "
        rf"bytes free, {RESERVE_BYTES} are always kept free, and \d+ more were to be stored; make room \(",
        nsqd.log,
    )
    assert nsqd.log.count("publishes are refused") == 1, "not for each publish"
    after = Publisher(nsqd.tcp, "t", numbers, size=BODY_SIZE, count_max=500)
    after.start()
    assert after.finish().is_complete, after.errors
    nsqd.restart()
    result = check([*publishers, after], drained, drain(nsqd, "t", "c"))
    assert result.lost == []


@needs_root
def test_a_disk_full_of_what_is_consumed_gets_room_although_no_segment_is_full(daemons: Daemons, small_disk: Mount):
    """Each topic has one segment, which is far from full."""
    nsqd = daemons.nsqd(data_path=small_disk.path / "data")
    topics = [f"t{number}" for number in range(8)]
    for topic in topics:
        nsqd.request("POST", f"/channel/create?topic={topic}&channel=c")
    stored: list[int] = []
    while (answer := _publish(nsqd, topics[len(stored) % 8], len(stored))).status == 200:
        stored.append(len(stored))
    assert answer.error == (503, "EXITING")
    assert sorted(number for topic in topics for number in _drained(nsqd, topic)) == stored
    wait_until(lambda: small_disk.free_bytes() > RESERVE_BYTES + 9 * MEBIBYTE, "consumed segments deleted")
    wait_until(lambda: nsqd.request("GET", "/ping").body == b"OK", "healthy again")
    assert _publish(nsqd, "t0", 1000).status == 200
    nsqd.restart()
    assert _publish(nsqd, "t1", 1001).status == 200
    assert [_drained(nsqd, topic) for topic in topics[:3]] == [[1000], [1001], []]


def _publish(nsqd: Nsqd, topic: str, number: int) -> Answer:
    return nsqd.request("POST", f"/pub?topic={topic}", body_of(number, 200_000))


def _drained(nsqd: Nsqd, topic: str) -> list[int]:
    return sorted({delivery.number for delivery in drain(nsqd, topic, "c").deliveries})


@needs_root
def test_a_disk_without_a_single_byte_left(daemons: Daemons, small_disk: Mount):
    """Somebody else took the reserve as well: nsqd stays up, says so, and is whole when the space comes back."""
    nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=262144", data_path=small_disk.path / "data")
    numbers = Numbers()
    first = Publisher(nsqd.tcp, "t", numbers, count_max=5000)
    first.start()
    first.finish()
    consumer = Consumer(nsqd.tcp, "t", "c", 100, held).begin()
    wait_until(lambda: len(consumer.deliveries) == 100, "100 in flight")
    small_disk.fill()
    with nsqd.connect() as connection:
        assert connection.error(pub("t", b"x" * 600_000)).startswith("E_PUB_FAILED PUB failed disk full")
    with nsqd.connect() as connection:
        assert connection.error(pub("new", b"x")).startswith("E_PUB_FAILED PUB failed ")
    consumer.stop()
    while_full = drain(nsqd, "t", "c")  # progress cannot be written, delivering goes on
    check([first], consumer, while_full)
    assert nsqd.is_running
    small_disk.empty()

    def publishes() -> bool:
        with nsqd.connect() as connection:
            connection.send(pub("t", body_of(numbers.take(1)[0])))
            return connection.frame().kind != ERROR

    wait_until(publishes, "publishing again")
    wait_until(lambda: nsqd.request("GET", "/ping").body == b"OK", "healthy again")
    nsqd.restart()
    again = drain(nsqd, "t", "c")
    assert len(again.deliveries) <= 2, "what was finished while the disk was full is finished"
    with nsqd.connect() as connection:
        connection.ok(pub("new", b"x"))


@needs_root
def test_a_start_where_less_than_the_reserve_is_free(daemons: Daemons, tmp_path: Path):
    """A volume that is no larger than what is kept free takes no message ever."""
    with mounted_tmpfs(tmp_path / "disk", RESERVE_BYTES) as mount:
        nsqd = daemons.nsqd(data_path=mount.path)
        wait_until(lambda: "WARNING: publishes are refused, the disk of " in nsqd.log, "it is told without a publish")
        with nsqd.connect() as connection:
            assert connection.error(pub("t", b"x")).startswith("E_PUB_FAILED PUB failed disk full")
        assert nsqd.request("GET", "/ping").body.startswith(b"NOK - disk full: ")
        nsqd.stop()


@needs_root
def test_a_stop_while_the_disk_is_full(daemons: Daemons, small_disk: Mount):
    """It cannot write how far the channels are, says so, and has lost nothing when it is started again."""
    nsqd = daemons.nsqd("--durability=os", data_path=small_disk.path / "data")
    publisher = Publisher(nsqd.tcp, "t", Numbers(), count_max=5000)
    publisher.start()
    publisher.finish()
    nsqd.post("/channel/create?topic=t&channel=c")
    small_disk.fill()
    drain(nsqd, "t", "c")
    wait_until(lambda: "writing progress failed: " in nsqd.log, "it is told")
    assert nsqd.request("GET", "/ping").body.startswith(b"NOK - disk full: ")
    nsqd.send_signal(signal.SIGTERM)
    assert nsqd.wait() == 1
    line = nsqd.log.splitlines()[-1]
    assert re.search(r" FATAL: stopped without writing everything - \S+channels.db: the disk is full \(", line)
    small_disk.empty()
    nsqd.start()
    check([publisher], drain(nsqd, "t", "c"))
    nsqd.stop()


@needs_root
def test_a_kill_while_the_disk_is_full(daemons: Daemons, small_disk: Mount):
    nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=1048576", data_path=small_disk.path / "data")
    publishers: list[Publisher] = []
    publish_until_refused(nsqd, Numbers(), publishers)
    small_disk.fill()
    nsqd.kill()
    small_disk.empty()
    nsqd.start()
    check(publishers, drain(nsqd, "t", "c"))


@needs_root
@pytest.mark.parametrize("how", ["/channel/empty", "/channel/delete", "/topic/delete"])
def test_a_disk_full_of_deferred_messages_gets_room_when_they_are_dropped(daemons: Daemons, tmp_path: Path, how: str):
    """What they had comes back although nearly all of the reserve is taken; a kill changes nothing."""
    with mounted_tmpfs(tmp_path / "disk", RESERVE_BYTES + 30 * MEBIBYTE) as mount:
        nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=1048576", data_path=mount.path / "data")
        nsqd.post("/topic/create?topic=t")
        nsqd.post("/channel/create?topic=t&channel=c")
        with nsqd.connect() as connection:
            for _ in range(10):
                connection.ok(b"MDPUB t 3600000\n" + sized(mpub_body([b"x" * 1000] * 1000)))
        wait_until(lambda: nsqd.stats("t", "c")["deferred_count"] == 10_000, "all are set aside")
        nsqd.write_progress()
        database = mount.path / "data" / "channels.db"
        size = database.stat().st_size
        assert size > 6 * MEBIBYTE
        mount.fill(but_bytes=3 * MEBIBYTE)

        nsqd.post(f"{how}?topic=t" + ("" if "topic" in how else "&channel=c"))
        wait_until(lambda: database.stat().st_size < MEBIBYTE, "it is given back")
        wait_until(lambda: mount.free_bytes() > size, "the disk has it")
        assert "writing progress failed" not in nsqd.log
        nsqd.kill()
        mount.empty()
        nsqd.start()
        assert nsqd.request("GET", "/ping").body == b"OK"
        if how == "/channel/empty":
            assert nsqd.unfinished("t", "c") == 0
        with nsqd.connect() as connection:
            connection.ok(pub("other", b"x"))
        nsqd.stop()


# -- damaged files -----------------------------------------------------------------------------------------------------


def published(nsqd: Nsqd, count: int, batch: int) -> None:
    with nsqd.connect() as connection:
        for start in range(0, count, batch):
            connection.ok(mpub("t", [body_of(number) for number in range(start, start + batch)]))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


@pytest.mark.parametrize(
    "where",
    [
        pytest.param(BATCH_HEADER_BYTES + 500, id="body"),
        pytest.param(11, id="size-of-the-batch"),
        pytest.param(0, id="magic"),
        pytest.param(23, id="first-id"),
        pytest.param(70, id="crc"),
    ],
)
def test_a_flipped_byte(daemons: Daemons, where: int):
    """The batch it hits is reported, kept aside and skipped; everything else is delivered, nothing of it as good."""
    batch = 10
    nsqd = daemons.nsqd("--durability=os")
    published(nsqd, 1000, batch)
    nsqd.stop()
    (segment,) = nsqd.segment_paths("t")
    size = (segment.stat().st_size - SEGMENT_HEADER_BYTES) // 100
    victim = 40
    flip(segment, SEGMENT_HEADER_BYTES + victim * size + where)
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    lost = set(range(victim * batch, (victim + 1) * batch))
    assert set(rest.numbers) == set(range(1000)) - lost
    report = next(line for line in nsqd.log.splitlines() if " ERROR: " in line)
    assert f"{segment.relative_to(nsqd.data_path)} at byte {SEGMENT_HEADER_BYTES + victim * size}, " in report
    assert f"{batch} messages from sequence {victim * batch + 1} to {(victim + 1) * batch} skipped" in report
    (aside,) = segment.parent.glob("*.bad")
    assert aside.stat().st_size == size
    published(nsqd, 10, 10)
    assert sorted(drain(nsqd, "t", "c").numbers) == list(range(10))


@pytest.mark.parametrize("what", ["index", "log.meta", "segment header"])
def test_files_beside_the_messages(daemons: Daemons, what: str):
    """What only helps to find messages is made again when it is damaged or gone."""
    nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=65536")
    published(nsqd, 2000, 10)
    nsqd.stop()
    segments = nsqd.segment_paths("t")
    assert len(segments) > 3
    if what == "index":
        indexes = sorted(segments[0].parent.glob("*.index"))
        flip(indexes[0], 20)
        indexes[1].write_bytes(indexes[1].read_bytes()[:10])
        for index in indexes[2:]:
            index.unlink()
    elif what == "log.meta":
        (segments[0].parent / "log.meta").unlink()
    else:
        flip(segments[0], 3)
        flip(segments[-1], 30)
    nsqd.start()
    assert sorted(drain(nsqd, "t", "c").numbers) == list(range(2000))


def test_a_torn_tail(daemons: Daemons):
    """Half a batch at the end of the file, as a power loss leaves it, is cut; everything before it is there."""
    nsqd = daemons.nsqd("--durability=os")
    published(nsqd, 100, 10)
    nsqd.kill()
    (segment,) = nsqd.segment_paths("t")
    size = segment.stat().st_size
    os.truncate(segment, size - 700)
    nsqd.start()
    assert "unfinished write cut off" in nsqd.log
    published(nsqd, 10, 10)
    assert sorted(drain(nsqd, "t", "c").numbers) == sorted([*range(90), *range(10)])


def test_a_damaged_database_is_made_anew_and_kept(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    published(nsqd, 100, 10)
    nsqd.stop()
    database = nsqd.data_path / "channels.db"
    database.write_bytes(b"no database" * 1000)
    for path in nsqd.data_path.glob("channels.db-*"):
        path.unlink()
    nsqd.start()
    (line,) = [line for line in nsqd.log.splitlines() if "ERROR: channels.db: " in line]
    assert "file is not a database; it is made anew" in line and "kept as channels.db.1.bad" in line
    assert (nsqd.data_path / "channels.db.1.bad").read_bytes() == b"no database" * 1000
    assert sorted(drain(nsqd, "t", "c").numbers) == list(range(100)), "the messages need no database"


# -- connections -------------------------------------------------------------------------------------------------------


class Probe:
    """A healthy client beside the trouble: how long a publish takes to come back as a message."""

    def __init__(self, nsqd: Nsqd) -> None:
        self._connection = nsqd.connect().subscribe("probe", "c", 1)

    def p99_ms(self, count: int = 200) -> float:
        """The 99th percentile of ``count`` round trips."""
        took = []
        for number in range(count):
            begun = time.monotonic()
            self._connection.send(pub("probe", body_of(number)))
            frames = [self._connection.frame(), self._connection.frame()]  # OK and the message, in any order
            took.append(time.monotonic() - begun)
            data = next(data for kind, data in frames if kind == 2)
            assert number_of(data[26:]) == number
            self._connection.send(b"FIN " + data[10:26] + b"\n")
        return sorted(took)[int(count * 0.99) - 1] * 1000

    def is_quick(self) -> bool:
        """Whether publishes come back at once: 99 of 100 within 0.1 s, once in a few tries on a busy machine."""
        return any(self.p99_ms() < 100 for _ in range(10))


def test_a_thousand_silent_connections(nsqd: Nsqd):
    """They are closed by the deadline for the magic, and a good client hardly notices them."""
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(nsqd.tcp)) for _ in range(1000)]
        for connection in silent[:200]:
            connection.sendall(b"  V")  # almost
        opened = time.monotonic()
        assert Probe(nsqd).is_quick()
        wait_until(lambda: all(map(broken, silent)), "all closed")
        assert time.monotonic() - opened > 4.0
    wait_until(lambda: len(os.listdir(f"/proc/{nsqd.pid}/fd")) < 40, "descriptors closed")


def test_a_reader_that_does_not_read(daemons: Daemons):
    """It costs a bounded amount of memory, delays nobody, and is cut after a heartbeat; its messages go to others."""
    nsqd = daemons.nsqd("--durability=os")
    bodies = 400
    with nsqd.connect() as connection:
        for _ in range(bodies // 4):
            connection.ok(mpub("t", [b"x" * 256 * 1024] * 4))
    probe = Probe(nsqd)
    before = nsqd.resident_bytes()
    with nsqd.connect(receive_buffer_bytes=4096) as slow:
        slow.identify(heartbeat_interval=1000)
        slow.subscribe("t", "c", 2500)
        time.sleep(0.3)
        assert nsqd.stats("t", "c")["in_flight_count"] < bodies / 4, "sent without regard to what is read"
        assert probe.is_quick()
        assert nsqd.resident_bytes() - before < 40 * MEBIBYTE
        wait_until(lambda: nsqd.stats("t", "c")["client_count"] == 0, "cut")
    other = Consumer(nsqd.tcp, "t", "d", 100, held)  # a later channel gets nothing of the backlog
    other.begin()
    with nsqd.connect() as reader:
        reader.subscribe("t", "c", 100)
        for _ in range(bodies):
            message = reader.message()
            reader.finish(message)
    assert other.stop().deliveries == []


def test_a_publisher_that_does_not_read_its_answers(nsqd: Nsqd):
    """nsqd stops reading from it instead of gathering its answers."""
    before = nsqd.resident_bytes()
    probe = Probe(nsqd)
    with nsqd.connect(receive_buffer_bytes=4096) as connection:
        connection.socket.settimeout(1.0)
        commands = b"".join(pub("t#ephemeral", b"x") for _ in range(1000))
        sent = 0
        with contextlib.suppress(TimeoutError):
            while sent < 3000:
                connection.send(commands)
                sent += 1
        assert probe.is_quick()
        assert nsqd.resident_bytes() - before < 40 * MEBIBYTE
    assert sent < 3000, "nobody stopped it"


def test_an_mpub_that_lies_about_its_size(nsqd: Nsqd):
    """body_size 4 and a count of 600 MiB behind it: refused before anything is gathered."""
    before = nsqd.resident_bytes()
    with nsqd.connect() as connection:
        with contextlib.suppress(ConnectionError):
            connection.send(b"MPUB t\n" + struct.pack(">ii", 4, 600))
            for _ in range(100):
                connection.send(struct.pack(">i", MEBIBYTE) + b"x" * MEBIBYTE)
        frames = connection.wait_closed()
    assert [frame.kind for frame in frames[:1]] in ([ERROR], []), "a reset may overtake the error"
    assert nsqd.resident_bytes() - before < 12 * MEBIBYTE
    assert nsqd.get("/stats?format=json")["topics"] in ([], None) or nsqd.stats("t")["message_count"] == 0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_more_connections_than_descriptors(daemons: Daemons, tmp_path: Path, loop: str):
    """It refuses some, neither spins nor floods its log, serves those it has and who looks after it, and recovers."""
    limits = ["prlimit", "--nofile=128:128"]
    if loop == "asyncio":
        (tmp_path / "uvloop.py").write_text("raise ImportError('as if it were not installed')")
        limits += ["env", f"PYTHONPATH={tmp_path}{os.pathsep}{SOURCES}"]
    nsqd = daemons.nsqd("--durability=os", limits=limits)
    probe = Probe(nsqd)
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            connection = stack.enter_context(socket.create_connection(nsqd.tcp))
            with contextlib.suppress(OSError):
                connection.sendall(b"  V2")
        sizes = [-1, len(nsqd.log)]
        while sizes[-1] != sizes[-2]:  # it is not through with all of them
            time.sleep(0.3)
            sizes.append(len(nsqd.log))
        cpu_s, log_size, begun = nsqd.cpu_s(), len(nsqd.log), time.monotonic()
        time.sleep(2.0)
        seconds = time.monotonic() - begun
        assert (nsqd.cpu_s() - cpu_s) / seconds < 0.2
        assert (len(nsqd.log) - log_size) / seconds < 2000
        assert nsqd.request("GET", "/ping").body == b"OK"
        assert probe.is_quick()
    wait_until(lambda: len(os.listdir(f"/proc/{nsqd.pid}/fd")) < 40, "descriptors closed")
    nsqd.publish("t", b"x")


def test_more_topics_than_descriptors(daemons: Daemons):
    """Every topic keeps a file open: nsqd takes as many descriptors as it may, and says when they are too few."""
    nsqd = daemons.nsqd("--durability=os", limits=("prlimit", "--nofile=256:4096"))
    with nsqd.connect() as connection:
        connection.ok(b"".join(pub(f"t{number}", b"x") for number in range(400)), 400)
    nsqd.restart()
    assert len(nsqd.get("/stats?format=json")["topics"]) == 400
    nsqd.stop()
    poor = daemons.new_nsqd(data_path=nsqd.data_path, limits=("prlimit", "--nofile=256:256"))
    poor.launch()
    assert poor.wait() == 1
    assert re.search(r" FATAL: failed to instantiate nsqd - .*Too many open files", poor.log.splitlines()[-1])
    assert re.search(
        r"256 files are the limit of this process, and each of the 400 topics and partitions that are stored takes "
        r"one: raise it to 656 or more \(LimitNOFILE of systemd, ulimit -n\)$",
        poor.log.splitlines()[-1],
    )
    nsqd.start()
    assert len(nsqd.get("/stats?format=json")["topics"]) == 400


def test_topics_leave_descriptors_for_whoever_deletes_them(daemons: Daemons):
    """However quickly they come: what is there is served, and topics are made again once some are gone."""
    nsqd = daemons.nsqd("--durability=os", limits=("prlimit", "--nofile=128:128"))

    def create(path: str) -> str:
        answer = nsqd.request("POST", path, b"x")
        assert answer.status in (200, 503), answer.body
        return answer.body.decode() if answer.status == 503 else ""

    with nsqd.connect() as publisher, nsqd.connect() as subscriber, contextlib.ExitStack() as stack:
        subscriber.settle()
        publisher.send(b"".join(pub(f"t{number}", b"x") for number in range(400)))
        frames = publisher.wait_closed()
        assert {frame.data for frame in frames[:-1]} == {b"OK"}
        made = len(frames) - 1
        refused = f"E_PUB_FAILED PUB failed topic t{made} cannot be created: too few of 128 open files are left"
        assert frames[-1].data.decode().startswith(refused), frames[-1]
        while made < 128 and not create(f"/pub?topic=t{made}"):
            made += 1
        for _ in range(5):  # clients have their share
            stack.enter_context(nsqd.connect()).settle()
        assert nsqd.request("GET", "/ping").body == b"OK"
        assert len(nsqd.get("/stats?format=json")["topics"]) == made + 1, "and the one of settle()"
        for path in ("/pub?topic=new", "/topic/create?topic=new", "/topic/create?topic=new&partition_num=100"):
            assert create(path).startswith('{"message":"TOO_FEW_FILES: topic new cannot be created: '), path
        subscriber.send(b"SUB new c\n")
        text = "E_SUB_FAILED SUB failed topic new cannot be created: too few of 128 open files are left.*LimitNOFILE"
        assert re.match(text, subscriber.wait_closed()[-1].data.decode())
        assert create("/pub?topic=t0") == ""
        assert create("/pub?topic=new%23ephemeral") == "", "it has no file"
        for number in range(10):
            nsqd.post(f"/topic/delete?topic=t{number}")
        wait_until(lambda: not create("/topic/create?topic=new"), "there is room again")
    assert "topic not created: too few of 128 files are left" in nsqd.log
    assert "Too many open files" not in nsqd.log


def test_partitions_of_a_cluster_leave_descriptors_for_clients(daemons: Daemons):
    """What nodes have files for is placed on them, and no more; somebody can still connect, and delete topics."""
    store = f"--store-path={daemons.new_directory('store')}"
    nsqlookupd = daemons.nsqlookupd("--cluster-store=own", "--allow-same-host", store)
    flags = (
        "--durability=os", "--peer-address=127.0.0.1:0", f"--cluster-store=127.0.0.1:{nsqlookupd.http[1]}",
        f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}",
    )  # fmt: skip
    nodes = [daemons.nsqd(*flags, limits=("prlimit", "--nofile=192:192")) for _ in range(2)]
    wait_until(lambda: len(nsqlookupd.get("/cluster/status")["nodes"]) == 2, "both are there")

    def create(topic: str) -> str:
        answer = nsqlookupd.request("POST", f"/topic/create?topic={topic}&partition_num=20&replicator=2")
        return "" if answer.status == 200 else f"{answer.status} {answer.body.decode()}"

    refused = [create(f"t{number}") for number in range(4)]
    assert refused[:3] == ["", "", ""], "192 - 32 - 100 = 60 copies"
    assert "no nsqd has an open file left for another copy" in refused[3], refused[3]
    rows = nsqlookupd.get("/cluster/status")["nodes"]
    assert [(row["holds"], row["copies_max"]) for row in rows] == [(60, 60)] * 2
    for nsqd in nodes:
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(nsqd.connect()).settle()
    nsqlookupd.post("/topic/delete?topic=t0")
    wait_until(lambda: not create("new"), "there is room again")
    assert not any("Too many open files" in nsqd.log for nsqd in nodes)


def test_connections_beyond_the_limit_are_refused(daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os", "--max-connections=10")
    with contextlib.ExitStack() as stack:
        good = [stack.enter_context(nsqd.connect()) for _ in range(10)]
        for connection in good:
            connection.settle()
        with Connection(nsqd.tcp, magic=b"") as refused:
            assert refused.wait_closed() == []
        for _ in range(100):
            with Connection(nsqd.tcp, magic=b"") as refused:
                assert refused.wait_closed() == []
        refusals = [line for line in nsqd.log.splitlines() if "client refused: 10 connections are the limit" in line]
        assert len(refusals) < 50 and "127.0.0.1:" in refusals[0], "who comes again and again does not fill the log"
        for connection in good:
            connection.settle()
        good[0].close()
        with nsqd.connect() as again:
            again.settle()


def test_many_idle_consumers_cost_little(nsqd: Nsqd):
    """500 subscribed connections on 50 channels: little memory, no CPU, the probe undisturbed."""
    probe = Probe(nsqd)
    before = nsqd.resident_bytes()
    with contextlib.ExitStack() as stack:
        for number in range(500):
            stack.enter_context(nsqd.connect()).subscribe("t", f"c{number % 50}#ephemeral", 1)
        assert nsqd.resident_bytes() - before < 500 * 20 * 1024 + 5 * MEBIBYTE
        cpu_s = nsqd.cpu_s()
        time.sleep(1.0)
        assert nsqd.cpu_s() - cpu_s < 0.15
        assert probe.is_quick()
