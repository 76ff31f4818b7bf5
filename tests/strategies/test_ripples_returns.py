"""A process that is killed while models are averaged, and started again alone by its script."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.returning import lines, made, start

SCRIPT = """if True:
    import os, sys, time, torch, wingbeat
    from torch import nn
    from wingbeat_lab.bench import models
    from wingbeat.strategies import parse
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=60)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = model.state_dict(), optimizer.state_dict()
    model, optimizer = wingbeat.distribute(model, optimizer, parse(sys.argv[1]))
    for target, state in zip((model, optimizer), states) if world.returned else ():
        try:  # an older state, as of a checkpoint that a script loads whenever there is one
            target.load_state_dict(state)
            sys.exit("loaded")
        except wingbeat.errors.UsageError as error:
            assert "which was started again" in str(error), error
    images, labels, _, _ = models.data()
    x, y = images.flatten(1), labels
    loss_of = nn.CrossEntropyLoss()
    with torch.no_grad():
        print("begun", float(loss_of(model(x), y)), flush=True)
    made = 0
    while not os.path.exists(sys.argv[2]):
        chosen = torch.randint(len(x), (32,))
        optimizer.zero_grad()
        loss_of(model(x[chosen]), y[chosen]).backward()
        optimizer.step()
        made += 1
        print("made", made, flush=True)
        time.sleep(0.002)
    wingbeat.synchronize(model)
    with torch.no_grad():
        total = sum(float(value.double().sum()) for value in model.parameters())
        print("ended", total, float(loss_of(model.eval()(x), y)) < 1.0, flush=True)
    wingbeat.shutdown()
"""


RETURNING = [
    "ripples",
    "ripples:overlap=true",
    "localsgd:every=4",
    "diloco:every=6",
    "diloco:every=8,fragments=2,delay=1",
]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", RETURNING)
def test_killed_worker_rejoins_and_all_end_equal(strategy: str, tmp_path: Path) -> None:
    port, stop = free_port(), tmp_path / "stop"
    workers = [start(SCRIPT, rank, port, strategy, stop) for rank in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        now = made(said[0], 150)
        workers[2].kill()
        workers[2].wait(10)
        made(said[0], now + 100)  # the others go on without it, once it is missed
        workers[2] = start(SCRIPT, 2, port, strategy, stop)
        said[2] = lines(workers[2])
        what, loss = next(said[2])
        assert what == "begun"
        assert float(loss) < 2.0, "it goes on from where the others are, not from the beginning"
        made(said[2], 50)
        stop.touch()
        ended = [next(text for what, text in own if what == "ended") for own in said]
        assert ended[0] == ended[1] == ended[2]
        assert ended[0].endswith("True\n")
        assert [worker.wait(30) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
