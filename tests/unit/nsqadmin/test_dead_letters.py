"""Topics of dead letters among thousands of others, and where the dead letters of a topic go."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qsl

import pytest

from flintmq.client.admin.results import PeekedMessage, SettingsState, StoredMessage
from flintmq.nsqadmin import daemons, messages
from flintmq.nsqadmin.actions import Actions
from flintmq.nsqadmin.messages import CHANNEL_COUNT_MAX, DEAD_TOPIC_COUNT_MAX, Messages, Places
from flintmq.nsqadmin.snapshots import Known, Snapshot, merge
from flintmq.nsqadmin.upstream import Answers, NotAnswered
from flintmq.nsqadmin.views import DeadTopicsView, Missing, NodeRow
from flintmq.settings import NOTHING, Settings, resolve

NODE = "a:4151"
SOON_S = 60.0
MARKED = Settings(dead_letters=True)


class PretendNode:
    """Upstream and snapshots of one nsqd of ours.

    Args:
        settings: by topic or ``topic/channel``; of all others nothing is set.
        flags: of the nsqd.
        silent: topics about which it never answers; ``gone``: that it has no more.
    """

    def __init__(
        self,
        topics: Iterable[daemons.Topic],
        settings: Mapping[str, Settings] | None = None,
        flags: Settings = NOTHING,
        silent: Iterable[str] = (),
        gone: Iterable[str] = (),
    ) -> None:
        node = NodeRow(address=NODE, hostname="a", broadcast_address="a", http_port=4151, kind="flintmq")
        answers = {NODE: daemons.Stats(health="OK", topics=list(topics))}
        self._found = merge(1.0, Known({NODE: node}, [], []), answers, [])
        self._settings, self._flags = settings or {}, flags
        self._silent, self._gone = set(silent), set(gone)
        self.asked: list[str] = []

    async def get(self) -> Snapshot:
        return self._found

    fresh = get

    async def look(self, daemon: str, address: str, question: Any, within_s: float = 1.0) -> SettingsState:
        asked = dict(parse_qsl(question.target.partition("?")[2]))
        topic, channel = asked["topic"], asked.get("channel", "")
        self.asked.append(f"{topic}/{channel}" if channel else topic)
        if topic in self._silent:
            await asyncio.Event().wait()
        if topic in self._gone:
            raise NotAnswered(Missing(daemon, address, "refused", "TOPIC_NOT_FOUND"), 404, "TOPIC_NOT_FOUND")
        layers = [self._settings.get(name, NOTHING) for name in dict.fromkeys((self.asked[-1], topic))]
        in_force = resolve(topic, *layers, self._flags)
        own = {name: value for name, value in _fields(layers[0]).items() if value is not None}
        return SettingsState(topic, own, _fields(in_force), channel)

    async def look_all(self, daemon: str, addresses: Iterable[str], question: Any) -> Answers[SettingsState]:
        found: dict[str, SettingsState] = {}
        failures = []
        for address in addresses:
            try:
                found[address] = await self.look(daemon, address, question)
            except NotAnswered as error:
                failures.append(error)
        return Answers(found, failures)

    def dead_topics(self) -> DeadTopicsView:
        return asyncio.run(self._messages().dead_topics())

    def places_of(self, topic: str) -> Places:
        return asyncio.run(self._messages().places_of(topic, self._found))

    def _messages(self) -> Messages:
        env: Any = SimpleNamespace()
        return Messages(env, self, self)  # type: ignore[arg-type]


def _fields(struct: Any) -> dict[str, Any]:
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def topics(*names: str, headers: bool = False, channels: Iterable[str] = ()) -> list[daemons.Topic]:
    rows = [daemons.Channel(channel_name=channel) for channel in channels]
    return [daemons.Topic(name, extend_support=headers, channels=rows, message_count=7) for name in names]


MANY = topics(*(f"t{number:04}" for number in range(2 * DEAD_TOPIC_COUNT_MAX)))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "SETTINGS_S", SOON_S)  # a machine may be slow


def test_they_are_found_behind_any_number_of_other_topics():
    marked = {"grave": MARKED, "lost.mail": MARKED}
    node = PretendNode([*MANY, *topics("zzz", "zzz.dead", "grave", "lost.mail")], marked)
    view = node.dead_topics()
    assert [(row.name, row.topic, row.message_count) for row in view.topics] == [
        ("grave", "", 7), ("lost.mail", "", 7), ("zzz.dead", "zzz", 7),
    ]  # fmt: skip
    assert (view.total, view.unasked, view.notes, view.missing) == (3, 0, [], [])
    assert "zzz.dead" not in node.asked, "its name says it"


def test_those_with_headers_are_asked_first_and_what_there_was_no_time_for_is_said(monkeypatch: pytest.MonkeyPatch):
    node = PretendNode(
        [*MANY, *topics("zzz", headers=True)], {"zzz": MARKED}, silent=[f"t{number:04}" for number in range(50, 2000)]
    )
    monkeypatch.setattr(messages, "SETTINGS_S", 1.0)
    view = node.dead_topics()
    assert [row.name for row in view.topics] == ["zzz"] and node.asked[0] == "zzz"
    assert view.unasked == len(MANY) - 50
    assert view.notes == [
        f"of {view.unasked} of {len(MANY) + 1} topics it is not known whether they have dead letters, because there "
        "are too many to ask: only those with a name that ends in .dead are listed"
    ]


def test_a_list_that_is_cut_says_so():
    count = DEAD_TOPIC_COUNT_MAX + 3
    view = PretendNode(topics(*(f"t{number:04}.dead" for number in range(count)))).dead_topics()
    assert len(view.topics) == DEAD_TOPIC_COUNT_MAX and view.total == count
    assert view.notes == [f"{count} topics have dead letters; the first {DEAD_TOPIC_COUNT_MAX} by name are listed"]


def test_a_topic_that_is_gone_meanwhile_is_nobody_s_failure():
    view = PretendNode(topics("t", "grave"), {"grave": MARKED}, gone=["t"]).dead_topics()
    assert [row.name for row in view.topics] == ["grave"] and (view.missing, view.unasked) == ([], 0)


def test_those_of_an_ephemeral_topic_are_its():
    names = topics("t#ephemeral", "t.dead#ephemeral", "a.deadly", "a.deadly.dead")
    view = PretendNode(names, {"t.dead#ephemeral": MARKED}).dead_topics()
    assert {row.name: row.topic for row in view.topics} == {
        "t.dead#ephemeral": "t#ephemeral", "a.deadly.dead": "a.deadly",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("topic", "settings", "flags", "own", "others"),
    [
        ("t", {}, NOTHING, "t.dead", []),
        ("t", {"t": Settings(max_attempts=1, dead_letter_topic="{topic}-lost")}, NOTHING, "t-lost", []),
        ("t", {}, Settings(max_attempts=1, dead_letter_topic="grave"), "grave", []),
        ("t", {"t/c": Settings(max_attempts=1, dead_letter_topic="lost.mail")}, NOTHING, "", ["lost.mail"]),
        ("t", {"t/c": Settings(max_attempts=1)}, NOTHING, "t.dead", []),
        (
            "t", {"t": Settings(max_attempts=1), "t/c": Settings(dead_letter_topic="lost.mail")}, NOTHING,
            "t.dead", ["lost.mail"],
        ),
        ("grave", {"grave": MARKED}, Settings(max_attempts=1), "grave", []),
        ("by.dead", {}, NOTHING, "by.dead", []),  # a client published them: nobody marks it
        ("by.dead", {}, Settings(max_attempts=1), "by.dead", ["by.dead.dead"]),
    ],
)  # fmt: skip
def test_the_topics_that_dead_letters_go_to(
    topic: str, settings: dict[str, Settings], flags: Settings, own: str, others: list[str]
):
    node = PretendNode(topics("t", "grave", "by.dead", channels=["c", "d"]), settings, flags)
    places = node.places_of(topic)
    assert (places.own, places.others, places.missing, places.notes) == (own, others, [], [])


def test_a_topic_that_the_dead_letters_of_a_channel_have_used_before_stays_in_sight():
    node = PretendNode(
        topics("t", "t.dead", channels=["c"]), {"t/c": Settings(max_attempts=1, dead_letter_topic="lost.mail")}
    )
    places = node.places_of("t")
    assert (places.own, places.others) == ("t.dead", ["lost.mail"])


def test_channels_that_are_too_many_to_ask_are_counted():
    count = CHANNEL_COUNT_MAX + 1
    node = PretendNode(topics("t", channels=[f"c{number:04}" for number in range(count)]))
    assert node.places_of("t").notes == [
        f"of 1 of {count} channels it is not known where their dead letters go: too many to ask"
    ]


class PretendLetters(PretendNode):
    """A node with two dead letters in a channel, one of which somebody else finishes when it is published."""

    def __init__(self) -> None:
        super().__init__([*topics("t"), *topics("t.dead", channels=["nsqadmin"])])
        self.lookupds: tuple[str, ...] = ()
        self.left = ["a" * 16, "b" * 16]
        self.published = 0
        self.messages = self._messages()
        self.snapshots = self
        self.outcomes: list[tuple[Any, ...]] = []

    def forget(self) -> None:
        pass

    async def look(self, daemon: str, address: str, question: Any, within_s: float = 1.0) -> Any:
        if question.target.startswith("/channel/peek"):
            return [PeekedMessage(id=1, message_id=each, text="", timestamp_ns=0) for each in self.left]
        return await super().look(daemon, address, question, within_s)

    async def change(self, daemon: str, address: str, question: Any) -> Any:
        if question.target.startswith("/message/get"):
            return StoredMessage(id=1, message_id=self.left[0], text="body", timestamp_ns=0)
        if question.target.startswith("/pub"):
            self.published += 1
            return None
        raise NotAnswered(Missing(daemon, address, "refused", "it answers 404"), 404, "MESSAGE_NOT_FOUND")

    def note(self, *arguments: Any) -> None:
        self.outcomes.append(arguments)

    def tell(self, notification: Any) -> None:
        pass


def test_a_letter_that_somebody_else_finished_may_be_there_twice_and_the_rest_is_theirs():
    node: Any = PretendLetters()
    visitor: Any = SimpleNamespace(
        require=lambda role: None, basic_user="", name="ann", is_believed=True, address="", user_agent="", url=""
    )
    env: Any = SimpleNamespace(clock=SimpleNamespace(wall_ns=lambda: 0))
    done = asyncio.run(Actions(env, node, node, node, node, "host").requeue_dead_letters(visitor, "t"))
    assert (node.published, done.text) == (1, "requeued dead letters of t (1)")
    (failure,) = done.failures
    assert "it is published twice; those behind it are left" in failure.text
