"""What becomes of a publish, with both clients alike: the retry table, unknown outcomes, moved leaders, idempotence.

Scripted nsqd over real sockets say what each case needs; the same cases run in virtual time, with more of them, in
``tests/unit/client`` for the asyncio client. A time here is only ever a bound from below or a deadline of a call.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeVar

import pytest
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import FLAVOURS, Flavour, PublishHandle, opened
from tests.integration.test_sync_partitions import Imitation, imitation
from tests.unit.client.fake_nsqd import HANG_UP, OK, SILENCE, FakeNsqd

from flintmq.errors import PublishError, PublishRefused, PublishUnknown
from flintmq.wire.identify import ServerFeatures

T = TypeVar("T")

FAILED = "E_PUB_FAILED PUB failed exiting"
DRAINING = "E_PUB_FAILED PUB failed draining"
GAP = "E_SEQUENCE_GAP PUB_ONCE producer p sequence 2, expected 1"


@pytest.fixture(params=FLAVOURS)
def flavour(request: pytest.FixtureRequest) -> Iterator[Flavour]:
    with opened(request.param) as found:
        yield found


class Scripted:
    """Nsqd that do what a test says, on a loop in a thread of their own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="scripted nsqd", daemon=True)
        self._thread.start()
        self._fakes: list[FakeNsqd] = []

    def do(self, function: Callable[[], T]) -> T:
        """Call it where the nsqd live."""

        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(PATIENCE_S)

    def start(self, *answers: str) -> tuple[str, FakeNsqd]:
        """One more nsqd, which gives these answers to publishes and then OK; its address."""
        left = [*answers]
        fake = FakeNsqd(ServerFeatures(version="fake", producer_sequences=True))
        fake.answer = lambda command, bodies: left.pop(0) if left else OK
        self._fakes.append(fake)
        return asyncio.run_coroutine_threadsafe(fake.listen(), self._loop).result(PATIENCE_S), fake

    def close(self) -> None:
        for fake in self._fakes:
            self.do(fake.stop)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    made = Scripted()
    try:
        yield made
    finally:
        made.close()


def outcome_of(call: Future[None]) -> PublishError | None:
    """How a publish ended."""
    error = call.exception(PATIENCE_S)
    assert error is None or isinstance(error, PublishError), error
    return error


def pub(producer: PublishHandle, body: bytes = b"x", **options: Any) -> PublishError | None:
    """Publish one message and say how that ended."""
    try:
        producer.call(lambda it: it.pub("t", body, **options))
    except PublishError as error:
        return error
    return None


# --- one nsqd ---


@dataclass
class Case:
    """What nsqd answers, and what becomes of the publish.

    Attributes:
        count: commands that nsqd saw.
    """

    name: str
    answers: list[str]
    count: int
    kind: type[PublishError] | None = None
    code: str = ""
    retryable: bool = True
    options: dict[str, Any] = field(default_factory=dict)


ONCE = {"idempotent": True}
NEVER_AGAIN = {"retry_unknown": False}
CASES = [
    Case("stored", [], 1),
    Case("a bad message is final", ["E_BAD_MESSAGE too big"], 1, PublishRefused, "E_BAD_MESSAGE", False),
    Case("a bad topic is final", ["E_BAD_TOPIC no"], 1, PublishRefused, "E_BAD_TOPIC", False),
    Case("an unknown code is final", ["E_FROM_THE_FUTURE what"], 1, PublishRefused, "E_FROM_THE_FUTURE", False),
    Case("what can pass is tried again", ["E_INVALID cannot"] * 2, 3),
    Case("as often as allowed", ["E_INVALID cannot"] * 3, 3, PublishRefused, "E_INVALID"),
    Case("which can be once", ["E_INVALID cannot"], 1, PublishRefused, "E_INVALID", options={"max_tries": 1}),
    Case("a failure may be stored", [FAILED] * 3, 3, PublishUnknown, "E_PUB_FAILED"),
    Case("and stays so", [FAILED, "E_BAD_TOPIC no"], 2, PublishUnknown, "E_BAD_TOPIC", False),
    Case("it is not sent again", [FAILED], 1, PublishUnknown, "E_PUB_FAILED", options=NEVER_AGAIN),
    Case("a refusal is", ["E_INVALID cannot"], 2, options=NEVER_AGAIN),
    Case("draining stores nothing", [DRAINING] * 5, 6, options=NEVER_AGAIN | {"timeout": PATIENCE_S}),
    Case("no answer is tried again", [HANG_UP], 2),
    Case("more often than refusals", [HANG_UP] * 4, 5, options={"timeout": PATIENCE_S}),
    Case("or told", [HANG_UP], 1, PublishUnknown, "CONNECTION_LOST", options=NEVER_AGAIN),
    Case("a refusal after it", [HANG_UP, "E_BAD_TOPIC no"], 2, PublishUnknown, "E_BAD_TOPIC", False),
    Case("silence ends with the deadline", [SILENCE], 1, PublishUnknown, "TIMEOUT", options={"timeout": 0.5}),
    Case("once: no answer is tried again", [HANG_UP], 2, options=ONCE | NEVER_AGAIN),
    Case("once: a failure too", [FAILED], 2, options=ONCE | NEVER_AGAIN),
    Case("once: a gap is passed by", [GAP], 2, options=ONCE),
    Case("once: draining is certain", [FAILED, DRAINING, "E_BAD_BODY"], 3, PublishRefused, "E_BAD_BODY", False, ONCE),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
def test_one_nsqd(flavour: Flavour, scripted: Scripted, case: Case):
    address, fake = scripted.start(*case.answers)
    with flavour.producer(address, **case.options) as producer:
        error = pub(producer)
        stats = producer.call(lambda it: it.stats())
    assert [bodies for _, bodies in fake.commands] == [[b"x"]] * case.count
    if case.kind is None:
        assert error is None
        assert (stats.published, stats.failed) == (1, 0)
    else:
        assert type(error) is case.kind
        assert (error.code, error.retryable) == (case.code, case.retryable)
        assert (stats.published, stats.failed) == (0, 1)
    assert stats.retries >= case.count - 1, "more where it was sent to a connection that had been closed"
    assert stats.bytes_in_flight == 0


@pytest.mark.parametrize(("method", "body", "command"), [("dpub", b"x", "DPUB"), ("mpub", [b"x", b"y"], "MDPUB")])
def test_a_delay_that_nsqd_does_not_allow_is_final(
    flavour: Flavour, scripted: Scripted, method: str, body: Any, command: str
):
    """Other reasons for the same code can pass."""
    refusal = f"E_INVALID {command} timeout 5000 out of range 0-1000"
    address, fake = scripted.start()
    left = ["E_INVALID cannot", refusal, OK]
    fake.answer = lambda *_: left.pop(0)
    with flavour.producer(address) as producer, pytest.raises(PublishRefused, match=refusal) as refused:
        producer.call(methodcaller(method, "t", body, delay=5))
    assert not refused.value.retryable
    assert left == [OK], "the first is tried again, the second is not"


def test_an_mpub_fails_as_a_whole(flavour: Flavour, scripted: Scripted):
    address, fake = scripted.start("E_BAD_MESSAGE MPUB message too big")
    with flavour.producer(address) as producer:
        with pytest.raises(PublishRefused, match="E_BAD_MESSAGE"):
            producer.call(lambda it: it.mpub("t", [b"1", b"2"]))
        assert pub(producer, b"good") is None
    assert fake.stored == [b"good"]


def test_an_answer_that_makes_no_sense(flavour: Flavour, scripted: Scripted):
    address, fake = scripted.start(SILENCE)
    with flavour.producer(address) as producer:
        call = producer.submit("t", b"x")
        wait_until(lambda: fake.commands)
        scripted.do(lambda: fake.deliver_unasked(b"\x00\x00\x00\x06\x00\x00\x00\x00NO"))
        error = outcome_of(call)
    assert isinstance(error, PublishUnknown)
    assert "b'NO'" in str(error)


def test_a_refused_publish_does_not_keep_the_others_waiting(flavour: Flavour, scripted: Scripted):
    """nsqd closes with the error: connections are there again at once, not after a delay that grows."""
    address, fake = scripted.start()
    fake.answer = lambda command, bodies: OK if bodies == [b"good"] else "E_BAD_MESSAGE PUB message too big"
    with flavour.producer(address, timeout=PATIENCE_S) as producer:
        for _ in range(10):
            assert isinstance(pub(producer, b"bad"), PublishRefused)
            assert pub(producer, b"good") is None
    assert fake.stored == [b"good"] * 10


# --- several nsqd ---


def test_what_one_does_not_answer_goes_to_another(flavour: Flavour, scripted: Scripted):
    first, second = scripted.start(), scripted.start()
    first[1].answer = lambda command, bodies: HANG_UP
    with flavour.producer([first[0], second[0]]) as producer:
        for number in range(4):
            assert pub(producer, b"%d" % number, timeout=PATIENCE_S) is None
    assert second[1].stored == [b"0", b"1", b"2", b"3"]
    assert first[1].commands, "or it was never asked"


@pytest.mark.parametrize("retry_unknown", [True, False])
def test_a_silent_one_is_left_before_the_deadline(flavour: Flavour, scripted: Scripted, retry_unknown: bool):
    """Unless that would store it twice."""
    first, second = scripted.start(), scripted.start()
    first[1].answer = lambda command, bodies: SILENCE
    with flavour.producer([first[0], second[0]], timeout=4, retry_unknown=retry_unknown) as producer:
        wait_until(lambda: producer.call(lambda it: it.stats()).connections == 2)
        found = [pub(producer, b"%d" % number) for number in range(2)]
    if retry_unknown:
        assert found == [None, None]
        assert sorted(second[1].stored) == [b"0", b"1"]
    else:
        (error,) = (each for each in found if each is not None)
        assert (type(error), error.code) == (PublishUnknown, "TIMEOUT")


# --- idempotence ---


def sequences(fake: FakeNsqd) -> list[tuple[int, int, int]]:
    """Writer, sequence and count of every publish; writers by number in the order they came."""
    numbers: dict[bytes, int] = {}
    return [(numbers.setdefault(name, len(numbers) + 1), sequence, count) for name, sequence, count in fake.onces]


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([], [(1, 1, 1), (1, 2, 1)]),
        ([HANG_UP], [(1, 1, 1), (1, 1, 1), (1, 2, 1)]),
        ([FAILED], [(1, 1, 1), (1, 1, 1), (1, 2, 1)]),
        ([OK, GAP], [(1, 1, 1), (1, 2, 1), (2, 1, 1)]),
        ([DRAINING], [(1, 1, 1), (1, 1, 1), (1, 2, 1)]),
    ],
)
def test_identities(flavour: Flavour, scripted: Scripted, answers: list[str], expected: list[tuple[int, int, int]]):
    address, fake = scripted.start(*answers)
    with flavour.producer(address, idempotent=True, timeout=PATIENCE_S) as producer:
        assert pub(producer) is None
        assert pub(producer) is None
    assert sequences(fake) == expected


def test_what_may_be_stored_goes_to_the_same_nsqd_alone(flavour: Flavour, scripted: Scripted):
    first, second = scripted.start(HANG_UP, HANG_UP), scripted.start()
    with flavour.producer([first[0], second[0]], idempotent=True, timeout=PATIENCE_S) as producer:
        for number in range(4):
            assert pub(producer, b"%d" % number) is None
    stored = [body for _, fake in (first, second) for body in fake.stored]
    assert sorted(stored) == [b"0", b"1", b"2", b"3"], "and none of them twice"
    assert sequences(first[1])[:3] == [(1, 1, 1)] * 3


def test_after_an_unknown_outcome_another_identity_goes_on(flavour: Flavour, scripted: Scripted):
    address, fake = scripted.start(SILENCE, SILENCE)
    with flavour.producer(address, idempotent=True, timeout=3) as producer:
        error = pub(producer)
        assert isinstance(error, PublishUnknown)
        scripted.do(fake.drop_all)
        assert pub(producer, timeout=PATIENCE_S) is None
    found = sequences(fake)
    assert (found[0], found[-1], len(found)) == ((1, 1, 1), (2, 1, 1), 3)
    assert found == sorted(found), (
        "and the first never again"
    )  # how often it was sent within 3 s is the machine's affair


# --- partitions ---


@pytest.fixture
def nsq() -> Iterator[Imitation]:
    with imitation() as peer:
        yield peer


@contextmanager
def producing(flavour: Flavour, nsq: Imitation, **options: Any) -> Iterator[PublishHandle]:
    """A producer that knows topic ``t`` with one partition, which ``a`` leads."""
    nsq.create("t", 1)
    with flavour.producer(nsqlookupd_http_addresses=nsq.lookups, **options) as producer:
        assert pub(producer, b"first", sharding_id="x", timeout=PATIENCE_S) is None
        yield producer


def stored(nsq: Imitation) -> list[bytes]:
    return nsq.do(lambda peer: [*peer.cluster.topics["t"].partitions[0].bodies])


def answer_with(nsq: Imitation, *answers: str) -> list[str]:
    """Have the next publishes answered like this; return what the nsqlookupd are asked from now on."""
    left = [*answers]
    asked: list[str] = []

    def script(peer: Any) -> None:
        answer = peer.cluster.http

        def listen(path: str, query: dict[str, str]) -> tuple[int, bytes]:
            asked.append(path)
            found: tuple[int, bytes] = answer(path, query)
            return found

        peer.cluster.http = listen
        peer.cluster.answer = lambda *_: left.pop(0) if left else OK

    nsq.do(script)
    return asked


@pytest.mark.parametrize(
    ("error", "tries", "refreshes"),
    [
        ("E_BAD_MESSAGE too big", 1, False),
        ("E_BAD_TOPIC", 1, False),
        ("E_EXT_NOT_SUPPORT", 1, False),
        ("E_INVALID", 3, True),
        ("E_PUB_FAILED", 3, True),
        ("E_PUB_TOO_MUCH_WAITING", 3, None),  # nsqd closes: what then waits for a connection may be looked up
        ("E_FAILED_ON_NOT_LEADER", 4, True),
        ("E_FAILED_ON_NOT_WRITABLE", 4, True),
        ("E_TOPIC_NOT_EXIST", 4, True),
    ],
)
def test_the_table_of_partitions(flavour: Flavour, nsq: Imitation, error: str, tries: int, refreshes: bool | None):
    """A leader that moved is followed more often than ``max_tries``: here it stays where it was."""
    with producing(flavour, nsq, lookup_interval=3600, timeout=PATIENCE_S) as producer:
        asked = answer_with(nsq, *[error] * tries)
        found = pub(producer, b"x", sharding_id="x")
        if refreshes:
            wait_until(lambda: "/lookup" in asked)
        count = nsq.do(lambda peer: sum(len(node.commands) for node in peer.cluster.nodes.values())) - 1
    if refreshes is not None:
        assert ("/lookup" in asked) == refreshes
    if tries > 3:
        assert found is None
        assert (count, stored(nsq)) == (tries + 1, [b"first", b"x"])
    else:
        assert found is not None
        assert (count, found.retryable) == (tries, tries > 1)
        assert type(found) is (PublishUnknown if error == "E_PUB_FAILED" else PublishRefused)


def test_a_leader_that_moved_is_found(flavour: Flavour, nsq: Imitation):
    with producing(flavour, nsq, lookup_interval=3600, timeout=PATIENCE_S) as producer:
        nsq.do(lambda peer: peer.cluster.move("t", 0, "b", closes=False))
        assert pub(producer, b"second", sharding_id="x") is None
    assert stored(nsq) == [b"first", b"second"]


def test_a_partition_without_a_leader_is_waited_for(flavour: Flavour, nsq: Imitation):
    with producing(flavour, nsq, lookup_interval=3600) as producer:
        nsq.do(lambda peer: peer.cluster.move("t", 0, ""))
        error = pub(producer, b"lost", sharding_id="x", timeout=1)
        assert error is not None
        assert (type(error), error.code) == (PublishRefused, "PARTITION_UNAVAILABLE")
        nsq.do(lambda peer: peer.cluster.move("t", 0, "b"))
        assert pub(producer, b"second", sharding_id="x", timeout=PATIENCE_S) is None
    assert stored(nsq) == [b"first", b"second"]


def test_what_is_not_answered_is_not_overtaken(flavour: Flavour, nsq: Imitation):
    with producing(flavour, nsq, timeout=PATIENCE_S) as producer:
        answer_with(nsq, SILENCE)
        first = producer_pub(producer, b"1", timeout=1.5)
        wait_until(lambda: nsq.do(lambda peer: sum(len(each.commands) for each in peer.cluster.nodes.values())) == 2)
        second = producer_pub(producer, b"2", timeout=PATIENCE_S)
        assert isinstance(outcome_of(first), PublishUnknown)
        error = outcome_of(second)
        assert error is not None
        assert (type(error), error.code) == (PublishRefused, "E_ORDER")
    assert stored(nsq) == [b"first"]


def producer_pub(producer: PublishHandle, body: bytes, timeout: float) -> Future[None]:
    """Begin a publish that keeps its order, in a thread of its own."""
    ended: Future[None] = Future()

    def run() -> None:
        try:
            producer.call(lambda it: it.pub("t", body, sharding_id="x", timeout=timeout))
        except BaseException as error:  # noqa: BLE001 - it is asked for
            ended.set_exception(error)
        else:
            ended.set_result(None)

    threading.Thread(target=run, daemon=True).start()
    return ended
