"""The parts of the utilities that need no process: go-nsq's options, splitting, the pace, sums of figures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import OptionError
from flintmq.tools import feed
from flintmq.tools.client_opts import client_opts
from flintmq.tools.consuming import batch_size
from flintmq.tools.feed import InputError, Pace, Splitter
from flintmq.tools.nsq_stat import Figures


def _opts(*given: str, for_consumer: bool = True) -> Any:
    return client_opts("app", "--opt", given, for_consumer)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("dial_timeout,2s", "connect_timeout", 2.0),
        ("heartbeat_interval,5s", "heartbeat_interval", 5.0),
        ("msg_timeout,0", "msg_timeout", None),
        ("msg_timeout,90s", "msg_timeout", 90.0),
        ("output_buffer_size,-1", "output_buffer_size", -1),
        ("tls_v1", "tls", True),
        ("tls_insecure_skip_verify,true", "tls_verify", False),
        ("tls_min_version,1.3", "tls_min_version", "tls1.3"),
        ("snappy", "compression", "snappy"),
        ("deflate,true", "compression", "deflate"),
        ("deflate,false", "compression", None),
        ("auth_secret,a,b", "auth_secret", "a,b"),
        ("user_agent,mine", "user_agent", "mine"),
    ],
)
def test_options_of_a_connection(given: str, name: str, value: object) -> None:
    assert getattr(_opts(given).connection, name) == value
    assert getattr(_opts(given, for_consumer=False).connection, name) == value


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ("max_in_flight,7", "max_in_flight", 7),
        ("max_attempts,0", "max_attempts", 0),
        ("default_requeue_delay,1m30s", "requeue_delay", 90.0),
        ("max_backoff_duration,0", "max_backoff", 0.0),
        ("lookupd_poll_jitter,0.5", "lookup_jitter", 0.5),
        ("lookupd_poll_interval,1s", "lookup_interval", 1.0),
    ],
)
def test_options_of_a_consumer(given: str, name: str, value: object) -> None:
    assert _opts(given).consumer == {name: value}
    assert _opts(given, for_consumer=False).consumer == {}, "go-nsq's producers take no notice of them"


def test_the_last_of_a_name_counts_and_defaults_of_go_nsq_ask_for_nothing() -> None:
    opts = _opts("sample_rate,5", "sample_rate,9", "read_timeout,60s", "backoff_strategy,exponential", "hostname,")
    assert opts.connection.sample_rate == 9
    assert opts.connection.user_agent.startswith("app/1.3.0 flintmq/")


@pytest.mark.parametrize(
    ("given", "compression"),
    [
        (("snappy", "deflate,false"), "snappy"),
        (("deflate,false", "snappy"), "snappy"),
        (("deflate", "snappy,false"), "deflate"),
        (("snappy", "deflate", "snappy,false"), "deflate"),
        (("snappy", "snappy,false"), None),
        (("snappy,false", "deflate,false"), None),
    ],
)
def test_each_compression_has_a_switch_of_its_own(given: tuple[str, ...], compression: str | None) -> None:
    assert _opts(*given).connection.compression == compression


@pytest.mark.parametrize("given", [("snappy", "deflate"), ("deflate", "snappy,true", "deflate")])
def test_two_compressions_are_refused_as_by_nsqd(given: tuple[str, ...]) -> None:
    with pytest.raises(OptionError, match="cannot enable both deflate and snappy compression"):
        _opts(*given, for_consumer=False)


def test_names_may_have_dashes_as_with_go_nsq() -> None:
    opts = _opts("sample-rate,5", "backoff-multiplier,0s")
    assert opts.connection.sample_rate == 5
    assert opts.consumer == {"backoff": 0.0}


@pytest.mark.parametrize(
    "given",
    ["read_timeout,1s", "backoff_strategy,full_jitter", "topology_zone,a", "deflate_level,99", "heartbeat_interval,1h"],
)
def test_what_is_not_obeyed_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match=given.partition(",")[0]):
        _opts(given)


def test_a_secret_stays_off_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("A_SECRET", "sesame")
    (file := tmp_path / "secret").write_text("of a file\n")
    assert _opts("auth_secret,env:A_SECRET").connection.auth_secret() == "sesame"
    secret = _opts(f"auth_secret,file:{file}", for_consumer=False).connection.auth_secret
    assert secret() == "of a file"
    file.write_text("renewed\n")
    assert secret() == "renewed"
    file.unlink()
    assert secret() == "renewed", "the last good one"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("auth_secret,env:NOBODY_SET_THIS", "auth_secret: the environment variable NOBODY_SET_THIS is not set"),
        ("auth_secret,file:/no/such/file", "auth_secret: it cannot be read: .*No such file"),
    ],
)
def test_a_secret_that_is_not_there(given: str, expected: str) -> None:
    with pytest.raises(OptionError, match=expected):
        _opts(given)


def test_a_mistyped_name_does_not_show_what_may_be_a_secret() -> None:
    with pytest.raises(OptionError, match="there is no auth_sekret; did you mean auth_secret") as caught:
        _opts("auth_sekret,sesame")
    assert "sesame" not in str(caught.value)


@given(st.lists(st.binary(max_size=20)), st.data())
def test_items_are_the_same_however_the_input_comes(blocks: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(blocks)
    splitter = Splitter(b"\n")
    found = [item for block in blocks for item in splitter.feed(block)] + splitter.end()
    expected = whole.split(b"\n")
    assert found == (expected if expected[-1] else expected[:-1])


def test_an_item_that_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "ITEM_BYTES_MAX", 10)
    splitter = Splitter(b"\n")
    assert splitter.feed(b"0123456789") == []
    assert splitter.feed(b"\nbefore\n0123456789x") == [b"0123456789", b"before"], "they come before it"
    for call in (partial(splitter.feed, b"y"), splitter.end):
        with pytest.raises(InputError, match="more than 10 bytes"):
            call()


async def test_no_more_goes_out_than_the_rate_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    async def sleep(delay_s: float) -> None:
        nonlocal now
        assert delay_s > 0
        now += delay_s

    monkeypatch.setattr(feed, "monotonic", lambda: now)
    monkeypatch.setattr("asyncio.sleep", sleep)
    pace = Pace(50)
    assert pace.count_max == 5
    for _ in range(101):
        await pace.wait(5)
    assert now == pytest.approx((505 - 1) / 50)
    now += 3600.0  # what was not used is kept for a second, not longer
    began = now
    for _ in range(20):
        await pace.wait(5)
    assert now - began == pytest.approx(1.0)
    free = Pace(0)
    await free.wait(1_000_000)
    assert now - began == pytest.approx(1.0)


def test_figures_are_summed_and_compared() -> None:
    before, now = Figures(), Figures()
    for each in (before, now):
        each.add({"depth": 4, "backend_depth": 1, "message_count": 10, "clients": [{}, {}]})
    now.add({"depth": 2, "message_count": 20, "in_flight_count": 3, "client_count": 1, "clients": None})
    assert now.line(before, 2.0).split() == ["10", "9", "|", "6", "5", "1", "3", "0", "|", "0", "0", "30", "3"]


def test_batches_are_parts_of_what_may_be_in_flight_unless_they_were_small() -> None:
    assert [batch_size(count) for count in (1, 200, 500, 2500, 1_000_000)] == [1, 200, 200, 625, 2500]
