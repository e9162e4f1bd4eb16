"""The pictures of docs/nsqadmin.md: `python -m tests.browser.pictures [DIRECTORY]` makes them anew, in docs/nsqadmin.

With another directory as argument: of every page, light and dark, wide and narrow, to be looked at.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from tests.browser.deployment import Deployment, deployed
from tests.browser.visitor import CHROMIUM_FLAGS, Visitor
from tests.integration.daemons import Daemons, running_cluster, wait_until

DOCS = Path(__file__).resolve().parents[2] / "docs/nsqadmin"
SHOWN = (
    "overview", "problems", "topics", "topic", "channel", "peek", "nodes", "node", "counter", "lookup", "find",
    "message", "dead-letters", "dead-letters-topic", "create", "confirm", "audit", "login",
)  # fmt: skip
HISTORY_S = 40
SHOWN_HISTORY_S = 150
COLOURS = 256


def _work(deployment: Deployment, for_s: float) -> None:
    """Publish and consume for a while, so that the charts show something."""
    nsqd = deployment.nsqds[0]
    end = time.monotonic() + for_s
    with nsqd.connect() as connection:
        connection.subscribe("orders", "archive", 20)
        number = 0
        while time.monotonic() < end:
            number += 1
            bodies = [b'{"order": %d, "total": 12.5}' % (number * 100 + one) for one in range(20 + number % 40)]
            nsqd.publish("orders", *bodies)
            for message in connection.messages(20):
                connection.finish(message)
            time.sleep(0.1)


def _draw(visitor: Visitor, deployment: Deployment, directory: Path, names: tuple[str, ...], looks: list[str]) -> None:
    for name in names:
        path = deployment.paths()[name]
        visitor.page.goto(visitor.url + path)
        for look in looks:
            visitor.look("dark" if "dark" in look else "light", "narrow" in look)
            if visitor.page.locator(".chart").count():
                visitor.page.locator(".chart canvas").first.wait_for()
            target = directory / (f"{name}-{look}.png" if len(looks) > 1 else f"{name}.png")
            visitor.page.screenshot(path=target, full_page=True)


def main(arguments: list[str]) -> None:
    """Make them."""
    directory = Path(arguments[0]) if arguments else DOCS
    directory.mkdir(parents=True, exist_ok=True)
    executable = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=CHROMIUM_FLAGS)
        flag = "--e2e-processing-latency-percentile=0.99,0.5"
        with deployed(Path(temporary), flag, is_tidy=not arguments) as deployment:
            visitor = Visitor(browser, deployment.url)
            _work(deployment, HISTORY_S if arguments else SHOWN_HISTORY_S)
            wait_until(lambda: visitor.open("/").locator(".chart").count() >= 2, "there is some history")
            if arguments:
                looks = ["light", "light-narrow", "dark", "dark-narrow"]
                _draw(visitor, deployment, directory, tuple(deployment.paths()), looks)
            else:
                _draw(visitor, deployment, directory, SHOWN, ["light"])
                visitor.page.goto(f"{visitor.url}/topics/orders")
                visitor.look("dark", is_narrow=True)
                visitor.page.screenshot(path=directory / "phone.png", full_page=False)
        _draw_cluster(browser, directory)
        browser.close()
    for path in directory.glob("*.png"):
        with Image.open(path) as picture:
            picture.convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
                path, optimize=True
            )


def _draw_cluster(browser: Browser, directory: Path) -> None:
    """A cluster one of whose nodes was killed."""
    with tempfile.TemporaryDirectory() as temporary, running_cluster(Path(temporary)) as cluster:
        cluster.create("orders", 4, 3)
        for number in range(4):
            cluster.leader("orders", number).post(f"/pub?topic=orders&partition={number}", b"body")
        admin = Daemons(Path(temporary))
        try:
            nsqadmin = admin.nsqadmin(f"--lookupd-http-address=127.0.0.1:{cluster.nsqlookupd.http[1]}")
            visitor = Visitor(browser, nsqadmin.url)
            leader = cluster.leader("orders")
            leader.kill()
            cluster.leader("orders", but=leader)
            wait_until(lambda: visitor.open("/cluster").get_by_text("2 of 3").count(), "a copy is missing")
            move = "/confirm/move_partition?topic=orders&partition=0"
            for name, path in (("cluster", "/cluster"), ("cluster-topic", "/topics/orders"), ("move", move)):
                visitor.open(path).screenshot(path=directory / f"{name}.png", full_page=True)
        finally:
            admin.close()


if __name__ == "__main__":
    main(sys.argv[1:])
