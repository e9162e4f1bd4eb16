"""Less for the garbage collector of Spark's Python workers to look at.

PySpark's daemon has a worker collect garbage after each task, and after each plan, over all that PySpark, pyarrow and
numpy keep for as long as the process lives: 20 to 40 ms of processor time, a sixth of what reading 500,000 messages
takes. So what is left by the collection behind the first task is not looked at again; what comes later is.

The rules of this file: only where PySpark's daemon collects; nothing that is garbage then is kept.
"""

from __future__ import annotations

import gc
import sys
from functools import cache
from typing import Any

_DAEMON = "pyspark.daemon"
_FULL = 2
"""The generation of a collection that somebody asked for, or that looks at everything."""


@cache
def spare_what_stays() -> None:
    """Have the next full collection of this process be the last one that looks at what is imported by now."""
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == _DAEMON:
        gc.callbacks.append(_freeze_after)


def _freeze_after(phase: str, about: dict[str, Any]) -> None:
    if phase == "stop" and about["generation"] == _FULL:
        gc.callbacks.remove(_freeze_after)
        gc.freeze()


__all__ = ["spare_what_stays"]
