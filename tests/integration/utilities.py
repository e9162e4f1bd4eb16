"""Utilities as people use them: processes with stdin, stdout, signals and exit codes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.integration.daemons import PATIENCE_S, SOURCES, Nsqd, Nsqlookupd
from tests.integration.flavours import address_of


@contextlib.contextmanager
def started(program: str, *arguments: str, log: Path | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a utility; it is ended when nobody has waited for its end.

    Args:
        log: a file for stderr, to be read while it runs.
    """
    code = f"import sys; from flintmq.cli import {program} as run; sys.exit(run())"
    with (
        contextlib.nullcontext(subprocess.PIPE) if log is None else log.open("wb") as stderr,
        subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(SOURCES)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
        ) as process,
    ):
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


def end(process: subprocess.Popen[bytes]) -> str:
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
