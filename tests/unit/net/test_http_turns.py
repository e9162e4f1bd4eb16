"""A connection that sends much has its turns; what it gets is the same as if it had sent it piece by piece."""

import asyncio

import pytest
from tests.unit.net.test_http_server import Peer, chunked, request

from flintmq.net.http_server import PIECE_BYTES, QUEUE_BYTES_MAX, HttpServer, PendingResponse, Router, text_response
from flintmq.net.turns import SLICE_NS


class Clock:
    """Time that passes when something is handled."""

    def __init__(self):
        self.ns = 0

    def monotonic_ns(self):
        return self.ns

    boottime_ns = monotonic_ns

    def wall_ns(self):
        return 0


class World:
    def __init__(self):
        self.clock = Clock()
        self.pending: list[PendingResponse] = []
        self.seen: list[bytes] = []
        router = Router()
        router.add("GET", "/work", self.work, is_logged=False)
        router.add("POST", "/echo", self.echo, body_limit_bytes=10 * QUEUE_BYTES_MAX, is_logged=False)
        router.add("POST", "/hold", self.hold, body_limit_bytes=10 * QUEUE_BYTES_MAX, is_logged=False)
        self.server = HttpServer(router, clock=self.clock)

    def work(self, each):
        self.clock.ns += SLICE_NS // 4
        return text_response(each.query["n"])

    def echo(self, each):
        self.clock.ns += SLICE_NS // 4
        self.seen.append(each.body)
        return text_response(str(len(each.body)))

    def hold(self, each):
        self.seen.append(each.body)
        self.pending.append(PendingResponse())
        return self.pending[-1]


@pytest.fixture
async def world():
    return World()


@pytest.fixture
async def peer(world):
    return Peer(world.server)


def bodies(peer):
    return [answer.body for answer in peer.answers]


async def until_idle(peer):
    for _ in range(10_000):
        if not peer.transport.is_paused:
            return
        await asyncio.sleep(0)
    raise AssertionError("reading is still paused")


async def test_a_pipeline_is_answered_in_slices_and_in_order(world, peer):
    count = 1000
    peer.send(b"".join(request(f"/work?n={number}") for number in range(count)))
    assert peer.transport.is_paused, "nothing more is read before it has had its turn"
    first = len(peer.answers)
    # one piece of the input at most beyond the slice
    assert 4 <= first <= 4 + PIECE_BYTES // len(request("/work?n=0"))
    await asyncio.sleep(0)
    assert first < len(peer.answers) <= 2 * first + 4
    await until_idle(peer)
    assert bodies(peer) == [b"%d" % number for number in range(count)]


async def test_others_have_their_turn_meanwhile(world, peer):
    peer.send(b"".join(request(f"/work?n={number}") for number in range(1000)))
    other = Peer(world.server)
    other.send(request("/work?n=1"))
    assert bodies(other) == [b"1"]
    many = Peer(world.server).send(b"".join(request(f"/work?n={number}") for number in range(1000)))
    before = len(peer.answers)
    for _ in range(4):
        await asyncio.sleep(0)
    assert len(peer.answers) > before
    assert len(many.answers) > 4


@pytest.mark.parametrize("size", [PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 1, 100_000])
async def test_bodies_are_whole_wherever_they_are_cut(world, peer, size):
    body = bytes(number % 251 for number in range(size))
    sent = (
        request("/echo", method="POST", body=body) * 5
        + chunked("/echo", body[:1000], body[1000:])
        + request("/work?n=7")
    )
    for at in range(0, len(sent), 65_536):
        peer.send(sent[at : at + 65_536])
    await until_idle(peer)
    assert world.seen == [body] * 6
    assert bodies(peer) == [b"%d" % size] * 6 + [b"7"]


async def test_requests_that_wait_for_an_answer_are_bounded_in_bytes(world, peer):
    body = bytes(QUEUE_BYTES_MAX // 2)
    peer.send(request("/hold", method="POST", body=body) * 10)
    assert peer.transport.is_paused
    assert len(world.seen) == 1
    assert peer.protocol._queue_bytes <= 2 * QUEUE_BYTES_MAX
    for number in range(10):
        for _ in range(5):
            await asyncio.sleep(0)
        world.pending[number].complete(text_response(str(number)))
    await until_idle(peer)
    assert bodies(peer) == [b"%d" % number for number in range(10)]
    assert peer.protocol._queue_bytes == 0


async def test_a_request_to_close_ends_a_pipeline(world, peer):
    sent = b"".join(request(f"/work?n={number}") for number in range(100)) + request("/work?n=x", "Connection: close")
    peer.send(sent + request("/work?n=after") * 1000)
    for _ in range(200):
        await asyncio.sleep(0)
    assert bodies(peer)[-1] == b"x"
    assert peer.transport.state == "closed"
    assert len(peer.answers) == 101


async def test_who_has_gone_has_no_turn(world, peer):
    peer.send(b"".join(request(f"/work?n={number}") for number in range(1000)))
    answered = len(peer.answers)
    peer.transport.abort()
    for _ in range(5):
        await asyncio.sleep(0)
    assert len(peer.answers) == answered
    assert len(world.server.turns) == 0
