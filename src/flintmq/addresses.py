"""Addresses as people write them.

Source: RFC 3986 (hosts in brackets).
"""

from __future__ import annotations


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
