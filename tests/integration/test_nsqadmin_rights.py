"""Who may do what at nsqadmin: logging in, roles, what changes have to carry, headers, and the audit log."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from tests.integration.daemons import PATIENCE_S, Answer, Daemons, Nsqadmin, Nsqd, wait_until

TOKENS = {"reader": "reader-0123456789", "operator": "operator-0123456789", "chief": "chief-0123456789ab"}
HTML = {"Accept": "text/html"}
FORM = {"Content-Type": "application/x-www-form-urlencoded", **HTML}


class Deployment:
    """An nsqd with a message in t/c, and an nsqadmin with users."""

    def __init__(self, daemons: Daemons, directory: Path, *flags: str) -> None:
        self.nsqd: Nsqd = daemons.nsqd("--durability=os")
        hashed = subprocess.run(
            [sys.executable, "-m", "flintmq.nsqadmin.passwords"],
            input="open sesame\n", capture_output=True, text=True, timeout=PATIENCE_S, check=True,
        ).stdout.strip()  # fmt: skip
        roles = {"reader": "read", "operator": "operate", "chief": "admin"}
        users = [
            f'[[user]]\nname = "{name}"\nrole = "{role}"\ntoken = "{TOKENS[name]}"\npassword = "{hashed}"\n'
            for name, role in roles.items()
        ]
        (directory / "users.toml").write_text("".join(users))
        self.audit = directory / "audit.log"
        self.nsqadmin: Nsqadmin = daemons.nsqadmin(
            "--http-address=127.0.0.1:0",
            f"--nsqd-http-address=127.0.0.1:{self.nsqd.http[1]}",
            f"--users-file={directory / 'users.toml'}",
            f"--audit-log={self.audit}",
            *flags,
        )

    def topic(self, name: str) -> str:
        self.nsqd.post(f"/topic/create?topic={name}")
        self.nsqd.post(f"/channel/create?topic={name}&channel=c")
        self.nsqd.publish(name, b"the body")
        return name

    def as_user(self, name: str, method: str, path: str, body: object = None) -> Answer:
        data = None if body is None else json.dumps(body).encode()
        return self.nsqadmin.request(method, path, data, {"Authorization": f"Bearer {TOKENS[name]}"})

    def log_in(
        self, name: str, password: str = "open sesame", wanted: str = "/topics", headers: Mapping[str, str] = FORM
    ) -> Answer:
        form = {
            "name": name,
            "password": password,
            "next": wanted,
            "csrf": csrf_of(self.nsqadmin.request("GET", "/login", None, HTML)),
        }
        return self.nsqadmin.request("POST", "/login", urlencode(form).encode(), dict(headers))

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


def csrf_of(answer: Answer) -> str:
    found = re.search(rb'name="csrf"[^>]*value="([0-9a-f]+)"', answer.body)
    assert found, answer.body
    return found[1].decode()


def cookie_of(answer: Answer) -> str:
    return str(answer.headers["Set-Cookie"]).partition(";")[0]


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("rights")
    daemons = Daemons(directory)
    try:
        yield Deployment(daemons, directory)
    finally:
        daemons.close()


def test_nobody_sees_anything_before_logging_in(deployed: Deployment):
    answer = deployed.nsqadmin.request("GET", "/topics?sort=-depth", None, HTML)
    assert (answer.status, answer.headers["Location"]) == (303, "/login?next=%2Ftopics%3Fsort%3D-depth")
    for path in ("/api/topics", "/api/v2/topics", "/config/log_level"):
        answer = deployed.nsqadmin.request("GET", path)
        assert answer.status == 401, path
    assert deployed.nsqadmin.request("GET", "/ping").status == 200
    assert deployed.nsqadmin.request("DELETE", "/api/topics/t").status == 401


def test_a_log_in_leads_where_the_visitor_wanted_to_go(deployed: Deployment):
    answer = deployed.log_in("operator", wanted="/topics?sort=-depth")
    assert (answer.status, answer.headers["Location"]) == (303, "/topics?sort=-depth")
    cookie = str(answer.headers["Set-Cookie"])
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {each.strip() for each in cookie.split(";")}
    page = deployed.nsqadmin.request("GET", "/topics", None, {"Cookie": cookie_of(answer), **HTML})
    assert page.status == 200 and b"operator" in page.body
    assert deployed.lines()[-1].items() >= {"action": "log_in", "who": "operator", "outcome": "done"}.items()


@pytest.mark.parametrize(
    "wanted", ["//evil.example", "https://evil.example", "/\\evil.example", "javascript:alert(1)", "/a\nb"]
)
def test_a_log_in_leads_to_nobody_else(deployed: Deployment, wanted: str):
    assert deployed.log_in("reader", wanted=wanted).headers["Location"] == "/"


def test_a_wrong_password_is_refused_and_written_down_without_it(deployed: Deployment):
    answer = deployed.log_in("operator", "wrong password")
    assert answer.status == 401 and "Set-Cookie" not in answer.headers
    assert deployed.lines()[-1].items() >= {"action": "log_in_failed", "who": "operator", "outcome": "refused"}.items()
    assert "wrong password" not in deployed.audit.read_text()


def test_a_log_in_needs_the_form_that_we_made(deployed: Deployment):
    form = {"name": "chief", "password": "open sesame", "next": "/", "csrf": "00" * 32}
    assert deployed.nsqadmin.request("POST", "/login", urlencode(form).encode(), FORM).status == 403


def test_each_role_may_what_it_may(deployed: Deployment):
    topic = deployed.topic("roles")
    pause = {"action": "pause"}
    assert deployed.as_user("reader", "GET", f"/api/topics/{topic}").status == 200
    assert deployed.as_user("reader", "POST", f"/api/topics/{topic}", pause).status == 403
    assert deployed.as_user("operator", "POST", f"/api/topics/{topic}", pause).status == 200
    assert deployed.as_user("operator", "DELETE", f"/api/topics/{topic}/c").status == 403
    assert deployed.as_user("operator", "GET", "/api/v2/audit").status == 403
    assert deployed.as_user("chief", "DELETE", f"/api/topics/{topic}/c").status == 200
    done = deployed.lines()[-1]
    assert (done["who"], done["role"], done["how"]) == ("chief", "admin", "token")
    assert (done["action"], done["subject"], done["outcome"]) == ("delete_channel", f"{topic}/c", "done")
    rows = deployed.as_user("chief", "GET", "/api/v2/audit?text=chief").json["rows"]
    assert rows[0]["action"] == "delete_channel"


def test_a_channel_is_set_to_a_time_by_whoever_may_empty_it(deployed: Deployment):
    topic = deployed.topic("set")
    for name, status in (("operator", 403), ("chief", 303)):
        headers = {"Cookie": cookie_of(deployed.log_in(name)), **FORM}
        page = deployed.nsqadmin.request("GET", f"/topics/{topic}/c", None, headers)
        assert [f"/confirm/{act}?" in page.text for act in ("set_channel", "empty_channel")] == [status == 303] * 2
        assert "/act/pause_channel" in page.text
        assert deployed.nsqd.stats(topic, "c")["depth"] == 1
        form = {"topic": topic, "channel": "c", "when": "end", "confirm": "c", "csrf": csrf_of(page)}
        answer = deployed.nsqadmin.request("POST", "/act/set_channel", urlencode(form).encode(), headers)
        assert answer.status == status
        row = deployed.lines()[-1]
        assert (row["who"], row["action"], row["subject"]) == (name, "set_channel", f"{topic}/c")
        assert row["outcome"] == ("done" if status == 303 else "refused")
    assert deployed.nsqd.stats(topic, "c")["depth"] == 0


def test_bodies_are_hidden_from_who_may_only_look(deployed: Deployment):
    topic = deployed.topic("bodies")
    hidden = deployed.as_user("reader", "GET", f"/api/v2/peek/{topic}/c").json
    assert hidden["are_bodies_hidden"] and hidden["messages"][0]["body"] is None
    assert hidden["messages"][0]["body_size"] == len("the body")
    shown = deployed.as_user("operator", "GET", f"/api/v2/peek/{topic}/c").json
    assert shown["messages"][0]["body"] == "the body"


def test_a_change_of_a_page_carries_what_only_our_page_for_this_visitor_has(deployed: Deployment):
    topic = deployed.topic("csrf")
    chief = {"Cookie": cookie_of(deployed.log_in("chief")), **FORM}
    operator = {"Cookie": cookie_of(deployed.log_in("operator")), **FORM}
    page = deployed.nsqadmin.request("GET", f"/topics/{topic}", None, chief)
    good = csrf_of(page)
    of_another = csrf_of(deployed.nsqadmin.request("GET", f"/topics/{topic}", None, operator))
    for csrf in ("", "00" * 32, of_another):
        form = urlencode({"topic": topic, "csrf": csrf}).encode()
        assert deployed.nsqadmin.request("POST", "/act/pause_topic", form, chief).status == 403
    headers = {"Cookie": chief["Cookie"], "X-CSRF-Token": of_another}
    body = b'{"action": "pause"}'
    assert deployed.nsqadmin.request("POST", f"/api/topics/{topic}", body, headers).status == 403
    assert not deployed.nsqd.stats(topic)["paused"]
    headers["X-CSRF-Token"] = good
    assert deployed.nsqadmin.request("POST", f"/api/topics/{topic}", body, headers).status == 200
    assert deployed.nsqd.stats(topic)["paused"]


def test_after_logging_out_the_cookie_opens_nothing(deployed: Deployment):
    headers = {"Cookie": cookie_of(deployed.log_in("reader")), **FORM}
    csrf = csrf_of(deployed.nsqadmin.request("GET", "/topics", None, headers))
    assert deployed.nsqadmin.request("POST", "/logout", urlencode({"csrf": csrf}).encode(), headers).status == 303
    assert deployed.nsqadmin.request("GET", "/topics", None, headers).status == 303


def test_every_answer_keeps_browsers_from_running_framing_and_guessing(deployed: Deployment):
    chief = {"Authorization": f"Bearer {TOKENS['chief']}", **HTML}
    for path in ("/", "/topics", "/api/topics", "/none", "/static/nsqadmin.js", "/login"):
        headers = deployed.nsqadmin.request("GET", path, None, chief).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy, path
        assert "unsafe-inline" not in policy and "unsafe-eval" not in policy, path
        assert headers["X-Content-Type-Options"] == "nosniff", path
        assert headers["X-Frame-Options"] == "DENY", path
        assert headers["Referrer-Policy"] == "same-origin", path
        assert "Server" not in headers, path


def test_pages_run_no_script_of_their_own_text(deployed: Deployment):
    chief = {"Authorization": f"Bearer {TOKENS['chief']}", **HTML}
    topic = deployed.topic("inline")
    for path in (
        "/",
        "/topics",
        f"/topics/{topic}",
        f"/topics/{topic}/c",
        "/nodes",
        "/lookup",
        "/counter",
        "/problems",
    ):
        page = deployed.nsqadmin.request("GET", path, None, chief)
        assert page.status == 200, path
        text = page.body.decode()
        assert not re.search(r"<script(?![^>]*\bsrc=)(?![^>]*type=\"application/json\")", text), path
        assert not re.search(r"<[a-z][^>]*\s(on[a-z]+|style)=", text), path


def test_the_page_of_changes_has_those_from_before_the_start(deployed: Deployment):
    topic = deployed.topic("before")
    assert deployed.as_user("operator", "POST", f"/api/topics/{topic}", {"action": "pause"}).status == 200
    with deployed.audit.open("ab") as file:
        file.write(b"\xff no line of ours\n")
    deployed.nsqadmin.restart()
    rows = deployed.as_user("chief", "GET", f"/api/v2/audit?text={topic}").json["rows"]
    assert [(row["who"], row["action"], row["subject"]) for row in rows] == [("operator", "pause_topic", topic)]


@pytest.fixture
def proxied(daemons: Daemons, tmp_path: Path) -> Deployment:
    """One with nothing in its audit log, that believes the proxies of this machine."""
    return Deployment(daemons, tmp_path, "--acl-from-cidr=127.0.0.1/32")


def test_a_change_that_is_refused_to_nobody_we_know_is_written_down(proxied: Deployment):
    body = json.dumps({"topic": "new"}).encode()
    basic = base64.b64encode(b"ann:secret").decode()
    for headers, status, who in (
        ({}, 401, ""),
        ({"Authorization": "Bearer 0123456789-nobody"}, 401, ""),
        ({"X-Forwarded-User": "mallory"}, 401, "mallory"),
        ({"Authorization": f"Basic {basic}"}, 401, "ann"),
        ({"Origin": "https://evil.example", "X-Forwarded-For": "203.0.113.7"}, 403, ""),
    ):
        answer = proxied.nsqadmin.request("POST", "/api/topics", body, headers)
        assert answer.status == status, headers
        row = proxied.lines()[-1]
        assert (row["action"], row["subject"], row["outcome"]) == ("change", "POST /api/topics", "refused"), headers
        assert (row["who"], row["role"], row["is_known"]) == (who, "none", False), headers
        assert row["failures"] == [answer.json["message"]]
        assert row["forwarded_for"] == headers.get("X-Forwarded-For", "")
    for path in ("/", "/api/topics"):
        proxied.nsqadmin.request("GET", path)  # who only looks changes nothing
    assert len(proxied.lines()) == 5
    assert "secret" not in proxied.audit.read_text() and basic not in proxied.audit.read_text()


def test_a_form_of_an_administrator_that_no_page_of_ours_has_made_is_written_down(proxied: Deployment):
    chief = {"Cookie": cookie_of(proxied.log_in("chief")), **FORM}
    form = urlencode({"topic": "t", "csrf": "00" * 32}).encode()
    assert proxied.nsqadmin.request("POST", "/act/pause_topic", form, chief).status == 403
    row = proxied.lines()[-1]
    assert (row["who"], row["is_known"], row["role"]) == ("chief", True, "admin")
    assert (row["action"], row["subject"], row["outcome"]) == ("change", "POST /act/pause_topic", "refused")


def test_guesses_fill_neither_the_audit_log_nor_its_page(proxied: Deployment):
    topic = proxied.topic("kept")
    assert proxied.as_user("operator", "POST", f"/api/topics/{topic}", {"action": "pause"}).status == 200
    csrf = csrf_of(proxied.nsqadmin.request("GET", "/login", None, HTML))
    form = urlencode({"name": "x" * 5000, "password": "y", "next": "/", "csrf": csrf}).encode()
    statuses = [proxied.nsqadmin.request("POST", "/login", form, FORM).status for _ in range(100)]
    assert statuses[0] == 401 and 429 in statuses
    lines = proxied.lines()
    assert lines[0]["action"] == "pause_topic" and 20 <= len(lines) - 1 < 100
    assert lines[1]["who"] == lines[1]["subject"] == "x" * 64
    proxied.nsqadmin.restart()
    rows = proxied.as_user("chief", "GET", "/api/v2/audit?count=1&text=").json["rows"]
    assert [row["action"] for row in rows if row["outcome"] == "done"] == ["pause_topic"]
    (more,) = proxied.as_user("chief", "GET", "/api/v2/audit?text=more_refusals").json["rows"][:1]
    counted = [int(line["subject"]) for line in proxied.lines() if line["action"] == "more_refusals"]
    written = [line for line in proxied.lines() if line["action"] == "log_in_failed"]
    assert len(written) + sum(counted) == 100 and more["subject"] == str(counted[-1])


def test_a_guesser_behind_a_proxy_keeps_nobody_else_from_logging_in(proxied: Deployment):
    guesser = {**FORM, "X-Forwarded-For": "203.0.113.9, 203.0.113.7"}
    statuses = [proxied.log_in("chief", f"guess {number}", headers=guesser).status for number in range(40)]
    assert 429 in statuses
    assert proxied.lines()[-1]["forwarded_for"] == "203.0.113.7"
    other = {**FORM, "X-Forwarded-For": "203.0.113.8"}
    assert proxied.log_in("chief", headers=other).status == 303
    done = proxied.lines()[-1]
    assert (done["action"], done["forwarded_for"]) == ("log_in", "203.0.113.8")
    assert done["address"].startswith("127.0.0.1:") and done["is_known"]
    page = proxied.nsqadmin.request("GET", "/audit", None, {"Authorization": f"Bearer {TOKENS['chief']}", **HTML})
    assert f"none, 203.0.113.8 through {done['address']}" in page.text
    rows = proxied.as_user("chief", "GET", "/api/v2/audit?text=203.0.113.8").json["rows"]
    assert [row["action"] for row in rows] == ["log_in"]


def test_the_audit_says_to_what_an_option_was_set_and_what_was_refused(proxied: Deployment):
    chief = {"Authorization": f"Bearer {TOKENS['chief']}"}
    for path, body, status, subject in (
        ("log_level", b"debug", 200, "log_level=debug"),
        ("log_level", b"loud", 400, "log_level"),
        ("nsqlookupd_http_addresses", b'["127.0.0.1:4161"]', 400, "nsqlookupd_http_addresses"),
        ("verbose", b"true", 400, "verbose"),
        ("log_level", b"", 413, "log_level"),
    ):
        answer = proxied.nsqadmin.request("PUT", f"/config/{path}", body, chief)
        assert answer.status == status, (path, body)
        row = proxied.lines()[-1]
        outcome = "done" if status == 200 else "refused"
        assert (row["action"], row["subject"], row["outcome"]) == ("set_config", subject, outcome)
        assert row["failures"] == ([] if status == 200 else [answer.json["message"]])
    assert len(proxied.lines()) == 5


def test_options_that_are_set_from_where_they_may_not_be_are_written_down(daemons: Daemons, tmp_path: Path):
    closed = Deployment(daemons, tmp_path, "--allow-config-from-cidr=192.0.2.1/32")
    chief = {"Authorization": f"Bearer {TOKENS['chief']}"}
    assert closed.nsqadmin.request("GET", "/config/log_level", None, chief).status == 403
    assert closed.nsqadmin.request("PUT", "/config/log_level", b"debug", chief).status == 403
    (row,) = closed.lines()
    assert (row["action"], row["subject"], row["outcome"]) == ("set_config", "log_level", "refused")


def test_the_nsqlookupds_that_are_set_are_in_the_audit(shared: Daemons, tmp_path: Path):
    audit = tmp_path / "audit.log"
    nsqadmin = shared.nsqadmin(
        "--http-address=127.0.0.1:0", "--lookupd-http-address=127.0.0.1:1", f"--audit-log={audit}"
    )  # fmt: skip
    body = b'["127.0.0.1:2", "127.0.0.1:3"]'
    assert nsqadmin.request("PUT", "/config/nsqlookupd_http_addresses", body).status == 200
    (line,) = audit.read_text().splitlines()
    assert json.loads(line)["subject"] == "nsqlookupd_http_addresses=127.0.0.1:2,127.0.0.1:3"


def test_a_page_of_another_origin_that_is_named_may_use_the_api(deployed: Deployment, shared: Daemons):
    nsqadmin = shared.nsqadmin(
        "--http-address=127.0.0.1:0", f"--nsqd-http-address=127.0.0.1:{deployed.nsqd.http[1]}",
        "--http-allow-origin=https://wiki.example",
    )  # fmt: skip
    origin = {"Origin": "https://wiki.example"}
    answer = nsqadmin.request("GET", "/api/topics", None, origin)
    assert (answer.status, answer.headers["Access-Control-Allow-Origin"]) == (200, "https://wiki.example")
    asking = {**origin, "Access-Control-Request-Method": "DELETE"}
    answer = nsqadmin.request("OPTIONS", "/api/topics/t", None, asking)
    assert answer.status == 204 and "DELETE" in answer.headers["Access-Control-Allow-Methods"]
    assert "Access-Control-Allow-Origin" not in nsqadmin.request("GET", "/api/topics").headers
    assert nsqadmin.request("GET", "/api/topics", None, {"Origin": "https://other.example"}).status == 403


def test_a_page_says_when_everybody_may_change_everything(deployed: Deployment, shared: Daemons):
    flags = ("--http-address=127.0.0.1:0", f"--nsqd-http-address=127.0.0.1:{deployed.nsqd.http[1]}")
    page = shared.nsqadmin(*flags).request("GET", "/", None, HTML)
    assert b"Everybody who reaches this page may change everything" in page.body
    page = shared.nsqadmin(*flags, "--admin-user=ann").request("GET", "/", None, HTML)
    assert b"is believed, from any address" in page.body
    page = deployed.nsqadmin.request("GET", "/", None, {"Authorization": f"Bearer {TOKENS['chief']}", **HTML})
    assert b"Everybody who reaches this page" not in page.body


def test_a_page_says_when_the_daemons_behind_it_take_changes_from_everybody(
    deployed: Deployment, shared: Daemons, tmp_path: Path
):
    chief = {"Authorization": f"Bearer {TOKENS['chief']}", **HTML}

    def is_said(nsqadmin: Nsqadmin, nsqd: Nsqd) -> bool:
        page = nsqadmin.request("GET", "/", None, chief).body.decode()
        return f"Whoever reaches nsqd 127.0.0.1:{nsqd.http[1]} over HTTP may change everything there" in page

    wait_until(lambda: is_said(deployed.nsqadmin, deployed.nsqd), "it is said")

    (tmp_path / "clients.toml").write_text(
        '[[client]]\nname = "nsqadmin"\ntoken = "nsqadmin-0123456789"\npermissions = ["read", "admin"]\n'
    )
    (tmp_path / "token").write_text("nsqadmin-0123456789\n")
    closed = shared.nsqd("--durability=os", f"--http-auth-tokens-file={tmp_path / 'clients.toml'}")
    flags = ("--http-address=127.0.0.1:0", f"--nsqd-http-address=127.0.0.1:{closed.http[1]}", "--admin-user=ann")
    without = shared.nsqadmin(*flags)
    assert without.get("/api/v2/nodes")["missing"][0]["text"].startswith("it answers 401 ")
    nsqadmin = shared.nsqadmin(*flags, f"--http-client-token-file={tmp_path / 'token'}")
    assert nsqadmin.get("/api/v2/nodes")["missing"] == []
    ann = {"X-Forwarded-User": "ann"}
    body = json.dumps({"topic": "made"}).encode()
    assert nsqadmin.request("POST", "/api/topics", body, ann).json == {"message": ""}
    assert not is_said(nsqadmin, closed)
