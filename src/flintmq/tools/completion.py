"""``flintmq completion bash|zsh``: completion of commands, flags and values, from the tables that they are read by.

Rules of this file: the script knows all words itself, and asks a running broker only for names of topics and channels,
for half a second at most and without a word when nobody answers. One function of plain shell finds the candidates for
both shells; it expands no names of files and evaluates nothing that was typed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from flintmq.errors import FlintError, UsageError
from flintmq.options import Options, rows
from flintmq.tools import admin, cluster
from flintmq.tools.shell import arguments

SHELLS = ("bash", "zsh")
VALUES_TIMEOUT = "500ms"
_FILE, _VALUE, _TOPIC, _CHANNEL, _WHERE = "@file", "@value", "@topic", "@channel", "@where"
_FILES = ("FILE", "DIR", "DIRECTORY", "PATH")
_WHERE_FLAGS = (
    "nsqd", "nsqd-tcp-address", "nsqd-http", "nsqd-http-address", "lookupd", "lookupd-http-address",
)  # fmt: skip


Reader = Callable[[], "type[Options] | argparse.ArgumentParser | Sequence[str]"]


@dataclass(slots=True)
class Words:
    """The words that may follow a command.

    Attributes:
        verbs: of which one comes first.
        flags: each with the kind of its value: empty, ``@file``, ``@topic``, ``@channel``, ``@value``, ``@where`` (an
            address, which a question for names needs too), or words to choose from.
        places: kinds of the arguments in their order; the last one with a ``*`` stands for all that follow.
    """

    verbs: Sequence[str] = ()
    flags: dict[str, str] = field(default_factory=dict)
    places: list[str] = field(default_factory=list)


def words_of_parser(parser: argparse.ArgumentParser) -> Words:
    """Return the words of a command that is read by argparse."""
    found = Words()
    for action in parser._actions:
        kind = _kind(action)
        for flag in action.option_strings:
            found.flags[flag] = kind if action.nargs != 0 else ""
        if not action.option_strings:
            found.places.append(f"{kind}*" if action.nargs in ("*", "+") else kind)
    return found


def _kind(action: argparse.Action) -> str:
    if action.choices is not None:
        return " ".join(map(str, action.choices))
    if action.option_strings and action.option_strings[0].lstrip("-") in _WHERE_FLAGS:
        return _WHERE
    if action.metavar in _FILES:
        return _FILE
    if action.dest in ("topic", "to"):
        return _TOPIC
    return _CHANNEL if action.dest == "channel" else _VALUE


def words_of_table(table: type[Options]) -> Words:
    """Return the words of a program that has a table of options."""
    found = Words(flags={"--help": "", "--version": "", "--config": _FILE, "--show-config": ""})
    for row in rows(table):
        if row.deprecated or row.hidden or not row.implemented:
            continue
        kind = row.kind
        choices = getattr(kind, "choices", ())
        value = " ".join(choice for choice in choices if choice) or _VALUE
        if kind.placeholder in _FILES:
            value = _FILE
        elif row.flag in _WHERE_FLAGS:
            value = _WHERE
        found.flags[f"--{row.flag}"] = "" if kind.bare is not None else value
    return found


def tree(programs: Mapping[str, Reader], names: Iterable[str]) -> dict[str, Words]:
    """Return the words behind every command, and behind every verb, by its path.

    Args:
        programs: commands that are no tools, with what returns how they are read: a table of options, a parser, or
            the words of which one comes next.
        names: all commands.
    """
    found = {"": Words(list(names), {"--help": "", "--version": ""})}
    for name, table in programs.items():
        found[name] = _words_of(table())
    for name, command in arguments.COMMANDS.items():
        if isinstance(command, arguments.Noun):
            _add_verbs(found, name, {verb: arguments.parser_of(f"{name} {verb}") for verb in command.verbs})
        else:
            found[name] = words_of_parser(arguments.parser_of(name))
    for noun in cluster.NOUNS:
        _add_verbs(found, noun, cluster.parsers(noun))
    _add_verbs(found, "admin", admin.parsers())
    found["completion"] = Words(places=[" ".join(SHELLS)])
    return found


def _words_of(reads: type[Options] | argparse.ArgumentParser | Sequence[str]) -> Words:
    if isinstance(reads, argparse.ArgumentParser):
        return words_of_parser(reads)
    return words_of_table(reads) if isinstance(reads, type) else Words(list(reads), {"--help": ""})


def _add_verbs(found: dict[str, Words], noun: str, parsers: Mapping[str, argparse.ArgumentParser]) -> None:
    """Add verbs to a noun that may have some already; a verb that has two readers has the words of both."""
    before = found.get(noun, Words())
    found[noun] = Words([*before.verbs, *(verb for verb in parsers if verb not in before.verbs)], {"--help": ""})
    for verb, parser in parsers.items():
        words = words_of_parser(parser)
        path = f"{noun} {verb}"
        if path in found:
            words.flags = {**found[path].flags, **words.flags}
        found[path] = words


# -- scripts -----------------------------------------------------------------------------------------------------------


def script(shell: str, found: Mapping[str, Words]) -> str:
    """Return the script for a shell."""
    parts = [
        f"# completion of flintmq for {shell}: eval \"$(flintmq completion {shell})\"",
        _case("__flintmq_verbs", {path: " ".join(words.verbs) for path, words in found.items()}),
        _case("__flintmq_flags", {path: " ".join(words.flags) for path, words in found.items()}),
        _case("__flintmq_takes", {f"{path} {flag}": kind for path, words in found.items()
                                  for flag, kind in words.flags.items() if kind}),
        _case("__flintmq_place", _places(found)),
        _COMMON,
        _BASH if shell == "bash" else _ZSH,
    ]  # fmt: skip
    return "\n".join(parts)


def _places(found: Mapping[str, Words]) -> dict[str, str]:
    """Return the kind of each argument by path and number; that of all further ones by ``*``."""
    places = {}
    for path, words in found.items():
        for number, kind in enumerate(words.places, 1):
            places[f"{path} {number}"] = kind.removesuffix("*")
            if kind.endswith("*"):
                places[f"{path} *"] = kind.removesuffix("*")
    return places


def _case(name: str, values: Mapping[str, str]) -> str:
    """Return a shell function that prints a value for its argument; keys with the same value share a line."""
    keys: dict[str, list[str]] = {}
    for key, value in values.items():
        if value:
            keys.setdefault(value, []).append(key)
    lines = [f"  {'|'.join(map(_quoted, some))}) echo {_quoted(value)} ;;" for value, some in keys.items()]
    return "\n".join([f"{name}() {{", '  case "$1" in', *lines, "  esac", "}"])


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


_COMMON = f"""\
# prints the candidates, one a line, or @file; its arguments: the word that is completed, then those before it
# (no variable is called path: zsh has another idea of that)
__flintmq_candidates() {{
  local cur="$1" spot="" prev="" kind="" place=0 topic="" word candidates=""
  local -a asking
  asking=()
  shift
  for word in "$@"; do
    if [ -n "$kind" ]; then
      if [ "$kind" = "{_WHERE}" ]; then asking+=("$prev" "$word"); fi
      kind=""
      continue
    fi
    case "$word" in
      --nsqd*=*|--lookupd*=*) asking+=("$word") ;;
      --*=*) ;;
      -?*) kind="$(__flintmq_takes "$spot $word")"; prev="$word" ;;
      *)
        if [ -n "$(__flintmq_verbs "$spot")" ]; then
          spot="${{spot:+$spot }}$word"
        else
          place=$((place + 1))
          if [ "$place" = 1 ]; then topic="$word"; fi
        fi ;;
    esac
  done
  if [ -z "$kind" ]; then
    case "$cur" in
      -*) kind="$(__flintmq_flags "$spot")" ;;
      *)
        kind="$(__flintmq_verbs "$spot")"
        if [ -z "$kind" ]; then
          kind="$(__flintmq_place "$spot $((place + 1))")"
          if [ -z "$kind" ]; then kind="$(__flintmq_place "$spot *")"; fi
        fi ;;
    esac
  fi
  case "$kind" in
    {_FILE}) echo "{_FILE}"; return ;;
    {_TOPIC}) candidates="$(command flintmq completion topics "${{asking[@]}}" 2>/dev/null)" ;;
    {_CHANNEL}) candidates="$(command flintmq completion channels "$topic" "${{asking[@]}}" 2>/dev/null)" ;;
    @*|"") return ;;
    *) candidates="$(printf '%s' "$kind" | tr ' ' '\\n')" ;;
  esac
  printf '%s\\n' "$candidates" | while IFS= read -r word; do
    case "$word" in
      "$cur"*) if [ -n "$word" ]; then printf '%s\\n' "$word"; fi ;;
    esac
  done
}}
"""
_BASH = """\
_flintmq() {
  local line="${COMP_LINE:0:COMP_POINT}" cur="" found word
  local -a words
  read -ra words <<< "$line"
  case "$line" in *[[:space:]]) ;; *) cur="${words[${#words[@]}-1]}"; unset "words[${#words[@]}-1]" ;; esac
  COMPREPLY=()
  found="$(__flintmq_candidates "$cur" "${words[@]:1}")"
  if [ "$found" = @file ]; then compopt -o default 2>/dev/null; return; fi
  while IFS= read -r word; do
    if [ -n "$word" ]; then COMPREPLY+=("$word"); fi
  done <<< "$found"
}
complete -F _flintmq flintmq
"""
_ZSH = """\
_flintmq() {
  local found
  found="$(__flintmq_candidates "${words[CURRENT]}" "${(@)words[2,CURRENT-1]}")"
  if [[ "$found" = @file ]]; then _files; return; fi
  if [[ -n "$found" ]]; then compadd -- ${(f)found}; fi
}
if (( ! ${+functions[compdef]} )); then autoload -Uz compinit && compinit -u; fi
compdef _flintmq flintmq
"""


# -- the command -------------------------------------------------------------------------------------------------------


def run(words: Sequence[str], programs: Mapping[str, Reader], names: Iterable[str]) -> int:
    """Run ``flintmq completion``; return its exit code.

    Raises:
        UsageError: the command line is wrong.
    """
    what = words[0] if words else "--help"
    if what in SHELLS and len(words) == 1:
        sys.stdout.write(script(what, tree(programs, names)))
        return 0
    if what in ("topics", "channels"):
        return _names(what, words[1:])
    if what.lstrip("-") in ("help", "h"):
        sys.stdout.write(
            "Usage: flintmq completion bash|zsh\n\n"
            "Prints a script that completes commands, flags, topics and channels:\n"
            '  eval "$(flintmq completion bash)"    in ~/.bashrc\n'
            '  eval "$(flintmq completion zsh)"     in ~/.zshrc\n'
        )
        return 0
    raise UsageError(f"{' '.join(words)!r}: it must be bash or zsh")


def _names(what: str, words: Sequence[str]) -> int:
    """Print names of topics, or of channels of a topic, for a script; nothing and 1 where nobody answers."""
    parser = arguments.Parser(prog="flintmq completion", add_help=False, allow_abbrev=False)
    if what == "channels":
        parser.add_argument("topic")
    arguments.add_where(parser, VALUES_TIMEOUT, tcp=False)
    try:
        given = parser.parse_args(list(words))
        given.command = "completion"
        arguments.from_environment(given)
        from flintmq.tools.shell.link import Link
        from flintmq.tools.shell.stats import stats

        found = stats(Link(given), given.topic if what == "channels" else None)
    except FlintError:
        return 1  # there is nobody to tell: somebody presses a key
    names = {row.channel if what == "channels" else row.topic for row in found}
    sys.stdout.writelines(f"{name}\n" for name in sorted(names - {""}))
    return 0
