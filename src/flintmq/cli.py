"""The command line: ``flintmq <command>``, and NSQ's own command names as scripts of their own.

The rules of this file: it parses, prints and picks an exit code, nothing else. Commands are imported when they are
called, so that ``nsqd`` starts without loading Spark and ``--help`` answers at once. Exit code 1: the user can do
something about it, and one line on stderr says what; 2: the command line itself is wrong, as with Go's flags; 130:
Ctrl-C; 141: nobody reads the output any more. A traceback is always a bug.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from flintmq import stdout
from flintmq.errors import FlintError, OptionError, UsageError
from flintmq.options import Options, StartRefused, daemon_version_line, nearest, read_command, version_line
from flintmq.version import __version__

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from flintmq.tools.completion import Reader

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_NOBODY_READS = 128 + signal.SIGPIPE  # what a shell says of others that this ends
_OF_OUTPUT = (errno.EBADF, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOSPC)
# sources of an option, of which a job's flags hand on those of Spark's format; others are a file or the environment
_TYPED = ("flag", "command line", "argument", "option of format nsq", "sink nsq")

Table = TypeVar("Table", bound=Options)


def nsqd(arguments: Sequence[str] | None = None) -> int:
    """Run nsqd until it is told to stop; return its exit code."""
    with _importing():
        from flintmq.nsqd.options import NsqdOptions

    def serve(options: NsqdOptions) -> int:
        with _importing():
            from flintmq.nsqd.server import run

        return run(options)

    return _daemon(NsqdOptions, serve, _arguments(arguments))


def nsqlookupd(arguments: Sequence[str] | None = None) -> int:
    """Run nsqlookupd until it is told to stop; return its exit code."""
    with _importing():
        from flintmq.nsqlookupd.options import NsqlookupdOptions

    def serve(options: NsqlookupdOptions) -> int:
        with _importing():
            from flintmq.nsqlookupd.server import run

        return run(options)

    return _daemon(NsqlookupdOptions, serve, _arguments(arguments))


def nsqadmin(arguments: Sequence[str] | None = None) -> int:
    """Run nsqadmin until it is told to stop; return its exit code."""
    with _importing():
        from flintmq.nsqadmin.options import NsqadminOptions

    def serve(options: NsqadminOptions) -> int:
        with _importing():
            from flintmq.nsqadmin.server import run

        return run(options)

    return _daemon(NsqadminOptions, serve, _arguments(arguments))


def up(arguments: Sequence[str]) -> int:
    """Run nsqd, nsqlookupd and nsqadmin in one process, for use by hand."""
    with _importing():
        from flintmq.up import run

    return run(list(arguments))


def backup(arguments: Sequence[str]) -> int:
    """Copy the data directory of an nsqd, which may run."""
    from flintmq.backup.command import run_backup

    return run_backup(list(arguments))


def restore(arguments: Sequence[str]) -> int:
    """Make a data directory of a backup."""
    from flintmq.backup.command import run_restore

    return run_restore(list(arguments))


def demo(arguments: Sequence[str]) -> int:
    """Run the demonstration."""
    from flintmq.demo import run

    return run(list(arguments))


def doctor(arguments: Sequence[str]) -> int:
    """Look at a deployment and say what is wrong."""
    with _importing():
        from flintmq.tools.doctor import run

    return run(list(arguments))


def admin(arguments: Sequence[str]) -> int:
    """Ask an nsqd or a nsqlookupd something over HTTP, or have it change something."""
    from flintmq.tools.admin import run

    return run(list(arguments))


def cluster(noun: str) -> Callable[[Sequence[str]], int]:
    """Return what runs ``flintmq cluster``, ``topic`` or ``node``."""

    def run(arguments: Sequence[str]) -> int:
        with _importing():
            from flintmq.tools.cluster import run

        return run(noun, list(arguments))

    return run


def shell(name: str) -> Callable[[Sequence[str]], int]:
    """Return what runs one of the commands for people."""

    def run(arguments: Sequence[str]) -> int:
        with _importing():
            from flintmq.tools.shell.start import run

        return run(name, list(arguments))

    return run


def completion(arguments: Sequence[str]) -> int:
    """Print a script that completes command lines."""
    from flintmq.tools.completion import run

    return run(list(arguments), _TABLES, COMMANDS)


def _nsqd_table() -> type[Options]:
    from flintmq.nsqd.options import NsqdOptions

    return NsqdOptions


def _nsqlookupd_table() -> type[Options]:
    from flintmq.nsqlookupd.options import NsqlookupdOptions

    return NsqlookupdOptions


def _up_table() -> type[Options]:
    from flintmq.up import UpOptions

    return UpOptions


def _doctor_table() -> type[Options]:
    from flintmq.tools.doctor import DoctorOptions

    return DoctorOptions


def _nsqadmin_table() -> type[Options]:
    from flintmq.nsqadmin.options import NsqadminOptions

    return NsqadminOptions


def _backup_parser() -> ArgumentParser:
    from flintmq.backup.command import parser_of_backup

    return parser_of_backup()


def _restore_parser() -> ArgumentParser:
    from flintmq.backup.command import parser_of_restore

    return parser_of_restore()


def _demo_table() -> type[Options]:
    from flintmq.demo.options import DemoOptions

    return DemoOptions


def _pipeline_jobs() -> Sequence[str]:
    from flintmq.pipeline import JOBS

    return list(JOBS)  # their flags need pyarrow, which is too slow for the start of a shell


_TABLES: dict[str, Reader] = {
    "nsqd": _nsqd_table,
    "nsqlookupd": _nsqlookupd_table,
    "nsqadmin": _nsqadmin_table,
    "up": _up_table,
    "doctor": _doctor_table,
    "backup": _backup_parser,
    "restore": _restore_parser,
    "demo": _demo_table,
    "pipeline": _pipeline_jobs,
}


def nsq_tail(arguments: Sequence[str] | None = None) -> int:
    """Print messages as they come; return the exit code."""
    with _importing():
        from flintmq.tools.nsq_tail import run

    return _guarded("nsq_tail", "", lambda: run(_arguments(arguments)))


def to_nsq(arguments: Sequence[str] | None = None) -> int:
    """Publish what comes on stdin; return the exit code."""
    with _importing():
        from flintmq.tools.to_nsq import run

    return _guarded("to_nsq", "", lambda: run(_arguments(arguments)))


def nsq_stat(arguments: Sequence[str] | None = None) -> int:
    """Print the figures of a channel every now and then; return the exit code."""
    with _importing():
        from flintmq.tools.nsq_stat import run

    return _guarded("nsq_stat", "", lambda: run(_arguments(arguments)))


def nsq_to_file(arguments: Sequence[str] | None = None) -> int:
    """Write the messages of topics to files; return the exit code."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a log rotator that comes while it starts: no file is open yet
    with _importing():
        from flintmq.tools.nsq_to_file import run

    return _guarded("nsq_to_file", "", lambda: run(_arguments(arguments)))


def nsq_to_nsq(arguments: Sequence[str] | None = None) -> int:
    """Publish the messages of topics to other nsqd; return the exit code."""
    with _importing():
        from flintmq.tools.nsq_to_nsq import run

    return _guarded("nsq_to_nsq", "", lambda: run(_arguments(arguments)))


def nsq_to_http(arguments: Sequence[str] | None = None) -> int:
    """Make an HTTP request of each message of a topic; return the exit code."""
    with _importing():
        from flintmq.tools.nsq_to_http import run

    return _guarded("nsq_to_http", "", lambda: run(_arguments(arguments)))


def pipeline(arguments: Sequence[str]) -> int:
    """Run a job around the pipeline on Spark."""
    with _importing():
        from flintmq.pipeline import run

    return run(arguments)


@dataclass(frozen=True)
class Command:
    """One word after ``flintmq``."""

    summary: str
    run: Callable[[Sequence[str]], int]


COMMANDS = {
    "nsqd": Command("receive, store and deliver messages", nsqd),
    "nsqlookupd": Command("tell clients which nsqd has which topic", nsqlookupd),
    "nsqadmin": Command("show nsqd and nsqlookupd as web pages, and change them", nsqadmin),
    "up": Command("nsqd, nsqlookupd and nsqadmin in one process, for use by hand", up),
    "pub": Command("publish messages: arguments, files, or lines of stdin", shell("pub")),
    "sub": Command("consume a channel: print each message, or run a command for it", shell("sub")),
    "tail": Command("print the last messages of a topic, and those that come", shell("tail")),
    "peek": Command("look into a channel without disturbing it", shell("peek")),
    "replay": Command("have a channel go on elsewhere, or copy messages to another topic", shell("replay")),
    "message": Command("find a message, and what has happened to it", shell("message")),
    "top": Command("rates and depths of topics and channels, live", shell("top")),
    "bench": Command("put load on an nsqd, and measure rates and latencies", shell("bench")),
    "channel": Command("look at channels, create, delete, empty, pause or move them", shell("channel")),
    "deadletters": Command("look at messages that were given up, requeue or drop them", shell("deadletters")),
    "doctor": Command("look at a deployment as a client does, and say what to do", doctor),
    "admin": Command("look into an nsqd or nsqlookupd, or change it: peek, replay, pause, drain and more", admin),
    "cluster": Command("look at a cluster, its moves and its balance", cluster("cluster")),
    "topic": Command("look at topics, make, change and delete them, move them in a cluster", cluster("topic")),
    "node": Command("look at nsqds, and take them out of a cluster", cluster("node")),
    "backup": Command("copy the data directory of an nsqd, which may run", backup),
    "restore": Command("make a data directory of a backup", restore),
    "completion": Command("print a script for bash or zsh that completes command lines", completion),
    "pipeline": Command("jobs around queries on Spark: how far they are", pipeline),
    "demo": Command("real data through the broker, consumers and Spark", demo),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``flintmq <command> ...``; return the exit code."""
    words = _arguments(arguments)
    name = words[0] if words else "--help"
    command = COMMANDS.get(name)
    if command is not None:
        return _guarded(f"flintmq {name}", "", lambda: command.run(words[1:]))
    return _guarded("flintmq", "", lambda: _about(name))


def _about(name: str) -> int:
    """Answer a first word that is no command.

    Raises:
        UsageError: there is nothing to answer.
    """
    if name.lstrip("-") in ("help", "h"):
        sys.stdout.write(usage())
    elif name.lstrip("-") == "version":
        print(version_line("flintmq", __version__))
    else:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else "flintmq --help lists all"
        raise UsageError(f"unknown command {name}; {hint}")
    return 0


def usage() -> str:
    """Return what ``flintmq --help`` prints."""
    width = max(map(len, COMMANDS))
    commands = "".join(f"  {name:<{width}}  {command.summary}\n" for name, command in COMMANDS.items())
    return (
        "Usage: flintmq <command> [flags]\n\nNSQ in Python.\n\nCommands:\n"
        f"{commands}\nflintmq <command> --help explains a command; flintmq --version prints the version.\n"
    )


def _daemon(table: type[Table], serve: Callable[[Table], int], arguments: Sequence[str]) -> int:
    failed = f"FATAL: failed to instantiate {table.program} - "  # NSQ's words, which scripts look for
    return _guarded(table.program, failed, lambda: _run_daemon(table, serve, arguments))


def _run_daemon(table: type[Table], serve: Callable[[Table], int], arguments: Sequence[str]) -> int:
    from flintmq.wire.identify import NSQ_VERSION

    version = daemon_version_line(table.program, NSQ_VERSION)
    options = read_command(table, arguments, table.program, version)
    if options is None:
        return 0
    with _stoppable():
        return serve(options)


@contextlib.contextmanager
def _importing() -> Iterator[None]:
    """Import a command: what comes with it stays, and to look for garbage among it takes up to a quarter of a start."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Let a signal that comes before the event loop runs end the daemon as cleanly as one that comes later.

    One that means nothing to a daemon, perhaps SIGHUP or SIGUSR1, ends it no more than it ends NSQ's.
    """

    from flintmq.net import early_stop

    def stop(number: int, frame: object) -> None:
        early_stop.note(number)
        raise SystemExit(0)

    def unraisable(found: sys.UnraisableHookArgs) -> None:
        if found.exc_type is not SystemExit:  # it was raised in a callback of the interpreter's, and is noted
            say_unraisable(found)

    say_unraisable, sys.unraisablehook = sys.unraisablehook, unraisable
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    for ignored in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        before[ignored] = signal.signal(ignored, signal.SIG_IGN)
    try:
        yield
    finally:
        sys.unraisablehook = say_unraisable
        if signal.getsignal(signal.SIGTERM) is stop:  # else it ran, and takes no signal any more
            for number, handler in before.items():
                signal.signal(number, handler)


def _guarded(program: str, failed: str, run: Callable[[], int]) -> int:
    """Turn what the user can mend into one line on stderr and an exit code."""
    _open_what_is_closed()
    try:
        try:
            code = run()
        except SystemExit:
            sys.stdout.flush()
            raise
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        stdout.give_up()
        return EXIT_NOBODY_READS
    except OSError as error:
        if error.filename is not None or error.errno not in _OF_OUTPUT:
            raise
        stdout.give_up()
        print(f"{program}: the output cannot be written: {error.strerror}", file=sys.stderr)
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


def _open_what_is_closed() -> None:
    """Have 0, 1 and 2 open: what is opened next would take the number, and be printed into.

    As with other programs it is an error to read from a stdin or to write to a stdout that was closed; what is said on
    such a stderr is lost.

    Source: POSIX.1-2017 2.14 (a new descriptor is the lowest free number).
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, mode)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
            else:
                os.set_inheritable(number, True)
    for name, number, how in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:  # the interpreter has found it closed
            stream = open(number, how, encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)


def _arguments(arguments: Sequence[str] | None) -> list[str]:
    return list(sys.argv[1:] if arguments is None else arguments)
