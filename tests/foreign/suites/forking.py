"""A plugin of pytest for other people's suites: the daemons that they start by name are forks of one process.

That saves most of the processor time of some 400 starts. The first start of each program is left to PATH.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import IO, Any

_FORKED = Path(__file__).resolve().parents[2] / "integration" / "forked.py"
_PROGRAMS = ("nsqd", "nsqlookupd")


def _module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flintmq_forked", _FORKED)  # these suites have a package "tests", too
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_forked = _module()
_started: set[str] = set()
_popen: Any = subprocess.Popen


def _start(
    command: Any,
    *args: Any,
    stdin: int | IO[Any] | None = None,
    stdout: int | IO[Any] | None = None,
    stderr: int | IO[Any] | None = None,
    **more: Any,
) -> Any:
    """What ``subprocess.Popen`` does."""
    program = command[0] if isinstance(command, list) else ""
    if args or more or program not in _started:
        if program in _PROGRAMS:
            _started.add(program)
        return _popen(command, *args, stdin=stdin, stdout=stdout, stderr=stderr, **more)
    streams = {"stdin": stdin, "stdout": stdout, "stderr": stderr}
    ours = {name: number if given is None else given for number, (name, given) in enumerate(streams.items())}
    return _forked.start(command[1:], program=program, **ours)


subprocess.Popen = _start  # type: ignore[assignment,misc]
