"""An nsqd as a cluster's nsqlookupds see it: a record in the store, a peer port, and what it leads registered over V1.

It keeps no messages and always has everything; whoever is elected says so at once, unless it is told not to.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from contextlib import aclosing

from flintmq.cluster.keys import Keys
from flintmq.cluster.state import NodeRecord
from flintmq.cluster.store import Store, StoreError, follow
from flintmq.cluster.view import PartitionId, View
from flintmq.env import Env
from flintmq.net.etcd import EtcdOptions, EtcdStore
from flintmq.net.membership import Membership
from flintmq.topic_meta import TopicMeta
from flintmq.wire import lookup as wire

TCP, HTTP, PEER = 4150, 4151, 4152


class FakeNode:
    """One node.

    Args:
        record: as it stands in the store.
    """

    def __init__(self, env: Env, store: Store, keys: Keys, record: NodeRecord) -> None:
        self.view = View(keys)
        self.record = record
        self.says_ready = True
        self.cluster_id = ""
        self.connections: dict[tuple[str, int], _Connection] = {}
        self._env = env
        self._store = store
        self._keys = keys
        self._membership = Membership(store, env.clock, keys.node(record.node), record)

    async def run(self) -> None:
        """Live until cancelled; then everybody is told."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, "0.0.0.0", self.record.peer_port)
        self._membership.start()
        try:
            while True:
                try:
                    async with aclosing(follow(self._store, self._keys.all)) as following:
                        async for told in following:
                            self.view.feed(told)
                            self.tell()
                except StoreError:
                    await asyncio.sleep(0.1)
        finally:
            server.close()
            for connection in self.connections.values():
                connection.close()
            await self._membership.close()

    async def drain(self, record: NodeRecord) -> None:
        """Stand in the store with another record."""
        self.record = record
        await self._membership.update(record)

    def led(self) -> dict[PartitionId, TopicMeta]:
        """The partitions that this process leads."""
        me = self.record
        return {
            partition: self.view.topics[partition[0]].meta
            for partition in self.view.led.get(me.node, ())
            if self.view.partitions[partition].is_led_by(me.node, me.incarnation) and partition[0] in self.view.topics
        }

    def tell(self) -> None:
        """Have every nsqlookupd know what is led here."""
        addresses = {(each.host, each.tcp_port) for each in self.view.lookupds.values()}
        for address in sorted(addresses - set(self.connections)):
            self.connections[address] = _Connection(self, *address)
        for address in sorted(set(self.connections) - addresses):
            self.connections.pop(address).close()
        for connection in self.connections.values():
            connection.tell()

    def peer_info(self) -> wire.PeerInfo:
        return wire.PeerInfo(
            version="1.3.0",
            tcp_port=self.record.tcp_port,
            http_port=self.record.http_port,
            hostname=self.record.host,
            broadcast_address=self.record.host,
            distributed_id=f"{self.record.host}:{self.record.peer_port}:{self.record.tcp_port}:1",
            cluster_id=self.cluster_id or (self.view.cluster.cluster_id if self.view.cluster is not None else ""),
        )


class _Connection(asyncio.Protocol):
    """To one nsqlookupd, made again when it breaks."""

    def __init__(self, node: FakeNode, host: str, port: int) -> None:
        self._node = node
        self._transport: asyncio.Transport | None = None
        self._told: set[PartitionId] = set()
        self.received = b""
        self._task = asyncio.get_running_loop().create_task(self._keep_up(host, port))
        self._lost: Callable[[], None] = lambda: None

    async def _keep_up(self, host: str, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            lost = asyncio.Event()
            self._lost = lost.set
            try:
                async with asyncio.timeout(1.0):
                    await loop.create_connection(lambda: self, host, port)
                await lost.wait()
            except (OSError, TimeoutError):
                pass
            await asyncio.sleep(0.1)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._told = set()
        transport.write(wire.MAGIC_V1 + wire.encode_identify(self._node.peer_info()))
        self.tell()

    def data_received(self, data: bytes) -> None:
        self.received += data

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

    def tell(self) -> None:
        if self._transport is None:
            return
        led = self._node.led() if self._node.says_ready else {}
        for topic, number in sorted(self._told - set(led)):
            self._transport.write(wire.encode_unregister(topic, "", number))
        for topic, number in sorted(set(led) - self._told):
            meta = led[topic, number]
            if meta.is_partitioned:
                self._transport.write(wire.encode_describe(topic, meta))
                self._transport.write(wire.encode_register(topic, "", number))
            else:
                self._transport.write(wire.encode_register(topic, "", wire.ALL_PARTITIONS))
        self._told = set(led)

    def close(self) -> None:
        self._task.cancel()
        if self._transport is not None:
            self._transport.abort()


def main(url: str, name: str, tcp_port: str, peer_port: str) -> None:
    """Be a node as a process, on a machine of its own as far as others can tell."""
    record = NodeRecord(
        name, f"{name}{os.getpid()}", "boot", False, "127.0.0.1", int(tcp_port), HTTP, int(peer_port), name
    )

    async def live() -> None:
        env = Env()
        await FakeNode(env, EtcdStore(env, EtcdOptions([url])), Keys("default"), record).run()

    asyncio.run(live())


if __name__ == "__main__":
    main(*sys.argv[1:])
