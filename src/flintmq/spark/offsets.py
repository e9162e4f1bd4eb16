"""Positions in partition logs, and their JSON: what Spark keeps in a checkpoint and users give as startingOffsets.

::

    {"_from":   {"flights": {"0/0000018f3c5a7b21": 1}},
     "_log":    3,
     "_times":  {"flights": {"0/0000018f3c5a7b21": 1767225600123456789}},
     "flights": {"0/0000018f3c5a7b21": 336777}}

The rules of this file:

- a log is named by its topic, its partition and its id, never by who serves it: the same data directory behind another
  address, and the next leader of a partition that has copies, go on with the same log; a topic that was deleted and
  created again has another one, whose numbers begin at 1 once more;
- ends are exclusive: the number is the sequence of the next message to read;
- keys are sorted at every level, because Spark compares offsets as text and runs a micro-batch when they differ;
- ``_log`` is the version of this form;
- ``_mode`` is ``spool`` or ``direct`` where the logs are not nsqd's own, and not there where they are;
- ``_from`` says where reading starts in the partitions that enter with the micro-batch of which this is the end. So
  what a micro-batch reads follows from its two offsets alone, however often and wherever it is repeated;
- ``_times`` has for each log a time, in nanoseconds since 1970, that nothing before its offset is later than. So in the
  log that was read nothing later stands before the offset; where it does, nsqd runs on an older copy of the log and has
  given the numbers of messages that were read to others. An nsqd that does not say how late its messages are has none.

Version 2 had no ``_times``. Version 1 named logs by the address of their nsqd, and had their ids apart. Both are
understood::

    {"_log":    {"flights": {"127.0.0.1:4150/0": "0000018f3c5a7b21"}},
     "flights": {"127.0.0.1:4150/0": 336777}}

Source: docs/decisions/0006; docs/decisions/0017.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flintmq.errors import OptionError
from flintmq.names import listed
from flintmq.spark.errors import SOURCE, BadCheckpoint

LOG_KEY = "_log"
FROM_KEY = "_from"
LAG_KEY = "_lag"  # of a progress alone
CHANNEL_KEY = "@channel"  # likewise; no topic can have that name
MODE_KEY = "_mode"
TIMES_KEY = "_times"
RESERVED_TOPICS = frozenset({LOG_KEY, FROM_KEY, LAG_KEY, MODE_KEY, TIMES_KEY})
VERSION = 3
BY_LOG_ID = (2, VERSION)
"""The versions that name logs by their ids."""
FIRST_SEQUENCE = 1  # of a new log; a user's 0 means the same
LATEST_SEQUENCE = -1
LISTED_MAX = 20  # of what there is, in an error
EARLIEST_SEQUENCE = -2

_FORM = 'JSON such as {"topic": {"host:4150/0": 23}}, with -1 for latest and -2 for earliest'
TIME_MAX_MS = 9_999_999_999_999
"""The latest time that nsqd can be asked for, in milliseconds since 1970."""
TIMES_FORM = (
    f'JSON such as {{"topic": {{"0": 1767225600000}}}}, milliseconds since 1970 up to {TIME_MAX_MS}, of at least one '
    "partition"
)
_LABEL = re.compile(r"(\d{1,9})/([0-9a-f]{16})")


class PartitionKey(NamedTuple):
    """One partition log; ``log_id`` is 16 hex digits."""

    topic: str
    partition: int
    log_id: str

    @property
    def label(self) -> str:
        """``<partition>/<log id>``, the inner key of offsets JSON."""
        return f"{self.partition}/{self.log_id}"


Offsets = dict[PartitionKey, int]
"""The next message to read, by log."""


def to_json(
    offsets: Mapping[PartitionKey, int],
    entering: Mapping[PartitionKey, int] = {},
    times: Mapping[PartitionKey, int] = {},
) -> dict[str, Any]:
    """Return the offsets as a dictionary whose keys are sorted at every level.

    Args:
        entering: where reading starts in partitions that the offset before does not have.
        times: that nothing before the offset of a log is later than, in ns.
    """
    result: dict[str, Any] = {LOG_KEY: VERSION, **_nested(offsets)}
    if entering:
        result[FROM_KEY] = _nested(entering)
    if times:
        result[TIMES_KEY] = _nested(times)
    return dict(sorted(result.items()))


def _nested(values: Mapping[PartitionKey, int]) -> dict[str, dict[str, int]]:
    result: dict[str, dict[str, int]] = {}
    for key in sorted(values, key=lambda key: (key.topic, key.label)):
        result.setdefault(key.topic, {})[key.label] = values[key]
    return result


def _split_place(label: str) -> tuple[str, int]:
    nsqd, slash, partition = label.rpartition("/")
    if not slash or ":" not in nsqd or not partition.isdecimal():
        raise ValueError(f"{label!r} is not <nsqd>/<partition>")
    return nsqd, int(partition)


def is_current(value: Mapping[str, Any]) -> bool:
    """Whether offsets have the form of today."""
    return value.get(LOG_KEY) == VERSION


def from_json(value: Mapping[str, Any]) -> Offsets:
    """Return the positions of :func:`to_json`, also of the form before; none for an empty dictionary.

    Raises:
        BadCheckpoint: they are not what this source has written.
    """
    return _positions({topic: labels for topic, labels in value.items() if topic not in RESERVED_TOPICS}, value)


def entries_of(value: Mapping[str, Any]) -> Offsets:
    """Return where reading starts in the partitions that enter with the micro-batch of which this is the end."""
    return _positions(value.get(FROM_KEY, {}), value)


def times_of(value: Mapping[str, Any]) -> Offsets:
    """Return the time of each log that nothing before its offset is later than, in ns, as far as it is known."""
    return _positions(value.get(TIMES_KEY, {}), value)


def _positions(sequences: Mapping[str, Mapping[str, Any]], value: Mapping[str, Any]) -> Offsets:
    logs = value.get(LOG_KEY)
    positions: Offsets = {}
    try:
        for topic, labels in sequences.items():
            for label, sequence in labels.items():
                if logs in BY_LOG_ID:
                    match = _LABEL.fullmatch(label)
                    if match is None:
                        raise ValueError(f"{label!r} is not <partition>/<log id>")
                    key = PartitionKey(topic, int(match[1]), match[2])
                elif isinstance(logs, dict):
                    key = PartitionKey(topic, _split_place(label)[1], str(logs[topic][label]))
                else:
                    raise ValueError(f"form {logs!r} of its offsets is not known here")
                positions[key] = max(int(sequence), positions.get(key, 0))  # one nsqd may have had two addresses
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadCheckpoint(str(error), VERSION) from error
    return positions


class Place(NamedTuple):
    """The nsqd that has a log now, and what there is of it: ``start`` to ``end`` (exclusive)."""

    nsqd: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GivenOffsets:
    """Positions a user wrote: ``{"topic": {label: sequence, -1 or -2}}``.

    A label is ``<nsqd>/<partition>``, ``<partition>`` alone (that partition of every log there is), or the
    ``<partition>/<log id>`` of a checkpoint, whose offsets may be pasted as they are. Those that were pasted from a
    checkpoint of the form before name their logs by ``logs``.
    """

    sequences: Mapping[str, Mapping[str, int]]
    logs: Mapping[str, Mapping[str, str]]

    def sequence(self, key: PartitionKey, nsqd: str) -> int | None:
        """Return the number for a log that an nsqd has, None when the user named none."""
        labels = self.sequences.get(key.topic, {})
        placed = _placed(key, nsqd)
        names = [*self._old_labels(key), key.label]
        if placed not in self.logs.get(key.topic, {}):  # else it names a log of another id
            names.append(placed)
        return next((labels[name] for name in (*names, str(key.partition)) if name in labels), None)

    def _old_labels(self, key: PartitionKey) -> Iterable[str]:
        logs = self.logs.get(key.topic, {})
        return (label for label, log_id in logs.items() if (_split_place(label)[1], log_id) == key[1:])

    def check(self, option: str, logs: Mapping[PartitionKey, Place]) -> None:
        """See that everything that is named is there.

        Args:
            logs: every log there is.

        Raises:
            OptionError: a topic, nsqd, partition or log does not exist; it lists what does.
        """
        for topic, labels in self.sequences.items():
            there = {key: log for key, log in logs.items() if key.topic == topic}
            if not there:
                names = ", ".join(sorted({key.topic for key in logs})[:LISTED_MAX]) or "none"
                what = f"there is no topic {topic!r} to read from; there is {names}"
                raise OptionError(option, json.dumps(self.sequences), what, SOURCE)
            known = {str(key.partition) for key in there} | {key.label for key in there}
            known |= {_placed(key, log.nsqd) for key, log in there.items()} | set(self.logs.get(topic, ()))
            for label in labels:
                # one that names a log by its id may be gone: whether that is an error failOnDataLoss says
                if label not in known and not _LABEL.fullmatch(label):
                    what = f"topic {topic!r} has no {label!r}; there is {_shown(there)}"
                    raise OptionError(option, json.dumps(self.sequences), what, SOURCE)

    def gone(self, logs: Iterable[PartitionKey]) -> Offsets:
        """Return the positions that were given in logs that are not there, named by their ids."""
        there = set(logs)
        named: Offsets = {}
        for topic, labels in self.sequences.items():
            for label, sequence in labels.items():
                if match := _LABEL.fullmatch(label):
                    named[PartitionKey(topic, int(match[1]), match[2])] = sequence
                elif log_id := self.logs.get(topic, {}).get(label):
                    named[PartitionKey(topic, _split_place(label)[1], log_id)] = sequence
        return {key: sequence for key, sequence in named.items() if key not in there and sequence >= 0}

    def beyond(self, option: str, key: PartitionKey, sequence: int, place: Place) -> OptionError:
        """Return the exception for a number behind the end of its log."""
        exists = _shown({key: place})
        what = f"{key.topic} {_placed(key, place.nsqd)} has no {sequence} yet; there is {exists}"
        return OptionError(option, json.dumps(self.sequences), what, SOURCE)


def check_assigned(assigned: Iterable[tuple[str, int]], logs: Mapping[PartitionKey, Place]) -> None:
    """See that the partitions of ``assign`` are there, of topics that are.

    Args:
        logs: every log there is of these topics.

    Raises:
        OptionError: one is not; it lists those that are.
    """
    for topic, partition in assigned:
        there = {key: log for key, log in logs.items() if key.topic == topic}
        if there and not any(key.partition == partition for key in there):
            what = f"topic {topic!r} has no partition {partition}; there is {_shown(there)}"
            raise OptionError("assign", json.dumps({topic: [partition]}), what, SOURCE)


def _placed(key: PartitionKey, nsqd: str) -> str:
    return f"{nsqd}/{key.partition}"


def _shown(logs: Mapping[PartitionKey, Place]) -> str:
    """Show logs, and where they begin and end, in an error."""
    rows = sorted((_placed(key, log.nsqd), log.start, log.end) for key, log in logs.items())
    return listed((f"{label} ({start} to {end}, exclusive)" for label, start, end in rows), LISTED_MAX)


def parse_times(option: str, text: str) -> GivenOffsets:
    """Read the JSON of ``startingOffsetsByTimestamp`` or ``endingOffsetsByTimestamp``: as offsets, in milliseconds.

    Raises:
        OptionError: it has another form.
    """
    return parse_given(option, text, 0, TIME_MAX_MS, TIMES_FORM)


def parse_given(
    option: str, text: str, least: int = EARLIEST_SEQUENCE, most: int = (1 << 63) - 1, form: str = _FORM
) -> GivenOffsets:
    """Read the JSON of ``startingOffsets`` or ``endingOffsets``.

    Args:
        least, most: the lowest and the highest number that is allowed.
        form: that is expected, for errors.

    Raises:
        OptionError: it has another form.
    """
    error = OptionError(option, text, form, SOURCE)
    value = json.loads(text)
    logs = value.pop(LOG_KEY, {})
    value.pop(FROM_KEY, None)
    value.pop(LAG_KEY, None)
    value.pop(CHANNEL_KEY, None)
    value.pop(MODE_KEY, None)
    value.pop(TIMES_KEY, None)
    if logs in BY_LOG_ID:
        logs = {}
    if not isinstance(logs, dict) or not all(isinstance(labels, dict) for labels in (*logs.values(), *value.values())):
        raise error
    try:
        for labels in value.values():
            for label, sequence in labels.items():
                if isinstance(sequence, bool) or not isinstance(sequence, int) or not least <= sequence <= most:
                    raise error
                if not label.isdecimal() and not _LABEL.fullmatch(label):
                    _split_place(label)
        for labels in logs.values():
            for label, log_id in labels.items():
                _split_place(label)
                if not isinstance(log_id, str):
                    raise error
    except ValueError:
        raise error from None
    return GivenOffsets(value, logs)
