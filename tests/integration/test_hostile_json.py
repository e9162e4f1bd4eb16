"""JSON that is nested too deeply, wherever the daemons read JSON of others: an error there, and no traceback."""

from __future__ import annotations

import contextlib
import json
import socket
import sys

import pytest
from tests.conformance.redesigned_helpers import create, headed, one
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, sized

DEPTHS = [150, 300, 600, 990, 1000, 1010, 7900]
"""Around what Python allows, which depends on how deep the reader stands itself; all of them fit 16 KiB."""

MAY_BE_READ = 1000 if sys.version_info < (3, 12) else 8000
"""What is not as deep may be read or refused; newer Pythons count what is written in C by itself."""


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


@pytest.fixture(scope="module")
def nsqd(shared: Daemons) -> Nsqd:
    nsqd = shared.nsqd("--durability=os")
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    create(nsqd, "headers", 1, extend="true")
    return nsqd


@pytest.fixture(scope="module")
def nsqlookupd(shared: Daemons) -> Nsqlookupd:
    return shared.nsqlookupd()


@pytest.mark.parametrize("depth", DEPTHS)
def test_settings(nsqd: Nsqd, depth: int):
    for target in ("/topic/settings?topic=t", "/channel/settings?topic=t&channel=c"):
        for body in (deep(depth), b'{"x":%b}' % deep(depth), b'{"overflow":%b}' % deep(depth)):
            answer = nsqd.request("POST", target, body)
            assert answer.status == 400 and answer.json["message"].startswith("INVALID_"), (target, depth, answer.text)
            assert len(answer.body) < 500


@pytest.mark.parametrize("depth", DEPTHS)
def test_config(nsqd: Nsqd, depth: int):
    answer = nsqd.request("PUT", "/config/nsqlookupd_tcp_addresses", deep(depth))
    assert answer.error == (400, "INVALID_VALUE")


@pytest.mark.parametrize("depth", DEPTHS)
def test_identify(nsqd: Nsqd, depth: int):
    for name in (b"user_agent", b"client_id", b"nobody_knows"):
        with nsqd.connect() as connection:
            connection.send(b"IDENTIFY\n" + sized(b'{"%b":%b}' % (name, deep(depth))))
            kind, data = connection.frame()
            if name == b"nobody_knows" and kind == 0:
                assert depth < MAY_BE_READ and data == b"OK"
            else:
                assert data.startswith(b"E_BAD_BODY IDENTIFY"), data


@pytest.mark.parametrize("depth", DEPTHS)
def test_headers_of_a_message(nsqd: Nsqd, depth: int):
    with nsqd.connect() as connection:
        connection.send(one("PUB_EXT", "headers", 0, headed(b'{"a":%b}' % deep(depth), b"x")))
        kind, data = connection.frame()
        assert kind == 1 or depth < MAY_BE_READ, data


@pytest.mark.parametrize("depth", DEPTHS)
def test_nsqlookupd(nsqlookupd: Nsqlookupd, depth: int):
    with contextlib.closing(socket.create_connection(nsqlookupd.tcp, PATIENCE_S)) as peer:
        peer.sendall(b"  V1IDENTIFY\n" + sized(b'{"more":%b}' % deep(depth)))
        answer = peer.recv(1000)
    assert b"E_BAD_BODY" in answer, answer
    with contextlib.closing(socket.create_connection(nsqlookupd.tcp, PATIENCE_S)) as peer:
        me = {"version": "1", "tcp_port": 1, "http_port": 2, "broadcast_address": "b", "distributed_id": "b:1"}
        peer.sendall(b"  V1IDENTIFY\n" + sized(json.dumps(me).encode()))
        assert b"version" in peer.recv(1000)
        peer.sendall(b"META t\n" + sized(b'{"more":%b}' % deep(depth)))
        answer = peer.recv(1000)
    assert b"E_BAD_BODY" in answer or (depth < MAY_BE_READ and b"OK" in answer), answer


def test_an_answer_of_an_auth_server(daemons: Daemons):
    with AuthServer() as server:
        nsqd = daemons.nsqd(f"--auth-http-address={server.address}")
        answer: object = []
        for _ in range(900):  # about as deep as the server itself can write
            answer = [answer]
        server.answer = {"ttl": 60, "authorizations": [], "more": answer}
        with nsqd.connect() as connection:
            connection.send(b"AUTH\n" + sized(SECRET.encode()))
            assert connection.error() in ("E_AUTH_FAILED AUTH failed", "E_UNAUTHORIZED AUTH no authorizations found")
