"""Whether a signal asked this process to end before its event loop takes signals.

Such a signal ends it by an exception, as a rule. Where that is raised in a destructor, or in a callback of the loop's
own, the interpreter prints and drops it, and the process would serve on; so the signal is noted too, and whoever has
the loop take signals looks here once.
"""

from __future__ import annotations

_noted: list[int] = []


def note(number: int) -> None:
    """A signal came."""
    _noted.append(number)


def was_asked() -> bool:
    """Whether one has come."""
    return bool(_noted)
