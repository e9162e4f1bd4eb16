"""Flags that the jobs of ``flintmq pipeline`` have in common, in parts of which each job takes those it obeys.

::

    JobOptions                how it is told how far a job is
    +- SourceFlags            the topics that are read, where nsqd is, TLS and secrets
    +- SinkFlags              the topic that is published to, and where that is
    +- SparkFlags             the session: master, settings
       +- StreamFlags         checkpoint, once or on and on

The rules of this file: a flag stands here when two jobs have it; a job takes no part of which it does not obey every
flag. Nothing heavy is imported, so that ``--help`` is quick. No flag holds a secret, only where it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from flintmq.errors import UsageError
from flintmq.options import SECOND, Choice, Duration, Items, Options, Repeated, Switch, Text, option

WHERE, SECURITY, TO, SPARK, WHEN, TOLD = (
    "Where nsqd is", "TLS and secrets", "Where it is published", "Spark", "When", "How it is told"
)  # fmt: skip


NAMING = ("topicpattern", "subscribepattern", "assign")
"""Options of format nsq, in small letters, that name topics otherwise than one by one."""
NO_END = "a job goes on where it was, and has no end: leave it out; --dry-run alone takes one"
"""Why a job that has a checkpoint takes no option that says where reading ends."""


@dataclass(slots=True)
class Work:
    """The progress of a job.

    Attributes:
        rows: messages done.
        lag: messages that are known to be there and are not done.
        batch: number of the round or micro-batch, as far as there are some.
        more: further figures by name, as the job has them.
        ui: address of Spark's page, where Spark runs it.
    """

    rows: int = 0
    lag: int = 0
    batch: int = 0
    more: dict[str, int] = field(default_factory=dict)
    ui: str = ""

    def figures(self) -> dict[str, int]:
        """Return the figures of this job besides rows, lag and batch."""
        return self.more


@dataclass(frozen=True, kw_only=True)
class JobOptions(Options):
    """Flags of every job that takes its time."""

    last_groups: ClassVar[tuple[str, ...]] = (WHERE, SECURITY, TO, SPARK, WHEN, TOLD)

    progress: str = option(
        Choice(("auto", "bar", "json", "none")), "auto", "what is told on stderr; auto: a bar on a terminal", group=TOLD
    )


@dataclass(frozen=True, kw_only=True)
class LinkFlags(Options):
    """The place of nsqd, and what secures the connections; for reading, and for a sink at the same place."""

    nsqd: tuple[str, ...] = option(Items(Text("HOST:PORT")), (), "an nsqd's TCP address", group=WHERE)
    lookupd: tuple[str, ...] = option(Items(Text("HOST:PORT")), (), "an nsqlookupd's HTTP address", group=WHERE)
    tls: bool = option(Switch(), False, "secure connections to nsqd", group=SECURITY)
    tls_ca_file: str = option(Text("FILE"), "", "authorities to trust; without it the system's", group=SECURITY)
    tls_cert: str = option(Text("FILE"), "", "certificate of this client, if one is wanted", group=SECURITY)
    tls_key: str = option(Text("FILE"), "", "its key, if that is not in the certificate's file", group=SECURITY)
    tls_server_name: str = option(Text("NAME"), "", "name expected in the certificate of nsqd", group=SECURITY)
    auth_secret: str = option(Text("WHERE"), "", "where the secret for AUTH is: env:NAME or file:/path", group=SECURITY)
    nsqlookupd_token: str = option(
        Text("WHERE"), "", "where the token for nsqlookupd is: env:NAME or file:/path", group=SECURITY
    )

    def where(self) -> dict[str, str]:
        """Return the options of format nsq that say where nsqd is.

        Raises:
            UsageError: there is none, or two.
        """
        if bool(self.nsqd) == bool(self.lookupd):
            raise UsageError("give either --nsqd or --lookupd")
        return {"nsqd": ",".join(self.nsqd)} if self.nsqd else {"lookupd": ",".join(self.lookupd)}

    def link(self) -> dict[str, str]:
        """Return the options of format nsq that secure connections, those that were given."""
        given = {
            "tls": "true" if self.tls else "",
            "tlsCaFile": self.tls_ca_file,
            "tlsCert": self.tls_cert,
            "tlsKey": self.tls_key,
            "tlsServerName": self.tls_server_name,
            "authSecret": self.auth_secret,
            "nsqlookupdToken": self.nsqlookupd_token,
        }
        return {name: value for name, value in given.items() if value}


@dataclass(frozen=True, kw_only=True)
class SourceFlags(LinkFlags):
    """The topics that a job reads."""

    topic: tuple[str, ...] = option(Items(Text("TOPIC")), (), "a topic", group=WHERE)
    channel: str = option(
        Text("CHANNEL"), "", "holds back retention, and shows in nsqd what is not done yet", group=WHERE
    )
    source_option: tuple[str, ...] = option(
        Repeated(Text("NAME=VALUE")),
        (),
        "any other option of format nsq for reading, such as startingOffsets=latest",
        group=WHERE,
    )
    wait_for_topic_ns: int = option(
        Duration(0), 0, "how long a topic may be missing", group=WHERE, default_text="0: refused at once"
    )

    def source(self, **more: str) -> dict[str, str]:
        """Return the options of format nsq for reading, ``more`` going before what was given.

        Raises:
            UsageError: there is no topic or no nsqd, or an option is not NAME=VALUE.
        """
        given = pairs("--source-option", self.source_option)
        has_topics = any(name.lower() in NAMING for name in given)
        if not self.topic and not has_topics:
            raise UsageError("give --topic")
        chosen = {**self.where(), **self.link(), **given, **more}
        if self.topic:
            chosen["topics"] = ",".join(self.topic)
        if self.channel:
            chosen["channel"] = self.channel
        return chosen

    def topics_told(self) -> str:
        """Return the topics, or what names them instead, for the checkpoint of a job that reads no others."""
        given = pairs("--source-option", self.source_option)
        named = {name.lower(): value for name, value in given.items() if name.lower() in NAMING}
        return ",".join(self.topic) or "; ".join(f"{name}={value}" for name, value in sorted(named.items()))


@dataclass(frozen=True, kw_only=True)
class TopicFlags(Options):
    """The topic that a job publishes to, at the nsqd of :class:`LinkFlags`."""

    to_topic: str = option(Text("TOPIC"), "", "the topic that is published to", group=TO)
    to_option: tuple[str, ...] = option(
        Repeated(Text("NAME=VALUE")),
        (),
        "any other option of format nsq for writing, such as oversize=drop",
        group=TO,
    )

    def publishing(self, **more: str) -> dict[str, str]:
        """Return the options of format nsq for writing that stand here, ``more`` going before what was given.

        Raises:
            UsageError: an option is not NAME=VALUE.
        """
        chosen = {**pairs("--to-option", self.to_option), **more}
        return chosen | ({"topic": self.to_topic} if self.to_topic else {})


@dataclass(frozen=True, kw_only=True)
class SinkFlags(TopicFlags):
    """The same, at another nsqd where one is named; TLS and secrets of that are options of their own."""

    to_nsqd: tuple[str, ...] = option(Items(Text("HOST:PORT")), (), "nsqd of that topic, if another", group=TO)
    to_lookupd: tuple[str, ...] = option(Items(Text("HOST:PORT")), (), "nsqlookupd of that topic, if another", group=TO)

    def sink(self, link: LinkFlags, **more: str) -> dict[str, str]:
        """Return the options of format nsq for writing, ``more`` going before what was given.

        Args:
            link: of what is read, for a topic at the same place.

        Raises:
            UsageError: two places are given, or an option is not NAME=VALUE.
        """
        if self.to_nsqd and self.to_lookupd:
            raise UsageError("give either --to-nsqd or --to-lookupd")
        if self.to_nsqd:
            chosen = {"nsqd": ",".join(self.to_nsqd)}
        elif self.to_lookupd:
            chosen = {"lookupd": ",".join(self.to_lookupd)}
        else:
            chosen = {**link.where(), **link.link()}
        return {**chosen, **self.publishing(**more)}


@dataclass(frozen=True, kw_only=True)
class SparkFlags(JobOptions):
    """The session of a job that Spark runs."""

    master: str = option(
        Text("MASTER"), "local[*]", "the cluster: local[*], local[4,3], spark://host:7077", group=SPARK
    )
    conf: tuple[str, ...] = option(
        Repeated(Text("NAME=VALUE")),
        (),
        "a setting of Spark, such as spark.driver.memory=4g",
        group=SPARK,
    )
    jvm: str = option(
        Choice(("quick", "throughput")), "quick", "quick starts sooner, throughput is for long jobs", group=SPARK
    )

    def settings(self) -> dict[str, str]:
        """Return the settings that were given.

        Raises:
            UsageError: one is not NAME=VALUE, or no setting of Spark's.
        """
        given = pairs("--conf", self.conf)
        for name in given:
            if not name.startswith("spark."):
                raise UsageError(f"--conf {name}: names of Spark settings begin with spark.")
        return given


@dataclass(frozen=True, kw_only=True)
class StreamFlags(SparkFlags):
    """A query that goes on where it was."""

    checkpoint: str = option(
        Text("DIRECTORY"), "", "where the job remembers how far it is; one for each job", group=WHEN
    )
    follow: bool = option(Switch(), False, "go on with what is published, until Ctrl-C or SIGTERM", group=WHEN)
    interval_ns: int = option(Duration(0), 5 * SECOND, "with --follow: how long a micro-batch may gather", group=WHEN)

    def trigger(self) -> dict[str, object]:
        """Return the arguments of Spark's ``trigger``.

        Raises:
            UsageError: there is no checkpoint.
        """
        if not self.checkpoint:
            raise UsageError("give --checkpoint, a directory of this job alone")
        return {"processingTime": f"{self.interval_ns // 1_000_000} milliseconds"} if self.follow else {
            "availableNow": True
        }  # fmt: skip


def pairs(flag: str, given: Sequence[str]) -> dict[str, str]:
    """Read a flag that was given as NAME=VALUE, several times.

    Raises:
        UsageError: one of them is not, or a name is there twice.
    """
    found: dict[str, str] = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not equals or not name.strip():
            raise UsageError(f"{flag} {each} is not NAME=VALUE")
        if found.setdefault(name.strip(), value) != value:
            raise UsageError(f"{flag} {name.strip()} is given twice, and differs")
    return found


def as_text(options: Mapping[str, object]) -> dict[str, str]:
    """Return options of format nsq as Spark hands them on; True is ``true``."""
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}


__all__ = [
    "NO_END",
    "JobOptions",
    "LinkFlags",
    "SinkFlags",
    "SourceFlags",
    "SparkFlags",
    "StreamFlags",
    "TopicFlags",
    "Work",
    "as_text",
    "pairs",
]
