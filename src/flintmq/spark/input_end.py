"""Whether the rows that Spark gives to a task have come to their end, or were cut off.

When a task of Spark fails or is cancelled while it makes rows, Spark closes the connection to its Python process.
To the Arrow reader there that looks like the end, when it happens between two record batches. Behind a true end there
is a signal of Spark's, which the process reads later, and which can be looked at before that.

The rules of this file: nothing of the connection is read, it is looked at; where Spark's process is not found on the
stack (a test, a job of ours that publishes by itself) nothing is known, and the end is taken for one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flintmq.spark.errors import RowsCutOff

if TYPE_CHECKING:
    import pyarrow as pa

_MAIN, _INPUT = "main", "infile"  # of pyspark/worker.py: the function that serves a task, and what it reads


def whole(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield all rows of a task.

    Raises:
        RowsCutOff: there would have been more.
    """
    yield from batches
    connection = _connection()
    if connection is not None and not connection.peek(1):
        raise RowsCutOff


def _connection() -> Any:
    """Return what Spark's Python process reads from the JVM; None: this is none."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        if frame.f_code.co_name == _MAIN and hasattr(frame.f_locals.get(_INPUT), "peek"):
            return frame.f_locals[_INPUT]
    return None


__all__ = ["whole"]
