"""The command line: what each command prints, where it goes, its exit code, and that it loads no more than it needs."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest

from flintmq import __version__, cli
from flintmq.errors import DataPathLocked
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions

PYTHON = ".".join(map(str, sys.version_info[:3]))


@pytest.fixture
def called(monkeypatch):
    """Stands in for the modules behind the commands; the list holds what each was called with."""
    calls: list[object] = []

    def run(argument: object) -> int:
        calls.append(argument)
        return 7

    for name in ("flintmq.nsqd.server", "flintmq.nsqlookupd.server", "flintmq.up", "flintmq.demo"):
        module = types.ModuleType(name)
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, name, module)
    return calls


def test_daemons_get_their_options_and_their_exit_code_is_returned(called):
    assert cli.nsqd(["--tcp-address=:1"]) == 7
    assert cli.main(["nsqd", "-tcp-address", ":2"]) == 7
    assert cli.nsqlookupd([]) == 7
    assert cli.main(["nsqlookupd"]) == 7
    assert called == [
        NsqdOptions(tcp_address=":1"),
        NsqdOptions(tcp_address=":2"),
        NsqlookupdOptions(),
        NsqlookupdOptions(),
    ]


def test_collection_goes_on_behind_the_import_of_a_command(capsys):
    frozen_count = gc.get_freeze_count()
    assert cli.main(["nsqd", "--version"]) == 0 and gc.isenabled()
    gc.disable()
    try:
        assert cli.main(["nsqd", "--version"]) == 0 and not gc.isenabled()
    finally:
        gc.enable()
    assert gc.get_freeze_count() >= frozen_count


def test_up_and_demo_get_the_rest_of_the_words(called):
    assert cli.main(["up", "--data-path", "x"]) == 7
    assert cli.main(["demo"]) == 7
    assert called == [["--data-path", "x"], []]


def test_the_words_of_the_process_are_the_default(called, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nsqd", "--sync-every=9"])
    assert cli.nsqd() == 7
    assert called == [NsqdOptions(sync_every=9)]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--version"], f"flintmq v{__version__} (built w/python{PYTHON})\n"),
        (["nsqd", "--version"], f"nsqd v1.3.0 (built w/python{PYTHON}) FlintMQ v{__version__}\n"),
        (["nsqlookupd", "-version"], f"nsqlookupd v1.3.0 (built w/python{PYTHON}) FlintMQ v{__version__}\n"),
    ],
)
def test_version(words, expected, capsys):
    assert cli.main(words) == 0
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"], ["help"]])
def test_help_lists_every_command(words, capsys):
    assert cli.main(words) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in cli.COMMANDS)


def test_help_of_a_daemon(capsys):
    assert cli.nsqd(["--help"]) == 0
    assert capsys.readouterr().out.startswith("Usage: nsqd [flags]\n")


def test_show_config(capsys):
    assert cli.nsqd(["--show-config", "--sync-every=9"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("sync_every"))
    assert line.split() == ["sync_every", "=", "9", "#", "flag"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nsqb"], "flintmq: unknown command nsqb; did you mean nsqd?\n"),
        (["--verison"], "flintmq: unknown command --verison; flintmq --help lists all\n"),
        (["nsqd", "--tcp-adress=x"], "nsqd: flag: unknown option --tcp-adress; did you mean --tcp-address?\n"),
        (["nsqd", "--sync-every=x"], "nsqd: flag: --sync-every='x' is not allowed; it must be a whole number\n"),
    ],
)
def test_mistakes_are_one_line_on_stderr_and_exit_code_2(words, expected, capsys, called):
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err == expected
    assert captured.out == ""
    assert called == []


def test_a_daemon_that_cannot_start_says_so_in_nsq_s_words(called, monkeypatch, capsys):
    def refuse(_options: NsqdOptions) -> int:
        raise DataPathLocked("/data", "Resource temporarily unavailable")

    monkeypatch.setattr(sys.modules["flintmq.nsqd.server"], "run", refuse)
    assert cli.main(["nsqd"]) == 1
    assert capsys.readouterr().err.startswith(
        "nsqd: FATAL: failed to instantiate nsqd - failed to lock data-path: cannot flock directory /data - "
    )


def test_what_a_file_sets_in_vain_is_told(called, tmp_path, capsys):
    path = tmp_path / "nsqd.cfg"
    path.write_text('statsd_prefx = "x"\n', encoding="utf-8")
    assert cli.nsqd([f"--config={path}"]) == 7
    assert capsys.readouterr().err == (
        f"nsqd: {path}: unknown option statsd_prefx is ignored; did you mean statsd_prefix?\n"
    )


def test_what_nsq_refuses_at_its_start_is_refused_in_its_words(called, capsys):
    assert cli.nsqd(["--max-deflate-level=10"]) == 1
    assert capsys.readouterr().err == (
        "nsqd: FATAL: failed to instantiate nsqd - --max-deflate-level must be [1,9] (flag: --max-deflate-level='10')\n"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_daemon_is_being_loaded_stops_it_cleanly(called, monkeypatch, number):
    before = signal.getsignal(number)

    def load(_options: NsqdOptions) -> int:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(number)
        return 7

    monkeypatch.setattr(sys.modules["flintmq.nsqd.server"], "run", load)
    with pytest.raises(SystemExit) as ended:
        cli.nsqd([])
    assert ended.value.code == 0
    assert signal.getsignal(number) is before


def test_a_bug_keeps_its_traceback(called, monkeypatch):
    def break_down(_options: NsqdOptions) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(sys.modules["flintmq.nsqd.server"], "run", break_down)
    with pytest.raises(ZeroDivisionError):
        cli.nsqd([])


def test_as_a_module_it_answers_without_loading_what_it_does_not_need():
    code = (
        "import sys, runpy; sys.argv = ['flintmq', '--version']\n"
        "try:\n    runpy.run_module('flintmq', run_name='__main__')\n"
        "except SystemExit as end:\n    assert end.code == 0, end.code\n"
        "web = {'jinja2', 'starlette', 'uvicorn'}\n"
        "heavy = {'aiohttp', 'asyncio', 'cramjam', 'prometheus_client', 'pyarrow', 'pyspark', *web} & {*sys.modules}\n"
        "assert not heavy, heavy\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"flintmq v{__version__} (built w/python{PYTHON})\n"


HEAVY = {
    "aiohttp", "cramjam", "cryptography", "difflib", "email", "flintmq.client", "flintmq.demo",
    "flintmq.migrate.diskqueue", "flintmq.migrate.takeover", "flintmq.nsqadmin", "flintmq.spark", "flintmq.tools",
    "h11", "html", "http.client", "idna", "importlib.metadata", "jinja2", "multiprocessing", "OpenSSL",
    "opentelemetry", "pathlib", "pdb", "prometheus_client", "pyarrow", "pydantic", "pyspark", "pytest", "starlette",
    "tempfile", "tomllib", "unittest", "urllib.request", "uvicorn", "xml", "yaml",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("daemon", "main_class", "address"),
    [("nsqd", "Nsqd", "self.addresses.http"), ("nsqlookupd", "Nsqlookupd", "self.http_address")],
)
def test_a_daemon_listens_and_answers_without_loading_what_only_some_need(daemon, main_class, address, tmp_path):
    code = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "import asyncio, os, signal\n"
        "from flintmq import cli\n"
        f"import flintmq.{daemon}.server as server\n"
        f"daemon = server.{main_class}\n"
        "start, heavy = daemon.start, set()\n"
        "async def start_and_stop(self, *arguments):\n"
        "    await start(self, *arguments)\n"
        f"    reader, writer = await asyncio.open_connection(*{address})\n"
        "    writer.write(b'GET /ping HTTP/1.1\\r\\nHost: localhost\\r\\n\\r\\n')\n"
        "    answer = await reader.readuntil(b'\\r\\n\\r\\nOK')\n"
        "    writer.close()\n"
        f"    heavy.update({HEAVY!r} & (set(sys.modules) - before))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "daemon.start = start_and_stop\n"
        f"code = cli.{daemon}(['--tcp-address=127.0.0.1:0', '--http-address=127.0.0.1:0', *sys.argv[1:]])\n"
        "assert code == 0, code\n"
        "assert not heavy, sorted(heavy)\n"
    )
    arguments = [f"--data-path={tmp_path}"] if daemon == "nsqd" else []
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr


# --- stdout, stdin and stderr that are not as usual

LINES = [["--version"], ["--help"], ["nsqd", "--version"], ["up", "--help"], ["pub", "--help"], ["completion", "bash"]]


def shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Runs a line of a shell in which ``$@`` is ``flintmq`` with some words."""
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    environment.pop("PYTHONUNBUFFERED", None)
    command = ["bash", "-c", line, "-", sys.executable, "-m", "flintmq", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no device that is always full")
@pytest.mark.parametrize("words", LINES)
def test_an_output_that_cannot_be_written_is_one_line(words):
    program = words[0] if words[0] == "nsqd" else f"flintmq {words[0]}" if len(words) > 1 else "flintmq"
    for line, reason in (('"$@" >/dev/full', "No space left on device"), ('"$@" >&-', "Bad file descriptor")):
        done = shell(line, *words)
        assert done.stderr == f"{program}: the output cannot be written: {reason}\n"
        assert done.returncode == 1


@pytest.mark.slow
@pytest.mark.parametrize("words", LINES)
def test_when_nobody_reads_it_ends_as_others_do(words):
    done = shell('exec 3> >(true); wait $!; "$@" >&3', *words)  # not before the reader has gone
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_what_is_said_on_a_closed_stderr_comes_nowhere_else():
    done = shell('"$@" 2>&-', "no-such-command")
    assert (done.returncode, done.stdout) == (2, "")


def test_what_is_opened_takes_the_place_of_nothing_that_was_closed():
    """Else a file of the data directory could be 1, and be printed into."""
    code = (
        "import os, sys; from flintmq import cli\n"
        "def run(words):\n    return os.open(os.devnull, os.O_RDONLY)\n"
        "cli.COMMANDS['demo'] = cli.Command('', run)\n"
        "sys.exit(cli.main(['demo']))\n"
    )
    environment = os.environ | {"PYTHONPATH": str(Path(cli.__file__).parents[1])}
    command = ["bash", "-c", '"$@" <&- >&- 2>&-', "-", sys.executable, "-c", code]
    assert subprocess.run(command, timeout=60, env=environment).returncode == 3
