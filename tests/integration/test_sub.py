"""``flintmq sub``: what its exit code says, and how it ends when nobody reads."""

from __future__ import annotations

import signal

import pytest
from tests.integration.daemons import PATIENCE_S, Nsqd, wait_until
from tests.integration.test_shell import has_consumer, run, started
from tests.integration.test_shell import topic as topic  # a fixture

FAILS_UNLESS_GOOD = 'read body; [ "$body" = good ]'


@pytest.mark.parametrize(
    ("bodies", "words", "code"),
    [
        ((b"bad", b"bad"), ("--idle", "2s"), 1),  # nothing was finished
        ((b"good", b"bad"), ("--idle", "2s"), 0),  # something was, and nobody has said how much is wanted
        ((b"good", b"bad"), ("--idle", "2s", "-n", "2"), 1),
        ((b"good", b"bad"), ("-n", "1"), 0),
        ((), ("--idle", "100ms", "-n", "2"), 0),  # there was nothing to do, and nothing has failed
    ],
)
def test_the_exit_code_says_when_commands_failed_and_less_than_wanted_was_finished(
    single_nsqd: Nsqd, topic: str, bodies: tuple[bytes, ...], words: tuple[str, ...], code: int
):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    if bodies:
        single_nsqd.publish(topic, *bodies)
    done = run(single_nsqd, "sub", topic, "c", *words, "--requeue", "1h", "--exec", FAILS_UNLESS_GOOD)
    assert done.returncode == code, done.stderr
    assert " finished, " in done.stderr.splitlines()[-1]


def test_it_ends_when_nobody_reads_though_no_message_comes(single_nsqd: Nsqd, topic: str):
    single_nsqd.post(f"/topic/create?topic={topic}")
    single_nsqd.post(f"/channel/create?topic={topic}&channel=c")
    single_nsqd.publish(topic, b"first")
    with started(single_nsqd, "sub", topic, "c") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == b"first\n"
        wait_until(lambda: single_nsqd.unfinished(topic, "c") == 0, "it is finished")
        assert has_consumer(single_nsqd, topic, "c")
        process.stdout.close()
        assert process.wait(PATIENCE_S) == 128 + signal.SIGPIPE
        assert process.stderr.read() == b""
