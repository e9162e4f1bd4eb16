"""Somebody at the pages: opens them, and sees that nothing is wrong with them.

Rules of this file: every page that is opened is watched: what the console says, what fails to load, what the content
security policy stops. A page that asks for another host than its own fails the test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, ViewportSize
from tests.integration.daemons import PATIENCE_S

CHROMIUM_FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
]  # fmt: skip
axe_source = Path(__file__).parent / "node_modules/axe-core/axe.min.js"
WIDE: ViewportSize = {"width": 1280, "height": 800}
NARROW: ViewportSize = {"width": 390, "height": 844}


class Visitor:
    """A visitor with a window.

    Args:
        url: of the pages, without a slash at the end.
        has_javascript: False: the window has none.

    Attributes:
        browser: whose window it is.
        complaints: what was wrong with the pages so far; :meth:`leave` finds none.
    """

    def __init__(self, browser: Browser, url: str, has_javascript: bool = True) -> None:
        self.browser = browser
        self.url = url
        self.complaints: list[str] = []
        self._status = 200
        self._context = browser.new_context(
            viewport=WIDE, java_script_enabled=has_javascript, reduced_motion="reduce",
            ignore_https_errors=True,  # of an authority that only the tests know
        )  # fmt: skip
        self._context.set_default_timeout(PATIENCE_S * 1000)
        self.page: Page = self._context.new_page()
        self.page.on("console", self._hear)
        self.page.on("pageerror", lambda error: self.complaints.append(f"{self.page.url}: {error}"))
        self.page.on("request", self._watch)

    def _hear(self, message: ConsoleMessage) -> None:
        is_known = self._status != 200 and f"status of {self._status}" in message.text
        if message.type in ("error", "warning") and not is_known:
            self.complaints.append(f"{self.page.url}: {message.text}")

    def _watch(self, request: Request) -> None:
        if not request.url.startswith((self.url + "/", "data:")):
            self.complaints.append(f"{self.page.url} asked for {request.url}")

    def open(self, path: str, status: int = 200) -> Page:
        """Open a page and see its status; the browser's own complaint about another one than 200 is none.

        It may come late, and again when the page refreshes by itself.
        """
        self._status = status
        answer = self.page.goto(self.url + path)
        assert answer is not None
        assert answer.status == status, (path, answer.status, self.page.inner_text("body")[:500])
        return self.page

    def look(self, theme: Literal["light", "dark"], is_narrow: bool = False) -> None:
        """Go on with this theme of the system, and this width of the window."""
        self.page.emulate_media(color_scheme=theme)
        self.page.set_viewport_size(NARROW if is_narrow else WIDE)

    def violations(self) -> list[str]:
        """What axe finds on the page, a line for each rule."""
        session = self._context.new_cdp_session(self.page)  # past the content security policy, as an extension would
        session.send("Runtime.evaluate", {"expression": axe_source.read_text(encoding="utf-8")})
        session.detach()
        found: list[str] = self.page.evaluate(  # the lines alone: all that axe finds is some MB, most of it in order
            """async () => (await axe.run({resultTypes: ["violations"]})).violations.map((rule) =>
              `${rule.id}: ${rule.help}: ${rule.nodes.slice(0, 3).map((node) => node.html.slice(0, 120))}`)"""
        )
        return found

    def spills(self) -> list[str]:
        """The titles of cards with a table that is wider than they are, and does not scroll in itself."""
        found = self.page.evaluate(
            """[...document.querySelectorAll(".card")].filter((card) =>
              [...card.querySelectorAll("table")].some((table) => !table.closest(".table-responsive") &&
                table.getBoundingClientRect().right > card.getBoundingClientRect().right + 1)
            ).map((card) => card.innerText.slice(0, 40))"""
        )
        return [str(each) for each in found]

    def overflow(self) -> int:
        """By how many pixels the page is wider than the window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def table(self, name: str) -> list[dict[str, str]]:
        """The rows of a table by the label of its region, each by the headings of its columns."""
        region = self.page.get_by_role("region", name=name, exact=True)
        heads = [" ".join(text.split()) for text in region.locator("thead th").all_text_contents()]
        rows = region.locator("tbody tr").all()
        return [
            dict(zip(heads, [" ".join(text.split()) for text in row.locator("td").all_text_contents()], strict=True))
            for row in rows
        ]

    def leave(self) -> None:
        """Close the window.

        Raises:
            AssertionError: something was wrong with a page.
        """
        self._context.close()
        assert not self.complaints, self.complaints
