"""nsqlookupd's flags, one case per rule: every flag, its forms, default and refusals (NSQ's options).

nsqlookupd shows no configuration over the wire, so most flags are seen by what they do.
"""

from __future__ import annotations

import socket

import pytest
from tests.conformance.daemon_helpers import (
    NODE,
    LookupConnection,
    addresses_of,
    identified,
    run_to_end,
    unused_port,
)
from tests.conformance.flag_tables import FORMS
from tests.integration.daemons import Daemons, Nsqlookupd, wait_until

BRIEF = "300ms"
OTHER = {
    "broadcast-address": "lookup.example",
    "log-level": "debug",
    "log-prefix": "[x] ",
    "inactive-producer-timeout": BRIEF,
    "tombstone-lifetime": BRIEF,
}
DEFAULTS = {
    "log_level": '"info"',
    "log_prefix": '"[nsqlookupd] "',
    "tcp_address": '"0.0.0.0:4160"',
    "http_address": '"0.0.0.0:4161"',
    "broadcast_address": '""',
    "inactive_producer_timeout": '"5m0s"',
    "tombstone_lifetime": '"45s"',
}


@pytest.fixture(scope="module", params=FORMS)
def told(request: pytest.FixtureRequest, shared_daemons: Daemons) -> Nsqlookupd:
    """A nsqlookupd with all flags at another value, in one form."""
    form = FORMS[request.param]
    flags = [word for name, value in OTHER.items() for word in form(name, value)]
    return shared_daemons.nsqlookupd(*flags, *form("tcp-address", "127.0.0.1:0"), *form("http-address", "127.0.0.1:0"))


def lines_of(text: str) -> dict[str, str]:
    return {line.partition(" = ")[0]: line for line in text.splitlines()}


# -- every flag in every form ------------------------------------------------------------------------------------------


def test_addresses(told: Nsqlookupd):
    assert told.request("GET", "/ping").body == b"OK"
    with LookupConnection(told.tcp) as connection:
        connection.ok(b"PING\n")


def test_broadcast_address(told: Nsqlookupd):
    with LookupConnection(told.tcp) as connection:
        assert connection.identify()["broadcast_address"] == "lookup.example"


def test_log_prefix(told: Nsqlookupd):
    lines = told.log.splitlines()
    assert lines
    assert all(line.startswith("[x] ") for line in lines)


def test_inactive_producer_timeout(told: Nsqlookupd, topic: str):
    with identified(told) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        assert addresses_of(told, topic) == ["nsqd.example"]
        wait_until(lambda: addresses_of(told, topic) == [], "the producer filtered out", 2.0)


def test_tombstone_lifetime(told: Nsqlookupd, topic: str):
    with identified(told) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        told.post(f"/topic/tombstone?topic={topic}&node={NODE}")
        assert addresses_of(told, topic) == []

        def is_back() -> bool:
            peer.ok(b"PING\n")
            return addresses_of(told, topic) == ["nsqd.example"]

        wait_until(is_back, "the producer shown again", 2.0)


@pytest.mark.improvement
@pytest.mark.parametrize("form", FORMS)
def test_show_config_of_every_form(form: str):
    """NSQ has no --show-config."""
    flags = [word for name, value in OTHER.items() for word in FORMS[form](name, value)]
    lines = lines_of(run_to_end("nsqlookupd", "--show-config", *flags).out)
    for name, value in OTHER.items():
        key = name.replace("-", "_")
        assert lines[key].startswith(f'{key} = "{value}"')
        assert lines[key].endswith("# flag")


# -- defaults ----------------------------------------------------------------------------------------------------------


@pytest.mark.improvement
def test_show_config_of_defaults():
    """NSQ has no --show-config."""
    lines = lines_of(run_to_end("nsqlookupd", "--show-config").out)
    assert {key: lines[key].removeprefix(f"{key} = ").partition("  #")[0].rstrip() for key in DEFAULTS} == DEFAULTS
    assert all(line.endswith("# default") for line in lines.values())


def test_default_log_prefix(nsqlookupd: Nsqlookupd):
    assert all(line.startswith("[nsqlookupd] ") for line in nsqlookupd.log.splitlines())


def test_default_log_level_is_info(nsqlookupd: Nsqlookupd):
    assert " INFO: " in nsqlookupd.log
    assert " DEBUG: " not in nsqlookupd.log


def test_default_broadcast_address_is_the_host_name(nsqlookupd: Nsqlookupd):
    with LookupConnection(nsqlookupd.tcp) as connection:
        assert connection.identify()["broadcast_address"] == socket.gethostname()


def test_a_producer_is_active_for_long_by_default(nsqlookupd: Nsqlookupd, topic: str):
    with identified(nsqlookupd) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        with pytest.raises(AssertionError, match="not within"):
            wait_until(lambda: addresses_of(nsqlookupd, topic) == [], "filtered out", 0.5)


# -- forms of values ---------------------------------------------------------------------------------------------------


def test_the_last_of_a_repeated_flag_counts(shared_daemons: Daemons):
    last = shared_daemons.nsqlookupd("--broadcast-address=first", "-broadcast-address", "last")
    with LookupConnection(last.tcp) as connection:
        assert connection.identify()["broadcast_address"] == "last"


def test_a_higher_log_level_says_less(shared_daemons: Daemons):
    quiet = shared_daemons.nsqlookupd()
    quiet.stop()
    port = unused_port()
    quiet.flags += ["--log-level=error", f"--http-address=127.0.0.1:{port}"]
    quiet.http = ("127.0.0.1", port)
    quiet.launch()

    def answers() -> bool:
        try:
            return quiet.request("GET", "/ping").body == b"OK"
        except OSError:
            return False

    wait_until(answers, "/ping")
    assert quiet.log == ""


@pytest.mark.parametrize("form", ["--verbose", "-verbose", "--verbose=true", "--verbose=false"])
def test_deprecated_flags_are_accepted(form: str):
    assert run_to_end("nsqlookupd", form, "--version").code == 0


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag"],
        ["--inactive-producer-timeout=60"],
        ["--tombstone-lifetime=soon"],
        ["--log-level=loud"],
        ["--broadcast-address"],
    ],
    ids=" ".join,
)
def test_a_flag_that_cannot_be_read_ends_it(flags: list[str]):
    ended = run_to_end("nsqlookupd", *flags)
    assert ended.code != 0
    assert flags[0].strip("-").partition("=")[0] in ended.err
    assert ended.out == ""


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--tcp-adress=:1", "unknown option --tcp-adress; did you mean --tcp-address?"),
        ("--tombstone-livetime=1s", "unknown option --tombstone-livetime; did you mean --tombstone-lifetime?"),
        ("--zzz", "unknown option --zzz; nsqlookupd --help lists all"),
        ("--tombstone-lifetime=45", "--tombstone-lifetime='45' is not allowed; it needs a unit: 45s or 45ms"),
        ("--tombstone-lifetime=-1s", "--tombstone-lifetime='-1s' is not allowed; it must be at least 0s"),
        ("--http-address=nowhere", "--http-address='nowhere' is not allowed; it must be host:port"),
        ("stray", "nsqlookupd takes only flags; a switch is turned off as --x=false"),
    ],
)
def test_a_refusal_says_which_and_why_and_what_is_near(flag: str, text: str):
    """NSQ prints what Go does: the error, all flags, exit code 2."""
    ended = run_to_end("nsqlookupd", flag)
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert line.startswith("nsqlookupd: flag: ")
    assert text in line


@pytest.mark.improvement
def test_help_names_every_flag():
    ended = run_to_end("nsqlookupd", "--help")
    assert ended.code == 0
    assert all(f"--{name}" in ended.out for name in (*OTHER, "tcp-address", "http-address", "config", "version"))
