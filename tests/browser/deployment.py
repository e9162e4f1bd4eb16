"""Daemons with something of everything that the pages show, for all tests of this folder and for the pictures.

Rules of this file: names and words of clients are as bad as the protocol allows; what the tests count does not change
by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.integration.daemons import Connection, Daemons, Nsqadmin, Nsqd, Nsqlookupd, wait_until

LONG = "a.name.of.sixty-four.characters.which.is.as.long.as.it.may.ever."
LONG += "x" * (64 - len(LONG))
HOSTILE = '"><img src=x onerror=alert(1)>'
_HOUR_MS = 3_600_000
TRACED_BODY = b'{"invoice": 1}'


@dataclass(frozen=True)
class Deployment:
    """One nsqlookupd, two nsqd, one nsqadmin."""

    daemons: Daemons
    nsqlookupd: Nsqlookupd
    nsqds: list[Nsqd]
    nsqadmin: Nsqadmin
    traced_id: str

    @property
    def url(self) -> str:
        """Of the pages, without a slash at the end."""
        return self.nsqadmin.url

    def paths(self) -> dict[str, str]:
        """Every page by a name for its picture; addresses below the base path."""
        node = f"127.0.0.1:{self.nsqds[0].http[1]}"
        return {
            "overview": "/",
            "problems": "/problems",
            "topics": "/topics",
            "topic": "/topics/orders",
            "topic-partitions": "/topics/invoices",
            "topic-long": f"/topics/{LONG}",
            "topic-none": "/topics/nobody-has-it",
            "channel": "/topics/orders/mail",
            "channel-idle": "/topics/orders/archive",
            "nodes": "/nodes",
            "node": f"/nodes/{node}",
            "counter": "/counter",
            "lookup": "/lookup",
            "cluster": "/cluster",
            "peek": "/peek?topic=orders&channel=archive",
            "peek-in-flight": "/peek?topic=orders&channel=mail&what=in_flight",
            "peek-deferred": "/peek?topic=orders&channel=archive&what=deferred",
            "find": "/messages",
            "message": f"/messages?topic=invoices&by=id&value={self.traced_id}",
            "dead-letters": "/dead-letters",
            "dead-letters-topic": "/dead-letters/payments",
            "create": "/create",
            "confirm": "/confirm/delete_topic?topic=orders",
            "confirm-time": "/confirm/set_channel?topic=orders&channel=archive",
            "audit": "/audit",
            "login": "/login",
        }


@contextmanager
def deployed(directory: Path, *flags: str, is_tidy: bool = False) -> Iterator[Deployment]:
    """Start it, with consumers that stay connected, and end it.

    Args:
        flags: of the nsqds.
        is_tidy: as it would be with people of good will, for pictures.
    """
    daemons = Daemons(directory)
    with ExitStack() as stack:
        stack.callback(daemons.close)
        nsqlookupd = daemons.nsqlookupd("--broadcast-address=127.0.0.1")
        long = ("--max-heartbeat-interval=1h", "--max-msg-timeout=1h")  # consumers that nobody serves stay
        flags = ("--durability=os", *long, f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}", *flags)
        nsqds = [daemons.nsqd(*flags), daemons.nsqd(*flags)]
        long_name = "shipments" if is_tidy else LONG
        for nsqd in nsqds:
            for topic in ("orders", long_name):
                nsqd.post(f"/topic/create?topic={topic}")
            nsqd.post("/channel/create?topic=orders&channel=archive")
            nsqd.post("/channel/create?topic=orders&channel=mail")
            nsqd.post(f"/channel/create?topic={long_name}&channel={long_name}")
            note = "gift" if is_tidy else HOSTILE
            nsqd.publish("orders", *[json.dumps({"order": number, "note": note}).encode() for number in range(20)])
            nsqd.publish(long_name, b"x" * 5000, b"\x00\xff" * 100)
        for client_id in ("mailer-1", "mailer-2" if is_tidy else HOSTILE):
            stack.enter_context(_consumer(nsqds[0], client_id))
        _kill_payments(nsqds[0])
        traced_id = _trace_invoices(nsqds[0])
        topics = {"orders", long_name, "payments", "payments.dead", "invoices"}
        wait_until(lambda: topics <= set(nsqlookupd.get("/topics")["topics"]), "all topics are registered")
        nsqadmin = daemons.nsqadmin(f"--lookupd-http-address=127.0.0.1:{nsqlookupd.http[1]}")
        report_query(nsqadmin, nsqds[0], "orders", "rides into Parquet" if is_tidy else HOSTILE, read=4)
        yield Deployment(daemons, nsqlookupd, nsqds, nsqadmin, traced_id)


def report_query(nsqadmin: Nsqadmin, nsqd: Nsqd, topic: str, name: str, read: int, state: str = "running") -> None:
    """What the driver of a query on Spark tells nsqadmin."""
    (row,) = nsqd.get(f"/stats?format=json&topic={topic}&partition=0")["data"]["topics"]
    log = {"topic": topic, "partition": 0, "log_id": row["log_id"], "read": read}
    query = {"id": f"checkpoint of {topic}", "name": name, "state": state, "batch": 7, "batch_age_s": 1, "logs": [log]}
    query["error"] = "no space left on device" if state == "failed" else ""
    answer = nsqadmin.request("POST", "/api/v2/queries", json.dumps({"queries": [query]}).encode())
    assert answer.status == 200, answer.body


def _consumer(nsqd: Nsqd, client_id: str) -> Connection:
    """A consumer of orders/mail that keeps three messages."""
    connection = nsqd.connect()
    words = {"client_id": client_id, "hostname": f"host of {client_id}", "user_agent": f"{client_id}/1.0"}
    connection.identify(**words, heartbeat_interval=_HOUR_MS, msg_timeout=_HOUR_MS)
    connection.subscribe("orders", "mail", 3)
    connection.messages(3)
    return connection


def _kill_payments(nsqd: Nsqd) -> None:
    """Two messages that were given up after one attempt."""
    nsqd.post("/topic/create?topic=payments")
    nsqd.post("/channel/create?topic=payments&channel=book")
    nsqd.post("/topic/settings?topic=payments", b'{"max_attempts": 1}')
    nsqd.publish("payments", b'{"payment": 1}', b'{"payment": 2}')
    with nsqd.connect() as connection:
        connection.subscribe("payments", "book", 2)
        for message in connection.messages(2):
            connection.send(b"REQ %s 0\n" % message.id)
        wait_until(lambda: nsqd.stats("payments.dead")["message_count"] == 2, "both are dead letters")
    nsqd.post("/channel/create?topic=payments.dead&channel=nsqadmin")


def _trace_invoices(nsqd: Nsqd) -> str:
    """A topic with two partitions whose messages are traced; returns the id of one that was finished."""
    nsqd.post("/topic/create?topic=invoices&partition_num=2")
    nsqd.post("/channel/create?topic=invoices&channel=ledger")
    nsqd.post("/message/trace/enable?topic=invoices")
    nsqd.post("/pub?topic=invoices&partition=0", TRACED_BODY)
    with nsqd.connect() as connection:
        connection.subscribe("invoices", "ledger", 1)
        message = connection.message()
        connection.finish(message)
        wait_until(lambda: nsqd.unfinished("invoices", "ledger") == 0, "it is finished")
    return message.id.decode()
