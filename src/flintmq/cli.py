"""The command line: ``flintmq <command>``, and NSQ's own command names as scripts of their own.

The rules of this file: it parses, prints and picks an exit code, nothing else. Commands are imported when they are
called, so that ``nsqd`` starts without loading Spark and ``--help`` answers at once. Exit code 1: the user can do
something about it, and one line on stderr says what; 2: the command line itself is wrong, as with Go's flags. A
traceback is always a bug.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from flintmq import __version__
from flintmq.errors import FlintError, OptionError, UsageError
from flintmq.options import Options, StartRefused, nearest, read_command, version_line

EXIT_FAILED = 1
EXIT_USAGE = 2
_TYPED = ("flag", "command line", "argument")  # sources of an option; others are a file or the environment

Table = TypeVar("Table", bound=Options)


def nsqd(arguments: Sequence[str] | None = None) -> int:
    """Run nsqd until it is told to stop; return its exit code."""
    from flintmq.nsqd.options import NsqdOptions

    def serve(options: NsqdOptions) -> int:
        from flintmq.nsqd.server import run

        return run(options)

    return _daemon(NsqdOptions, serve, _arguments(arguments))


def nsqlookupd(arguments: Sequence[str] | None = None) -> int:
    """Run nsqlookupd until it is told to stop; return its exit code."""
    from flintmq.nsqlookupd.options import NsqlookupdOptions

    def serve(options: NsqlookupdOptions) -> int:
        from flintmq.nsqlookupd.server import run

        return run(options)

    return _daemon(NsqlookupdOptions, serve, _arguments(arguments))


def up(arguments: Sequence[str]) -> int:
    """Run nsqd and nsqlookupd in one process, for use by hand."""
    from flintmq.up import run

    return run(list(arguments))


def demo(arguments: Sequence[str]) -> int:
    """Run the demonstration."""
    from flintmq.demo import run

    return run(list(arguments))


def doctor(arguments: Sequence[str]) -> int:
    """Look at a deployment and say what is wrong."""
    from flintmq.tools.doctor import run

    return run(list(arguments))


def admin(arguments: Sequence[str]) -> int:
    """Ask an nsqd or a nsqlookupd something over HTTP, or have it change something."""
    from flintmq.tools.admin import run

    return run(list(arguments))


def cluster(noun: str) -> Callable[[Sequence[str]], int]:
    """Return what runs ``flintmq cluster``, ``topic`` or ``node``."""

    def run(arguments: Sequence[str]) -> int:
        from flintmq.tools.cluster import run

        return run(noun, list(arguments))

    return run


def nsq_tail(arguments: Sequence[str] | None = None) -> int:
    """Print messages as they come; return the exit code."""
    from flintmq.tools.nsq_tail import run

    return _guarded("nsq_tail", "", lambda: run(_arguments(arguments)))


def to_nsq(arguments: Sequence[str] | None = None) -> int:
    """Publish what comes on stdin; return the exit code."""
    from flintmq.tools.to_nsq import run

    return _guarded("to_nsq", "", lambda: run(_arguments(arguments)))


def nsq_stat(arguments: Sequence[str] | None = None) -> int:
    """Print the figures of a channel every now and then; return the exit code."""
    from flintmq.tools.nsq_stat import run

    return _guarded("nsq_stat", "", lambda: run(_arguments(arguments)))


@dataclass(frozen=True)
class Command:
    """One word after ``flintmq``."""

    summary: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "nsqd": Command("receive, store and deliver messages", nsqd),
    "nsqlookupd": Command("tell clients which nsqd has which topic", nsqlookupd),
    "up": Command("nsqd and nsqlookupd in one process, for use by hand", up),
    "doctor": Command("look at a deployment as a client does, and say what to do", doctor),
    "admin": Command("look into an nsqd or nsqlookupd, or change it: peek, replay, pause, drain and more", admin),
    "cluster": Command("look at a cluster, its moves and its balance", cluster("cluster")),
    "topic": Command("make, change and move topics of a cluster", cluster("topic")),
    "node": Command("look at the nsqds of a cluster, and take them out", cluster("node")),
    "demo": Command("real data through the broker, consumers and Spark", demo),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``flintmq <command> ...``; return the exit code."""
    words = _arguments(arguments)
    name = words[0] if words else "--help"
    command = COMMANDS.get(name)
    if command is not None:
        return _guarded(f"flintmq {name}", "", lambda: command.run(words[1:]))
    if name.lstrip("-") in ("help", "h"):
        sys.stdout.write(usage())
        return 0
    if name.lstrip("-") == "version":
        print(version_line("flintmq", __version__))
        return 0
    near = nearest(name, COMMANDS)
    hint = f"did you mean {near}?" if near else "flintmq --help lists all"
    print(f"flintmq: unknown command {name}; {hint}", file=sys.stderr)
    return EXIT_USAGE


def usage() -> str:
    """Return what ``flintmq --help`` prints."""
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:<{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    return (
        "Usage: flintmq <command> [flags]\n\nNSQ in Python.\n\nCommands:\n"
        f"{commands}\nflintmq <command> --help explains a command; flintmq --version prints the version.\n"
    )


def daemon_version_line(program: str) -> str:
    """Return what a daemon's ``--version`` prints: ``nsqd v1.3.0 (built w/python3.11.7) FlintMQ v0.1.0``.

    First of all it says which NSQ it is like, as over the wire: scripts and the suites of clients read that, and take a
    small number for an NSQ that lacks most of what they need.
    """
    from flintmq.wire.identify import NSQ_VERSION

    return f"{version_line(program, NSQ_VERSION)} FlintMQ v{__version__}"


def _daemon(table: type[Table], serve: Callable[[Table], int], arguments: Sequence[str]) -> int:
    failed = f"FATAL: failed to instantiate {table.program} - "  # NSQ's words, which scripts look for
    return _guarded(table.program, failed, lambda: _run_daemon(table, serve, arguments))


def _run_daemon(table: type[Table], serve: Callable[[Table], int], arguments: Sequence[str]) -> int:
    options = read_command(table, arguments, table.program, daemon_version_line(table.program))
    if options is None:
        return 0
    with _stoppable():
        return serve(options)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let a signal that comes before the event loop runs end the daemon as cleanly as one that comes later."""

    def stop(number: int, frame: object) -> None:
        raise SystemExit(0)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is stop:  # else it ran, and takes no signal any more
            for number, handler in before.items():
                signal.signal(number, handler)


def _guarded(program: str, failed: str, run: Callable[[], int]) -> int:
    """Turn what the user can mend into one line on stderr and an exit code."""
    try:
        return run()
    except StartRefused as error:
        print(f"{program}: {failed}{error}", file=sys.stderr)
    except OptionError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USAGE if error.source in _TYPED else EXIT_FAILED
    except UsageError as error:
        print(f"{program}: {error}", file=sys.stderr)
        return EXIT_USAGE
    except FlintError as error:
        print(f"{program}: {failed}{error}", file=sys.stderr)
    return EXIT_FAILED


def _arguments(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)
