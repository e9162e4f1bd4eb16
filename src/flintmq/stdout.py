"""stdout of a command that goes on, or ends well, when who reads it has gone."""

from __future__ import annotations

import os
import sys


def say(text: str) -> None:
    """Print a line; when it cannot be written, it goes nowhere, as does whatever comes behind it."""
    try:
        print(text, flush=True)
    except OSError:
        give_up()


def give_up() -> None:
    """Have the rest of the output go nowhere: the interpreter would fail once more when it flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
