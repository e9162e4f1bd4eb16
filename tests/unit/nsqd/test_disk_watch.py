"""When /ping calls the disk full, and what the log says of it."""

from __future__ import annotations

import asyncio
import logging
import urllib.error
import urllib.request

import pytest

from flintmq.env import Env
from flintmq.errors import DiskFull, StorageError
from flintmq.limits import BATCH_SIZE_MAX, DISK_RESERVE_BYTES
from flintmq.nsqd import disk_watch
from flintmq.nsqd.disk_watch import HOLD_NS_MAX, HOLD_NS_MIN, ROOM_BYTES, DiskWatch
from flintmq.testing import MemoryDisk, MemoryNsqd

SECOND = 1_000_000_000
PLENTY = 10 * DISK_RESERVE_BYTES
SIZE = 900_000


class Case:
    """A disk that is looked at once a second, and the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "flintmq")
        self._caplog = caplog
        self.free = PLENTY
        self.refused: DiskFull | None = None
        self.now_ns = SECOND
        self.is_short = False
        self.wanted: list[int] = []
        self.watch = DiskWatch(
            Env(),
            self,  # type: ignore[arg-type]
            "/data",
            lambda: self.refused,
            self.wanted.append,
            lambda: self.is_short,
        )

    def free_bytes(self) -> int:
        return self.free

    def refuse(self, size: int) -> None:
        self.refused = DiskFull("a segment", self.free, DISK_RESERVE_BYTES, size)

    def pass_time(self, duration_ns: int) -> None:
        for _ in range(0, duration_ns, SECOND):
            self.now_ns += SECOND
            self.watch.look(self.free, self.now_ns)

    def told(self) -> list[str]:
        """What the log says since the last call."""
        levels = [record.levelname for record in self._caplog.records]
        self._caplog.clear()
        return levels


@pytest.fixture
def case(caplog: pytest.LogCaptureFixture) -> Case:
    return Case(caplog)


# -- /ping -------------------------------------------------------------------------------------------------------------


def ping(nsqd: MemoryNsqd) -> str:
    try:
        with urllib.request.urlopen(f"{nsqd.http_address}/ping", timeout=60) as answer:
            return str(answer.read(), "utf-8")
    except urllib.error.HTTPError as error:
        with error:
            return str(error.read(), "utf-8")


def test_ping_tells_as_long_as_there_is_no_room_for_what_was_refused():
    disk = MemoryDisk()
    with MemoryNsqd(disk=disk) as nsqd:
        nsqd.publish("t", b"x")
        disk.set_free_bytes(DISK_RESERVE_BYTES + SIZE // 2)
        for _ in range(3):
            with pytest.raises(StorageError, match="disk full"):
                nsqd.publish("t", b"x" * SIZE)
            assert ping(nsqd).startswith("NOK - disk full: ")
            assert ping(nsqd).startswith("NOK - disk full: "), "it is no matter of who asks first"
        disk.set_free_bytes(DISK_RESERVE_BYTES + 2 * SIZE)
        assert ping(nsqd) == "OK", "without a publish"
        nsqd.publish("t", b"x" * SIZE)


def test_ping_tells_until_the_next_good_write():
    disk = MemoryDisk()
    with MemoryNsqd(disk=disk) as nsqd:
        nsqd.publish("t", b"x")
        disk.set_free_bytes(DISK_RESERVE_BYTES + SIZE // 2)
        with pytest.raises(StorageError, match="disk full"):
            nsqd.publish("t", b"x" * SIZE)
        nsqd.publish("memory#ephemeral", b"x")
        assert ping(nsqd).startswith("NOK - disk full: "), "what goes into memory says nothing of the disk"
        nsqd.publish("t", b"x")
        assert ping(nsqd) == "OK"


@pytest.mark.parametrize(("free", "is_full"), [(DISK_RESERVE_BYTES, True), (DISK_RESERVE_BYTES + 1, False)])
def test_without_a_refusal_it_is_full_when_not_even_one_byte_could_be_stored(case: Case, free: int, is_full: bool):
    case.free = free
    assert (case.watch.full(None) is not None) == is_full


def test_a_write_that_finds_no_room_is_believed_and_not_the_file_system(case: Case):
    """A quota: the file system says that there is room."""
    case.refuse(SIZE)
    assert case.watch.full(case.refused) is case.refused
    case.free += 1
    assert case.watch.full(case.refused) is None


def test_a_file_system_that_cannot_be_asked_changes_nothing(case: Case, monkeypatch: pytest.MonkeyPatch):
    def fail() -> int:
        raise OSError(5, "Input/output error")

    case.refuse(SIZE)
    monkeypatch.setattr(case, "free_bytes", fail)
    assert case.watch.full(None) is None
    assert case.watch.full(case.refused) is case.refused


# -- the log -----------------------------------------------------------------------------------------------------------


def test_each_change_is_told_once_however_many_are_refused(case: Case, caplog: pytest.LogCaptureFixture):
    case.pass_time(10 * SECOND)
    assert case.told() == []
    case.free = DISK_RESERVE_BYTES + SIZE // 2
    case.pass_time(10 * SECOND)
    assert case.told() == [], "there is room for others"
    case.refuse(SIZE)
    case.pass_time(SECOND)
    (line,) = caplog.messages
    assert "publishes are refused, the disk of /data is full" in line
    assert f"{case.free} bytes free, {DISK_RESERVE_BYTES} are always kept free, and {SIZE} more were" in line
    assert "--retention-bytes" in line
    for _ in range(100):
        case.refuse(SIZE)
        case.pass_time(SECOND)
    assert case.told() == ["WARNING"]
    case.pass_time(100 * SECOND)
    assert case.told() == [], "there is still no room for what was refused"
    case.free = PLENTY
    case.pass_time(HOLD_NS_MIN - SECOND)
    assert case.told() == []
    case.pass_time(SECOND)
    assert caplog.messages == [f"the disk of /data has room again: {PLENTY} bytes are free"]
    case.pass_time(HOLD_NS_MAX)
    assert case.told() == ["INFO"], "what was refused once is not told again"


def test_a_full_disk_is_told_of_without_a_publish(case: Case):
    case.free = DISK_RESERVE_BYTES
    case.pass_time(SECOND)
    assert case.told() == ["WARNING"]
    case.free = PLENTY
    case.pass_time(HOLD_NS_MIN)
    assert case.told() == ["INFO"]


def test_one_that_goes_to_and_fro_is_told_of_ever_more_seldom(case: Case):
    hour = 3600 * SECOND
    for _ in range(hour // (7 * SECOND)):
        case.refuse(SIZE)
        case.pass_time(7 * SECOND)
    assert len(case.told()) <= 6
    case.pass_time(hour)
    case.told()
    case.refuse(SIZE)
    case.pass_time(HOLD_NS_MIN + 2 * SECOND)
    assert case.told() == ["WARNING", "INFO"], "that is long ago"


def test_room_is_asked_for_while_there_is_none(case: Case):
    case.pass_time(3 * SECOND)
    assert case.wanted == []
    case.free = DISK_RESERVE_BYTES + SIZE - 1
    case.pass_time(SECOND)
    assert case.wanted == [], "nothing was refused"
    case.refuse(SIZE)
    case.pass_time(2 * SECOND)
    assert case.wanted == [BATCH_SIZE_MAX, ROOM_BYTES - case.free]
    case.free = DISK_RESERVE_BYTES + SIZE
    case.pass_time(2 * SECOND)
    assert len(case.wanted) == 2, "there is room for what was refused"
    case.is_short = True
    case.pass_time(SECOND)
    assert case.wanted[2:] == [ROOM_BYTES - case.free], "a cluster wants more"
    case.free = ROOM_BYTES
    case.pass_time(SECOND)
    assert len(case.wanted) == 3


def test_room_is_asked_for_where_a_write_finds_none_although_some_is_free(case: Case):
    case.refuse(SIZE)
    case.pass_time(5 * SECOND)
    assert case.wanted == [BATCH_SIZE_MAX], "once for each that is refused"


async def test_it_is_looked_at_the_start_and_from_then_on(caplog: pytest.LogCaptureFixture, monkeypatch):
    monkeypatch.setattr(disk_watch, "LOOK_S", 0.001)
    monkeypatch.setattr(disk_watch, "HOLD_NS_MIN", 0)
    case = Case(caplog)
    answers: list[OSError | int] = [OSError(5, "Input/output error"), DISK_RESERVE_BYTES]

    async def run_blocking(*_: object) -> int:
        answer = answers.pop(0) if answers else PLENTY
        if isinstance(answer, OSError):
            raise answer
        return answer

    watch = DiskWatch(Env(run_blocking=run_blocking), case, "/data", lambda: None)  # type: ignore[arg-type]
    watch.start()
    async with asyncio.timeout(60):
        while len(caplog.records) < 2:
            await asyncio.sleep(0.001)
    await watch.close()
    assert case.told() == ["WARNING", "INFO"]


async def test_a_file_system_that_does_not_answer_holds_nobody(case: Case):
    asked = asyncio.Event()

    async def run_blocking(*_: object) -> int:
        asked.set()
        await asyncio.Event().wait()
        return 0

    watch = DiskWatch(Env(run_blocking=run_blocking), case, "/data", lambda: None)  # type: ignore[arg-type]
    watch.start()
    await asked.wait()
    await watch.close()
    assert case.told() == []
