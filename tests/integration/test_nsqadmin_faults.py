"""nsqadmin in front of daemons that are down, slow, lying or of another kind, and of visitors who are no better."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import parse_qsl, urlencode

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import SOON_S, Answer, Daemons, Nsqadmin, Nsqd, Nsqlookupd, a_few_times, wait_until
from tests.integration.test_nsqadmin_rights import FORM, HTML, csrf_of
from tests.integration.utilities import flintmq

from flintmq.nsqadmin.server import CONNECTION_COUNT_MAX

INFO = {"version": "1.3.0", "broadcast_address": "127.0.0.1", "hostname": "liar", "tcp_port": 1}


class Liar:
    """An HTTP server that answers each path as it is told; None: it never answers."""

    def __init__(self, answers: dict[str, bytes | None] | bytes | None) -> None:
        self.answers = answers
        self._gone = threading.Event()
        liar = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                answers = liar.answers
                path = self.path.partition("?")[0]
                body = answers.get(path, b"{}") if isinstance(answers, dict) else answers
                if body is None:
                    liar._gone.wait()
                    return
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    self.wfile.write(body)

            def do_POST(self) -> None:
                self.do_GET()

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._gone.set()
        self._server.shutdown()
        self._server.server_close()


StartLiar = Callable[[Any], Liar]


@pytest.fixture
def liar() -> Iterator[StartLiar]:
    started: list[Liar] = []

    def start(answers: Any) -> Liar:
        started.append(Liar(answers))
        return started[-1]

    yield start
    for each in started:
        each.close()


def unused() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return f"127.0.0.1:{found.getsockname()[1]}"


def admin_of(daemons: Daemons, *nsqds: str, flags: tuple[str, ...] = ()) -> Nsqadmin:
    return daemons.nsqadmin("--http-address=127.0.0.1:0", *(f"--nsqd-http-address={each}" for each in nsqds), *flags)


def http_of(daemon: Nsqd | Nsqlookupd) -> str:
    return f"127.0.0.1:{daemon.http[1]}"


def with_topic(nsqd: Nsqd) -> Nsqd:
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    nsqd.publish("t", b"message")
    return nsqd


def test_whoever_does_not_answer_is_named_and_the_rest_is_shown(daemons: Daemons, nsqd: Nsqd, liar: StartLiar):
    with_topic(nsqd)
    down = unused()
    wrong = [liar(b"<html>I am no nsqd</html>"), liar({"/stats": b'{"topics": 7}', "/info": b"[]"}), liar(b"")]
    slow = liar(None)
    nsqadmin = admin_of(daemons, http_of(nsqd), down, slow.address, *(each.address for each in wrong))
    view = nsqadmin.get("/api/v2/topics")
    assert [row["name"] for row in view["topics"]] == ["t"]
    why = {each["address"]: each["why"] for each in view["missing"]}
    assert why == {down: "down", slow.address: "slow", **{each.address: "unreadable" for each in wrong}}
    rows = {row["address"]: row for row in nsqadmin.get("/api/v2/nodes")["nodes"]}
    assert rows[http_of(nsqd)]["problem"] is None
    assert all(rows[address]["problem"]["why"] == reason for address, reason in why.items())
    found = nsqadmin.get("/api/topics/t")
    assert found["message_count"] == 1
    assert found["message"].startswith("WARNING: ") and down in found["message"]
    subjects = {row["subject"] for row in nsqadmin.get("/api/v2/problems")["findings"] if row["level"] == "problem"}
    assert {f"nsqd {address}" for address in why} <= subjects
    page = nsqadmin.request("GET", "/topics")
    assert page.status == 200 and down.encode() in page.body


def test_no_page_waits_longer_than_two_seconds_for_a_dead_node(daemons: Daemons, nsqd: Nsqd, liar: StartLiar):
    with_topic(nsqd)
    nsqadmin = admin_of(daemons, http_of(nsqd), liar(None).address)

    def attempt(_number: int) -> None:
        for path in ("/api/v2/topics/t", "/api/topics/t", "/nodes"):
            began = time.monotonic()
            assert nsqadmin.request("GET", path).status == 200
            assert time.monotonic() - began < 4.0, path  # two questions one after the other, each bounded by 1.8 s

    a_few_times(attempt)


def test_when_nobody_answers_the_api_says_so(daemons: Daemons, liar: StartLiar):
    lookupd = liar(b"garbage")
    nsqadmin = daemons.nsqadmin("--http-address=127.0.0.1:0", f"--lookupd-http-address={lookupd.address}")
    for path in ("/api/topics", "/api/topics/t", "/api/topics/t/c", "/api/nodes", "/api/nodes/x:1", "/api/counter"):
        answer = nsqadmin.request("GET", path)
        assert answer.status == 502, path
        assert answer.json["message"].startswith("UPSTREAM_ERROR: nsqlookupd "), path
    assert nsqadmin.request("GET", "/").status == 200


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_means_nothing_does_not_end_it(daemons: Daemons, number: signal.Signals):
    nsqadmin = admin_of(daemons, "127.0.0.1:1")
    nsqadmin.send_signal(number)
    assert nsqadmin.request("GET", "/ping").status == 200
    nsqadmin.stop()


def test_nodes_are_those_that_a_nsqlookupd_names_now(daemons: Daemons):
    """One that knows of none has answered; when none answers, those of earlier are for the pages for people alone."""
    nsqlookupd, empty = daemons.nsqlookupd(), daemons.nsqlookupd()
    nsqd = daemons.nsqd("--lookupd-tcp-address={}:{}".format(*nsqlookupd.tcp), "--broadcast-address=127.0.0.1")
    wait_until(lambda: nsqlookupd.get("/nodes")["producers"], "it has registered")
    lookups = [f"--lookupd-http-address={http_of(each)}" for each in (nsqlookupd, empty)]
    nsqadmin = daemons.nsqadmin("--http-address=127.0.0.1:0", *lookups)
    assert len(nsqadmin.whole("/api/nodes")["nodes"]) == 1
    nsqlookupd.kill()
    late = daemons.nsqadmin("--http-address=127.0.0.1:0", *lookups)

    def found() -> Any:
        answer = late.request("GET", "/api/nodes")
        return answer.json if answer.status == 200 else None  # the other one may be late as well

    assert wait_until(found)["nodes"] is None
    assert wait_until(found)["message"].startswith(f"WARNING: nsqlookupd {http_of(nsqlookupd)}")
    empty.kill()
    for path in ("/api/nodes", f"/api/nodes/{http_of(nsqd)}"):
        answer = nsqadmin.request("GET", path)
        assert answer.status == 502 and answer.json["message"].startswith("UPSTREAM_ERROR: nsqlookupd "), path
    assert http_of(nsqd) in nsqadmin.request("GET", "/nodes").text


def test_names_and_words_of_a_liar_are_shown_and_never_run(daemons: Daemons, liar: StartLiar):
    evil = "<script>alert(1)</script>"
    stats = {
        "version": evil, "health": evil, "topics": [
            {"topic_name": evil, "channels": []},
            {"topic_name": "t", "channels": [{"channel_name": "c", "clients": [
                dict.fromkeys(("client_id", "hostname", "user_agent", "remote_address", "auth_identity"), evil),
            ]}]},
        ],
    }  # fmt: skip
    node = liar({"/stats": json.dumps(stats).encode(), "/info": json.dumps({**INFO, "hostname": evil}).encode()})
    nsqadmin = admin_of(daemons, node.address)
    for path in (
        "/",
        "/topics",
        "/topics/t",
        "/topics/t/c",
        "/nodes",
        f"/nodes/{node.address}",
        "/problems",
        "/counter",
    ):
        answer = nsqadmin.request("GET", path)
        assert answer.status == 200, path
        assert b"<script>alert" not in answer.body, path
    assert nsqadmin.get("/api/topics")["topics"] == ["t"]
    assert any("names that nothing can have" in note for note in nsqadmin.get("/api/v2/topics")["notes"])
    for path in (
        "/topics/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/nodes/%3Cscript%3Ealert(1)%3C%2Fscript%3E",
        "/%3Cscript%3E",
    ):
        answer = nsqadmin.request("GET", path, None, {"Accept": "text/html"})
        assert answer.status in (400, 404), path
        assert b"<script>alert" not in answer.body and b"<script>" not in answer.body.replace(b"<script ", b""), path


def test_a_node_that_does_not_say_all_of_itself_is_named(daemons: Daemons, liar: StartLiar):
    """Else its page would look like that of a node without anything to drain or acknowledge."""
    ours = json.dumps({**INFO, "flintmq_version": "0.2.0"}).encode()
    node = liar({"/stats": b'{"topics": []}', "/info": ours, "/drain": None})
    nsqadmin = admin_of(daemons, node.address)
    (missing,) = nsqadmin.get(f"/api/v2/nodes/{node.address}")["missing"]
    assert (missing["address"], missing["why"]) == (node.address, "slow")
    assert b"no answer within" in nsqadmin.request("GET", f"/nodes/{node.address}", None, {"Accept": "text/html"}).body


def test_a_huge_answer_is_a_failure_of_that_node_alone(daemons: Daemons, nsqd: Nsqd, liar: StartLiar):
    with_topic(nsqd)
    huge = liar({"/stats": b"[" * (4 * 1024 * 1024)})
    nsqadmin = admin_of(daemons, http_of(nsqd), huge.address)
    view = nsqadmin.get("/api/v2/topics")
    assert [row["name"] for row in view["topics"]] == ["t"]
    assert [each["address"] for each in view["missing"]] == [huge.address]
    assert nsqadmin.is_running


def test_a_change_that_one_node_did_not_make_says_which(daemons: Daemons, nsqd: Nsqd, liar: StartLiar):
    with_topic(nsqd)
    stats = json.dumps({"topics": [{"topic_name": "t", "channels": [{"channel_name": "c"}]}]}).encode()
    other = liar({"/stats": stats, "/info": json.dumps(INFO).encode(), "/channel/pause": None})
    nsqadmin = admin_of(daemons, http_of(nsqd), other.address, flags=("--http-client-request-timeout=1s",))
    answer = nsqadmin.request("POST", "/api/topics/t/c", b'{"action": "pause"}')
    assert answer.status == 200
    assert answer.json["message"] == f"WARNING: nsqd {other.address}: no answer within 1 s"
    assert nsqd.stats("t", "c")["paused"]


CHANGES: tuple[tuple[str, str, bytes, str], ...] = (
    ("POST", "/api/topics/t/c", b'{"action": "pause"}', "pause_channel"),
    ("POST", "/api/topics/t/c", b'{"action": "unpause"}', "unpause_channel"),
    ("POST", "/api/topics/t", b'{"action": "pause"}', "pause_topic"),
    ("POST", "/api/topics/t/c", b'{"action": "empty"}', "empty_channel"),
    ("POST", "/api/topics/t", b'{"action": "empty"}', "empty_topic"),
    ("POST", "/api/topics", b'{"topic": "t", "channel": "d"}', "create_topic"),
    ("DELETE", "/api/topics/t/c", b"", "delete_channel"),
    ("DELETE", "/api/topics/t", b"", "delete_topic"),
)
"""Requests of NSQ's API, in an order in which each has something to do, and what the audit log calls them."""


def act(nsqadmin: Nsqadmin, name: str, **form: str) -> Answer:
    """The page after a change that somebody makes on a page."""
    csrf = csrf_of(nsqadmin.request("GET", "/create", None, HTML))
    answer = nsqadmin.request("POST", f"/act/{name}", urlencode({"csrf": csrf, **form}).encode(), FORM)
    if answer.status != 303:
        return answer
    return nsqadmin.request("GET", str(answer.headers["Location"]), None, HTML)


def last_audit(path: Path) -> tuple[str, str, list[str]]:
    """Action, outcome and failures of the last line of an audit log."""
    row = json.loads(path.read_text().splitlines()[-1])
    return row["action"], row["outcome"], row["failures"]


def test_a_change_that_did_not_reach_a_node_that_is_away_says_so(daemons: Daemons, nsqd: Nsqd, tmp_path: Path):
    with_topic(nsqd)
    away = with_topic(daemons.nsqd("--durability=os"))
    audit = tmp_path / "audit.log"
    nsqadmin = admin_of(daemons, http_of(nsqd), http_of(away), flags=(f"--audit-log={audit}",))
    assert nsqadmin.get("/api/topics/t")["message_count"] == 2
    away.kill()
    reason = f"nsqd {http_of(away)}: Connection refused"

    page = act(nsqadmin, "pause_topic", topic="t")
    assert page.status == 200 and "paused topic t. These did not do it, or could not be asked:" in page.text
    assert f"<li>{reason}" in page.text
    assert nsqd.stats("t")["paused"]
    for method, path, body, action in CHANGES:
        answer = nsqadmin.request(method, path, body)
        assert answer.status == 200, (action, answer.body)
        assert answer.json["message"].startswith(f"WARNING: {reason}"), action
        said, outcome, failures = last_audit(audit)
        assert (said, outcome, len(failures)) == (action, "partly", 1), failures
        assert failures[0].startswith(reason)
    assert not nsqd.get("/stats?format=json&topic=t")["topics"]

    answer = nsqadmin.request("DELETE", "/api/topics/t")  # only who is away may have it
    assert answer.status == 502 and answer.json["message"].startswith(f"UPSTREAM_ERROR: {reason}")
    away.start()
    row = away.stats("t", "c")
    assert (row["depth"], row["paused"]) == (1, False)
    assert nsqadmin.request("DELETE", "/api/topics/t").json == {"message": ""}
    assert last_audit(audit) == ("delete_topic", "done", [])
    assert nsqadmin.request("DELETE", "/api/topics/t").status == 404


def test_a_change_that_nobody_could_be_asked_for_has_failed(daemons: Daemons, nsqd: Nsqd, tmp_path: Path):
    audit = tmp_path / "audit.log"
    nsqadmin = admin_of(daemons, http_of(with_topic(nsqd)), unused(), flags=(f"--audit-log={audit}",))
    assert nsqadmin.get("/api/topics/t")["message_count"] == 1
    nsqd.kill()
    for method, path, body, action in CHANGES:
        answer = nsqadmin.request(method, path, body)
        assert answer.status == 502, action
        assert answer.json["message"].startswith("UPSTREAM_ERROR: nsqd ") and http_of(nsqd) in answer.json["message"]
        assert last_audit(audit)[:2] == (action, "failed")
    page = act(nsqadmin, "pause_topic", topic="t")
    assert page.status == 502 and http_of(nsqd) in page.text


def test_a_change_while_a_nsqlookupd_is_away_says_that_its_nsqd_were_not_asked(daemons: Daemons, tmp_path: Path):
    lookupds = [daemons.nsqlookupd() for _ in range(2)]
    nsqds = [
        with_topic(daemons.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:{each.tcp[1]}"))
        for each in lookupds
    ]
    for each in lookupds:
        wait_until(lambda each=each: "c" in each.channels("t"), "t and c are registered")  # type: ignore[misc]
    lookupds[1].kill()
    audit = tmp_path / "audit.log"
    nsqadmin = daemons.nsqadmin(
        "--http-address=127.0.0.1:0", f"--audit-log={audit}",
        *(f"--lookupd-http-address=127.0.0.1:{each.http[1]}" for each in lookupds),
    )  # fmt: skip
    reason = f"nsqlookupd 127.0.0.1:{lookupds[1].http[1]}: Connection refused"

    page = act(nsqadmin, "pause_topic", topic="t")
    assert "paused topic t. These did not do it, or could not be asked:" in page.text
    assert f"<li>{reason}" in page.text and "(nsqd that only it knows were not asked)" in page.text
    assert [each.stats("t")["paused"] for each in nsqds] == [True, False]
    for method, path, body, action in CHANGES:
        answer = nsqadmin.request(method, path, body)
        assert answer.status == 200, (action, answer.body)
        assert answer.json["message"].startswith(f"WARNING: {reason}"), action
        assert answer.json["message"].endswith("(nsqd that only it knows were not asked)"), action
        said, outcome, failures = last_audit(audit)
        assert (said, outcome, len(failures)) == (action, "partly", 1), failures
        assert failures[0].startswith(reason)
    assert not nsqds[0].get("/stats?format=json&topic=t")["topics"]
    assert nsqds[1].stats("t", "c")["depth"] == 1


def test_dead_letters_behind_hundreds_of_other_topics_are_listed(daemons: Daemons, liar: StartLiar):
    names = [*(f"t{number:04}" for number in range(600)), "zzz", "zzz.dead"]
    stats = {"version": "1.3.0", "health": "OK", "topics": [{"topic_name": name} for name in names]}
    node = liar({"/stats": json.dumps(stats).encode(), "/info": json.dumps(INFO).encode()})
    page = admin_of(daemons, node.address).request("GET", "/dead-letters", None, HTML).text
    assert 'href="/dead-letters/zzz">zzz</a>' in page and 'href="/topics/zzz.dead"' in page
    assert "No topic has dead letters" not in page


def test_dead_letters_of_a_node_that_is_away_are_not_said_to_be_requeued(daemons: Daemons, nsqd: Nsqd, tmp_path: Path):
    with_topic(nsqd)
    for path in ("/topic/create?topic=t.dead", "/channel/create?topic=t.dead&channel=nsqadmin"):
        nsqd.post(path)
    nsqd.publish("t.dead", b"one", b"two", b"three")
    nsqd.wait_given("t.dead")
    audit, away = tmp_path / "audit.log", unused()
    nsqadmin = admin_of(daemons, http_of(nsqd), away, flags=(f"--audit-log={audit}",))
    (first, *_) = nsqadmin.get("/api/v2/dead-letters/t")["messages"]
    assert act(nsqadmin, "requeue_dead_letters", topic="t", message_id=first["message_id"]).status == 200
    assert last_audit(audit) == ("requeue_dead_letters", "done", []), "the one that was asked for is found"
    page = act(nsqadmin, "requeue_dead_letters", topic="t")
    assert "requeued dead letters of t (2). These did not do it, or could not be asked:" in page.text
    action, outcome, failures = last_audit(audit)
    assert (action, outcome, len(failures)) == ("requeue_dead_letters", "partly", 1)
    assert failures[0].startswith(f"nsqd {away}: Connection refused")
    assert act(nsqadmin, "requeue_dead_letters", topic="t").status == 502, "there may be more where nobody could look"


def test_a_nsqlookupd_without_the_coordination_store_that_others_have_is_named(daemons: Daemons, liar: StartLiar):
    def lookupd(**told: Any) -> Liar:
        master = {"lookupd": "m", "incarnation": "i", "host": "m", "tcp_port": 4160, "http_port": 4161}
        status = {
            "cluster": "default", "cluster_id": "id", "problem": "", "revision": 5, "is_master": not told,
            "master": master, "lookupds": [master], "nodes": [], "topics": [], "store_away_since": None, **told,
        }  # fmt: skip
        return liar({"/cluster/status": json.dumps(status).encode(), "/cluster/moves": b"[]", "/nodes": b"{}"})

    whole = lookupd()
    away, apart = lookupd(store_away_since=1_795_967_800.5, master=None), lookupd(problem="the store was emptied")
    flags = (f"--lookupd-http-address={each.address}" for each in (away, whole, apart))
    nsqadmin = daemons.nsqadmin("--http-address=127.0.0.1:0", *flags)

    def found(subject: str, level: str) -> dict[str, dict[str, str]]:
        rows = {row["subject"]: row for row in nsqadmin.get("/api/v2/problems")["findings"]}
        return rows if subject in rows and rows[subject]["level"] == level else {}

    findings = wait_until(partial(found, f"nsqlookupd {away.address}", "warning"), "it is noticed")
    stale = findings[f"nsqlookupd {away.address}"]
    text = "this nsqlookupd is without the coordination store since 2026-11-29 15:56:40 UTC"
    assert stale["text"].startswith(text) and "old leaders" in stale["advice"]
    assert findings[f"nsqlookupd {apart.address}"]["text"].endswith("takes no part: the store was emptied")
    assert f"nsqlookupd {whole.address}" not in findings
    view = nsqadmin.whole("/api/v2/cluster")
    assert (view["master"], view["problem"]) == ("m:4161", ""), "as the one that knows says"
    assert [note.partition(": ")[0] for note in view["notes"]] == [
        f"nsqlookupd {away.address}", f"nsqlookupd {apart.address}",
    ]  # fmt: skip
    for path in ("/", "/problems", "/cluster"):
        assert text in nsqadmin.request("GET", path, None, HTML).text, path
    whole.close()
    findings = wait_until(partial(found, "cluster default", "problem"), "nobody knows any more")
    assert f"nsqlookupd {away.address}" not in findings, "nobody knows better now: it is the cluster's problem"
    assert text in findings["cluster default"]["text"]


def test_an_unreachable_notification_endpoint_is_logged_and_ends_nothing(daemons: Daemons, nsqd: Nsqd):
    with_topic(nsqd)
    nsqadmin = admin_of(daemons, http_of(nsqd), flags=(f"--notification-http-endpoint=http://{unused()}/x",))
    assert nsqadmin.request("POST", "/api/topics/t", b'{"action": "pause"}').status == 200
    wait_until(lambda: "notification not sent" in nsqadmin.whole_log, "it is in the log")
    assert nsqadmin.request("POST", "/api/topics/t", b'{"action": "unpause"}').status == 200


def test_an_nsqd_that_wants_tls_is_asked_over_it(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    server, client = certificates.server, certificates.client("good")
    nsqd = daemons.nsqd(
        "--durability=os", "--https-address=127.0.0.1:0", f"--tls-cert={server.cert}", f"--tls-key={server.key}",
        "--tls-required=true", f"--tls-root-ca-file={certificates.ca}", "--tls-client-auth-policy=require-verify",
    )  # fmt: skip
    stranger = admin_of(daemons, http_of(nsqd), flags=(f"--http-client-tls-root-ca-file={certificates.ca}",))
    (missing,) = stranger.get("/api/v2/nodes")["missing"]
    assert missing["address"] == http_of(nsqd)
    nsqadmin = admin_of(
        daemons, http_of(nsqd),
        flags=(
            f"--http-client-tls-root-ca-file={certificates.ca}", f"--http-client-tls-cert={client.cert}",
            f"--http-client-tls-key={client.key}",
        ),
    )  # fmt: skip
    assert nsqadmin.get("/api/v2/nodes")["missing"] == []
    assert nsqadmin.request("POST", "/api/topics", b'{"topic": "secured"}').json == {"message": ""}
    assert nsqadmin.get("/api/topics") == {"topics": ["secured"], "message": ""}
    wrong = daemons.nsqadmin("--http-address=127.0.0.1:0", f"--nsqd-http-address={http_of(nsqd)}")
    (missing,) = wrong.get("/api/v2/nodes")["missing"]
    assert (missing["why"], missing["text"].startswith("TLS: ")) == ("refused", True)


# -- visitors ----------------------------------------------------------------------------------------------------------


def test_a_body_that_is_too_large_or_never_comes_is_refused(daemons: Daemons, nsqd: Nsqd):
    nsqadmin = admin_of(daemons, http_of(nsqd))
    answer = nsqadmin.request("POST", "/api/topics", b" " * (64 * 1024 + 1))
    assert (answer.status, answer.json["message"]) == (413, "BODY_TOO_BIG: at most 65536 bytes")
    with socket.create_connection(nsqadmin.http, SOON_S + 15) as slow:
        slow.sendall(b"POST /api/topics HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{")
        assert slow.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_request_that_is_never_complete_is_ended(daemons: Daemons, nsqd: Nsqd):
    nsqadmin = admin_of(daemons, http_of(nsqd))
    with contextlib.ExitStack() as stack:
        waiting = [stack.enter_context(socket.create_connection(nsqadmin.http, SOON_S + 20)) for _ in range(50)]
        for number, each in enumerate(waiting[1:]):
            each.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * number)
        assert nsqadmin.request("GET", "/ping").status == 200
        for each in waiting:
            assert each.recv(4096)[:12] in (b"", b"HTTP/1.1 400")


def test_too_many_connections_are_refused_and_told_once(daemons: Daemons, nsqd: Nsqd):
    nsqadmin = admin_of(daemons, http_of(nsqd))

    def is_answered() -> bool:
        try:
            return nsqadmin.request("GET", "/ping").status == 200
        except (OSError, HTTPException):
            return False

    with contextlib.ExitStack() as opened:
        silent = [opened.enter_context(socket.create_connection(nsqadmin.http)) for _ in range(CONNECTION_COUNT_MAX)]
        for _ in range(20):
            with socket.create_connection(nsqadmin.http, SOON_S) as one_more, contextlib.suppress(ConnectionError):
                assert one_more.recv(1) == b""
        silent.pop().close()
        wait_until(is_answered, "there is room for one")
    assert nsqadmin.whole_log.count("another one is refused") == 1


def test_a_head_without_end_is_refused(daemons: Daemons, nsqd: Nsqd):
    nsqadmin = admin_of(daemons, http_of(nsqd))
    with socket.create_connection(nsqadmin.http, SOON_S) as endless:
        with contextlib.suppress(OSError):
            endless.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * (1024 * 1024))
        with contextlib.suppress(ConnectionResetError):
            assert endless.recv(64)[:12] in (b"", b"HTTP/1.1 400")
    assert nsqadmin.request("GET", "/ping").status == 200


def test_it_starts_as_nsq_s_does_or_says_why_not(daemons: Daemons):

    for flags, said in (
        ([], "--nsqd-http-address or --lookupd-http-address required"),
        (
            ["--nsqd-http-address=a:1", "--lookupd-http-address=b:1"],
            "use --nsqd-http-address or --lookupd-http-address not both",
        ),
        (["--nsqd-http-address=a:1", "--http-client-tls-key=k"], "must be specified with --http-client-tls-key"),
        (["--nsqd-http-address=a:1", "--allow-config-from-cidr=x"], "failed to parse --allow-config-from-cidr (x)"),
        (["--nsqd-http-address=a:1", "--users-file=/nonexistent"], "--users-file=/nonexistent: it cannot be read"),
        (["--nsqd-http-address=a:1", "--history-path=/nonexistent/h"], "--history-path=/nonexistent/h: unable to open"),
        (["--nsqd-http-address=a:1", "--http-address=256.0.0.1:1"], "256.0.0.1"),
    ):
        done = flintmq("nsqadmin", *flags)
        assert done.returncode in (1, 2), done
        assert said in done.stderr and "Traceback" not in done.stderr, done.stderr


class Youzans(BaseHTTPRequestHandler):
    """Youzan's nsqlookupd and nsqd on one port, as far as nsqadmin's changes of a topic need them."""

    topics: ClassVar[set[str]]
    refused: ClassVar[list[str]]

    def _answer(self, status: int, data: object, word: str = "OK") -> None:
        told = {"status_code": status, "status_txt": word, "data": data} if status == 200 else {"message": word}
        body = json.dumps(told).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        port = int(self.headers["Host"].rpartition(":")[2])
        me = {"broadcast_address": "127.0.0.1", "hostname": "yz", "tcp_port": 1, "http_port": port, "version": VERSION}
        row = {"is_leader": True, "depth": 70, "backend_start": 10, "message_count": 2, "channels": []}
        rows = [
            {**row, "topic_name": name, "topic_full_name": f"{name}-{number}", "topic_partition": str(number)}
            for name in sorted(self.topics)
            for number in (0, 1)
        ]
        known: dict[str, object] = {
            "/topics": {"topics": sorted(self.topics)},
            "/nodes": {"producers": [{**me, "topics": sorted(self.topics), "tombstones": []}]},
            "/lookup": {"channels": [], "producers": [me], "partitions": {}},
            "/info": me,
            "/stats": {"version": VERSION, "health": "OK", "topics": rows},
        }
        path, _, query = self.path.partition("?")
        found = known.get(path)
        if path == "/lookup" and dict(parse_qsl(query))["topic"] not in self.topics:
            found = None
        self._answer(200, found) if found is not None else self._answer(404, None, "NOT_FOUND")

    def do_POST(self) -> None:
        path, _, query = self.path.partition("?")
        given = dict(parse_qsl(query))
        needed = {"/topic/create": ("partition_num", "replicator"), "/topic/delete": ("partition",)}.get(path)
        lacks = [name for name in needed or () if name not in given]
        if needed is None or lacks:
            word = f"MISSING_ARG_TOPIC_{lacks[0].upper()}" if lacks else "NOT_FOUND"
            self.refused.append(f"{path} {word}")
            self._answer(400 if lacks else 404, None, word)
            return
        (self.topics.add if path == "/topic/create" else self.topics.discard)(given["topic"])
        self._answer(200, None)

    def log_message(self, *args: object) -> None:
        pass


VERSION = "0.3.7-HA.1.13.0"


def test_a_topic_of_youzans_daemons_is_made_shown_and_deleted(daemons: Daemons):
    class Handler(Youzans):
        topics: ClassVar[set[str]] = {"t"}
        refused: ClassVar[list[str]] = []

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        nsqadmin = daemons.nsqadmin("--http-address=127.0.0.1:0", f"--lookupd-http-address={address}")
        partitions = nsqadmin.get("/api/v2/topics/t")["partitions"]
        assert [(row["number"], row["leader_node"], row["message_bytes"]) for row in partitions] == [
            (0, address, 60), (1, address, 60),
        ]  # fmt: skip
        answer = nsqadmin.request("POST", "/api/topics/t", b'{"action": "pause"}')
        assert answer.status == 502
        assert "knows no request /topic/pause: this kind or version of nsqd cannot do that" in answer.json["message"]
        assert nsqadmin.request("POST", "/api/topics", b'{"topic": "made"}').json == {"message": ""}
        assert Handler.topics == {"t", "made"}
        Handler.refused.clear()
        assert nsqadmin.request("DELETE", "/api/topics/t").json == {"message": ""}
        assert Handler.topics == {"made"} and not Handler.refused
        assert nsqadmin.request("DELETE", "/api/topics/t").status == 404
        server.shutdown()
