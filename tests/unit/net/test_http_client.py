"""The request that one daemon makes of another, against a raw socket that answers whatever a test wants."""

import asyncio

import pytest

from flintmq.errors import ConnectionFailed
from flintmq.net.http_client import ANSWER_BYTES_MAX, get


async def ask(*pieces, close=True, timeout_s=5.0):
    """Send ``pieces`` as the answer; return what get() made of it and the request that was received."""
    requests = []

    async def serve(reader, writer):
        requests.append(await reader.readuntil(b"\r\n\r\n"))
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.001)
        if close:
            writer.close()
        else:
            await reader.read()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        body = await get("127.0.0.1", port, "/a?b=c", connect_timeout_s=5, request_timeout_s=timeout_s)
    finally:
        server.close()
    return body, requests[0]


async def test_request_and_answer():
    body, request = await ask(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")
    assert body == b"abc"
    assert request.startswith(b"GET /a?b=c HTTP/1.1\r\nHost: 127.0.0.1:")
    assert b"\r\nAccept: application/vnd.nsq; version=1.0\r\n" in request


async def test_an_answer_in_chunks_and_pieces():
    answer = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    body, _ = await ask(*[answer[i : i + 5] for i in range(0, len(answer), 5)], close=False)
    assert body == b"abcde"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n", "status 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n", "status 302"),
        (b"220 not HTTP at all\r\n", "not HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", "closed before the answer was complete"),
        (b"", "closed before the answer was complete"),
    ],
)
async def test_bad_answers(answer, reason):
    with pytest.raises(ConnectionFailed, match=reason):
        await ask(answer)


@pytest.mark.parametrize(
    ("beginning", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9000000\r\n\r\n", "larger than 1048576 bytes"),
        (b"HTTP/1.1 200 OK\r\nX: ", "head of the answer is larger than 65536 bytes"),
    ],
)
async def test_answers_that_are_too_long(beginning, reason):
    with pytest.raises(ConnectionFailed, match=reason):
        await ask(beginning + b"x" * 2 * ANSWER_BYTES_MAX)


async def test_an_answer_that_does_not_come():
    with pytest.raises(ConnectionFailed, match=r"no answer within 0\.05 s"):
        await ask(b"HTTP/1.1 200 OK\r\n", close=False, timeout_s=0.05)


async def test_nobody_there():
    server = await asyncio.start_server(lambda _reader, _writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionFailed, match=f"127.0.0.1:{port} failed: "):
        await get("127.0.0.1", port, "/", connect_timeout_s=1, request_timeout_s=1)
