"""From the options of a source or sink to connections of the blocking client, in the process that connects.

The rules of this file: files and secrets are read where they are used, on the driver and on every executor, and what is
missing is said with the name of the host; a secret goes into the connection and nowhere else; errors speak of options
as Spark users write them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import TypeVar

from flintmq.client.blocking.pipeline import SilentOptions
from flintmq.client.options import ConnectionOptions, system_env
from flintmq.client.security import SECRET_BYTES_MAX, Secret
from flintmq.errors import ConnectionFailed, NsqdError, OptionError
from flintmq.spark.errors import SOURCE
from flintmq.spark.options import LinkOptions, camel
from flintmq.version import __version__

log = logging.getLogger("flintmq.spark")

USER_AGENT = "flintmq-spark"
_FILE = "file:"

_WORDS = {
    **{name: camel(name) for name in ("tls_ca_file", "tls_cert", "tls_key", "tls_server_name", "tls_min_version")},
    "auth_secret": "authSecret",
    "tls=True": "tls=true",
    "tls=False": "tls=false",
}

Options = TypeVar("Options", bound=ConnectionOptions)


def silent_options(link: LinkOptions, connect_timeout_s: float) -> SilentOptions:
    """Return the options for connections to nsqd.

    Raises:
        OptionError: a file or secret is not to be had on this host.
    """
    secret = secret_of("authSecret", link.auth_secret) if link.auth_secret else None
    can_change = link.auth_secret.startswith(_FILE)
    return _connection_options(
        SilentOptions,
        link,
        connect_timeout_s,
        tls=link.tls,
        compression=None if link.compression == "none" else link.compression,
        deflate_level=link.deflate_level,
        # as a function it is one that the next connection may have another of, so a refusal is not the last word
        auth_secret=(lambda: secret) if secret is not None and can_change else secret,
    )


def consumer_options(link: LinkOptions, connect_timeout_s: float, frame_size_max: int) -> ConnectionOptions:
    """Return the options for a consumer: for nsqd and for nsqlookupd.

    Raises:
        OptionError: a file, secret or token is not to be had on this host.
    """
    secret: Secret | None = secret_of("authSecret", link.auth_secret) if link.auth_secret else None
    if link.auth_secret.startswith(_FILE):
        secret = partial(
            secret_of, "authSecret", link.auth_secret
        )  # a file may have another one for the next connection
    return _connection_options(
        ConnectionOptions,
        link,
        connect_timeout_s,
        frame_size_max=frame_size_max,
        tls=link.tls,
        compression=None if link.compression == "none" else link.compression,
        deflate_level=link.deflate_level,
        auth_secret=secret,
        lookup_token=secret_of("nsqlookupdToken", link.nsqlookupd_token) if link.nsqlookupd_token else None,
    )


def lookup_options(link: LinkOptions, timeout_s: float) -> ConnectionOptions:
    """Return the options for requests to nsqlookupd.

    Raises:
        OptionError: a file or token is not to be had on this host.
    """
    token = secret_of("nsqlookupdToken", link.nsqlookupd_token) if link.nsqlookupd_token else None
    return _connection_options(ConnectionOptions, link, timeout_s, lookup_token=token)


def _connection_options(kind: type[Options], link: LinkOptions, connect_timeout_s: float, **more: object) -> Options:
    if not link.tls_verify:
        _warn_unverified()
    try:
        return kind(
            client_id=f"{USER_AGENT}-{os.getpid()}",
            user_agent=f"{USER_AGENT}/{__version__}",
            connect_timeout=connect_timeout_s,
            tls_ca_file=link.tls_ca_file or None,
            tls_cert=link.tls_cert or None,
            tls_key=link.tls_key or None,
            tls_server_name=link.tls_server_name or None,
            tls_min_version=link.tls_min_version,
            tls_verify=link.tls_verify,
            **more,  # type: ignore[arg-type]
        )
    except OptionError as error:
        option = {"lookup_token": "nsqlookupdToken"}.get(error.option, camel(error.option))
        raise OptionError(option, error.value, f"{with_spark_names(error.allowed)} ({_here()})", SOURCE) from None


@cache
def _warn_unverified() -> None:
    log.warning("tlsVerify=false: whoever sits between can read and change everything")


def _here() -> str:
    return f"on host {system_env().hostname}"


def secret_of(option: str, reference: str) -> str:
    """Return the secret that ``env:NAME`` or ``file:/path`` stands for in this process."""
    kind, _, name = reference.partition(":")
    if kind == "env":
        secret = os.environ.get(name, "")
        if not secret:
            allowed = (
                f"the environment variable {name} is not set {_here()}: Spark's driver needs it before the session is "
                f"started, executors in their own environment (not by spark.executorEnv, which Spark shows); or use "
                f"file:/path"
            )
            raise OptionError(option, reference, allowed, SOURCE)
        return secret
    try:
        with Path(name.removeprefix("//")).open("rb") as file:
            data = file.read(SECRET_BYTES_MAX + 2)
    except OSError as error:
        why = f"it cannot be read {_here()}: {error.strerror or type(error).__name__}"
        raise OptionError(option, reference, why, SOURCE) from None
    data = data.rstrip(b"\r\n")
    if not 0 < len(data) <= SECRET_BYTES_MAX:
        found = "it is empty" if not data else f"it has more than {SECRET_BYTES_MAX} bytes"
        raise OptionError(option, reference, f"{found} {_here()}", SOURCE)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise OptionError(option, reference, f"it is not UTF-8 text {_here()}", SOURCE) from None


def with_spark_names(text: str) -> str:
    """Return a text of the client's, naming options as Spark users write them."""
    for ours, sparks in _WORDS.items():
        text = text.replace(ours, sparks)
    return text


def refusal_with_spark_names(error: NsqdError) -> NsqdError:
    """Return the error, naming options as Spark users write them."""
    error.detail = with_spark_names(error.detail)
    error.args = (error.code, error.detail, *error.args[2:])
    return error


@contextmanager
def spark_names() -> Iterator[None]:
    """Have errors name options as Spark users write them."""
    try:
        yield
    except ConnectionFailed as error:
        error.reason = with_spark_names(error.reason)
        error.args = (error.address, error.reason, *error.args[2:])
        raise
    except NsqdError as error:
        refusal_with_spark_names(error)
        raise
