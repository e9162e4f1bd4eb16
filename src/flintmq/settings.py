"""Settings of one topic or one channel, changed while nsqd runs: limits of its messages, and whether they are traced.

A field that is not set is inherited: a channel's from its topic, a topic's from the options of the node. 0 switches a
limit off, also one that would be inherited.

Rules of this file: data and what follows from it; what is refused is a :class:`BadSetting`, whose text is the answer.

Source: NSQ's issues (bounds, time to live, dead letters).
"""

from __future__ import annotations

from typing import Any

import msgspec

from flintmq.errors import UNREADABLE_JSON, FlintError
from flintmq.limits import ATTEMPTS_MAX, SEQUENCE_MAX
from flintmq.names import EPHEMERAL_SUFFIX, is_ephemeral, is_valid_name

DEAD_LETTER_TOPIC = "{topic}.dead"
"""The name of a topic's dead-letter topic, unless told otherwise."""
REFUSE, DROP_OLDEST = "refuse", "drop_oldest"
OVERFLOWS = (REFUSE, DROP_OLDEST)
TRACES = ("", "traced", "all")
TTL_MS_MAX = 10 * 366 * 86_400_000
_TOPIC = "{topic}"
_NS_PER_MS = 1_000_000
_TEMPLATE_SIZE_MAX = 128


class BadSetting(FlintError):
    """A setting cannot be taken; its text begins with a code and is the answer."""


class Settings(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of one topic or channel; None for what is inherited.

    Attributes:
        max_attempts: deliveries after which a message goes to the dead letters; 0 for no limit.
        dead_letter_topic: their topic; ``{topic}`` stands for the name of the message's own.
        ttl_ms: how old a message may be when it is delivered; 0 for any age.
        max_messages, max_bytes: what a channel, or a topic without channels, may have that is not finished; 0 for any.
        overflow: what happens beyond that: ``refuse`` publishing, or ``drop_oldest``.
        trace: which messages are traced: none, the ``traced``, ``all``.
        dead_letters: whether the topic has been given dead letters; those are not given up a second time.
        is_ordered: whether the channel is consumed in order although its topic need not be.
        is_order_must: whether it may only be consumed so, because somebody said so and not only a consumer did.
    """

    max_attempts: int | None = None
    dead_letter_topic: str | None = None
    ttl_ms: int | None = None
    max_messages: int | None = None
    max_bytes: int | None = None
    overflow: str | None = None
    trace: str | None = None
    dead_letters: bool | None = None
    is_ordered: bool | None = None
    is_order_must: bool | None = None


class Limits(msgspec.Struct, frozen=True):
    """The limits in force for one topic or channel, see :class:`Settings`.

    Attributes:
        dead_letter_topic: its name; empty without ``max_attempts``.
    """

    max_attempts: int = 0
    dead_letter_topic: str = ""
    ttl_ms: int = 0
    max_messages: int = 0
    max_bytes: int = 0
    overflow: str = REFUSE
    trace: str = ""

    @property
    def ttl_ns(self) -> int:
        """The longest age in ns, 0 for any."""
        return self.ttl_ms * _NS_PER_MS

    @property
    def is_bounded(self) -> bool:
        """Whether there is a bound on what is not finished."""
        return bool(self.max_messages or self.max_bytes)

    @property
    def is_limiting(self) -> bool:
        """Whether any message can meet a limit."""
        return bool(self.max_attempts or self.ttl_ms or self.max_messages or self.max_bytes)


NOTHING = Settings()
NO_LIMITS = Limits()
_NUMBERS = {
    "max_attempts": ATTEMPTS_MAX,
    "ttl_ms": TTL_MS_MAX,
    "max_messages": SEQUENCE_MAX,
    "max_bytes": SEQUENCE_MAX,
}
_CHOICES = {"overflow": OVERFLOWS, "trace": TRACES}
_NAMES = (*_NUMBERS, "dead_letter_topic", *_CHOICES)
encode_settings = msgspec.json.Encoder().encode
decode_settings = msgspec.json.Decoder(Settings).decode
_decode_any = msgspec.json.Decoder().decode


def resolve(topic: str, *layers: Settings) -> Limits:
    """Return what is in force for a topic or one of its channels.

    Without a valid name for the dead-letter topic there are no dead letters, and no limit of attempts.

    Args:
        layers: the nearest first: the channel's, the topic's, the node's.
    """
    found: dict[str, Any] = {}
    is_for_dead_letters = False
    for layer in layers:
        is_for_dead_letters = is_for_dead_letters or bool(layer.dead_letters)
        for name in _NAMES:
            value = getattr(layer, name)
            if value is not None:
                found.setdefault(name, value)
    template = found.pop("dead_letter_topic", DEAD_LETTER_TOPIC)
    if found.get("max_attempts"):
        name = dead_letter_topic(template, topic)
        if is_for_dead_letters or not is_valid_name(name) or name == topic:
            found["max_attempts"] = 0
        else:
            found["dead_letter_topic"] = name
    return Limits(**found)


def dead_letter_topic(template: str, topic: str) -> str:
    """Return the name that ``template`` gives to a topic's dead-letter topic; an ephemeral topic's is ephemeral."""
    if _TOPIC not in template:
        return template
    name = template.replace(_TOPIC, topic.removesuffix(EPHEMERAL_SUFFIX))
    return name + EPHEMERAL_SUFFIX if is_ephemeral(topic) and not is_ephemeral(name) else name


def merged(settings: Settings, change: bytes) -> Settings:
    """Change settings by a JSON object: null for a field makes it inherited again.

    Raises:
        BadSetting: it is no object, or has a field or a value that there is not.
    """
    try:
        fields = _decode_any(change)
    except UNREADABLE_JSON as error:
        raise BadSetting(f"INVALID_BODY: not JSON - {error}") from None
    if not isinstance(fields, dict):
        raise BadSetting('INVALID_BODY: it must be a JSON object such as {"max_attempts": 5}')
    for name, value in fields.items():
        if name not in _NAMES:
            raise BadSetting(f"INVALID_SETTING: {_shown(name)} is not one; there are {', '.join(_NAMES)}")
        if value is not None:
            _check(name, value)
    if fields.get("dead_letter_topic") == "":
        fields["dead_letter_topic"] = None
    return msgspec.structs.replace(settings, **fields)


def _check(name: str, value: object) -> None:
    if name in _NUMBERS:
        most = _NUMBERS[name]
        if type(value) is not int or not 0 <= value <= most:
            raise _refused(name, value, f"0 to {most}, 0 for no limit, or null to inherit it")
    elif name in _CHOICES:
        if value not in _CHOICES[name]:
            words = ", ".join(f'"{word}"' for word in _CHOICES[name])
            raise _refused(name, value, f"one of {words}, or null to inherit it")
    elif not isinstance(value, str) or len(value) > _TEMPLATE_SIZE_MAX:
        raise _refused(name, value, f"the name of a topic, in which {_TOPIC} stands for this one's, or null")


def check_dead_letter_topic(topic: str, *layers: Settings) -> None:
    """Refuse settings under which dead letters of ``topic`` would have nowhere to go.

    Args:
        layers: as in :func:`resolve`; the first is what is to be set.

    Raises:
        BadSetting: the dead-letter topic has no valid name, or is the topic itself.
    """
    mine = layers[0]
    if not mine.max_attempts and mine.dead_letter_topic is None:
        return  # what is inherited from the node is off where it gives no name
    template = next((layer.dead_letter_topic for layer in layers if layer.dead_letter_topic), DEAD_LETTER_TOPIC)
    name = dead_letter_topic(template, topic)
    if not is_valid_name(name):
        raise _refused("dead_letter_topic", name, "a topic name of 1 to 64 characters of .a-zA-Z0-9_-")
    if name == topic:
        raise _refused("dead_letter_topic", name, "another topic than the messages' own")
    if mine.max_attempts and any(layer.dead_letters for layer in layers):
        raise _refused(
            "max_attempts", mine.max_attempts, f"0: {topic} holds dead letters, which are not given up again"
        )


def check_node(settings: Settings) -> str | None:
    """Tell why a node's template of the dead-letter topic cannot be used; None when it can."""
    template = DEAD_LETTER_TOPIC if settings.dead_letter_topic is None else settings.dead_letter_topic
    if is_valid_name(dead_letter_topic(template, "t")):
        return None
    return f"it must be the name of a topic, in which {_TOPIC} stands for the messages' own"


def _refused(name: str, value: object, allowed: str) -> BadSetting:
    return BadSetting(f"INVALID_ARG_{name.upper()}: {name}={_shown(value)}, it must be {allowed}")


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "an array" if isinstance(value, list) else "an object"
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 100 else text[:100] + "..."
