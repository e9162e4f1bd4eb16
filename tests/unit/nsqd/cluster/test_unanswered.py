"""Publishes that were written and not answered when another node was elected."""

from __future__ import annotations

from typing import Any, cast

import pytest

from flintmq.broker.partition import PublishGroup
from flintmq.errors import RemoteProtocolError
from flintmq.nsqd.cluster.unanswered import KNOWN_NS_MAX, NotLedAnyMore, Unanswered


def group(first: int, end: int) -> PublishGroup:
    made = PublishGroup(cast(Any, None))
    made.first_sequence, made.end_sequence = first, end
    return made


@pytest.fixture
def groups() -> list[PublishGroup]:
    return [group(10, 12), group(12, 15), group(15, 16)]


@pytest.fixture
def unanswered(groups: list[PublishGroup]) -> Unanswered:
    made = Unanswered("t", 0)
    made.keep(groups, 0)
    return made


def test_what_the_next_leader_commits_is_stored(unanswered: Unanswered, groups: list[PublishGroup]) -> None:
    unanswered.committed(14)
    assert [each.ended for each in groups] == [True, False, False] and groups[0].error is None
    unanswered.committed(16)
    assert all(each.ended and each.error is None for each in groups) and not unanswered


def test_what_is_cut_off_is_refused_and_not_taken_for_what_comes_in_its_place(
    unanswered: Unanswered, groups: list[PublishGroup]
) -> None:
    unanswered.cut(13)
    unanswered.committed(20)
    whole, parted, gone = (each.error for each in groups)
    assert whole is None and isinstance(parted, NotLedAnyMore)
    assert isinstance(gone, RemoteProtocolError) and gone.code == "E_FAILED_ON_NOT_LEADER" and not gone.fatal


def test_nobody_waits_for_long(unanswered: Unanswered, groups: list[PublishGroup]) -> None:
    unanswered.tick(KNOWN_NS_MAX - 1)
    assert unanswered and not groups[0].ended
    unanswered.tick(KNOWN_NS_MAX)
    assert all(isinstance(each.error, NotLedAnyMore) for each in groups) and not unanswered
