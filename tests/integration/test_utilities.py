"""The utilities as people use them: processes with stdin, stdout, signals and exit codes, against a real nsqd.

Source: NSQ 1.3, apps/nsq_tail, apps/to_nsq, apps/nsq_stat.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import count

import pytest
from tests.integration.daemons import PATIENCE_S, SOON_S, SOURCES, Daemons, Nsqd, Nsqlookupd, in_time, sized, wait_until
from tests.integration.flavours import address_of
from tests.integration.proxy import Proxy
from tests.integration.utilities import at, run, started

_topics = (f"tools{number}" for number in count())
_HEAD_OF_STAT = """\
------rate------+----------------depth----------------+--------------metadata---------------
ingress  egress |   total     mem    disk inflt   def |     req     t-o         msgs clients
"""


@pytest.fixture
def topic() -> str:
    return next(_topics)


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


def test_an_nsqd_that_is_down_ends_it_and_the_others_get_nothing(shared_nsqd: Nsqd, topic: str):
    """At once, as NSQ's: a publish that waited for it would end after 30 s, with other words."""
    done = run("to_nsq", at(shared_nsqd), "--nsqd-tcp-address=127.0.0.1:1", f"--topic={topic}", text=b"x\n" * 3)
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"Connection refused" in done.stderr and b"nothing is published: no connection" in done.stderr, done.stderr
    assert not shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    done = run("to_nsq", "--nsqd-tcp-address=127.0.0.1:1", f"--topic={topic}", text=b"")
    assert done.returncode == 0, done.stderr


def seconds_of_ending(nsqd: Nsqd, topic: str, signals: int) -> float:
    """How long to_nsq goes on after so many signals when nsqd answers its last publish no more."""
    answers = bytearray()
    with Proxy(nsqd.tcp) as proxy:
        proxy.watch = lambda _, way, data: answers.extend(data if way == "down" else b"")
        to = "--nsqd-tcp-address={}:{}".format(*proxy.address)
        with started("to_nsq", to, f"--topic={topic}") as process:
            assert process.stdin is not None and process.stderr is not None
            process.stdin.write(b"first\n")
            process.stdin.flush()
            wait_until(lambda: sized(b"\0\0\0\0OK") in bytes(answers), "the first line is published")
            proxy.down.is_stalled = True
            process.stdin.write(b"second\nthird\n")
            process.stdin.flush()
            wait_until(lambda: nsqd.stats(topic)["message_count"] == 3, "it waits for an answer")
            process.send_signal(signal.SIGINT)
            while b"told to end" not in (line := process.stderr.readline()):
                assert line, "it has ended"
            began = time.monotonic()
            if signals == 2:
                process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=PATIENCE_S)
            took_s = time.monotonic() - began
    assert process.returncode == 1
    assert b"told to end: 2 items that were read are not published" in errors and b"Traceback" not in errors, errors
    assert b"has everything up to item 1 for certain, and perhaps up to item 3" in errors
    return took_s


def test_a_signal_ends_what_waits_and_what_is_not_published_is_counted(shared_nsqd: Nsqd, topic: str):
    """By itself a publish would be given up after 30 s."""
    assert seconds_of_ending(shared_nsqd, topic, 1) < SOON_S


@in_time
def test_the_second_signal_ends_it_at_once(shared_nsqd: Nsqd, topic: str):
    assert seconds_of_ending(shared_nsqd, topic, 2) < 4


def test_what_the_rate_holds_back_is_counted(shared_nsqd: Nsqd, topic: str):
    with started("to_nsq", at(shared_nsqd), f"--topic={topic}", "--rate=1") as process:
        assert process.stdin is not None
        process.stdin.write(b"a\n\nb\nc\n" + b"d\n" * 1000 + b"last")
        process.stdin.close()
        wait_until(lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "the first is published")
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 1
        assert process.stderr is not None
        errors = process.stderr.read().decode()
    left = 1004 - shared_nsqd.stats(topic)["message_count"]
    assert f"told to end: {left} items that were read are not published" in errors


def test_what_cannot_be_published_is_named_and_what_comes_before_it_is(shared: Daemons, topic: str):
    nsqd = shared.nsqd("--durability=os", "--max-msg-size=10")
    done = run("to_nsq", at(nsqd), f"--topic={topic}", text=b"short\n\nmuch too long\nlater\n")
    assert done.returncode == 1
    assert b"item 3 of 13 bytes is not published: E_BAD_MESSAGE" in done.stderr
    assert b"Traceback" not in done.stderr
    assert tail(nsqd, topic, 1) == [b"short"]
    assert nsqd.stats(topic)["message_count"] == 1


def test_items_are_as_large_as_nsqd_takes_them(shared: Daemons, shared_nsqd: Nsqd, topic: str):
    wide = shared.nsqd("--durability=os", "--max-msg-size=20000000", "--max-body-size=20000000")
    text = b"short\n" + b"x" * 17_000_000 + b"\n"
    done = run("to_nsq", at(wide), f"--topic={topic}", text=text)
    assert done.returncode == 0, done.stderr
    assert wide.stats(topic)["message_count"] == 2
    done = run("to_nsq", at(shared_nsqd), at(wide), f"--topic={topic}", text=text)
    assert done.returncode == 1
    assert b"item 2 of 17000000 bytes is not published: E_BAD_MESSAGE" in done.stderr
    places = [f"{address_of(nsqd)} has everything up to item {last}" for nsqd, last in ((shared_nsqd, 1), (wide, 2))]
    assert ", ".join(places) in done.stderr.decode()


def test_an_item_that_has_no_end_is_named(shared_nsqd: Nsqd, topic: str):
    done = run("to_nsq", at(shared_nsqd), f"--topic={topic}", text=b"short\n\n" + bytes(66 * 1024 * 1024))
    assert done.returncode == 1
    assert b"item 3 has more than 67108864 bytes without a delimiter; is --delimiter right?" in done.stderr
    assert f"; {address_of(shared_nsqd)} has everything up to item 2\n" in done.stderr.decode()


def test_of_several_nsqd_it_is_said_how_far_each_is(shared: Daemons, shared_nsqd: Nsqd, topic: str):
    """Whoever goes on from the item that one of them does not take would double those that the others have."""
    strict = shared.nsqd("--durability=os", "--max-msg-size=10")
    done = run("to_nsq", at(shared_nsqd), at(strict), f"--topic={topic}", text=b"short\n\nmuch too long\nlater\n")
    assert done.returncode == 1
    assert b"item 3 of 13 bytes is not published: E_BAD_MESSAGE" in done.stderr
    places = [f"{address_of(nsqd)} has everything up to item {last}" for nsqd, last in ((shared_nsqd, 4), (strict, 2))]
    assert ", ".join(places) in done.stderr.decode()
    assert [nsqd.stats(topic)["message_count"] for nsqd in (shared_nsqd, strict)] == [3, 1]


def test_when_one_of_several_nsqd_has_died_it_is_said_how_far_each_is(shared: Daemons, shared_nsqd: Nsqd, topic: str):
    second = shared.nsqd("--durability=os")
    with started("to_nsq", at(shared_nsqd), at(second), f"--topic={topic}") as process:
        assert process.stdin is not None and process.stderr is not None
        process.stdin.write(b"first\n")
        process.stdin.flush()
        for nsqd in (shared_nsqd, second):
            wait_until(partial(is_stored, nsqd, topic, 1), "the first line is everywhere")
        second.kill()
        process.stdin.write(b"second\nthird\n")
        process.stdin.flush()
        wait_until(partial(is_stored, shared_nsqd, topic, 3), "the living one has all")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert f"{address_of(shared_nsqd)} has everything up to item 3, {address_of(second)} has" in errors.decode()


def is_stored(nsqd: Nsqd, topic: str, count: int) -> bool:
    topics = nsqd.get(f"/stats?format=json&topic={topic}")["topics"]
    return bool(topics) and topics[0]["message_count"] >= count


def test_topics_of_several_nsqd_are_found_and_named(shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str):
    other = next(_topics)
    shared_nsqd.publish(topic, b"1")
    shared_nsqd.publish(other, b"2")
    wait_until(lambda: {topic, other} <= {*shared_nsqlookupd.get("/topics")["topics"]}, "nsqlookupd knows both")
    lookupd = "--lookupd-http-address={}:{}".format(*shared_nsqlookupd.http)
    done = run("nsq_tail", lookupd, f"-topic={topic}", "--topic", other, "--channel=c", "-n=2", "-print-topic")
    assert sorted(done.stdout.splitlines()) == sorted([f"{topic} | 1".encode(), f"{other} | 2".encode()]), done.stderr


def test_the_count_is_of_all_topics_together(shared_nsqd: Nsqd, topic: str):
    other = next(_topics)
    for each in (topic, other):
        shared_nsqd.publish(each, b"x", b"x")
    done = run("nsq_tail", at(shared_nsqd), f"--topic={topic}", f"--topic={other}", "--channel=c", "--n=3")
    assert (done.returncode, done.stdout) == (0, b"x\n" * 3), done.stderr
    assert shared_nsqd.unfinished(topic, "c") + shared_nsqd.unfinished(other, "c") == 1


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


def test_an_nsqd_that_comes_later_is_found(daemons: Daemons, topic: str):
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish(topic, b"kept")
    nsqd.stop()
    with started("nsq_tail", at(nsqd), f"--topic={topic}", "--channel=c", "--n=1") as process:
        assert process.stdout is not None and process.stderr is not None
        while b"cannot consume from nsqd" not in (line := process.stderr.readline()):
            assert line, "it has ended"
        nsqd.start()
        assert process.stdout.readline() == b"kept\n"


def test_when_nobody_reads_any_more_it_ends_and_gives_back(shared_nsqd: Nsqd, topic: str):
    bodies = [b"%d" % number for number in range(3)]
    with started("nsq_tail", at(shared_nsqd), f"--topic={topic}", "--channel=c", "--max-in-flight=1") as process:
        assert process.stdout is not None
        wait_until(lambda: shared_nsqd.get(f"/stats?format=json&topic={topic}")["topics"], "it has subscribed")
        process.stdout.close()
        shared_nsqd.publish(topic, *bodies)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
    assert sorted(tail(shared_nsqd, topic, 3)) == bodies


def test_what_cannot_be_written_is_not_finished(shared_nsqd: Nsqd, topic: str):
    shared_nsqd.publish(topic, b"kept")
    with open("/dev/full", "wb") as full:
        done = run("nsq_tail", at(shared_nsqd), f"--topic={topic}", "--channel=c", stdout=full)
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


@pytest.mark.parametrize(
    ("program", "broken", "more"),
    [
        ("nsq_to_file", "tools.output_file.OutputFile.write", ["--output-dir=/dev/shm/none"]),
        ("nsq_to_http", "net.http_client.HttpClient.ask", ["--post=http://127.0.0.1:1/"]),
        ("nsq_to_nsq", "client.aio.producer.Producer.mpub", ["--destination-nsqd-tcp-address=127.0.0.1:1"]),
    ],
)
def test_a_mistake_of_ours_finishes_nothing(shared_nsqd: Nsqd, topic: str, program: str, broken: str, more: list[str]):
    """It ends with a traceback, and the message is still there."""
    shared_nsqd.publish(topic, b"kept")
    module, name, method = f"flintmq.{broken}".rsplit(".", 2)
    code = (
        f"import sys; from {module} import {name} as it\ndef wrong(*a, **k): raise ZeroDivisionError('planted')\n"
        f"it.{method} = wrong; from flintmq.cli import {program} as run; sys.exit(run())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, at(shared_nsqd), f"--topic={topic}", "--channel=c", *more],
        env={**os.environ, "PYTHONPATH": str(SOURCES)}, stderr=subprocess.PIPE, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == b"ZeroDivisionError: planted"
    wait_until(lambda: shared_nsqd.stats(topic, "c")["client_count"] == 0, "it has gone")
    assert shared_nsqd.unfinished(topic, "c") == 1


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_nsq_stat_ends_when_it_is_told_to(shared_nsqd: Nsqd, topic: str, number: signal.Signals):
    shared_nsqd.request("POST", f"/topic/create?topic={topic}")
    shared_nsqd.request("POST", f"/channel/create?topic={topic}&channel=c")
    where = "--nsqd-http-address={}:{}".format(*shared_nsqd.http)
    with started("nsq_stat", where, f"--topic={topic}", "--channel=c", "--interval=1h") as process:
        assert process.stdout is not None
        assert process.stdout.readline() + process.stdout.readline() == _HEAD_OF_STAT.encode()
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == 0


def figures(lines: Iterable[bytes]) -> Iterator[tuple[int, ...]]:
    """Ingress, egress and total of the lines of nsq_stat that are no header."""
    for line in lines:
        if b"|" in line and b"ingress" not in line:
            yield tuple(int(each) for each in line.replace(b"|", b" ").split()[:3])


def with_channel(nsqd: Nsqd, topic: str, *bodies: bytes) -> str:
    """Messages for channel ``c``; how nsq_stat is told of this nsqd."""
    nsqd.request("POST", f"/topic/create?topic={topic}")
    nsqd.request("POST", f"/channel/create?topic={topic}&channel=c")
    nsqd.publish(topic, *bodies)
    return "--nsqd-http-address={}:{}".format(*nsqd.http)


def test_nsq_stat_gives_no_figures_of_some_for_those_of_all(shared: Daemons, shared_nsqd: Nsqd, topic: str):
    second = shared.nsqd("--durability=os")
    where = [with_channel(each, topic, b"1", b"2") for each in (shared_nsqd, second)]
    what = (f"--topic={topic}", "--channel=c")
    with started("nsq_stat", *where, *what, "--interval=10ms") as process:
        assert process.stdout is not None
        assert next(figures(process.stdout)) == (0, 0, 4)
        second.kill()
        out, errors = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "{}:{}".format(*second.http).encode() in errors and b"Traceback" not in errors, errors
    assert {*figures(out.splitlines())} <= {(0, 0, 4)}
    done = run("nsq_stat", *where, *what, "--interval=10ms", "--count=1")
    assert (done.returncode, done.stdout) == (1, b"")


def test_nsq_stat_asks_all_nsqlookupd(shared_nsqd: Nsqd, shared_nsqlookupd: Nsqlookupd, topic: str):
    """One that is down may be the only one that knows of some nsqd."""
    with_channel(shared_nsqd, topic, b"1")
    wait_until(lambda: topic in shared_nsqlookupd.get("/topics")["topics"], "nsqlookupd knows it")
    where = "--lookupd-http-address={}:{}".format(*shared_nsqlookupd.http), "--lookupd-http-address=127.0.0.1:1"
    done = run("nsq_stat", *where, f"--topic={topic}", "--channel=c", "--interval=10ms", "--count=1")
    assert (done.returncode, done.stdout) == (1, b"")
    assert b"127.0.0.1:1" in done.stderr and b"Traceback" not in done.stderr


def test_nsq_stat_has_no_rate_between_two_sets_of_nsqd(shared: Daemons, topic: str):
    nsqlookupd = shared.nsqlookupd()
    lookup = "--lookupd-tcp-address={}:{}".format(*nsqlookupd.tcp)
    first, second = (shared.nsqd("--durability=os", lookup, "--broadcast-address=127.0.0.1") for _ in range(2))
    with_channel(first, topic, b"1")
    with_channel(second, topic, b"1", b"2")
    wait_until(lambda: len(nsqlookupd.producers(topic)) == 2, "nsqlookupd knows both")
    where = "--lookupd-http-address={}:{}".format(*nsqlookupd.http)
    with started("nsq_stat", where, f"--topic={topic}", "--channel=c", "--interval=10ms") as process:
        assert process.stdout is not None and process.stderr is not None
        lines = figures(process.stdout)
        assert next(lines) == (0, 0, 3)
        node = f"127.0.0.1:{second.http[1]}"
        assert nsqlookupd.request("POST", f"/topic/tombstone?topic={topic}&node={node}").status == 200
        assert next(line for line in lines if line != (0, 0, 3)) == (0, 0, 1)
        assert b"is at other nsqd now: 127.0.0.1:%d" % first.http[1] in process.stderr.readline()


# --- what is wrong on a command line


_TLS_FILES = [
    ("--http-client-tls-root-ca-file=/none",
     "--http-client-tls-root-ca-file='/none' is not allowed; certificate authorities /none: No such file"),
    ("--http-client-tls-cert=/none --http-client-tls-key=/none",
     "--http-client-tls-cert='/none' is not allowed; certificate /none: No such file"),
    ("--http-client-tls-cert=/none", "--http-client-tls-cert and --http-client-tls-key go together"),
    ("--http-client-tls-key=/none", "--http-client-tls-cert and --http-client-tls-key go together"),
]  # fmt: skip
_TO_HTTP = "nsq_to_http --nsqd-tcp-address=a:1 --topic=t"


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("nsq_tail --topic=t", "--nsqd-tcp-address or --lookupd-http-address required"),
        ("nsq_tail --topic=t --nsqd-tcp-address=a:1 --lookupd-http-address=b:1",
         "use --nsqd-tcp-address or --lookupd-http-address not both"),
        ("nsq_tail --nsqd-tcp-address=a:1", "--topic required"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=a/b", "--topic='a/b' is not allowed"),
        ("nsq_tail --topics=t", "did you mean --topic?"),
        ("nsq_tail --topic=t --nsqd-tcp-address=http://a:1", "without http://"),
        ("nsq_stat --topic=t --channel=c --nsqd-http-address=http://a:1", "without http://"),
        ("nsq_tail --topic=t --lookupd-http-address=a", "--lookupd-http-address='a' is not allowed; HOST:PORT, http://"),
        ("nsq_to_file --topic=t --lookupd-http-address=a:99999", "--lookupd-http-address='a:99999' is not allowed"),
        ("nsq_to_http --topic=t --lookupd-http-address=ftp://a:1 --post=http://a/", "--lookupd-http-address='ftp://a:1'"),
        ("nsq_tail --topic=t --lookupd-http-address=https://a:b", "its host or port is malformed"),
        ("nsq_to_nsq --topic=t --nsqd-tcp-address=a:1 --destination-lookupd-http-address=a:b",
         "--destination-lookupd-http-address='a:b' is not allowed"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=snapy", "did you mean snappy?"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=msg_timeout,soon", "msg_timeout: "),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=local_addr,a", "nothing here can obey local_addr"),
        ("nsq_tail --nsqd-tcp-address=a:1 --topic=t --consumer-opt=snappy --consumer-opt=deflate",
         "cannot enable both deflate and snappy compression"),
        ("nsq_to_file --topic=t", "--nsqd-tcp-address or --lookupd-http-address required"),
        ("nsq_to_file --nsqd-tcp-address=a:1", "--topic or --topic-pattern required"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic-pattern=t",
         "--lookupd-http-address must be specified when no --topic specified"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --topic-pattern=x", "it must match one --topic at least"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --topic-pattern=(", "--topic-pattern"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --channel=", "--channel is required"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --gzip-level=10", "--gzip-level='10' is not allowed"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --log-level=loud", "it must be one of: debug, info"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --gzip --filename-format=x", "missing <REV>"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --rotate-size=1 --filename-format=x", "missing <REV>"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --datetime-format=%Q", "%Q is none of"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --http-client-connect-timeout=0s", "--http-client-connect"),
        ("nsq_to_file --nsqd-tcp-address=a:1 --topic=t --output-dir=/dev/shm --work-dir=/proc",
         "it must be on the file system of --output-dir"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1", "--topic and --channel are required"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --channel=a/b", "--channel='a/b' is not allowed"),
        ("nsq_to_nsq --topic=t", "--nsqd-tcp-address or --lookupd-http-address required"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t", "--destination-nsqd-tcp-address required"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --destination-topic=a/b", "--destination-topic='a/b'"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --destination-nsqd-tcp-address=b:1 --mode=all",
         "it must be one of: hostpool, round-robin, epsilon-greedy"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --destination-nsqd-tcp-address=a:1", "for ever"),
        ("nsq_to_nsq --nsqd-tcp-address=127.0.0.1:1 --topic=t --destination-nsqd-tcp-address=LOCALHOST:1", "for ever"),
        ("nsq_to_nsq --lookupd-http-address=127.0.0.1:80 --topic=t "
         "--destination-lookupd-http-address=http://[::1]/", "for ever"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t:u --topic=u:t --destination-nsqd-tcp-address=a:1", "for ever"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=s:t --topic=t:u --topic=u:t --destination-nsqd-tcp-address=a:1",
         "for ever"),
        ("nsq_to_nsq --lookupd-http-address=http://a/dc1/ --topic=t "
         "--destination-lookupd-http-address=http://A:80/dc1", "for ever"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t: --destination-nsqd-tcp-address=b:1", "--topic=t:TO, TO=''"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t:u --topic=t:v --destination-nsqd-tcp-address=b:1", "one topic"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t:u --destination-topic=v --destination-nsqd-tcp-address=b:1",
         "use --topic=t:u or --destination-topic not both"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --destination-nsqd-tcp-address=b:1 --ordered",
         "--ordered needs --destination-lookupd-http-address"),
        ("nsq_to_nsq --lookupd-http-address=a:1 --topic=t --destination-lookupd-http-address=b:1 --ordered --defer=1s",
         "use --ordered or --defer not both: nothing keeps the order of messages that are deferred"),
        ("nsq_to_nsq --nsqd-tcp-address=a:1 --topic=t --destination-nsqd-tcp-address=b:1 --require-json-value=1",
         "--require-json-value needs --require-json-field"),
        ("nsq_to_http --nsqd-tcp-address=a:1", "--topic and --channel are required"),
        ("nsq_to_http --topic=t --post=http://a/", "--nsqd-tcp-address or --lookupd-http-address required"),
        (_TO_HTTP, "--get or --post required"),
        (f"{_TO_HTTP} --post=http://a/ --get=http://a/%s", "use --get or --post not both"),
        (f"{_TO_HTTP} --get=http://a/", "invalid GET address - must be a printf string"),
        (f"{_TO_HTTP} --get=http://a/%s%s", "invalid GET address - must be a printf string"),
        (f"{_TO_HTTP} --get=http://a/%s --content-type=a/b", "--content-type only used with --post"),
        (f"{_TO_HTTP} --post=http://a/ --content-type=", "--content-type requires a value when used"),
        (f"{_TO_HTTP} --post=a:80/x", "it must be http://host:port/path or https://"),
        (f"{_TO_HTTP} --post=http://a/ --sample=1.5", "--sample must be between 0.0 and 1.0"),
        (f"{_TO_HTTP} --post=http://a/ --mode=some", "one of: hostpool, round-robin, epsilon-greedy, multicast"),
        (f"{_TO_HTTP} --post=http://a/ --header=x", "it must be 'Name: value'"),
        *((f"{_TO_HTTP} --post=https://a/ {flags}", expected) for flags, expected in _TLS_FILES),
        *((f"nsq_stat --topic=t --channel=c --nsqd-http-address=a:1 {flags}", expected)
          for flags, expected in _TLS_FILES),
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


@pytest.mark.parametrize("program", ["nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq", "to_nsq", "nsq_stat"])
def test_version_and_help(program: str):
    assert run(program, "--version").stdout.startswith(f"{program} v1.3.0 ".encode())
    assert run(program, "-h").stdout.startswith(f"Usage: {program} [flags]\n".encode())
