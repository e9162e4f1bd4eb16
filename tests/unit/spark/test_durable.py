"""Files that are whole after a loss of power."""

from __future__ import annotations

import os
from pathlib import Path

from flintmq.spark import durable


def test_a_file_has_its_name_when_it_is_on_disk(tmp_path: Path, monkeypatch):
    staged, path = tmp_path / "staged", tmp_path / "named"
    staged.write_text("all of it")
    done = []
    rename = os.replace

    def renamed(*paths: Path) -> None:
        done.append("renamed")
        rename(*paths)

    monkeypatch.setattr(os, "fsync", lambda descriptor: done.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    monkeypatch.setattr(os, "replace", renamed)
    durable.replace(staged, path)
    assert done == [str(staged), "renamed", str(tmp_path)]
    assert path.read_text() == "all of it" and not staged.exists()
