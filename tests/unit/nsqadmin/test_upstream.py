"""The nsqd that are shown nsqadmin's token, and the time when."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates

from flintmq.client.admin.nsqd import create_topic, ping
from flintmq.env import Env
from flintmq.net.http_exchange import Answer, Request
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.upstream import Upstream

TOKEN = "a-token-of-thirty-two-characters"
WANTS_TLS = Answer(403, {}, b'{"message": "TLS_REQUIRED", "https_port": 4152}')
WANTS_TOKEN = Answer(401, {}, b'{"message": "UNAUTHORIZED"}')
FINE = Answer(200, {}, b"OK")
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


async def test_without_options_of_tls_nothing_is_asked_twice(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    daemons = Daemons(FINE)
    await upstream(monkeypatch, tmp_path, daemons).look("nsqd", "a.example:4151", ping())
    assert daemons.asked == [(IN_CLEAR, True)]
