"""Completion in real shells: what is offered is what the commands take, and what the running broker has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.daemons import PATIENCE_S, SOURCES, Nsqd, a_few_times
from tests.integration.flavours import address_of

from flintmq import cli
from flintmq.tools import completion

SHELLS = [pytest.param(shell, marks=pytest.mark.skipif(shutil.which(shell) is None, reason=f"there is no {shell}"))
          for shell in completion.SHELLS]  # fmt: skip
ASK = {
    "bash": """
ask() { COMP_LINE="$1" COMP_POINT=${#1}; _flintmq; printf '%s\\n' "${COMPREPLY[@]}"; }
""",
    # the shell's own completion asks with these; what it would be given is printed
    "zsh": """
compadd() { shift; print -l -- "$@"; }
_files() { :; }
ask() { words=(${(z)1}); if [[ "$1" = *\\  ]]; then words+=(""); fi; CURRENT=${#words}; _flintmq; }
""",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A directory with ``flintmq`` on the path, as a user has it."""
    program = tmp_path / "bin" / "flintmq"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flintmq "$@"\n')
    program.chmod(0o755)
    return tmp_path


def offered(shell: str, home: Path, *lines: str, **environment: str) -> list[list[str]]:
    """What a shell offers behind each of these command lines."""
    asked = "\n".join(f"ask '{line}'; echo ---" for line in lines)
    script = f'PATH="{home}/bin:$PATH"\neval "$(flintmq completion {shell})"\n{ASK[shell]}\n{asked}\n'
    done = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else ["--norc"]), "-c", script],
        env={**os.environ, "PYTHONPATH": str(SOURCES), "HOME": str(home), **environment},
        capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip
    assert done.returncode == 0 and not done.stderr, done.stderr
    return [part.split() for part in done.stdout.split("---\n")[:-1]]


@pytest.mark.parametrize("shell", SHELLS)
def test_commands_verbs_flags_and_choices(shell: str, home: Path):
    commands, verbs, flags, choices, more, daemon, files, nothing = offered(
        shell, home, "flintmq ", "flintmq channel p", "flintmq pub --tls-c", "flintmq top --sort ", "flintmq bench b",
        "flintmq nsqd --data", "flintmq pub t -f ", "flintmq pub --rate ",
    )  # fmt: skip
    assert sorted(commands) == sorted(cli.COMMANDS)
    assert verbs == ["pause"] and flags == ["--tls-cert"] and more == ["both"] and daemon == ["--data-path"]
    assert choices == ["depth", "in", "out", "lag", "requeued", "name"]
    assert files == nothing == []


@pytest.mark.parametrize("shell", SHELLS)
def test_topics_and_channels_of_the_running_broker(shell: str, home: Path, single_nsqd: Nsqd):
    for channel in ("billing", "audit"):
        single_nsqd.post("/topic/create?topic=completed")
        single_nsqd.post(f"/channel/create?topic=completed&channel={channel}")
    variables = {"FLINTMQ_NSQD": address_of(single_nsqd), "FLINTMQ_HTTP": "{}:{}".format(*single_nsqd.http)}
    lines = "flintmq pub compl", "flintmq sub --timeout 9s completed b", "flintmq peek completed "

    def attempt(number: int) -> None:  # the broker has half a second to answer
        assert offered(shell, home, *lines, **variables) == [["completed"], ["billing"], ["audit", "billing"]]

    a_few_times(attempt)
    assert offered(shell, home, "flintmq pub x", FLINTMQ_NSQD="127.0.0.1:1") == [[]], "nobody is there to be asked"


def test_names_are_printed_for_scripts(single_nsqd: Nsqd, monkeypatch: pytest.MonkeyPatch, capfd):
    single_nsqd.post("/topic/create?topic=named")
    single_nsqd.post("/channel/create?topic=named&channel=c%23ephemeral")
    where = ["--nsqd-http", "{}:{}".format(*single_nsqd.http), "--timeout", "60s"]
    assert cli.main(["completion", "topics", *where]) == 0
    assert "named" in capfd.readouterr().out.split()
    assert cli.main(["completion", "channels", "named", *where]) == 0
    assert capfd.readouterr().out == "c#ephemeral\n"
    assert cli.main(["completion", "topics", "--nsqd", "127.0.0.1:1"]) == 1
    assert capfd.readouterr() == ("", "")
    assert cli.main(["completion", "fish"]) == 2


def test_every_command_has_its_words():
    found = completion.tree(cli._TABLES, cli.COMMANDS)
    for name in cli.COMMANDS:
        assert found[name].verbs or found[name].flags or found[name].places, name
    assert "--nsqd" in found["channel delete"].flags and "--wait" in found["topic create"].flags
