"""The descriptors that are left for topics."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flintmq.net import descriptors

_IN_A_PROCESS_OF_ITS_OWN = """
import os
from flintmq.net import descriptors

def free_below(end):
    return end - sum(os.path.exists(f"/proc/self/fd/{number}") for number in range(end))

opened = [os.open("/", os.O_RDONLY) for _ in range(80)]
limit = max(opened) + 1
descriptors.descriptor_limit = lambda: limit
end = limit - descriptors.kept_count(limit) * 2
assert descriptors.room(10) == free_below(end) == 0
for number in opened[5:15:2]:
    os.close(number)
os.close(opened[-1])  # one of the last, which are kept
before = free_below(limit)
assert descriptors.room(100) == free_below(end) == 5
assert descriptors.room(3) == 3
assert free_below(limit) == before, "all that it opened are closed"
"""


def test_room_is_what_is_free_below_the_last_however_it_lies():
    # what other tests left is closed at any moment here
    done = subprocess.run([sys.executable, "-c", _IN_A_PROCESS_OF_ITS_OWN], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_a_limit_there_is_room(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(descriptors, "descriptor_limit", lambda: -1)
    assert descriptors.room(1_000_000) == 1_000_000
