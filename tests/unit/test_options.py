"""The option machinery and the tables of both daemons: every spelling, every source, every refusal."""

from __future__ import annotations

import dataclasses
import os
import pickle
import re
import runpy
import tomllib
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flintmq.errors import UNKNOWN, OptionError, without_credentials
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqd.options import NsqdOptions, node_id_of
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.options import (
    HOUR,
    MILLISECOND,
    MINUTE,
    SECOND,
    Options,
    Resolved,
    Text,
    example_file,
    format_duration,
    help_text,
    option,
    parse_duration_ns,
    read_command,
    resolve,
    rows,
    show_config,
    version_line,
)
from flintmq.options.durations import DURATION_NS_MAX
from flintmq.options.table import StartRefused
from flintmq.tools.nsq_to_http import ToHttpOptions

ROOT = Path(__file__).resolve().parents[2]
TABLES: list[type[Options]] = [NsqdOptions, NsqlookupdOptions, NsqadminOptions]


def nsqd(*flags: str, **environment: str) -> NsqdOptions:
    return resolve(NsqdOptions, flags, environment).options


def refusal(*flags: str, **environment: str) -> str:
    with pytest.raises(OptionError) as caught:
        resolve(NsqdOptions, flags, environment)
    return str(caught.value)


@pytest.fixture
def config(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "nsqd.cfg"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


# --- durations ---


@pytest.mark.parametrize(
    ("text", "expected_ns"),
    [
        ("0", 0),
        ("0s", 0),
        ("250ms", 250 * MILLISECOND),
        ("1.5s", 1500 * MILLISECOND),
        (".5s", 500 * MILLISECOND),
        ("1.s", SECOND),
        ("1h2m3s", HOUR + 2 * MINUTE + 3 * SECOND),
        ("1m0s", MINUTE),
        ("-2s", -2 * SECOND),
        ("+2s", 2 * SECOND),
        ("3us", 3_000),
        ("3µs", 3_000),
        ("7ns", 7),
        ("0.000000001s", 1),
        ("90m", HOUR + 30 * MINUTE),
    ],
)
def test_go_durations_are_read(text, expected_ns):
    assert parse_duration_ns(text) == expected_ns


@pytest.mark.parametrize(
    "text", ["", "-", "s", ".s", "1", "60000", "1 s", "1x", "1s2", "abc", "1e3s", "١s", "3000000h"]
)
def test_other_durations_are_refused(text):
    with pytest.raises(ValueError, match="it "):
        parse_duration_ns(text)


@pytest.mark.parametrize(
    ("duration_ns", "expected"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1µs"),
        (250 * MILLISECOND, "250ms"),
        (1_500 * MILLISECOND, "1.5s"),
        (MINUTE, "1m0s"),
        (HOUR, "1h0m0s"),
        (HOUR + 1, "1h0m0.000000001s"),
        (-MINUTE, "-1m0s"),
    ],
)
def test_durations_are_spelled_as_go_does(duration_ns, expected):
    assert format_duration(duration_ns) == expected


@given(st.integers(-DURATION_NS_MAX, DURATION_NS_MAX))
def test_durations_survive_a_round_trip(duration_ns):
    assert parse_duration_ns(format_duration(duration_ns)) == duration_ns


@pytest.mark.slow
@given(st.text(max_size=20))
def test_any_text_is_a_duration_or_a_value_error(text):
    try:
        assert abs(parse_duration_ns(text)) <= DURATION_NS_MAX
    except ValueError:
        pass


# --- flags ---


@pytest.mark.parametrize(
    "flags", [["-tcp-address", ":1"], ["--tcp-address", ":1"], ["-tcp-address=:1"], ["--tcp-address=:1"]]
)
def test_flags_have_one_dash_or_two_and_an_equals_sign_or_none(flags):
    assert nsqd(*flags).tcp_address == ":1"


@pytest.mark.parametrize(
    ("flag", "expected"),
    [("--deflate", True), ("--deflate=true", True), ("-deflate=T", True), ("--snappy=0", False), ("--verbose", True)],
)
def test_switches_stand_alone_or_have_a_value(flag, expected):
    attribute = flag.strip("-").partition("=")[0].replace("-", "_")
    assert getattr(nsqd(flag), attribute) is expected


def test_a_switch_does_not_take_the_next_word():
    assert "takes only flags; a switch is turned off as --x=false" in refusal("--verbose", "false")


def test_two_dashes_end_the_flags():
    assert nsqd("--sync-every=2", "--") == NsqdOptions(sync_every=2)
    assert nsqd("--log-prefix", "--").log_prefix == "--"  # the value of a flag, as in Go


def test_the_last_of_a_repeated_flag_counts():
    assert nsqd("--sync-every=1", "--sync-every=2").sync_every == 2


def test_lists_are_repeated_flags_and_comma_lists():
    options = nsqd("--lookupd-tcp-address=a:1,b:2", "-lookupd-tcp-address", "c:3")
    assert options.lookupd_tcp_address == ("a:1", "b:2", "c:3")
    assert nsqd("--lookupd-tcp-address=").lookupd_tcp_address == ()


@pytest.mark.parametrize(
    ("text", "number"),
    [("0x10", 16), ("0XfF", 255), ("1_000", 1000), ("0b11", 3), ("0o17", 15), ("017", 15), ("0_7", 7), ("+5", 5)],
)
def test_numbers_are_written_as_in_go(text, number):
    assert nsqd(f"--sync-every={text}").sync_every == number


def test_values_may_start_with_a_dash_or_hold_an_equals_sign():
    assert nsqd("--log-prefix", "-a=b-").log_prefix == "-a=b-"
    assert nsqd("--log-prefix=-a=b-").log_prefix == "-a=b-"


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tcp-adress=:1"], "unknown option --tcp-adress; did you mean --tcp-address?"),
        (["-mem-queue-sizes=1"], "unknown option -mem-queue-sizes; did you mean --mem-queue-size?"),
        (["--zzz"], "unknown option --zzz; nsqd --help lists all"),
        (["---"], "unknown option ---; nsqd --help lists all"),
        (["---snappy"], "unknown option ---snappy; did you mean --snappy?"),
        (["stray"], "takes only flags"),
        (["-"], "takes only flags"),
        (["--", "--verbose"], "it stands behind --, which ends the flags: NSQ ignores it"),
        (["--data-path"], "it needs a value: --data-path=DIRECTORY"),
        (["--config"], "it needs a value: --config=FILE"),
        (["--verbose=maybe"], "--verbose='maybe' is not allowed; it must be true or false"),
        (["--sync-every=ten"], "it must be a whole number"),
        (["--sync-every=0"], "it must be at least 1"),
        (["--sync-every=" + "9" * 30], "it must be a whole number"),
        (["--broadcast-tcp-port=65536"], "it must be from 0 to 65535"),
        (["--msg-timeout=60"], "it needs a unit: 60s or 60ms"),
        (["--msg-timeout=0s"], "it must be at least 1ms"),
        (["--max-req-timeout=-1s"], "it must be at least 0s"),
        (["--durability=maybe"], "it must be one of: fsync, os, interval"),
        (["--tcp-address=nowhere"], "it must be host:port"),
        (["--tcp-address=:65536"], "a port from 0 to 65535"),
        (["--tcp-address="], "it must be host:port"),
        (["--tcp-address=::1:4150"], "an IPv6 address goes in brackets"),
        (["--tcp-address=http://127.0.0.1:4150"], "it must be host:port, without http:// or the like"),
        (["--http-address=https://a"], "it must be host:port, without http:// or the like"),
        (["--lookupd-tcp-address=http://127.0.0.1:4161"], "it must be host:port, without http:// or the like"),
        (["--lookupd-tcp-address=:4160"], "it must name a host and a port"),
        (["--lookupd-tcp-address=" + ",".join(["a:1"] * 1025)], "at most 1024 are allowed"),
        (["--sync-every=09"], "it must be a whole number"),
        (["--sync-every=1__0"], "it must be a whole number"),
        (["--sync-every=0x8000000000000000"], "it must be a whole number"),
    ],
)
def test_a_refused_flag_says_what_and_why(flags, expected):
    text = refusal(*flags)
    assert text.startswith("flag: ")
    assert expected in text


@pytest.mark.parametrize(
    ("flag", "nsq_words"),
    [
        ("--max-deflate-level=10", "--max-deflate-level must be [1,9]"),
        ("--node-id=1024", "--node-id must be [0,1024)"),
        ("--auth-http-request-method=put", "--auth-http-request-method must be post or get"),
        ("--e2e-processing-latency-percentile=100", "invalid E2E processing latency percentile: 100"),
    ],
)
def test_refusals_nsq_has_words_for_use_them(flag, nsq_words):
    assert refusal(flag).startswith(nsq_words)


# --- environment ---


def test_every_option_can_come_from_the_environment():
    options = nsqd(
        FLINTMQ_NSQD_MEM_QUEUE_SIZE="7", FLINTMQ_NSQD_LOOKUPD_TCP_ADDRESS="a:1,b:2", FLINTMQ_NSQD_SYNC_TIMEOUT="3s"
    )
    assert (options.mem_queue_size, options.lookupd_tcp_address, options.sync_timeout_ns) == (
        7,
        ("a:1", "b:2"),
        3 * SECOND,
    )


def test_an_unknown_variable_is_refused_with_the_nearest():
    text = refusal(FLINTMQ_NSQD_MEM_QUEUE="7")
    assert text == ("environment: unknown option FLINTMQ_NSQD_MEM_QUEUE; did you mean FLINTMQ_NSQD_MEM_QUEUE_SIZE?")


def test_variables_of_others_and_of_kubernetes_are_left_alone():
    nsqd(
        FLINTMQ_NSQLOOKUPD_TCP_ADDRESS="x",
        FLINTMQ_NSQD_SERVICE_HOST="10.0.0.1",
        FLINTMQ_NSQD_SERVICE_PORT_TCP="4150",
        FLINTMQ_NSQD_PORT="tcp://10.0.0.1:4150",
        FLINTMQ_NSQD_PORT_4150_TCP_ADDR="10.0.0.1",
    )


def test_a_bad_variable_names_itself():
    assert refusal(FLINTMQ_NSQD_SYNC_EVERY="x") == (
        "environment: FLINTMQ_NSQD_SYNC_EVERY='x' is not allowed; it must be a whole number"
    )


# --- files ---

# The example file NSQ 1.3 ships as contrib/nsqd.cfg.example, with its commented lines on where they are harmless.
OFFICIAL_FILE = """
log_level = "info"
id = 515
tcp_address = "0.0.0.0:4150"
http_address = "0.0.0.0:4151"
https_address = "0.0.0.0:4152"
broadcast_address = ""
nsqlookupd_tcp_addresses = [
    "127.0.0.1:4160"
]
http_client_connect_timeout = "2s"
http_client_request_timeout = "5s"
data_path = "/var/lib/nsq"
mem_queue_size = 10000
max_bytes_per_file = 104857600
sync_every = 2500
sync_timeout = "2s"
msg_timeout = "60s"
max_msg_timeout = "15m"
max_msg_size = 1024768
max_req_timeout = "1h"
max_body_size = 5123840
max_heartbeat_interval = "60s"
max_rdy_count = 2500
max_output_buffer_size = 65536
max_output_buffer_timeout = "1s"
statsd_prefix = "nsq.%s"
statsd_interval = "60s"
statsd_mem_stats = true
statsd_udp_packet_size = 508
e2e_processing_latency_percentiles = [
    1.0,
    0.99,
    0.95
]
e2e_processing_latency_window_time = "10m"
tls_cert = ""
tls_key = ""
tls_root_ca_file = ""
tls_required = false
tls_min_version = ""
deflate = true
max_deflate_level = 6
snappy = true
"""


def test_an_official_file_loads_unchanged(config):
    path = config(OFFICIAL_FILE)
    resolved = resolve(NsqdOptions, ["--config", path], {})
    options = resolved.options
    assert options.lookupd_tcp_address == ("127.0.0.1:4160",)
    assert (options.node_id, options.max_msg_size, options.max_output_buffer_timeout_ns) == (515, 1024768, SECOND)
    assert (options.tls_min_version, options.tls_required) == ("tls1.2", "false")
    assert options.e2e_processing_latency_percentile == (1.0, 0.99, 0.95)
    assert resolved.notes == ()


@pytest.mark.parametrize(
    ("line", "attribute", "expected"),
    [
        ("msg_timeout = 1500", "msg_timeout_ns", 1500 * MILLISECOND),
        ('msg_timeout = "1500ms"', "msg_timeout_ns", 1500 * MILLISECOND),
        ('nsqlookupd_tcp_addresses = "a:1,b:2"', "lookupd_tcp_address", ("a:1", "b:2")),
        ('lookupd_tcp_address = ["a:1"]', "lookupd_tcp_address", ("a:1",)),
        ("nsqlookupd_tcp_addresses = []", "lookupd_tcp_address", ()),
        ('max_rdy_count = "5"', "max_rdy_count", 5),
        ('max_rdy_count = "010"', "max_rdy_count", 10),
        ("max_rdy_count = 0x10", "max_rdy_count", 16),
        ("\ufeffmax_rdy_count = 5", "max_rdy_count", 5),
        ("node_id = 3", "node_id", 3),
        ('log_level = "WARN"', "log_level", "warn"),
        ('http_address = ""', "http_address", ""),
        ("tls_required = 0", "tls_required", "false"),
    ],
)
def test_values_in_a_file_have_nsq_s_spellings(config, line, attribute, expected):
    assert getattr(nsqd("--config", config(line)), attribute) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tcp_address = 4150\n", 'it must be text in quotes: "..."'),
        ("msg_timeout = 1.5\n", 'it must be a duration in quotes, such as "2s", or a whole number of milliseconds'),
        ("msg_timeout = true\n", "it must be a duration in quotes"),
        ("sync_every = 1.5\n", "it must be a whole number"),
        ('sync_every = "0x10"\n', "it must be a whole number"),
        ('sync_every = "1_000"\n', "it must be a whole number"),
        ("sync_every = true\n", "it must be a whole number"),
        ("deflate = 2\n", "it must be true or false"),
        ("nsqlookupd_tcp_addresses = 1\n", "it must be an array"),
        ("nsqlookupd_tcp_addresses = [1]\n", 'it must be text in quotes: "..."'),
        ("id = 1\nnode_id = 2\n", "the file sets it as id already"),
        ("nsqlookupd_tcp_addresses = ['a:1, b:2']\n", 'quoted one by one: ["a:1", "b:2"]'),
        ("nsqlookupd_tcp_addresses = ['::1:4160']\n", "an IPv6 address goes in brackets"),
        ("tls_required = 2\n", 'it must be text in quotes: "..."'),
        ("tls_required = 1\n", "cannot require TLS client connections without TLS key and cert"),
        ("a =\n", "not TOML: Invalid value (at line 1, column 4)"),
    ],
)  # fmt: skip
def test_a_refused_file_says_what_and_why(config, text, expected):
    path = config(text)
    refused = refusal("--config", path)
    assert path in refused
    assert expected in refused


def test_a_file_that_is_too_large_is_refused(config):
    path = config("#" * (1024 * 1024 + 1))
    refused = refusal("--config", path)
    assert path in refused
    assert "a configuration file has at most 1048576 bytes" in refused


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("mem_queue_sise = 1\n", "unknown option mem_queue_sise is ignored; did you mean mem_queue_size?"),
        ('"data-path" = "x"\n', "unknown option data-path is ignored; did you mean data_path?"),
        ("[section]\nsync_every = 1\n", "unknown option section is ignored; nsqd --help lists all"),
        ("verbose = true\n", "verbose has no effect, use --log-level"),
        ("worker_id = 5\n", "worker_id has no effect, use --node-id"),
    ],
)
def test_unknown_names_in_a_file_are_told_and_ignored(config, text, note):
    path = config("max_rdy_count = 7\n" + text)
    resolved = resolve(NsqdOptions, ["--config", path], {})
    assert resolved.notes == (f"{path}: {note}",)
    assert resolved.options == NsqdOptions(max_rdy_count=7)


@pytest.mark.parametrize(
    ("table", "line", "key"),
    [
        (NsqdOptions, 'lookupd_tcp_address = "a:1"', "nsqlookupd_tcp_addresses"),
        (NsqdOptions, "node_id = 3", "id"),
        (NsqdOptions, 'auth_http_address = "a:1"', "auth_http_addresses"),
        (NsqdOptions, 'e2e_processing_latency_percentile = "0.5"', "e2e_processing_latency_percentiles"),
        (NsqadminOptions, 'lookupd_http_address = "a:1"', "nsqlookupd_http_addresses"),
        (NsqadminOptions, 'nsqd_http_address = "a:1"', "nsqd_http_addresses"),
        (NsqadminOptions, 'admin_user = "a"\nnsqd_http_addresses = "a:1"', "admin_users"),
    ],
)
def test_keys_that_nsq_ignores_are_told_and_obeyed(config, table, line, key):
    path = config(line)
    resolved = resolve(table, ["--config", path, "--show-config"], {})
    name = line.partition(" ")[0]
    told = f"{path}: {name} is obeyed, as {key}; NSQ ignores it; take it out unless you mean it"
    assert resolved.notes == (told,)
    assert f"\n{key} = " in show_config(resolved)


def test_migration_names_every_key_that_nsq_ignores():
    page = (ROOT / "docs" / "migration.md").read_text(encoding="utf-8")
    keys = {key for table in TABLES for row in rows(table) if row.origin == "nsq" for key in row.keys[1:]}
    assert len(keys) == 7
    assert [key for key in keys if f"`{key}`" not in page] == []


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    assert "failed to load config file /no/such - No such file or directory" in refusal("--config=/no/such")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    assert "not TOML" in refusal(f"--config={tmp_path / 'bytes'}")


def test_the_file_may_be_named_in_the_environment(config):
    assert nsqd(FLINTMQ_NSQD_CONFIG=config("sync_every = 9")).sync_every == 9


# --- together ---


def test_flag_before_environment_before_file_before_default(config):
    path = config("sync_every = 3\nmem_queue_size = 3\nmax_rdy_count = 3\n")
    environment = {"FLINTMQ_NSQD_SYNC_EVERY": "2", "FLINTMQ_NSQD_MEM_QUEUE_SIZE": "2"}
    resolved = resolve(NsqdOptions, ["--config", path, "--sync-every=1"], environment)
    options = resolved.options
    assert (options.sync_every, options.mem_queue_size, options.max_rdy_count, options.max_msg_size) == (
        1,
        2,
        3,
        1048576,
    )
    sources = [resolved.sources[name] for name in ("sync_every", "mem_queue_size", "max_rdy_count", "max_msg_size")]
    assert sources == ["flag", "environment", path, "default"]


def test_show_config_tells_value_and_origin_and_is_a_file_that_loads(config):
    path = config("sync_every = 3\n")
    resolved = resolve(NsqdOptions, ["--config", path, "--lookupd-tcp-address=a:1", '--log-prefix="\\é\t'], {})
    assert resolved.action == "run"
    shown = show_config(resolved)
    lines = {line.partition(" = ")[0]: line for line in shown.splitlines()}
    assert lines["sync_every"].split() == ["sync_every", "=", "3", "#", path]
    assert lines["nsqlookupd_tcp_addresses"].split("  ")[0] == 'nsqlookupd_tcp_addresses = ["a:1"]'
    assert lines["max_rdy_count"].endswith("# default")
    assert nsqd("--config", config(shown)) == resolved.options


@pytest.mark.parametrize(
    ("table", "flags"),
    [
        (NsqdOptions, ["--auth-http-address=http://au:hidden@a:1/auth?token=hidden,b:2"]),
        (NsqdOptions, ["--auth-http-address=au:hidden@a:1"]),
        (NsqdOptions, ["--auth-http-address=a:1/auth?token=hidden"]),
        (NsqdOptions, ["--cluster-store=https://au:hidden@a:1", "--cluster-store=https://au:hidden@b:1"]),
        (NsqlookupdOptions, ["--cluster-store=https://au:hidden@a:1"]),
        (NsqadminOptions, ["--nsqd-http-address=a:1", "--notification-http-endpoint=https://a/hook?key=hidden"]),
        (NsqadminOptions, ["--nsqd-http-address=a:1", "--graphite-url=http://au:hidden@g/"]),
        (ToHttpOptions, ["--header=Authorization: Bearer hidden", "--header=X-Api-Key:hidden"]),
        (ToHttpOptions, ["--post=https://au:hidden@a/?key=hidden", "--consumer-opt=auth_secret,hidden"]),
    ],
)
def test_show_config_shows_no_secret(table, flags):
    resolved = resolve(table, flags, {})
    assert "hidden" in repr(resolved.options)
    shown = show_config(resolved)
    assert "hidden" not in shown and "***" in shown
    tomllib.loads(shown)


def test_show_config_shows_what_is_no_secret():
    flags = ["--lookupd-tcp-address=token-host:4160", "--log-prefix=?x@y", "--auth-http-address=a:1/auth,https://b/auth",
             "--http-auth-tokens-file=/etc/tokens.toml"]  # fmt: skip
    shown = show_config(resolve(NsqdOptions, flags, {}))
    for text in ('"token-host:4160"', '"?x@y"', '["a:1/auth", "https://b/auth"]', '"/etc/tokens.toml"'):
        assert text in shown
    assert "***" not in shown
    flags = ["--consumer-opt=auth_secret,env:SECRET", "--header=Accept: a/b"]
    shown = show_config(resolve(ToHttpOptions, flags, {}))
    assert '"auth_secret,env:SECRET"' in shown and '"Accept: a/b"' in shown


@pytest.mark.parametrize(
    "addresses",
    ["a:4181", "a", "a:4181/path", "[::1]:4181", "http://a", "https://a:1/auth?token=zz", "http://au:p%40w@a:1/x",
     "a:1,b:2", "au:pw@a:1", "A:1", "HTTP://a:1/auth"],
)  # fmt: skip
def test_auth_servers_that_nsq_takes(addresses):
    assert len(nsqd(f"--auth-http-address={addresses}").auth_http_address) == addresses.count(",") + 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("ftp://au:pw@h/a?token=zz", "it must be http://host:port/path or https://host:port/path"),
        ("http://au:pw@[::1/a?token=zz", "its host or port is malformed"),
        ("http://au:pw@h:port/a?token=zz", "its host or port is malformed"),
        ("http://au:pw@h:99999/a?token=zz", "its host or port is malformed"),
        ("http://au:pw@/a?token=zz", "it must be http://host:port/path"),
        ("au:pw@h:0/a?token=zz", "there is no port 0"),
        ("a b:1", "its host is neither a name nor an IP address"),
        ("a:x", "its host or port is malformed"),
    ],
)
def test_an_auth_server_that_can_never_be_asked(address, reason, config):
    for said in (
        refusal("--auth-http-address=a:1", f"--auth-http-address={address}"),
        refusal("--config", config(f'auth_http_addresses = ["a:1", "{address}"]')),
    ):
        assert "server 2 of 2 can never be asked: " in said and re.search(reason, said), said
        assert "pw" not in said and "zz" not in said and "auth" in said.partition("=")[0]


def test_actions():
    actions = {flag: resolve(NsqdOptions, [flag], {}).action for flag in ("--version", "-version", "--help", "-h")}
    assert actions == {"--version": "version", "-version": "version", "--help": "help", "-h": "help"}
    assert resolve(NsqdOptions, ["--show-config", "--sync-every=1"], {}).action == "show-config"
    assert resolve(NsqdOptions, ["--version=false"], {}).action == "run"
    assert resolve(NsqdOptions, ["--version"], {"FLINTMQ_NSQD_NONSENSE": "1"}).action == "version"
    assert "did you mean --version?" in refusal("--versoin")


# --- what is not built yet ---


@pytest.mark.parametrize(
    ("flag", "beginning"),
    [
        ("--help", "Usage: flintmq nsqd [flags]\n"),
        ("--version", "flintmq nsqd v1.2 (built w/python3."),
        ("--show-config", "log_level = "),
    ],
)
def test_a_command_prints_what_it_is_asked_for(flag, beginning, capsys):
    program = "flintmq nsqd"
    assert read_command(NsqdOptions, [flag], program, version_line(program, "1.2")) is None
    said = capsys.readouterr()
    assert said.out.startswith(beginning) and said.out.endswith("\n")
    assert said.err == ""


def test_a_command_runs_and_says_what_is_noteworthy(config, capsys):
    path = config("max_msg_sice = 5\n")
    options = read_command(NsqdOptions, [f"--config={path}", "--max-msg-size=7"], "flintmq nsqd", "v")
    assert options is not None and options.max_msg_size == 7
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"flintmq nsqd: {path}: ") and "max_msg_sice" in said.err


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unfinished(Options):
    """A daemon with an option whose feature does not exist yet."""

    program: ClassVar[str] = "nsqd"
    summary: ClassVar[str] = "It does nothing yet."

    orbit: str = option(Text(), "", "where it is", group="Space", implemented=False)


def test_an_option_without_its_feature_is_refused(config):
    for flags in (["--orbit=low"], ["--config", config('orbit = "low"')]):
        with pytest.raises(OptionError, match="this version does not support it yet; leave it out"):
            resolve(Unfinished, flags, {})


def test_an_option_without_its_feature_accepts_its_default():
    assert resolve(Unfinished, ["--orbit="], {}).options.orbit == ""


# --- experiments ---


def test_experiments_that_are_known_can_be_turned_on(config):
    topology = ("topology-aware-consumption",)
    assert nsqd("--enable-experiment=topology-aware-consumption", "--topology-zone=a").enable_experiment == topology
    assert nsqd("--config", config('enable_experiment = ["topology-aware-consumption"]')).enable_experiment == topology
    assert nsqd().enable_experiment == ()


def test_experiments_that_are_not_known_are_refused_with_those_that_are(config):
    for flags in (["--enable-experiment=warp"], ["--config", config('enable_experiment = "warp"')]):
        text = refusal(*flags)
        assert "warp" in text and "topology-aware-consumption" in text


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--tls-required"], "cannot require TLS client connections without TLS key and cert"),
        (["--tls-client-auth-policy=require"], "cannot require TLS client connections without TLS key and cert"),
        (["--tls-required=tcp-https", "--tls-cert=x"], "cannot require TLS client connections without TLS key and"),
        (["--tls-cert=x"], "it needs --tls-key as well"),
        (["--tls-key=x"], "it needs --tls-cert as well"),
        (["--tls-min-version=ssl3.0"], "one of: tls1.0, tls1.1, tls1.2, tls1.3"),
    ],
)
def test_half_of_tls_is_refused(flags, expected):
    assert expected in refusal(*flags)


def test_percentiles_of_a_file_are_checked(config):
    text = refusal("--config", config("e2e_processing_latency_percentiles = [100.0]"))
    assert "invalid E2E processing latency percentile: 100.0" in text


@pytest.mark.parametrize("given", ["10.0.0.0/33", "here", "127.0.0.1/8,nothing"])
def test_ranges_of_addresses_are_checked(given):
    assert "it must be addresses such as 10.0.0.0/8" in refusal(f"--allow-config-from-cidr={given}")


def test_ranges_of_addresses():
    assert nsqd().allow_config_from_cidr == ("127.0.0.1/8", "::1/128")
    assert nsqd("--allow-config-from-cidr=10.0.0.5/8,::/0").allow_config_from_cidr == ("10.0.0.5/8", "::/0")
    assert nsqd("--allow-config-from-cidr=").allow_config_from_cidr == ()


# --- plain construction ---


def test_keyword_construction():
    options = NsqdOptions(tcp_address="127.0.0.1:0", msg_timeout_ns=SECOND, lookupd_tcp_address=("a:1",))
    assert (options.tcp_address, options.msg_timeout_ns, options.max_rdy_count) == ("127.0.0.1:0", SECOND, 2500)
    assert options.replace(max_rdy_count=1).max_rdy_count == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.max_rdy_count = 2  # type: ignore[misc]


@pytest.mark.parametrize(
    "arguments",
    [
        {"tcp_address": "nowhere"},
        {"tcp_address": None},
        {"max_rdy_count": 0},
        {"max_rdy_count": True},
        {"max_rdy_count": "5"},
        {"msg_timeout_ns": 1.5},
        {"msg_timeout_ns": 1},
        {"lookupd_tcp_address": ["a:1"]},
        {"lookupd_tcp_address": "a:1"},
        {"lookupd_tcp_address": (1,)},
        {"verbose": 1},
        {"node_id": 1024},
        {"tls_cert": "x"},
        {"tls_required": "true"},
        {"e2e_processing_latency_percentile": (2.0,)},
    ],
)
def test_keyword_construction_checks(arguments):
    with pytest.raises(OptionError) as caught:
        NsqdOptions(**arguments)
    assert f"argument: {next(iter(arguments))}=" in str(caught.value)


# --- the tables ---

# flag -> default, as NSQ's options lists them but for tls-min-version (docs/decisions/0007)
NSQD_DEFAULTS = """
log-level info | log-prefix [nsqd]_ | tcp-address 0.0.0.0:4150 | http-address 0.0.0.0:4151 | https-address 0.0.0.0:4152
broadcast-tcp-port 0 | broadcast-http-port 0 | lookupd-tcp-address | auth-http-address | auth-http-request-method get
http-client-connect-timeout 2s | http-client-request-timeout 5s | topology-region | topology-zone | data-path
mem-queue-size 10000 | max-bytes-per-file 104857600 | sync-every 2500 | sync-timeout 2s | queue-scan-worker-pool-max 4
queue-scan-selection-count 20 | msg-timeout 1m0s | max-msg-timeout 15m0s | max-msg-size 1048576 | max-body-size 5242880
max-req-timeout 1h0m0s | max-heartbeat-interval 1m0s | max-rdy-count 2500 | max-output-buffer-size 65536
max-output-buffer-timeout 30s | min-output-buffer-timeout 25ms | output-buffer-timeout 250ms | max-channel-consumers 0
statsd-address | statsd-interval 1m0s | statsd-mem-stats true | statsd-prefix nsq.%s | statsd-udp-packet-size 508
statsd-exclude-ephemeral false | e2e-processing-latency-percentile | e2e-processing-latency-window-time 10m0s | tls-cert
tls-key | tls-client-auth-policy | tls-root-ca-file | tls-required false | tls-min-version tls1.2 | deflate true
max-deflate-level 6 | snappy true | enable-experiment | broadcast-address | verbose false | worker-id false
"""
NSQLOOKUPD_DEFAULTS = """
log-level info | log-prefix [nsqlookupd]_ | tcp-address 0.0.0.0:4160 | http-address 0.0.0.0:4161 | broadcast-address
inactive-producer-timeout 5m0s | tombstone-lifetime 45s | verbose false
"""


NSQADMIN_DEFAULTS = """
log-level info | log-prefix [nsqadmin]_ | http-address 0.0.0.0:4171 | base-path / | dev-static-dir | graphite-url
proxy-graphite false | statsd-counter-format stats.counters.%s.count | statsd-gauge-format stats.gauges.%s
statsd-prefix nsq.%s | statsd-interval 1m0s | notification-http-endpoint | http-client-connect-timeout 2s
http-client-request-timeout 5s | http-client-tls-insecure-skip-verify false | http-client-tls-root-ca-file
http-client-tls-cert | http-client-tls-key | allow-config-from-cidr 127.0.0.1/8 | acl-http-header X-Forwarded-User
lookupd-http-address | nsqd-http-address | admin-user | verbose false
"""


@pytest.mark.parametrize(
    ("table", "listed"),
    [(NsqdOptions, NSQD_DEFAULTS), (NsqlookupdOptions, NSQLOOKUPD_DEFAULTS), (NsqadminOptions, NSQADMIN_DEFAULTS)],
)
def test_every_flag_of_nsq_is_there_with_its_default(table, listed):
    expected = {}
    for entry in listed.replace("\n", "|").split("|"):
        if entry.strip():
            flag, _, default = entry.strip().partition(" ")
            expected[flag] = default.replace("_", " ")
    ours = {
        row.flag: row.kind.show(row.default) for row in rows(table) if row.origin == "nsq" and row.default is not None
    }
    assert ours == expected


def test_our_own_defaults():
    options = NsqdOptions()
    assert (options.durability, options.retention_time_ns, options.retention_bytes, options.max_connections) == (
        "fsync",
        0,
        0,
        0,
    )
    assert options.node_id is None


@pytest.mark.parametrize("table", TABLES)
def test_rows_are_sound(table):
    flags = [row.flag for row in rows(table)]
    keys = [key for row in rows(table) for key in row.keys]
    assert len(set(flags)) == len(flags)
    assert len(set(keys)) == len(keys)
    assert not {"config", "help", "h", "version", "show-config"} & set(flags)
    for row in rows(table):
        if row.default is None:
            continue
        row.check(row.default)
        assert row.kind.from_text(row.kind.show(row.default)) == row.default
        assert not row.help.endswith(".")


@pytest.mark.parametrize("table", TABLES)
def test_the_example_file_is_the_defaults(table, config):
    lines = [line for line in example_file(table).splitlines() if line.startswith("# ") and "=" in line][1:]
    switched_on = "\n".join(line.removeprefix("# ") for line in lines if not line.endswith("="))
    resolved: Resolved[Options] = resolve(table, ["--config", config(switched_on)], {})
    assert resolved.options == table()
    assert len(lines) == sum(1 for row in rows(table) if row.implemented and not row.deprecated and not row.hidden)


@pytest.mark.parametrize("table", TABLES)
def test_help_names_every_flag_once_and_fits(table):
    text = help_text(table)
    for row in rows(table):
        is_named = re.search(rf"--{row.flag}(?![a-z-])", text) is not None
        assert is_named is not (row.deprecated or row.hidden), row.flag
    assert all(len(line) <= 100 for line in text.splitlines())


def test_generated_files_are_up_to_date():
    generated = runpy.run_path(str(ROOT / "docs" / "generate.py"))["generated"]()
    for name, text in generated.items():
        assert (ROOT / name).read_text(encoding="utf-8") == text, f"{name} is out of date: run make docs"


def test_node_ids_are_nsq_s():
    assert node_id_of("localhost") == 16  # printf localhost | openssl md5 -binary | gzip -c | tail -c8: CRC-32 % 1024


@given(
    st.lists(
        st.sampled_from(["--", "-", "=", "tcp-address", "verbose", "config", "1", ":1", "lookupd-tcp-address", ","])
    )
)
def test_any_command_line_gives_options_or_an_option_error(words):
    arguments = ["".join(words[index : index + 3]) for index in range(0, len(words), 3)]
    try:
        assert isinstance(resolve(NsqdOptions, arguments, {}).options, NsqdOptions)
    except OptionError as error:
        assert str(error)


def test_the_real_environment_is_not_read_behind_the_back(monkeypatch):
    monkeypatch.setitem(os.environ, "FLINTMQ_NSQD_SYNC_EVERY", "9")
    assert nsqd().sync_every == 2500


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("somebody:hidden@a:1", "'***@a:1'"),
        ("http://somebody:hid@den,'x y@a:1", "'http://***@a:1'"),
        (("http://hidden@a:1", "b:1"), "('http://***@a:1', 'b:1')"),
        (["a:1/auth?secret=hidden"], "['a:1/auth?***']"),
        ("name@host", "'name@host'"),
        (b"a:b@c", "b'a:b@c'"),
        (5, "5"),
    ],
)
def test_an_error_shows_no_password_of_an_address(value, shown):
    error = OptionError("--lookupd", value, "host:port", "flag")
    assert str(error) == f"flag: --lookupd={shown} is not allowed; host:port"
    assert repr(error) == f"OptionError('--lookupd', {shown}, 'host:port', 'flag')"
    assert "hidden" not in str(StartRefused("--lookupd", value, "host:port", "flag"))
    assert pickle.loads(pickle.dumps(error)).value == value


@pytest.mark.parametrize("value", [UNKNOWN, "x"])
@pytest.mark.parametrize("option", ["http://somebody:hidden@a:1", "--lookup=somebody:hidden@a:1"])
def test_an_address_in_the_place_of_a_flag_is_shown_without_its_password(option, value):
    error = OptionError(option, value, "give a flag", "flag")
    assert "hidden" not in f"{error} {error!r}" and "***@a:1" in str(error) and "***@a:1" in repr(error)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("--auth-http-address=somebody:hid@den@a:1", "--auth-http-address=***@a:1"),
        (
            "--cluster-store=https://u:hidden@a:1,https://u:hidden@b:1?x=1",
            "--cluster-store=https://***@a:1,https://***@b:1?***",
        ),
        ("asking u:hidden@a, and 12:30 at b", "asking ***@a, and 12:30 at b"),
        ("mail name@host: soon", "mail name@host: soon"),
    ],
)
def test_a_text_is_shown_without_the_credentials_of_addresses(text, shown):
    assert without_credentials(text) == shown
