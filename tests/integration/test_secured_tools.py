"""Every utility and every command of a shell in a secured deployment: an nsqd that takes nobody without a certificate
and a secret, and an nsqlookupd that answers over HTTPS who shows a token."""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import ClassVar

import pytest
from tests.certificates import Certificates
from tests.integration.auth_server import SECRET, AuthServer
from tests.integration.daemons import SOURCES, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.flavours import address_of
from tests.integration.test_upgrades import https_address
from tests.integration.utilities import at, end, flintmq, run, started

TOKEN = "a-token-of-thirty-two-characters"
ONE_FILE = "--filename-format=<TOPIC>.log"
"""For nsq_to_file, which by default begins another one when the hour strikes."""
_topics = (f"secured{number}" for number in count())


@dataclass(frozen=True)
class Place:
    """The nsqd, and what a client needs for it.

    Attributes:
        nsqlookupd: nsqd registers with it.
        opts: of ``--consumer-opt`` and ``--producer-opt``.
        token: the file with what nsqlookupd wants to be shown.
    """

    nsqd: Nsqd
    nsqlookupd: Nsqlookupd
    guard: AuthServer
    opts: tuple[str, ...]
    environment: dict[str, str]
    token: Path

    def found(self, prefix: str = "", token: Path | None = None) -> list[str]:
        """The flags of who asks nsqlookupd."""
        return [
            "--{}lookupd-http-address=https://{}:{}".format(prefix, *https_address(self.nsqlookupd)),
            f"--{prefix}lookupd-http-token-file={token or self.token}",
        ]

    def consuming(self) -> list[str]:
        return [f"--consumer-opt={opt}" for opt in self.opts]

    def producing(self) -> list[str]:
        return [f"--producer-opt={opt}" for opt in self.opts]

    def shell(self, *words: str) -> subprocess.CompletedProcess[str]:
        return flintmq(*words, environment=self.environment)

    def well(self, *words: str) -> str:
        done = self.shell(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def place(shared: Daemons, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("secured")
    certificates = Certificates(directory)
    mine = certificates.client("good")
    (directory / "secret").write_text(f"{SECRET}\n")
    (directory / "token").write_text(f"{TOKEN}\n")
    (directory / "tokens.json").write_text(
        json.dumps({"client": [{"name": "me", "token": TOKEN, "permissions": ["publish", "read", "admin"]}]})
    )
    (directory / "tokens.json").chmod(0o600)
    nsqlookupd = shared.nsqlookupd(
        "--https-address=127.0.0.1:0", f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}",
        f"--tls-root-ca-file={certificates.ca}", "--tls-client-auth-policy=require-verify",
        f"--http-auth-tokens-file={directory / 'tokens.json'}",
    )  # fmt: skip
    with AuthServer() as guard:
        nsqd = shared.nsqd(
            f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}", f"--lookupd-http-token-file={directory / 'token'}",
            "--durability=os", f"--tls-cert={certificates.server.cert}", f"--tls-key={certificates.server.key}",
            f"--tls-root-ca-file={certificates.ca}", "--tls-client-auth-policy=require-verify",
            "--tls-required=tcp-https", "--https-address=127.0.0.1:0", f"--auth-http-address={guard.address}",
            f"--http-auth-tokens-file={directory / 'tokens.json'}",
        )  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FLINTMQ_")} | {
            "PYTHONPATH": str(SOURCES), "FLINTMQ_NSQD": address_of(nsqd), "FLINTMQ_TLS": "1",
            "FLINTMQ_HTTP": "https://{}:{}".format(*https_address(nsqd)), "FLINTMQ_TLS_ROOT_CA_FILE": certificates.ca,
            "FLINTMQ_TLS_CERT": mine.cert, "FLINTMQ_TLS_KEY": mine.key,
            "FLINTMQ_AUTH_SECRET": f"file:{directory / 'secret'}", "FLINTMQ_TOKEN": f"file:{directory / 'token'}",
        }  # fmt: skip
        opts = ("tls_v1", f"tls_root_ca_file,{certificates.ca}", f"tls_cert,{mine.cert}", f"tls_key,{mine.key}",
                f"auth_secret,file:{directory / 'secret'}")  # fmt: skip
        yield Place(nsqd, nsqlookupd, guard, opts, environment, directory / "token")


@pytest.fixture
def topic(place: Place) -> str:
    """A topic with a message that waits for its first channel."""
    name = next(_topics)
    place.well("pub", name, "hidden")
    return name


# --- NSQ's utilities


def test_nsq_tail(place: Place, topic: str):
    done = run("nsq_tail", at(place.nsqd), f"--topic={topic}", "--channel=c", "--n=1", *place.consuming())
    assert (done.returncode, done.stdout) == (0, b"hidden\n"), done.stderr


def test_nsq_to_file(place: Place, topic: str, tmp_path: Path):
    arguments = (f"--topic={topic}", f"--output-dir={tmp_path}", ONE_FILE, *place.consuming())
    with started("nsq_to_file", at(place.nsqd), *arguments) as process:
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.iterdir()), "it is written")
        end(process)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"hidden\n"]


def test_to_nsq_and_nsq_to_nsq(place: Place, shared_nsqd: Nsqd, topic: str):
    done = run("to_nsq", at(place.nsqd), f"--topic={topic}", *place.producing(), text=b"more\n")
    assert done.returncode == 0, done.stderr
    to = f"--destination-nsqd-tcp-address={address_of(place.nsqd)}"
    arguments = (f"--topic={topic}:{topic}.copy", to, *place.consuming(), *place.producing())
    with started("nsq_to_nsq", at(place.nsqd), *arguments):
        assert sorted(place.well("sub", f"{topic}.copy", "c", "-n", "2").split()) == ["hidden", "more"]


class Target(http.server.BaseHTTPRequestHandler):
    """Takes what nsq_to_http sends."""

    bodies: ClassVar[list[bytes]]

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@contextlib.contextmanager
def targeted() -> Iterator[tuple[str, list[bytes]]]:
    """Where nsq_to_http may send to, and what came."""

    class Handler(Target):
        bodies: ClassVar[list[bytes]] = []

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/", Handler.bodies
        server.shutdown()


def test_nsq_to_http(place: Place, topic: str):
    with targeted() as (url, bodies):
        arguments = (f"--topic={topic}", "--channel=c", f"--post={url}")
        with started("nsq_to_http", at(place.nsqd), *arguments, *place.consuming()) as process:
            wait_until(lambda: bodies, "it is sent")
            end(process)
    assert bodies == [b"hidden"]


# --- by nsqlookupd


def test_nsq_tail_finds_nsqd(place: Place, topic: str):
    done = run("nsq_tail", *place.found(), f"--topic={topic}", "--channel=c", "--n=1", *place.consuming())
    assert (done.returncode, done.stdout) == (0, b"hidden\n"), done.stderr


def test_nsq_to_file_finds_topics_by_a_pattern(place: Place, topic: str, tmp_path: Path):
    arguments = (f"--topic-pattern=^{topic}$", f"--output-dir={tmp_path}", ONE_FILE, *place.found(), *place.consuming())
    with started("nsq_to_file", *arguments) as process:
        wait_until(lambda: any(path.stat().st_size for path in tmp_path.iterdir()), "it is written")
        end(process)
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"hidden\n"]


def test_nsq_to_http_finds_nsqd(place: Place, topic: str):
    with targeted() as (url, bodies):
        arguments = (f"--topic={topic}", "--channel=c", f"--post={url}", *place.found(), *place.consuming())
        with started("nsq_to_http", *arguments) as process:
            wait_until(lambda: bodies, "it is sent")
            end(process)
    assert bodies == [b"hidden"]


def test_nsq_to_nsq_finds_both_sides(place: Place, topic: str):
    place.well("topic", "create", f"{topic}.copy")
    arguments = (f"--topic={topic}", f"--destination-topic={topic}.copy", *place.consuming(), *place.producing())
    with started("nsq_to_nsq", *place.found(), *place.found("destination-"), *arguments):
        assert place.well("sub", f"{topic}.copy", "c", "-n", "1") == "hidden\n"


def test_a_token_is_renewed_without_a_restart(place: Place, topic: str, tmp_path: Path):
    token = tmp_path / "token"
    token.write_text("a-token-that-nobody-has-ever-seen\n")
    arguments = (f"--topic={topic}", "--channel=c", "--n=1", "--consumer-opt=lookupd_poll_interval,500ms")
    log = tmp_path / "log"
    with started("nsq_tail", *place.found(token=token), *arguments, *place.consuming(), log=log) as process:
        wait_until(lambda: "it asks for a token that it knows" in log.read_text(), "it is refused")
        (tmp_path / "new").write_text(f"{TOKEN}\n")
        (tmp_path / "new").rename(token)
        assert process.stdout is not None
        assert process.stdout.read() == b"hidden\n"


def test_topics_are_not_looked_for_without_a_token(place: Place, topic: str, tmp_path: Path):
    arguments = (f"--topic-pattern=^{topic}$", f"--output-dir={tmp_path}", place.found()[0], *place.consuming())
    log = tmp_path / "log"
    with started("nsq_to_file", *arguments, log=log) as process:
        wait_until(lambda: "could not retrieve topic list" in log.read_text(), "it is refused")
        end(process)
    assert "it answers 401 to /topics: it asks for a token that it knows" in log.read_text()


@pytest.mark.parametrize("program", ["nsq_tail", "nsq_to_file", "nsq_to_http", "nsq_to_nsq"])
def test_files_that_cannot_be_used_are_one_line(place: Place, program: str, tmp_path: Path):
    (tmp_path / "token").write_text("two\nlines\n")
    more = {
        "nsq_to_http": ("--post=http://127.0.0.1:1/",),
        "nsq_to_nsq": ("--destination-nsqd-tcp-address=127.0.0.1:1",),
    }
    for token, expected in ((tmp_path / "token", b"token: "), (tmp_path / "none", b"none: ")):
        done = run(program, *place.found(token=token), "--topic=t", *more.get(program, ()))
        assert done.returncode != 0 and expected in done.stderr and done.stderr.count(b"\n") == 1, done.stderr
    done = run(
        program, *place.found(), "--topic=t", *more.get(program, ()), "--consumer-opt=auth_secret,env:NOBODY_SET"
    )
    assert done.returncode == 2 and b"NOBODY_SET is not set" in done.stderr, done.stderr


@pytest.mark.parametrize("program", ["nsq_tail", "to_nsq"])
@pytest.mark.parametrize(("left_out", "reason"), [("tls", b"TLS required"), ("auth_secret", b"AUTH required")])
def test_nobody_comes_in_without(place: Place, program: str, left_out: str, reason: bytes):
    opts = place.producing() if program == "to_nsq" else place.consuming()
    given = [opt for opt in opts if left_out not in opt]
    done = run(program, at(place.nsqd), "--topic=never", *given, text=b"x\n")
    assert done.returncode == 1 and reason in done.stderr, done.stderr


# --- commands for people

LOOKS: list[tuple[list[str], Callable[[str], bool]]] = [
    (["tail", "{}", "--no-follow"], lambda out: out == "hidden\n"),
    (["sub", "{}", "d", "-n", "1"], lambda out: out == "hidden\n"),
    (["channel", "create", "{}", "c"], lambda out: "is there" in out),
    (["channel", "list", "{}"], lambda out: "\nd " in out),
    (["message", "1", "--topic", "{}"], lambda out: "body hidden" in out),
    (["replay", "{}", "d", "--from", "beginning"], lambda out: "1 message will be delivered" in out),
    (["peek", "{}", "d"], lambda out: "hidden" in out),
    (["replay", "{}", "--to", "{}.again", "--from", "beginning"], lambda out: "1 message" in out),
    (["topic", "show", "{}"], lambda out: "1 message" in out),
    (["top", "{}", "--once", "--interval", "100ms"], lambda out: "CLIENTS" in out),
    (["bench", "both", "--duration", "100ms", "--rate", "100"], lambda out: "/s" in out),
]  # fmt: skip


def test_commands_for_people(place: Place, topic: str):
    for words, is_right in LOOKS:
        out = place.well(*(word.replace("{}", topic) for word in words))
        assert is_right(out), (words, out)
    assert place.guard.questions[-1]["secret"] == SECRET


def test_doctor_sees_a_secured_nsqd(place: Place):
    flags = (
        "--tls", f"--tls-root-ca-file={place.environment['FLINTMQ_TLS_ROOT_CA_FILE']}",
        f"--tls-cert={place.environment['FLINTMQ_TLS_CERT']}", f"--tls-key={place.environment['FLINTMQ_TLS_KEY']}",
    )  # fmt: skip
    environment = place.environment | {"FLINTMQ_DOCTOR_AUTH_SECRET": SECRET}
    where = (f"--nsqd-tcp-address={address_of(place.nsqd)}", f"--nsqd-http-address={environment['FLINTMQ_HTTP']}")
    done = flintmq("doctor", *where, *flags, environment=environment)
    assert done.returncode == 0 and "all is well" in done.stdout, done.stdout


@pytest.mark.parametrize(
    "words",
    [("channel", "list", "{}"), ("topic", "list"), ("topic", "show", "{}"), ("node", "list"), ("peek", "{}", "c")],
    ids=" ".join,
)
def test_the_ways_to_name_a_token(place: Place, topic: str, words: tuple[str, ...]):
    """A reference, a file, and the token itself in the environment: each command, and those for a cluster too."""
    place.well("channel", "create", topic, "c")
    words = tuple(word.format(topic) for word in words)
    name = place.environment["FLINTMQ_TOKEN"].removeprefix("file:")
    bare = {key: value for key, value in place.environment.items() if key != "FLINTMQ_TOKEN"}
    for flags, more in (
        ([], {"FLINTMQ_TOKEN": f"file:{name}"}),
        ([f"--token=file:{name}"], {}),
        ([f"--token-file={name}"], {"FLINTMQ_TOKEN": "env:NOT_SET"}),
        ([], {"FLINTMQ_ADMIN_TOKEN": Path(name).read_text().strip()}),
    ):
        done = flintmq(*words, *flags, environment=bare | more)
        assert done.returncode == 0, (flags, done.stderr)
    done = flintmq(*words, environment=bare)
    assert done.returncode == 1 and "401 UNAUTHORIZE" in done.stdout + done.stderr, done


# --- nsq_stat


def test_nsq_stat_shows_certificate_and_token(place: Place, shared: Daemons, topic: str, tmp_path: Path):
    place.well("channel", "create", topic, "c")
    words = place.environment
    token = words["FLINTMQ_TOKEN"].removeprefix("file:")
    secured = [
        f"--http-client-tls-root-ca-file={words['FLINTMQ_TLS_ROOT_CA_FILE']}",
        f"--http-client-tls-cert={words['FLINTMQ_TLS_CERT']}", f"--http-client-tls-key={words['FLINTMQ_TLS_KEY']}",
        f"--http-client-token-file={token}",
    ]  # fmt: skip
    what = (f"--topic={topic}", "--channel=c", "--count=1", "--interval=1ms")
    for where in (words["FLINTMQ_HTTP"], "{}:{}".format(*place.nsqd.http)):  # the latter is told where HTTPS is
        done = run("nsq_stat", f"--nsqd-http-address={where}", *what, *secured)
        assert done.returncode == 0 and done.stdout.count(b"\n") == 3, done.stderr
    done = run("nsq_stat", f"--nsqd-http-address={words['FLINTMQ_HTTP']}", *what, *secured[:-1])
    assert done.returncode == 1 and b"it answers 401 to /stats" in done.stderr, done.stderr
    (tmp_path / "ca.pem").write_text("none")
    done = run(
        "nsq_stat",
        f"--nsqd-http-address={words['FLINTMQ_HTTP']}",
        *what,
        f"--http-client-tls-root-ca-file={tmp_path / 'ca.pem'}",
    )
    assert done.returncode == 2 and done.stderr.count(b"\n") == 1, done.stderr
    assert b"--http-client-tls-root-ca-file='" in done.stderr and b"ca.pem" in done.stderr, done.stderr
    guarded = Path(token).with_name("tokens.json")
    nsqlookupd = shared.nsqlookupd(f"--http-auth-tokens-file={guarded}")
    nsqlookupd_at = "--lookupd-http-address={}:{}".format(*nsqlookupd.http)
    done = run("nsq_stat", nsqlookupd_at, *what)
    assert done.returncode == 1 and b"it answers 401 to /lookup" in done.stderr, done.stderr
    done = run("nsq_stat", nsqlookupd_at, *what, *secured)
    assert done.returncode == 1 and b"no nsqlookupd knows topic" in done.stderr, done.stderr


def test_nsq_stat_beside_required_tls(shared: Daemons, tmp_path: Path, place: Place):
    nsqd = shared.nsqd(
        "--durability=os", f"--tls-cert={(made := Certificates(tmp_path)).server.cert}", f"--tls-key={made.server.key}",
        "--tls-required=tcp-https", "--https-address=", f"--auth-http-address={place.guard.address}",
    )  # fmt: skip
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    host, port = nsqd.http
    done = run(
        "nsq_stat", f"--nsqd-http-address={host}:{port}", "--topic=t", "--channel=c", "--count=1", "--interval=1ms"
    )
    assert done.returncode == 0 and done.stdout.count(b"\n") == 3, done.stderr
