"""What every test shares: hypothesis without a deadline, because the machine may be busy with something else; compiled
modules, also where the environment says that none are written; and how the files are dealt out to several processes.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
from pathlib import Path
from typing import Any

import hypothesis
import pytest

hypothesis.settings.register_profile("flintmq", deadline=None, print_blob=True)
hypothesis.settings.load_profile("flintmq")

if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):  # compiling all tests takes as long as running a third of them
    sys.dont_write_bytecode = False
    sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"] = str(Path(__file__).parents[1] / ".pytest_cache/bytecode")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in what a script started with "&": children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if sys.prefix != sys.base_prefix:  # what Spark keeps goes with the virtual environment; so says the Makefile
    os.environ["XDG_CACHE_HOME"] = str(Path(sys.prefix) / "cache")

os.environ.setdefault("SPARK_SUBMIT_OPTS", "-Xms64m -XX:MaxNewSize=32m")  # Java would begin with a 64th of the memory

LARGE = {
    "JVM": (
        "tests/integration/test_demo.py",
        "tests/integration/test_docs.py::test_the_examples_of_spark",
        "tests/integration/test_up.py::test_the_printed_spark_command",
        "tests/spark/test_crash.py",
        "tests/spark/test_kills.py",
        "tests/spark/test_warm.py",
        "tests/spark/test_prefetch.py",
        "tests/spark/test_spool_spark.py",
        "tests/spark/test_without_java.py",
        "tests/spark/test_secured_spark.py",
        "tests/spark/test_flow.py",
        "tests/spark/test_pipeline_doctor.py",
        "tests/spark/test_spark.py",
        "tests/spark/test_spark_moving.py",
        "tests/spark/test_streams.py",
        "tests/spark/test_trace_job.py",
    ),
    "browser and clients": (
        "tests/integration/test_origins.py::test_a_real_browser",
        "tests/browser/",
        "tests/foreign/test_ansq.py",
        "tests/foreign/test_asyncnsq.py",
        "tests/foreign/test_gnsq.py",
        "tests/foreign/test_nsqjs.py",
        "tests/foreign/test_pynsq.py",
    ),
}
"""Tests with a JVM, and those with a browser or a dozen daemons, each 0.5 GB or more, by the beginnings of their ids.

Each kind goes to one process, one after the other in this order; those that share a session of Spark, which lives long,
are the last with a JVM.
"""


ON_TOP = (
    # the cluster
    "tests/chaos/",
    "tests/integration/test_cluster",
    "tests/integration/test_demo_cluster.py",
    "tests/integration/test_docs_cluster.py",
    "tests/integration/test_peer_versions.py",
    "tests/integration/test_rolling_upgrade.py",
    "tests/integration/test_store.py",
    "tests/sim/test_agents.py",
    "tests/sim/test_cluster_",
    "tests/sim/test_membership.py",
    "tests/sim/test_own_store.py",
    "tests/sim/test_store.py",
    "tests/unit/cluster/",
    "tests/unit/net/test_cluster_store.py",
    "tests/unit/nsqd/cluster/",
    "tests/unit/nsqlookupd/",
    "tests/unit/test_cluster_",
    # the pipeline
    "tests/integration/test_demo.py",
    "tests/spark/",
    "tests/unit/demo/",
    "tests/unit/spark/",
    "tests/unit/spool/",
    # the page
    "tests/browser/",
    "tests/conformance/test_nsqadmin_",
    "tests/integration/test_nsqadmin_",
    "tests/unit/nsqadmin/",
)
"""What ``--one-node`` leaves out, by the beginnings of paths: what comes on top of one node and its clients."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--one-node", action="store_true", help="leave out cluster, pipeline and page")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not even import what ``--one-node`` leaves out."""
    if not config.getoption("one_node"):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix() + "/" * collection_path.is_dir()
    return path.startswith(ON_TOP) or None


def kind_of(nodeid: str) -> str:
    """The kind in ``LARGE`` that a test is of, by its id; empty when it is of none."""
    return next((kind for kind, beginnings in LARGE.items() if nodeid.startswith(beginnings)), "")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take what lives as long as the process out of the search for garbage: half a million objects of the tests."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file give back to the system what its tests have had: a process runs a few hundred files.

    What stays is frozen again: an nsqd that ran in this process has undone that.
    """
    if sys.platform == "linux" and nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()
        ctypes.CDLL(None).malloc_trim(0)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``--dist loadfile``: by file, and each kind of ``LARGE`` together."""
    if config.getvalue("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    scheduling = LoadFileScheduling(config, log)
    file_of = scheduling._split_scope
    scheduling._split_scope = lambda nodeid: kind_of(nodeid) or file_of(nodeid)
    return scheduling


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Where several processes share the work, begin with what takes longest, so that it does not come last."""
    if not hasattr(config, "workerinput"):
        return
    order = [beginning for beginnings in LARGE.values() for beginning in beginnings]

    def place(nodeid: str) -> int:
        return next((number for number, beginning in enumerate(order) if nodeid.startswith(beginning)), len(order))

    slow = {item.path for item in items if item.get_closest_marker("slow") is not None}
    items.sort(key=lambda item: (place(item.nodeid), item.path not in slow))
