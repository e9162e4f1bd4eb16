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

from collections.abc import Sequence

from flintmq.wire.commands import COMMANDS, publish
from flintmq.wire.words import is_producer_id as is_producer_id
from flintmq.wire.words import parse_sequence as parse_sequence


def pub_once(topic: str, partition: int | None, producer_id: str, sequence: int, body: bytes) -> bytes:
    """``PUB_ONCE``; the body must not be empty."""
    row = COMMANDS["PUB_ONCE"]
    return publish(row, topic, (body,), partition, producer_id=producer_id, sequence=sequence)


def mpub_once(topic: str, partition: int | None, producer_id: str, sequence: int, bodies: Sequence[bytes]) -> bytes:
    """``MPUB_ONCE``; at least one body, none empty.

    Args:
        sequence: of the first body.
    """
    row = COMMANDS["MPUB_ONCE"]
    return publish(row, topic, bodies, partition, producer_id=producer_id, sequence=sequence)
