"""``flintmq pipeline init``: a project of Spark's declarative pipelines, with our source and sink in it.

The rules of this file: nothing that is there is overwritten; what is written runs as it is, and says why it is so.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from flintmq.errors import FlintError, UsageError
from flintmq.names import is_valid_name, why_invalid
from flintmq.options import Options, Switch, Text, option, read_command, version_line
from flintmq.pipeline.options import TO, WHERE
from flintmq.spark.options import SourceOptions
from flintmq.version import __version__

SPEC = "spark-pipeline.yml"
DEFAULTS = "conf/spark-defaults.conf"
STEPS = "transformations/messages.py"

_SPEC = """\
name: {name}
# Checkpoints of the streams; the tables are in the warehouse of the catalog.
storage: {storage}
libraries:
  - glob:
      include: transformations/**
configuration:
  spark.sql.session.timeZone: UTC
  # Times in the tables' files with their zone, for whatever else reads them.
  spark.sql.parquet.outputTimestampType: TIMESTAMP_MICROS
"""

_DEFAULTS = """\
# Settings of the server that spark-pipelines starts; a pipeline cannot change them.
# The tables are known to the next run by metastore_db; leave these three out where Spark has a catalog.
spark.sql.catalogImplementation hive
spark.sql.warehouse.dir {warehouse}
spark.hadoop.javax.jdo.option.ConnectionURL jdbc:derby:;databaseName={metastore};create=true
spark.python.unix.domain.socket.enabled true
"""

_WRITTEN_OTHERWISE = frozenset(' "#%*:<>?[\\]^`{|}')
"""Characters that Spark writes as %20 or the like where it has the storage of a pipeline, or takes for a pattern."""

_STEPS = '''\
"""Messages of a topic as a table, what they amount to, and some of them in another topic."""

from pyspark import pipelines as dp
from pyspark.sql import SparkSession
from pyspark.sql import functions as f

spark = SparkSession.active()


@dp.table
def messages():
    """Each message once, run after run: a streaming table goes on where it was."""
    rows = spark.readStream.format("nsq").option("nsqd", {nsqd}).option("topic", {topic}).load()
    return rows.select("partition", "offset", "timestamp", f.col("body").cast("string").alias("body"))


@dp.materialized_view
def per_minute():
    """Computed anew, from the table, in each run."""
    return spark.read.table("messages").groupBy(f.window("timestamp", "1 minute").start.alias("minute")).count()


dp.create_sink("out", "nsq", {{"nsqd": {nsqd}, "topic": {to_topic}}})


@dp.append_flow(target="out")
def publish():
    """To another topic, each row once; read from the table, so that the topic is read once."""
    return spark.readStream.table("messages").where("body <> ''").select("body")
'''


@dataclass(frozen=True, kw_only=True)
class InitOptions(Options):
    """The flags of flintmq pipeline init."""

    program: ClassVar[str] = "flintmq pipeline init"
    summary: ClassVar[str] = (
        "flintmq pipeline init --declarative DIRECTORY [flags] writes a project for spark-pipelines: a topic as a "
        "table, a view of it, and another topic."
    )

    declarative: bool = option(Switch(), False, "a project of Spark's declarative pipelines", group=WHERE)
    nsqd: str = option(Text("HOST:PORT"), "127.0.0.1:4150", "an nsqd's TCP address", group=WHERE)
    topic: str = option(Text("TOPIC"), "flights", "the topic that is read", group=WHERE)
    to_topic: str = option(Text("TOPIC"), "flights-out", "the topic that is published to", group=TO)


def init(directory: Path, options: InitOptions) -> list[Path]:
    """Write a project; return its files.

    Raises:
        UsageError: a topic has a name that none can have, or the directory one under which Spark finds another.
        OptionError: the topic cannot be read by that name, or nsqd is no address.
        FlintError: one is there already, or cannot be written.
    """
    for flag, name in (("--topic", options.topic), ("--to-topic", options.to_topic)):
        if not is_valid_name(name):
            raise UsageError(f"{flag}: {why_invalid('topic', name)}")
    SourceOptions.parse({"nsqd": options.nsqd, "topic": options.topic})
    place = directory.absolute()
    if odd := sorted({each for each in str(place) if each in _WRITTEN_OTHERWISE or not each.isprintable()}):
        raise UsageError(
            f"{place} has {', '.join(map(repr, odd))} in it, and Spark would keep the state of the pipeline beside it, "
            "in a directory named with %20 or the like: name one without"
        )
    words = {name: json.dumps(getattr(options, name)) for name in ("nsqd", "topic", "to_topic")}
    files = {
        place / SPEC: _SPEC.format(
            name=json.dumps(place.name), storage=json.dumps(f"file:{place / 'pipeline-storage'}")
        ),
        place / DEFAULTS: _DEFAULTS.format(warehouse=f"file:{place / 'warehouse'}", metastore=place / "metastore_db"),
        place / STEPS: _STEPS.format(**words),
    }
    for path in files:
        if path.exists():
            raise FlintError(f"{path} is there already, and is not overwritten; name another directory")
    try:
        for path, text in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise FlintError(f"cannot write {error.filename}: {error.strerror}") from error
    return list(files)


def run(arguments: Sequence[str]) -> int:
    """Run ``flintmq pipeline init``."""
    words = [each for each in arguments if not each.startswith("-")]
    flags = [each for each in arguments if each.startswith("-")]
    options = read_command(InitOptions, flags, InitOptions.program, version_line("flintmq", __version__))
    if options is None:
        return 0
    if len(words) != 1:
        raise UsageError("name one directory: flintmq pipeline init --declarative DIRECTORY; flags are --name=value")
    if not options.declarative:
        raise UsageError("say --declarative; a pipeline in TOML is one file, docs/pipelines.md has one to copy")
    if options.to_topic == options.topic:
        raise UsageError("that is the topic itself: give another --to-topic")
    for path in init(Path(words[0]), options):
        print(path)
    print(f"cd {shlex.quote(words[0])} && SPARK_CONF_DIR=conf spark-pipelines run")
    return 0


__all__ = ["InitOptions", "init", "run"]
