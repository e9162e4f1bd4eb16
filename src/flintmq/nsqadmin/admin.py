"""The parts of one nsqadmin, put together.

Rules of this file: what is made here is closed here.
"""

from __future__ import annotations

from collections.abc import Callable

from flintmq.env import Env
from flintmq.nsqadmin.access import Access
from flintmq.nsqadmin.actions import Actions
from flintmq.nsqadmin.audit import Audit
from flintmq.nsqadmin.elections import ElectionKeeper
from flintmq.nsqadmin.gather import Gather
from flintmq.nsqadmin.graphite import GraphiteLink, links
from flintmq.nsqadmin.history import History
from flintmq.nsqadmin.notify import Notifier
from flintmq.nsqadmin.openness import Openness
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.nsqadmin.queries import Queries
from flintmq.nsqadmin.render import Render
from flintmq.nsqadmin.snapshots import Snapshots
from flintmq.nsqadmin.upstream import Upstream


class Admin:
    """The parts of one nsqadmin.

    Args:
        make_secret: returns so many random bytes.

    Raises:
        FlintError: an option, or a file that it names, cannot be used.
    """

    def __init__(self, options: NsqadminOptions, env: Env, make_secret: Callable[[int], bytes]) -> None:
        self.options = options
        self.env = env
        self.access = Access(options, env, make_secret)
        self.audit = Audit(options.audit_log, env)
        self.upstream = Upstream(options, env)
        self.snapshots = Snapshots(options, env, self.upstream)
        self.history = History(options, env, self.snapshots)
        self.openness = Openness(self.upstream, self.snapshots)
        self.queries = Queries(env, self.upstream, self.snapshots)
        self.gather = Gather(env, self.upstream, self.snapshots, self.audit, self.history, self.queries)
        self.elections = ElectionKeeper(self.gather)
        self.notifier = Notifier(options.notification_http_endpoint, self.upstream)
        self.actions = Actions(env, self.upstream, self.gather, self.audit, self.notifier, env.hostname)
        self.render = Render(options.base, self.warnings)
        self.render.environment.globals["graphite"] = self.graphite

    def start(self) -> None:
        """Begin what goes on in the background."""
        self.notifier.start()
        self.history.start()
        self.openness.start()
        self.elections.start()

    async def close(self) -> None:
        """End it."""
        await self.elections.close()
        await self.openness.close()
        await self.notifier.close()
        await self.history.close()
        await self.snapshots.close()
        await self.upstream.close()
        self.audit.close()

    def graphite(self, series: str, name: str) -> list[GraphiteLink]:
        """Return the pictures that Graphite has of a topic or channel."""
        return links(self.options, series, name)

    def warnings(self) -> list[str]:
        """Return what every page says about how safe this nsqadmin is."""
        found = []
        if self.access.is_open:
            found.append(
                "Everybody who reaches this page may change everything: --users-file or --admin-user says who may."
            )
        elif self.options.admin_user and not self.options.acl_from_cidr and not self.options.users_file:
            found.append(
                f"Whoever sends the header {self.options.acl_http_header} is believed, from any address: "
                "--acl-from-cidr names the proxies."
            )
        if not self.access.is_open:
            found.append(self.openness.warning)
        found += [self.audit.failure, self.history.failure]
        return [each for each in found if each]


__all__ = ["Admin"]
