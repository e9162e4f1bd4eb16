"""nsqd's flags, one case per rule: every flag, its forms, default and refusals (NSQ's options).

A few processes carry all flags; what they made of them is read from ``/config``.
"""

from __future__ import annotations

import platform
import socket
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.daemon_helpers import run_to_end
from tests.conformance.flag_tables import FORMS, NSQD, TLS_FILES, Flag, command_line, tls_files
from tests.integration.daemons import Daemons, Nsqd

every_flag = pytest.mark.parametrize("flag", NSQD, ids=lambda flag: flag.name)


def config(nsqd: Nsqd, key: str) -> str:
    answer = nsqd.request("GET", f"/config/{key}")
    assert answer.status == 200, (key, answer.body)
    return answer.text


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def told(shared_daemons: Daemons, certificates: Certificates) -> dict[str, Nsqd]:
    """One nsqd per form, each with all flags at their other value."""
    flags = (*NSQD, *tls_files(certificates))
    return {form: shared_daemons.nsqd(*quick_flags(), *command_line(flags, form)) for form in FORMS}


@pytest.fixture(scope="module")
def shown() -> dict[str, str]:
    """Key -> line of ``--show-config`` without flags."""
    return lines_of(run_to_end("nsqd", "--show-config").out)


def lines_of(text: str) -> dict[str, str]:
    return {line.partition(" = ")[0].removeprefix("# ").split()[0]: line for line in text.splitlines()}


# -- every flag --------------------------------------------------------------------------------------------------------


@every_flag
def test_every_form(told: dict[str, Nsqd], flag: Flag):
    assert {form: config(nsqd, flag.key) for form, nsqd in told.items()} == dict.fromkeys(FORMS, flag.shown)


@pytest.mark.parametrize("name", TLS_FILES)
def test_every_form_of_tls_files(told: dict[str, Nsqd], certificates: Certificates, name: str):
    (flag,) = (each for each in tls_files(certificates) if each.name == name)
    assert {form: config(nsqd, flag.key) for form, nsqd in told.items()} == dict.fromkeys(FORMS, flag.shown)


@pytest.mark.parametrize("flag", [flag for flag in NSQD if flag.default is not None], ids=lambda flag: flag.name)
def test_default(nsqd: Nsqd, flag: Flag):
    accepted = (flag.default, "null") if flag.default == "[]" else (flag.default,)
    assert config(nsqd, flag.key) in accepted


@pytest.mark.parametrize("name", TLS_FILES)
def test_default_of_tls_files(nsqd: Nsqd, name: str):
    assert config(nsqd, name.replace("-", "_")) == ""


@pytest.mark.parametrize("form", FORMS)
def test_addresses_and_data_path(shared_daemons: Daemons, told: dict[str, Nsqd], form: str):
    nsqd = told[form]
    assert config(nsqd, "data_path") == str(nsqd.data_path)
    assert config(nsqd, "tcp_address") == f"127.0.0.1:{nsqd.tcp[1]}"
    assert config(nsqd, "http_address") == f"127.0.0.1:{nsqd.http[1]}"


def test_default_of_node_id_is_a_hash_of_the_host_name(nsqd: Nsqd):
    assert 0 <= int(config(nsqd, "id")) < 1024


def test_default_of_the_broadcast_address_is_the_host_name(shared_daemons: Daemons):
    nsqd = shared_daemons.nsqd(*quick_flags(), "--broadcast-address=")
    assert config(nsqd, "broadcast_address") == nsqd.get("/info")["broadcast_address"] == socket.gethostname()


def test_default_broadcast_ports_are_those_listened_on(nsqd: Nsqd):
    assert (config(nsqd, "broadcast_tcp_port"), config(nsqd, "broadcast_http_port")) == (
        str(nsqd.tcp[1]),
        str(nsqd.http[1]),
    )


def test_default_of_statsd_prefix_names_this_nsqd(nsqd: Nsqd):
    assert config(nsqd, "statsd_prefix") == f"nsq.127_0_0_1_{nsqd.http[1]}."


@pytest.mark.improvement
def test_default_of_tls_min_version_is_1_2(nsqd: Nsqd):
    """NSQ's is TLS 1.0, which is broken."""
    assert config(nsqd, "tls_min_version") == str(0x303)


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tcp_address", '"0.0.0.0:4150"'),
        ("http_address", '"0.0.0.0:4151"'),
        ("https_address", '"0.0.0.0:4152"'),
        ("data_path", '""'),
        ("broadcast_address", '""'),
        ("broadcast_tcp_port", "0"),
        ("statsd_prefix", '"nsq.%s"'),
        ("msg_timeout", '"1m0s"'),
        ("max_req_timeout", '"1h0m0s"'),
        ("durability", '"fsync"'),
        ("log_file", '""'),
        ("retention_time", '"0s"'),
    ],
)
def test_show_config_of_defaults(shown: dict[str, str], key: str, value: str):
    """NSQ has no --show-config."""
    assert shown[key].split() == [key, "=", value, "#", "default"]


@pytest.mark.improvement
@pytest.mark.parametrize("flag", NSQD, ids=lambda flag: flag.name)
def test_show_config_lists_every_option_under_its_key(shown: dict[str, str], flag: Flag):
    """NSQ has no --show-config."""
    assert shown[flag.key].endswith("# default")


@pytest.mark.improvement
def test_show_config_says_what_came_from_a_flag():
    lines = lines_of(run_to_end("nsqd", "--show-config", "-sync-every", "9", "--mem-queue-size=10000").out)
    assert lines["sync_every"].split() == ["sync_every", "=", "9", "#", "flag"]
    assert lines["mem_queue_size"].endswith("# flag")
    assert lines["max_rdy_count"].endswith("# default")


# -- forms of values ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spelled(shared_daemons: Daemons) -> Nsqd:
    """An nsqd with unusual spellings, and with flags that are given more than once."""
    flags = (
        *("--deflate", "-snappy=F", "--statsd-mem-stats=0", "-statsd-exclude-ephemeral=T", "--verbose", "-worker-id"),
        *("--sync-every=1", "-sync-every", "77", "--broadcast-address=first", "--broadcast-address=last"),
        *("--lookupd-tcp-address=127.0.0.1:1", "-lookupd-tcp-address", "127.0.0.1:2"),
        *("--auth-http-address=127.0.0.1:3", "--auth-http-address=127.0.0.1:4"),
        *("--e2e-processing-latency-percentile=1.0,0.99", "--e2e-processing-latency-percentile=0.5"),
        *("--msg-timeout=1m0.5s", "--max-msg-timeout=1h1m1s", "--output-buffer-timeout=250000us"),
        *("--max-req-timeout=.5h", "--sync-timeout=3000000000ns", "--http-client-connect-timeout=1500ms"),
        *("--tls-min-version=TLS1.2", "--log-level=WARN", "--log-prefix=-a=b- ", "--tls-required=false"),
        *("--node-id=0", "--max-deflate-level=9", "--max-channel-consumers=0"),
    )
    return shared_daemons.nsqd(*quick_flags(), *flags[:-3], *flags[-3:], "--log-level=info")


@pytest.mark.parametrize(
    ("key", "value"),
    [("deflate", "true"), ("snappy", "false"), ("statsd_mem_stats", "false"), ("statsd_exclude_ephemeral", "true")],
)
def test_a_switch(spelled: Nsqd, key: str, value: str):
    assert config(spelled, key) == value


@pytest.mark.parametrize(("key", "value"), [("sync_every", "77"), ("broadcast_address", "last"), ("log_level", "2")])
def test_the_last_of_a_repeated_flag_counts(spelled: Nsqd, key: str, value: str):
    assert config(spelled, key) == value


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nsqlookupd_tcp_addresses", '["127.0.0.1:1","127.0.0.1:2"]'),
        ("auth_http_addresses", '["127.0.0.1:3","127.0.0.1:4"]'),
        ("e2e_processing_latency_percentiles", "[1.0,0.99,0.5]"),
    ],
)
def test_repeats_of_a_list_add_up(spelled: Nsqd, key: str, value: str):
    assert config(spelled, key).replace("[1,", "[1.0,") == value


@pytest.mark.parametrize(
    ("key", "value_ns"),
    [
        ("msg_timeout", 60_500_000_000),
        ("max_msg_timeout", 3_661_000_000_000),
        ("output_buffer_timeout", 250_000_000),
        ("max_req_timeout", 1_800_000_000_000),
        ("sync_timeout", 3_000_000_000),
        ("http_client_connect_timeout", 1_500_000_000),
    ],
)
def test_a_go_duration(spelled: Nsqd, key: str, value_ns: int):
    assert config(spelled, key) == str(value_ns)


def test_a_value_may_start_with_a_dash_and_hold_an_equals_sign(spelled: Nsqd):
    assert config(spelled, "log_prefix") == "-a=b- "


@pytest.mark.parametrize(("key", "value"), [("id", "0"), ("max_deflate_level", "9"), ("tls_required", "0")])
def test_the_ends_of_a_range(spelled: Nsqd, key: str, value: str):
    assert config(spelled, key) == value


def test_deprecated_flags_are_accepted(spelled: Nsqd):
    assert spelled.request("GET", "/ping").body == b"OK"


@pytest.mark.parametrize("key", ["verbose", "worker_id", "config", "version", "lookupd_tcp_address", "nothing"])
def test_what_is_no_option_has_no_config(nsqd: Nsqd, key: str):
    answer = nsqd.request("GET", f"/config/{key}")
    assert (answer.status, answer.json) == (400, {"message": "INVALID_OPTION"})


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--max-deflate-level=0", "--max-deflate-level must be [1,9]"),
        ("--max-deflate-level=10", "--max-deflate-level must be [1,9]"),
        ("--node-id=-1", "--node-id must be [0,1024)"),
        ("--node-id=1024", "--node-id must be [0,1024)"),
        ("--tls-required=true", "cannot require TLS client connections without TLS key and cert"),
        ("--tls-required=tcp-https", "cannot require TLS client connections without TLS key and cert"),
        ("--tls-client-auth-policy=require", "cannot require TLS client connections without TLS key and cert"),
        ("--auth-http-request-method=put", "--auth-http-request-method must be post or get"),
        ("--e2e-processing-latency-percentile=0", "invalid E2E processing latency percentile: 0"),
        ("--e2e-processing-latency-percentile=1.5", "invalid E2E processing latency percentile: 1.5"),
    ],
)
def test_nsq_s_words_for_what_it_refuses_at_its_start(tmp_path: Path, flag: str, words: str):
    addresses = ("--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0", f"--data-path={tmp_path}")
    ended = run_to_end("nsqd", *addresses, flag)
    assert ended.code == 1
    assert f"FATAL: failed to instantiate nsqd - {words}" in ended.err
    assert "listening on" not in ended.err


@pytest.mark.parametrize(
    "flags",
    [
        ["--no-such-flag"],
        ["--sync-every=ten"],
        ["--msg-timeout=60"],
        ["--msg-timeout=fast"],
        ["--snappy=maybe"],
        ["--log-level=loud"],
        ["--tls-min-version=ssl3.0"],
        ["--data-path"],
    ],
    ids=" ".join,
)
def test_a_flag_that_cannot_be_read_ends_it(flags: list[str]):
    """As Go's flags do it."""
    ended = run_to_end("nsqd", *flags)
    assert ended.code == 2
    assert flags[0].strip("-").partition("=")[0] in ended.err
    assert ended.out == ""


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--tcp-adress=:1"], "nsqd: flag: unknown option --tcp-adress; did you mean --tcp-address?"),
        (["-mem-queue-sizes=1"], "nsqd: flag: unknown option -mem-queue-sizes; did you mean --mem-queue-size?"),
        (["--versoin"], "nsqd: flag: unknown option --versoin; did you mean --version?"),
        (["--zzz"], "nsqd: flag: unknown option --zzz; nsqd --help lists all"),
        (["--sync-every=ten"], "nsqd: flag: --sync-every='ten' is not allowed; it must be a whole number"),
        (["--sync-every=0"], "nsqd: flag: --sync-every='0' is not allowed; it must be at least 1"),
        (["--msg-timeout=60"], "nsqd: flag: --msg-timeout='60' is not allowed; it needs a unit: 60s or 60ms"),
        (["--broadcast-tcp-port=65536"], "--broadcast-tcp-port='65536' is not allowed; it must be from 0 to 65535"),
        (["--snappy=maybe"], "nsqd: flag: --snappy='maybe' is not allowed; it must be true or false"),
        (["--durability=maybe"], "--durability='maybe' is not allowed; it must be one of: fsync, os, interval"),
        (["--tcp-address=nowhere"], "--tcp-address='nowhere' is not allowed; it must be host:port"),
        (["--data-path"], "nsqd: flag: --data-path='' is not allowed; it needs a value: --data-path=DIRECTORY"),
        (["--deflate", "false"], "nsqd takes only flags; a switch is turned off as --x=false"),
        (["--tls-cert=x"], "--tls-cert='x' is not allowed; it needs --tls-key as well"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_refusal_says_which_and_why_and_what_is_near(flags: list[str], text: str):
    """NSQ prints what Go does: the error and all flags."""
    ended = run_to_end("nsqd", *flags)
    assert (ended.code, ended.out) == (2, "")
    (line,) = ended.err.splitlines()
    assert text in line


@pytest.mark.improvement
def test_help_names_every_flag():
    """NSQ exits with 2 from --help."""
    ended = run_to_end("nsqd", "--help")
    assert ended.code == 0
    for flag in NSQD:
        assert f"--{flag.name}" in ended.out
    assert platform.python_version() not in ended.out
