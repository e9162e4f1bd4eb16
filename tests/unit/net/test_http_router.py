"""Parameters that a route does not obey: refused when somebody knows them or the route names them, else ignored."""

from __future__ import annotations

import pytest

from flintmq.net.http_messages import HttpError, Request, Response, text_response
from flintmq.net.http_router import Router


def asked(router: Router, method: str, path: str, query: bytes = b"") -> Response:
    route = router.exact[method.encode(), path.encode()]
    answer = route.handler(Request(method.encode(), path.encode(), query, {}, "@", route))
    assert isinstance(answer, Response)
    return answer


@pytest.fixture
def router() -> Router:
    router = Router(["partition"])
    router.add("GET", "/one", lambda _: text_response("one"), takes=("topic", "channel", "format"))
    router.add("GET", "/two", lambda _: text_response("two"), takes=("count",), refuses=("channel",))
    router.add("GET", "/none", lambda _: text_response("none"), takes=())
    router.add("GET", "/all", lambda _: text_response("all"))
    return router


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/one", "topic=t&channel=c&other=1"),
        ("/two", "count=1&topic=t&partition=1"),
        ("/two", "format=json"),
        ("/none", "other=1&Topic=t"),
        ("/none", ""),
        ("/all", "topic=t&partition=1"),
    ],
)
def test_what_is_taken_and_what_is_ignored(router: Router, path: str, query: str):
    assert asked(router, "GET", path, query.encode()).body == path[1:].encode()


@pytest.mark.parametrize(
    ("path", "query", "text"),
    [
        ("/one", "topic=t&count=1", "INVALID_ARG_COUNT: GET /one does not take count; it takes topic, channel, format"),
        ("/none", "partition=", "INVALID_ARG_PARTITION: GET /none does not take partition; it takes no parameters"),
        ("/two", "channel=c", "INVALID_ARG_CHANNEL: GET /two does not take channel; it takes count"),
        ("/none", "%70artition=1", "INVALID_ARG_PARTITION: GET /none does not take partition; it takes no parameters"),
    ],
)  # fmt: skip
def test_what_is_refused(router: Router, path: str, query: str, text: str):
    with pytest.raises(HttpError) as caught:
        asked(router, "GET", path, query.encode())
    assert (caught.value.status, caught.value.message) == (400, text)


def test_a_query_that_cannot_be_read_is_for_the_handler_to_refuse(router: Router):
    assert asked(router, "GET", "/one", b"partition=%zz").body == b"one"


def test_a_form_is_for_refusals_as_well():
    def shouting(handler):
        def answer(request):
            try:
                return handler(request)
            except HttpError as error:
                return text_response(error.message.upper())

        return answer

    router = Router(["partition"])
    router.add("GET", "/x", lambda _: text_response("x"), takes=(), form=shouting)
    assert asked(router, "GET", "/x", b"partition=1").body.startswith(b"INVALID_ARG_PARTITION: GET /X DOES NOT TAKE")
