"""Where this node is, and which consumers are near it (``--enable-experiment=topology-aware-consumption``).

Zones and regions are plain names: two are equal or not. An empty one is no place, so nobody is in it; in NSQ a consumer
without a zone counts as local to an nsqd without one.

Source: reference/nsq.md 1.11.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from flintmq.broker.channel import Channel
from flintmq.broker.parts import SharedSubscription
from flintmq.broker.subscription import Locality, Subscription
from flintmq.nsqd.options import TOPOLOGY_AWARE, NsqdOptions
from flintmq.wire.identify import IdentifyRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topology:
    """Where this node is, for deciding whom to serve first.

    Attributes:
        zone, region: both empty while the experiment is off: then all consumers are equally far.
    """

    zone: str = ""
    region: str = ""

    @classmethod
    def of(cls, options: NsqdOptions) -> Topology:
        """The place that ``options`` name."""
        if TOPOLOGY_AWARE not in options.enable_experiment:
            return cls()
        if not (options.topology_zone or options.topology_region):
            log.warning("%s: without --topology-zone and --topology-region no consumer is near", TOPOLOGY_AWARE)
        return cls(options.topology_zone, options.topology_region)

    def locality(self, request: IdentifyRequest) -> Locality:
        """How near a consumer is, by what it said about itself."""
        if self.zone and request.topology_zone == self.zone:
            return Locality.ZONE
        if self.region and request.topology_region == self.region:
            return Locality.REGION
        return Locality.GLOBAL


COUNT_FIELDS = {
    Locality.ZONE: "zone_local_msg_count",
    Locality.REGION: "region_local_msg_count",
    Locality.GLOBAL: "global_msg_count",
}


def channel_counts(parts: Sequence[Channel]) -> dict[str, int]:
    """Deliveries of a channel for its row of ``/stats``, by how near the consumer was; zeros are left out."""
    if not any(map(any, (part.locality_counts for part in parts))):
        return {}
    counts = {field: sum(part.locality_counts[locality] for part in parts) for locality, field in COUNT_FIELDS.items()}
    return {field: count for field, count in counts.items() if count}


def client_counts(subscription: Subscription | SharedSubscription) -> dict[str, int]:
    """The same for one consumer, which is near or not for as long as it is connected."""
    count = subscription.message_count
    return {COUNT_FIELDS[subscription.locality]: count} if count else {}
