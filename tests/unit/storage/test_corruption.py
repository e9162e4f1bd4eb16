"""Every byte of a small log changed or cut: what is damaged is found, nothing else is lost, nothing wrong is served."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from tests.sim.disk import CrashingDisk
from tests.unit.storage.log_kit import CREATED_NS, DIRECTORY, Kit, fetch_all, fill, read_all, sync

from flintmq.batch import decode_header
from flintmq.storage.segment import SEGMENT_HEADER_BYTES


@dataclass(frozen=True)
class Sample:
    """A log as bytes, and where each batch lies in it."""

    contents: dict[str, bytes]
    model: dict[int, bytes]
    batches: dict[str, list[tuple[int, int, range]]]

    def disk(self, changed: dict[str, bytes | None]) -> Kit:
        """The log on a new disk, with some files replaced (or, by None, missing)."""
        disk = CrashingDisk()
        files = disk.attach()
        files.make_directory(DIRECTORY)
        for path, content in {**self.contents, **changed}.items():
            if content is not None:
                file = files.open(path, create=True)
                file.write_at(0, content)
                file.sync()
        files.sync_directory(DIRECTORY)
        return Kit(disk)

    def hit(self, path: str, first: int, last: int) -> set[int]:
        """Sequences of the batches that overlap bytes ``first`` to ``last`` of a file."""
        hit: set[int] = set()
        for start, end, sequences in self.batches.get(path, []):
            if start <= last and first < end:
                hit.update(sequences)
        return hit


def make_sample(is_clean: bool) -> Sample:
    kit = Kit(segment_bytes=900)
    log = kit.open()
    model = fill(log, 11)
    sync(log)
    if is_clean:
        log.close()
    kit.disk.release()
    contents = {path: kit.disk.content(path) for path in kit.disk.paths()}
    if not is_clean:
        contents = {path: content for path, content in contents.items() if not path.endswith(".index")}
    batches: dict[str, list[tuple[int, int, range]]] = {}
    for path in kit.logs():
        position = SEGMENT_HEADER_BYTES
        while position < len(contents[path]):
            header = decode_header(contents[path], position)
            lies = (position, position + header.size, range(header.first_sequence, header.end_sequence))
            batches.setdefault(path, []).append(lies)
            position += header.size
    assert len(batches) == 3
    assert sum(len(lies) for lies in batches.values()) == 11
    return Sample(contents, model, batches)


SAMPLES = {"clean": make_sample(True), "killed": make_sample(False)}
ACTIVE = max(SAMPLES["clean"].batches)


def check(sample: Sample, kit: Kit, hit: set[int], thoroughly: bool = True) -> None:
    """Open and read everything in both ways; thoroughly: append, and do it all again after a second crash."""
    log = kit.open()
    assert log.failed is None
    stored = read_all(log)
    assert stored == {sequence: body for sequence, body in sample.model.items() if sequence not in hit}
    assert log.log_id == CREATED_NS
    assert not kit.lost() & set(stored)
    gone = {sequence for sequence in hit if log.start_sequence <= sequence < log.next_sequence}
    assert gone <= kit.lost()
    if not thoroughly:
        return
    assert fetch_all(log) == stored
    first = log.append([b"after"], 5000)
    assert first == log.next_sequence - 1 >= max(stored, default=0) + 1
    stored[first] = b"after"
    assert read_all(log) == stored
    log = kit.open()
    assert read_all(log) == fetch_all(log) == stored


@pytest.mark.slow
@pytest.mark.parametrize(("state", "change"), [("clean", "one bit"), ("killed", "all bits")])
def test_any_byte_changed(state, change):
    sample = SAMPLES[state]
    for path, content in sample.contents.items():
        for position in range(len(content)):
            changed = bytearray(content)
            changed[position] ^= 1 << position % 8 if change == "one bit" else 0xFF
            kit = sample.disk({path: bytes(changed)})
            hit = sample.hit(path, position, position)
            check(sample, kit, hit, thoroughly=position % 5 == 0)
            if hit:
                assert any(report.path == path for report in kit.all_reports)


@pytest.mark.slow
@pytest.mark.parametrize("state", SAMPLES)
def test_any_length(state):
    sample = SAMPLES[state]
    for path, content in sample.contents.items():
        for size in range(len(content)):
            kit = sample.disk({path: content[:size]})
            hit = sample.hit(path, size, len(content))
            check(sample, kit, hit, thoroughly=size % 5 == 0)
            if path == ACTIVE:
                assert not any(report.kind == "damage" for report in kit.all_reports), "an unfinished write is no loss"


@pytest.mark.slow
def test_any_length_filled_with_zeros():
    """What a file system leaves when it knew the new size but not yet the new bytes."""
    sample = SAMPLES["killed"]
    for path, content in sample.contents.items():
        for size in range(len(content)):
            kit = sample.disk({path: content[:size].ljust(len(content), b"\0")})
            # batches end with a body: a zero where a zero was changes nothing
            hit = sample.hit(path, size, len(content)) if content[size:].strip(b"\0") else set()
            check(sample, kit, hit, thoroughly=size % 5 == 0)


@pytest.mark.parametrize("state", SAMPLES)
@pytest.mark.parametrize("suffix", ["log", "index", "meta"])
def test_any_file_missing(state, suffix):
    sample = SAMPLES[state]
    for path in sample.contents:
        if path.endswith(suffix):
            check(sample, sample.disk({path: None}), sample.hit(path, 0, 1 << 60))


def test_no_index_and_no_meta_at_all():
    sample = SAMPLES["clean"]
    kit = sample.disk({path: None for path in sample.contents if not path.endswith(".log")})
    check(sample, kit, set())


@pytest.mark.parametrize("state", SAMPLES)
@pytest.mark.parametrize("seed", range(40))
def test_stretches_overwritten(state, seed):
    """Zeros, noise, or a copy of another place of the log, over any stretch of any segment."""
    rng = random.Random(seed)
    sample = SAMPLES[state]
    path = rng.choice(sorted(sample.batches))
    content = sample.contents[path]
    start = rng.randrange(len(content))
    end = rng.randrange(start, len(content)) + 1
    source = sample.contents[rng.choice(sorted(sample.batches))]
    shift = rng.randrange(len(source))
    filler = rng.choice([bytes(end - start), rng.randbytes(end - start), (source * 3)[shift : shift + end - start]])
    if filler == content[start:end]:
        pytest.skip("nothing changed")
    kit = sample.disk({path: content[:start] + filler + content[end:]})
    hit = sample.hit(path, start, end - 1)
    log = kit.open()
    stored = read_all(log)
    assert stored.items() <= sample.model.items()
    assert set(sample.model) - set(stored) <= hit
    assert fetch_all(log) == stored


@pytest.mark.parametrize("state", SAMPLES)
@pytest.mark.parametrize("seed", range(40))
def test_bytes_inserted_or_removed(state, seed):
    """The rest of the segment is shifted; it is found again behind the place all the same."""
    rng = random.Random(seed)
    sample = SAMPLES[state]
    path = rng.choice(sorted(sample.batches))
    content = sample.contents[path]
    start = rng.randrange(SEGMENT_HEADER_BYTES, len(content))
    if seed % 2:
        end = min(start + rng.randrange(1, 200), len(content))
        changed, last = content[:start] + content[end:], end - 1
    else:
        changed, last = content[:start] + content[: rng.randrange(1, 300)] + content[start:], start
    kit = sample.disk({path: changed})
    log = kit.open()
    stored = read_all(log)
    assert stored.items() <= sample.model.items()
    lost = set(sample.model) - set(stored)
    assert lost <= sample.hit(path, start, last)
    assert fetch_all(log) == stored
