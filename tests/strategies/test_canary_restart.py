"""A process that is killed while it trains with Canary, and restarted alone."""

from __future__ import annotations

import pytest

from helpers.ports import free_port
from helpers.returning import lines, start

SCRIPT = """if True:
    import sys, time, torch, wingbeat
    from torch import nn
    from wingbeat_lab.bench import models
    from wingbeat.methods.bounded_staleness.build import bounded_exchange
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=60)
    model = models.network(world.rank if world.returned else 0)  # replaced by pulled ones
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    strategy = wingbeat.Canary(s=8, p=2, colayers=4, encrypted=False)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    exchange = bounded_exchange(model)
    print("returned" if world.returned else "begun", exchange.machine.iteration, flush=True)
    images, answers, *_ = models.data()
    for x, y in models.batches(images, answers, rank=world.rank, workers=3, seed=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)  # three workers share two cores
        print("applied", int(exchange.applied), flush=True)
        if exchange.applied >= float(sys.argv[1]):
            break
    model.synchronize()
    begin = time.monotonic()
    sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    print("ended", sums, flush=True)
    wingbeat.shutdown()
    print("left", time.monotonic() - begin, flush=True)
"""


@pytest.mark.slow
def test_canary_killed_worker_rejoins_and_all_end_equal() -> None:
    port = free_port()
    workers = [start(SCRIPT, rank, port, 700) for rank in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        assert any(what == "applied" and int(value) >= 50 for what, value in said[0])
        workers[2].kill()
        workers[2].wait(10)
        now = next(int(value) for what, value in said[0] if what == "applied")
        # The other two workers continue, so the applied iterations still grow.
        assert any(what == "applied" and int(value) >= now + 60 for what, value in said[0])
        workers[2] = start(SCRIPT, 2, port, 700)
        said[2] = lines(workers[2])
        what, at = next(said[2])
        assert what == "returned"
        assert int(at) > 50
        ended = [dict(each for each in own if each[0] in ("ended", "left")) for own in said]
        assert ended[0]["ended"] == ended[1]["ended"] == ended[2]["ended"]
        assert all(float(own["left"]) < 20 for own in ended)
        assert [worker.wait(30) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
