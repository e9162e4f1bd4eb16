"""The start of reading; from there on the channel of the query keeps what has not been read.

The rules of this file: with a channel, asking twice gives the same answer, whatever was published in between.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from flintmq.errors import OptionError
from flintmq.names import listed
from flintmq.spark.broker import PartitionLog
from flintmq.spark.errors import GONE, SOURCE, DataLost
from flintmq.spark.offsets import (
    EARLIEST_SEQUENCE,
    FIRST_SEQUENCE,
    LATEST_SEQUENCE,
    LISTED_MAX,
    GivenOffsets,
    Offsets,
    PartitionKey,
    Place,
    check_assigned,
    parse_given,
    parse_times,
)
from flintmq.spark.options import CURSOR, EARLIEST, LATEST, SourceOptions
from flintmq.spark.survey import Survey, Surveyor

log = logging.getLogger("flintmq.spark")


class StartingPoints:
    """The positions at which reading starts: the options, applied to what nsqd has."""

    def __init__(self, options: SourceOptions, surveyor: Surveyor) -> None:
        self._options = options
        self._surveyor = surveyor

    def find(self, survey: Survey) -> Offsets:
        """Return the starting position in every log of a survey that was asked for ``startingTimestamp``."""
        options = self._options
        check_assigned(options.assign, places(survey) | _places(survey.others))
        check_channel(options, survey)
        if options.starting_timestamp is not None:
            times = dict.fromkeys(survey.logs, options.starting_timestamp)
            return {key: self._at_time(key, entry, entry.at, times) for key, entry in sorted(survey.logs.items())}
        if options.starting_offsets_by_timestamp:
            option, text = "startingOffsetsByTimestamp", options.starting_offsets_by_timestamp
            times, found = at_times(option, text, survey, self._surveyor)
            return {key: self._at_time(key, entry, found.get(key), times) for key, entry in sorted(survey.logs.items())}
        given: GivenOffsets | None = None
        if options.starting_offsets not in (EARLIEST, LATEST, CURSOR):
            given = parse_given("startingOffsets", options.starting_offsets)
            given.check("startingOffsets", places(survey))
            for key, sequence in sorted(given.gone(survey.logs).items()):
                why = survey.why_missing(key) if survey.away or key in survey.unled else GONE
                lost = DataLost(key.topic, key.label, sequence, None, why)
                if options.fail_on_data_loss:
                    raise lost
                log.warning("%s", lost.forgiven())
        return {key: self._sequence(key, entry, given) for key, entry in sorted(survey.logs.items())}

    def _sequence(self, key: PartitionKey, entry: PartitionLog, given: GivenOffsets | None) -> int:
        options = self._options
        if given is None:
            wanted = {EARLIEST: EARLIEST_SEQUENCE, LATEST: LATEST_SEQUENCE}.get(options.starting_offsets)
            if wanted is None:  # cursor; a channel that is new gets the whole log, as the first channel of NSQ does
                return self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
        else:
            wanted = given.sequence(key, entry.nsqd)
        if wanted is None or wanted == EARLIEST_SEQUENCE:
            return self._at_beginning(key, entry)
        if wanted == LATEST_SEQUENCE:
            return self._surveyor.move_cursor(key, LATEST_SEQUENCE) if options.channel else entry.end
        if wanted > entry.end:
            assert given is not None
            beyond = given.beyond("startingOffsets", key, wanted, Place(entry.nsqd, entry.start, entry.end))
            if options.fail_on_data_loss:
                raise beyond
            log.warning("%s; beginning at the end", beyond)
            wanted = entry.end
        return self._held(key, max(wanted, FIRST_SEQUENCE))

    def _at_beginning(self, key: PartitionKey, entry: PartitionLog) -> int:
        if self._options.channel:
            self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
        return entry.start

    def _at_time(
        self, key: PartitionKey, entry: PartitionLog, at: int | None, times: Mapping[PartitionKey, int]
    ) -> int:
        """Return where reading starts when a time was given, which ``at`` is the first message of."""
        if key not in times:
            return self._at_beginning(key, entry)
        at = entry.end if at is None else at
        if at >= entry.end and self._options.starting_offsets_by_timestamp_strategy == "error":
            where = f"topic {key.topic!r}, {self._surveyor.label(key)}, ends at {entry.end}"
            raise OptionError(
                "startingOffsetsByTimestampStrategy",
                "error",
                f"{where} and has nothing stored at or after {times[key] // 1_000_000} ms; latest starts at its end",
                SOURCE,
            )
        return self._held(key, at)

    def _held(self, key: PartitionKey, sequence: int) -> int:
        """Make the channel keep what is read from here on."""
        if self._options.channel:
            self._surveyor.move_cursor(key, sequence)
        return sequence

    def of_newcomer(self, key: PartitionKey, entry: PartitionLog) -> int:
        """Return the starting position in a log that appeared after the query began: its beginning.

        A channel that has been there before, from a query with another checkpoint, is gone on with.
        """
        if self._options.channel:
            floor = self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
            if self._options.starting_offsets in (CURSOR, LATEST):
                return floor
        return entry.start


def check_channel(options: SourceOptions, survey: Survey) -> None:
    """See that a query with a channel reads every partition of its topics: a channel is of whole topics.

    Raises:
        OptionError: ``assign`` leaves some out, whose messages the channel would count, and keep for good.
    """
    if options.channel and (names := left_out(options, survey)):
        allowed = (
            f"assign leaves out {names}, whose messages this channel would count, and keep for good: assign these as "
            "well, or leave channel out"
        )
        raise OptionError("channel", options.channel, allowed, SOURCE)


def left_out(options: SourceOptions, survey: Survey) -> str:
    """Name the partitions of the topics of ``assign`` that are not assigned; empty when there are none."""
    found = sorted(each for each in survey.left_out if each[0] in options.named_topics) if options.assign else []
    return listed((f"partition {number} of topic {topic!r}" for topic, number in found), LISTED_MAX)


def at_times(
    option: str, text: str, survey: Survey, surveyor: Surveyor
) -> tuple[dict[PartitionKey, int], dict[PartitionKey, int]]:
    """Find the messages at times that are given for partitions one by one.

    Returns:
        The time of each log that has one, in ns, and the sequence of its first message stored at or after it (its end
        if there is none).

    Raises:
        OptionError: the JSON has another form, or names what does not exist.
        FlintError: an nsqd did not answer as often as the retries allow.
    """
    given = parse_times(option, text)
    given.check(option, places(survey))
    chosen = ((key, given.sequence(key, entry.nsqd)) for key, entry in survey.logs.items())
    times = {key: time_ms * 1_000_000 for key, time_ms in chosen if time_ms is not None}
    found: dict[PartitionKey, int] = {}
    for time_ns in sorted(set(times.values())):
        keys = [key for key, one_ns in times.items() if one_ns == time_ns]
        logs = surveyor.look(keys, time_ns, is_waiting=True).logs
        for key in keys:
            entry = logs.get(key, survey.logs[key])
            found[key] = entry.end if entry.at is None else entry.at
    return times, found


def places(survey: Survey) -> dict[PartitionKey, Place]:
    """Return where the logs of a survey are, and what there is of them."""
    return _places(survey.logs)


def _places(logs: Mapping[PartitionKey, PartitionLog]) -> dict[PartitionKey, Place]:
    return {key: Place(entry.nsqd, entry.start, entry.end) for key, entry in logs.items()}
