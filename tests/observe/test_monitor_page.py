"""Commands of ``docs/how-to/monitor.md`` that need a running job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.code_blocks import ROOT, Block, blocks_of
from helpers.ports import free_port
from wingbeat.engine.advice import Facts, advise
from wingbeat.strategies import parse

PAGE = ROOT / "docs/how-to/monitor.md"
TOP, START, READ = (block for block in blocks_of(PAGE) if block.word("elsewhere"))

SCRIPT = """
import torch, wingbeat
world = wingbeat.init()
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
model, optimizer = wingbeat.distribute(model, optimizer, wingbeat.AllReduce())
while True:
    optimizer.zero_grad()
    model(torch.ones(8, 64)).square().mean().backward()
    optimizer.step()
"""


@pytest.fixture
def job(tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """Start the job of the page; yield the environment of other commands, and its port."""
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    port = str(free_port())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "WINGBEAT_RUNTIME_DIR": str(tmp_path / "run")}
    env.pop("WINGBEAT_TOP", None)
    assert "WINGBEAT_METRICS=9400" in START.code
    started = subprocess.Popen(
        ["bash", "-euc", START.code.replace("9400", port)],
        cwd=tmp_path,
        env={**env, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield env, port
    os.killpg(started.pid, signal.SIGTERM)  # torchrun ends its workers
    started.wait(60)


def output_of(block: Block, env: dict[str, str], port: str = "9400") -> str:
    """Run the commands of a block until they succeed; return their output."""
    deadline = time.monotonic() + 120
    while True:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code.replace("9400", port)],
            env=env,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode == 0 and "iterations/s; 2 workers" in done.stdout:
            return done.stdout
        assert time.monotonic() < deadline, (block.name, done.stdout, done.stderr)


@pytest.mark.slow
def test_commands_of_the_page_show_the_job_that_it_starts(job: tuple[dict[str, str], str]) -> None:
    env, port = job
    assert "AllReduce()" in output_of(TOP, env)
    text = output_of(READ, env, port)
    metrics, _, rest = text.partition('{"name"')
    state, _ = json.JSONDecoder().raw_decode('{"name"' + rest)
    assert [worker["rank"] for worker in state["workers"]] == [0, 1]
    quoted = {line.partition("{")[0] for line in metrics.splitlines() if line[:9] == "wingbeat_"}
    page = PAGE.read_text(encoding="utf-8")
    assert quoted
    assert all(f"`{name}`" in page for name in quoted)


def test_the_page_quotes_the_warnings() -> None:
    """In the order of its table."""
    always = parse("allreduce:compression=sketch:auto_disable=false")
    one_host, four = Facts(workers=4, hosts=1), Facts(workers=4, hosts=4)
    fast = Facts(workers=2, hosts=2, link_bytes_s=12.5e9, codec_bytes_s=2e9)
    warned = [
        (always, Facts(workers=1, hosts=1)),
        (always, one_host),
        (always, fast),
        (parse("geryon"), one_host),
        (parse("geryon:servers=1"), four),
        (parse("ripples"), one_host),
        (parse("diloco:every=1"), four),
    ]
    table = PAGE.read_text(encoding="utf-8").partition("| warning | decided by |")[2]
    rows = [row for row in table.partition("\n\n")[0].splitlines() if row.startswith("| `")]
    assert len(rows) == len(warned)
    for row, (strategy, facts) in zip(rows, warned, strict=True):
        [line] = advise(strategy, facts)
        words = [part for part in row.split("`")[1].split("…") if part.strip()]
        assert all(part.strip() in line for part in words), (row, line)
