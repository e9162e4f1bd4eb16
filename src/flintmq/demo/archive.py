"""The demo's end of the pipe to :mod:`flintmq.demo.archiver`, which is Spark.

The rules of this file: requests are made one after the other, each is answered; when the process ends, a request fails.
Spark's own words are in its log, which every failure names.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from flintmq.demo.processes import Process
from flintmq.demo.verdict import Contents

LINE_BYTES_MAX = 1 << 20

Delay = tuple[str, int, float, int]  # carrier, month, mean minutes, flights


class Archive(Process):
    """Spark, archiving one topic after the other.

    Args:
        directory: where everything goes: archives, checkpoints, what Spark writes aside.
        log_path: for everything Spark has to say.
        archived: told how many messages are archived so far, whenever that changes.
        say: told what Spark has found out meanwhile, for people.
    """

    def __init__(
        self, directory: Path, log_path: Path, archived: Callable[[int], None], say: Callable[[str], None]
    ) -> None:
        super().__init__("Spark", log_path)
        self._directory = directory
        self._archived = archived
        self._say = say
        self._lines: asyncio.StreamReader | None = None

    async def start(self) -> str:
        """Start Spark; return its version.

        Raises:
            DemoFailed: it cannot start.
        """
        scratch = self._directory / "spark"
        scratch.mkdir(parents=True)
        process = self.launch("flintmq.demo.archiver", cwd=scratch, is_talking=True)
        lines = self._lines = asyncio.StreamReader(limit=LINE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), process.stdout)
        return str(await self._ask("start_spark", scratch=str(scratch)))

    async def begin(self, topic: str, nsqd: str, delays_each: int) -> None:
        """Archive a topic from now on.

        Args:
            delays_each: compute the delays whenever so many more flights are archived; 0: never.
        """
        await self._ask("begin", topic=topic, nsqd=nsqd, directory=str(self._directory), delays_each=delays_each)

    async def drain(self, count: int) -> None:
        """Wait until all that is published, ``count`` messages, is archived, and end that."""
        self._archived(int(await self._ask("drain", count=count)))

    async def delays(self, topic: str) -> list[Delay]:
        """Return the mean departure delay by carrier and month."""
        return [(row[0], row[1], row[2], row[3]) for row in await self._ask("delays", path=str(self._path(topic)))]

    async def contents(self, topic: str) -> Contents:
        """Read the archive of a topic."""
        import pyarrow as pa

        file = self._directory / f"{topic}.arrow"
        await self._ask("contents", path=str(self._path(topic)), file=str(file))
        with pa.OSFile(str(file), "rb") as source:
            table = pa.ipc.open_file(source).read_all()
        file.unlink()
        # a row that is no flight has no id; -1 is nobody's
        columns = [table[name].fill_null(-1).to_numpy() for name in ("partition", "offset", "id", "body_crc32")]
        return Contents(*(np.asarray(column, dtype=np.int64) for column in columns))

    def ask_to_end(self, process: subprocess.Popen[bytes]) -> None:
        """Close its pipe: it ends when its requests do."""
        assert process.stdin is not None
        process.stdin.close()

    def _path(self, topic: str) -> Path:
        return self._directory / topic

    async def _ask(self, request: str, **arguments: Any) -> Any:
        process, lines = self._process, self._lines
        assert process is not None and process.stdin is not None and lines is not None
        try:
            process.stdin.write(json.dumps({"do": request, **arguments}).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError as error:
            raise self.failed(f"failed ({request}): the process has ended") from error
        while line := await lines.readline():
            answer = json.loads(line)
            if "archived" in answer:
                self._archived(answer["archived"])
            elif "say" in answer:
                self._say(answer["say"])
            elif "error" in answer:
                raise self.failed(f"failed ({request}): {answer['error'].strip().splitlines()[0]}")
            else:
                return answer["result"]
        raise self.failed(f"failed ({request}): the process has ended")
