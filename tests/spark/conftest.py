"""One nsqd and one Spark for all tests that need them."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.ports import reserved_port
from tests.spark.processes import NsqdProcess, environment


@pytest.fixture(scope="session", autouse=True)
def formats_are_kept() -> None:
    """Loggers of PySpark make lines of JSON of all that a handler gets. pytest gives its own handler to each logger
    that does not propagate, as theirs behind an error in SQL: ``caplog.text`` would be JSON, for all tests that follow.
    """
    from pyspark.logger import PySparkLogger

    add = PySparkLogger.addHandler

    def add_handler(self: Any, handler: logging.Handler) -> None:
        before = handler.formatter
        add(self, handler)
        if before is not None:
            handler.setFormatter(before)

    pytest.MonkeyPatch().setattr(PySparkLogger, "addHandler", add_handler)  # until the process ends, as those loggers


@pytest.fixture(scope="package")
def nsqd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NsqdProcess]:
    process = NsqdProcess(tmp_path_factory.mktemp("nsqd"))
    yield process
    process.stop()


@pytest.fixture(scope="package")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A session on two cores; every test of a run shares it."""
    from flintmq.spark import session

    before = dict(os.environ)
    os.environ.update(environment())
    warehouse = tmp_path_factory.mktemp("warehouse")
    reserved = reserved_port()
    conf = {
        "spark.ui.enabled": "false",
        "spark.sql.warehouse.dir": str(warehouse),
        # as a server of Spark Connect, too
        "spark.plugins": "org.apache.spark.sql.connect.SparkConnectPlugin",
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": str(reserved.getsockname()[1]),
    }
    started = session("tests", "local[2]", **conf)
    started.sparkContext.setLogLevel("OFF")
    yield started
    gateway = started.sparkContext._gateway
    started.stop()
    end(gateway)
    reserved.close()
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="package")
def remote(spark: Any) -> str:
    """The address at which that session serves Spark Connect, for SPARK_REMOTE."""
    return f"sc://127.0.0.1:{spark.conf.get('spark.connect.grpc.binding.port')}"


def end(gateway: Any) -> None:
    """End the JVM of a session that was stopped, which would live as long as this process, with all its memory."""
    from pyspark import SparkContext

    SparkContext._gateway = SparkContext._jvm = None
    gateway.shutdown()
    gateway.proc.stdin.close()  # it ends with that
    gateway.proc.wait(60)


_NUMBERS = itertools.count()


@pytest.fixture
def topic() -> str:
    """A topic of its own for each test."""
    return f"topic-{os.getpid()}-{next(_NUMBERS)}"


@pytest.fixture
def source(spark: Any, nsqd: NsqdProcess, topic: str) -> Callable[..., Any]:
    """Builds a reader of ``topic``: ``source(spark.read)`` or ``source(spark.readStream, columns="body")``."""

    def build(reader: Any, **options: object) -> Any:
        given = {"nsqd": nsqd.address, "topic": topic, **options}
        return reader.format("nsq").options(**{name: str(value) for name, value in given.items() if value is not None})

    return build


@pytest.fixture
def archive(tmp_path: Path) -> Callable[..., Any]:
    """Runs a stream into Parquet with a checkpoint: ``archive(frame, availableNow=True)`` returns the query."""

    def start(frame: Any, **trigger: Any) -> Any:
        writer = frame.writeStream.format("parquet").option("checkpointLocation", str(tmp_path / "checkpoint"))
        return writer.trigger(**trigger).start(str(tmp_path / "archive"))

    return start
