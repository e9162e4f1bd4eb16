"""A nsqlookupd in a thread that answers what it is told to."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeLookupd:
    """Serves ``answers`` (path to a JSON value, or to bytes sent as they are); use as a context manager.

    Attributes:
        asked: the paths, as they came.
        on_ask: called with each path before it is answered, by several threads.
    """

    def __init__(self) -> None:
        self.answers: dict[str, Any] = {}
        self.asked: list[str] = []
        self.on_ask: Callable[[str], object] = lambda _path: None
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.asked.append(self.path)
                fake.on_ask(self.path)
                answer = fake.answers.get(self.path)
                body = (
                    answer
                    if isinstance(answer, bytes)
                    else json.dumps(answer or {"message": "TOPIC_NOT_FOUND"}).encode()
                )
                self.send_response(404 if answer is None else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Tests read ``asked`` instead."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)

    def __enter__(self) -> FakeLookupd:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join(5)
        self._server.server_close()
