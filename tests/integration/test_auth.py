"""AUTH against an auth server of the test: who may do what, how long, who is told what (NSQ's TCP protocol)."""

from __future__ import annotations

import contextlib
import json
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import CLIENT_NAME, Certificates
from tests.conformance.protocol_helpers import topics
from tests.integration.auth_server import EVERYTHING, AuthServer, auth, authorized
from tests.integration.daemons import SOURCES, Connection, Daemons, Nsqd, mpub, mpub_body, pub, sized, wait_until
from tests.integration.upgraded import Upgraded


@pytest.fixture(scope="module")
def one_server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture(autouse=True)
def server(one_server: AuthServer) -> AuthServer:
    one_server.reset()
    return one_server


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, one_server: AuthServer) -> Iterator[Nsqd]:
    """An nsqd that asks ``server``; the tests of this file share it, each has a topic of its own."""
    daemons = Daemons(tmp_path_factory.mktemp("guarded"))
    try:
        yield daemons.nsqd(f"--auth-http-address={one_server.address}", "--log-level=debug", "--durability=os")
    finally:
        daemons.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic of this test."""
    return f"t{zlib.crc32(request.node.name.encode()):08x}"


def client_row(nsqd: Nsqd, topic: str) -> dict[str, Any]:
    """The row of the only producer of a topic."""
    rows: list[dict[str, Any]] = nsqd.get("/stats?format=json&include_mem=false")["producers"]
    (found,) = [row for row in rows if row["pub_counts"][0]["topic"] == topic]
    return found


# -- letting in --------------------------------------------------------------------------------------------------------


def test_without_auth_servers(nsqd: Nsqd):
    with nsqd.connect() as connection:
        assert connection.identify()["auth_required"] is False
        assert connection.error(auth()) == "E_AUTH_DISABLED AUTH disabled"
        assert connection.wait_closed() == []


def test_without_what_matches_patterns(daemons: Daemons, server: AuthServer, tmp_path: Path):
    """Where google-re2 cannot be installed: plain names work, a pattern lets nobody in, and the log says why."""
    (tmp_path / "sitecustomize.py").write_text('import sys\nsys.modules["re2"] = None\n')
    without = ("env", f"PYTHONPATH={tmp_path}:{SOURCES}")
    nsqd = daemons.nsqd(f"--auth-http-address={server.address}", "--durability=os", limits=without)
    assert "google-re2 is not installed: grants of auth servers may name topics and channels plainly, or" in nsqd.log
    server.grant({"permissions": ["subscribe", "publish"], "topic": "^orders$", "channels": ["bill", ".*"]})
    with authorized(nsqd) as connection:
        connection.ok(pub("orders", b"x"))
        connection.subscribe("orders", "billing", 1)
        connection.finish(connection.message())
    with authorized(nsqd) as connection:
        assert connection.error(pub("orders2", b"x")).startswith("E_UNAUTHORIZED ")
    server.grant({"permissions": ["publish"], "topic": "^orders$"}, {"permissions": ["publish"], "topic": "^(eu|us)_"})
    with nsqd.connect() as connection:
        assert connection.error(auth()) == "E_AUTH_FAILED AUTH failed"
        assert connection.wait_closed() == []
    told = "the regular expression '^(eu|us)_' needs the package google-re2, which is not installed here: pip install "
    assert told in nsqd.log
    with nsqd.connect() as connection:
        rule = {"type": 2, "inverse": False, "filter_ext_key": "k", "filter_data": "a+"}
        connection.send(b"IDENTIFY\n" + sized(json.dumps({"extend_support": True, "ext_filter": rule}).encode()))
        assert "needs the package google-re2" in connection.error()


@pytest.mark.parametrize("method", ["get", "post"])
def test_the_question_and_the_answer(daemons: Daemons, server: AuthServer, method: str):
    nsqd = daemons.nsqd(f"--auth-http-address={server.address}", f"--auth-http-request-method={method}")
    with nsqd.connect() as connection:
        assert connection.identify()["auth_required"] is True
        connection.send(auth("sess&me ü"))
        assert connection.response() == b'{"identity":"me","identity_url":"http://me","permission_count":1}'
        connection.ok(pub("t", b"x"))
        connection.subscribe("t", "c", 1)
        connection.finish(connection.message())
    expected = {"common_name": "", "remote_ip": "127.0.0.1", "secret": "sess&me ü", "tls": "false"}
    if method == "post":
        expected = {name: [value] for name, value in expected.items()}  # type: ignore[misc]
    assert server.questions == [{"method": method.upper(), "path": "/auth", **expected}]


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("SUB", b"SUB %s c\n"),
        ("PUB", b"PUB %s\n" + sized(b"x")),
        ("MPUB", b"MPUB %s\n" + sized(mpub_body([b"x"]))),
        ("DPUB", b"DPUB %s 1\n" + sized(b"x")),
        ("OFFSETS", b"OFFSETS %s\n"),
        ("FETCH", b"FETCH %s 0\n" + bytes(28)),
        ("CURSOR", b"CURSOR %s c 0 -1\n"),
    ],
)
def test_nothing_before_auth(guarded: Nsqd, server: AuthServer, topic: str, command: str, line: bytes):
    with guarded.connect() as connection:
        assert connection.error(line % topic.encode()) == f"E_AUTH_FIRST AUTH required before {command}"
        assert connection.wait_closed() == []
    assert server.questions == []
    assert topic not in topics(guarded)


def test_the_body_of_an_mpub_is_not_waited_for(guarded: Nsqd, server: AuthServer):
    with guarded.connect() as connection:
        assert connection.error(b"MPUB t\n") == "E_AUTH_FIRST AUTH required before MPUB"
    server.grant({"permissions": ["publish"], "topic": "^u$"})
    with authorized(guarded) as connection:
        assert connection.error(b"MPUB t\n") == 'E_UNAUTHORIZED AUTH failed for MPUB on "t" ""'


@pytest.mark.parametrize(
    ("status", "answer", "error"),
    [
        (200, {"ttl": 1, "authorizations": []}, "E_UNAUTHORIZED AUTH no authorizations found"),
        (200, {"ttl": 0, "authorizations": EVERYTHING}, "E_AUTH_FAILED AUTH failed"),
        (200, {"ttl": 1, "authorizations": [{"permissions": ["x"], "topic": ""}]}, "E_AUTH_FAILED AUTH failed"),
        (200, {"ttl": 1, "authorizations": [{"permissions": [], "topic": "("}]}, "E_AUTH_FAILED AUTH failed"),
        (200, "text", "E_AUTH_FAILED AUTH failed"),
        (403, {"ttl": 1, "authorizations": EVERYTHING}, "E_AUTH_FAILED AUTH failed"),
        (500, {}, "E_AUTH_FAILED AUTH failed"),
    ],
)
def test_who_is_not_let_in(guarded: Nsqd, topic: str, server: AuthServer, status: int, answer: Any, error: str):
    server.status, server.answer = status, answer
    with guarded.connect() as connection:
        connection.send(auth() + pub(topic, b"x"))  # nothing behind it is executed
        assert connection.error() == error
        assert connection.wait_closed() == []
    assert topic not in topics(guarded)


def test_servers_that_do_not_answer(daemons: Daemons, server: AuthServer):
    server.delay_s = 5
    nsqd = daemons.nsqd(
        "--auth-http-address=127.0.0.1:1",
        f"--auth-http-address={server.address}",
        "--http-client-request-timeout=200ms",
    )
    with nsqd.connect() as connection, nsqd.connect() as other:
        connection.send(auth())
        other.send(b"NOP\n")
        assert other.error(b"PUB t\n" + sized(b"x")) == "E_AUTH_FIRST AUTH required before PUB"
        assert connection.error() == "E_AUTH_FAILED AUTH failed"
    assert "failed to auth against http://127.0.0.1:1/auth - " in nsqd.log
    assert f"failed to auth against http://{server.address}/auth - no answer within 0.2 s" in nsqd.log


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"AUTH x\n", "E_INVALID AUTH invalid number of parameters"),
        (b"AUTH\n\x00\x00\x00\x00", "E_BAD_BODY AUTH invalid body size 0"),
        (b"AUTH\n\xff\xff\xff\xff", "E_BAD_BODY AUTH invalid body size -1"),
        (b"AUTH\n\x7f\xff\xff\xff", "E_BAD_BODY AUTH body too big 2147483647 > 5242880"),
    ],
)
def test_malformed(guarded: Nsqd, line: bytes, error: str):
    with guarded.connect() as connection:
        assert connection.error(line) == error


def test_only_once_and_only_at_the_start(guarded: Nsqd, topic: str):
    with authorized(guarded) as connection:
        assert connection.error(auth()) == "E_INVALID AUTH already set"
    with authorized(guarded) as connection:
        connection.subscribe(topic, "c")
        assert connection.error(auth()) == "E_INVALID cannot AUTH in current state"


def test_everything_in_one_packet(guarded: Nsqd, topic: str, server: AuthServer):
    """The answer of the auth server decides about what stands behind; nothing is lost, the order is kept."""
    server.delay_s = 0.1
    commands = auth() + pub(topic, b"1") + mpub(topic, [b"2", b"3"]) + b"SUB %s c\nRDY 10\n" % topic.encode()
    for cut in (len(commands), 9, 30):
        with guarded.connect() as connection:
            connection.send(commands[:cut])
            time.sleep(0.02)
            connection.send(commands[cut:])
            assert b"permission_count" in connection.response()
            connection.ok(count=3)
            received = connection.messages(3)
            assert [message.body for message in received] == [b"1", b"2", b"3"]
            connection.finish(*received)
            connection.settle()


def test_a_slow_answer_is_waited_for_whatever_the_heartbeat(guarded: Nsqd, topic: str, server: AuthServer):
    """nsqd does not read meanwhile, so it must not take the client for silent."""
    server.delay_s = 3.2
    with guarded.connect() as connection:
        connection.identify(heartbeat_interval=1000)
        connection.send(auth() + pub(topic, b"x"))
        assert b"permission_count" in connection.response()
        connection.ok()
        assert connection.heartbeat_count >= 2


def test_a_client_that_leaves_meanwhile(guarded: Nsqd, topic: str, server: AuthServer):
    server.delay_s = 3.0  # so long it has to leave
    for _ in range(5):
        with guarded.connect() as connection:
            connection.send(auth() + pub(topic, b"x"))
            wait_until(lambda: server.questions, "the question")
        server.questions.clear()
    server.delay_s = 0.0
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x"))
    assert guarded.stats(topic)["message_count"] == 1


def test_much_behind_auth_is_not_gathered(guarded: Nsqd, topic: str, server: AuthServer):
    """A client cannot make nsqd hold what it sends while the auth server thinks."""
    server.delay_s = 1.0
    with authorized(guarded) as warm:
        warm.ok(pub("warm", b"x"))
    before_bytes = guarded.resident_bytes()
    with guarded.connect() as connection:
        connection.send(auth())
        connection.socket.settimeout(0.5)
        with pytest.raises(TimeoutError):
            for _ in range(1000):
                connection.socket.sendall(pub(topic, bytes(100_000)))
        assert guarded.resident_bytes() - before_bytes < 8 * 1024 * 1024


# -- permissions -------------------------------------------------------------------------------------------------------


def test_permissions(guarded: Nsqd, server: AuthServer):
    server.grant(
        {"permissions": ["publish"], "topic": "^in$"},
        {"permissions": ["subscribe"], "topic": "^out$", "channels": ["^c$"]},
        {"permissions": ["subscribe", "publish"], "topic": "^both", "channels": [".*"]},
    )
    allowed = [
        pub("in", b"x"),
        mpub("in", [b"x"]),
        b"DPUB in 1\n" + sized(b"x"),
        b"SUB out c\n",
        b"SUB both_of_them d#ephemeral\n",
        pub("both", b"x"),
    ]
    for command in allowed:
        with authorized(guarded) as connection:
            connection.ok(command)
    refused = [
        (pub("out", b"x"), 'PUB on "out" ""'),
        (pub("in2", b"x"), 'PUB on "in2" ""'),
        (pub("IN", b"x"), 'PUB on "IN" ""'),
        (pub("in#ephemeral", b"x"), 'PUB on "in#ephemeral" ""'),
        (mpub("out", [b"x"]), 'MPUB on "out" ""'),
        (b"DPUB out 1\n" + sized(b"x"), 'DPUB on "out" ""'),
        (b"SUB in c\n", 'SUB on "in" "c"'),
        (b"SUB out cc\n", 'SUB on "out" "cc"'),
        (b"SUB out c#ephemeral\n", 'SUB on "out" "c#ephemeral"'),
        (b"OFFSETS in\n", 'OFFSETS on "in" ""'),
        (b"FETCH in 0\n" + bytes(28), 'FETCH on "in" ""'),
        (b"CURSOR in c 0 -1\n", 'CURSOR on "in" "c"'),
        (b"CURSOR out d 0 -1\n", 'CURSOR on "out" "d"'),
    ]
    for command, what in refused:
        with authorized(guarded) as connection:
            assert connection.error(command) == f"E_UNAUTHORIZED AUTH failed for {what}"
            assert connection.wait_closed() == []
    assert {"in", "out", "both", "both_of_them"} <= topics(guarded)
    assert not {"in2", "IN", "in#ephemeral"} & topics(guarded)


def test_stats_show_who_it_is(guarded: Nsqd, topic: str):
    with authorized(guarded) as connection, guarded.connect() as stranger:
        connection.ok(pub(topic, b"x"))
        stranger.send(b"NOP\n")
        row = client_row(guarded, topic)
        names = list(row)
        at = names.index("user_agent")
        assert names[at + 1 : at + 5] == ["authed", "auth_identity", "auth_identity_url", "topology_zone"]
        assert (row["authed"], row["auth_identity"], row["auth_identity_url"]) == (True, "me", "http://me")


def test_stats_leave_out_what_is_empty(guarded: Nsqd, topic: str, server: AuthServer):
    server.answer = {"ttl": 10, "authorizations": EVERYTHING}
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x"))
        row = client_row(guarded, topic)
        assert row["authed"] is True
        assert "auth_identity" not in row
        assert "auth_identity_url" not in row


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_the_certificate_s_name_is_told(daemons: Daemons, server: AuthServer, tmp_path: Path, policy: str):
    certificates = Certificates(tmp_path / "certificates")
    nsqd = daemons.nsqd(
        f"--auth-http-address={server.address}",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        f"--tls-root-ca-file={certificates.ca}",
        f"--tls-client-auth-policy={policy}",
        "--https-address=",
    )
    with Upgraded(nsqd.tcp) as connection:
        connection.upgrade(certificates.client_context("good" if policy == "require-verify" else "stranger"), "snappy")
        connection.send(auth())
        assert b"permission_count" in connection.response()
    (question,) = server.questions
    assert (question["common_name"], question["tls"]) == (CLIENT_NAME, "true")


# -- time --------------------------------------------------------------------------------------------------------------


def test_after_the_ttl_the_server_is_asked_again(guarded: Nsqd, topic: str, server: AuthServer):
    server.grant(*EVERYTHING, ttl=2)
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x") * 20, count=20)
        assert len(server.questions) == 1
        time.sleep(2.1)
        connection.ok(pub(topic, b"x") * 3 + mpub(topic, [b"y", b"z"]), count=4)
        assert len(server.questions) == 2
        assert server.questions[0] == server.questions[1]
    assert guarded.stats(topic)["message_count"] == 25


def test_what_is_granted_may_change(guarded: Nsqd, topic: str, server: AuthServer):
    server.grant(*EVERYTHING, ttl=1)
    with authorized(guarded) as connection, authorized(guarded) as consumer:
        connection.ok(pub(topic, b"x"))
        consumer.subscribe(topic, "c", 10)
        consumer.finish(consumer.message())
        server.grant({"permissions": ["subscribe"], "topic": ".*", "channels": [".*"]})
        time.sleep(1.1)
        assert connection.error(pub(topic, b"x")) == 'E_UNAUTHORIZED AUTH failed for PUB on "' + f'{topic}" ""'
        server.grant(*EVERYTHING)
        with authorized(guarded) as producer:
            producer.ok(pub(topic, b"y"))
        assert consumer.message().body == b"y"  # it may still subscribe


@pytest.mark.parametrize("change", [{"status": 500}, {"answer": {"ttl": 0}}])
def test_when_it_cannot_be_asked_again(guarded: Nsqd, topic: str, server: AuthServer, change: dict[str, Any]):
    server.grant(*EVERYTHING, ttl=1)
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x"))
        time.sleep(1.1)
        for name, value in change.items():
            setattr(server, name, value)
        assert connection.error(pub(topic, b"x") + pub(topic, b"y")) == "E_AUTH_FAILED AUTH failed"
        assert connection.wait_closed() == []
    assert guarded.stats(topic)["message_count"] == 1


def test_commands_wait_in_order_while_it_is_asked_again(guarded: Nsqd, topic: str, server: AuthServer):
    server.grant(*EVERYTHING, ttl=1)
    with authorized(guarded) as connection:
        time.sleep(1.1)
        server.delay_s = 0.2
        for number in range(50):
            connection.send(pub(topic, b"%d" % number))
            if number % 10 == 0:
                time.sleep(0.01)
        connection.send(b"SUB %s c\nRDY 100\n" % topic.encode())
        connection.ok(count=51)
        assert [message.body for message in connection.messages(50)] == [b"%d" % number for number in range(50)]


def publish_later(nsqd: Nsqd, server: AuthServer, topic: str, body: bytes) -> None:
    """Publish as somebody whose grant goes on."""
    before, status = server.answer, server.status
    server.status = 200
    server.grant(*EVERYTHING, ttl=before["ttl"])  # the consumer may ask just now
    with authorized(nsqd) as producer:
        server.answer, server.status = before, status
        producer.ok(pub(topic, body))


@contextlib.contextmanager
def consuming(nsqd: Nsqd, server: AuthServer, topic: str, ttl: int = 1) -> Iterator[Connection]:
    """A consumer whose grant ends soon; it does nothing but receive."""
    publish_later(nsqd, server, topic, b"first")
    server.grant(*EVERYTHING, ttl=ttl)
    with authorized(nsqd) as consumer:
        consumer.subscribe(topic, "c", 100)
        assert consumer.message().body == b"first"
        yield consumer


def test_deliveries_end_with_the_grant(guarded: Nsqd, topic: str, server: AuthServer):
    with consuming(guarded, server, topic) as consumer:
        server.grant({"permissions": ["subscribe"], "topic": "^another$", "channels": [".*"]}, ttl=1)
        assert consumer.error() == f'E_UNAUTHORIZED AUTH failed for SUB on "{topic}" "c"'
        publish_later(guarded, server, topic, b"second")
        assert consumer.wait_closed() == []
    assert guarded.unfinished(topic, "c") == 2
    wait_until(lambda: "what it was granted has ended" in guarded.log, "the log says why")


def test_deliveries_end_when_the_server_is_gone_for_longer_than_the_grant(
    guarded: Nsqd, topic: str, server: AuthServer
):
    with consuming(guarded, server, topic) as consumer:
        server.status = 500
        assert consumer.error() == "E_AUTH_FAILED AUTH failed"
        publish_later(guarded, server, topic, b"second")
        assert consumer.wait_closed() == []
    assert guarded.unfinished(topic, "c") == 2


def test_deliveries_wait_for_a_server_that_is_slow_and_go_on(guarded: Nsqd, topic: str, server: AuthServer):
    with consuming(guarded, server, topic) as consumer:
        server.delay_s = 1.5
        asked = len(server.questions)
        wait_until(lambda: len(server.questions) > asked, "it is asked again")
        consumer.finish()
        server.delay_s = 0
        publish_later(guarded, server, topic, b"second")
        assert consumer.message().body == b"second"


def test_a_grant_that_is_renewed_is_not_noticed(guarded: Nsqd, topic: str, server: AuthServer):
    with consuming(guarded, server, topic) as consumer:
        for number in range(3):
            asked = len(server.questions)
            wait_until(lambda: len(server.questions) > asked, "it is asked again")  # noqa: B023 - it ends here
            publish_later(guarded, server, topic, b"%d" % number)
            assert consumer.message().body == b"%d" % number
    asked = len(server.questions)
    wait_until(lambda: all(row["channels"][0]["client_count"] == 0 for row in [guarded.stats(topic)]), "it is gone")
    assert len(server.questions) <= asked + 1  # nobody asks about one that is gone


def test_a_failure_of_the_server_before_the_end_is_not_noticed(guarded: Nsqd, topic: str, server: AuthServer):
    with consuming(guarded, server, topic, ttl=2) as consumer:
        failures = guarded.log.count("AUTH cannot be renewed")
        server.status = 500
        wait_until(lambda: guarded.log.count("AUTH cannot be renewed") > failures, "the first try fails")
        server.status = 200
        asked = len(server.questions)
        wait_until(lambda: len(server.questions) > asked, "it is asked again")
        publish_later(guarded, server, topic, b"second")
        assert consumer.message().body == b"second"


def test_who_is_refused_by_status_is_closed_without_being_asked_about_again(
    guarded: Nsqd, topic: str, server: AuthServer
):
    with consuming(guarded, server, topic, ttl=3) as consumer:
        asked = len(server.questions)
        server.status = 403
        assert consumer.error() == "E_AUTH_FAILED AUTH failed"
        assert len(server.questions) == asked + 1


# -- secrets -----------------------------------------------------------------------------------------------------------


def test_what_an_auth_servers_url_has_in_it_is_nowhere_to_be_read(daemons: Daemons, server: AuthServer):
    """User, password and query reach the server; options, errors, log and debug pages show the rest of the URL."""
    url = f"http://somebody:pass-4712@{server.address}/auth?key=key-4713"
    nsqd = daemons.nsqd(f"--auth-http-address={url}", f"--auth-http-address={url}&more=1", "--log-level=debug")
    outputs: list[str] = []
    with authorized(nsqd) as connection:
        connection.ok(pub("t", b"x"))
        target, headers, _ = server.requests[0]
        assert "key=key-4713" in target and headers["Authorization"].startswith("Basic ")
        paths = ["/config/auth_http_addresses", "/stats?format=json", "/info", "/metrics", "/debug/state"]
        paths += ["/debug/pprof/cmdline", "/debug/tasks", "/debug/threads", "/debug/memory"]
        outputs += [nsqd.request("GET", path).text for path in paths]
    assert nsqd.get("/config/auth_http_addresses") == [f"http://***@{server.address}/auth?***"] * 2
    for server.status in (500, 403, 302):
        with nsqd.connect() as connection:
            outputs.append(connection.error(auth()))
    nsqd.stop()
    assert f"failed to auth against http://***@{server.address}/auth?*** - status 500" in nsqd.whole_log
    for wrong in ([url], [f"--auth-http-address={url}", f"--max-msg-size={url}"], [f"--statsd-address={url}"]):
        refused = daemons.new_nsqd(*wrong)
        refused.launch()
        assert refused.wait() != 0
        outputs.append(refused.whole_log)
        assert "***@" in refused.whole_log
    for output in (*outputs, nsqd.whole_log):
        assert not any(secret in output for secret in ("somebody", "pass-4712", "key-4713")), output


def test_the_secret_is_nowhere_to_be_read(daemons: Daemons, server: AuthServer):
    nsqd = daemons.nsqd(f"--auth-http-address={server.address}", "--log-level=debug")
    with authorized(nsqd) as connection:
        connection.ok(pub("t", b"x"))
        outputs = [nsqd.request("GET", target).text for target in ("/stats?format=json", "/stats", "/info")]
    for server.status in (500, 403, 302):
        with nsqd.connect() as connection:
            outputs.append(connection.error(auth()))
    nsqd.stop()
    for output in (*outputs, nsqd.whole_log):
        assert "sesame" not in output
    assert "AUTH failed" in nsqd.whole_log
