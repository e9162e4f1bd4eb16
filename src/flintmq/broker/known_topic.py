"""A topic's channels with all that is set for them, apart from where they are: what its other partitions begin with.

Rules of this file: data, and how what several say becomes one.

Source: docs/decisions/0017.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from flintmq.settings import Settings


class KnownChannel(msgspec.Struct, frozen=True):
    """A channel.

    Attributes:
        paused: whether nothing of it is delivered.
        skipped: whether everything is finished without being delivered.
    """

    paused: bool = False
    skipped: bool = False


class KnownTopic(msgspec.Struct, frozen=True):
    """A topic as somebody has it who leads some of it, or follows some of it.

    Attributes:
        paused: whether nothing is handed to its channels.
        channels: by name; ephemeral ones are not among them.
        settings: by channel; of the topic itself under an empty name.
    """

    paused: bool = False
    channels: dict[str, KnownChannel] = {}
    settings: dict[str, Settings] = {}


def merged(parts: Sequence[KnownTopic]) -> KnownTopic:
    """Return a topic with every channel that one of them has.

    As for one topic on one node, what is paused (or skipped) is so everywhere: one partition that is says nothing of
    others. Of settings the first one stands that sets something.
    """
    channels: dict[str, KnownChannel] = {}
    settings: dict[str, Settings] = {}
    for part in parts:
        for name, theirs in part.channels.items():
            ours = channels.get(name, theirs)
            channels[name] = KnownChannel(ours.paused and theirs.paused, ours.skipped and theirs.skipped)
        for name, each in part.settings.items():
            settings[name] = completed(settings.get(name, each), each)
    return KnownTopic(bool(parts) and all(part.paused for part in parts), channels, settings)


def completed(settings: Settings, others: Settings) -> Settings:
    """Return settings, with those of others where nothing is set."""
    missing = {name: getattr(others, name) for name in others.__struct_fields__ if getattr(settings, name) is None}
    return msgspec.structs.replace(settings, **missing)
