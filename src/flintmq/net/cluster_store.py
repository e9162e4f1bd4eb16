"""The coordination store that options name: its addresses as people write them, and the files beside them.

An address is ``host:port``, or ``http(s)://[user:password@]host:port``, all of one store: members of an etcd, or one
nsqlookupd that keeps a store. Both daemons have the same options for it, checked and used here.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

from flintmq.addresses import format_address
from flintmq.cluster.keys import CLUSTER_NAME, Keys
from flintmq.cluster.store import StoreRefused
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.address import split_address
from flintmq.net.etcd import EtcdOptions, EtcdStore
from flintmq.net.http_auth import TokenFile
from flintmq.net.secret_file import SecretFile
from flintmq.net.tls import Renewed, client_context

FORM = "it must be host:port or http(s)://[user:password@]host:port, of members of one etcd or of one nsqlookupd"
_PASSWORD_BYTES_MAX = 1024
_PASSWORD_FLAG = "--cluster-store-password-file"
_TLS_OPTIONS = "--cluster-store-root-ca-file, --cluster-store-cert and --cluster-store-key"
_DEFAULT_PORTS = {"http": 2379, "https": 2379}


class StoreOptions(Protocol):
    """The options of a daemon about the store, each the flag of the same name."""

    @property
    def cluster(self) -> str: ...
    @property
    def cluster_store(self) -> Sequence[str]: ...
    @property
    def cluster_store_token_file(self) -> str: ...
    @property
    def cluster_store_password_file(self) -> str: ...
    @property
    def cluster_store_root_ca_file(self) -> str: ...
    @property
    def cluster_store_cert(self) -> str: ...
    @property
    def cluster_store_key(self) -> str: ...


def check_options(options: StoreOptions, is_elsewhere: bool = True) -> None:
    """Check the name of the cluster and, of a store that is elsewhere, its addresses.

    Raises:
        OptionError: one of them cannot be used.
    """
    if CLUSTER_NAME.fullmatch(options.cluster) is None:
        raise OptionError("cluster", options.cluster, "it must be 1 to 64 of A-Z a-z 0-9 _ . -", "argument")
    if is_elsewhere:
        try:
            read_addresses(options.cluster_store)
        except ValueError as error:
            raise OptionError("cluster_store", "", str(error), "argument") from None  # there may be a password in it


def store_of(env: Env, options: StoreOptions) -> EtcdStore:
    """Return the store that options name; nothing is asked yet. Blocks for small files.

    Raises:
        StoreRefused: the addresses cannot be used, or do not go with the files.
        TlsSetupError: a file for TLS cannot be used.
    """
    path = options.cluster_store_token_file
    files = StoreFiles(
        options.cluster_store_password_file,
        options.cluster_store_root_ca_file,
        options.cluster_store_cert,
        options.cluster_store_key,
    )
    token = TokenFile(path, env, "--cluster-store-token-file") if path else None
    try:
        return open_store(env, options.cluster_store, token, files, Keys(options.cluster).prefix)
    except ValueError as error:
        raise StoreRefused(f"--cluster-store: {error}") from None


def read_addresses(addresses: Sequence[str]) -> tuple[list[str], str, str]:
    """Read addresses; return the endpoints as URLs, the user and the password.

    Raises:
        ValueError: one cannot be read, or they name different users; its text has no password.
    """
    endpoints: list[str] = []
    users: dict[tuple[str, str], None] = {}
    for number, text in enumerate(addresses, 1):
        try:
            url, user, password = _read(text)
        except ValueError:
            raise ValueError(f"address {number} of {len(addresses)} cannot be read: {FORM}") from None
        endpoints.append(url)
        if user:
            users[user, password] = None
    if len(users) > 1:
        raise ValueError("the addresses have different users or passwords, and they are of one store: give one")
    user, password = next(iter(users), ("", ""))
    return list(dict.fromkeys(endpoints)), user, password


def _read(text: str) -> tuple[str, str, str]:
    if "://" not in text:
        found = split_address(text)
        if found is None or not found[0] or not 0 < found[1] < 65536:
            raise ValueError(text)
        return f"http://{format_address(*found)}", "", ""
    parts = urlsplit(text)
    port = parts.port  # also refused when it is no number
    if parts.scheme not in _DEFAULT_PORTS or not parts.hostname or parts.path not in ("", "/"):
        raise ValueError(text)
    if parts.query or parts.fragment or port == 0:
        raise ValueError(text)
    address = format_address(parts.hostname, _DEFAULT_PORTS[parts.scheme] if port is None else port)
    return f"{parts.scheme}://{address}", unquote(parts.username or ""), unquote(parts.password or "")


@dataclass(frozen=True, slots=True)
class StoreFiles:
    """Files that the way to a store needs besides addresses: the path of each, or empty.

    Attributes:
        password: one line, the password of the user that the addresses name. Read again when it changes, as are:
        root_ca: authorities of servers in PEM; those of the system when empty.
        cert, key: what this client shows, in PEM.
    """

    password: str = ""
    root_ca: str = ""
    cert: str = ""
    key: str = ""


def _context(files: StoreFiles) -> Renewed[ssl.SSLContext]:
    """Return the client's side of TLS with a store: whom it trusts, what it shows.

    Raises:
        TlsSetupError: a file is missing, cannot be read, or does not fit.
    """
    paths = (files.root_ca, files.cert, files.key)
    return Renewed(_TLS_OPTIONS, paths, lambda: client_context(files.root_ca, cert=files.cert, key=files.key))


def open_store(
    env: Env,
    addresses: Sequence[str],
    token: TokenFile | None = None,
    files: StoreFiles | None = None,
    prefix: str = "",
) -> EtcdStore:
    """Return the store behind addresses; nothing is asked yet.

    Args:
        token: shown to a nsqlookupd that asks for one.
        prefix: of all keys that are asked for, as what is said of permissions names it.

    Raises:
        ValueError: an address cannot be read, or does not go with the files.
        StoreRefused: there is none.
        TlsSetupError: a file for TLS cannot be used.
    """
    files = files or StoreFiles()
    endpoints, user, password = read_addresses(addresses)
    source: PasswordFile | None = None
    if files.password:
        if not user or password:
            what = "have a password already" if password else "name no user"
            raise ValueError(f"the file with the password {files.password} is of no use: the addresses {what}")
        source = PasswordFile(files.password, env)
        password = source.known
    is_secured = any(endpoint.startswith("https:") for endpoint in endpoints)
    if (files.root_ca or files.cert or files.key) and not is_secured:
        raise ValueError("files for TLS are of no use: no address of the store begins with https://")
    context = _context(files).now if is_secured else None
    options = EtcdOptions(endpoints, context, user, password, password_source=source, token=token, prefix=prefix)
    return EtcdStore(env, options)


class PasswordFile(SecretFile):
    """The password of a user of the store: the only line of a file, which is read again when it changes.

    Raises:
        ValueError: there is none in it.
    """

    def __init__(self, path: str, env: Env) -> None:
        super().__init__(path, env, _read_password, "password")


def _read_password(path: str) -> str:
    try:
        with Path(path).open("rb") as file:
            lines = file.read(_PASSWORD_BYTES_MAX + 1).splitlines()
        if len(lines) == 1 and len(lines[0]) <= _PASSWORD_BYTES_MAX and lines[0]:
            return lines[0].decode()
    except OSError as error:
        raise ValueError(f"{_PASSWORD_FLAG}={path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        pass
    what = f"it must have one line of UTF-8, the password, of at most {_PASSWORD_BYTES_MAX} bytes"
    raise ValueError(f"{_PASSWORD_FLAG}={path}: {what}")
