"""Web pages of strangers and the HTTP ports of both daemons: what browsers send is refused, everybody else is served.

With a Chromium in the path (Debian: chromium-headless-shell or chromium) two tests let a real browser try.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.chromium import CHROMIUM
from tests.integration.daemons import Daemon, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.test_upgrades import https_address

EVIL = "https://evil.example"
WIKI = "https://wiki.example"
BROWSER_PATIENCE_S = 90.0

NSQD_CHANGES = [
    ("POST", "/topic/delete?topic=kept"),
    ("POST", "/topic/empty?topic=kept"),
    ("POST", "/topic/create?topic=new"),
    ("POST", "/channel/delete?topic=kept&channel=c"),
    ("POST", "/pub?topic=kept"),
    ("POST", "/drain"),
    ("DELETE", "/drain"),
    ("PUT", "/config/log_level"),
    ("PUT", "/debug/setblockrate?rate=1"),
]
NSQLOOKUPD_CHANGES = [
    ("POST", "/topic/create?topic=new"),
    ("POST", "/topic/delete?topic=kept"),
    ("POST", "/topic/tombstone?topic=kept&node=x:1"),
    ("POST", "/channel/delete?topic=kept&channel=c"),
]
PAGES = [
    {"Origin": EVIL},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://127.0.0.1:3000"},
    {"Host": "evil.example:4151"},
    {"Host": "evil.example:4151", "Origin": "http://evil.example:4151"},
]


@pytest.fixture(scope="module")
def nsqd(shared: Daemons) -> Nsqd:
    nsqd = shared.nsqd("--durability=os", f"--http-allow-origin={WIKI}", "--broadcast-address=nsqd.corp.example")
    nsqd.publish("kept", b"body")
    nsqd.post("/channel/create?topic=kept&channel=c")
    return nsqd


@pytest.fixture(scope="module")
def nsqlookupd(shared: Daemons) -> Nsqlookupd:
    nsqlookupd = shared.nsqlookupd(f"--http-allow-origin={WIKI}")
    nsqlookupd.post("/topic/create?topic=kept")
    return nsqlookupd


def refused(daemon: Daemon, method: str, target: str, headers: dict[str, str]) -> None:
    body = b"fatal" if method in ("POST", "PUT") else None
    answer = daemon.request(method, target, body, headers)
    case = f"{method} {target} {headers} -> {answer.status} {answer.body[:200]!r}"
    assert answer.status == 403, case
    assert b"FORBIDDEN_ORIGIN" in answer.body and b"--http-allow-origin" in answer.body, case
    assert "Access-Control-Allow-Origin" not in answer.headers, case


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_page_changes_anything_on_nsqd(nsqd: Nsqd, page: dict[str, str]):
    before = nsqd.stats("kept")
    for method, target in NSQD_CHANGES:
        refused(nsqd, method, target, page)
    assert nsqd.stats("kept") == before
    assert nsqd.get("/drain") == {"draining": False}
    assert nsqd.get("/config/log_level") == 2


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_page_changes_anything_on_nsqlookupd(nsqlookupd: Nsqlookupd, page: dict[str, str]):
    for method, target in NSQLOOKUPD_CHANGES:
        refused(nsqlookupd, method, target, page)
    assert nsqlookupd.get("/topics") == {"topics": ["kept"]}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_page_reads_anything(nsqd: Nsqd, nsqlookupd: Nsqlookupd, page: dict[str, str]):
    """By rebinding the page could read the answer as well: bodies of messages, options, names."""
    for target in ("/config/log_level", "/message/get?topic=kept&id=1", "/stats?format=json", "/metrics", "/nothing"):
        refused(nsqd, "GET", target, page)
    for target in ("/nodes", "/topics", "/debug", "/ping"):
        refused(nsqlookupd, "GET", target, page)


def test_who_is_no_browser_notices_nothing(nsqd: Nsqd, nsqlookupd: Nsqlookupd):
    hosts = ["localhost:4151", "127.0.0.1", "[::1]:4151", "10.1.2.3:80", socket.gethostname(), "nsqd.localhost"]
    for host in (*hosts, "nsqd.corp.example:4151", "wiki.example"):
        assert nsqd.request("GET", "/stats", headers={"Host": host}).status == 200, host
        assert nsqd.request("POST", "/pub?topic=other", b"x", {"Host": host}).status == 200, host
    for host in (*hosts, "wiki.example"):
        assert nsqlookupd.request("GET", "/topics", headers={"Host": host}).status == 200, host
    forwarded = {"X-Forwarded-Host": "evil.example", "X-Forwarded-For": "1.2.3.4", "Referer": EVIL + "/"}
    assert nsqd.request("POST", "/pub?topic=other", b"x", forwarded).status == 200
    with socket.create_connection(nsqd.http) as old:  # no Host at all
        old.sendall(b"GET /ping HTTP/1.0\r\n\r\n")
        assert b" 200 OK" in old.recv(1000)


def test_the_address_bar_a_link_and_its_own_pages(nsqd: Nsqd):
    typed = {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    assert nsqd.request("GET", "/stats", headers=typed).status == 200
    link = typed | {"Sec-Fetch-Site": "cross-site"}
    assert nsqd.request("GET", "/stats", headers=link).status == 200
    refused(nsqd, "GET", "/debug/pprof/profile", link)
    refused(nsqd, "GET", "/stats", link | {"Sec-Fetch-Dest": "iframe"})
    own = {"Origin": f"http://127.0.0.1:{nsqd.http[1]}", "Sec-Fetch-Site": "same-origin"}
    assert nsqd.request("POST", "/pub?topic=other", b"x", own).status == 200


def test_an_allowed_page(nsqd: Nsqd, nsqlookupd: Nsqlookupd):
    page = {"Origin": WIKI, "Sec-Fetch-Site": "cross-site"}
    preflight = {"Access-Control-Request-Method": "PUT", "Access-Control-Request-Headers": "authorization"}
    for daemon, target in ((nsqd, "/config/log_level"), (nsqlookupd, "/topics")):
        asked = daemon.request("OPTIONS", target, headers=page | preflight)
        assert asked.status == 200 and "PUT" in asked.headers["Access-Control-Allow-Methods"]
        assert asked.headers["Access-Control-Allow-Headers"] == "authorization"
        answer = daemon.request("GET", target, headers=page)
        assert answer.status == 200 and answer.headers["Access-Control-Allow-Origin"] == WIKI
    assert nsqd.request("POST", "/pub?topic=other", b"x", page).status == 200


def test_over_https_as_well(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    tls = [f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}"]
    both: list[Nsqd | Nsqlookupd] = [daemons.nsqd(*tls, "--https-address=127.0.0.1:0")]
    both.append(daemons.nsqlookupd(*tls, "--https-address=127.0.0.1:0"))
    for daemon in both:
        with contextlib.closing(https_connection(daemon, certificates)) as connection:
            for headers, status in (({"Origin": EVIL}, 403), ({"Host": "evil.example"}, 403), ({}, 200)):
                connection.request("GET", "/info", headers=headers)
                answer = connection.getresponse()
                answer.read()
                assert answer.status == status, (daemon.program, headers)


def https_connection(daemon: Nsqd | Nsqlookupd, certificates: Certificates) -> http.client.HTTPSConnection:
    context = ssl.create_default_context(cafile=str(certificates.ca))
    context.check_hostname = False
    return http.client.HTTPSConnection(*https_address(daemon), context=context)


# -- a real browser ----------------------------------------------------------------------------------------------------

_ATTACK = """<!doctype html><title>page</title><body><script>
const target = TARGET;
const results = {};
async function attempt(name, work) {
  try { results[name] = await work(); } catch (error) { results[name] = "failed"; }
}
const read = async (path, options) => { const a = await fetch(target + path, options); return [a.type, a.status]; };
const loaded = (tag, path) => new Promise(done => {
  const element = document.createElement(tag);
  element.onload = () => done("loaded");
  element.onerror = () => done("failed");
  element.src = target + path;
  document.body.append(element);
});
const submitted = path => new Promise(done => {
  const frame = document.createElement("iframe");
  frame.name = "sink";
  document.body.append(frame);
  const form = document.createElement("form");
  form.method = "POST"; form.action = target + path; form.target = "sink";
  document.body.append(form);
  frame.onload = () => done("sent");
  form.submit();
});
(async () => {
  await attempt("simple", () => read("/topic/delete?topic=kept", {method: "POST", mode: "no-cors"}));
  await attempt("empty", () => read("/topic/empty?topic=kept", {method: "POST", mode: "no-cors", body: "x"}));
  await attempt("preflighted", () => read("/topic/delete?topic=kept", {method: "POST", headers: {"X-A": "b"}}));
  await attempt("put", () => read("/config/log_level", {method: "PUT", body: "none"}));
  await attempt("form", () => submitted("/topic/delete?topic=kept"));
  await attempt("image", () => loaded("img", "/config/log_level"));
  await attempt("script", () => loaded("script", "/config/log_level"));
  await attempt("read", () => read("/info"));
  await attempt("drain", () => read("/drain", {method: "POST", mode: "no-cors"}));
  await fetch("/done", {method: "POST", body: JSON.stringify(results)});
})();
</script>"""


class PageServer(http.server.ThreadingHTTPServer):
    """Serves one page, on all names of this host, and keeps what it reports."""

    def __init__(self, page: str) -> None:
        self.page = page
        self.reports: list[dict[str, Any]] = []
        self.was_read = threading.Event()
        super().__init__(("127.0.0.1", 0), _PageHandler)
        self.url = f"http://127.0.0.1:{self.server_port}"


class _PageHandler(http.server.BaseHTTPRequestHandler):
    server: PageServer

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.end_headers()
        self.wfile.write(self.server.page.encode())
        self.server.was_read.set()

    def do_POST(self) -> None:
        self.server.reports.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name of the base class
        """Tests are quiet."""


@contextlib.contextmanager
def page_server(page: str) -> Iterator[PageServer]:
    with PageServer(page) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def visit(url: str, server: PageServer, directory: Path) -> dict[str, Any]:
    """Open a page in a real browser, and return what it reports."""
    assert CHROMIUM is not None
    flags = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    flags += " --disable-component-update --disable-sync --disable-dev-shm-usage --remote-debugging-port=0"
    names = "--host-resolver-rules=MAP evil.example 127.0.0.1"
    command = [CHROMIUM, *flags.split(), names, f"--user-data-dir={directory}", url]
    with (directory / "browser.log").open("wb") as log:
        browser = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        return wait_until(lambda: server.reports, "the page reports", BROWSER_PATIENCE_S)[0]
    finally:
        os.killpg(browser.pid, signal.SIGKILL)  # Debian's headless shell is the child of a script
        browser.wait(BROWSER_PATIENCE_S)


needs_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium in the path")


@pytest.mark.slow
@needs_a_browser
@pytest.mark.parametrize("host", ["localhost", "evil.example", "127.0.0.1"])
def test_a_real_browser_on_the_page_of_a_stranger(daemons: Daemons, tmp_path: Path, host: str):
    nsqd = daemons.nsqd("--durability=os", "--log-level=info")
    nsqd.publish("kept", b"body")
    before = nsqd.stats("kept")
    with page_server(_ATTACK.replace("TARGET", json.dumps(f"http://127.0.0.1:{nsqd.http[1]}"))) as server:
        report = visit(f"http://{host}:{server.server_port}/", server, tmp_path)
    assert report.pop("form") == "sent"  # the frame shows the refusal
    assert report.pop("simple") == report.pop("empty") == report.pop("drain") == ["opaque", 0]
    assert report == dict.fromkeys(("preflighted", "put", "image", "script", "read"), "failed")
    assert nsqd.stats("kept") == before and nsqd.get("/drain") == {"draining": False}
    assert nsqd.log.count("403 ") >= 8 and nsqd.log.count("FORBIDDEN_ORIGIN") >= 8


@pytest.mark.slow
@needs_a_browser
def test_a_real_browser_on_an_allowed_page(daemons: Daemons, tmp_path: Path):
    with page_server("") as server:
        origin = f"http://localhost:{server.server_port}"
        nsqd = daemons.nsqd("--durability=os", f"--http-allow-origin={origin}")
        nsqd.publish("kept", b"body")
        server.page = _ATTACK.replace("TARGET", json.dumps(f"http://127.0.0.1:{nsqd.http[1]}"))
        report = visit(origin, server, tmp_path)
    assert report["preflighted"] == ["cors", 404]  # the requests before it have deleted the topic
    assert report["read"] == ["cors", 200] and report["put"] == ["cors", 400]  # there is no such level


_REBINDING = """<!doctype html><body><script>
const wait = () => new Promise(done => setTimeout(done, 100));
(async () => {
  let answer = null;
  while (!answer || !answer.headers.get("X-NSQ-Content-Type")) {  // until nsqd is what the name means
    await wait();
    try { answer = await fetch("/config/log_level"); } catch (error) { answer = null; }
  }
  const report = {status: answer.status, text: await answer.text()};
  await fetch(REPORT + "/done", {method: "POST", mode: "no-cors", body: JSON.stringify(report)});
})();
</script>"""


@pytest.mark.slow
@needs_a_browser
def test_a_real_browser_that_was_told_a_wrong_address(daemons: Daemons, tmp_path: Path):
    """DNS rebinding: page and nsqd have one origin for the browser, so it sends neither of the other headers."""
    nsqd = daemons.new_nsqd()
    with page_server("") as reports, ThreadPoolExecutor(1) as executor:
        with page_server(_REBINDING.replace("REPORT", json.dumps(reports.url))) as server:
            visited = executor.submit(visit, f"http://evil.example:{server.server_port}/", reports, tmp_path)
            assert server.was_read.wait(BROWSER_PATIENCE_S)
            nsqd.http = ("127.0.0.1", server.server_port)
        nsqd.start()
        report = visited.result()
    assert report["status"] == 403 and "Host 'evil.example:" in report["text"]
