"""Daemons that are asked over HTTPS: an nsqd without a plain port is found all the same, and so are all nsqlookupds."""

from __future__ import annotations

import asyncio
import logging

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqd, Nsqlookupd, wait_until
from tests.integration.test_http_auth import https
from tests.integration.test_upgrades import https as ask
from tests.integration.test_upgrades import https_address
from tests.integration.utilities import run

from flintmq import ConnectionOptions
from flintmq.client.aio.http import HttpFetch
from flintmq.client.aio.lookup import Lookup
from flintmq.sync import Producer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


def tls(certificates: Certificates) -> list[str]:
    server = certificates.server
    return ["--https-address=127.0.0.1:0", f"--tls-cert={server.cert}", f"--tls-key={server.key}"]


@pytest.fixture(scope="module")
def closed(shared: Daemons, certificates: Certificates) -> tuple[Nsqlookupd, Nsqd]:
    """The setup of SECURITY.md, with a nsqlookupd; nsqd has a topic with a channel."""
    nsqlookupd = shared.nsqlookupd()
    flags = (*tls(certificates), "--tls-required=true", "--http-address=", "--durability=os")
    nsqd = shared.new_nsqd(*flags, f"--lookupd-tcp-address=127.0.0.1:{nsqlookupd.tcp[1]}")
    nsqd.launch()
    wait_until(lambda: nsqlookupd.get("/nodes")["producers"], lambda: f"nsqd is known:\n{nsqd.log}")
    (node,) = nsqlookupd.get("/nodes")["producers"]
    options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca)
    with Producer(f"127.0.0.1:{node['tcp_port']}", options=options) as producer:
        producer.pub("t", b"x")
    assert ask(nsqd, certificates.client_context(), "POST", "/channel/create?topic=t&channel=c")[0] == 200
    return nsqlookupd, nsqd


def test_an_nsqd_without_http_registers_the_port_for_https(closed: tuple[Nsqlookupd, Nsqd], certificates: Certificates):
    nsqlookupd, nsqd = closed
    (node,) = nsqlookupd.get("/nodes")["producers"]
    assert node["http_port"] == https_address(nsqd)[1]
    assert https(nsqd, certificates.client_context(), "/config/broadcast_http_port").json == node["http_port"]
    assert https(nsqd, certificates.client_context(), "/info").json["http_port"] == 0  # as NSQ without HTTP


def test_who_finds_it_by_nsqlookupd_asks_there(
    closed: tuple[Nsqlookupd, Nsqd], shared: Daemons, certificates: Certificates
):
    nsqlookupd, _ = closed
    at, trusted = f"127.0.0.1:{nsqlookupd.http[1]}", f"--http-client-tls-root-ca-file={certificates.ca}"
    wait_until(lambda: nsqlookupd.producers("t"), "the topic is registered")
    nsqadmin = shared.nsqadmin(f"--lookupd-http-address={at}", trusted)
    assert nsqadmin.whole("/api/topics/t")["message_count"] == 1
    what = ("--topic=t", "--channel=c", "--count=1", "--interval=10ms")
    done = run("nsq_stat", f"--lookupd-http-address={at}", *what, trusted)
    assert done.returncode == 0, done.stderr


def test_nsqlookupds_say_where_they_speak_tls(
    shared: Daemons, certificates: Certificates, caplog: pytest.LogCaptureFixture
):
    keeper = shared.nsqlookupd(f"--store-path={shared.new_directory('store')}")
    flags = ("--broadcast-address=127.0.0.1", f"--cluster-store=http://127.0.0.1:{keeper.http[1]}")
    secured = [shared.nsqlookupd(*flags, *tls(certificates)) for _ in range(2)]
    plain = shared.nsqlookupd(*flags)
    for each in secured:
        wait_until(lambda each=each: len(each.get("/cluster/status")["lookupds"]) == 3, "all are listed")  # type: ignore[misc]
    rows = secured[0].request("GET", "/listlookup").json["data"]["lookupdnodes"]
    wanted = {str(each.http[1]): str(https_address(each)[1]) for each in secured} | {str(plain.http[1]): None}
    assert {row["HttpPort"]: row.get("HttpsPort") for row in rows} == wanted
    (alone,) = keeper.request("GET", "/listlookup").json["data"]["lookupdnodes"]
    assert "HttpsPort" not in alone

    async def found(seed: str) -> set[str]:
        options = ConnectionOptions(tls=True, tls_ca_file=certificates.ca)
        lookup = Lookup([seed], PATIENCE_S, HttpFetch(options))
        await lookup.topic("t")
        await lookup.close()
        return set(lookup.addresses)

    caplog.set_level(logging.WARNING)
    ports = [https_address(each)[1] for each in secured]
    assert asyncio.run(found(f"https://127.0.0.1:{ports[0]}")) == {f"https://127.0.0.1:{port}" for port in ports}
    assert "is skipped" not in caplog.text
    assert asyncio.run(found(f"http://127.0.0.1:{plain.http[1]}")) == {
        f"http://127.0.0.1:{each.http[1]}" for each in (*secured, plain)
    }
