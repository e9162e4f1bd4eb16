"""``flintmq admin``: verbs and arguments come from the clients' methods; mistakes are one line and exit code 1."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from flintmq import cli
from flintmq.sync import LookupdAdmin, NsqdAdmin, Start
from flintmq.tools import admin


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """Stands in for the network; the list holds who was asked what, with which body."""
    questions: list[tuple[str, str, str]] = []

    def ask(self: Any, question: Any) -> None:
        questions.append((self.address, f"{question.method} {question.target}", question.body.decode()))

    for kind in (NsqdAdmin, LookupdAdmin):
        monkeypatch.setattr(kind.__base__, "ask", ask)
    return questions


def test_help_names_every_verb(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["admin", "--help"]) == 0
    out = capsys.readouterr().out
    for kind in (NsqdAdmin, LookupdAdmin):
        for name in admin.methods(kind):
            assert f"  {name.replace('_', '-')} " in out
    assert ":meth:" not in out and "`" not in out


@pytest.mark.parametrize("kind", [NsqdAdmin, LookupdAdmin])
def test_every_verb_explains_itself(kind: Any, capsys: pytest.CaptureFixture[str]):
    for name in admin.methods(kind):
        word = name.replace("_", "-")
        with pytest.raises(SystemExit) as ended:
            cli.main(["admin", word, "--help"])
        assert ended.value.code == 0
        assert f"flintmq admin {word}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ping", ("http://127.0.0.1:4151", "GET /ping", "")),
        ("ping --lookupd-http-address=a:1", ("http://a:1", "GET /ping", "")),
        ("topics", ("http://127.0.0.1:4161", "GET /topics", "")),
        ("pause-topic t --nsqd-http-address https://b", ("https://b:4151", "POST /topic/pause?topic=t", "")),
        ("set-offset t c end", ("", "POST /channel/setoffset?topic=t&channel=c", "special:-1")),
        ("set-offset t c offset:7 --partition=1",
         ("", "POST /channel/setoffset?topic=t&channel=c&partition=1", "virtual_queue:7")),
        ("create-topic t", ("", "POST /topic/create?topic=t", "")),
        ("create-topic t --headers --no-auto-channels",
         ("", "POST /topic/create?topic=t&extend=true&disable_channel_auto_create=true", "")),
        ("set-channel-order t c false", ("", "POST /channel/setorder?topic=t&channel=c&order=false", "")),
        ("drain 10m", ("", "POST /drain?timeout=600000ms", "")),
        ("drain", ("", "POST /drain", "")),
        ("set-config nsqlookupd_tcp_addresses [\"a:1\"]", ("", "PUT /config/nsqlookupd_tcp_addresses", '["a:1"]')),
        ("get-message t --count=3",
         ("", "GET /message/get?topic=t&search_mode=count&search_pos=3&needext=true", "")),
    ],
)  # fmt: skip
def test_words_become_a_question(asked: list[tuple[str, str, str]], words: str, expected: tuple[str, str, str]):
    assert cli.main(["admin", *words.split()]) == 0
    assert asked == [(expected[0] or "http://127.0.0.1:4151", *expected[1:])]


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("peak t c", "there is no verb peak; did you mean peek?"),
        ("xyzzy", "there is no verb xyzzy; flintmq admin --help lists all"),
        ("peek t", "the following arguments are required: channel; flintmq admin peek --help says more"),
        ("peek t c sideways", "argument what: invalid choice: 'sideways'"),
        ("peek t c --count=x", "argument --count: invalid int value: 'x'"),
        ("peek t c --cuont=1", "unrecognized arguments: --cuont=1"),
        ("set-offset t c tomorrow", "argument start: it is neither a time such as"),
        (
            "set-offset t c 1969-12-31",
            "argument start: it is a time before 1970, or after 2262-04-11; there",
        ),
        ("set-offset t c 99999999h", "argument start: it is longer than 2562047h"),
        ("set-offset t c -- -5m", "argument start: how long ago is 0 or more"),
        ("set-channel-order t c maybe", "argument ordered: it must be true or false"),
        ("drain 10", "argument timeout: it needs a unit: 10s or 10ms"),
        ("lookup t --nsqd-http-address=a", "lookup is for nsqlookupd: use --lookupd-http-address"),
        ("peek t c --lookupd-http-address=a", "peek is for nsqd: use --nsqd-http-address"),
        ("ping --nsqd-http-address=a --lookupd-http-address=b", "one daemon at a time"),
        ("ping --nsqd-http-address=::1", "such as 127.0.0.1:4151"),
        ("get-message t", "one of message_id, offset and count"),
    ],
)
def test_mistakes(asked: list[tuple[str, str, str]], capsys: pytest.CaptureFixture[str], words: str, text: str):
    assert cli.main(["admin", *words.split()]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("flintmq admin: ") and text in captured.err
    assert captured.err.count("\n") == 1 and not captured.out
    assert asked == []


@pytest.mark.parametrize(
    ("text", "start"),
    [
        ("1h30m", timedelta(minutes=90)),
        ("count:0", Start.count(0)),
        ("2026-01-31T12:00Z", datetime(2026, 1, 31, 12, tzinfo=UTC)),
        ("2026-01-31T12:00", datetime(2026, 1, 31, 12, tzinfo=UTC)),
    ],
)
def test_starts(text: str, start: object):
    assert admin.parser_of("set-offset", NsqdAdmin.set_offset).parse_args(["t", "c", text]).start == start


def test_answers(capsys: pytest.CaptureFixture[str]):
    for answer, shown in ((None, ""), ("metrics 1\n", "metrics 1\n"), (["a"], '[\n  "a"\n]\n'), ({}, "{}\n")):
        admin.show(answer)
        assert capsys.readouterr().out == shown


def test_a_token_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLINTMQ_ADMIN_TOKEN", "from-the-environment")
    made = []
    monkeypatch.setattr(NsqdAdmin.__base__, "ask", lambda self, question: made.append(self._options.lookup_token))
    assert cli.main(["admin", "ping"]) == 0
    assert made == ["from-the-environment"]


@pytest.mark.parametrize(
    ("words", "variables", "address", "token"),
    [
        ("ping", {"FLINTMQ_HTTP": "a:1", "FLINTMQ_TOKEN": "env:SECRET"}, "http://a:1", "s3cret"),
        ("ping", {"FLINTMQ_NSQD": "a"}, "http://a:4151", None),
        ("ping", {"FLINTMQ_NSQD": "a:7", "FLINTMQ_HTTP": "https://b:1"}, "https://b:1", None),
        ("topics", {"FLINTMQ_LOOKUPD": "c:2", "FLINTMQ_HTTP": "a:1"}, "http://c:2", None),
        ("ping --nsqd-http-address=d:3", {"FLINTMQ_HTTP": "a:1,b:1"}, "http://d:3", None),
        ("ping --token=env:SECRET", {"FLINTMQ_ADMIN_TOKEN": "other"}, "http://127.0.0.1:4151", "s3cret"),
        ("ping", {"FLINTMQ_ADMIN_TOKEN": "other"}, "http://127.0.0.1:4151", "other"),
    ],
)
def test_whom_to_ask_and_the_token_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, words: str, variables: dict[str, str], address: str, token: str | None
):
    made: list[tuple[str, str | None]] = []
    monkeypatch.setenv("SECRET", "s3cret")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def ask(self: Any, question: Any) -> None:
        made.append((self.address, self._options.lookup_token))

    for kind in (NsqdAdmin, LookupdAdmin):
        monkeypatch.setattr(kind.__base__, "ask", ask)
    assert cli.main(["admin", *words.split()]) == 0
    assert made == [(address, token)]


@pytest.mark.parametrize(
    ("words", "variables", "status", "text"),
    [
        ("ping", {"FLINTMQ_HTTP": "a:1,b:1"}, 2, "FLINTMQ_HTTP names 2, and this asks one: --nsqd-http-address"),
        ("ping --token=s3cret", {}, 2, "everybody sees a command line"),
        ("ping --token=env:X --token-file=y", {}, 2, "not allowed with argument"),
        ("ping --token=file:/dev/null/t", {"FLINTMQ_TOKEN": "env:A"}, 2, "flag: --token='file:/dev/null/t' is not"),
        ("ping", {"FLINTMQ_TOKEN": "env:NOT_SET"}, 1, "the environment variable NOT_SET is not set"),
        ("ping", {"FLINTMQ_TOKEN": "file:/dev/null/t"}, 1, "environment: FLINTMQ_TOKEN='file:/dev/null/t' is not"),
    ],
)
def test_mistakes_of_the_environment(
    asked: list[tuple[str, str, str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    variables: dict[str, str],
    status: int,
    text: str,
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cli.main(["admin", *words.split()]) == status
    assert text in capsys.readouterr().err
    assert asked == []
