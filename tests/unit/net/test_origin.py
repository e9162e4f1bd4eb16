"""The rule for requests of browsers: every kind of page and every kind of arrival, each with what becomes of it."""

from __future__ import annotations

import pytest

from flintmq.errors import OptionError
from flintmq.net.origin import Origins, check_origins, is_loopback_address, local_names, parse_origin
from flintmq.nsqd.options import NsqdOptions
from flintmq.nsqlookupd.options import NsqlookupdOptions

EVIL = "https://evil.example"
NAVIGATE = {"sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}


def judge(method="POST", path="/topic/delete", at_loopback=False, origins=None, **headers):
    raw = {name.replace("_", "-").encode(): value.encode("latin-1") for name, value in headers.items()}
    raw.setdefault(b"host", b"10.0.0.1:4151")
    return (origins or Origins()).judge(method.encode(), path.encode(), raw, at_loopback)


def refusal(**arguments):
    return judge(**arguments).refusal


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "HEAD"])
def test_who_tells_nothing_notices_nothing(method):
    assert not refusal(method=method) and not judge(method=method).headers


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": EVIL},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://10.0.0.1"},  # another port
        {"origin": "http://10.0.0.1:4151", "host": "10.0.0.2:4151"},
        {"origin": "http://10.0.0.1:4151.evil.example"},
        {"origin": EVIL, "sec_fetch_site": "cross-site"},
        {"origin": "http://localhost:3000", "sec_fetch_site": "same-site", "host": "localhost:4151"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": ""},
        {"sec_fetch_site": "a word of the next standard"},
        {"sec_fetch_site": "cross-site", **NAVIGATE},  # a form: POST
    ],
)
def test_a_page_from_elsewhere_changes_nothing(headers):
    for method in ("POST", "PUT", "DELETE"):
        assert refusal(method=method, **{k.replace("-", "_"): v for k, v in headers.items()})


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://10.0.0.1:4151"},
        {"origin": "http://NSQD.example:4151", "host": "nsqd.example:4151"},
        {"origin": "http://nsqd.example", "host": "nsqd.example:80"},
        {"origin": "https://nsqd.example:443", "host": "nsqd.example"},
        {"origin": "http://[fd00::1]:4151", "host": "[fd00::1]:4151"},
        {"sec_fetch_site": "same-origin"},
        {"sec_fetch_site": "none"},
        {"sec_fetch_site": "same-origin", "origin": "https://nsq.example", "host": "127.0.0.1:4151"},  # behind a proxy
    ],
)
def test_its_own_pages_and_the_address_bar_go_through(headers):
    assert not refusal(**headers)


def test_a_link_can_be_followed_and_nothing_else_of_a_page():
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate", "sec_fetch_dest": "document"}
    assert not refusal(method="GET", path="/stats", **link)
    for change in (
        {"method": "POST"},
        {"sec_fetch_dest": "iframe"},
        {"sec_fetch_dest": "image", "sec_fetch_mode": "no-cors"},
        {"sec_fetch_dest": "empty", "sec_fetch_mode": "cors"},
        {"path": "/debug/pprof/profile"},
        {"path": "/%64ebug/profile"},
    ):
        assert "has to ask by fetch" in refusal(**{"method": "GET", "path": "/stats", **link, **change}), change
    assert refusal(method="GET", path="/stats", origin=EVIL, **link | {"sec_fetch_mode": "cors"})


@pytest.mark.parametrize(
    "host",
    (
        *("127.0.0.1:4151", "127.9.9.9", "localhost", "LocalHost.:4151", "a.localhost:1", "[::1]:4151", "[::1]", "::1"),
        *("10.1.2.3:4151", "[fe80::1%eth0]:4151", "here:4151", "HERE.:4151", "broadcast.example", "wiki.example:9", ""),
    ),
)
def test_names_that_no_page_can_have(host):
    origins = Origins(["https://wiki.example"], ["here", "Broadcast.example", ""])
    assert not refusal(method="GET", at_loopback=True, host=host, origins=origins)


@pytest.mark.parametrize(
    "host",
    (
        *("evil.example", "evil.example:4151", "localhost.evil.example", "127.0.0.1.evil.example:4151", "notlocalhost"),
        *("[evil.example]:4151", "user@localhost", "here.evil.example", "xn--n3h.example", "evil", " "),
    ),
)
def test_a_name_that_was_made_to_mean_this_host(host):
    """DNS rebinding: the page and what it asks have one origin, so only the name tells."""
    arguments = {"method": "GET", "path": "/config/log_level", "host": host, "origins": Origins((), ["here"])}
    assert "is no name of this host" in refusal(at_loopback=True, **arguments)
    assert "is no name of this host" in refusal(at_loopback=True, sec_fetch_site="same-origin", **arguments)
    assert not refusal(at_loopback=False, **arguments)


def test_what_the_flag_allows():
    origins = Origins(["https://Wiki.example:443/", "http://[fd00::2]:8080", "chrome-extension://abcdef"])
    for origin in ("https://wiki.example", "http://[fd00::2]:8080", "chrome-extension://abcdef"):
        verdict = judge(origin=origin, sec_fetch_site="cross-site", origins=origins)
        assert not verdict.refusal and not verdict.is_preflight
        assert verdict.headers == f"Access-Control-Allow-Origin: {origin}\r\nVary: Origin\r\n".encode()
    for origin in ("http://wiki.example", "https://wiki.example:444", "https://a.wiki.example", "null", EVIL):
        assert refusal(origin=origin, sec_fetch_site="cross-site", origins=origins)
    for host, is_known in (("wiki.example:4151", True), ("abcdef", True), ("a.wiki.example", False)):
        assert bool(refusal(method="GET", host=host, at_loopback=True, origins=origins)) is not is_known


def test_a_preflight():
    origins = Origins(["https://wiki.example"])
    asked = {"method": "OPTIONS", "origin": "https://wiki.example", "origins": origins}
    assert not judge(**asked).is_preflight
    lines = judge(access_control_request_method="POST", **asked).headers.decode()
    assert "Allow-Methods: GET, HEAD, POST, PUT, DELETE\r\n" in lines and "Max-Age: 600\r\n" in lines
    assert "Allow-Headers" not in lines and "Network" not in lines
    more = {"access_control_request_headers": "authorization", "access_control_request_private_network": "true"}
    verdict = judge(access_control_request_method="POST", **more, **asked)
    assert verdict.is_preflight and b"Access-Control-Allow-Private-Network: true\r\n" in verdict.headers
    assert b"Access-Control-Allow-Headers: authorization\r\n" in verdict.headers
    for names in ("a\rb: c", "x" * 2000, "\u00fc"):
        more = {"access_control_request_headers": names}
        assert b"Allow-Headers" not in judge(access_control_request_method="POST", **more, **asked).headers
    assert refusal(access_control_request_method="POST", **asked | {"origin": EVIL})


def test_what_is_said_of_a_stranger_is_short_and_printable():
    text = refusal(origin="https://\x00\x1b[31m\xff" + "x" * 5000)
    assert text.startswith("FORBIDDEN_ORIGIN: Origin 'https://??[31m\\\\xff") and len(text) < 400
    assert text.isascii() and text.isprintable() and "--http-allow-origin=https://" in text
    assert refusal(origin=EVIL) == (
        "FORBIDDEN_ORIGIN: Origin 'https://evil.example' is another origin; "
        "--http-allow-origin=https://evil.example allows it"
    )
    assert "can be allowed" in refusal(origin="null")
    assert "--http-allow-origin=http://evil.example:1" in refusal(host="evil.example:1", at_loopback=True)


@pytest.mark.parametrize(
    ("sockname", "is_loopback"),
    [
        (("127.0.0.1", 4151), True),
        (("127.0.1.1", 4151), True),
        (("::1", 4151, 0, 0), True),
        (("::ffff:127.0.0.1", 4151, 0, 0), True),
        (("::ffff:10.0.0.1", 4151, 0, 0), False),
        (("fe80::1%lo", 4151, 0, 1), False),
        (("0.0.0.0", 4151), False),
        (("10.0.0.1", 4151), False),
        (("a simulated host", 4151), False),
        ("/run/nsqd.sock", False),
        ("", False),
        (None, False),
        ((), False),
    ],
)
def test_arrival_at_a_loopback_address(sockname, is_loopback):
    assert is_loopback_address(sockname) is is_loopback


def test_names_of_the_list_of_hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_bytes(
        b"127.0.0.1 localhost\n127.0.1.1\tbox.corp.example box # 127.0.0.1 not-this\n::1 ip6-localhost\n\n"
        b"# 127.0.0.1 nor-this\n"
        b"10.0.0.5 other.example\n127.0.0.1\nnonsense here\n\xff\xfe x\n127.0.0.2 " + b"x" * 300_000
    )
    found = local_names(str(path))
    assert found[:4] == ("localhost", "box.corp.example", "box", "ip6-localhost") and len(found) == 5
    assert local_names(str(tmp_path / "nothing")) == ()
    origins = Origins((), found)
    assert not refusal(method="GET", host="Box.corp.example:4151", at_loopback=True, origins=origins)
    assert refusal(method="GET", host="other.example", at_loopback=True, origins=origins)


@pytest.mark.parametrize(
    "text",
    (
        *("", "*", "null", "wiki.example", "https://", "https://a/b", "https://a b", "https://a:b", "https://a:70000"),
        *("https://u@a", "https://a,https://b", "//a", "https://a?b", "https://[a", "file:///", "https://*.example"),
    ),
)
def test_what_is_no_origin(text):
    with pytest.raises(ValueError, match="origin of a page"):
        parse_origin(text)
    for options in (NsqdOptions, NsqlookupdOptions):
        with pytest.raises(OptionError, match="http_allow_origin"):
            options(http_allow_origin=(text,))


def test_origins_are_compared_as_browsers_spell_them():
    assert parse_origin("HTTPS://Wiki.Example:443/") == ("https", "wiki.example", "")
    assert parse_origin("http://wiki.example:443") == ("http", "wiki.example", "443")
    assert parse_origin("http://[FD00::2]:80") == ("http", "fd00::2", "")
    check_origins(["https://wiki.example", "http://10.0.0.5:8080"])
