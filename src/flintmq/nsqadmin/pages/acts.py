"""The changes that pages offer: what each takes, what is asked before, and where the visitor stands afterwards.

Rules of this file: what loses something, or hides it, asks for the name first (``named_by``); roles and names are
checked by ``Actions``, which every other way to change something uses too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from flintmq.nsqadmin.pages.shown import number
from flintmq.nsqadmin.views import DoneView

Form = Mapping[str, str]
_PARTITIONS_MAX = 1024
_REPLICAS_MAX = 16
_DAYS_MAX = 3650
_SYNC_MAX = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Ask:
    """A field that the page before an act asks for.

    Attributes:
        kind: ``number``, or ``node``: a choice of the nodes of the cluster.
        is_needed: it may not be left empty; else that leaves it as it is.
    """

    name: str
    label: str
    hint: str = ""
    kind: str = "number"
    minimum: int = 0
    maximum: int = 0
    is_needed: bool = False


@dataclass(frozen=True, slots=True)
class Act:
    """One change.

    Attributes:
        name: of its address.
        takes: fields of the form that are its arguments.
        optional: fields that may be missing.
        named_by: the field whose name is to be typed; empty: nothing is asked before.
        asks_when: a place in the messages is asked for as well.
        asks: further fields that are asked for.
        is_planned: a first page asks for these, a second one shows what the order comes to, and gives it.
        title, what, button: words of the page that asks; ``what`` is a sentence.
        leads_to: the page afterwards, with fields of the form in braces; ``{of}`` is the topic of the page before.
        about: the page before, where that is another one.
        method: of ``Actions``; empty: the name.
    """

    name: str
    takes: tuple[str, ...]
    leads_to: str
    optional: tuple[str, ...] = ()
    named_by: str = ""
    asks_when: bool = False
    asks: tuple[Ask, ...] = ()
    is_planned: bool = False
    title: str = ""
    what: str = ""
    button: str = ""
    about: str = ""
    method: str = ""

    @property
    def is_about(self) -> str:
        """The page about what is changed."""
        return self.about or self.leads_to

    def label_of(self, name: str) -> str:
        """Return the word for a field on the page that asks."""
        return next((each.label for each in self.asks if each.name == name), name.replace("_", " ").capitalize())

    @property
    def asks_node(self) -> bool:
        """Whether one of the nodes of the cluster is to be chosen."""
        return any(each.kind == "node" for each in self.asks)

    @property
    def is_asked(self) -> bool:
        """Whether a page asks before."""
        return bool(self.title)


_TOPIC = "/topics/{topic}"
_CHANNEL = "/topics/{topic}/{channel}"
_NODE = "/nodes/{node}"
_DEAD = "/dead-letters/{topic}"

ACTS = {
    act.name: act
    for act in (
        Act("create_topic", ("topic",), _TOPIC),
        Act("pause_topic", ("topic",), _TOPIC),
        Act("unpause_topic", ("topic",), _TOPIC),
        Act(
            "empty_topic", ("topic",), _TOPIC, named_by="topic", title="Empty topic", button="Empty the topic",
            what="Messages of this topic that have not reached its channels are dropped on every node, for good.",
        ),
        Act(
            "delete_topic", ("topic",), "/topics", about=_TOPIC, named_by="topic", title="Delete topic",
            button="Delete the topic",
            what="The topic, its channels and all its messages are deleted on every node, for good.",
        ),
        Act("create_channel", ("topic", "channel"), _CHANNEL),
        Act("pause_channel", ("topic", "channel"), _CHANNEL),
        Act("unpause_channel", ("topic", "channel"), _CHANNEL),
        Act(
            "empty_channel", ("topic", "channel"), _CHANNEL, named_by="channel", title="Empty channel",
            button="Empty the channel",
            what="All that waits in this channel, is in flight or deferred is dropped on every node, for good.",
        ),
        Act(
            "delete_channel", ("topic", "channel"), _TOPIC, about=_CHANNEL, named_by="channel", title="Delete channel",
            button="Delete the channel",
            what="The channel and its messages are deleted on every node, for good; its consumers are disconnected.",
        ),
        Act(
            "set_channel", ("topic", "channel", "when"), _CHANNEL, named_by="channel", asks_when=True,
            title="Set channel to a time", button="Set the channel",
            what="Back: messages that are still stored are delivered again. Forward: what the channel has before that "
            "place, waiting, in flight or deferred, is dropped on every node, for good.",
        ),
        Act(
            "tombstone", ("node", "topic"), _TOPIC, named_by="topic", title="Take a topic from a node",
            button="Tombstone, and delete there",
            what="nsqlookupd hides this node from consumers of the topic, and the node deletes it, for good.",
        ),
        Act(
            "drain_node", ("node",), _NODE, named_by="node", title="Drain node", button="Drain the node",
            what="The node takes no more messages, and its consumers empty it; publishers go to other nodes.",
        ),
        Act("stop_drain_node", ("node",), _NODE),
        Act("open_dead_letters", ("topic", "channel"), "/dead-letters/{of}", method="create_channel"),
        Act("requeue_dead_letters", ("topic",), _DEAD, optional=("message_id",)),
        Act(
            "drop_dead_letters", ("topic",), _DEAD, optional=("message_id",), named_by="topic",
            title="Drop dead letters", button="Drop them", what="They are dropped, for good.",
        ),
        Act("enable_trace", ("topic",), _TOPIC),
        Act("disable_trace", ("topic",), _TOPIC),
        Act(
            "move_partition", ("topic", "partition", "source", "target"), _TOPIC, title="Move a copy", is_planned=True,
            asks=(
                Ask("source", "From", kind="node", is_needed=True), Ask("target", "To", kind="node", is_needed=True),
            ),
            button="Move the copy",
            what="The copy is made on the other node first, then taken away here; nothing is lost, and nobody waits.",
        ),
        Act(
            "change_topic", ("topic",), _TOPIC, optional=("replicas", "min_in_sync", "retention_days"),
            named_by="topic", title="Change topic", button="Change the topic", is_planned=True,
            asks=(
                Ask("replicas", "Copies of each partition", "fewer: others are deleted", "number", 1, _REPLICAS_MAX),
                Ask(
                    "min_in_sync", "Copies that have to confirm",
                    "fewer: what is acknowledged may be on so few; more: no OK while so many are not in sync",
                    "number", 1, _REPLICAS_MAX,
                ),
                Ask(
                    "retention_days", "Kept for days",
                    "after they are finished; fewer: older messages are gone, and can be replayed no more",
                    "number", 0, _DAYS_MAX,
                ),
            ),
            what="What is left empty stays as it is. Copies are made and deleted in the background.",
        ),
        Act(
            "expand_topic", ("topic", "partitions"), _TOPIC, named_by="topic", title="More partitions", is_planned=True,
            asks=(Ask("partitions", "Partitions in all", "", "number", 1, _PARTITIONS_MAX, is_needed=True),),
            button="Make more partitions",
            what="Partitions cannot be taken away again, and keys go to other partitions from then on.",
        ),
        Act(
            "elect", ("topic", "partition"), _TOPIC, named_by="topic", title="Elect with loss",
            button="Elect, and lose that",
            what="The node that has most of those that answer leads; what it lacks is lost, for good.",
        ),
        Act(
            "drain_member", ("node",), "/cluster", named_by="node", title="Drain node of the cluster",
            button="Drain the node",
            what="The node leads nothing any more and gives its copies to others; it stays in the cluster.",
        ),
        Act("stop_drain_member", ("node",), "/cluster"),
        Act(
            "remove_member", ("node",), "/cluster", named_by="node", title="Remove node from the cluster",
            button="Remove the node",
            what="The node gives its copies to others, and is forgotten when it has none and has ended.",
        ),
        Act("set_balance", ("state",), "/cluster"),
        Act("forget_query", ("query", "topic"), _TOPIC),
    )
}  # fmt: skip


async def carry_out(act: Act, actions: Any, visitor: object, form: Form) -> DoneView:
    """Do it.

    Args:
        actions: ``Admin.actions``.

    Raises:
        Refused: by a role, a name, a number, or because no daemon did it.
    """
    method: Callable[..., Awaitable[DoneView]] = getattr(actions, act.method or act.name)
    if act.name == "create_topic":
        return await method(visitor, form.get("topic", "").strip(), **_properties(form))
    arguments: dict[str, str | None] = {field: form.get(field, "").strip() for field in act.takes}
    arguments |= {field: form[field] for field in act.optional if form.get(field)}
    if act.named_by:
        arguments["confirm"] = form.get("confirm", "").strip()
    return await method(visitor, **arguments)


def _properties(form: Form) -> dict[str, Any]:
    return {
        "channel": form.get("channel", "").strip(),
        "partitions": number("partitions", form.get("partitions", ""), 0, 0, _PARTITIONS_MAX),
        "replicas": number("replicas", form.get("replicas", ""), 0, 0, _REPLICAS_MAX),
        "retention_days": number("retention_days", form.get("retention_days", ""), 0, 0, _DAYS_MAX),
        "syncdisk": number("syncdisk", form.get("syncdisk", ""), 0, 0, _SYNC_MAX),
        "ordered": bool(form.get("ordered")),
        "multipart": bool(form.get("multipart")),
        "headers": bool(form.get("headers")),
        "auto_channels": not form.get("closed"),
    }
