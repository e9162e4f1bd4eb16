"""The start of reading; from there on the channel of the query keeps what has not been read.

The rules of this file: with a channel, asking twice gives the same answer, whatever was published in between.
"""

from __future__ import annotations

import logging

from flintmq.spark.broker import PartitionLog
from flintmq.spark.errors import GONE, DataLost
from flintmq.spark.offsets import (
    EARLIEST_SEQUENCE,
    FIRST_SEQUENCE,
    LATEST_SEQUENCE,
    GivenOffsets,
    Offsets,
    PartitionKey,
    Place,
    parse_given,
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
        given: GivenOffsets | None = None
        if options.starting_timestamp is None and options.starting_offsets not in (EARLIEST, LATEST, CURSOR):
            given = parse_given("startingOffsets", options.starting_offsets)
            given.check("startingOffsets", places(survey))
            for key, sequence in sorted(given.gone(survey.logs).items()):
                why = survey.why_missing(key) if survey.away or key in survey.unled else GONE
                lost = DataLost(key.topic, key.label, sequence, None, why)
                if options.fail_on_data_loss:
                    raise lost
                log.warning("%s", lost)
        return {key: self._sequence(key, entry, given) for key, entry in sorted(survey.logs.items())}

    def _sequence(self, key: PartitionKey, entry: PartitionLog, given: GivenOffsets | None) -> int:
        options = self._options
        if options.starting_timestamp is not None:
            return self._held(key, entry.end if entry.at is None else entry.at)
        if given is None:
            wanted = {EARLIEST: EARLIEST_SEQUENCE, LATEST: LATEST_SEQUENCE}.get(options.starting_offsets)
            if wanted is None:  # cursor; a channel that is new gets the whole log, as the first channel of NSQ does
                return self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
        else:
            wanted = given.sequence(key, entry.nsqd)
        if wanted is None or wanted == EARLIEST_SEQUENCE:
            if options.channel:
                self._surveyor.move_cursor(key, EARLIEST_SEQUENCE)
            return entry.start
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


def places(survey: Survey) -> dict[PartitionKey, Place]:
    """Return where the logs of a survey are, and what there is of them."""
    return {key: Place(entry.nsqd, entry.start, entry.end) for key, entry in survey.logs.items()}
