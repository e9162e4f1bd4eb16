"""From a command line, the environment and a TOML file to checked options: flag > environment > file > default.

The rules of this file: every value remembers where it came from; the first thing wrong ends it with an
:class:`~flintmq.errors.OptionError` that says what, where, what is allowed and, for a name, the nearest one. Only a
file may hold names that are unknown: they are told and ignored.

Flags are read by Go's rules, because the spellings are NSQ's: one dash or two, ``--x v`` or ``--x=v``; a bare ``--x``
is true for switches, which therefore never take the next word as their value. ``--`` ends the flags.
Source: NSQ's options, Go's package flag.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from flintmq.errors import UNKNOWN, OptionError
from flintmq.options.table import Options, Row, refused, rows, variable_prefix

Table = TypeVar("Table", bound=Options)
TableRead = TypeVar("TableRead", bound=Options, covariant=True)
Action = Literal["run", "help", "version", "show-config"]

CONFIG_FILE_BYTES_MAX = 1024 * 1024
_ACTIONS: dict[str, Action] = {"help": "help", "h": "help", "version": "version", "show-config": "show-config"}
COMMAND_FLAGS = ("config", "help", "version", "show-config")  # about the command line itself, not options of the daemon
_SWITCH_TEXTS = {"": True, "true": True, "1": True, "t": True, "false": False, "0": False, "f": False}
# Kubernetes sets these for a service called flintmq-nsqd; they are nobody's mistake.
_KUBERNETES = re.compile(r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_[0-9]+_(TCP|UDP)(_.*)?)?)\Z")


@dataclass(frozen=True)
class Resolved(Generic[TableRead]):
    """The request of a command line.

    Attributes:
        action: what to do; ``run`` unless a flag such as ``--version`` asks for something else.
        sources: attribute -> ``flag``, ``environment``, the path of the file, or ``default``.
        notes: what the user should be told although it is no error.
    """

    action: Action
    options: TableRead
    sources: Mapping[str, str]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Given:
    """One value as somebody wrote it."""

    name: str
    value: Any
    source: str


@dataclass(frozen=True)
class _CommandLine:
    action: Action
    config_path: str
    given: dict[str, _Given]


def resolve(table: type[Table], arguments: Sequence[str], environment: Mapping[str, str]) -> Resolved[Table]:
    """Read everything that can set an option.

    Raises:
        OptionError: an unknown name, a bad value, or a file that cannot be read.
    """
    command = _read_flags(table, arguments)
    if command.action in ("help", "version"):  # these two answer whatever the environment says
        return Resolved(command.action, table(), {row.attribute: "default" for row in rows(table)}, ())
    from_environment, environment_path = _read_environment(table, environment)
    path = command.config_path or environment_path
    from_file, notes = _read_file(table, path) if path else ({}, ())
    given = {**from_file, **from_environment, **command.given}
    sources = {
        row.attribute: given[row.attribute].source if row.attribute in given else "default" for row in rows(table)
    }
    try:
        options = table(**{attribute: entry.value for attribute, entry in given.items()})
    except OptionError as error:  # single values were checked where they were read: this is about several together
        entry = given.get(error.option)
        name = entry.name if entry else error.option
        raise type(error)(name, error.value, error.allowed, sources.get(error.option, "option")) from None
    return Resolved(command.action, options, sources, notes)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """Return the known name most like ``name``, if any is like it at all."""
    import difflib  # for those who mistyped

    matches = difflib.get_close_matches(name, list(known), n=1, cutoff=0.6)
    return matches[0] if matches else None


def _read_flags(table: type[Options], arguments: Sequence[str]) -> _CommandLine:
    by_flag = {row.flag: row for row in rows(table)}
    action: Action = "run"
    config_path = ""
    given: dict[str, _Given] = {}
    words = list(reversed(arguments))
    while words:
        word = words.pop()
        if word == "--":
            if not words:
                break
            raise OptionError(words[-1], words[-1], "it stands behind --, which ends the flags: NSQ ignores it")
        name, equals, text = word.removeprefix("-").removeprefix("-").partition("=")  # more dashes are of the name
        if not word.startswith("-") or word == "-":
            raise OptionError(word, word, f"{table.program} takes only flags; a switch is turned off as --x=false")
        value = text if equals else None
        row = by_flag.get(name)
        if row is not None:
            _add_flag(given, row, f"--{name}", _flag_text(row, name, value, words))
        elif name == "config":
            config_path = _needed(f"--{name}", value, words, "FILE")
        elif name in _ACTIONS:
            if _SWITCH_TEXTS.get((value or "").lower(), True):
                action = _ACTIONS[name]
        else:
            raise OptionError(
                word.partition("=")[0], UNKNOWN, _hint(name, [*by_flag, *COMMAND_FLAGS], "--", table.program)
            )
    return _CommandLine(action, config_path, given)


def _flag_text(row: Row, name: str, value: str | None, words: list[str]) -> str:
    if value is None and row.kind.bare is not None:
        return row.kind.bare
    return _needed(f"--{name}", value, words, row.kind.placeholder)


def _needed(flag: str, value: str | None, words: list[str], placeholder: str) -> str:
    if value is not None:
        return value
    if not words:
        raise OptionError(flag, "", f"it needs a value: {flag}={placeholder}")
    return words.pop()


def _add_flag(given: dict[str, _Given], row: Row, flag: str, text: str) -> None:
    value = _checked(row, flag, text, "flag", from_file=False)
    before = given.get(row.attribute)
    if row.kind.is_list and before is not None:
        value = (*before.value, *value)
    given[row.attribute] = _Given(flag, value, "flag")


def _read_environment(table: type[Options], environment: Mapping[str, str]) -> tuple[dict[str, _Given], str]:
    prefix = variable_prefix(table.program)
    by_variable = {row.variable(table.program): row for row in rows(table)}
    given: dict[str, _Given] = {}
    path = ""
    for variable in sorted(environment):
        if not variable.startswith(prefix):
            continue
        row = by_variable.get(variable)
        if row is not None:
            value = _checked(row, variable, environment[variable], "environment", from_file=False)
            given[row.attribute] = _Given(variable, value, "environment")
        elif variable == prefix + "CONFIG":
            path = environment[variable]
        elif not _KUBERNETES.fullmatch(variable.removeprefix(prefix)):
            raise OptionError(variable, UNKNOWN, _hint(variable, by_variable, "", table.program), "environment")
    return given, path


def _read_file(table: type[Options], path: str) -> tuple[dict[str, _Given], tuple[str, ...]]:
    by_key = {key: row for row in rows(table) for key in row.keys}
    given: dict[str, _Given] = {}
    notes: list[str] = []
    for key, raw in _load_toml(path).items():
        row = by_key.get(key)
        if row is None:
            # NSQ ignores it without a word, and its files have to load unchanged
            notes.append(f"{path}: unknown option {key} is ignored; {_hint(key, by_key, '', table.program)}")
            continue
        if row.deprecated:
            notes.append(f"{path}: {key} {row.help}")
            continue
        if row.attribute in given:
            raise OptionError(key, raw, f"the file sets it as {given[row.attribute].name} already", path)
        given[row.attribute] = _Given(key, _checked(row, key, raw, path, from_file=True), path)
        if key != row.key and row.origin == "nsq":
            # a file that NSQ has ignored a line of means something else here, and may lock clients out
            notes.append(f"{path}: {key} is obeyed, as {row.key}; NSQ ignores it; take it out unless you mean it")
    return given, tuple(notes)


def _load_toml(path: str) -> dict[str, Any]:
    import tomllib  # for those who have a file

    try:
        with open(path, "rb") as file:
            data = file.read(CONFIG_FILE_BYTES_MAX + 1)
        if len(data) > CONFIG_FILE_BYTES_MAX:
            raise OptionError(
                "--config",
                path,
                f"a configuration file has at most {CONFIG_FILE_BYTES_MAX} bytes",
                "configuration file",
            )
        return tomllib.loads(data.decode("utf-8-sig"))
    except OSError as error:
        raise OptionError(
            "--config", path, f"failed to load config file {path} - {error.strerror}", "configuration file"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise OptionError(
            "--config", path, f"failed to load config file {path} - not TOML: {error}", "configuration file"
        ) from None


def _checked(row: Row, name: str, raw: object, source: str, *, from_file: bool) -> Any:
    try:
        value = row.kind.from_file(raw) if from_file else row.kind.from_text(str(raw))
        row.check(value)
    except ValueError as error:
        raise refused(name, raw, error, source) from None
    return value


def _hint(name: str, known: Iterable[str], dashes: str, program: str) -> str:
    near = nearest(name, known)
    return f"did you mean {dashes}{near}?" if near else f"{program} --help lists all"
