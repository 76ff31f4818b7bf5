"""The exact set of addresses at which a running job listens, as docs/how-to/security.md has it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

SCRIPT = """
import os, pathlib, sys, time
import torch, wingbeat
from wingbeat_lab import baselines

wingbeat.init()
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = wingbeat.distribute(model, optimizer, baselines.parse(sys.argv[1]))
for step in range(3):
    optimizer.zero_grad()
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
wingbeat.synchronize(model)
pathlib.Path(sys.argv[2], f"ready-{os.environ['RANK']}").touch()
sys.stdin.read()  # until the test is done
"""


ROLES = ("observe.supervisor", "model_averaging", "parameter_server", "distributed.run", "train.py")
"""Parts of the command lines of a job's processes; the first that is contained counts."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def listening(root: psutil.Process) -> dict[str, list[tuple[str, int]]]:
    """Addresses and ports at which each process below ``root`` listens, by its place and role."""
    found = {}
    for each in [root, *root.children(recursive=True)]:
        words = each.cmdline()
        role = next((name for name in ROLES if any(name in word for word in words)), "?")
        found[f"{each.pid} {role}"] = [
            (one.laddr.ip, one.laddr.port)
            for one in each.net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        ]
    return found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "sockets", "service"),
    [
        ("dear", 3, ""),  # liveness, torch's gloo group (which drops all), collectives
        ("canary", 4, ""),  # and messages
        ("ripples", 4, "model_averaging"),
        ("parameterserver", 4, "parameter_server"),
    ],
)
def test_job_on_one_host_listens_on_loopback_except_for_the_store_of_torchrun(
    tmp_path: Path, strategy: str, sockets: int, service: str
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    port, metrics = free_port(), free_port()
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    words += ["--master-port", str(port), "train.py", strategy, str(tmp_path)]
    env = os.environ | {
        "WINGBEAT_METRICS": str(metrics),
        "WINGBEAT_RUNTIME_DIR": str(tmp_path / "run"),
        "WINGBEAT_TOP": "on",
    }
    ready = [tmp_path / f"ready-{rank}" for rank in range(2)]
    with subprocess.Popen(words, cwd=tmp_path, env=env, stdin=subprocess.PIPE) as job:
        deadline = time.monotonic() + 120
        try:
            while not all(path.exists() for path in ready):
                assert job.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.1)
            while True:  # the supervisor starts beside training
                found = listening(psutil.Process(job.pid))
                if any(("127.0.0.1", metrics) in places for places in found.values()):
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
        finally:
            job.terminate()
    by_role: dict[str, list[list[tuple[str, int]]]] = {}
    for name, places in found.items():
        by_role.setdefault(name.partition(" ")[2], []).append(places)
    [[store]] = by_role.pop("distributed.run")
    assert store[0] in ("::", "0.0.0.0")
    assert store[1] == port
    assert by_role.pop("observe.supervisor") == [[("127.0.0.1", metrics)]]
    assert {ip for each in by_role.values() for places in each for ip, _ in places} == {"127.0.0.1"}
    counts = {role: sorted(map(len, each)) for role, each in by_role.items()}
    assert counts == {"train.py": [sockets, sockets]} | ({service: [1]} if service else {})
