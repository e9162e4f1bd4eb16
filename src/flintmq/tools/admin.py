"""``flintmq admin <verb>``: one request to the HTTP API of an nsqd or a nsqlookupd, its answer as JSON.

Rules of this file: the verbs are the methods of ``flintmq.sync.NsqdAdmin`` and ``LookupdAdmin``, with ``-`` for ``_``;
their arguments, texts and checks come from there, so a new method is a new verb. What is needed is written in order,
everything else as a flag. Tokens come from a file or the environment, because everybody sees a command line.
"""

from __future__ import annotations

import argparse
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from flintmq.client.core.start import BEGINNING, END, Start, StartAt
from flintmq.errors import UsageError
from flintmq.options import nearest, parse_duration_ns, parse_moment
from flintmq.sync import ConnectionOptions, LookupdAdmin, NsqdAdmin
from flintmq.tools.shell.arguments import NSQD_TCP_PORT, TOKEN_VARIABLE, VARIABLES, Parser, add_token, split_host
from flintmq.tools.shell.secrets import shown_token

PROGRAM = "flintmq admin"
_NS_PER_S = 1_000_000_000
_NSQD, _LOOKUPD = "127.0.0.1:4151", "127.0.0.1:4161"
_START = (
    "beginning, end, offset:<bytes>, count:<messages>, 2026-01-31T12:00Z (UTC without a zone), or how long ago, such "
    "as 1h30m"
)


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq admin``; return its exit code.

    Raises:
        FlintError: the command line is wrong, or the daemon refuses or does not answer.
    """
    word = arguments[0] if arguments else "--help"
    if word.lstrip("-") in ("help", "h"):
        sys.stdout.write(usage())
        return 0
    verb = word.replace("-", "_")
    kinds = {kind.daemon: kind for kind in (NsqdAdmin, LookupdAdmin) if verb in methods(kind)}
    if not kinds:
        near = nearest(word, [name.replace("_", "-") for kind in (NsqdAdmin, LookupdAdmin) for name in methods(kind)])
        hint = f"did you mean {near}?" if near else f"{PROGRAM} --help lists all"
        raise UsageError(f"there is no verb {word}; {hint}")
    kind = _kind_of(word, kinds, arguments[1:])
    method = methods(kind)[verb]
    given = parser_of(word, method).parse_args(list(arguments[1:]))
    fill_in(given)
    admin = kind(
        given.address or _address_of(kind),
        timeout=given.deadline,
        token=shown_token(given),
        options=ConnectionOptions(tls_ca_file=given.tls_root_ca_file, tls_cert=given.tls_cert, tls_key=given.tls_key),
    )
    positional, named = _arguments(method, vars(given))
    show(method(admin, *positional, **named))
    return 0


def _kind_of(
    word: str, kinds: Mapping[str, type[NsqdAdmin] | type[LookupdAdmin]], arguments: Sequence[str]
) -> type[NsqdAdmin] | type[LookupdAdmin]:
    """Return the daemon that a verb is for: the one whose address is given, nsqd if none is and it has the verb."""
    flags = {argument.partition("=")[0].lstrip("-") for argument in arguments if argument.startswith("-")}
    wanted = [daemon for daemon, words in _ADDRESS_FLAGS.items() if flags & {*words}]
    if len(wanted) > 1:
        raise UsageError("one daemon at a time: --nsqd-http-address or --lookupd-http-address")
    if wanted and wanted[0] not in kinds:
        raise UsageError(f"{word} is for {next(iter(kinds))}: use --{_ADDRESS_FLAGS[next(iter(kinds))][0]}")
    return kinds[wanted[0]] if wanted else next(iter(kinds.values()))


_ADDRESS_FLAGS = {
    "nsqd": ("nsqd-http-address", "nsqd-http"),
    "nsqlookupd": ("lookupd-http-address", "lookupd"),
}
"""The longer name is NSQ's, the shorter one that of the commands for people."""


def methods(kind: type[NsqdAdmin] | type[LookupdAdmin]) -> dict[str, Callable[..., Any]]:
    """Return the methods that ask something, by name."""
    return {name: each for name, each in vars(kind).items() if inspect.isfunction(each)}


def usage() -> str:
    """Return what ``flintmq admin --help`` prints."""
    lines = [f"Usage: {PROGRAM} <verb> [arguments] [flags]", "", "Asks one nsqd or nsqlookupd; prints its answer."]
    for kind in (NsqdAdmin, LookupdAdmin):
        flag, default = _ADDRESS_FLAGS[kind.daemon][0], _NSQD if kind is NsqdAdmin else _LOOKUPD
        lines += ["", f"Verbs of {kind.daemon} (--{flag}=HOST:PORT, {default}):"]
        for name, method in methods(kind).items():
            first = (inspect.getdoc(method) or "").partition("\n")[0].replace(":meth:", "")
            lines.append(f"  {name.replace('_', '-'):<18} {_plain(first)}")
    lines += [
        "",
        f"{PROGRAM} <verb> --help explains a verb. A token: --token=REF, --token-file=FILE, or {TOKEN_VARIABLE}.",
        f"Whom to ask, if no flag says it: {VARIABLES['nsqd_http']} (or {VARIABLES['nsqd']}), {VARIABLES['lookupd']}.",
        "",
    ]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """Return a docstring without its markup."""
    return text.replace(":meth:", "").replace("`", "")


def parser_of(word: str, method: Callable[..., Any]) -> argparse.ArgumentParser:
    """Return the parser of a verb's arguments."""
    parser = Parser(
        prog=f"{PROGRAM} {word}",
        description=_plain(inspect.getdoc(method) or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    hints = get_type_hints(method)
    for name, parameter in inspect.signature(method).parameters.items():
        if name != "self":
            _add(parser, parameter, hints[name])
    common = parser.add_argument_group("whom to ask, and how")
    addresses = common.add_mutually_exclusive_group()
    for daemon, flags in _ADDRESS_FLAGS.items():
        addresses.add_argument(
            *(f"--{flag}" for flag in flags), dest="address", metavar="HOST:PORT", help=f"the {daemon}; or https://..."
        )
    common.add_argument("--timeout", dest="deadline", type=duration, default=timedelta(seconds=10), metavar="10s",
                        help="until the answer must be there")  # fmt: skip
    add_token(common)
    common.add_argument("--tls-root-ca-file", metavar="FILE",
                        help=f"PEM file with the authorities to trust; {VARIABLES['tls_root_ca_file']}")  # fmt: skip
    common.add_argument("--tls-cert", metavar="FILE",
                        help=f"PEM file with a certificate to show; {VARIABLES['tls_cert']}")  # fmt: skip
    common.add_argument("--tls-key", metavar="FILE", help=f"PEM file with its key; {VARIABLES['tls_key']}")
    return parser


def fill_in(given: argparse.Namespace) -> None:
    """Take token and certificates that are not given from the environment, as the commands for people do."""
    given.of_environment = set()
    for name in ("tls_root_ca_file", "tls_cert", "tls_key", "token"):
        found = os.environ.get(VARIABLES[name])
        if found and getattr(given, name) is None and not (name == "token" and given.token_file):
            setattr(given, name, found)
            given.of_environment.add(name)


def _address_of(kind: type[NsqdAdmin] | type[LookupdAdmin]) -> str:
    """Return whom to ask where no flag says it: the one of the environment, else the one of this host.

    Raises:
        UsageError: the environment names several.
    """
    if kind is LookupdAdmin:
        return _only_one(VARIABLES["lookupd"], kind.daemon) or _LOOKUPD
    http, tcp = (_only_one(VARIABLES[name], kind.daemon) for name in ("nsqd_http", "nsqd"))
    if http or not tcp:
        return http or _NSQD
    host, port = split_host(tcp, NSQD_TCP_PORT, VARIABLES["nsqd"])
    return f"{host}:{port + 1}"


def _only_one(variable: str, daemon: str) -> str:
    found = [each.strip() for each in os.environ.get(variable, "").split(",") if each.strip()]
    if len(found) > 1:
        raise UsageError(f"{variable} names {len(found)}, and this asks one: --{_ADDRESS_FLAGS[daemon][0]}=HOST:PORT")
    return found[0] if found else ""


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each verb."""
    found: dict[str, argparse.ArgumentParser] = {}
    for kind in (LookupdAdmin, NsqdAdmin):  # the latter's count, where both have a verb
        for name, method in methods(kind).items():
            word = name.replace("_", "-")
            found[word] = parser_of(word, method)
    return found


def _add(parser: argparse.ArgumentParser, parameter: inspect.Parameter, hint: Any) -> None:
    kinds = _kinds(hint)
    settings: dict[str, Any] = {}
    is_flag = parameter.kind is parameter.KEYWORD_ONLY
    if bool in kinds and is_flag:
        settings["action"] = argparse.BooleanOptionalAction
    elif bool in kinds:
        settings["type"] = _switch
    elif get_origin(hint) is Literal:
        settings["choices"] = get_args(hint)
    elif datetime in kinds:
        settings |= {"type": _start, "help": _START}
    elif timedelta in kinds:
        settings |= {"type": duration, "help": "such as 10m"}
    elif int in kinds and str not in kinds:
        settings["type"] = int
    if is_flag:
        parser.add_argument(f"--{parameter.name.replace('_', '-')}", default=None, **settings)
    elif parameter.default is parameter.empty:
        parser.add_argument(parameter.name, **settings)
    else:
        parser.add_argument(parameter.name, nargs="?", default=None, **settings)


def _kinds(hint: Any) -> set[Any]:
    """Return the types that a value may have."""
    if get_origin(hint) in (None, Literal, list):
        return {hint}
    return {kind for part in get_args(hint) for kind in _kinds(part)}


def _arguments(method: Callable[..., Any], given: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return what was given as positional and named arguments of the method; what was not given is left to it."""
    positional, named = [], {}
    for name, parameter in inspect.signature(method).parameters.items():
        value = given.get(name)
        if name == "self" or value is None:
            continue
        if parameter.default is parameter.empty:
            positional.append(value)
        else:
            named[name] = value
    return positional, named


def _switch(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("it must be true or false")
    return text == "true"


def duration(text: str) -> timedelta:
    """Read a duration of a command line, such as ``10m``."""
    try:
        duration_ns = parse_duration_ns(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return timedelta(seconds=duration_ns / _NS_PER_S)


def _start(text: str) -> StartAt:
    if text == BEGINNING:
        return "beginning"
    if text == END:
        return "end"
    kind, separator, number = text.partition(":")
    if separator and kind in ("offset", "count") and number.isascii() and number.isdigit():
        return Start.offset(int(number)) if kind == "offset" else Start.count(int(number))
    try:
        return parse_moment(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; there are {_START}") from None


def show(answer: Any) -> None:
    """Print an answer: nothing for what is done, text as it is, everything else as JSON."""
    if isinstance(answer, str):
        print(answer.rstrip("\n"))
    elif answer is not None:
        print(msgspec.json.format(msgspec.json.encode(answer), indent=2).decode())
