"""The way from ``flintmq NAME ...`` to the module that runs it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib import import_module

from flintmq.tools.shell.arguments import command_of, read


def run(name: str, arguments: Sequence[str]) -> int:
    """Run ``flintmq NAME``; return its exit code.

    Raises:
        FlintError: the command line is wrong, or what was asked for cannot be had.
    """
    given = read(name, arguments)
    if given is None:
        return 0
    command = command_of(given.command)
    _log(given.command, command.tells)
    code: int = import_module(f"flintmq.tools.shell.{command.module}").run(given)
    return code


def _log(name: str, tells: bool) -> None:
    """Have what the client logs told in the form of the command's own words, or left to the command."""
    handler: logging.Handler = logging.NullHandler()
    if tells:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter(f"flintmq {name}: %(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
