"""Ranges of addresses, for endpoints that not everybody may use.

Source: NSQ's options (``--allow-config-from-cidr`` of nsqadmin).
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from flintmq.net.address import split_address

LOOPBACK = ("127.0.0.1/8", "::1/128")
UNIX_PEER = "@"


class Networks:
    """The networks whose clients may.

    Args:
        ranges: such as ``10.0.0.0/8``, bits behind the prefix do not matter; none of them means everybody.

    Raises:
        ValueError: one is not a range of addresses.
    """

    def __init__(self, ranges: Iterable[str]) -> None:
        self._networks: list[IPv4Network | IPv6Network] = [ip_network(each, strict=False) for each in ranges]

    def allows(self, peer: str) -> bool:
        """Whether ``ip:port`` is in one of the ranges; a unix socket is, because its file has permissions."""
        if not self._networks or peer == UNIX_PEER:
            return True
        address = split_address(peer)
        if address is None:
            return False
        try:
            found = ip_address(address[0].partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(found, "ipv4_mapped", None)
        return any((mapped or found) in network for network in self._networks)
