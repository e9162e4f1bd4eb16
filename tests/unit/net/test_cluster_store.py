"""The addresses of a coordination store, as people write them."""

from __future__ import annotations

import pytest

from flintmq.net.cluster_store import read_addresses


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
