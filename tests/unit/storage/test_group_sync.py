"""Syncing many logs together: what is synced at a start, in a round and at a stop, how often, and what a fault does."""

import errno
import random
import threading
from collections import Counter

import pytest
from tests.sim.disk import CrashingDisk

from flintmq.storage import Creation, LogPlace, OsFiles, create_logs, run_tickets
from flintmq.storage.cache import ReadCache
from flintmq.storage.group_sync import sync_together
from flintmq.storage.partition_log import PartitionLog
from flintmq.testing import MemoryDisk

COUNT = 12


def directory(number):
    return f"topics/t-{number}/p-0000"


class Node:
    """A process with many logs, and how often it did what to the disk."""

    def __init__(self, disk):
        self.disk = disk
        self.files = disk.attach()
        self.reports = []
        self.seen: list[tuple[str, str]] = []
        disk.observers[:] = [lambda operation: self.seen.append((operation.kind, operation.path))]
        self.logs = []

    def arguments(self):
        return {"segment_bytes": 10_000, "cache": ReadCache(), "report": self.reports.append, "created_ns": 7}

    def open(self):
        places = [LogPlace(directory(number), 0) for number in range(COUNT)]
        self.logs = PartitionLog.open_all(self.files, places, **self.arguments())
        return self

    def create(self, sync=True):
        creations = [
            Creation(PartitionLog.new(self.files, directory(number), partition=0, **self.arguments()))
            for number in range(COUNT)
        ]
        create_logs(creations, sync)
        for creation in creations:
            assert creation.error is None
            creation.finish()
        self.logs = [creation.log for creation in creations]
        return self

    def append(self, *numbers):
        for number in numbers or range(COUNT):
            self.logs[number].append([b"message"], 1)

    def sync(self):
        """One round; the numbers of the logs it was about."""
        tickets = {number: ticket for number, log in enumerate(self.logs) if (ticket := log.begin_sync()) is not None}
        errors = run_tickets(list(tickets.values()))
        for (number, ticket), error in zip(tickets.items(), errors, strict=True):
            self.logs[number].finish_sync(ticket, error)
        return list(tickets)

    def close(self):
        for log in self.logs:
            log.close()
        self.files.close()

    def counted(self):
        """How often a file and how often each directory was synced since the last look."""
        seen, self.seen[:] = [*self.seen], []
        files = Counter(path for kind, path in seen if kind == "sync")
        directories = Counter(path for kind, path in seen if kind == "sync_directory")
        return files, directories, [path for kind, path in seen if kind == "write"]


def segments(*numbers):
    return Counter(f"{directory(number)}/{1:020d}.log" for number in numbers or range(COUNT))


@pytest.fixture
def disk():
    return CrashingDisk()


def test_after_a_clean_stop_nothing_is_written_or_synced(disk):
    node = Node(disk).create()
    node.append()
    node.sync()
    node.close()
    node = Node(disk).open()
    assert node.counted() == ({}, {}, [])
    assert [log.next_sequence for log in node.logs] == [2] * COUNT
    assert [log.synced_sequence for log in node.logs] == [2] * COUNT
    assert node.sync() == []
    node.close()
    assert node.counted() == ({}, {}, [])


@pytest.mark.parametrize("seed", range(10))
def test_after_a_kill_each_log_is_synced_once_and_no_directory_whose_name_is_known_to_be_durable(disk, seed):
    node = Node(disk).create()
    for _ in range(2):  # the second says that the first was synced
        node.append()
        node.sync()
    disk.crash(power_loss=False, rng=random.Random(seed))
    node = Node(disk).open()
    files, directories, _ = node.counted()
    assert (files, directories) == (segments(), {})
    disk.crash(power_loss=True, rng=random.Random(seed))
    assert [log.next_sequence for log in Node(disk).open().logs] == [3] * COUNT


@pytest.mark.parametrize("seed", range(10))
def test_after_a_kill_of_what_was_never_synced_every_directory_is_synced_once(disk, seed):
    node = Node(disk).create(sync=False)
    node.append()
    disk.crash(power_loss=False, rng=random.Random(seed))
    node = Node(disk).open()
    files, directories, _ = node.counted()
    assert files == segments()
    own = [path for number in range(COUNT) for path in (directory(number), f"topics/t-{number}")]
    assert directories == Counter([*own, "topics", ""])
    disk.crash(power_loss=True, rng=random.Random(seed))
    assert [log.next_sequence for log in Node(disk).open().logs] == [2] * COUNT


def test_a_round_syncs_what_was_appended_to_and_a_stop_no_more(disk):
    node = Node(disk).create()
    node.append()
    node.sync()
    node.append(3, 5)
    node.counted()
    assert node.sync() == [3, 5]
    assert node.counted()[:2] == (segments(3, 5), {})
    assert node.sync() == []


def test_a_stop_writes_checkpoints_only_where_something_was_added(disk):
    node = Node(disk).create()
    node.append()
    node.sync()
    node.close()
    node = Node(disk).open()
    node.append(4)
    node.sync()
    node.counted()
    node.close()
    assert node.counted() == ({}, {}, [f"{directory(4)}/{1:020d}.index"])


def test_new_logs_of_policy_os_sync_what_they_share_once(disk):
    node = Node(disk).create(sync=False)
    node.append()
    node.counted()
    node.sync()
    files, directories, _ = node.counted()
    assert files == segments()
    assert directories == Counter(
        [*(path for number in range(COUNT) for path in (directory(number), f"topics/t-{number}")), "topics", ""]
    )


def test_a_file_that_cannot_be_synced_fails_its_own_log_alone(disk):
    node = Node(disk).create()
    node.append()
    disk.fail("sync", path=directory(3))
    node.sync()
    assert [number for number, log in enumerate(node.logs) if log.failed] == [3]
    assert [log.synced_sequence for log in node.logs] == [0 if number == 3 else 2 for number in range(COUNT)]


def test_a_directory_that_cannot_be_synced_fails_those_whose_name_is_in_it(disk):
    node = Node(disk).create(sync=False)
    node.append()
    disk.fail("sync_directory", path="topics/t-3")
    node.sync()
    assert [number for number, log in enumerate(node.logs) if log.failed] == [3]


def test_a_directory_that_all_share_fails_all(disk):
    node = Node(disk).create(sync=False)
    node.append()
    disk.fail("sync_directory", nth=2 * COUNT + 1, times=2)
    node.sync()
    assert all(log.failed for log in node.logs)


@pytest.mark.parametrize("kind", ["sync", "write"])
def test_at_a_start_a_fault_of_one_log_leaves_the_others_as_they_are(disk, kind):
    node = Node(disk).create()
    node.append()
    disk.crash(power_loss=False, rng=random.Random(0))
    disk.fail(kind, path=directory(3))
    node = Node(disk).open()
    assert [number for number, log in enumerate(node.logs) if log.failed] == [3]
    assert [log.synced_sequence for log in node.logs] == [0 if number == 3 else 2 for number in range(COUNT)]
    node.append(0, 11)
    assert node.sync() == [0, 11]


def test_a_log_deleted_meanwhile_has_no_error_to_tell(disk):
    node = Node(disk).create()
    node.append()
    tickets = [log.begin_sync() for log in node.logs]
    node.logs[3].delete()
    disk.fail("sync", path=directory(3))
    assert run_tickets(tickets) == [None] * COUNT


def test_nothing_to_sync():
    assert run_tickets([]) == []
    assert sync_together(MemoryDisk().attach(), []) == []


# what the real files do with it


@pytest.fixture
def files(tmp_path):
    files = OsFiles(str(tmp_path))
    yield files
    files.close()


def test_calls_are_made_several_at_a_time(files):
    meeting = threading.Barrier(2, timeout=60)  # nobody passes it alone
    assert files.run_all([meeting.wait] * 2) == [None] * 2


def test_each_call_is_made_once_and_has_its_own_error(files):
    made = []

    def call(number):
        made.append(number)
        if number % 100 == 3:
            raise OSError(errno.EIO, str(number))

    errors = files.run_all([lambda number=number: call(number) for number in range(1000)])
    assert sorted(made) == list(range(1000))
    assert [(number, error.strerror) for number, error in enumerate(errors) if error is not None] == [
        (number, str(number)) for number in range(3, 1000, 100)
    ]


def test_a_mistake_of_ours_is_not_taken_for_a_fault_of_the_disk(files):
    def mistaken():
        raise ValueError("a mistake")

    with pytest.raises(ValueError, match="a mistake"):
        files.run_all([mistaken, lambda: None, mistaken])


def test_a_call_alone_is_made_where_it_is_asked_for(files):
    threads = []
    files.run_all([lambda: threads.append(threading.current_thread())])
    assert threads == [threading.current_thread()]
