"""Auth servers: the question in both forms, the answer and its bounds, what follows from it."""

from __future__ import annotations

import asyncio
import gzip
import json
import random
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import msgspec
import pytest
from aiohttp import web
from tests.certificates import Certificates

from flintmq.env import Env
from flintmq.net.regex import compiled
from flintmq.net.tls import client_context
from flintmq.nsqd import auth as auth_module
from flintmq.nsqd.auth import (
    ANSWER_SIZE_MAX,
    CONCURRENT_MAX,
    DECISION_COUNT_MAX,
    AuthClient,
    AuthFailed,
    AuthRefused,
    ClientAuth,
    Grants,
    Question,
    parse_answer,
)

SECRET = b"geheim & <wort>+\xff"
QUESTION = Question("127.0.0.1", False, "", SECRET)
ANSWER = {
    "ttl": 3600,
    "identity": "name",
    "identity_url": "http://x",
    "authorizations": [{"permissions": ["subscribe", "publish"], "topic": ".*", "channels": [".*"]}],
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@asynccontextmanager
async def serving(handler: Handler, context: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """An HTTP server that answers everything with ``handler``; gives its ``host:port``."""
    runner = web.ServerRunner(web.Server(cast(Any, handler)), shutdown_timeout=0.05)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    assert runner.addresses
    try:
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def asking(*addresses: str, **options: Any) -> AsyncIterator[AuthClient]:
    settings: dict[str, Any] = {
        "method": "get",
        "env": Env(random=random.Random(1)),
        "context": client_context,
        "connect_timeout_s": 0.5,
        "request_timeout_s": 2.0,
    }
    client = AuthClient(addresses, **{**settings, **options})
    try:
        yield client
    finally:
        await client.close()


async def ask(client: AuthClient, question: Question = QUESTION) -> Grants:
    answered: asyncio.Future[Grants | AuthFailed] = asyncio.get_running_loop().create_future()
    client.ask(question, answered.set_result)
    async with asyncio.timeout(20):
        answer = await answered
    if isinstance(answer, AuthFailed):
        raise answer
    return answer


def with_answer(answer: Any, seen: list[web.Request] | None = None) -> Handler:
    async def handle(request: web.Request) -> web.Response:
        await request.read()
        if seen is not None:
            seen.append(request)
        return web.json_response(answer)

    return handle


# -- the question ------------------------------------------------------------------------------------------------------


async def test_get():
    seen: list[web.Request] = []
    async with serving(with_answer(ANSWER, seen)) as address, asking(address) as client:
        grants = await ask(client, Question("1.2.3.4", True, "cn ü", SECRET))
    assert (grants.identity, grants.identity_url, grants.ttl_s, grants.count) == ("name", "http://x", 3600, 1)
    request = seen[0]
    assert request.method == "GET"
    assert request.raw_path == (
        "/auth?common_name=cn+%C3%BC&remote_ip=1.2.3.4&secret=geheim+%26+%3Cwort%3E%2B%FF&tls=true"
    )
    assert request.headers["Accept"] == "application/vnd.nsq; version=1.0"


async def test_post():
    seen: list[tuple[web.Request, bytes]] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append((request, await request.read()))
        return web.json_response(ANSWER)

    async with serving(handle) as address, asking(address, method="post") as client:
        await ask(client, Question("", False, "", SECRET))
    request, body = seen[0]
    assert (request.method, request.raw_path) == ("POST", "/auth")
    assert request.headers["Content-Type"] == "application/json"
    assert request.headers["Accept"] == "application/vnd.nsq; version=1.0"
    assert list(json.loads(body).items()) == [
        ("common_name", [""]),
        ("remote_ip", [""]),
        ("secret", ["geheim & <wort>+\ufffd"]),
        ("tls", ["false"]),
    ]


@pytest.mark.parametrize(
    ("form", "path"),
    [
        ("http://{}/a/b", "/a/b?common_name="),
        ("http://{}", "/?common_name="),
        ("http://{}/a?x=1", "/a?x=1&common_name="),
    ],
)
async def test_whole_urls_are_used_as_they_are(form: str, path: str):
    seen: list[web.Request] = []
    async with serving(with_answer(ANSWER, seen)) as address, asking(form.format(address)) as client:
        await ask(client)
    assert seen[0].raw_path.startswith(path)


async def test_https_is_verified(certificates: Certificates):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    trusted = partial(client_context, certificates.ca)
    async with serving(with_answer(ANSWER), context) as address:
        async with asking(f"https://{address}/auth", context=trusted) as client:
            assert (await ask(client)).count == 1
        async with asking(f"https://{address}/auth") as client:
            with pytest.raises(AuthFailed, match="certificate verify failed"):
                await ask(client)


async def test_a_403_that_names_an_https_port_is_followed(certificates: Certificates):
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificates.server.cert, certificates.server.key)
    trusted = partial(client_context, certificates.ca)
    seen: list[web.Request] = []
    async with serving(with_answer(ANSWER, seen), context) as secure_address:

        async def refuse(request: web.Request) -> web.Response:
            body = {"message": "TLS_REQUIRED", "https_port": int(secure_address.rpartition(":")[2])}
            return web.json_response(body, status=403)

        async with (
            serving(refuse) as address,
            asking(address, context=trusted) as client,
        ):
            assert (await ask(client)).count == 1
    assert seen[0].raw_path.startswith("/auth?common_name=&remote_ip=127.0.0.1&secret=geheim")


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[]", b'{"https_port":0}', b'{"https_port":"1"}', b'{"https_port":70000}']
)
async def test_another_403_is_a_refusal(body: bytes):
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=403, body=body)

    async with serving(refuse) as address, asking(address) as client:
        with pytest.raises(AuthRefused, match="status 403"):
            await ask(client)


async def test_all_servers_have_to_refuse():
    status = [401, 403]

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status.pop())

    async with serving(answer) as address, asking(address, address) as client:
        with pytest.raises(AuthRefused, match=r"status 403.*status 401"):
            await ask(client)
        status[:] = [403, 500]
        with pytest.raises(AuthFailed, match=r"status 500.*status 403") as caught:
            await ask(client)
    assert not isinstance(caught.value, AuthRefused), "the other one might say yes"


# -- servers -----------------------------------------------------------------------------------------------------------


async def test_the_next_server_is_asked_when_one_fails():
    async def broken(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async with serving(broken) as bad, serving(with_answer(ANSWER)) as good:
        async with asking("127.0.0.1:1", bad, good, bad) as client:
            for _ in range(8):
                assert (await ask(client)).count == 1
        async with asking("127.0.0.1:1", bad) as client:
            with pytest.raises(AuthFailed) as caught:
                await ask(client)
    text = str(caught.value)
    assert f"failed to auth against http://{bad}/auth - status 500" in text
    assert "failed to auth against http://127.0.0.1:1/auth - " in text
    assert "; " in text


async def test_the_first_server_is_chosen_at_random():
    firsts: list[str] = []

    def handler(name: str) -> Handler:
        async def handle(_: web.Request) -> web.Response:
            firsts.append(name)
            return web.json_response(ANSWER)

        return handle

    async with serving(handler("a")) as one, serving(handler("b")) as other, asking(one, other) as client:
        for _ in range(30):
            await ask(client)
    assert {"a", "b"} == set(firsts)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"ttl": 0}, "invalid ttl 0"),
        ({"ttl": -1}, "invalid ttl -1"),
        ({"ttl": None}, "the answer has no ttl"),
        ({"ttl": "3600"}, "cannot be read"),
        ({"authorizations": {}}, "cannot be read"),
        ({"authorizations": [{"permissions": ["admin"], "topic": ".*"}]}, "unknown permission 'admin'"),
        ({"authorizations": [{"permissions": ["publish"], "topic": "("}]}, "missing )"),
        ({"authorizations": [{"permissions": ["publish"], "topic": "a", "channels": ["["]}]}, "missing ]"),
        ({"authorizations": [{"topic": 1}]}, "cannot be read"),
        ({"Authorizations": [{"Topic": "a", "Permissions": ["admin"]}]}, "unknown permission 'admin'"),
        ({"authorizations": [{"topic": "a"}] * 10_001}, "the answer has 10001 authorizations, at most 10000 are taken"),
        ({"authorizations": [{"channels": [f"c{n}" for n in range(10_001)]}]}, "has 10002 regular expressions, at mo"),
    ],
)
async def test_answers_that_cannot_be_used(change: dict[str, Any], reason: str):
    async with serving(with_answer({**ANSWER, **change})) as address, asking(address) as client:
        with pytest.raises(AuthFailed) as caught:
            await ask(client)
    assert reason in str(caught.value)


DEEP = b'{"ttl":1,"more":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}"


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"null", b"[]", b'{"ttl":1,"identity":"\xff"}', DEEP])
def test_bodies_that_are_no_answer(body: bytes):
    with pytest.raises(AuthFailed):
        parse_answer(body)


def test_what_may_be_missing():
    grants = parse_answer(b'{"ttl":1,"identity":null,"authorizations":null,"more":{}}')
    assert (grants.identity, grants.identity_url, grants.count) == ("", "", 0)


def test_keys_may_have_any_case():
    """As a server in Go sends them that gives its fields no names."""
    grants = parse_answer(
        b'{"TTL":60,"Identity":"i","Authorizations":[{"Topic":"^t$","CHANNELS":["^c$"],"Permissions":["subscribe"]}]}'
    )
    assert (grants.ttl_s, grants.identity, grants.count) == (60, "i", 1)
    assert grants.may_subscribe("t", "c")
    assert not grants.may_subscribe("t", "d")
    assert not grants.may_publish("t")


@pytest.mark.parametrize(
    ("sent", "ttl_s", "is_allowed"),
    [
        (b'"ttl":1,"TTL":2,"authorizations":[],"Authorizations":[%s]', 2, True),
        (b'"TTL":2,"ttl":1,"Authorizations":[%s],"authorizations":[]', 1, False),
        (b'"ttl":1,"TTL":null,"authorizations":[%s]', 1, True),
        (b'"ttl":1,"authorizations":[%s],"AUTHORIZATIONS":null', 1, False),
        (b'"ttl":1,"authorizations":[{"topic":"^t$","Topic":null,"permissions":["publish"]}]', 1, True),
        (b'"ttl":1,"authorizations":[{"topic":"^t$","permissions":["publish"],"Permissions":null}]', 1, False),
    ],
)
def test_of_several_keys_the_last_counts(sent: bytes, ttl_s: int, is_allowed: bool):
    one = b'{"topic":"^t$","permissions":["publish"]}'
    grants = parse_answer(b"{" + sent.replace(b"%s", one) + b"}")
    assert (grants.ttl_s, grants.may_publish("t")) == (ttl_s, is_allowed)


def test_answers_may_be_long():
    """A service with a topic for each of its customers; more than are remembered by what compiles expressions."""
    rules = [{"permissions": ["publish"], "topic": f"^t{n}$", "channels": [f"^c{n}$", "^$"]} for n in range(4_999)]
    grants = granted(*rules)
    assert grants.count == 4_999
    assert grants.may_publish("t4998")
    assert not grants.may_publish("t4999")


def test_what_is_granted_alike_is_kept_once(monkeypatch: pytest.MonkeyPatch):
    texts: list[str] = []

    def counting(text: str) -> Any:
        texts.append(text)
        return compiled(text)

    monkeypatch.setattr(auth_module, "compiled", counting)
    listed = b'[{"permissions":["publish"],"topic":"^kept_once$","channels":["^$"]}]'
    one = parse_answer(b'{"ttl":1,"identity":"a","authorizations":%s}' % listed)
    other = parse_answer(b'{"ttl":2,"identity":"b","authorizations":%s}' % listed)
    assert texts == ["^kept_once$", "^$"]
    assert (one.identity, one.ttl_s, other.identity, other.ttl_s) == ("a", 1, "b", 2)
    assert one.may_publish("kept_once") and other.may_publish("kept_once")
    del one, other
    parse_answer(b'{"ttl":1,"authorizations":%s}' % listed)
    assert len(texts) == 4  # nobody had it any more


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_a_redirect_is_named(status: int):
    async def handle(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"Location": "/elsewhere?secret=geheim"})

    async with serving(handle) as address, asking(address) as client:
        with pytest.raises(AuthFailed) as caught:
            await ask(client)
    assert str(caught.value).endswith(
        f"status {status}: it redirects, which is not followed; give the address it leads to"
    )


@pytest.mark.parametrize("status", [201, 204, 301, 302, 307, 404, 500])
async def test_only_200_is_an_answer(status: int):
    """Redirects neither: they would carry the secret to wherever they point."""
    visited: list[str] = []

    async def handle(request: web.Request) -> web.Response:
        visited.append(request.path)
        return web.Response(status=status, body=json.dumps(ANSWER).encode(), headers={"Location": "/elsewhere"})

    async with serving(handle) as address, asking(address) as client:
        with pytest.raises(AuthFailed, match=f"status {status}"):
            await ask(client)
    assert visited == ["/auth"]


async def test_an_answer_that_is_too_large_is_not_read_to_its_end():
    sent = 0

    async def handle(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(640):
            await response.write(b" " * 65536)
            sent += 65536
        return response

    async with serving(handle) as address, asking(address) as client:
        with pytest.raises(AuthFailed, match=f"larger than {ANSWER_SIZE_MAX} bytes"):
            await ask(client)
    assert sent < 20 * 1024 * 1024


async def test_a_compressed_answer_is_refused_and_not_expanded():
    async def handle(_: web.Request) -> web.Response:
        return web.Response(body=gzip.compress(json.dumps(ANSWER).encode()), headers={"Content-Encoding": "gzip"})

    async with serving(handle) as address, asking(address) as client:
        with pytest.raises(AuthFailed, match="cannot be read"):
            await ask(client)


async def test_an_answer_that_comes_too_late_is_none():
    async def handle(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response(ANSWER)

    async with serving(handle) as address, asking(address, request_timeout_s=0.1) as client:
        with pytest.raises(AuthFailed, match=r"no answer within 0\.1 s"):
            await ask(client)


async def test_a_large_answer_is_read_in_a_thread():
    threads = 0

    async def run_blocking(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal threads
        threads += 1
        return function(*args)

    large = {**ANSWER, "authorizations": [{"permissions": ["publish"], "topic": f"^topic_{n}$"} for n in range(500)]}
    env = Env(random=random.Random(1), run_blocking=run_blocking)
    async with serving(with_answer(large)) as address, asking(address, env=env) as client:
        grants = await ask(client)
    assert threads == 1
    assert grants.may_publish("topic_499")
    assert not grants.may_publish("topic_500")


async def test_questions_have_a_bound_and_all_are_answered():
    together = most = 0

    async def handle(_: web.Request) -> web.Response:
        nonlocal together, most
        together += 1
        most = max(most, together)
        await asyncio.sleep(0.02)
        together -= 1
        return web.json_response(ANSWER)

    context = client_context()  # as nsqd, which does not read the authorities anew for each question
    timeouts = {"connect_timeout_s": 60, "request_timeout_s": 60}
    async with serving(handle) as address, asking(address, context=lambda: context, **timeouts) as client:
        answers = await asyncio.gather(*(ask(client) for _ in range(2 * CONCURRENT_MAX)))
    assert len(answers) == 2 * CONCURRENT_MAX
    assert 2 < most <= CONCURRENT_MAX


async def test_a_question_can_be_given_up():
    begun = asyncio.Event()

    async def handle(_: web.Request) -> web.Response:
        begun.set()
        await asyncio.sleep(5)
        return web.json_response(ANSWER)

    async with serving(handle) as address, asking(address) as client:
        task = client.ask(QUESTION, lambda _: pytest.fail("answered"))
        await begun.wait()
        task.cancel()
        await asyncio.sleep(0.01)
        assert task.cancelled()


async def test_closing_gives_up_what_is_asked():
    async def handle(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response(ANSWER)

    async with serving(handle) as address, asking(address) as client:
        task = client.ask(QUESTION, lambda _: pytest.fail("answered"))
        await asyncio.sleep(0.05)
        await client.close()
        await asyncio.sleep(0.01)
        assert task.cancelled()


@pytest.mark.slow
@pytest.mark.parametrize("method", ["get", "post"])
async def test_the_secret_is_in_no_error(method: str):
    async def echo(request: web.Request) -> web.Response:
        return web.Response(status=400, text=request.raw_path + (await request.text()))

    async def garbage(request: web.Request) -> web.Response:
        assert request.transport is not None
        request.transport.write(b"geheim is not HTTP\r\n\r\n")
        return web.Response()

    async def slow(_: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.Response()

    for handler in (echo, garbage, slow):
        async with serving(handler) as address, asking(address, method=method, request_timeout_s=0.2) as client:
            with pytest.raises(AuthFailed) as caught:
                await ask(client)
            assert "geheim" not in str(caught.value)
    for address in ("127.0.0.1:1", "http://no host/", "http://[::1:1/", "gopher://127.0.0.1/", "127.0.0.1:99999"):
        async with asking(address, method=method) as client:
            with pytest.raises(AuthFailed) as caught:
                await ask(client)
            assert "geheim" not in str(caught.value)
    assert "geheim" not in repr(QUESTION)


# -- decisions ---------------------------------------------------------------------------------------------------------


def granted(*authorizations: dict[str, Any]) -> Grants:
    return parse_answer(msgspec.json.encode({"ttl": 10, "authorizations": authorizations}))


def test_permissions_are_kept_apart():
    grants = granted(
        {"permissions": ["publish"], "topic": "^in$", "channels": [".*"]},
        {"permissions": ["subscribe"], "topic": "^out$", "channels": ["^c$"]},
    )
    assert grants.may_publish("in")
    assert not grants.may_publish("out")
    assert grants.may_subscribe("out", "c")
    assert not grants.may_subscribe("out", "d")
    assert not grants.may_subscribe("in", "c")
    assert grants.may_read("out")
    assert not grants.may_read("in")


def test_topic_and_channel_must_be_of_one_authorization():
    grants = granted(
        {"permissions": ["subscribe"], "topic": "^a$", "channels": ["^x$"]},
        {"permissions": ["subscribe"], "topic": "^b$", "channels": ["^y$"]},
    )
    assert not grants.may_subscribe("a", "y")
    assert grants.may_subscribe("b", "y")


def test_expressions_are_searched_as_in_nsqd():
    assert granted({"permissions": ["publish"], "topic": "orders"}).may_publish("private_orders_x")


@pytest.mark.parametrize("channels", [None, []])
def test_publishing_needs_no_channels(channels: list[str] | None):
    grants = granted({"permissions": ["publish", "subscribe"], "topic": "t", "channels": channels})
    assert grants.may_publish("t")
    assert not grants.may_subscribe("t", "c")
    assert not grants.may_read("t")


def test_channels_that_are_named_count_for_publishing_as_in_nsqd():
    assert not granted({"permissions": ["publish"], "topic": "t", "channels": ["^c$"]}).may_publish("t")
    assert granted({"permissions": ["publish"], "topic": "t", "channels": ["^c$", "^$"]}).may_publish("t")


def test_no_permission_is_none():
    assert not granted({"topic": ".*", "channels": [".*"]}).may_publish("t")
    assert not granted().may_publish("t")


def test_decisions_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch):
    count = 0
    decide = auth_module._allows

    def counting(*arguments: Any) -> bool:
        nonlocal count
        count += 1
        return decide(*arguments)

    monkeypatch.setattr(auth_module, "_allows", counting)
    grants = granted({"permissions": ["publish"], "topic": "t"})
    for _ in range(5):
        assert grants.may_publish("t")
    assert count == 1
    for number in range(3 * DECISION_COUNT_MAX):
        grants.may_publish(f"t{number}")
    assert len(grants._rules.decisions) <= DECISION_COUNT_MAX


def test_what_a_client_is_refused_with():
    auth = ClientAuth()
    assert auth.refusal("PUB", "t") == ("E_AUTH_FIRST", "AUTH required before PUB")
    assert not auth.has_expired(1e9)
    auth.set(granted({"permissions": ["publish"], "topic": "^t$"}), 100.0)
    assert auth.refusal("PUB", "t") is None
    assert auth.refusal("MPUB", "u") == ("E_UNAUTHORIZED", 'AUTH failed for MPUB on "u" ""')
    assert auth.refusal("SUB", "t", "c#ephemeral") == ("E_UNAUTHORIZED", 'AUTH failed for SUB on "t" "c#ephemeral"')
    assert auth.refusal("FETCH", "t", None) == ("E_UNAUTHORIZED", 'AUTH failed for FETCH on "t" ""')
    assert not auth.has_expired(109.9)
    assert auth.has_expired(110.0)
