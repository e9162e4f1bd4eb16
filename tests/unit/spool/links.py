"""A connection to nsqd that notes what it is told."""

from __future__ import annotations

from typing import Any


class FakeLink:
    """A connection that notes what it is told; messages time out after 60 s, and after 900 s whatever is done."""

    msg_timeout_s = 60.0
    max_msg_timeout_s = 900.0
    address = "nsqd:4150"

    def __init__(self) -> None:
        self.is_lost = False
        self.finished: list[bytes] = []
        self.touched: list[bytes] = []
        self.requeued: list[bytes] = []
        self.probes: list[Any] = []

    def finish_all(self, message_ids):
        self.finished += message_ids

    def touch(self, message_id, failed):
        self.touched.append(message_id)

    def probe(self, answered):
        self.probes.append(answered)

    def answer(self) -> None:
        """Answer what was asked so far."""
        while self.probes:
            self.probes.pop(0)()

    def requeue(self, message_id, delay_ms):
        self.requeued.append(message_id)

    def forget_touched(self, message_id):
        self.touched.remove(message_id)


def ids(first: int, end: int) -> list[bytes]:
    return [b"%016x" % number for number in range(first, end)]
