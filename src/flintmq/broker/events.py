"""The life of messages, as a channel tells it to a listener.

Rules of this file: calls only. Nobody listens as a rule, and then a run of messages costs one look at an attribute; who
does listen is told of runs, not of messages, and returns at once without raising.

Source: Youzan's message tracing (the actions of a trace).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from flintmq.batch import Batch
from flintmq.broker.subscription import Subscription


class ChannelEvents(Protocol):
    """A listener to one channel; ends of ranges are exclusive."""

    def delivered(self, subscription: Subscription, batch: Batch, first: int, end: int, delivery_count: int) -> None:
        """Messages of one batch went to a consumer, each for the n-th time."""

    def delivered_spilled(self, subscription: Subscription, sequence: int, frame: bytes, delivery_count: int) -> None:
        """A spilled message, which has its frame, went to a consumer for the n-th time."""

    def finished(self, subscription: Subscription | None, first: int, end: int) -> None:
        """A consumer finished messages; None: an operator did."""

    def requeued(self, subscription: Subscription, sequence: int, delay_ns: int) -> None:
        """A consumer gave a message back."""

    def timed_out(self, subscription: Subscription, sequence: int) -> None:
        """A consumer held a message for too long."""

    def touched(self, subscription: Subscription, sequence: int) -> None:
        """A consumer asked for more time."""

    def released(self, subscription: Subscription, sequences: Iterable[int]) -> None:
        """A consumer is gone that held messages, or the channel goes on elsewhere; they are queued again."""

    def given_up(self, sequence: int, client: str) -> None:
        """A message had its last attempt, by the consumer with this address, and is with the dead letters."""

    def expired(self, first: int, end: int) -> None:
        """Messages became too old to be delivered."""
