"""The parameters of nsqd's HTTP API that belong to the redesigned NSQ, and how a flag among them is read.

A parameter that means something to who sends it is obeyed or refused (:mod:`flintmq.net.http_router`); these mean
something although no route of ours takes them, or not every route does.

Source: reference/youzan.md 1.1 and 1.4.
"""

from __future__ import annotations

from flintmq.net.http_envelope import Style
from flintmq.net.http_messages import HttpError, Request
from flintmq.topic_meta import CREATION_WORDS

YOUZAN_ALONE = ("partition", "leaderOnly", "needClients")
"""What shows that a request which NSQ has, too, is the redesigned NSQ's."""
NSQ_WORDS = ("topic", "channel", "format", "defer", "binary", "include_clients", "include_mem")
"""What NSQ's nsqd takes somewhere, and ignores everywhere else."""
KNOWN = (
    *YOUZAN_ALONE,
    *CREATION_WORDS,
    "access", "checkcorrupt", "client_prefix", "consistent", "delayed_queue", "force", "loglevel", "metaInfo",
    "metainfo", "move_from", "move_leader", "move_to", "needext", "order", "ratekilobytes", "ready", "remove_node",
    "restore", "search_mode", "search_pos", "slow", "topn", "upgradeext",
)  # fmt: skip
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}


def style_of(name: str) -> Style:
    """How an nsqd that was started with this ``--http-style`` answers."""
    return Style(name, YOUZAN_ALONE)


def switch_of(request: Request, name: str) -> bool | None:
    """A parameter that is true or false; None when it was not given.

    Raises:
        HttpError: 400, it is neither.
    """
    text = request.query.get(name)
    if text is None:
        return None
    try:
        return _SWITCHES[text.lower()]
    except KeyError:
        shown = text[:64]
        raise HttpError(400, f"INVALID_ARG_{name.upper()}: {name}={shown}, it must be true or false") from None
