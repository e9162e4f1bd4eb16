"""Trace ids and headers: what is stored of them, which topics have room for them, and who is sent what.

What messages look like on the disk and to consumers: :mod:`flintmq.message`; what publishers send:
:mod:`flintmq.wire.bodies`.

Rules of this file: no state, no IO; headers are checked and kept as they came; nothing is done per message that can be
done for all messages of a command.

Source: Youzan's TCP protocol, docs/headers.md.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import methodcaller
from typing import NamedTuple

import msgspec

from flintmq.broker.ext_filter import BadGlob, ExtFilter
from flintmq.broker.partition import Partition
from flintmq.broker.subscription import Layout, Subscription
from flintmq.broker.topic import Topic
from flintmq.errors import UNREADABLE_JSON, RemoteProtocolError
from flintmq.message import (
    EMPTY_HEADERS,
    FRAME_OVERHEAD_BYTES,
    HEADERS_DEPTH_MAX,
    JSON,
    LOCATION,
    NO_HEADERS,
    SIZE_FIELD_BYTES,
    TRACE_ID,
    TRACE_ID_HEADER,
    TRACE_ID_SIZE,
    with_empty_headers,
    with_hex_ids,
    with_location,
    with_location_behind_headers,
    without_headers,
)
from flintmq.net.regex import BadPattern, Pattern
from flintmq.nsqd.pending_reply import NO_TRACE
from flintmq.topic_meta import TopicMeta
from flintmq.wire.bodies import HEADED, HEADERS_SIZE, TRACE_ID_MAX, TRACED, headers_end
from flintmq.wire.frames import UINT32
from flintmq.wire.identify import ExtFilterRule, bad_filter
from flintmq.wire.server import Publish, Subscribe

_TRACE_ID_DIGITS_MAX = 20
_FILTER_STEPS_MAX = 1024  # of a pattern that headers are matched against
_decode = msgspec.json.Decoder(dict[str, object]).decode
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # 1 and -1 as signed bytes
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_WHOLE = re.compile(rb"\\\\|\\u[dD][89abAB]..\\u[dD][c-fC-F]..", re.DOTALL)  # escaped backslashes, pairs
_HALF = re.compile(rb"\\u[dD][89a-fA-F]")


class Form(NamedTuple):
    """Messages as they are stored.

    Attributes:
        traces: trace id of each message; None for those without one. Empty when nobody asked.
    """

    bodies: Sequence[bytes]
    traces: Sequence[bytes | None]


@dataclass(frozen=True, slots=True)
class _Headers:
    """The stored form of some headers.

    Attributes:
        front: what stands in front of them in what is stored.
        trace: their trace id, None without one.
        cut: where what is stored of the body begins.
    """

    front: bytes
    trace: bytes | None
    cut: int


# -- publishing --------------------------------------------------------------------------------------------------------


def check_room(event: Publish, meta: TopicMeta) -> None:
    """Refuse trace ids or headers for a topic that has no room for them.

    Raises:
        RemoteProtocolError: as said; not fatal.
    """
    if event.front is HEADED and not meta.extend_support:
        raise _no_room(event, "no headers: create it with extend=true, or upgrade it with upgradeext=true")
    if event.front is TRACED and not meta.has_raw_ids:
        raise _no_room(
            event, "no partitions, so its message ids have no room for a trace id: create it with partition_num=1"
        )


def _no_room(event: Publish, what: str) -> RemoteProtocolError:
    return RemoteProtocolError("E_EXT_NOT_SUPPORT", f"{event.command} topic {event.topic} has {what}", fatal=False)


def stored_form(event: Publish, meta: TopicMeta) -> Form:
    """Return what is stored of a publish to a topic that has room for it.

    Raises:
        RemoteProtocolError: headers are not a JSON object or beyond a limit, or their trace id is not a number; not
            fatal.
    """
    if event.front is HEADED:
        return _with_headers(event, meta)
    traces = [body[:TRACE_ID_SIZE] for body in event.bodies]
    if not meta.extend_support:
        return Form(event.bodies, traces)
    return Form([b"%b\0%b" % (body[:TRACE_ID_SIZE], body[TRACE_ID_SIZE:]) for body in event.bodies], traces)


def _with_headers(event: Publish, meta: TopicMeta) -> Form:
    bodies = event.bodies
    first = bodies[0][: headers_end(bodies[0])]
    headers = _headers(event.command, first, meta)
    if all(map(methodcaller("startswith", first), bodies)):  # often all messages have the same
        front, cut = headers.front, headers.cut
        stored = [front + body for body in bodies] if not cut else [front + body[cut:] for body in bodies]
        return Form(stored, [headers.trace] * len(bodies))
    known = {first: headers}
    stored, traces = [], []
    for body in bodies:
        its = body[: headers_end(body)]
        headers = known.get(its) or known.setdefault(its, _headers(event.command, its, meta))
        stored.append(headers.front + (body[headers.cut :] if headers.cut else body))
        traces.append(headers.trace)
    return Form(stored, traces)


def _headers(command: str, sized: bytes, meta: TopicMeta) -> _Headers:
    """Check headers with their size in front."""
    if len(sized) == HEADERS_SIZE.size:
        return _Headers((NO_TRACE if meta.has_raw_ids else b"") + bytes((NO_HEADERS,)), None, HEADERS_SIZE.size)
    trace = trace_of(command, sized[HEADERS_SIZE.size :])
    front = (trace or NO_TRACE) + bytes((JSON,)) if meta.has_raw_ids else bytes((JSON,))
    return _Headers(front, trace, 0)


def trace_of(command: str, headers: bytes) -> bytes | None:
    """The trace id in headers, as 8 bytes; None without one.

    Raises:
        RemoteProtocolError: they are not a JSON object or beyond a limit, or it is not a text of decimal digits; not
            fatal.
    """
    try:
        found = read_headers(headers)
    except BadHeaders as error:
        raise RemoteProtocolError("E_INVALID_JSON_HEADER", f"{command} headers are {error}", fatal=False) from None
    return trace_id_bytes(command, found[TRACE_ID_HEADER]) if TRACE_ID_HEADER in found else None


class BadHeaders(ValueError):
    """Headers are refused; the text says what they are.

    Args:
        is_beyond_limit: they are a JSON object perhaps, but not one that everybody could read.
    """

    def __init__(self, what: str, is_beyond_limit: bool = False) -> None:
        super().__init__(what)
        self.is_beyond_limit = is_beyond_limit


def read_headers(headers: bytes) -> dict[str, object]:
    """Read headers that somebody publishes; what this takes can be read wherever they are looked at later.

    Raises:
        BadHeaders: they are no JSON object, or beyond a limit: nested deeper than ``HEADERS_DEPTH_MAX``, a number out
            of range, or a text with half of a surrogate pair.
    """
    try:
        found = _decode(headers)
    except RecursionError:
        raise _too_deep() from None
    except UNREADABLE_JSON as error:
        if isinstance(error, msgspec.ValidationError) and "out of range" in str(error):
            what = "a number out of range: integers of at most 4300 digits, others up to 1.79e308"
            raise _beyond(what) from None
        if _HALF.search(_WHOLE.sub(b"", headers)):
            raise _beyond("half of a surrogate pair in a text") from None
        raise BadHeaders(f"not a JSON object: {error}") from None
    # each level has two brackets, so most headers are too short to be too deep
    if len(headers) > 2 * HEADERS_DEPTH_MAX and _is_too_deep(headers):
        raise _too_deep()
    return found


def _is_too_deep(headers: bytes) -> bool:
    """Whether JSON that can be read is nested deeper than is taken; without recursion, which has other limits."""
    if headers.count(b"[") + headers.count(b"{") <= HEADERS_DEPTH_MAX:
        return False
    quoted = headers.replace(rb"\\", b"").replace(rb"\"", b"").split(b'"')  # every second piece is inside of a text
    steps = b"".join(quoted[::2]).translate(_STEPS, _NO_BRACKETS)
    return max(accumulate(memoryview(steps).cast("b"))) > HEADERS_DEPTH_MAX


def _too_deep() -> BadHeaders:
    return _beyond(f"nested deeper than {HEADERS_DEPTH_MAX}")


def _beyond(what: str) -> BadHeaders:
    return BadHeaders(f"beyond a limit: {what}", is_beyond_limit=True)


def trace_id_bytes(command: str, value: object) -> bytes:
    """A trace id that is given as text.

    Raises:
        RemoteProtocolError: it is not a text of decimal digits, or beyond 64 bits; not fatal.
    """
    if isinstance(value, str) and value.isascii() and value.isdigit():
        digits = value.lstrip("0") or "0"
        if len(digits) <= _TRACE_ID_DIGITS_MAX and int(digits) <= TRACE_ID_MAX:
            return TRACE_ID.pack(int(digits))
    what = f"{command} trace id {str(value)[:40]!r} is not a text of digits, 0 to {TRACE_ID_MAX}"
    raise RemoteProtocolError("INVALID_TRACE_ID", what, fatal=False)


# -- consuming ---------------------------------------------------------------------------------------------------------


def check_support(topics: Mapping[str, Topic], event: Subscribe, knows_headers: bool) -> None:
    """Refuse a subscription to a topic with headers by who does not know them, and the other way round.

    Plain topics with headers take both: who does not know them gets the bodies alone. One that is not there yet is
    made as the first who subscribes to it knows it.

    Raises:
        RemoteProtocolError: as said; fatal.
    """
    topic = topics.get(event.topic)
    has_headers = topic is not None and topic.meta.extend_support
    if topic is not None and has_headers and not knows_headers and topic.meta.is_partitioned:
        what = "messages have headers, identify with extend_support"
        raise RemoteProtocolError("E_SUB_EXTEND_NEED", f"{event.command} topic {event.topic}: {what}")
    if knows_headers and topic is not None and not has_headers:
        what = "messages have no headers, identify without extend_support"
        raise RemoteProtocolError("E_SUB_EXTEND_FORBIDDON", f"{event.command} topic {event.topic}: {what}")


def check_filtered(topics: Mapping[str, Topic], event: Subscribe, knows_headers: bool) -> None:
    """Refuse a subscription with ``ext_filter`` to a topic without headers, where it could not be obeyed.

    Raises:
        RemoteProtocolError: as said; fatal.
    """
    topic = topics.get(event.topic)
    if not (knows_headers if topic is None else topic.meta.extend_support):
        what = "messages have no headers, identify without ext_filter"
        raise RemoteProtocolError("E_SUB_EXTEND_FORBIDDON", f"{event.command} topic {event.topic}: {what}")


def filter_of(rule: ExtFilterRule) -> ExtFilter:
    """The filter that a consumer identified with.

    Raises:
        RemoteProtocolError: its pattern is none, or costs too much.
    """
    try:
        return ExtFilter(rule, _searching)
    except (BadGlob, BadPattern) as error:
        raise bad_filter(str(error)) from None


def _searching(text: str) -> tuple[Callable[[str], bool], int]:
    pattern = Pattern(text)
    if pattern.step_count > _FILTER_STEPS_MAX:
        raise BadPattern(text, f"more than {_FILTER_STEPS_MAX} steps")
    return pattern.search, pattern.step_count


def lay_out(subscription: Subscription, partition: Partition, knows_headers: bool) -> None:
    """Have a consumer sent what it knows of the messages of a partition."""
    is_located = subscription.is_located
    subscription.layout = _with_ids(subscription, layout_of(partition.meta, is_located, knows_headers))
    if partition.meta.extend_support and partition.headers_from:
        subscription.headers_from = partition.headers_from
        subscription.older_layout = _with_ids(subscription, older_layout_of(is_located, knows_headers))


def _with_ids(subscription: Subscription, layout: Layout | None) -> Layout | None:
    """Return a layout with ids as a consumer knows them."""
    if not subscription.has_hex_ids:
        return layout
    if layout is None:
        return with_hex_ids
    return lambda frame, offset_bytes: with_hex_ids(layout(frame, offset_bytes))


def layout_of(meta: TopicMeta, is_located: bool, knows_headers: bool) -> Layout | None:
    """Return how messages are laid out for a consumer; None as they are stored.

    Args:
        is_located: whether the consumer is told where each is.
    """
    if not meta.extend_support:
        return with_location if is_located else None
    if knows_headers:
        return with_location_behind_headers if is_located else None
    return _located_without_headers if is_located else without_headers


def older_layout_of(is_located: bool, knows_headers: bool) -> Layout | None:
    """As :func:`layout_of`, of messages that were stored before their topic had headers."""
    if knows_headers:
        return _located_with_empty_headers if is_located else with_empty_headers
    return with_location if is_located else None


def go_on(subscription: Subscription, partition: Partition) -> None:
    """Let a consumer without headers go on with a plain topic that has got them: it gets the bodies alone."""
    subscription.headers_from = partition.headers_from
    subscription.older_layout = subscription.layout
    subscription.layout = _with_ids(subscription, layout_of(partition.meta, subscription.is_located, False))


def _located_with_empty_headers(frame: bytes | memoryview, offset_bytes: int = 0) -> bytes:
    location = EMPTY_HEADERS + LOCATION.pack(offset_bytes, len(frame))
    size = UINT32.pack(len(frame) - SIZE_FIELD_BYTES + len(location))
    view = memoryview(frame)
    return b"".join((size, view[SIZE_FIELD_BYTES:FRAME_OVERHEAD_BYTES], location, view[FRAME_OVERHEAD_BYTES:]))


def _located_without_headers(frame: bytes | memoryview, offset_bytes: int = 0) -> bytes:
    bare = without_headers(frame)
    size = UINT32.pack(len(bare) - SIZE_FIELD_BYTES + LOCATION.size)
    location = LOCATION.pack(offset_bytes, len(frame))
    return b"".join((size, bare[SIZE_FIELD_BYTES:FRAME_OVERHEAD_BYTES], location, bare[FRAME_OVERHEAD_BYTES:]))
