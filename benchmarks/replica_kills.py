"""Replicas of several processes, of which one process is killed time after time.

    python benchmarks/replica_kills.py --json out/replica_kills.json
    python benchmarks/replica_kills.py --ranks 1 --row allreduce:min_replicas=1

Replicas train a network on the digits on this host, those of several processes under FSDP2. Each
replica is started by a torchrun of its own, and they meet at the store of `wingbeat store`.
Repeatedly a process of any of them is killed (SIGKILL), at a moment and of a rank that follow from
the seed. Its torchrun ends the other processes of the replica and starts all of them again; the
other replicas continue. A second run makes as many steps without a kill.

Limits: each time the others continue, and none of them makes no step for longer than 3 s. Each
killed replica rejoins. All replicas have the same weights in the end, their loss has fallen to
under a tenth, and it is at most 0.05 above that of the undisturbed run. No process is left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from common import at_least_one, at_least_two, run_and_judge, show, write
from killing import (
    PATIENCE_S,
    Killer,
    Telling,
    kill_cells,
    loss_of,
    losses,
    losses_table,
    missed_losses,
    put,
    standstills,
)

from wingbeat.errors import LabError
from wingbeat_lab import baselines
from wingbeat_lab.bench.table import Printed

STILL_S = 3.0
"""Allowed seconds without a step of a replica that was not killed."""
WORSE = 0.05
"""Allowed difference of the loss to that of the run without kills."""


def main() -> int:
    args = arguments()

    def measure(report: dict[str, Any]) -> list[str]:
        baselines.parse(args.row)  # fail before processes are started
        report |= run(args)
        for table in (*tables(report), losses_table(report["losses"])):
            show(report, table)
        write(args.json, report)
        return judged(args.kills, report)

    return run_and_judge(args.json, measure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row", default="localsgd:every=2", help="(localsgd:every=2)")
    parser.add_argument("--replicas", type=at_least_two, default=3, help="(3)")
    parser.add_argument("--ranks", type=at_least_one, default=2, help="of a replica (2)")
    parser.add_argument("--kills", type=at_least_one, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="of whom and when (0)")
    parser.add_argument("--json", type=Path, default=Path("out/replica_kills.json"), metavar="FILE")
    return parser.parse_args()


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Train with kills, and then as many steps without."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        killer = ReplicaKiller(home, args.replicas, args.ranks, args.kills, args.seed)
        begun, left = time.monotonic(), trained(args, home, killer)
        seconds = [time.monotonic() - begun]
        steps = json.loads((home / "stop").read_text())
        found = {"kills": killer.kills, "losses": losses(home), "left": left, "steps": steps}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        put(home / "stop", steps)
        begun = time.monotonic()
        found["left"] += trained(args, home, None)
        found["seconds"] = [*seconds, time.monotonic() - begun]
        found["undisturbed"] = losses(home)
    return found


def trained(args: argparse.Namespace, home: Path, killer: Killer | None) -> list[str]:
    """Run all replicas to their end; return the processes that were left, which it has ended."""
    seen: set[psutil.Process] = set()
    try:
        with contextlib.ExitStack() as stack:
            store, port = stack.enter_context(served())
            replicas = [
                stack.enter_context(started(replica, args, home, port))
                for replica in range(args.replicas)
            ]
            if killer is not None:
                stack.enter_context(running(killer))
            watch(store, replicas, killer, seen)
    finally:
        _, alive = psutil.wait_procs(seen, 10.0)
        left = [f"{each.pid}: {shown(each)}" for each in alive]
        for each in alive:
            with contextlib.suppress(psutil.Error):
                each.kill()
    return left


def shown(process: psutil.Process) -> str:
    """Return a process's command."""
    with contextlib.suppress(psutil.Error):
        return " ".join(process.cmdline())[:200]
    return ""


def watch(
    store: subprocess.Popen[str],
    replicas: Sequence[subprocess.Popen[bytes]],
    killer: Killer | None,
    seen: set[psutil.Process],
) -> None:
    """Wait for the end of all replicas; add the processes that these start to ``seen``.

    Raises LabError if the store or a replica fails, or the killer.
    """
    named = {"wingbeat store": store} | {
        f"torchrun of replica {n}": each for n, each in enumerate(replicas)
    }
    while any(each.poll() is None for each in replicas):
        time.sleep(0.2)
        for each in named.values():
            with contextlib.suppress(psutil.Error):
                seen.update(psutil.Process(each.pid).children(recursive=True))
        for name, each in named.items():
            if each.poll():
                raise LabError(f"{name} ended with exit status {each.poll()}; its errors are above")
        if killer is not None and killer.failure:
            raise LabError(killer.failure)


@contextlib.contextmanager
def running(killer: Killer) -> Iterator[None]:
    """Let the killer work in a thread."""
    thread = threading.Thread(target=killer.run, name="killer")
    thread.start()
    try:
        yield
    finally:
        killer.over.set()
        thread.join()


@contextlib.contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Serve a store; its process and port."""
    process = subprocess.Popen(
        [sys.executable, "-m", "wingbeat.cli.main", "store", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().rpartition(" ")[2]
        if not port.strip().isdecimal():
            raise LabError(f"wingbeat store ended with exit status {process.wait()}")
        yield process, int(port)
    finally:
        process.terminate()
        process.communicate()


@contextlib.contextmanager
def started(
    replica: int, args: argparse.Namespace, home: Path, port: int
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the torchrun of a replica."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words += ["--nproc-per-node", str(args.ranks), "--max-restarts", "1000"]
    words += [__file__, "--work", str(home), args.row]
    env = {
        "WINGBEAT_REPLICA": str(replica),
        "WINGBEAT_REPLICAS": str(args.replicas),
        "WINGBEAT_STORE": f"127.0.0.1:{port}",
        "WINGBEAT_TOP": "off",
        "OMP_NUM_THREADS": "1",
    }
    process = subprocess.Popen(words, env=os.environ | env)
    try:
        yield process
    finally:
        process.terminate()  # torchrun ends its workers
        process.wait()


class ReplicaKiller(Killer):
    """Kills a process of one replica after the other.

    Args:
        home: the shared folder.
        replicas: their number.
        ranks: the number of processes of each.
        times: number of kills.
        seed: determines victims and times.
    """

    def __init__(self, home: Path, replicas: int, ranks: int, times: int, seed: int) -> None:
        super().__init__(home, replicas, times, seed)
        self._folder, self._ranks, self._places = home, ranks, random.Random(seed + 1)

    def _end(self, rank: int, *, back: bool) -> None:
        assert back, "torchrun restarts it"
        place = self._places.randrange(self._ranks)
        report = json.loads((self._folder / f"at-{rank}").read_text())
        os.kill(report["pids"][place], signal.SIGKILL)

    def _kill(self, rank: int, *, back: bool) -> dict[str, Any]:
        found = super()._kill(rank, back=back)
        print(
            f"kill {len(self.kills) + 1}, of replica {rank}: the others stood still for "
            f"{found['still_s']:.2f} s; it is back after {found['back_s']:.1f} s",
            flush=True,
        )
        return found


def judged(kills: int, report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    found = report["kills"]
    missed = [f"{len(found)} kills; expected {kills}"] if len(found) != kills else []
    for number, kill in enumerate(found, start=1):
        if kill["still_s"] > STILL_S:
            missed.append(
                f"kill {number}, of replica {kill['rank']}: the others stood still for "
                f"{kill['still_s']:.2f} s; limit {STILL_S:g} s"
            )
        if kill["back_s"] is None:
            missed.append(f"kill {number}: replica {kill['rank']} did not rejoin")
    missed += missed_losses(report["losses"])
    mean, calm = final_losses(report)
    if mean > calm + WORSE:
        missed.append(f"a loss of {mean:.4f}; without kills {calm:.4f}, limit {WORSE:g} more")
    return missed + [f"process {each} is left" for each in report["left"]]


def final_losses(report: dict[str, Any]) -> tuple[float, float]:
    """Return the mean loss in the end, with kills and without."""
    with_kills, calm = (
        statistics.fmean(each[1] for each in report[name].values())
        for name in ("losses", "undisturbed")
    )
    return with_kills, calm


COLUMNS = ("kill", "replica", "at step", "stood still, s", "steps without", "back after, s")


def tables(report: dict[str, Any]) -> list[Printed]:
    """Return a row for each kill."""
    (mean, calm), (seconds, calm_s) = final_losses(report), report["seconds"]
    notes = standstills(report["kills"])
    notes.append(
        f"loss after {report['steps']} steps: {mean:.4f}, in {seconds:.0f} s; without kills "
        f"{calm:.4f}, in {calm_s:.0f} s, where all replicas share the cores all the time"
    )
    notes.append(f"processes left: {len(report['left'])}")
    cells = kill_cells(report["kills"])
    return [Printed.of("replicas, of which a process is killed", COLUMNS, cells, notes)]


# -- a process of a replica ------------------------------------------------------------------


def work(home: Path, row: str) -> None:
    """Train up to the step that the killer names."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import wingbeat
    from wingbeat_lab.bench import models

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=PATIENCE_S)
    ranks = dist.get_world_size()
    replica, place = divmod(world.rank, ranks)
    images, answers, *held_out = models.data()
    loss = loss_of(held_out)
    first = loss(models.network(0))
    network: Any = models.network(1 if world.returned else 0)  # what rejoins copies parameters
    mesh = None
    if ranks > 1:
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
        for layer in network:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(network, mesh=mesh)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    wingbeat.distribute(network, optimizer, baselines.parse(row), mesh=mesh)
    pids: list[Any] = [None] * ranks
    dist.all_gather_object(pids, os.getpid())
    life = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    telling = Telling(home, replica, life) if place == 0 else None
    stop = home / "stop"
    seed = 1000 * life + world.rank
    for x, y in models.batches(images, answers, rank=world.rank, workers=world.size, seed=seed):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        steps = wingbeat.steps_made(network)
        if telling is not None:
            telling.say(steps, pids=pids)
        # Written long before that step, so all ranks of a replica end at the same one.
        if stop.exists() and steps >= json.loads(stop.read_text()):
            break
    wingbeat.synchronize(network)
    ours = loss(network)
    whole = [p.full_tensor() if ranks > 1 else p for p in network.parameters()]
    sums = [float(p.detach().double().abs().sum()) for p in whole]
    if telling is not None:
        put(home / f"loss-{replica}", (first, ours, sums))
    wingbeat.shutdown()


def run_main(argv: Sequence[str]) -> int:
    if argv[1:2] == ["--work"]:
        work(Path(argv[2]), argv[3])
        return 0
    return main()


if __name__ == "__main__":
    try:
        sys.exit(run_main(sys.argv))
    except KeyboardInterrupt:
        sys.exit(130)
