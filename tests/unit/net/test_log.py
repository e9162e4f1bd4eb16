"""Log lines: NSQ's format, one line per record whatever a peer sends, level words."""

from __future__ import annotations

import io
import logging
import re
import sys

import pytest

from flintmq.errors import OptionError
from flintmq.net.log import LEVELS, LogFileFailed, announce, configure, escape


@pytest.fixture
def lines():
    """Configure the log to a string; the loggers are put back as they were."""
    root, ours = logging.getLogger(), logging.getLogger("flintmq")
    before = root.handlers[:], root.level, ours.level
    stream = io.StringIO()

    def start(level: str, prefix: str = "[nsqd] "):
        configure(prefix, level, stream)
        return lambda: stream.getvalue().splitlines()

    yield start
    root.handlers[:], level, our_level = before
    root.setLevel(level)
    ours.setLevel(our_level)


def test_format(lines):
    read = lines("debug")
    log = logging.getLogger("flintmq.test")
    log.debug("one")
    log.info("two %d", 2)
    log.warning("three")
    log.error("four")
    log.critical("five")
    stamps = [
        re.fullmatch(r"\[nsqd\] (\d{4}/\d\d/\d\d \d\d:\d\d:\d\d\.\d{6}) (\w+): (\w+( \d)?)", line) for line in read()
    ]
    assert all(stamps)
    assert [match[2] for match in stamps if match] == ["DEBUG", "INFO", "WARNING", "ERROR", "FATAL"]


@pytest.mark.parametrize(
    ("level", "count"), [("debug", 5), ("info", 4), ("warn", 3), ("error", 2), ("fatal", 1), ("INFO", 4)]
)
def test_level_words(lines, level, count):
    read = lines(level)
    log = logging.getLogger("flintmq.test")
    for number in LEVELS.values():
        log.log(number, "x")
    assert len(read()) == count


def test_unknown_level():
    with pytest.raises(OptionError, match="log-level='loud'"):
        configure("", "loud", io.StringIO())


def test_other_libraries_are_heard_from_warnings_upwards(lines):
    read = lines("debug")
    logging.getLogger("asyncio").info("hidden")
    logging.getLogger("asyncio").warning("shown")
    assert len(read()) == 1


def test_nobody_can_fake_a_line(lines):
    read = lines("info")
    logging.getLogger("flintmq.test").info(
        "topic %s", "a\n[nsqd] 2026/01/01 00:00:00.000000 FATAL: gone\r\x1b[2J\u2028x"
    )
    (line,) = read()
    assert line.endswith(r"topic a\x0a[nsqd] 2026/01/01 00:00:00.000000 FATAL: gone\x0d\x1b[2J\u2028x")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢 ☃", "plain ä 漢 ☃"),
        ("\x00\t\x7f\x85", r"\x00\x09\x7f\x85"),
        ("\u202egnp", r"\u202egnp"),
        (b"\xff\xfea".decode("utf-8", "surrogateescape"), r"\xff\xfea"),
        ("\ud800", r"\ud800"),
    ],
)
def test_escape(text, shown):
    assert escape(text) == shown
    shown.encode("utf-8")


def test_every_line_of_a_traceback_has_the_prefix(lines):
    read = lines("info")
    try:
        raise ValueError("first\nsecond")
    except ValueError:
        logging.getLogger("flintmq.test").exception("it broke")
    shown = read()
    assert len(shown) > 3
    assert all(line.startswith("[nsqd] ") and " ERROR: " in line for line in shown)
    assert shown[0].endswith("ERROR: it broke")
    assert shown[-1].endswith("second")


def test_microseconds_never_round_up_to_a_second(lines):
    read = lines("info")
    record = logging.LogRecord("flintmq.test", logging.INFO, __file__, 1, "x", (), None)
    record.created = 1_700_000_000.9999995
    logging.getLogger("flintmq.test").handle(record)
    assert ".999999 INFO" in read()[0]


def test_it_goes_to_stderr(lines, capsys, monkeypatch):
    lines("info")
    configure("[x] ", "info")
    handler = logging.getLogger().handlers[0]
    assert isinstance(handler, logging.StreamHandler)
    assert handler.stream is sys.stderr


# -- a file ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def log_file(lines, tmp_path):
    """Configure the log to a file; gives its path, what is on stderr, and what SIGHUP does."""
    lines("info")
    stderr = io.StringIO()
    path = tmp_path / "d.log"
    reopen = configure("[x] ", "info", stderr, str(path))
    yield path, stderr, reopen
    for handler in logging.getLogger().handlers:
        handler.close()


def texts(written: str) -> list[str]:
    return [line.split(" ", 3)[3] for line in written.splitlines()]


def test_a_file_takes_everything_and_stderr_what_is_waited_for(log_file):
    path, stderr, _ = log_file
    log = logging.getLogger("flintmq.test")
    log.info("one")
    announce(log, "TCP", "127.0.0.1:1")
    log.error("two")
    log.critical("three")
    announced = "INFO: TCP: listening on 127.0.0.1:1"
    assert texts(path.read_text()) == ["INFO: one", announced, "ERROR: two", "FATAL: three"]
    assert texts(stderr.getvalue()) == [announced, "FATAL: three"]


def test_the_level_holds_for_announcements_too(lines):
    read = lines("warn")
    announce(logging.getLogger("flintmq.test"), "TCP", "127.0.0.1:1")
    assert read() == []


def test_reopening_goes_on_under_the_name(log_file):
    path, _, reopen = log_file
    log = logging.getLogger("flintmq.test")
    log.info("before")
    path.rename(path.with_suffix(".1"))
    log.info("still the old one")
    reopen()
    log.info("after")
    old, new = path.with_suffix(".1").read_text(), path.read_text()
    assert [line.rpartition(": ")[2] for line in old.splitlines()] == ["before", "still the old one"]
    assert [line.rpartition(": ")[2] for line in new.splitlines()] == ["log file reopened", "after"]


def test_reopening_that_fails_changes_nothing(log_file):
    path, _, reopen = log_file
    path.rename(path.with_suffix(".1"))
    path.mkdir()
    reopen()
    assert "SIGHUP: the log goes on in the old file" in path.with_suffix(".1").read_text()


def test_a_file_that_cannot_be_opened(tmp_path):
    with pytest.raises(LogFileFailed, match="No such file or directory; its directory must exist"):
        configure("", "info", io.StringIO(), str(tmp_path / "no" / "log"))


def test_a_file_that_cannot_be_written_is_told_once(log_file, capsys, monkeypatch):
    _, _, _ = log_file
    handler = logging.getLogger().handlers[1]
    assert isinstance(handler, logging.FileHandler)
    log = logging.getLogger("flintmq.test")

    class Full(io.StringIO):
        is_full = True

        def flush(self):
            if self.is_full:
                raise OSError(28, "No space left on device")

    full = Full()
    monkeypatch.setattr(handler, "stream", full)
    for _ in range(3):
        log.info("lost")
    assert capsys.readouterr().err == f"cannot write the log file {handler.baseFilename} - No space left on device\n"
    full.is_full = False
    log.info("kept")
    full.is_full = True
    log.info("lost")
    assert capsys.readouterr().err.count("cannot write") == 1


def test_without_a_file_there_is_nothing_to_reopen(lines):
    stream = io.StringIO()
    lines("info")
    configure("[x] ", "info", stream)()
    assert stream.getvalue().endswith("SIGHUP: nothing to reopen, the log is on stderr\n")
