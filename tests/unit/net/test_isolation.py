"""Doing one thing to many connections."""

import logging

from flintmq.net.isolation import for_each


def test_what_one_fails_with_is_logged_with_it_and_the_others_have_their_turn(caplog):
    done: list[str] = []

    def do(member: str) -> None:
        done.append(member)
        if member == "b":
            raise RuntimeError("cannot")

    with caplog.at_level(logging.ERROR):
        for_each("abc", do, "closing")
    assert done == ["a", "b", "c"]
    assert [record.message for record in caplog.records] == ["closing b failed: RuntimeError('cannot')"]


def test_members_may_leave_meanwhile():
    members = dict.fromkeys("abc")
    for_each(members, members.pop, "closing")
    assert not members
