"""The name of this nsqd, and its addresses: for clients, nsqlookupds, statsd and the trace.

Rules of this file: where it listens is known once it does; what the flags say goes before what is found out.

Source: NSQ's HTTP API (``/info``), NSQ's nsqlookupd (IDENTIFY of a nsqlookupd), NSQ's statsd (keys of statsd).
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from typing import Any

from flintmq.addresses import format_address
from flintmq.env import Env
from flintmq.errors import without_credentials
from flintmq.nsqd.options import NsqdOptions, node_id_of
from flintmq.options import daemon_version_line
from flintmq.version import __version__
from flintmq.wire.identify import NSQ_VERSION
from flintmq.wire.lookup import PeerInfo

_RUN_ID_SIZE = 32


@dataclass(frozen=True, slots=True)
class Addresses:
    """Addresses that an nsqd listens at; None for what it does not."""

    tcp: tuple[str, int] | None
    http: tuple[str, int] | None
    https: tuple[str, int] | None = None


class Identity:
    """The name and the addresses of one nsqd.

    Attributes:
        version: of NSQ, as clients are told.
        version_line: as ``--version`` prints it.
        start_ns: wall time of its start.
        run_id: tells this process from every other nsqd, and from the one that was here before.
        addresses: where it listens; set by the server.
    """

    def __init__(self, env: Env, options: NsqdOptions) -> None:
        self.version = NSQ_VERSION
        self.version_line = daemon_version_line("nsqd", NSQ_VERSION)
        self.start_ns = env.clock.wall_ns()
        place = f"{env.hostname} {os.path.abspath(options.data_path)} {self.start_ns}"
        self.run_id = hashlib.sha256(place.encode(errors="surrogateescape")).hexdigest()[:_RUN_ID_SIZE]
        self.addresses = Addresses(None, None)
        self._hostname = env.hostname
        self._options = options

    @property
    def node_id(self) -> int:
        """The number of this node, which the redesigned NSQ tells its nodes apart by."""
        node_id = self._options.node_id
        return node_id_of(self._hostname) if node_id is None else node_id

    def peer(self) -> PeerInfo:
        """Return what a nsqlookupd is told of a plain nsqd.

        Without a port for HTTP it is told that for HTTPS: it takes nobody without one, and who asks there in clear is
        told to use TLS.
        """
        options, hostname = self._options, self._hostname
        tcp, http = self.addresses.tcp, self.addresses.http or self.addresses.https
        return PeerInfo(
            version=self.version,
            tcp_port=options.broadcast_tcp_port or (tcp[1] if tcp else 0),
            http_port=options.broadcast_http_port or (http[1] if http else 0),
            hostname=hostname,
            broadcast_address=options.broadcast_address or hostname,
            topology_zone=options.topology_zone,
            topology_region=options.topology_region,
        )

    def info(self, is_draining: bool) -> dict[str, Any]:
        """Return the answer of /info."""
        options = self._options
        tcp, http = self.addresses.tcp, self.addresses.http
        return {
            "version": self.version,
            "broadcast_address": options.broadcast_address or self._hostname,
            "hostname": self._hostname,
            "http_port": http[1] if http else (-1 if options.http_address else 0),
            "tcp_port": tcp[1] if tcp else -1,
            "start_time": self.start_ns // 1_000_000_000,
            "max_heartbeat_interval": options.max_heartbeat_interval_ns,
            "max_output_buffer_size": options.max_output_buffer_size,
            "max_output_buffer_timeout": options.max_output_buffer_timeout_ns,
            "max_deflate_level": options.max_deflate_level,
            "topology_zone": options.topology_zone,
            "topology_region": options.topology_region,
            "flintmq_version": __version__,
            **({"draining": True} if is_draining else {}),
        }

    @property
    def statsd_prefix(self) -> str:
        """The beginning of every key that statsd is told."""
        me = self.peer()
        return prefix_of(self._options.statsd_prefix, me.broadcast_address, me.http_port)

    def filled_in(self) -> dict[str, Any]:
        """Return options that are not shown as they were given, by their name in a configuration file."""
        me = self.peer()
        return {
            "cluster_store": [without_credentials(each) for each in self._options.cluster_store],
            "broadcast_address": me.broadcast_address,
            "broadcast_tcp_port": me.tcp_port,
            "broadcast_http_port": me.http_port,
            "id": self.node_id,
            "statsd_prefix": self.statsd_prefix,
        }


def prefix_of(template: str, host: str, port: int) -> str:
    """Return what keys of statsd start with, a point at its end; ``%s`` is host and port, with ``_`` for ``.:``."""
    key = format_address(host, port).replace(".", "_").replace(":", "_")
    prefix = template.replace("%s", key)
    return prefix if not prefix or prefix.endswith(".") else f"{prefix}."
