"""flintmq up: how its options become those of two daemons, and what it tells the user to try."""

from __future__ import annotations

import re

import pytest

from flintmq import up
from flintmq.errors import OptionError
from flintmq.nsqd.options import NsqdOptions
from flintmq.options import resolve, rows
from flintmq.up import Listening, UpOptions, greeting, options_of_nsqd, options_of_nsqlookupd

WHERE = Listening("127.0.0.1:14150", "127.0.0.1:14151", "127.0.0.1:14160", "127.0.0.1:14161")


def options(*flags):
    return resolve(UpOptions, flags, {}).options


def addresses(*flags):
    given = options(*flags)
    nsqd, lookupd = options_of_nsqd(given), options_of_nsqlookupd(given)
    return [nsqd.tcp_address, nsqd.http_address, lookupd.tcp_address, lookupd.http_address]


def test_the_ports_are_nsq_s_and_nobody_outside_can_connect():
    assert addresses() == ["127.0.0.1:4150", "127.0.0.1:4151", "127.0.0.1:4160", "127.0.0.1:4161"]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tcp-port=1", "--http-port=2"], ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:4160", "127.0.0.1:4161"]),
        (
            ["--lookupd-tcp-port=3", "--lookupd-http-port=4"],
            ["127.0.0.1:4150", "127.0.0.1:4151", "127.0.0.1:3", "127.0.0.1:4"],
        ),
        (["--free-ports"], ["127.0.0.1:0"] * 4),
        (["--free-ports", "--tcp-port=1"], ["127.0.0.1:0"] * 4),
        (
            ["--tcp-address=0.0.0.0:5", "--http-address=[::1]:6", "--http-port=7"],
            ["0.0.0.0:5", "[::1]:7", "0.0.0.0:4160", "[::1]:4161"],
        ),
    ],
)
def test_other_ports_and_hosts(flags, expected):
    assert addresses(*flags) == expected


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], "127.0.0.1"),
        (["--tcp-address=localhost:4150"], "localhost"),
        (["--tcp-address=0.0.0.0:4150"], ""),  # this machine's name
        (["--broadcast-address=me.example"], "me.example"),
    ],
)
def test_nsqlookupd_tells_clients_an_address_they_can_reach(flags, expected):
    assert options_of_nsqd(options(*flags)).broadcast_address == expected


def test_every_flag_of_nsqd_reaches_nsqd():
    assert {row.flag for row in rows(NsqdOptions)} < {row.flag for row in rows(UpOptions)}
    nsqd = options_of_nsqd(options("--durability=os", "--msg-timeout=5s", "--lookupd-tcp-address=other:4160"))
    assert (nsqd.durability, nsqd.msg_timeout_ns, nsqd.lookupd_tcp_address) == ("os", 5_000_000_000, ("other:4160",))
    assert options_of_nsqd(options()).data_path == "flintmq-data"


def test_the_environment_has_its_own_prefix():
    given = resolve(UpOptions, [], {"FLINTMQ_UP_FREE_PORTS": "true", "FLINTMQ_NSQD_DURABILITY": "os"}).options
    assert (given.free_ports, given.durability) == (True, "fsync")


@pytest.mark.parametrize("flag", ["--tcp-port=70000", "--tcp-port=x", "--tcp-address=nowhere", "--http-address="])
def test_bad_values_are_refused(flag):
    with pytest.raises(OptionError):
        options(flag)


def test_help_shows_its_own_flags_before_nsqd_s(capsys):
    assert up.run(["--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("Usage: flintmq up [flags]\n")
    assert text.index("\n  --free-ports") < text.index("\n  --tcp-address") < text.index("\n  --msg-timeout")


def test_version_and_show_config(capsys):
    assert up.run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("flintmq up v")
    assert up.run(["--show-config", "--tcp-port=9"]) == 0
    assert re.search(r"^tcp_port = 9 +# flag$", capsys.readouterr().out, re.MULTILINE)


def test_the_greeting_names_every_address_and_the_durability():
    text = greeting(WHERE, options("--durability=os"), "python")
    for address in ("127.0.0.1:14150", "127.0.0.1:14151", "127.0.0.1:14160", "127.0.0.1:14161"):
        assert address in text
    assert re.search(r"^  durability  os ", text, re.MULTILINE)


def test_the_commands_to_try_use_the_real_ports():
    text = greeting(WHERE, options(), "'/opt/my bin/flintmq'")
    assert "  export FLINTMQ_NSQD=127.0.0.1:14150 FLINTMQ_HTTP=127.0.0.1:14151\n" in text
    assert "\n  '/opt/my bin/flintmq' pub greetings hello " in text
    assert "  curl -d hello 'http://127.0.0.1:14151/pub?topic=greetings'\n" in text


def test_at_the_usual_ports_the_commands_need_no_addresses():
    where = Listening("127.0.0.1:4150", "127.0.0.1:4151", "127.0.0.1:4160", "127.0.0.1:4161")
    text = greeting(where, options(), "flintmq")
    assert "export" not in text and "\n  flintmq tail greetings " in text
