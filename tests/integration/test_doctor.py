"""``flintmq doctor`` as an operator runs it, on deployments that are well and on some that are not."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import re
import subprocess
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from typing import ClassVar

import pytest
from tests.certificates import Certificates
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import Daemons, Nsqd, pub, running_cluster, wait_until
from tests.integration.mounts import Mount, mounted_tmpfs, needs_root
from tests.integration.test_upgrades import https_address
from tests.integration.utilities import flintmq


class Report:
    """What doctor printed with ``--json``, and how it ended."""

    def __init__(self, *flags: str, **environment: str) -> None:
        done = flintmq("doctor", "--json", "--timeout=10s", *flags, environment={**os.environ, **environment})
        self.code = done.returncode
        self.stderr = done.stderr
        self.findings = [json.loads(line) for line in done.stdout.splitlines()]

    def of(self, subject: str, level: str) -> list[str]:
        """Text and advice of the findings of a level about a subject."""
        return [
            f"{finding['text']} -> {finding['advice']}"
            for finding in self.findings
            if finding["subject"].startswith(subject) and finding["level"] == level
        ]

    def bad(self) -> list[str]:
        return [finding["text"] for finding in self.findings if finding["level"] in ("problem", "warning")]


def address_of(pair: tuple[str, int]) -> str:
    return f"{pair[0]}:{pair[1]}"


def test_a_deployment_that_is_well(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={address_of(lookupd.tcp)}")
    nsqd.publish("orders", b"1", b"2")
    with nsqd.connect() as connection:
        connection.subscribe("orders", "billing")
    wait_until(lambda: lookupd.request("GET", "/channels?topic=orders").json["channels"] == ["billing"])
    report = Report(f"--lookupd-http-address={address_of(lookupd.http)}", "--topic=orders")
    assert report.code == 0 and report.bad() == [], report.findings
    assert any("lists 1 nsqd" in text for text in report.of("nsqlookupd", "ok"))
    assert any("speaks NSQ 1.3.0" in text for text in report.of("nsqd", "ok"))
    assert any("1 topic, 2 messages wait" in text for text in report.of("nsqd", "ok"))
    assert any("channels: billing" in text for text in report.of("topic orders", "ok"))


def test_an_nsqd_that_one_nsqlookupd_does_not_know(daemons: Daemons):
    first, second = daemons.nsqlookupd(), daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={address_of(first.tcp)}")
    wait_until(lambda: first.get("/nodes")["producers"])
    report = Report(*(f"--lookupd-http-address={address_of(each.http)}" for each in (first, second)))
    assert report.code == 0
    [warning] = report.of(f"nsqd {address_of(nsqd.tcp)}", "warning")
    assert f"not registered with http://{address_of(second.http)}" in warning and "--lookupd-tcp-address" in warning


def test_ports_taken_for_one_another_and_nobody_there(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os")
    report = Report(f"--lookupd-http-address={address_of(lookupd.tcp)}", f"--nsqd-tcp-address={address_of(nsqd.http)}")
    assert report.code == 1
    assert any("not the TCP port (4160)" in text for text in report.of("nsqlookupd", "problem"))
    assert any("not its HTTP port (4151)" in text for text in report.of("nsqd", "problem"))
    nobody = Report("--nsqd-tcp-address=127.0.0.1:1")
    assert nobody.code == 1
    assert any("refused" in text and "is it running" in text for text in nobody.of("nsqd", "problem"))


def test_an_address_that_only_its_own_machine_knows(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    flags = ("--durability=os", f"--lookupd-tcp-address={address_of(lookupd.tcp)}")
    nsqd = daemons.new_nsqd(*flags)
    nsqd.flags.append("--broadcast-address=no-such-host.invalid")
    nsqd.start()
    wait_until(lambda: lookupd.get("/nodes")["producers"])
    report = Report(f"--lookupd-http-address={address_of(lookupd.http)}")
    assert report.code == 1
    [problem] = report.of("nsqd no-such-host.invalid", "problem")
    assert "cannot be resolved here" in problem and "--broadcast-address" in problem


def test_nobody_is_registered(daemons: Daemons):
    report = Report(f"--lookupd-http-address={address_of(daemons.nsqlookupd().http)}", "--topic=orders")
    assert report.code == 1
    assert any("no nsqlookupd lists any nsqd" in text for text in report.of("discovery", "problem"))
    assert any("no nsqd has it" in text for text in report.of("topic orders", "warning"))


def test_what_is_paused_and_what_nobody_consumes(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os", f"--lookupd-tcp-address={address_of(lookupd.tcp)}")
    nsqd.publish("alone", b"x")
    nsqd.post("/topic/create?topic=held")
    nsqd.post("/channel/create?topic=held&channel=c")
    nsqd.post("/channel/pause?topic=held&channel=c")
    wait_until(lambda: "held" in lookupd.get("/topics")["topics"])
    report = Report(f"--lookupd-http-address={address_of(lookupd.http)}", "--topic=alone")
    notes = report.of("nsqd", "note")
    assert any("1 message in topics that have no channel" in text for text in notes)
    assert any("paused: held/c" in text for text in notes)
    assert any("has no channel" in text for text in report.of("topic alone", "warning"))


def test_messages_at_one_nsqd_and_consumers_at_another(daemons: Daemons):
    """Consumers that were given one address bring what its nsqd has, and nobody brings the rest."""
    lookupd = daemons.nsqlookupd()
    flag = f"--lookupd-tcp-address={address_of(lookupd.tcp)}"
    here, there = (daemons.nsqd("--durability=os", flag) for _ in range(2))
    for nsqd in (here, there):
        nsqd.post("/topic/create?topic=t")
        for channel in ("c", "paused", "idle"):
            nsqd.post(f"/channel/create?topic=t&channel={channel}")
        nsqd.publish("t", b"1", b"2", b"3")
    there.post("/channel/pause?topic=t&channel=paused")
    wait_until(lambda: len(lookupd.get("/nodes")["producers"]) == 2)
    with here.connect() as one, here.connect() as another:
        one.subscribe("t", "c")
        another.subscribe("t", "paused")
        report = Report(f"--lookupd-http-address={address_of(lookupd.http)}")
    (finding,) = report.of("topic t", "warning")
    expected = f"3 messages wait at {address_of(there.tcp)}, and consumers are at {address_of(here.tcp)} alone"
    assert finding.startswith(expected) and "ask nsqlookupd" in finding


def test_two_nsqd_under_one_address(daemons: Daemons):
    """They are listed twice; who asks for either finds the one that is there."""
    lookupd = daemons.nsqlookupd()
    flags = ("--durability=os", f"--lookupd-tcp-address={address_of(lookupd.tcp)}")
    first = daemons.nsqd(*flags)
    ports = (f"--broadcast-tcp-port={first.tcp[1]}", f"--broadcast-http-port={first.http[1]}")
    second = daemons.nsqd(*flags, *ports)
    where = f"--lookupd-http-address={address_of(lookupd.http)}"
    wait_until(lambda: len(lookupd.get("/nodes")["producers"]) == 2, "both are listed")
    rows = lookupd.get("/nodes")["producers"]
    report = Report(where)
    assert report.code == 1
    (problem,) = report.of("nsqlookupd", "problem")
    assert f"2 nsqd say that they are {address_of(first.tcp)} (from " in problem and "--broadcast-tcp-port" in problem
    assert all(row["remote_address"] in problem for row in rows), problem
    second.kill()
    wait_until(lambda: len(lookupd.get("/nodes")["producers"]) == 1, "it is listed no longer")
    report = Report(where)
    assert report.code == 0 and report.bad() == [], report.findings


def test_an_nsqd_that_does_not_reach_its_nsqlookupds(daemons: Daemons):
    lookupd = daemons.nsqlookupd()
    up = address_of(lookupd.tcp)
    lonely = daemons.nsqd("--durability=os", "--lookupd-tcp-address=127.0.0.1:1,127.0.0.1:2")
    other = daemons.nsqd("--durability=os", f"--lookupd-tcp-address=127.0.0.1:1,{up}")
    wait_until(lambda: lookupd.get("/nodes")["producers"], "one of them is reached")
    where = [
        (f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(nsqd.http)}")
        for nsqd in (lonely, other)
    ]
    report = Report(*where[0])
    assert report.code == 1
    (problem,) = report.of("nsqd", "problem")
    assert "reaches none of its nsqlookupds (127.0.0.1:1, 127.0.0.1:2)" in problem
    assert "--lookupd-tcp-address" in problem
    report = Report(*where[1])
    assert report.code == 0
    (warning,) = report.of("nsqd", "warning")
    assert warning.startswith("does not reach its nsqlookupd 127.0.0.1:1 ")


class LateClock(http.server.BaseHTTPRequestHandler):
    """A nsqlookupd an hour ahead, of the kind that wraps its answers."""

    ANSWERS: ClassVar[dict[str, object]] = {
        "/info": {"status_code": 200, "data": {"version": "0.3.8"}},
        "/nodes": {"status_code": 200, "data": {"producers": []}},
        "/listlookup": {"lookupdleader": {}, "lookupdnodes": []},
    }

    def do_GET(self) -> None:
        body = json.dumps(self.ANSWERS.get(self.path, {})).encode()
        self.send_response(200 if self.path in self.ANSWERS else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def date_time_string(self, timestamp: float | None = None) -> str:
        return formatdate(time.time() + 3600, usegmt=True)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class has it so


@contextlib.contextmanager
def answering(answers: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def late_lookupd() -> Iterator[str]:
    with answering(LateClock) as address:
        yield address


def test_an_nsqd_that_is_named_by_another_name_than_it_registers_with(daemons: Daemons):
    """As 127.0.0.1 of a machine whose nsqd registers with the name of the host."""
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd(
        "--durability=os", "--broadcast-address=localhost", f"--lookupd-tcp-address={address_of(lookupd.tcp)}"
    )
    where = f"--lookupd-http-address={address_of(lookupd.http)}"
    wait_until(lambda: "lists 1 nsqd" in str(Report(where).findings), "it is registered")
    report = Report(where, f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(nsqd.http)}")
    assert (report.code, report.bad()) == (0, [])
    subjects = {each["subject"] for each in report.findings if each["subject"].startswith("nsqd ")}
    assert subjects == {f"nsqd localhost:{nsqd.tcp[1]}"}, "it is looked at once"
    assert address_of(nsqd.tcp) not in str(report.findings)
    strange = daemons.nsqd("--durability=os", "--broadcast-address=localhost")
    report = Report(
        where, f"--nsqd-tcp-address={address_of(strange.tcp)}", f"--nsqd-http-address={address_of(strange.http)}"
    )
    assert report.code == 1 and "is not registered with" in str(report.bad()), "another one is not taken for it"


def test_an_old_nsqlookupd_whose_clock_is_wrong(late_lookupd: str, daemons: Daemons):
    nsqd = daemons.nsqd("--durability=os")
    report = Report(f"--lookupd-http-address={late_lookupd}", f"--nsqd-tcp-address={address_of(nsqd.tcp)}")
    [warning] = [each for each in report.of("nsqlookupd", "warning") if "ahead" in each]  # it may be slow as well
    # half of the time that the answer took is the error of the comparison
    assert re.search(r"3(59|60)\d s ahead", warning) and "NTP" in warning
    oks = report.of("nsqlookupd", "ok")
    assert any("version 0.3.8" in text for text in oks) and any("/listlookup" in text for text in oks)


def of_cluster(**told: object) -> type[LateClock]:
    """A nsqlookupd of a cluster of nobody else, which says so of it."""
    lookupd = {"lookupd": "m", "incarnation": "i", "host": "m", "tcp_port": 4160, "http_port": 4161}
    status = {
        "cluster": "c", "cluster_id": "id", "problem": "", "revision": 5, "is_master": True, "master": lookupd,
        "lookupds": [lookupd], "nodes": [], "topics": [], **told,
    }  # fmt: skip
    return type("OfCluster", (LateClock,), {"ANSWERS": {**LateClock.ANSWERS, "/cluster/status": status}})


def test_a_nsqlookupd_that_alone_may_not_write_to_the_store():
    told = {"store_read_only_since": 1_795_967_800.5, "store_read_only_reason": "permission denied"}
    with answering(of_cluster()) as well, answering(of_cluster(**told)) as other:
        report = Report(f"--lookupd-http-address={well}", f"--lookupd-http-address={other}")
        text = "takes no writes since 2026-11-29 15:56:40 UTC: permission denied"
        assert not any(text in each for each in report.of("cluster c", "problem"))
        (warning,) = [each for each in report.of(f"nsqlookupd http://{other}", "warning") if text in each]
        assert "may its user of the store write" in warning
        report = Report(f"--lookupd-http-address={other}")
        assert any(text in each for each in report.of("cluster c", "problem")), "nobody says anything else"


ONE = {"broadcast_address": "127.0.0.1", "tcp_port": 1, "http_port": 2, "remote_address": "127.0.0.1:5001"}
OTHER = {**ONE, "remote_address": "127.0.0.1:5002"}


def of_two(first: list[object], then: list[object], debug: object) -> type[LateClock]:
    """A nsqlookupd that lists these nsqd, and then those; what ``/debug`` says of them."""
    answers = [{"producers": first}]

    class OfTwo(LateClock):
        ANSWERS: ClassVar[dict[str, object]] = {**LateClock.ANSWERS, "/debug": debug}

        def do_GET(self) -> None:
            if self.path == "/nodes":
                self.ANSWERS[self.path] = answers.pop() if answers else {"producers": then}
            super().do_GET()

    return OfTwo


def heard(one_s: float, other_s: float) -> object:
    """``/debug`` where something was heard of both."""
    ids = (ONE["remote_address"], one_s), (OTHER["remote_address"], other_s)
    return {"client::": [{"id": name, "last_update": int((1e9 + at_s) * 1e9)} for name, at_s in ids]}


@pytest.mark.parametrize(
    ("then", "debug", "count"),
    [
        ([ONE, OTHER], {}, 1),
        ([ONE, OTHER], heard(0, 15), 1),
        ([ONE, OTHER], heard(0, 120), 0),
        ([OTHER], {}, 0),
        ([ONE, OTHER], {"client::": 5}, 1),
    ],
    ids=["both live", "both ping", "one is silent", "one has just said anew who it is", "nonsense"],
)
def test_a_connection_that_is_not_yet_known_to_be_dead_is_no_second_nsqd(then: list[object], debug: object, count: int):
    with answering(of_two([ONE, OTHER], then, debug)) as lookupd:
        report = Report(f"--lookupd-http-address={lookupd}")
        found = [text for text in report.of("nsqlookupd", "problem") if "nsqd say that they are" in text]
        assert len(found) == count, report.findings


def test_tls_and_auth(daemons: Daemons, tmp_path: Path):
    """What is missing is said in the words of the flags; with them all is well; the secret is not shown."""
    certificates = Certificates(tmp_path)
    with AuthServer() as auth:
        nsqd = daemons.nsqd(
            "--durability=os",
            f"--tls-cert={certificates.server.cert}",
            f"--tls-key={certificates.server.key}",
            "--tls-required=tcp-https",
            f"--auth-http-address={auth.address}",
            "--https-address=127.0.0.1:0",
        )
        where = f"--nsqd-tcp-address={address_of(nsqd.tcp)}"
        bare = Report(where)
        assert bare.code == 1
        [problem] = bare.of("nsqd", "problem")
        assert "--tls" in problem and "--auth-secret" in problem
        unknown = Report(where, "--tls")
        assert "not from an authority that is trusted here" in unknown.of("nsqd", "problem")[0]
        trusted = (where, "--tls", f"--tls-root-ca-file={certificates.ca}")
        assert "wants a secret" in Report(*trusted).of("nsqd", "problem")[0]
        reference = tmp_path / "secret"
        reference.write_text(f"{SECRET}\n", encoding="utf-8")
        assert Report(*trusted, f"--auth-secret=file:{reference}").code == 0
        well = Report(*trusted, f"--auth-secret={SECRET}")
        assert well.code == 0 and any("with tls and AUTH" in text for text in well.of("nsqd", "ok")), well.findings
        assert SECRET not in str(well.findings)


@pytest.mark.parametrize("required", ["true", "tcp-https"])
def test_tls_that_is_required_is_seen_without_auth_too(daemons: Daemons, tmp_path: Path, required: str):
    """Such an nsqd lets everybody identify, and refuses the first command after it."""
    certificates = Certificates(tmp_path)
    nsqd = daemons.nsqd(
        "--durability=os",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        f"--tls-required={required}",
        "--https-address=127.0.0.1:0",
    )
    where = f"--nsqd-tcp-address={address_of(nsqd.tcp)}"
    bare = Report(where)
    assert bare.code == 1
    [problem] = bare.of("nsqd", "problem")
    assert "refuses every command without TLS (--tls-required)" in problem and "--tls-root-ca-file" in problem
    trusted = (where, "--tls", f"--tls-root-ca-file={certificates.ca}")
    well = Report(*trusted, f"--nsqd-http-address=https://{address_of(https_address(nsqd))}")
    assert well.code == 0 and well.bad() == [], well.findings
    assert any("0 topics" in text for text in well.of("nsqd", "ok")), "HTTP was asked, too"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Mount]:
    """A disk that is nearly all reserve."""
    with mounted_tmpfs(tmp_path / "disk", 80 * 1024 * 1024) as mount:
        yield mount


def wanting_tls(daemons: Daemons, certificates: Certificates, *flags: str, data_path: Path | None = None) -> Nsqd:
    """An nsqd that answers over HTTP only where it speaks TLS."""
    return daemons.nsqd(
        "--durability=os",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        "--tls-required=true",
        "--https-address=127.0.0.1:0",
        *flags,
        data_path=data_path,
    )


def test_an_nsqd_that_wants_tls_over_http_is_asked_at_the_port_that_it_names(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path)
    lookupd = daemons.nsqlookupd()
    auth = f"--http-auth-tokens-file={tokens_of(tmp_path)}"
    nsqd = wanting_tls(daemons, certificates, auth, f"--lookupd-tcp-address={address_of(lookupd.tcp)}")
    wait_until(lambda: lookupd.get("/nodes")["producers"], "it is listed")
    flags = ("--tls", f"--tls-root-ca-file={certificates.ca}", f"--token=file:{tmp_path / 'reader'}")
    listing = (f"--lookupd-http-address={address_of(lookupd.http)}",)
    named = (f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(nsqd.http)}")
    for where in (listing, named):
        report = Report(*where, *flags)
        assert report.code == 0 and report.bad() == [], report.findings
        assert any("0 topics" in text for text in report.of("nsqd", "ok"))
    unknown = Report(*listing)  # whose authority is not known here
    (warning,) = unknown.of("nsqd", "warning")
    assert f"cannot be asked at https://{address_of(https_address(nsqd))}, so nothing is known of its disk" in warning
    assert "--tls-root-ca-file" in warning


@needs_root
def test_the_full_disk_of_an_nsqd_that_wants_tls(daemons: Daemons, tmp_path: Path, small_disk: Mount):
    certificates = Certificates(tmp_path)
    nsqd = wanting_tls(daemons, certificates, data_path=small_disk.path)
    small_disk.fill()
    where = (f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(nsqd.http)}")
    report = Report(*where, "--tls", f"--tls-root-ca-file={certificates.ca}")
    assert report.code == 1
    assert any("is not well: " in text for text in report.of("nsqd", "problem")), report.findings


class WantsTls(http.server.BaseHTTPRequestHandler):
    """The HTTP API of an nsqd that wants TLS and has no port for it."""

    BODY: ClassVar[bytes] = b'{"message":"TLS_REQUIRED","https_port":0}'
    SHOWN: ClassVar[list[str | None]] = []

    def do_GET(self) -> None:
        self.SHOWN.append(self.headers["Authorization"])
        self.send_response(403)
        self.send_header("Content-Length", str(len(self.BODY)))
        self.end_headers()
        self.wfile.write(self.BODY)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class has it so


def test_all_is_not_well_where_http_wants_tls_and_names_no_port(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path)
    tokens_of(tmp_path)
    files = (f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}")
    nsqd = daemons.nsqd("--durability=os", *files)
    flags = ("--tls", f"--tls-root-ca-file={certificates.ca}", f"--token=file:{tmp_path / 'reader'}")
    others = type("RefusesOrigin", (WantsTls,), {"BODY": b'{"message":"FORBIDDEN_ORIGIN"}'})
    for answers, reason in ((WantsTls, "does not say at which port"), (others, "FORBIDDEN_ORIGIN")):
        with answering(answers) as http_address:
            where = (f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={http_address}")
            done = flintmq("doctor", *where, *flags)
        assert done.returncode == 0 and done.stdout.endswith("\n\n1 warning\n"), done.stdout
        assert "nothing is known of its disk" in done.stdout and reason in done.stdout
    assert set(WantsTls.SHOWN) == {None}, "the token was not shown in clear"


def test_tls_that_is_offered_is_no_problem(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path)
    files = (f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}")
    nsqd = daemons.nsqd("--durability=os", "--https-address=127.0.0.1:0", *files)
    bare = Report(f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(nsqd.http)}")
    assert bare.code == 0 and bare.bad() == [], bare.findings


class Unwell(http.server.BaseHTTPRequestHandler):
    """The HTTP API of an nsqd whose disk is full, and whose data are damaged."""

    def do_GET(self) -> None:
        health = "NOK - damage: 1 reports, 7 messages lost"
        is_ping = self.path == "/ping"
        body = b"NOK - disk full" if is_ping else json.dumps({"health": health, "topics": []}).encode()
        self.send_response(500 if is_ping else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002 - the base class has it so


class Neighbour(http.server.ThreadingHTTPServer):
    """Takes no port that somebody has reserved."""

    allow_reuse_address = False
    allow_reuse_port = False


def behind(nsqd: Nsqd, is_listening: bool = True) -> Neighbour:
    """Something at the port behind an nsqd's, which is not started yet, and is moved to where that is free."""
    while True:
        nsqd.move()
        try:
            server = Neighbour(("127.0.0.1", nsqd.tcp[1] + 1), Unwell, bind_and_activate=False)
            server.server_bind()
            if is_listening:
                server.server_activate()
            return server
        except (OSError, OverflowError):
            server.server_close()


def test_the_disk_and_the_data_of_an_nsqd_that_no_nsqlookupd_knows(daemons: Daemons):
    """Its HTTP port is the one behind, unless it is named."""
    nsqd = daemons.new_nsqd("--durability=os")
    with behind(nsqd) as server:
        nsqd.start()
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            where = f"--nsqd-tcp-address={address_of(nsqd.tcp)}"
            for flags in ((where,), (where, f"--nsqd-http-address=127.0.0.1:{server.server_address[1]}")):
                unwell = Report(*flags)
                assert unwell.code == 1, unwell.bad()
                full, damaged = unwell.of("nsqd", "problem")
                assert "disk full" in full and "7 messages lost" in damaged
            well = Report(where, f"--nsqd-http-address={address_of(nsqd.http)}")
            assert well.code == 0 and well.bad() == [], well.findings
        finally:
            server.shutdown()
            thread.join()


def test_what_was_not_looked_at_is_said(daemons: Daemons):
    nsqd = daemons.new_nsqd("--durability=os")
    with behind(nsqd, is_listening=False):
        nsqd.start()
        report = Report(f"--nsqd-tcp-address={address_of(nsqd.tcp)}")
        assert report.code == 0
        [warning] = report.of("nsqd", "warning")
        assert "nothing is known of its disk" in warning and "--nsqd-http-address=HOST:PORT" in warning
    lookupd = daemons.nsqlookupd()
    other = Report(f"--nsqd-tcp-address={address_of(nsqd.tcp)}", f"--nsqd-http-address={address_of(lookupd.http)}")
    assert any("/stats is answered with status 404" in text for text in other.bad()), other.findings
    twice = Report(f"--nsqd-http-address={address_of(nsqd.http)}")
    assert twice.code == 2 and "once for each --nsqd-tcp-address" in twice.stderr


def test_a_node_that_has_lost_its_lease(tmp_path: Path):
    with running_cluster(tmp_path, copies_on=1) as cluster:
        cluster.create("t", copies=1)
        (node,) = cluster.nodes
        where = (f"--nsqd-tcp-address={address_of(node.tcp)}", f"--nsqd-http-address={address_of(node.http)}")
        assert Report(*where).bad() == []
        cluster.nsqlookupd.kill()  # and with it the store
        wait_until(lambda: not node.get("/stats?format=json")["cluster"]["has_lease"], "its lease is over")
        report = Report(*where)
        assert report.code == 1
        assert any("has lost its lease" in text and "--cluster-store" in text for text in report.of("nsqd", "problem"))


TOKENS = {name: f"{name}-token-for-integration" for name in ("reader", "writer", "unknown")}


def tokens_of(directory: Path) -> Path:
    """A file of tokens: one may read, one only publish. Each is in a file of its own as well."""
    for name, token in TOKENS.items():
        (directory / name).write_text(f"{token}\n")
    rights = {"reader": ["read"], "writer": ["publish"]}
    rows = [{"name": name, "token": TOKENS[name], "permissions": each} for name, each in rights.items()]
    path = directory / "tokens.json"
    path.write_text(json.dumps({"client": rows}))
    path.chmod(0o600)
    return path


def test_http_that_asks_for_a_token(daemons: Daemons, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    auth = f"--http-auth-tokens-file={tokens_of(tmp_path)}"
    lookupd = daemons.nsqlookupd(auth)
    nsqd = daemons.nsqd(
        "--durability=os", auth, f"--lookupd-tcp-address={address_of(lookupd.tcp)}",
        f"--lookupd-http-token-file={tmp_path / 'reader'}",
    )  # fmt: skip
    nsqd.publish("orders", b"1")
    shown = {"Authorization": f"Bearer {TOKENS['reader']}"}
    wait_until(lambda: lookupd.request("GET", "/nodes", headers=shown).json["producers"], "nsqd is listed")
    where = f"--lookupd-http-address={address_of(lookupd.http)}"
    bare = Report(where)
    assert bare.code == 1
    [problem] = bare.of("nsqlookupd", "problem")
    assert "asks for a token" in problem and "FLINTMQ_TOKEN" in problem and "--token" in problem
    unknown = Report(where, f"--token=file:{tmp_path / 'unknown'}")
    assert unknown.code == 1 and "does not know the token" in unknown.of("nsqlookupd", "problem")[0]
    writer = Report(where, f"--token-file={tmp_path / 'writer'}")
    assert writer.code == 1 and "the permission read" in writer.of("nsqlookupd", "problem")[0]
    assert "1 message in topics" not in str(bare.findings)

    for flags in ([f"--token=file:{tmp_path / 'reader'}"], [f"--token-file={tmp_path / 'reader'}"], []):
        if not flags:
            monkeypatch.setenv("FLINTMQ_TOKEN", f"file:{tmp_path / 'reader'}")
        report = Report(where, "--topic=orders", *flags)
        assert report.code == 0, report.findings
        assert any("1 message in topics that have no channel" in text for text in report.of("nsqd", "note"))
        assert report.of("topic orders", "ok")
        assert TOKENS["reader"] not in str(report.findings)
    both = Report(where, f"--token=file:{tmp_path / 'reader'}", f"--token-file={tmp_path / 'reader'}")
    assert both.code == 2 and "name two tokens" in both.stderr


def test_it_looks_where_the_other_commands_look(daemons: Daemons, monkeypatch: pytest.MonkeyPatch):
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd("--durability=os")
    http, tcp, nsqd_http = (address_of(each) for each in (lookupd.http, nsqd.tcp, nsqd.http))
    for report in (
        Report(f"--lookupd={http}", "--nsqd", tcp, f"--nsqd-http={nsqd_http}"),
        Report(FLINTMQ_LOOKUPD=http, FLINTMQ_NSQD=tcp, FLINTMQ_HTTP=nsqd_http),
    ):
        assert report.of(f"nsqlookupd http://{http}", "ok") and report.of(f"nsqd {tcp}", "ok"), report.findings
        assert not any("HTTP" in text for text in report.of("nsqd", "warning")), report.findings
    named = Report(f"--lookupd={http}", FLINTMQ_NSQD="127.0.0.1:1")  # a flag goes before the environment
    assert not named.of("nsqd 127.0.0.1:1", "problem"), named.findings
    assert Report(FLINTMQ_NSQD="127.0.0.1").of("nsqd 127.0.0.1:4150", "problem")
    assert Report(FLINTMQ_NSQD=tcp, FLINTMQ_TLS="1").of(f"nsqd {tcp}", "problem")
    wrong = Report(FLINTMQ_NSQD=tcp, FLINTMQ_HTTP="127.0.0.1:1,127.0.0.1:2")
    assert wrong.code == 2 and "2 are named there, and 1 nsqd" in wrong.stderr


def test_a_token_is_not_shown_in_clear_to_who_was_found_over_https(daemons: Daemons, tmp_path: Path):
    certificates = Certificates(tmp_path)
    auth = f"--http-auth-tokens-file={tokens_of(tmp_path)}"
    lookupd = daemons.nsqlookupd(
        auth, "--https-address=127.0.0.1:0",
        f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}",
    )  # fmt: skip
    daemons.nsqd(
        "--durability=os", auth, f"--lookupd-tcp-address={address_of(lookupd.tcp)}",
        f"--lookupd-http-token-file={tmp_path / 'reader'}",
    )  # fmt: skip
    shown = {"Authorization": f"Bearer {TOKENS['reader']}"}
    wait_until(lambda: lookupd.request("GET", "/nodes", headers=shown).json["producers"], "nsqd is listed")
    report = Report(
        f"--lookupd-http-address=https://{address_of(https_address(lookupd))}",
        f"--tls-root-ca-file={certificates.ca}",
        f"--token=file:{tmp_path / 'reader'}",
    )
    assert report.code == 0, report.findings
    assert any("not shown to it in clear" in text for text in report.of("nsqd", "warning")), report.findings
    assert not any("messages wait" in text for text in report.of("nsqd", "ok")), "it was not let in"


def test_it_changes_nothing(nsqd: Nsqd):
    with nsqd.connect() as connection:
        connection.ok(pub("t", b"x"))
        before = nsqd.get("/stats?format=json&include_mem=false&include_clients=false")["topics"]
        Report(f"--nsqd-tcp-address={address_of(nsqd.tcp)}", "--topic=other")
        assert nsqd.get("/stats?format=json&include_mem=false&include_clients=false")["topics"] == before


def test_text_and_mistakes():
    def run(*flags: str) -> subprocess.CompletedProcess[str]:
        return flintmq("doctor", *flags)

    text = run("--nsqd-tcp-address=127.0.0.1:1").stdout
    assert "nsqd 127.0.0.1:1\n  problem  cannot be used:" in text and text.endswith("\n\n1 problem\n")
    here = run().stdout  # where none is named those of this machine are meant
    assert "\nnsqlookupd http://127.0.0.1:4161\n" in here and "\nnsqd 127.0.0.1:4150\n" in here
    assert "did you mean" in run("--lookupd-http-adress=x").stderr
