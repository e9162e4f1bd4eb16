"""The pictures of docs/nsqadmin.md: `python -m tests.browser.pictures [DIRECTORY]` makes them anew, in docs/nsqadmin.

With another directory as argument: of every page, light and dark, wide and narrow, to be looked at.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TypeAlias

from PIL import Image
from playwright.sync_api import Browser, sync_playwright
from tests.browser.deployment import Deployment, deployed, report_query
from tests.browser.visitor import CHROMIUM_FLAGS, Visitor
from tests.chromium import CHROMIUM
from tests.integration.daemons import Daemons, running_cluster, wait_until

Colour: TypeAlias = tuple[int, int, int]

DOCS = Path(__file__).resolve().parents[2] / "docs/nsqadmin"
SHOWN = (
    "overview", "problems", "topics", "topic", "channel", "peek", "nodes", "node", "counter", "lookup", "find",
    "message", "dead-letters", "dead-letters-topic", "create", "confirm", "audit", "login",
)  # fmt: skip
HISTORY_S = 40
SHOWN_HISTORY_S = 150
COLOURS = 256
APART = 24
"""Sum over red, green and blue; colours that are nearer than this to one that is kept look the same."""
HEIGHT_MAX = 1700
"""Of a picture of the docs; what a longer page has further down is more of the same."""


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


def _change_something(visitor: Visitor, deployment: Deployment) -> None:
    """Give the page of changes something to show, and have the query be heard of."""
    page = visitor.open("/topics/orders/archive")
    for name in ("Pause", "Unpause"):
        page.get_by_role("button", name=name, exact=True).click()
        page.get_by_role("status").first.wait_for()
    report_query(deployment.nsqadmin, deployment.nsqds[0], "orders", "rides into Parquet", read=50_000)


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
            if len(looks) == 1:
                _cut(target)


def _cut(path: Path) -> None:
    with Image.open(path) as picture:
        cut = picture.crop((0, 0, picture.width, min(picture.height, HEIGHT_MAX)))
    cut.save(path)


def _reduce(path: Path) -> None:
    """Keep the colours that are there most often as they are, so that no page gets a tint, and some of all others."""
    with Image.open(path) as opened:
        picture = opened.convert("RGB")
    data = picture.tobytes()
    pixels = list(zip(data[::3], data[1::3], data[2::3], strict=True))
    counts = [colour for colour, _ in Counter(pixels).most_common()]
    kept = counts[: COLOURS // 2]
    for colour in counts[COLOURS // 2 :]:
        if len(kept) < COLOURS and _distance(colour, _nearest(colour, kept)) > APART:
            kept.append(colour)
    numbers = {colour: number for number, colour in enumerate(kept)}
    for colour in counts:
        numbers.setdefault(colour, numbers[_nearest(colour, kept)])
    reduced = Image.frombytes("P", picture.size, bytes(numbers[pixel] for pixel in pixels))
    reduced.putpalette([part for colour in kept for part in colour])
    reduced.save(path, optimize=True)


def _distance(one: Colour, other: Colour) -> int:
    return sum(abs(a - b) for a, b in zip(one, other, strict=True))


def _nearest(colour: Colour, kept: list[Colour]) -> Colour:
    return min(kept, key=lambda other: _distance(colour, other))


def main(arguments: list[str]) -> None:
    """Make them."""
    directory = Path(arguments[0]) if arguments else DOCS
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=CHROMIUM_FLAGS)
        flag = "--e2e-processing-latency-percentile=0.99,0.5"
        with deployed(Path(temporary), flag, is_tidy=not arguments) as deployment:
            visitor = Visitor(browser, deployment.url)
            _work(deployment, HISTORY_S if arguments else SHOWN_HISTORY_S)
            wait_until(lambda: visitor.open("/").locator(".chart").count() >= 2, "there is some history")
            if not arguments:
                _change_something(visitor, deployment)
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
        _reduce(path)


def _draw_cluster(browser: Browser, directory: Path) -> None:
    """A cluster one of whose nodes was killed."""
    with tempfile.TemporaryDirectory() as temporary, running_cluster(Path(temporary)) as cluster:
        cluster.create("orders", 4, 3)
        cluster.create("clicks", 1, 2)
        for number in range(4):
            cluster.leader("orders", number).post(f"/pub?topic=orders&partition={number}", b"body")
        admin = Daemons(Path(temporary))
        try:
            nsqadmin = admin.nsqadmin(f"--lookupd-http-address=127.0.0.1:{cluster.nsqlookupd.http[1]}")
            visitor = Visitor(browser, nsqadmin.url)
            _draw_move(visitor, directory)
            leader = cluster.leader("orders")
            leader.kill()
            cluster.leader("orders", but=leader)
            wait_until(lambda: visitor.open("/cluster").get_by_text("2 of 3").count(), "a copy is missing")
            for name, path in (("cluster", "/cluster"), ("cluster-topic", "/topics/orders")):
                visitor.open(path).screenshot(path=directory / f"{name}.png", full_page=True)
        finally:
            admin.close()


def _draw_move(visitor: Visitor, directory: Path) -> None:
    """What moving the copy that does not lead comes to."""
    page = visitor.open("/confirm/move_partition?topic=clicks&partition=0")
    leader = page.locator(".headers .node").first.inner_text()
    nodes = [option for option in page.locator("#source option").all_inner_texts()[1:] if option != leader]
    page.locator("#source").select_option(nodes[0])
    page.locator("#target").select_option(index=1)
    page.get_by_role("button", name="See what it comes to").click()
    page.get_by_role("button", name="Move the copy").wait_for()
    page.screenshot(path=directory / "move.png", full_page=True)


if __name__ == "__main__":
    main(sys.argv[1:])
