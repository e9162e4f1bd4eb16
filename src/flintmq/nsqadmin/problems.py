"""The findings about a deployment: what does not work, what will bite, and what is good to know.

Rules of this file: no IO; a finding says what was seen and what to do, and leads to the page about it. Many of one kind
are ``SHOWN_MAX`` and a count. A cluster is judged by :mod:`flintmq.client.admin.health`, as ``flintmq doctor`` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast
from urllib.parse import quote

from flintmq.client.admin.health import troubles
from flintmq.client.admin.results import ClusterStatus
from flintmq.nsqadmin.snapshots import Snapshot
from flintmq.nsqadmin.views import FindingRow, Level, Missing, QueryRow, TopicRow

SHOWN_MAX = 20
GROWING_MIN = 1000
"""Messages that wait, below which growing is nobody's concern."""

BEHIND_S = 300.0
"""Age of the oldest message that a query on Spark has not read, below which it is not behind."""

_ORDER = ("problem", "warning", "note", "ok")
_ADVICE = {
    "down": "is it running, and is this its address? a firewall in between?",
    "slow": "look at the load of its machine, and at its disk",
    "refused": "does it ask for permissions? --http-client-token-file, --http-client-tls-cert",
    "unreadable": "is this the HTTP port of such a daemon?",
}


def findings(
    found: Snapshot,
    lookupd_count: int,
    status: ClusterStatus | None,
    missing: Iterable[Missing],
    queries: Iterable[QueryRow] = (),
    stale: Mapping[str, str] | None = None,
) -> list[FindingRow]:
    """Return everything that is not as it should be, the worst first.

    Args:
        lookupd_count: nsqlookupd that were asked.
        status: of the cluster; None: there is none.
        missing: who did not answer beside those of the snapshot.
        queries: on Spark.
        stale: why nsqlookupd do not know how the cluster is now, by address, where others of them do.
    """
    away = {each.address for several in found.away.values() for each in several} - found.nodes.keys()
    silent = [each for each in found.missing if status is None or each.address not in away]  # else among its troubles
    rows = [*_of_daemons([*silent, *missing]), *_of_nodes(found, lookupd_count)]
    if status is not None:
        rows += [
            FindingRow(
                level=cast(Level, each.level), subject=each.subject, text=each.text, advice=each.advice, path="/cluster"
            )
            for each in troubles(status)
        ]
    rows += _of_stale(stale or {})
    rows += _of_topics(found)
    rows += _cut([row for query in queries for row in _of_query(query)], "/")
    if not found.nodes and not found.missing:
        advice = "start nsqd with --lookupd-tcp-address of this nsqlookupd"
        rows.append(FindingRow(level="problem", subject="nodes", text="there is no nsqd", advice=advice, path="/nodes"))
    rows.sort(key=lambda row: _ORDER.index(row.level))
    if not rows:
        text = f"{len(found.nodes)} nsqd answer, and nothing stands out"
        rows.append(FindingRow(level="ok", subject="everything", text=text))
    return rows


def _of_daemons(missing: Iterable[Missing]) -> list[FindingRow]:
    unique = {(each.daemon, each.address): each for each in missing}
    rows = [
        FindingRow(
            level="problem",
            subject=f"{each.daemon} {each.address}",
            text=each.text,
            advice=_ADVICE[each.why],
            path=_path("nodes", each.address) if each.daemon == "nsqd" else "/lookup",
        )
        for each in unique.values()
    ]
    return _cut(rows, "/nodes")


def _of_stale(stale: Mapping[str, str]) -> list[FindingRow]:
    advice = (
        "consumers that ask it are sent to old leaders; others know: can the store be reached from there? see its log"
    )
    rows = [
        FindingRow(level="warning", subject=f"nsqlookupd {address}", text=why, advice=advice, path="/cluster")
        for address, why in stale.items()
    ]
    return _cut(rows, "/cluster")


def _of_nodes(found: Snapshot, lookupd_count: int) -> list[FindingRow]:
    rows: list[FindingRow] = []
    for address, node in found.nodes.items():
        subject, path = f"nsqd {address}", _path("nodes", address)
        if node.health not in ("", "OK"):
            text = f"it is not well: {node.health[:500]}"
            advice = "its log says more; damage is listed and acknowledged on its page"
            rows.append(FindingRow(level="problem", subject=subject, text=text, advice=advice, path=path))
        if node.is_out_of_date:
            text = f"its version {node.version} is older than that of others"
            rows.append(FindingRow(level="note", subject=subject, text=text, advice="upgrade it", path=path))
        if node.lookupd_count < lookupd_count:
            text = f"{node.lookupd_count} of {lookupd_count} nsqlookupd know it"
            advice = "give it --lookupd-tcp-address of all: consumers that ask another one do not find it"
            rows.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=path))
        if node.lookupd_count > lookupd_count > 0:
            text = f"it is registered {node.lookupd_count} times with {lookupd_count} nsqlookupd"
            advice = "several nsqd have one --broadcast-address and port: each needs its own"
            rows.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=path))
    return _cut(rows, "/nodes")


def _of_topics(found: Snapshot) -> list[FindingRow]:
    lonely: list[FindingRow] = []
    growing: list[FindingRow] = []
    stopped: list[FindingRow] = []
    for name, topic in found.topics.items():
        path = _path("topics", name)
        if topic.paused:
            stopped.append(_paused(f"topic {name}", topic.depth, path))
        if topic.depth and not topic.channel_count:
            text = f"{topic.depth:,} messages wait for the first channel"
            lonely.append(
                FindingRow(level="note", subject=f"topic {name}", text=text, advice="is a consumer missing?", path=path)
            )
        if topic.waiting >= GROWING_MIN and (topic.growth_per_s or 0) > 0:
            growing.append(_growing(name, topic, path))
        for channel, row in found.channels[name].items():
            subject, where = f"channel {name}/{channel}", _path("topics", name, channel)
            if row.paused:
                stopped.append(_paused(subject, row.depth, where))
            elif row.skipped:
                advice = "unskip it, if that was not wanted"
                text = "it finishes everything without delivering it"
                stopped.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=where))
            elif row.depth and not row.client_count:
                text = f"{row.depth:,} messages wait, and no consumer is connected"
                advice = "start its consumer, or delete the channel if nobody needs it"
                lonely.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=where))
    inactive = sum(row.is_inactive for row in found.topics.values())
    rows = [*_cut(growing, "/topics"), *_cut(lonely, "/topics"), *_cut(stopped, "/topics")]
    if inactive:
        text = f"{inactive} topics are on no nsqd; nsqlookupd remembers their names"
        advice = "delete them, if nothing will publish to them again"
        rows.append(FindingRow(level="note", subject="topics", text=text, advice=advice, path="/lookup"))
    return rows


def _of_query(query: QueryRow) -> list[FindingRow]:
    """Return the findings about a query on Spark: it failed, nothing is heard of it, or it falls behind."""
    subject = f"Spark query {query.name}"
    topics = dict.fromkeys(log.topic for log in query.logs)
    path = _path("topics", next(iter(topics))) if len(topics) == 1 else ""
    rows = []
    if query.state == "failed":
        text, advice = f"it has failed: {query.error[:300]}", "its checkpoint goes on where it was: start it again"
        rows.append(FindingRow(level="problem", subject=subject, text=text, advice=advice, path=path))
    elif query.state == "silent":
        text = "nothing was heard of its driver for more than a minute"
        advice = "does the driver still run, and does it reach this nsqadmin?"
        rows.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=path))
    if query.messages and (query.seconds or 0) >= BEHIND_S:
        text = f"{query.messages:,} messages are unread, the oldest for {query.seconds or 0:,.0f} s"
        advice = "start it again" if query.state != "running" else "it is too slow, or its trigger comes too seldom"
        rows.append(FindingRow(level="warning", subject=subject, text=text, advice=advice, path=path))
    return rows


def _paused(subject: str, depth: int, path: str) -> FindingRow:
    text = f"it is paused, and {depth:,} messages wait" if depth else "it is paused"
    advice = "unpause it, if that was not wanted"
    return FindingRow(level="warning" if depth else "note", subject=subject, text=text, advice=advice, path=path)


def _growing(name: str, topic: TopicRow, path: str) -> FindingRow:
    text = f"{topic.waiting:,} messages wait, {topic.growth_per_s:,.0f} more each second"
    advice = "consumers are too slow or too few: look at the shares of its channels' consumers"
    return FindingRow(level="warning", subject=f"topic {name}", text=text, advice=advice, path=path)


def _cut(rows: list[FindingRow], path: str) -> list[FindingRow]:
    """Return the worst of one kind, and how many more there are."""
    rows.sort(key=lambda row: _ORDER.index(row.level))
    more = len(rows) - SHOWN_MAX
    if more <= 0:
        return rows
    last = FindingRow(level=rows[SHOWN_MAX].level, subject="and more", text=f"{more} more of these", path=path)
    return [*rows[:SHOWN_MAX], last]


def _path(*words: str) -> str:
    return "".join("/" + quote(word, safe="") for word in words)


__all__ = ["findings"]
