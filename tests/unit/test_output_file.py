"""Files of nsq_to_file: names, revisions, rotation, gzip members, moving, and files of runs that were killed.

Source: NSQ 1.3, apps/nsq_to_file.
"""

from __future__ import annotations

import errno
import gzip
import os
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flintmq.errors import OptionError, UsageError
from flintmq.tools.output_file import (
    FileSettings,
    OutputFile,
    check_datetime_format,
    files_of_others,
    name_format,
    recover,
)

NAME = "t<REV>.<DATETIME>.log"


class World:
    """A directory and a clock."""

    def __init__(self, directory: Path) -> None:
        self.out, self.work = directory / "out", directory / "work"
        self.out.mkdir()
        self.work.mkdir()
        self.now = 1_000_000_000.0

    def settings(self, **more: Any) -> FileSettings:
        name = more.pop("name_format", NAME + (".gz" if more.get("gzip_level") else ""))
        work = str(self.work if more.pop("moves", False) else self.out)
        return FileSettings(
            output_dir=str(self.out), work_dir=work, name_format=name, datetime_format="%Y%m%d_%H%M%S", **more
        )

    def file(self, **more: Any) -> OutputFile:
        return OutputFile(self.settings(**more), "[t/c]", lambda: self.now, lambda: self.now)

    def names(self, where: Path | None = None) -> list[str]:
        return sorted(path.name for path in (where or self.out).iterdir())

    def contents(self) -> list[bytes]:
        return [(self.out / name).read_bytes() for name in self.names()]


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setenv("TZ", "UTC")
    before = signal.signal(signal.SIGIO, signal.SIG_IGN)
    yield World(tmp_path)
    signal.signal(signal.SIGIO, before)


# --- names


def test_fields_of_a_name() -> None:
    filled = name_format("<TOPIC>/<HOST>.<PID><REV>.<DATETIME>", "t", "h", has_revisions=True, is_gzip=True)
    assert filled == "t/h.<PID><REV>.<DATETIME>.gz"
    settings = FileSettings(output_dir="o", work_dir="o", name_format=filled, datetime_format="%Y")
    assert settings.name_at(1e9) == f"t/h.{os.getpid()}<REV>.2001.gz"
    assert name_format("<TOPIC><REV>.gz", "t", "h", has_revisions=True, is_gzip=True) == "t<REV>.gz"
    assert name_format("<TOPIC><REV>.log", "t", "h", has_revisions=False, is_gzip=False) == "t.log"
    with pytest.raises(UsageError, match="missing <REV>"):
        name_format("<TOPIC>.log", "t", "h", has_revisions=True, is_gzip=False)


def test_literal_text_in_a_datetime_stays_as_it_is(world: World) -> None:
    """NSQ's takes "15" for the hour, and writes what it does not know as it is."""
    settings = FileSettings(output_dir="o", work_dir="o", name_format="<DATETIME>", datetime_format="Jan-15_%Y%%")
    assert settings.name_at(world.now) == "Jan-15_2001%"
    for wrong in ("%Q", "%"):
        with pytest.raises(OptionError, match="is none of"):
            check_datetime_format(wrong)
    check_datetime_format("%Y-%m-%dT%H%M%S%z %A %a %B %b %I %p %y %Z %j %%")


# --- rotation


def test_a_file_ends_with_the_message_that_exceeds_the_size(world: World) -> None:
    file = world.file(rotate_size=5)
    assert file.write([b"12", b"34", b"5", b"a message of any size is whole", b"6"]) is True
    file.close()
    assert world.contents() == [b"12\n34\n", b"5\na message of any size is whole\n", b"6\n"]
    assert world.names() == [f"t-00000{n}.20010909_014640.log" for n in range(3)]


def test_another_name_is_another_file_and_counts_anew(world: World) -> None:
    file = world.file(rotate_size=1)
    file.write([b"a", b"b"])
    world.now += 1
    assert file.write([b"c"]) is True
    file.close()
    assert world.names() == [
        "t-000000.20010909_014640.log",
        "t-000000.20010909_014641.log",
        "t-000001.20010909_014640.log",
    ]


def test_another_file_after_the_interval(world: World) -> None:
    file = world.file(rotate_interval_s=10.0, name_format="t<REV>.log")
    file.write([b"a"])
    world.now += 10
    assert file.write([b"b"]) is False
    world.now += 1
    assert file.write([b"c"]) is True
    file.close()
    assert world.contents() == [b"a\nb\n", b"c\n"]


def test_a_file_that_is_there_is_appended_to_unless_it_is_too_large_or_must_be_new(world: World) -> None:
    there = world.out / "t-000000.log"
    there.write_bytes(b"before\n")
    file = world.file(name_format="t-000000.log")
    file.write([b"a"])
    file.close()
    assert there.read_bytes() == b"before\na\n"
    for more in ({"rotate_size": 5}, {"rotate_interval_s": 1.0}):
        file = world.file(name_format="t<REV>.log", **more)
        file.write([b"b"])
        file.close()
    assert world.contents() == [b"before\na\n", b"b\n", b"b\n"]


def test_nothing_is_put_behind_half_a_message(world: World) -> None:
    (world.out / "t.log").write_bytes(b"whole\nhal")
    file = world.file(name_format="t.log")
    file.write([b"a"])
    file.write([b"b"])
    file.close()
    assert (world.out / "t.log").read_bytes() == b"whole\nhal\na\nb\n"


def test_empty_files_where_they_are_wanted(world: World) -> None:
    file = world.file(gzip_level=6, keeps_empty=False)
    assert file.tick() is False and not file.path
    file.write([b"a"])
    world.now += 1
    assert file.tick() is True and not file.path
    keeps = world.file(gzip_level=6)
    assert keeps.tick() is True
    keeps.close()
    assert [gzip.decompress(each) for each in world.contents()] == [b"a\n", b""]


# --- gzip


def test_every_sync_ends_a_member(world: World) -> None:
    file = world.file(gzip_level=9)
    file.write([b"a"])
    file.sync()
    first = Path(file.path).read_bytes()
    assert gzip.decompress(first) == b"a\n"
    file.sync()
    assert Path(file.path).read_bytes() == first, "nothing new, no member"
    file.write([b"b"])
    file.close()
    (whole,) = world.contents()
    assert whole.startswith(first) and gzip.decompress(whole) == b"a\nb\n"


# --- moving


def test_a_file_moves_when_it_is_complete_and_never_over_another(world: World) -> None:
    file = world.file(moves=True, name_format="<DATETIME>/t<REV>.log")
    file.write([b"a"])
    directory = "20010909_014640"
    assert world.names(world.work / directory) == ["t-000000.log"]
    assert world.names(world.out / directory) == []
    (world.out / directory / "t-000000.log").write_bytes(b"of somebody else")
    (world.out / directory / "t-000001.log").write_bytes(b"likewise")
    file.close()
    assert world.names(world.work / directory) == []
    assert (world.out / directory / "t-000002.log").read_bytes() == b"a\n"
    assert (world.out / directory / "t-000000.log").read_bytes() == b"of somebody else"
    file.write([b"b"])  # NSQ's writes to the file that it has closed
    file.close()
    assert world.names(world.out / directory) == [f"t-00000{n}.log" for n in range(4)]


# --- what fails


def test_what_is_not_synced_is_cut_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for level in (0, 6):
        file = world.file(gzip_level=level, name_format=f"t{level}<REV>.log")
        file.write([b"a"])
        file.sync()
        file.write([b"b" * 100])
        with monkeypatch.context() as patch:
            real = os.write

            def short(fd: int, data: Any, real: Any = real) -> int:
                if len(data) < 8:
                    raise OSError(errno.ENOSPC, "No space left on device")
                return int(real(fd, data[:7]))

            patch.setattr(os, "write", short)
            with pytest.raises(OSError):
                file.write([os.urandom(100_000)])
                file.sync()
        file.cut_back()
        file.write([b"c"])
        file.close()
    plain, packed = world.contents()
    assert plain == gzip.decompress(packed) == b"a\nc\n"


def test_what_another_one_appended_is_not_cut_off(world: World) -> None:
    file = world.file(name_format="t.log")
    file.write([b"a"])
    with (world.out / "t.log").open("ab") as other:
        other.write(b"from another one")
    file.cut_back()
    file.write([b"b"])
    file.close()
    assert world.contents() == [b"a\nfrom another one\nb\n"]


# --- runs that were killed


def _recover(settings: FileSettings) -> None:
    recover(settings, "[t/c]", files_of_others(settings))


def _killed(world: World, bodies: list[bytes], **more: Any) -> bytes:
    """What a killed run leaves: members that are synced, then half of one."""
    file = world.file(moves=True, **more)
    for body in bodies:
        file.write([body])
        file.sync()
    path = Path(file.path)
    os.close(file._fd)
    return path.read_bytes()


@pytest.mark.parametrize("level", [0, 6])
def test_files_of_a_killed_run_are_cut_and_moved(world: World, level: int) -> None:
    _killed(world, [b"a", b"b"], gzip_level=level)
    (path,) = world.work.iterdir()
    with path.open("ab") as torn:
        torn.write(gzip.compress(os.urandom(5000))[:4000] if level else b"half of a mess")
    (world.work / "of-somebody-else").write_bytes(b"x")
    _recover(world.settings(moves=True, gzip_level=level))
    assert world.names(world.work) == ["of-somebody-else"]
    (found,) = world.contents()
    assert (gzip.decompress(found) if level else found) == b"a\nb\n"


def test_files_of_other_processes_and_days_are_found_but_nothing_beside_them(world: World) -> None:
    settings = world.settings(moves=True, name_format="<DATETIME>/t.<PID><REV>.log")
    for name in ("20010908/t.77-000003.log", "20010908/t.x-000003.log", "20010908/a/t.77-000003.log"):
        path = world.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"a\n")
    assert sorted(files_of_others(settings)) == ["20010908/t.77-000003.log", "20010908/t.x-000003.log"]
    _recover(settings)
    assert [str(path.relative_to(world.out)) for path in world.out.rglob("*.log")] == ["20010908/t.77-000003.log"]


def test_a_gzip_file_of_a_killed_run_is_cut_where_it_is(world: World) -> None:
    big = gzip.compress(b"x" * 5_000_000)
    (world.out / "t-000000.old.log.gz").write_bytes(big[:-1])
    os.utime(world.out / "t-000000.old.log.gz", (1, 1))
    (world.out / "t-000000.new.log.gz").write_bytes(big + big[:-1])
    _recover(world.settings(gzip_level=6))
    assert [len(each) for each in world.contents()] == [len(big), len(big) - 1]


def test_damage_is_no_reason_to_cut(world: World) -> None:
    member = zlib.compressobj(6, zlib.DEFLATED, 31)
    data = bytearray(member.compress(b"abc" * 1000) + member.flush())
    data[-5] ^= 1
    data += gzip.compress(b"more")
    (world.work / "t-000000.x.log.gz").write_bytes(data)
    _recover(world.settings(moves=True, gzip_level=6))
    assert world.contents() == [data]


def test_what_another_process_writes_is_left_alone(world: World) -> None:
    path = world.work / "t-000000.x.log"
    code = "import sys; f = open(sys.argv[1], 'wb'); f.write(b'half'); f.flush(); print('open', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdin=-1, stdout=-1) as other:
        assert other.stdout is not None and other.stdin is not None
        assert other.stdout.readline() == b"open\n"
        _recover(world.settings(moves=True))
        assert path.read_bytes() == b"half"
        other.stdin.close()
        other.wait()
    _recover(world.settings(moves=True))
    assert world.names(world.work) == world.names() == [], "not one message is whole"
