"""Files that are whole after a loss of power: what a name stands for is on disk before it gets that name."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file, or the names in a directory, durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(staged: Path, path: Path) -> None:
    """Rename a file, durably; at any moment the name stands for all of it, or for what it stood for before."""
    sync(staged)
    os.replace(staged, path)
    sync(path.parent)


__all__ = ["replace", "sync"]
