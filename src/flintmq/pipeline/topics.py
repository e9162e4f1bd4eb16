"""The topics that a job is told to read: one that is nowhere is refused, or waited for, before anything is begun.

A stream of Spark's waits for a topic that is not there. A job that does is told of a wrong name by nothing but silence.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from pathlib import Path

from flintmq.errors import FlintError, NsqdError
from flintmq.pipeline.streams import ROWS
from flintmq.spark.broker import TOPIC_NOT_EXIST, NotByOffset
from flintmq.spark.discovery import all_topics, nsqds_of_topic
from flintmq.spark.offsets import LISTED_MAX
from flintmq.spark.options import AUTO, OFFSET, SourceOptions
from flintmq.spark.survey import Surveyor

LOOK_EVERY_S = 0.5


def await_topics(
    given: Mapping[str, str],
    wait_s: float,
    stop: threading.Event,
    *,
    checkpoint: str = "",
    known: Iterable[str] = (),
) -> None:
    """Return when every topic that is named is somewhere.

    An nsqd without offsets, named by its address, makes topics for whoever asks for them: there nothing is refused.

    Args:
        given: options of format nsq for reading.
        wait_s: seconds in which they may come.
        stop: ends the wait, and the job that looks at it next.
        checkpoint: the directory of a job; if it has run before nothing is asked, as its source tells what has become
            of topics.
        known: topics that the job has read before.

    Raises:
        NsqdError: a topic is nowhere; it lists those that are, where an nsqlookupd tells.
        FlintError: nobody who could know answers.
    """
    if checkpoint and any((Path(checkpoint) / ROWS / "offsets").glob("[0-9]*")):
        return
    options = SourceOptions.parse(given)
    wanted = set(options.named_topics) - set(known)
    left_s = wait_s
    while wanted and (missing := wanted - _there(options, wanted)):
        if left_s <= 0:
            raise _nowhere(options, min(missing), wait_s)
        if stop.wait(min(left_s, LOOK_EVERY_S)):
            return
        left_s -= LOOK_EVERY_S


def _there(options: SourceOptions, wanted: set[str]) -> set[str]:
    if options.mode in (AUTO, OFFSET):
        try:
            survey = Surveyor(options).look(is_waiting=True)
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
            more = f" and {len(names) - LISTED_MAX} more" if len(names) > LISTED_MAX else ""
            there = f"; there is {', '.join(sorted(names)[:LISTED_MAX]) or 'none'}{more}"
        except FlintError as error:
            there = f"; those that are there are not to be had ({error})"
    waited = f" after {wait_s:g} s" if wait_s else ""
    text = f"no nsqd of {where} has topic {topic!r}{waited}{there}. --wait-for-topic waits for one that comes later"
    return NsqdError(TOPIC_NOT_EXIST, text)


__all__ = ["await_topics"]
