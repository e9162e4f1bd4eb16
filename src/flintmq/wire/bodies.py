"""The bodies of commands: none, a sized one, one message, several messages, or fields of fixed size.

Byte pictures (big-endian)::

    one message            [4 size][front][body]
    several messages       [4 total][4 count]{[4 size][front][body]}
    front                  nothing | [8 trace id] | [2 size][JSON]
                           size counts everything behind it

Rules of this file: what stands in front of a message is one class, :class:`Front`, with what the server checks of it
and what the client writes; ``max_msg_size`` counts what consumers see as the body, without the front. What is refused
here is what breaks the framing, and fatal; whether headers are JSON, and whether the topic has any, is the owner's to
say, because the connection goes on after it.

Source: NSQ's TCP protocol, Youzan's smart client, "Message Tracing", Youzan's TCP protocol.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from struct import Struct
from typing import Any

from flintmq.errors import LocalProtocolError
from flintmq.message import HEADERS_SIZE_MAX, TRACE_ID, TRACE_ID_SIZE
from flintmq.wire.frames import UINT32
from flintmq.wire.refusals import Refused

HEADERS_SIZE = Struct(">H")
TRACE_ID_MAX = 2**64 - 1


class Front:
    """The bytes in front of a message; here there are none.

    Attributes:
        picture: as it is documented.
        least, most: how many bytes it has, when there is nothing behind it and at most.
        size_code: the code for a size that cannot be.
        size_of: what errors call that size.
        suffix: what they say behind it.
        errors: codes that it can be refused with.
    """

    picture = ""
    least = 0
    most = 0
    size_code = "E_BAD_MESSAGE"
    size_of = "message body"
    suffix = ""
    errors: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        """Whether there is anything."""
        return self.most > 0

    def check(self, command: str, body: bytes, max_msg_size: int) -> None:
        """Look into a message that is not too small and not too big with the longest front.

        Raises:
            Refused: the front does not fit.
        """

    def check_all(self, command: str, bodies: Sequence[bytes], max_msg_size: int) -> None:
        """Look into several messages, whose sizes are checked only upwards.

        Raises:
            Refused: as :meth:`check`, or a message is too small.
        """

    def parts(self, value: Any, body: bytes) -> tuple[bytes, ...]:
        """Return a message of the client with its size and what is in front of it.

        Raises:
            LocalProtocolError: the server would refuse it.
        """
        return UINT32.pack(len(body)), body


class _TraceId(Front):
    picture = "[8 trace id]"
    least = most = TRACE_ID_SIZE
    size_code = "E_BAD_BODY"
    size_of = "body"
    suffix = " with a trace id"
    errors = ("INVALID_TRACE_ID", "E_EXT_NOT_SUPPORT")

    def check_all(self, command: str, bodies: Sequence[bytes], max_msg_size: int) -> None:
        shortest = min(map(len, bodies))
        if shortest <= TRACE_ID_SIZE:
            raise Refused("E_BAD_BODY", f"{command} invalid body size {shortest} with a trace id")

    def parts(self, value: int, body: bytes) -> tuple[bytes, ...]:
        if not 0 <= value <= TRACE_ID_MAX:
            raise LocalProtocolError("INVALID_TRACE_ID", f"trace id {value} is not within 0 and 2^64-1")
        return UINT32.pack(TRACE_ID_SIZE + len(body)), TRACE_ID.pack(value), body


class _Headers(Front):
    picture = "[2 size][JSON]"
    least = HEADERS_SIZE.size
    most = HEADERS_SIZE.size + HEADERS_SIZE_MAX
    size_code = "E_BAD_BODY"
    size_of = "body"
    suffix = " with headers"
    errors = ("E_BAD_EXT", "E_INVALID_JSON_HEADER", "INVALID_TRACE_ID", "E_EXT_NOT_SUPPORT")

    def check(self, command: str, body: bytes, max_msg_size: int) -> None:
        end = headers_end(body)
        if end > len(body):
            what = f"{command} headers of {end - HEADERS_SIZE.size} bytes in a body of {len(body)}"
            raise Refused("E_BAD_EXT", what)
        if end == len(body):
            raise Refused("E_BAD_BODY", f"{command} nothing behind headers of {end - HEADERS_SIZE.size} bytes")
        if len(body) - end > max_msg_size:
            raise Refused("E_BAD_MESSAGE", f"{command} message too big {len(body) - end} > {max_msg_size}")

    def check_all(self, command: str, bodies: Sequence[bytes], max_msg_size: int) -> None:
        for body in bodies:
            if len(body) <= HEADERS_SIZE.size:
                raise Refused("E_BAD_BODY", f"{command} invalid body size {len(body)} with headers")
            self.check(command, body, max_msg_size)

    def parts(self, value: bytes, body: bytes) -> tuple[bytes, ...]:
        if len(value) > HEADERS_SIZE_MAX:
            raise LocalProtocolError("E_BAD_EXT", f"headers of {len(value)} bytes, at most {HEADERS_SIZE_MAX}")
        size = HEADERS_SIZE.size + len(value) + len(body)
        return UINT32.pack(size), HEADERS_SIZE.pack(len(value)), value, body


PLAIN, TRACED, HEADED = Front(), _TraceId(), _Headers()


def headers_end(body: bytes) -> int:
    """Return where the message begins in a body with headers in front, which have been checked."""
    return HEADERS_SIZE.size + (body[0] << 8 | body[1])


class Kind(Enum):
    """The form of the body behind a line."""

    NONE = "none"
    SIZED = "sized"
    MESSAGE = "one message"
    MESSAGES = "several messages"
    FIXED = "fields of fixed size"


@dataclass(frozen=True, slots=True)
class Body:
    """The body of a command.

    Attributes:
        picture: of a sized or fixed body, as it is documented.
        front: what stands in front of each message.
        fields: of a fixed body.
    """

    kind: Kind = Kind.NONE
    picture: str = ""
    front: Front = PLAIN
    fields: Struct | None = None

    @property
    def form(self) -> str:
        """Its byte picture."""
        message = f"[4 size]{self.front.picture}[body]"
        match self.kind:
            case Kind.MESSAGE:
                return message
            case Kind.MESSAGES:
                return f"[4 size][4 count]{{{message}}}"
            case _:
                return self.picture

    @property
    def errors(self) -> tuple[str, ...]:
        """The codes that it can be refused with."""
        match self.kind:
            case Kind.SIZED:
                return ("E_BAD_BODY",)
            case Kind.MESSAGE:
                return tuple(dict.fromkeys(("E_BAD_MESSAGE", self.front.size_code, *self.front.errors)))
            case Kind.MESSAGES:
                return ("E_BAD_BODY", "E_BAD_MESSAGE", *self.front.errors)
            case _:
                return ()

    def write(self, command: str, bodies: Sequence[bytes], fronts: Sequence[Any] | None = None) -> list[bytes]:
        """Return one message or several, as they stand behind the line.

        Args:
            fronts: of each message; None for a command without.

        Raises:
            LocalProtocolError: the server would refuse them.
        """
        if self.kind is Kind.MESSAGE:
            (body,) = bodies
            if not body:
                raise LocalProtocolError("E_BAD_MESSAGE", f"{command} of an empty body; nsqd accepts 1 byte or more")
            return [*self.front.parts(None if fronts is None else fronts[0], body)]
        if not bodies or not all(bodies):
            what = f"{command} needs at least one body and none may be empty"
            raise LocalProtocolError("E_BAD_MESSAGE", what)
        if fronts is None:
            messages: list[bytes] = [b""] * (2 * len(bodies))
            messages[0::2] = map(UINT32.pack, map(len, bodies))
            messages[1::2] = bodies
        else:
            front = self.front
            messages = [part for value, body in zip(fronts, bodies, strict=True) for part in front.parts(value, body)]
        total = UINT32.size + sum(map(len, messages))
        return [UINT32.pack(total), UINT32.pack(len(bodies)), *messages]
