"""What is read again when it changes has changed as well when its owner or mode is put right."""

from __future__ import annotations

import os
from pathlib import Path

from flintmq.file_stamp import file_stamp


def test_what_is_a_change_of_a_file(tmp_path: Path):
    path, other = tmp_path / "file", tmp_path / "other"
    assert file_stamp(str(path)) is None and file_stamp("") is None
    path.write_text("first")
    seen = [file_stamp(str(path))]
    assert file_stamp(str(path)) == seen[0] is not None

    def is_new() -> bool:
        seen.append(file_stamp(str(path)))
        return seen[-1] not in seen[:-1]

    path.chmod(0o600 if path.stat().st_mode & 0o777 != 0o600 else 0o640)
    assert is_new()
    modified_ns = path.stat().st_mtime_ns
    os.utime(path, ns=(modified_ns, modified_ns))
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:  # the kernel's clock has steps
        os.chown(path, os.getuid(), os.getgid())
    assert is_new(), "nothing but the owner was given"
    other.write_text("again")
    os.utime(other, ns=(modified_ns, modified_ns))
    other.replace(path)
    assert is_new(), "with the same size and time"
