"""kill -9 of a real nsqd under load: what was acknowledged is delivered, nothing is early, and little comes twice.

The cases are the ways in which Go's nsqd loses messages (docs/delivery.md, and what else
happens on a disk); each runs with ``--durability=fsync`` and with ``os``, which kill -9 must not tell apart.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from contextlib import suppress

import pytest
from tests.integration.daemons import PATIENCE_S, Closed, Connection, Daemons, Nsqd, mpub, pub, req, wait_until
from tests.integration.load import Consumer, Numbers, Publisher, body_of, check, drain, held, number_of

MODES = [
    pytest.param(("--durability=fsync",), id="fsync"),
    pytest.param(("--durability=os", "--mem-queue-size=0"), id="os"),
]
every_mode = pytest.mark.parametrize("flags", MODES)
REPEATED_S = 3.0  # a FIN older than this at the kill may not be forgotten, however busy the machine is


def publish_until_killed(nsqd: Nsqd, topic: str, acked_count: int, numbers: Numbers) -> list[Publisher]:
    """Publish from three connections, single messages and batches, and kill nsqd after about ``acked_count``."""
    publishers = [Publisher(nsqd.tcp, topic, numbers, **how) for how in ({}, {}, {"batch": 50, "window": 10})]
    for publisher in publishers:
        publisher.start()
    wait_until(lambda: sum(publisher.acked_count for publisher in publishers) >= acked_count, "load")
    nsqd.kill()
    return [publisher.finish() for publisher in publishers]


def in_doubt(publishers: list[Publisher]) -> int:
    return sum(len(publisher.attempted) - publisher.acked_count for publisher in publishers)


@every_mode
@pytest.mark.parametrize("has_channel", [False, True], ids=["no-channel", "channel"])
def test_while_publishing(daemons: Daemons, flags: tuple[str, ...], has_channel: bool):
    """Rows 1, 2, 4, 5."""
    nsqd = daemons.nsqd(*flags)
    nsqd.post("/topic/create?topic=t")
    if has_channel:
        nsqd.post("/channel/create?topic=t&channel=c")
    numbers = Numbers()
    publishers = publish_until_killed(nsqd, "t", random.Random(repr(flags)).randrange(3_000, 20_000), numbers)
    while not in_doubt(publishers) and len(publishers) < 30:  # the publishers had no turn just then
        nsqd.start()
        publishers += publish_until_killed(nsqd, "t", 1_000, numbers)
    assert in_doubt(publishers) > 0, "nothing was on its way: not a kill under load"
    nsqd.start()
    result = check(publishers, drain(nsqd, "t", "c"))
    assert result.duplicate_count == 0
    assert nsqd.request("GET", "/ping").body == b"OK"


@every_mode
def test_while_a_consumer_finishes(daemons: Daemons, flags: tuple[str, ...]):
    """Rows 3 and 6: and what was finished a while before the kill does not come again."""
    nsqd = daemons.nsqd(*flags)
    publisher = Publisher(nsqd.tcp, "t", Numbers(), window=200)
    consumer = Consumer(nsqd.tcp, "t", "c", 500).begin()
    publisher.start()
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() > begun + 1.5 * REPEATED_S and len(consumer.finished_at) > 10_000, "load")
    killed_at = time.monotonic()
    nsqd.kill()
    publisher.finish()
    consumer.stop()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    check([publisher], consumer, rest)
    repeated = [killed_at - consumer.finished_at[number] for number in rest.numbers if number in consumer.finished_at]
    assert max(repeated, default=0.0) < REPEATED_S, f"{len(repeated)} finished messages came again"


@every_mode
def test_while_2500_are_held(daemons: Daemons, flags: tuple[str, ...]):
    """Row 7: what is in flight is not lost, and nothing else is repeated."""
    nsqd = daemons.nsqd(*flags)
    publisher = Publisher(nsqd.tcp, "t", Numbers(), batch=100, window=10, count_max=6000)
    publisher.start()
    consumer = Consumer(nsqd.tcp, "t", "c", 2500, held).begin()
    wait_until(lambda: len(consumer.deliveries) == 2500, "2500 in flight")
    publisher.finish()
    nsqd.kill()
    consumer.stop()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    assert len(rest.deliveries) == 6000
    check([publisher], rest)


@every_mode
def test_what_was_finished_stays_finished(daemons: Daemons, flags: tuple[str, ...]):
    """Half of what is in flight is finished, in no order; when that is written exactly the other half comes again."""
    nsqd = daemons.nsqd(*flags)
    nsqd.publish("t", *map(body_of, range(2000)))
    with nsqd.connect() as connection:
        messages = connection.subscribe("t", "c", 2000).messages(2000)
        finished = random.Random(7).sample(messages, 1000)
        connection.finish(*finished)
        connection.settle()
        nsqd.write_progress()
        nsqd.kill()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    expected = {number_of(message.body) for message in messages} - {number_of(message.body) for message in finished}
    assert sorted(rest.numbers) == sorted(expected)


@every_mode
def test_while_2500_wait_after_req(daemons: Daemons, flags: tuple[str, ...]):
    """Row 8: neither lost nor early."""
    delay_ms = 1500
    nsqd = daemons.nsqd(*flags)
    nsqd.publish("t", *map(body_of, range(2500)))
    with nsqd.connect() as connection:
        messages = connection.subscribe("t", "c", 2500).messages(2500)
        connection.rdy(0)
        requeued_ns = time.time_ns()
        connection.send(b"".join(req(message.id, delay_ms) for message in messages))
        connection.settle()
        nsqd.write_progress()
        nsqd.kill()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    assert sorted(rest.numbers) == list(range(2500))
    assert min(delivery.wall_ns for delivery in rest.deliveries) >= requeued_ns + delay_ms * 1_000_000
    assert {delivery.attempts for delivery in rest.deliveries} == {2}


def test_in_the_moment_of_req(daemons: Daemons):
    """REQ has no answer, so it may be forgotten; the message may not."""
    nsqd = daemons.nsqd("--durability=os")
    nsqd.publish("t", *map(body_of, range(2500)))
    with nsqd.connect() as connection:
        messages = connection.subscribe("t", "c", 2500).messages(2500)
        connection.send(b"".join(req(message.id, 1000) for message in messages))
        nsqd.kill()
    nsqd.start()
    rest = drain(nsqd, "t", "c")
    assert sorted(rest.numbers) == list(range(2500))


@pytest.mark.parametrize(
    ("flags", "killed"),
    [
        pytest.param(("--durability=fsync",), True, id="fsync-kill"),
        pytest.param(("--durability=os", "--mem-queue-size=0"), True, id="os-kill"),
        pytest.param(("--durability=os", "--mem-queue-size=0"), False, id="os-no-kill"),
    ],
)
def test_deferred_messages(daemons: Daemons, flags: tuple[str, ...], killed: bool):
    """Row 9: more than fit in memory, none lost and none early."""
    delay_ms = 1500
    nsqd = daemons.nsqd(*flags)
    before = Consumer(nsqd.tcp, "t", "c", 2500).begin()
    publisher = Publisher(nsqd.tcp, "t", Numbers(), defer_ms=delay_ms, count_max=6000, window=200)
    publisher.start()
    wait_until(lambda: publisher.acked_count >= 5000, "5000 deferred")
    consumers = [before]
    repeated: set[int] = set()
    listening_ns = 0
    if killed:
        killed_at = time.monotonic()
        nsqd.kill()
        before.stop()
        publisher.finish()
        nsqd.start()
        listening_ns = time.time_ns()
        consumers.append(drain(nsqd, "t", "c"))
        # none, unless publishing took so long that the first ones were due, and finished a moment before the kill
        repeated = set(before.numbers) & set(consumers[1].numbers)
        assert all(killed_at - before.finished_at.get(number, killed_at) < REPEATED_S for number in repeated)
    else:
        publisher.finish()
        wait_until(lambda: nsqd.unfinished("t", "c") == 0, "all delivered")
        before.stop()
    result = check([publisher], *consumers)
    assert result.duplicate_count == len(repeated)
    deliveries = [delivery for consumer in consumers for delivery in consumer.deliveries]
    for each in deliveries:
        due_ns = publisher.sent_ns[each.number] + delay_ms * 1_000_000
        assert each.wall_ns >= due_ns, "early"
        possible_ns = max(due_ns, listening_ns) if each.wall_ns > listening_ns else due_ns
        assert each.wall_ns < possible_ns + PATIENCE_S * 1_000_000_000, "late"


@every_mode
def test_while_segments_roll(daemons: Daemons, flags: tuple[str, ...]):
    """Small segments are begun and deleted all the time; no seam loses a message."""
    nsqd = daemons.nsqd(*flags, "--max-bytes-per-file=65536")
    consumer = Consumer(nsqd.tcp, "t", "c", 2500).begin()
    numbers = Numbers()
    publishers = publish_until_killed(nsqd, "t", 15_000, numbers)
    consumer.stop()
    nsqd.start()
    publishers += publish_until_killed(nsqd, "t", 8_000, numbers)  # nobody consumes: segments only grow in number
    assert len(nsqd.segment_paths("t")) > 20
    nsqd.start()
    check(publishers, consumer, drain(nsqd, "t", "c"))
    wait_until(lambda: len(nsqd.segment_paths("t")) == 1, "finished segments deleted")


def test_while_topics_are_deleted(daemons: Daemons):
    """A topic whose deletion was answered is gone, one that nobody deleted is whole, and no deletion harms another."""
    nsqd = daemons.nsqd("--durability=os", "--max-bytes-per-file=65536")
    doomed = [f"doomed{number}" for number in range(40)]
    for topic in doomed:
        nsqd.publish(topic, *map(body_of, range(1000)))
        nsqd.post(f"/channel/create?topic={topic}&channel=c")
    asked: list[str] = []
    answered: list[str] = []

    def delete() -> None:
        try:
            for topic in doomed:
                asked.append(topic)
                nsqd.post(f"/topic/delete?topic={topic}")
                answered.append(topic)
                time.sleep(0.01)  # so that the kill comes before the last one
        except OSError:
            return  # killed

    publisher = Publisher(nsqd.tcp, "kept", Numbers())
    publisher.start()
    deleter = threading.Thread(target=delete)
    deleter.start()
    wait_until(lambda: len(answered) >= 10 and publisher.acked_count > 500, "some deleted")
    nsqd.kill()
    deleter.join(PATIENCE_S)
    publisher.finish()
    assert 10 <= len(answered) < len(doomed), "the kill was to come in the middle"
    nsqd.start()
    left = {row["topic_name"]: row for row in nsqd.get("/stats?format=json")["topics"]}
    assert not set(answered) & set(left)
    assert set(doomed) - set(asked) <= set(left)
    for topic in sorted(set(doomed) & set(left)):
        numbers = sorted(drain(nsqd, topic, "c").numbers)
        assert numbers == list(range(1000)) or (topic in asked and not numbers), topic
    check([publisher], drain(nsqd, "kept", "c"))
    known = {f"t-{topic}" for topic in left}
    assert {path.name for path in (nsqd.data_path / "topics").iterdir()} == known, "a deleted topic left files behind"


@every_mode
def test_again_and_again(daemons: Daemons, flags: tuple[str, ...]):
    """Five kills of one data directory: while publishing, while starting, while stopping."""
    nsqd = daemons.nsqd(*flags, "--max-bytes-per-file=262144")
    chance = random.Random(repr(flags))
    numbers = Numbers()
    publishers: list[Publisher] = []
    for _ in range(3):
        publishers += publish_until_killed(nsqd, "t", chance.randrange(1000, 5000), numbers)
        nsqd.launch()
        time.sleep(chance.uniform(0.02, 0.25))
        nsqd.kill()
        nsqd.start()
    publisher = Publisher(nsqd.tcp, "t", numbers)
    publisher.start()
    wait_until(lambda: publisher.acked_count > 1000, "load")
    nsqd.send_signal(signal.SIGTERM)
    time.sleep(chance.uniform(0.0, 0.02))
    nsqd.kill()
    publishers.append(publisher.finish())
    nsqd.start()
    result = check(publishers, drain(nsqd, "t", "c"))
    assert result.duplicate_count == 0


def test_topics_and_channels_that_were_answered_are_there(daemons: Daemons):
    """A channel made by SUB or over HTTP gets what is published after its OK, whatever happens."""
    nsqd = daemons.nsqd("--durability=os")
    for number in range(3):
        topic, channel = f"t{number}", f"c{number}"
        with nsqd.connect() as connection:
            connection.subscribe(topic, channel)
            nsqd.post(f"/channel/create?topic={topic}&channel=other")
            connection.ok(pub(topic, body_of(number)))
            nsqd.kill()
        nsqd.start()
    for number in range(3):
        for channel in (f"c{number}", "other"):
            assert drain(nsqd, f"t{number}", channel).numbers == [number]


def test_what_was_emptied_stays_empty(daemons: Daemons):
    """An answer to /topic/empty and /channel/empty holds, also in the moment after it."""
    nsqd = daemons.nsqd("--durability=os")
    for number in range(3):
        nsqd.publish("t", *map(body_of, range(1000)))
        nsqd.post(f"/channel/create?topic=t&channel=c{number}")
        nsqd.publish("u", *map(body_of, range(1000)))
        nsqd.post("/topic/empty?topic=u")
        nsqd.post("/channel/empty?topic=t&channel=c0")
        nsqd.kill()
        nsqd.start()
        assert (nsqd.stats("u")["depth"], nsqd.unfinished("t", "c0")) == (0, 0)
    assert nsqd.unfinished("t", "c1") == 1000


def test_odd_names_survive(daemons: Daemons):
    """Names that a file system could take for something else."""
    names = [".", "..", "CON", "a.b", "Upper", "upper", "x" * 64, "-", "_", "deleted-1-x", "p-0000"]
    nsqd = daemons.nsqd("--durability=os")
    with nsqd.connect() as connection:
        for number, name in enumerate(names):
            connection.ok(pub(name, body_of(number)))
    nsqd.kill()
    nsqd.start()
    for number, name in enumerate(names):
        assert drain(nsqd, name, "c").numbers == [number], name


def test_a_batch_is_whole_or_absent(daemons: Daemons):
    """What one MPUB carried is not torn by a kill, answered or not."""
    nsqd = daemons.nsqd("--durability=os")
    size, count = 2000, 50
    batches = [[body_of(batch * count + number, size) for number in range(count)] for batch in range(200)]
    with Connection(nsqd.tcp) as connection:
        connection.send(b"".join(mpub("t", batch) for batch in batches[:50]))
        connection.ok(count=20)
        killer = threading.Timer(0.002, nsqd.kill)
        killer.start()
        try:
            connection.send(b"".join(mpub("t", batch) for batch in batches[50:]))
        except OSError:
            pass
        killer.join()
    nsqd.start()
    seen = set(drain(nsqd, "t", "c").numbers)
    per_batch = [sum(batch * count + number in seen for number in range(count)) for batch in range(len(batches))]
    assert set(per_batch) <= {0, count}
    assert per_batch[:20] == [count] * 20


@every_mode
def test_in_a_storm_of_new_topics(daemons: Daemons, flags: tuple[str, ...]):
    """Each connection publishes to one new topic after the other, far ahead of the answers; so does HTTP."""
    nsqd = daemons.nsqd(*flags)
    count, wanted = 3000, 150
    acked: list[int] = []
    answered: list[str] = []

    def publish(first: int) -> None:
        numbers = range(first, 3 * count, 3)
        with suppress(Closed, OSError), nsqd.connect() as connection:
            connection.send(b"".join(pub(f"topic{number}", body_of(number)) for number in numbers))
            for number in numbers:
                connection.ok()
                acked.append(number)

    def create() -> None:
        with suppress(OSError):
            for number in range(count):
                nsqd.post(f"/topic/create?topic=empty{number}")
                answered.append(f"empty{number}")

    threads = [
        *(threading.Thread(target=publish, args=(first,)) for first in range(3)),
        threading.Thread(target=create),
    ]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(acked) >= wanted and answered, "a storm")
    nsqd.kill()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(acked) < 3 * count, "the kill was to come in the middle"
    nsqd.start()
    there = {row["topic_name"] for row in nsqd.get("/stats?format=json&include_clients=false")["topics"]}
    assert set(answered) <= there
    for number in acked:
        with nsqd.connect() as connection:
            assert connection.subscribe(f"topic{number}", "c", 1).message().body == body_of(number)
    assert nsqd.request("GET", "/ping").body == b"OK"
