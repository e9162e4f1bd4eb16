"""Settings: what is in force, names of dead-letter topics, what a change is."""

import pytest

from flintmq.limits import NAME_SIZE_MAX
from flintmq.names import is_valid_name
from flintmq.settings import (
    NO_LIMITS,
    NOTHING,
    BadSetting,
    Limits,
    Settings,
    check_dead_letter_topic,
    check_node,
    dead_letter_topic,
    decode_settings,
    encode_settings,
    merged,
    resolve,
)


def test_without_settings_there_are_no_limits():
    assert resolve("t", NOTHING, NOTHING, NOTHING) == NO_LIMITS
    assert not NO_LIMITS.is_limiting and not NO_LIMITS.is_bounded


def test_the_nearest_that_says_something_is_in_force_also_when_it_says_0():
    node = Settings(max_attempts=5, ttl_ms=1000, overflow="drop_oldest", trace="all")
    topic = Settings(ttl_ms=0, max_messages=7)
    channel = Settings(max_messages=0, trace="")
    assert resolve("t", topic, node) == Limits(5, "t.dead", 0, 7, 0, "drop_oldest", "all")
    assert resolve("t", channel, topic, node) == Limits(5, "t.dead", 0, 0, 0, "drop_oldest", "")
    assert resolve("t", node).ttl_ns == 1_000_000_000


@pytest.mark.parametrize(
    ("template", "topic", "name"),
    [
        ("{topic}.dead", "a", "a.dead"),
        ("graves", "a", "graves"),
        ("x-{topic}-{topic}", "a", "x-a-a"),
        ("{topic}.dead", "a#ephemeral", "a.dead#ephemeral"),
        ("graves", "a#ephemeral", "graves"),
        ("{topic}.dead#ephemeral", "a", "a.dead#ephemeral"),
        ("{topic}.dead#ephemeral", "a#ephemeral", "a.dead#ephemeral"),
    ],
)
def test_names_of_dead_letter_topics(template, topic, name):
    assert dead_letter_topic(template, topic) == name
    assert is_valid_name(name)


def test_where_there_is_no_name_for_the_dead_letters_nothing_is_given_up():
    long = "x" * (NAME_SIZE_MAX - 4)
    assert resolve(long, Settings(max_attempts=5)).max_attempts == 0
    assert resolve(long[1:], Settings(max_attempts=5)).max_attempts == 5
    assert resolve("graves", Settings(max_attempts=5, dead_letter_topic="graves")).max_attempts == 0
    check_dead_letter_topic(long, Settings(ttl_ms=5), Settings(max_attempts=5))
    for settings in (Settings(max_attempts=5), Settings(dead_letter_topic="{topic}.dead")):
        with pytest.raises(BadSetting, match="INVALID_ARG_DEAD_LETTER_TOPIC"):
            check_dead_letter_topic(long, settings, NOTHING)
    with pytest.raises(BadSetting, match="another topic than the messages' own"):
        check_dead_letter_topic("graves", Settings(max_attempts=5), Settings(dead_letter_topic="graves"))


def test_a_topic_of_dead_letters_gives_none_up():
    graves = Settings(dead_letters=True)
    assert resolve("graves", Settings(max_attempts=1), graves, Settings(max_attempts=2)).max_attempts == 0
    with pytest.raises(BadSetting, match="INVALID_ARG_MAX_ATTEMPTS: max_attempts=3, it must be 0: graves holds dead"):
        check_dead_letter_topic("graves", Settings(max_attempts=3), graves)


def test_a_change_leaves_what_it_does_not_name():
    settings = merged(Settings(max_attempts=3, ttl_ms=5), b'{"ttl_ms": null, "overflow": "refuse"}')
    assert settings == Settings(max_attempts=3, overflow="refuse")
    assert merged(settings, b"{}") == settings
    assert merged(settings, b'{"dead_letter_topic": ""}').dead_letter_topic is None


def test_what_is_refused_is_shown_cut():
    with pytest.raises(BadSetting) as caught:
        merged(NOTHING, b'{"overflow": "' + b"x" * 5000 + b'"}')
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("settings", [NOTHING, Settings(max_attempts=0, trace="all", dead_letters=True)])
def test_they_are_stored_as_they_are(settings):
    assert decode_settings(encode_settings(settings)) == settings


@pytest.mark.parametrize("template", ["a b", "", "{topic", "x" * 65])
def test_templates_that_no_topic_could_use(template):
    assert check_node(Settings(dead_letter_topic=template)) is not None
    assert check_node(NOTHING) is None
