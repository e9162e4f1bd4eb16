"""Starts the spool, the process that takes messages from an nsqd without offsets, and starts it again when it ends.

It is a process of its own because Spark's runner answers one call at a time, while nsqd wants FINs, TOUCHes and
heartbeats all along. It ends with this process: its standard input does.

The rules of this file: it imports no pyspark; the reason of an error is what the spool says of itself, or said last;
a secret is handed on as the reference that it is.

Source: docs/decisions/0032.
"""

from __future__ import annotations

import json
import logging
import os
import select
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from flintmq.errors import UNREADABLE_JSON
from flintmq.spark.errors import EXIT_TAKEN, SpoolFailed
from flintmq.spark.lag import NoCheckpoint, PartitionLag
from flintmq.spark.link import with_spark_names
from flintmq.spark.offsets import Offsets, PartitionKey
from flintmq.spark.options import SPOOL, SourceOptions
from flintmq.spark.retry import Retries
from flintmq.spark.tasks import SpoolPlace
from flintmq.spark.token_place import TOKEN, TokenPlace

START_S = 120.0  # until it says where it listens: it may have a log to walk through
END_S = 10.0
ENDING_S = 2.0
LOOK_S = 60.0
COMMAND = (sys.executable, "-m", "flintmq.spool")
LAST_WORDS = 20  # lines that are remembered

log = logging.getLogger("flintmq.spark")


@dataclass(frozen=True)
class Spool:
    """A spool that runs.

    Attributes:
        logs: the id of the log of each topic, which a spool in memory has anew with each start.
    """

    place: SpoolPlace
    logs: Mapping[str, str]


class SpoolProcess:
    """The spool of one query.

    Args:
        mode: ``spool`` or ``direct``.
        is_ending: it is to find out when all that waited in nsqd has been taken.
        sleep: how to pause between attempts; seconds.
    """

    def __init__(
        self,
        options: SourceOptions,
        mode: str,
        is_ending: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._options = options
        self._is_ending = is_ending
        self._mode = mode
        self._sleep = sleep
        self._process: subprocess.Popen[bytes] | None = None
        self._spool: Spool | None = None
        self._said: deque[str] = deque(maxlen=LAST_WORDS)
        self._failed = ""  # why it is about to end by itself
        self._was_slow = False  # it was ended from here because it did not say where it listens
        self._port = 0
        self._token_place: TokenPlace | None = None

    @property
    def process_id(self) -> int:
        """The id of the process; 0 when there is none."""
        return 0 if self._process is None else self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process that has not ended."""
        return self._process is not None and self._process.poll() is None

    def running(self) -> Spool:
        """Return the spool; start it if it does not run.

        Raises:
            SpoolFailed: it cannot be started, or ended because nsqd or the disk refuses it.
        """
        if self._spool is not None and self._process is not None:
            if self._process.poll() is None and not self._failed:
                return self._spool
            self.check()  # it said why; one that was killed is started again
            log.warning("the spool was ended by signal %d, starting it again", -self._process.returncode)
        retries = Retries(self._options.retries, self._sleep)
        while True:
            try:
                self._spool = self._start()
                return self._spool
            except SpoolFailed as error:
                code = 0 if self._process is None else self._process.returncode
                is_killed = code < 0 and not self._was_slow
                if code != EXIT_TAKEN and not is_killed:
                    raise
                # that of a killed driver may be about to end; who kills may stop
                retries.failed(error, "starting the spool")

    def check(self) -> None:
        """Say why it has ended, if it has; called when it does not answer.

        Raises:
            SpoolFailed: nsqd or the disk refuses it.
        """
        if self._process is None:
            return
        if self._failed:
            _close_input(self._process)  # it is heard, and need not be there any longer
        try:
            code = self._process.wait(ENDING_S)  # its listener is gone before it is
        except subprocess.TimeoutExpired:
            code = 0
        if code > 0 or self._failed:
            self._spool = None
            raise SpoolFailed(self._reason())

    def close(self) -> None:
        """End it, and wait for that."""
        process, self._process, self._spool = self._process, None, None
        if process is None:
            return
        _close_input(process)
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._leave_token_place()

    def _leave_token_place(self) -> None:
        place, self._token_place = self._token_place, None
        if place is not None:
            place.close()

    def _start(self) -> Spool:
        options = self._options
        directory = os.path.abspath(options.spool_location) if self._mode == SPOOL else ""
        self._leave_token_place()  # that of a spool that was killed
        if not directory:
            self._token_place = TokenPlace()
        token_file = os.path.join(directory if self._token_place is None else self._token_place.path, TOKEN)
        settings = {
            "directory": directory,
            "token_file": token_file,
            "topics": list(options.named_topics),
            "channel": options.channel,
            "nsqd": list(options.nsqd),
            "lookupd": list(options.lookupd),
            "max_in_flight": options.max_in_flight,
            "bytes_max": options.spool_bytes_max if directory else options.memory_bytes_max,
            "host": options.spool_host,
            "port": self._port,
            "msg_timeout": options.msg_timeout,
            "connect_timeout": options.connect_timeout,
            "lookupd_poll_interval": options.lookupd_poll_interval,
            "link": asdict(options.link),
            "ends": self._is_ending,
        }
        self._said.clear()
        self._failed = ""
        self._was_slow = False
        process = self._process = subprocess.Popen(
            [*COMMAND],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_environment(),
            start_new_session=True,  # Ctrl-C is for Spark
        )
        listener = threading.Thread(target=self._listen, args=(process,), name="spool", daemon=True)
        listener.start()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(settings).encode() + b"\n")
            process.stdin.flush()
        except OSError:
            pass  # it has ended, and says below why
        line = process.stdout.readline() if select.select([process.stdout], [], [], START_S)[0] else b""
        try:
            ready = json.loads(line)
            address, logs = str(ready["address"]), {str(topic): str(each) for topic, each in ready["logs"].items()}
        except (*UNREADABLE_JSON, KeyError, TypeError, AttributeError):
            self._end(process)
            _close_input(process)
            listener.join(END_S)
            raise SpoolFailed(self._reason()) from None
        threading.Thread(target=self._hear, args=(process,), name="spool", daemon=True).start()
        self._port = int(address.rpartition(":")[2])
        log.info("the spool of %s listens at %s", ",".join(logs), address)
        return Spool(SpoolPlace(address, f"file:{token_file}"), logs)

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        try:
            process.wait(0.0 if process.poll() is not None else 1.0)
        except subprocess.TimeoutExpired:
            self._was_slow = True
            process.kill()
            process.wait()

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on what the spool logs, and remember the last of it."""
        assert process.stderr is not None
        for line in process.stderr:
            text = line.decode("utf-8", "backslashreplace").rstrip()
            self._said.append(text)
            log.warning("spool: %s", text)

    def _hear(self, process: subprocess.Popen[bytes]) -> None:
        """Note why the spool ends, which it says while it is still there."""
        assert process.stdout is not None
        for line in process.stdout:
            try:
                failed = str(json.loads(line)["failed"])
            except (*UNREADABLE_JSON, KeyError, TypeError):
                continue
            if process is self._process:
                self._failed = failed

    def _reason(self) -> str:
        if self._failed:
            return with_spark_names(self._failed)
        code = None if self._process is None else self._process.returncode
        if self._was_slow:
            last = f"; its last line was: {with_spark_names(self._said[-1])}" if self._said else ""
            return f"it did not say within {START_S:g} s where it listens, and was ended{last}"
        if code is not None and code < 0:
            return (
                f"signal {-code} ended it while it started. Was the driver's host or container short of memory (the "
                "kernel's log says so), or did somebody kill it? Nothing is lost: start the query again"
            )
        return with_spark_names(self._said[-1]) if self._said else f"it said nothing (exit code {code})"


def _close_input(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it was killed before it had read what was said
        process.stdin.close()


def _environment() -> dict[str, str]:
    """Return the environment in which a child finds this package."""
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, "PYTHONPATH": paths}


def spooled_lag(read: Offsets, directory: str, wall_ns: int) -> list[PartitionLag]:
    """Compare positions with the files of a spool, whether it runs or not.

    Args:
        read: how far its query is.
        wall_ns: now.

    Raises:
        NoCheckpoint: the directory is no spool, or cannot be read.
    """
    keys = sorted(read)
    wanted = {"directory": os.path.abspath(directory), "read": [(key.topic, key.log_id, read[key]) for key in keys]}
    try:
        done = subprocess.run(
            [*COMMAND, "look"],
            input=json.dumps(wanted) + "\n",
            capture_output=True,
            text=True,
            env=_environment(),
            timeout=LOOK_S,
            check=True,
        )
        seen = json.loads(done.stdout)
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        raise NoCheckpoint(Path(directory), said[-1] if said else f"exit code {error.returncode}") from error
    except subprocess.TimeoutExpired as error:
        raise NoCheckpoint(Path(directory), f"its files were not read within {LOOK_S:g} s") from error
    return [_lag(key, read[key], end, oldest_ns, wall_ns) for key, (end, oldest_ns) in zip(keys, seen, strict=True)]


def _lag(key: PartitionKey, position: int, end: int | None, oldest_ns: int | None, wall_ns: int) -> PartitionLag:
    if end is None:
        return PartitionLag(key, "", position, None, None, None)
    seconds = 0.0 if oldest_ns is None else round(max(0, wall_ns - oldest_ns) / 1e9, 3)
    return PartitionLag(key, SPOOL, position, max(end, position), max(0, end - position), seconds)
