"""Ports that a daemon keeps over its restarts, and which families of addresses there are."""

from __future__ import annotations

import socket


def reserved_port() -> socket.socket:
    """Bind a port of 127.0.0.1 that nobody else is given while the socket is open, but that a daemon may listen on.

    A port that is only remembered is free while its daemon restarts, and any connection may get it as its own end.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def has_ipv6() -> bool:
    """Whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
