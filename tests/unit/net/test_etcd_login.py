"""Logins at an etcd that takes long for them: each once for all, bounded, and named when they fail."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from flintmq.cluster.store import Span, StoreRefused, StoreUnavailable
from flintmq.env import Env
from flintmq.net import etcd_wire as wire
from flintmq.net.etcd import EtcdOptions, EtcdStore
from flintmq.net.http_messages import Request, Response
from flintmq.net.http_server import HttpServer, Router, json_response

PATIENCE_S = 60.0
UNAUTHENTICATED = 16


def refusal(code: int, message: str, status: int) -> Response:
    return json_response({"code": code, "message": f"etcdserver: {message}"}, status)


class FakeEtcd:
    """An etcd with one user, of which a test says when a login is answered.

    Attributes:
        logins: how many have begun.
        under_way, under_way_max: at the same time, now and at most.
        delay_s: a login takes so long; None: until ``answers`` is set.
        token: of who has logged in; empty: nobody has.
        shown, shown_at_login: the tokens that came with questions and logins; empty: none.
    """

    def __init__(self) -> None:
        self.logins = self.under_way = self.under_way_max = 0
        self.delay_s: float | None = None
        self.answers = asyncio.Event()
        self.news = asyncio.Event()
        self.failure: Response | None = None
        self.token = ""
        self.shown: list[str] = []
        self.shown_at_login: set[str] = set()
        router = Router()
        router.add("POST", wire.AUTHENTICATE, self._login)
        for target in (wire.RANGE, wire.WATCH):
            router.add("POST", target, self._range)
        self.server = HttpServer(router)

    async def until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so, which changes with what is asked here."""
        while not is_so():
            self.news.clear()
            await self.news.wait()

    async def _login(self, request: Request) -> Response:
        self.logins += 1
        self.under_way += 1
        self.under_way_max = max(self.under_way_max, self.under_way)
        self.shown_at_login.add(request.headers.get(b"authorization", b"").decode())
        self.news.set()
        try:
            if self.delay_s is None:
                await self.answers.wait()
            else:
                await asyncio.sleep(self.delay_s)
        finally:
            self.under_way -= 1
        if self.failure is not None:
            return self.failure
        self.token = f"token.{self.logins}"
        return json_response({"token": self.token})

    def _range(self, request: Request) -> Response:
        shown = request.headers.get(b"authorization", b"").decode()
        self.shown.append(shown)
        self.news.set()
        if not shown:
            return refusal(3, "user name is empty", 400)
        if shown != self.token:
            return refusal(UNAUTHENTICATED, "invalid auth token", 401)
        return json_response({"header": {"revision": "1"}})


@contextlib.asynccontextmanager
async def serving(*fakes: FakeEtcd, **options: Any) -> AsyncIterator[EtcdStore]:
    async with asyncio.timeout(PATIENCE_S), contextlib.AsyncExitStack() as stack:
        addresses = []
        for fake in fakes:
            listener = await fake.server.start("127.0.0.1:0")
            stack.push_async_callback(fake.server.close)
            stack.callback(fake.answers.set)
            addresses.append(f"http://{listener.name}")
        store = EtcdStore(Env(), EtcdOptions(addresses, user="joe", password="secret", **options))
        stack.push_async_callback(store.close)
        yield store


async def test_a_login_that_takes_longer_than_a_request_may_succeeds():
    fake = FakeEtcd()
    fake.delay_s = 1.0
    async with serving(fake, try_timeout_s=0.5, timeout_s=PATIENCE_S, login_timeout_s=PATIENCE_S) as store:
        assert await store.get("/a") is None
    assert fake.logins == 1 and fake.shown[-1] == "token.1"


async def test_who_needs_a_token_at_the_same_time_waits_for_one_login():
    fake = FakeEtcd()
    options = {"try_timeout_s": PATIENCE_S, "timeout_s": PATIENCE_S}
    async with serving(fake, **options) as store:
        asked = [asyncio.ensure_future(store.get(f"/{number}")) for number in range(20)]
        await fake.until(lambda: len(fake.shown) == 20)
        fake.answers.set()
        assert await asyncio.gather(*asked) == [None] * 20
        assert (fake.logins, fake.under_way_max) == (1, 1)
        fake.token = "another"  # it was started anew, and knows no token
        fake.failure = refusal(14, "leader changed", 503)
        for _ in range(2):
            with pytest.raises(StoreUnavailable, match=r"user 'joe' could not log in at the store: .*leader changed"):
                await store.get("/a")
        assert set(fake.shown[40:]) == {"token.1"}, "the one before stays until there is another one"
        assert fake.shown_at_login == {""}
        fake.failure = None
        assert await store.get("/a") is None and fake.shown[-1] == fake.token


async def test_a_call_waits_for_no_longer_than_it_may_take_and_the_login_goes_on():
    fake = FakeEtcd()
    async with serving(fake, try_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as store:
        store._options = EtcdOptions(
            store._options.endpoints, user="joe", password="secret", try_timeout_s=0.5, timeout_s=1.0,
            login_timeout_s=PATIENCE_S,
        )  # fmt: skip
        told = []
        while not fake.logins:
            with pytest.raises(StoreUnavailable) as raised:
                await store.get("/a")
            told.append(str(raised.value))
        assert any("user 'joe' has not logged in within 0." in each and "--bcrypt-cost" in each for each in told), told
        with pytest.raises(StoreUnavailable):
            await store.get("/a")
        fake.answers.set()
        while True:
            with contextlib.suppress(StoreUnavailable):
                assert await store.get("/a") is None
                break
        assert fake.logins == 1


async def test_a_login_without_an_answer_goes_on_at_the_next_endpoint_and_says_so_when_there_is_none():
    silent, other = FakeEtcd(), FakeEtcd()
    other.delay_s = 0.0
    options = {"try_timeout_s": PATIENCE_S, "timeout_s": PATIENCE_S, "login_timeout_s": 0.5}
    async with serving(silent, **options) as store:
        with pytest.raises(StoreUnavailable) as raised:
            await store.get("/a")
        told = str(raised.value)
        assert (
            f"user 'joe' could not log in at the store: {store.endpoints[0]}: no answer within 0.5 s; it takes" in told
        )
    async with serving(silent := FakeEtcd(), other, **{**options, "login_timeout_s": 1.0}) as store:
        store._token = "old"
        while other.token == "":
            with contextlib.suppress(StoreUnavailable):
                await store.get("/a")
        assert silent.logins and store._token == other.token


async def test_who_is_not_let_in_is_told_so_and_nobody_waits_for_that_again():
    fake = FakeEtcd()
    fake.failure = refusal(3, "authentication failed, invalid user ID or password", 400)
    fake.answers.set()
    async with serving(fake, try_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as store:
        with pytest.raises(
            StoreRefused, match=r"does not let user 'joe' in: .*; correct user and password of the store"
        ):
            await store.get("/a")


async def test_a_watch_outlives_a_login_that_fails(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    fake = FakeEtcd()
    fake.delay_s = 0.0
    fake.failure = refusal(14, "leader changed", 503)
    async with (
        serving(fake, try_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as store,
        store.watch(Span.of_prefix("/"), 0) as watched,
    ):
        reading = asyncio.ensure_future(anext(watched))
        reading.add_done_callback(lambda _: fake.news.set())
        await fake.until(lambda: fake.logins == 3 or reading.done())
        assert not reading.done(), reading
        reading.cancel()
        await asyncio.wait({reading})
    assert caplog.text.count("could not log in at the store") == 1, "once in an outage"


async def test_a_store_that_is_closed_logs_in_no_longer():
    fake = FakeEtcd()
    async with serving(fake, try_timeout_s=PATIENCE_S, timeout_s=PATIENCE_S) as store:
        asked = asyncio.ensure_future(store.get("/a"))
        await fake.until(lambda: fake.logins == 1)
        await store.close()
        with pytest.raises(StoreUnavailable, match="has not logged in"):
            await asked
        assert store._login is None
