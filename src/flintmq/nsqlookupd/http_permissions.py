"""The permission that each request of nsqlookupd's HTTP API asks for, when clients have to be known.

Rules of this file: every route has a row, those below ``/debug/`` apart: what has none asks for ``admin`` of all
topics. A test compares the rows with the routes, and the page in the reference is made of them.
"""

from __future__ import annotations

from flintmq.net.http_auth import ADMIN, KNOWN, OPEN, PUBLISH, READ, Table, needs

TABLE: Table = {
    ("GET", "/ping"): OPEN,  # what asks it tells whether the process lives, and often cannot send headers
    ("GET", "/info"): KNOWN,
    ("GET", "/listlookup"): KNOWN,
    ("GET", "/lookup"): needs(PUBLISH, READ, by_topic=True),  # producers find their nsqd with it as well
    ("GET", "/topics"): needs(READ),
    ("GET", "/channels"): needs(READ, by_topic=True),
    ("GET", "/nodes"): needs(READ),
    ("GET", "/metrics"): needs(READ),
    ("GET", "/debug"): needs(ADMIN),
    ("POST", "/topic/create"): needs(ADMIN, by_topic=True),
    ("PUT", "/topic/create"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/meta/update"): needs(ADMIN, by_topic=True),
    ("POST", "/loglevel/set"): needs(ADMIN),
    ("POST", "/topic/delete"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/tombstone"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/create"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/delete"): needs(ADMIN, by_topic=True),
}

CLUSTER_TABLE: Table = {
    ("GET", "/cluster/status"): needs(READ),
    ("GET", "/cluster/moves"): needs(READ),
    ("GET", "/cluster/elections"): needs(READ),
    ("GET", "/cluster/stats"): needs(READ),
    ("GET", "/cluster/balance/topn"): needs(READ),
    ("POST", "/cluster/partition/elect"): needs(ADMIN),
    ("POST", "/cluster/loss/acknowledge"): needs(ADMIN),
    ("POST", "/topic/partition/move"): needs(ADMIN),
    ("POST", "/topic/partition/expand"): needs(ADMIN, by_topic=True),
    ("POST", "/cluster/node/remove"): needs(ADMIN),
    ("POST", "/cluster/node/drain"): needs(ADMIN),
    ("POST", "/cluster/balance"): needs(ADMIN),
    ("POST", "/cluster/balance/topn"): needs(ADMIN),
    ("POST", "/cluster/upgrade/begin"): needs(ADMIN),
    ("POST", "/cluster/upgrade/done"): needs(ADMIN),
    ("POST", "/cluster/lookupd/tombstone"): needs(ADMIN),
    ("POST", "/disable/write"): needs(ADMIN),
}
"""Of a nsqlookupd that is one of a cluster."""

STORE_TABLE: Table = {
    ("POST", "/v3/kv/range"): needs(ADMIN),
    ("POST", "/v3/kv/txn"): needs(ADMIN),
    ("POST", "/v3/watch"): needs(ADMIN),
    ("POST", "/v3/lease/grant"): needs(ADMIN),
    ("POST", "/v3/lease/keepalive"): needs(ADMIN),
    ("POST", "/v3/lease/revoke"): needs(ADMIN),
    ("POST", "/v3/lease/timetolive"): needs(ADMIN),
    ("POST", "/v3/maintenance/status"): needs(ADMIN),
}
"""Of the coordination store, where there is one: whoever may use it decides who leads what."""
