"""What nsqlookupd says of plain topics whose messages may carry headers. Source: docs/headers.md."""

from __future__ import annotations

from typing import Any

from tests.integration.daemons import Daemons, wait_until


def test_nsqlookupd_says_that_a_plain_topic_has_headers(daemons: Daemons):
    """Only who asks for it is told, and only of such topics; it holds for an nsqd that comes back too."""
    nsqlookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd(f"--lookupd-tcp-address={nsqlookupd.tcp[0]}:{nsqlookupd.tcp[1]}")
    nsqd.post("/topic/create?topic=plain")
    nsqd.post("/topic/create?topic=extended&extend=true")
    nsqd.post("/channel/create?topic=extended&channel=c")

    def ask(target: str) -> Any:
        answer = nsqlookupd.get(target)
        return answer.get("data", answer)  # the redesigned NSQ's questions are answered in an envelope

    def meta(topic: str) -> Any:
        return ask(f"/lookup?topic={topic}&metainfo=true").get("meta")

    for _ in range(2):
        wait_until(lambda: meta("extended") is not None, "registered")
        assert meta("extended")["partition_num"] == 0 and meta("extended")["extend_support"] is True
        assert "meta" not in ask("/lookup?topic=extended")
        answer = ask("/lookup?topic=plain&metainfo=true")
        assert "meta" not in answer and len(answer["producers"]) == 1
        assert ask("/lookup?topic=extended&access=w")["channels"] == ["c"]
        rows = ask("/topics?metaInfo=true")["meta_info"]
        assert {row["topic_name"]: row["extend_support"] for row in rows} == {"plain": False, "extended": True}
        nsqd.restart()
