"""TLS, compression and AUTH: every combination of what a client can do by itself, publishing and consuming.

    TLS     none; with the server's certificate unverified, and verified; with a stranger's certificate, which
            --tls-client-auth-policy=require takes; with a good one, for require-verify
    codec   none, deflate, snappy
    AUTH    none, a secret

A part that a client lacks, or fails at alone, is one case and in no combination.
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import product
from typing import Any

from tests.certificates import CLIENT_NAME
from tests.foreign.clients.task import shown
from tests.foreign.harness import Case, Client, Stage, until
from tests.foreign.scenarios import consumer_rows, producer_rows, see_drained
from tests.foreign.servers import addresses
from tests.integration.daemons import mpub

TLS = ("", "unverified", "verified", "require", "require-verify")
CODECS = ("", "deflate", "snappy")
ROLES = ("publish", "consume")
CERTIFICATES = {"require": "stranger", "require-verify": "good"}
"""What a client shows: ``require`` takes any certificate."""

BODIES = [b"%d " % number + b"x" * (number * 200) for number in range(30)] + [random.Random(2).randbytes(5_000)]
LARGE_BODIES = [random.Random(3).randbytes(200_000), b"x"]
"""Larger than a record of TLS and than a chunk of snappy, also when compressed."""


@dataclass(frozen=True, slots=True)
class Upgrade:
    """What a connection is upgraded with."""

    role: str
    tls: str = ""
    codec: str = ""
    has_secret: bool = False
    is_large: bool = False

    @property
    def bodies(self) -> list[bytes]:
        return LARGE_BODIES if self.is_large else BODIES

    @property
    def parts(self) -> list[str]:
        """What it consists of, each in the client's power or not."""
        return [part for part in (self.tls, self.codec, "auth" if self.has_secret else "") if part]

    @property
    def name(self) -> str:
        return "-".join((self.role, *self.parts, *(["large"] if self.is_large else [])))

    def play(self, stage: Stage) -> None:
        """Publish or consume over such a connection."""
        (publishes if self.role == "publish" else consumes)(stage, self)

    def fields(self, stage: Stage) -> dict[str, Any]:
        """What the client is told."""
        certificates = stage.servers.certificates
        fields: dict[str, Any] = {"codec": self.codec, "secret": secret_of(stage) if self.has_secret else ""}
        if self.tls:
            fields["tls"] = "unverified" if self.tls == "unverified" else "verified"
            fields["ca"] = "" if self.tls == "unverified" else certificates.ca
        if self.tls in CERTIFICATES:
            files = certificates.client(CERTIFICATES[self.tls])
            fields |= {"cert": files.cert, "key": files.key}
        return fields

    @property
    def policy(self) -> str:
        return self.tls if self.tls in CERTIFICATES else ""


def secret_of(stage: Stage) -> str:
    return f"secret of {stage.topic}"


def check_row(row: dict[str, Any], upgrade: Upgrade) -> None:
    """See that a connection is what was asked for: a client that falls back in silence would pass otherwise."""
    assert row["tls"] == bool(upgrade.tls)
    assert [codec for codec in CODECS if codec and row[codec]] == ([upgrade.codec] if upgrade.codec else [])
    assert row.get("authed", False) == upgrade.has_secret


def check_question(stage: Stage, upgrade: Upgrade) -> None:
    """See that the auth server was asked, and told of the certificate."""
    questions = [each for each in stage.servers.auth_server.questions if each["secret"] == secret_of(stage)]
    assert questions
    assert questions[0]["tls"] == ("true" if upgrade.tls else "false")
    assert questions[0]["common_name"] == (CLIENT_NAME if upgrade.tls in CERTIFICATES else "")


def publishes(stage: Stage, upgrade: Upgrade) -> None:
    nsqd = stage.servers.nsqd(upgrade.policy, upgrade.has_secret)
    run = stage.start("publish", nsqd=addresses([nsqd]), **upgrade.fields(stage))
    bodies = upgrade.bodies
    assert run.publish(bodies, bodies) == [True] * (len(bodies) + 1), run.described
    (row,) = producer_rows(nsqd, stage.topic)
    check_row(row, upgrade)
    if upgrade.has_secret:
        check_question(stage, upgrade)
    with stage.servers.connect(nsqd, "of the test" if upgrade.has_secret else "") as consumer:
        consumer.subscribe(stage.topic, "channel", 1000)
        messages = consumer.messages(2 * len(bodies))
        assert [message.body for message in messages] == bodies + bodies
    run.end()


def consumes(stage: Stage, upgrade: Upgrade) -> None:
    nsqd = stage.servers.nsqd(upgrade.policy, upgrade.has_secret)
    with stage.servers.connect(nsqd, "of the test" if upgrade.has_secret else "") as producer:
        producer.ok(mpub(stage.topic, upgrade.bodies))
    run = stage.start("consume", nsqd=addresses([nsqd]), max_in_flight=10, **upgrade.fields(stage))
    run.wait(lambda: len(run.messages) == len(upgrade.bodies), "every message", stage.patience_s)
    assert run.messages == [(shown(body), 1) for body in upgrade.bodies]
    (row,) = consumer_rows(nsqd, stage.topic)
    check_row(row, upgrade)
    if upgrade.has_secret:
        check_question(stage, upgrade)
    until(lambda: nsqd.unfinished(stage.topic, "channel") == 0, "every FIN arrived")
    run.end()
    see_drained(nsqd, stage.topic)


def refuses_an_impostor(stage: Stage) -> None:
    """A client that verifies says nothing to an nsqd whose certificate is another authority's."""
    nsqd = stage.servers.nsqd()
    nsqd.publish(stage.topic, b"secret")
    nobody = stage.servers.certificates.client("self-signed").cert
    run = stage.start("consume", nsqd=addresses([nsqd]), tls="verified", ca=nobody)
    time.sleep(1)
    assert run.messages == []
    assert nsqd.stats(stage.topic)["channels"] == []
    run.order("end")


def combinations() -> list[Upgrade]:
    """Everything that could be asked for, from nothing to all."""
    every = [Upgrade(*each) for each in product(ROLES, TLS, CODECS, (False, True))]
    return every + [Upgrade(role, "verified", codec, is_large=True) for role, codec in product(ROLES, CODECS)]


def cases(client: Client) -> list[Case]:
    """Every combination that a client can do, and one case for each part that it cannot."""
    found: dict[str, Case] = {}
    if "verified" not in client.absent:
        found["refuse-impostor"] = Case("refuse-impostor", refuses_an_impostor)
    for upgrade in combinations():
        lacking = [part for part in upgrade.parts if part in client.absent]
        failing = [part for part in upgrade.parts if f"{upgrade.role}-{part}" in client.defects]
        is_part = len(upgrade.parts) == 1 and not upgrade.is_large
        if not upgrade.parts or ((lacking or failing) and not is_part):
            continue
        name = lacking[0] if lacking else upgrade.name  # what is lacking is lacking in every role
        found[name] = Case(name, upgrade.play)
    return list(found.values())
