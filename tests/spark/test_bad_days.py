"""Bad days: what a query needs is away while it plans, reads or commits; its topic goes; its checkpoint is taken, full.

The list of all cases, and where each of them has its test, is in README.md beside this file.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.datasource import ReadAllAvailable
from pyspark.sql.types import BinaryType, StructField, StructType
from tests.integration.daemons import SPARK_PATIENCE_S
from tests.integration.daemons import wait_until as wait_for
from tests.integration.mounts import mounted_tmpfs, needs_root
from tests.spark.driven import Query
from tests.spark.fake_lookupd import FakeLookupd
from tests.spark.processes import STARTS, NsqdProcess, assert_each_once, numbered
from tests.spark.secured import Secured, secured
from tests.spark.test_reader import ManualClock, offsets_read
from tests.spark.test_spark import archived, has_rows, run, wait_until

from flintmq.errors import DiscoveryError, FlintError, NsqdError
from flintmq.pipeline.streams import STARVED
from flintmq.spark import broker, retry
from flintmq.spark.broker import POOL
from flintmq.spark.errors import DataLost
from flintmq.spark.identity import TaskIdentity
from flintmq.spark.options import SinkOptions, SourceOptions
from flintmq.spark.sink import RowWriter
from flintmq.spark.stream_reader import NsqStreamReader

pytestmark = pytest.mark.slow
ALL = ReadAllAvailable()
BODY = StructType([StructField("body", BinaryType())])


@pytest.fixture(autouse=True)
def afresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As if the process had just been started, and in a hurry."""
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(retry, "PAUSE_MAX_S", 0.01)
    monkeypatch.setattr(broker, "_accepted", set())
    POOL._idle.clear()
    yield
    POOL._idle.clear()


def write(options: dict[str, str], bodies: list[bytes], task: int = 0) -> None:
    batch = pa.record_batch([pa.array(bodies, pa.binary())], ["body"])
    RowWriter(SinkOptions.parse(options), BODY).write(iter([batch]), TaskIdentity("query", 0, task))


def test_the_list_names_tests_that_exist():
    here = Path(__file__).parent
    listed = re.findall(r"`([\w/]*\.py)?(?:::)?(test_\w+)?`", (here / "README.md").read_text())
    text = "".join(path.read_text() for path in [*here.glob("test_*.py"), *here.parent.glob("unit/sp*/test_*.py")])
    assert len(listed) > 40
    for file, name in listed:
        assert not file or (here / file).exists() or (here.parent / file).exists(), file
        assert not name or f"def {name}(" in text, name


# -- the topic, while a query runs -------------------------------------------------------------------------------------


def _delete(nsqd: NsqdProcess, topic: str) -> None:
    nsqd.post(f"/topic/delete?topic={topic}")


def _create_anew(nsqd: NsqdProcess, topic: str) -> None:
    _delete(nsqd, topic)
    nsqd.publish(topic, numbered(0, 500))


@pytest.mark.parametrize(
    ("happens", "reason", "left"),
    [
        (_delete, "the topic no longer exists", 0),
        (_create_anew, "the topic was deleted and created again", 500),
    ],
    ids=["deleted", "created anew"],
)
def test_a_topic_between_planning_and_reading(
    nsqd: NsqdProcess, topic: str, happens: Callable[[NsqdProcess, str], None], reason: str, left: int
):
    """It is an error that names topic and offsets; where loss is forgiven, the query goes on with what is there."""
    nsqd.publish(topic, numbered(0, 300))
    given = {"nsqd": nsqd.address, "topic": topic, "columns": "offset,body", "maxMessagesPerTrigger": 200, "retries": 1}
    query = Query(**given)
    assert query.step() == 200
    assert query.plan()
    happens(nsqd, topic)
    with pytest.raises(DataLost, match=f"topic '{topic}', .*{reason}"):
        query.write()
    query.raw["failOnDataLoss"] = "false"
    query.stop()
    assert query.step() == 0, "the micro-batch that was planned has nothing left"
    while query.step():
        pass
    assert len(query.rows) == 200 + left
    nsqd.publish(topic, numbered(500, 510))
    assert query.step() == 10


def test_a_topic_that_is_emptied_is_read_all_the_same(nsqd: NsqdProcess, topic: str):
    """Emptying drops what channels have not been given; the log keeps it as long as retention does."""
    nsqd.publish(topic, numbered(0, 300))
    query = Query(nsqd=nsqd.address, topic=topic, channel="spark", columns="body", maxMessagesPerTrigger=200)
    assert query.step() == 200
    assert query.plan()
    nsqd.post(f"/channel/empty?topic={topic}&channel=spark")
    nsqd.post(f"/topic/empty?topic={topic}")
    query.write()
    query.commit()
    nsqd.publish(topic, numbered(300, 310))
    assert query.step() == 10
    assert_each_once(query.bodies, 310)


# -- the data directory ------------------------------------------------------------------------------------------------


@pytest.fixture
def own_nsqd(tmp_path: Path) -> Iterator[NsqdProcess]:
    process = NsqdProcess(tmp_path / "data")
    yield process
    process.stop()


def put_back(nsqd: NsqdProcess, topic: str, data: Path, count: int = 30) -> Query:
    """Have a query read 150 messages, put the directory back to a copy with 100 of them, and publish others."""
    copy = data.with_name("copy")
    nsqd.publish(topic, numbered(0, 100))
    nsqd.stop()
    shutil.copytree(data, copy)
    nsqd.start()
    nsqd.publish(topic, numbered(100, 150))
    query = Query(nsqd=nsqd.address, topic=topic, columns="offset,body", retries=2)
    query.available_now()
    assert_each_once(query.bodies, 150)
    nsqd.stop()
    shutil.rmtree(data)
    copy.rename(data)
    nsqd.start()
    nsqd.publish(topic, numbered(200, 200 + count))
    query.stop()
    return query


def test_a_data_directory_that_is_older_than_the_checkpoint(own_nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """The log ends before what was read of it, and the numbers behind its end are given again."""
    query = put_back(own_nsqd, topic, tmp_path / "data")
    with pytest.raises(DataLost, match=r"messages 101 to 151 \(exclusive\) are lost: messages were taken back"):
        query.available_now()
    query.raw["failOnDataLoss"] = "false"
    query.stop()
    query.available_now()
    own_nsqd.publish(topic, numbered(230, 260))
    query.available_now()
    assert query.bodies[150:] == numbered(200, 260), "all that was published since the directory was put back"


def test_a_log_that_has_grown_past_the_checkpoint_on_an_older_data_directory(
    own_nsqd: NsqdProcess, topic: str, tmp_path: Path
):
    """What was published behind the copy stands where other messages were read before anybody looked."""
    query = put_back(own_nsqd, topic, tmp_path / "data", 80)
    lost = r"messages 101 to 151 \(exclusive\) are lost: messages were taken back.* failOnDataLoss=false .* from 101 on"
    for _ in range(2):
        with pytest.raises(DataLost, match=lost):
            query.available_now()
        query.stop()
    with pytest.raises(DataLost, match=lost):
        query.step()
    query.raw["failOnDataLoss"] = "false"
    query.stop()
    query.available_now()
    assert query.bodies[150:] == numbered(200, 280)
    query.raw["failOnDataLoss"] = "true"
    query.stop()
    own_nsqd.publish(topic, numbered(280, 290))
    query.available_now()
    assert query.bodies[230:] == numbered(280, 290), "nothing is told of it again"


def test_a_stream_and_a_data_directory_that_is_older_than_its_checkpoint(
    own_nsqd: NsqdProcess, topic: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """It waits, as the directory may be exchanged once more, until something is stored where it has read before."""
    query = put_back(own_nsqd, topic, tmp_path / "data")
    wait_for(lambda: not query.step() and "messages were taken back" in caplog.text)
    assert len(query.rows) == 150
    own_nsqd.publish(topic, numbered(230, 260))
    with pytest.raises(DataLost, match=r"messages 101 to 151 \(exclusive\) are lost: messages were taken back"):
        query.step()


def test_an_older_data_directory_behind_a_stream_that_looks_away(own_nsqd: NsqdProcess, topic: str, tmp_path: Path):
    """nsqd is back, and the log past what was read, between two looks of a query that runs."""
    data = tmp_path / "data"
    own_nsqd.publish(topic, numbered(0, 100))
    own_nsqd.stop()
    shutil.copytree(data, data.with_name("copy"))
    own_nsqd.start()
    own_nsqd.publish(topic, numbered(100, 150))
    query = Query(nsqd=own_nsqd.address, topic=topic, columns="offset,body")
    assert query.step() == 150
    own_nsqd.kill()
    own_nsqd.start()
    own_nsqd.publish(topic, numbered(150, 160))
    assert query.step() == 10, "nothing was taken back by a restart"
    own_nsqd.stop()
    shutil.rmtree(data)
    data.with_name("copy").rename(data)
    own_nsqd.start()
    own_nsqd.publish(topic, numbered(200, 300))
    with pytest.raises(DataLost, match=r"messages 101 to 161 \(exclusive\) are lost: messages were taken back"):
        query.step()


# -- the auth server ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("secured")) as found:
        yield found


def test_the_auth_server_away(everything: Secured, caplog: pytest.LogCaptureFixture):
    """At the first plan it ends the query; later what was let in before is waited for, at plan, read and commit."""
    auth, given = everything.auth, everything.options(topic="t", channel="spark", retries="2")
    write(everything.options(topic="t"), numbered(0, 100))

    def away() -> None:
        auth.status = 500
        POOL._idle.clear()  # connections that were let in stay so

    def back() -> None:
        auth.status = 200
        POOL._idle.clear()

    away()
    broker._accepted.clear()
    refused = NsqStreamReader(SourceOptions.parse(given))
    with pytest.raises(NsqdError, match=r"E_AUTH_FAILED.*authSecret.*or does not answer"):
        refused.latestOffset({}, ALL)
    with pytest.raises(FlintError, match=r"E_AUTH_FAILED.*authSecret"):
        write(everything.options(topic="t"), [b"never"], 1)

    back()
    clock = ManualClock()
    reader = NsqStreamReader(SourceOptions.parse(given), clock)
    here = reader.latestOffset({}, ALL)

    away()
    caplog.clear()
    assert reader.latestOffset(here, ALL) == here, "the stream waits"
    assert "is away, its partitions wait" in caplog.text and "E_AUTH_FAILED" in caplog.text

    back()
    clock.advance(10)
    write(everything.options(topic="t"), numbered(100, 150), 2)
    end = reader.latestOffset(here, ALL)
    tasks = reader.partitions(here, end)
    away()
    with pytest.raises(FlintError, match="E_AUTH_FAILED"):
        offsets_read(reader, tasks)
    caplog.clear()
    reader.commit(end)
    assert "cursors on nsqd" in caplog.text and "not moved" in caplog.text, "only the lag shown is late"
    with pytest.raises(FlintError, match="E_AUTH_FAILED"):
        write(everything.options(topic="t"), numbered(150, 160), 3)

    back()
    assert offsets_read(reader, tasks) == list(range(101, 151)), "the task that Spark runs again"
    clock.advance(10)
    reader.latestOffset(end, ALL)
    moved = reader._surveyor.try_cursors(reader._read)
    assert set(moved.values()) == {151}
    write(everything.options(topic="t"), numbered(150, 160), 3)
    assert offsets_read(reader, reader.partitions(end, reader.latestOffset(end, ALL))) == list(range(151, 161))


# -- nsqlookupd --------------------------------------------------------------------------------------------------------


def test_nsqlookupd_away(nsqd: NsqdProcess, topic: str, caplog: pytest.LogCaptureFixture):
    """At the first plan it ends the query; later the nsqds that are known are asked, at plan, read and commit."""
    nsqd.publish(topic, numbered(0, 100))
    host, _, port = nsqd.address.rpartition(":")
    producers = {"producers": [{"broadcast_address": host, "tcp_port": int(port)}]}
    with FakeLookupd() as lookupd:
        given = {"lookupd": lookupd.address, "topic": topic, "channel": "spark", "retries": "2"}
        clock = ManualClock()
        reader = NsqStreamReader(SourceOptions.parse(given), clock)
        lookupd.answers[f"/lookup?topic={topic}"] = lookupd.answers["/nodes"] = b"broken"
        with pytest.raises(DiscoveryError, match=f"no nsqlookupd answers .*{lookupd.address}"):
            reader.latestOffset({}, ALL)
        with pytest.raises(DiscoveryError, match="no nsqlookupd answers"):
            write({"lookupd": lookupd.address, "topic": topic, "retries": "2"}, [b"never"])
        lookupd.answers[f"/lookup?topic={topic}"] = lookupd.answers["/nodes"] = producers
        here = reader.latestOffset({}, ALL)
        tasks = reader.partitions({}, here)
    # it is gone
    clock.advance(11)
    nsqd.publish(topic, numbered(100, 150))
    end = reader.latestOffset(here, ALL)
    assert offsets_read(reader, tasks) == list(range(1, 101))
    assert offsets_read(reader, reader.partitions(here, end)) == list(range(101, 151))
    reader.commit(end)
    assert b'"depth":0' in nsqd.get(f"/stats?format=json&topic={topic}&channel=spark")
    assert "not moved" not in caplog.text


# -- the checkpoint ----------------------------------------------------------------------------------------------------


@pytest.mark.spark
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
@pytest.mark.long
def test_two_queries_on_one_checkpoint(spark: Any, nsqd: NsqdProcess, topic: str, source: Any, archive: Any, tmp_path):
    """In one application the second is refused, or takes over; of two drivers the one that comes too late fails."""
    nsqd.publish(topic, numbered(0, 100))
    queries = [archive(source(spark.readStream).load(), processingTime="1 hour")]
    try:
        wait_until(lambda: has_rows(queries[0], 100), queries[0])
        other = spark.newSession()
        other.conf.set("spark.sql.streaming.stopActiveRunOnRestart", "false")
        with pytest.raises(Exception, match="already active"):
            archive(source(other.readStream).load(), availableNow=True)
        assert queries[0].isActive
        nsqd.publish(topic, numbered(100, 200))
        queries.append(archive(source(spark.newSession().readStream).load(), processingTime="0 seconds"))
        wait_until(lambda: has_rows(queries[1], 100), queries[1])
        assert not queries[0].isActive, "the second has taken over"

        wait_until(lambda: queries[1].status["message"].startswith(("Waiting for", "No new")), queries[1])
        plans = tmp_path / "checkpoint" / "offsets"
        last = max(int(path.name) for path in plans.iterdir() if path.name.isdecimal())
        shutil.copy(plans / str(last), plans / str(last + 1))  # as another driver would
        nsqd.publish(topic, numbered(200, 300))
        with pytest.raises(StreamingQueryException, match="Multiple streaming jobs detected"):
            queries[1].awaitTermination(int(SPARK_PATIENCE_S))
    finally:
        for query in queries:
            query.stop()
    run(archive(source(spark.readStream).load(), availableNow=True))
    assert_each_once(archived(spark, tmp_path), 300)


@needs_root
@pytest.mark.spark
@pytest.mark.timeout(2 * SPARK_PATIENCE_S)
def through(start: Callable[[], Any]) -> None:
    """Start a query and see it to its end; again where Python did not start within the 10 s that Spark waits."""
    for starts_left in reversed(range(STARTS)):
        try:
            run(start())
            return
        except StreamingQueryException as error:
            if STARVED not in str(error) or not starts_left:
                raise


def test_the_disk_of_the_checkpoint_is_full(spark: Any, nsqd: NsqdProcess, topic: str, source: Any, tmp_path: Path):
    """The query fails and says so, and goes on when there is room, each message once; it is no other topic's."""
    nsqd.publish(topic, numbered(0, 100))
    with mounted_tmpfs(tmp_path / "disk", 1 << 20) as disk:

        def start(**options: object) -> Any:
            writer = source(spark.readStream, **options).load().writeStream.format("parquet")
            writer = writer.option("checkpointLocation", str(disk.path / "checkpoint"))
            return writer.trigger(availableNow=True).start(str(tmp_path / "archive"))

        through(start)
        nsqd.publish(topic, numbered(100, 200))
        disk.fill()
        with pytest.raises(StreamingQueryException, match="No space left on device"):
            through(start)
        disk.empty()
        through(start)
        assert_each_once(archived(spark, tmp_path), 200)
        nsqd.publish(f"{topic}-other", numbered(0, 10))
        with pytest.raises(StreamingQueryException, match="the checkpoint has it, and the options leave it out"):
            through(lambda: start(topic=f"{topic}-other"))
