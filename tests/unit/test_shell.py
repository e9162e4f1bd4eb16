"""The rules of the commands for people that need no process: places, rates, order, formats, tables."""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from flintmq.errors import OptionError, UsageError
from flintmq.net.loop import loop_factory
from flintmq.tools.shell import arguments, lines, sub, top
from flintmq.tools.shell.bench import percentiles
from flintmq.tools.shell.stats import ChannelRow, rows_of
from flintmq.tools.tables import table


@pytest.fixture
def zone_of_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield request.param
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("beginning", "beginning", 0),
        ("end", "end", 0),
        ("1h30m", "ago", 5_400_000_000_000),
        ("2026-01-31T12:00Z", "time", 1_769_860_800_000_000_000),
        ("2026-01-31T13:00+01:00", "time", 1_769_860_800_000_000_000),
        ("2026-01-31T12:00:00.000001", "time", 1_769_860_800_000_001_000),
        ("offset:7", "offset", 7),
        ("count:0", "count", 0),
    ],
)
@pytest.mark.parametrize("zone_of_machine", ["UTC", "America/New_York"], indirect=True)
def test_places(zone_of_machine: str, text: str, kind: str, number: int):
    assert arguments.place(text) == arguments.Place(kind, number, text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "neither a time"),
        ("yesterday", "neither a time"),
        ("offset:x", "neither a time"),
        ("offset:-1", "neither a time"),
        ("2026-13-01", "neither a time"),
        ("1969-12-31T23:59Z", "a time before 1970"),
        ("9999-12-31T23:59:59Z", "after 2262-04-11"),
        ("99999999h", "longer than 2562047h"),
        ("-5m", "how long ago is 0 or more"),
    ],
)
def test_no_places(text: str, why: str):
    with pytest.raises(argparse.ArgumentTypeError, match=f"is no place: .*{why}.*; there are beginning, end"):
        arguments.place(text)


def test_the_environment_is_behind_the_command_line():
    variables = {"FLINTMQ_NSQD": "a,b:1", "FLINTMQ_TOKEN": "env:T", "FLINTMQ_TLS": "1"}
    given = arguments.parser_of("pub").parse_args(["t", "x"])
    arguments.from_environment(given, variables)
    assert (given.nsqd, given.lookupd, given.token, given.tls) == (["a", "b:1"], [], "env:T", True)
    given = arguments.parser_of("pub").parse_args(["t", "x", "--lookupd", "c", "--token", "file:/t"])
    arguments.from_environment(given, variables)
    assert (given.nsqd, given.lookupd, given.token) == ([], ["c"], "file:/t")
    given = arguments.parser_of("pub").parse_args(["t", "x", "--token-file", "/t"])
    arguments.from_environment(given, variables)
    assert (given.token, given.token_file) == (None, "/t")
    given = arguments.parser_of("pub").parse_args(["t", "x"])
    with pytest.raises(UsageError, match="not both"):
        arguments.from_environment(given, {**variables, "FLINTMQ_LOOKUPD": "c"})


@pytest.mark.parametrize(
    ("text", "found"), [("a", ("a", 9)), ("a:1", ("a", 1)), ("[::1]", ("[::1]", 9)), ("[::1]:2", ("[::1]", 2))]
)
def test_addresses(text: str, found: tuple[str, int]):
    assert arguments.split_host(text, 9, "--nsqd") == found


@pytest.mark.parametrize("text", ["a:b", "::1", "a:0", "a:65536", "a b", "http://a", ""])
def test_no_addresses(text: str):
    with pytest.raises(OptionError, match="host or host:port"):
        arguments.split_host(text, 9, "--nsqd")


def row(topic: str, channel: str = "", **counts: int) -> ChannelRow:
    found = ChannelRow(topic, channel)
    for name, value in counts.items():
        setattr(found, name, value)
    return found


def test_rates_come_from_two_looks():
    before = top.Look(10.0, [row("t", message_count=100), row("t", "c", message_count=100, depth=50)])
    now = top.Look(12.0, [row("t", message_count=300), row("t", "c", message_count=300, depth=100, requeue_count=4)])
    topic, channel = top.rates(before, now)
    assert (topic.incoming, topic.outgoing) == (100.0, None)
    assert (channel.incoming, channel.outgoing, channel.requeued, channel.lag_s) == (100.0, 75.0, 2.0, 100 / 75)
    assert all(each.incoming is None for each in top.rates(None, now))
    again = top.Look(14.0, [row("t", message_count=5)])
    assert top.rates(now, again)[0].incoming is None, "it counts anew after a restart"


def test_topics_stand_in_the_order_of_their_channels():
    found = top.rates(
        top.Look(0.0, []),
        top.Look(1.0, [row("a"), row("a", "x", depth=1), row("a", "y", depth=3), row("b"), row("b", "z", depth=2)]),
    )
    names = [(each.row.topic, each.row.channel) for each in top.ordered(found, "depth")]
    assert names == [("a", ""), ("a", "y"), ("a", "x"), ("b", ""), ("b", "z")]
    names = [(each.row.topic, each.row.channel) for each in top.ordered(found, "name")]
    assert names == [("a", ""), ("a", "x"), ("a", "y"), ("b", ""), ("b", "z")]


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_top_fits(width: int):
    found = top.rates(None, top.Look(0.0, [row("t" * 64), row("t" * 64, "c" * 64, depth=10**12)]))
    assert max(map(len, top.text_of(found, width).split("\n"))) <= width


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (None, "-"),
        (0, "0"),
        (0.25, "0.2"),
        (9999, "9999"),
        (12_345, "12.3k"),
        (123_456, "123k"),
        (2e6, "2.0M"),
        (3e13, "30.0T"),
    ],
)
def test_short_numbers(number: float | None, text: str):
    assert top.short(number) == text


def test_an_nsqd_that_answers_nonsense_hides_no_other():
    rows = rows_of(
        [("a", {"topics": None}), ("b", {"data": {"topics": [{"topic_name": "t", "channels": None, "depth": 2}]}})]
    )
    assert [(each.topic, each.depth, each.nodes) for each in rows] == [("t", 2, ["b"])]


def given(*words: str) -> argparse.Namespace:
    return arguments.parser_of("sub").parse_args(["t", *words])


LINE = lines.Line("t", b"a\xff\x1b", 1_769_860_800_123_456_789, "0" * 15 + "7", headers={"k": "v"}, nsqd="n:1")


@pytest.mark.parametrize(
    ("words", "terminal", "text"),
    [
        ((), False, b"a\xff\x1b\n"),
        ((), True, b"a\\xff\\x1b\n"),
        (("--raw",), True, b"a\xff\x1b"),
        (("--headers",), False, b'{"k":"v"} a\xff\x1b\n'),
        (("--format", r"{id}\t{time} {partition} \{x}"), False, b"0000000000000007\t2026-01-31T12:00:00.123Z - {x}\n"),
    ],
)
def test_lines(words: tuple[str, ...], terminal: bool, text: bytes):
    assert lines.writer(given(*words), terminal)(LINE) == text


def test_percentiles():
    assert percentiles([n * 1_000_000 for n in range(1, 1001)]) == {
        "p50": 501.0, "p90": 901.0, "p99": 991.0, "p99.9": 1000.0, "max": 1000.0,
    }  # fmt: skip
    assert percentiles([5_000_000])["p99"] == 5.0


def test_numbers_stand_at_the_right_and_wide_columns_are_cut():
    text = table(("NAME", "COUNT"), [("x" * 60, "1,234"), ("y", "-")], 40)
    assert text.split("\n")[1].endswith("…  1,234") and text.split("\n")[2].endswith("      -")


@pytest.mark.parametrize(
    "name", [name for name, found in arguments.COMMANDS.items() if isinstance(found, arguments.ShellCommand)]
)
def test_every_example_can_be_read(name: str):
    import shlex

    command = arguments.command_of(name)
    program, word, *rest = shlex.split(command.example)
    assert (program, word) == ("flintmq", name)
    arguments.parser_of(name).parse_intermixed_args(rest)


def test_pub_loads_no_more_than_it_needs():
    """It is run for single messages by scripts: each module that it does not need is time that they wait."""
    code = (
        "import sys; import flintmq.cli, flintmq.tools.shell.start, flintmq.tools.shell.pub; "
        "flintmq.tools.shell.arguments.read('pub', ['t', 'x']); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = {*done.stdout.split()}
    heavy = ("flintmq.sync", "flintmq.client.aio.consumer", "flintmq.client.blocking", "flintmq.nsqd", "flintmq.spark",
             "flintmq.client.admin", "uvloop", "cramjam", "rich", "cryptography", "OpenSSL")  # fmt: skip
    assert not [name for name in heavy if name in loaded]


@pytest.mark.parametrize("code", [0, 127])
def test_a_command_that_has_ended_before_it_is_given_the_body(code: int):
    """On the loop that the command runs on, with uvloop if it is there."""

    async def ended() -> int:
        process = await asyncio.create_subprocess_shell(f"exit {code}", stdin=asyncio.subprocess.PIPE)
        await process.wait()
        return await sub.end_of(process, b"x" * 100_000)

    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        assert runner.run(ended()) == code
