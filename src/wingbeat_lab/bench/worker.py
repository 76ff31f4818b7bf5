"""One worker of a bench: ``python -m wingbeat_lab.bench.worker CONFIG RESULT``.

Rows take turns, A B C A B C, so that a slowdown of the machine affects all of them. A row's model
exists only during its turn, so memory holds one at a time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wingbeat
from wingbeat.errors import WingbeatError
from wingbeat.planning.control import Decisions
from wingbeat.transport.world import World
from wingbeat_lab.bench import halves, measure, processes, steps, tracing, traffic
from wingbeat_lab.bench.attached import Attached
from wingbeat_lab.bench.clocks import SERVER, WORKER
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.pace import Pace
from wingbeat_lab.bench.protocol import ONLY, say
from wingbeat_lab.bench.results import Block, Deciding
from wingbeat_lab.bench.sent import Sent
from wingbeat_lab.bench.speedup import Timings
from wingbeat_lab.bench.steps import SharedSteps
from wingbeat_lab.bench.traffic import Sampler
from wingbeat_lab.bench.training import Training, training

TRACED = 3
"""Iterations recorded of each row for a trace."""

BROKEN_DOWN = 7
"""Iterations recorded of each row for a breakdown; the first does not count."""


@dataclass
class Worker:
    """The state of one worker process.

    Attributes:
        normal_s: seconds of a normal iteration; 0 without slow workers.
        folder: for files that workers share.
        done: iterations so far that count for the progress.
        said: time of the last progress message, by the monotonic clock.
        decisions: of each row about its training, by row.
        pace: how codec work is slowed.
        fixed: by row, `pace.fixed_costs` of its codec.
    """

    checked: Checked
    world: World
    normal_s: float = 0.0
    folder: Path = Path()
    done: int = 0
    said: float = 0.0
    decisions: dict[int, Decisions] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    fixed: dict[int, dict[str, float]] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """This worker's number."""
        return self.world.rank

    def tick(self, row: int, round_: int, iteration: int) -> None:
        """Count an iteration; rank 0 reports to the parent, at most ten times a second."""
        self.done += 1
        now = time.monotonic()
        if self.rank == 0 and now - self.said >= 0.1:
            self.said = now
            say("progress", done=self.done, row=row, round=round_, iteration=iteration)

    def training(
        self, row: int, *, recorded: bool = False, round_: int | None = None
    ) -> contextlib.AbstractContextManager[Training]:
        """A row's new model, with the row's decisions, inside a round or not."""
        self.pace.fixed = self.fixed.get(row, {})
        return training(
            self.checked,
            row,
            self.rank,
            self.normal_s,
            self.decisions.get(row),
            recorded=recorded,
            counted=self.counted(row, round_),
        )

    def counted(self, row: int, round_: int | None) -> Path | None:
        """The file in which workers count a row's steps, if it averages models without lockstep."""
        if round_ is None or not self.checked.rows[row].averages:
            return None
        return self.folder / f"steps-{row}-{round_}"


def run_block(worker: Worker, row: int, round_: int) -> Block | None:
    """Run one row's turn; rank 0 gets the result, the others None."""
    with worker.training(row, round_=round_) as own:
        before, worth = _warmed_up(worker, own, row, round_)
        fired = own.made.fired
        earlier = {} if fired is None else fired()
        said = _timed(worker, own, row, round_)
        if fired is not None:
            said["fired"] = {what: count - earlier[what] for what, count in fired().items()}
        said |= asdict(_settled(worker, own.made).since(before, own.done() - worth))
        about: dict[str, Any] = {}
        if own.steps is not None:
            said["starts"], about["steps_by_rank"] = _counted(worker, own.steps, said, round_)
        about["accuracy"] = own.built.accuracy(own.made.model)
        about |= {"coded": own.made.coded, "merge": own.made.merge}
    return _gather(worker, row, said, about)


def _warmed_up(worker: Worker, own: Training, row: int, round_: int) -> tuple[Sent, float]:
    """Run the iterations before the timed ones.

    Workers synchronize before the last of them, never right before a timed one: otherwise work
    deferred into the next forward would complete untimed. Where models are averaged they
    synchronize before the first, because it discards what is known of slow workers. Returns the
    bytes that this host had sent at that time, and the number of iterations.
    """
    warmup = worker.checked.config.warmup
    lead = warmup if own.steps is not None else min(1, warmup)
    for i in range(warmup - lead):
        own.iterate(i - warmup + 1)
        worker.tick(row, round_, i - warmup)
    before, worth = _settled(worker, own.made), own.done()
    if own.steps is not None:
        worth = 0.0  # the others may have begun
        # Settling makes all models equal, which sends bytes that belong to no iteration.
        before = before.and_again(_settled(worker, own.made))
    for i in range(lead):
        own.iterate(i - lead + 1)
        worker.tick(row, round_, i - lead)
    return before, worth


def _timed(worker: Worker, own: Training, row: int, round_: int) -> dict[str, Any]:
    """Run the timed iterations; return this worker's results."""
    config = worker.checked.config
    count, first = config.share(round_), config.before(round_) + 1
    used, served = processes.own_cpu_s(), processes.children_cpu_s()
    starts = [time.monotonic()]
    with _watched(worker) as sampler:
        for done in own.iterations(first, count, None if own.steps is None else config.warmup):
            starts.append(time.monotonic())
            worker.tick(row, round_, done)
    used = processes.own_cpu_s() - used
    served = processes.children_cpu_s() - served
    said: dict[str, Any] = {"starts": starts, "cpu_s": (used, served), "loss": own.curve[-1][1]}
    if config.target_loss is not None:
        said["curve"] = own.curve
    if sampler is not None:
        said["traffic"] = sampler.samples
    return said


def _counted(
    worker: Worker, counted: SharedSteps, said: dict[str, Any], round_: int
) -> tuple[list[float], list[int]]:
    """End times of the timed iterations, by all workers' steps, and the steps of each worker."""
    config = worker.checked.config
    return steps.iterations(
        counted.made(),
        worker.checked.workers,
        before=config.warmup,
        count=config.share(round_),
        begin=said["starts"][0],
    )


def _watched(worker: Worker) -> contextlib.AbstractContextManager[Sampler | None]:
    config = worker.checked.config
    if not config.traffic:
        return contextlib.nullcontext()
    return Sampler(worker.checked.lab, traffic.WINDOW_S * config.stretch / traffic.LOOKS)


def price_codec(worker: Worker, row: int) -> None:
    """Measure the part of a row's codec work that is independent of the model's size."""
    contender, profile = worker.checked.rows[row], worker.checked.model.profile
    if profile is None or not (contender.wire or contender.name.startswith("ddp+")):
        return
    config, scale = worker.checked.config, profile.scale
    base = config.model.partition("@")[0]

    @contextlib.contextmanager
    def opened(share: float) -> Iterator[Callable[[int], None]]:
        checked = replace(config, model=f"{base}@{share * scale!r}").check()
        with training(checked, row, worker.rank, worker.normal_s, None) as own:
            yield own.iterate
        gc.collect()

    worker.fixed[row] = worker.pace.price(opened)


def decide(worker: Worker, row: int) -> Deciding | None:
    """Let a row tune itself on a separate model; all later training applies the decisions.

    All rounds thus train alike, from the same weights as rows that need no tuning.
    Returns this worker's cost and the decisions; None if the row tunes nothing.
    """
    if not worker.checked.rows[row].decides:
        return None
    if worker.rank == 0:
        text = worker.checked.rows[row].text
        say("phase", text=f"{text}: finding out how it trains best, before it is timed")
    with worker.training(row) as own:
        begin = time.monotonic()
        iterations = 0
        while own.made.deciding():  # all workers decide in the same iteration
            iterations += 1
            own.iterate(-iterations)
        seconds = time.monotonic() - begin
        found = own.made.decisions()
    if found is None:  # single worker
        return None
    worker.decisions[row] = found
    return Deciding(iterations, seconds, found.to_json())


def measure_round(worker: Worker, round_: int) -> list[Timings]:
    """Measure computation alone and communication alone; all workers get all figures."""
    if worker.rank == 0:
        config = worker.checked.config
        say("phase", text=f"round {round_ + 1}/{config.rounds}: computation and links, each alone")
    own = measure.timings(worker.checked, worker.world)
    return [Timings(**each) for each in worker.world.exchange("timings", asdict(own))]


def _settled(worker: Worker, made: Attached) -> Sent:
    """The bytes that this host has sent, with no traffic in flight anywhere.

    Deferred work is waited for, so that the bytes belong to exactly the iterations so far.
    """
    made.settle()
    dist.barrier()
    sent = Sent.read(worker.checked.lab)
    dist.barrier()  # all must have read before anyone sends
    return sent


def _gather(worker: Worker, row: int, said: dict[str, Any], about: dict[str, Any]) -> Block | None:
    """Combine all workers' results of a block with those of rank 0."""
    everyone = worker.world.exchange("block", said)
    if worker.rank:
        return None
    losses = [each["loss"] for each in everyone]
    return Block(
        row=row,
        starts=[each["starts"] for each in everyone],
        sent_bytes=[each["sent"] for each in everyone],
        sent_by_class=[each["classes"] for each in everyone if each["classes"]],
        cpu_s=_by_role([each["cpu_s"] for each in everyone]),
        loss=sum(losses) / len(losses),
        curves=[each["curve"] for each in everyone] if "curve" in said else None,
        traffic=[each["traffic"] for each in everyone] if "traffic" in said else None,
        fired_by_rank=[each["fired"] for each in everyone] if "fired" in said else None,
        **about,
    )


def _by_role(seconds: list[tuple[float, float]]) -> dict[str, list[float]]:
    """CPU seconds by role, of workers and of the servers that they started."""
    workers, servers = zip(*seconds, strict=True)
    found = {WORKER: list(workers)}
    if any(servers):
        found[SERVER] = list(servers)
    return found


def _trace(worker: Worker, folder: Path) -> None:
    """Record a few iterations of each row, separate from the timed ones."""
    config = worker.checked.config
    for row, variant in worker.checked.recorded:
        contender = worker.checked.rows[row]
        dist.barrier()
        with worker.training(row, recorded=True) as own:
            if variant in ONLY:
                halves.use_only(variant, own.made.model, worker.world, _topology(contender))
            for i in range(max(2, config.warmup)):
                own.iterate(-i)
            count = BROKEN_DOWN if config.breakdown else TRACED
            _record(worker, contender, own, count)
            tracing.save(folder, row, worker.rank, variant)
        del own
        gc.collect()


def _record(worker: Worker, contender: Contender, own: Training, count: int) -> None:
    """Record iterations after the timed ones; a worker that is always slow is slow here too."""
    after = worker.checked.config.iterations + 1
    tracing.record(
        worker.rank,
        contender,
        own.made,
        own.built.loss,
        iterations=count,
        pause=lambda i: own.pause(after + i),
    )


def _topology(contender: Contender) -> str:
    assert contender.strategy is not None
    return contender.strategy.topology


def _bench(worker: Worker) -> dict[str, Any]:
    """Run all rounds; return rank 0's output as plain values."""
    checked = worker.checked
    if checked.slow:
        worker.normal_s = measure.normal_s(checked, worker.world)
    blocks: list[Block | None] = []
    timings, deciding = [], []
    for round_ in range(checked.config.rounds):
        if checked.config.measure:
            timings.append([asdict(own) for own in measure_round(worker, round_)])
            gc.collect()
        for row in range(len(checked.rows)):
            if round_ == 0:
                if worker.pace.slows:
                    price_codec(worker, row)
                decided = decide(worker, row)
                deciding.append(None if decided is None else asdict(decided))
                gc.collect()
            blocks.append(run_block(worker, row, round_))
            gc.collect()
    return {
        "blocks": [asdict(block) for block in blocks if block is not None],
        "timings": timings,
        "deciding": deciding,
        "normal_s": worker.normal_s,
    }


def main(argv: list[str]) -> int:
    """Run the whole bench as one worker; rank 0 writes the blocks to the result file."""
    torch.set_num_threads(1)
    config_path, result_path = Path(argv[0]), Path(argv[1])
    checked = BenchConfig.load(config_path).check()
    profile = checked.model.profile
    pace = Pace() if profile is None else Pace(checked.config.stretch, profile.scale)
    pace.install()
    world = wingbeat.init(timeout=120.0)
    try:
        worker = Worker(checked, world, folder=result_path.parent, pace=pace)
        found = _bench(worker)
        if checked.recorded:
            if worker.rank == 0:
                say("phase", text="recording what happens when")
            _trace(worker, result_path.parent)
        if worker.rank == 0:
            result_path.write_text(json.dumps(found), encoding="utf-8")
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
