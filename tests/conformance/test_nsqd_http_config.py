"""GET and PUT /config/{opt} of nsqd: every flag under its name in a configuration file (NSQ's options)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.conformance.conftest import quick_flags
from tests.conformance.http_helpers import JSON_TYPE, NSQ_TYPE, TEXT_TYPE, assert_refused, chunked, exchange
from tests.integration.daemons import Answer, Daemons, Nsqd, Nsqlookupd, wait_until

MS, S = 1_000_000, 1_000_000_000
M, H = 60 * S, 3600 * S


@dataclass(frozen=True)
class Option:
    """One option as /config shows it.

    Attributes:
        default: without a flag; None where it depends on the machine.
        flag: that sets it to something else; empty where the case would change how this nsqd is reached.
        value: as it is shown then.
    """

    default: object
    flag: str = ""
    value: object = None


OPTIONS = {
    "id": Option(None, "--node-id=7", 7),
    "log_level": Option(2, "--log-level=debug", 1),
    "log_prefix": Option("[nsqd] ", "--log-prefix=<n> ", "<n> "),
    "broadcast_tcp_port": Option(None, "--broadcast-tcp-port=5", 5),
    "broadcast_http_port": Option(None, "--broadcast-http-port=6", 6),
    "nsqlookupd_tcp_addresses": Option([], "--lookupd-tcp-address=127.0.0.1:1", ["127.0.0.1:1"]),
    "auth_http_addresses": Option([], "--auth-http-address=127.0.0.1:2", ["127.0.0.1:2"]),
    "auth_http_request_method": Option("get", "--auth-http-request-method=post", "post"),
    "http_client_connect_timeout": Option(2 * S, "--http-client-connect-timeout=1s", S),
    "http_client_request_timeout": Option(5 * S, "--http-client-request-timeout=1500ms", 1500 * MS),
    "topology_region": Option("", "--topology-region=the region", "the region"),
    "topology_zone": Option("", "--topology-zone=the zone", "the zone"),
    "mem_queue_size": Option(10000, "--mem-queue-size=5", 5),
    "max_bytes_per_file": Option(104857600, "--max-bytes-per-file=1000000", 1000000),
    "sync_every": Option(2500, "--sync-every=1", 1),
    "sync_timeout": Option(2 * S, "--sync-timeout=10ms", 10 * MS),
    "queue_scan_worker_pool_max": Option(4, "--queue-scan-worker-pool-max=2", 2),
    "queue_scan_selection_count": Option(20, "--queue-scan-selection-count=3", 3),
    "msg_timeout": Option(M, "--msg-timeout=90s", 90 * S),
    "max_msg_timeout": Option(15 * M, "--max-msg-timeout=1h30m", 90 * M),
    "max_msg_size": Option(1048576, "--max-msg-size=100", 100),
    "max_body_size": Option(5242880, "--max-body-size=1000", 1000),
    "max_req_timeout": Option(H, "--max-req-timeout=2h", 2 * H),
    "max_heartbeat_interval": Option(M, "--max-heartbeat-interval=30s", 30 * S),
    "max_rdy_count": Option(2500, "--max-rdy-count=10", 10),
    "max_output_buffer_size": Option(65536, "--max-output-buffer-size=1024", 1024),
    "max_output_buffer_timeout": Option(30 * S, "--max-output-buffer-timeout=2s", 2 * S),
    "min_output_buffer_timeout": Option(25 * MS, "--min-output-buffer-timeout=1ms", MS),
    "output_buffer_timeout": Option(250 * MS, "--output-buffer-timeout=5ms", 5 * MS),
    "max_channel_consumers": Option(0, "--max-channel-consumers=9", 9),
    "statsd_address": Option("", "--statsd-address=127.0.0.1:1", "127.0.0.1:1"),
    "statsd_interval": Option(M, "--statsd-interval=1h0m1s", H + S),
    "statsd_mem_stats": Option(True, "--statsd-mem-stats=false", False),
    "statsd_udp_packet_size": Option(508, "--statsd-udp-packet-size=1000", 1000),
    "statsd_exclude_ephemeral": Option(False, "--statsd-exclude-ephemeral", True),
    "e2e_processing_latency_percentiles": Option(None, "--e2e-processing-latency-percentile=0.99,0.5", [0.99, 0.5]),
    "e2e_processing_latency_window_time": Option(10 * M, "--e2e-processing-latency-window-time=1m", M),
    "tls_cert": Option(""),
    "tls_key": Option(""),
    "tls_client_auth_policy": Option("", "--tls-client-auth-policy=require-verify", "require-verify"),
    "tls_root_ca_file": Option(""),
    "tls_required": Option(0, "--tls-required=tcp-https", 1),
    "tls_min_version": Option(None, "--tls-min-version=tls1.1", 0x302),
    "deflate": Option(True, "--deflate=false", False),
    "max_deflate_level": Option(6, "--max-deflate-level=9", 9),
    "snappy": Option(True, "--snappy=false", False),
}


def get(nsqd: Nsqd, name: str) -> Answer:
    return nsqd.request("GET", f"/config/{name}")


def put(nsqd: Nsqd, name: str, body: bytes) -> Answer:
    return nsqd.request("PUT", f"/config/{name}", body)


def assert_shown(answer: Answer, value: object) -> None:
    """See a value as /config shows it: text bare, anything else as JSON."""
    assert answer.status == 200
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE
    if isinstance(value, str):
        assert answer.text == value
        assert not value or answer.headers["Content-Type"].split(";")[0] == TEXT_TYPE
    else:
        assert answer.headers["Content-Type"] == JSON_TYPE
        assert answer.body == json.dumps(value, separators=(",", ":")).encode()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(Path(tmp_path_factory.mktemp("certificates")))


@pytest.fixture(scope="module")
def changed(shared_daemons: Daemons, certificates: Certificates) -> Nsqd:
    """An nsqd with every option set to something else than its default."""
    server = certificates.server
    flags = [option.flag for option in OPTIONS.values() if option.flag]
    files = [f"--tls-cert={server.cert}", f"--tls-key={server.key}", f"--tls-root-ca-file={certificates.ca}"]
    return shared_daemons.nsqd(*quick_flags(), *flags, *files, "--https-address=127.0.0.1:0")


# -- GET ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.default is not None])
def test_default(nsqd: Nsqd, name: str):
    assert_shown(get(nsqd, name), OPTIONS[name].default)


@pytest.mark.parametrize("name", [name for name, option in OPTIONS.items() if option.flag])
def test_value(changed: Nsqd, name: str):
    assert_shown(get(changed, name), OPTIONS[name].value)


@pytest.mark.parametrize("name", ["tls_cert", "tls_key", "tls_root_ca_file"])
def test_files_are_shown_by_their_path(changed: Nsqd, certificates: Certificates, name: str):
    server = certificates.server
    assert_shown(get(changed, name), {"tls_cert": server.cert, "tls_key": server.key}.get(name, certificates.ca))


def test_the_default_id_is_a_number_below_1024(nsqd: Nsqd):
    assert 0 <= get(nsqd, "id").json < 1024


@pytest.mark.parametrize("name", ["tcp_address", "http_address", "https_address", "data_path", "broadcast_address"])
def test_addresses_and_paths_are_shown_as_given(nsqd: Nsqd, name: str):
    given = {
        "tcp_address": f"127.0.0.1:{nsqd.tcp[1]}",
        "http_address": f"127.0.0.1:{nsqd.http[1]}",
        "https_address": "0.0.0.0:4152",
        "data_path": str(nsqd.data_path),
        "broadcast_address": "127.0.0.1",
    }
    assert_shown(get(nsqd, name), given[name])


@pytest.mark.parametrize(("name", "port"), [("broadcast_tcp_port", "tcp"), ("broadcast_http_port", "http")])
def test_broadcast_ports_are_those_listened_on_by_default(nsqd: Nsqd, name: str, port: str):
    assert get(nsqd, name).json == {"tcp": nsqd.tcp, "http": nsqd.http}[port][1]


def test_statsd_prefix_is_shown_filled_in(nsqd: Nsqd):
    assert_shown(get(nsqd, "statsd_prefix"), f"nsq.127_0_0_1_{nsqd.http[1]}.")


def test_no_percentiles_are_an_empty_list_or_null(nsqd: Nsqd):
    assert not get(nsqd, "e2e_processing_latency_percentiles").json


@pytest.mark.improvement
def test_the_oldest_tls_is_1_2(nsqd: Nsqd):
    """Upstream's default is TLS 1.0: 769."""
    assert_shown(get(nsqd, "tls_min_version"), 0x303)


@pytest.mark.parametrize(("flag", "number"), [("debug", 1), ("info", 2), ("warn", 3), ("error", 4), ("fatal", 5)])
def test_log_level_is_a_number(nsqd: Nsqd, flag: str, number: int):
    assert_shown(put(nsqd, "log_level", flag.encode()), number)
    assert_shown(get(nsqd, "log_level"), number)
    put(nsqd, "log_level", b"info")


@pytest.mark.improvement
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_connections", 0),
        ("retention_time", 0),
        ("retention_bytes", 0),
        ("allow_config_from_cidr", ["127.0.0.1/8", "::1/128"]),
    ],
)
def test_options_of_flintmq(nsqd: Nsqd, name: str, value: object):
    """Upstream has no such option: 400 INVALID_OPTION."""
    assert_shown(get(nsqd, name), value)


@pytest.mark.parametrize(
    "name",
    [
        "nothing",
        "LOG_LEVEL",
        "log-level",
        "node_id",
        "lookupd_tcp_address",
        "auth_http_address",
        "e2e_processing_latency_percentile",
        "verbose",
        "worker_id",
        "version",
        "config",
    ],
)
def test_an_unknown_name_is_400(nsqd: Nsqd, name: str):
    assert_refused(get(nsqd, name), 400, "INVALID_OPTION")


def test_a_query_changes_nothing(nsqd: Nsqd):
    assert nsqd.request("GET", "/config/max_msg_size?x=%zz;").json == 1048576


# -- PUT ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["INFO", "Info"])
def test_the_case_of_a_level_does_not_matter(nsqd: Nsqd, word: str):
    assert_shown(put(nsqd, "log_level", word.encode()), 2)


@pytest.mark.parametrize(
    "body", [b"loud", b'"info"', b"2", b"info\n", b" info", b"warning", b"\xff", b"info,debug", b"\0"]
)
def test_log_level_refuses(nsqd: Nsqd, body: bytes):
    assert_refused(put(nsqd, "log_level", body), 400, "INVALID_VALUE")
    assert get(nsqd, "log_level").json == 2


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b'["127.0.0.1:1"]', ["127.0.0.1:1"]),
        (b' [ "127.0.0.1:1" , "127.0.0.1:2" ] ', ["127.0.0.1:1", "127.0.0.1:2"]),
        (b'["\\u0061:1"]', ["a:1"]),
        (b"[]", []),
    ],
)
def test_nsqlookupds_are_replaced(nsqd: Nsqd, body: bytes, shown: list[str]):
    assert_shown(put(nsqd, "nsqlookupd_tcp_addresses", body), shown)
    assert_shown(get(nsqd, "nsqlookupd_tcp_addresses"), shown)
    put(nsqd, "nsqlookupd_tcp_addresses", b"[]")


@pytest.mark.parametrize(
    "body", [b"127.0.0.1:1", b'"127.0.0.1:1"', b"[1]", b"{}", b"[", b"[] []", b'["127.0.0.1:1",]', b"1"]
)
def test_nsqlookupds_refuse(nsqd: Nsqd, body: bytes):
    assert_refused(put(nsqd, "nsqlookupd_tcp_addresses", body), 400, "INVALID_VALUE")
    assert get(nsqd, "nsqlookupd_tcp_addresses").json == []


@pytest.mark.improvement
@pytest.mark.parametrize("body", [b'["nowhere"]', b'["127.0.0.1:99999"]', b'[""]'])
def test_nsqlookupds_refuse_what_is_no_address(nsqd: Nsqd, body: bytes):
    """Upstream takes any text and fails to connect to it for ever."""
    assert_refused(put(nsqd, "nsqlookupd_tcp_addresses", body), 400, "INVALID_VALUE")


@pytest.mark.parametrize("name", ["max_msg_size", "deflate", "broadcast_address", "statsd_address", "msg_timeout"])
def test_other_options_cannot_be_changed(nsqd: Nsqd, name: str):
    before = get(nsqd, name).body
    assert_refused(put(nsqd, name, b"5"), 400, "INVALID_OPTION")
    assert get(nsqd, name).body == before


@pytest.mark.parametrize("name", ["nothing", "verbose"])
def test_an_unknown_option_cannot_be_changed(nsqd: Nsqd, name: str):
    assert_refused(put(nsqd, name, b"5"), 400, "INVALID_OPTION")


@pytest.mark.parametrize("name", ["log_level", "nsqlookupd_tcp_addresses", "max_msg_size", "nothing"])
def test_an_empty_body_is_413_first(nsqd: Nsqd, name: str):
    assert_refused(put(nsqd, name, b""), 413, "INVALID_VALUE")


@pytest.mark.parametrize("name", ["log_level", "nsqlookupd_tcp_addresses", "max_msg_size", "nothing"])
def test_a_body_above_max_msg_size_is_413_first(changed: Nsqd, name: str):
    assert_refused(put(changed, name, b"x" * 101), 413, "INVALID_VALUE")


def test_a_body_of_max_msg_size_is_read(changed: Nsqd):
    assert_refused(put(changed, "log_level", b"x" * 100), 400, "INVALID_VALUE")


def test_a_chunked_body_is_read(nsqd: Nsqd):
    request = chunked("/config/log_level", b"in", b"fo").replace(b"POST", b"PUT", 1)
    assert_shown(exchange(nsqd, request), 2)


def test_a_chunked_body_above_max_msg_size_is_413(changed: Nsqd):
    request = chunked("/config/log_level", b"x" * 60, b"x" * 41).replace(b"POST", b"PUT", 1)
    assert_refused(exchange(changed, request), 413, "INVALID_VALUE")


@pytest.mark.improvement
def test_only_some_addresses_may_change_options(daemons: Daemons):
    """Upstream lets everybody change them."""
    nsqd = daemons.nsqd(*quick_flags(), "--allow-config-from-cidr=10.0.0.0/8")
    assert_refused(put(nsqd, "log_level", b"debug"), 403, "FORBIDDEN")
    assert get(nsqd, "log_level").json == 2


@pytest.fixture(scope="module")
def own(shared_daemons: Daemons) -> Nsqd:
    """An nsqd whose options are changed."""
    return shared_daemons.nsqd(*quick_flags())


def test_log_level_takes_effect(own: Nsqd):
    put(own, "log_level", b"error")
    before = own.log.count("GET /info")
    own.get("/info")
    put(own, "log_level", b"info")
    own.get("/stats?format=json&topic=seen")
    wait_until(lambda: "/stats?format=json&topic=seen" in own.log)
    assert own.log.count("GET /info") == before


def test_nsqlookupds_take_effect(own: Nsqd, nsqlookupd: Nsqlookupd):
    own.post("/topic/create?topic=t")
    put(own, "nsqlookupd_tcp_addresses", b'["127.0.0.1:%d"]' % nsqlookupd.tcp[1])
    wait_until(lambda: nsqlookupd.producers("t") == [own.tcp[1]])
    put(own, "nsqlookupd_tcp_addresses", b"[]")
    wait_until(lambda: nsqlookupd.producers("t") == [])


def test_what_was_put_is_forgotten_at_a_restart(own: Nsqd):
    put(own, "log_level", b"error")
    own.restart()
    assert get(own, "log_level").json == 2
