"""Jobs around the pipeline on Spark: ``flintmq pipeline <job>``, and the same as functions.

What they need of Spark comes from :mod:`flintmq.spark`; a job that can do without a JVM does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from flintmq.errors import UsageError

_OF_THE_EXTRA = ("numpy", "pyarrow", "pyspark", "zlib_ng")


@dataclass(frozen=True)
class Job:
    """One word after ``flintmq pipeline``.

    Attributes:
        is_on_spark: it runs where its flag --master says.
    """

    summary: str
    run: Callable[[Sequence[str]], int]
    is_on_spark: bool = False


def _job(module: str, function: str = "run") -> Callable[[Sequence[str]], int]:
    """Return a function that runs the job of a module, which is imported only then."""

    def run(arguments: Sequence[str]) -> int:
        try:
            code: int = getattr(import_module(f"flintmq.pipeline.{module}"), function)(arguments)
        except ModuleNotFoundError as error:
            package = (error.name or "").partition(".")[0]
            if package not in _OF_THE_EXTRA or find_spec(package) is not None:
                raise
            from flintmq.spark.errors import SetupError
            from flintmq.spark.session_settings import EXTRA

            raise SetupError(f"this job needs {package}, which is not installed", EXTRA) from error
        return code

    return run


JOBS = {
    "archive": Job(
        "topics as Parquet files or tables, each message exactly once for whoever reads them", _job("archive")
    ),
    "check": Job(
        "a pipeline that is written down, planned against the running nsqd", _job("flow", "check"), is_on_spark=True
    ),
    "cluster": Job("up or down: a standalone Spark on this machine, for trying out jobs", _job("cluster")),
    "compact": Job("few files in the place of many small ones, in an archive or a table", _job("compact")),
    "dedupe": Job(
        "topics without the messages that have been there before, to a topic or files", _job("dedupe"), is_on_spark=True
    ),
    "doctor": Job("whether Spark runs here, and its executors reach nsqd", _job("doctor"), is_on_spark=True),
    "init": Job("a project of Spark's declarative pipelines, with a topic as a table", _job("init")),
    "lag": Job("how far a query is behind, by partition, from its checkpoint", _job("lag")),
    "mirror": Job(
        "topics of one cluster in another, each message once, with where it came from", _job("mirror"), is_on_spark=True
    ),
    "replay": Job("rows of Parquet files, such as an archive's, to a topic, each once", _job("replay")),
    "rollup": Job(
        "counts, sums and other aggregates by windows of time, to a topic or files", _job("rollup"), is_on_spark=True
    ),
    "run": Job("a pipeline that is written down: sources, steps, rules, sinks", _job("flow"), is_on_spark=True),
    "submit": Job("a program or a job through spark-submit, with flintmq packed for the executors", _job("submit")),
    "tail": Job("the last messages of topics as rows with their schema", _job("tail"), is_on_spark=True),
    "trace": Job(
        "the life of each message out of a trace: latencies, lost, stuck, repeated", _job("trace"), is_on_spark=True
    ),
    "warm": Job("an archive of Spark's classes, with which its sessions start sooner", _job("warm")),
}


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline <job> ...``; return the exit code.

    Raises:
        UsageError: there is no such job.
    """
    name = arguments[0] if arguments else "--help"
    job = JOBS.get(name)
    if job is not None:
        return job.run(arguments[1:])
    if name.lstrip("-") in ("help", "h"):
        width = max(map(len, JOBS))
        jobs = "".join(f"  {name:<{width}}  {job.summary}\n" for name, job in JOBS.items())
        print(f"Usage: flintmq pipeline <job> [flags]\n\nJobs:\n{jobs}\nflintmq pipeline <job> --help explains a job.")
        return 0
    raise UsageError(f"unknown job {name}; there is {', '.join(JOBS)}")
