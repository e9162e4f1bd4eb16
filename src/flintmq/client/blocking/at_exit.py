"""The end of a program that has not closed its consumers.

What was answered is gathered, and goes out when somebody pumps: of the last messages nsqd may have heard nothing when
the interpreter ends, and would deliver them again.

Rules of this file: consumers are kept alive by nobody here; the end of a program waits ``AT_EXIT_S`` for all of them
together, and no longer.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Callable
from itertools import count

from flintmq.client.core.weak_call import WeakCall
from flintmq.client.options import system_env

log = logging.getLogger("flintmq.client")

AT_EXIT_S = 0.5

_living: dict[int, WeakCall] = {}
_numbers = count()


def call_at_exit(method: Callable[[float], object]) -> None:
    """Call a bound method at the end of the program, if its object lives then.

    Args:
        method: is told for how many seconds it may wait.
    """
    number = next(_numbers)

    def forget(_: object, living: dict[int, WeakCall] = _living) -> None:  # also when this module is gone already
        living.pop(number, None)

    _living[number] = WeakCall(method, forget)


def _at_exit() -> None:
    time_ns = system_env().clock.monotonic_ns
    deadline = time_ns() * 1e-9 + AT_EXIT_S
    for call in [*_living.values()]:
        try:
            call(max(0.0, deadline - time_ns() * 1e-9))
        except Exception:
            log.exception("what was answered could not be sent at the end of the program")


atexit.register(_at_exit)
