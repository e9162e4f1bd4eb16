"""etcd's v3 JSON gateway as bytes: requests and answers of the part that :class:`flintmq.cluster.store.Store` needs.

Both sides are here: what :mod:`flintmq.net.etcd` sends is what the store of nsqlookupd reads, so that one client is for
both stores. Pure.

Rules of this file:

- Integers are text in answers, as etcd writes them; either form is read. Keys and values are base64.
- Of the requests the whole subset is understood, and nothing else: a field that would not be obeyed is refused.
- A watch is asked for from the last revision that was seen, not from the one after it: etcd before 3.5.16 forgets a
  deletion at the very revision that it is compacted at, without a word. What was seen is passed over.

Source: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/, rpc.proto of etcd 3.5; etcd-io/etcd#18089.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from flintmq.cluster.store import (
    Compacted,
    Compare,
    CompareValue,
    Condition,
    Delete,
    Event,
    Events,
    Get,
    KeyValue,
    LeaseExists,
    LeaseNotFound,
    Operation,
    Put,
    Snapshot,
    Span,
    StoreError,
    StoreRefused,
    Txn,
    TxnResult,
)
from flintmq.errors import UNREADABLE_JSON

RANGE, TXN, WATCH = "/v3/kv/range", "/v3/kv/txn", "/v3/watch"
LEASE_GRANT, LEASE_KEEPALIVE, LEASE_REVOKE = "/v3/lease/grant", "/v3/lease/keepalive", "/v3/lease/revoke"
LEASE_TIME_TO_LIVE = "/v3/lease/timetolive"
STATUS = "/v3/maintenance/status"
AUTHENTICATE = "/v3/auth/authenticate"

OK, INVALID_ARGUMENT, DEADLINE, NOT_FOUND, PERMISSION_DENIED = 0, 3, 4, 5, 7
EXHAUSTED, FAILED_PRECONDITION, OUT_OF_RANGE, UNAVAILABLE, UNAUTHENTICATED = 8, 9, 11, 14, 16
"""Codes of gRPC, which every error carries."""

HTTP_STATUS = {
    INVALID_ARGUMENT: 400,
    NOT_FOUND: 404,
    PERMISSION_DENIED: 403,
    EXHAUSTED: 429,
    FAILED_PRECONDITION: 400,
    OUT_OF_RANGE: 400,
    UNAVAILABLE: 503,
}

LEASE_NOT_FOUND = "etcdserver: requested lease not found"
LEASE_EXISTS = "etcdserver: lease already exists"
COMPACTED = "etcdserver: mvcc: required revision has been compacted"

_NUL = b"\0"


# -- what may stand there ----------------------------------------------------------------------------------------------


class _Row(msgspec.Struct, frozen=True):
    key: bytes = b""
    create_revision: int = 0
    mod_revision: int = 0
    version: int = 0
    value: bytes = b""
    lease: int = 0

    def pair(self) -> KeyValue:
        key = self.key.decode()
        return KeyValue(key, self.value, self.create_revision, self.mod_revision, self.version, self.lease)


class Header(msgspec.Struct, frozen=True):
    """The beginning of every answer.

    Attributes:
        cluster_id: which store this is; 0: it was not said.
        revision: of the store; 0: it was not said.
    """

    cluster_id: int = 0
    member_id: int = 0
    revision: int = 0


class _RangeAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    kvs: list[_Row] = []
    more: bool = False


class _OperationAnswer(msgspec.Struct, frozen=True):
    response_range: _RangeAnswer | None = None


class _TxnAnswer(msgspec.Struct, frozen=True):
    header: Header = Header()
    succeeded: bool = False
    responses: list[_OperationAnswer] = []


class LeaseAnswer(msgspec.Struct, frozen=True):
    """An answer about a lease; a lifetime of 0: it is not there."""

    header: Header = Header()
    ID: int = 0
    TTL: int = 0


class _LeaseStream(msgspec.Struct, frozen=True):
    result: LeaseAnswer = LeaseAnswer()


class _TokenAnswer(msgspec.Struct, frozen=True):
    token: str = ""


class _EventRow(msgspec.Struct, frozen=True):
    type: str = "PUT"
    kv: _Row = _Row()


class _WatchResult(msgspec.Struct, frozen=True):
    header: Header = Header()
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[_EventRow] = []


class _WatchError(msgspec.Struct, frozen=True):
    grpc_code: int = 0
    message: str = ""


class _WatchAnswer(msgspec.Struct, frozen=True):
    result: _WatchResult | None = None
    error: _WatchError | None = None


class ErrorAnswer(msgspec.Struct, frozen=True):
    """An error of etcd; code 0: it is none of etcd's."""

    code: int = 0
    message: str = ""


class BadAnswer(StoreError):
    """An answer is not as the API says."""


def _decode(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except UNREADABLE_JSON as error:
        raise BadAnswer(f"not an answer of etcd's v3 API: {error}") from None


# -- the client's side -------------------------------------------------------------------------------------------------


def _interval(span: Span) -> dict[str, Any]:
    fields: dict[str, Any] = {"key": span.start.encode() or _NUL}
    if span.end != span.start + "\0":
        fields["range_end"] = _NUL if span.end is None else span.end.encode()
    return fields


def range_request(span: Span, count_max: int = 0, revision: int = 0, is_counted: bool = False) -> bytes:
    """Ask what is in a span.

    Args:
        is_counted: only how much, which is as good a question for whether somebody is there.
    """
    fields = _interval(span)
    if count_max:
        fields["limit"] = count_max
    if revision:
        fields["revision"] = revision
    if is_counted:
        fields["count_only"] = True
    return msgspec.json.encode(fields)


def read_range(data: bytes) -> tuple[Header, Snapshot]:
    """Read the answer to :func:`range_request`."""
    answer: _RangeAnswer = _decode(data, _RangeAnswer)
    found = tuple(_pairs(answer.kvs))
    return answer.header, Snapshot(answer.header.revision, found, answer.more)


def _pairs(rows: Iterable[_Row]) -> Iterable[KeyValue]:
    try:
        return [row.pair() for row in rows]
    except UnicodeDecodeError as error:
        raise BadAnswer(f"a key is no UTF-8: somebody else writes to this part of the store ({error})") from None


def txn_request(txn: Txn) -> bytes:
    """Ask for a transaction."""
    return msgspec.json.encode(
        {
            "compare": [_condition(condition) for condition in txn.conditions],
            "success": [_operation(operation) for operation in txn.then],
            "failure": [_operation(operation) for operation in txn.otherwise],
        }
    )


def _condition(condition: Condition) -> dict[str, Any]:
    fields: dict[str, Any] = {"key": condition.key.encode(), "result": "EQUAL"}
    if isinstance(condition, Compare):
        return fields | {"target": "MOD", "mod_revision": condition.mod_revision}
    return fields | {"target": "VALUE", "value": condition.value}


def _operation(operation: Operation) -> dict[str, Any]:
    key = operation.key.encode()
    if isinstance(operation, Put):
        fields: dict[str, Any] = {"key": key, "value": operation.value}
        return {"request_put": fields | ({"lease": operation.lease_id} if operation.lease_id else {})}
    return {"request_delete_range" if isinstance(operation, Delete) else "request_range": {"key": key}}


def read_txn(data: bytes) -> tuple[Header, TxnResult]:
    """Read the answer to :func:`txn_request`."""
    answer: _TxnAnswer = _decode(data, _TxnAnswer)
    ranges = (each.response_range for each in answer.responses)
    found = tuple(next(iter(_pairs(each.kvs)), None) for each in ranges if each is not None)
    return answer.header, TxnResult(answer.succeeded, answer.header.revision, found)


def watch_request(span: Span, after: int) -> bytes:
    """Ask for what happens in a span after a revision, and for a sign of life when nothing does."""
    fields = {**_interval(span), "start_revision": max(1, after), "progress_notify": True}
    return msgspec.json.encode({"create_request": fields})


def read_watch(data: bytes, after: int) -> tuple[Header, Events]:
    """Read one line of the answer to :func:`watch_request`.

    Args:
        after: what happened up to there is left out.

    Raises:
        Compacted: what should come next is forgotten.
        ServerError: the watch is refused, or ended.
    """
    answer: _WatchAnswer = _decode(data, _WatchAnswer)
    if answer.error is not None:
        raise ServerError(answer.error.grpc_code, answer.error.message)
    result = answer.result or _WatchResult()
    if result.compact_revision:
        raise Compacted(result.compact_revision)
    if result.canceled:
        code = PERMISSION_DENIED if "permission denied" in result.cancel_reason else UNAVAILABLE
        raise ServerError(code, result.cancel_reason or "the watch was ended")
    events = []
    for row in result.events:
        if row.kv.mod_revision > after:
            (pair,) = _pairs([row.kv])
            events.append(Event(pair.mod_revision, pair.key, None if row.type == "DELETE" else pair))
    return result.header, Events(events[-1].revision if events else after, tuple(events))


def lease_request(lease_id: int, ttl_s: int | None = None) -> bytes:
    """Ask for a lease, its renewal or its end."""
    return msgspec.json.encode({"ID": lease_id} | ({} if ttl_s is None else {"TTL": ttl_s}))


def read_lease(data: bytes) -> tuple[Header, LeaseAnswer]:
    """Read the answer to a request for a lease or its end."""
    answer: LeaseAnswer = _decode(data, LeaseAnswer)
    return answer.header, answer


def read_keepalive(data: bytes) -> tuple[Header, LeaseAnswer]:
    """Read the answer to a renewal: a stream of one line."""
    answer: _LeaseStream = _decode(data.strip(), _LeaseStream)
    return answer.result.header, answer.result


def authenticate_request(user: str, password: str) -> bytes:
    """Ask for a token."""
    return msgspec.json.encode({"name": user, "password": password})


def read_token(data: bytes) -> str:
    """Read the answer to :func:`authenticate_request`."""
    answer: _TokenAnswer = _decode(data, _TokenAnswer)
    return answer.token


class ServerError(StoreError):
    """An error that was answered.

    Args:
        code: of gRPC; 0: it is none of etcd's.
        message: etcd's words.
    """

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def read_error(data: bytes) -> ServerError:
    """Read an answer with another status than 200."""
    try:
        answer = msgspec.json.decode(data, type=ErrorAnswer, strict=False)
    except UNREADABLE_JSON:
        return ServerError(OK, data[:200].decode("utf-8", "replace").strip())
    return ServerError(answer.code, answer.message)


# -- the store's side --------------------------------------------------------------------------------------------------


class _Request(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    pass


class _RangeRequest(_Request, frozen=True):
    key: bytes = b""
    range_end: bytes = b""
    limit: int = 0
    revision: int = 0
    count_only: bool = False
    serializable: bool = False  # no answer is older than what was answered before, whether that is asked for or not


class _PutRequest(_Request, frozen=True):
    key: bytes = b""
    value: bytes = b""
    lease: int = 0


class _KeyRequest(_Request, frozen=True):
    key: bytes = b""


class _OperationRequest(_Request, frozen=True):
    request_put: _PutRequest | None = None
    request_delete_range: _KeyRequest | None = None
    request_range: _KeyRequest | None = None


class _CompareRequest(_Request, frozen=True):
    key: bytes = b""
    target: str = "VERSION"
    result: str = "EQUAL"
    mod_revision: int = 0
    value: bytes = b""


class _TxnRequest(_Request, frozen=True):
    compare: list[_CompareRequest] = []
    success: list[_OperationRequest] = []
    failure: list[_OperationRequest] = []


class _CreateRequest(_Request, frozen=True):
    key: bytes = b""
    range_end: bytes = b""
    start_revision: int = 0
    progress_notify: bool = False


class _WatchRequest(_Request, frozen=True):
    create_request: _CreateRequest


class LeaseRequest(_Request, frozen=True):
    """A request about a lease; an id of 0 when it is made: the store chooses one."""

    ID: int = 0
    TTL: int = 0


class LeaseQuestion(_Request, frozen=True):
    """A question about a lease."""

    ID: int = 0
    keys: bool = False


class RangeQuestion(msgspec.Struct, frozen=True):
    """The question of a :func:`range_request`."""

    span: Span
    count_max: int
    revision: int
    is_counted: bool


def _read(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except UNREADABLE_JSON as error:
        raise StoreRefused(f"this request is not understood here: {error}") from None


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise StoreRefused("keys are UTF-8 here") from None


def _span(key: bytes, end: bytes) -> Span:
    if not end:
        if not key:
            raise StoreRefused("etcdserver: key is not provided")
        return Span.of_key(_text(key))
    start = "" if key == _NUL else _text(key)
    return Span(start, None if end == _NUL else _text(end))


def parse_range(data: bytes) -> RangeQuestion:
    """Read what :func:`range_request` writes."""
    asked: _RangeRequest = _read(data, _RangeRequest)
    if asked.limit < 0 or asked.revision < 0:
        raise StoreRefused("limit and revision must not be negative")
    return RangeQuestion(_span(asked.key, asked.range_end), asked.limit, asked.revision, asked.count_only)


def parse_txn(data: bytes) -> Txn:
    """Read what :func:`txn_request` writes."""
    asked: _TxnRequest = _read(data, _TxnRequest)
    conditions = tuple(map(_parse_condition, asked.compare))
    return Txn(conditions, tuple(map(_parse_operation, asked.success)), tuple(map(_parse_operation, asked.failure)))


def _parse_condition(asked: _CompareRequest) -> Condition:
    if asked.result != "EQUAL" or asked.target not in ("MOD", "VALUE"):
        raise StoreRefused(f"compare {asked.target[:20]} {asked.result[:20]}: only MOD and VALUE, EQUAL are known here")
    key = _text(asked.key)
    return Compare(key, asked.mod_revision) if asked.target == "MOD" else CompareValue(key, asked.value)


def _parse_operation(asked: _OperationRequest) -> Operation:
    put, delete, get = asked.request_put, asked.request_delete_range, asked.request_range
    if sum(each is not None for each in (put, delete, get)) != 1:
        raise StoreRefused("an operation is one of request_put, request_delete_range and request_range")
    if put is not None:
        return Put(_text(put.key), put.value, put.lease)
    if delete is not None:
        return Delete(_text(delete.key))
    assert get is not None
    return Get(_text(get.key))


def parse_watch(data: bytes) -> tuple[Span, int, bool]:
    """Read what :func:`watch_request` writes: the span, from which revision on, and whether signs of life are wanted.

    Revision 0 is that of the next change.
    """
    asked = _read(data, _WatchRequest).create_request
    return _span(asked.key, asked.range_end), max(0, asked.start_revision), asked.progress_notify


def parse_lease(data: bytes) -> LeaseRequest:
    """Read what :func:`lease_request` writes."""
    asked: LeaseRequest = _read(data, LeaseRequest)
    return asked


def parse_lease_question(data: bytes) -> LeaseQuestion:
    """Read a question about a lease."""
    asked: LeaseQuestion = _read(data, LeaseQuestion)
    return asked


def _row(pair: KeyValue) -> dict[str, Any]:
    row: dict[str, Any] = {
        "key": pair.key.encode(),
        "create_revision": str(pair.create_revision),
        "mod_revision": str(pair.mod_revision),
        "version": str(pair.version),
        "value": pair.value,
    }
    return row | ({"lease": str(pair.lease_id)} if pair.lease_id else {})


class Answers:
    """Writes what a store answers.

    Args:
        cluster_id: of the store.
    """

    def __init__(self, cluster_id: int) -> None:
        self._cluster_id = str(cluster_id)

    def header(self, revision: int) -> dict[str, Any]:
        """Write the beginning of every answer."""
        return {"cluster_id": self._cluster_id, "member_id": "1", "revision": str(revision), "raft_term": "1"}

    def plain(self, revision: int, **fields: Any) -> dict[str, Any]:
        """An answer of its header and some fields."""
        return {"header": self.header(revision), **fields}

    def range(self, snapshot: Snapshot, count: int, is_counted: bool) -> dict[str, Any]:
        """The answer to a range.

        Args:
            count: how many there are, whether or not they are all in it.
        """
        fields: dict[str, Any] = {"count": str(count)} if count else {}
        if snapshot.found and not is_counted:
            fields["kvs"] = list(map(_row, snapshot.found))
        if snapshot.has_more and not is_counted:
            fields["more"] = True
        return self.plain(snapshot.revision, **fields)

    def txn(self, txn: Txn, result: TxnResult) -> dict[str, Any]:
        """The answer to a transaction."""
        header = {"revision": str(result.revision)}
        found = iter(result.found)
        responses: list[dict[str, Any]] = []
        for operation in txn.then if result.succeeded else txn.otherwise:
            if isinstance(operation, Get):
                pair = next(found)
                answer = {} if pair is None else {"kvs": [_row(pair)], "count": "1"}
                responses.append({"response_range": {"header": header, **answer}})
            else:
                name = "response_put" if isinstance(operation, Put) else "response_delete_range"
                responses.append({name: {"header": header}})
        fields: dict[str, Any] = {"succeeded": True} if result.succeeded else {}
        return self.plain(result.revision, **fields, responses=responses)

    def lease(self, revision: int, lease_id: int, ttl_s: int, **fields: Any) -> dict[str, Any]:
        """The answer about a lease; with a lifetime of 0 it is not there."""
        return self.plain(revision, ID=str(lease_id), **({"TTL": str(ttl_s)} if ttl_s else {}), **fields)

    def line(self, result: dict[str, Any]) -> bytes:
        """One line of a stream."""
        return msgspec.json.encode({"result": result}) + b"\n"

    def watch(self, events: Events) -> bytes:
        """One line of a watch."""
        rows = [
            {"kv": _row(event.now)}
            if event.now is not None
            else {"type": "DELETE", "kv": {"key": event.key.encode(), "mod_revision": str(event.revision)}}
            for event in events.events
        ]
        return self.line(self.plain(events.revision, events=rows))


def error_fields(error: StoreError) -> tuple[int, dict[str, Any]]:
    """Status and body for a request that was refused."""
    code, text = INVALID_ARGUMENT, str(error)
    if isinstance(error, LeaseNotFound):
        code, text = NOT_FOUND, LEASE_NOT_FOUND
    elif isinstance(error, LeaseExists):
        code, text = FAILED_PRECONDITION, LEASE_EXISTS
    elif isinstance(error, Compacted):
        code, text = OUT_OF_RANGE, COMPACTED
    elif not isinstance(error, StoreRefused):
        code = UNAVAILABLE
    return HTTP_STATUS[code], {"error": text, "code": code, "message": text}


# A lease is renewed in a thread of its own, and two threads that have msgspec learn one type at the same time crash the
# process.
for _kind in (
    _RangeAnswer,
    _OperationAnswer,
    _TxnAnswer,
    LeaseAnswer,
    _LeaseStream,
    _TokenAnswer,
    _WatchAnswer,
    ErrorAnswer,
):
    msgspec.json.Decoder(_kind, strict=False)
