"""The addresses of a coordination store, as people write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from flintmq.env import Env
from flintmq.net.cluster_store import StoreFiles, open_store, read_addresses


@pytest.mark.parametrize(
    ("addresses", "found"),
    [
        (["a:4161"], (["http://a:4161"], "", "")),
        (["[::1]:4161"], (["http://[::1]:4161"], "", "")),
        (["http://a"], (["http://a:2379"], "", "")),
        (["https://a:1/", "b:2", "https://a:1"], (["https://a:1", "http://b:2"], "", "")),
        (["https://me:p%40ss@a:1", "https://b:1"], (["https://a:1", "https://b:1"], "me", "p@ss")),
        (["http://me:x@a:1", "http://me:x@b:1"], (["http://a:1", "http://b:1"], "me", "x")),
    ],
)
def test_addresses(addresses, found):
    assert read_addresses(addresses) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "a:",
        ":4161",
        "a:0",
        "a:65536",
        "ftp://a:1",
        "http://",
        "http://a:x",
        "http://a:1/path",
        "http://a:1?q=1",
    ],
)
def test_what_is_no_address_is_refused_with_its_place(text):
    with pytest.raises(ValueError, match="address 2 of 2 cannot be read: it must be host:port or http"):
        read_addresses(["a:1", text])


def test_a_password_is_not_told():
    for addresses in (["http://me:secret@a:x"], ["http://me:secret@a:1", "http://you:secret@b:1"]):
        with pytest.raises(ValueError) as refused:
            read_addresses(addresses)
        assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("addresses", "files", "text"),
    [
        (["a:1"], {"password": "good"}, "the addresses name no user"),
        (["http://u:p@a:1"], {"password": "good"}, "the addresses have a password already"),
        (["http://u@a:1"], {"password": "none"}, "No such file"),
        (["http://u@a:1"], {"password": "empty"}, "it must have one line"),
        (["http://u@a:1"], {"password": "two"}, "it must have one line"),
        (["http://u@a:1"], {"password": "latin"}, "one line of UTF-8"),
        (["a:1"], {"root_ca": "good"}, "no address of the store begins with https"),
        (["http://a:1"], {"key": "good"}, "files for TLS are of no use"),
    ],
)
def test_files_that_would_not_be_used_or_cannot_be_are_refused(
    tmp_path: Path, addresses: list[str], files: dict[str, str], text: str
):
    for name, data in (("good", b"secret\n"), ("empty", b"\n"), ("two", b"a\nb\n"), ("latin", b"\xe9\n")):
        (tmp_path / name).write_bytes(data)
    paths = {kind: str(tmp_path / name) for kind, name in files.items()}
    with pytest.raises(ValueError, match=text) as refused:
        open_store(Env(), addresses, None, StoreFiles(**paths))
    assert "secret" not in str(refused.value) and "p@" not in str(refused.value)


def test_a_password_comes_from_its_file(tmp_path: Path):
    (tmp_path / "password").write_text("päss word \n")
    store = open_store(Env(), ["http://u@a:1", "b:2"], None, StoreFiles(password=str(tmp_path / "password")))
    assert store.endpoints == ["a:1", "b:2"]
    assert (store._options.user, store._options.password) == ("u", "päss word ")
    assert "päss" not in repr(store._options)
