"""The table of error codes: who sends them, whether the connection closes, what a client does.

The server raises from a row, the client maps through it; the reference page and the conformance cases are generated
from it. Source: NSQ's TCP protocol, Youzan's TCP protocol, Youzan's smart client (retry table).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Origin = Literal["nsq", "youzan", "flintmq"]
Action = Literal["give_up", "retry", "refresh_then_retry", "ignore"]


@dataclass(frozen=True, slots=True)
class Code:
    """One error code.

    Attributes:
        fatal: the server closes the connection after the error frame.
        action: what a publisher or consumer does about it.
        unknown_outcome: a publish answered so may have been stored.
    """

    name: str
    fatal: bool
    action: Action
    origin: Origin
    about: str
    unknown_outcome: bool = False


_ROWS = (
    Code("E_INVALID", True, "refresh_then_retry", "nsq", "unknown command, wrong state or bad parameters"),
    Code("E_BAD_PROTOCOL", True, "give_up", "nsq", "the first four bytes were not a protocol this server speaks"),
    Code("E_BAD_BODY", True, "give_up", "nsq", "a body size or a body is not acceptable"),
    Code("E_BAD_TOPIC", True, "give_up", "nsq", "the topic name is not valid"),
    Code("E_BAD_CHANNEL", True, "give_up", "nsq", "the channel name is not valid"),
    Code("E_BAD_MESSAGE", True, "give_up", "nsq", "a message is empty, too big or cut short"),
    Code("E_PUB_FAILED", True, "refresh_then_retry", "nsq", "PUB could not be stored", True),
    Code("E_MPUB_FAILED", True, "refresh_then_retry", "nsq", "MPUB could not be stored", True),
    Code("E_DPUB_FAILED", True, "refresh_then_retry", "nsq", "DPUB could not be stored", True),
    Code("E_MDPUB_FAILED", True, "refresh_then_retry", "flintmq", "MDPUB could not be stored", True),
    Code("E_PUB_ONCE_FAILED", False, "retry", "flintmq", "PUB_ONCE could not be stored: send it again", True),
    Code("E_MPUB_ONCE_FAILED", False, "retry", "flintmq", "MPUB_ONCE could not be stored: send it again", True),
    Code("E_SEQUENCE_GAP", False, "give_up", "flintmq", "a producer left out a sequence; nothing is stored"),
    Code("E_SUB_FAILED", True, "retry", "nsq", "the subscription is refused"),
    Code("E_FIN_FAILED", False, "ignore", "nsq", "the message is not in flight on this connection"),
    Code("E_REQ_FAILED", False, "ignore", "nsq", "the message is not in flight on this connection"),
    Code("E_TOUCH_FAILED", False, "ignore", "nsq", "the message is not in flight on this connection"),
    Code("E_IDENTIFY_FAILED", True, "give_up", "nsq", "the features asked for cannot be had together, or TLS failed"),
    Code("E_AUTH_FAILED", True, "give_up", "nsq", "the auth server refused or is away; after the handshake: retry"),
    Code("E_AUTH_ERROR", True, "give_up", "nsq", "an internal error while authorising; after the handshake: retry"),
    Code("E_AUTH_DISABLED", True, "give_up", "nsq", "AUTH sent to a server without auth"),
    Code("E_AUTH_FIRST", True, "give_up", "nsq", "the server requires AUTH before this command"),
    Code("E_UNAUTHORIZED", True, "give_up", "nsq", "not allowed on this topic or channel"),
    Code("E_BAD_PARTITION", True, "give_up", "youzan", "the partition is missing or not a number"),
    Code("E_BAD_EXT", True, "give_up", "youzan", "the headers of a message are malformed or too long"),
    Code("E_FAILED_ON_NOT_LEADER", False, "refresh_then_retry", "youzan", "another node leads the partition"),
    Code("E_FAILED_ON_NOT_WRITABLE", False, "refresh_then_retry", "youzan", "the partition takes no messages now"),
    Code("E_PUB_TOO_MUCH_WAITING", True, "retry", "youzan", "too many bytes wait to be stored or to be complete"),
    Code("E_SUB_ORDER_IS_MUST", True, "give_up", "youzan", "the topic can only be consumed in order"),
    Code("E_SUB_EXTEND_NEED", True, "give_up", "youzan", "the topic has headers, which the client does not support"),
    Code("E_SUB_EXTEND_FORBIDDON", True, "give_up", "youzan", "the topic has no headers and the client wants them"),
    Code("E_SUB_CHANNEL_NOT_REGISTERED", True, "give_up", "youzan", "the channel must be created beforehand"),
    Code("E_EXT_NOT_SUPPORT", False, "give_up", "youzan", "headers or a trace id for a topic without room"),
    Code("E_INVALID_JSON_HEADER", False, "give_up", "youzan", "the headers are not a JSON object, or beyond a limit"),
    Code("INVALID_TRACE_ID", False, "give_up", "youzan", "the trace id is not a number of 64 bits"),
    Code("E_TOPIC_NOT_EXIST", False, "refresh_then_retry", "youzan", "topic or partition is not here; PUB, SUB close"),
    Code("E_CREATE_TOPIC_FAILED", False, "give_up", "youzan", "INTERNAL_CREATE_TOPIC is not obeyed; the text says why"),
    Code("E_OFFSET_OUT_OF_RANGE", False, "give_up", "flintmq", "FETCH asked for messages that are not stored"),
    Code("E_FETCH_FAILED", False, "retry", "flintmq", "the log could not be read now"),
    Code("E_STALE_EPOCH", False, "refresh_then_retry", "flintmq", "FETCH names an epoch that is not the log's"),
)

MOVED_CODES = ("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE", "E_TOPIC_NOT_EXIST")
"""Answers of an nsqd that is not, or not now, the one to ask about a partition."""

LED_ELSEWHERE_CODES = ("E_FAILED_ON_NOT_LEADER", "E_FAILED_ON_NOT_WRITABLE")
"""The answers of a node of a cluster, also where no partition is named, until somebody else leads."""

CODES = {row.name: row for row in _ROWS}
assert len(CODES) == len(_ROWS), "duplicate error code"
assert CODES.keys() >= {*MOVED_CODES, *LED_ELSEWHERE_CODES}


def is_fatal(code: str) -> bool:
    """Whether a server closes after this code; unknown codes count as fatal."""
    row = CODES.get(code)
    return row is None or row.fatal
