"""A relay in front of nsqd that keeps what a client sends, for what nsqd counts nowhere."""

from __future__ import annotations

import contextlib
import socket
import threading


class Tap:
    """Listens on a free port and passes everything on.

    Attributes:
        address: where it listens.
        sent: what its clients have sent.
    """

    def __init__(self, target: tuple[str, int]) -> None:
        self.sent = b""
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.address: tuple[str, int] = self._listener.getsockname()

    def __enter__(self) -> Tap:
        self._begin(self._accept)
        return self

    def __exit__(self, *error: object) -> None:
        for each in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):  # it may be closed already
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def _begin(self, target: object, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # shut down
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                self._begin(self._pass, client, server, True)
                self._begin(self._pass, server, client, False)

    def _pass(self, source: socket.socket, sink: socket.socket, is_kept: bool) -> None:
        with contextlib.suppress(OSError):  # one of the two was reset
            while data := source.recv(65536):
                if is_kept:
                    self.sent += data
                sink.sendall(data)
        with contextlib.suppress(OSError):  # it is gone already
            sink.shutdown(socket.SHUT_WR)
