"""Tokens and certificates of HTTP clients: the file, the decisions, who guesses, and what must never be seen."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import re
import time
from pathlib import Path

import pytest
from tests.parameters import filled
from tests.unit.net.test_http_server import Peer, request

from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net import http_auth
from flintmq.net.http_auth import (
    ADDRESS_COUNT_MAX,
    ADMIN,
    CLIENT_COUNT_MAX,
    FAILURE_COUNT_MAX,
    FAILURE_INTERVAL_S,
    FILE_SIZE_MAX,
    KNOWN,
    OPEN,
    PERMISSIONS,
    PUBLISH,
    READ,
    TOPIC_COUNT_MAX,
    Failures,
    HttpAuth,
    HttpAuthFileError,
    TokenFile,
    failure_address,
    needs,
    parse_clients,
)
from flintmq.net.http_messages import HttpError, Request, Response, text_response
from flintmq.net.http_router import Router
from flintmq.net.http_server import HttpServer
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.testing import ManualClock

TOKENS = {name: f"{name}-token-of-a-client" for name in ("all", "publisher", "reader", "admin", "orders", "nothing")}
FILE = f"""
[[client]]
name = "all"
token = "{TOKENS["all"]}"
permissions = ["publish", "read", "admin"]

[[client]]
name = "publisher"
sha256 = "{hashlib.sha256(TOKENS["publisher"].encode()).hexdigest().upper()}"
permissions = ["publish"]

[[client]]
name = "reader"
token = "{TOKENS["reader"]}"
permissions = ["read"]

[[client]]
name = "admin"
token = "{TOKENS["admin"]}"
permissions = ["admin"]

[[client]]
name = "orders"
token = "{TOKENS["orders"]}"
common_name = "orders.example"
permissions = ["publish", "read", "admin"]
topics = ["orders", "invoices_.*|bills"]

[[client]]
name = "nothing"
token = "{TOKENS["nothing"]}"
permissions = []
topics = []
"""
TABLE = {
    ("GET", "/ping"): OPEN,
    ("GET", "/info"): KNOWN,
    ("POST", "/pub"): needs(PUBLISH, by_topic=True),
    ("GET", "/stats"): needs(READ, by_topic=True),
    ("GET", "/lookup"): needs(PUBLISH, READ, by_topic=True),
    ("POST", "/topic/create"): needs(ADMIN, by_topic=True),
    ("PUT", "/config/{opt}"): needs(ADMIN),
}
UNLISTED = ("GET", "/unlisted")


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tokens.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def router():
    router = Router()
    for method, at in (*TABLE, UNLISTED):
        router.add(method, at, lambda _: text_response("done"))
    return router


@pytest.fixture
def auth(path, router, clock):
    return HttpAuth(str(path), router, TABLE, Env(clock=clock), True, "nsqd")


def asked(auth, router, method, target, token="", *, header="", name="", peer="10.0.0.1:5"):
    """The status that a request is refused with; 200 when it may go on."""
    at, _, query = target.partition("?")
    headers = {b"authorization": (header or f"Bearer {token}").encode()} if token or header else {}
    route, _ = router.resolve_slowly(method, at.encode(), query.encode())
    made = Request(method.encode(), at.encode(), query.encode(), headers, peer, route)
    made.common_name = name
    response = auth.check(made)
    return 200 if response is None else response.status


def message(response: Response) -> str:
    return str(json.loads(response.body)["message"])


# -- who may what ------------------------------------------------------------------------------------------------------

TARGETS = {
    ("GET", "/info"): (),
    ("POST", "/pub?topic=t"): ("publish",),
    ("GET", "/stats?topic=t"): ("read",),
    ("GET", "/lookup?topic=t"): ("publish", "read"),
    ("POST", "/topic/create?topic=t"): ("admin",),
    ("PUT", "/config/log_level"): ("admin",),
    UNLISTED: ("admin",),
}


@pytest.mark.parametrize(("method", "target"), TARGETS)
def test_each_permission_is_for_itself(auth, router, method, target):
    wanted = TARGETS[method, target]
    for name, permission in (("publisher", "publish"), ("reader", "read"), ("admin", "admin"), ("nothing", "")):
        expected = 200 if not wanted or permission in wanted else 403
        assert asked(auth, router, method, target, TOKENS[name]) == expected, name
    assert asked(auth, router, method, target, TOKENS["all"]) == 200
    assert asked(auth, router, method, target) == 401
    assert asked(auth, router, method, target, "not-the-token-of-anybody") == 401


def test_ping_is_open(auth, router):
    assert asked(auth, router, "GET", "/ping") == 200
    assert asked(auth, router, "GET", "/ping", "not-the-token-of-anybody") == 200


@pytest.mark.parametrize(
    ("topic", "is_allowed"),
    [
        ("orders", True),
        ("invoices_2026", True),
        ("invoices_", True),
        ("bills", True),
        ("orders_x", False),
        ("private_orders", False),
        ("invoices", False),
        ("bills2", False),
        ("xbills", False),
        ("ORDERS", False),
        ("orders#ephemeral", False),
        ("invoices_%0Aorders", False),
        ("orders%20", False),
        ("%C3%B6rders", False),
        ("invoices_%00", False),
        ("invoices_" + "x" * 64, False),
        ("", False),
    ],
)
def test_topics_match_as_a_whole(auth, router, topic, is_allowed):
    for target in ("/stats", "/lookup"):
        assert asked(auth, router, "GET", f"{target}?topic={topic}", TOKENS["orders"]) == (200 if is_allowed else 403)


def test_without_a_topic_it_is_about_all(auth, router):
    for method, target in (("GET", "/stats"), ("GET", "/stats?topic="), ("POST", "/pub"), ("PUT", "/config/log_level")):
        assert asked(auth, router, method, target, TOKENS["orders"]) == 403
        assert asked(auth, router, method, target, TOKENS["all"]) == 200
    assert asked(auth, router, "GET", "/info", TOKENS["orders"]) == 200
    assert asked(auth, router, "PUT", "/config/log_level?topic=orders", TOKENS["orders"]) == 403


def test_of_two_topics_the_first_counts_as_for_the_handlers(auth, router):
    assert asked(auth, router, "POST", "/pub?topic=orders&topic=other", TOKENS["orders"]) == 200
    assert asked(auth, router, "POST", "/pub?topic=other&topic=orders", TOKENS["orders"]) == 403


@pytest.mark.parametrize("at", ["/p%75b", "/%70ub", "http://h/pub"])
async def test_no_spelling_of_a_path_goes_around(auth, at):
    peer = Peer(HttpServer(auth._router, clock=ManualClock(), before=auth.check))
    assert peer.get(f"{at}?topic=t", method="POST").answer.status == 401


@pytest.mark.parametrize("target", ["/PUB?topic=t", "/pub/?topic=t", "/nowhere"])
def test_what_has_no_route_is_answered_as_ever(auth, router, target):
    assert asked(auth, router, "POST", target) == 200
    route, _ = router.resolve_slowly("POST", target.partition("?")[0].encode(), b"")
    answer = route.handler(Request(b"POST", target.encode(), b"", {}, "@", route))
    assert isinstance(answer, Response) and answer.status in (308, 404)


def test_a_bad_query_is_told_only_to_clients(auth, router):
    assert asked(auth, router, "GET", "/stats?topic=%zz") == 401
    with pytest.raises(HttpError, match="INVALID_REQUEST"):
        asked(auth, router, "GET", "/stats?topic=%zz", TOKENS["reader"])


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("bearer {}", 200),
        ("BEARER   {}  ", 200),
        ("{}", 401),
        ("Basic {}", 401),
        ("Bearer{}", 401),
        ("Bearer", 401),
        ("Bearer {} {}", 401),
        ("Bearer {}x", 401),
        ("Bearer é{}", 401),
    ],
)
def test_forms_of_the_header(auth, router, header, status):
    text = header.replace("{}", TOKENS["reader"])
    assert asked(auth, router, "GET", "/stats", header=text) == status


async def test_before_the_body_is_read(auth):
    peer = Peer(HttpServer(auth._router, clock=ManualClock(), before=auth.check))
    peer.send(b"POST /pub?topic=t HTTP/1.1\r\nHost: h\r\nContent-Length: 60000000\r\n\r\n")
    answer = peer.answer
    assert (answer.status, answer.body) == (401, b'{"message":"UNAUTHORIZED"}')
    assert answer.headers["WWW-Authenticate"] == 'Bearer realm="nsqd"'
    assert answer.headers["Content-Type"] == "application/json; charset=utf-8"
    assert peer.transport.is_closing() or peer.transport.has_sent_eof


async def test_answers_on_one_connection(auth):
    peer = Peer(HttpServer(auth._router, clock=ManualClock(), before=auth.check))
    good, bad = f"Authorization: Bearer {TOKENS['reader']}", "Authorization: Bearer wrong-wrong-wrong-wrong"
    for header in (good, bad, "X: y", good):
        peer.send(request("/stats", header))
    peer.send(request("/pub?topic=t", good, method="POST", body=b"x"))
    assert peer.statuses == [200, 401, 401, 200, 403]
    assert peer.answers[1].headers["WWW-Authenticate"] == 'Bearer realm="nsqd", error="invalid_token"'
    assert peer.answers[4].body == b'{"message":"FORBIDDEN"}'


# -- certificates ------------------------------------------------------------------------------------------------------


def test_a_common_name_instead_of_a_token(auth, router):
    assert asked(auth, router, "GET", "/stats?topic=orders", name="orders.example") == 200
    assert asked(auth, router, "GET", "/stats?topic=other", name="orders.example") == 403
    assert asked(auth, router, "GET", "/stats?topic=orders", name="other.example") == 401
    assert asked(auth, router, "GET", "/stats?topic=orders", name="") == 401


def test_a_token_goes_before_a_certificate(auth, router):
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"], name="orders.example") == 200
    assert asked(auth, router, "GET", "/stats?topic=orders", "wrong-wrong-wrong-wrong", name="orders.example") == 401


def test_names_that_were_not_verified_count_for_nothing(path, router, caplog):
    auth = HttpAuth(str(path), router, TABLE, Env(), False, "nsqd")
    assert asked(auth, router, "GET", "/stats?topic=orders", name="orders.example") == 401


CERT = {"http_auth_tokens_file": "f", "tls_cert": "c", "tls_key": "k", "tls_root_ca_file": "r"}


@pytest.mark.parametrize("table", [NsqdOptions, NsqlookupdOptions])
@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ({"http_auth_tokens_file": ""}, "--http-auth-tokens-file"),
        ({"tls_root_ca_file": ""}, "--tls-root-ca-file"),
        ({"tls_client_auth_policy": "require"}, "proves nothing"),
    ],
)
def test_certificates_need_what_makes_them_worth_something(table, missing, reason):
    https = {"https_address": "127.0.0.1:0"}
    table(**CERT, **https, http_auth_client_cert=True)
    table(**CERT, **https, http_auth_client_cert=True, tls_client_auth_policy="require-verify")
    with pytest.raises(OptionError, match=reason):
        table(**{**CERT, **https, **missing}, http_auth_client_cert=True)


def test_certificates_need_https():
    with pytest.raises(OptionError, match="--tls-cert"):
        NsqdOptions(http_auth_tokens_file="f", http_auth_client_cert=True, tls_root_ca_file="r")
    with pytest.raises(OptionError, match="--tls-cert"):
        NsqlookupdOptions(https_address="127.0.0.1:0")
    with pytest.raises(OptionError, match="--https-address"):
        NsqlookupdOptions(tls_cert="c", tls_key="k")


# -- the file ----------------------------------------------------------------------------------------------------------


def entry(**fields: object) -> dict[str, object]:
    return {"name": "n", "token": "a-token-of-some-size", "permissions": ["read"], **fields}


def as_json(*entries: dict[str, object]) -> bytes:
    return json.dumps({"client": entries}).encode()


def test_json_says_the_same():
    content = as_json(entry(), entry(name="m", token="", common_name="m.example", topics=["t"]))
    clients = parse_clients("f.json", content)
    assert clients.count == 2
    assert clients.by_common_name["m.example"].may(needs(READ), "t")
    found = clients.of_digest(hashlib.sha256(b"a-token-of-some-size").digest())
    assert found is not None and found.name == "n"


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "truncated"),
        (b"{}", "client"),
        (b"{", "malformed|truncated"),
        (as_json({"name": "n"}), "permissions"),
        (as_json(entry(tokens="x")), "unknown field `tokens`"),
        (as_json(entry(permissions=["write"])), "client 1 ('n'): there is no permission 'write'"),
        (as_json(entry(token="")), "give it a token"),
        (as_json(entry(token="short")), "16 to 512 characters"),
        (as_json(entry(token="with a space in it, too")), "16 to 512 characters"),
        (as_json(entry(token="x" * 513)), "16 to 512 characters"),
        (as_json(entry(sha256="abc")), "64 hex digits"),
        (as_json(entry(name="")), "name must be"),
        (as_json(entry(name="a\nb")), "name must be"),
        (as_json(entry(name="x" * 65)), "name must be"),
        (as_json(entry(), entry(name="m")), "client 2 ('m'): its token is also that of 'n'"),
        (as_json(entry(common_name="c"), entry(token="", common_name="c")), "its common_name is also that of 'n'"),
        (as_json(entry(topics=["("])), "regular expression"),
        (as_json(entry(topics=["a)(b"])), "regular expression"),
        (as_json(entry(topics=["a"] * (TOPIC_COUNT_MAX + 1))), "more than 100 topics"),
        (as_json(*[entry(token=f"token-number-{n:06}") for n in range(CLIENT_COUNT_MAX + 1)]), "more than 1000"),
        (as_json(entry(name="\xe9")).replace(b"\\u00e9", b"\xff"), "(?i)utf-8"),
        (FILE_SIZE_MAX + 1, "more than 1048576 bytes"),
    ],
)
def test_what_is_wrong_with_a_file(content, reason):
    pattern = reason if reason.startswith("(?i)") or "|" in reason else re.escape(reason)
    with pytest.raises(HttpAuthFileError, match=pattern) as caught:
        parse_clients("f.json", filled(content))
    assert "a-token-of-some-size" not in str(caught.value)
    assert str(caught.value).startswith("f.json: ")


@pytest.mark.parametrize(
    "content", [b"", b"client", b"[[client]]\nname = 3\n", b"[client]\n", b"[[client]]\nx = 1\n", b"\xff"]
)
def test_what_is_wrong_with_toml(content):
    with pytest.raises(HttpAuthFileError, match=r"f\.toml: "):
        parse_clients("f.toml", content)


def test_a_file_with_a_byte_order_mark():
    assert parse_clients("f.toml", b"\xef\xbb\xbf" + FILE.encode()).plain_tokens == parse_clients(
        "f.toml", FILE.encode()
    ).plain_tokens  # fmt: skip


def test_an_expensive_pattern_is_matched_at_once():
    clients = parse_clients("f.json", as_json(entry(topics=["(a+)+(a+)+b"])))
    client = clients.of_digest(hashlib.sha256(b"a-token-of-some-size").digest())
    assert client is not None
    begun = time.process_time()
    assert not client.may(needs(READ), "a" * 64)
    assert time.process_time() - begun < 1


def test_decisions_are_remembered_within_a_bound(monkeypatch):
    monkeypatch.setattr(http_auth, "DECISION_COUNT_MAX", 10)
    (client,) = parse_clients(
        "f.json", as_json(entry(token="", common_name="c", topics=["t.*"]))
    ).by_common_name.values()
    for number in range(100):
        assert client.may(needs(READ), f"t{number}")
        assert not client.may(needs(READ), f"u{number}")
    assert len(client._decisions) <= 10


def test_no_file_stops_a_start(tmp_path, router):
    with pytest.raises(HttpAuthFileError, match="No such file"):
        HttpAuth(str(tmp_path / "none.toml"), router, TABLE, Env(), False, "nsqd")


def replace(path: Path, text: str) -> None:
    """As an editor or a deployment does it, so that no half of it is ever read."""
    new = path.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o600)
    new.rename(path)


async def test_a_file_that_changes(auth, path, router, caplog):
    caplog.set_level(logging.INFO)
    replace(path, FILE.replace(TOKENS["reader"], "another-token-of-it"))
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 200  # nobody has looked
    await auth.look_at_file()
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 401
    assert asked(auth, router, "GET", "/stats", "another-token-of-it") == 200

    replace(path, FILE + "[[client]]\n")
    await auth.look_at_file()
    await auth.look_at_file()
    assert asked(auth, router, "GET", "/stats", "another-token-of-it") == 200
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and "nothing changes" in errors[0].getMessage()

    path.unlink()
    await auth.look_at_file()
    assert asked(auth, router, "GET", "/stats", "another-token-of-it") == 200
    replace(path, FILE)
    await auth.look_at_file()
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 200


async def test_the_file_is_looked_after(auth, path, router, monkeypatch):
    monkeypatch.setattr(http_auth, "WATCH_INTERVAL_S", 0.001)
    auth.start()
    replace(path, FILE.replace(TOKENS["reader"], "another-token-of-it"))
    for _ in range(1000):
        if asked(auth, router, "GET", "/stats", "another-token-of-it", peer="@") == 200:
            break
        await asyncio.sleep(0.005)
    else:
        pytest.fail("the file was not read again")
    await auth.close()


@pytest.mark.parametrize(("mode", "warns"), [(0o600, False), (0o640, False), (0o644, True)])
async def test_a_file_that_everybody_can_read(path, router, caplog, mode, warns):
    path.chmod(mode)
    auth = HttpAuth(str(path), router, TABLE, Env(), True, "nsqd")
    auth.start()
    await auth.close()
    assert ("can be read by every user" in caplog.text) == warns


# -- who guesses -------------------------------------------------------------------------------------------------------


def test_who_fails_too_often_is_not_looked_at(auth, router, clock):
    for number in range(FAILURE_COUNT_MAX):
        assert asked(auth, router, "GET", "/stats", f"guess-number-{number:04}") == 401
    assert asked(auth, router, "GET", "/stats", "one-guess-too-many") == 429
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 429  # a right guess is not told
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"], peer="10.0.0.2:5") == 200
    assert asked(auth, router, "GET", "/stats") == 401  # no token, no guess
    clock.advance(int(FAILURE_INTERVAL_S * 1e9))
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 200


def test_tokens_that_were_good_from_there_go_on(auth, router):
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"]) == 200
    for number in range(FAILURE_COUNT_MAX + 5):
        asked(auth, router, "GET", "/stats", f"guess-number-{number:04}")
    assert asked(auth, router, "GET", "/stats", TOKENS["all"]) == 429
    assert asked(auth, router, "GET", "/stats", TOKENS["reader"], peer="10.0.0.1:77") == 200


def test_failures_are_forgotten_in_time():
    failures, now_ns = Failures(), 10**12
    for _ in range(FAILURE_COUNT_MAX):
        assert failures.may_try("a", b"d", now_ns)
        failures.failed("a", b"d", now_ns)
    assert not failures.may_try("a", b"d", now_ns)
    later = now_ns + int(FAILURE_INTERVAL_S * 2e9)
    for _ in range(2):
        assert failures.may_try("a", b"d", later)
        failures.failed("a", b"d", later)
    assert not failures.may_try("a", b"d", later)
    assert failures.may_try("a", b"d", later + int(FAILURE_COUNT_MAX * FAILURE_INTERVAL_S * 1e9))
    assert len(failures) == 0


def test_what_is_remembered_of_addresses_is_bounded():
    failures = Failures()
    for number in range(2 * ADDRESS_COUNT_MAX):
        failures.failed(f"10.0.{number >> 8}.{number & 255}", b"d", number)
        failures.succeeded(f"10.1.{number >> 8}.{number & 255}", b"d")
    assert len(failures) == ADDRESS_COUNT_MAX


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("10.0.0.1:5", "10.0.0.1"),
        ("[::ffff:10.0.0.1]:5", "10.0.0.1"),
        ("[2001:db8:1:2:3:4:5:6]:5", "2001:db8:1:2::"),
        ("[fe80::1%eth0]:5", "fe80::"),
        ("@", "@"),
    ],
)
def test_what_failures_are_counted_under(peer, address):
    assert failure_address(peer) == address


# -- what must not be seen ---------------------------------------------------------------------------------------------


async def test_no_token_is_ever_shown(auth, path, router, caplog):
    caplog.set_level(logging.DEBUG)
    server = HttpServer(router, clock=ManualClock(), before=auth.check)
    wrong = "wrong-token-that-nobody-may-see"
    peer = Peer(server)
    for token in (TOKENS["publisher"], wrong, TOKENS["all"]):
        peer.get("/stats?topic=t", f"Authorization: Bearer {token}")
    auth.start()
    replace(path, FILE.replace(TOKENS["admin"], "no good"))
    await auth.look_at_file()
    await auth.close()
    found = caplog.text + server.describe() + repr(vars(auth)) + repr(auth._clients) + peer.transport.written.decode()
    assert "unknown token" in found and "nothing changes" in found
    for token in (*TOKENS.values(), wrong, "no good"):
        assert token not in found


# -- tokens of our own -------------------------------------------------------------------------------------------------


async def test_a_token_to_show(tmp_path, caplog):
    path = tmp_path / "token"
    path.write_text("a-token-of-some-size\n")
    token = TokenFile(str(path), Env())
    assert await token.current() == "a-token-of-some-size"
    assert "a-token" not in repr(token)
    replace(path, "another-token-of-it\n")
    assert await token.current() == "another-token-of-it"
    replace(path, "a-third-token-of-it\n")
    assert token.now() == await token.current() == "a-third-token-of-it"
    replace(path, "two words, no token\n")
    assert token.now() == await token.current() == "a-third-token-of-it"
    assert "two words" not in caplog.text and "still used" in caplog.text


@pytest.mark.parametrize("content", [b"", b"short", b"two-tokens-of-size\ntwo-tokens-of-size", b"\xff" * 20])
def test_no_token_to_show(tmp_path, content):
    path = tmp_path / "token"
    path.write_bytes(content)
    with pytest.raises(HttpAuthFileError):
        TokenFile(str(path), Env())


# -- the tables --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("table", [NSQD_TABLE, NSQLOOKUPD_TABLE])
def test_only_ping_is_open_and_changes_need_more_than_reading(table):
    assert [key for key, row in table.items() if row.is_open] == [("GET", "/ping")]
    for (method, at), row in table.items():
        assert set(row.permissions) <= set(PERMISSIONS)
        if method != "GET":
            assert row.permissions in ((PUBLISH,), (ADMIN,)), (method, at)
