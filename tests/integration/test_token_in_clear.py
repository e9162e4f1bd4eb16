"""A token for HTTPS: commands and nsq_stat find nsqd by an nsqlookupd at ``https://``, and show it to none of them in
clear, whoever has registered there."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.certificates import Certificates
from tests.conformance.daemon_helpers import identified
from tests.integration.daemons import SOURCES, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.test_admin import WANTING_A_TOKEN, Listener, wanting_tls
from tests.integration.test_upgrades import https_address
from tests.integration.utilities import flintmq, run

TOKEN = "a-token-of-thirty-two-characters"


@dataclass(frozen=True)
class Place:
    """An nsqlookupd that is asked over HTTPS, and an nsqd that wants TLS, both with tokens.

    Attributes:
        environment: of commands.
        flags: of nsq_stat.
    """

    nsqlookupd: Nsqlookupd
    nsqd: Nsqd
    environment: dict[str, str]
    flags: tuple[str, ...]

    def stat(self, topic: str, *where: str) -> tuple[int, str]:
        """Run nsq_stat for a line; return its exit code and what it says, figures or why there are none."""
        what = (f"--topic={topic}", "--channel=c", "--count=1", "--interval=1ms")
        done = run("nsq_stat", *(where or self.found()), *what, *self.flags)
        return done.returncode, (done.stdout + done.stderr).decode()

    def found(self) -> tuple[str, ...]:
        return ("--lookupd-http-address=https://{}:{}".format(*https_address(self.nsqlookupd)),)


@pytest.fixture(scope="module")
def place(shared: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("clear")
    certificates = Certificates(directory)
    token = directory / "token"
    token.write_text(f"{TOKEN}\n")
    tokens = directory / "tokens.json"
    tokens.write_text(
        json.dumps({"client": [{"name": "me", "token": TOKEN, "permissions": ["publish", "read", "admin"]}]})
    )
    tokens.chmod(0o600)
    secured = (
        f"--http-auth-tokens-file={tokens}", "--https-address=127.0.0.1:0",
        f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}",
    )  # fmt: skip
    nsqlookupd = shared.nsqlookupd(*secured)
    nsqd = shared.nsqd(
        *secured, "--tls-required=true", "--durability=os", f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}",
        "--broadcast-address=127.0.0.1", f"--lookupd-http-token-file={token}",
    )  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FLINTMQ_")} | {
        "PYTHONPATH": str(SOURCES), "FLINTMQ_LOOKUPD": "https://{}:{}".format(*https_address(nsqlookupd)),
        "FLINTMQ_TLS_ROOT_CA_FILE": certificates.ca, "FLINTMQ_TOKEN": f"file:{token}",
    }  # fmt: skip
    flags = (f"--http-client-tls-root-ca-file={certificates.ca}", f"--http-client-token-file={token}")
    yield Place(nsqlookupd, nsqd, environment, flags)


def test_commands_find_an_nsqd_that_wants_tls(place: Place):
    def well(*words: str) -> str:
        done = flintmq(*words, environment=place.environment)
        assert done.returncode == 0, (words, done.stderr)
        return done.stdout

    nsqd = {**place.environment, "FLINTMQ_LOOKUPD": "", "FLINTMQ_HTTP": "{}:{}".format(*place.nsqd.http)}
    done = flintmq("topic", "create", "t", environment=nsqd)
    assert done.returncode == 0, done.stderr
    wait_until(
        lambda: flintmq("channel", "create", "t", "c", environment=place.environment).returncode == 0,
        "nsqlookupd knows the topic",
    )
    assert "\nc " in well("channel", "list", "t")
    well("channel", "empty", "t", "c", "--yes")
    assert json.loads(well("top", "t", "--once", "--interval", "1ms", "--json").splitlines()[0])["topic"] == "t"
    well("peek", "t", "c")
    well("deadletters", "list")
    code, said = place.stat("t")
    assert code == 0 and said.count("\n") == 3, said


COMMANDS = (
    ("peek", "fake", "c"),
    ("channel", "list", "fake"),
    ("channel", "pause", "fake", "c"),
    ("top", "fake", "--once", "--interval", "1ms"),
)


def test_who_has_only_registered_does_not_get_the_token(place: Place):
    with (
        closing(Listener(WANTING_A_TOKEN)) as false,
        identified(place.nsqlookupd, broadcast_address="127.0.0.1", http_port=port_of(false)) as connection,
    ):
        connection.ok(b"REGISTER fake c\n")
        for words in COMMANDS:
            done = flintmq(*words, environment=place.environment)
            assert done.returncode == 1 and done.stderr.count("\n") == 1, (words, done.stderr)
            assert f"{false.address} asks for a token over plain HTTP" in done.stderr, done.stderr
            assert f"--nsqd-http=http://{false.address} shows it the token in clear" in done.stderr
        code, said = place.stat("fake")
        assert code == 1 and f"--nsqd-http-address={false.address} shows it the token in clear" in said
        assert false.requests and not any("authorization" in each.lower() for each in false.requests)
        # who is named by hand is trusted
        by_hand = {**place.environment, "FLINTMQ_LOOKUPD": "", "FLINTMQ_HTTP": f"http://{false.address}"}
        assert flintmq(*COMMANDS[0], environment=by_hand).returncode == 1
        assert TOKEN in false.requests[-1]
        place.stat("fake", f"--nsqd-http-address={false.address}")
        assert TOKEN in false.requests[-1] and TOKEN not in false.requests[-2]


def test_who_says_that_it_wants_tls_must_have_a_certificate_for_it(place: Place, shared: Daemons, tmp_path: Path):
    strange = Certificates(tmp_path).server  # of an authority that nobody here trusts
    behind = shared.nsqd(
        "--https-address=127.0.0.1:0", f"--tls-cert={strange.cert}", f"--tls-key={strange.key}", "--durability=os"
    )
    with (
        closing(Listener(wanting_tls(https_address(behind)[1]))) as false,
        identified(place.nsqlookupd, broadcast_address="127.0.0.1", http_port=port_of(false)) as connection,
    ):
        connection.ok(b"REGISTER tls c\n")
        done = flintmq("peek", "tls", "c", environment=place.environment)
        assert done.returncode == 1 and "not from an authority that is trusted here" in done.stderr, done.stderr
        assert place.stat("tls")[0] == 1
        assert len(false.requests) == 2 and not any("authorization" in each.lower() for each in false.requests)


def test_where_nsqlookupd_is_asked_in_clear_so_are_nsqd(shared: Daemons, place: Place):
    nsqlookupd = shared.nsqlookupd()
    environment = {name: value for name, value in place.environment.items() if name != "FLINTMQ_TLS_ROOT_CA_FILE"}
    environment["FLINTMQ_LOOKUPD"] = "{}:{}".format(*nsqlookupd.http)
    with (
        closing(Listener(WANTING_A_TOKEN)) as nsqd,
        identified(nsqlookupd, broadcast_address="127.0.0.1", http_port=port_of(nsqd)) as connection,
    ):
        connection.ok(b"REGISTER plain c\n")
        assert "401 UNAUTHORIZED" in flintmq("peek", "plain", "c", environment=environment).stderr
        assert len(nsqd.requests) == 1 and TOKEN in nsqd.requests[0]
        flags = (f"--lookupd-http-address={environment['FLINTMQ_LOOKUPD']}", place.flags[1])
        done = run("nsq_stat", "--topic=plain", "--channel=c", "--count=1", *flags)
        assert done.returncode == 1 and b"it answers 401 to /stats" in done.stderr, done.stderr
        assert len(nsqd.requests) == 2 and TOKEN in nsqd.requests[1]


def port_of(listener: Listener) -> int:
    return int(listener.address.rpartition(":")[2])
