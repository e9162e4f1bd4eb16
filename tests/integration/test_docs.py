"""What README and docs/ print is run as printed: every block of Python, every curl, every `flintmq admin`.

Only addresses differ: those of the pages become those of an nsqd and a nsqlookupd made for the example. What a page
takes for granted (a message to consume, a function that bills) stands in the table below; a block that is in no row
fails, so that a new example comes with its test.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, SPARK_PATIENCE_S, wait_until

from flintmq import cli
from flintmq.spark.options import SourceOptions
from flintmq.testing import MemoryNsqd

ROOT = Path(__file__).resolve().parents[2]
PAGES = ["README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")))]


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks_of(page: str) -> list[Block]:
    found: list[Block] = []
    begin = 0
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        if not line.startswith("```"):
            continue
        if begin:
            text = "\n".join(lines[begin : number - 1]) + "\n"
            found.append(Block(page, begin, lines[begin - 1].removeprefix("```"), text))
        begin = 0 if begin else number
    return found


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]


class World:
    """An nsqd with its nsqlookupd, for one example."""

    def __init__(self, nsqd: MemoryNsqd) -> None:
        self.nsqd = nsqd

    def here(self, text: str) -> str:
        """A text of the page with the addresses of this world."""
        nsqd_http = self.nsqd.http_address.removeprefix("http://")
        lookupd_http = self.nsqd.nsqlookupd_http_address.removeprefix("http://")
        addresses = {
            "127.0.0.1:4150": self.nsqd.tcp_address,
            "127.0.0.1:4151": nsqd_http,
            "127.0.0.1:4161": lookupd_http,
            "10.0.0.5:4151": nsqd_http,
            "10.0.0.9:4161": lookupd_http,
        }
        # In one pass: a port of this world may begin as one of the page does.
        return re.sub(r"\b(?:127\.0\.0\.1|10\.0\.0\.\d):41\d\d\b", lambda found: addresses[found[0]], text)

    def post(self, path: str, *, lookupd: bool = False) -> None:
        address = self.nsqd.nsqlookupd_http_address if lookupd else self.nsqd.http_address
        urllib.request.urlopen(address + path, data=b"", timeout=PATIENCE_S).close()


@pytest.fixture
def world() -> Iterator[World]:
    with MemoryNsqd() as nsqd:
        yield World(nsqd)


# -- Python ------------------------------------------------------------------------------------------------------------

# Runs a block, with "await" at its top level if it has any, as python -m asyncio does.
RUN = """
import ast, asyncio, inspect, sys
code = compile(sys.stdin.read(), "example", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
names = {"__name__": "__main__"}
if code.co_flags & inspect.CO_COROUTINE:
    async def main():
        await eval(code, names)
    asyncio.run(main())
else:
    exec(code, names)
"""
CLIENT = "from flintmq import Consumer, Producer\n"
BILL = """
async def bill(body):
    print("handled", body, flush=True)
    return True
charge = insert = bill
"""
BILL_SYNC = "def bill(body):\n    print('handled', body, flush=True)\n"

ORDERED = """
import warnings
warnings.simplefilter("ignore")
from fastapi.testclient import TestClient
with TestClient(app) as client:
    answer = client.post("/orders", json={"id": 1, "items": ["pen"]})
    assert (answer.status_code, answer.json()) == (202, {"id": 1}), answer.text
    assert client.post("/orders", json={"id": "x"}).status_code == 422
"""


def waiting(topic: str, channel: str, *bodies: bytes) -> Callable[[World], None]:
    """Messages that wait in a channel."""

    def prepare(world: World) -> None:
        world.nsqd.create(topic, channel)
        world.nsqd.publish(topic, *bodies)

    return prepare


def topic_of_four(topic: str, parameters: str = "") -> Callable[[World], None]:
    return lambda world: world.post(f"/topic/create?topic={topic}&partition_num=4{parameters}", lookupd=True)


def payments_and_events(world: World) -> None:
    topic_of_four("payments", "&orderedmulti=true")(world)
    topic_of_four("events", "&extend=true")(world)


def two_channels(world: World) -> None:
    world.nsqd.create("orders", "archive")
    waiting("orders", "billing", b'{"id": 1}')(world)


def drained(topic: str, *channels: str) -> Callable[[World, str], bool]:
    return lambda world, said: all(world.nsqd.is_drained(topic, channel) for channel in channels)


def handled(count: int) -> Callable[[World, str], bool]:
    return lambda world, said: said.count("handled") == count


def published(topic: str, *bodies: bytes) -> Callable[[World, str], bool]:
    return lambda world, said: world.nsqd.published(topic) == list(bodies)


@dataclass(frozen=True)
class Example:
    """A block of Python and what is around it.

    Attributes:
        page, phrase: which block: the one that contains the phrase.
        prepare: what there is before.
        before, after: lines that the page takes for granted.
        until: for what runs on for ever: when it has done what it is for, by nsqd and by what it printed.
        then: what holds at the end.
        ended_by: the signal that what runs on for ever is sent then.
    """

    page: str
    phrase: str
    prepare: Callable[[World], None] = lambda world: None
    before: str = ""
    after: str = ""
    until: Callable[[World, str], bool] | None = None
    then: Callable[[World, str], bool] = lambda world, said: True
    ended_by: signal.Signals = signal.SIGINT


EXAMPLES = [
    Example("README.md", "hello again", until=drained("greetings", "readme")),
    Example("docs/admin.md", "LookupdAdmin, NsqdAdmin", waiting("orders", "billing", b"x")),
    Example(
        "docs/admin.md", "from flintmq.sync import NsqdAdmin", waiting("orders", "billing", b"x", b"y"),
        after="print(f'{depth=}')", then=lambda world, said: said == "depth=2\n",
    ),
    Example(
        "docs/admin.md", "https://nsqd-1:4152",
        before="from flintmq import ConnectionOptions\nfrom flintmq.sync import NsqdAdmin\ntoken = 'secret'\n",
    ),
    Example(
        "docs/from-pynsq.md", "nsq.Reader(", waiting("orders", "billing", b"x"), BILL_SYNC,
        until=drained("orders", "billing"),
    ),
    Example(
        "docs/from-pynsq.md", "app = App(", waiting("orders", "billing", b"x"), BILL_SYNC,
        until=drained("orders", "billing"),
    ),
    Example(
        "docs/from-pynsq.md", "writer = nsq.Writer", lambda world: world.nsqd.create("orders"), until=handled(1),
        then=published("orders", b"hello"), ended_by=signal.SIGKILL,  # pynsq looks at signals with its next heartbeat
    ),
    Example("docs/from-pynsq.md", "async with Producer", then=published("orders", b"hello")),
    Example(
        "docs/from-pynsq.md", "gnsq.Consumer(", waiting("orders", "billing", b"x"), BILL_SYNC,
        until=drained("orders", "billing"),
    ),
    Example(
        "docs/from-pynsq.md", "with Consumer(", waiting("orders", "billing", b"x"), BILL_SYNC,
        until=drained("orders", "billing"),
    ),
    Example(
        "docs/from-pynsq.md", "gnsq.Producer(", before="import logging\nlogging.disable()\n",
        then=published("orders", b"hello", b"a", b"b"),
    ),
    Example("docs/from-pynsq.md", "flintmq.sync import Producer", then=published("orders", b"hello", b"a", b"b")),
    Example("docs/web.md", "FastAPI(lifespan", after=ORDERED, then=published("orders", b'{"id":1,"items":["pen"]}')),
    Example(
        "docs/web.md", "app.run()", waiting("orders", "billing", b'{"id":1,"items":["pen"]}', b"{}"),
        "import logging\nlogging.disable()\n",
        until=drained("orders", "billing"),
        then=lambda world, said: said == "handled 1 ['pen']\n" and world.nsqd.published("orders.unreadable") == [b"{}"],
    ),
    Example("docs/client.md", "await producer.dpub", then=published("orders", b'{"id": 1}', b"a", b"b", b"c")),
    Example(
        "docs/client.md", "max_in_flight=200", waiting("orders", "billing", b"x"), BILL,
        until=drained("orders", "billing"), then=handled(1),
    ),
    Example(
        "docs/client.md", "raise Requeue(delay=30)  # again in 30 s", waiting("orders", "billing", b"x"), BILL,
        until=drained("orders", "billing"), then=handled(1),
    ),
    Example(
        "docs/client.md", "async for batch in consumer.batches(1000, timeout=1)", waiting("t", "c", b"x"),
        f"{CLIENT}{BILL}consumer = Consumer('t', 'c', nsqd_tcp_addresses='127.0.0.1:4150')\nawait consumer.start()\n",
        until=drained("t", "c"), then=handled(1),
    ),
    Example("docs/client.md", "start=timedelta(hours=6)", waiting("orders", "report", b"x")),
    Example(
        "docs/client.md", "class Click(Struct)", waiting("clicks", "warehouse", b'{"user":1,"url":"u"}'), CLIENT + BILL,
        until=handled(1), then=lambda world, said: "Click(user=1, url='u')" in said,
    ),
    Example(
        "docs/client.md", "app = App(", two_channels,
        f"{BILL}from msgspec import Struct\nclass Order(Struct):\n    id: int\nclass Invoice(Order):\n    pass\n",
        until=drained("orders", "billing", "archive"), then=published("invoices", b'{"id":1}'),
    ),
    Example(
        "docs/client.md", "def view(request)", waiting("orders", "billing", b"x"), BILL_SYNC,
        until=drained("orders", "billing"), then=handled(1),
    ),
    Example(
        "docs/client.md", "signal.signal(signal.SIGTERM", waiting("orders", "billing", b"x"),
        until=drained("orders", "billing"),
    ),
    Example(
        "docs/client.md", "in the order of the calls of this thread", payments_and_events,
        f"{BILL_SYNC}body, customer = b'x', 7\n", until=handled(2),
    ),
    Example(
        "docs/client.md", "# partitions take turns", payments_and_events,
        f"{CLIENT}{BILL}body, customer = b'x', 7\n", until=handled(4),
    ),
    Example(
        "docs/headers.md", 'headers={"shop": "7"}', topic_of_four("orders", "&extend=true"), f"{CLIENT}body = b'x'\n",
        then=published("orders", b"x"),
    ),
    Example(
        "docs/idempotent.md", "idempotent=True", before="import flintmq, flintmq.sync\n",
        then=published("orders", b"hello", b"a", b"b"),
    ),
    Example(
        "docs/tags.md", 'desired_tag="canary"', lambda world: world.post("/topic/create?topic=orders&extend=true"),
        CLIENT, until=lambda world, said: world.nsqd.counts("orders", "billing").clients == 1,
    ),
]  # fmt: skip
OWN_TESTS = {  # blocks with a test of their own
    ("README.md", "flintmq.spark"),
    ("docs/client.md", '"nsqd.example:4150", options=options'),
    ("docs/lake.md", "DeltaTable"),
    ("docs/spark.md", "flights.selectExpr"),
    ("docs/spark.md", "processingTime="),
    ("docs/spark.md", "withWatermark"),
    ("docs/spark.md", "flights-spool"),
    ("docs/spark.md", "reminders-spool"),
    ("docs/spark.md", "to_json(struct(*))"),
    ("docs/spark.md", "secured = {"),
    ("docs/spark.md", "watch(spark"),
    ("docs/testing.md", "# conftest.py"),
    ("docs/testing.md", "test_orders_become_invoices"),
    ("docs/testing.md", "ManualClock()"),
    ("docs/tracing.md", "decimal(20,0)"),
    ("docs/web.md", "# shop/views.py"),
    ("docs/web.md", "# shop/outbox.py"),
    ("docs/web.md", "# shop/async_views.py"),
}


def block(page: str, phrase: str) -> Block:
    (found,) = (each for each in PYTHON if each.page == page and phrase in each.text)
    return found


def test_every_block_of_python_has_a_test():
    rows = [*((example.page, example.phrase) for example in EXAMPLES), *OWN_TESTS]
    assert sorted(str(block(*row)) for row in rows) == sorted(map(str, PYTHON))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: f"{each.page}-{each.phrase}")
def test_an_example_runs(world: World, example: Example, tmp_path: Path):
    Certificates(tmp_path)  # ca.pem is where the examples look for it
    example.prepare(world)
    code = world.here(example.before + block(example.page, example.phrase).text + example.after)
    (tmp_path / "code.py").write_text(code, encoding="utf-8")
    out, err = tmp_path / "out", tmp_path / "err"
    with (tmp_path / "code.py").open() as stdin, out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN],
            stdin=stdin, stdout=stdout, stderr=stderr, cwd=tmp_path, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
    try:
        until = example.until
        if until is not None:
            wait_until(
                lambda: process.poll() is not None or until(world, out.read_text()), "the example does what it is for"
            )
            assert process.poll() is None, err.read_text()
            process.send_signal(example.ended_by)
        process.wait(PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    said, errors = out.read_text(), err.read_text()
    if example.until is None:
        assert (process.returncode, errors) == (0, ""), errors
    else:
        assert not errors or errors.endswith("\nKeyboardInterrupt\n"), errors
    assert example.then(world, said), said


def test_the_example_of_tls_is_as_the_client_takes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its nsqd is somebody else's; what can be wrong in it are names and files."""
    Certificates(tmp_path)  # ca.pem is where the examples look for it
    monkeypatch.chdir(tmp_path)
    printed = block("docs/client.md", '"nsqd.example:4150", options=options').text
    exec(printed.partition("async with")[0], {})


SERVICE = """
import contextlib
import asyncio
from flintmq import App, Message

@contextlib.asynccontextmanager
async def billing_service(nsqlookupd, drain_timeout=3600):
    app = App(nsqlookupd_http_addresses=nsqlookupd)
    @app.consumer("orders", "billing", drain_timeout=drain_timeout)
    async def bill(message: Message) -> None:
        if message.body == b"1":
            await asyncio.sleep(3600)
        await app.producer.pub("invoices", b'{"order": 1, "total": 10}')
    task = asyncio.create_task(app.serve())
    yield
    app.stop()
    await task
"""


def test_the_tests_of_the_page_about_testing(tmp_path: Path):
    (tmp_path / "service.py").write_text(SERVICE)
    (tmp_path / "conftest.py").write_text(block("docs/testing.md", "# conftest.py").text)
    for name, phrase in (("test_orders.py", "test_orders_become_invoices"), ("test_time.py", "ManualClock()")):
        text = block("docs/testing.md", phrase).text
        (tmp_path / name).write_text(f"from service import billing_service\n{text}")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", "asyncio_mode=auto", "--rootdir", str(tmp_path), str(tmp_path)],
        capture_output=True, text=True, timeout=PATIENCE_S * 2, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and "2 passed" in done.stdout, done.stdout + done.stderr


MODELS = """
from django.db import models
class Order(models.Model):
    items = models.JSONField()
    class Meta:
        app_label = "shop"
class Outgoing(models.Model):
    topic = models.CharField(max_length=64)
    body = models.BinaryField()
    class Meta:
        app_label = "shop"
"""
SHOP = """
import asyncio, django
from django.conf import settings
database = {"ENGINE": "django.db.backends.sqlite3", "NAME": "shop.sqlite"}
settings.configure(INSTALLED_APPS=["shop"], DATABASES={"default": database}, SECRET_KEY="x", ALLOWED_HOSTS=["*"])
django.setup()
from django.db import connection, transaction
from django.test import AsyncRequestFactory, RequestFactory
from shop import async_views, models, outbox, views
with connection.schema_editor() as editor:
    editor.create_model(models.Order)
    editor.create_model(models.Outgoing)
asked = RequestFactory().post("/orders", {"items": ["pen"]}, content_type="application/json")
assert views.create_order(asked).status_code == 202
try:
    with transaction.atomic():
        views.create_order(asked)
        raise KeyError
except KeyError:
    pass
for number in range(3):
    models.Outgoing.objects.create(topic="orders" if number < 2 else "visits", body=b"%d" % number)
assert outbox.relay(views.producer) == 3 and outbox.relay(views.producer) == 0
visit = AsyncRequestFactory().post("/visits", b"seen", content_type="text/plain")
assert asyncio.run(async_views.note_visit(visit)).status_code == 202
"""


def test_django_publishes_what_is_committed(world: World, tmp_path: Path):
    (tmp_path / "shop").mkdir()
    (tmp_path / "shop/__init__.py").touch()
    (tmp_path / "shop/models.py").write_text(MODELS)
    for name in ("views", "outbox", "async_views"):
        text = world.here(block("docs/web.md", f"# shop/{name}.py").text)
        (tmp_path / f"shop/{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SHOP], capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert world.nsqd.published("orders") == [b'{"id": 1, "items": ["pen"]}', b"0", b"1"]
    assert world.nsqd.published("visits") == [b"2", b"seen"]


def _spark(world: World, tmp_path: Path, code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", world.here(code)], capture_output=True, text=True, timeout=SPARK_PATIENCE_S, cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    return done.stdout


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.timeout(SPARK_PATIENCE_S + 30)
def test_the_examples_of_spark(world: World, tmp_path: Path):
    """All of them in one session, in the order in which a reader meets them."""
    world.nsqd.publish("greetings", b"hello")
    waiting("flights", "archive", b"one", b"two")(world)
    world.nsqd.publish("nsqd_trace", b'{"timestamp":1,"action":"FIN","topic":"t","msgid":5,"traceid":7}')
    parts = [
        block("README.md", "flintmq.spark").text,
        block("docs/spark.md", "flights.selectExpr").text,
        block("docs/spark.md", "watch(spark").text.replace(":9464", ":0"),
        block("docs/spark.md", "processingTime=").text,
        "query.processAllAvailable()\nquery.stop()\nprint('archived', spark.read.parquet('flights.parquet').count())\n",
        block("docs/spark.md", "withWatermark").text,
        "print('windows', per_minute.columns)\n",
        "rows = spark.range(3)\n",
        block("docs/spark.md", "to_json(struct(*))").text,
        block("docs/tracing.md", "decimal(20,0)").text,
        "print('action', lives.first().action)\n",
    ]
    said = _spark(world, tmp_path, "".join(parts))
    assert "hello" in said and "two" in said and "archived 2" in said and "action FIN" in said, said
    assert "windows ['window', 'carrier', 'flights', 'delay']" in said, said
    assert sorted(world.nsqd.published("out")) == [b'{"id":0}', b'{"id":1}', b'{"id":2}']


def test_the_example_of_a_table(world: World, tmp_path: Path):
    waiting("flights", "archive", b"one", b"two")(world)
    table = tmp_path / "flights"
    words = [
        *("pipeline", "archive", "--topic=flights", world.here("--nsqd=127.0.0.1:4150")),
        *(f"--to={table}", "--format=delta", "--progress=none"),
    ]
    subprocess.run([sys.executable, "-m", "flintmq", *words], check=True, timeout=PATIENCE_S)
    code = block("docs/lake.md", "DeltaTable").text.replace("/data/flights", str(table))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert re.search(r"\d{4}-\d\d-\d\d\W+2\b", done.stdout), done


def test_the_options_of_a_secured_nsqd():
    """That they do what they say is seen in tests/spark/test_secured_spark.py."""
    written = block("docs/spark.md", "secured = {").text
    names: dict[str, dict[str, str]] = {}
    exec(written.partition("spark.read")[0], names)
    options = SourceOptions.parse({"nsqd": "nsqd.example:4150", "topic": "flights", **names["secured"]})
    assert options.tls and options.tls_key and options.auth_secret == names["secured"]["authSecret"]


def test_the_example_of_a_spool_is_as_the_source_takes_it():
    """Its nsqd is one of NSQ's; that such a query does what it says is seen in tests/spark/test_spool_spark.py."""
    spark = MagicMock()
    reader = spark.readStream.format.return_value
    reader.option.return_value = reader
    exec(block("docs/spark.md", "flights-spool").text, {"spark": spark})
    options = SourceOptions.parse(dict(call.args for call in reader.option.call_args_list))
    assert options.channel == "spark" and options.spool_location == "/var/lib/spark/flights-spool"


def test_the_example_of_a_delay_is_as_the_source_takes_it():
    """That such a query does what it says is seen in tests/spark/test_spool.py."""
    spark = MagicMock()
    exec(block("docs/spark.md", "reminders-spool").text, {"spark": spark})
    options = SourceOptions.parse(spark.readStream.format.return_value.options.call_args.kwargs)
    assert (options.deferred, options.mode, options.channel) == ("due", "spool", "reminders")


# -- shell -------------------------------------------------------------------------------------------------------------

LINES = [(each.page, line) for each in BLOCKS if not each.language for line in each.text.splitlines()]
CURLS = [(page, line) for page, line in LINES if line.startswith("curl ")]
VERBS = [(page, line) for page, line in LINES if line.startswith("flintmq admin ")]
VERBS = [(page, line) for page, line in VERBS if page != "docs/troubleshooting.md"]  # run below
PARTS = {"docs/headers.md", "docs/tracing.md"}  # pages whose topic has partitions and headers


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
@pytest.mark.parametrize(("page", "line"), CURLS, ids=lambda value: value[:90])
def test_a_curl_is_answered_well(world: World, tmp_path: Path, page: str, line: str):
    if page == "docs/http-auth.md":
        pytest.skip("needs the tokens of its page: test_http_auth.py")
    if page in PARTS and "topic/create" not in line:
        topic_of_four("orders", "&extend=true")(world)
        world.nsqd.create("orders", "billing")
    elif page == "docs/tags.md" and "pub_ext" in line:
        world.post("/topic/create?topic=orders&extend=true")
    elif "topic/create" not in line and page != "README.md":
        waiting("orders", "billing", *[b"x"] * 42)(world)
        for name in ("orders", "logs"):
            world.nsqd.create(name, "live")
    done = subprocess.run(
        ["sh", "-c", world.here(line).replace("curl ", "curl -sS --fail-with-body ", 1)],
        capture_output=True, text=True, timeout=PATIENCE_S, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("page", "line"), VERBS, ids=lambda value: value)
def test_a_verb_of_admin_is_answered_well(world: World, page: str, line: str, capsys: pytest.CaptureFixture[str]):
    waiting("orders", "billing", b"x")(world)
    topic_of_four("payments")(world)
    words = shlex.split(world.here(line), comments=True)[1:]
    if "--help" not in words and not any("address" in word for word in words):
        words.append(f"--nsqd-http-address={world.nsqd.http_address}")
    assert cli.main(words) == 0, capsys.readouterr().err


WITH_COMMANDS = ("docs/commands.md", "docs/troubleshooting.md", "README.md")
SHELL = [(page, line) for page, line in LINES if page in WITH_COMMANDS and "flintmq " in line]
SHELL = [(page, line) for page, line in SHELL if "flintmq " in line and "up " not in line and "pip" not in line]


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A shop's nsqd, and the environment of somebody who works with it, for the lines of a page one after the other."""
    directory = tmp_path_factory.mktemp("shop")
    program = directory / "flintmq"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flintmq "$@"\n')
    program.chmod(0o755)
    (directory / "order.json").write_text('{"id": 3}')
    with MemoryNsqd() as nsqd:
        nsqd.create("orders", "billing")
        nsqd.create("orders", "mailer")
        nsqd.publish("orders", *[b"x"] * 10)
        urllib.request.urlopen(f"{nsqd.http_address}/topic/create?topic=audited&extend=true", data=b"").close()
        nsqd.create("orders.dead", "deadletters")
        http = nsqd.http_address.removeprefix("http://")
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FLINTMQ_")}
        yield {
            **variables, "PATH": f"{directory}:{os.environ['PATH']}", "PWD": str(directory), "FLINTMQ_HTTP": http,
            "FLINTMQ_NSQD": nsqd.tcp_address, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm",
        }  # fmt: skip


@pytest.mark.parametrize(("page", "line"), SHELL, ids=lambda value: value[:60])
def test_a_command_does_what_the_page_says(shop: dict[str, str], page: str, line: str):
    endless = line.partition("#")[0].strip() in ("flintmq tail greetings", "flintmq top")
    if endless and "tail" in line:
        line = "flintmq tail greetings --no-follow"
    elif endless:
        line = "flintmq top --once --interval 100ms"  # the screen has a terminal in test_shell.py
    line = line.replace("127.0.0.1:4150", shop["FLINTMQ_NSQD"])
    if line.startswith("flintmq admin "):
        line += f" --nsqd-http-address={shop['FLINTMQ_HTTP']}"
    done = subprocess.run(
        ["bash", "-c", line], env=shop, cwd=shop["PWD"], capture_output=True, text=True, timeout=PATIENCE_S,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stdout + done.stderr


TROUBLES = [
    ("flintmq pub orders x --nsqd 127.0.0.1:1", "Connection refused: nothing listens there"),
    ("flintmq pub orders x --nsqd $FLINTMQ_HTTP", "speaks HTTP: not an nsqd?"),
    ("head -c 2000000 /dev/zero | flintmq pub orders --whole", "message too big"),
    ("flintmq pub orders x --delay 99h", "out of range 0-3600000"),
    ("flintmq pub full a b", "is full: channel"),
    ("nsqd --tcp-address=127.0.0.1:0 --http-address= --data-path=$HELD", "failed to lock data-path"),
]


@pytest.mark.parametrize(("line", "text"), TROUBLES, ids=lambda value: value[:50])
def test_what_goes_wrong_says_what_the_page_has(shop: dict[str, str], tmp_path: Path, line: str, text: str):
    assert f"`{text}`" in (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    if "full" in line:
        for target, body in (
            ("/topic/create?topic=full", b""), ("/channel/create?topic=full&channel=c", b""),
            ("/topic/settings?topic=full", b'{"max_messages": 1}'),
        ):  # fmt: skip
            urllib.request.urlopen(f"http://{shop['FLINTMQ_HTTP']}{target}", data=body).close()
    held = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    try:
        done = subprocess.run(
            ["bash", "-c", line.replace("nsqd --", f"'{sys.executable}' -m flintmq nsqd --")],
            env={**shop, "HELD": str(tmp_path)}, cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S,
        )  # fmt: skip
    finally:
        os.close(held)
    assert done.returncode == 1 and text in done.stderr, done.stderr


@pytest.mark.skipif(shutil.which("pkill") is None, reason="there is no pkill")
@pytest.mark.parametrize("command", ["-m flintmq nsqd", "nsqd"])
def test_the_example_of_logrotate_has_the_log_begun_anew(tmp_path: Path, command: str):
    """What logrotate does: move the file away, give what stands after postrotate to a shell, with the file's name."""
    (text,) = (each.text for each in BLOCKS if each.page == "docs/monitoring.md" and "postrotate" in each.text)
    path = tmp_path / "nsqd.log"
    script = text.partition("postrotate\n")[2].partition("endscript")[0]
    script = script.replace("/var/log/nsqd", str(path.with_suffix("")))
    program = [str(Path(sys.executable).with_name("nsqd"))] if command == "nsqd" else [sys.executable, *command.split()]
    flags = (f"--log-file={path}", f"--data-path={tmp_path}", "--tcp-address=127.0.0.1:0", "--http-address=127.0.0.1:0")
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen([*program, *flags], stderr=stderr, cwd=tmp_path)
    try:
        wait_until(lambda: path.exists() and "HTTP: listening on" in path.read_text(), "nsqd listens")
        path.rename(tmp_path / "nsqd.log.1")
        subprocess.run(["sh", "-c", script, "logrotate_script", str(path)], check=True, timeout=PATIENCE_S)
        wait_until(path.exists, "the log is written anew")
        assert process.poll() is None
    finally:
        process.terminate()
        process.wait(PATIENCE_S)
