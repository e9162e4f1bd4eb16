"""Files of other people that nsqadmin carries: what assets.json says of them holds, and each has its licence."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NPM = ROOT / "tests/browser"
STATIC = ROOT / "src/flintmq/nsqadmin/static"
VENDOR = STATIC / "vendor"
ASSETS = json.loads((VENDOR / "assets.json").read_text(encoding="utf-8"))
SIZE_MAX = 200 * 1024


def test_every_file_is_the_one_that_was_made():
    for asset in ASSETS:
        body = (VENDOR / asset["file"]).read_bytes()
        assert hashlib.sha256(body).hexdigest() == asset["sha256"], f"{asset['file']} was changed by hand"
    named = {asset["file"] for asset in ASSETS} | {"assets.json", "LICENCES.txt"}
    assert {path.name for path in VENDOR.iterdir()} == named


def test_versions_are_those_that_npm_pins():
    wanted = json.loads((NPM / "package.json").read_text(encoding="utf-8"))["dependencies"]
    locked = json.loads((NPM / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert {asset["package"]: asset["version"] for asset in ASSETS} == wanted
    for name, version in wanted.items():
        entry = locked[f"node_modules/{name}"]
        assert entry["version"] == version and entry["integrity"].startswith("sha512-")


def test_every_package_has_its_licence():
    licences = (VENDOR / "LICENCES.txt").read_text(encoding="utf-8")
    for asset in ASSETS:
        assert f"{asset['package']} {asset['version']} ({asset['licence']})\n" in licences
        assert asset["licence"] in ("MIT", "0BSD")
    assert licences.count("Permission") >= 3


def test_they_are_small_and_speak_to_nobody():
    assert sum(path.stat().st_size for path in STATIC.rglob("*.*")) <= SIZE_MAX
    for path in STATIC.rglob("*.*"):
        if path.suffix in (".css", ".js"):
            text = path.read_text(encoding="utf-8")
            assert "sourceMappingURL" not in text
            assert not re.search(r"url\(\s*[\"']?(https?:)?//|@import", text), f"{path.name} loads something"


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
@pytest.mark.skipif(not (NPM / "node_modules/purgecss").exists(), reason="run npm ci in tests/browser")
def test_they_are_what_would_be_made_now():
    made = subprocess.run(["node", "assets.mjs", "--check"], cwd=NPM, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
