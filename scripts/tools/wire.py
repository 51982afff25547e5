"""A wire between network interfaces, in user space: every frame comes out of the interface of its receiver, later.

`python scripts/tools/wire.py --latency 0.0003 port0 port1 …` runs inside the network namespace that holds the ports
(scripts/tools/hosts.py starts it there); it prints `ready` and ends when its standard input does. Linux's own way to
delay packets is the queue `netem`, which many kernels of virtual machines and containers are built without.

Frames are read and written with the kernel's header for offloads in front (PACKET_VNET_HDR of packet(7)): TCP's 64 KiB
pieces stay whole, so a gigabit is 2,000 frames a second and not 83,000.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import select
import socket
import sys
import time

ETH_P_ALL = 3
SO_RCVBUFFORCE = 33
SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING = 263, 15, 23
OFFLOAD_HEADER = 10
"""Bytes of `struct virtio_net_hdr` in front of each frame."""
ADDRESS = slice(OFFLOAD_HEADER, OFFLOAD_HEADER + 6)
SENDER = slice(OFFLOAD_HEADER + 6, OFFLOAD_HEADER + 12)
LARGEST = 1 << 17
BUFFER = 1 << 24


def port(interface: str) -> socket.socket:
    """Return a socket that reads and writes the whole frames of `interface`."""
    made = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ALL))
    made.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    made.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
    made.bind((interface, 0))
    made.setblocking(False)
    return made


class Wire:
    """Ports that hand each other their frames, `latency` seconds after they came; it learns who is behind which."""

    def __init__(self, ports: list[socket.socket], latency: float) -> None:
        self.ports, self.latency = ports, latency
        self._behind: dict[bytes, socket.socket] = {}
        self._under_way: list[tuple[float, int, bytes, socket.socket]] = []
        self._order = itertools.count()

    def run(self) -> None:
        """Carry frames until standard input ends."""
        watched = [*self.ports, sys.stdin]
        while True:
            wait = self._under_way[0][0] - time.monotonic() if self._under_way else None
            ready, _, _ = select.select(watched, [], [], None if wait is None else max(0.0, wait))
            if sys.stdin in ready:
                return
            for came_from in ready:
                self._take(came_from)
            self._deliver()

    def _take(self, came_from: socket.socket) -> None:
        """Note every frame that waits at a port with the time at which it is due."""
        due = time.monotonic() + self.latency
        while True:
            try:
                frame = came_from.recv(LARGEST)
            except BlockingIOError:
                return
            self._behind[frame[SENDER]] = came_from
            receiver = self._behind.get(frame[ADDRESS])
            for out in self.ports if receiver is None else [receiver]:
                if out is not came_from:
                    heapq.heappush(self._under_way, (due, next(self._order), frame, out))

    def _deliver(self) -> None:
        now = time.monotonic()
        while self._under_way and self._under_way[0][0] <= now:
            _, _, frame, out = heapq.heappop(self._under_way)
            try:
                out.send(frame)
            except OSError:  # the port is down or its queue full: a wire loses the frame, and TCP sends it again
                continue


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("ports", nargs="+")
    parser.add_argument("--latency", type=float, required=True, help="seconds in one direction")
    words = parser.parse_args()
    wire = Wire([port(name) for name in words.ports], words.latency)
    print("ready", flush=True)
    wire.run()


if __name__ == "__main__":
    main()
