"""HTTPS of nsqd, what TLS_REQUIRED answers, and client certificates (NSQ's HTTP API, NSQ's TCP protocol)."""

from __future__ import annotations

import http.client
import ssl
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.certificates import Certificates, old_client_context
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import (
    JSON_TYPE,
    NSQ_TYPE,
    POST_ROUTES,
    RawHttp,
    assert_empty,
    assert_refused,
    assert_text,
    bodies_of,
    https,
    https_address,
    tls_flags,
)
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, pub
from tests.integration.upgraded import Upgraded

PLAIN_REQUESTS = [
    ("GET", "/ping"),
    ("GET", "/info"),
    ("GET", "/stats?format=json"),
    ("GET", "/nothing"),
    ("GET", "/PING/"),
    ("GET", "/config/log_level"),
    ("PUT", "/config/log_level"),
    ("GET", "/debug/pprof/"),
    ("DELETE", "/ping"),
    ("OPTIONS", "/ping"),
    *(("POST", path) for path in POST_ROUTES),
]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(Path(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(scope="module")
def start(shared_daemons: Daemons, certificates: Certificates) -> Callable[..., Nsqd]:
    """Starts an nsqd with a certificate and further flags, each once."""
    started: dict[tuple[str, ...], Nsqd] = {}

    def get(*flags: str) -> Nsqd:
        if flags not in started:
            started[flags] = shared_daemons.nsqd(*quick_flags(), *tls_flags(certificates, *flags))
        return started[flags]

    return get


@pytest.fixture
def secure(start: Callable[..., Nsqd]) -> Nsqd:
    return start()


@pytest.fixture
def required(start: Callable[..., Nsqd]) -> Nsqd:
    return start("--tls-required=true")


@pytest.fixture
def tcp_https(start: Callable[..., Nsqd]) -> Nsqd:
    return start("--tls-required=tcp-https")


# -- HTTPS -------------------------------------------------------------------------------------------------------------


def test_ping(secure: Nsqd, certificates: Certificates):
    answer = https(secure, certificates.client_context(), "GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")


def test_publish(secure: Nsqd, certificates: Certificates, topic: str):
    body = bytes(range(256)) * 2000
    assert_text(https(secure, certificates.client_context(), "POST", f"/pub?topic={topic}", body), "OK")
    assert bodies_of(secure, topic, 1) == [body]


def test_topics(secure: Nsqd, certificates: Certificates, topic: str):
    assert_empty(https(secure, certificates.client_context(), "POST", f"/topic/create?topic={topic}"))
    assert secure.stats(topic)["depth"] == 0


def test_errors(secure: Nsqd, certificates: Certificates):
    context = certificates.client_context()
    assert_refused(https(secure, context, "GET", "/nothing"), 404, "NOT_FOUND")
    assert_refused(https(secure, context, "POST", "/ping"), 405, "METHOD_NOT_ALLOWED")
    assert_refused(https(secure, context, "POST", "/pub?topic=t", b"x" * 1048577), 413, "MSG_TOO_BIG")


def test_info_shows_the_plain_port(secure: Nsqd, certificates: Certificates):
    assert https(secure, certificates.client_context(), "GET", "/info").json["http_port"] == secure.http[1]


def test_a_connection_is_kept(secure: Nsqd, certificates: Certificates):
    connection = http.client.HTTPSConnection(
        *https_address(secure), timeout=PATIENCE_S, context=certificates.client_context()
    )
    for _ in range(3):
        connection.request("GET", "/ping")
        assert connection.getresponse().read() == b"OK"
    connection.close()


def test_pipelined_requests(secure: Nsqd, certificates: Certificates):
    with RawHttp(https_address(secure), certificates.client_context()) as raw:
        raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        assert [raw.answer().body for _ in range(3)] == [b"OK"] * 3


def test_the_certificate_can_be_verified(secure: Nsqd):
    with pytest.raises(ssl.SSLCertVerificationError):
        https(secure, ssl.create_default_context(), "GET", "/ping")


def test_plain_http_goes_on_beside_it(secure: Nsqd):
    assert secure.request("GET", "/ping").body == b"OK"


def test_plain_http_on_its_port_is_not_answered(secure: Nsqd):
    with RawHttp(https_address(secure)) as raw:
        try:
            answer = raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n").answer()
        except (AssertionError, ConnectionResetError):
            return  # closed
        if answer.status != 400:  # as Go's server does; ours says where TLS is, as the plain port of nsqd
            assert answer.status == 403
            assert answer.body == b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_address(secure)[1]


def test_without_a_certificate_nothing_listens(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags(), "--https-address=127.0.0.1:0")
    assert "HTTPS: listening" not in nsqd.log


def test_the_oldest_version_can_be_raised(start: Callable[..., Nsqd], certificates: Certificates):
    nsqd = start("--tls-min-version=tls1.3")
    context = certificates.client_context()
    assert https(nsqd, context, "GET", "/ping").body == b"OK"
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        https(nsqd, context, "GET", "/ping")


@pytest.mark.improvement
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_tls_1_1_has_to_be_asked_for(secure: Nsqd):
    """Upstream accepts TLS 1.0 by default."""
    with pytest.raises((ssl.SSLError, ConnectionError)):
        https(secure, old_client_context(ssl.TLSVersion.TLSv1_1), "GET", "/ping")


# -- TLS required ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "target"), PLAIN_REQUESTS)
def test_every_plain_request_is_403_with_the_https_port(required: Nsqd, method: str, target: str):
    answer = required.request(method, target, b"x" if method in ("POST", "PUT") else None)
    assert answer.status == 403
    assert answer.body == b'{"message": "TLS_REQUIRED", "https_port": %d}' % https_address(required)[1]
    assert answer.headers["Content-Type"] == JSON_TYPE
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


def test_head_is_403_without_a_body(required: Nsqd):
    answer = required.request("HEAD", "/ping")
    assert (answer.status, answer.body) == (403, b"")


def test_what_was_answered_403_did_nothing(required: Nsqd, certificates: Certificates, topic: str):
    required.request("POST", f"/pub?topic={topic}", b"x")
    stats = https(required, certificates.client_context(), "GET", f"/stats?format=json&topic={topic}").json
    assert stats["topics"] is None


def test_a_connection_is_kept_behind_a_403(required: Nsqd):
    with RawHttp(required.http) as raw:
        for _ in range(2):
            assert raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n").answer().status == 403


def test_https_is_answered_when_it_is_required(required: Nsqd, certificates: Certificates, topic: str):
    context = certificates.client_context()
    assert_text(https(required, context, "POST", f"/pub?topic={topic}", b"x"), "OK")
    stats = https(required, context, "GET", f"/stats?format=json&topic={topic}").json
    assert stats["topics"][0]["message_count"] == 1


def test_tcp_needs_tls_when_it_is_required(required: Nsqd):
    with required.connect() as connection:
        assert connection.error(pub("t", b"x")) == "E_INVALID cannot PUB in current state (TLS required)"


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [("GET", "/ping", 200), ("GET", "/stats", 200), ("GET", "/nothing", 404), ("POST", "/ping", 405)],
)
def test_tcp_https_leaves_plain_http_alone(tcp_https: Nsqd, method: str, target: str, status: int):
    assert tcp_https.request(method, target).status == status


def test_tcp_https_lets_plain_http_publish(tcp_https: Nsqd, topic: str):
    assert_text(tcp_https.request("POST", f"/pub?topic={topic}", b"x"), "OK")


def test_tcp_https_needs_tls_on_tcp(tcp_https: Nsqd):
    with tcp_https.connect() as connection:
        assert connection.error(pub("t", b"x")) == "E_INVALID cannot PUB in current state (TLS required)"


def test_tcp_https_answers_https(tcp_https: Nsqd, certificates: Certificates):
    assert https(tcp_https, certificates.client_context(), "GET", "/ping").body == b"OK"


# -- client certificates -----------------------------------------------------------------------------------------------

REFUSED = (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)
ADMITTED = {
    "": ("none", "good", "stranger"),
    "require": ("good", "stranger", "self-signed"),
    "require-verify": ("good",),
}


def with_policy(start: Callable[..., Nsqd], policy: str) -> Nsqd:
    return start(f"--tls-client-auth-policy={policy}") if policy else start()


@pytest.mark.parametrize(("policy", "kind"), [(policy, kind) for policy, kinds in ADMITTED.items() for kind in kinds])
def test_policy_admits(start: Callable[..., Nsqd], certificates: Certificates, policy: str, kind: str):
    answer = https(with_policy(start, policy), certificates.client_context(kind), "GET", "/ping")
    assert answer.body == b"OK"


@pytest.mark.parametrize(
    ("policy", "kind"),
    [
        ("require", "none"),
        ("require-verify", "none"),
        ("require-verify", "stranger"),
        ("require-verify", "self-signed"),
        ("require-verify", "expired"),
    ],
)
def test_policy_refuses(start: Callable[..., Nsqd], certificates: Certificates, policy: str, kind: str):
    with pytest.raises(REFUSED):
        https(with_policy(start, policy), certificates.client_context(kind), "GET", "/ping")


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_a_policy_makes_tls_required(start: Callable[..., Nsqd], policy: str):
    nsqd = with_policy(start, policy)
    answer = nsqd.request("GET", "/ping")
    assert (answer.status, answer.json["message"]) == (403, "TLS_REQUIRED")
    with nsqd.connect() as connection:
        assert connection.error(pub("t", b"x")) == "E_INVALID cannot PUB in current state (TLS required)"


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_a_policy_leaves_tcp_https_as_it_is(start: Callable[..., Nsqd], policy: str):
    nsqd = start(f"--tls-client-auth-policy={policy}", "--tls-required=tcp-https")
    assert nsqd.request("GET", "/ping").body == b"OK"


@pytest.mark.parametrize("policy", ["require", "require-verify"])
def test_a_policy_holds_on_tcp_as_well(start: Callable[..., Nsqd], certificates: Certificates, policy: str):
    nsqd = with_policy(start, policy)
    with Upgraded(nsqd.tcp) as connection:
        connection.upgrade(certificates.client_context("good"))
        connection.ok(pub("t", b"x"))
