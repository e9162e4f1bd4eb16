"""The addresses of a coordination store, as people write them, and the files beside them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.certificates import Certificates

from flintmq.cluster.store import OutcomeUnknown, StoreUnavailable
from flintmq.env import Env
from flintmq.net import etcd_wire as wire
from flintmq.net.cluster_store import PasswordFile, StoreFiles, open_store, read_addresses
from flintmq.net.etcd import EtcdStore
from flintmq.net.http_server import HttpServer, Router, json_response
from flintmq.net.tls import REQUIRE_VERIFY, ServerTls, TlsSetupError

PATIENCE_S = 60


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


# --- files that change while the daemon runs ---


async def test_a_password_is_read_again_and_stays_where_that_cannot_be(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    path = tmp_path / "password"

    def write(text: str) -> None:
        (tmp_path / "new").write_text(text)
        (tmp_path / "new").replace(path)

    write("first\n")
    source = PasswordFile(str(path), Env())
    assert await source.current() == source.known == "first"
    write("second\n")
    assert await source.current() == "second" and not caplog.text
    for text in ("", "two\nlines\n"):
        write(text)
        assert [await source.current() for _ in range(2)] == ["second"] * 2
    path.unlink()
    assert [await source.current() for _ in range(2)] == ["second"] * 2
    told = "--cluster-store-password-file="
    assert caplog.text.count(told) == 3 and caplog.text.count("the password that was in it is still used") == 3
    assert "second" not in caplog.text and "second" not in repr(source)
    write("third\n")
    assert await source.current() == "third"
    with pytest.MonkeyPatch.context() as patch:  # nobody but its owner may read it, and root always may
        patch.setattr(source, "_read", no_permission)
        write("fourth\n")
        assert [await source.current() for _ in range(2)] == ["third"] * 2
    path.chmod(0o604)
    assert await source.current() == "fourth"


def no_permission(path: str) -> str:
    raise ValueError(f"{path}: Permission denied")


@contextlib.asynccontextmanager
async def serving(certificates: Certificates, address: str = "127.0.0.1:0", **more: str) -> AsyncIterator[str]:
    """A store with nothing in it, over HTTPS."""
    router = Router()
    router.add("POST", wire.RANGE, lambda _: json_response({"header": {"revision": "1"}}))
    server = HttpServer(router)
    listener = await server.start(
        address, ServerTls(certificates.server.cert, certificates.server.key, **more).engines()
    )
    try:
        yield listener.name
    finally:
        await server.close()


def opened(address: str, files: StoreFiles) -> EtcdStore:
    """A store that gives up sooner than a daemon does."""
    return EtcdStore(Env(), replace(open_store(Env(), [f"https://{address}"], None, files)._options, timeout_s=1.0))


async def asked(store: EtcdStore) -> None:
    """Ask until there is an answer, or TLS is why there is none."""
    while True:
        try:
            assert await store.get("/a") is None
            return
        except (StoreUnavailable, OutcomeUnknown) as error:
            if "certificate" in str(error) or "unknown ca" in str(error):
                raise


def put(source: str, target: Path) -> None:
    """Give a file other contents at once, as those do who renew certificates."""
    new = target.with_suffix(".new")
    shutil.copy(source, new)
    new.rename(target)


async def test_authorities_are_read_again_when_they_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    old, new = Certificates(tmp_path / "old"), Certificates(tmp_path / "new")
    path = tmp_path / "ca.pem"
    put(old.ca, path)
    async with asyncio.timeout(PATIENCE_S):
        async with serving(old) as address:
            store = opened(address, StoreFiles(root_ca=str(path)))
            await asked(store)
            before = store._options.tls()
            assert store._options.tls() is before
        async with serving(new, address):
            with pytest.raises(StoreUnavailable, match=r"certificate verify failed.*--cluster-store-root-ca-file"):
                await asked(store)
            path.write_text("nothing of the kind\n")
            with pytest.raises(StoreUnavailable, match="certificate verify failed"):
                await asked(store)
            assert caplog.text.count("are not used, those before stay: certificate authorities") == 1
            put(new.ca, path)
            await asked(store)
            assert (
                caplog.text.count("--cluster-store-root-ca-file, --cluster-store-cert and --cluster-store-key are used")
                == 1
            )
            await store.close()


async def test_what_the_store_is_shown_is_read_again_when_it_changed(tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"

    def show(kind: str) -> None:
        put(certificates.client(kind).cert, cert)
        put(certificates.client(kind).key, key)

    show("stranger")
    wants = {"policy": REQUIRE_VERIFY, "root_ca_file": certificates.ca}
    async with asyncio.timeout(PATIENCE_S), serving(certificates, **wants) as address:
        store = opened(address, StoreFiles("", certificates.ca, str(cert), str(key)))
        with pytest.raises((StoreUnavailable, OutcomeUnknown), match=r"unknown ca.*--cluster-store-cert"):
            await asked(store)
        show("good")
        await asked(store)
        await store.close()


def test_files_that_cannot_be_used_are_refused_at_the_start(tmp_path: Path):
    files = StoreFiles(root_ca=str(tmp_path / "none"))
    with pytest.raises(TlsSetupError, match="No such file"):
        open_store(Env(), ["https://a:1"], None, files)
    (tmp_path / "none").touch()
    with pytest.raises(TlsSetupError, match="certificate authorities"):
        open_store(Env(), ["https://a:1"], None, files)
