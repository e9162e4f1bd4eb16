"""The coordination store over HTTP, as etcd's v3 JSON gateway offers it: requests to the embedded store.

Rules of this file: one function per endpoint, thin; what a request means is in net/etcd_wire.py. A start revision of a
watch that is compacted itself is taken, as etcd does: what came after it is remembered.

Source: https://etcd.io/docs/v3.5/dev-guide/api_grpc_gateway/.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from flintmq.cluster.store import LeaseNotFound, StoreError
from flintmq.cluster.store_state import StoreState
from flintmq.env import Env
from flintmq.net import etcd_wire as wire
from flintmq.net.http_messages import JSON_TYPE, Request, Response, StreamingResponse
from flintmq.net.http_router import Router
from flintmq.nsqlookupd.store import EmbeddedStore

BODY_BYTES_MAX = 2 * 1024 * 1024

Handler = Callable[[Request], Coroutine[Any, Any, Response | StreamingResponse]]


def add_routes(router: Router, store: EmbeddedStore, env: Env) -> None:
    """Answer the requests for the store."""
    api = StoreApi(store, env)
    handlers: dict[str, Handler] = {
        wire.RANGE: api.range,
        wire.TXN: api.txn,
        wire.WATCH: api.watch,
        wire.LEASE_GRANT: api.grant,
        wire.LEASE_KEEPALIVE: api.keepalive,
        wire.LEASE_REVOKE: api.revoke,
        wire.LEASE_TIME_TO_LIVE: api.time_to_live,
        wire.STATUS: api.status,
    }
    for path, handler in handlers.items():
        guarded = _refusing(handler)
        router.add("POST", path, guarded, body_limit_bytes=BODY_BYTES_MAX, is_logged=False, takes=())


def _refusing(handler: Handler) -> Handler:
    """A handler whose refusals are answered in etcd's form."""

    async def answer(request: Request) -> Response | StreamingResponse:
        try:
            return await handler(request)
        except StoreError as error:
            status, fields = wire.error_fields(error)
            return _response(fields, status)

    return answer


def _response(fields: dict[str, Any], status: int = 200) -> Response:
    return Response(status, msgspec.json.encode(fields), (JSON_TYPE,))


class StoreApi:
    """The handlers."""

    def __init__(self, store: EmbeddedStore, env: Env) -> None:
        self._store = store
        self._random = env.random

    async def range(self, request: Request) -> Response:
        asked = wire.parse_range(request.body)
        count_max = 1 if asked.is_counted else asked.count_max
        snapshot, count = await self._store.ask(
            lambda state, _: (state.range(asked.span, count_max, asked.revision), state.count(asked.span))
        )
        return _response(self._store.answers.range(snapshot, count, asked.is_counted))

    async def txn(self, request: Request) -> Response:
        txn = wire.parse_txn(request.body)
        result = await self._store.ask(lambda state, _: state.apply(txn))
        return _response(self._store.answers.txn(txn, result))

    async def watch(self, request: Request) -> StreamingResponse:
        return self._store.watch(*wire.parse_watch(request.body))

    async def grant(self, request: Request) -> Response:
        asked = wire.parse_lease(request.body)
        lease_id = asked.ID or self._random.getrandbits(62) + 1
        lease, revision = await self._store.ask(
            lambda state, now_ns: (state.grant(lease_id, asked.TTL, now_ns), state.revision)
        )
        return _response(self._store.answers.lease(revision, lease.lease_id, lease.ttl_s))

    async def keepalive(self, request: Request) -> Response:
        lease_id = wire.parse_lease(request.body).ID
        try:
            ttl_s = await self._store.ask(lambda state, now_ns: state.keepalive(lease_id, now_ns))
        except LeaseNotFound:
            ttl_s = 0  # which is how etcd says it
        result = self._store.answers.lease(self._store.durable_revision, lease_id, ttl_s)
        return Response(200, self._store.answers.line(result), (JSON_TYPE,))

    async def revoke(self, request: Request) -> Response:
        lease_id = wire.parse_lease(request.body).ID

        def revoke(state: StoreState, _now_ns: int) -> int:
            state.revoke(lease_id)
            return state.revision

        return _response(self._store.answers.plain(await self._store.ask(revoke)))

    async def time_to_live(self, request: Request) -> Response:
        asked = wire.parse_lease_question(request.body)
        answers, revision = self._store.answers, self._store.durable_revision
        try:
            left_s, ttl_s, keys = await self._store.ask(lambda state, now_ns: state.time_to_live(asked.ID, now_ns))
        except LeaseNotFound:
            return _response(answers.lease(revision, asked.ID, -1))
        fields: dict[str, Any] = {"grantedTTL": str(ttl_s)}
        if asked.keys and keys:
            fields["keys"] = [key.encode() for key in keys]
        return _response(answers.lease(revision, asked.ID, left_s, **fields))

    async def status(self, request: Request) -> Response:
        revision = await self._store.ask(lambda state, _: state.revision)
        return _response(self._store.answers.plain(revision, version="3.5.0", leader="1"))
