"""Option tables and everything derived from them: flags, environment, TOML files, documentation.

A program describes its options once, as a frozen dataclass of :func:`option` rows (see :mod:`flintmq.options.table`);
:func:`resolve` reads a command line over it.
"""

from __future__ import annotations

from flintmq.options.command import daemon_version_line, read_command, version_line
from flintmq.options.durations import HOUR, MILLISECOND, MINUTE, SECOND, format_duration, parse_duration_ns
from flintmq.options.kinds import Address, Choice, Duration, Integer, Items, Number, Repeated, Switch, Text
from flintmq.options.render import example_file, help_text, reference_page, show_config
from flintmq.options.resolve import Resolved, nearest, resolve
from flintmq.options.table import Options, Row, StartRefused, option, rows
from flintmq.options.times import nanoseconds_of, parse_moment

__all__ = [
    "Address",
    "Choice",
    "Duration",
    "HOUR",
    "Integer",
    "Items",
    "MILLISECOND",
    "MINUTE",
    "Number",
    "Options",
    "Repeated",
    "Resolved",
    "Row",
    "SECOND",
    "StartRefused",
    "Switch",
    "Text",
    "daemon_version_line",
    "example_file",
    "format_duration",
    "help_text",
    "nanoseconds_of",
    "nearest",
    "option",
    "parse_duration_ns",
    "parse_moment",
    "read_command",
    "reference_page",
    "resolve",
    "rows",
    "show_config",
    "version_line",
]
