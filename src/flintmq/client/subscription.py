"""What every consumer checks and bounds alike, on asyncio and on blocking sockets."""

from __future__ import annotations

from flintmq.client.core.discovery import PollTimes
from flintmq.client.core.message import Delivery
from flintmq.client.core.order import Order
from flintmq.client.core.rdy import RdyPolicy
from flintmq.client.core.start import NS_PER_S, Beginning, StartAt
from flintmq.client.options import SOURCE, Seconds, seconds, whole
from flintmq.env import Env
from flintmq.errors import (
    DiscoveryError,
    FinFailed,
    LocalProtocolError,
    NsqdError,
    OptionError,
    ReqFailed,
    TouchFailed,
)
from flintmq.limits import ATTEMPTS_MAX
from flintmq.names import is_valid_name
from flintmq.wire.extended import SUB_ORDER, SUB_ORDERED

MAX_IN_FLIGHT_MAX = 1_000_000
CLOSE_WAIT_S = 2.0
DRAIN_SAID_S = 0.5  # handlers that take longer to end are waited for aloud
DRAIN_WAITS = "%d handlers still run: waiting for at most %g s (drain_timeout)"
TAG_SIZE_MAX = 100
PARTITIONED_POLL_S = 5.0
SOON_S = 1.0
OTHER_NAME_COUNT_MAX = 10_000
TOPIC_CODES = ("E_SUB_ORDER_IS_MUST", "E_SUB_CHANNEL_NOT_REGISTERED")
"""What is said of the topic, not of the nsqd that says it: trying another one is of no use."""

EXTEND_CODES = ("E_SUB_EXTEND_NEED", "E_SUB_EXTEND_FORBIDDON")
DOUBT_S = 10.0
"""How long an nsqd and the nsqlookupd may disagree on whether the topic has headers: it may be changing just now."""

YOUZAN_MARK = "-HA"
"""In the versions of Youzan's daemons, such as 0.3.7-HA.1.13.0."""

FAILURES = {"FIN": FinFailed, "REQ": ReqFailed, "TOUCH": TouchFailed}


def check_names(topic: str, channel: str, dead_letter: str | None) -> None:
    """Raise LocalProtocolError or OptionError unless these names can be used."""
    names = [("E_BAD_TOPIC", "topic", topic), ("E_BAD_CHANNEL", "channel", channel)]
    if dead_letter is not None:
        names.append(("E_BAD_TOPIC", "dead-letter topic", dead_letter))
    for code, what, name in names:
        if not is_valid_name(name):
            raise LocalProtocolError(
                code, f"{what} name {name!r} is not valid: 1 to 64 of [.a-zA-Z0-9_-], optionally #ephemeral"
            )
    if dead_letter == topic:
        raise OptionError("dead_letter", dead_letter, "another topic than the one that is consumed", SOURCE)


def check_ordered(has_lookup: bool, samples: bool, gives_up: bool) -> None:
    """Raise OptionError unless these go together with consuming in order."""
    if not has_lookup:
        allowed = "with nsqlookupd_http_addresses, which know where the partitions are"
        raise OptionError("ordered", True, allowed, SOURCE)
    if samples:
        raise OptionError("ordered", True, "without sample_rate: what is left out would be out of order", SOURCE)
    if gives_up:
        allowed = "without on_giving_up and dead_letter: a message blocks its partition until the handler finishes it"
        raise OptionError("ordered", True, allowed, SOURCE)


def new_beginning(start: StartAt | None, is_ordered: bool, env: Env) -> Beginning | None:
    """Where the channel begins; None: where it is.

    Raises:
        OptionError: the start is none, or does not go together with the rest.
    """
    if start is None:
        return None
    if is_ordered:
        allowed = "without ordered=True: SUB_ORDER says no place; move the channel with NsqdAdmin.set_offset before"
        raise OptionError("start", start, allowed, SOURCE)
    return Beginning(start, env.clock.wall_ns() / NS_PER_S)


def has_partitions(topic: str) -> DiscoveryError:
    """What ends a consumer with ``start`` that was given the address of an nsqd whose topic has partitions."""
    detail = "start= has to be told for each of them: give nsqlookupd_http_addresses, which know where they are"
    return DiscoveryError(f"topic {topic} has partitions: {detail}")


def checked_tag(tag: str) -> str:
    """A tag that messages may be given first for.

    Raises:
        OptionError: nsqd would refuse it.
    """
    if len(tag) > TAG_SIZE_MAX or not all(sign.isascii() and (sign.isalnum() or sign in "_-") for sign in tag):
        raise OptionError("desired_tag", tag, f"at most {TAG_SIZE_MAX} of [A-Za-z0-9_-]", SOURCE)
    return tag


class OrderCommands:
    """Under which name each nsqd knows ``SUB_ORDER``.

    Youzan's daemons know it as ``SUB_ORDERED`` alone, and answer E_INVALID and close to what they do not know. What
    nsqd says of itself decides which name is tried first; where that is refused the other one is tried, once, and
    remembered for the address.
    """

    def __init__(self) -> None:
        self._others: dict[str, None] = {}  # addresses at which the name that is tried first was refused

    def name(self, address: str, version: str) -> str:
        """The name to try at an nsqd.

        Args:
            version: as it answered IDENTIFY.
        """
        return SUB_ORDERED if (YOUZAN_MARK in version) != (address in self._others) else SUB_ORDER

    def may_know_other(self, address: str, error: BaseException) -> bool:
        """Whether an nsqd that has refused is to be asked again, under the other name."""
        if not isinstance(error, NsqdError) or error.code != "E_INVALID":
            return False
        if address in self._others:  # it knows neither; it may be another nsqd next time
            del self._others[address]
            return False
        while len(self._others) >= OTHER_NAME_COUNT_MAX:
            del self._others[next(iter(self._others))]
        self._others[address] = None
        return True


def give_back(delivery: Delivery) -> None:
    """Requeue messages that were never handed out."""
    for _, _, message_id, _ in delivery.records:
        delivery.link.requeue(message_id, 0)


def new_times(interval: Seconds, jitter: float) -> PollTimes:
    """When to ask the nsqlookupd.

    Raises:
        OptionError: an argument is out of range; as for the next two.
    """
    return PollTimes(seconds(interval, "lookup_interval", 0.01), seconds(jitter, "lookup_jitter", 0, 1))


def new_policy(max_in_flight: int, low_rdy_idle_timeout: Seconds, low_rdy_timeout: Seconds) -> RdyPolicy:
    """How much may be in flight on which connection."""
    return RdyPolicy(
        whole(max_in_flight, "max_in_flight", 1, MAX_IN_FLIGHT_MAX),
        seconds(low_rdy_idle_timeout, "low_rdy_idle_timeout", 0.001),
        seconds(low_rdy_timeout, "low_rdy_timeout", 0.001),
    )


def new_order(topic: str, warn_attempts: int, error_attempts: int) -> Order:
    """What checks the order of messages."""
    return Order(
        topic,
        whole(warn_attempts, "blocked_warn_attempts", 1, ATTEMPTS_MAX),
        whole(error_attempts, "blocked_error_attempts", 1, ATTEMPTS_MAX),
    )
