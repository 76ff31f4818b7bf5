"""Processes that are killed during or after a colayer change, and restarted."""

from __future__ import annotations

import pytest

from helpers.ports import free_port
from helpers.returning import lines, start

SCRIPT = """if True:
    import os, signal, sys, time, torch, wingbeat
    from torch import nn
    from wingbeat_lab.bench import models
    from wingbeat.methods.bounded_staleness.colayers import LayerProfiler
    from wingbeat.methods.bounded_staleness.build import bounded_exchange
    torch.set_num_threads(1)
    dies, moment = sys.argv[2], {"said": "measurements", "decided": "set_colayers"}.get(sys.argv[2])
    world = wingbeat.init(timeout=60)
    if world.rank == 2 and not world.returned and moment:
        setattr(LayerProfiler, moment, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    model = models.network(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    strategy = wingbeat.Canary(s=8, p=2, colayers=2, measured=True, encrypted=False)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    exchange = bounded_exchange(model)
    print("returned" if world.returned else "begun", exchange.machine.epoch, flush=True)
    images, answers, *_ = models.data()
    for x, y in models.batches(images, answers, rank=world.rank, workers=3, seed=1):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        time.sleep(0.02)
        print("applied", int(exchange.applied), flush=True)
        if exchange.applied >= float(sys.argv[1]):
            break
    model.synchronize()
    sums = [float(p.detach().double().abs().sum()) for p in model.parameters()]
    print("ended", [exchange.machine.epoch, *sums], flush=True)
    wingbeat.shutdown()
"""


@pytest.mark.slow
@pytest.mark.parametrize("dies", ["said", "decided", "later"])
def test_worker_killed_during_colayer_change_rejoins(dies: str) -> None:
    port = free_port()
    workers = [start(SCRIPT, rank, port, 600, dies) for rank in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        if dies == "later":
            assert any(what == "applied" and int(value) >= 30 for what, value in said[0])
            workers[2].kill()
        workers[2].wait(180)  # starting may take long
        now = next(int(value) for what, value in said[0] if what == "applied")
        assert any(what == "applied" and int(value) >= now + 40 for what, value in said[0])
        workers[2] = start(SCRIPT, 2, port, 600, dies)
        said[2] = lines(workers[2])
        what, epoch = next(said[2])
        assert what == "returned"
        assert dies == "said" or int(epoch) == 1  # otherwise the retry may still be due
        ended = [next(value for what, value in own if what == "ended") for own in said]
        assert ended[0] == ended[1] == ended[2]
        assert ended[0].startswith("[1, ")
        assert [worker.wait(60) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
