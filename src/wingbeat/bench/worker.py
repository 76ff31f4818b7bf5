"""One worker of a bench: ``python -m wingbeat.bench.worker CONFIG RESULT``.

Rows take turns, A B C A B C, so that a machine that slows down slows all of them. A row's model
lives only as long as its turn: memory never holds two.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wingbeat
from wingbeat.bench import attach, halves, measure, models, tracing
from wingbeat.bench.attached import Attached
from wingbeat.bench.config import BenchConfig, Checked
from wingbeat.bench.contenders import Contender
from wingbeat.bench.protocol import ONLY, say
from wingbeat.bench.results import Block
from wingbeat.bench.speedup import Timings
from wingbeat.errors import WingbeatError
from wingbeat.lab import counters
from wingbeat.transport.world import World

TRACED = 3
"""Iterations recorded of each row when a trace is asked for."""

BROKEN_DOWN = 7
"""Iterations recorded of each row when a breakdown is asked for; the first does not count."""


@dataclass
class Worker:
    """What one process needs to know of itself."""

    checked: Checked
    world: World
    done: int = 0
    said: float = 0.0
    decided: dict[int, bool] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.world.rank

    def tick(self, row: int, round_: int, iteration: int) -> None:
        """Count an iteration; rank 0 tells the parent, at most ten times a second."""
        self.done += 1
        now = time.monotonic()
        if self.rank == 0 and now - self.said >= 0.1:
            self.said = now
            say("progress", done=self.done, row=row, round=round_, iteration=iteration)


def run_block(worker: Worker, row: int, round_: int) -> Block | None:
    """One row's turn; rank 0 gets the result, the others None."""
    config = worker.checked.config
    contender = worker.checked.rows[row]
    built = _build(worker)
    maker = attach.optimizer_maker(config.optimizer, paced=worker.checked.model.profile is not None)
    count = config.share(round_)
    # Workers wait for each other before the last warm-up iteration, never right before a timed
    # one: work put off into the next forward would find time to finish unseen.
    with attach.attached(contender, built.model, maker) as made:
        lead = min(1, config.warmup)
        for i in range(config.warmup - lead):
            attach.step(made, built.loss)
            worker.tick(row, round_, i - config.warmup)
        _decide(worker, row, made, built.loss)
        before = _settled_bytes(worker, made)
        for _ in range(lead):
            attach.step(made, built.loss)
            worker.tick(row, round_, -1)
        starts = [time.monotonic()]
        for i in range(count):
            loss = attach.step(made, built.loss)
            starts.append(time.monotonic())
            worker.tick(row, round_, i)
        sent = (_settled_bytes(worker, made) - before) / (count + lead)
        accuracy = built.accuracy(made.model)
        coded = made.coded
        merging = None if made.control is None else made.control.merging
        merge = None if merging is None else merging.report()
    return _gather(worker, row, starts, sent, loss, accuracy, coded, merge)


def _decide(
    worker: Worker, row: int, made: Attached, loss: Callable[[torch.nn.Module], torch.Tensor]
) -> None:
    """Train until the row's plan is made and it is known whether its codec stays on.

    What was found about the codec holds for all rounds.
    """
    trial = None if made.control is None else made.control.trial
    if trial is not None and row in worker.decided:
        trial.decide(worker.decided[row])
    if not made.deciding():
        return
    trying = trial is not None and trial.active()
    if worker.rank == 0:
        text = worker.checked.rows[row].text
        what = "whether its codec stays on" if trying else "what its plan depends on"
        say("phase", text=f"{text}: measuring {what}")
    while made.deciding():  # all workers decide in the same iteration
        attach.step(made, loss)
    if trying:
        worker.decided[row] = bool(made.coded)


def measure_round(worker: Worker, round_: int) -> list[Timings]:
    """Measure computation alone and communication alone; everyone gets all workers' figures."""
    if worker.rank == 0:
        config = worker.checked.config
        say("phase", text=f"round {round_ + 1}/{config.rounds}: computation and links, each alone")
    own = measure.timings(worker.checked, worker.world)
    return [Timings(**each) for each in worker.world.exchange("timings", asdict(own))]


def _build(worker: Worker) -> models.Built:
    return models.build(
        worker.checked.model,
        rank=worker.rank,
        workers=worker.world.size,
        seed=worker.checked.config.seed,
    )


def _settled_bytes(worker: Worker, made: Attached) -> int:
    """What this host's interfaces have sent, once nothing is under way anywhere.

    Without a lab, what went over the loopback. Work that was put off is waited for, so that a
    number of iterations has all of its bytes and no other's.
    """
    made.settle()
    dist.barrier()
    shaped = worker.checked.lab.shaped
    return sum(c.tx_bytes for name, c in counters.read().items() if (name != "lo") == shaped)


def _gather(
    worker: Worker,
    row: int,
    starts: list[float],
    sent: float,
    loss: float,
    accuracy: float | None,
    coded: bool | None,
    merge: dict[str, Any] | None,
) -> Block | None:
    everyone = worker.world.exchange("block", {"starts": starts, "sent": sent, "loss": loss})
    if worker.rank:
        return None
    losses = [each["loss"] for each in everyone]
    return Block(
        row=row,
        starts=[each["starts"] for each in everyone],
        sent_bytes=[each["sent"] for each in everyone],
        loss=sum(losses) / len(losses),
        accuracy=accuracy,
        coded=coded,
        merge=merge,
    )


def _trace(worker: Worker, folder: Path) -> None:
    """Record a few iterations of each row, apart from the timed ones."""
    config = worker.checked.config
    paced = worker.checked.model.profile is not None
    maker = attach.optimizer_maker(config.optimizer, paced=paced)
    for row, variant in worker.checked.recorded:
        contender = worker.checked.rows[row]
        built = _build(worker)
        dist.barrier()
        with attach.attached(contender, built.model, maker, recorded=True) as made:
            if variant in ONLY:
                halves.use_only(variant, made.model, worker.world, _topology(contender))
            _decide(worker, row, made, built.loss)
            for _ in range(max(2, config.warmup)):
                attach.step(made, built.loss)
            count = BROKEN_DOWN if config.breakdown else TRACED
            tracing.record(worker.rank, contender, made, built.loss, iterations=count)
            tracing.save(folder, row, worker.rank, variant)
        del built, made
        gc.collect()


def _topology(contender: Contender) -> str:
    assert contender.strategy is not None
    return contender.strategy.choices().topology


def main(argv: list[str]) -> int:
    """Run the whole bench as one worker; rank 0 writes the blocks to the result file."""
    torch.set_num_threads(1)
    config_path, result_path = Path(argv[0]), Path(argv[1])
    checked = BenchConfig.load(config_path).check()
    world = wingbeat.init(timeout=120.0)
    try:
        worker = Worker(checked, world)
        blocks, timings = [], []
        for round_ in range(checked.config.rounds):
            if checked.config.measure:
                timings.append([asdict(own) for own in measure_round(worker, round_)])
                gc.collect()
            for row in range(len(checked.rows)):
                blocks.append(run_block(worker, row, round_))
                gc.collect()
        if checked.recorded:
            if worker.rank == 0:
                say("phase", text="recording what happens when")
            _trace(worker, result_path.parent)
        if worker.rank == 0:
            made = [asdict(block) for block in blocks if block is not None]
            text = json.dumps({"blocks": made, "timings": timings})
            result_path.write_text(text, encoding="utf-8")
        dist.barrier()
    finally:
        wingbeat.shutdown()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except WingbeatError as err:
        print(f"wingbeat: {err}", file=sys.stderr)
        sys.exit(1)
