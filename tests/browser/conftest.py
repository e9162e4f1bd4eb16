"""One browser for all tests of this folder: Debian's Chromium, driven by Playwright, that speaks to 127.0.0.1 only.

Without a Chromium in the path, or without axe (`npm ci` in this folder), the tests are skipped; with CI set they fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright
from tests.browser.deployment import Deployment, deployed
from tests.browser.visitor import CHROMIUM_FLAGS, Visitor, axe_source
from tests.chromium import CHROMIUM
from tests.integration.daemons import PATIENCE_S


def _needs(is_there: bool, what: str) -> None:
    if is_there:
        return
    if os.environ.get("CI"):
        pytest.fail(f"{what}: `make setup` installs it, and CI needs it", pytrace=False)
    pytest.skip(what)


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """The browser."""
    _needs(CHROMIUM is not None, "no chromium in the path")
    _needs(axe_source.exists(), "no axe: run npm ci in tests/browser")
    expect.set_options(timeout=PATIENCE_S * 1000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="package")
def deployment(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """The daemons that most tests look at."""
    with deployed(tmp_path_factory.mktemp("deployment")) as deployment:
        yield deployment


@pytest.fixture
def visitor(browser: Browser, deployment: Deployment) -> Iterator[Visitor]:
    """Somebody at the pages, with a profile of their own."""
    visitor = Visitor(browser, deployment.url)
    yield visitor
    visitor.leave()
