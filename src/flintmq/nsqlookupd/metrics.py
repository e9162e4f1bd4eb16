"""nsqlookupd's figures for Prometheus. There are no series per topic or node, so their number never grows.

Source: the names follow https://prometheus.io/docs/practices/naming/.
"""

from __future__ import annotations

from flintmq.clock import Clock
from flintmq.cluster.registration import RegistrationDatabase
from flintmq.net.http_messages import Request, Response
from flintmq.net.http_router import Router
from flintmq.net.metrics import Family, exposition, labels_of, process_families

_NAMESPACE = "flintmq_nsqlookupd"


def collect(database: RegistrationDatabase, now_ns: int, version: str) -> list[Family]:
    """Return the figures as they are now.

    Args:
        now_ns: monotonic time, which decides who is active.
    """
    topics = database.topics()
    active = database.nodes(now_ns)
    about = Family(f"{_NAMESPACE}_build_info", "gauge", "Always 1; says what runs").add(1, labels_of(version=version))
    figures = (
        ("topics", "Topics that are known", len(topics)),
        ("channels", "Channels that are known", sum(len(database.channels(topic)) for topic in topics)),
        ("nodes", "nsqds that are connected", len(database.all_nodes())),
        ("active_nodes", "nsqds that are listed, because they have pinged lately", len(active)),
        ("topic_registrations", "Topics of all active nsqds, added up", sum(len(node.topics) for node in active)),
        ("tombstones", "Topics that are hidden on a nsqd", sum(sum(node.tombstones) for node in active)),
    )
    return [about, *(Family(f"{_NAMESPACE}_{name}", "gauge", text).add(value) for name, text, value in figures)]


def add_route(router: Router, clock: Clock, database: RegistrationDatabase, version: str) -> None:
    """Answer ``GET /metrics``."""

    def metrics(request: Request) -> Response:
        return exposition([*collect(database, clock.monotonic_ns(), version), *process_families()])

    router.add("GET", "/metrics", metrics, is_logged=False, takes=())
