"""``NsqdAdmin`` and ``LookupdAdmin`` on asyncio.

Rules of this file: a method is a line; what it asks, and its description, is in :mod:`flintmq.client.admin.nsqd` or
``nsqlookupd``. The blocking twins are in :mod:`flintmq.client.blocking.admin`.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import wraps
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar

from flintmq.addresses import shown_url
from flintmq.client.admin import cluster, nsqd, nsqlookupd
from flintmq.client.admin.question import TIMEOUT_S, Question, as_method, base_url
from flintmq.client.admin.route import left_s, route_to
from flintmq.client.aio.home import running_loop
from flintmq.client.aio.http import HttpFetch
from flintmq.client.options import ConnectionOptions, Seconds, checked_options, seconds, switch
from flintmq.client.security import Token
from flintmq.errors import ConnectionFailed

Arguments = ParamSpec("Arguments")
Value = TypeVar("Value")


class Admin:
    """The parts that both have in common: an address, a deadline, and how to show who one is.

    Args:
        address: ``host:port`` or ``http(s)://host:port``.
        timeout: until an answer must be complete.
        token: bearer token for a daemon that asks for permissions, or a plain function that returns it, called
            for every question; send it over ``https://`` only.
        options: ``tls_`` options for ``https://``: whom to trust, this client's certificate. An nsqd that wants TLS
            (``--tls-required=true``) is asked again over it, with the same options.
        token_in_clear: False: the token is shown over TLS only; a daemon that asks for it over plain HTTP is a
            :class:`HttpRefused` with status 401. True: over plain HTTP as well; at an address without ``http://``,
            when there are ``tls_`` options, not before it is asked for.

    Raises:
        OptionError: an argument cannot be used.
    """

    daemon: ClassVar[str]

    def __init__(
        self,
        address: str,
        *,
        timeout: Seconds = TIMEOUT_S,
        token: Token | None = None,
        options: ConnectionOptions | None = None,
        token_in_clear: bool = True,
    ) -> None:
        self.address = base_url(address, self.daemon)
        self._timeout_s = seconds(timeout, "timeout", 0.001, 3600)
        options = checked_options(options).with_overrides(lookup_token=token)
        self._fetch = HttpFetch(options, keeps_connections=False)
        self._tls_name = options.tls_server_name if self.daemon == "nsqd" else None
        self._route = route_to(address, self.address, options, switch(token_in_clear, "token_in_clear"))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {shown_url(self.address)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Let go of what belongs to the event loop; it can be used again."""
        await self._fetch.close()

    async def ask(self, question: Question[Value]) -> Value:
        """Ask what there is no method for.

        Raises:
            HttpRefused: the daemon answers with an error.
            ConnectionFailed: it does not answer in time; what was asked for may have been done.
            RemoteProtocolError: its answer cannot be read.
        """
        time = running_loop(type(self).__name__).time
        deadline = time() + self._timeout_s
        step, within_s = self._route.first(), self._timeout_s
        while True:
            try:
                status, body = await self._fetch.ask(
                    question.method, step.base + question.target, within_s, question.body,
                    shows_token=step.shows_token, tls_name=self._tls_name,
                )  # fmt: skip
            except OSError as error:
                self._route.failed(step)
                raise ConnectionFailed(step.base, str(error)) from error
            following = self._route.after(step, status, body)
            if following is None:
                return self._route.read(question, step, status, body)
            step, within_s = following, left_s(deadline - time())


def asked(
    make: Callable[Arguments, Question[Value]],
) -> Callable[Concatenate[Admin, Arguments], Coroutine[Any, Any, Value]]:
    """A method that asks a question and returns the answer."""

    @wraps(make)
    async def method(admin: Admin, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Value:
        return await admin.ask(make(*args, **kwargs))

    return as_method(method, make)


class NsqdAdmin(Admin):
    """Asks one nsqd over HTTP, and changes what it has.

    ::

        async with NsqdAdmin("127.0.0.1:4151") as nsqd:
            await nsqd.pause_channel("orders", "billing")
            for message in await nsqd.peek("orders", "billing", count=3):
                print(message.message_id, message.body)
            await nsqd.set_offset("orders", "billing", timedelta(hours=1))  # once more what came in the last hour

    All methods raise :class:`HttpRefused` when nsqd refuses, and :class:`ConnectionFailed` when it does not answer; a
    change is on disk when its method returns.
    """

    daemon = "nsqd"

    ping = asked(nsqd.ping)
    info = asked(nsqd.info)
    stats = asked(nsqd.stats)
    metrics = asked(nsqd.metrics)
    server_stats = asked(nsqd.server_stats)
    hourly_sizes = asked(nsqd.hourly_sizes)
    coordinator_stats = asked(nsqd.coordinator_stats)
    cluster_copies = asked(nsqd.cluster_copies)
    replicate_topic = asked(nsqd.replicate_topic)
    channel_state = asked(nsqd.channel_state)
    create_topic = asked(nsqd.create_topic)
    change_topic = asked(nsqd.change_topic)
    delete_topic = asked(nsqd.delete_topic)
    empty_topic = asked(nsqd.empty_topic)
    pause_topic = asked(nsqd.pause_topic)
    unpause_topic = asked(nsqd.unpause_topic)
    create_channel = asked(nsqd.create_channel)
    delete_channel = asked(nsqd.delete_channel)
    empty_channel = asked(nsqd.empty_channel)
    empty_deferred = asked(nsqd.empty_deferred)
    pause_channel = asked(nsqd.pause_channel)
    unpause_channel = asked(nsqd.unpause_channel)
    limit_clients = asked(nsqd.limit_clients)
    set_channel_order = asked(nsqd.set_channel_order)
    set_offset = asked(nsqd.set_offset)
    skip_channel = asked(nsqd.skip_channel)
    unskip_channel = asked(nsqd.unskip_channel)
    topic_settings = asked(nsqd.topic_settings)
    channel_settings = asked(nsqd.channel_settings)
    change_topic_settings = asked(nsqd.change_topic_settings)
    change_channel_settings = asked(nsqd.change_channel_settings)
    peek = asked(nsqd.peek)
    get_message = asked(nsqd.get_message)
    finish_message = asked(nsqd.finish_message)
    cancel_message = asked(nsqd.cancel_message)
    enable_trace = asked(nsqd.enable_trace)
    disable_trace = asked(nsqd.disable_trace)
    find_trace = asked(nsqd.find_trace)
    get_config = asked(nsqd.get_config)
    set_config = asked(nsqd.set_config)
    set_log_level = asked(nsqd.set_log_level)
    damage = asked(nsqd.damage)
    acknowledge_damage = asked(nsqd.acknowledge_damage)
    drain_state = asked(nsqd.drain_state)
    drain = asked(nsqd.drain)
    stop_drain = asked(nsqd.stop_drain)


class LookupdAdmin(Admin):
    """Asks one nsqlookupd over HTTP, and changes what is registered there.

    ::

        async with LookupdAdmin("127.0.0.1:4161") as nsqlookupd:
            await nsqlookupd.create_topic("payments", partitions=4, ordered=True)
            found = await nsqlookupd.lookup("payments")
            print({number: node.address for number, node in found.partitions.items()})

    Exceptions are those of :class:`NsqdAdmin`.
    """

    daemon = "nsqlookupd"

    ping = asked(nsqlookupd.ping)
    info = asked(nsqlookupd.info)
    metrics = asked(nsqlookupd.metrics)
    debug = asked(nsqlookupd.debug)
    lookup = asked(nsqlookupd.lookup)
    topics = asked(nsqlookupd.topics)
    channels = asked(nsqlookupd.channels)
    nodes = asked(nsqlookupd.nodes)
    members = asked(nsqlookupd.members)
    create_topic = asked(nsqlookupd.create_topic)
    change_topic = asked(nsqlookupd.change_topic)
    delete_topic = asked(nsqlookupd.delete_topic)
    tombstone = asked(nsqlookupd.tombstone)
    set_log_level = asked(nsqlookupd.set_log_level)
    create_channel = asked(nsqlookupd.create_channel)
    delete_channel = asked(nsqlookupd.delete_channel)
    cluster_status = asked(cluster.cluster_status)
    elect = asked(cluster.elect)
    acknowledge_loss = asked(cluster.acknowledge_loss)
    expand_topic = asked(cluster.expand_topic)
    move_partition = asked(cluster.move_partition)
    drain_node = asked(cluster.drain_node)
    remove_node = asked(cluster.remove_node)
    cluster_moves = asked(cluster.cluster_moves)
    cluster_elections = asked(cluster.cluster_elections)
    cluster_stats = asked(cluster.cluster_stats)
    set_balance = asked(cluster.set_balance)
    balance_top = asked(cluster.balance_top)
    begin_upgrade = asked(cluster.begin_upgrade)
    end_upgrade = asked(cluster.end_upgrade)
    balance_by_load = asked(cluster.balance_by_load)
    tombstone_lookupd = asked(cluster.tombstone_lookupd)
    disable_write = asked(cluster.disable_write)
