"""Power loss of a real disk: an ext4 file system in a file is shut down in the middle of the load, as by a pulled plug.

Needs root; skipped otherwise. ``--durability=fsync`` promises that what was answered with OK survives; ``os`` and
``interval`` promise less, and must still start with what is there. Source: docs/delivery.md.
"""

from __future__ import annotations

import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.daemons import SOON_S, Daemons, Nsqd, pub, wait_until
from tests.integration.load import Consumer, Numbers, Publisher, check, drain
from tests.integration.mounts import Disk, ext4_disk, needs_root

pytestmark = [
    needs_root,
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4"),
]
DISK_BYTES = 320 * 1024 * 1024
REPEATED_S = 2.0  # a FIN older than this when the power goes may not be forgotten, however busy the machine is


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    with ext4_disk(tmp_path, DISK_BYTES) as disk:
        yield disk


def cut_power_under(nsqd: Nsqd, disk: Disk) -> None:
    """Cut the power while nsqd stands still at some moment of its work; the caller kills it or lets it go on.

    An ``fdatasync`` that is under way while ext4 is shut down may return success although its last write is gone: a
    plain loop of pwrite and fdatasync shows it in one of a dozen runs. A plug does not do that, it answers nothing.
    """
    nsqd.send_signal(signal.SIGSTOP)
    threads = Path(f"/proc/{nsqd.pid}/task")
    wait_until(
        lambda: all((thread / "stat").read_text().rpartition(")")[2].split()[0] == "T" for thread in threads.iterdir()),
        "every thread stopped",
    )
    disk.mount.cut_power()


def lose_power(nsqd: Nsqd, disk: Disk) -> None:
    """The disk first, then the process: nothing it writes in between arrives."""
    cut_power_under(nsqd, disk)
    nsqd.kill()
    disk.detach()
    disk.attach()


def run_load(nsqd: Nsqd, numbers: Numbers, acked_count: int) -> list[Publisher]:
    publishers = [Publisher(nsqd.tcp, "t", numbers, **how) for how in ({}, {}, {"batch": 50, "window": 10})]
    for publisher in publishers:
        publisher.start()
    wait_until(lambda: sum(publisher.acked_count for publisher in publishers) >= acked_count, "load")
    return publishers


@pytest.mark.parametrize("has_channel", [False, True], ids=["no-channel", "consumer"])
def test_nothing_acknowledged_is_lost(daemons: Daemons, disk: Disk, has_channel: bool):
    """Three power losses of one data directory, segments rolling all the time."""
    nsqd = daemons.nsqd("--max-bytes-per-file=1048576", data_path=disk.mount.path / "data")
    chance = random.Random(f"power {has_channel}")
    numbers = Numbers()
    publishers: list[Publisher] = []
    consumers: list[Consumer] = []
    cut_at: list[float] = []
    for _ in range(3):
        if has_channel:
            consumers.append(Consumer(nsqd.tcp, "t", "c", 500).begin())
        publishers += (some := run_load(nsqd, numbers, chance.randrange(2_000, 10_000)))
        cut_at.append(time.monotonic())
        lose_power(nsqd, disk)
        for publisher in some:
            publisher.finish()
        nsqd.start()
    consumers = [*(consumer.stop() for consumer in consumers), drain(nsqd, "t", "c")]
    check(publishers, *consumers)
    assert sum(len(publisher.attempted) - publisher.acked_count for publisher in publishers) > 0
    finished_before_cut_s: dict[int, float] = {}
    for consumer, cut in zip(consumers, [*cut_at, 0.0], strict=False):
        assert all(finished_before_cut_s.get(number, 0.0) < REPEATED_S for number in consumer.numbers)
        finished_before_cut_s |= {number: cut - at for number, at in consumer.finished_at.items()}
    assert nsqd.request("GET", "/ping").body == b"OK"


def test_channels_progress_and_deferrals_survive(daemons: Daemons, disk: Disk):
    """What SUB and DPUB were answered holds; FINs and REQs a moment old are remembered."""
    nsqd = daemons.nsqd(data_path=disk.mount.path / "data")
    numbers = Numbers()
    deferred = Publisher(nsqd.tcp, "t", numbers, defer_ms=2500, count_max=1000)
    plain = Publisher(nsqd.tcp, "t", numbers, count_max=1000)
    with nsqd.connect() as connection:
        connection.subscribe("t", "c", 600)
        for publisher in (deferred, plain):
            publisher.start()
            publisher.finish()
        messages = connection.messages(600)
        connection.rdy(0)
        connection.finish(*messages[:500])
        connection.settle()
        wait_until(lambda: nsqd.stats("t", "c")["in_flight_count"] == 100, "500 finished")
        flushed = Publisher(nsqd.tcp, "u", numbers, count_max=200, window=2)  # a little time, and syncs of another log
        flushed.start()
        flushed.finish()
        with nsqd.connect() as other:
            other.subscribe("t", "late")
        nsqd.post("/channel/pause?topic=t&channel=late")
        lose_power(nsqd, disk)
    nsqd.start()
    assert nsqd.stats("t", "late")["paused"] is True
    rest = drain(nsqd, "t", "c")
    finished = {int(message.body.split(b" ")[0]) for message in messages[:500]}
    assert not finished & set(rest.numbers), "finished before the power went"
    everything = set(deferred.acked) | set(plain.acked)
    assert everything - finished == set(rest.numbers)
    waits_ms = [
        (delivery.wall_ns - deferred.sent_ns[delivery.number]) / 1e6
        for delivery in rest.deliveries
        if delivery.number in deferred.sent_ns
    ]
    assert len(waits_ms) == 1000 and min(waits_ms) >= 2500


@pytest.mark.parametrize("durability", ["os", "interval"])
def test_the_weaker_promises_leave_a_usable_log(daemons: Daemons, disk: Disk, durability: str):
    """Something may be missing, at the end only; nothing is torn, invented or in the way of going on."""
    # One sync, well before the cut: had a timer its say too, a cut right behind a sync would lose nothing at times.
    flags = (f"--durability={durability}", "--sync-every=20000", "--sync-timeout=1h")
    nsqd = daemons.nsqd(*flags, data_path=disk.mount.path / "data")
    numbers = Numbers()
    publisher = Publisher(nsqd.tcp, "t", numbers, count_max=39_000)
    publisher.start()
    wait_until(lambda: publisher.acked_count >= 30_000, "load")
    lose_power(nsqd, disk)
    publisher.finish()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    assert rest.numbers == list(range(len(rest.numbers))), "what is missing is not the end"
    assert len(rest.numbers) <= len(publisher.attempted)
    assert len(rest.numbers) < publisher.acked_count, "the power was not really cut: these tests prove nothing"
    if durability == "interval":
        assert len(rest.numbers) > 0
    after = Publisher(nsqd.tcp, "t", numbers, count_max=1000)
    after.start()
    after.finish()
    check([after], drain(nsqd, "t", "c"))


def test_a_disk_that_dies(daemons: Daemons, disk: Disk):
    """Every write and sync fails from now on: publishers are told at once, and nobody is told OK for nothing."""
    nsqd = daemons.nsqd(data_path=disk.mount.path / "data")
    numbers = Numbers()
    publishers = run_load(nsqd, numbers, 5_000)
    cut_power_under(nsqd, disk)
    nsqd.send_signal(signal.SIGCONT)
    begun = time.monotonic()
    for publisher in publishers:
        publisher.finish()
    assert time.monotonic() - begun < SOON_S
    errors = [error for publisher in publishers for error in publisher.errors]
    assert len(errors) == len(publishers)
    assert all(re.match(r"E_M?PUB_FAILED M?PUB failed write to \S+ failed: ", error) for error in errors), errors
    with nsqd.connect() as connection:
        assert connection.error(pub("t", b"x")).startswith("E_PUB_FAILED PUB failed ")
    with nsqd.connect() as connection:
        assert connection.error(pub("new", b"x")).startswith("E_PUB_FAILED PUB failed ")
    with nsqd.connect() as connection:
        assert connection.error(b"SUB t c\n").startswith("E_SUB_FAILED SUB failed ")
    answer = nsqd.request("GET", "/ping")
    assert answer.status == 500 and answer.text.startswith("NOK - ")
    nsqd.send_signal(signal.SIGTERM)
    assert nsqd.wait() == 1, "a stop that could not write everything is not a clean one"
    disk.detach()
    disk.attach()
    nsqd.start()
    check(publishers, drain(nsqd, "t", "c"))
