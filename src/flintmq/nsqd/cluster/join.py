"""A node is made one of a cluster: from its options, its data directory and its machine.

Source: docs/decisions/0017.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from flintmq.broker.topic import Topic
from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord
from flintmq.env import Env
from flintmq.errors import OptionError
from flintmq.net.cluster_store import store_of
from flintmq.net.descriptors import logs_max
from flintmq.nsqd.client import Clients
from flintmq.nsqd.cluster.agent import Agent
from flintmq.nsqd.cluster.peer_tls import PeerFiles, PeerTls
from flintmq.nsqd.cluster.readiness import OnReady
from flintmq.nsqd.engine import Engine
from flintmq.nsqd.file_room import FileRoom
from flintmq.nsqd.identity import Identity
from flintmq.nsqd.options import NsqdOptions
from flintmq.storage import Files, node_id
from flintmq.topic_meta import TopicMeta
from flintmq.wire.peer import SECRET_BYTES_MIN

log = logging.getLogger(__name__)

_MACHINE_ID = "/etc/machine-id"
_SECRET_BYTES_MAX = 4096


async def new_agent(
    env: Env,
    files: Files,
    options: NsqdOptions,
    engine: Engine,
    clients: Clients,
    on_ready: OnReady,
    change_meta: Callable[[Topic, TopicMeta], bool],
    room: FileRoom,
) -> Agent:
    """Return this node's part in the cluster that its options name; it begins with :meth:`Agent.start`.

    Raises:
        OptionError: the secret cannot be read.
        StorageError: the data directory has no identity, and none can be made.
        StoreRefused: the addresses of the store cannot be used, or do not go with its files.
        TlsSetupError: a file for TLS cannot be used.
    """
    secret = await env.run_blocking(read_secret, options.cluster_secret_file)
    identity = await env.run_blocking(node_id, files)
    store = store_of(env, options)
    files_of_tls = PeerFiles(options.cluster_tls_cert, options.cluster_tls_key, options.cluster_tls_root_ca)
    tls = await env.run_blocking(PeerTls, files_of_tls) if files_of_tls.cert else None
    if tls is None and not secret:
        log.warning(
            "CLUSTER: whoever reaches --peer-address is taken for a node: give all nodes --cluster-secret-file, or "
            "--cluster-tls-cert, --cluster-tls-key and --cluster-tls-root-ca"
        )
    keys = Keys(options.cluster)
    return Agent(
        env,
        engine,
        store,
        keys,
        identity,
        files,
        secret,
        clients,
        on_ready,
        change_meta,
        room,
        own_topics=frozenset((options.trace_topic,)),
        makes_topics=options.auto_create == "cluster",
        are_created=options.auto_create_topics,
        msg_timeout_ns=options.msg_timeout_ns,
        tls=tls,
    )


def record_of(options: NsqdOptions, identity: Identity) -> NodeRecord:
    """Return what others are told of this node, but for what its agent knows. Blocks for a small file."""
    me = identity.peer()
    return NodeRecord(
        node="",
        incarnation="",
        boot_id="",
        syncs=False,
        host=me.broadcast_address,
        tcp_port=me.tcp_port,
        http_port=me.http_port,
        peer_port=0,
        host_id=_machine_id(),
        zone=options.topology_zone,
        number=identity.node_id,
        copies_max=logs_max(),
    )


def read_secret(path: str) -> bytes:
    """Read the secret that all nodes share; empty without a file. Blocks.

    Raises:
        OptionError: it cannot be read, or is none.
    """
    if not path:
        return b""
    try:
        with Path(path).open("rb") as file:
            secret = file.read(_SECRET_BYTES_MAX + 1).strip()
    except OSError as error:
        raise OptionError(
            "cluster_secret_file", path, f"it cannot be read: {error.strerror or error}", "file"
        ) from None
    if not SECRET_BYTES_MIN <= len(secret) <= _SECRET_BYTES_MAX:
        what = f"it must have {SECRET_BYTES_MIN} to {_SECRET_BYTES_MAX} bytes besides white space at its ends"
        raise OptionError("cluster_secret_file", path, what, "file")
    return secret


def _machine_id() -> str:
    """The identity of this machine; empty when it has none."""
    try:
        return Path(_MACHINE_ID).read_text(encoding="ascii", errors="replace")[:64].strip()
    except OSError:
        return ""
