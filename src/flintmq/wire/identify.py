"""IDENTIFY: the request's fields, what a server grants, and the negotiated answer.

Rules of this file: ranges and defaults are those of NSQ's TCP protocol; durations are milliseconds because that is
what the wire carries; a field of the wrong JSON type is an error, an unknown field is ignored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import msgspec

from flintmq.errors import UNREADABLE_JSON, RemoteProtocolError
from flintmq.limits import CLIENT_TEXT_SIZE_MAX
from flintmq.names import shortened

NSQ_VERSION = "1.3.0"
"""The NSQ release that peers see in IDENTIFY, /info and towards nsqlookupd, because tools compare it."""

TAG_SIZE_MAX = 100
"""Of the tag that a consumer wants messages of."""

_TAG = re.compile(f"[A-Za-z0-9_-]{{0,{TAG_SIZE_MAX}}}")
_Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]  # as wide as nsqd's: what is beyond is no number
_Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


FILTER_KEY_SIZE_MAX = 128
FILTER_DATA_SIZE_MAX = 1024
FILTER_LIST_MAX = 64
"""Of ``ext_filter``: characters of a header's name and of a text or pattern, and how many of them."""

_NOT_IN_KEYS = frozenset(".*?|\\")  # paths in the redesigned NSQ, where they go into headers in headers
EXACT, REGEXP, GLOB, SEVERAL = 1, 2, 3, 4


class ExtFilterItem(msgspec.Struct):
    """One of several headers."""

    filter_ext_key: str = ""
    filter_data: str = ""


class ExtFilterRule(msgspec.Struct):
    """The messages that a consumer of an extended topic takes; see :mod:`flintmq.broker.ext_filter`."""

    type: _Int64 = 0
    inverse: bool = False
    filter_ext_key: str = ""
    filter_data: str = ""
    filter_data_list: list[ExtFilterItem] = []


_NO_FILTER = ExtFilterRule()


class IdentifyRequest(msgspec.Struct, kw_only=True):
    """A client's description of itself; every field may be absent.

    Attributes:
        nsqd_run_id: ask nsqd by what its process is told from every other; only FlintMQ's says it.
    """

    client_id: str = ""
    hostname: str = ""
    user_agent: str = ""
    feature_negotiation: bool = False
    heartbeat_interval: _Int64 = 0
    output_buffer_size: _Int64 = 0
    output_buffer_timeout: _Int64 = 0
    tls_v1: bool = False
    snappy: bool = False
    deflate: bool = False
    deflate_level: _Int64 = 0
    sample_rate: _Int32 = 0
    msg_timeout: _Int64 = 0
    topology_region: str = ""
    topology_zone: str = ""
    nsqd_run_id: bool | msgspec.UnsetType = msgspec.UNSET


class ExtendedIdentifyRequest(IdentifyRequest, kw_only=True):
    """Fields that a client of an extended topic adds, for a redesigned nsqd (Youzan's TCP protocol) only."""

    extend_support: bool = True
    desired_tag: str = ""


class OnceIdentifyRequest(IdentifyRequest, kw_only=True):
    """The field that a producer with sequences adds; an nsqd that takes them has the same one in its answer."""

    producer_sequences: bool = True


class ReceivedRequest(IdentifyRequest, kw_only=True):
    """An IDENTIFY as a server reads it; fields that a client of a plain topic never sends have their defaults."""

    extend_support: bool = False
    desired_tag: str = ""
    ext_filter: ExtFilterRule | None = None
    producer_sequences: bool = False


class IdentifyResponse(msgspec.Struct, kw_only=True):
    """The negotiated answer, fields in the order nsqd sends them."""

    max_rdy_count: int
    version: str
    max_msg_timeout: int
    msg_timeout: int
    tls_v1: bool
    deflate: bool
    deflate_level: int
    max_deflate_level: int
    snappy: bool
    sample_rate: int
    auth_required: bool
    output_buffer_size: int
    output_buffer_timeout: int
    topology_region: str
    topology_zone: str
    desired_tag: str | msgspec.UnsetType = msgspec.UNSET
    producer_sequences: bool | msgspec.UnsetType = msgspec.UNSET
    nsqd_run_id: str | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True, slots=True)
class ServerFeatures:
    """The features that a server can grant, and their limits; times in milliseconds, sizes in bytes."""

    version: str
    max_rdy_count: int = 2500
    msg_timeout_ms: int = 60_000
    max_msg_timeout_ms: int = 900_000
    heartbeat_interval_ms: int = 30_000
    max_heartbeat_interval_ms: int = 60_000
    max_output_buffer_size: int = 65536
    output_buffer_timeout_ms: int = 250
    min_output_buffer_timeout_ms: int = 25
    max_output_buffer_timeout_ms: int = 30_000
    tls: bool = False
    deflate: bool = False
    max_deflate_level: int = 6
    snappy: bool = False
    auth_required: bool = False
    topology_region: str = ""
    topology_zone: str = ""
    producer_sequences: bool = True
    run_id: str = ""


@dataclass(slots=True)
class Negotiated:
    """The terms of a connection after IDENTIFY; times in milliseconds, ``heartbeat_interval_ms`` 0 when disabled."""

    request: ReceivedRequest
    response: bytes | None
    heartbeat_interval_ms: int
    msg_timeout_ms: int
    sample_rate: int
    output_buffer_size: int
    output_buffer_timeout_ms: int
    tls: bool
    deflate_level: int
    snappy: bool

    @property
    def ext_filter(self) -> ExtFilterRule | None:
        """The messages that the consumer takes; None for all of them."""
        return None if self.request.ext_filter == _NO_FILTER else self.request.ext_filter

    @property
    def upgrades(self) -> bool:
        """Whether the bytes after the answer belong to another layer."""
        return self.tls or self.snappy or self.deflate_level > 0


_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_HEX = "[0-9a-fA-F]{2}"
_ESCAPES = re.compile(rf"\\(?:u[dD][89abAB]{_HEX}\\u[dD][c-fC-F]{_HEX}|(u[dD][89a-fA-F]{_HEX})|.)", re.DOTALL)
_FIELDS = frozenset(ReceivedRequest.__struct_fields__)
_SHOWN_TEXTS = ("client_id", "hostname", "user_agent", "topology_region", "topology_zone")


def parse_request(body: bytes) -> ReceivedRequest:
    """Decode an IDENTIFY body; keys are matched whatever their case, as nsqd does, and null means absent.

    Bytes that are not UTF-8, and escapes of half a character (a surrogate that is not in a pair), are replaced, not
    refused: they stand in names that only statistics show. Of each such name ``CLIENT_TEXT_SIZE_MAX`` characters
    are kept: NSQ takes any, but all statistics would carry what one client says.

    Raises:
        RemoteProtocolError: E_BAD_BODY, not a JSON object or a known field of the wrong type.
    """
    text = body.decode("utf-8", "replace")
    try:
        try:
            return _received(text)
        except UNREADABLE_JSON:
            mended = _ESCAPES.sub(lambda found: r"\ufffd" if found[1] else found[0], text)
            if mended == text:
                raise
            return _received(mended)
    except UNREADABLE_JSON as error:
        raise RemoteProtocolError("E_BAD_BODY", "IDENTIFY failed to decode JSON body") from error


def _received(text: str) -> ReceivedRequest:
    fields = {}
    for key, value in _decode(text).items():
        name = key if key in _FIELDS else key.lower()
        if name in _FIELDS and bytes(value) != b"null":
            fields[name] = msgspec.json.decode(value)
    for name in _SHOWN_TEXTS:
        if isinstance(said := fields.get(name), str):
            fields[name] = shortened(said, CLIENT_TEXT_SIZE_MAX)
    return msgspec.convert(fields, ReceivedRequest)


def bad_filter(what: str) -> RemoteProtocolError:
    """Return the refusal of an ``ext_filter``."""
    return RemoteProtocolError("E_BAD_BODY", f"IDENTIFY ext_filter is invalid: {what}")


def _check_filter(rule: ExtFilterRule) -> None:
    """Refuse a filter that could not be obeyed; whether a pattern is one, who compiles it finds out."""
    if rule.type == SEVERAL:
        if rule.filter_ext_key not in ("any", "all"):
            raise bad_filter(f"filter_ext_key {rule.filter_ext_key[:100]!r} of type 4 is not any or all")
        if rule.filter_data:
            raise bad_filter("type 4 has no filter_data, only filter_data_list")
        if not 1 <= len(rule.filter_data_list) <= FILTER_LIST_MAX:
            raise bad_filter(f"filter_data_list has {len(rule.filter_data_list)} of 1 to {FILTER_LIST_MAX} items")
        items = rule.filter_data_list
    elif rule.type in (EXACT, REGEXP, GLOB):
        if rule.filter_data_list:
            raise bad_filter("only type 4 has filter_data_list")
        items = [ExtFilterItem(rule.filter_ext_key, rule.filter_data)]
    else:
        raise bad_filter(f"type {rule.type} is not 1 (exact), 2 (regular expression), 3 (glob) or 4 (several)")
    for item in items:
        key, data = item.filter_ext_key, item.filter_data
        if not 1 <= len(key) <= FILTER_KEY_SIZE_MAX or key[0] in "@!" or not _NOT_IN_KEYS.isdisjoint(key):
            what = f"is not the name of a header: 1 to {FILTER_KEY_SIZE_MAX} characters without . * ? | \\"
            raise bad_filter(f"filter_ext_key {key[:100]!r} {what} and not beginning with @ or !")
        if not 1 <= len(data) <= FILTER_DATA_SIZE_MAX:
            raise bad_filter(f"filter_data of {key!r} has {len(data)} of 1 to {FILTER_DATA_SIZE_MAX} characters")


def _bad(what: str, value: int) -> RemoteProtocolError:
    return RemoteProtocolError("E_BAD_BODY", f"IDENTIFY {what} ({value}) is invalid")


def negotiate(request: ReceivedRequest, server: ServerFeatures) -> Negotiated:
    """Apply the ranges of NSQ's TCP protocol and decide what is granted.

    Raises:
        RemoteProtocolError: E_BAD_BODY for a value out of range, E_IDENTIFY_FAILED for deflate with snappy.
    """
    heartbeat = request.heartbeat_interval
    if heartbeat == 0:
        heartbeat = server.heartbeat_interval_ms
    elif heartbeat == -1:
        heartbeat = 0
    elif not 1000 <= heartbeat <= server.max_heartbeat_interval_ms:
        raise _bad("heartbeat interval", heartbeat)

    timeout = request.output_buffer_timeout
    if timeout == 0:
        timeout = server.output_buffer_timeout_ms
    elif timeout == -1:
        timeout = 0
    elif not server.min_output_buffer_timeout_ms <= timeout <= server.max_output_buffer_timeout_ms:
        raise _bad("output buffer timeout", timeout)

    size = request.output_buffer_size
    if size == 0:
        size = 16384
    elif size == -1:
        size, timeout = 1, 0
    elif not 64 <= size <= server.max_output_buffer_size:
        raise _bad("output buffer size", size)

    if not 0 <= request.sample_rate <= 99:
        raise _bad("sample rate", request.sample_rate)

    msg_timeout = request.msg_timeout or server.msg_timeout_ms
    if request.msg_timeout and not 1000 <= msg_timeout <= server.max_msg_timeout_ms:
        raise _bad("msg timeout", request.msg_timeout)

    if not _TAG.fullmatch(request.desired_tag):
        what = f"at most {TAG_SIZE_MAX} of [A-Za-z0-9_-]"
        raise RemoteProtocolError(
            "E_BAD_BODY", f"IDENTIFY desired tag ({request.desired_tag[:120]}) is invalid: {what}"
        )

    if request.ext_filter is not None and request.ext_filter != _NO_FILTER:
        _check_filter(request.ext_filter)

    negotiates = request.feature_negotiation
    tls = negotiates and server.tls and request.tls_v1
    deflate = negotiates and server.deflate and request.deflate
    snappy = negotiates and server.snappy and request.snappy
    if deflate and snappy:
        raise RemoteProtocolError("E_IDENTIFY_FAILED", "cannot enable both deflate and snappy compression")
    wanted = request.deflate_level if deflate and request.deflate_level > 0 else 6
    level = min(wanted, server.max_deflate_level)

    response = None
    if negotiates:
        response = msgspec.json.encode(
            IdentifyResponse(
                max_rdy_count=server.max_rdy_count,
                version=server.version,
                max_msg_timeout=server.max_msg_timeout_ms,
                msg_timeout=msg_timeout,
                tls_v1=tls,
                deflate=deflate,
                deflate_level=level,
                max_deflate_level=server.max_deflate_level,
                snappy=snappy,
                sample_rate=request.sample_rate,
                auth_required=server.auth_required,
                output_buffer_size=size,
                output_buffer_timeout=timeout,
                topology_region=server.topology_region,
                topology_zone=server.topology_zone,
                desired_tag=request.desired_tag or msgspec.UNSET,
                producer_sequences=(request.producer_sequences and server.producer_sequences) or msgspec.UNSET,
                nsqd_run_id=(server.run_id if request.nsqd_run_id is True else "") or msgspec.UNSET,
            )
        )
    return Negotiated(
        request=request,
        response=response,
        heartbeat_interval_ms=heartbeat,
        msg_timeout_ms=msg_timeout,
        sample_rate=request.sample_rate,
        output_buffer_size=size,
        output_buffer_timeout_ms=timeout,
        tls=tls,
        deflate_level=level if deflate else 0,
        snappy=snappy,
    )
