"""The command line of a program that has a table of options: run it, or print what was asked for."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TypeVar

from flintmq.options.render import help_text, show_config
from flintmq.options.resolve import resolve
from flintmq.options.table import Options
from flintmq.version import __version__

Table = TypeVar("Table", bound=Options)


def read_command(table: type[Table], arguments: Sequence[str], program: str, version: str) -> Table | None:
    """Read a command line over the environment of this process; say on stderr what is noteworthy about it.

    Args:
        program: as users type it, such as ``flintmq up``.
        version: the line that ``--version`` prints.

    Returns:
        The options to run with; None if the help, the version or the configuration was asked for, and printed.

    Raises:
        OptionError: a flag, a variable or a line of the configuration file is wrong.
    """
    resolved = resolve(table, arguments, os.environ)
    for note in resolved.notes:
        sys.stderr.write(f"{program}: {note}\n")
    if resolved.action == "run":
        return resolved.options
    if resolved.action == "help":
        sys.stdout.write(help_text(table).replace(f"Usage: {table.program}", f"Usage: {program}", 1))
    elif resolved.action == "version":
        sys.stdout.write(f"{version}\n")
    else:
        sys.stdout.write(show_config(resolved))
    return None


def version_line(program: str, version: str) -> str:
    """Return what ``--version`` prints, in NSQ's form: ``flintmq v0.1.0 (built w/python3.11.7)``."""
    return f"{program} v{version} (built w/python{'.'.join(map(str, sys.version_info[:3]))})"


def daemon_version_line(program: str, nsq_version: str) -> str:
    """Return what a daemon's ``--version`` prints: ``nsqd v1.3.0 (built w/python3.11.7) FlintMQ v0.1.0``.

    First of all it says which NSQ it is like, as over the wire: scripts and the suites of clients read that, and take a
    small number for an NSQ that lacks most of what they need.
    """
    return f"{version_line(program, nsq_version)} FlintMQ v{__version__}"
