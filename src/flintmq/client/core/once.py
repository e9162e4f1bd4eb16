"""Publishing so that a retry is not stored twice: the identities that a producer publishes with, and their sequences.

A producer has several *writers* for each log: of a partition that a cluster keeps, or of a topic or partition on one
nsqd. A writer is an id and the sequence of
its next message; nsqd remembers for each id how far it is. One publish at a time goes out with a writer, so no sequence
is ever left out, and publishes do not wait for each other as long as there is another writer.

::

    taken --- OK ------------------------> given back, behind the publish
          --- nothing was stored --------> given back, where it was
          --- nobody knows --------------> sent again with the same writer, to whoever has the log
                  --- the deadline ------> never used again: how far nsqd is with it is not known

Rules of this file: no clock, no IO; an id is used by one run of one process alone, because its sequences begin with 1.

Source: docs/idempotent.md.
"""

from __future__ import annotations

import os
from typing import NamedTuple, cast
from weakref import WeakSet

from flintmq.client.options import SOURCE
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.limits import PRODUCER_ID_SIZE_MAX
from flintmq.wire.params import is_producer_id

WRITERS_MAX = 4
"""Of one producer for one log: nsqd remembers a thousand for each partition."""

POOL_SIZE_MAX = 64
"""Connections of one blocking producer to one nsqd, each with a writer of its own; for the same reason."""

SPOT_COUNT_MAX = 10_000
"""Keys for which writers are kept; those used longest ago are forgotten."""

NOT_TRACED = "without idempotent, which says of a message whether it is traced: give trace_id with those that are"
_NUMBER_SIZE = 8
_RUN_SIZE = 16 + 6 + 8  # digits of the time, the process and chance
NAME_SIZE_MAX = PRODUCER_ID_SIZE_MAX - 1 - _RUN_SIZE - 1 - _NUMBER_SIZE
GAP_CODE = "E_SEQUENCE_GAP"


class Home(NamedTuple):
    """The log that a publish is stored in, as far as a client can tell.

    Attributes:
        address: of its nsqd; empty where the log is known.
        log_id: of a partition that several nsqd keep together: it stays, whoever leads.
    """

    address: str
    log_id: str
    topic: str
    partition: int | None


class WriterKey(NamedTuple):
    """A log, for which sequences are counted.

    Attributes:
        is_lane: publishes that keep their order have writers of their own, so that they wait for no others.
    """

    home: Home
    is_lane: bool = False


class Writer:
    """An identity to publish with.

    Attributes:
        producer_id: nsqd knows it by this.
        sequence: of its next message.
    """

    __slots__ = ("producer_id", "sequence", "key", "__weakref__")

    def __init__(self, key: WriterKey, producer_id: str) -> None:
        self.key = key
        self.producer_id = producer_id
        self.sequence = 1


class Writers:
    """The writers of one producer.

    Args:
        name: what ids begin with, for people who look at them; what nobody else has follows, and a number.
        env: time and chance. Chance alone would not do: children of one process may have inherited the same.
        count_max: for one key.

    Raises:
        OptionError: no id can begin like this.
    """

    __slots__ = ("_count_max", "_free", "_prefix", "_taken", "_total")

    def __init__(self, name: str, env: Env, count_max: int = WRITERS_MAX) -> None:
        is_text = isinstance(cast(object, name), str)
        if not is_text or len(name) > NAME_SIZE_MAX or (name and not is_producer_id(name.encode())):
            raise OptionError("producer_id", name, f"text, at most {NAME_SIZE_MAX} of [A-Za-z0-9._:-]", SOURCE)
        run = f"{env.clock.wall_ns() % 2**64:016x}{os.getpid() % 2**24:06x}{env.random.getrandbits(32):08x}"
        self._prefix = f"{name or 'p'}-{run}"
        self._count_max = count_max
        self._total = 0
        self._free: dict[WriterKey, list[Writer]] = {}  # the key used last comes last
        # Weakly: a blocking call that Ctrl-C ends at the wrong instruction never gives its writer back.
        self._taken: dict[WriterKey, WeakSet[Writer]] = {}

    def take(self, key: WriterKey) -> Writer | None:
        """A writer to publish with; None when all there may be are in use."""
        free = self._free.get(key)
        if free:
            writer = free.pop()
        elif len(self._taken.get(key, ())) >= self._count_max:
            return None
        else:
            self._total += 1
            writer = Writer(key, f"{self._prefix}.{self._total % 10**_NUMBER_SIZE}")
        taken = self._taken.get(key)
        if taken is None:
            taken = self._taken[key] = WeakSet()
        taken.add(writer)
        return writer

    def has_free(self, key: WriterKey) -> bool:
        """Whether :meth:`take` has one."""
        return bool(self._free.get(key)) or len(self._taken.get(key, ())) < self._count_max

    def release(self, writer: Writer, stored_count: int, is_in_doubt: bool) -> None:
        """Give a writer back.

        Args:
            stored_count: messages that were stored with it.
            is_in_doubt: nobody knows how many: it is never used again.
        """
        key = writer.key
        taken = self._taken[key]
        taken.remove(writer)
        if not taken:
            del self._taken[key]
        if is_in_doubt:
            return
        writer.sequence += stored_count
        free = self._free.pop(key, [])
        free.append(writer)
        self._free[key] = free
        while len(self._free) > SPOT_COUNT_MAX:
            del self._free[next(iter(self._free))]


def check_not_delayed(delay: object, **asked: object) -> None:
    """Raise OptionError if messages with a delay are to have what nsqd cannot keep together with one."""
    if delay is None:
        return
    for option, value in asked.items():
        if value is not None:
            raise OptionError("delay", delay, f"without {option}: nsqd has no delayed publish with it", SOURCE)


def new_writers(name: str | None, env: Env, pool_size: int) -> Writers | None:
    """The writers of a blocking producer, one for each connection; None for no name.

    Raises:
        OptionError: there would be too many.
    """
    if name is None:
        return None
    if pool_size > POOL_SIZE_MAX:
        raise OptionError("pool_size", pool_size, f"at most {POOL_SIZE_MAX} when idempotent", SOURCE)
    return Writers(name, env, 2 * pool_size)
