"""AUTH with an HTTP auth server: questions, answers, permissions, time (NSQ's TCP protocol)."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import CLIENT_NAME, Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.protocol_helpers import (
    COMMANDS,
    UnixNsqd,
    after_eof,
    clients,
    fatal,
    fatal_on,
    goes_on,
    tls_flags,
    topics,
)
from tests.integration.auth_server import EVERYTHING, SECRET, AuthServer, auth, authorized
from tests.integration.daemons import ERROR, SOON_S, Connection, Daemons, Frame, Nsqd, dpub, mpub, pub
from tests.integration.upgraded import Upgraded

FAILED = "E_AUTH_FAILED AUTH failed"


@pytest.fixture(scope="module")
def one_server() -> Iterator[AuthServer]:
    with AuthServer() as server:
        yield server


@pytest.fixture(autouse=True)
def server(one_server: AuthServer) -> AuthServer:
    """The auth server, which lets everybody do everything unless a case says otherwise."""
    one_server.reset()
    return one_server


@pytest.fixture(scope="module")
def guarded(shared_daemons: Daemons, one_server: AuthServer) -> Nsqd:
    """An nsqd that asks the auth server, which has all the time that a busy machine needs."""
    flags = (f"--auth-http-address={one_server.address}", f"--http-client-request-timeout={SOON_S:g}s")
    return shared_daemons.nsqd(*quick_flags(), *flags)


# -- without auth servers ----------------------------------------------------------------------------------------------


def test_disabled(nsqd: Nsqd):
    assert fatal(nsqd, auth()) == "E_AUTH_DISABLED AUTH disabled"


@pytest.mark.parametrize("is_guarded", [False, True], ids=["disabled", "enabled"])
def test_auth_required_in_the_answer_to_IDENTIFY(nsqd: Nsqd, guarded: Nsqd, is_guarded: bool):
    with (guarded if is_guarded else nsqd).connect() as connection:
        assert connection.identify()["auth_required"] is is_guarded


# -- before AUTH -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["SUB", "PUB", "MPUB", "DPUB"])
def test_auth_first(guarded: Nsqd, server: AuthServer, command: str):
    assert fatal(guarded, COMMANDS[command]) == f"E_AUTH_FIRST AUTH required before {command}"
    assert server.questions == []


@pytest.mark.parametrize("command", ["IDENTIFY", "NOP"])
def test_allowed_before_auth(guarded: Nsqd, command: str):
    with guarded.connect() as connection:
        connection.ok(COMMANDS[command], count=command == "IDENTIFY")
        assert connection.error(COMMANDS["PUB"]) == "E_AUTH_FIRST AUTH required before PUB"


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"SUB\n", "E_INVALID SUB insufficient number of parameters"),
        (b"SUB a/b c\n", 'E_BAD_TOPIC SUB topic name "a/b" is not valid'),
        (b"PUB a/b\n", 'E_BAD_TOPIC PUB topic name "a/b" is not valid'),
        (b"PUB t\n\x00\x00\x00\x00", "E_BAD_MESSAGE PUB invalid message body size 0"),
        (b"DPUB t x\n", "E_INVALID DPUB could not parse timeout x"),
    ],
    ids=["SUB-parameters", "SUB-topic", "PUB-topic", "PUB-body", "DPUB-delay"],
)
def test_parameters_are_looked_at_before_permissions(guarded: Nsqd, line: bytes, error: str):
    assert fatal(guarded, line) == error


def test_pub_is_checked_behind_its_body(guarded: Nsqd):
    with guarded.connect() as connection, guarded.connect() as other:
        connection.send(b"PUB t\n\x00\x00\x00\x02x")
        # an answer to a later connection stands for "it has been read": this one is in the middle of its body
        assert fatal_on(other, b"PUB t\n\x00\x00\x00\x01x") == "E_AUTH_FIRST AUTH required before PUB"
        connection.silence(0)
        assert fatal_on(connection, b"y") == "E_AUTH_FIRST AUTH required before PUB"


def test_mpub_is_checked_before_its_body(guarded: Nsqd):
    assert fatal(guarded, b"MPUB t\n") == "E_AUTH_FIRST AUTH required before MPUB"


# -- the command -------------------------------------------------------------------------------------------------------

MALFORMED: dict[str, tuple[bytes, str]] = {
    "parameter": (b"AUTH x\n", "E_INVALID AUTH invalid number of parameters"),
    "trailing-space": (b"AUTH \n", "E_INVALID AUTH invalid number of parameters"),
    "size-zero": (b"AUTH\n\x00\x00\x00\x00", "E_BAD_BODY AUTH invalid body size 0"),
    "size-negative": (b"AUTH\n\xff\xff\xff\xff", "E_BAD_BODY AUTH invalid body size -1"),
    "size-max-plus-one": (b"AUTH\n\x00\x50\x00\x01", "E_BAD_BODY AUTH body too big 5242881 > 5242880"),
    "size-biggest": (b"AUTH\n\x7f\xff\xff\xff", "E_BAD_BODY AUTH body too big 2147483647 > 5242880"),
}


@pytest.mark.parametrize("case", MALFORMED)
@pytest.mark.parametrize("is_guarded", [False, True], ids=["disabled", "enabled"])
def test_malformed(nsqd: Nsqd, guarded: Nsqd, case: str, is_guarded: bool):
    command, error = MALFORMED[case]
    assert fatal(guarded if is_guarded else nsqd, command) == error


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", "AUTH failed to read body size"),
        (b"\x00\x00", "AUTH failed to read body size"),
        (b"\x00\x00\x00\x02x", "AUTH failed to read body"),
    ],
    ids=["no-size", "half-a-size", "half-a-body"],
)
def test_cut_short_by_the_end_of_the_stream(guarded: Nsqd, sent: bytes, error: str):
    assert after_eof(guarded, b"AUTH\n" + sent) == [Frame(ERROR, f"E_BAD_BODY {error}".encode())]


def test_is_answered_before_what_is_refused_at_the_end_of_the_stream(guarded: Nsqd):
    answer, error = after_eof(guarded, auth() + b"RDY\n")
    assert b"permission_count" in answer.data and error.kind == ERROR


def test_already_set(guarded: Nsqd):
    with authorized(guarded) as connection:
        assert fatal_on(connection, auth()) == "E_INVALID AUTH already set"


def test_not_behind_SUB(guarded: Nsqd, topic: str):
    with authorized(guarded) as connection:
        connection.subscribe(topic, "c")
        assert fatal_on(connection, auth()) == "E_INVALID cannot AUTH in current state"


def test_before_and_behind_IDENTIFY(guarded: Nsqd, topic: str):
    with authorized(guarded) as connection:
        connection.identify()
        connection.ok(pub(topic, b"x"))
    with guarded.connect() as connection:
        connection.identify()
        connection.send(auth())
        assert b"permission_count" in connection.response()
        connection.ok(pub(topic, b"x"))


# -- the answer to the client ------------------------------------------------------------------------------------------


def test_the_answer_byte_for_byte(guarded: Nsqd, server: AuthServer):
    server.grant(*EVERYTHING, *EVERYTHING)
    with guarded.connect() as connection:
        connection.send(auth())
        assert connection.response() == b'{"identity":"me","identity_url":"http://me","permission_count":2}'


def test_the_answer_without_identity(guarded: Nsqd, server: AuthServer):
    server.answer = {"ttl": 1, "authorizations": EVERYTHING}
    with guarded.connect() as connection:
        connection.send(auth())
        assert connection.response() == b'{"identity":"","identity_url":"","permission_count":1}'


# -- the question ------------------------------------------------------------------------------------------------------


def test_get_has_a_sorted_and_encoded_query(guarded: Nsqd, server: AuthServer):
    with guarded.connect() as connection:
        connection.send(auth("a b&c=ü/+"))
        connection.response()
    ((target, headers, body),) = server.requests
    expected = "common_name=&remote_ip=127.0.0.1&secret=a+b%26c%3D%C3%BC%2F%2B&tls=false"
    assert target == f"/auth?{expected}"
    assert headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert body == b""
    assert server.questions[0]["method"] == "GET"


@pytest.fixture(scope="module")
def posting(shared_daemons: Daemons, one_server: AuthServer) -> Nsqd:
    """An nsqd that asks with POST, at an address with a scheme and a path."""
    address = f"--auth-http-address=http://{one_server.address}/who/may"
    return shared_daemons.nsqd(*quick_flags(), address, "--auth-http-request-method=post")


def test_post_has_json_of_arrays(posting: Nsqd, server: AuthServer):
    with posting.connect() as connection:
        connection.send(auth("a b&cü"))
        connection.response()
    ((_, headers, body),) = server.requests
    assert headers["Content-Type"] == "application/json"
    assert headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert json.loads(body) == {"common_name": [""], "remote_ip": ["127.0.0.1"], "secret": ["a b&cü"], "tls": ["false"]}
    assert server.questions[0]["method"] == "POST"


def test_an_address_with_a_scheme_is_used_as_it_is(posting: Nsqd, server: AuthServer):
    with authorized(posting):
        assert [target for target, *_ in server.requests] == ["/who/may"]


def test_tls_and_the_certificate_s_name_are_told(shared_daemons: Daemons, server: AuthServer, tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    flags = tls_flags(certificates, "--tls-client-auth-policy=require-verify")
    nsqd = shared_daemons.nsqd(*quick_flags(), *flags, f"--auth-http-address={server.address}")
    with Upgraded(nsqd.tcp) as connection:
        connection.upgrade(certificates.client_context("good"))
        connection.send(auth())
        connection.response()
    (question,) = server.questions
    assert (question["common_name"], question["tls"]) == (CLIENT_NAME, "true")
    nsqd.stop()


def test_remote_ip_is_empty_on_a_unix_socket(tmp_path: Path, server: AuthServer):
    nsqd = UnixNsqd(tmp_path, *quick_flags(), f"--auth-http-address={server.address}")
    nsqd.start()
    try:
        with authorized(nsqd):
            assert server.questions[0]["remote_ip"] == ""
    finally:
        nsqd.discard()
    assert not nsqd.crashes()


def test_the_next_server_is_asked_when_one_does_not_answer(shared_daemons: Daemons, server: AuthServer):
    """Whichever of them is the first by chance."""
    addresses = ("127.0.0.1:1", server.address, "127.0.0.1:1")
    nsqd = shared_daemons.nsqd(*quick_flags(), *(f"--auth-http-address={each}" for each in addresses))
    for _ in range(4):
        with authorized(nsqd):
            pass
    assert len(server.questions) == 4
    nsqd.stop()


def test_a_server_that_is_too_slow_is_given_up(shared_daemons: Daemons, server: AuthServer):
    flags = (f"--auth-http-address={server.address}", "--http-client-request-timeout=300ms")
    server.delay_s = 3600
    assert fatal(shared_daemons.nsqd(*quick_flags(), *flags), auth()) == FAILED


# -- answers that let nobody in ----------------------------------------------------------------------------------------


def granting(**changes: Any) -> dict[str, Any]:
    return {"ttl": 60, "authorizations": [{**EVERYTHING[0], **changes}]}


REFUSED: dict[str, tuple[int, Any]] = {
    "status-500": (500, granting()),
    "status-404": (404, granting()),
    "status-403": (403, granting()),
    "status-201": (201, granting()),
    "not-an-object": (200, "welcome"),
    "unknown-permission": (200, granting(permissions=["publish", "administrate"])),
    "permission-in-upper-case": (200, granting(permissions=["PUBLISH"])),
    "bad-topic-pattern": (200, granting(topic="(")),
    "bad-channel-pattern": (200, granting(channels=[".*", "["])),
    "ttl-zero": (200, {**granting(), "ttl": 0}),
    "ttl-negative": (200, {**granting(), "ttl": -1}),
    "ttl-absent": (200, {"authorizations": EVERYTHING}),
    "ttl-a-text": (200, {**granting(), "ttl": "60"}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_failed(guarded: Nsqd, server: AuthServer, case: str):
    server.status, server.answer = REFUSED[case]
    assert fatal(guarded, auth()) == FAILED


def test_failed_when_nobody_answers(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags(), "--auth-http-address=127.0.0.1:1")
    assert fatal(nsqd, auth()) == FAILED
    nsqd.stop()


@pytest.mark.parametrize("authorizations", [[], None], ids=["empty", "null"])
def test_no_authorizations(guarded: Nsqd, server: AuthServer, authorizations: Any):
    server.answer = {"ttl": 60, "authorizations": authorizations}
    assert fatal(guarded, auth()) == "E_UNAUTHORIZED AUTH no authorizations found"


def test_nothing_behind_a_refused_AUTH_is_executed(guarded: Nsqd, server: AuthServer, topic: str):
    server.status = 500
    assert fatal(guarded, auth() + pub(topic, b"x")) == FAILED
    assert topic not in topics(guarded)


def test_commands_behind_AUTH_wait_for_its_answer(guarded: Nsqd, server: AuthServer, topic: str):
    server.delay_s = 0.1
    with guarded.connect() as connection:
        connection.send(auth() + pub(topic, b"x") + b"NOP\n")
        assert b"permission_count" in connection.response()
        connection.ok()


# -- permissions -------------------------------------------------------------------------------------------------------

MAY_PUBLISH = {"permissions": ["publish"], "topic": "^in$", "channels": [".*"]}
MAY_SUBSCRIBE = {"permissions": ["subscribe"], "topic": "^out$", "channels": ["^a", "^b$"]}
MAY_BOTH = {"permissions": ["subscribe", "publish"], "topic": "both", "channels": [".*"]}

PERMISSIONS: dict[str, tuple[bytes, str]] = {
    "PUB-allowed": (pub("in", b"x"), ""),
    "MPUB-allowed": (mpub("in", [b"x"]), ""),
    "DPUB-allowed": (dpub("in", 0, b"x"), ""),
    "SUB-allowed": (b"SUB out b\n", ""),
    "SUB-unanchored-channel": (b"SUB out abc\n", ""),
    "SUB-unanchored-topic": (b"SUB the_both_of c\n", ""),
    "PUB-unanchored-topic": (pub("the_both_of", b"x"), ""),
    "PUB-without-permission": (pub("out", b"x"), 'PUB on "out" ""'),
    "MPUB-without-permission": (mpub("out", [b"x"]), 'MPUB on "out" ""'),
    "DPUB-without-permission": (dpub("out", 0, b"x"), 'DPUB on "out" ""'),
    "SUB-without-permission": (b"SUB in c\n", 'SUB on "in" "c"'),
    "PUB-anchored-topic": (pub("in2", b"x"), 'PUB on "in2" ""'),
    "PUB-other-case": (pub("IN", b"x"), 'PUB on "IN" ""'),
    "SUB-other-channel": (b"SUB out c\n", 'SUB on "out" "c"'),
    "SUB-anchored-channel": (b"SUB out bb\n", 'SUB on "out" "bb"'),
    "SUB-ephemeral-is-another-channel": (b"SUB out b#ephemeral\n", 'SUB on "out" "b#ephemeral"'),
}


@pytest.mark.parametrize("case", PERMISSIONS)
def test_permission(guarded: Nsqd, server: AuthServer, case: str):
    command, what = PERMISSIONS[case]
    server.grant(MAY_PUBLISH, MAY_SUBSCRIBE, MAY_BOTH)
    with authorized(guarded) as connection:
        if what:
            assert fatal_on(connection, command) == f"E_UNAUTHORIZED AUTH failed for {what}"
        else:
            connection.ok(command)


def test_a_refused_command_creates_nothing(guarded: Nsqd, server: AuthServer, topic: str):
    server.grant(MAY_PUBLISH)
    for command in (pub(topic, b"x"), mpub(topic, [b"x"]), dpub(topic, 0, b"x"), b"SUB %s c\n" % topic.encode()):
        with authorized(guarded) as connection:
            fatal_on(connection, command)
    assert topic not in topics(guarded)


def test_one_authorization_is_enough(guarded: Nsqd, server: AuthServer, topic: str):
    nothing = {"permissions": [], "topic": ".*", "channels": [".*"]}
    server.grant(nothing, {"permissions": ["publish"], "topic": "^$", "channels": [".*"]}, *EVERYTHING)
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x"))


@pytest.mark.improvement
@pytest.mark.parametrize("channels", [{}, {"channels": []}], ids=["absent", "empty"])
def test_publishing_needs_no_channels(guarded: Nsqd, server: AuthServer, topic: str, channels: dict[str, Any]):
    """Upstream matches "" against the channels, so an authorization without any lets nobody publish."""
    server.grant({"permissions": ["publish"], "topic": ".*", **channels})
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x"))


def test_publishing_needs_channels_that_match_the_empty_text(guarded: Nsqd, server: AuthServer, topic: str):
    server.grant({"permissions": ["publish"], "topic": ".*", "channels": ["^c$"]})
    with authorized(guarded) as connection:
        error = fatal_on(connection, pub(topic, b"x"))
    assert error == f'E_UNAUTHORIZED AUTH failed for PUB on "{topic}" ""'


def test_subscribing_needs_channels(guarded: Nsqd, server: AuthServer, topic: str):
    server.grant({"permissions": ["subscribe"], "topic": ".*"})
    with authorized(guarded) as connection:
        error = fatal_on(connection, b"SUB %s c\n" % topic.encode())
    assert error == f'E_UNAUTHORIZED AUTH failed for SUB on "{topic}" "c"'


def test_stats_say_who_it_is(guarded: Nsqd, topic: str):
    with authorized(guarded) as connection:
        connection.subscribe(topic, "c")
        (row,) = clients(guarded, topic)
        assert (row["authed"], row["auth_identity"], row["auth_identity_url"]) == (True, "me", "http://me")


def test_http_has_no_auth(guarded: Nsqd, topic: str):
    guarded.post(f"/pub?topic={topic}", b"x")
    assert topic in topics(guarded)


# -- time --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def expired(guarded: Nsqd, one_server: AuthServer) -> Iterator[Callable[[], Connection]]:
    """Connections whose grants, given for two seconds, have run out; all of them wait for it together."""
    one_server.reset()
    one_server.grant(*EVERYTHING, ttl=2)
    with contextlib.ExitStack() as stack:
        connections = []
        for number in range(12):
            connections.append(stack.enter_context(authorized(guarded)))
            if number < 6:
                connections[-1].ok(pub("ttl", b"x"))
        assert len(one_server.questions) == 12
        time.sleep(2.1)
        yield connections.pop


def test_ttl_nothing_is_asked_within_it(guarded: Nsqd, server: AuthServer, topic: str):
    with authorized(guarded) as connection:
        connection.ok(pub(topic, b"x") * 50, count=50)
        connection.subscribe(topic, "c")
    assert len(server.questions) == 1


@pytest.mark.parametrize("command", ["SUB", "PUB", "MPUB", "DPUB"])
def test_ttl_behind_it_the_server_is_asked_again(expired: Callable[[], Connection], server: AuthServer, command: str):
    expired().ok(COMMANDS[command])
    assert len(server.questions) == 1
    assert server.questions[0]["secret"] == SECRET


def test_ttl_the_new_answer_counts(expired: Callable[[], Connection], server: AuthServer, topic: str):
    server.grant(MAY_PUBLISH)
    error = fatal_on(expired(), pub(topic, b"x"))
    assert error == f'E_UNAUTHORIZED AUTH failed for PUB on "{topic}" ""'


def test_ttl_the_new_answer_holds_for_its_own_time(expired: Callable[[], Connection], server: AuthServer, topic: str):
    expired().ok(pub(topic, b"x") * 3, count=3)
    assert len(server.questions) == 1


@pytest.mark.parametrize("command", ["SUB", "PUB"])
def test_ttl_without_an_answer_it_failed(expired: Callable[[], Connection], server: AuthServer, command: str):
    server.status = 500
    assert fatal_on(expired(), COMMANDS[command]) == FAILED


def test_ttl_a_subscription_goes_on_while_it_is_granted(guarded: Nsqd, server: AuthServer, topic: str):
    """NSQ's nsqd does not ask about it again; ours asks ahead of time, and RDY, FIN and CLS wait for nothing."""
    server.grant(*EVERYTHING, ttl=1)
    with authorized(guarded) as connection:
        connection.subscribe(topic, "c", 1)
        time.sleep(1.05)
        guarded.post(f"/pub?topic={topic}", b"x")
        message = connection.message()
        connection.finish(message)
        connection.send(b"RDY 1\nCLS\n")
        assert connection.response() == b"CLOSE_WAIT"


def test_ttl_nop_and_identify_need_no_permission(expired: Callable[[], Connection], server: AuthServer):
    connection = expired()
    connection.send(b"NOP\n")
    connection.identify()
    assert server.questions == []
    goes_on(connection)
