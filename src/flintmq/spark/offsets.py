"""Positions in partition logs, and their JSON: what Spark keeps in a checkpoint and users give as startingOffsets.

::

    {"_from":   {"flights": {"127.0.0.1:4150/0": 1}},
     "_log":    {"flights": {"127.0.0.1:4150/0": "0000018f3c5a7b21"}},
     "flights": {"127.0.0.1:4150/0": 336777}}

The rules of this file:

- ends are exclusive: the number is the sequence of the next message to read;
- keys are sorted at every level, because Spark compares offsets as text and runs a micro-batch when they differ;
- ``_log`` names the incarnation of each log: a topic that was deleted and created again counts from 1 once more, and
  without it messages would be skipped in silence;
- ``_from`` says where reading starts in the partitions that enter with the micro-batch of which this is the end. So
  what a micro-batch reads follows from its two offsets alone, however often and wherever it is repeated.

Source: design/spark.md 0 and 10.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flintmq.errors import OptionError
from flintmq.spark.errors import SOURCE

LOG_KEY = "_log"
FROM_KEY = "_from"
RESERVED_TOPICS = frozenset({LOG_KEY, FROM_KEY})
FIRST_SEQUENCE = 1  # of a new log; a user's 0 means the same
LATEST_SEQUENCE = -1
LISTED_MAX = 20  # of what there is, in an error
EARLIEST_SEQUENCE = -2


class PartitionKey(NamedTuple):
    """One partition log; ``nsqd`` is its address as configured or as nsqlookupd gives it."""

    topic: str
    nsqd: str
    partition: int

    @property
    def label(self) -> str:
        """``<nsqd>/<partition>``, the inner key of offsets JSON."""
        return f"{self.nsqd}/{self.partition}"


@dataclass(frozen=True, slots=True)
class Position:
    """The next message to read, and the identity of the log in which that number means something."""

    sequence: int
    log_id: str


Offsets = dict[PartitionKey, Position]


def to_json(offsets: Mapping[PartitionKey, Position], entering: Mapping[PartitionKey, Position] = {}) -> dict[str, Any]:
    """Return the offsets as a dictionary whose keys are sorted at every level.

    Args:
        entering: where reading starts in partitions that the offset before does not have.
    """
    result: dict[str, dict[str, Any]] = {LOG_KEY: _nested({key: position.log_id for key, position in offsets.items()})}
    result |= _nested({key: position.sequence for key, position in offsets.items()})
    if entering:
        result[FROM_KEY] = _nested({key: position.sequence for key, position in entering.items()})
    return dict(sorted(result.items()))


def _nested(values: Mapping[PartitionKey, Any]) -> dict[str, dict[str, Any]]:
    result: dict[str, dict[str, Any]] = {}
    for key in sorted(values, key=lambda key: (key.topic, key.label)):
        result.setdefault(key.topic, {})[key.label] = values[key]
    return result


def _split_label(label: str) -> tuple[str, int]:
    nsqd, slash, partition = label.rpartition("/")
    if not slash or not partition.isdecimal():
        raise ValueError(f"{label!r} is not <nsqd>/<partition>")
    return nsqd, int(partition)


def from_json(value: Mapping[str, Any]) -> Offsets:
    """Return the positions of :func:`to_json`; none for an empty dictionary.

    Raises:
        ValueError: Spark handed over something this source did not write.
    """
    return _positions({topic: labels for topic, labels in value.items() if topic not in RESERVED_TOPICS}, value)


def entries_of(value: Mapping[str, Any]) -> Offsets:
    """Return where reading starts in the partitions that enter with the micro-batch of which this is the end."""
    return _positions(value.get(FROM_KEY, {}), value)


def _positions(sequences: Mapping[str, Mapping[str, Any]], value: Mapping[str, Any]) -> Offsets:
    return {
        PartitionKey(topic, *_split_label(label)): Position(int(sequence), str(value[LOG_KEY][topic][label]))
        for topic, labels in sequences.items()
        for label, sequence in labels.items()
    }


@dataclass(frozen=True, slots=True)
class GivenOffsets:
    """Positions a user wrote: ``{"topic": {"<nsqd>/<partition>" or "<partition>": sequence, -1 or -2}}``.

    ``<partition>`` alone means that partition on every nsqd. Offsets copied from a checkpoint may be pasted as they
    are; their ``_log`` is then checked.
    """

    sequences: Mapping[str, Mapping[str, int]]
    logs: Mapping[str, Mapping[str, str]]

    def sequence(self, key: PartitionKey) -> int | None:
        """Return the number for a partition, None when the user named none."""
        labels = self.sequences.get(key.topic, {})
        return labels.get(key.label, labels.get(str(key.partition)))

    def check(self, option: str, logs: Mapping[PartitionKey, tuple[int, int]]) -> None:
        """See that everything that is named is there.

        Args:
            logs: start and end (exclusive) of every log there is.

        Raises:
            OptionError: a topic, nsqd or partition does not exist; it lists what does.
        """
        for topic, labels in self.sequences.items():
            there = {key: log for key, log in logs.items() if key.topic == topic}
            if not there:
                names = ", ".join(sorted({key.topic for key in logs})[:LISTED_MAX]) or "none"
                what = f"there is no topic {topic!r} to read from; there is {names}"
                raise OptionError(option, json.dumps(self.sequences), what, SOURCE)
            known = {key.label for key in there} | {str(key.partition) for key in there}
            for label in labels:
                if label not in known:
                    what = f"topic {topic!r} has no {label!r}; there is {_shown(there)}"
                    raise OptionError(option, json.dumps(self.sequences), what, SOURCE)

    def beyond(self, option: str, key: PartitionKey, sequence: int, start: int, end: int) -> OptionError:
        """Return the exception for a number behind the end of its log."""
        exists = _shown({key: (start, end)})
        what = f"{key.topic} {key.label} has no {sequence} yet; there is {exists}"
        return OptionError(option, json.dumps(self.sequences), what, SOURCE)

    def log_id(self, key: PartitionKey) -> str | None:
        """Return the identity of the log the number belongs to, None when the user gave none."""
        return self.logs.get(key.topic, {}).get(key.label)


def _shown(logs: Mapping[PartitionKey, tuple[int, int]]) -> str:
    """Show logs, and where they begin and end, in an error."""
    shown = [f"{key.label} ({start} to {end}, exclusive)" for key, (start, end) in sorted(logs.items())]
    more = f" and {len(shown) - LISTED_MAX} more" if len(shown) > LISTED_MAX else ""
    return ", ".join(shown[:LISTED_MAX]) + more


def parse_given(option: str, text: str) -> GivenOffsets:
    """Read the JSON of ``startingOffsets`` or ``endingOffsets``.

    Raises:
        OptionError: it has another form.
    """
    form = 'JSON such as {"topic": {"host:4150/0": 23}}, with -1 for latest and -2 for earliest'
    error = OptionError(option, text, form, SOURCE)
    value = json.loads(text)
    logs = value.pop(LOG_KEY, {})
    value.pop(FROM_KEY, None)
    if not isinstance(logs, dict):
        raise error
    for labels in value.values():
        if not isinstance(labels, dict):
            raise error
        for label, sequence in labels.items():
            if isinstance(sequence, bool) or not isinstance(sequence, int) or sequence < EARLIEST_SEQUENCE:
                raise error
            if not label.isdecimal():
                try:
                    _split_label(label)
                except ValueError:
                    raise error from None
    return GivenOffsets(value, logs)
