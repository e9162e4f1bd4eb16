"""Utilities as people use them: processes with stdin, stdout, signals and exit codes."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.integration import forked
from tests.integration.daemons import PATIENCE_S, Nsqd, Nsqlookupd
from tests.integration.flavours import address_of

Process = subprocess.Popen[bytes] | forked.Forked


@contextlib.contextmanager
def started(program: str, *arguments: str, log: Path | None = None, **options: Any) -> Iterator[Process]:
    """Runs a utility, or ``flintmq``; it is ended when nobody has waited for its end.

    Args:
        log: a file for stderr, to be read while it runs.
        options: those of :func:`forked.start`.
    """
    with (
        contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("wb") as stderr,
        forked.start(arguments, program=program, stderr=stderr, **options) as process,
    ):
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()


def run(program: str, *arguments: str, text: bytes = b"", **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs a utility until it ends by itself."""
    with started(program, *arguments, **options) as process:
        out, errors = process.communicate(text, timeout=PATIENCE_S)
        return subprocess.CompletedProcess(arguments, process.wait(), out, errors)


def flintmq(*words: str, text: bytes = b"", **options: Any) -> subprocess.CompletedProcess[str]:
    """Runs a command of ``flintmq`` until it ends by itself."""
    done = run("flintmq", *words, text=text, **options)
    return subprocess.CompletedProcess(words, done.returncode, done.stdout.decode(), done.stderr.decode())


def end(process: Process) -> str:
    """Tells a utility to end, sees it do so with 0, and returns what it has logged."""
    process.terminate()
    _, errors = process.communicate(timeout=PATIENCE_S)
    errors = errors or b""  # it is in a file
    assert process.returncode == 0, errors
    assert b"Traceback" not in errors, errors.decode()
    return errors.decode()


def at(nsqd: Nsqd) -> str:
    return f"--nsqd-tcp-address={address_of(nsqd)}"


def lookup(nsqlookupd: Nsqlookupd) -> str:
    return "--lookupd-http-address={}:{}".format(*nsqlookupd.http)


def is_finished(nsqd: Nsqd, topic: str, channel: str, count: int) -> bool:
    """Whether a channel has had so many messages and has none left."""
    for each in nsqd.get(f"/stats?format=json&topic={topic}")["topics"]:
        for found in each["channels"]:
            if found["channel_name"] == channel:
                left = found["depth"] + found["in_flight_count"] + found["deferred_count"]
                return found["message_count"] >= count and not left
    return False
