"""``flintmq pipeline submit``: packs this environment for executors that have no flintmq, and calls spark-submit.

The rules of this file: only what executors import is packed, with the very files that are installed here; what is
packed is a function of them, so it is packed once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import ClassVar

import flintmq
from flintmq.errors import FlintError, UsageError
from flintmq.options import Choice, Options, Repeated, Switch, Text, option, read_command, version_line
from flintmq.pipeline.options import SPARK, pairs
from flintmq.spark.durable import replace
from flintmq.spark.errors import SetupError
from flintmq.spark.home import driver_environment
from flintmq.spark.java import cache_directory, find_java_home
from flintmq.spark.session_settings import JVM_FLAGS, settings
from flintmq.version import __version__

ENVIRONMENT = "flintmqenv"
SMALL = ("msgspec", "httptools", "typing_extensions")
LARGE = ("numpy", "pyarrow")
_WHAT = "What is submitted"


@dataclass(frozen=True, kw_only=True)
class SubmitOptions(Options):
    """The flags of flintmq pipeline submit."""

    program: ClassVar[str] = "flintmq pipeline submit"
    summary: ClassVar[str] = (
        "flintmq pipeline submit [flags] -- program.py [arguments], or [flags] -- <job> [flags], packs flintmq for the "
        "executors and prints the call of spark-submit, or runs it with --run."
    )

    master: str = option(Text("MASTER"), "", "the cluster, such as spark://host:7077", group=SPARK)
    conf: tuple[str, ...] = option(
        Repeated(Text("NAME=VALUE")), (), "a setting of Spark, such as spark.executor.memory=4g", group=SPARK
    )
    jvm: str = option(
        Choice(("quick", "throughput")), "throughput", "quick starts sooner, throughput is for long jobs", group=SPARK
    )
    pack: str = option(
        Choice(("small", "whole", "none")),
        "small",
        "small: flintmq, for nodes that have pyarrow and numpy; whole: those as well; none: the nodes have flintmq",
        group=_WHAT,
    )
    archive: str = option(Text("FILE"), "", "where the pack goes; without it into the cache", group=_WHAT)
    run: bool = option(Switch(), False, "run spark-submit, rather than print how", group=_WHAT)
    json: bool = option(Switch(), False, "print command and environment as a line of JSON", group=_WHAT)


def pack(path: Path | None = None, *, whole: bool = False) -> Path:
    """Pack what executors import as a .tgz, unless it is there already.

    Args:
        path: of the pack; None: a place in the cache that its content names.
        whole: with numpy and pyarrow; these are of this machine's kind.

    Raises:
        SetupError: something is not installed here, or the pack cannot be written.
    """
    files = sorted(_files(SMALL + (LARGE if whole else ())))
    if path is None:
        said = [(name, each.stat().st_size, each.stat().st_mtime_ns) for name, each in files]
        digest = hashlib.sha256(repr(said).encode()).hexdigest()[:16]
        path = cache_directory(os.environ) / f"{ENVIRONMENT}-{__version__}-{digest}.tgz"
        if path.is_file():
            return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = path.with_name(f".{path.name}.{os.getpid()}")
        with tarfile.open(staged, "w:gz", compresslevel=1) as out:
            for name, each in files:
                out.add(each, name, recursive=False)
        replace(staged, path)
    except OSError as error:
        raise SetupError(f"cannot write {path}: {error}", "name another place with --archive") from error
    return path


def _files(packages: Sequence[str]) -> Iterator[tuple[str, Path]]:
    root = Path(flintmq.__file__).parent
    for each in root.rglob("*"):
        if each.is_file() and "__pycache__" not in each.parts and "nsqadmin" not in each.relative_to(root).parts[:1]:
            yield f"flintmq/{each.relative_to(root).as_posix()}", each
    registration = importlib.util.find_spec("pyspark_nsq")
    if registration is None or registration.origin is None:
        raise SetupError("the module pyspark_nsq is missing", "install flintmq anew")
    yield "pyspark_nsq.py", Path(registration.origin)
    for package in packages:
        try:
            found = distribution(package).files or []
        except PackageNotFoundError as error:
            raise SetupError(f"the Python package {package} is missing", "pip install 'flintmq[spark]'") from error
        for file in found:
            name, place = file.as_posix(), Path(str(file.locate()))
            if not name.startswith("..") and "__pycache__" not in name and "/tests/" not in name and place.is_file():
                yield name, place


@dataclass(frozen=True, slots=True)
class Submission:
    """A call of spark-submit.

    Attributes:
        environment: variables to set besides those that are there.
    """

    command: list[str]
    environment: dict[str, str]

    def shown(self) -> str:
        """Return it for a shell."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in self.environment.items())
        return f"{variables} {shlex.join(self.command)}"


def submission(options: SubmitOptions, words: Sequence[str], archive: Path | None) -> Submission:
    """Return the call that submits a program, or a job of ours.

    Args:
        words: the program and its arguments, or the job and its flags.
        archive: of :func:`pack`; None: the nodes have flintmq.

    Raises:
        UsageError: there is no such program, or no such job, or it is one that Spark does not run.
    """
    from flintmq.pipeline import JOBS

    if not words:
        raise UsageError("name what is to be submitted behind --: program.py, or a job")
    program, *rest = words
    if program.endswith(".py"):
        if not Path(program).is_file():
            raise UsageError(f"{program} is not there")
    elif program in JOBS:
        if not JOBS[program].is_on_spark:
            raise UsageError(f"{program} does not run on a cluster: run flintmq pipeline {program} itself")
        # a session's own master would win over the one of spark-submit
        more = [] if any(each.startswith("--master") for each in rest) else [f"--master={options.master}"]
        program, rest = str(Path(flintmq.__file__).with_name("__main__.py")), ["pipeline", program, *rest, *more]
    else:
        raise UsageError(f"{program} is neither a .py file nor a job; jobs are {', '.join(JOBS)}")
    java_home = find_java_home(os.environ)
    given = pairs("--conf", options.conf)
    conf = {**settings(options.master, options.jvm), **given}
    command = [str(_spark_submit()), "--master", options.master]
    if archive is not None:
        command += ["--archives", f"{archive}#{ENVIRONMENT}"]
        conf.setdefault("spark.executorEnv.PYTHONPATH", ENVIRONMENT)
    for name, value in conf.items():
        if not name.startswith("spark."):
            raise UsageError(f"--conf {name}: names of Spark settings begin with spark.")
        command += ["--conf", f"{name}={value}"]
    root = str(Path(flintmq.__file__).parents[1])
    path = os.pathsep.join(each for each in (root, os.environ.get("PYTHONPATH", "")) if each)
    environment = {"JAVA_HOME": str(java_home), "PYTHONPATH": path}
    environment |= driver_environment(options.master, java_home, os.environ, JVM_FLAGS in given)
    if "PYSPARK_PYTHON" not in os.environ:
        # the driver's; executors of a cluster run their own
        environment["PYSPARK_DRIVER_PYTHON"] = sys.executable
        if options.master.startswith("local"):
            environment["PYSPARK_PYTHON"] = sys.executable
    return Submission([*command, program, *rest], environment)


def _spark_submit() -> Path:
    spec = importlib.util.find_spec("pyspark")
    if spec is None or spec.origin is None:
        raise SetupError("the Python package pyspark is missing", "pip install 'flintmq[spark]'")
    return Path(spec.origin).parent / "bin" / "spark-submit"


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline submit``; with ``--run`` return what spark-submit ends with."""
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    options = read_command(SubmitOptions, words[:cut], SubmitOptions.program, version_line("flintmq", __version__))
    if options is None:
        return 0
    if not options.master:
        raise UsageError("give --master, such as spark://host:7077")
    if options.archive and options.pack == "none":
        raise UsageError("--archive has nothing to hold with --pack=none")
    submission(options, words[cut + 1 :], None)  # what is wrong is said before anything is packed
    place = Path(options.archive) if options.archive else None
    archive = None if options.pack == "none" else pack(place, whole=options.pack == "whole")
    call = submission(options, words[cut + 1 :], archive)
    if not options.run:
        print(json.dumps({"command": call.command, "environment": call.environment}) if options.json else call.shown())
        return 0
    try:
        return subprocess.run(call.command, env={**os.environ, **call.environment}, check=False).returncode
    except OSError as error:
        raise FlintError(f"spark-submit cannot be started: {error}") from error


__all__ = ["Submission", "SubmitOptions", "pack", "run", "submission"]
