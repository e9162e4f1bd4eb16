"""Power loss of a real disk under idempotent publishing: everything sent again is there once, and nothing is missing.

Needs root; skipped otherwise.
"""

from __future__ import annotations

import shutil
from collections import Counter

import pytest
from tests.integration.daemons import Closed, Daemons
from tests.integration.mounts import Disk, needs_root
from tests.integration.test_once import numbers, once, several, stored
from tests.power.test_power import disk as disk
from tests.power.test_power import lose_power

pytestmark = [
    needs_root,
    pytest.mark.skipif(shutil.which("mkfs.ext4") is None, reason="needs mkfs.ext4"),
]
BATCHES, SIZE = 1500, 7


@pytest.mark.parametrize("durability", ["fsync", "os"])
def test_sent_again_after_a_power_loss(daemons: Daemons, disk: Disk, durability: str):
    """With fsync what was acknowledged is there without being sent again; with less, what was taken comes back."""
    flags = ("--max-bytes-per-file=65536", f"--durability={durability}")
    nsqd = daemons.nsqd(*flags, data_path=disk.mount.path / "data")
    batches = [several("t", "p", 1 + SIZE * n, SIZE) for n in range(BATCHES)]
    singles = [once("t", "q", 1 + n) for n in range(BATCHES)]
    acked = 0
    for attempt in range(3):
        with nsqd.connect() as connection, nsqd.connect() as other:
            connection.send(b"".join(batches[acked:]))
            other.send(b"".join(singles[acked:]))
            for _ in range(100 + 50 * attempt):
                connection.ok()
                other.ok()
                acked += 1
            lose_power(nsqd, disk)
        nsqd.start()
        if durability == "fsync":
            there = set(stored(nsqd, "t"))
            assert set(numbers("p", 1, SIZE * acked)) | set(numbers("q", 1, acked)) <= there
        else:
            acked = 0  # what the kernel had not written is gone, so a producer that wants all of it begins anew
    with nsqd.connect() as connection, nsqd.connect() as other:
        try:
            connection.ok(b"".join(batches[acked:]), len(batches) - acked)
            other.ok(b"".join(singles[acked:]), len(singles) - acked)
        except Closed:
            pytest.fail(nsqd.log)
    found = Counter(stored(nsqd, "t"))
    assert found == Counter([*numbers("p", 1, SIZE * BATCHES), *numbers("q", 1, BATCHES)])
