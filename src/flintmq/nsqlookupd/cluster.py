"""A nsqlookupd that is one of a cluster: the store it was given, its coordinator, and what else has to know of it."""

from __future__ import annotations

from collections.abc import Callable

from flintmq.cluster.controller import Defaults
from flintmq.cluster.keys import Keys
from flintmq.cluster.registration import RegistrationDatabase
from flintmq.cluster.state import LookupdRecord
from flintmq.env import Env
from flintmq.net.cluster_store import store_of
from flintmq.net.etcd import EtcdStore
from flintmq.nsqlookupd.balancer import Balancer
from flintmq.nsqlookupd.cluster_api import ClusterApi
from flintmq.nsqlookupd.coordinator import Coordinator
from flintmq.nsqlookupd.http_api import LookupdAddress
from flintmq.nsqlookupd.options import NsqlookupdOptions
from flintmq.nsqlookupd.own_store import OwnStore
from flintmq.nsqlookupd.session import Sessions
from flintmq.nsqlookupd.store import EmbeddedStore
from flintmq.nsqlookupd.topics import TopicAdmin
from flintmq.options import SECOND


class Cluster:
    """The parts of a nsqlookupd that it has in a cluster alone.

    Args:
        own: the store of this nsqlookupd, if it has one.

    Raises:
        StoreRefused: the addresses of the store cannot be used.
    """

    def __init__(
        self,
        env: Env,
        options: NsqlookupdOptions,
        database: RegistrationDatabase,
        own: EmbeddedStore | None,
    ) -> None:
        self._balancer: Balancer | None = None
        self._store: EtcdStore | OwnStore
        if options.is_own_store:
            assert own is not None, "the options were checked"
            self._store = OwnStore(own, env)
        else:
            self._store = store_of(env, options)
        keys = Keys(options.cluster)
        defaults = Defaults(options.default_partitions, options.default_replicator)
        self.coordinator = Coordinator(env, self._store, keys, database, options.allow_same_host, defaults)

    def api(
        self,
        database: RegistrationDatabase,
        env: Env,
        admin: TopicAdmin,
        me: Callable[[], LookupdAddress],
        options: NsqlookupdOptions,
    ) -> ClusterApi:
        """Return the handlers of the HTTP API."""
        api = self._api(database, env, admin, me, options)
        if options.balance_interval_ns:
            interval_s = options.balance_interval_ns / SECOND
            self._balancer = Balancer(self.coordinator, env.clock, api.loads, interval_s, options.balance_hours)
        return api

    def _api(
        self,
        database: RegistrationDatabase,
        env: Env,
        admin: TopicAdmin,
        me: Callable[[], LookupdAddress],
        options: NsqlookupdOptions,
    ) -> ClusterApi:
        allows_writing = options.allow_write_with_nochannels
        return ClusterApi(database, env.clock, admin, me, allows_writing, self.coordinator)

    def watch(self, sessions: Sessions, admin: TopicAdmin) -> None:
        """Hear of nsqds that come and go, and of what they register."""
        coordinator = self.coordinator

        def registered(topic: str) -> None:
            coordinator.registered(topic)
            if not coordinator.has_topic(topic):  # nodes of the cluster follow the store
                admin.registered(topic)

        def left(topic: str) -> None:
            coordinator.left(topic)
            admin.left(topic)

        sessions.on_change = registered
        sessions.on_left = left
        sessions.on_identified = coordinator.connected
        sessions.on_gone = coordinator.disconnected
        sessions.cluster_id = lambda: coordinator.cluster_id

    def start(self, me: LookupdRecord) -> None:
        """Take part from now on."""
        self.coordinator.start(me)
        if self._balancer is not None:
            self._balancer.start()

    async def close(self) -> None:
        """Take part no longer."""
        if self._balancer is not None:
            await self._balancer.close()
        await self.coordinator.close()
        await self._store.close()
