"""Consuming in order: what came is compared with what came before, and what blocks a partition is told.

Rules of this file:

- Within a partition, internal ids and offsets only grow. The last message may come again; anything else is a violation:
  logged, counted and told to ``on_error``. The message is handed out all the same, because only the application knows
  what to do, and what follows is compared with it: a channel that was set back is told once.
- What was seen stays while connections and leaders change: that is when order gets lost.
- A message that comes again and again blocks its partition. It is logged with its first attempt above the threshold and
  then with every tenth; it is never finished or skipped here.

Source: Youzan's smart client, "Consumption in ordered message scenario", Youzan's TCP protocol "Ordered delivery".
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from flintmq.errors import FlintError
from flintmq.wire.client import Record
from flintmq.wire.extended import Extension, split_id

log = logging.getLogger("flintmq.client")

LOG_EVERY = 10


class OrderViolation(FlintError):
    """A message came out of order.

    Args:
        where: topic and partition.
        nsqd: ``host:port`` it came from.
        found: internal id and offset of the message.
        before: those of the message before it.
    """

    def __init__(self, where: str, nsqd: str, found: tuple[int, int], before: tuple[int, int]) -> None:
        super().__init__(where, nsqd, found, before)
        self.where = where
        self.nsqd = nsqd
        self.found = found
        self.before = before

    def __str__(self) -> str:
        return (
            f"{self.where}: message with id {self.found[0]} at offset {self.found[1]} came from {self.nsqd} after "
            f"id {self.before[0]} at offset {self.before[1]}"
        )


class Order:
    """The partitions of a topic, and what was seen of each.

    Args:
        topic: for messages.
        warn_attempts, error_attempts: more attempts are logged as a warning, as an error.

    Attributes:
        blocked: partition to the attempts of the message that blocks it.
    """

    def __init__(self, topic: str, warn_attempts: int, error_attempts: int) -> None:
        self.blocked: dict[int, int] = {}
        self._topic = topic
        self._warn_attempts = warn_attempts
        self._error_attempts = error_attempts
        self._seen: dict[int, tuple[int, int]] = {}

    def check(
        self, nsqd: str, partition: int, records: list[Record], extensions: dict[bytes, Extension]
    ) -> Iterator[OrderViolation]:
        """Take what came of a partition; yields what is wrong with it."""
        for _, attempts, message_id, _ in records:
            found = split_id(message_id)[0], extensions[message_id].offset
            before = self._seen.get(partition)
            self._seen[partition] = found
            if before is not None and found != before and not (found[0] > before[0] and found[1] > before[1]):
                yield OrderViolation(f"{self._topic} partition {partition}", nsqd, found, before)
            self._note_attempts(nsqd, partition, found[0], attempts)

    def _note_attempts(self, nsqd: str, partition: int, internal_id: int, attempts: int) -> None:
        if attempts <= self._warn_attempts:
            self.blocked.pop(partition, None)
            return
        self.blocked[partition] = attempts
        if attempts % LOG_EVERY and attempts not in (self._warn_attempts + 1, self._error_attempts + 1):
            return
        log.log(
            logging.ERROR if attempts > self._error_attempts else logging.WARNING,
            "%s partition %d is blocked: message %d came from %s for the %d. time",
            self._topic, partition, internal_id, nsqd, attempts,
        )  # fmt: skip
