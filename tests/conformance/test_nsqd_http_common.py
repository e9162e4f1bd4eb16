"""Rules that hold for all of nsqd's HTTP API: methods, paths, types, parameters, HTTP itself (NSQ's HTTP API)."""

from __future__ import annotations

import pytest
from tests.conformance.http_helpers import (
    DEBUG_ROUTES,
    GET_ROUTES,
    JSON_TYPE,
    NSQ_TYPE,
    POST_ROUTES,
    TEXT_TYPE,
    RawHttp,
    assert_empty,
    assert_fields,
    assert_refused,
    assert_text,
    bodies_of,
    chunked,
    exchange,
    topic_names,
)
from tests.integration.daemons import Nsqd

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
ALLOWED: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((*GET_ROUTES, *DEBUG_ROUTES), ("GET",)),
    **dict.fromkeys(POST_ROUTES, ("POST",)),
    "/config/log_level": ("GET", "PUT"),
    "/config/nothing": ("GET", "PUT"),
    "/debug/pprof/profile": ("GET",),
    "/debug/pprof/block": ("GET",),
    "/debug/pprof/threadcreate": ("GET",),
    "/debug/pprof/symbol": ("GET", "POST"),
    "/debug/setblockrate": ("PUT",),
    "/debug/freememory": ("POST",),
}
WITH_PARAMETERS = [("GET", "/stats"), *(("POST", path) for path in POST_ROUTES)]
PING = b"GET /ping HTTP/1.1\r\nHost: localhost\r\n\r\n"


def allow(methods: tuple[str, ...]) -> str:
    """The header of a path with these methods."""
    return ", ".join(sorted((*methods, "OPTIONS")))


# -- methods -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path"),
    [
        pytest.param(method, path, id=f"{method}-{path}")
        for path, allowed in ALLOWED.items()
        for method in METHODS
        if method not in allowed
    ],
)
def test_wrong_method_is_405_with_allow(nsqd: Nsqd, method: str, path: str):
    answer = nsqd.request(method, path)
    assert answer.headers["Allow"] == allow(ALLOWED[path])
    if method == "HEAD":
        assert (answer.status, answer.body) == (405, b"")
        assert answer.headers["Content-Type"] == JSON_TYPE
    else:
        assert_refused(answer, 405, "METHOD_NOT_ALLOWED")


@pytest.mark.parametrize("path", ALLOWED)
def test_options_is_200_empty_with_allow(nsqd: Nsqd, path: str):
    answer = nsqd.request("OPTIONS", path)
    assert (answer.status, answer.body, answer.headers["Allow"]) == (200, b"", allow(ALLOWED[path]))


def test_options_of_an_unknown_path_is_404(nsqd: Nsqd):
    assert_refused(nsqd.request("OPTIONS", "/nothing"), 404, "NOT_FOUND")


def test_options_of_the_server_is_200_empty(nsqd: Nsqd):
    answer = exchange(nsqd, b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (answer.status, answer.body) == (200, b"")


def test_a_wrong_method_leaves_the_body_unread_and_the_connection_usable(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        assert (
            raw.send(b"PUT /pub?topic=t HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\nabc").answer().status
            == 405
        )
        assert raw.send(PING).answer().body == b"OK"


# -- paths -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/nothing",
        "/pub/x",
        "/topic",
        "/channel",
        "/topic/nothing",
        "/channel/nothing",
        "/config/a/b",
        "/lookup",
        "/topics",
        "/nodes",
        "/api/topics",
        "/debug/pprof/nothing",
        "/ping%00",
    ],
)
def test_unknown_path_is_404(nsqd: Nsqd, path: str):
    assert_refused(nsqd.request("GET", path), 404, "NOT_FOUND")


@pytest.mark.parametrize(
    "path",
    [
        "/create_topic",
        "/delete_topic",
        "/empty_topic",
        "/pause_topic",
        "/unpause_topic",
        "/create_channel",
        "/delete_channel",
        "/empty_channel",
        "/pause_channel",
        "/unpause_channel",
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_names_before_1_0_are_404(nsqd: Nsqd, method: str, path: str):
    assert_refused(nsqd.request(method, f"{path}?topic=t&channel=c"), 404, "NOT_FOUND")


@pytest.mark.parametrize(("method", "path"), [("GET", p) for p in GET_ROUTES] + [("POST", p) for p in POST_ROUTES])
def test_trailing_slash_redirects(nsqd: Nsqd, method: str, path: str):
    answer = nsqd.request(method, f"{path}/?topic=t&x=%20")
    assert answer.status == (301 if method == "GET" else 308)
    assert answer.headers["Location"] == f"{path}?topic=t&x=%20"


@pytest.mark.parametrize(("method", "path"), [("GET", p) for p in GET_ROUTES] + [("POST", p) for p in POST_ROUTES])
def test_wrong_case_redirects(nsqd: Nsqd, method: str, path: str):
    wrong = path.replace("/config", "/CONFIG") if path.startswith("/config") else path.upper()
    answer = nsqd.request(method, f"{wrong}?topic=t")
    assert answer.status == (301 if method == "GET" else 308)
    assert answer.headers["Location"] == f"{path}?topic=t"


@pytest.mark.parametrize(
    ("method", "path", "status", "location"),
    [
        ("GET", "//ping", 301, "/ping"),
        ("GET", "/./ping", 301, "/ping"),
        ("GET", "/topic/../ping", 301, "/ping"),
        ("GET", "/PING/", 301, "/ping"),
        ("POST", "/topic//create", 308, "/topic/create"),
        ("PUT", "/config/log_level/", 308, "/config/log_level"),
        ("GET", "/debug/pprof", 301, "/debug/pprof/"),
        ("GET", "/debug/pprof/heap/", 301, "/debug/pprof/heap"),
    ],
)
def test_unclean_path_redirects(nsqd: Nsqd, method: str, path: str, status: int, location: str):
    answer = exchange(nsqd, f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
    assert (answer.status, answer.headers["Location"]) == (status, location)


def test_the_case_of_a_parameter_in_the_path_is_kept(nsqd: Nsqd):
    answer = nsqd.request("GET", "/Config/Log_Level")
    assert (answer.status, answer.headers["Location"]) == (301, "/config/Log_Level")


def test_a_redirect_does_nothing_yet(nsqd: Nsqd, topic: str):
    assert nsqd.request("POST", f"/pub/?topic={topic}", b"x").status == 308
    assert topic not in topic_names(nsqd)


@pytest.mark.parametrize("method", ["HEAD", "DELETE"])
def test_no_redirect_to_a_path_without_the_method(nsqd: Nsqd, method: str):
    assert nsqd.request(method, "/ping/").status == 404


def test_a_plain_escape_in_the_path_is_decoded(nsqd: Nsqd):
    assert nsqd.request("GET", "/%70ing").body == b"OK"


def test_a_bad_escape_in_the_path_is_400(nsqd: Nsqd):
    assert exchange(nsqd, b"GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n").status == 400


# -- types -------------------------------------------------------------------------------------------------------------


def test_json_answers_have_their_type(nsqd: Nsqd):
    answer = nsqd.request("GET", "/info")
    assert answer.headers["Content-Type"] == JSON_TYPE
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


def test_string_answers_are_bare_text(nsqd: Nsqd, topic: str):
    assert_text(nsqd.request("POST", f"/pub?topic={topic}", b"x"), "OK")


def test_answers_without_data_are_empty_and_untyped(nsqd: Nsqd, topic: str):
    assert_empty(nsqd.request("POST", f"/topic/create?topic={topic}"))


def test_there_is_no_envelope(nsqd: Nsqd):
    assert not {"status_code", "status_txt", "data"} & set(nsqd.get("/info"))


@pytest.mark.parametrize("accept", ["application/vnd.nsq; version=1.0", "*/*", "application/json", "text/html"])
def test_accept_changes_nothing(nsqd: Nsqd, accept: str):
    assert nsqd.request("GET", "/info", headers={"Accept": accept}).json == nsqd.get("/info")


def test_accept_encoding_changes_nothing(nsqd: Nsqd):
    answer = nsqd.request("GET", "/info", headers={"Accept-Encoding": "gzip, deflate"})
    assert "Content-Encoding" not in answer.headers and answer.json["version"]


def test_answers_have_date_and_length(nsqd: Nsqd):
    answer = nsqd.request("GET", "/ping")
    assert answer.headers["Date"].endswith(" GMT") and answer.headers["Content-Length"] == "2"


# -- /ping and /info ---------------------------------------------------------------------------------------------------

INFO_TYPES = {
    "version": str,
    "broadcast_address": str,
    "hostname": str,
    "http_port": int,
    "tcp_port": int,
    "start_time": int,
    "max_heartbeat_interval": int,
    "max_output_buffer_size": int,
    "max_output_buffer_timeout": int,
    "max_deflate_level": int,
    "topology_zone": str,
    "topology_region": str,
}


SINCE_1_3 = ("topology_zone", "topology_region")


def test_ping_is_ok_as_plain_text(nsqd: Nsqd):
    answer = nsqd.request("GET", "/ping")
    assert (answer.status, answer.body) == (200, b"OK")
    assert answer.headers["Content-Type"].split(";")[0] == TEXT_TYPE
    assert "X-NSQ-Content-Type" not in answer.headers


def test_ping_does_not_look_at_its_query(nsqd: Nsqd):
    assert nsqd.request("GET", "/ping?topic=%zz;").body == b"OK"


def test_info_does_not_look_at_its_query(nsqd: Nsqd):
    assert nsqd.request("GET", "/info?topic=%zz;").status == 200


def test_info_has_its_fields_in_order(nsqd: Nsqd):
    assert_fields(nsqd.get("/info"), INFO_TYPES, optional=SINCE_1_3)


@pytest.mark.parametrize("name", INFO_TYPES)
def test_info_field_has_its_type(nsqd: Nsqd, name: str):
    assert type(nsqd.get("/info").get(name, INFO_TYPES[name]())) is INFO_TYPES[name]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("broadcast_address", "127.0.0.1"),
        ("max_heartbeat_interval", 60_000_000_000),
        ("max_output_buffer_size", 65536),
        ("max_output_buffer_timeout", 30_000_000_000),
        ("max_deflate_level", 6),
    ],
)
def test_info_shows_defaults_durations_in_ns(nsqd: Nsqd, name: str, value: object):
    assert nsqd.get("/info")[name] == value


def test_info_shows_the_ports_listened_on(nsqd: Nsqd):
    info = nsqd.get("/info")
    assert (info["tcp_port"], info["http_port"]) == (nsqd.tcp[1], nsqd.http[1])


def test_info_shows_the_ports_listened_on_not_those_broadcast(shared_daemons, nsqd: Nsqd):
    other = shared_daemons.nsqd("--broadcast-tcp-port=5", "--broadcast-http-port=6", "--broadcast-address=elsewhere")
    info = other.get("/info")
    assert (info["tcp_port"], info["http_port"]) == (other.tcp[1], other.http[1])
    assert info["broadcast_address"] == "elsewhere"
    other.stop()


# -- parameters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "path"), WITH_PARAMETERS)
def test_a_semicolon_in_the_query_is_400(nsqd: Nsqd, method: str, path: str):
    assert_refused(nsqd.request(method, f"{path}?topic=t;channel=c", b"x"), 400, "INVALID_REQUEST")


@pytest.mark.parametrize("escape", ["%zz", "%1"])
@pytest.mark.parametrize(("method", "path"), WITH_PARAMETERS)
def test_a_bad_escape_in_the_query_is_400(nsqd: Nsqd, method: str, path: str, escape: str):
    assert_refused(nsqd.request(method, f"{path}?topic=t&x={escape}", b"x"), 400, "INVALID_REQUEST")


def test_a_bad_escape_in_a_name_is_400(nsqd: Nsqd):
    assert_refused(nsqd.request("GET", "/stats?%zz=1"), 400, "INVALID_REQUEST")


@pytest.mark.parametrize(("method", "path"), WITH_PARAMETERS[1:])
def test_parameters_do_not_come_from_a_form(nsqd: Nsqd, method: str, path: str):
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = nsqd.request(method, path, b"topic=t&channel=c", form)
    assert_refused(answer, 400, "MISSING_ARG_TOPIC")


def created(nsqd: Nsqd, query: str) -> None:
    assert_empty(nsqd.request("POST", f"/topic/create?{query}"))


def test_the_first_value_of_a_parameter_wins(nsqd: Nsqd, topic: str):
    created(nsqd, f"topic={topic}&topic={topic}-2")
    assert topic in topic_names(nsqd) and f"{topic}-2" not in topic_names(nsqd)


def test_an_invalid_second_value_is_ignored(nsqd: Nsqd, topic: str):
    created(nsqd, f"topic={topic}&topic=no!")


def test_an_invalid_first_value_is_not_made_up_for(nsqd: Nsqd, topic: str):
    assert_refused(nsqd.request("POST", f"/topic/create?topic=&topic={topic}"), 400, "INVALID_TOPIC")


def test_escapes_in_values_are_decoded(nsqd: Nsqd, topic: str):
    created(nsqd, "topic=" + "".join(f"%{byte:02X}" for byte in topic.encode()))
    assert topic in topic_names(nsqd)


def test_escapes_in_names_are_decoded(nsqd: Nsqd, topic: str):
    created(nsqd, f"t%6Fpic={topic}")
    assert topic in topic_names(nsqd)


def test_a_plus_is_a_space(nsqd: Nsqd, topic: str):
    assert_refused(nsqd.request("POST", f"/topic/create?topic={topic}+x"), 400, "INVALID_TOPIC")


def test_an_escaped_semicolon_is_an_ordinary_character(nsqd: Nsqd):
    assert_refused(nsqd.request("POST", "/topic/create?topic=a%3Bb"), 400, "INVALID_TOPIC")


def test_an_escaped_ampersand_is_an_ordinary_character(nsqd: Nsqd):
    assert_refused(nsqd.request("POST", "/topic/create?topic=a%26b"), 400, "INVALID_TOPIC")


def test_names_of_parameters_have_a_case(nsqd: Nsqd, topic: str):
    assert_refused(nsqd.request("POST", f"/topic/create?Topic={topic}"), 400, "MISSING_ARG_TOPIC")


def test_unknown_parameters_are_ignored(nsqd: Nsqd, topic: str):
    created(nsqd, f"x=1&topic={topic}&y")


def test_empty_fields_are_ignored(nsqd: Nsqd, topic: str):
    created(nsqd, f"&&topic={topic}&&")


def test_a_parameter_without_a_value_is_empty_not_missing(nsqd: Nsqd):
    assert_refused(nsqd.request("POST", "/topic/create?topic"), 400, "INVALID_TOPIC")


def test_a_second_equals_sign_belongs_to_the_value(nsqd: Nsqd):
    assert_refused(nsqd.request("POST", "/topic/create?topic=a=b"), 400, "INVALID_TOPIC")


def test_an_escaped_hash_is_part_of_a_name(nsqd: Nsqd, topic: str):
    created(nsqd, f"topic={topic}%23ephemeral")
    assert f"{topic}#ephemeral" in topic_names(nsqd)


# -- HTTP itself -------------------------------------------------------------------------------------------------------


def test_a_connection_is_kept_for_further_requests(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        assert [raw.send(PING).answer().body for _ in range(3)] == [b"OK"] * 3


def test_connection_close_closes_after_the_answer(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        answer = raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").answer()
        assert (answer.body, answer.headers["Connection"]) == (b"OK", "close")
        raw.wait_closed()


def test_http_1_0_closes_after_the_answer(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        assert raw.send(b"GET /ping HTTP/1.0\r\n\r\n").answer().body == b"OK"
        raw.wait_closed()


def test_http_1_0_keeps_the_connection_when_asked(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        for _ in range(2):
            answer = raw.send(b"GET /ping HTTP/1.0\r\nConnection: keep-alive\r\n\r\n").answer()
            assert (answer.body, answer.headers["Connection"].lower()) == (b"OK", "keep-alive")


def test_http_1_0_needs_no_host_but_may_publish(nsqd: Nsqd, topic: str):
    answer = exchange(nsqd, f"POST /pub?topic={topic} HTTP/1.0\r\nContent-Length: 2\r\n\r\nhi".encode())
    assert answer.body == b"OK" and bodies_of(nsqd, topic, 1) == [b"hi"]


def test_http_1_1_without_host_is_400(nsqd: Nsqd):
    assert exchange(nsqd, b"GET /ping HTTP/1.1\r\n\r\n").status == 400


@pytest.mark.parametrize("status", [400, 404, 405])
def test_an_error_keeps_the_connection(nsqd: Nsqd, status: int):
    path = {400: "/topic/create", 404: "/nothing", 405: "/ping"}[status]
    with RawHttp(nsqd.http) as raw:
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode()
        assert raw.send(head).answer().status == status
        assert raw.send(PING).answer().body == b"OK"


def test_pipelined_requests_are_answered_in_order(nsqd: Nsqd, topic: str):
    pub = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\n\r\n".encode()
    with RawHttp(nsqd.http) as raw:
        raw.send(
            pub + b"1" + PING + pub + b"2" + b"GET /nothing HTTP/1.1\r\nHost: localhost\r\n\r\n" + pub + b"3" + PING
        )
        statuses = [raw.answer().status for _ in range(6)]
    assert statuses == [200, 200, 200, 404, 200, 200]
    assert bodies_of(nsqd, topic, 3) == [b"1", b"2", b"3"]


def test_a_hundred_pipelined_publishes(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n".encode()
    expected = [b"%03d" % number for number in range(100)]
    with RawHttp(nsqd.http) as raw:
        raw.send(b"".join(head + body for body in expected))
        assert {raw.answer().body for _ in expected} == {b"OK"}
    assert bodies_of(nsqd, topic, 100) == expected


def test_a_request_may_come_byte_by_byte(nsqd: Nsqd, topic: str):
    request = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody".encode()
    with RawHttp(nsqd.http) as raw:
        for number in range(len(request)):
            raw.send(request[number : number + 1])
        assert raw.answer().body == b"OK"
    assert bodies_of(nsqd, topic, 1) == [b"body"]


def test_names_of_headers_have_no_case(nsqd: Nsqd, topic: str):
    request = f"POST /pub?topic={topic} HTTP/1.1\r\nhOST: localhost\r\ncontent-LENGTH: 2\r\n\r\nhi"
    assert exchange(nsqd, request.encode()).body == b"OK"


@pytest.mark.parametrize("target", ["http://x/ping", "http://127.0.0.1:1/ping?a=b", "HTTP://x/ping"])
def test_an_absolute_target_is_its_path(nsqd: Nsqd, target: str):
    assert exchange(nsqd, f"GET {target} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()).body == b"OK"


def test_an_absolute_target_has_a_query(nsqd: Nsqd, topic: str):
    head = f"POST http://x/topic/create?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    assert_empty(exchange(nsqd, head.encode()))
    assert topic in topic_names(nsqd)


def test_a_chunked_body_is_put_together(nsqd: Nsqd, topic: str):
    assert exchange(nsqd, chunked(f"/pub?topic={topic}", b"one ", b"two ", b"three")).body == b"OK"
    assert bodies_of(nsqd, topic, 1) == [b"one two three"]


def test_a_chunked_body_may_have_extensions_and_trailers(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    with RawHttp(nsqd.http) as raw:
        raw.send(head + b"3;name=value\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n" + PING)
        assert [raw.answer().body, raw.answer().body] == [b"OK", b"OK"]
    assert bodies_of(nsqd, topic, 1) == [b"abc"]


def test_an_empty_chunked_body_is_an_empty_body(nsqd: Nsqd, topic: str):
    assert_refused(exchange(nsqd, chunked(f"/pub?topic={topic}")), 400, "MSG_EMPTY")


def test_expect_100_continue_is_invited(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nExpect: 100-continue\r\n\r\n"
    with RawHttp(nsqd.http) as raw:
        assert raw.send(head.encode()).answer().status == 100
        assert raw.send(b"later").answer().body == b"OK"
    assert bodies_of(nsqd, topic, 1) == [b"later"]


def test_expect_100_continue_of_what_is_too_big_is_refused_at_once(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 1048577"
    assert_refused(exchange(nsqd, head.encode() + b"\r\n\r\n"), 413, "MSG_TOO_BIG")


def test_expect_100_continue_is_not_awaited_by_all_clients(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\nhi"
    with RawHttp(nsqd.http) as raw:
        answer = raw.send(head.encode()).answer()
        answer = raw.answer() if answer.status == 100 else answer
        assert answer.body == b"OK"


def test_another_expectation_is_417(nsqd: Nsqd):
    assert exchange(nsqd, b"GET /ping HTTP/1.1\r\nHost: localhost\r\nExpect: miracles\r\n\r\n").status == 417


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(b"nonsense\r\n\r\n", id="no request line"),
        pytest.param(b"GET /ping\r\n\r\n", id="no version"),
        pytest.param(b"G\x01T /ping HTTP/1.1\r\nHost: localhost\r\n\r\n", id="bad method"),
        pytest.param(b"GET /ping HTTP/1.1\r\nHost x\r\n\r\n", id="header without colon"),
        pytest.param(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nBad Name: x\r\n\r\n", id="space in header name"),
        pytest.param(b"POST /pub HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n", id="negative length"),
        pytest.param(b"POST /pub HTTP/1.1\r\nHost: localhost\r\nContent-Length: ten\r\n\r\n", id="length not a number"),
        pytest.param(
            b"POST /pub HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
            id="two lengths",
        ),
    ],
)
def test_what_is_not_http_is_400(nsqd: Nsqd, request_bytes: bytes):
    with RawHttp(nsqd.http) as raw:
        answer = raw.send(request_bytes).answer()
        assert answer.status == 400
        assert answer.headers["Connection"] == "close"


def test_a_bad_chunk_size_publishes_nothing(nsqd: Nsqd, topic: str):
    head = f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    assert exchange(nsqd, head + b"zz\r\nabc\r\n0\r\n\r\n").status in (400, 500)
    assert topic not in topic_names(nsqd)


def test_half_a_body_publishes_nothing(nsqd: Nsqd, topic: str):
    with RawHttp(nsqd.http) as raw:
        raw.send(f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nhalf".encode())
        raw.end()
    nsqd.get("/info")
    assert topic not in topic_names(nsqd)


def test_requests_before_the_end_of_input_are_answered(nsqd: Nsqd, topic: str):
    with RawHttp(nsqd.http) as raw:
        raw.send(f"POST /pub?topic={topic} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi".encode()).end()
        assert raw.answer().body == b"OK"


def test_a_body_where_none_is_expected_is_ignored(nsqd: Nsqd):
    with RawHttp(nsqd.http) as raw:
        assert (
            raw.send(b"GET /ping HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\nbody").answer().body == b"OK"
        )
        assert raw.send(PING).answer().body == b"OK"
