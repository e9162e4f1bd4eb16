"""Who logs in sees what the role allows: buttons that would be refused are not there, and bodies are hidden."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from tests.browser.deployment import Deployment
from tests.browser.visitor import Visitor
from tests.certificates import Certificates
from tests.integration.daemons import Daemons, Nsqadmin
from tests.integration.test_upgrades import https_address

from flintmq.nsqadmin.access import hash_password

PASSWORD = "correct horse"


@pytest.fixture
def guarded(deployment: Deployment, tmp_path: Path) -> Iterator[Nsqadmin]:
    """An nsqadmin below /queues, with HTTPS as well, that lets in those who log in."""
    certificates = Certificates(tmp_path / "certificates")
    rows = [
        f'[[user]]\nname = "{role}"\nrole = "{role}"\npassword = "{hash_password(PASSWORD, bytes(16))}"\n'
        for role in ("read", "operate", "admin")
    ]
    (tmp_path / "users.toml").write_text("\n".join(rows))
    daemons = Daemons(tmp_path)
    try:
        yield daemons.nsqadmin(
            f"--lookupd-http-address=127.0.0.1:{deployment.nsqlookupd.http[1]}",
            f"--users-file={tmp_path / 'users.toml'}",
            "--base-path=/queues",
            "--https-address=127.0.0.1:0",
            f"--tls-cert={certificates.server.cert}",
            f"--tls-key={certificates.server.key}",
        )
    finally:
        daemons.close()


def log_in(visitor: Visitor, role: str, password: str = PASSWORD) -> None:
    visitor.page.fill("#name", role)
    visitor.page.fill("#password", password)
    visitor.page.get_by_role("button", name="Log in").click()


def test_each_role_sees_what_it_may(browser: Browser, guarded: Nsqadmin):
    seen = {}
    for role in ("read", "operate", "admin"):
        visitor = Visitor(browser, f"{guarded.url}/queues")
        page = visitor.open("/topics/orders/archive?span=3600")  # leads to the login, and comes back
        expect(page.locator("h1")).to_have_text("Log in")
        assert page.get_by_role("navigation").count() == 0 and visitor.violations() == []
        if role == "read":
            log_in(visitor, role, "wrong")
            expect(page.get_by_role("alert")).to_have_count(1)
            visitor.complaints = [each for each in visitor.complaints if "status of 401" not in each]
        log_in(visitor, role)
        expect(page.locator("h1")).to_have_text("archive")
        assert page.url == f"{visitor.url}/topics/orders/archive?span=3600"
        buttons = page.locator(".head-actions > *").all_text_contents()
        page = visitor.open("/peek?topic=orders&channel=archive")
        seen[role] = [" ".join(text.split()) for text in buttons], page.locator("pre.body").count() > 0
        page.get_by_role("button", name="Log out").click()
        expect(page.locator("h1")).to_have_text("Log in")
        visitor.leave()
    looks = ["JSON", "CSV", "Peek"]
    assert seen["read"] == (looks, False)
    assert seen["operate"] == ([*looks, "Pause"], True)
    assert seen["admin"] == ([*looks, "Set to a time…", "Pause", "Empty…", "Delete…"], True)


def test_over_https(browser: Browser, guarded: Nsqadmin):
    host, port = https_address(guarded)
    visitor = Visitor(browser, f"https://{host}:{port}/queues")
    page = visitor.open("/topics/orders")
    log_in(visitor, "admin")
    expect(page.locator("h1")).to_have_text("orders")
    (cookie,) = [each for each in page.context.cookies() if each.get("httpOnly")]
    assert cookie["secure"] is True
    page.get_by_role("button", name="Pause", exact=True).click()
    page.get_by_role("button", name="Unpause", exact=True).click()
    expect(page.locator("#told-notes .alert-success")).to_contain_text("unpaused topic orders")
    visitor.leave()
