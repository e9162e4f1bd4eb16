"""The messages that each leader may send to one consumer, so that together they send no more than it asked for.

Rules of this file: no IO, no clock; what is granted to all of them is never more than the consumer's RDY, and what one
has sent stays granted to it until it is finished; with fewer than there are leaders they take turns.

Source: NSQ's TCP protocol (RDY), NSQ's client guide.
"""

from __future__ import annotations

from collections.abc import Sequence


def shares(rdy_count: int, in_flight: Sequence[int], turn: int) -> list[int]:
    """Return what each leader is granted.

    Args:
        rdy_count: of the consumer, for all of them.
        in_flight: messages of each that the consumer has not finished.
        turn: who comes first; the next one has the next number.
    """
    count = len(in_flight)
    if not count or rdy_count <= 0:
        return [0] * count
    order = [(turn + index) % count for index in range(count)]
    if rdy_count >= count:
        granted = [rdy_count // count] * count
        for index in order[: rdy_count % count]:
            granted[index] += 1
        return granted
    granted = [0] * count
    left = rdy_count
    for index in order:  # a leader counts what is in flight into what it may send
        if in_flight[index] and left:
            granted[index] = 1
            left -= 1
    for index in order:
        if not in_flight[index] and left > 0:
            granted[index] = 1
            left -= 1
    return granted
