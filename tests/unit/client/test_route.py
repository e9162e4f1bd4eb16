"""The way a daemon is asked, as its answers decide: over plain HTTP or TLS, with the token or without."""

from __future__ import annotations

import pytest

from flintmq.client.admin.nsqd import ping
from flintmq.client.admin.question import HttpRefused
from flintmq.client.admin.route import Route, Step, TokenWithheld, left_s, route_to, wants_tls
from flintmq.client.options import ConnectionOptions

PLAIN = "http://127.0.0.1:4151"
SECURED = "https://127.0.0.1:4152"
WANTS_TLS = 403, b'{"message": "TLS_REQUIRED", "https_port": 4152}'
WANTS_TOKEN = 401, b'{"message": "UNAUTHORIZED"}'
FINE = 200, b"OK"


def asked(route: Route, *answers: tuple[int, bytes]) -> list[Step]:
    """The requests to one question whose answers are these; there must be no other."""
    steps = [route.first()]
    for number, (status, body) in enumerate(answers, 1):
        following = route.after(steps[-1], status, body)
        assert (following is None) == (number == len(answers))
        if following is not None:
            steps.append(following)
    return steps


@pytest.mark.parametrize("has_token", [False, True])
def test_one_request_is_enough_where_nothing_is_refused(has_token: bool):
    assert asked(Route(PLAIN, has_token=has_token), FINE) == [Step(PLAIN, has_token)]
    assert asked(Route(SECURED, has_token=has_token, token_in_clear=False), FINE) == [Step(SECURED, has_token)]


@pytest.mark.parametrize("answer", [(403, b'{"message": "FORBIDDEN"}'), (404, b"{}"), (500, b""), (403, b"no JSON")])
def test_no_other_refusal_is_asked_again(answer: tuple[int, bytes]):
    assert asked(Route(PLAIN, has_token=True, token_in_clear=False), answer) == [Step(PLAIN, False)]


def test_who_wants_tls_is_asked_over_it_and_the_next_time_at_once():
    route = Route(PLAIN, has_token=False)
    assert asked(route, WANTS_TLS, FINE) == [Step(PLAIN, False), Step(SECURED, False)]
    assert asked(route, FINE) == [Step(SECURED, False)]
    route.failed(Step(SECURED, False))
    assert route.first() == Step(PLAIN, False), "it may listen elsewhere now"
    ipv6 = Route("http://[::1]:4151", has_token=False)
    assert asked(ipv6, WANTS_TLS, FINE)[1].base == "https://[::1]:4152"


def test_who_wants_tls_over_tls_is_not_asked_for_ever():
    assert len(asked(Route(PLAIN, has_token=True), WANTS_TLS, WANTS_TLS)) == 2
    assert len(asked(Route(PLAIN, has_token=True, waits_for_401=True), WANTS_TOKEN, WANTS_TLS, WANTS_TLS)) == 3


def test_a_token_for_tls_only_is_in_no_request_in_clear():
    route = Route(PLAIN, has_token=True, token_in_clear=False)
    assert asked(route, WANTS_TLS, FINE) == [Step(PLAIN, False), Step(SECURED, True)]
    route = Route(PLAIN, has_token=True, token_in_clear=False)
    (step,) = asked(route, WANTS_TOKEN)
    assert not step.shows_token
    with pytest.raises(TokenWithheld, match=f"^{PLAIN} asks for a token over plain HTTP, .* over TLS only$"):
        route.read(ping(), step, *WANTS_TOKEN)
    assert route.read(ping(), step, *FINE) == "OK"


def test_a_token_that_is_not_known_is_a_refusal_like_any():
    route = Route(PLAIN, has_token=True)
    (step,) = asked(route, WANTS_TOKEN)
    with pytest.raises(HttpRefused) as refused:
        route.read(ping(), step, *WANTS_TOKEN)
    assert not isinstance(refused.value, TokenWithheld)


def test_a_token_that_may_be_shown_waits_until_it_is_asked_for():
    route = Route(PLAIN, has_token=True, waits_for_401=True)
    assert asked(route, WANTS_TOKEN, FINE) == [Step(PLAIN, False), Step(PLAIN, True)]
    assert asked(route, FINE) == [Step(PLAIN, True)], "the next time at once"


@pytest.mark.parametrize(
    ("address", "options", "shows"),
    [
        ("127.0.0.1", ConnectionOptions(), True),
        ("127.0.0.1", ConnectionOptions(tls_server_name="a.example"), False),
        ("http://127.0.0.1", ConnectionOptions(tls_server_name="a.example"), True),
    ],
)
def test_an_address_with_its_scheme_is_taken_at_its_word(address: str, options: ConnectionOptions, shows: bool):
    secured = options.with_overrides(lookup_token="t" * 20)
    assert route_to(address, PLAIN, secured, token_in_clear=True).first() == Step(PLAIN, shows)


def test_which_options_are_of_tls():
    assert not wants_tls(ConnectionOptions())
    assert all(
        wants_tls(each)
        for each in (
            ConnectionOptions(tls=True),
            ConnectionOptions(tls_server_name="a.example"),
            ConnectionOptions(tls_verify=False),
        )
    )


def test_the_time_that_is_left_can_be_read_and_is_never_none():
    assert (left_s(9.98765), left_s(0.01), left_s(-1)) == (10.0, 0.1, 0.1)
