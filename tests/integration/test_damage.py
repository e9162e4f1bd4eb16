"""A real nsqd on a data directory that was damaged after kill -9: all is delivered or told of, never a silence."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.integration.daemons import (
    HEARTBEAT,
    MESSAGE,
    PATIENCE_S,
    RESPONSE,
    SOURCES,
    Connection,
    Daemons,
    Message,
    Nsqd,
    dpub,
    message_of,
    wait_until,
)
from tests.integration.utilities import flintmq

from flintmq.message import LOCATION

COUNT = 200
LULL_S = 0.05
PLAIN = {"plain": ("c",), "two": ("a", "b"), "limited": ("l",), "deferred": ("d",)}
TOPICS = (*PLAIN, "parts", "ordered")
DATABASE, WAL, LIST = "channels.db", "channels.db-wal", "channels.list"


def fill(nsqd: Nsqd) -> None:
    """Six topics, with messages that nobody has got yet."""
    for name, channels in PLAIN.items():
        nsqd.post(f"/topic/create?topic={name}")
        for channel in channels:
            nsqd.post(f"/channel/create?topic={name}&channel={channel}")
    nsqd.post("/topic/create?topic=parts&partition_num=3")
    nsqd.post("/topic/create?topic=ordered&partition_num=1&orderedmulti=true")
    for name in ("parts", "ordered"):
        nsqd.post(f"/channel/create?topic={name}&channel=c")
    nsqd.post("/channel/settings?topic=limited&channel=l", b'{"max_attempts": 5}')
    for name in ("plain", "two", "limited"):
        nsqd.publish(name, *(b"%d" % number for number in range(COUNT)))
    for number in range(3):
        nsqd.post(f"/mpub?topic=parts&partition={number}", b"\n".join(b"%d.%d" % (number, n) for n in range(COUNT)))
    nsqd.post("/mpub?topic=ordered&partition=0", b"\n".join(b"%d" % number for number in range(COUNT)))
    with nsqd.connect() as connection:
        connection.send(b"".join(dpub("deferred", 1000, b"%d" % number) for number in range(COUNT)))
        connection.ok(count=COUNT)


def expected() -> dict[tuple[str, str], set[bytes]]:
    numbers = {b"%d" % number for number in range(COUNT)}
    found = {(name, channel): numbers for name, channels in PLAIN.items() for channel in channels}
    parts = {b"%d.%d" % (number, n) for number in range(3) for n in range(COUNT)}
    return {**found, ("parts", "c"): parts, ("ordered", "c"): numbers}


def consume(nsqd: Nsqd, topic: str, channel: str, count: int) -> set[bytes]:
    """What comes of a channel until nothing is left of it."""
    bodies: set[bytes] = set()
    with nsqd.connect() as consumer:
        if topic == "ordered":
            consumer.ok(b"SUB_ORDER ordered c 0\n")
            consumer.rdy(10)
        else:
            consumer.subscribe(topic, channel, 500)
        while len(bodies) < count and (message := next_message(nsqd, consumer, topic, channel)) is not None:
            bodies.add(message.body[LOCATION.size :] if topic == "ordered" else message.body)
            consumer.finish(message)
        consumer.settle()
    return bodies


def next_message(nsqd: Nsqd, consumer: Connection, topic: str, channel: str) -> Message | None:
    """The next message; None when nothing is left of the channel, which is asked when nothing comes for a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            frame = consumer.any_frame(LULL_S)
        except TimeoutError:
            if not nsqd.unfinished(topic, channel):
                return None
            assert time.monotonic() < deadline, f"{topic}/{channel} is not finished, and nothing comes"
            continue
        if frame != (RESPONSE, HEARTBEAT):
            assert frame is not None and frame.kind == MESSAGE, frame
            return message_of(frame.data)


def check(nsqd: Nsqd, what: str) -> str:
    """Start it and take all there is; what it told of."""
    nsqd.launch()
    try:
        wait_until(lambda: "HTTP: listening" in nsqd.log or not nsqd.is_running)
    finally:
        assert "Traceback" not in nsqd.log, what
    if not nsqd.is_running:
        assert nsqd.wait() == 1, what
        assert "FATAL: failed to instantiate nsqd - " in nsqd.log and "channels" in nsqd.log, what
        return nsqd.log
    told = [line for line in nsqd.log.splitlines() if " ERROR: " in line]
    state = nsqd.get("/damage")
    assert bool(state["count"]) == (nsqd.get("/stats?format=json")["health"] != "OK"), what
    for (topic, channel), bodies in expected().items():
        missing = bodies - consume(nsqd, topic, channel, len(bodies))
        assert not missing or state["is_more_possible"] or state["lost"] >= len(missing), f"{what}: {topic} {told}"
    assert nsqd.get("/channel/settings?topic=limited&channel=l")["settings"]["max_attempts"] == 5, what
    assert "Traceback" not in nsqd.log, what
    nsqd.kill()
    return "\n".join(told)


def flip(path: Path, random_source: random.Random) -> str:
    position, bit = random_source.randrange(path.stat().st_size), random_source.randrange(8)
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ (1 << bit)]))
    return f"{path.name} byte {position} bit {bit}"


def cut(path: Path, random_source: random.Random) -> str:
    size = random_source.randrange(path.stat().st_size)
    os.truncate(path, size)
    return f"{path.name} cut to {size}"


def delete(path: Path, random_source: random.Random) -> str:
    path.unlink()
    return f"{path.name} deleted"


@pytest.mark.slow
@pytest.mark.parametrize("name", [DATABASE, WAL, LIST])
@pytest.mark.parametrize("harm", [flip, cut, delete], ids=lambda harm: harm.__name__)
def test_damage_after_a_kill(
    daemons: Daemons, tmp_path: Path, harm: Callable[[Path, random.Random], str], name: str
) -> None:
    nsqd = daemons.nsqd()
    fill(nsqd)
    if name == DATABASE:  # all of it is in the write-ahead log otherwise
        nsqd.stop()
        nsqd.start()
    nsqd.kill()
    shutil.copytree(nsqd.data_path, tmp_path / "killed")
    random_source = random.Random(f"{harm.__name__} {name}")
    for _ in range(1 if harm is delete else 3):
        shutil.rmtree(nsqd.data_path)
        shutil.copytree(tmp_path / "killed", nsqd.data_path)
        what = harm(nsqd.data_path / name, random_source)
        told = check(nsqd, what)
        assert told or harm is flip, f"{what}: not a word"


def missing_at_the_end(nsqd: Nsqd, how: str) -> None:
    (path,) = nsqd.segment_paths("t")
    if how == "deleted":
        path.unlink()
    else:
        size = path.stat().st_size
        os.truncate(path, {"emptied": 0, "header": 64, "in a batch": size - 10}[how])


@pytest.mark.parametrize("durability", ["fsync", "os", "interval"])
@pytest.mark.parametrize("how", ["emptied", "header", "in a batch", "deleted"])
def test_messages_missing_at_the_end_of_a_log_are_told_of_until_it_is_acknowledged(
    daemons: Daemons, durability: str, how: str
) -> None:
    lookupd = daemons.nsqlookupd()
    nsqd = daemons.nsqd(f"--durability={durability}", f"--lookupd-tcp-address=127.0.0.1:{lookupd.tcp[1]}")
    nsqd.post("/topic/create?topic=t")
    for first in range(0, 600, 50):
        nsqd.publish("t", *(b"%d" % number for number in range(first, first + 50)))

    def is_noted() -> bool:
        database = (nsqd.data_path / "channels.list").read_bytes()
        return bool(database) and nsqd.get("/stats?format=json")["topics"][0]["message_count"] == 600

    wait_until(is_noted)
    nsqd.post("/channel/create?topic=t&channel=c")  # waits for a flush, which says how far the log is
    nsqd.kill()
    missing_at_the_end(nsqd, how)
    nsqd.start()
    lost = 50 if how == "in a batch" else 600
    first = 600 - lost + 1
    (line,) = [line for line in nsqd.log.splitlines() if " ERROR: " in line and "messages from sequence" in line]
    assert f"{lost} messages from sequence {first} to 600" in line
    for _ in range(2):
        state = nsqd.get("/damage")
        assert (state["count"], state["lost"]) == (1, lost)
        assert (state["reports"][0]["first"], state["reports"][0]["end"]) == (first, 601)
        assert nsqd.get("/stats?format=json")["health"].startswith(f"NOK - damage: 1 reports, {lost} messages lost")
        assert nsqd.request("GET", "/ping").text == "OK"
        metrics = nsqd.request("GET", "/metrics").text
        assert f"flintmq_nsqd_damage_lost_messages {lost}" in metrics
        assert "flintmq_nsqd_healthy 1" in metrics
        nsqd.restart()
    port = nsqd.http[1]
    wait_until(lambda: lookupd.get("/topics")["topics"] == ["t"])
    assert f"{lost} messages lost" in command("doctor", f"--lookupd-http-address=127.0.0.1:{lookupd.http[1]}")
    shown = json.loads(command("admin", "damage", f"--nsqd-http-address=127.0.0.1:{port}"))
    assert shown["lost"] == lost
    command("admin", "acknowledge-damage", f"--nsqd-http-address=127.0.0.1:{port}")
    for _ in range(2):
        assert nsqd.get("/stats?format=json")["health"] == "OK"
        assert nsqd.get("/damage")["count"] == 0
        nsqd.kill()
        nsqd.start()
    nsqd.publish("t", b"next")
    with nsqd.connect() as consumer:
        messages = consumer.subscribe("t", "c", 1000).messages(601 - lost)
    assert int(messages[-1].id, 16) == 601, "no sequence is used again"


def command(*arguments: str) -> str:
    """What a flintmq command prints."""
    run = flintmq(*arguments)
    return run.stdout + run.stderr


AWAY = """
import errno, os

_read = os.pread

def _pread(descriptor, *args):
    root, found, _ = os.readlink(f"/proc/self/fd/{descriptor}").partition("/topics/")
    if found and os.path.exists(f"{root}/AWAY"):
        raise OSError(errno.EIO, "Input/output error")
    return _read(descriptor, *args)

os.pread = _pread
"""


def test_a_disk_that_does_not_answer_for_a_while_loses_nothing(daemons: Daemons, tmp_path: Path):
    """As one that is reached over a network: a start waits for it, and so does who consumes."""
    (tmp_path / "sitecustomize.py").write_text(AWAY)
    nsqd = daemons.nsqd("--durability=os", limits=("env", f"PYTHONPATH={tmp_path}:{SOURCES}"))
    nsqd.post("/topic/create?topic=t")
    nsqd.post("/channel/create?topic=t&channel=c")
    sent = {b"%d" % number * 10_000 for number in range(COUNT)}  # more than is read ahead
    for body in sent:
        nsqd.publish("t", body)
    away = nsqd.data_path / "AWAY"
    for end in (nsqd.stop, nsqd.kill):  # with a checkpoint, and without
        end()
        away.touch()
        nsqd.launch()
        assert nsqd.wait() == 1
        assert "The disk does not answer" in nsqd.log and "nothing of it is changed" in nsqd.log
        away.unlink()
        nsqd.start()
        assert nsqd.stats("t", "c")["depth"] == COUNT
    nsqd.restart()  # nothing of it is in memory
    with nsqd.connect() as consumer:
        away.touch()
        consumer.subscribe("t", "c", rdy_count=1)
        bodies: list[bytes] = []
        while len(bodies) < COUNT:
            if away.exists() and "The disk does not answer" in nsqd.log:
                away.unlink()
            try:
                frame = consumer.any_frame(LULL_S)
            except TimeoutError:
                continue  # it is away, or slow
            if frame is not None and frame.kind == MESSAGE:
                message = message_of(frame.data)
                bodies.append(message.body)
                consumer.finish(message)
        consumer.settle()
    assert not away.exists(), "it was tried to read what was not in memory"
    assert len(bodies) == COUNT and set(bodies) == sent
    assert nsqd.get("/damage")["count"] == 0 and not list(nsqd.data_path.glob("**/*.bad"))
