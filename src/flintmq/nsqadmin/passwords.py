"""``python -m flintmq.nsqadmin.passwords``: print what stands in ``--users-file`` for a password that is typed."""

from __future__ import annotations

import getpass
import secrets
import sys

from flintmq.nsqadmin.access import PASSWORD_SIZE_MAX, hash_password

SALT_SIZE = 16


def main() -> int:
    """Read a password, from the terminal or a line of stdin, and print its hash; return the exit code."""
    if sys.stdin.isatty():
        password = getpass.getpass("password: ")
        if password != getpass.getpass("once more: "):
            sys.stderr.write("the two are not the same\n")
            return 1
    else:
        password = sys.stdin.readline().rstrip("\n")
    if not 0 < len(password) <= PASSWORD_SIZE_MAX:
        sys.stderr.write(f"a password has 1 to {PASSWORD_SIZE_MAX} characters\n")
        return 1
    sys.stdout.write(hash_password(password, secrets.token_bytes(SALT_SIZE)) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
