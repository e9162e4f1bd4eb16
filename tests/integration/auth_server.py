"""An HTTP server for AUTH, in a thread, and what a client says: its answer can be changed at any time, it keeps what it
was asked.

Source: NSQ's TCP protocol.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from typing import Any, cast

from aiohttp import web
from tests.integration.daemons import Connection, Nsqd, sized

SECRET = "sesame-4711"
EVERYTHING = [{"permissions": ["subscribe", "publish"], "topic": ".*", "channels": [".*"]}]


def auth(secret: str = SECRET) -> bytes:
    return b"AUTH\n" + sized(secret.encode())


@contextlib.contextmanager
def authorized(nsqd: Nsqd) -> Iterator[Connection]:
    """A connection that was let in."""
    with nsqd.connect() as connection:
        connection.send(auth())
        assert json.loads(connection.response())["permission_count"] > 0
        yield connection


class AuthServer:
    """An HTTP server in a thread; what it answers can be changed at any time.

    Attributes:
        answer: JSON of the next answers; with status 200 unless ``status`` says otherwise.
        delay_s: before it answers.
        questions: what it was asked: query or body, and the method.
        requests: the same as it came: target, headers, body.
    """

    def __init__(self) -> None:
        self.answer: Any = None
        self.questions: list[dict[str, Any]] = []
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.reset()
        self.address = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run)
        self._ready = threading.Event()
        self._stop = asyncio.Event()

    def __enter__(self) -> AuthServer:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def reset(self) -> None:
        """As if it had just been started."""
        self.answer = {"ttl": 3600, "identity": "me", "identity_url": "http://me", "authorizations": EVERYTHING}
        self.status = 200
        self.delay_s = 0.0
        self.questions.clear()
        self.requests.clear()

    def grant(self, *authorizations: dict[str, Any], ttl: int = 3600) -> None:
        self.answer = {**self.answer, "ttl": ttl, "authorizations": list(authorizations)}

    def _run(self) -> None:
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        runner = web.ServerRunner(web.Server(cast(Any, self._handle)), shutdown_timeout=0.05)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.address = f"127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        await self._stop.wait()
        await runner.cleanup()
        late = asyncio.all_tasks() - {asyncio.current_task()}  # answers that nobody waits for any more
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.read()
        self.requests.append((request.raw_path, dict(request.headers), body))
        question = json.loads(body) if body else dict(request.query)
        self.questions.append({"method": request.method, "path": request.path, **question})
        answer, status = self.answer, self.status
        await asyncio.sleep(self.delay_s)
        return web.json_response(answer, status=status)
