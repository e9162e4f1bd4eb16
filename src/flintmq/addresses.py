"""Addresses as people write them.

Source: RFC 3986 (hosts in brackets).
"""

from __future__ import annotations


def format_address(host: str, port: int) -> str:
    """Return ``host:port``, with brackets around an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shown_url(url: str) -> str:
    """Return a URL as it may be logged: with ``***`` instead of a user and password, even where it is none."""
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    _, at, place = rest.rpartition("@")
    return f"{scheme}{separator}***@{place}" if at else url
