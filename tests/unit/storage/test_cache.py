"""What all logs share: bounded in bytes, in handles, in tails."""

from __future__ import annotations

from functools import partial

from flintmq.storage import File
from flintmq.storage.cache import ReadCache
from flintmq.testing import MemoryFiles


def is_open(file: File) -> bool:
    try:
        file.size()
    except OSError:
        return False
    return True


class FakeLog:
    def __init__(self) -> None:
        self.dropped = 0

    def drop_tail(self) -> None:
        self.dropped += 1


def test_least_recently_used_values_go_first():
    cache = ReadCache(capacity_bytes=100)
    gone: list[str] = []
    for key in "abc":
        cache.put(key, key.upper(), 30, partial(gone.append, key))
    assert cache.get("a") == "A"
    cache.put("d", "D", 30)
    assert gone == ["b"]
    assert cache.get("b") is None
    assert [cache.get(key) for key in "acd"] == ["A", "C", "D"]
    assert cache.used_bytes == 90


def test_one_value_larger_than_everything_stays_until_the_next():
    cache = ReadCache(capacity_bytes=100)
    cache.put("small", 1, 10)
    cache.put("huge", 2, 1000)
    assert cache.get("small") is None
    assert cache.get("huge") == 2
    cache.put("next", 3, 10)
    assert cache.get("huge") is None
    assert cache.used_bytes == 10


def test_putting_again_replaces_and_tells():
    cache = ReadCache()
    gone: list[int] = []
    cache.put("key", 1, 10, lambda: gone.append(1))
    cache.put("key", 2, 20, lambda: gone.append(2))
    assert gone == [1]
    assert cache.used_bytes == 20
    cache.discard("key")
    cache.discard("key")
    assert gone == [1, 2]
    assert cache.used_bytes == 0


def test_handles_are_bounded_and_closed():
    cache = ReadCache(files_max=2)
    files = MemoryFiles()
    opened: list[str] = []

    def handle(key: str) -> File:
        def open_file() -> File:
            opened.append(key)
            return files.open(key, create=True)

        return cache.file(key, open_file)

    a, b = handle("a"), handle("b")
    assert handle("a") is a
    c = handle("c")
    assert opened == ["a", "b", "c"]
    assert [is_open(file) for file in (a, b, c)] == [True, False, True]
    cache.close_file("a")
    cache.close_file("a")
    assert not is_open(a)


def test_a_handle_can_be_taken_and_given_back():
    cache = ReadCache(files_max=1)
    files = MemoryFiles()
    file = files.open("a", create=True)
    cache.keep_file("a", file)
    assert cache.take_file("a") is file
    assert cache.take_file("a") is None
    cache.keep_file("b", files.open("b", create=True))
    assert is_open(file), "a taken handle is not the cache's to close"
    cache.keep_file("a", file)
    again = files.open("a")
    cache.keep_file("a", again)
    assert not is_open(file)
    assert is_open(again)


def test_the_log_that_appended_longest_ago_gives_its_tail_up():
    cache = ReadCache(tails_bytes=100)
    one, two, three = FakeLog(), FakeLog(), FakeLog()
    cache.tail_changed(one, 40)
    cache.tail_changed(two, 40)
    cache.tail_changed(one, 10)
    assert (one.dropped, two.dropped) == (0, 0)
    cache.tail_changed(three, 30)
    assert (one.dropped, two.dropped, three.dropped) == (0, 1, 0)
    assert cache.tails_bytes == 80
    cache.tail_changed(one, -20)
    assert cache.tails_bytes == 60
    cache.tail_changed(two, 30)
    assert one.dropped == 0
    cache.tail_changed(three, 30)
    assert one.dropped == 1, "a tail that shrank does not count as used"
    cache.tail_dropped(three)
    cache.tail_dropped(three)
    assert cache.tails_bytes == 30


def test_the_only_tail_is_left_alone():
    cache = ReadCache(tails_bytes=10)
    log = FakeLog()
    cache.tail_changed(log, 1000)
    assert log.dropped == 0


def test_describe_counts():
    cache = ReadCache(capacity_bytes=100)
    cache.put("a", 1, 10)
    cache.keep_file("f", MemoryFiles().open("f", create=True))
    cache.tail_changed(FakeLog(), 7)
    assert cache.describe() == "ReadCache(10/100 bytes in 1 entries, 1 handles, 7 bytes in 1 tails)"
