"""Both clients through every combination of TLS, compression and AUTH: 24, with a body larger than every buffer.

Client certificates and what is refused are in test_client_security.py.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from tests.certificates import Certificates
from tests.integration.auth_server import SECRET
from tests.integration.daemons import PATIENCE_S, wait_until
from tests.integration.flavours import Flavour, address_of
from tests.integration.test_client_security import (  # noqa: F401 - fixtures
    CODECS,
    NOISE,
    NsqdFor,
    certificates,
    guard,
    nsqd_for,
    one_guard,
    rows_of_clients,
    tls_options,
    topic,
)

from flintmq import ConnectionOptions

COUNT = 40
REQUEUED_EVERY, TOUCHED_EVERY = 10, 7


@pytest.mark.parametrize(
    ("transport", "codec", "has_auth"), [*product(("clear", "verified"), CODECS, (False, True))], ids=str
)
def test_publish_consume_requeue_touch(
    flavour: Flavour,
    nsqd_for: NsqdFor,  # noqa: F811
    certificates: Certificates,  # noqa: F811
    topic: str,  # noqa: F811
    transport: str,
    codec: str | None,
    has_auth: bool,
):
    nsqd = nsqd_for(transport, has_auth)
    options = ConnectionOptions(
        **tls_options(certificates, transport), compression=codec, auth_secret=SECRET if has_auth else None
    )
    bodies = [b"%d." % number * 20 for number in range(COUNT)]
    finished: list[bytes] = []
    requeued: list[bytes] = []

    def handle(message: Any) -> None:
        number = len(finished) + len(requeued)
        if message.attempts == 1 and (number % REQUEUED_EVERY == 0 or message.body == NOISE):
            requeued.append(message.body)
            message.requeue(0)
            return
        if number % TOUCHED_EVERY == 0:
            message.touch()
        finished.append(message.body)

    with (
        flavour.producer(address_of(nsqd), options=options) as producer,
        flavour.consumer(
            topic, "c", handle, nsqd_tcp_addresses=address_of(nsqd), options=options, max_in_flight=20
        ) as consumer,
    ):
        producer.call(lambda it: it.mpub(topic, bodies[: COUNT // 2]))
        producer.submit(topic, NOISE).result(PATIENCE_S)
        for future in [producer.submit(topic, body) for body in bodies[COUNT // 2 :]]:
            future.result(PATIENCE_S)
        wait_until(lambda: len(finished) == COUNT + 1)
        rows = rows_of_clients(nsqd, topic)
        assert consumer.call(lambda it: it.stats()).late == 0
    assert sorted(finished) == sorted([*bodies, NOISE])
    assert NOISE in requeued
    assert len(requeued) > 2
    assert len(rows) >= 2, "a consumer, and each connection of the producer"
    for row in rows:
        assert (row["tls"], row["snappy"], row["deflate"]) == (
            transport == "verified", codec == "snappy", codec == "deflate",
        )  # fmt: skip
        assert row.get("authed", False) is has_auth
    assert nsqd.unfinished(topic, "c") == 0
