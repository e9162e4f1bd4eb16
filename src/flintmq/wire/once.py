"""Publishing once: commands of a producer that counts its messages, so that what it sends again is not stored again.

Byte pictures (big-endian)::

    PUB_ONCE <topic> <partition|-> <producer_id> <sequence>\\n[4 size][body]
    MPUB_ONCE <topic> <partition|-> <producer_id> <first_sequence>\\n[4 total][4 count]{[4 size][body]}

``-`` stands for the only partition of a topic. A sequence is 1 to 2^63-1 and counts the messages of one producer to one
partition.

Serialisers check what the protocol would refuse and raise :class:`LocalProtocolError`.

Source: docs/idempotent.md, design/reliability.md R13.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from flintmq.errors import LocalProtocolError
from flintmq.limits import PRODUCER_ID_SIZE_MAX, PRODUCER_SEQUENCE_MAX
from flintmq.wire.commands import several, target
from flintmq.wire.frames import UINT32

NO_PARTITION = b"-"
_PRODUCER_ID = re.compile(rb"[A-Za-z0-9._:-]{1,%d}" % PRODUCER_ID_SIZE_MAX)
_SEQUENCE_DIGITS_MAX = 19


@lru_cache(maxsize=4096)
def is_producer_id(producer_id: bytes) -> bool:
    """Whether a producer may have this id: 1 to 64 of ``[A-Za-z0-9._:-]``."""
    return _PRODUCER_ID.fullmatch(producer_id) is not None


def parse_sequence(text: bytes, count: int = 1) -> int | None:
    """Read the sequence of the first of ``count`` messages; None when one of them cannot be one."""
    if not (text.isdigit() and len(text) <= _SEQUENCE_DIGITS_MAX):
        return None
    sequence = int(text)
    return sequence if 0 < sequence <= PRODUCER_SEQUENCE_MAX - count + 1 else None


def pub_once(topic: str, partition: int | None, producer_id: str, sequence: int, body: bytes) -> bytes:
    """``PUB_ONCE``; the body must not be empty."""
    if not body:
        raise LocalProtocolError("E_BAD_MESSAGE", "PUB_ONCE of an empty body; nsqd accepts 1 byte or more")
    line = _line(b"PUB_ONCE", topic, partition, producer_id, sequence, 1)
    return b"".join((line, b"\n", UINT32.pack(len(body)), body))


def mpub_once(topic: str, partition: int | None, producer_id: str, sequence: int, bodies: Sequence[bytes]) -> bytes:
    """``MPUB_ONCE``; at least one body, none empty.

    Args:
        sequence: of the first body.
    """
    return several(_line(b"MPUB_ONCE", topic, partition, producer_id, sequence, len(bodies)), bodies)


def _line(command: bytes, topic: str, partition: int | None, producer_id: str, sequence: int, count: int) -> bytes:
    raw_id = producer_id.encode()
    if not is_producer_id(raw_id):
        what = f"1 to {PRODUCER_ID_SIZE_MAX} of [A-Za-z0-9._:-]"
        raise LocalProtocolError("E_INVALID", f"producer id {producer_id!r} is not valid: {what}")
    if not 0 < sequence <= PRODUCER_SEQUENCE_MAX - count + 1:
        raise LocalProtocolError("E_INVALID", f"sequence {sequence} of {count} messages is not within 1 and 2^63-1")
    where = target(topic, partition) if partition is not None else target(topic) + b" " + NO_PARTITION
    return b"%s %s %s %d" % (command, where, raw_id, sequence)
