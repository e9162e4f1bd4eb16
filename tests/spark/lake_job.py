"""An archive to be killed: it stands still right before or right behind its first transaction.

Usage: ``lake_job.py <directory> <nsqd> <topic> <format> <before or after>``
"""

from __future__ import annotations

import sys
import time
from typing import Any

from flintmq.pipeline import table_files
from flintmq.pipeline.archive import archive
from flintmq.pipeline.table_files import TableArchive


def main(directory: str, nsqd: str, topic: str, kind: str, where: str) -> None:
    method = TableArchive.commit

    def commit(self: TableArchive, *, is_due: bool = True) -> Any:
        waiting = bool(self._waiting) and is_due
        if waiting and where == "before":
            stand_still()
        ends = method(self, is_due=is_due)
        if waiting:
            stand_still()
        return ends

    table_files.TableArchive.commit = commit  # type: ignore[method-assign]
    archive(directory, nsqd=nsqd, topic=topic, format=kind)


def stand_still() -> None:
    print("here", flush=True)
    time.sleep(3600)


if __name__ == "__main__":
    main(*sys.argv[1:])
