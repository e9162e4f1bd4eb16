"""The demo's end of the pipe to :mod:`flintmq.demo.archiver`.

The rules of this file: requests are made one after the other, each is answered; when the process ends, so does whoever
waits for it. Spark's own words are in its log, which every failure names.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import numpy as np

from flintmq.demo.archiver import CHANNEL
from flintmq.demo.failures import DemoFailed
from flintmq.demo.servers import child_environment
from flintmq.demo.verdict import Contents

LINE_BYTES_MAX = 1 << 20
STOP_S_MAX = 10.0

Event = dict[str, Any]


class Archive:
    """Spark, archiving topics.

    Args:
        directory: where everything goes: archives, checkpoints, what Spark writes aside.
        log_path: for everything Spark has to say.
        on_event: told of each event, see :mod:`flintmq.demo.archiver`.
    """

    channel = CHANNEL

    def __init__(self, directory: Path, log_path: Path, on_event: Callable[[Event], None]) -> None:
        self.directory = directory
        self._aside = directory / "spark"
        self._log_path = log_path
        self._on_event = on_event
        self._process: subprocess.Popen[bytes] | None = None
        self._lines: asyncio.StreamReader | None = None

    async def start(self) -> str:
        """Start Spark; return its version.

        Raises:
            DemoFailed: it cannot start.
        """
        self._aside.mkdir(parents=True)
        self._process = self._launch()
        assert self._process.stdout is not None
        self._lines = await _reader(self._process.stdout)
        return str(await self._ask("start_spark", directory=str(self._aside)))

    def _launch(self) -> subprocess.Popen[bytes]:
        with self._log_path.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "flintmq.demo.archiver"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=self._aside,
                env=child_environment(),
                start_new_session=True,  # Ctrl-C is for the demo, which then ends this and the Java it started
            )

    async def begin(self, topic: str, nsqd: str, delays_each: int) -> None:
        """Archive a topic from now on.

        Args:
            delays_each: compute the delays whenever so many more flights are archived; 0: never.
        """
        await self._ask("archive", topic=topic, nsqd=nsqd, directory=str(self.directory), delays_each=delays_each)

    async def drain(self, count: int) -> int:
        """Wait until all that is published, ``count`` messages, is archived; stop; return how many there are."""
        return int(await self._ask("drain", count=count))

    async def delays(self, topic: str) -> list[tuple[str, int, float, int]]:
        """Mean departure delay: carrier, month, minutes, flights."""
        rows = await self._ask("delays", path=str(self.directory / topic))
        return [(row[0], row[1], row[2], row[3]) for row in rows]

    async def contents(self, topic: str) -> Contents:
        """What is in the archive of a topic."""
        import pyarrow as pa

        path = self._aside / f"{topic}.arrow"
        await self._ask("contents", path=str(self.directory / topic), file=str(path))
        with pa.OSFile(str(path), "rb") as file:
            table = pa.ipc.open_file(file).read_all()
        path.unlink()
        # a row that is no flight has no id; -1 is nobody's
        columns = [table[name].fill_null(-1).to_numpy() for name in ("partition", "offset", "id", "body_crc32")]
        return Contents(*(np.asarray(column, dtype=np.int64) for column in columns))

    async def stop(self) -> None:
        """End the process and wait for it, at most for a while."""
        if self._process is None or self._process.stdin is None:
            return
        self._process.stdin.close()
        try:
            await asyncio.to_thread(self._process.wait, STOP_S_MAX)
        except subprocess.TimeoutExpired:
            pass  # it gets no longer
        self.kill()

    def kill(self) -> None:
        """End the process and its Java at once."""
        process, self._process = self._process, None
        if process is not None:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass  # all of them have ended
            process.wait()

    async def _ask(self, what: str, **arguments: Any) -> Any:
        assert self._process is not None and self._process.stdin is not None and self._lines is not None
        try:
            self._process.stdin.write(json.dumps({"do": what, **arguments}).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._failed(what, "the process has ended") from error
        while line := await self._lines.readline():
            answer = json.loads(line)
            if "event" in answer:
                self._on_event(answer)
            elif "error" in answer:
                raise self._failed(what, answer["error"])
            else:
                return answer["result"]
        raise self._failed(what, "the process has ended")

    def _failed(self, what: str, reason: str) -> DemoFailed:
        first_line = reason.strip().splitlines()[0]
        return DemoFailed(f"Spark failed ({what}): {first_line}", f"see {self._log_path}")


async def _reader(pipe: IO[bytes]) -> asyncio.StreamReader:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=LINE_BYTES_MAX)
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    return reader
