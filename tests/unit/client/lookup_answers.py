"""What nsqlookupd answer, for the tests of discovery."""

from __future__ import annotations

import json


def node(host: str, port: int = 4150) -> dict[str, object]:
    return {
        "remote_address": "",
        "hostname": host,
        "broadcast_address": host,
        "tcp_port": port,
        "http_port": port + 1,
        "version": "1.3.0",
        "topology_zone": "z",
    }


def bare(*nodes: dict[str, object]) -> bytes:
    return json.dumps({"channels": [], "producers": list(nodes)}).encode()
