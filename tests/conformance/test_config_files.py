"""TOML files of both daemons, the environment, and what goes before what, one case per rule (NSQ's options)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.daemon_helpers import LookupConnection, addresses_of, identified, run_to_end
from tests.conformance.flag_tables import NSQD, TLS_FILES, Flag, tls_files
from tests.integration.daemons import Daemons, Nsqd, Nsqlookupd, wait_until

WriteFile = Callable[[str], Path]

# contrib/nsqd.cfg.example of NSQ 1.3 with its commented lines switched on where a test machine allows them
OFFICIAL_NSQD = """
## log verbosity level: debug, info, warn, error, or fatal
log_level = "info"
id = 5150
tcp_address = "0.0.0.0:4150"
http_address = "0.0.0.0:4151"
broadcast_address = ""
nsqlookupd_tcp_addresses = [
    "127.0.0.1:1"
]
http_client_connect_timeout = "2s"
http_client_request_timeout = "5s"
data_path = "/no/such/directory"
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
tls_required = false
tls_min_version = ""
deflate = true
max_deflate_level = 6
snappy = true
"""
OFFICIAL_NSQLOOKUPD = """
## log verbosity level: debug, info, warn, error, or fatal
log_level = "info"
tcp_address = "0.0.0.0:4160"
http_address = "0.0.0.0:4161"
broadcast_address = "lookup.example"
inactive_producer_timeout = "300s"
tombstone_lifetime = "45s"
"""
DURATIONS = [flag for flag in NSQD if flag.shown.endswith("000000") and flag.toml == ""]


def config(nsqd: Nsqd, key: str) -> str:
    answer = nsqd.request("GET", f"/config/{key}")
    assert answer.status == 200, (key, answer.body)
    return answer.text


@pytest.fixture
def write(tmp_path: Path) -> WriteFile:
    """Writes a configuration file."""

    def write(text: str) -> Path:
        path = tmp_path / "daemon.cfg"
        path.write_text(text, encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def certificates(directory: Path) -> Certificates:
    return Certificates(directory / "certificates")


@pytest.fixture(scope="module")
def told(shared_daemons: Daemons, directory: Path, certificates: Certificates) -> Nsqd:
    """An nsqd with every option at another value by its file; the helper's flags give it addresses."""
    path = directory / "all.cfg"
    path.write_text("".join(flag.toml_line for flag in (*NSQD, *tls_files(certificates))), encoding="utf-8")
    nsqd = shared_daemons.new_nsqd(*quick_flags(), f"--config={path}")
    nsqd.flags.remove("--broadcast-address=127.0.0.1")
    nsqd.start()
    return nsqd


@pytest.fixture(scope="module")
def whole(shared_daemons: Daemons, directory: Path) -> Nsqd:
    """An nsqd whose durations are whole numbers and whose lists are text."""
    path = directory / "whole.cfg"
    lines = [f"{flag.key} = {int(flag.shown) // 1_000_000}\n" for flag in DURATIONS]
    lines += ['nsqlookupd_tcp_addresses = "127.0.0.1:1,127.0.0.1:2"\n', 'auth_http_addresses = "127.0.0.1:3"\n']
    lines += ['e2e_processing_latency_percentiles = "0.5"\n', 'snappy = "false"\n', 'max_rdy_count = "7"\n']
    path.write_text("".join(lines), encoding="utf-8")
    return shared_daemons.nsqd(*quick_flags(), f"--config={path}")


# -- keys and values ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flag", NSQD, ids=lambda flag: flag.key)
def test_key(told: Nsqd, flag: Flag):
    assert config(told, flag.key) == flag.shown


@pytest.mark.parametrize("name", TLS_FILES)
def test_key_of_tls_files(told: Nsqd, certificates: Certificates, name: str):
    (flag,) = (each for each in tls_files(certificates) if each.name == name)
    assert config(told, flag.key) == flag.shown


@pytest.mark.parametrize("flag", DURATIONS, ids=lambda flag: flag.key)
def test_a_whole_number_is_milliseconds(whole: Nsqd, flag: Flag):
    assert config(whole, flag.key) == flag.shown


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("nsqlookupd_tcp_addresses", '["127.0.0.1:1","127.0.0.1:2"]'),
        ("auth_http_addresses", '["127.0.0.1:3"]'),
        ("e2e_processing_latency_percentiles", "[0.5]"),
    ],
)
def test_a_list_may_be_text_with_commas(whole: Nsqd, key: str, value: str):
    assert config(whole, key) == value


@pytest.mark.parametrize(("key", "value"), [("snappy", "false"), ("max_rdy_count", "7")])
def test_switches_and_numbers_may_be_text(whole: Nsqd, key: str, value: str):
    assert config(whole, key) == value


@pytest.mark.parametrize("form", ["-config", "--config", "-config=", "--config="])
def test_every_form_of_the_config_flag(shared_daemons: Daemons, write: WriteFile, form: str):
    path = write('broadcast_address = "by.file"\n')
    flags = [f"{form}{path}"] if form.endswith("=") else [form, str(path)]
    nsqlookupd = shared_daemons.nsqlookupd(*flags)
    with LookupConnection(nsqlookupd.tcp) as connection:
        assert connection.identify()["broadcast_address"] == "by.file"


def test_an_empty_file(shared_daemons: Daemons, write: WriteFile):
    assert shared_daemons.nsqlookupd(f"--config={write('')}").request("GET", "/ping").body == b"OK"


def test_the_official_file_of_nsqd(shared_daemons: Daemons, write: WriteFile):
    path = write(OFFICIAL_NSQD.replace("5150", "515"))
    nsqd = shared_daemons.nsqd(*quick_flags(), f"--config={path}")
    assert config(nsqd, "max_msg_size") == "1024768"
    assert config(nsqd, "max_body_size") == "5123840"
    assert config(nsqd, "id") == "515"
    assert config(nsqd, "e2e_processing_latency_percentiles").replace("[1,", "[1.0,") == "[1.0,0.99,0.95]"
    assert config(nsqd, "max_output_buffer_timeout") == "1000000000"


def test_the_official_file_of_nsqlookupd(shared_daemons: Daemons, write: WriteFile):
    nsqlookupd = shared_daemons.nsqlookupd(f"--config={write(OFFICIAL_NSQLOOKUPD)}")
    with LookupConnection(nsqlookupd.tcp) as connection:
        assert connection.identify()["broadcast_address"] == "lookup.example"


def test_every_key_of_nsqlookupd(shared_daemons: Daemons, write: WriteFile, topic: str):
    path = write(
        'log_level = "debug"\nlog_prefix = "[y] "\nbroadcast_address = "b"\n'
        'inactive_producer_timeout = 300\ntombstone_lifetime = "300ms"\n'
    )
    nsqlookupd = shared_daemons.nsqlookupd(f"--config={path}")
    assert all(line.startswith("[y] ") for line in nsqlookupd.log.splitlines())
    with identified(nsqlookupd) as peer:
        peer.ok(f"REGISTER {topic}\n".encode())
        wait_until(lambda: addresses_of(nsqlookupd, topic) == [], "the producer filtered out", 2.0)


# -- what is not read --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def untidy(shared_daemons: Daemons, directory: Path) -> Nsqd:
    """An nsqd whose file has names that nobody knows, and names that are no more."""
    path = directory / "untidy.cfg"
    path.write_text(
        'mem_queue_sise = 1\nverbose = true\nworker_id = 5\nmax_message_size = 7\nsync_every = 9\n"data-path" = "/no"\n'
        "[section]\nmax_rdy_count = 3\n",
        encoding="utf-8",
    )
    return shared_daemons.nsqd(*quick_flags(), f"--config={path}")


@pytest.mark.parametrize(
    ("key", "value"),
    [("mem_queue_size", "10000"), ("max_msg_size", "1048576"), ("sync_every", "9"), ("max_rdy_count", "2500")],
)
def test_unknown_keys_are_ignored(untidy: Nsqd, key: str, value: str):
    assert config(untidy, key) == value


@pytest.mark.improvement
@pytest.mark.parametrize(
    "note",
    [
        "unknown option mem_queue_sise is ignored; did you mean mem_queue_size?",
        "unknown option max_message_size is ignored; did you mean max_msg_size?",
        "unknown option data-path is ignored; did you mean data_path?",
        "unknown option section is ignored; nsqd --help lists all",
        "verbose has no effect, use --log-level",
        "worker_id has no effect, use --node-id",
    ],
)
def test_what_is_ignored_is_told(untidy: Nsqd, note: str):
    """NSQ ignores it without a word."""
    assert f"untidy.cfg: {note}\n" in untidy.log


# -- precedence --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layered(shared_daemons: Daemons, directory: Path) -> Nsqd:
    """An nsqd that is told the same by flag, environment and file."""
    path = directory / "layered.cfg"
    path.write_text(
        "sync_every = 3\nmem_queue_size = 3\nmax_rdy_count = 3\n"
        'nsqlookupd_tcp_addresses = ["127.0.0.1:3"]\nauth_http_addresses = ["127.0.0.1:3"]\n',
        encoding="utf-8",
    )
    nsqd = shared_daemons.new_nsqd(*quick_flags(), f"--config={path}", "--sync-every=1")
    nsqd.flags += ["--lookupd-tcp-address=127.0.0.1:1"]
    with pytest.MonkeyPatch.context() as environment:
        for name in ("SYNC_EVERY", "MEM_QUEUE_SIZE", "MAX_CHANNEL_CONSUMERS"):
            environment.setenv(f"FLINTMQ_NSQD_{name}", "2")
        environment.setenv("FLINTMQ_NSQD_MSG_TIMEOUT", "2s")
        environment.setenv("FLINTMQ_NSQD_SNAPPY", "false")
        nsqd.start()
    return nsqd


def test_a_flag_goes_before_a_file(layered: Nsqd):
    assert config(layered, "sync_every") == "1"


def test_a_file_goes_before_a_default(layered: Nsqd):
    assert config(layered, "max_rdy_count") == "3"


def test_a_default_is_what_nobody_gave(layered: Nsqd):
    assert config(layered, "max_bytes_per_file") == "104857600"


def test_a_list_of_flags_replaces_that_of_the_file(layered: Nsqd):
    assert config(layered, "nsqlookupd_tcp_addresses") == '["127.0.0.1:1"]'


def test_a_list_of_the_file_replaces_the_default(layered: Nsqd):
    assert config(layered, "auth_http_addresses") == '["127.0.0.1:3"]'


@pytest.mark.improvement
def test_the_environment_goes_before_a_file(layered: Nsqd):
    """NSQ does not read the environment, and so for all cases of variables."""
    assert config(layered, "mem_queue_size") == "2"


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("key", "value"), [("max_channel_consumers", "2"), ("msg_timeout", "2000000000"), ("snappy", "false")]
)
def test_the_environment_goes_before_a_default(layered: Nsqd, key: str, value: str):
    assert config(layered, key) == value


@pytest.mark.improvement
def test_show_config_names_the_origin_of_each_value(write: WriteFile):
    """NSQ has no --show-config."""
    path = write("sync_every = 3\nmem_queue_size = 3\n")
    shown = run_to_end(
        "nsqd", "--show-config", f"--config={path}", environment={"FLINTMQ_NSQD_MEM_QUEUE_SIZE": "2"}
    ).out
    origins = {line.partition(" = ")[0]: line.rpartition("# ")[2] for line in shown.splitlines() if " = " in line}
    assert origins["sync_every"] == str(path)
    assert origins["mem_queue_size"] == "environment"
    assert origins["max_rdy_count"] == "default"


@pytest.mark.improvement
@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_what_show_config_prints_is_a_file_that_loads(program: str, write: WriteFile):
    first = run_to_end(program, "--show-config", "--log-prefix=\"é'\t", "--broadcast-address=b")
    path = write(first.out)
    second = run_to_end(program, "--show-config", f"--config={path}")
    assert (second.code, second.err) == (0, "")
    strip = [[line.rpartition("# ")[0].rstrip() for line in each.out.splitlines()] for each in (first, second)]
    assert strip[0] == strip[1]


@pytest.mark.improvement
@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_the_file_may_be_named_in_the_environment(program: str, write: WriteFile):
    path = write('broadcast_address = "by.file"\n')
    ended = run_to_end(program, "--show-config", environment={f"FLINTMQ_{program.upper()}_CONFIG": str(path)})
    assert 'broadcast_address = "by.file"' in ended.out


# -- refusals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_file_that_is_not_there_ends_it(program: str):
    ended = run_to_end(program, "--config=/no/such/file.cfg")
    assert ended.code == 1
    assert "failed to load config file /no/such/file.cfg - " in ended.err


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize("text", ["a =\n", "tcp_address\n", '"unfinished'], ids=repr)
def test_a_file_that_is_not_toml_ends_it(program: str, write: WriteFile, text: str):
    path = write(text)
    ended = run_to_end(program, f"--config={path}")
    assert ended.code == 1
    assert f"failed to load config file {path} - " in ended.err


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tcp_address = 4150\n", 'tcp_address=4150 is not allowed; it must be text in quotes: "..."'),
        ("msg_timeout = 1.5\n", "msg_timeout=1.5 is not allowed; it must be a duration in quotes"),
        ("sync_every = true\n", "sync_every=True is not allowed; it must be a whole number"),
        ("deflate = 2\n", "deflate=2 is not allowed; it must be true or false"),
        ("nsqlookupd_tcp_addresses = 1\n", "nsqlookupd_tcp_addresses=1 is not allowed; it must be an array"),
        ("max_deflate_level = 10\n", "failed to instantiate nsqd - --max-deflate-level must be [1,9]"),
        ("id = 1\nnode_id = 2\n", "node_id=2 is not allowed; the file sets it as id already"),
    ],
    ids=lambda value: value.strip() if value.endswith("\n") else "",
)
def test_a_bad_value_in_a_file_says_which_and_why(write: WriteFile, text: str, why: str):
    """NSQ dies of a value of the wrong type with a stack trace."""
    path = write(text)
    ended = run_to_end("nsqd", f"--config={path}")
    assert ended.code == 1
    (line,) = ended.err.splitlines()
    assert why in line
    assert str(path) in line


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("variable", "value", "why"),
    [
        ("FLINTMQ_NSQD_SYNC_EVERY", "x", "environment: FLINTMQ_NSQD_SYNC_EVERY='x' is not allowed"),
        ("FLINTMQ_NSQD_MEM_QUEUE", "7", "FLINTMQ_NSQD_MEM_QUEUE; did you mean FLINTMQ_NSQD_MEM_QUEUE_SIZE?"),
    ],
)
def test_a_bad_variable_says_which_and_why(variable: str, value: str, why: str):
    ended = run_to_end("nsqd", environment={variable: value})
    assert ended.code == 1
    assert why in ended.err


def test_an_nsqlookupd_does_not_mind_the_environment_of_nsqd(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLINTMQ_NSQD_SYNC_EVERY", "x")
    assert run_to_end("nsqlookupd", "--version").code == 0


def test_nsqlookupd_s_file_may_be_that_of_nsqd(shared_daemons: Daemons, write: WriteFile):
    path = write('data_path = "/x"\nmax_msg_size = 7\nlog_level = "info"\n')
    nsqlookupd: Nsqlookupd = shared_daemons.nsqlookupd(f"--config={path}")
    assert nsqlookupd.request("GET", "/ping").body == b"OK"
