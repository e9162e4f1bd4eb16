"""A query as Spark drives it, without a JVM: offsets are written down, then read, then committed; a kill is to stop."""

from __future__ import annotations

import json
import os
import pickle
import signal
from typing import Any

from flintmq.spark.options import SourceOptions
from flintmq.spark.spooled import AnyStreamReader


class Query:
    """One query; its checkpoint and its sink, by micro-batch, outlive the readers.

    Args:
        options: of the source.
    """

    def __init__(self, **options: object) -> None:
        self.raw = {name: str(value) for name, value in options.items()}
        self.planned: list[str] = [json.dumps({})]
        self.committed = 0
        self.sink: dict[int, list[dict[str, Any]]] = {}
        self.reader = self._new()

    def _new(self) -> AnyStreamReader:
        return pickle.loads(pickle.dumps(AnyStreamReader(SourceOptions.parse(self.raw))))

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [row for rows in self.sink.values() for row in rows]

    @property
    def bodies(self) -> list[bytes]:
        return [row["body"] for row in self.rows]

    @property
    def spool_process_id(self) -> int:
        assert self.reader._process is not None
        return self.reader._process.process_id

    def kill(self) -> None:
        """kill -9 of the driver, and with it of its spool."""
        process = self.reader._process
        if process is not None and process._process is not None:
            os.kill(process.process_id, signal.SIGKILL)
            process._process.wait()
        self.reader = self._new()

    def stop(self) -> None:
        """End the driver; its spool sees it and ends by itself."""
        if self.reader._process is not None:
            self.reader._process.close()
        self.reader = self._new()

    def plan(self) -> bool:
        """Plan a micro-batch, if there is something new; what was planned before has to be committed."""
        assert self.committed == len(self.planned) - 1
        start = json.loads(self.planned[-1])
        end = json.dumps(self.reader.latestOffset(start, self.reader.getDefaultReadLimit()))
        if end == json.dumps(start):
            return False
        self.planned.append(end)
        return True

    def write(self) -> int:
        """Read the micro-batch that was planned last, as executors do, into the sink; return its rows."""
        start, end = (json.loads(text) for text in self.planned[-2:])
        if self.committed:
            self.reader.commit(start)
        elsewhere = AnyStreamReader(SourceOptions.parse(self.raw))
        tasks = pickle.loads(pickle.dumps(self.reader.partitions(start, end)))
        rows = [row for task in tasks for batch in elsewhere.read(task) for row in batch.to_pylist()]
        self.sink[len(self.planned) - 1] = rows
        return len(rows)

    def commit(self) -> None:
        self.committed = len(self.planned) - 1

    def step(self) -> int:
        """Run one micro-batch if there is something new; return its rows."""
        if self.committed < len(self.planned) - 1 or self.plan():
            count = self.write()
            self.commit()
            return count
        return 0

    def available_now(self) -> None:
        """Run like a query with that trigger."""
        self.reader.prepareForTriggerAvailableNow()
        while self.committed < len(self.planned) - 1 or self.plan():
            self.write()
            self.commit()
