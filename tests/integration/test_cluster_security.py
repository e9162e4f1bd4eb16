"""Who may be a node: TLS with certificates of the cluster, and the next version of FlintMQ beside this one."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, Cluster, Daemons, Nsqd, running_cluster, sized, wait_until

from flintmq.client.core.message import is_hex
from flintmq.cluster.state import PEER_VERSION
from flintmq.wire import peer
from flintmq.wire.peer import Dialer, Identity, PeerReader, Ping, Pong, Welcome, encode_one


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[Cluster]:
    """Three nodes that show each other certificates, with a topic that has a copy on each."""
    server = certificates.server
    flags = (
        f"--cluster-tls-cert={server.cert}",
        f"--cluster-tls-key={server.key}",
        f"--cluster-tls-root-ca={certificates.ca}",
    )
    with running_cluster(tmp_path_factory.mktemp("cluster"), flags=flags) as cluster:
        cluster.create("t")
        cluster.wait_in_sync("t", 3)
        yield cluster


def _peer_port(cluster: Cluster, node: Nsqd) -> int:
    rows = cluster.status()["nodes"]
    port: int = next(row["peer_port"] for row in rows if row["tcp_port"] == node.tcp[1])
    return port


def _dial(cluster: Cluster, node: Nsqd) -> socket.socket:
    return socket.create_connection(("127.0.0.1", _peer_port(cluster, node)), PATIENCE_S)


def _end(connection: socket.socket) -> bytes:
    """What comes until the other end closes."""
    found = b""
    try:
        while data := connection.recv(65536):
            found += data
    except ConnectionResetError:
        pass
    return found


def test_nodes_with_certificates_replicate_and_take_over(cluster: Cluster) -> None:
    leader = cluster.leader("t")
    with leader.connect() as connection:
        connection.ok(b"PUB t 0\n" + sized(b"before"))
    leader.kill()
    successor = cluster.leader("t", access="w", but=leader)

    def is_taken() -> bool:
        with successor.connect() as connection:
            connection.send(b"PUB t 0\n" + sized(b"after"))
            return connection.frame().data == b"OK"

    wait_until(is_taken, "the new leader takes publishes")
    with cluster.leader("t", but=leader).connect() as connection:
        connection.ok(b"SUB t ch 0\n")
        connection.rdy(2)
        assert [message.body for message in connection.messages(2)] == [b"before", b"after"]
    leader.start()
    cluster.wait_in_sync("t", 3)


def test_clients_of_another_node_are_served_over_tls(cluster: Cluster) -> None:
    cluster.wait_in_sync("t", 3)
    other = next(node for node in cluster.nodes if node is not cluster.leader("t"))
    bodies = [b"%d" % number * 20_000 for number in range(40)]
    with other.connect() as connection:
        connection.ok(b"SUB t relayed\n")
        connection.rdy(40)
        with other.connect() as publisher:
            for body in bodies:
                publisher.ok(b"PUB t\n" + sized(body))
        for body in bodies:
            (message,) = connection.messages(1)
            assert message.body == body
            assert is_hex(message.id), "as of a plain topic, although the topic has partitions"
            connection.send(b"FIN " + message.id + b"\n")
        connection.settle()
    wait_until(lambda: cluster.leader("t").unfinished("t", "relayed") == 0, "the leader has been told of each")


def test_who_speaks_no_tls_is_refused_and_it_is_logged(cluster: Cluster) -> None:
    node = cluster.nodes[0]
    me = Identity(cluster.status()["cluster_id"], "stranger", "1", "boot", False, 1)
    with _dial(cluster, node) as connection:
        connection.sendall(Dialer(me, b"", b"n" * 32, "x").hello())
        _end(connection)
    wait_until(lambda: "refused: tls: " in node.log and "--cluster-tls-root-ca" in node.log, lambda: node.log[-2000:])


@pytest.mark.parametrize("kind", ["none", "stranger"])
def test_who_has_no_certificate_of_the_cluster_is_refused(
    cluster: Cluster, certificates: Certificates, kind: str
) -> None:
    node = cluster.nodes[1]
    context = ssl.create_default_context(cafile=certificates.ca)
    if kind != "none":
        files = certificates.client(kind)
        context.load_cert_chain(files.cert, files.key)
    try:
        with _dial(cluster, node) as plain, context.wrap_socket(plain, server_hostname="127.0.0.1") as connection:
            connection.sendall(b"hello")
            said = connection.recv(100)  # with TLS 1.3 the server looks at certificates when the client has done
    except (ssl.SSLError, ConnectionError):
        said = b""
    assert said == b""
    wait_until(lambda: "refused: tls: " in node.log, lambda: node.log[-2000:])


def test_without_tokens_the_store_says_that_it_is_open_and_with_them_a_stranger_cannot_register(
    daemons: Daemons, tmp_path: Path
) -> None:
    """Nodes register in the store; with tokens nobody does without one, and who has one does as ever."""
    (tmp_path / "open").mkdir()
    is_open = daemons.nsqlookupd(f"--store-path={tmp_path / 'open'}")
    assert "whoever reaches the HTTP port may change the coordination store" in is_open.log
    token = "0123456789abcdef0123456789abcdef"
    clients, token_file = tmp_path / "clients.toml", tmp_path / "token"
    clients.write_text(f'[[client]]\nname = "nsqd"\ntoken = "{token}"\npermissions = ["admin", "read", "publish"]\n')
    token_file.write_text(token)
    for path in (clients, token_file):
        path.chmod(0o600)
    (tmp_path / "closed").mkdir()
    lookupd = daemons.nsqlookupd(
        f"--store-path={tmp_path / 'closed'}",
        "--cluster-store=own",
        "--broadcast-address=127.0.0.1",
        f"--http-auth-tokens-file={clients}",
    )
    assert "whoever reaches the HTTP port" not in lookupd.log
    store = f"--cluster-store=127.0.0.1:{lookupd.http[1]}"
    stranger = daemons.nsqd(store, "--peer-address=127.0.0.1:0")
    wait_until(lambda: "401" in stranger.log or "token" in stranger.log, lambda: stranger.log[-2000:])
    daemons.nsqd(store, "--peer-address=127.0.0.1:0", f"--cluster-store-token-file={token_file}")

    def nodes() -> list[Any]:
        answer = lookupd.request("GET", "/cluster/status", None, {"Authorization": f"Bearer {token}"})
        rows: list[Any] = answer.json["nodes"]
        return rows

    wait_until(lambda: len(nodes()) == 1, lambda: str(nodes()))
    assert nodes()[0]["tcp_port"] != stranger.tcp[1]


class NextVersion:
    """A node of the next version: its frames have fields that this version does not know."""

    def __init__(self, connection: socket.socket, cluster_id: str, node: str) -> None:
        self._connection = connection
        self._reader = PeerReader()
        identity = Identity(cluster_id, "ffffffffffffffff", "1", "boot", False, 2)
        self._dialer = Dialer(identity, b"", b"n" * 32, node)

    def _send(self, frame: bytes) -> None:
        """Send a frame with two more fields at the end of its header."""
        _, size = peer._SIZES.unpack_from(frame)
        header: list[Any] = msgspec.msgpack.decode(frame[8 : 8 + size])
        packed = msgspec.msgpack.encode([*header, "new", {"more": 1}])
        body = frame[8 + size :]
        self._connection.sendall(peer._SIZES.pack(4 + len(packed) + len(body), len(packed)) + packed + body)

    def _next(self) -> peer.Frame:
        while (found := self._reader.next_frame()) is None:
            data = self._connection.recv(65536)
            assert data, "closed"
            self._reader.receive(data)
        return found[0]

    def shake_hands(self) -> Identity:
        self._send(self._dialer.hello())
        welcome = self._next()
        assert isinstance(welcome, Welcome), welcome
        found, proof = self._dialer.welcomed(welcome)
        self._send(proof)
        return found

    def ping(self) -> Pong:
        self._send(encode_one(Ping(77)))
        pong = self._next()
        assert isinstance(pong, Pong), pong
        return pong


def test_the_next_version_and_this_one_work_together(daemons: Daemons) -> None:
    cluster = Cluster(daemons, copies_on=1)
    try:
        status = cluster.status()
        with _dial(cluster, cluster.nodes[0]) as connection:
            newer = NextVersion(connection, status["cluster_id"], status["nodes"][0]["node"])
            assert newer.shake_hands().version == PEER_VERSION
            assert newer.ping() == Pong(77)
            assert newer.ping() == Pong(77)
    finally:
        cluster.close()


def test_files_for_tls_go_together(daemons: Daemons, certificates: Certificates, tmp_path: Path) -> None:
    nsqd = daemons.new_nsqd("--cluster-store=127.0.0.1:1", f"--cluster-tls-cert={certificates.server.cert}")
    nsqd.launch()
    assert nsqd.wait() == 1
    assert "--cluster-tls-root-ca go together: give all three" in nsqd.log
    missing = daemons.new_nsqd(
        "--cluster-store=127.0.0.1:1",
        f"--cluster-tls-cert={certificates.server.cert}",
        f"--cluster-tls-key={certificates.server.key}",
        f"--cluster-tls-root-ca={tmp_path / 'nothing.pem'}",
    )
    missing.launch()
    assert missing.wait() == 1
    assert "nothing.pem: No such file or directory" in missing.log
