"""What was answered of topics and channels survives a crash at any operation, whichever of the two syncs ends first."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable, Sequence

import pytest
from tests.sim.disk import CrashingDisk, DiskCrashed

from flintmq.errors import StorageError
from flintmq.storage import integrity
from flintmq.storage.channel_store import ChannelStore, StoredChannel, delete_channel, put_channel, put_topic
from flintmq.testing import MemoryFiles

OPERATIONS_MAX = 80
SEEDS = 6


def change(files: MemoryFiles, done: list[str]) -> None:
    """Make a topic and channels one after the other, and delete one; ``done`` says how far it came."""
    store = ChannelStore(files)
    store.run_transaction([put_topic("t", False)], True)
    done.append("t")
    for name in ("a", "b", "c"):
        store.run_transaction([put_channel("t", 0, name, StoredChannel(0))], True)
        done.append(name)
    store.run_transaction([delete_channel("t", 0, "b")], True)
    done.append("-b")
    store.close()


def reverse(files: MemoryFiles) -> None:
    run_all = files.run_all

    def backwards(calls: Sequence[Callable[[], None]]) -> list[OSError | None]:
        return run_all(calls[::-1])[::-1]

    files.run_all = backwards  # type: ignore[method-assign]


def crashed(number: int, power_loss: bool, is_reversed: bool, seed: int) -> str:
    """Crash at an operation; return what is wrong with what the next start finds, or "end" behind the last one."""
    rng = random.Random(f"{number} {seed}")
    disk = CrashingDisk()
    files = disk.attach()
    if is_reversed:
        reverse(files)
    disk.crash_at(number, power_loss, rng)
    done: list[str] = []
    try:
        change(files, done)
    except DiskCrashed:
        pass
    else:
        return "end"
    disk.heal()
    disk.crash(power_loss, rng)
    store = ChannelStore(disk.attach())
    found = {*store.load().topics, *(name for _, _, name in store.load().channels)}
    steps = ["t", "a", "b", "c", "-b"]
    promised = set(done) - {"b", "-b"} | ({"b"} if "b" in done and "-b" not in done else set())
    under_way = steps[len(done)]
    damages = store.take_damages()
    store.close()
    if damages:
        return f"{damages[0]}"
    wrong = (found ^ promised) - {under_way.removeprefix("-")}
    return f"{sorted(wrong)} after {done}" if wrong else ""


def problems(power_loss: bool, is_reversed: bool) -> list[str]:
    found: list[str] = []
    for number in range(1, OPERATIONS_MAX):
        results = {crashed(number, power_loss, is_reversed, seed) for seed in range(SEEDS if power_loss else 1)}
        if results == {"end"}:
            assert number > 10, "crashed nowhere"
            return found
        found += [f"operation {number}: {result}" for result in results if result]
    raise AssertionError("it has not ended")


@pytest.mark.slow
@pytest.mark.parametrize("is_reversed", [False, True], ids=["list first", "database first"])
@pytest.mark.parametrize("power_loss", [False, True], ids=["kill", "power loss"])
def test_what_was_answered_is_there_after_a_crash_at_any_operation(power_loss: bool, is_reversed: bool):
    assert not problems(power_loss, is_reversed)


@pytest.mark.slow
def test_a_last_record_that_went_with_the_power_would_be_told_of_as_damage(monkeypatch: pytest.MonkeyPatch):
    """What the test above rests on: it sees a start that takes the list for damaged."""
    monkeypatch.setattr(integrity._Opening, "_is_explained", lambda self, loaded, generation: False)
    assert problems(True, is_reversed=True)


def test_a_list_that_cannot_be_synced_is_written_anew_and_the_database_goes_on(caplog: pytest.LogCaptureFixture):
    disk = CrashingDisk()
    store = ChannelStore(disk.attach())
    store.run_transaction([put_topic("t", False)], True)
    disk.fail("sync", path="channels.list")
    store.run_transaction([put_channel("t", 0, "a", StoredChannel(0))], True)
    assert "cannot sync channels.list: Input/output error; it is written anew" in caplog.text
    store.run_transaction([put_channel("t", 0, "b", StoredChannel(0))], True)
    disk.crash(True, random.Random(1))
    store = ChannelStore(disk.attach())
    assert [name for _, _, name in store.load().channels] == ["a", "b"]
    assert not store.take_damages()


def test_a_database_that_refuses_is_told_of_after_the_list_was_synced():
    disk = CrashingDisk()
    store = ChannelStore(disk.attach())
    disk.fail("commit", error=errno.ENOSPC)
    with pytest.raises(StorageError):
        store.run_transaction([put_topic("t", False)], True)
    store.run_transaction([put_topic("t", False)], True)
    disk.crash(True, random.Random(1))
    store = ChannelStore(disk.attach())
    assert list(store.load().topics) == ["t"]
    assert not store.take_damages()
