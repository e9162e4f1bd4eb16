"""Readers and writers without Spark against daemons that want TLS, client certificates, AUTH and tokens."""

from __future__ import annotations

import logging
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark import cloudpickle
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.integration.daemons import PATIENCE_S, Daemons, wait_until
from tests.spark.driven import Query
from tests.spark.fake_nsqd import FakeNsqd
from tests.spark.processes import assert_each_once
from tests.spark.secured import SECRETS, Secured, secured
from tests.spark.test_reader import ManualClock, numbered, offsets_read

from flintmq.errors import DiscoveryError, FlintError, NsqdError, OptionError, PublishRefused
from flintmq.spark import broker, retry
from flintmq.spark.batch_reader import NsqReader
from flintmq.spark.broker import POOL, NsqdConnection
from flintmq.spark.discovery import LookupRefused
from flintmq.spark.errors import SpoolFailed
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import LinkOptions, SinkOptions, SourceOptions
from flintmq.spark.sink import NsqWriter, RowWriter
from flintmq.spark.stream_reader import NsqStreamReader

BODY = StructType([StructField("body", BinaryType())])
ALL = ReadAllAvailable()


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as found:
        write(found.options(topic="t"), numbered(0, 100))
        yield found


@pytest.fixture(autouse=True)
def afresh(everything: Secured, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had just been started, and the auth server too."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(broker, "_accepted", set())
    everything.auth.reset()
    POOL._idle.clear()
    yield
    POOL._idle.clear()


def write(options: dict[str, str], bodies: list[bytes]) -> None:
    batch = pa.record_batch([pa.array(bodies, pa.binary())], ["body"])
    RowWriter(SinkOptions.parse(options), BODY).write(iter([batch]), TaskIdentity("query", 0, 0))


def count(options: dict[str, str]) -> int:
    reader = NsqReader(SourceOptions.parse({"topic": "t", **options}))
    return len(offsets_read(reader, reader.partitions()))


def refusal(options: dict[str, str]) -> str:
    """The one line that a reader fails with; a writer fails with the same words."""
    with pytest.raises((FlintError, OptionError)) as reading:
        count(options)
    with pytest.raises((FlintError, OptionError)):
        write({"topic": "t", **options}, [b"never"])
    line = str(reading.value)
    assert "\n" not in line
    assert not [secret for secret in SECRETS if secret in line]
    return line


@pytest.mark.parametrize("place", ["nsqd", "lookupd"])
def test_a_spool(everything: Secured, tmp_path: Path, place: str):
    """It asks as everybody does, and what it has taken is not open to others."""
    write(everything.options(topic=f"spooled-{place}"), numbered(0, 100))
    found = {"nsqd": None, "lookupd": everything.lookupd, "nsqlookupdToken": f"file:{everything.token}"}
    options = everything.options(**(found if place == "lookupd" else {}))
    options |= {"topic": f"spooled-{place}", "channel": "spark", "mode": "spool", "spoolLocation": str(tmp_path / "s")}
    query = Query(**options)
    try:
        query.available_now()
        assert_each_once(query.bodies, 100)
        assert query.reader._place is not None
        address = query.reader._place.address
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port)), PATIENCE_S) as stranger:
            stranger.sendall(f"  V2OFFSETS spooled-{place}\n".encode())
            assert b"E_UNAUTHORIZED" in stranger.recv(1000)
        with pytest.raises(NsqdError, match="E_UNAUTHORIZED"):
            NsqdConnection(address, PATIENCE_S, PATIENCE_S, LinkOptions(auth_secret=f"file:{everything.secret}"))
        seen = (*query.planned, *(path.read_bytes().decode("latin1") for path in tmp_path.glob("s/*.json")))
        assert not [secret for secret in SECRETS for text in seen if secret in text]
    finally:
        query.stop()


def test_a_spool_that_may_not_publish_is_told_of_headers(everything: Secured, tmp_path: Path):
    """The answer that says so is for who may publish; the others learn it from the answer to SUB."""
    daemons = Daemons(tmp_path)
    try:
        nsqd = daemons.nsqd(f"--auth-http-address={everything.auth.address}")
        nsqd.post("/topic/create?topic=with&extend=true")
        nsqd.post("/pub_ext?topic=with&ext=%7B%22a%22%3A%22b%22%7D", b"x")
        nsqd.post("/pub?topic=without", b"x")
        everything.auth.grant({"permissions": ["subscribe"], "topic": ".*", "channels": ["spark"]})
        for topic, headers in (("with", {"a": "b"}), ("without", {})):
            options = {"nsqd": f"127.0.0.1:{nsqd.tcp[1]}", "authSecret": f"file:{everything.secret}", "topic": topic}
            options |= {"channel": "spark", "columns": "body,headers"}
            query = Query(**options, mode="spool", spoolLocation=tmp_path / topic)
            try:
                query.available_now()
                assert [(row["body"], dict(row["headers"] or ())) for row in query.rows] == [(b"x", headers)]
            finally:
                query.stop()
    finally:
        daemons.close()


def test_a_spool_that_nsqd_refuses(everything: Secured, tmp_path: Path):
    options = everything.options(tlsCert=None, tlsKey=None)
    options |= {"topic": "t", "channel": "spark", "mode": "spool", "spoolLocation": str(tmp_path / "s")}
    query = Query(**options)
    try:
        with pytest.raises(SpoolFailed, match="it wants a certificate of this client: set tlsCert"):
            query.available_now()
    finally:
        query.stop()


def test_reading_and_writing(everything: Secured):
    options = everything.options(topic="both")
    write(options, numbered(0, 3000))
    assert count(options) == 3000


@pytest.mark.parametrize("compression", ["snappy", "deflate"])
@pytest.mark.parametrize("tls", ["true", "false"])
def test_compressed(everything: Secured, tmp_path: Path, compression: str, tls: str):
    bodies = numbered(0, 3000, 200)
    if tls == "true":
        options = everything.options(topic=f"of-{compression}", compression=compression)
        write(options, bodies)
        assert count(options) == 3000
        return
    daemons = Daemons(tmp_path)
    try:
        plain = daemons.nsqd("--durability=os")
        options = {"nsqd": f"127.0.0.1:{plain.tcp[1]}", "topic": "t", "compression": compression}
        write(options, bodies)
        assert count(options) == 3000
        connection = NsqdConnection(options["nsqd"], 5, 5, SourceOptions.parse(options).link)
        assert connection.layers == (compression,)
        connection.close()
    finally:
        daemons.close()


def test_a_certificate_and_its_key_in_one_file(everything: Secured, tmp_path: Path):
    files = everything.certificates.client("good")
    both = tmp_path / "both.pem"
    both.write_bytes(Path(files.cert).read_bytes() + Path(files.key).read_bytes())
    both.chmod(0o600)
    assert count(everything.options(tlsCert=str(both), tlsKey=None)) == 100


def test_the_names_that_users_of_kafka_and_nsq_write(everything: Secured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARKS_SECRET", SECRETS[0])
    files = everything.certificates.client("good")
    assert (
        count(
            {
                "nsqd": everything.nsqd,
                "kafka.security.protocol": "SSL",
                "kafka.ssl.truststore.location": everything.certificates.ca,
                "tls_cert": files.cert,
                "tls_key": files.key,
                "auth_secret": "env:SPARKS_SECRET",
            }
        )
        == 100
    )


def test_by_nsqlookupd_over_https_with_a_token(everything: Secured):
    options = everything.options(nsqd=None, lookupd=everything.lookupd, nsqlookupdToken=f"file:{everything.token}")
    assert count(options) == 100
    reader = NsqReader(SourceOptions.parse({**options, "topicPattern": "t"}))
    assert len(offsets_read(reader, reader.partitions())) == 100
    write({**options, "topic": "by-lookup"}, [b"1"])
    assert count(everything.options(topic="by-lookup")) == 1


# -- refusals: each is one line that says what to do -------------------------------------------------------------------


def test_tls_is_required_and_not_asked_for(everything: Secured):
    plain = {"nsqd": everything.nsqd, "authSecret": f"file:{everything.secret}", "retries": "0"}
    assert "this nsqd wants TLS: connect with tls=true" in refusal(plain)


def test_tls_where_there_is_none(everything: Secured):
    with FakeNsqd() as fake:
        line = refusal(everything.options(nsqd=fake.address))
    assert "this nsqd offers no TLS" in line
    assert "tls=false" in line


def test_another_authority(everything: Secured, tmp_path: Path):
    from tests.certificates import Certificates

    line = refusal(everything.options(tlsCaFile=Certificates(tmp_path / "other").ca))
    assert "not from an authority that is trusted here: set tlsCaFile" in line


@pytest.mark.parametrize("kind", ["none", "stranger", "expired"])
def test_client_certificates(everything: Secured, kind: str):
    files = everything.certificates.client(kind)
    line = refusal(everything.options(tlsCert=files.cert or None, tlsKey=files.key or None))
    wanted = {
        "none": "set tlsCert and tlsKey",
        "stranger": "tlsCert must be from an authority",
        "expired": "this client's certificate has expired, says the server: renew tlsCert",
    }
    assert wanted[kind] in line


def test_a_server_whose_certificate_has_expired(everything: Secured, tmp_path: Path):
    daemons = Daemons(tmp_path)
    try:
        server = everything.certificates.expired_server()
        nsqd = daemons.nsqd(f"--tls-cert={server.cert}", f"--tls-key={server.key}", "--https-address=127.0.0.1:0")
        assert "its certificate has expired" in refusal(everything.options(nsqd=f"127.0.0.1:{nsqd.tcp[1]}"))
    finally:
        daemons.close()


def test_another_name(everything: Secured):
    line = refusal(everything.options(tlsServerName="nsqd.example"))
    assert "its certificate is not for 'nsqd.example'" in line
    assert "tlsServerName" in line
    assert count(everything.options(tlsServerName="localhost")) == 100


def test_trusting_everybody_is_said(everything: Secured, caplog: pytest.LogCaptureFixture):
    from flintmq.spark.link import _warn_unverified

    _warn_unverified.cache_clear()
    with caplog.at_level(logging.WARNING, "flintmq.spark"):
        assert count(everything.options(tlsCaFile=None, tlsVerify="false")) == 100
    assert [record.message for record in caplog.records if "tlsVerify=false" in record.message]


@pytest.mark.parametrize("option", ["tlsCaFile", "tlsCert", "tlsKey"])
def test_a_file_that_this_host_lacks(everything: Secured, tmp_path: Path, option: str):
    missing = str(tmp_path / "missing.pem")
    line = refusal(everything.options(**{option: missing}))
    assert missing in line
    assert f"on host {socket.gethostname()}" in line


def test_secrets_that_are_not_to_be_had(everything: Secured, tmp_path: Path):
    here = f"on host {socket.gethostname()}"
    line = refusal(everything.options(authSecret="env:NOBODY_SETS_THIS"))
    assert "authSecret='env:NOBODY_SETS_THIS'" in line
    assert f"the environment variable NOBODY_SETS_THIS is not set {here}" in line
    line = refusal(everything.options(authSecret=f"file:{tmp_path}/none"))
    assert f"it cannot be read {here}: No such file or directory" in line
    (tmp_path / "empty").write_text("\n")
    assert f"it is empty {here}" in refusal(everything.options(authSecret=f"file:{tmp_path}/empty"))
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8 text" in refusal(everything.options(authSecret=f"file:{tmp_path}/binary"))


def test_no_secret_where_one_is_wanted(everything: Secured):
    line = refusal(everything.options(authSecret=None))
    assert "E_AUTH_FIRST" in line
    assert "set authSecret" in line


def test_a_secret_that_the_auth_server_does_not_know(everything: Secured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARKS_SECRET", "another one")
    everything.auth.status = 403
    asked = len(everything.auth.questions)
    line = refusal(everything.options(authSecret="env:SPARKS_SECRET", retries="1000"))
    assert "E_AUTH_FAILED" in line
    assert "refuses authSecret" in line
    assert len(everything.auth.questions) == asked + 2, (
        "a first refusal is final: one for the reader, one for the writer"
    )


def test_a_topic_that_is_not_allowed(everything: Secured):
    everything.auth.grant({"permissions": ["subscribe"], "topic": "^other$", "channels": [".*"]})
    line = refusal(everything.options())
    assert "E_UNAUTHORIZED" in line


def test_a_secret_that_is_revoked_while_a_query_runs(everything: Secured, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SPARKS_SECRET", SECRETS[0])
    everything.auth.grant(*everything.auth.answer["authorizations"], ttl=1)
    options = SourceOptions.parse(everything.options(topic="t", authSecret="env:SPARKS_SECRET"))
    clock = ManualClock()
    reader = NsqStreamReader(options, clock)
    here = reader.latestOffset(reader.initialOffset(), ALL)
    everything.auth.status = 403

    def is_away() -> bool:
        clock.advance(10)
        reader.latestOffset(here, ALL)
        return reader._surveyor.away_s(everything.nsqd) > 0

    wait_until(is_away, "nsqd has asked the auth server again")
    # it says so itself, or it is known to be away by then, and why
    with pytest.raises(FlintError, match=r"E_AUTH_FAILED.*refuses authSecret, or does not answer"):
        offsets_read(reader, reader.partitions({}, here))
    clock.advance(301)
    with pytest.raises(FlintError, match=r" is away.*E_AUTH_FAILED"):
        reader.latestOffset(here, ALL)
    everything.auth.status = 200
    clock.advance(10)
    assert reader.latestOffset(here, ALL) == here, "an auth server that was only away for a while"


def test_a_secret_file_is_read_for_every_connection(everything: Secured, tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text("the old one")
    options = everything.options(authSecret=f"file:{file}")
    assert count(options) == 100
    assert everything.auth.questions[-1]["secret"] == "the old one"
    POOL._idle.clear()
    file.write_text("the new one\n")
    assert count(options) == 100
    assert everything.auth.questions[-1]["secret"] == "the new one"


def test_connections_are_not_shared_between_secrets(everything: Secured, tmp_path: Path):
    (tmp_path / "other").write_text("other")
    for file in (everything.secret, tmp_path / "other", everything.secret):
        assert count(everything.options(authSecret=f"file:{file}")) == 100
    assert [question["secret"] for question in everything.auth.questions] == [SECRETS[0], "other"]


def test_tokens_of_nsqlookupd(everything: Secured, tmp_path: Path):
    (tmp_path / "unknown").write_text("a-token-nobody-has")
    base = everything.options(nsqd=None, lookupd=everything.lookupd, retries="1000")
    with pytest.raises(LookupRefused, match=r"HTTP status 401.*set nsqlookupdToken"):
        count(base)
    with pytest.raises(LookupRefused, match="HTTP status 401"):
        write({**base, "topic": "t", "nsqlookupdToken": f"file:{tmp_path}/unknown"}, [b"1"])
    with pytest.raises(OptionError, match="NO_TOKEN is not set on host"):
        count({**base, "nsqlookupdToken": "env:NO_TOKEN"})
    other = {**base, "nsqlookupdToken": f"file:{everything.token}", "retries": "0"}
    del other["tlsCaFile"]
    with pytest.raises(DiscoveryError, match="set tlsCaFile"):
        count(other)


# -- nothing leaves the process ----------------------------------------------------------------------------------------


def test_no_secret_in_what_spark_pickles_or_shows(everything: Secured, caplog: pytest.LogCaptureFixture):
    given = everything.options(
        nsqd=None, lookupd=everything.lookupd, topic="t", nsqlookupdToken=f"file:{everything.token}"
    )
    shown = []
    with caplog.at_level(logging.DEBUG):
        reader = NsqStreamReader(SourceOptions.parse(given))
        here = reader.latestOffset(reader.initialOffset(), ALL)
        tasks = reader.partitions({}, here)
        batch = NsqReader(SourceOptions.parse(given))
        assert len(offsets_read(reader, tasks)) == 100
        writer = NsqWriter(SinkOptions.parse(given), BODY, False)
        shown.append(pickle.dumps(writer.write(iter([]))))
        for thing in (reader, batch, writer, tasks, here):
            shown += [pickle.dumps(thing), cloudpickle.dumps(thing), repr(thing).encode()]
        shown += [repr(vars(thing)).encode() for thing in (reader, batch, writer)]
    # the server that answers AUTH is in this process, too, and its library logs what it was asked
    shown += [record.getMessage().encode() for record in caplog.records if record.name.startswith("flintmq")]
    for secret in SECRETS:
        assert not [one for one in shown if secret.encode() in one]


def test_of_an_exception_in_a_connection_nothing_is_shown(everything: Secured):
    everything.auth.status = 500
    with pytest.raises((NsqdError, PublishRefused)) as caught:
        count(everything.options())
    error: BaseException | None = caught.value
    while error is not None:
        assert not [secret for secret in SECRETS if secret in repr(error) or secret in str(error.args)]
        error = error.__cause__ or error.__context__


def test_a_child_process_makes_connections_of_its_own(everything: Secured):
    """PySpark's daemon forks its workers."""
    options = everything.options()
    assert count(options) == 100
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if count(options) == 100 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert count(options) == 100
