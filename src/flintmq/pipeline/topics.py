"""The topics of a job, looked at before anything is begun: those that it reads, and those that it publishes to.

A topic that is nowhere is refused, or waited for: a stream of Spark's waits for one that is not there, and a job that
does is told of a wrong name by nothing but silence. So is one that a job publishes to and reads: it would read what it
has published, in the next micro-batch or the next run.

The rules of this file: a topic is the same one when it is at the same nsqd, under whatever name, or has the same log:
addresses are compared as they are given, then resolved, then the ids of the logs; who does not answer is not waited for
to compare them.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from flintmq.errors import FlintError, NsqdError, UsageError
from flintmq.names import listed
from flintmq.pipeline.runner import StoppedEarly, awaiting
from flintmq.pipeline.streams import ROWS
from flintmq.spark.broker import POOL, TOPIC_NOT_EXIST, ConnectionPool, NotByOffset
from flintmq.spark.discovery import all_nsqds, all_topics, nsqds_of_topic
from flintmq.spark.offsets import LISTED_MAX
from flintmq.spark.options import AUTO, OFFSET, SinkOptions, SourceOptions, split_address
from flintmq.spark.stopping import Stopped, Stopping
from flintmq.spark.survey import Surveyor

LOOK_EVERY_S = 0.5


@dataclass(frozen=True, slots=True)
class Target:
    """A topic that a job publishes to.

    Attributes:
        options: of format nsq for writing; without ``topic`` a message goes to the topic that has its own name.
        instead: what to do where that is a topic that is read, for the error.
        prefix: of the names of these topics.
    """

    options: Mapping[str, str]
    instead: str
    prefix: str = ""


def targets_of(sink: Mapping[str, str], bad_topic: str) -> list[Target]:
    """Return what a job publishes to that has --to-topic and --bad-topic, those that were given.

    Args:
        sink: options of format nsq for writing.
    """
    found = []
    if sink.get("topic"):
        found.append(Target(sink, "give --to-nsqd, --to-lookupd or another --to-topic"))
    if bad_topic:
        found.append(Target({**sink, "topic": bad_topic}, "give another --bad-topic"))
    return found


def await_topics(
    given: Mapping[str, str],
    wait_s: float,
    stop: threading.Event,
    *,
    checkpoint: str = "",
    known: Iterable[str] = (),
    targets: Sequence[Target] = (),
) -> None:
    """Return when every topic that is named is somewhere, and none of them is published to.

    An nsqd without offsets, named by its address, makes topics for whoever asks for them: there nothing is refused.

    Args:
        given: options of format nsq for reading.
        wait_s: seconds in which they may come.
        stop: ends the wait, and the job with it.
        checkpoint: the directory of a job; if it has run before nothing is asked, as its source tells what has become
            of topics.
        known: topics that the job has read before.
        targets: what the job publishes to.

    Raises:
        UsageError: a topic is published to as well.
        StoppedEarly: ``stop`` was set before every topic was there, or while an nsqd was waited for.
        NsqdError: a topic is nowhere; it lists those that are, where an nsqlookupd tells.
        FlintError: nobody who could know answers.
    """
    options = SourceOptions.parse(given)
    check_targets(options, targets, asks=False)
    with awaiting(stop) as stopping:
        if not checkpoint or not any((Path(checkpoint) / ROWS / "offsets").glob("[0-9]*")):
            _await(options, set(options.named_topics) - set(known), wait_s, stop, stopping)
        check_targets(options, targets, pool=stopping.pool)


def _await(options: SourceOptions, wanted: set[str], wait_s: float, stop: threading.Event, stopping: Stopping) -> None:
    left_s = wait_s
    while wanted and (missing := wanted - _there(options, wanted, stopping)):
        if left_s <= 0:
            raise _nowhere(options, min(missing), wait_s)
        if stop.wait(min(left_s, LOOK_EVERY_S)):
            raise StoppedEarly(f"while it waited for topic {min(missing)!r}, which has not come")
        left_s -= LOOK_EVERY_S


def _there(options: SourceOptions, wanted: set[str], stopping: Stopping) -> set[str]:
    if options.mode in (AUTO, OFFSET):
        try:
            survey = Surveyor(options, sleep=stopping.pause, pool=stopping.pool).look(is_waiting=True)
            return {key.topic for logs in (survey.logs, survey.others, survey.unled) for key in logs}
        except NotByOffset:
            if options.mode == OFFSET:
                raise
    if not options.lookupd:
        return wanted
    asked = options.lookupd, options.connect_timeout, options.link
    return {topic for topic in wanted if nsqds_of_topic(asked[0], topic, *asked[1:])}


def _nowhere(options: SourceOptions, topic: str, wait_s: float) -> NsqdError:
    where = ",".join(options.nsqd or options.lookupd)
    there = ""
    if options.lookupd:
        try:
            names = all_topics(options.lookupd, options.connect_timeout, options.link)
            there = f"; there is {listed(sorted(names), LISTED_MAX) or 'none'}"
        except FlintError as error:
            there = f"; those that are there are not to be had ({error})"
    waited = f" after {wait_s:g} s" if wait_s else ""
    text = f"no nsqd of {where} has topic {topic!r}{waited}{there}. --wait-for-topic waits for one that comes later"
    return NsqdError(TOPIC_NOT_EXIST, text)


def check_targets(
    options: SourceOptions, targets: Iterable[Target], *, asks: bool = True, pool: ConnectionPool = POOL
) -> None:
    """See that none of the topics that are read is published to.

    Args:
        options: what is read.
        asks: nsqds and nsqlookupds; else the addresses are compared as they are given, and no pattern is looked up.
        pool: where connections come from.

    Raises:
        UsageError: one is.
        OptionError: options for writing are wrong.
        Stopped: the pool was left.
    """
    for target in targets:
        sink = SinkOptions.parse(target.options)
        written = [sink.topic] if sink.topic else [target.prefix + topic for topic in _topics_read(options, asks)]
        for topic in written:
            if _is_read(options, topic) and _is_shared(topic, options, sink, asks=asks, pool=pool):
                raise UsageError(f"topic {topic!r} is read, and would be published to: {target.instead}")


def shared_topics(first: SourceOptions, second: SourceOptions) -> list[str]:
    """Return the topics that two sources read at the same place, as far as can be told now."""
    topics = _topics_read(first, asks=True)
    return [topic for topic in topics if _is_read(second, topic) and _is_shared(topic, first, second)]


def _topics_read(options: SourceOptions, asks: bool) -> list[str]:
    topics: Iterable[str] = options.named_topics
    if options.topic_pattern and asks:
        try:
            topics = all_topics(options.lookupd, options.connect_timeout, options.link)
        except FlintError:  # the source is going to say it
            topics = ()
    return sorted(topic for topic in topics if _is_read(options, topic))


def _is_read(options: SourceOptions, topic: str) -> bool:
    return options.reads(topic, 0) if options.topic_pattern else topic in options.named_topics


def _is_shared(
    topic: str,
    first: SourceOptions,
    second: SourceOptions | SinkOptions,
    *,
    asks: bool = True,
    pool: ConnectionPool = POOL,
) -> bool:
    """Whether the places that two options name have, or may get, the same topic of this name.

    Args:
        asks, pool: as :func:`check_targets`.
    """
    if {*first.nsqd, *first.lookupd} & {*second.nsqd, *second.lookupd}:
        return True
    if not asks:
        return False
    here, there = (_nsqds(topic, options) for options in (first, second))
    if _resolved(here) & _resolved(there):
        return True
    return bool(_logs(topic, first, here, pool) & _logs(topic, second, there, pool))


def _nsqds(topic: str, options: SourceOptions | SinkOptions) -> Sequence[str]:
    """Return the nsqds that a topic is read from, now or when they get it, or is published at."""
    if options.nsqd:
        return options.nsqd
    asked = options.lookupd, options.connect_timeout, options.link
    try:
        known = nsqds_of_topic(asked[0], topic, *asked[1:]) if isinstance(options, SinkOptions) else []
        return known or all_nsqds(*asked)
    except FlintError:  # it is asked again, and is going to be told of, when the job begins
        return ()


def _resolved(addresses: Iterable[str]) -> set[tuple[str, int]]:
    found: set[tuple[str, int]] = set()
    for address in addresses:
        host, port = split_address(address)
        try:
            found |= {(str(each[4][0]), port) for each in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        except OSError:
            found.add((host, port))
    return found


def _logs(
    topic: str, options: SourceOptions | SinkOptions, addresses: Iterable[str], pool: ConnectionPool
) -> set[tuple[int, str]]:
    """Return partition and id of the logs of a topic, as far as nsqds answer that have logs with ids."""
    found: set[tuple[int, str]] = set()
    timeout_s = options.fetch_timeout if isinstance(options, SourceOptions) else options.pub_timeout
    for address in addresses:
        try:
            with pool.lend(address, options.connect_timeout, timeout_s, options.link) as connection:
                (answer,) = connection.offsets([topic])
        except Stopped:
            raise
        except FlintError:
            continue
        found |= {(log.partition, log.log_id) for log in answer.logs}
        found |= {(log.partition, log.log_id) for log in answer.elsewhere}
    return found


__all__ = ["Target", "await_topics", "check_targets", "shared_topics", "targets_of"]
