"""The coordination store as real processes: etcd and nsqlookupd do the same, and what becomes of it when they fail."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.certificates import Certificates, Files
from tests.integration.daemons import PATIENCE_S, Daemons, Nsqlookupd, wait_until
from tests.integration.etcd import Etcd
from tests.integration.proxy import Proxy
from tests.store_cases import CASES, compare_with_model, put, take

from flintmq.clock import SystemClock
from flintmq.cluster.keys import Keys
from flintmq.cluster.store import (
    Compacted,
    Compare,
    Fate,
    OutcomeUnknown,
    Put,
    Snapshot,
    Span,
    StoreFull,
    StoreRefused,
    StoreUnavailable,
    Txn,
    follow,
    swap,
)
from flintmq.env import Env
from flintmq.net import etcd_wire as wire
from flintmq.net.cluster_store import PasswordFile, StoreFiles, open_store
from flintmq.net.etcd import FULL_PAUSE_S, EtcdOptions, EtcdStore
from flintmq.net.http_auth import TokenFile
from flintmq.net.http_client import HttpClient
from flintmq.net.http_exchange import Request
from flintmq.net.lease import holding
from flintmq.net.tls import client_context
from flintmq.nsqlookupd.http_permissions import STORE_TABLE

ALL = Span.of_prefix("/")
PATIENT: dict[str, Any] = {"try_timeout_s": PATIENCE_S, "timeout_s": 2 * PATIENCE_S}

Scenario = Callable[[EtcdStore], Awaitable[None]]


def use(scenario: Scenario, *endpoints: str, **options: Any) -> None:
    """Run a scenario on a store; a store that is slow is waited for unless the options say otherwise."""

    async def main() -> None:
        store = EtcdStore(Env(), EtcdOptions(endpoints, **{**PATIENT, **options}))
        try:
            async with asyncio.timeout(5 * PATIENCE_S):
                await scenario(store)
        finally:
            await store.close()

    asyncio.run(main())


async def first(watched: Any) -> Any:
    async with asyncio.timeout(4 * PATIENCE_S):
        return await anext(watched)


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    etcd = Etcd(tmp_path_factory.mktemp("etcd"), "one")
    try:
        yield etcd.launch().wait()
    finally:
        etcd.discard()


@pytest.fixture(scope="module")
def embedded(shared: Daemons, tmp_path_factory: pytest.TempPathFactory) -> str:
    nsqlookupd = shared.nsqlookupd(f"--store-path={tmp_path_factory.mktemp('store')}")
    return f"http://127.0.0.1:{nsqlookupd.http[1]}"


@pytest.fixture(params=["nsqlookupd", "etcd"])
def url(request: pytest.FixtureRequest) -> str:
    """Each of the two stores."""
    if request.param == "etcd":
        return str(request.getfixturevalue("etcd").url)
    return str(request.getfixturevalue("embedded"))


@pytest.mark.parametrize("name", CASES)
def test_it_does_what_every_store_does(url: str, name: str):
    use(lambda store: CASES[name](store, f"/{name}/"), url)


def test_etcd_does_as_the_state_machine_for_long(etcd: Etcd):
    use(partial(compare_with_model, prefix="/long/", seed=2, steps=300), etcd.url)


# -- nsqlookupd --------------------------------------------------------------------------------------------------------


def with_store(daemons: Daemons, path: Path, *flags: str) -> tuple[Nsqlookupd, str]:
    path.mkdir(exist_ok=True)
    nsqlookupd = daemons.nsqlookupd(f"--store-path={path}", *flags)
    return nsqlookupd, f"http://127.0.0.1:{nsqlookupd.http[1]}"


def test_what_was_answered_survives_kill_9(daemons: Daemons, tmp_path: Path):
    nsqlookupd, url = with_store(daemons, tmp_path / "store")

    async def scenario(store: EtcdStore) -> None:
        lease = await store.grant(60)
        revision = await put(store, "/a", b"1")
        async with store.watch(ALL, revision) as watched:
            await put(store, "/b", b"2", lease.lease_id)
            assert [event.key for event in (await first(watched)).events] == ["/b"]
            before = await store.range(ALL)
            await asyncio.to_thread(nsqlookupd.kill)
            await asyncio.to_thread(nsqlookupd.start)
            assert await store.range(ALL) == before
            await store.keepalive(lease.lease_id)
            await put(store, "/c", b"3")
            assert [event.key for event in (await first(watched)).events] == ["/c"]

    use(scenario, url)


def test_a_stopped_nsqlookupd_ends_its_watches_and_says_nothing_wrong(daemons: Daemons, tmp_path: Path):
    nsqlookupd, url = with_store(daemons, tmp_path / "store")

    async def scenario(store: EtcdStore) -> None:
        revision = await put(store, "/a")
        async with store.watch(ALL, revision) as watched:
            await put(store, "/b")
            await first(watched)
            await asyncio.to_thread(nsqlookupd.stop)
            impatient = EtcdStore(Env(), EtcdOptions([url], timeout_s=3))
            with pytest.raises(StoreUnavailable, match="refused"):
                await impatient.get("/a")

    use(scenario, url)


@pytest.mark.parametrize("table", ["store_key", "store_state", "store_lease"])
@pytest.mark.parametrize("how", ["changed", "deleted"])
def test_a_damaged_store_is_refused(daemons: Daemons, tmp_path: Path, table: str, how: str):
    nsqlookupd, url = with_store(daemons, tmp_path / "store")

    async def scenario(store: EtcdStore) -> None:
        lease = await store.grant(60)
        await put(store, "/a", b"1", lease.lease_id)

    use(scenario, url)
    nsqlookupd.stop()
    change = {"store_key": "value = x'32'", "store_state": "revision = 1", "store_lease": "ttl_s = 61"}[table]
    with sqlite3.connect(tmp_path / "store" / "store.db") as database:
        database.execute(f"UPDATE {table} SET {change}" if how == "changed" else f"DELETE FROM {table}")
    database.close()
    nsqlookupd.launch()
    assert nsqlookupd.wait() == 1
    assert "store.db of --store-path is damaged" in nsqlookupd.log
    assert "Restore it from a backup" in nsqlookupd.log


def test_a_store_that_is_no_database_is_refused(daemons: Daemons, tmp_path: Path):
    nsqlookupd, _ = with_store(daemons, tmp_path / "store")
    nsqlookupd.stop()
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    (tmp_path / "store" / "store.db").write_bytes(b"no database at all" * 500)
    nsqlookupd.launch()
    assert nsqlookupd.wait() == 1
    assert "store.db of --store-path is damaged" in nsqlookupd.log


def test_without_the_option_there_is_no_store_and_the_client_says_so(daemons: Daemons):
    nsqlookupd = daemons.nsqlookupd()

    async def scenario(store: EtcdStore) -> None:
        with pytest.raises(StoreUnavailable, match="--store-path"):
            await put(store, "/a")

    use(scenario, f"http://127.0.0.1:{nsqlookupd.http[1]}", timeout_s=5.0)


def test_two_nsqlookupd_do_not_share_a_directory(daemons: Daemons, tmp_path: Path):
    with_store(daemons, tmp_path / "store")
    with pytest.raises(AssertionError, match=r"--store-path=\S+/store: another process has it open") as refused:
        daemons.nsqlookupd(f"--store-path={tmp_path / 'store'}")
    assert "data-path" not in str(refused.value)


def test_a_directory_that_cannot_be_used_is_called_by_its_option(daemons: Daemons, tmp_path: Path):
    (tmp_path / "file").write_text("")
    (tmp_path / "closed").mkdir(mode=0)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "store.db").mkdir()
    for name, text in (
        ("missing", r"--store-path=\S+/missing: there is no such directory; create it first"),
        ("file", r"--store-path=\S+/file: Not a directory"),
        ("closed", r"--store-path=\S+/closed: permission denied: .* belongs to uid"),
        ("full", r"full/store\.db"),
    ):
        if name == "closed" and os.access(tmp_path / "closed", os.R_OK):
            continue  # who runs this may do everything
        with pytest.raises(AssertionError, match=text) as refused:
            daemons.nsqlookupd(f"--store-path={tmp_path / name}")
        assert "data-path" not in str(refused.value)


def test_an_older_store_is_refused_and_taken_by_who_insists(daemons: Daemons, tmp_path: Path):
    nsqlookupd, url = with_store(daemons, tmp_path / "store")

    async def scenario(store: EtcdStore) -> None:
        for name in "abc":
            await put(store, f"/{name}")

    use(scenario, url)
    nsqlookupd.kill()
    wal = tmp_path / "store" / "store.db-wal"
    data = bytearray(wal.read_bytes())
    data[-2000] ^= 1
    wal.write_bytes(data)
    nsqlookupd.launch()
    assert nsqlookupd.wait() == 1
    assert "it ends 1 transactions before the last that was acknowledged" in nsqlookupd.log
    assert "start once with --accept-older-store" in nsqlookupd.log
    _, url = with_store(daemons, tmp_path / "store", "--accept-older-store")

    async def later(store: EtcdStore) -> None:
        assert [pair.key for pair in (await store.range(ALL)).found] == ["/a", "/b"]
        assert await put(store, "/d") > 1_000_000

    use(later, url)


def test_it_is_for_those_who_may_and_not_for_pages_of_the_web(daemons: Daemons, tmp_path: Path):
    admin, reader = "a" * 32, "b" * 32
    clients = tmp_path / "clients.toml"
    clients.write_text(
        f'[[client]]\nname = "node"\ntoken = "{admin}"\npermissions = ["admin"]\n'
        f'[[client]]\nname = "dashboard"\ntoken = "{reader}"\npermissions = ["read", "publish"]\n'
    )
    clients.chmod(0o600)
    _, url = with_store(daemons, tmp_path / "store", f"--http-auth-tokens-file={clients}")

    async def as_admin(store: EtcdStore) -> None:
        revision = await put(store, "/a")
        async with store.watch(ALL, revision) as watched:
            await put(store, "/b")
            await first(watched)

    async def as_reader(store: EtcdStore) -> None:
        with pytest.raises(StoreRefused, match=r"FORBIDDEN.*permission admin"):
            await store.get("/a")
        async with store.watch(ALL, 1) as watched:
            with pytest.raises(StoreRefused, match="FORBIDDEN"):
                await first(watched)

    async def as_nobody(store: EtcdStore) -> None:
        with pytest.raises(StoreRefused, match="UNAUTHORIZED"):
            await store.get("/a")

    for token, scenario in ((admin, as_admin), (reader, as_reader)):
        (tmp_path / "token").write_text(token)
        use(scenario, url, token=TokenFile(str(tmp_path / "token"), Env()))
    use(as_nobody, url)

    async def page() -> int:
        headers = {"Origin": "https://evil.example", "Authorization": f"Bearer {admin}"}
        asked = Request.to("POST", f"{url}/v3/kv/range", headers, b'{"key":"L2E="}')
        return (await HttpClient().ask(asked, timeout_s=PATIENCE_S)).status

    assert asyncio.run(page()) == 403


def test_what_is_not_obeyed_is_refused(embedded: str):
    async def ask(path: str, body: bytes) -> tuple[int, bytes]:
        asked = Request.to("POST", f"{embedded}{path}", {}, body)
        status, _, answer = await HttpClient().ask(asked, timeout_s=PATIENCE_S)
        return status, answer

    async def scenario() -> None:
        for path, body, what in (
            ("/v3/kv/range", b'{"key":"YQ==","sort_order":"DESCEND"}', b"sort_order"),
            ("/v3/kv/range", b'{"key":"/w=="}', b"UTF-8"),
            ("/v3/kv/range", b'{"key":"YQ==","revision":"99999999"}', b"still to come"),
            ("/v3/kv/range", b"{bad", b"not understood"),
            ("/v3/kv/txn", b'{"compare":[{"key":"YQ==","target":"LEASE"}]}', b"only MOD and VALUE"),
            ("/v3/kv/txn", b'{"success":[{}]}', b"an operation is one of"),
            ("/v3/watch", b'{"create_request":{"key":"YQ==","filters":["NOPUT"]}}', b"filters"),
            ("/v3/watch", b'{"cancel_request":{"watch_id":"1"}}', b"cancel_request"),
            ("/v3/lease/grant", b'{"TTL":"0"}', b"must be 1 to 86400 s"),
        ):
            status, answer = await ask(path, body)
            assert status == 400 and what in answer and b'"code":3' in answer, (path, body, answer)
        assert (await ask("/v3/kv/txn", b"x" * 3_000_000))[0] == 413

    asyncio.run(scenario())


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_a_change_without_an_answer_may_be_carried_out_and_is_found_out(url: str):
    with Proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy:

        async def scenario(store: EtcdStore) -> None:
            direct = EtcdStore(Env(), EtcdOptions([url], **PATIENT))
            before = (await swap(direct, "/unknown/state", None, b"first")).now
            proxy.down.is_dropped = True
            with pytest.raises(OutcomeUnknown):
                await swap(store, "/unknown/state", before, b"second", tries=1)
            while (now := await direct.get("/unknown/state")) == before:
                await asyncio.sleep(0.01)
            assert now is not None and now.value == b"second"

            swapping = asyncio.ensure_future(swap(store, "/unknown/state", now, b"third", tries=100))
            while await direct.get("/unknown/state") == now:
                await asyncio.sleep(0.01)
            proxy.heal()
            swapped = await swapping
            assert swapped.fate is Fate.APPLIED and swapped.now is not None
            assert (swapped.now.value, swapped.now.version) == (b"third", 3), "carried out once"
            await direct.close()

        use(scenario, "http://{}:{}".format(*proxy.address), try_timeout_s=1.0, timeout_s=PATIENCE_S)


def test_a_watch_leaves_an_endpoint_that_the_network_is_silent_about(url: str):
    with Proxy(("127.0.0.1", int(url.rpartition(":")[2]))) as proxy:

        async def scenario(store: EtcdStore) -> None:
            direct = EtcdStore(Env(), EtcdOptions([url], **PATIENT))
            start = await put(direct, "/silent/start")
            async with store.watch(Span.of_prefix("/silent/"), start) as watched:
                await put(direct, "/silent/a")
                assert [event.key for event in (await first(watched)).events] == ["/silent/a"]
                proxy.down.is_dropped = True
                await put(direct, "/silent/b")
                await put(direct, "/silent/c")
                assert [event.key for event in await take(watched, 2)] == ["/silent/b", "/silent/c"]
            assert store.endpoints[0] == url.removeprefix("http://")
            await direct.close()

        use(scenario, "http://{}:{}".format(*proxy.address), url, try_timeout_s=1.0, timeout_s=PATIENCE_S)


def test_a_watch_and_a_lease_survive_a_restart_of_etcd(tmp_path: Path):
    etcd = Etcd(tmp_path, "one")
    try:
        etcd.launch().wait()

        async def scenario(store: EtcdStore) -> None:
            async with holding(store, "k", SystemClock(), 60) as held:
                revision = await put(store, "/held", b"", held.lease_id)
                async with store.watch(ALL, revision) as watched:
                    await put(store, "/a")
                    assert [event.key for event in (await first(watched)).events] == ["/a"]
                    etcd.kill()
                    etcd.restart()
                    assert (await swap(store, "/b", None, b"", tries=100)).fate is Fate.APPLIED
                    assert [event.key for event in (await first(watched)).events] == ["/b"]
                await held.renew()

        use(scenario, etcd.url)
    finally:
        etcd.discard()


def test_a_flood_that_holds_the_loop_costs_no_lease(url: str):
    """A turn of the loop takes 0.8 s, for twice as long as the lease is."""

    async def scenario(store: EtcdStore) -> None:
        clock = SystemClock()
        async with holding(store, "k", clock, 3) as held:
            await put(store, "/flood", b"", held.lease_id)
            begun_ns = clock.boottime_ns()
            while clock.boottime_ns() < begun_ns + 6_000_000_000:
                await asyncio.sleep(0)
                threading.Event().wait(0.8)
                assert held.is_held, held.failure
            pair = await store.get("/flood")
            assert pair is not None and pair.version == 1

    use(scenario, url)


def test_many_idle_watches_ask_one_question_a_second_at_most(url: str, monkeypatch: pytest.MonkeyPatch):
    """etcd says nothing by itself over this gateway; nsqlookupd does, and is asked nothing where it is not slow."""
    asked: list[float] = []
    ask = EtcdStore._ask_at

    async def counted(store: EtcdStore, *args: Any) -> Any:
        asked.append(time.monotonic())
        return await ask(store, *args)

    async def scenario(store: EtcdStore) -> None:
        revision = await put(store, "/idle")
        async with AsyncExitStack() as stack:
            watches = [await stack.enter_async_context(store.watch(ALL, revision)) for _ in range(20)]
            await asyncio.sleep(1)
            monkeypatch.setattr(EtcdStore, "_ask_at", counted)
            begun = time.monotonic()
            await asyncio.sleep(4)
            seconds = time.monotonic() - begun
            assert len(asked) <= seconds + 1
            last = await put(store, "/idle")
            for watched in watches:
                assert (await first(watched)).revision == last

    use(scenario, url)


def test_a_compaction_during_a_watch_makes_its_reader_begin_again(tmp_path: Path):
    etcd = Etcd(tmp_path, "one")
    try:
        etcd.launch().wait()

        async def compact(revision: int) -> None:
            body = b'{"revision":"%d","physical":true}' % revision
            asked = Request.to("POST", f"{etcd.url}/v3/kv/compaction", {}, body)
            assert (await HttpClient().ask(asked, timeout_s=PATIENCE_S)).status == 200

        async def scenario(store: EtcdStore) -> None:
            start = await put(store, "/a")
            await put(store, "/b")
            deleted = (await swap(store, "/b", await store.get("/b"), None)).revision
            await compact(deleted)
            with pytest.raises(Compacted):
                async with store.watch(ALL, start) as watched:
                    await first(watched)
            # etcd 3.5.1 forgets a deletion at the very revision that it compacts, and would say nothing
            with pytest.raises(Compacted):
                async with store.watch(ALL, deleted - 1) as watched:
                    await first(watched)
            async with store.watch(ALL, deleted) as watched:
                last = await put(store, "/c")
                assert (await first(watched)).revision == last
                await compact(last)  # a watch that is level is not disturbed
                await put(store, "/d")
                assert [event.key for event in (await first(watched)).events] == ["/d"]
            following = follow(store, ALL)
            snapshot = await anext(following)
            assert isinstance(snapshot, Snapshot)
            assert [pair.key for pair in snapshot.found] == ["/a", "/c", "/d"]
            await following.aclose()

        use(scenario, etcd.url)
    finally:
        etcd.discard()


@pytest.fixture(scope="module")
def members(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Etcd]]:
    """An etcd of three."""
    directory = tmp_path_factory.mktemp("members")
    members = [Etcd(directory, f"m{number}") for number in range(3)]
    cluster = ",".join(f"{member.name}={member.peer_url}" for member in members)
    try:
        for member in members:
            member.launch(cluster)
        yield [member.wait() for member in members]
    finally:
        for member in members:
            member.discard()


async def leader_first(members: list[Etcd]) -> list[Etcd]:
    """The members, the leader first; waits until there is one."""
    while True:
        ids = {}
        leaders = set()
        for member in members:
            asked = Request.to("POST", f"{member.url}/v3/maintenance/status", {}, b"{}")
            status, _, body = await HttpClient().ask(asked, timeout_s=PATIENCE_S)
            if status == 200:
                fields = json.loads(body)
                ids[fields["header"]["member_id"]] = member
                leaders.add(fields.get("leader", "0"))
        if len(leaders) == 1 and (found := ids.get(leaders.pop())) is not None:
            return [found, *(member for member in members if member is not found)]
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=lambda number: number.name)
def test_the_leader_of_three_goes_and_nothing_is_lost_or_told_twice(members: list[Etcd], number: signal.Signals):
    leader, *others = asyncio.run(leader_first(members))
    begun = time.monotonic()

    async def scenario(store: EtcdStore) -> None:
        prefix = f"/{number.name}/"
        start = await put(store, prefix + "start")
        async with store.watch(Span.of_prefix(prefix), start) as watched:
            keys = [f"{prefix}{count:02d}" for count in range(20)]
            for count, key in enumerate(keys):
                if count == 10:
                    assert [event.key for event in await take(watched, 10)] == keys[:10]
                    assert store.endpoints[0] == f"127.0.0.1:{leader.port}"
                    leader.kill() if number == signal.SIGKILL else leader.signal(signal.SIGSTOP)
                while True:
                    try:
                        swapped = await swap(store, key, None, key.encode())
                        break
                    except (OutcomeUnknown, StoreUnavailable):
                        current = await store.get(key)
                        if current is not None:
                            break
                else:
                    assert swapped.fate is Fate.APPLIED
            assert store.endpoints[0] != f"127.0.0.1:{leader.port}"
            assert [event.key for event in await take(watched, 10)] == keys[10:]

    try:
        use(scenario, leader.url, *(other.url for other in others), try_timeout_s=1.0, timeout_s=PATIENCE_S)
    finally:
        if number == signal.SIGKILL:
            leader.restart().wait()
        else:
            leader.signal(signal.SIGCONT)
    assert time.monotonic() - begun < 4 * PATIENCE_S


def test_a_watch_does_not_stay_with_a_stopped_member(members: list[Etcd]):
    """Its connection stays, and says nothing for ever."""
    stopped, *others = asyncio.run(leader_first(members))[::-1]  # not the leader

    async def scenario(store: EtcdStore) -> None:
        start = await put(store, "/stopped/start")
        async with store.watch(Span.of_prefix("/stopped/"), start) as watched:
            await put(store, "/stopped/a")
            await first(watched)
            other = EtcdStore(Env(), EtcdOptions([each.url for each in others], **PATIENT))
            stopped.signal(signal.SIGSTOP)
            await put(other, "/stopped/b")
            assert [event.key for event in (await first(watched)).events] == ["/stopped/b"]
            await other.close()

    try:
        use(scenario, stopped.url, *(other.url for other in others), try_timeout_s=1.0)
    finally:
        stopped.signal(signal.SIGCONT)


def test_endpoints_of_two_stores_are_not_mixed(etcd: Etcd, embedded: str):
    async def scenario(store: EtcdStore) -> None:
        await put(store, "/mixed", b"1")
        store._failed(store._line[0])
        with pytest.raises(OutcomeUnknown, match="belongs to store"):
            await put(store, "/mixed", b"2")
        pair = await store.get("/mixed")
        assert pair is not None and pair.value == b"1"

    use(scenario, embedded, etcd.url)


def test_users_and_passwords_and_a_token_that_is_refused(tmp_path: Path):
    etcd = Etcd(tmp_path, "one", "--auth-token-ttl=1")
    try:
        etcd.launch().wait()

        async def enable(store: EtcdStore) -> None:
            await put(store, "/a")
            for path, body in (
                ("user/add", b'{"name":"root","password":"secret"}'),
                ("user/grant", b'{"user":"root","role":"root"}'),
                ("user/add", b'{"name":"joe","password":"secret"}'),
                ("enable", b"{}"),
            ):
                asked = Request.to("POST", f"{etcd.url}/v3/auth/{path}", {}, body)
                assert (await HttpClient().ask(asked, timeout_s=PATIENCE_S)).status == 200

        async def as_root(store: EtcdStore) -> None:
            revision = await put(store, "/b")
            async with store.watch(ALL, revision) as watched:
                await put(store, "/c")
                await first(watched)
                store._token = "outdated.1"
                await put(store, "/d")
                assert [event.key for event in (await first(watched)).events] == ["/d"]
            store._token = "outdated.2"
            async with store.watch(ALL, revision) as watched:
                assert [event.key for event in await take(watched, 2)] == ["/c", "/d"]
            etcd.kill()  # which forgets all tokens
            etcd.restart()
            etcd.wait()
            assert await store.get("/d") is not None

        async def as_joe(store: EtcdStore) -> None:
            with pytest.raises(StoreRefused, match="permission denied"):
                await store.get("/a")

        async def refused(store: EtcdStore) -> None:
            with pytest.raises(StoreRefused, match=r"authentication failed.*correct user|user name is empty.*give its"):
                await store.get("/a")

        use(enable, etcd.url, user="root", password="whatever")
        use(as_root, etcd.url, user="root", password="secret")
        use(as_joe, etcd.url, user="joe", password="secret")
        use(refused, etcd.url, user="root", password="wrong")
        use(refused, etcd.url)
    finally:
        etcd.discard()


def test_what_a_user_may_not_do_is_said_with_what_it_needs(tmp_path: Path):
    etcd = Etcd(tmp_path, "one")
    advice = (
        r"permission denied; user 'joe' of the store needs .* readwrite on the prefix /flintmq/c/: etcdctl role "
        r"grant-permission ROLE readwrite /flintmq/c/ --prefix, and etcdctl user grant-role joe ROLE"
    )
    key = Keys("c").check
    try:
        etcd.launch().wait()
        for name in ("root", "joe"):
            etcd.change("auth/user/add", b'{"name":"%b","password":"secret"}' % name.encode())
        etcd.change("auth/user/grant", b'{"user":"root","role":"root"}')
        etcd.change("auth/enable", b"{}")

        async def as_joe(store: EtcdStore) -> None:
            for asked in (store.get(key), put(store, key), _first_of(store, Keys("c").all)):
                with pytest.raises(StoreRefused, match=advice):
                    await asked

        use(as_joe, etcd.url, user="joe", password="secret", prefix=Keys("c").prefix)
    finally:
        etcd.discard()


async def _first_of(store: EtcdStore, span: Span) -> object:
    async with store.watch(span, 1) as watched:
        return await first(watched)


def test_a_password_that_is_changed_ends_an_idle_watch_and_the_address_is_said_once(tmp_path: Path):
    etcd = Etcd(tmp_path, "one")
    try:
        etcd.launch().wait()
        etcd.change("auth/user/add", b'{"name":"root","password":"secret"}')
        etcd.change("auth/user/grant", b'{"user":"root","role":"root"}')
        etcd.change("auth/enable", b"{}")

        async def scenario(store: EtcdStore) -> None:
            revision = await put(store, "/a")
            async with store.watch(ALL, revision) as watched:
                await put(store, "/b")
                await first(watched)
                body = b'{"name":"root","password":"another"}'
                asked = Request.to("POST", f"{etcd.url}/v3/auth/user/changepw", {"Authorization": store._token}, body)
                assert (await HttpClient().ask(asked, timeout_s=PATIENCE_S)).status == 200
                with pytest.raises(StoreRefused, match=r"does not let user 'root' in: .*; correct") as raised:
                    await first(watched)
                assert str(raised.value).count(f"127.0.0.1:{etcd.port}") == 1

        use(scenario, etcd.url, user="root", password="secret", probe_s=0.2)
    finally:
        etcd.discard()


def test_a_password_is_changed_without_a_restart(tmp_path: Path):
    """In the file first, so that nothing is refused meanwhile; or in etcd first, until the file has it as well."""
    etcd = Etcd(tmp_path, "one")
    path = tmp_path / "password"
    path.write_text("first\n")

    async def change(store: EtcdStore, password: str) -> None:
        body = json.dumps({"name": "root", "password": password}).encode()
        asked = Request.to("POST", f"{etcd.url}/v3/auth/user/changepw", {"Authorization": store._token}, body)
        assert (await HttpClient().ask(asked, timeout_s=PATIENCE_S)).status == 200

    def write(password: str) -> None:
        (tmp_path / "new").write_text(f"{password}\n")
        (tmp_path / "new").replace(path)

    async def scenario(store: EtcdStore) -> None:
        revision = await put(store, "/a")
        async with store.watch(ALL, revision) as watched:
            await put(store, "/b")
            await first(watched)
            write("another one")
            store._token = "outdated.1"
            assert await store.get("/b") is not None, "etcd has the one before yet"
            await change(store, "another one")
            await put(store, "/c")
            assert [event.key for event in (await first(watched)).events] == ["/c"]
        await change(store, "third")
        with pytest.raises(StoreRefused, match=r"does not let user 'root' in: .*; correct"):
            await store.get("/c")
        write("third")
        assert await store.get("/c") is not None

    try:
        etcd.launch().wait()
        etcd.change("auth/user/add", b'{"name":"root","password":"first"}')
        etcd.change("auth/user/grant", b'{"user":"root","role":"root"}')
        etcd.change("auth/enable", b"{}")
        use(scenario, etcd.url, user="root", password_source=PasswordFile(str(path), Env()))
    finally:
        etcd.discard()


def test_a_full_etcd_is_read_and_says_that_it_takes_no_writes(tmp_path: Path):
    etcd = Etcd(tmp_path, "one")
    try:
        etcd.launch().wait()

        async def scenario(store: EtcdStore) -> None:
            revision = await put(store, "/a")
            lease = await store.grant(60)
            etcd.fill(True)
            never = Txn((Compare("/a", 1),), (Put("/a", b""),))
            began = asyncio.get_running_loop().time()
            for asked in (put(store, "/a"), store.txn(never), store.grant(60)):
                with pytest.raises(StoreFull, match=r"^etcdserver: mvcc: database space exceeded; make room: etcdctl"):
                    await asked
            assert asyncio.get_running_loop().time() - began > 3 * FULL_PAUSE_S, (
                "who asks again and again does not flood it"
            )
            assert await store.get("/a") is not None and await store.keepalive(lease.lease_id) > 0
            etcd.fill(False)
            assert not (await store.txn(never)).succeeded
            assert (await store.range(ALL)).revision == revision, "nothing was written"

        use(scenario, etcd.url)
    finally:
        etcd.discard()


def test_the_addresses_and_files_of_an_option_are_enough_for_a_secured_etcd(tmp_path: Path, daemons: Daemons):
    """Two addresses, of which one is nobody's; TLS with certificates of both sides; user, and password in a file."""
    certificates = Certificates(tmp_path / "certificates")
    server, client = certificates.server, certificates.client("good")
    flags = (
        f"--cert-file={server.cert}",
        f"--key-file={server.key}",
        "--client-cert-auth",
        f"--trusted-ca-file={certificates.ca}",
    )
    etcd = Etcd(tmp_path, "one", *flags, scheme="https")
    for name, text in (("password", "secret\n"), ("wrong", "guess\n")):
        (tmp_path / name).write_text(text)
    addresses = ["https://root@127.0.0.1:1", etcd.url.replace("://", "://root@")]

    nameless = certificates._leaf("nameless", certificates._ca, "client.example")

    def opened(password: str, shown: Files = nameless) -> EtcdStore:
        files = StoreFiles(str(tmp_path / password), certificates.ca, shown.cert, shown.key)
        return open_store(Env(), addresses, None, files)

    async def until_answered(ask: Callable[[], Awaitable[Any]]) -> Any:
        while True:  # a busy machine may take longer than the deadline of a call
            try:
                return await ask()
            except (OutcomeUnknown, StoreUnavailable):
                continue

    async def scenario() -> None:
        context = client_context(certificates.ca, cert=client.cert, key=client.key)
        for path, body in (
            ("user/add", b'{"name":"root","password":"secret"}'),
            ("user/grant", b'{"user":"root","role":"root"}'),
            ("enable", b"{}"),
        ):
            asked = Request.to("POST", f"{etcd.url}/v3/auth/{path}", {}, body)
            assert (await HttpClient().ask(asked, timeout_s=PATIENCE_S, context=context)).status == 200
        store = opened("password")
        await until_answered(lambda: put(store, "/a"))
        revision = await until_answered(lambda: put(store, "/a"))
        async with store.watch(ALL, revision - 1) as watched:
            assert [event.key for event in (await first(watched)).events] == ["/a"]
        await store.close()
        for store, text in (
            (opened("wrong"), "does not let user 'root' in: .*; correct user and password"),
            (opened("password", client), "takes only a client certificate without a common name"),
        ):
            with pytest.raises(StoreRefused, match=text):
                await until_answered(partial(store.get, "/a"))
            await store.close()

    try:
        etcd.launch().wait()
        asyncio.run(scenario())
        with pytest.raises(AssertionError, match=r"--cluster-store: .* is of no use: the addresses name no user"):
            daemons.nsqlookupd(
                f"--cluster-store={etcd.url}",
                f"--cluster-store-password-file={tmp_path / 'wrong'}",
                f"--cluster-store-root-ca-file={certificates.ca}",
            )
    finally:
        etcd.discard()


def test_a_stranger_reaches_nothing_of_the_store(daemons: Daemons, tmp_path: Path):
    """Whoever has no token, or one without the permission admin, can neither read nor write, by any request."""
    reader = "b" * 32
    clients = tmp_path / "clients.toml"
    clients.write_text(f'[[client]]\nname = "dashboard"\ntoken = "{reader}"\npermissions = ["read", "publish"]\n')
    clients.chmod(0o600)
    _, url = with_store(daemons, tmp_path / "store", f"--http-auth-tokens-file={clients}")
    paths = [path for _, path in STORE_TABLE]
    assert len(paths) == len({*paths, wire.RANGE, wire.TXN, wire.WATCH, wire.LEASE_GRANT, wire.LEASE_REVOKE})

    async def scenario() -> None:
        for path in paths:
            for headers, status in (({}, 401), ({"Authorization": f"Bearer {reader}"}, 403)):
                asked = Request.to("POST", f"{url}{path}", headers, b"{}")
                answer = await HttpClient().ask(asked, timeout_s=PATIENCE_S)
                assert answer.status == status, (path, headers, answer)

    asyncio.run(scenario())


def test_tls_with_client_certificates(tmp_path: Path):
    certificates = Certificates(tmp_path / "certificates")
    server, client = certificates.server, certificates.client("good")
    flags = (
        f"--cert-file={server.cert}",
        f"--key-file={server.key}",
        "--client-cert-auth",
        f"--trusted-ca-file={certificates.ca}",
    )
    etcd = Etcd(tmp_path, "one", *flags, scheme="https")
    try:
        etcd.launch().wait()

        async def known(store: EtcdStore) -> None:
            revision = await put(store, "/a")
            async with store.watch(ALL, revision) as watched:
                await put(store, "/b")
                await first(watched)

        async def unknown(store: EtcdStore) -> None:
            with pytest.raises((StoreUnavailable, OutcomeUnknown)):
                await put(store, "/a")

        context, nobodys = (
            client_context(certificates.ca, cert=client.cert, key=client.key),
            client_context(certificates.ca),
        )
        use(known, etcd.url, context=lambda: context)
        use(unknown, etcd.url, context=lambda: nobodys, timeout_s=1.0)

        async def in_clear(store: EtcdStore) -> None:
            with pytest.raises(StoreUnavailable, match=r"if this port speaks TLS, its address is https://127\.0\.0"):
                await store.get("/a")

        use(in_clear, etcd.url.replace("https:", "http:"), timeout_s=1.0)
    finally:
        etcd.discard()


def test_a_watcher_that_does_not_read_is_not_buffered_for(daemons: Daemons, tmp_path: Path):
    """What it has not read stays in the store's history, of which there is one for all."""
    nsqlookupd, url = with_store(daemons, tmp_path / "store")
    with socket.create_connection(("127.0.0.1", nsqlookupd.http[1])) as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = b'{"create_request":{"key":"AA==","range_end":"AA==","start_revision":"1"}}'
        deaf.sendall(b"POST /v3/watch HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

        async def scenario(store: EtcdStore) -> None:
            before = _memory_bytes(nsqlookupd.pid)
            for number in range(120):
                await put(store, "/same", b"%d" % number * 80_000)
            # 120 values of up to 240 kB in base64 would be 35 MB in its buffer; the history has 32 MiB at most
            assert _memory_bytes(nsqlookupd.pid) - before < 70_000_000
            async with store.watch(ALL, 1) as watched:
                while not (await first(watched)).events[-1].now.value.startswith(b"119119"):
                    pass

        use(scenario, url)
    wait_until(lambda: nsqlookupd.is_running)


def _memory_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[1]) * 4096
