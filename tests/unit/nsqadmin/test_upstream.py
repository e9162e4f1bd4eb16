"""The nsqd that are shown nsqadmin's token, and the time when; those that are slow, and those that are suspected."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Set
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates

from flintmq.client.admin.nsqd import create_topic, ping
from flintmq.client.admin.question import Question
from flintmq.env import Env
from flintmq.net.http_exchange import Answer, Request
from flintmq.nsqadmin import daemons
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.upstream import SUSPECTED_S, NotAnswered, Upstream
from flintmq.options import MILLISECOND, MINUTE

TOKEN = "a-token-of-thirty-two-characters"
WANTS_TLS = Answer(403, {}, b'{"message": "TLS_REQUIRED", "https_port": 4152}')
WANTS_TOKEN = Answer(401, {}, b'{"message": "UNAUTHORIZED"}')
FINE = Answer(200, {}, b"OK")
WITHIN_S = 0.01
IN_CLEAR, SECURED = "http://a.example:4151", "https://a.example:4152"


class Daemons:
    """Stands in for the client: answers in order, and remembers who was asked and whether the token was shown."""

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.asked: list[tuple[str, bool]] = []

    async def ask(self, request: Request, **_: Any) -> Answer:
        endpoint = request.endpoint
        shown = request.headers.get("Authorization") == f"Bearer {TOKEN}"
        self.asked.append((f"{endpoint.scheme}://{endpoint.address}", shown))
        return self._answers.pop(0)


def upstream(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, daemons: Daemons, **options: Any) -> Upstream:
    token = tmp_path / "token"
    token.write_text(TOKEN)
    made = Upstream(
        NsqadminOptions(lookupd_http_address=("l:4161",), http_client_token_file=str(token), **options), Env()
    )
    monkeypatch.setattr(made, "_client", daemons)
    return made


async def test_with_options_of_tls_an_nsqd_that_wants_it_never_has_the_token_in_clear(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    daemons = Daemons(WANTS_TLS, FINE, FINE)
    asking = upstream(
        monkeypatch, tmp_path, daemons, http_client_tls_root_ca_file=Certificates(tmp_path / "certificates").ca
    )
    await asking.change("nsqd", "a.example:4151", create_topic("t"))
    await asking.look("nsqd", "a.example:4151", ping())
    assert daemons.asked == [(IN_CLEAR, False), (SECURED, True), (SECURED, True)]


async def test_with_options_of_tls_an_nsqd_has_the_token_in_clear_when_it_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    daemons = Daemons(WANTS_TOKEN, FINE, FINE, FINE)
    asking = upstream(monkeypatch, tmp_path, daemons, http_client_tls_insecure_skip_verify=True)
    await asking.change("nsqd", "a.example:4151", create_topic("t"))
    await asking.look("nsqd", "a.example:4151", ping())
    await asking.look("nsqlookupd", "l:4161", ping())
    assert daemons.asked == [(IN_CLEAR, False), (IN_CLEAR, True), (IN_CLEAR, True), ("http://l:4161", True)]


class Slow:
    """Stands in for the client: some paths are answered when ``answering`` says so, others at once, or never."""

    def __init__(self, at_once: set[str], delayed: Set[str] = frozenset()) -> None:
        self.at_once, self._delayed = at_once, delayed
        self.answering = asyncio.Event()
        self.asked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def ask(self, request: Request, **_: Any) -> Answer:
        path = request.target.partition("?")[0]
        self.asked[path].set()
        if path in self._delayed:
            await self.answering.wait()
        elif path not in self.at_once:
            await asyncio.Event().wait()
        return Answer(200, {}, b"OK" if path == "/ping" else b'{"version": "1.3.0"}')


def slow_upstream(monkeypatch: pytest.MonkeyPatch, slow: Slow, timeout_ns: int = MINUTE) -> Upstream:
    made = Upstream(NsqadminOptions(lookupd_http_address=("l:4161",), http_client_request_timeout_ns=timeout_ns), Env())
    monkeypatch.setattr(made, "_client", slow)
    return made


async def test_an_nsqd_that_lives_has_time_for_the_figures_of_all_of_its_topics(monkeypatch: pytest.MonkeyPatch):
    slow = Slow({"/ping"}, {"/stats"})
    asking = slow_upstream(monkeypatch, slow)
    looking = asyncio.ensure_future(asking.look_all("nsqd", ["a.example:4151"], daemons.stats(), WITHIN_S))
    pinged = asyncio.ensure_future(slow.asked["/ping"].wait())
    await asyncio.wait({looking, pinged}, return_when=asyncio.FIRST_COMPLETED)
    assert pinged.done(), "nobody has asked for a sign of life"
    done, _ = await asyncio.wait({looking}, timeout=5 * WITHIN_S)
    assert not done, "its time is over, and it lives"
    slow.answering.set()
    assert (await looking).found["a.example:4151"].version == "1.3.0"


async def test_one_that_lives_and_never_has_them_is_not_suspected(monkeypatch: pytest.MonkeyPatch):
    slow = Slow({"/ping"})
    asking = slow_upstream(monkeypatch, slow, MILLISECOND)
    with pytest.raises(
        NotAnswered, match=r"no answer within 0\.01 s to the question for all of its topics.*request-tim"
    ):
        await asking.look("nsqd", "a.example:4151", daemons.stats(), WITHIN_S)
    with pytest.raises(NotAnswered) as late:
        await asking.look("nsqd", "a.example:4151", daemons.stats("t"), 2 * SUSPECTED_S)
    assert late.value.missing.text == "no answer within 0.8 s", "all of the time, and not the little for a suspect"


async def test_one_that_shows_no_life_has_little_time_for_the_next_questions_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch,
):
    slow = Slow(set())
    asking = slow_upstream(monkeypatch, slow)
    with pytest.raises(NotAnswered) as dead:
        await asking.look("nsqd", "a.example:4151", daemons.stats(), WITHIN_S)
    assert dead.value.missing.text == "no answer within 0.01 s"
    questions: tuple[Question[Any], ...] = (daemons.info(), daemons.stats())
    for question in questions:
        with pytest.raises(NotAnswered) as suspected:
            await asking.look("nsqd", "a.example:4151", question)
        text = "no answer within 0.4 s, for which alone it was asked as it had not answered before"
        assert suspected.value.missing.text == text
    slow.at_once |= {"/ping", "/stats", "/info"}
    await asking.look("nsqd", "a.example:4151", daemons.stats())
    slow.at_once.clear()
    with pytest.raises(NotAnswered) as again:
        await asking.look("nsqd", "a.example:4151", daemons.info(), 2 * SUSPECTED_S)
    assert again.value.missing.text == "no answer within 0.8 s"


async def test_without_options_of_tls_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    daemons = Daemons(FINE)
    await upstream(monkeypatch, tmp_path, daemons).look("nsqd", "a.example:4151", ping())
    assert daemons.asked == [(IN_CLEAR, True)]
