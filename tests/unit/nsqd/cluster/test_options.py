"""The options of a cluster: what does not fit together is refused, and without them nothing of it is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.unit.broker.test_replicas import World

from flintmq.cluster.store import StoreRefused
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.tls import TlsSetupError
from flintmq.nsqd.cluster.join import new_agent, read_secret
from flintmq.nsqd.options import NsqdOptions


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"cluster": "mine"}, "--cluster-store"),
        ({"peer_address": "127.0.0.1:9"}, "--cluster-store"),
        ({"cluster_secret_file": "/secret"}, "--cluster-store"),
        ({"cluster_store_token_file": "/token"}, "--cluster-store"),
        ({"cluster_store_password_file": "/password"}, "--cluster-store"),
        ({"cluster_store_root_ca_file": "/ca.pem"}, "--cluster-store"),
        ({"cluster_store_cert": "/cert.pem"}, "--cluster-store"),
        ({"cluster_store_key": "/key.pem"}, "--cluster-store"),
        ({"cluster_store": ("host:2379",), "cluster": "a/b"}, "1 to 64"),
        ({"cluster_store": ("nonsense",)}, "host:port"),
        ({"cluster_store": ("host:2379",), "peer_address": "nonsense"}, "peer_address"),
    ],
)
def test_what_does_not_fit_together_is_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(OptionError, match=told):
        NsqdOptions(**given)  # type: ignore[arg-type]


def test_a_password_in_an_address_is_not_shown() -> None:
    with pytest.raises(OptionError) as caught:
        NsqdOptions(cluster_store=("http://me:hunter2@host:1/path",))
    assert "hunter2" not in str(caught.value)


def test_a_secret_is_as_its_file_has_it(tmp_path: Path) -> None:
    assert read_secret("") == b""
    path = tmp_path / "secret"
    path.write_bytes(b"0123456789abcdef\n")
    assert read_secret(str(path)) == b"0123456789abcdef"
    for bad in (b"short", b"x" * 5000):
        path.write_bytes(bad)
        with pytest.raises(OptionError, match="16 to 4096 bytes"):
            read_secret(str(path))
    with pytest.raises(OptionError, match="cannot be read"):
        read_secret(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("addresses", "given", "told"),
    [
        (("a:1",), {"cluster_store_password_file": "password"}, "the addresses name no user"),
        (("http://u:p@a:1",), {"cluster_store_password_file": "password"}, "have a password already"),
        (("http://u@a:1",), {"cluster_store_password_file": "missing"}, "No such file"),
        (("http://u@a:1",), {"cluster_store_root_ca_file": "missing"}, "no address of the store begins with https"),
        (("http://u@a:1",), {"cluster_store_cert": "missing"}, "no address of the store begins with https"),
        (("http://u@a:1",), {"cluster_store_key": "missing"}, "no address of the store begins with https"),
    ],
)
async def test_files_of_the_store_that_are_of_no_use_are_refused(
    addresses: tuple[str, ...], given: dict[str, str], told: str, tmp_path: Path
) -> None:
    (tmp_path / "password").write_text("hunter2\n")
    paths = {name: str(tmp_path / file) for name, file in given.items()}
    with pytest.raises(StoreRefused, match=told) as caught:
        await _join(NsqdOptions(cluster_store=addresses, **paths))  # type: ignore[arg-type]
    assert "--cluster-store" in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.parametrize("option", ["cluster_store_root_ca_file", "cluster_store_cert"])
async def test_files_for_tls_are_read(option: str, tmp_path: Path) -> None:
    path = tmp_path / "file.pem"
    path.write_text("nonsense")
    given = {option: str(path)} | ({"cluster_store_key": str(path)} if option == "cluster_store_cert" else {})
    with pytest.raises(TlsSetupError, match=r"file\.pem"):
        await _join(NsqdOptions(cluster_store=("https://a:1",), **given))  # type: ignore[arg-type]


async def _join(options: NsqdOptions) -> None:
    nothing: Any = None
    await new_agent(Env(), World().files, options, nothing, nothing, nothing, nothing, nothing)


def test_a_node_of_no_cluster_loads_nothing_of_one() -> None:
    code = (
        "import sys, flintmq.nsqd.server; ends = ('.etcd', '.leading', '.link'); "
        "print([name for name in sys.modules if 'nsqd.cluster' in name or name.endswith(ends)])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
