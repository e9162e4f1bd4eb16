"""A Spark session with the settings under which ``format("nsq")`` is quick, and with clear words when it cannot start.

Spark looks for sinks that are written in Python in its active session, which each thread has for itself.

The rules of this file: a setting the caller gives wins over ours, whether here or to spark-submit; a session that runs
already is left as it is, and what it lacks is told once, with what that costs; nothing is set that changes results, but
the time zone of the session, which is UTC.

Source: docs/decisions/0006, docs/decisions/0041.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from flintmq.errors import OptionError
from flintmq.spark.errors import SetupError
from flintmq.spark.home import driver_environment, named
from flintmq.spark.java import find_java_home
from flintmq.spark.session_settings import (
    COSTS,
    EXTRA,
    JVM_FLAGS,
    QUICK,
    STREAM_ENVIRONMENT,
    THROUGHPUT,
    local_cores,
    settings,
    unfit_pyspark,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

CONNECT_PORT = 15_002
CONNECT_S = 3.0

log = logging.getLogger("flintmq.spark")
_told: set[str] = set()  # ids of applications


def session(app: str, master: str = "", jvm: str = QUICK, **conf: str) -> SparkSession:
    """Start (or get) a Spark session in which ``format("nsq")`` is registered.

    A session that runs already, as in a notebook, is returned with only ``conf`` set; what it lacks is logged. It is
    the active one of the calling thread then (:func:`activate`). Behind spark-submit, master and settings given to that
    are kept.

    Args:
        master: ``local[*]``, ``local[4,3]`` (4 cores, 3 attempts per task), ``spark://host:7077``, or
            ``sc://host:15002`` for Spark Connect. Empty: that of spark-submit, that in ``SPARK_REMOTE``, else
            ``local[*]``.
        jvm: ``quick`` starts soon, ``throughput`` compiles thoroughly, for jobs of more than a minute. Neither has an
            effect behind spark-submit and with Spark Connect, where the JVM runs already.
        conf: Spark settings, as ``session("app", **{"spark.driver.memory": "4g"})``; they win over the ones set here.

    Raises:
        SetupError: pyspark, pyarrow or Java is missing or of a version that does not do.
        OptionError: a setting's name does not begin with ``spark.``, or ``jvm`` is another word.
    """
    if jvm not in (QUICK, THROUGHPUT):
        raise OptionError("jvm", jvm, f"say {QUICK} or {THROUGHPUT}", "flintmq.spark.session")
    for name in conf:
        if not name.startswith("spark."):
            raise OptionError(name, conf[name], "names of Spark settings begin with spark.", "flintmq.spark.session")
    require_pyspark()
    _require("pyarrow", (18, 0))
    _require("numpy", (1, 26))
    remote = master or os.environ.get("SPARK_REMOTE", "")
    if remote.startswith("sc://") or (remote and not master):
        return _connected(app, remote, conf)
    from pyspark.sql import SparkSession

    running = _running()
    builder = SparkSession.builder.appName(app)
    variables: dict[str, str] = {}
    if running is not None:
        chosen = dict(conf)
    else:
        given = given_to_spark_submit()
        master = master or given.get("spark.master", "local[*]")
        _prepare_environment(master, has_jvm=bool(given))
        builder = builder.master(master)
        chosen = {name: value for name, value in settings(master, jvm).items() if name not in given}
        if not given:
            variables = driver_environment(master, Path(os.environ["JAVA_HOME"]), os.environ, JVM_FLAGS in conf)
        chosen |= conf
    for name, value in chosen.items():
        builder = builder.config(name, value)
    with named(variables):
        spark = builder.getOrCreate()
    _register(spark)
    if running is not None:
        activate(spark)
        wanted = {**settings(str(running.sparkContext.master), jvm), **conf}
        _warn_of(spark, str(spark.sparkContext.applicationId), wanted)
    return spark


def activate(spark: SparkSession) -> None:
    """Let the calling thread write in format nsq, with a session that another thread has started.

    Otherwise Spark finds no sink there: ``DATA_SOURCE_NOT_FOUND``. With Spark Connect there is nothing to be done, and
    this does nothing.
    """
    if (java := getattr(spark, "_jsparkSession", None)) is not None:
        _sessions_of(spark).setActiveSession(java)


@contextmanager
def activated(spark: SparkSession) -> Iterator[None]:
    """Have a session be the active one of the calling thread for a while, and then the one that was."""
    from py4j.protocol import Py4JError

    if getattr(spark, "_jsparkSession", None) is None:
        yield
        return
    sessions = _sessions_of(spark)
    before = sessions.getActiveSession()
    activate(spark)
    try:
        yield
    finally:
        with suppress(Py4JError, ConnectionError):  # there may be no JVM any more, which was told then
            if before.isDefined():
                sessions.setActiveSession(before.get())
            else:
                sessions.clearActiveSession()


def _sessions_of(spark: SparkSession) -> Any:
    """Return Java's class of a session, which keeps the active one of each thread."""
    jvm: Any = spark.sparkContext._jvm
    return jvm.org.apache.spark.sql.classic.SparkSession


def _running() -> SparkSession | None:
    """Return the session of the calling thread, else the one that another thread has started."""
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is None:
        return None
    return SparkSession.getActiveSession() or SparkSession._instantiatedSession


def _connected(app: str, remote: str, conf: Mapping[str, str]) -> SparkSession:
    """Return a session of Spark Connect; its server finds the source by itself, or has none."""
    for package, module in (("grpcio", "grpc"), ("pandas", "pandas"), ("grpcio-status", "grpc_status")):
        if importlib.util.find_spec(module) is None:
            raise SetupError(f"Spark Connect needs the Python package {package}", "pip install 'pyspark[connect]'")
    if not remote.startswith("sc://"):
        _prepare_environment(remote, has_jvm=False)  # pyspark starts a server there
    from pyspark.sql import SparkSession

    # the others are the server's: it has refused to change them since it runs
    _tell_if_away(remote)
    ours = {name: value for name, value in settings(remote).items() if name.startswith("spark.sql.")}
    builder = SparkSession.builder.appName(app).remote(remote)
    for name, value in {**ours, **conf}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    _warn_of(spark, remote, {**settings(remote), **conf})
    return spark


def _tell_if_away(remote: str) -> None:
    """Log that no server of Spark Connect is there: Spark tries again for minutes, and says nothing."""
    if not remote.startswith("sc://"):
        return
    try:
        place = urlsplit(remote)
        host, port = place.hostname or "", place.port or CONNECT_PORT
        socket.create_connection((host, port), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        where = remote.partition("/;")[0]  # behind it may be a token
        log.warning("no Spark Connect server answers at %s (%s): Spark tries again for some minutes", where, error)


def _warn_of(spark: SparkSession, where: str, wanted: Mapping[str, str]) -> None:
    """Log once what a session that was not started here lacks."""
    if where in _told:
        return
    _told.add(where)
    lacking = {name: wanted[name] for name in COSTS if name in wanted and spark.conf.get(name, None) != wanted[name]}
    if lacking:
        log.warning(
            "this session was started without settings of flintmq.spark.session: %s",
            "; ".join(f"{name}={value}: {COSTS[name]}" for name, value in lacking.items()),
        )


def given_to_spark_submit() -> dict[str, str]:
    """Return the settings with which spark-submit started the JVM that this Python belongs to; empty without it."""
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        return {}
    from pyspark import SparkConf, SparkContext

    SparkContext._ensure_initialized()  # type: ignore[no-untyped-call, unused-ignore]
    return dict(SparkConf().getAll())


def _prepare_environment(master: str, has_jvm: bool) -> None:
    """Make the settings that Spark reads from the environment only; what the caller has set stays."""
    if not has_jvm:
        os.environ["JAVA_HOME"] = str(find_java_home(os.environ))
    if local_cores(master) is not None:
        # else the workers run whichever python3 is first on the PATH, which may have none of our packages
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        # a host name that does not resolve keeps Spark from starting, and nobody else needs to reach this one
        os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")


def _register(spark: SparkSession) -> None:
    """Register the data source, unless Spark found it by itself: doing both makes it warn."""
    from py4j.protocol import Py4JError

    from flintmq.spark.source import NsqDataSource

    name = NsqDataSource.name()
    try:
        sources = spark._jsparkSession.sessionState().dataSourceManager()
        if not sources.dataSourceExists(name):
            spark.dataSource.register(NsqDataSource)
        _complete(sources.lookupDataSource(name).dataSourceCls().envVars())
    except Py4JError as error:  # not a public interface
        log.debug("Spark has other names for its data sources: %s", error)
        spark.dataSource.register(NsqDataSource)


def _complete(environment: Any) -> None:
    """Put into the source's environment what each stream puts there when it starts, from a thread of its own.

    Two threads that add a name at the same time corrupt the map, after which no query can send a task that reads from
    the source; with every name in it they only replace values.

    Args:
        environment: a ``java.util.Map`` of the JVM.
    """
    for name, value in STREAM_ENVIRONMENT.items():
        environment.putIfAbsent(name, value)


def require_pyspark() -> None:
    """Raise SetupError unless pyspark is installed in a version that this works with."""
    if importlib.util.find_spec("pyspark") is None:
        raise SetupError("the Python package pyspark is missing", EXTRA)
    from pyspark.version import __version__

    if why := unfit_pyspark(__version__):
        raise SetupError(why, EXTRA)


def _require(package: str, least: tuple[int, int]) -> None:
    if importlib.util.find_spec(package) is None:
        raise SetupError(f"the Python package {package} is missing", EXTRA)
    from importlib.metadata import version

    have = version(package)
    if tuple(int(part) for part in re.findall(r"\d+", have)[:2]) < least:
        raise SetupError(f"{package} {have} is too old, {least[0]}.{least[1]} or later is needed", EXTRA)


__all__ = ["QUICK", "THROUGHPUT", "activate", "activated", "given_to_spark_submit", "session", "settings"]
