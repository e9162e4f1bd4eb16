"""In which form dead letters are published: each rule by itself, with nobody who publishes."""

from __future__ import annotations

import pytest

from flintmq.client.core.dead_letters import Form, Letters
from flintmq.errors import ConnectionFailed, FlintError, LocalProtocolError, NsqdError, PublishRefused, PublishUnknown

TOO_LARGE = LocalProtocolError("E_BAD_EXT", "headers of 70000 bytes, at most 65535")


def published(letters: Letters, takes_headers: bool | None, answers: dict[Form, FlintError]) -> list[Form]:
    """The forms that a letter was tried in; nsqd takes it in those that are not in ``answers``."""
    tried = []
    for form in letters.forms(takes_headers):
        tried.append(form)
        if form not in answers:
            letters.taken(form)
            break
        letters.refused(form, answers[form])
    return tried


@pytest.mark.parametrize(("takes_headers", "form"), [(True, Form.HEADED), (False, Form.PLAIN)])
def test_what_is_known_is_not_tried(takes_headers: bool, form: Form):
    letters = Letters()
    assert not letters.needs_try(takes_headers)
    assert published(letters, takes_headers, {}) == [form]


def test_the_first_letter_tries_for_all():
    letters = Letters()
    assert letters.needs_try(None)
    assert published(letters, None, {}) == [Form.ALONE]
    assert not letters.needs_try(None)
    assert published(letters, None, {}) == [Form.HEADED]


@pytest.mark.parametrize("code", ["E_EXT_NOT_SUPPORT", "E_TOPIC_NOT_EXIST", "E_INVALID"])
def test_headers_that_are_refused_are_left_out_from_then_on(code: str):
    letters = Letters()
    assert published(letters, None, {Form.ALONE: NsqdError(code, "", "a:1")}) == [Form.ALONE, Form.PLAIN]
    assert published(letters, None, {}) == [Form.PLAIN]


def test_a_topic_can_lose_its_headers():
    letters = Letters()
    published(letters, None, {})
    refused = PublishRefused("E_EXT_NOT_SUPPORT", "", "a:1", False)
    assert published(letters, None, {Form.HEADED: refused}) == [Form.HEADED, Form.PLAIN]
    assert published(letters, None, {}) == [Form.PLAIN]


@pytest.mark.parametrize("takes_headers", [True, None])
def test_headers_that_are_too_large_say_nothing_of_the_topic(takes_headers: bool | None):
    letters = Letters()
    with_headers = Form.HEADED if takes_headers else Form.ALONE
    assert published(letters, takes_headers, {with_headers: TOO_LARGE}) == [with_headers, Form.PLAIN]
    assert published(letters, takes_headers, {}) == [with_headers]


@pytest.mark.parametrize(
    ("form", "error"),
    [
        (Form.ALONE, ConnectionFailed("a:1", "gone")),
        (Form.ALONE, NsqdError("E_PUB_FAILED", "disk full", "a:1")),
        (Form.HEADED, PublishRefused("E_TOPIC_NOT_EXIST", "", "a:1", True)),
        (Form.HEADED, PublishUnknown("E_EXT_NOT_SUPPORT", "", "a:1", True)),
        (Form.PLAIN, PublishRefused("E_EXT_NOT_SUPPORT", "", "a:1", False)),
        (Form.PLAIN, LocalProtocolError("E_BAD_MESSAGE", "a body is empty")),
    ],
)
def test_what_has_another_reason_is_told(form: Form, error: FlintError):
    letters = Letters()
    with pytest.raises(type(error)) as caught:
        letters.refused(form, error)
    assert caught.value is error
    assert letters.can_have_headers is None
