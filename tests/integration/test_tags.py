"""Tags with our clients, and with consumers that come and go while nsqd is killed."""

from __future__ import annotations

import random
import threading
import time

from tests.conformance.redesigned_helpers import RAW_ID, create, extended, headed, several
from tests.integration.daemons import MESSAGE, Connection, Daemons, Nsqd, message_of, wait_until

from flintmq.sync import Consumer, Producer

KEY = "##client_dispatch_tag"
TAGS = ("", "a", "b")


def test_our_clients_through_nsqlookupd(daemons: Daemons):
    lookup = daemons.nsqlookupd()
    flags = ("--broadcast-address=127.0.0.1", f"--lookupd-tcp-address={lookup.tcp[0]}:{lookup.tcp[1]}")
    nsqd = daemons.nsqd("--durability=os", *flags)
    wait_until(lambda: lookup.get("/nodes")["producers"])
    lookup.post("/topic/create?topic=t&partition_num=2&replicator=1&extend=true")
    lookups = [f"http://{lookup.http[0]}:{lookup.http[1]}"]
    with (
        Consumer("t", "c", nsqlookupd_http_addresses=lookups, desired_tag="canary") as canary,
        Consumer("t", "c", nsqlookupd_http_addresses=lookups) as others,
        Producer(nsqlookupd_http_addresses=lookups) as producer,
    ):
        wait_until(lambda: len(nsqd.stats("t", "c")["clients"]) == 4, "both consumers in both partitions")
        for number in range(10):
            producer.pub("t", b"canary %d" % number, headers={KEY: "canary"})
            producer.pub("t", b"other %d" % number, headers={KEY: "nobody's"})
            producer.pub("t", b"plain %d" % number)
        assert {take(canary) for _ in range(10)} == {b"canary %d" % number for number in range(10)}
        assert {take(others) for _ in range(20)} == {b"%s %d" % (k, n) for k in (b"other", b"plain") for n in range(10)}
    wait_until(lambda: nsqd.unfinished("t", "c") == 0)


def take(consumer: Consumer) -> bytes:
    message = next(iter(consumer))
    message.finish()
    return message.body


def test_our_client_without_nsqlookupd(nsqd: Nsqd):
    nsqd.post("/topic/create?topic=t&extend=true")
    address = f"{nsqd.tcp[0]}:{nsqd.tcp[1]}"
    nsqd.post("/pub_ext?topic=t&ext=%7B%22%23%23client_dispatch_tag%22%3A%22canary%22%7D", b"an order")
    nsqd.publish("t", b"another")
    with Consumer("t", "c", nsqd_tcp_addresses=address, desired_tag="canary") as canary:
        assert take(canary) == b"an order"
        with Consumer("t", "c", nsqd_tcp_addresses=address) as others:
            assert take(others) == b"another"


class Worker:
    """A consumer on a thread of its own that finishes, gives back and leaves as chance has it."""

    def __init__(self, nsqd: Nsqd, tag: str, seed: int) -> None:
        self.seen: list[tuple[int, bytes]] = []
        self.finished: set[bytes] = set()
        self.tag = tag
        self._nsqd = nsqd
        self._random = random.Random(seed)
        self.is_ended = threading.Event()
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        while not self.is_ended.is_set():
            try:
                with self._nsqd.connect() as connection:
                    connection.identify(extend_support=True, desired_tag=self.tag)
                    connection.ok(b"SUB t c\n")
                    connection.rdy(self._random.choice((1, 5, 50)))
                    self._consume(connection, time.monotonic() + self._random.uniform(0.05, 0.4))
            except (OSError, AssertionError):
                time.sleep(0.02)  # nsqd is down, or was killed just now

    def _consume(self, connection: Connection, until_s: float) -> None:
        while (left := until_s - time.monotonic()) > 0 and not self.is_ended.is_set():
            try:
                frame = connection.any_frame(min(left, 0.05))
            except TimeoutError:
                continue
            if frame is None:
                return
            if frame.kind != MESSAGE:
                continue
            message = message_of(frame.data)
            body = extended(message.body).body
            self.seen.append((RAW_ID.unpack(message.id)[0], body))
            if self._random.random() < 0.2:
                connection.send(b"REQ %s %d\n" % (message.id, self._random.choice((0, 0, 10))))
            else:
                connection.finish(message)
                self.finished.add(body)


def test_consumers_come_and_go_and_nsqd_is_killed(daemons: Daemons):
    """Everything is delivered in the end, and nobody is given what is not his."""
    nsqd = daemons.nsqd("--durability=os", "--msg-timeout=2s")
    create(nsqd, "t", 2, extend="true")
    nsqd.post("/channel/create?topic=t&channel=c")
    workers = [Worker(nsqd, tag, seed) for seed, tag in enumerate(TAGS * 2)]
    published = set()
    try:
        for number in range(30):
            tags = [TAGS[(number + each) % 3] for each in range(20)]
            bodies = [f"{number}.{each}.{tag}".encode() for each, tag in enumerate(tags)]
            items = [headed({KEY: tag} if tag else {}, body) for tag, body in zip(tags, bodies, strict=True)]
            with nsqd.connect() as publisher:
                publisher.ok(several("MPUB_EXT", "t", number % 2, items))
            published |= set(bodies)
            if number in (10, 20):
                nsqd.kill()
                nsqd.start()
        wait_until(lambda: published <= set().union(*(worker.finished for worker in workers)), "all finished")
    finally:
        for worker in workers:
            worker.is_ended.set()
        for worker in workers:
            worker.thread.join()
    for worker in workers:
        if worker.tag:
            assert {body.rsplit(b".", 1)[1].decode() for _, body in worker.seen} <= {worker.tag}
