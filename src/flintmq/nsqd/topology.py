"""Zone and region of this node, and which consumers are near it (``--enable-experiment=topology-aware-consumption``).

Zones and regions are plain names: two are equal or not. An empty one is no place, so nobody is in it; in NSQ a consumer
without a zone counts as local to an nsqd without one.

Source: NSQ's topology-aware consumption.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flintmq.broker.subscription import Locality
from flintmq.nsqd.options import TOPOLOGY_AWARE, NsqdOptions
from flintmq.wire.identify import IdentifyRequest

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this node, for deciding whom to serve first.

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
        """Return how near a consumer is, by what it said about itself."""
        if self.zone and request.topology_zone == self.zone:
            return Locality.ZONE
        if self.region and request.topology_region == self.region:
            return Locality.REGION
        return Locality.GLOBAL
