"""Frames from server to client.

Byte picture (big-endian)::

    +--------+------------+------
    | size   | frame type | data
    +--------+------------+------
    size counts the frame type and the data (4 + len(data)); type 0 response, 1 error, 2 message

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

from functools import cache
from struct import Struct

from flintmq.limits import FETCH_BYTES_MAX
from flintmq.message import FRAME_HEADER, FRAME_TYPE_MESSAGE

RESPONSE = 0
ERROR = 1
MESSAGE = FRAME_TYPE_MESSAGE

UINT32 = Struct(">I")
INT32 = Struct(">i")


def response_frame(data: bytes) -> bytes:
    """Frame a response."""
    return FRAME_HEADER.pack(len(data) + 4, RESPONSE) + data


def error_frame(code: str, detail: str = "") -> bytes:
    """Frame an error: the code, a space, the description; a bare code has no space."""
    text = f"{code} {detail}" if detail else code
    data = text.encode("utf-8", "surrogateescape")
    return FRAME_HEADER.pack(len(data) + 4, ERROR) + data


def fetched_frame(data: bytes | memoryview, following: int) -> tuple[bytes, bytes | memoryview]:
    """Frame the answer to FETCH, the sequence to ask for next and batches; in two pieces, as to join them copies."""
    return FRAME_HEADER.pack(len(data) + 12, RESPONSE) + following.to_bytes(8, "big"), data


@cache
def keep_room_for_fetched() -> None:
    """Have the C library keep the memory of one answer to FETCH for the next.

    It returns blocks of 128 KiB and more to the kernel, which clears every page for the next answer anew: that took
    longer than reading the file. Freeing one block of this size makes it keep up to twice as much.
    """
    bytearray(FETCH_BYTES_MAX)


OK_FRAME = response_frame(b"OK")
HEARTBEAT = b"_heartbeat_"
HEARTBEAT_FRAME = response_frame(HEARTBEAT)
CLOSE_WAIT = b"CLOSE_WAIT"
CLOSE_WAIT_FRAME = response_frame(CLOSE_WAIT)
ENDS_FRAME = error_frame(
    "E_FAILED_ON_NOT_WRITABLE", "this node ends: of what is not answered before this, nothing is stored"
)
"""The last thing that a node of a cluster says to another one that publishes for its clients.

Who does not know it takes it for the answer to the first publish that has none, and that is true as well.
"""
