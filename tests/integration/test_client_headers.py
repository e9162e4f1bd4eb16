"""Headers and tags from producer to consumer, with both clients and a real nsqd."""

from __future__ import annotations

from contextlib import ExitStack
from operator import methodcaller
from typing import Any

import pytest
from tests.integration.daemons import Nsqd, Nsqlookupd, wait_until
from tests.integration.flavours import Flavour, address_of

from flintmq import LocalProtocolError, Message, NsqdError, OptionError, PublishRefused
from flintmq.sync import NsqdAdmin

TAG = "##client_dispatch_tag"


@pytest.fixture(scope="module")
def nsqlookupd(shared_nsqlookupd: Nsqlookupd) -> Nsqlookupd:
    return shared_nsqlookupd


@pytest.fixture(scope="module")
def nsqd(shared_nsqd: Nsqd) -> Nsqd:
    return shared_nsqd


def admin_of(nsqd: Nsqd) -> NsqdAdmin:
    return NsqdAdmin(f"127.0.0.1:{nsqd.http[1]}")


def lookup_of(nsqlookupd: Nsqlookupd) -> dict[str, Any]:
    return {"nsqlookupd_http_addresses": f"http://127.0.0.1:{nsqlookupd.http[1]}"}


def consumed(flavour: Flavour, topic: str, channel: str, count: int, **options: Any) -> list[Message]:
    seen: list[Message] = []
    with flavour.consumer(topic, channel, seen.append, **options):
        wait_until(lambda: len(seen) >= count, f"{count} messages")
    return seen


def test_a_topic_with_headers_and_no_partitions(nsqd: Nsqd, flavour: Flavour):
    topic = f"plain-{flavour.name}"
    admin = admin_of(nsqd)
    admin.create_topic(topic, headers=True)
    here = {"nsqd_tcp_addresses": address_of(nsqd)}
    with flavour.producer(address_of(nsqd)) as producer:
        producer.call(lambda it: it.pub(topic, b"red", headers={"color": "red", "n": 1}))
        producer.call(lambda it: it.pub(topic, b"none"))
    found = consumed(flavour, topic, "c", 2, headers=True, **here)
    assert [(message.body, message.headers) for message in found] == [(b"red", {"color": "red", "n": 1}), (b"none", {})]
    assert admin.get_message(topic, count=1).headers == {"color": "red", "n": 1}
    again = consumed(flavour, topic, "other", 2, start="beginning", **here)
    assert [(message.body, message.headers) for message in again] == [(b"red", {}), (b"none", {})]
    both = consumed(flavour, topic, "both", 2, start="beginning", headers=True, **here)
    assert [message.headers for message in both] == [{"color": "red", "n": 1}, {}]
    assert [bool(message.offset) for message in both] == [False, True]


def test_nsqlookupd_says_that_a_topic_without_partitions_has_headers(
    nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour
):
    topic = f"told-{flavour.name}"
    admin_of(nsqd).create_topic(topic, headers=True)
    where = lookup_of(nsqlookupd)
    wait_until(lambda: nsqlookupd.producers(topic), "it is registered")
    with flavour.producer(**where) as producer:
        producer.call(lambda it: it.pub(topic, b"a", headers={"color": "red"}))
        with pytest.raises(PublishRefused, match="NO_PARTITIONS"):
            producer.call(lambda it: it.pub(topic, b"b", headers={"color": "red"}, partition=0))
    (found,) = consumed(flavour, topic, "c", 1, **where)
    assert (found.body, found.headers, found.partition) == (b"a", {"color": "red"}, None)


def test_a_topic_without_headers(nsqd: Nsqd, flavour: Flavour):
    topic = f"bare-{flavour.name}"
    nsqd.publish(topic, b"a")
    with flavour.producer(address_of(nsqd)) as producer:
        with pytest.raises(PublishRefused, match="E_EXT_NOT_SUPPORT") as caught:
            producer.call(lambda it: it.pub(topic, b"b", headers={"a": "b"}))
        assert caught.value.retryable is False
        with pytest.raises(OptionError, match="trace_id=5 is not allowed; it needs a partition"):
            producer.call(lambda it: it.pub(topic, b"b", trace_id=5))
        producer.call(lambda it: it.pub(topic, b"c"))
    with (
        pytest.raises(NsqdError, match="E_SUB_EXTEND_FORBIDDON"),
        flavour.consumer(topic, "c", print, headers=True, nsqd_tcp_addresses=address_of(nsqd)),
    ):
        pass


def test_a_topic_with_headers_and_partitions(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour):
    topic = f"parts-{flavour.name}"
    nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=2&extend=true")
    with flavour.producer(**lookup_of(nsqlookupd)) as producer:
        producer.call(lambda it: it.pub(topic, b"a", headers={"k": "v"}, partition=1))
        stored = producer.call(lambda it: it.pub(topic, b"b", headers={"k": "w"}, trace_id=77, partition=0))
    found = consumed(flavour, topic, "c", 2, **lookup_of(nsqlookupd))
    by_partition = {message.partition: message for message in found}
    assert by_partition[1].headers == {"k": "v"} and by_partition[1].trace_id == 0
    assert by_partition[0].headers["k"] == "w" and by_partition[0].trace_id == 77
    assert by_partition[0].internal_id == stored.internal_id


def test_several_messages_with_headers(nsqd: Nsqd, flavour: Flavour):
    """One mapping for all of them, or one for each; they are one command, so all are stored or none."""
    topic = f"several-{flavour.name}"
    admin_of(nsqd).create_topic(topic, headers=True)
    here = {"nsqd_tcp_addresses": address_of(nsqd)}
    with flavour.producer(address_of(nsqd)) as producer:
        producer.call(lambda it: it.mpub(topic, [b"a", b"b"], headers={"k": "same"}))
        producer.call(lambda it: it.mpub(topic, [b"c", b"d"], headers=[{"k": "1"}, {}]))
        producer.call(lambda it: it.mpub(topic, [b"e"], headers={"k": "alone"}))
        producer.call(lambda it: it.mpub(topic, iter([b"f", {"json": 1}])))
    found = consumed(flavour, topic, "c", 7, headers=True, **here)
    assert [(message.body, message.headers) for message in found] == [
        (b"a", {"k": "same"}), (b"b", {"k": "same"}), (b"c", {"k": "1"}), (b"d", {}), (b"e", {"k": "alone"}),
        (b"f", {}), (b'{"json":1}', {}),
    ]  # fmt: skip


def test_several_messages_with_trace_ids(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour):
    topic = f"several-traced-{flavour.name}"
    nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=2&extend=true")
    with flavour.producer(**lookup_of(nsqlookupd)) as producer:
        first = producer.call(lambda it: it.mpub(topic, [b"a", b"b"], trace_id=[7, 8], partition=1))
        same = producer.call(lambda it: it.mpub(topic, [b"c", b"d"], trace_id=9))
        both = producer.call(
            lambda it: it.mpub(topic, [b"e", b"f"], trace_id=[5, 6], headers={"k": "v"}, sharding_id="x")
        )
    found = {message.body: message for message in consumed(flavour, topic, "c", 6, **lookup_of(nsqlookupd))}
    assert {body: message.trace_id for body, message in found.items()} == {
        b"a": 7, b"b": 8, b"c": 9, b"d": 9, b"e": 5, b"f": 6,
    }  # fmt: skip
    assert [found[body].headers.get("k") for body in (b"a", b"e", b"f")] == [None, "v", "v"]
    assert (first.partition, first.internal_id, first.trace_id) == (1, found[b"a"].internal_id, 7)
    assert same.internal_id == found[b"c"].internal_id
    assert (both.partition, both.internal_id, both.trace_id) == (found[b"e"].partition, None, 5)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"headers": [{"a": "b"}]}, OptionError, "one for each of the 2"),
        ({"trace_id": [1, 2, 3], "partition": 0}, OptionError, "one for each of the 2"),
        ({"trace_id": [1, -1], "partition": 0}, OptionError, "trace_id"),
        ({"trace_id": "12", "partition": 0}, OptionError, "trace_id"),
        ({"trace_id": 1}, OptionError, "it needs a partition"),
        ({"headers": "a=b"}, TypeError, "a mapping from names to values"),
        ({"headers": [1, 2]}, TypeError, "a mapping from names to values"),
        ({"headers": {"a": "b"}, "delay": 1}, OptionError, "without headers"),
        ({"trace_id": 1, "partition": 0, "delay": 1}, OptionError, "without trace_id"),
        ({"headers": {"a": "x" * 70_000}}, LocalProtocolError, "at most"),
        ({"headers": {"a": "b"}}, PublishRefused, "E_EXT_NOT_SUPPORT"),
    ],
    ids=str,
)
def test_what_cannot_go_with_several_messages(
    nsqd: Nsqd, flavour: Flavour, options: dict[str, Any], error: type[Exception], says: str
):
    topic = f"refusing-{flavour.name}"
    nsqd.publish(topic, b"a")
    with flavour.producer(address_of(nsqd)) as producer, pytest.raises(error, match=says):
        producer.call(lambda it: it.mpub(topic, [b"b", b"c"], **options))


@pytest.mark.parametrize("bodies", [b"abc", bytearray(b"abc"), memoryview(b"abc"), "abc", {"a": 1}, 7, None], ids=type)
def test_one_body_is_not_several(nsqd: Nsqd, flavour: Flavour, bodies: Any):
    """b"abc" was published as the three messages 97, 98 and 99."""
    with (
        flavour.producer(address_of(nsqd)) as producer,
        pytest.raises(TypeError, match=r"several bodies are a list of them, not .*; pub\(\) publishes one"),
    ):
        producer.call(lambda it: it.mpub("one-body", bodies))


def test_dead_letters_say_why(nsqd: Nsqd, flavour: Flavour):
    topic = f"dying-{flavour.name}"
    admin = admin_of(nsqd)
    admin.create_topic(topic)
    admin.change_topic_settings(topic, max_attempts=1)
    nsqd.publish(topic, b"poison")

    def fail(message: Message) -> None:
        message.requeue(0)

    with flavour.consumer(topic, "c", fail, nsqd_tcp_addresses=address_of(nsqd)):
        dead = consumed(flavour, f"{topic}.dead", "c", 1, headers=True, nsqd_tcp_addresses=address_of(nsqd))
    assert dead[0].body == b"poison"
    assert dead[0].headers["##dead_letter_reason"] == "max_attempts"
    assert dead[0].headers["##dead_letter_topic"] == topic


@pytest.mark.parametrize("partitions", [0, 1])
def test_tags(nsqd: Nsqd, nsqlookupd: Nsqlookupd, flavour: Flavour, partitions: int):
    """A message with a tag goes to who desires it while somebody does, everything else to who desires none."""
    topic = f"tags-{partitions}-{flavour.name}"
    where: dict[str, Any]
    if partitions:
        nsqlookupd.post(f"/topic/create?topic={topic}&partition_num=1&extend=true")
        where = lookup_of(nsqlookupd)
    else:
        admin_of(nsqd).create_topic(topic, headers=True)
        where = {"nsqd_tcp_addresses": address_of(nsqd)}
    tagged: list[Message] = []
    others: list[Message] = []
    plain = {} if partitions else {"headers": True}
    with ExitStack() as stack:
        producer = stack.enter_context(flavour.producer(**where))
        stack.enter_context(flavour.consumer(topic, "c", others.append, **plain, **where))
        with flavour.consumer(topic, "c", tagged.append, desired_tag="blue", **where):
            for tag in ("blue", "red", "", "blue"):
                headers = {TAG: tag} if tag else None
                producer.call(methodcaller("pub", topic, b"x", headers=headers))
            wait_until(lambda: len(tagged) + len(others) == 4, "all of them")
            assert [message.tag for message in tagged] == ["blue", "blue"]
            assert sorted(message.tag for message in others) == ["", "red"]
        producer.call(lambda it: it.pub(topic, b"y", headers={TAG: "blue"}))
        wait_until(lambda: len(others) == 3, "nobody desires it any more")
    assert others[2].tag == "blue"
