"""The utilities as people use them: processes with stdin, stdout, signals and exit codes, against a real nsqd.

Source: NSQ 1.3, apps/nsq_tail, apps/to_nsq, apps/nsq_stat.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from itertools import count

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.flavours import address_of

_topics = (f"tools{number}" for number in count())
_HEAD_OF_STAT = """\
------rate------+----------------depth----------------+--------------metadata---------------
ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients
"""


@pytest.fixture
def topic() -> str:
    return next(_topics)


@contextlib.contextmanager
def started(program: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a utility; it is ended when nobody has waited for its end."""
    code = f"import sys; from flintmq.cli import {program} as run; sys.exit(run())"
    with subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(program: str, *arguments: str, text: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Runs a utility until it ends by itself."""
    with started(program, *arguments) as process:
        out, errors = process.communicate(text, timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.returncode, out, errors)


def at(nsqd: Nsqd) -> str:
    return f"--nsqd-tcp-address={address_of(nsqd)}"


def tail(nsqd: Nsqd, topic: str, number: int, *arguments: str) -> list[bytes]:
    """The next messages of channel ``c``, as nsq_tail prints them."""
    done = run("nsq_tail", at(nsqd), f"--topic={topic}", "--channel=c", f"-n={number}", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


# --- to_nsq and nsq_tail


def test_lines_go_in_and_come_out(shared_nsqd: Nsqd, topic: str):
    """The last line needs no newline to be whole; empty ones are none."""
    done = run("to_nsq", at(shared_nsqd), f"--topic={topic}", text=b"one\n\ntwo\r\n\xff\x00\nlast")
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
    assert shared_nsqd.stats(topic)["message_count"] == 4
    read = run("nsq_tail", at(shared_nsqd), f"--topic={topic}", "--channel=c", "-n=4")
    assert read.stdout == b"one\ntwo\r\n\xff\x00\nlast\n"
    assert shared_nsqd.unfinished(topic, "c") == 0


def test_many_lines_keep_their_order(shared_nsqd: Nsqd, topic: str):
    lines = [b"%d" % number for number in range(20_000)]
    run("to_nsq", at(shared_nsqd), f"--topic={topic}", text=b"\n".join(lines))
    assert tail(shared_nsqd, topic, len(lines)) == lines


def test_every_nsqd_gets_everything_split_at_the_delimiter(shared: Daemons, shared_nsqd: Nsqd, topic: str):
    second = shared.nsqd("--durability=os")
    done = run("to_nsq", at(shared_nsqd), at(second), f"--topic={topic}", "--delimiter=,", text=b"a,b\n,c")
    assert done.returncode == 0, done.stderr
    for nsqd in (shared_nsqd, second):
        read = run("nsq_tail", at(nsqd), f"--topic={topic}", "--channel=c", "-n=3")
        assert read.stdout == b"a\nb\n\nc\n"


def test_a_line_is_published_when_it_is_there_and_a_signal_ends_it(shared_nsqd: Nsqd, topic: str):
    with started("to_nsq", at(shared_nsqd), f"--topic={topic}", "--rate=1000") as process:
        assert process.stdin is not None
        process.stdin.write(b"whole\nhal")
        process.stdin.flush()
        wait_until(
            lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "the first line is published"
        )
        assert tail(shared_nsqd, topic, 1) == [b"whole"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert shared_nsqd.stats(topic)["message_count"] == 1, "half a line is no message"


def test_what_cannot_be_published_is_named_and_what_comes_before_it_is(shared: Daemons, topic: str):
    nsqd = shared.nsqd("--durability=os", "--max-msg-size=10")
    done = run("to_nsq", at(nsqd), f"--topic={topic}", text=b"short\n\nmuch too long\nlater\n")
    assert done.returncode == 1
    assert b"item 3 of 13 bytes is not published: E_BAD_MESSAGE" in done.stderr
    assert b"Traceback" not in done.stderr
    assert tail(nsqd, topic, 1) == [b"short"]
    assert nsqd.stats(topic)["message_count"] == 1


def test_topics_of_several_nsqd_are_found_and_named(shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str):
    other = next(_topics)
    shared_nsqd.publish(topic, b"1")
    shared_nsqd.publish(other, b"2")
    wait_until(lambda: {topic, other} <= {*shared_nsqlookupd.get("/topics")["topics"]}, "nsqlookupd knows both")
    lookupd = "--lookupd-http-address={}:{}".format(*shared_nsqlookupd.http)
    done = run("nsq_tail", lookupd, f"-topic={topic}", "--topic", other, "--channel=c", "-n=2", "-print-topic")
    assert sorted(done.stdout.splitlines()) == sorted([f"{topic} | 1".encode(), f"{other} | 2".encode()]), done.stderr


def test_it_looks_on_without_taking_from_anybody_until_it_is_told_to_end(shared_nsqd: Nsqd, topic: str):
    with started("nsq_tail", at(shared_nsqd), f"--topic={topic}") as process:
        assert process.stdout is not None
        wait_until(lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "it has subscribed")
        (channel,) = wait_until(lambda: shared_nsqd.stats(topic)["channels"], "it has subscribed")
        assert channel["channel_name"].startswith("tail") and channel["channel_name"].endswith("#ephemeral")
        shared_nsqd.publish(topic, b"seen")
        assert process.stdout.readline() == b"seen\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    wait_until(lambda: not shared_nsqd.stats(topic)["channels"], "its channel goes with it")


def test_when_nobody_reads_any_more_it_ends_and_gives_back(shared_nsqd: Nsqd, topic: str):
    bodies = [b"%d" % number for number in range(3)]
    with started("nsq_tail", at(shared_nsqd), f"--topic={topic}", "--channel=c", "--max-in-flight=1") as process:
        assert process.stdout is not None
        wait_until(lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "it has subscribed")
        process.stdout.close()
        shared_nsqd.publish(topic, *bodies)
        assert process.wait(PATIENCE_S) == 0
    assert sorted(tail(shared_nsqd, topic, 3)) == bodies


def test_what_cannot_be_written_is_not_finished(shared_nsqd: Nsqd, topic: str):
    shared_nsqd.publish(topic, b"kept")
    code = "import sys; from flintmq.cli import nsq_tail as run; sys.exit(run())"
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", code, at(shared_nsqd), f"--topic={topic}", "--channel=c"],
            env={**os.environ, "PYTHONPATH": str(SOURCES)}, stdout=full, stderr=subprocess.PIPE, timeout=PATIENCE_S,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"nsq_tail: the output cannot be written: No space left on device"
    assert tail(shared_nsqd, topic, 1) == [b"kept"]


@pytest.mark.parametrize(("program", "descriptor", "name"), [("to_nsq", 0, "stdin"), ("nsq_tail", 1, "stdout")])
def test_what_is_closed_is_said(shared_nsqd: Nsqd, topic: str, program: str, descriptor: int, name: str):
    """The first connection would take its place."""
    code = f"import os, sys; os.close({descriptor}); from flintmq.cli import {program} as run; sys.exit(run())"
    done = subprocess.run(
        [sys.executable, "-c", code, at(shared_nsqd), f"--topic={topic}"],
        env={**os.environ, "PYTHONPATH": str(SOURCES)}, stderr=subprocess.PIPE, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == f"{program}: {name} is closed; redirect it, perhaps to /dev/null\n".encode()


def test_a_topic_that_is_deleted_while_it_is_looked_at(shared_nsqd: Nsqd, topic: str):
    with started("nsq_tail", at(shared_nsqd), f"--topic={topic}") as process:
        wait_until(lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "it has subscribed")
        (channel,) = wait_until(lambda: shared_nsqd.stats(topic)["channels"], "it has subscribed")
        shared_nsqd.request("POST", f"/topic/delete?topic={topic}")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read(), channel


def test_options_of_the_consumer_are_obeyed(shared: Daemons, topic: str):
    nsqd = shared.nsqd("--durability=os", "--max-deflate-level=6")
    opts = ["--consumer-opt=deflate", "--consumer-opt=client_id,me, you", "--consumer-opt=max_in_flight,7"]
    with started("nsq_tail", at(nsqd), f"--topic={topic}", "--channel=c", *opts):
        (client,) = wait_until(
            lambda: (
                nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
                and nsqd.stats(topic)["channels"]
                and nsqd.stats(topic, "c")["clients"]
            ),
            "it has subscribed",
        )
        assert client["client_id"] == "me, you" and client["deflate"]
        assert client["user_agent"].startswith("nsq_tail/1.3.0 flintmq/")
        nsqd.publish(topic, b"x")  # a connection gets its share with its first message
        wait_until(lambda: nsqd.stats(topic, "c")["clients"][0]["ready_count"] == 7, "RDY is what was asked for")


# --- nsq_stat


def test_figures_of_a_channel(shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str):
    shared_nsqd.request("POST", f"/topic/create?topic={topic}")
    shared_nsqd.request("POST", f"/channel/create?topic={topic}&channel=c")
    shared_nsqd.publish(topic, b"1", b"2", b"3")
    wait_until(lambda: topic in shared_nsqlookupd.get("/topics")["topics"], "nsqlookupd knows it")
    for where in (
        "--nsqd-http-address={}:{}".format(*shared_nsqd.http),
        "--lookupd-http-address={}:{}".format(*shared_nsqlookupd.http),
    ):
        done = run("nsq_stat", where, f"--topic={topic}", "--channel=c", "--count=2", "--interval=10ms")
        assert done.returncode == 0, done.stderr
        *head, first, second = done.stdout.decode().splitlines(keepends=True)
        assert "".join(head) == _HEAD_OF_STAT
        fields = [int(each) for each in first.replace("|", " ").split()]
        assert first == second
        assert (fields[:2], fields[2], sum(fields[3:5]), fields[5:]) == ([0, 0], 3, 3, [0, 0, 0, 0, 3, 0])


def test_what_nsq_stat_cannot_find_is_said(shared_nsqd: Nsqd, topic: str):
    done = run("nsq_stat", "--nsqd-http-address={}:{}".format(*shared_nsqd.http), f"--topic={topic}", "--channel=c")
    assert done.returncode == 1
    assert f"failed to find channel(c) in stats metadata for topic({topic})" in done.stderr.decode()
    done = run("nsq_stat", "--nsqd-http-address=127.0.0.1:1", f"--topic={topic}", "--channel=c")
    assert done.returncode == 1 and b"127.0.0.1:1" in done.stderr and b"Traceback" not in done.stderr


# --- what is wrong on a command line


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nsq_tail --topic=t", "--nsqd-tcp-address or --lookupd-http-address required"),
        ("nsq_tail --topic=t --nsqd-tcp-address=a:1 --lookupd-http-address=b:1",
         "use --nsqd-tcp-address or --lookupd-http-address not both"),
        ("nsq_tail --nsqd-tcp-address=a:1", "--topic required"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=a/b", "--topic='a/b' is not allowed"),
        ("nsq_tail --topics=t", "did you mean --topic?"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=snapy", "did you mean snappy?"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=msg_timeout,soon", "msg_timeout: "),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=local_addr,a", "nothing here can obey local_addr"),
        ("to_nsq --topic=t", "--nsqd-tcp-address required"),
        ("to_nsq --nsqd-tcp-address=a:1", "--topic required"),
        ("to_nsq --nsqd-tcp-address=a:1 --topic=t --delimiter=ab", "--delimiter must be a single byte"),
        ("nsq_stat --topic=t", "--topic and --channel are required"),
        ("nsq_stat --topic=t --channel=c", "--nsqd-http-address or --lookupd-http-address required"),
        ("nsq_stat --topic=t --channel=c --count=0 --nsqd-http-address=a:1", "it must be at least 1"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(words: str, text: str):
    program, *arguments = words.split()
    done = run(program, *arguments)
    assert done.returncode == 2
    assert text in done.stderr.decode()
    assert done.stderr.count(b"\n") == 1, done.stderr


@pytest.mark.parametrize("program", ["nsq_tail", "to_nsq", "nsq_stat"])
def test_version_and_help(program: str):
    assert run(program, "--version").stdout.startswith(f"{program} v1.3.0 ".encode())
    assert run(program, "-h").stdout.startswith(f"Usage: {program} [flags]\n".encode())
