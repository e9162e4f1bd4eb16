"""What the HTTP cases share: raw connections, exact answers, messages of a topic.

Rules of this file: no code of the daemons; a raw connection reads exactly one answer at a time, so that a case sees
their order and what stands between them.

Source: NSQ's HTTP API.
"""

from __future__ import annotations

import http.client
import io
import json
import re
import socket
import ssl
from collections.abc import Iterable
from typing import Any

from tests.certificates import Certificates
from tests.integration.daemons import PATIENCE_S, Answer, Message, Nsqd, wait_until

JSON_TYPE = "application/json; charset=utf-8"
TEXT_TYPE = "text/plain"
NSQ_TYPE = "nsq; version=1.0"
ADDITIONS = frozenset({"durability", "flintmq_version"})
"""Fields of JSON answers that NSQ does not have."""

MEMORY = (
    "heap_objects",
    "heap_idle_bytes",
    "heap_in_use_bytes",
    "heap_released_bytes",
    "gc_pause_usec_100",
    "gc_pause_usec_99",
    "gc_pause_usec_95",
    "next_gc_bytes",
    "gc_total_runs",
)
"""What /stats says of memory, in this order."""

GET_ROUTES = ("/ping", "/info", "/stats", "/config/log_level")
POST_ROUTES = (
    "/pub",
    "/mpub",
    *(f"/topic/{action}" for action in ("create", "delete", "empty", "pause", "unpause")),
    *(f"/channel/{action}" for action in ("create", "delete", "empty", "pause", "unpause")),
)
DEBUG_ROUTES = ("/debug/pprof/", "/debug/pprof/cmdline", "/debug/pprof/heap", "/debug/pprof/goroutine")


# -- what an answer must look like -------------------------------------------------------------------------------------


def assert_refused(answer: Answer, status: int, text: str) -> None:
    """See an error of the V1 API: status, body to the byte, types."""
    assert (answer.status, answer.body) == (status, b'{"message":"%s"}' % text.encode())
    assert answer.headers["Content-Type"] == JSON_TYPE
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


def assert_empty(answer: Answer) -> None:
    """See a success without data."""
    assert (answer.status, answer.body) == (200, b"")
    assert "Content-Type" not in answer.headers
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


def assert_text(answer: Answer, text: str) -> None:
    """See a bare string."""
    assert (answer.status, answer.text) == (200, text)
    assert answer.headers["Content-Type"].split(";")[0] == TEXT_TYPE
    assert answer.headers["X-NSQ-Content-Type"] == NSQ_TYPE


def assert_fields(row: dict[str, Any], expected: Iterable[str], optional: Iterable[str] = ()) -> None:
    """See exactly these fields in this order.

    Args:
        expected: every field there can be.
        optional: those of them that may be absent.
    """
    shown = [name for name in row if name not in ADDITIONS]
    assert shown == [name for name in expected if name in row or name not in set(optional)]


# -- messages ----------------------------------------------------------------------------------------------------------


def drain(nsqd: Nsqd, topic: str, count: int, channel: str = "drain") -> list[Message]:
    """The ``count`` messages of a topic, and nothing behind them."""
    with nsqd.connect() as consumer:
        consumer.subscribe(topic, channel, count + 1)
        messages = consumer.messages(count)
        consumer.finish(*messages)
        consumer.settle()
        assert nsqd.unfinished(topic, channel) == 0, "more messages than expected"
    return messages


def bodies_of(nsqd: Nsqd, topic: str, count: int) -> list[bytes]:
    """The bodies of the ``count`` messages of a topic, and nothing behind them."""
    return [message.body for message in drain(nsqd, topic, count)]


def topic_names(nsqd: Nsqd) -> list[str]:
    """The topics there are."""
    return [row["topic_name"] for row in nsqd.get("/stats?format=json&include_clients=false")["topics"]]


# -- raw connections ---------------------------------------------------------------------------------------------------


class RawHttp:
    """An HTTP connection of which every byte is the test's own.

    Args:
        address: of the server.
        context: for HTTPS.
    """

    def __init__(self, address: tuple[str, int], context: ssl.SSLContext | None = None) -> None:
        self._socket = socket.create_connection(address, PATIENCE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None:
            self._socket = context.wrap_socket(self._socket, server_hostname="localhost")
        self._buffer = b""

    def __enter__(self) -> RawHttp:
        return self

    def __exit__(self, *error: object) -> None:
        self._socket.close()

    def send(self, data: bytes) -> RawHttp:
        """Send ``data`` as it is."""
        self._socket.sendall(data)
        return self

    def end(self) -> None:
        """Tell the server that nothing more will be sent."""
        self._socket.shutdown(socket.SHUT_WR)

    def answer(self, method: str = "GET") -> Answer:
        """The next answer, which may be ``100 Continue``.

        Args:
            method: of the request; an answer to HEAD has no body.
        """
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            self._receive()
        head, self._buffer = self._buffer[: end + 4], self._buffer[end + 4 :]
        line, _, fields = head.partition(b"\r\n")
        status = int(line.split()[1])
        headers = http.client.parse_headers(io.BytesIO(fields))
        has_body = method != "HEAD" and status >= 200
        return Answer(status, headers, self._body(headers) if has_body else b"")

    def _body(self, headers: http.client.HTTPMessage) -> bytes:
        if headers.get("Transfer-Encoding") == "chunked":
            body = b""
            while size := int(self._line(), 16):
                body += self._exactly(size + 2)[:-2]
            assert self._line() == b""
            return body
        return self._exactly(int(headers.get("Content-Length", "0")))

    def _line(self) -> bytes:
        while b"\r\n" not in self._buffer:
            self._receive()
        line, _, self._buffer = self._buffer.partition(b"\r\n")
        return line

    def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            self._receive()
        data, self._buffer = self._buffer[:size], self._buffer[size:]
        return data

    def _receive(self) -> None:
        data = self._socket.recv(65536)
        assert data, f"closed behind {self._buffer!r}"
        self._buffer += data

    def wait_closed(self) -> None:
        """See the server close the connection without another byte."""
        try:
            assert self._buffer + self._socket.recv(65536) == b""
        except ConnectionResetError:
            assert self._buffer == b""


def exchange(nsqd: Nsqd, data: bytes) -> Answer:
    """Send bytes on a connection of their own and return the first answer."""
    with RawHttp(nsqd.http) as raw:
        return raw.send(data).answer()


def chunked(path: str, *chunks: bytes) -> bytes:
    """A POST with a chunked body."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    return head + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"


# -- HTTPS -------------------------------------------------------------------------------------------------------------


def tls_flags(certificates: Certificates, *further: str) -> list[str]:
    """Flags of an nsqd that has a certificate and listens for HTTPS."""
    server = certificates.server
    return [
        f"--tls-cert={server.cert}",
        f"--tls-key={server.key}",
        f"--tls-root-ca-file={certificates.ca}",
        "--https-address=127.0.0.1:0",
        *further,
    ]


def https_address(nsqd: Nsqd) -> tuple[str, int]:
    """Where an nsqd listens for HTTPS."""
    found = wait_until(lambda: re.search(r"HTTPS: listening on (\S+):(\d+)\n", nsqd.log), "the HTTPS address")
    assert found is not None
    return found[1], int(found[2])


def https(
    nsqd: Nsqd,
    context: ssl.SSLContext,
    method: str,
    target: str,
    body: bytes | None = None,
    headers: dict[str, str] | None = None,
) -> Answer:
    """One request over HTTPS on a connection of its own."""
    connection = http.client.HTTPSConnection(*https_address(nsqd), timeout=PATIENCE_S, context=context)
    try:
        connection.request(method, target, body, headers or {})
        response = connection.getresponse()
        return Answer(response.status, response.headers, response.read())
    finally:
        connection.close()


def is_json(text: str) -> bool:
    """Whether ``text`` is JSON."""
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
