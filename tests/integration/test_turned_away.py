"""An nsqd that closes every new connection, as one with too many clients does: the same failure each time."""

from __future__ import annotations

import logging
import socket
import struct
import threading

import pytest
from tests.integration.daemons import wait_until
from tests.integration.flavours import FLAVOURS, opened

RESET = struct.pack("ii", 1, 0)


@pytest.mark.parametrize("name", FLAVOURS)
def test_it_is_told_once_whether_it_closes_or_resets(name, caplog):
    turned_away: list[int] = []

    def turn_away() -> None:
        while len(turned_away) < 3:
            connection, _ = server.accept()
            with connection:
                connection.recv(4)  # what it begins with has come
                if len(turned_away) % 2:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                else:
                    connection.shutdown(socket.SHUT_WR)
                    while connection.recv(65536):
                        pass
            turned_away.append(1)

    with socket.create_server(("127.0.0.1", 0)) as server, opened(name) as flavour:
        thread = threading.Thread(target=turn_away)
        thread.start()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        caplog.set_level(logging.WARNING, "flintmq.client")
        with flavour.consumer("t", "c", print, nsqd_tcp_addresses=address):
            wait_until(lambda: len(turned_away) == 3)
        thread.join()
    told = {text.partition("failed: ")[2] for text in caplog.messages if "while waiting for" in text}
    assert len(told) == 1, caplog.messages
    assert "closed by nsqd while waiting for the answer to IDENTIFY" in told.pop()
