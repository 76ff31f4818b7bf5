"""One worker of a bench: ``python -m wingbeat_lab.bench.worker CONFIG RESULT``.

Rows take turns, A B C A B C, so that a slowdown of the machine affects all of them. A row's model
exists only during its turn, so memory holds one at a time.
"""

from __future__ import annotations

import contextlib
import gc
import json
import mmap
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import wingbeat
from wingbeat.collectives import Collectives, Handle
from wingbeat.engine.upgrade import engine_of
from wingbeat.errors import WingbeatError
from wingbeat.exchanges.collective import CollectiveExchange
from wingbeat.planning.control import Decisions
from wingbeat.transport.world import World
from wingbeat_lab.bench import attach, measure, models, protocol, slow, tracing, traffic
from wingbeat_lab.bench.attach import Attached
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.measure import Timings
from wingbeat_lab.bench.models import Built
from wingbeat_lab.bench.pace import Pace
from wingbeat_lab.bench.protocol import ONLY, send_message
from wingbeat_lab.bench.results import SERVER, WORKER, Block, Deciding
from wingbeat_lab.bench.traffic import Sampler, Sent

_ROUNDING = 1e-6


@dataclass
class Training:
    """A newly built model that trains by its row.

    Attributes:
        normal_s: seconds of a normal iteration, the unit of a slow worker's sleeps.
        made: the same, attached to the row's strategy.
        steps: of all workers, if they average models without lockstep; None otherwise.
        curve: seconds and loss of each iteration so far.
    """

    checked: Checked
    rank: int
    normal_s: float
    built: Built
    made: Attached
    steps: SharedSteps | None = None
    curve: list[tuple[float, float]] = field(default_factory=list)

    def iterate(self, number: int) -> None:
        """Run one iteration, after the sleep of a slow worker.

        Timed iterations count from 1 over all rounds, those before them from 0 downwards.
        """
        begin = time.monotonic()
        self.pause(number)
        loss = attach.step(self.made, self.built.loss)
        end = time.monotonic()
        self.curve.append((end - begin, loss))
        if self.steps is not None:
            self.steps.add(end)

    def done(self) -> float:
        """Return the number of iterations whose gradients were applied.

        Where workers average models, an iteration is as many steps as there are workers.
        """
        if self.steps is not None:
            return self.steps.total() / self.checked.workers
        applied = self.made.applied
        return len(self.curve) if applied is None else applied()

    def iterations(self, first: int, count: int, since: float | None = None) -> Iterator[int]:
        """Run iterations; yield their numbers, from 0, as each completes.

        Where workers are not in lockstep, an iteration completes when as many gradients of any
        worker have been applied as all workers produce in one; this worker runs as many of its own
        as that takes. The same holds for steps where models are averaged.

        ``first`` is as for `iterate`. ``since`` is the number completed before, by default the
        current one; for a late worker it is lower, because the others have begun.
        """
        before, own, found = self.done() if since is None else since, 0, 0
        while found < count:
            self.iterate(first + own)
            own += 1
            while found < count and self.done() - before > found + 1 - _ROUNDING:
                yield found
                found += 1

    def pause(self, number: int) -> None:
        """Sleep before this iteration if this worker is slow in it."""
        factor = slow.factor(
            self.checked.slow,
            rank=self.rank,
            iteration=number,
            workers=self.checked.workers,
            seed=self.checked.config.seed,
        )
        if factor:
            time.sleep(factor * self.normal_s)


@contextlib.contextmanager
def training(
    checked: Checked,
    row: int,
    rank: int,
    normal_s: float,
    known: Decisions | None,
    *,
    recorded: bool = False,
    counted: Path | None = None,
) -> Iterator[Training]:
    """Build a row's model for a ``with`` block; the same weights each time.

    ``known`` are earlier decisions of the row, to be applied. ``counted`` is the file in which
    workers count their steps; None where they are in lockstep.
    """
    config = checked.config
    built = models.build(checked.model, rank=rank, workers=checked.workers, seed=config.seed)
    maker = attach.optimizer_maker(config.optimizer, paced=checked.model.profile is not None)
    with attach.attached(checked.rows[row], built.model, maker, recorded=recorded) as made:
        if known is not None:
            made.keep(known)
        steps = None if counted is None else SharedSteps(counted, rank, checked.workers)
        try:
            yield Training(checked, rank, normal_s, built, made, steps)
        finally:
            if steps is not None:
                steps.close()


_TICKS = os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """CPU seconds of this process, all threads, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def children_cpu_s() -> float:
    """CPU seconds of the current children of this process, to about a hundredth."""
    return sum(_cpu_s(fields) for fields in _stats() if int(fields[1]) == os.getpid())


def _stats() -> list[list[str]]:
    """The fields of ``/proc/PID/stat`` after the name, for each process: state, parent, ..."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = each.read_text(encoding="utf-8", errors="replace")
        except OSError:  # the process has just ended
            continue
        found.append(text.rpartition(")")[2].split())
    return found


def _cpu_s(fields: list[str]) -> float:
    user, kernel = fields[11:13]
    return (int(user) + int(kernel)) / _TICKS


ROOM = 100_000
"""Maximum number of steps of a worker; the file is sparse."""

_BYTES = 8


class SharedSteps:
    """When each worker has made each of its steps.

    The first worker creates the file at ``path``. A worker may make up to ``room`` steps.
    """

    def __init__(self, path: Path, rank: int, workers: int, room: int = ROOM) -> None:
        self._rank, self._workers, self._room = rank, workers, room
        size = workers * (1 + room) * _BYTES
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(handle, size)  # existing content stays, new bytes are 0
            self._map = mmap.mmap(handle, size)
        finally:
            os.close(handle)
        self._cells = memoryview(self._map).cast("d")

    def add(self, now: float) -> None:
        """Count a step of this worker that ended at ``now``, in seconds of the monotonic clock.

        WingbeatError if the maximum is exceeded.
        """
        count = int(self._cells[self._rank * (1 + self._room)])
        if count == self._room:
            raise WingbeatError(
                f"rank {self._rank} has made {count} steps in one turn; a bench counts up to "
                f"{self._room}: ask for fewer iterations or more rounds"
            )
        # Each worker writes only its own part, and the time before the count.
        self._cells[self._rank * (1 + self._room) + 1 + count] = now
        self._cells[self._rank * (1 + self._room)] = count + 1

    def by_rank(self) -> list[int]:
        """Return the number of steps of each worker."""
        return [int(self._cells[rank * (1 + self._room)]) for rank in range(self._workers)]

    def total(self) -> int:
        """Return the number of steps of all workers."""
        return sum(self.by_rank())

    def made(self) -> list[tuple[float, int]]:
        """Return when each step ended and its worker, in this order."""
        found = []
        for rank, count in enumerate(self.by_rank()):
            first = rank * (1 + self._room) + 1
            found += [(now, rank) for now in self._cells[first : first + count]]
        return sorted(found)

    def close(self) -> None:
        """Close the file."""
        self._cells.release()
        self._map.close()


def iterations(
    made: list[tuple[float, int]], workers: int, *, before: int, count: int, begin: float
) -> tuple[list[float], list[int]]:
    """Split steps into iterations: each has as many steps as there are workers, of any of them.

    ``begin`` is when the first one began, if ``before`` is 0. Returns when the previous iteration
    and each iteration ended; and the steps of each worker in them.

    >>> iterations([(1.0, 0), (1.5, 1), (2.0, 0), (3.0, 0)], 2, before=1, count=1, begin=0.0)
    ([1.5, 3.0], [2, 0])
    """
    last = [workers * (before + number) - 1 for number in range(count + 1)]
    ends = [begin if index < 0 else made[index][0] for index in last]
    inside = [rank for _, rank in made[workers * before : workers * (before + count)]]
    return ends, [inside.count(rank) for rank in range(workers)]


class ReduceScatterOnly(Collectives):
    """Omits the all-gathers of buckets."""

    def all_gather(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        after: Handle | None = None,
        **options: Any,
    ) -> Handle:
        """Complete as soon as ``after`` does, so that the reduce-scatter is still waited for."""
        if bucket < 0:
            return super().all_gather(buffer, bucket=bucket, after=after, **options)
        return after or Handle([])


class AllGatherOnly(Collectives):
    """Omits the reduce-scatters of buckets."""

    def reduce_scatter(self, buffer: torch.Tensor, *, bucket: int = -1, **options: Any) -> Handle:
        """Complete at once."""
        if bucket < 0:
            return super().reduce_scatter(buffer, bucket=bucket, **options)
        return Handle([])

    def all_gather(
        self,
        buffer: torch.Tensor,
        *,
        bucket: int = -1,
        after: Handle | None = None,
        **options: Any,
    ) -> Handle:
        """Gather after ``after``, unless that was omitted."""
        kept = after if after is not None and after.jobs else None
        return super().all_gather(buffer, bucket=bucket, after=kept, **options)


_CLASSES = dict(zip(protocol.ONLY, (ReduceScatterOnly, AllGatherOnly), strict=True))


def use_only(only: str, model: torch.nn.Module, world: World, topology: str) -> None:
    """Make a distributed model's engine exchange one half of each bucket (``protocol.ONLY``)."""
    engine = engine_of(model)
    assert engine is not None, "the model is not distributed"
    halves = _CLASSES[only](world, topology)
    engine.runtime.exchange = CollectiveExchange(halves, engine.compression)


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
        reported: time of the last progress message, by the monotonic clock.
        decisions: of each row about its training, by row.
        pace: how codec work is slowed.
        fixed: by row, `pace.fixed_costs` of its codec.
    """

    checked: Checked
    world: World
    normal_s: float = 0.0
    folder: Path = Path()
    done: int = 0
    reported: float = 0.0
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
        if self.rank == 0 and now - self.reported >= 0.1:
            self.reported = now
            send_message("progress", done=self.done, row=row, round=round_, iteration=iteration)

    def training(
        self, row: int, *, recorded: bool = False, round_: int | None = None
    ) -> contextlib.AbstractContextManager[Training]:
        """A row's new model, with the row's decisions, inside a round or not."""
        self.pace.use(self.fixed.get(row, {}))
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
        result = _timed(worker, own, row, round_)
        if fired is not None:
            result["fired"] = {what: count - earlier[what] for what, count in fired().items()}
        result |= asdict(_settled(worker, own.made).since(before, own.done() - worth))
        about: dict[str, Any] = {}
        if own.steps is not None:
            result["starts"], about["steps_by_rank"] = _counted(worker, own.steps, result, round_)
        about["accuracy"] = own.built.accuracy(own.made.model)
        about |= {"coded": own.made.coded, "merge": own.made.merge}
    return _gather(worker, row, result, about)


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
    used, served = own_cpu_s(), children_cpu_s()
    starts = [time.monotonic()]
    with _watched(worker) as sampler:
        for done in own.iterations(first, count, None if own.steps is None else config.warmup):
            starts.append(time.monotonic())
            worker.tick(row, round_, done)
    used = own_cpu_s() - used
    served = children_cpu_s() - served
    result: dict[str, Any] = {"starts": starts, "cpu_s": (used, served), "loss": own.curve[-1][1]}
    if config.target_loss is not None:
        result["curve"] = own.curve
    if sampler is not None:
        result["traffic"] = sampler.samples
    return result


def _counted(
    worker: Worker, counted: SharedSteps, result: dict[str, Any], round_: int
) -> tuple[list[float], list[int]]:
    """End times of the timed iterations, by all workers' steps, and the steps of each worker."""
    config = worker.checked.config
    return iterations(
        counted.made(),
        worker.checked.workers,
        before=config.warmup,
        count=config.share(round_),
        begin=result["starts"][0],
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

    found = worker.world.exchange("fixed costs of codecs", worker.pace.price(opened))
    worker.fixed[row] = medians(found)


def medians(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median over all workers of what each of them has found, by name.

    The scale multiplies the error of a worker's few calls, and the slowest worker counts.

    >>> medians([{"pack": 1.0, "unpack": 2.0}, {"pack": 3.0}, {"pack": 9.0}])
    {'pack': 3.0}
    """
    common = [name for name in found[0] if all(name in each for each in found)]
    return {name: statistics.median(each[name] for each in found) for name in common}


def decide(worker: Worker, row: int) -> Deciding | None:
    """Let a row tune itself on a separate model; all later training applies the decisions.

    All rounds thus train alike, from the same weights as rows that need no tuning.
    Returns this worker's cost and the decisions; None if the row tunes nothing.
    """
    if not worker.checked.rows[row].decides:
        return None
    if worker.rank == 0:
        text = worker.checked.rows[row].text
        send_message("phase", text=f"{text}: finding out how it trains best, before it is timed")
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
        send_message(
            "phase", text=f"round {round_ + 1}/{config.rounds}: computation and links, each alone"
        )
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


def _gather(
    worker: Worker, row: int, result: dict[str, Any], about: dict[str, Any]
) -> Block | None:
    """Combine all workers' results of a block with those of rank 0."""
    results = worker.world.exchange("block", result)
    if worker.rank:
        return None
    losses = [each["loss"] for each in results]
    return Block(
        row=row,
        starts=[each["starts"] for each in results],
        sent_bytes=[each["sent"] for each in results],
        sent_by_class=[each["classes"] for each in results if each["classes"]],
        cpu_s=_by_role([each["cpu_s"] for each in results]),
        loss=sum(losses) / len(losses),
        curves=[each["curve"] for each in results] if "curve" in result else None,
        traffic=[each["traffic"] for each in results] if "traffic" in result else None,
        fired_by_rank=[each["fired"] for each in results] if "fired" in result else None,
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
                use_only(variant, own.made.model, worker.world, _topology(contender))
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
                send_message("phase", text="recording what happens when")
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
