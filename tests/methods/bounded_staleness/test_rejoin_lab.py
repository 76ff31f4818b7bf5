"""Workers in an emulated BCube: an interface is cut and restored, and a process is killed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from wingbeat_lab import lab
from wingbeat_lab.audit import audit

TRAIN = """if True:
    import logging, os, pathlib, signal, sys, time
    sys.path.insert(0, sys.argv[2])
    from wingbeat.methods.bounded_staleness.membership import join_workers
    from wingbeat.methods.bounded_staleness.communication import CommunicationThread
    from wingbeat_lab.lab import counters
    from wingbeat.methods.bounded_staleness.journal import Journal
    from wingbeat.methods.bounded_staleness.bound import StalenessBound
    from wingbeat.methods.bounded_staleness.worker import Worker
    from wingbeat.topologies.bcube import BCube
    assert "torch" not in sys.modules
    from helpers.communication import NumericReplica, combine, train

    class Files:  # the hosts of a lab share a disk
        def __init__(self, folder):
            self.folder = pathlib.Path(folder)
        def _place(self, key):
            return self.folder / key.replace("/", "_")
        def _part(self, key, value):
            part = self.folder / f"{key.replace('/', '_')}.{os.getpid()}"
            part.write_text(value)
            return part
        def set(self, key, value):
            self._part(key, value).rename(self._place(key))
        def claim(self, key, value):
            try:
                os.link(self._part(key, value), self._place(key))
            except FileExistsError:
                pass
            return self._place(key).read_text()
        def get(self, key, seconds):
            deadline = time.monotonic() + seconds
            while not self.has(key):
                if time.monotonic() > deadline:
                    raise TimeoutError(key)
                time.sleep(0.01)
            return self._place(key).read_text()
        def has(self, key):
            return self._place(key).exists()

    class Lines(logging.Handler):
        def emit(self, record):
            line = record.getMessage()
            print(line, flush=True)
            seen.append(line)
            sent.append(counters.read()["eth1"].tx_bytes)

    rank, n, bound, seen, sent = int(os.environ["RANK"]), 4, StalenessBound(2, 1, 2), [], []
    logging.getLogger("wingbeat").addHandler(Lines())
    store, cubes = Files(sys.argv[1]), BCube(2, 2)
    neighbours = [
        {w for level in range(2) for w in cubes.cube(me, level)} - {me} for me in range(n)
    ]
    joined = join_workers(
        store, rank, n, namespace="lab", neighbours=neighbours, suspect_after=5.0, seconds=60.0
    )
    machine = Worker(rank, n, bound, combine, incarnation=joined.incarnation)
    file = open(f"{sys.argv[1]}/journal{rank}.{joined.incarnation}", "w", buffering=1)
    replica = NumericReplica(n, 2)  # the thread holds it weakly
    thread = CommunicationThread(
        machine, joined.mailbox, replica, timeout=60.0,
        streams=joined.streams, membership=joined.membership,
        journal=Journal(file.write, rank, joined.incarnation, n, bound),
    )
    thread.start()
    at, stop = -1, None
    while stop is None or at < stop:
        (at,) = train(thread, n, 2, 1)
        time.sleep(0.02)
        if rank == 2 and not joined.incarnation and at >= 20:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and stop is None and any("used again" in line for line in seen):
            store.set("stop", str(at + 100))
        if stop is None and store.has("stop"):
            stop = int(store.get("stop", 1.0))
    thread.finish()
    if rank == 1:
        sent.append(counters.read()["eth1"].tx_bytes)
        mine = [number for number, line in enumerate(seen) if "eth1" in line]
        print(*(sent[number + 1] - sent[number] for number in mine))
    thread.close()
    print("incarnation", joined.incarnation)
"""

AGAIN = """if True:
    import subprocess, sys, time
    while subprocess.run([sys.executable, "-c", *sys.argv[1:]]).returncode == -9:
        time.sleep(2.5)  # the others detect its loss first
"""


@pytest.mark.slow
@pytest.mark.lab
def test_cut_interface_and_killed_process_recover(tmp_path: Path) -> None:
    lines: dict[int, list[str]] = {}
    tests = str(Path(__file__).parents[2])
    result = lab.run(
        "bcube:2x2@200mbit",
        [sys.executable, "-c", AGAIN, TRAIN, str(tmp_path), tests],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        fail="12s h1.eth1 down; 16s h1.eth1 up",
        timeout=180,
    )
    assert result.exit_code == 0, lines
    assert [lines[rank][-1] for rank in range(4)] == [
        "incarnation 0",
        "incarnation 0",
        "incarnation 1",
        "incarnation 0",
    ]
    for rank in (0, 1, 3):
        back = [line for line in lines[rank] if "rank 2 is back" in line]
        assert [line.partition(" [event=returned rank=2 ")[0] for line in back] == [
            f"rank {rank}: rank 2 is back"
        ], lines[rank]
    ended = (
        "rank 2 has ended unexpectedly: its connections are closed; the others continue without it"
    )
    assert any(f"rank {rank}: {ended}" in lines[rank] for rank in (0, 3)), lines
    assert not any("has been silent" in line for rank in range(4) for line in lines[rank]), lines
    assert [line for line in lines[1] if "rank 2 was reported lost by" in line], (
        "it has no way there"
    )
    assert not any("ended without" in line and ended not in line for rank in range(4)
                   for line in lines[rank]), lines  # fmt: skip
    cut = [line for line in lines[1] if line.startswith("rank 1: eth1")]
    assert len(cut) == 2, lines[1]
    assert "has received nothing from rank 3" in cut[0]
    assert "[event=path-cut rank=1 " in cut[0]
    assert cut[1].startswith("rank 1: eth1 is used again [event=path-restored rank=1 ")
    during, after = map(int, lines[1][-2].split())
    assert 4 * during < after, lines[1][
        -2
    ]  # the kernel sends what it held when the interface is back
    journals = sorted(tmp_path.glob("journal*"))
    assert len(journals) == 5
    found = audit(path.read_text().splitlines(keepends=True) for path in journals)
    assert not found.findings, found.findings
    assert found.pulls >= 1
    settled = [json.loads(path.read_text().splitlines()[-1]) for path in journals]
    assert sum("drained" in words for words in settled) == 4
