"""The commands for people, as people use them: processes with arguments, stdin, stdout, signals and exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration import utilities
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, SOURCES, Daemons, Nsqd, Nsqlookupd, req, wait_until
from tests.integration.flavours import address_of
from tests.integration.utilities import Process
from tests.ports import has_ipv6

from flintmq import cli
from flintmq.tools.shell import start
from flintmq.tools.shell.arguments import NS_PER_S

Here = Callable[..., tuple[int, str, str]]

_topics = (f"shell{number}" for number in count())


@pytest.fixture
def topic() -> str:
    return next(_topics)


def environment(nsqd: Nsqd | None) -> dict[str, str]:
    """What a user has exported who talks to this nsqd."""
    found = {name: value for name, value in os.environ.items() if not name.startswith("FLINTMQ_")}
    found.pop("COLUMNS", None)  # of the terminal that the tests run on
    found["PYTHONPATH"] = str(SOURCES)
    if nsqd is not None:
        found |= {"FLINTMQ_NSQD": address_of(nsqd), "FLINTMQ_HTTP": "{}:{}".format(*nsqd.http)}
    return found


def started(nsqd: Nsqd | None, *words: str) -> contextlib.AbstractContextManager[Process]:
    """Runs a command; it is ended when nobody has waited for its end."""
    return utilities.started("flintmq", *words, environment=environment(nsqd))


def run(nsqd: Nsqd | None, *words: str, text: bytes = b"") -> subprocess.CompletedProcess[str]:
    """Runs a command until it ends by itself."""
    return utilities.flintmq(*words, text=text, environment=environment(nsqd))


def well(nsqd: Nsqd | None, *words: str, text: bytes = b"") -> str:
    """Runs a command that succeeds; returns its answer."""
    done = run(nsqd, *words, text=text)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(nsqd: Nsqd | None, *words: str, text: bytes = b"") -> tuple[int, str]:
    """Runs a command that fails; returns its exit code and the one line that says why."""
    done = run(nsqd, *words, text=text)
    assert done.stdout == "" and done.stderr.count("\n") == 1, (done.stdout, done.stderr)
    assert done.stderr.startswith(f"flintmq {words[0]}: ")
    return done.returncode, done.stderr


def has_consumer(nsqd: Nsqd, topic: str, channel: str) -> bool:
    topics = nsqd.get(f"/stats?format=json&topic={topic}&channel={channel}")["topics"]
    return any(each["clients"] for row in topics for each in row["channels"])


# --- pub, sub, tail


def test_arguments_files_and_lines_are_published_and_come_out(single_nsqd: Nsqd, topic: str, tmp_path):
    (tmp_path / "whole").write_bytes(b"two\nlines")
    assert run(single_nsqd, "pub", topic, "one", "two", "-n", "2").stderr == ""
    well(single_nsqd, "pub", topic, "-f", str(tmp_path / "whole"))
    done = run(single_nsqd, "pub", topic, "--json", text=b"three\n\nfour\nlast")
    assert json.loads(done.stdout) == {"topic": topic, "published": 3, "bytes": 13, "empty": 1, "refused": []}
    assert done.stderr == "flintmq pub: 1 empty line left out: no nsqd takes empty messages\n"
    well(single_nsqd, "pub", topic, "--whole", text=b"a\nb\n")
    assert well(single_nsqd, "sub", topic, "c", "-n", "9", "--format", "{size} {attempts} {body}").splitlines() == [
        "3 1 one", "3 1 two", "3 1 one", "3 1 two", "9 1 two", "lines", "5 1 three", "4 1 four", "4 1 last", "4 1 a",
        "b", "",
    ]  # fmt: skip
    assert single_nsqd.unfinished(topic, "c") == 0


def test_many_lines_keep_their_order(single_nsqd: Nsqd, topic: str):
    lines = [b"%d" % number for number in range(50_000)]
    well(single_nsqd, "pub", topic, text=b"\n".join(lines))
    assert well(single_nsqd, "tail", topic, "--from", "beginning", "--no-follow").encode().split() == lines


def test_what_is_refused_is_named_and_the_rest_is_published(single_nsqd: Nsqd, topic: str):
    big = b"x" * (shared_nsqd_size_max + 1)
    done = run(single_nsqd, "pub", topic, text=b"one\n" + big + b"\nthree\n")
    assert done.returncode == 1 and done.stdout == ""
    first, summary = done.stderr.splitlines()
    assert first.startswith("flintmq pub: line 2 is not published: E_BAD_MESSAGE") and "message too big" in first
    assert summary == f"2 messages published to {topic}, 1 message not"
    assert well(single_nsqd, "tail", topic, "--no-follow") == "one\nthree\n"


shared_nsqd_size_max = 1024 * 1024


WRONG = (
    (("pub",), "the following arguments are required: topic;"),
    (("pub", "t", ""), "an empty body"),
    (("pub", "no name", "x"), "1 to 64 of"),
    (("pub", "t", "x", "-H", "bare"), "a header is name=value"),
    (("pub", "t", "x", "--whole"), "--whole is for stdin"),
    (("pub", "t", "x", "--key", "k"), "--key needs --lookupd"),
    (("pub", "t", "x", "--nsqd", "a:b:c"), "host or host:port"),
    (("pub", "t", "x", "--nsqd", "a", "--lookupd", "b"), "not both"),
    (("sub", "t", "--from", "yesterday"), "is no place"),
    (("sub", "t", "--format", "{nothing}"), "known are {body}"),
    (("sub", "t", "--count", "0"), "a whole number of 1 or more"),
    (("tail", "t", "--from", "count:3"), "--from is a time"),
)


@pytest.mark.parametrize(("words", "phrase"), WRONG, ids=lambda value: str(value)[:40])
def test_a_wrong_command_line_is_one_line_and_exit_code_2(
    words: tuple[str, ...], phrase: str, capsys: pytest.CaptureFixture[str]
):
    assert cli.main(words) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and phrase in said.err


def test_nobody_there_and_secrets_that_are_not(topic: str):
    started_at = os.times().elapsed
    code, said = refused(None, "pub", topic, "x", "--nsqd", "127.0.0.1:1")
    assert code == 1 and "connection to 127.0.0.1:1 failed" in said and "--nsqd" in said
    assert os.times().elapsed - started_at < PATIENCE_S
    assert "plain" not in refused(None, "pub", topic, "x", "--auth-secret", "plain")[1]
    assert "NOT_SET is not set" in refused(None, "sub", topic, "--auth-secret", "env:NOT_SET")[1]


def test_a_delay_and_publishing_once(single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    well(single_nsqd, "pub", topic, "later", "too", "--delay", "1h")
    well(single_nsqd, "pub", topic, "later", "--delay", "1h", "--once")
    well(single_nsqd, "pub", topic, "now", "--once")
    assert well(single_nsqd, "sub", topic, "c", "-n", "1") == "now\n"
    assert single_nsqd.stats(topic, "c")["deferred_count"] == 3


def test_headers_go_in_and_come_out(single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}&extend=true")
    well(single_nsqd, "pub", topic, "body", "-H", "shop=7", "-H", "user=a=b", "--once")
    assert well(single_nsqd, "tail", topic, "--headers", "--no-follow") == '{"shop":"7","user":"a=b"} body\n'
    (line,) = well(single_nsqd, "sub", topic, "c", "-n", "1", "--headers", "--json").splitlines()
    found = json.loads(line)
    assert (found["headers"], found["body"], found["channel"]) == ({"shop": "7", "user": "a=b"}, "body", "c")
    done = run(single_nsqd, "pub", f"{topic}.plain", "x", "-H", "a=b")
    assert done.returncode == 1 and "body 1 is not published: E_" in done.stderr
    assert done.stderr.count(f"flintmq topic create {topic}.plain --headers)") == 1


def test_a_command_decides_what_is_finished(single_nsqd: Nsqd, topic: str):
    """What fails comes again; the command knows which message it has."""
    well(single_nsqd, "pub", topic, "good", "bad")
    script = 'read body; echo "$FLINTMQ_ATTEMPTS $body"; [ "$body$FLINTMQ_ATTEMPTS" != bad1 ]'
    done = run(single_nsqd, "sub", topic, "c", "-n", "2", "--requeue", "0s", "--exec", script)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["1 bad", "1 good", "2 bad"]
    assert "the command ended with 1" in done.stderr and "2 messages finished, 1 requeued" in done.stderr
    assert single_nsqd.unfinished(topic, "c") == 0


def test_a_command_that_is_not_there_ends_sub_at_the_first_message(single_nsqd: Nsqd, topic: str):
    """Else a slip of the pen would have every message of a backlog be tried, and in the end given up."""
    single_nsqd.publish(topic, *[b"x"] * 50)
    done = run(single_nsqd, "sub", topic, "c", "--exec", "no-such-command-here")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "flintmq sub: the command cannot be run, a shell says 127: no-such-command-here"
    )
    assert single_nsqd.unfinished(topic, "c") == 50
    assert single_nsqd.stats(topic, "c")["requeue_count"] < 5


def test_sub_ends_by_itself_by_a_signal_and_when_nobody_reads(single_nsqd: Nsqd, topic: str):
    well(single_nsqd, "pub", topic, text=b"x\n" * 5000)
    assert well(single_nsqd, "sub", topic, "idle", "--idle", "500ms").count("x") == 5000
    assert single_nsqd.unfinished(topic, "idle") == 0
    well(single_nsqd, "sub", topic, "span", "--for", "100ms")
    for number in (signal.SIGINT, signal.SIGTERM):
        with started(single_nsqd, "sub", topic, "c") as process:
            wait_until(lambda: has_consumer(single_nsqd, topic, "c"), "it is there")
            process.send_signal(number)
            assert process.wait(PATIENCE_S) == 0
            assert process.stderr is not None and process.stderr.read() == b""
    single_nsqd.post(f"/channel/create?topic={topic}&channel=pipe")
    well(single_nsqd, "pub", topic, text=b"x\n" * 50_000)
    with started(single_nsqd, "sub", topic, "pipe") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"x\n"
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""
    assert single_nsqd.stats(topic, "pipe")["depth"], "what was not read is there still"


def test_tail_begins_with_the_last_and_follows(single_nsqd: Nsqd, topic: str):
    """No channel is made for it."""
    well(single_nsqd, "pub", topic, *map(str, range(20)))
    with started(single_nsqd, "tail", topic, "-n", "2") as process:
        assert process.stdout is not None and process.stderr is not None
        assert [process.stdout.readline() for _ in range(2)] == [b"18\n", b"19\n"]
        well(single_nsqd, "pub", topic, "new")
        assert process.stdout.readline() == b"new\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0 and process.stderr.read() == b""
    assert single_nsqd.get(f"/stats?format=json&topic={topic}")["topics"][0]["channels"] == []
    assert refused(single_nsqd, "tail", "not-there", "--no-follow")[0] == 1


# --- channel, peek, replay, message, deadletters


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], single_nsqd: Nsqd) -> Here:
    """Runs a command in this process, which is quicker: its exit code, its answer and what it says beside that."""
    monkeypatch.setattr(start, "_log", lambda *arguments: None)  # pytest's own must stay
    for name, value in environment(single_nsqd).items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str, str]:
        code = cli.main(words)
        said = capfd.readouterr()
        return code, said.out, said.err

    return run


def rows(answer: tuple[int, str, str]) -> list[Any]:
    """The lines of JSON of an answer."""
    code, out, errors = answer
    assert code == 0, errors
    return [json.loads(line) for line in out.splitlines()]


def test_a_channel_from_its_creation_to_its_end(here: Here, single_nsqd: Nsqd, topic: str):
    assert here("channel", "list", topic)[0] == 1
    single_nsqd.post(f"/topic/create?topic={topic}")
    assert here("channel", "list", topic) == (0, "", f"topic {topic} has no channels\n")
    assert here("channel", "create", topic, "c") == (0, f"channel c of topic {topic} is there\n", "")
    single_nsqd.publish(topic, b"a", b"b")
    (row,) = rows(here("channel", "list", topic, "--json"))
    assert (row["channel"], row["depth"], row["paused"]) == ("c", 2, False)
    here("channel", "pause", topic, "c")
    assert "paused" in here("channel", "show", topic, "c")[1]
    here("channel", "unpause", topic, "c")
    for verb, phrase in (("empty", "emptying"), ("delete", "deleting"), ("skip", "skipping")):
        code, _, said = here("channel", verb, topic, "c")
        assert code == 2 and f"{phrase} channel c of topic {topic} loses 2 messages that wait" in said
        assert "say --yes" in said and single_nsqd.stats(topic, "c")["depth"] == 2
    assert here("channel", "empty", topic, "c", "--yes")[0] == 0
    assert single_nsqd.stats(topic, "c")["depth"] == 0
    assert here("channel", "skip", topic, "c")[0] == 0, "nothing is lost"
    assert rows(here("channel", "show", topic, "c", "--json"))[0]["skipped"]
    here("channel", "unskip", topic, "c")
    assert here("channel", "delete", topic, "c")[0] == 0
    code, _, said = here("channel", "show", topic, "c")
    assert (code, said.count("\n")) == (1, 1) and f"there is no channel c of topic {topic}" in said
    assert here("channel", "dlete", topic, "c")[2] == "flintmq channel: there is no verb dlete; did you mean delete?\n"


def test_peek_shows_all_three_kinds_and_disturbs_nothing(here: Here, single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.post(f"/pub?topic={topic}&defer=3600000", b"later")
    single_nsqd.publish(topic, b"held", b"\x1b[2Jwaits")
    with single_nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        assert consumer.message().body == b"held"
        found = {row["state"]: row for row in rows(here("peek", topic, "--json"))}
        assert {state: row["body"] for state, row in found.items()} == {
            "in flight": "held", "waits": "\x1b[2Jwaits", "deferred": "later",
        }  # fmt: skip
        assert found["deferred"]["due_in_ms"] > 3_000_000 and found["in flight"]["client"]["remote_address"]
        said = here("peek", topic, "c", "-w", "next")[1]
        assert "\\x1b[2Jwaits" in said and "\x1b" not in said and "held" not in said
    code, _, said = here("peek", topic, "other")
    assert code == 1 and "is not there" in said


def test_replay_counts_first_and_moves_then(here: Here, single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, b"a", b"b", b"c")
    (plan,) = rows(here("replay", topic, "c", "--from", "end", "--dry-run", "--json"))
    assert (plan["will_be_delivered"], plan["waiting"]) == (0, 3)
    code, _, said = here("replay", topic, "c", "--from", "end")
    assert code == 2 and "; 3 of those lie before that place and will never be delivered" in said
    assert single_nsqd.stats(topic, "c")["depth"] == 3
    here("replay", topic, "c", "--from", "end", "--yes")
    assert single_nsqd.stats(topic, "c")["depth"] == 0
    code, out, _ = here("channel", "to-time", topic, "c", "beginning")
    assert code == 0 and "3 messages will be delivered" in out
    assert single_nsqd.stats(topic, "c")["depth"] == 3
    assert here("replay", topic, "c")[0] == 2


def test_replay_asks_before_deferred_messages_are_finished(here: Here, single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    for _ in range(3):
        single_nsqd.post(f"/pub?topic={topic}&defer=1800000", b"later")
    wait_until(lambda: single_nsqd.stats(topic, "c")["deferred_count"] == 3)
    (plan,) = rows(here("replay", topic, "c", "--from", "end", "--dry-run", "--json"))
    assert (plan["waiting"], plan["deferred"], plan["lost_at_least"], plan["lost_at_most"]) == (0, 3, 3, 3)
    for command in (("replay", topic, "c", "--from", "end"), ("channel", "to-time", topic, "c", "end")):
        code, _, said = here(*command)
        assert code == 2 and "3 of those lie before that place and will never be delivered" in said
    assert single_nsqd.stats(topic, "c")["deferred_count"] == 3
    assert here("replay", topic, "c", "--from", "beginning")[0] == 0, "nothing is lost"


def test_replay_asks_when_more_comes_than_is_lost(here: Here, single_nsqd: Nsqd, topic: str):
    """What will be delivered again makes up for nothing that lies before the place."""
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, b"old")
    first_s = (time.time_ns() // NS_PER_S) + 1
    wait_until(lambda: time.time_ns() >= first_s * NS_PER_S, "the next second")
    place = datetime.fromtimestamp(first_s, UTC).isoformat()
    single_nsqd.publish(topic, *(b"new%d" % number for number in range(4)))
    with single_nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 5)
        old, *new = [consumer.message() for _ in range(5)]
        for message in new:
            consumer.finish(message)
        consumer.settle()
        (plan,) = rows(here("replay", topic, "c", "--from", place, "--dry-run", "--json"))
        assert (plan["will_be_delivered"], plan["lost_at_least"], plan["lost_at_most"]) == (4, 1, 1)
        code, _, said = here("replay", topic, "c", "--from", place)
        assert code == 2 and "4 messages will be delivered, 1 would be without that; 1 of those lie" in said
        consumer.finish(old)
        consumer.settle()
    assert here("replay", topic, "c", "--from", place)[0] == 0, "nothing is lost any more"
    assert single_nsqd.stats(topic, "c")["depth"] == 4


def test_a_range_is_copied_to_another_topic(here: Here, single_nsqd: Nsqd, topic: str):
    for name in (topic, f"{topic}.copy"):
        single_nsqd.post(f"/topic/create?topic={name}&extend=true")
    well(single_nsqd, "pub", topic, "a", "b", "-H", "shop=7")
    copy = ("replay", topic, "--to", f"{topic}.copy")
    assert rows(here(*copy, "--from", "1h", "--dry-run", "--json"))[0]["messages"] == 2
    assert here(*copy, "--from", "1h") == (0, f"2 messages of {topic} copied to {topic}.copy\n", "")
    assert rows(here(*copy, "--from", "beginning", "--until", "1h", "--json"))[0]["copied"] == 0
    lines = rows(here("tail", f"{topic}.copy", "--no-follow", "--json"))
    assert [(line["body"], line["headers"]) for line in lines] == [("a", {"shop": "7"}), ("b", {"shop": "7"})]
    assert here("replay", topic, "--to", topic, "--from", "1h")[0] == 2


def test_a_message_and_its_life(here: Here, single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/message/trace/enable?topic={topic}")
    single_nsqd.publish(topic, b"look at me")
    well(single_nsqd, "sub", topic, "c", "-n", "1")

    def actions() -> list[str]:
        return [row["event"]["action"] for row in rows(here("message", "1", "-t", topic, "--json")) if "event" in row]

    wait_until(lambda: actions() == ["PUB", "START", "FIN"], "its life is traced")
    code, out, _ = here("message", "0000000000000001", "--topic", topic)
    assert code == 0 and "look at me" in out and "FIN" in out and "ACTION" in out
    code, _, said = here("message", "4711", "--topic", topic)
    assert code == 1 and f"there is no message 4711 in topic {topic}" in said
    assert here("message", "nonsense")[0] == here("message")[0] == 2


def test_dead_letters_are_seen_requeued_and_dropped(here: Here, single_nsqd: Nsqd, topic: str):
    dead = f"{topic}.dead"
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/topic/settings?topic={topic}", b'{"max_attempts": 1}')
    single_nsqd.publish(topic, b"one", b"two", b"three", b"four")
    with single_nsqd.connect() as consumer:
        consumer.subscribe(topic, "billing", 10)
        for message in consumer.messages(4):
            consumer.send(req(message.id, 0))
        wait_until(lambda: single_nsqd.stats(topic, "billing").get("dead_letter_count") == 4, "they are given up")
    found = rows(here("deadletters", "show", dead, "--json"))
    assert [row["body"] for row in found] == ["one", "two", "three", "four"]
    assert found[0]["headers"]["##dead_letter_channel"] == "billing"
    assert single_nsqd.stats(dead)["channels"] == [], "who looks makes no channel"
    assert {"topic": dead, "letters": 4, "channels": []} in rows(here("deadletters", "list", "--json"))
    ids = [row["id"] for row in found]
    assert "##dead_letter_reason=max_attempts" in here("deadletters", "show", dead, ids[0])[1]
    assert here("deadletters", "requeue", dead, ids[0]) == (0, f"letter {ids[0]} is requeued to {topic}\n", "")
    code, _, said = here("deadletters", "requeue", dead, ids[0])
    assert code == 1 and "was requeued or dropped already" in said
    code, _, said = here("deadletters", "drop", dead, ids[1])
    assert code == 2 and f"1 dead letter of {dead} will be dropped for good" in said
    assert here("deadletters", "drop", dead, ids[1], "--yes")[0] == 0
    assert [row["id"] for row in rows(here("deadletters", "show", dead, "--json"))] == ids[2:]
    done = well(single_nsqd, "deadletters", "requeue", dead, "--all", "--yes")
    assert done == f"2 dead letters of {dead} requeued\n"
    assert here("deadletters", "show", dead)[1:] == ("", f"topic {dead} has no letters that nobody has dealt with\n")
    assert well(single_nsqd, "sub", topic, "billing", "-n", "3").split() == ["one", "three", "four"]
    assert here("deadletters", "drop", dead)[0] == 2


# --- top, bench, and questions on a terminal


class Terminal:
    """A command on a terminal of its own, of so many columns and lines."""

    def __init__(self, nsqd: Nsqd, *words: str, columns: int = 80, lines: int = 12) -> None:
        master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._master, self.slave = master, slave
        self.said = b""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flintmq", *words],
            env={**environment(nsqd), "TERM": "xterm"}, stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self.slave)

    def until(self, phrase: bytes) -> None:
        """Reads until a phrase has come; what came before it is forgotten."""

        def has_come() -> bool:
            if select.select([self._master], [], [], 0.05)[0]:
                self.said += os.read(self._master, 65536)
            return phrase in self.said

        wait_until(has_come, f"{phrase!r} is shown")
        self.said = self.said[self.said.index(phrase) :]

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def end(self) -> int:
        code = self.process.wait(PATIENCE_S)
        while select.select([self._master], [], [], 0.05)[0]:
            self.said += os.read(self._master, 65536)
        return code


def test_top_is_a_live_screen_that_obeys_keys_and_leaves_no_trace(single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, *[b"x"] * 12345)
    with Terminal(single_nsqd, "top", topic, "-i", "100ms", columns=50, lines=6) as terminal:
        terminal.until(b"12.3k")
        terminal.press(b"n")
        terminal.until(b"by name")
        single_nsqd.publish(topic, *[b"x"] * 100_000)
        terminal.until(b"112k")
        terminal.press(b" ")
        terminal.until(b"stopped")
        drawn = terminal.said.split(b"\x1b[H")[-1]
        assert all(len(plain_of(line)) < 50 for line in drawn.split(b"\r\n")), drawn
        terminal.press(b"q")
        assert terminal.end() == 0
        assert terminal.said.endswith(b"\x1b[?25h\x1b[?1049l")
        assert termios.tcgetattr(terminal.slave) == terminal.before
    for number in (signal.SIGINT, signal.SIGTERM):
        with Terminal(single_nsqd, "top", "-i", "1s") as terminal:
            terminal.until(b"q quits")
            terminal.process.send_signal(number)
            assert terminal.end() == 0 and b"Traceback" not in terminal.said
            assert terminal.said.endswith(b"\x1b[?25h\x1b[?1049l")
            assert termios.tcgetattr(terminal.slave) == terminal.before


def plain_of(line: bytes) -> str:
    return re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", line).decode()


def test_top_as_lines(here: Here, single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, b"x", b"y")
    first, second = rows(here("top", topic, "--once", "-i", "10ms", "--json"))
    assert (first["topic"], first["messages"]) == (topic, 2) and "channel" not in first
    assert (second["channel"], second["depth"], second["lag_s"]) == ("c", 2, None)
    assert "stands" in here("top", topic, "--once", "-i", "10ms")[1]
    assert here("top")[0] == 2, "no terminal"


def test_what_is_lost_is_asked_about_on_a_terminal(single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, b"x")
    for answer, code, depth in ((b"\n", 1, 1), (b"y\n", 0, 0)):
        with Terminal(single_nsqd, "channel", "empty", topic, "c") as terminal:
            terminal.until(b"loses 1 message that waits, 0 in flight, 0 deferred. Go on? [y/N]")
            terminal.press(answer)
            assert terminal.end() == code, terminal.said
            assert (b"nothing is changed" in terminal.said) == bool(code)
        assert single_nsqd.stats(topic, "c")["depth"] == depth


def test_bodies_do_not_command_a_terminal(single_nsqd: Nsqd, topic: str):
    single_nsqd.publish(topic, b"\x1b[2Jhello\x07")
    with Terminal(single_nsqd, "tail", topic, "--no-follow") as terminal:
        terminal.until(b"\\x1b[2Jhello\\x07")
        assert terminal.end() == 0 and b"\x1b[2J" not in terminal.said


def test_bench_measures_both_ways_and_leaves_nothing(single_nsqd: Nsqd):
    (found,) = map(json.loads, well(single_nsqd, "bench", "both", "--duration", "500ms", "--rate", "2000", "--batch",
                                    "10", "--json").splitlines())  # fmt: skip
    assert found["published"]["messages"] == found["consumed"]["messages"] > 0
    assert found["consumed"]["latency_ms"]["p50"] <= found["consumed"]["latency_ms"]["max"]
    names = [row["topic_name"] for row in single_nsqd.get("/stats?format=json")["topics"]]
    assert found["topic"].startswith("flintmq-bench-") and found["topic"] not in names
    assert refused(single_nsqd, "bench", "sub")[0] == 2


@pytest.mark.parametrize(("rate", "batch"), [(10, 1), (50, 5), (1500, 100)])
def test_bench_publishes_no_more_than_the_rate_asks_for_and_not_nothing(single_nsqd: Nsqd, rate: int, batch: int):
    (found,) = map(
        json.loads, well(single_nsqd, "bench", "pub", "--duration", "1s", "--rate", str(rate), "--json").splitlines()
    )
    assert 0 < found["published"]["messages"] <= rate and found["batch"] == batch


def test_bench_refuses_a_batch_that_is_more_than_the_rate_allows(single_nsqd: Nsqd):
    code, said = refused(single_nsqd, "bench", "pub", "--duration", "2s", "--rate", "10", "--batch", "100")
    assert code == 2 and "at most 20, which is what --rate allows in 2 s" in said


# --- topics and nsqds without a cluster


def test_a_topic_of_a_single_nsqd_from_its_creation_to_its_end(here: Here, single_nsqd: Nsqd, topic: str):
    assert here("topic", "create", topic, "--headers") == (0, f"topic {topic} is created\n", "")
    assert here("topic", "show", topic)[2] == f"topic {topic} has no channels; 0 messages wait for the first one\n"
    single_nsqd.publish(topic, b"a", b"b")
    assert topic in [row["topic"] for row in rows(here("topic", "list", "--json"))]
    here("topic", "pause", topic)
    assert rows(here("topic", "show", topic, "--json"))[0]["paused"]
    here("topic", "unpause", topic)
    code, _, said = here("topic", "empty", topic)
    assert code == 2 and "loses 2 messages that no channel has yet" in said
    here("channel", "create", topic, "c")
    code, _, said = here("topic", "delete", topic)
    assert code == 2 and "loses channel c with 2 messages that wait" in said
    assert here("topic", "delete", topic, "--yes") == (0, f"topic {topic} is deleted\n", "")
    assert here("topic", "show", topic)[0] == 1
    (node,) = rows(here("node", "list", "--json"))
    assert node["version"].startswith("FlintMQ ") and node["health"] == "OK"


def test_a_cluster_is_asked_first_and_its_absence_is_no_error(
    here: Here, single_nsqd: Nsqd, shared: Daemons, topic: str, monkeypatch: pytest.MonkeyPatch
):
    """With a nsqlookupd that is in no cluster, its nsqds are asked; what only a cluster has is said to be that."""
    nsqlookupd = shared.nsqlookupd()
    nsqd = shared.nsqd("--lookupd-tcp-address={}:{}".format(*nsqlookupd.tcp), "--broadcast-address=127.0.0.1")
    nsqd.publish(topic, b"x")
    wait_until(lambda: nsqlookupd.producers(topic), "it is registered")
    for name in ("FLINTMQ_NSQD", "FLINTMQ_HTTP"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLINTMQ_LOOKUPD", "{}:{}".format(*nsqlookupd.http))
    assert [row["topic"] for row in rows(here("topic", "list", "--json"))] == [topic]
    assert rows(here("tail", topic, "--no-follow", "--json"))[0]["body"] == "x"
    code, _, said = here("topic", "expand", topic, "4")
    assert code == 1 and said.count("\n") == 1 and "is in no cluster" in said
    well(None, "pub", topic, "y", "--lookupd", "{}:{}".format(*nsqlookupd.http))
    assert here("topic", "delete", topic, "--yes")[0] == 0
    assert nsqlookupd.producers(topic) == []


@pytest.fixture
def asks_lookupd(monkeypatch: pytest.MonkeyPatch, here: Here, shared: Daemons) -> Nsqlookupd:
    """A nsqlookupd with nothing but what a test registers, which commands here ask."""
    nsqlookupd = shared.nsqlookupd()
    for name in ("FLINTMQ_NSQD", "FLINTMQ_HTTP"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("FLINTMQ_LOOKUPD", "{}:{}".format(*nsqlookupd.http))
    return nsqlookupd


def registered(shared: Daemons, nsqlookupd: Nsqlookupd, topic: str, host: str, *flags: str) -> Nsqd:
    """An nsqd that has a topic with a message, and is registered under a host."""
    to = "--lookupd-tcp-address={}:{}".format(*nsqlookupd.tcp)
    nsqd = shared.nsqd("--durability=os", to, f"--broadcast-address={host}", *flags)
    assert run(nsqd, "pub", topic, "x").returncode == 0
    wait_until(lambda: nsqd.tcp[1] in nsqlookupd.producers(topic), "it is registered")
    return nsqd


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_an_nsqd_with_an_ipv6_address_is_asked_as_the_others_are(
    here: Here, asks_lookupd: Nsqlookupd, shared: Daemons, topic: str
):
    nsqds = [
        registered(shared, asks_lookupd, topic, "127.0.0.1"),
        registered(shared, asks_lookupd, topic, "::1", "--tcp-address=[::1]:0", "--http-address=[::1]:0"),
    ]
    tcp = sorted("{}:{}".format(*nsqd.tcp) for nsqd in nsqds)
    http = sorted("{}:{}".format(*nsqd.http) for nsqd in nsqds)
    assert any(each.startswith("[::1]:") for each in tcp + http)
    assert here("channel", "create", topic, "c") == (0, f"channel c of topic {topic} is there\n", "")
    for words in (("topic", "list"), ("topic", "show", topic), ("channel", "list", topic)):
        code, out, said = here(*words)
        assert (code, said) == (0, "") and out
    code, out, said = here("channel", "show", topic, "c")
    assert (code, said) == (0, "no consumers\n") and all(each in out for each in http)
    (row,) = rows(here("topic", "list", "--json"))
    assert row["messages"] == 2 and sorted(row["nodes"]) == http
    assert rows(here("top", topic, "--once", "--interval", "1ms", "--json"))
    assert len(rows(here("peek", topic, "c", "--json"))) == 2
    assert len(rows(here("tail", topic, "--no-follow", "--json"))) == 2
    found = rows(here("node", "list", "--json"))
    assert (sorted(each["node"] for each in found), sorted(each["tcp"] for each in found)) == (http, tcp)


def test_an_nsqd_whose_address_is_none_is_told_and_hides_no_other(
    here: Here, asks_lookupd: Nsqlookupd, shared: Daemons, topic: str
):
    """Anybody can register with a nsqlookupd, under any name."""
    wrong = [registered(shared, asks_lookupd, topic, host) for host in ("no host", "[", "a/b")]
    told = [f"nsqd '{host}:{nsqd.tcp[1]}', as nsqlookupd names it, is not asked: that is not an address"
            for host, nsqd in zip(("no host", "[", "a/b"), wrong, strict=True)]  # fmt: skip
    code, out, said = here("topic", "list")
    assert (code, out) == (1, "") and said.count("\n") == 1 and any(text in said for text in told)
    nsqd = registered(shared, asks_lookupd, topic, "127.0.0.1")
    http = "{}:{}".format(*nsqd.http)
    here("channel", "create", topic, "c")
    for words in (
        ("topic", "list"), ("topic", "show", topic), ("channel", "list", topic), ("channel", "show", topic, "c"),
        ("peek", topic, "c"), ("tail", topic, "--no-follow"),
    ):  # fmt: skip
        code, out, said = here(*words)
        assert code == 0 and out and said.count("nsqd '") == 3 and all(text in said for text in told), (words, said)
    code, out, said = here("node", "list", "--json")
    assert code == 1 and [json.loads(line)["node"] for line in out.splitlines()] == [http]
    code, out, said = here("channel", "pause", topic, "c")
    assert code == 1 and all(text in said for text in told)
    assert out == f"channel c of topic {topic} is paused; 3 nsqd without an address that can be used: not asked\n"
    assert nsqd.stats(topic, "c")["paused"]


def test_secured_nsqd_and_secrets_by_reference(shared: Daemons, tmp_path: Path, topic: str):
    """The same options for connections, for the log and for HTTPS; no secret on a command line or in an error."""
    certificates = Certificates(tmp_path)
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRET}\n")
    with AuthServer() as guard:
        nsqd = shared.nsqd(
            f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}", "--tls-required=true",
            f"--auth-http-address={guard.address}",
        )  # fmt: skip
        how = ("--tls", "--tls-root-ca-file", str(certificates.ca), "--auth-secret", f"file:{secret}", "--compression",
               "snappy")  # fmt: skip
        well(nsqd, "pub", topic, "hidden", *how)
        assert well(nsqd, "tail", topic, "--no-follow", *how[:-2]) == "hidden\n"
        assert well(nsqd, "sub", topic, "c", "-n", "1", *how) == "hidden\n"
        assert guard.questions[0]["secret"] == SECRET
        guard.status = 403
        done = run(nsqd, "pub", topic, "x", *how)
        assert done.returncode == 1 and "E_AUTH" in done.stderr and SECRET not in done.stderr
        assert refused(nsqd, "pub", topic, "x")[0] == 1


def test_ctrl_c_says_how_far_it_came(single_nsqd: Nsqd, topic: str):
    with started(single_nsqd, "pub", topic) as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"whole\nhal")
        process.stdin.flush()
        wait_until(lambda: single_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "the line is published")
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 130
        said = process.stderr.read().decode()
    assert said == ("flintmq pub: interrupted: nothing behind line 1 was tried\n" + f"1 message published to {topic}\n")


class Other(BaseHTTPRequestHandler):
    """The HTTP port of an nsqd of another kind, as far as it is asked here."""

    def do_GET(self) -> None:
        answers = {
            "/info": {"version": "1.3.0", "tcp_port": 1, "http_port": 2, "broadcast_address": "b", "start_time": 1},
            "/stats": {"version": "1.3.0", "health": "OK", "topics": [{"topic_name": "t", "depth": 7, "channels": []}]},
        }
        found = answers.get(self.path.partition("?")[0])
        body = json.dumps({"message": "NOT_FOUND"} if found is None else found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *arguments: object) -> None: ...


@pytest.fixture
def other() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize(
    ("words", "cannot"),
    [
        ("peek t c", "show the messages of a channel"),
        ("message 1 -t t", "find single messages"),
        ("deadletters list", "keep dead letters"),
        ("channel unskip t c", "unskip a channel"),
        ("topic create u --headers", "create topics with --headers"),
        ("sub t --headers", "send headers: leave --headers out"),
        ("sub t --from 1h", "begin at a place: leave --from out"),
        ("pub t x --partition 1", "store to a partition: leave --partition out"),
    ],
)
def test_a_broker_that_is_not_ours_is_said_to_be_that_in_one_line(here: Here, other: str, words: str, cannot: str):
    code, out, said = here(*words.split(), "--nsqd", "127.0.0.1:1", "--nsqd-http", other)
    assert (code, out) == (1, "")
    assert said == f"flintmq {words.split()[0]}: nsqd {other} is not FlintMQ's: it cannot {cannot}\n"


def test_a_broker_that_is_not_ours_is_looked_at_as_far_as_it_can(here: Here, other: str):
    where = ("--nsqd-http", other, "--json")
    assert rows(here("topic", "list", *where))[0]["depth"] == 7
    assert rows(here("node", "list", *where))[0]["version"] == "1.3.0"
    assert rows(here("top", "--once", "-i", "10ms", *where))[0]["depth"] == 7


def test_of_two_nsqds_one_that_is_away_hides_nothing(here: Here, other: str):
    code, out, said = here("topic", "list", "--json", "--nsqd-http", f"127.0.0.1:1,{other}")
    assert code == 0 and json.loads(out)["topic"] == "t"
    assert said.count("\n") == 1 and said.startswith("flintmq topic list: connection to http://127.0.0.1:1 failed")


def test_how_far_it_is_is_shown_on_a_terminal_only(single_nsqd: Nsqd):
    words = ("bench", "pub", "--duration", "1s", "--rate", "1000")
    with Terminal(single_nsqd, *words) as terminal:
        terminal.until(b" messages, ")
        assert terminal.end() == 0 and b"\r\x1b[K" in terminal.said
    assert run(single_nsqd, *words).stderr == ""
