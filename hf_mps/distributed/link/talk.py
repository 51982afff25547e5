"""What two machines say to each other to measure the link between them, over one TCP connection.

The one that asks connects; the one that answers (`hf-mps doctor --serve`) tells its facts, sends pings back with its
clock's time, takes and sends blocks for as long as a measurement lasts, and tries to connect back. Nothing that comes
over the connection is run, opened or stored.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

PORT = 29477
"""Where a machine answers: beside torchrun's 29400 and 29500, so that both can run."""
GREETING = b"hf_mps link 1\n"
HEADER = struct.Struct("!cI")
FACTS, PING, BLOCK, END, FLOOD, BACK, BYE = b"F", b"P", b"B", b"E", b"W", b"K", b"Q"
LARGEST = 1 << 20
PINGS = 50
BLOCK_BYTES = 1 << 18
SECONDS = 1.0
"""How long each direction is flooded."""
WARM_UP = 0.2
"""The part of it that is not counted: TCP finds its speed."""
PATIENCE = 5.0
"""Seconds to wait for a connection or an answer: a firewall that drops packets says nothing."""
BACK_PATIENCE = 3.0


class NotAPeer(OSError):
    """Something answers that is not this program."""


@dataclass(frozen=True)
class Measured:
    """A link as one machine sees it: seconds, and bits a second.

    `round_trip` is the median of PINGS; `clock` is by how much the other clock is ahead, right to half the least round
    trip (RFC 5905's offset); `back` says why the other machine could not connect to this one, empty where it could.
    """

    round_trip: float
    least_round_trip: float
    there: float
    here: float
    clock: float
    back: str
    facts: Mapping[str, Any]


class Line:
    """A connection that carries messages of a kind and a length. Raises OSError where the other end goes away."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connected.settimeout(PATIENCE)
        self._from = connected.makefile("rb")

    def greet(self) -> None:
        """Exchange the first line. Raises NotAPeer where the other end says something else."""
        self.socket.sendall(GREETING)
        said = self._from.read(len(GREETING))
        if said != GREETING:
            raise NotAPeer("another program, or another version of this one, answers")

    def send(self, kind: bytes, payload: bytes = b"") -> None:
        self.socket.sendall(HEADER.pack(kind, len(payload)) + payload)

    def receive(self) -> tuple[bytes, bytes]:
        kind, length = HEADER.unpack(self._read(HEADER.size))
        if length > LARGEST:
            raise NotAPeer("a message of this program is shorter")
        return kind, self._read(length)

    def flood(self) -> None:
        """Send blocks for SECONDS, and then that this was all."""
        block, until = bytes(BLOCK_BYTES), time.monotonic() + SECONDS
        while time.monotonic() < until:
            self.send(BLOCK, block)
        self.send(END)

    def soak_up(self) -> float:
        """Receive such blocks and return the bits a second that came after the warm-up, by this machine's clock."""
        began = time.monotonic()
        counted, since, last = 0, began, began
        while True:
            kind, block = self.receive()
            if kind != BLOCK:
                break
            last = time.monotonic()
            if last - began < WARM_UP:
                since = last
            else:
                counted += len(block)
        return 8 * counted / (last - since) if last > since else 0.0

    def _read(self, length: int) -> bytes:
        read = self._from.read(length)
        if read is None or len(read) < length:
            raise ConnectionResetError("the other end closed the connection")
        return read


def ask(host: str, facts: Mapping[str, Any], port: int = PORT) -> tuple[Measured, socket.socket]:
    """Measure the link to `host`, which answers at `port`, and return it with the connected socket (to be closed).

    Takes about SECONDS in each direction. Raises OSError where there is no connection or it breaks off.
    """
    connected = socket.create_connection((host, port), timeout=PATIENCE)
    try:
        line = Line(connected)
        line.greet()
        line.send(FACTS, json.dumps(facts).encode())
        theirs = json.loads(line.receive()[1])
        trips = [_ping(line) for _ in range(PINGS)]
        line.send(FLOOD)
        line.flood()
        there = float(line.receive()[1])
        line.send(END)
        here = line.soak_up()
        back = _called_back(line)
        line.send(BYE)
    except BaseException:
        connected.close()
        raise
    least, clock = min(trips)
    return Measured(median(trip for trip, _ in trips), least, there, here, clock, back, theirs), connected


def _ping(line: Line) -> tuple[float, float]:
    """Return a round trip and the other clock's lead, in seconds."""
    sent, began = time.time_ns(), time.perf_counter()
    line.send(PING)
    theirs = struct.unpack("!q", line.receive()[1])[0]
    trip = time.perf_counter() - began
    return trip, (theirs - sent) / 1e9 - trip / 2


def _called_back(line: Line) -> str:
    """Have the other machine connect to this one; return what stopped it, empty where nothing did."""
    with socket.create_server(("", 0), family=line.socket.family) as listening:
        line.send(BACK, struct.pack("!H", listening.getsockname()[1]))
        return line.receive()[1].decode()


def answer(connected: socket.socket, facts: Mapping[str, Any]) -> Mapping[str, Any]:
    """Answer one machine that asks, to its end; return its facts. Raises OSError where it goes away or is no peer."""
    line = Line(connected)
    line.greet()
    theirs: Mapping[str, Any] = {}
    while True:
        kind, payload = line.receive()
        if kind == FACTS:
            theirs = json.loads(payload)
            line.send(FACTS, json.dumps(facts).encode())
        elif kind == PING:
            line.send(PING, struct.pack("!q", time.time_ns()))
        elif kind == FLOOD:
            line.send(FLOOD, repr(line.soak_up()).encode())
        elif kind == END:
            line.flood()
        elif kind == BACK:
            line.send(BACK, _call_back(connected, struct.unpack("!H", payload)[0]).encode())
        else:
            return theirs


def _call_back(connected: socket.socket, port: int) -> str:
    try:
        socket.create_connection((connected.getpeername()[0], port), timeout=BACK_PATIENCE).close()
    except OSError as error:
        return str(error) or type(error).__name__
    return ""


def serve(facts: Mapping[str, Any], tell: Callable[[str, Mapping[str, Any] | OSError], None], port: int = PORT) -> None:
    """Answer whoever asks, one after the other, until KeyboardInterrupt; `tell` hears of each with its address.

    Raises OSError where the port is taken.
    """
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    with socket.create_server(("", port), family=family, dualstack_ipv6=both) as listening:
        while True:
            connected, address = listening.accept()
            with connected:
                try:
                    tell(address[0], answer(connected, facts))
                except (OSError, ValueError, struct.error) as error:
                    tell(address[0], error if isinstance(error, OSError) else NotAPeer(str(error)))
