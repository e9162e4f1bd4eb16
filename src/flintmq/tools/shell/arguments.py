"""The command lines of the commands for people: one place for all of their arguments, so that they are one family.

Rules of this file: nothing heavy is imported, because completion and ``--help`` read it all; each command is a row of
:data:`COMMANDS` with its arguments and the module that runs it; options that several have are added by one function.
An option that is not given comes from the environment (:data:`VARIABLES`), then from the default: a daemon here.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

from flintmq.errors import OptionError, UsageError
from flintmq.options import nanoseconds_of, nearest, parse_duration_ns, parse_moment

NS_PER_S = 1_000_000_000
HOST = "127.0.0.1"
NSQD_TCP_PORT, LOOKUPD_HTTP_PORT = 4150, 4161
PLACE = "beginning, end, a time such as 2026-01-31T12:00Z (UTC without a zone), or how long ago, such as 1h30m"

VARIABLES: Mapping[str, str] = {
    "nsqd": "FLINTMQ_NSQD",
    "nsqd_http": "FLINTMQ_HTTP",
    "lookupd": "FLINTMQ_LOOKUPD",
    "tls": "FLINTMQ_TLS",
    "tls_root_ca_file": "FLINTMQ_TLS_ROOT_CA_FILE",
    "tls_cert": "FLINTMQ_TLS_CERT",
    "tls_key": "FLINTMQ_TLS_KEY",
    "auth_secret": "FLINTMQ_AUTH_SECRET",
    "token": "FLINTMQ_TOKEN",
}
"""Environment variables of options that are not given, by name of the option."""
TOKEN_VARIABLE = "FLINTMQ_ADMIN_TOKEN"
"""Environment variable with the bearer token itself, where nothing says where it is."""
_LISTS = ("nsqd", "nsqd_http", "lookupd")


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line and exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; {self.prog} --help says more")


@dataclass(frozen=True)
class Place:
    """A place in a topic, as it was written.

    Attributes:
        kind: ``beginning``, ``end``, ``ago``, ``time``, ``offset`` or ``count``.
        number: nanoseconds of ``ago``, nanoseconds since 1970 of ``time``, bytes of ``offset``, messages of ``count``.
        text: as it was written.
    """

    kind: str
    number: int
    text: str

    def timestamp_ns(self, now_ns: int) -> int | None:
        """Return the time that is meant, since 1970; None where no time is meant."""
        if self.kind == "ago":
            return max(0, now_ns - self.number)
        return self.number if self.kind == "time" else 0 if self.kind == "beginning" else None


def place(text: str) -> Place:
    """Read a place in a topic."""
    if text in ("beginning", "end"):
        return Place(text, 0, text)
    kind, colon, number = text.partition(":")
    if colon and kind in ("offset", "count") and re.fullmatch("[0-9]{1,18}", number):
        return Place(kind, int(number), text)
    try:
        moment = parse_moment(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no place: {error}; there are {PLACE}") from None
    if isinstance(moment, timedelta):
        return Place("ago", moment // timedelta(microseconds=1) * 1000, text)
    return Place("time", nanoseconds_of(moment), text)


def duration(text: str) -> timedelta:
    """Read a duration, such as ``10m``."""
    return timedelta(seconds=duration_s(text))


def duration_s(text: str) -> float:
    """Read a duration as seconds."""
    try:
        found = parse_duration_ns(text) / NS_PER_S
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from None
    if found < 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a duration is 0 or more")
    return found


def positive_duration_s(text: str) -> float:
    """Read a duration as seconds, more than 0."""
    found = duration_s(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: it must be more than 0")
    return found


def number(minimum: int, maximum: int = 10**18) -> Callable[[str], int]:
    """Return a reader of whole numbers within bounds."""

    def read(text: str) -> int:
        if not re.fullmatch("[0-9]{1,19}", text) or not minimum <= int(text) <= maximum:
            limit = f"from {minimum} to {maximum}" if maximum < 10**18 else f"of {minimum} or more"
            raise argparse.ArgumentTypeError(f"{text!r}: it must be a whole number {limit}")
        return int(text)

    return read


def size(text: str) -> int:
    """Read a size in bytes, such as ``200``, ``10k`` or ``1M``."""
    found = re.fullmatch("([0-9]{1,9})([kM]?)", text)
    count = int(found[1]) * {"": 1, "k": 1024, "M": 1024 * 1024}[found[2]] if found else 0
    if not 0 < count <= 64 * 1024 * 1024:
        raise argparse.ArgumentTypeError(f"{text!r}: a size from 1 to 64M, such as 200 or 10k")
    return count


def header(text: str) -> tuple[str, str]:
    """Read ``name=value``."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r}: a header is name=value")
    return name, value


# -- what several have -------------------------------------------------------------------------------------------------


def add_where(parser: argparse.ArgumentParser, timeout: str = "10s", *, tcp: bool = True) -> None:
    """Add whom to ask, and how.

    Args:
        timeout: the default of ``--timeout``.
        tcp: whether messages go to or come from nsqd's TCP port.
    """
    group = parser.add_argument_group("whom to ask, and how (or in the environment)")
    at = f"default {HOST}:{NSQD_TCP_PORT}; {VARIABLES['nsqd']}"
    group.add_argument("--nsqd", "--nsqd-tcp-address", action="append", metavar="HOST[:PORT]",
                       help=f"TCP address of an nsqd; several: repeat it, or commas; {at}")  # fmt: skip
    group.add_argument("--nsqd-http", "--nsqd-http-address", action="append", metavar="HOST:PORT",
                       help=f"its HTTP address, if that is not the port behind; {VARIABLES['nsqd_http']}")  # fmt: skip
    group.add_argument("--lookupd", "--lookupd-http-address", action="append", metavar="HOST[:PORT]",
                       help=f"HTTP address of an nsqlookupd that knows the nsqd; {VARIABLES['lookupd']}")  # fmt: skip
    group.add_argument("--timeout", type=positive_duration_s, default=timeout, metavar="TIME",
                       help=f"until an answer must be there; default {timeout}")  # fmt: skip
    if tcp:
        group.add_argument("--tls", action="store_true", default=None, help=f"secure connections; {VARIABLES['tls']}=1")
    group.add_argument("--tls-root-ca-file", metavar="FILE",
                       help=f"PEM file with the authorities to trust; {VARIABLES['tls_root_ca_file']}")  # fmt: skip
    group.add_argument(
        "--tls-cert", metavar="FILE", help=f"PEM file with a certificate to show; {VARIABLES['tls_cert']}"
    )
    group.add_argument("--tls-key", metavar="FILE", help=f"PEM file with its key; {VARIABLES['tls_key']}")
    group.add_argument("--tls-server-name", metavar="NAME", help="name in nsqd's certificate, if it is not the host")
    group.add_argument("--tls-insecure-skip-verify", action="store_true",
                       help="trust everybody, also whoever sits between")  # fmt: skip
    if tcp:
        group.add_argument("--auth-secret", metavar="REF",
                           help=f"secret for AUTH: env:NAME or file:/path; {VARIABLES['auth_secret']}")  # fmt: skip
        group.add_argument("--compression", choices=("snappy", "deflate"), help="of connections")
    add_token(group)


def add_token(group: argparse._ArgumentGroup) -> None:
    """Add what says where a bearer token for HTTP is."""
    tokens = group.add_mutually_exclusive_group()
    tokens.add_argument("--token", metavar="REF",
                        help=f"bearer token for HTTP: env:NAME or file:/path; {VARIABLES['token']}")  # fmt: skip
    tokens.add_argument("--token-file", metavar="FILE", help=f"with a bearer token; or set {TOKEN_VARIABLE}")


def add_json(parser: argparse.ArgumentParser, what: str = "print JSON, one line for each thing") -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help=what)


def add_yes(parser: argparse.ArgumentParser) -> None:
    """Add ``--yes``."""
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask before something is lost")


def from_environment(given: argparse.Namespace, environment: Mapping[str, str] | None = None) -> None:
    """Fill in what is not given and stands in the environment; addresses of one kind go before those of the other.

    ``given.of_environment`` is what was filled in.

    Raises:
        UsageError: nsqd and nsqlookupd are both named.
    """
    variables = os.environ if environment is None else environment
    named = bool(given.nsqd or given.nsqd_http or given.lookupd)
    given.of_environment = set()
    for name, variable in VARIABLES.items():
        if not hasattr(given, name) or getattr(given, name) or not variables.get(variable):
            continue
        if name == "token" and given.token_file:
            continue
        given.of_environment.add(name)
        if name in _LISTS:
            if not named:
                setattr(given, name, [variables[variable]])
        elif name == "tls":
            given.tls = is_on(variables[variable])
        else:
            setattr(given, name, variables[variable])
    for name in _LISTS:
        found = getattr(given, name) or []
        setattr(given, name, [part.strip() for each in found for part in each.split(",") if part.strip()])
    if given.lookupd and (given.nsqd or given.nsqd_http):
        raise UsageError("use --nsqd or --lookupd, not both: nsqlookupd tells which nsqd there are")


def is_on(text: str) -> bool:
    """Whether a variable turns something on: it is set, and to none of ``0``, ``false`` and ``no``."""
    return text.lower() not in ("", "0", "false", "no")


def split_host(text: str, port: int, flag: str) -> tuple[str, int]:
    """Return host and port of ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``.

    Raises:
        OptionError: it is none of these.
    """
    found = re.fullmatch(r"(\[[0-9a-fA-F:.%]+\]|[^\[\]:/@\s]+)(?::([0-9]{1,5}))?", text)
    if found is None or not 0 < int(found[2] or port) < 65536:
        raise OptionError(flag, text, f"host or host:port, such as {HOST}:{port}", "flag")
    return found[1], int(found[2] or port)


# -- the commands ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ShellCommand:
    """One command.

    Attributes:
        about: what it does, in a sentence.
        add: adds its arguments.
        module: whose ``run`` takes what was read; below ``flintmq.tools.shell``.
        example: a command line that people copy.
        tells: whether what the client logs goes to stderr; else the command says itself what matters of it.
    """

    about: str
    add: Callable[[argparse.ArgumentParser], None]
    module: str
    example: str = ""
    tells: bool = False


@dataclass(frozen=True)
class Noun:
    """A command whose first word says what is done.

    Attributes:
        verbs: each of them.
    """

    about: str
    verbs: Mapping[str, ShellCommand]


def command_of(name: str) -> ShellCommand:
    """Return the command of ``flintmq NAME``, where a verb is part of the name."""
    noun, _, verb = name.partition(" ")
    found = COMMANDS[noun]
    return found.verbs[verb] if isinstance(found, Noun) else found


def parser_of(name: str) -> Parser:
    """Return the parser of ``flintmq NAME``, where a verb is part of the name."""
    command = command_of(name)
    parser = Parser(
        prog=f"flintmq {name}",
        description=command.about,
        epilog=f"example: {command.example}" if command.example else None,
        allow_abbrev=False,
    )
    command.add(parser)
    return parser


def read(name: str, arguments: Sequence[str]) -> argparse.Namespace | None:
    """Read the command line of ``flintmq NAME``; None where help was asked for, and printed.

    Raises:
        UsageError: it is wrong.
    """
    words = list(arguments)
    found = COMMANDS[name]
    if isinstance(found, Noun):
        word = words[0] if words else "--help"
        if word.lstrip("-") in ("help", "h"):
            sys.stdout.write(usage(name, found))
            return None
        if word not in found.verbs:
            near = nearest(word, found.verbs)
            hint = f"did you mean {near}?" if near else f"flintmq {name} --help lists all"
            raise UsageError(f"there is no verb {word}; {hint}")
        name = f"{name} {words.pop(0)}"
    given = parser_of(name).parse_intermixed_args(words)
    given.command = name
    from_environment(given)
    return given


def usage(name: str, noun: Noun) -> str:
    """Return what ``flintmq channel --help`` and its siblings print."""
    width = max(map(len, noun.verbs))
    lines = [f"Usage: flintmq {name} <verb> [arguments] [flags]", "", noun.about, ""]
    lines += [f"  {verb:<{width}}  {command.about}" for verb, command in noun.verbs.items()]
    return "\n".join([*lines, "", f"flintmq {name} <verb> --help explains a verb.", ""])


def _pub(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("body", nargs="*", default=[], help="a message each; none: the lines of stdin")
    parser.add_argument("-f", "--file", action="append", default=[], metavar="FILE",
                        help="publish a file as one message (may be given several times)")  # fmt: skip
    parser.add_argument("--lines", action="store_true", help="each line of a --file is a message")
    parser.add_argument("--whole", action="store_true", help="all of stdin is one message")
    parser.add_argument("-d", "--delimiter", metavar="BYTE", help="ends a message in the input; default: newline")
    parser.add_argument("-H", "--header", action="append", type=header, default=[], metavar="NAME=VALUE",
                        help="a header, for a topic that has them (may be given several times)")  # fmt: skip
    parser.add_argument("-k", "--key", help="to the partition of this key, in order")
    parser.add_argument("-p", "--partition", type=number(0, 1023), metavar="N", help="to this partition")
    parser.add_argument(
        "--trace-id", type=number(0, 2**64 - 1), metavar="N", help="a trace id; where it is stored is printed"
    )
    parser.add_argument("--delay", type=duration_s, metavar="TIME", help="deliver it TIME from now, not before")
    parser.add_argument("-n", "--count", type=number(1), default=1, metavar="N", help="publish everything N times")
    parser.add_argument("--rate", type=number(1), default=0, metavar="N", help="at most N a second")
    parser.add_argument("--once", action="store_true", help="store nothing twice, also after an answer was lost")
    add_json(parser, "print a JSON object that says what was published")
    add_where(parser)


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", metavar="TEXT",
                        help="print this for each message: {body}, {id}, {time}, {timestamp}, {attempts}, {size}, "
                        "{topic}, {channel}, {partition}, {offset}, {trace_id}, {headers}, {nsqd}; \\n")  # fmt: skip
    parser.add_argument("--headers", action="store_true", help="ask for headers, and print them before the body")
    parser.add_argument("--raw", action="store_true", help="print bodies as they are, with nothing between them")
    add_json(parser)


def _sub(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("channel", nargs="?", help="default: one of its own, which goes with it and takes from nobody")
    parser.add_argument("-n", "--count", type=number(1), metavar="N", help="end after N messages")
    parser.add_argument("--idle", type=positive_duration_s, metavar="TIME", help="end when nothing has come for TIME")
    parser.add_argument("--for", dest="span", type=positive_duration_s, metavar="TIME", help="end after TIME")
    parser.add_argument("--from", dest="start", type=place, metavar="PLACE",
                        help=f"have the channel begin there, if it has no other consumer: {PLACE}")  # fmt: skip
    parser.add_argument("--exec", dest="command_line", metavar="COMMAND",
                        help="run a command for each message, its body on stdin: finished when it ends with 0, else "
                        "requeued; FLINTMQ_ID, FLINTMQ_ATTEMPTS and more are in its environment")  # fmt: skip
    parser.add_argument(
        "-j", "--jobs", type=number(1, 256), default=1, metavar="N", help="commands at a time; default 1"
    )
    parser.add_argument("--requeue", type=duration_s, default=5.0, metavar="TIME",
                        help="until a message whose command failed comes again; default 5s")  # fmt: skip
    parser.add_argument("--ordered", action="store_true", help="consume each partition in order; needs --lookupd")
    parser.add_argument("--max-in-flight", type=number(1, 100_000), default=2500, metavar="N",
                        help="messages on their way to here; default 2500, with --exec twice --jobs")  # fmt: skip
    _add_format(parser)
    add_where(parser)


def _tail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("-n", "--last", type=number(0, 100_000), default=10, metavar="N",
                        help="begin with the last N messages; default 10")  # fmt: skip
    parser.add_argument("--from", dest="start", type=place, metavar="PLACE", help=f"begin there instead: {PLACE}")
    parser.add_argument("--no-follow", action="store_true", help="end with the last message that is there")
    _add_format(parser)
    add_where(parser)


def _peek(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("channel", nargs="?", help="needed if the topic has several")
    parser.add_argument("-w", "--what", choices=("next", "in_flight", "deferred"),
                        help="those delivered next, held by consumers, or deferred; default: all three")  # fmt: skip
    parser.add_argument("-n", "--count", type=number(1, 100), default=10, metavar="N", help="of each; default 10")
    parser.add_argument("-p", "--partition", type=number(0, 1023), metavar="N", help="only of this one")
    parser.add_argument("--max-body", type=number(0, 1048576), default=4096, metavar="BYTES", help="of each body; 4096")
    add_json(parser)
    add_where(parser, tcp=False)


def _replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("channel", nargs="?", help="the channel that goes on elsewhere; not with --to")
    parser.add_argument("--from", dest="start", type=place, metavar="PLACE",
                        help=f"where it goes on, or the copy begins: {PLACE}; in a partition offset:N")  # fmt: skip
    parser.add_argument(
        "--to", metavar="TOPIC", help="leave all channels alone, and copy the messages to another topic"
    )
    parser.add_argument("--until", type=place, metavar="PLACE", help="end of a copy; default: the end as it is now")
    parser.add_argument("-p", "--partition", type=number(0, 1023), metavar="N", help="only of this one")
    parser.add_argument("--rate", type=number(1), default=0, metavar="N", help="copy at most N a second")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    add_yes(parser)
    add_json(parser)
    add_where(parser)


def _message(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", nargs="?", help="16 or 32 hex digits, or the internal id as a number")
    parser.add_argument("-t", "--topic", help="default: all topics are searched")
    parser.add_argument("--trace-id", type=number(1, 2**64 - 1), metavar="N", help="all messages with this trace id")
    parser.add_argument("-n", "--limit", type=number(1, 1000), default=100, metavar="N", help="events; default 100")
    add_json(parser)
    add_where(parser, tcp=False)


def _letters_topic(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", help="the topic of the dead letters, such as orders.dead")


def _letters_list(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_where(parser)


def _letters_show(parser: argparse.ArgumentParser) -> None:
    _letters_topic(parser)
    parser.add_argument("id", nargs="?", help="only this one, with all of its body")
    parser.add_argument("-n", "--count", type=number(1, 100), default=20, metavar="N", help="at most; default 20")
    add_json(parser)
    add_where(parser)


def _letters_change(parser: argparse.ArgumentParser) -> None:
    _letters_topic(parser)
    parser.add_argument("id", nargs="*", help="of the letters, as deadletters show prints them")
    parser.add_argument("--all", action="store_true", help="all that are there now")
    add_yes(parser)
    add_json(parser)
    add_where(parser)


def _letters_requeue(parser: argparse.ArgumentParser) -> None:
    _letters_change(parser)
    parser.add_argument("--to", metavar="TOPIC", help="publish them there instead of where they come from")


def _topic_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    add_json(parser)
    add_where(parser, tcp=False)


def _channel_only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("channel")
    parser.add_argument("-p", "--partition", type=number(0, 1023), metavar="N", help="only in this one")
    add_json(parser)
    add_where(parser, tcp=False)


def _channel_loses(parser: argparse.ArgumentParser) -> None:
    _channel_only(parser)
    add_yes(parser)


def _channel_empty(parser: argparse.ArgumentParser) -> None:
    _channel_loses(parser)
    parser.add_argument("--deferred", action="store_true", help="only what is deferred")


def _channel_to_time(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic")
    parser.add_argument("channel")
    parser.add_argument("start", type=place, metavar="place", help=f"{PLACE}; of one partition offset:N or count:N")
    parser.add_argument("-p", "--partition", type=number(0, 1023), metavar="N", help="only in this one")
    parser.add_argument("--dry-run", action="store_true", help="change nothing, and say what would be done")
    add_yes(parser)
    add_json(parser)
    add_where(parser)


def _top(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("topic", nargs="?", help="default: all topics")
    parser.add_argument("-s", "--sort", choices=("depth", "in", "out", "lag", "requeued", "name"), default="depth",
                        help="by the most of it; default depth")  # fmt: skip
    parser.add_argument("-i", "--interval", type=positive_duration_s, default="2s", metavar="TIME",
                        help="between two looks; default 2s")  # fmt: skip
    parser.add_argument("-n", "--limit", type=number(1), metavar="N", help="at most N rows; not on the live screen")
    parser.add_argument("--once", action="store_true", help="print it once, after one interval")
    parser.add_argument("--count", type=number(1), metavar="N", help="end --json after N looks")
    add_json(parser)
    add_where(parser, "5s", tcp=False)


def _bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=("pub", "sub", "both"), help="both: and the way from publisher to consumer")
    parser.add_argument("topic", nargs="?", help="default: one of its own, which is deleted at the end")
    parser.add_argument("-c", "--channel", help="to consume; default: a new one, which has what comes from now on")
    parser.add_argument("--size", type=size, default=200, metavar="BYTES", help="of a message; default 200")
    parser.add_argument(
        "--batch",
        type=number(1, 10_000),
        metavar="N",
        help="messages of one MPUB; default 100, fewer at a --rate below 1000",
    )
    parser.add_argument("--rate", type=number(1), default=0, metavar="N", help="messages a second; default: all it can")
    parser.add_argument("--connections", type=number(1, 256), default=1, metavar="N", help="of each side; default 1")
    parser.add_argument("--duration", type=positive_duration_s, default="10s", metavar="TIME", help="default 10s")
    add_json(parser, "print a JSON object")
    add_where(parser)


_CHANNEL = Noun(
    "Looks at the channels of a topic, and changes them.",
    {
        "list": ShellCommand("Print the channels of a topic.", _topic_only, "channel"),
        "show": ShellCommand("Print a channel and its consumers.", _channel_only, "channel"),
        "create": ShellCommand("Create a channel: it has what is published from now on.", _channel_only, "channel"),
        "delete": ShellCommand("Delete a channel with all that waits in it.", _channel_loses, "channel"),
        "empty": ShellCommand("Drop all that waits in a channel.", _channel_empty, "channel"),
        "pause": ShellCommand("Deliver nothing of a channel.", _channel_only, "channel"),
        "unpause": ShellCommand("Deliver again.", _channel_only, "channel"),
        "skip": ShellCommand("Finish all without delivering it, from now on.", _channel_loses, "channel"),
        "unskip": ShellCommand("Deliver again.", _channel_only, "channel"),
        "to-time": ShellCommand("Have a channel go on at another place.", _channel_to_time, "replay"),
    },
)


def _topic_loses(parser: argparse.ArgumentParser) -> None:
    _topic_only(parser)
    add_yes(parser)


def _topics(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_where(parser, tcp=False)


def _topic_create(parser: argparse.ArgumentParser) -> None:
    _topic_only(parser)
    parser.add_argument(
        "--partitions", type=number(1, 1023), metavar="N", help="partitions; default: a plain topic of NSQ"
    )
    parser.add_argument("--headers", action="store_true", help="messages may carry headers")
    parser.add_argument("--ordered", action="store_true", help="it can only be consumed in order")


_TOPIC = Noun(
    "Looks at topics, and changes them.",
    {
        "list": ShellCommand("Print all topics.", _topics, "topic"),
        "show": ShellCommand("Print a topic and its channels.", _topic_only, "topic"),
        "create": ShellCommand("Create a topic.", _topic_create, "topic"),
        "delete": ShellCommand("Delete a topic with its channels and messages.", _topic_loses, "topic"),
        "empty": ShellCommand("Drop what has not reached the topic's channels.", _topic_loses, "topic"),
        "pause": ShellCommand("Let no message reach the topic's channels.", _topic_only, "topic"),
        "unpause": ShellCommand("Let messages reach them again.", _topic_only, "topic"),
    },
)
_NODE = Noun("Looks at nsqds.", {"list": ShellCommand("Print all nsqds.", _topics, "node")})
_LETTERS = Noun(
    "Looks at messages that were given up, and has them processed again or drops them.",
    {
        "list": ShellCommand("Print the topics that have dead letters.", _letters_list, "deadletters"),
        "show": ShellCommand("Print dead letters with their reasons.", _letters_show, "deadletters"),
        "requeue": ShellCommand("Publish dead letters to the topic they come from.", _letters_requeue, "deadletters"),
        "drop": ShellCommand("Drop dead letters.", _letters_change, "deadletters"),
    },
)
COMMANDS: Mapping[str, ShellCommand | Noun] = {
    "pub": ShellCommand(
        "Publish messages: arguments, files, or lines of stdin.", _pub, "pub", "flintmq pub orders '{\"id\": 1}'"
    ),
    "sub": ShellCommand(
        "Consume a channel, and print each message.", _sub, "sub", "flintmq sub orders billing -n 10 --json", tells=True
    ),
    "tail": ShellCommand(
        "Print the last messages of a topic, and those that come; takes from nobody.", _tail, "tail",
        "flintmq tail orders -n 20", tells=True,
    ),
    "peek": ShellCommand(
        "Print what waits in a channel, is in flight or deferred; nothing is disturbed.", _peek, "peek",
        "flintmq peek orders billing",
    ),
    "replay": ShellCommand(
        "Have a channel go on elsewhere, or copy a range of messages to another topic.", _replay, "replay",
        "flintmq replay orders billing --from 1h --dry-run",
    ),
    "message": ShellCommand(
        "Find a message, and print what has happened to it as far as it was traced.", _message, "message",
        "flintmq message 000000000000002a --topic orders",
    ),
    "top": ShellCommand(
        "Show rates and depths of topics and channels, live.", _top, "top", "flintmq top --once --sort lag"
    ),
    "bench": ShellCommand(
        "Put load on an nsqd, and measure rates and latencies.", _bench, "bench",
        "flintmq bench both --rate 10000 --duration 10s", tells=True,
    ),
    "channel": _CHANNEL,
    "deadletters": _LETTERS,
    "topic": _TOPIC,
    "node": _NODE,
}  # fmt: skip
