"""/debug/... of nsqd: Go's names, answered in Python's terms, and what NSQ has besides (NSQ's HTTP API)."""

from __future__ import annotations

import re

import pytest
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import TEXT_TYPE, is_json
from tests.integration.daemons import Answer, Daemons, Nsqd

PPROF = ("", "cmdline", "symbol", "heap", "goroutine", "block", "threadcreate")


def assert_plain(answer: Answer, status: int, pattern: str) -> None:
    """See bare text."""
    assert answer.status == status
    assert answer.headers["Content-Type"].split(";")[0] == TEXT_TYPE
    assert "X-NSQ-Content-Type" not in answer.headers
    assert re.search(pattern, answer.text), answer.text[:1000]


# -- Go's names --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PPROF)
def test_pprof_answers(nsqd: Nsqd, name: str):
    answer = nsqd.request("GET", f"/debug/pprof/{name}")
    assert answer.status == 200 and answer.body


def test_pprof_symbol_can_be_posted_to(nsqd: Nsqd):
    answer = nsqd.request("POST", "/debug/pprof/symbol", b"0x1")
    assert answer.status == 200 and answer.body.startswith(b"num_symbols: ")


def test_pprof_symbol_can_be_got(nsqd: Nsqd):
    assert nsqd.request("GET", "/debug/pprof/symbol").body.startswith(b"num_symbols: ")


def test_pprof_cmdline_is_the_command_line_split_by_nul(nsqd: Nsqd):
    words = nsqd.request("GET", "/debug/pprof/cmdline").body.split(b"\0")
    assert f"--data-path={nsqd.data_path}".encode() in words


def test_pprof_profile_takes_as_long_as_asked(nsqd: Nsqd):
    assert nsqd.request("GET", "/debug/pprof/profile?seconds=1").status == 200


@pytest.mark.parametrize("name", ["nothing", "heap/x", "trace-of-nothing"])
def test_an_unknown_profile_is_404(nsqd: Nsqd, name: str):
    assert nsqd.request("GET", f"/debug/pprof/{name}").status == 404


# -- in Python's terms -------------------------------------------------------------------------------------------------


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("target", "pattern"),
    [
        ("/debug/", r"(?m)^GET  /debug/profile "),
        ("/debug/state", r"(?m)^HttpServer "),
        ("/debug/tasks", r"^\d+ tasks\ntask "),
        ("/debug/threads", r"(?s)^\d+ threads\n.*thread MainThread "),
        ("/debug/memory", r"objects +own bytes  type\n"),
        ("/debug/profile?seconds=0.05", r"(?m)^MainThread;\S+ \d+$"),
        ("/debug/pprof/", r"(?m)^GET  /debug/profile "),
        ("/debug/pprof/heap", r"objects +own bytes  type\n"),
        ("/debug/pprof/goroutine", r"(?s)^\d+ tasks\n.*\d+ threads\n"),
        ("/debug/pprof/threadcreate", r"^\d+ threads\n"),
        ("/debug/pprof/block", r"/debug/tasks"),
        ("/debug/pprof/symbol", r"^num_symbols: 0\n$"),
        ("/debug/pprof/profile?seconds=0.05", r"(?m)^MainThread;\S+ \d+$"),
    ],
)
def test_it_is_told_in_words_of_python(nsqd: Nsqd, target: str, pattern: str):
    """Upstream answers with Go's own profiles, and has nothing at /debug/state and the like."""
    assert_plain(nsqd.request("GET", target), 200, pattern)


@pytest.mark.improvement
def test_the_state_tells_of_topics_channels_and_clients(nsqd: Nsqd, topic: str):
    """Upstream has no such thing."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, "c", 1)
        text = nsqd.request("GET", "/debug/state").text
        port = consumer.socket.getsockname()[1]
    assert re.search(rf"(?m)^partition {topic}/0 .*\n(  .*\n)*?  channel c ", text)
    assert f"session 127.0.0.1:{port} " in text


@pytest.mark.improvement
@pytest.mark.parametrize("seconds", ["0", "-1", "61", "x", "nan", "inf", ""])
def test_a_profile_refuses_seconds(nsqd: Nsqd, seconds: str):
    """Upstream takes what it cannot read for 30, and has no limit."""
    assert_plain(nsqd.request("GET", f"/debug/profile?seconds={seconds}"), 400, "seconds must be a number")


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/debug/"),
        ("GET", "/debug/pprof/heap"),
        ("PUT", "/debug/setblockrate?rate=1"),
        ("POST", "/debug/freememory"),
    ],
)
def test_only_some_addresses_are_answered(strict: Nsqd, method: str, path: str):
    """Upstream answers everybody."""
    assert_plain(strict.request(method, path), 403, "^FORBIDDEN: ")


@pytest.fixture(scope="module")
def strict(shared_daemons: Daemons) -> Nsqd:
    """An nsqd that answers /debug to nobody here."""
    return shared_daemons.nsqd(*quick_flags(), "--allow-config-from-cidr=10.0.0.0/8")


# -- setblockrate and freememory ---------------------------------------------------------------------------------------


@pytest.mark.improvement
@pytest.mark.parametrize("rate", ["0", "1", "-1", "%2B5", "1000000"])
def test_setblockrate_answers_empty(nsqd: Nsqd, rate: str):
    """Upstream does it and answers 500 INTERNAL_ERROR (defect 3 of section 6)."""
    answer = nsqd.request("PUT", f"/debug/setblockrate?rate={rate}")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.improvement
def test_freememory_answers_empty(nsqd: Nsqd):
    """Upstream does it and answers 500 INTERNAL_ERROR (defect 3 of section 6)."""
    answer = nsqd.request("POST", "/debug/freememory")
    assert (answer.status, answer.body) == (200, b"")


@pytest.mark.parametrize(
    "query", ["", "?rate=", "?rate=x", "?rate=1.5", "?rate=%201", "?rate=1e3", "?rate=9223372036854775808"]
)
def test_setblockrate_refuses_in_bare_text(nsqd: Nsqd, query: str):
    answer = nsqd.request("PUT", f"/debug/setblockrate{query}")
    assert_plain(answer, 400, "^invalid block rate : ")
    assert not is_json(answer.text)


def test_setblockrate_says_what_it_could_not_read(nsqd: Nsqd):
    answer = nsqd.request("PUT", "/debug/setblockrate?rate=fast")
    assert answer.text == 'invalid block rate : strconv.Atoi: parsing "fast": invalid syntax'
