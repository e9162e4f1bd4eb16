"""nsqd on unix sockets: what is not host:port in ``--tcp-address`` and ``--http-address`` is a path (reference 1.1)."""

import json
import signal
import socket
import struct
import subprocess
import sys
import time

from tests.integration.daemons import PATIENCE_S

from flintmq.wire import commands


def connect(path):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(PATIENCE_S)
        try:
            client.connect(str(path))
            return client
        except OSError:
            client.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def frame(stream):
    size, kind = struct.unpack(">II", stream.read(8))
    return kind, stream.read(size - 4)


def ask(path, request):
    with connect(path) as client:
        client.sendall(request)
        with client.makefile("rb") as stream:
            return stream.read()


def test_both_listeners_on_paths_and_again_after_a_kill(tmp_path):
    tcp, http = tmp_path / "nsqd.sock", tmp_path / "http.sock"
    data = tmp_path / "data"
    data.mkdir()
    command = [
        *(sys.executable, "-m", "flintmq", "nsqd"),
        *(f"--tcp-address={tcp}", f"--http-address={http}", f"--data-path={data}"),
    ]
    for round_number in range(2):
        nsqd = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        try:
            with connect(tcp) as client, client.makefile("rb") as stream:
                client.sendall(commands.MAGIC_V2 + commands.pub("t", b"hello %d" % round_number))
                assert frame(stream) == (0, b"OK")
            with connect(tcp) as client, client.makefile("rb") as stream:
                client.sendall(commands.MAGIC_V2 + commands.sub("t", "c") + commands.rdy(1))
                assert frame(stream) == (0, b"OK")
                kind, message = frame(stream)
                assert (kind, message[26:]) == (2, b"hello %d" % round_number)
                client.sendall(commands.fin(message[10:26]))
                client.sendall(commands.pub("other", b"x"))
                assert frame(stream) == (0, b"OK"), "what was sent before has been taken"
            for target in ("topic/create?topic=t", "channel/create?topic=t&channel=d"):  # written with progress
                head = f"POST /{target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
                assert ask(http, head.encode()).startswith(b"HTTP/1.1 200 ")
            answer = ask(http, b"GET /info HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            info = json.loads(answer.partition(b"\r\n\r\n")[2])
            assert (info["tcp_port"], info["http_port"]) == (-1, -1)
        finally:
            # a killed nsqd leaves its socket files behind, which must not stop the next one
            nsqd.send_signal(signal.SIGKILL if round_number == 0 else signal.SIGTERM)
            _, log = nsqd.communicate(timeout=PATIENCE_S)
        assert f"TCP: listening on {tcp}\n" in log
        assert f"HTTP: listening on {http}\n" in log
    assert nsqd.returncode == 0
