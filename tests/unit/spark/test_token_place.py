"""The directory of a spool's token: gone at the end, and after a kill gone with the next one that starts."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from flintmq.spark.token_place import PREFIX, TOKEN, TokenPlace


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def written(place: TokenPlace) -> Path:
    (Path(place.path) / TOKEN).write_text("secret")
    return Path(place.path)


def test_it_is_gone_at_the_end(scratch: Path):
    place = TokenPlace()
    assert written(place).stat().st_mode & 0o777 == 0o700
    place.close()
    assert list(scratch.iterdir()) == []


def test_what_a_killed_process_has_left_goes_with_the_next_start_and_nothing_else(scratch: Path):
    living, dead = TokenPlace(), TokenPlace()
    kept = {written(living), scratch / f"{PREFIX}link", scratch / f"{PREFIX}other", scratch / "flintmq-12345678"}
    left = written(dead)
    os.close(dead._lock)  # as a kill does
    (scratch / f"{PREFIX}other").mkdir()
    (scratch / f"{PREFIX}other" / "notes.txt").write_text("mine")
    (scratch / "flintmq-12345678").mkdir()
    (scratch / f"{PREFIX}link").symlink_to(scratch / "flintmq-12345678")
    following = TokenPlace()
    assert set(scratch.iterdir()) == kept | {Path(following.path)} and not left.exists()
    assert (Path(living.path) / TOKEN).read_text() == "secret"
    living.close()
    following.close()
