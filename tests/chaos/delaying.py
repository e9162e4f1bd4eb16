"""Holds back packets: a tun device of the router through which delayed pairs of machines are routed.

Reads lines ``source target delay_s loss`` from its input, and packets from the device; writes each packet back when its
time has come. The packets of a pair keep their order. What waits is bounded: beyond that packets are dropped, as a
router drops them.

Rules of this file: it runs by itself, in the namespace of the router, and imports nothing of this project.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import random
import select
import socket
import struct
import sys
import time

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_PACKET_BYTES = 65536
_WAITING_MAX = 20_000


def _open_tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def main() -> None:
    """Delay until the input ends."""
    tun = _open_tun(sys.argv[1])
    print("ready", flush=True)
    delays: dict[bytes, tuple[float, float]] = {}
    last: dict[bytes, float] = {}
    waiting: list[tuple[float, int, bytes]] = []
    lines = b""
    number = 0
    chance = random.Random(0)
    while True:
        timeout_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([tun, 0], [], [], timeout_s)
        if 0 in readable:
            data = os.read(0, _PACKET_BYTES)
            if not data:
                return
            *whole, lines = (lines + data).split(b"\n")
            for line in whole:
                source, target, *numbers = line.decode().split()
                delays[socket.inet_aton(source) + socket.inet_aton(target)] = float(numbers[0]), float(numbers[1])
        if tun in readable:
            try:
                packet = os.read(tun, _PACKET_BYTES)
            except BlockingIOError:
                packet = b""
            if len(packet) >= 20 and packet[0] >> 4 == 4:
                pair = packet[12:20]
                delay_s, loss = delays.get(pair, (0.0, 0.0))
                if chance.random() >= loss and len(waiting) < _WAITING_MAX:
                    due = max(last.get(pair, 0.0), time.monotonic() + delay_s * chance.uniform(0.5, 1.5))
                    last[pair] = due
                    number += 1
                    heapq.heappush(waiting, (due, number, packet))
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            try:
                os.write(tun, heapq.heappop(waiting)[2])
            except OSError:  # nobody takes it now, as it may be with any packet
                continue


if __name__ == "__main__":
    main()
