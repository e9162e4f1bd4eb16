"""An MPUB of very many messages is cut in pieces; what comes out does not depend on where the pieces end."""

from struct import pack

import pytest

from flintmq.wire.server import RefusedBody, ServerLimits, parse_mpub_body


def body_of(messages):
    return pack(">I", len(messages)) + b"".join(pack(">I", len(each)) + each for each in messages)


@pytest.mark.parametrize("count", [1, 2, 2047, 2048, 2049, 4096, 4097, 10_000])
@pytest.mark.parametrize("is_uniform", [True, False])
def test_every_message_comes_out_in_order(count, is_uniform):
    messages = [b"%05d" % number for number in range(count)]
    if not is_uniform:
        messages[-1] += b"longer"
    assert list(parse_mpub_body(body_of(messages), ServerLimits())) == messages


@pytest.mark.parametrize("number", [0, 2047, 2048, 4999])
def test_a_wrong_size_anywhere_is_refused(number):
    data = bytearray(body_of([b"12345"] * 5000))
    data[4 + 9 * number + 3] = 0
    with pytest.raises(RefusedBody) as refused:
        parse_mpub_body(bytes(data), ServerLimits())
    assert refused.value.args == ("E_BAD_MESSAGE", f"MPUB invalid message({number}) body size 0")


def test_what_stands_behind_the_messages_of_http_is_refused():
    with pytest.raises(RefusedBody) as refused:
        parse_mpub_body(body_of([b"x", b"y"]) + b"z", ServerLimits())
    assert refused.value.args == ("E_BAD_BODY", "MPUB body has 1 bytes after its 2 messages")


@pytest.mark.parametrize(
    ("size", "code", "detail"),
    [
        (3, "E_BAD_BODY", "MPUB failed to read message count"),
        (6, "E_BAD_MESSAGE", "MPUB failed to read message(0) body size"),
        (8, "E_BAD_MESSAGE", "MPUB failed to read message body"),
        (9, "E_BAD_MESSAGE", "MPUB failed to read message(1) body size"),
    ],
)
def test_what_lacks_over_http_is_refused(size, code, detail):
    with pytest.raises(RefusedBody) as refused:
        parse_mpub_body(body_of([b"x", b"y"])[:size], ServerLimits())
    assert refused.value.args == (code, detail)
