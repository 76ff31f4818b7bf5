"""Averages of models on hosts with two cards: both carry them, whatever the strategy."""

from __future__ import annotations

import json
import sys

import pytest

from wingbeat_lab import lab

ROWS = ["ripples:policy=static", "localsgd:every=1", "diloco:every=1", "adpsgd:overlap=false"]
STEPS, MB = 4, 2
LEAST = 0.25
"""Of the bytes, that each card sends."""

TRAIN = """if True:
    import json, sys, torch, wingbeat
    from wingbeat_lab.lab import counters
    from wingbeat.strategies import parse
    torch.set_num_threads(1)
    wingbeat.init(timeout=60)
    def sent():
        return [counters.read()[card].tx_bytes for card in ("eth0", "eth1")]
    steps, mb, *rows = sys.argv[1:]
    found = {}
    for row in rows:
        model = torch.nn.Linear(1000, int(mb) * 250, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        model, optimizer = wingbeat.distribute(model, optimizer, parse(row))
        model.weight.grad = torch.ones_like(model.weight)
        before = sent()
        for _ in range(int(steps)):
            optimizer.step()
        found[row] = [after - first for first, after in zip(before, sent())]
        wingbeat.release(model, optimizer)
    print(json.dumps(found), flush=True)
    wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.lab
def test_averages_use_both_interfaces_of_a_host() -> None:
    lines: dict[int, list[str]] = {}
    result = lab.run(
        "star:2x2@500mbit",
        [sys.executable, "-c", TRAIN, str(STEPS), str(MB), *ROWS],
        per_host=2,
        env={"WINGBEAT_TOP": "off"},
        on_line=lambda rank, line: lines.setdefault(rank, []).append(line),
        timeout=240,
    )
    assert result.exit_code == 0, lines
    found = [json.loads(own[-1]) for own in lines.values()]
    assert len(found) == 4
    for row in ROWS:
        sent = [sum(own[row][card] for own in found) for card in (0, 1)]
        assert sum(sent) > STEPS * MB * 1e6, f"{row}: {sent} bytes are less than an average"
        assert min(sent) > LEAST * sum(sent), f"{row}: {sent} bytes by card"
