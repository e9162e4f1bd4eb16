"""Visitors: roles by password, token and header; sessions, what forms send back, and who guesses."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path

import pytest

from flintmq.env import Env
from flintmq.net.http_auth import FAILURE_COUNT_MAX
from flintmq.nsqadmin.access import COOKIE, Access, UsersFileError, Visitor, fits, hash_password
from flintmq.nsqadmin.errors import Refused
from flintmq.nsqadmin.options import NsqadminOptions
from flintmq.options import HOUR
from flintmq.testing.clock import ManualClock

PEER = "10.0.0.9:5000"
TOKEN = "0123456789abcdef"
SALT = b"salt" * 4
_counter = iter(range(10**9))


def secret(size: int) -> bytes:
    return hashlib.shake_256(str(next(_counter)).encode()).digest(size)


def users_file(tmp_path: Path, *users: dict[str, object]) -> str:
    path = tmp_path / "users.json"
    path.write_text(json.dumps({"user": list(users)}))
    return str(path)


def access_with(clock: ManualClock | None = None, **options: object) -> Access:
    found = NsqadminOptions(lookupd_http_address=("127.0.0.1:4161",), **options)  # type: ignore[arg-type]
    return Access(found, Env(clock=clock or ManualClock()), secret)


async def visit(
    access: Access, headers: dict[str, str] | None = None, cookie: str = "", address: str = PEER
) -> Visitor:
    return await access.visitor_of(headers or {}, {COOKIE: cookie} if cookie else {}, address)


async def test_without_users_everybody_may_everything_as_with_nsq():
    access = access_with()
    visitor = await visit(access)
    assert (visitor.role, visitor.how) == ("admin", "open")
    assert access.is_open


async def test_an_admin_user_is_named_by_the_proxy_and_the_others_may_look():
    access = access_with(admin_user=("ann",))
    assert (await visit(access)).role == "read"
    assert (await visit(access, {"x-forwarded-user": "ann"})).role == "admin"
    assert (await visit(access, {"x-forwarded-user": "Ann"})).role == "read"
    assert not access.is_open


async def test_only_the_proxies_that_are_named_are_believed():
    access = access_with(admin_user=("ann",), acl_from_cidr=("10.0.0.0/24",), acl_http_header="X-User")
    assert (await visit(access, {"x-user": "ann"})).role == "admin"
    assert (await visit(access, {"x-user": "ann"}, address="10.0.1.9:5000")).role == "read"


async def test_a_password_opens_a_session_that_ends_with_its_lifetime(tmp_path: Path):
    clock = ManualClock()
    path = users_file(tmp_path, {"name": "ann", "role": "operate", "password": hash_password("sesame", SALT)})
    access = access_with(clock, users_file=path, session_lifetime_ns=HOUR)
    assert (await visit(access)).role == "none"
    cookie = await access.log_in("ann", "sesame", PEER)
    visitor = await visit(access, cookie=cookie)
    assert (visitor.name, visitor.role, visitor.how, visitor.sees_bodies) == ("ann", "operate", "password", True)
    assert visitor.may("read") and not visitor.may("admin")
    with pytest.raises(Refused, match="this needs admin"):
        visitor.require("admin")
    clock.advance(HOUR)
    assert (await visit(access, cookie=cookie)).role == "none"


async def test_whoever_logs_out_needs_to_log_in_again(tmp_path: Path):
    path = users_file(tmp_path, {"name": "ann", "role": "read", "password": hash_password("sesame", SALT)})
    access = access_with(users_file=path)
    cookie = await access.log_in("ann", "sesame", PEER)
    access.log_out(cookie)
    assert (await visit(access, cookie=cookie)).role == "none"


@pytest.mark.parametrize(("name", "password"), [("ann", "wrong"), ("bob", "sesame"), ("ann", "")])
async def test_a_wrong_name_is_refused_as_a_wrong_password_is(tmp_path: Path, name: str, password: str):
    path = users_file(tmp_path, {"name": "ann", "role": "read", "password": hash_password("sesame", SALT)})
    with pytest.raises(Refused) as refused:
        await access_with(users_file=path).log_in(name, password, PEER)
    assert (refused.value.status, refused.value.text) == (401, "the name or the password is wrong")


async def test_whoever_guesses_tokens_is_slowed_down_and_nobody_else(tmp_path: Path):
    path = users_file(tmp_path, {"name": "script", "role": "admin", "token": TOKEN})
    access = access_with(users_file=path)
    for number in range(FAILURE_COUNT_MAX):
        with pytest.raises(Refused) as refused:
            await visit(access, {"authorization": f"Bearer guess-{number}-guess-guess"})
        assert refused.value.status == 401
    with pytest.raises(Refused) as refused:
        await visit(access, {"authorization": f"Bearer {TOKEN}"})
    assert refused.value.status == 429
    visitor = await visit(access, {"authorization": f"Bearer {TOKEN}"}, address="10.0.0.8:1")
    assert (visitor.name, visitor.role, visitor.how) == ("script", "admin", "token")


async def test_whoever_guesses_passwords_is_slowed_down(tmp_path: Path):
    quick = f"scrypt$1024$1$1${'A' * 22}==${'A' * 43}="
    access = access_with(users_file=users_file(tmp_path, {"name": "ann", "role": "read", "password": quick}))
    for number in range(FAILURE_COUNT_MAX):
        with pytest.raises(Refused) as refused:
            await access.log_in("ann", f"guess {number}", PEER)
        assert refused.value.status == 401
    with pytest.raises(Refused) as refused:
        await access.log_in("ann", "guess", PEER)
    assert refused.value.status == 429


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("203.0.113.7", "203.0.113.7"),
        ("198.51.100.1, 203.0.113.7", "203.0.113.7"),  # the entries before the last are the visitor's own words
        ("198.51.100.1,203.0.113.7:4711", "203.0.113.7"),
        ("2001:db8::1", "2001:db8::1"),
        ("unknown, [2001:DB8::1]", "2001:db8::1"),
        ("[2001:db8::1]:443", "2001:db8::1"),
        ("203.0.113.7,", ""),
        ("203.0.113.7, unknown", ""),
        ("203.0.113", ""),
        ("fe80::1%eth0", ""),
        ("", ""),
        ("1:" + "9" * 5000, ""),
        ("203.0.113.7\x00", ""),
    ],
)
def test_the_address_of_a_visitor_is_what_the_proxy_has_put_last(said: str, found: str):
    access = access_with(acl_from_cidr=("10.0.0.0/24",))
    assert access.forwarded_for(said, PEER) == found
    assert access.forwarded_for(said, "10.0.1.9:5000") == ""
    assert access_with().forwarded_for(said, PEER) == "", "no proxy is named"


async def test_a_guesser_behind_a_proxy_slows_down_nobody_else_behind_it(tmp_path: Path):
    path = users_file(tmp_path, {"name": "script", "role": "admin", "token": TOKEN})
    access = access_with(users_file=path, acl_from_cidr=("10.0.0.0/24",))
    guesser, other = "203.0.113.7", "203.0.113.8"
    for number in range(FAILURE_COUNT_MAX):
        with pytest.raises(Refused):
            await access.visitor_of({"authorization": f"Bearer guess-{number}-guess-guess"}, {}, PEER, guesser)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    with pytest.raises(Refused) as refused:
        await access.visitor_of(bearer, {}, PEER, guesser)
    assert refused.value.status == 429
    visitor = await access.visitor_of(bearer, {}, PEER, other)
    assert (visitor.name, visitor.address, visitor.forwarded_for, visitor.source) == ("script", PEER, other, other)


async def test_whoever_is_only_said_to_be_somebody_is_not_known(tmp_path: Path):
    users: list[dict[str, object]] = [
        {"name": name, "role": "read", "token": TOKEN + name, "header": name == "ann"} for name in ("ann", "bob")
    ]
    access = access_with(users_file=users_file(tmp_path, *users), default_role="read", admin_user=("eve",))
    for headers, is_known in (
        ({}, False),
        ({"x-forwarded-user": "mallory"}, False),
        ({"x-forwarded-user": "bob"}, False),
        ({"x-forwarded-user": "ann"}, True),
        ({"x-forwarded-user": "eve"}, True),
        ({"authorization": f"Bearer {TOKEN}bob"}, True),
    ):
        assert (await visit(access, headers)).is_known is is_known, headers


async def test_what_a_form_sends_back_is_of_this_visitor_and_never_the_same_twice(tmp_path: Path):
    path = users_file(
        tmp_path,
        {"name": "ann", "role": "admin", "password": hash_password("sesame", SALT)},
        {"name": "bob", "role": "admin", "header": True},
    )
    access = access_with(users_file=path)
    cookie = await access.log_in("ann", "sesame", PEER)
    ann, again = await visit(access, cookie=cookie), await visit(access, cookie=cookie)
    bob = await visit(access, {"x-forwarded-user": "bob"})
    assert ann.csrf != again.csrf
    cookies = {COOKIE: cookie}
    assert access.checks_out(ann.csrf, again, cookies)
    assert not access.checks_out(bob.csrf, ann, cookies)
    assert not access.checks_out(ann.csrf, bob, {})
    for wrong in ("", "00", "zz" * 32, ann.csrf[:-2], ann.csrf[:-2] + ("00" if ann.csrf[-2:] != "00" else "01")):
        assert not access.checks_out(wrong, ann, cookies)


async def test_bodies_are_shown_from_the_role_on_that_may_see_them():
    assert not (await visit(access_with(default_role="read"))).sees_bodies
    assert (await visit(access_with(default_role="read", bodies_role="read"))).sees_bodies
    assert not (await visit(access_with(default_role="operate", bodies_role="admin"))).sees_bodies


async def test_a_file_that_changes_is_read_again_and_one_that_is_broken_changes_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    clock = ManualClock()
    path = users_file(tmp_path, {"name": "script", "role": "read", "token": TOKEN})
    access = access_with(clock, users_file=path)
    bearer = {"authorization": f"Bearer {TOKEN}"}
    users_file(tmp_path, {"name": "script", "role": "admin", "token": TOKEN})
    os.utime(path, ns=(1, 1))
    clock.advance(2 * 10**9)
    assert (await visit(access, bearer)).role == "admin"
    Path(path).write_text("{")
    clock.advance(2 * 10**9)
    assert (await visit(access, bearer)).role == "admin"
    assert "nothing changes until it is put right" in caplog.text


@pytest.mark.parametrize(
    ("user", "said"),
    [
        (
            {"name": "ann", "role": "king", "token": TOKEN},
            "role of 'ann' must be one of read, operate, admin, and not 'king'",
        ),
        ({"name": "ann", "role": "none", "token": TOKEN}, "one of read, operate, admin"),
        ({"name": "ann", "token": TOKEN}, "role of 'ann' must be one of read, operate, admin$"),
        ({"role": "read", "token": TOKEN}, "user 1 needs a name"),
        ({"name": 7, "role": "read", "token": TOKEN}, "name of user 1 must be text in quotes"),
        ({"name": "ann", "role": ["read"], "token": TOKEN}, "role of 'ann' must be text in quotes"),
        ({"name": "ann", "role": "read", "header": "yes"}, "header of 'ann' must be true or false"),
        ({"name": "ann", "role": "read"}, "needs a password, a token"),
        ({"name": "", "role": "read", "token": TOKEN}, "1 to 64 characters"),
        ({"name": "a\nb", "role": "read", "token": TOKEN}, "1 to 64 characters"),
        ({"name": "ann", "role": "read", "token": "short"}, "16 to 512"),
        ({"name": "ann", "role": "read", "sha256": "12"}, "64 hex digits"),
        ({"name": "ann", "role": "read", "password": "sesame"}, "must be a hash"),
        ({"name": "ann", "role": "read", "password": f"scrypt$4194304$8$1${'A' * 24}${'A' * 44}"}, "must be a hash"),
        (
            {"name": "ann", "role": "read", "token": TOKEN, "shoe_size": 9},
            "'ann' has 'shoe_size', which is not known; it may have name, role, password, token, sha256, header",
        ),
    ],
)
def test_a_file_that_says_nonsense_stops_the_start(tmp_path: Path, user: dict[str, object], said: str):
    with pytest.raises(UsersFileError, match=said) as refused:
        access_with(users_file=users_file(tmp_path, user))
    assert str(refused.value).startswith(f"--users-file={tmp_path}/users.json: ") and TOKEN not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("u.toml", '[[users]]\nname = "ann"', r"'users' is not known; users are tables called \[\[user\]\]"),
        ("u.toml", '[user]\nname = "ann"', r"users are tables called \[\[user\]\]"),
        ("u.toml", 'user = ["ann"]', r"users are tables called \[\[user\]\]"),
        ("u.json", '[{"name": "ann"}]', 'in JSON objects of a list called "user"'),
        ("u.toml", '[[user]]\nname = "ann"\nrole = read', "at line 3, column"),
        ("u.toml", '\ufeff[[user]]\nname = "ann"\nrole = read', "at line 3, column"),
        (
            "u.toml",
            '[[user]]\nname = "ann"\nrole = "read"\nheader = true\n[[user]]\nrole = "boss"',
            "user 2 needs a name",
        ),
    ],
)
def test_a_file_of_another_form_is_told_the_form(tmp_path: Path, name: str, text: str, said: str):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UsersFileError, match=said):
        access_with(users_file=str(path))


async def test_the_file_of_the_documentation_can_be_used(tmp_path: Path):
    """Each of its users is known by what stands there; what the page leaves out is filled in."""
    page = (Path(__file__).resolve().parents[3] / "docs/nsqadmin.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"^```toml\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    other = TOKEN[::-1]
    digest = hashlib.sha256(TOKEN.encode()).hexdigest()
    for gap, filled in (
        ('"scrypt$16384$8..."', f'"{hash_password("sesame", SALT)}"'),
        ('"5b1f..."', f'"{digest}"'),
        ('# token = "..."', f'token = "{other}"'),
    ):
        assert shown.count(gap) == 1
        shown = shown.replace(gap, filled)
    path = tmp_path / "users.toml"
    path.write_text(shown)
    access = access_with(users_file=str(path))
    assert (await visit(access, cookie=await access.log_in("ann", "sesame", PEER))).role == "admin"
    assert (await visit(access, {"x-forwarded-user": "bob"})).role == "operate"
    for token in (TOKEN, other):
        visitor = await visit(access, {"authorization": f"Bearer {token}"})
        assert (visitor.name, visitor.role) == ("nightly", "read")
    assert (await visit(access)).role == "none"


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path):
    with pytest.raises(UsersFileError, match="cannot be read"):
        access_with(users_file=str(tmp_path / "none.toml"))


def test_a_password_fits_its_hash_alone():
    stored = hash_password("säsame", SALT)
    assert fits("säsame", stored)
    assert not fits("sasame", stored)
    assert not fits("säsame", "säsame")
