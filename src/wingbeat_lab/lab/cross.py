"""Cross-traffic: bulk TCP flows between hosts of a fat-tree on which no worker runs.

One process on each of these hosts sends to the next leaf switch's and receives from the one
before, so that every trunk carries the same in both directions. Packets are unmarked (best effort),
as those of other jobs on a shared network. The kernel paces each connection
(``SO_MAX_PACING_RATE``), pages are sent without a copy (``sendfile``) and what arrives is dropped
unread (``MSG_TRUNC``), because all hosts share this machine's processors.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from wingbeat_lab.lab import counters
from wingbeat_lab.lab.plan import Host, NetworkPlan
from wingbeat_lab.lab.spec import LabSpec

PORT = 29600
"""Any port is free on a host of one's own."""
LOOK_S = 0.1
"""Between two looks at the counters."""
MEET_S = 30.0
"""For the host at the other end to listen."""
PIECE = 1 << 20
WAKE = 1 << 18
"""Bytes that have to be there before a receiver is woken."""
SO_MAX_PACING_RATE = 47
"""Linux's number, which Python's ``socket`` lacks."""

_CODE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from wingbeat_lab.lab.cross import main; main()"
)


class Sample(NamedTuple):
    """What one host had received at one time.

    Attributes:
        when: seconds of the machine's monotonic clock.
        bytes: received on all interfaces since the lab was made, by the kernel's counters.
        cpu_s: that its generator has used.
    """

    when: float
    bytes: int
    cpu_s: float

    @classmethod
    def read(cls, line: str) -> Sample:
        """Read what a generator prints.

        Raises:
            ValueError: it is something else.
        """
        values = json.loads(line)
        if not isinstance(values, list) or len(values) != 3:
            raise ValueError(line)
        return cls(*values)


def commands(plan: NetworkPlan, spec: LabSpec) -> Iterator[tuple[Host, list[str]]]:
    """Yield each host of cross-traffic, and the command that makes its share of it."""
    others = plan.hosts[len(plan.hosts) - plan.others :]
    for number, host in enumerate(others):
        after = others[(number + 1) % len(others)]
        job = {
            "own": [i.address for i in host.interfaces],
            "to": [i.address for i in after.interfaces],
            "name": after.name,
            "flows": spec.cross_flows,
            "rate": spec.cross,
        }
        source = str(Path(__file__).parents[2])
        yield host, [sys.executable, "-I", "-S", "-c", _CODE, source, json.dumps(job)]


def main() -> None:
    """Send and receive until killed; print a `Sample` every tenth of a second."""
    job: dict[str, Any] = json.loads(sys.argv[2])
    page = os.memfd_create("wingbeat-cross")
    os.ftruncate(page, PIECE)
    for address in job["own"]:
        listener = socket.create_server((address, PORT), family=_family(address), backlog=128)
        _thread(_receive_all, listener)
    for address in job["to"]:
        for _ in range(job["flows"]):
            pace = max(1, job["rate"] // 8 // job["flows"])
            _thread(_send, address, job["name"], pace, page)
    while True:
        received = sum(i.rx_bytes for name, i in counters.read().items() if name != "lo")
        used = os.times()
        print(json.dumps([time.monotonic(), received, used.user + used.system]), flush=True)
        time.sleep(LOOK_S)


def _send(address: str, name: str, bytes_per_s: int, page: int) -> None:
    with _connect(address, name) as flow:
        flow.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, struct.pack("Q", bytes_per_s))
        while True:
            os.sendfile(flow.fileno(), page, 0, PIECE)


def _connect(address: str, name: str) -> socket.socket:
    deadline = time.monotonic() + MEET_S
    while True:
        flow = socket.socket(_family(address))
        with contextlib.suppress(OSError):
            flow.settimeout(max(0.1, deadline - time.monotonic()))
            flow.connect((address, PORT))
            flow.settimeout(None)
            return flow
        flow.close()
        if time.monotonic() > deadline:
            raise TimeoutError(f"{name} ({address}) did not listen within {MEET_S:g} s")
        time.sleep(0.05)  # the other host's process may not have started


def _receive_all(listener: socket.socket) -> None:
    while True:
        flow, _ = listener.accept()
        flow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, WAKE)
        _thread(_drop, flow)


def _drop(flow: socket.socket) -> None:
    room = bytearray(PIECE)
    while flow.recv_into(room, PIECE, socket.MSG_TRUNC):
        pass
    raise ConnectionError("the host before closed a flow")


def _thread(work: Callable[..., None], *args: Any) -> None:
    """Run in a thread whose failure is the process's."""

    def run() -> None:
        try:
            work(*args)
        except OSError as err:
            print(err, flush=True)
            os._exit(1)

    threading.Thread(target=run, daemon=True).start()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
