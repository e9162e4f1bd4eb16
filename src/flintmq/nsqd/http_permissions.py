"""What each request of nsqd's HTTP API asks for, when clients have to be known.

Rules of this file: every route has a row, those of ``/debug`` apart: what has none asks for ``admin`` of all topics. A
test compares the rows with the routes, and the page in the reference is made of them.
"""

from __future__ import annotations

from flintmq.net.http_auth import ADMIN, KNOWN, OPEN, PUBLISH, READ, Table, needs

TABLE: Table = {
    ("GET", "/ping"): OPEN,  # what asks it tells whether the process lives, and often cannot send headers
    ("GET", "/info"): KNOWN,
    ("GET", "/stats"): needs(READ, by_topic=True),
    ("GET", "/serverstats"): KNOWN,
    ("GET", "/metrics"): needs(READ),
    ("POST", "/pub"): needs(PUBLISH, by_topic=True),
    ("POST", "/put"): needs(PUBLISH, by_topic=True),
    ("POST", "/mpub"): needs(PUBLISH, by_topic=True),
    ("POST", "/mput"): needs(PUBLISH, by_topic=True),
    ("POST", "/mdpub"): needs(PUBLISH, by_topic=True),
    ("POST", "/pubtrace"): needs(PUBLISH, by_topic=True),
    ("POST", "/pub_ext"): needs(PUBLISH, by_topic=True),
    ("POST", "/topic/create"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/meta/update"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/delete"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/empty"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/pause"): needs(ADMIN, by_topic=True),
    ("POST", "/topic/unpause"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/create"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/delete"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/empty"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/emptydelayed"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/pause"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/unpause"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/setorder"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/setoffset"): needs(ADMIN, by_topic=True),
    ("GET", "/topic/settings"): needs(READ, by_topic=True),
    ("POST", "/topic/settings"): needs(ADMIN, by_topic=True),
    ("GET", "/channel/settings"): needs(READ, by_topic=True),
    ("POST", "/channel/settings"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/skip"): needs(ADMIN, by_topic=True),
    ("POST", "/channel/unskip"): needs(ADMIN, by_topic=True),
    ("GET", "/channel/peek"): needs(READ, by_topic=True),
    ("GET", "/message/get"): needs(READ, by_topic=True),
    ("GET", "/message/stats"): needs(READ, by_topic=True),
    ("GET", "/message/historystats"): needs(READ, by_topic=True),
    ("POST", "/channel/setclientlimit"): needs(ADMIN, by_topic=True),
    ("POST", "/message/finish"): needs(ADMIN, by_topic=True),
    ("POST", "/message/cancel"): needs(ADMIN, by_topic=True),
    ("GET", "/message/trace"): needs(READ, by_topic=True),
    ("POST", "/message/trace/enable"): needs(ADMIN, by_topic=True),
    ("POST", "/message/trace/disable"): needs(ADMIN, by_topic=True),
    ("POST", "/loglevel/set"): needs(ADMIN),
    ("GET", "/config/{opt}"): needs(ADMIN),
    ("PUT", "/config/{opt}"): needs(ADMIN),
    ("GET", "/damage"): needs(READ),
    ("POST", "/damage/acknowledge"): needs(ADMIN),
    ("GET", "/drain"): needs(READ),
    ("POST", "/drain"): needs(ADMIN),
    ("DELETE", "/drain"): needs(ADMIN),
}
