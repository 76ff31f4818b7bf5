"""Mailboxes over emulated switches: a BCube, whose switches join only some hosts, and classes."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from wingbeat_lab import lab

FILES = """if True:
    import os, pathlib, sys, time
    from wingbeat_lab.lab import counters
    from wingbeat.transport.messages import Limits, open_mailbox

    class Files:  # hosts of a lab share their disk
        def __init__(self, folder):
            self.folder = pathlib.Path(folder)
        def set(self, key, value):
            part = self.folder / (key.replace("/", "_") + ".part")
            part.write_text(value)
            part.rename(part.with_suffix(""))
        def get(self, key, seconds):
            deadline = time.monotonic() + seconds
            while not (self.folder / key.replace("/", "_")).exists():
                if time.monotonic() > deadline:
                    raise TimeoutError(key)
                time.sleep(0.01)
            return (self.folder / key.replace("/", "_")).read_text()
        def has(self, key):
            return (self.folder / key.replace("/", "_")).exists()

    assert "torch" not in sys.modules
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    def sent():
        return {name: c.tx_bytes for name, c in counters.read().items() if name != "lo"}
"""

BCUBE = (
    FILES
    + """
    limits = Limits(silence=30)
    with open_mailbox(Files(sys.argv[1]), rank, range(size), seconds=30, limits=limits) as box:
        print([box.interfaces(peer) for peer in box.peers])
        before = sent()
        posted = []
        for peer in box.peers:
            posted.append(box.post(peer, rank, bytes(1_000_000)))
        got = []
        while len(got) < len(box.peers) or not all(each.arrived for each in posted):
            if (message := box.next(0.1)) is not None:
                got.append(message.kind)
        got.sort()
        after = sent()
        print(got)
        print([round((after[name] - before[name]) / 1e6) for name in ("eth0", "eth1")])
"""
)


def run(spec: str, code: str, folder: Path) -> dict[int, list[str]]:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        spec,
        [sys.executable, "-c", code, str(folder)],
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
    )
    assert result.exit_code == 0, lines
    return lines


@pytest.mark.lab
def test_each_pair_of_a_bcube_communicates_over_its_shared_switch(tmp_path: Path) -> None:
    lines = run("bcube:2x2@200mbit", BCUBE, tmp_path)
    level = {(0, 1): 0, (2, 3): 0, (0, 2): 1, (1, 3): 1, (0, 3): 0, (1, 2): 0}
    for rank, (reached, got, sent) in lines.items():
        peers = [peer for peer in range(4) if peer != rank]
        over = [level[min(rank, peer), max(rank, peer)] for peer in peers]
        assert reached == str([(each,) for each in over])
        assert got == str(peers)
        # One of a pair without a common switch goes by the host between, which passes it on.
        assert all(int(mb) >= 1 for mb in sent.strip("[]").split(", "))
