"""The terms on which clients are served: limits, features that IDENTIFY negotiates, TLS, who has to prove what.

Source: NSQ's TCP protocol (IDENTIFY), NSQ's TCP protocol (AUTH), NSQ's options (``--tls-required``).
"""

from __future__ import annotations

from dataclasses import dataclass

from flintmq.env import Env
from flintmq.net.tls import ServerTls
from flintmq.net.tls_engine import NewEngine
from flintmq.nsqd.auth import AuthClient, auth_client
from flintmq.nsqd.options import NsqdOptions
from flintmq.wire.identify import NSQ_VERSION, ServerFeatures
from flintmq.wire.server import ServerLimits


@dataclass(frozen=True, slots=True)
class Terms:
    """The flags that concern every connection.

    Attributes:
        limits: of commands and bodies.
        features: that IDENTIFY may have.
        tls: certificate and key; None without.
        new_tls: makes the TLS of one connection; None without.
        tls_required: ``false``, ``tcp-https`` or ``true``.
        auth: asks auth servers; None where nobody has to prove anything.
    """

    limits: ServerLimits
    features: ServerFeatures
    tls: ServerTls | None
    new_tls: NewEngine | None
    tls_required: str
    auth: AuthClient | None

    @classmethod
    def of(cls, options: NsqdOptions, env: Env, run_id: str) -> Terms:
        """Return the terms that the flags name; ``run_id`` tells clients which nsqd this is.

        Raises:
            FlintError: a certificate, or what belongs to it, cannot be used.
        """
        tls = _tls(options)
        is_required = options.tls_client_auth_policy and options.tls_required == "false"
        return cls(
            _limits(options),
            _features(options, run_id),
            tls,
            None if tls is None else tls.engines(),
            "true" if is_required else options.tls_required,
            auth_client(options, env),
        )


def _limits(options: NsqdOptions) -> ServerLimits:
    return ServerLimits(
        max_msg_size=options.max_msg_size,
        max_body_size=options.max_body_size,
        max_rdy_count=options.max_rdy_count,
        max_req_timeout_ms=options.max_req_timeout_ns // 1_000_000,
    )


def _features(options: NsqdOptions, run_id: str) -> ServerFeatures:
    return ServerFeatures(
        version=NSQ_VERSION,
        max_rdy_count=options.max_rdy_count,
        msg_timeout_ms=options.msg_timeout_ns // 1_000_000,
        max_msg_timeout_ms=options.max_msg_timeout_ns // 1_000_000,
        max_heartbeat_interval_ms=options.max_heartbeat_interval_ns // 1_000_000,
        max_output_buffer_size=options.max_output_buffer_size,
        output_buffer_timeout_ms=options.output_buffer_timeout_ns // 1_000_000,
        min_output_buffer_timeout_ms=options.min_output_buffer_timeout_ns // 1_000_000,
        max_output_buffer_timeout_ms=options.max_output_buffer_timeout_ns // 1_000_000,
        tls=bool(options.tls_cert or options.tls_key),
        deflate=options.deflate,
        max_deflate_level=options.max_deflate_level,
        snappy=options.snappy,
        auth_required=bool(options.auth_http_address),
        topology_region=options.topology_region,
        topology_zone=options.topology_zone,
        run_id=run_id,
    )


def _tls(options: NsqdOptions) -> ServerTls | None:
    if not options.tls_cert and not options.tls_key:
        return None
    return ServerTls(
        options.tls_cert,
        options.tls_key,
        options.tls_client_auth_policy,
        options.tls_root_ca_file,
        options.tls_min_version,
    )
