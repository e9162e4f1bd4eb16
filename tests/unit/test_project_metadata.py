"""The metadata of a distribution: on an index every link of the README leads somewhere."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
URL = "https://example.org/flintmq"


def metadata() -> dict[str, Any]:
    """What hatchling would write, but for what stands in pyproject.toml."""
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: dict[str, Any] = {"version": tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]}
    module.CustomMetadataHook(str(ROOT), {}).update(found)
    return found


def links(text: str) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", text)


def test_links_of_a_release_are_absolute_and_name_files_that_are_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FLINTMQ_PROJECT_URL", f"{URL}/")
    found = metadata()
    at = f"{URL}/blob/v{found['version']}/"
    named = links(found["readme"]["text"])
    assert len(named) > 20
    for link in named:
        assert link.startswith("https://"), link
        if link.startswith(at):
            assert (ROOT / link.removeprefix(at).partition("#")[0]).exists(), link
    assert found["urls"]["Homepage"] == URL and found["urls"]["Changelog"] == f"{at}CHANGELOG.md"


def test_without_an_address_the_readme_is_as_it_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("FLINTMQ_PROJECT_URL", raising=False)
    found = metadata()
    assert found["readme"]["text"] == (ROOT / "README.md").read_text(encoding="utf-8")
    assert found["urls"] == {}


@pytest.mark.parametrize("url", ["example.org/flintmq", "http://example.org", "https://", "https://a b"])
def test_what_is_no_address_is_refused(monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setenv("FLINTMQ_PROJECT_URL", url)
    with pytest.raises(ValueError, match="https:// address of the project"):
        metadata()
