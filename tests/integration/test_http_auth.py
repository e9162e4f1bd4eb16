"""Real daemons with --http-auth-tokens-file: every endpoint with every permission, certificates, and daemons that ask
each other. That nothing changes without the option is what every other test shows."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.certificates import CLIENT_NAME, Certificates
from tests.integration.daemons import PATIENCE_S, Answer, Daemon, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.test_upgrades import https_address

from flintmq import ConnectionOptions, Producer, PublishError
from flintmq.net.http_auth import Needs, Table
from flintmq.nsqd.api.routes import PERMISSIONS as NSQD_TABLE
from flintmq.nsqlookupd.http_permissions import TABLE as NSQLOOKUPD_TABLE
from flintmq.sync import Producer as BlockingProducer

RIGHTS: dict[str, tuple[tuple[str, ...], tuple[str, ...] | None]] = {
    "all": (("publish", "read", "admin"), None),
    "publish": (("publish",), None),
    "read": (("read",), None),
    "admin": (("admin",), None),
    "mine": (("publish", "read", "admin"), ("mine",)),
    "others": (("publish", "read", "admin"), ("other.*",)),
    "nothing": ((), None),
}
TOKENS = {name: f"{name}-token-for-integration" for name in RIGHTS}
REFUSED = {401: "UNAUTHORIZED", 403: "FORBIDDEN"}


def clients() -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for name, (permissions, topics) in RIGHTS.items():
        row: dict[str, object] = {"name": name, "token": TOKENS[name], "permissions": permissions}
        found.append(row if topics is None else row | {"topics": topics})
    return found


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"client": rows}))
    new.chmod(0o600)
    return new.rename(path)


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {TOKENS.get(name, name)}"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("http-auth")


@pytest.fixture(scope="module")
def certificates(directory: Path) -> Certificates:
    return Certificates(directory / "certificates")


@pytest.fixture(scope="module")
def tokens(directory: Path) -> Path:
    cert: dict[str, object] = {"name": "cert", "common_name": CLIENT_NAME, "permissions": ["read"], "topics": ["mine"]}
    return write(directory / "tokens.json", [*clients(), cert])


@pytest.fixture(scope="module")
def flags(tokens: Path, certificates: Certificates) -> list[str]:
    return [
        f"--http-auth-tokens-file={tokens}",
        "--http-auth-client-cert",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        f"--tls-root-ca-file={certificates.ca}",
        "--https-address=127.0.0.1:0",
        "--log-level=debug",
    ]


@pytest.fixture(scope="module")
def shared(directory: Path) -> Iterator[Daemons]:
    daemons = Daemons(directory)
    try:
        yield daemons
    finally:
        daemons.close()


@pytest.fixture(scope="module")
def nsqd(shared: Daemons, flags: list[str]) -> Nsqd:
    nsqd = shared.nsqd(*flags)
    nsqd.publish("kept", b"so that it never has drained")  # TCP has its own AUTH
    return nsqd


@pytest.fixture(scope="module")
def nsqlookupd(shared: Daemons, flags: list[str]) -> Nsqlookupd:
    return shared.nsqlookupd(*flags)


# -- every endpoint with every permission ------------------------------------------------------------------------------


def is_allowed(name: str, needed: Needs, topic: str) -> bool:
    """What the table means, said once more."""
    if needed.is_open:
        return True
    if name not in RIGHTS:
        return False
    permissions, topics = RIGHTS[name]
    if not needed.permissions:
        return True
    if not set(permissions) & set(needed.permissions):
        return False
    return topics is None or (needed.by_topic and topic in topics)


def check_table(daemon: Daemon, table: Table) -> int:
    count = 0
    for (method, path), needed in table.items():
        for topic in ("mine", ""):
            target = path.replace("{opt}", "log_level") + (f"?topic={topic}&channel=c" if topic else "")
            body = b"debug" if method in ("POST", "PUT") else None
            for name in (*RIGHTS, "a-token-nobody-has", ""):
                answer = daemon.request(method, target, body, bearer(name) if name else {})
                wanted = 200 if is_allowed(name, needed, topic) else 403 if name in RIGHTS else 401
                case = f"{name or 'nobody'}: {method} {target} -> {answer.status} {answer.body[:80]!r}"
                if wanted == 200:
                    assert answer.status not in (401, 403, 429), case
                elif answer.status == 429:
                    assert wanted == 401 and name, case
                else:
                    assert answer.error == (wanted, REFUSED[wanted]), case
                    assert ("WWW-Authenticate" in answer.headers) == (wanted == 401), case
                count += 1
    return count


def test_every_endpoint_of_nsqd(nsqd: Nsqd):
    assert check_table(nsqd, NSQD_TABLE) == len(NSQD_TABLE) * 2 * (len(RIGHTS) + 2)
    assert nsqd.request("GET", "/drain", headers=bearer("read")).json == {"draining": False}  # DELETE came last


def test_every_endpoint_of_nsqlookupd(nsqlookupd: Nsqlookupd):
    assert check_table(nsqlookupd, NSQLOOKUPD_TABLE) == len(NSQLOOKUPD_TABLE) * 2 * (len(RIGHTS) + 2)


@pytest.mark.parametrize(
    "path", ["/debug/", "/debug/state", "/debug/tasks", "/debug/pprof/heap", "/debug/pprof/cmdline"]
)
def test_debug_is_for_admin_of_all(nsqd: Nsqd, nsqlookupd: Nsqlookupd, path: str):
    for daemon in (nsqd, nsqlookupd):
        statuses = [daemon.request("GET", path, headers=bearer(name)).status for name in ("admin", "mine", "read")]
        assert statuses == [200, 403, 403]
        assert daemon.request("GET", path).status == 401


def test_work_is_done_with_a_token(nsqd: Nsqd):
    publish = bearer("publish")
    assert nsqd.request("POST", "/pub?topic=done", b"hello", publish).body == b"OK"
    assert nsqd.request("POST", "/mpub?topic=done", b"a\nb", publish).body == b"OK"
    row = nsqd.request("GET", "/stats?format=json&topic=done", headers=bearer("read")).json["topics"][0]
    assert row["depth"] == 3
    assert nsqd.request("POST", "/topic/delete?topic=done", b"", bearer("admin")).status == 200


def test_tokens_are_in_no_output(nsqd: Nsqd, nsqlookupd: Nsqlookupd, tokens: Path):
    admin = bearer("admin")
    for daemon in (nsqd, nsqlookupd):
        seen = daemon.whole_log
        for path in ("/debug/state", "/debug/tasks", "/debug/threads", "/debug/pprof/cmdline", "/debug/memory"):
            seen += daemon.request("GET", path, headers=admin).text
        assert "unknown token" in seen
        assert not [token for token in (*TOKENS.values(), "a-token-nobody-has") if token in seen]
    assert nsqd.request("GET", "/config/http_auth_tokens_file", headers=admin).text == str(tokens)


# -- the file ----------------------------------------------------------------------------------------------------------


def test_the_file_is_read_again(daemons: Daemons, tmp_path: Path):
    path = write(tmp_path / "tokens.json", clients())
    nsqd = daemons.nsqd(f"--http-auth-tokens-file={path}")

    def status() -> int:
        return nsqd.request("GET", "/stats", headers=bearer("read")).status

    assert status() == 200
    path.write_text("not JSON")
    wait_until(lambda: "nothing changes until it is put right" in nsqd.log, "the bad file is told")
    assert status() == 200
    write(path, [row for row in clients() if row["name"] != "read"])
    wait_until(lambda: status() == 401, "the token is gone")


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_bad_file_stops_the_start(daemons: Daemons, tmp_path: Path, program: str):
    path = tmp_path / "tokens.toml"
    path.write_text('[[client]]\nname = "a"\npermissions = ["reed"]\ntoken = "a-token-of-some-size"\n')
    flag = f"--http-auth-tokens-file={path}"
    daemon: Daemon = daemons.new_nsqd(flag) if program == "nsqd" else Nsqlookupd(tmp_path / "log", [flag])
    daemon.launch()
    assert daemon.wait() == 1
    assert f"{flag}: " in daemon.log and "there is no permission 'reed'" in daemon.log
    assert "a-token-of-some-size" not in daemon.log


@pytest.mark.parametrize(
    ("program", "flag"),
    [
        ("nsqd", "--http-auth-tokens-file"),
        ("nsqd", "--lookupd-http-token-file"),
        ("nsqlookupd", "--http-auth-tokens-file"),
        ("nsqlookupd", "--nsqd-http-token-file"),
    ],
)
def test_a_file_that_is_not_there_is_called_by_its_flag(daemons: Daemons, tmp_path: Path, program: str, flag: str):
    given = f"{flag}={tmp_path / 'none'}"
    daemon: Daemon = daemons.new_nsqd(given) if program == "nsqd" else Nsqlookupd(tmp_path / "log", [given])
    daemon.launch()
    assert daemon.wait() == 1
    assert daemon.log.splitlines()[-1].endswith(f"{given}: No such file or directory")


def test_who_guesses_is_slowed_down(daemons: Daemons, tmp_path: Path):
    nsqd = daemons.nsqd(f"--http-auth-tokens-file={write(tmp_path / 'tokens.json', clients())}")
    assert nsqd.request("GET", "/stats", headers=bearer("read")).status == 200
    answers = [nsqd.request("GET", "/stats", headers=bearer(f"guess-{number:020}")) for number in range(60)]
    assert 20 <= [answer.status for answer in answers].count(401) <= 40
    last = next(answer for answer in answers if answer.status == 429)
    assert last.error == (429, "TOO_MANY_FAILURES") and int(last.headers["Retry-After"]) >= 1
    assert nsqd.request("GET", "/stats", headers=bearer("read")).status == 200
    assert nsqd.log.count("unknown token") <= 40


# -- HTTPS -------------------------------------------------------------------------------------------------------------


def https(daemon: Daemon, context: ssl.SSLContext, target: str, headers: dict[str, str] | None = None) -> Answer:
    address = https_address(daemon)
    connection = http.client.HTTPSConnection(*address, timeout=PATIENCE_S, context=context)
    try:
        connection.request("GET", target, headers=headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
def test_a_certificate_or_a_token(request: pytest.FixtureRequest, certificates: Certificates, program: str):
    daemon: Daemon = request.getfixturevalue(program)
    mine, other = ("/stats?topic=mine", "/stats?topic=t") if program == "nsqd" else ("/lookup?topic=mine", "/topics")
    good, nobody = certificates.client_context("good"), certificates.client_context("none")
    assert https(daemon, good, mine).status in (200, 404)
    assert https(daemon, good, other).error == (403, "FORBIDDEN")
    assert https(daemon, nobody, mine).error == (401, "UNAUTHORIZED")
    assert https(daemon, nobody, mine, bearer("read")).status in (200, 404)
    assert https(daemon, good, other, bearer("read")).status == 200  # a token goes before the certificate
    assert https(daemon, nobody, "/ping").body == b"OK"
    assert daemon.request("GET", mine).status == 401  # nothing is shown over HTTP


@pytest.mark.parametrize("program", ["nsqd", "nsqlookupd"])
@pytest.mark.parametrize("kind", ["stranger", "self-signed", "expired"])
def test_certificates_of_others(request: pytest.FixtureRequest, certificates: Certificates, program: str, kind: str):
    daemon: Daemon = request.getfixturevalue(program)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        https(daemon, certificates.client_context(kind), "/ping", bearer("all"))


@pytest.mark.parametrize("policy", ["", "require", "require-verify"])
def test_https_of_nsqlookupd(daemons: Daemons, certificates: Certificates, policy: str):
    """The policies of nsqd, without tokens; HTTP goes on beside it."""
    nsqlookupd = daemons.nsqlookupd(
        "--https-address=127.0.0.1:0",
        f"--tls-cert={certificates.server.cert}",
        f"--tls-key={certificates.server.key}",
        f"--tls-root-ca-file={certificates.ca}",
        f"--tls-client-auth-policy={policy}",
    )
    accepted = {
        "": ("none", "good", "stranger", "self-signed", "expired"),
        "require": ("good", "stranger", "self-signed", "expired"),
        "require-verify": ("good",),
    }[policy]
    for kind in ("none", "good", "stranger", "self-signed", "expired"):
        if kind in accepted:
            assert https(nsqlookupd, certificates.client_context(kind), "/ping").body == b"OK"
        else:
            with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
                https(nsqlookupd, certificates.client_context(kind), "/ping")
    assert nsqlookupd.get("/topics") == {"topics": []}
    assert https(nsqlookupd, certificates.client_context("good"), "/topics").json == {"topics": []}
    nsqlookupd.stop()


# -- daemons that ask each other ---------------------------------------------------------------------------------------


def test_daemons_show_each_other_their_tokens(daemons: Daemons, tmp_path: Path):
    tokens = write(tmp_path / "tokens.json", clients())
    (tmp_path / "read.token").write_text(TOKENS["read"] + "\n")
    (tmp_path / "admin.token").write_text(TOKENS["admin"] + "\n")
    nsqlookupd = daemons.nsqlookupd(
        f"--http-auth-tokens-file={tokens}", f"--nsqd-http-token-file={tmp_path / 'admin.token'}"
    )
    lookupd = f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}"
    auth = f"--http-auth-tokens-file={tokens}"
    nsqd = daemons.nsqd(lookupd, auth, f"--lookupd-http-token-file={tmp_path / 'read.token'}")
    admin = bearer("admin")
    assert nsqlookupd.request("POST", "/channel/create?topic=t&channel=before", b"", admin).status == 200

    nsqd.publish("t", b"x")  # the channel that nsqlookupd knows is asked for and created

    def channels() -> list[str]:
        row = nsqd.request("GET", "/stats?format=json&topic=t", headers=bearer("read")).json["topics"][0]
        return [each["channel_name"] for each in row["channels"]]

    wait_until(lambda: channels() == ["before"], "the channel is created ahead")

    def listed() -> int:
        return len(nsqlookupd.request("GET", "/nodes", headers=bearer("read")).json["producers"])

    wait_until(lambda: listed() == 1, "nsqd is listed")
    created = nsqlookupd.request("POST", "/topic/create?topic=parts&partition_num=2&replicator=1", b"", admin)
    assert created.status == 200, created.body
    row = nsqd.request("GET", "/stats?format=json&topic=parts", headers=bearer("read")).json["topics"]
    assert row


def test_without_a_token_the_others_say_no(daemons: Daemons, tmp_path: Path):
    tokens = write(tmp_path / "tokens.json", clients())
    nsqlookupd = daemons.nsqlookupd(f"--http-auth-tokens-file={tokens}")
    nsqd = daemons.nsqd(f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}")
    nsqlookupd.request("POST", "/channel/create?topic=t&channel=before", b"", bearer("admin"))
    nsqd.publish("t", b"x")
    wait_until(lambda: "status 401" in nsqd.log, "nsqd says why it was not told")
    assert nsqd.stats("t")["channels"] == []


async def test_our_clients_show_a_token(daemons: Daemons, tmp_path: Path):
    tokens = write(tmp_path / "tokens.json", clients())
    nsqlookupd = daemons.nsqlookupd(f"--http-auth-tokens-file={tokens}")
    nsqd = daemons.nsqd(f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}")
    where = f"http://127.0.0.1:{nsqlookupd.http[1]}"
    nsqd.publish("t", b"from elsewhere")

    def listed() -> int:
        return nsqlookupd.request("GET", "/lookup?topic=t", headers=bearer("read")).status

    wait_until(lambda: listed() == 200, "the topic is listed")
    options = ConnectionOptions(lookup_token=TOKENS["read"])
    async with Producer(nsqlookupd_http_addresses=where, options=options) as producer:
        await producer.pub("t", b"asyncio")
    with BlockingProducer(nsqlookupd_http_addresses=where, options=options) as blocking:
        blocking.pub("t", b"blocking")
    async with Producer(nsqlookupd_http_addresses=where, timeout=3) as producer:
        with pytest.raises(PublishError) as refused:
            await producer.pub("t", b"x")
    assert "401" in str(refused.value) or "401" in str(refused.value.__cause__)
    assert nsqd.stats("t")["message_count"] == 3
    options = ConnectionOptions(lookup_token=lambda: TOKENS["read"])
    async with Producer(nsqlookupd_http_addresses=where, options=options) as producer:
        await producer.pub("t", b"asyncio, by a function")
    with BlockingProducer(nsqlookupd_http_addresses=where, options=options) as blocking:
        blocking.pub("t", b"blocking, by a function")
    assert nsqd.stats("t")["message_count"] == 5
    assert TOKENS["read"] not in repr(options)
