"""A process that is stopped for longer than the others wait, as in a paused VM, and goes on."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.ports import free_port
from helpers.returning import lines, made, start

SILENCE_S = 1.0
"""Seconds without a sign after which a worker is lost, in place of 5: the test is shorter."""

PAUSE_S = 8.0
"""Of which a step that is late takes 2, and a message in vain SILENCE_S."""

SCRIPT = f"""if True:
    import functools, os, sys, time, torch, wingbeat
    from wingbeat.methods.model_averaging import group_averager
    from wingbeat.strategies import parse
    config = group_averager.GeneratorConfig
    group_averager.GeneratorConfig = functools.partial(config, silence={SILENCE_S})
    torch.set_num_threads(1)
    world = wingbeat.init(timeout=60)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer = wingbeat.distribute(model, optimizer, parse(sys.argv[1]))
    torch.manual_seed(world.rank)
    made = 0
    while not os.path.exists(sys.argv[2]):
        optimizer.zero_grad()
        model(torch.randn(16, 64)).square().mean().backward()
        optimizer.step()
        made += 1
        print("made", made, flush=True)
        time.sleep(0.01)
    wingbeat.synchronize(model)
    bits = b"".join(value.detach().numpy().tobytes() for value in model.parameters())
    print("ended", bits.hex(), flush=True)
    wingbeat.shutdown()
"""


def pause(worker: subprocess.Popen[str], said: Iterator[list[str]]) -> None:
    """Stop a worker for so long that it is late, and then lost."""
    made(said, 20)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(PAUSE_S)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("strategy", "rank"),
    [("ripples", 1), ("ripples", 0), ("ripples:overlap=true", 1), ("diloco:every=4", 1)],
)
def test_stopped_worker_trains_on_and_all_end_equal(
    strategy: str, rank: int, tmp_path: Path
) -> None:
    """Rank 0, too, which has started the generator and has the store."""
    port, stop = free_port(), tmp_path / "stop"
    workers = [start(SCRIPT, each, port, strategy, stop) for each in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        pause(workers[rank], said[rank])
        workers[rank].send_signal(signal.SIGCONT)
        made(said[rank], 60)
        stop.touch()
        ends = [next(text for what, text in own if what == "ended") for own in said]
        assert ends[0] == ends[1] == ends[2]
        assert [worker.wait(30) for worker in workers] == [0, 0, 0]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("strategy", ["ripples", "diloco:every=4"])
def test_worker_stopped_until_others_ended_fails(strategy: str, tmp_path: Path) -> None:
    port, stop = free_port(), tmp_path / "stop"
    workers = [start(SCRIPT, each, port, strategy, stop) for each in range(3)]
    try:
        said = [lines(worker) for worker in workers]
        pause(workers[1], said[1])
        stop.touch()
        ends = [next(text for what, text in said[each] if what == "ended") for each in (0, 2)]
        assert ends[0] == ends[1]
        assert [workers[each].wait(30) for each in (0, 2)] == [0, 0]
        workers[1].send_signal(signal.SIGCONT)
        assert all(what != "ended" for what, _ in said[1]), "its model is not theirs"
        assert workers[1].wait(30) == 1
    finally:
        for worker in workers:
            worker.kill()
            worker.wait(10)
