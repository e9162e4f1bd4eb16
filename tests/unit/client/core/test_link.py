"""A connection's rules, without a transport."""

from __future__ import annotations

from typing import Any

import pytest

from flintmq.client.core.link import Link
from flintmq.client.options import ConnectionOptions
from flintmq.errors import FlintError
from flintmq.wire.commands import COMMANDS, PUBLISHING
from flintmq.wire.frames import error_frame


class Owner:
    """Takes everything and does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: None


class BareLink(Link):
    def flush_soon(self) -> None:
        pass

    @property
    def ends(self) -> tuple[str, str]:
        return "", ""

    def _disconnect(self, is_polite: bool) -> None:
        pass


def publish(link: Link, name: str, answered: Any) -> None:
    """Publish with the command of this name."""
    bodies = [b"body"] if COMMANDS[name].body.kind.value == "one message" else [b"one", b"two"]
    match name.removeprefix("M"):
        case "PUB":
            link.publish("t", bodies, answered)
        case "DPUB":
            link.publish_deferred("t", 5, bodies, answered)
        case "PUB_ONCE":
            link.publish_once("t", bodies, "p", 1, answered)
        case "PUB_TRACE":
            link.publish_traced("t", 0, [(1, body) for body in bodies], answered)
        case "PUB_EXT":
            link.publish_with_headers("t", 0, [(b"{}", body) for body in bodies], answered)
        case _:
            raise AssertionError(f"{name} is not published here")


@pytest.mark.parametrize("name", PUBLISHING)
def test_an_nsqd_that_closes_because_of_a_publish_is_well(name: str):
    link = BareLink("127.0.0.1:4150", Owner(), ConnectionOptions(), lambda: 0.0)
    answers: list[Any] = []
    publish(link, name, answers.append)
    assert link.take_output().startswith(name.encode() + b" t")
    link.feed(error_frame("E_BAD_BODY", "x"))
    assert isinstance(answers[0], FlintError)
    assert link.is_lost
    assert link.is_publish_refused
