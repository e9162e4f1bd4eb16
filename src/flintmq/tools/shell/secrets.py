"""The secrets of one command line: for AUTH, and the bearer token for HTTP.

Rules of this file: a flag goes before the environment, and an error names the one that was obeyed.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from flintmq.errors import OptionError
from flintmq.tools.secret import SECRET_BYTES_MAX, secret_of
from flintmq.tools.shell.arguments import TOKEN_VARIABLE, VARIABLES

_TOKEN = f"1 to {SECRET_BYTES_MAX} printable characters of ASCII in one line"


def named_secret(given: argparse.Namespace, name: str) -> str | None:
    """Return the secret that an option of a command line or its environment variable names; None: neither does.

    Args:
        name: of the option, such as ``auth_secret``.

    Raises:
        OptionError: it stands for none.
    """
    reference = getattr(given, name, None)
    if not reference:
        return None
    if name in given.of_environment:
        return secret_of(VARIABLES[name], reference, "environment")
    return secret_of(f"--{name.replace('_', '-')}", reference)


def shown_token(given: argparse.Namespace) -> str | None:
    """Return the bearer token that a command line names, or the environment; None: there is none.

    Raises:
        OptionError: it cannot be read.
    """
    return named_secret(given, "token") or token_of(given.token_file)


def token_of(path: str | None) -> str | None:
    """Return the bearer token: of a file, else of the environment; None: there is none.

    Raises:
        OptionError: the file cannot be read, or it is no token.
    """
    if path is None:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
        if token and not _is_token(token):
            raise OptionError(TOKEN_VARIABLE, "<hidden>", f"one token: {_TOKEN}", "environment")
        return token or None
    try:
        with Path(path).open(encoding="ascii") as file:
            token = file.read(SECRET_BYTES_MAX + 2).strip()
    except (OSError, UnicodeError) as error:
        raise OptionError("--token-file", path, f"a file with one token: {error}", "command line") from error
    if not _is_token(token):
        raise OptionError("--token-file", path, f"a file with one token: {_TOKEN}", "command line")
    return token


def _is_token(text: str) -> bool:
    return 0 < len(text) <= SECRET_BYTES_MAX and text.isascii() and text.isprintable()
