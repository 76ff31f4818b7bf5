"""Kill a process of a training run with servers: the failure must be named, and nothing lost.

    python benchmarks/kills.py --json out/kills.json

Three workers train a small network on the digits with `Geryon` and two servers, and save a
checkpoint every few iterations. In each case a worker or a server is killed (SIGKILL) at a random
moment that follows from the seed; then the run is restarted from its last checkpoint.

Limits, in each case: every other worker ends within the timeout, with one line that names the
killed process and its role; no process is left; and the restarted run ends with the weights and
the optimizer's state of an undisturbed run, bit for bit. In one more run unknown clients connect
with wrong keys and send garbage to a server's ports: all are refused and counted, and the bits are
the same.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
from common import at_least_one, refuse_unwritable, show, write

from wingbeat_lab.bench.table import Printed

WORKERS, SERVERS = 3, 2
MARK = "WINGBEAT_BENCH_KILLS"
"""In the environment of every process of this run, to find those left behind."""

PATIENCE = 60.0
"""Seconds for an undisturbed run, and for processes to end that have reported their failure."""

STRANGERS = 20
"""Number of unknown clients of each kind, at each port."""


# -- one worker ---------------------------------------------------------------------------


def work(rank: int, folder: str, plan: dict[str, Any]) -> None:
    """Train, from the last checkpoint if there is one; print a line if that fails."""
    home = Path(folder)
    log = os.open(home / f"log-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(plan["env"], RANK=str(rank), LOCAL_RANK=str(rank))
    from wingbeat.errors import WingbeatError

    try:
        train(rank, home, plan)
    except WingbeatError as error:
        said = {"line": str(error), "at": time.monotonic()}
        (home / f"said-{rank}").write_text(json.dumps(said))
        sys.exit(1)


def train(rank: int, home: Path, plan: dict[str, Any]) -> None:
    """Train to the end, and write a digest of the result."""
    import torch

    import wingbeat
    from wingbeat_lab.bench.models import BATCH, data

    torch.set_num_threads(1)
    images, labels, _, _ = data()
    world = wingbeat.init(timeout=plan["timeout"])
    model, optimizer, done = fresh(home)
    model, optimizer = wingbeat.distribute(
        model, optimizer, wingbeat.Geryon(servers=SERVERS, mb=0.1)
    )
    (home / f"begun-{rank}").touch()
    if rank == 0:
        tell_strangers(world, home)
    for turn in range(done, plan["iterations"]):
        chosen = torch.randperm(len(labels), generator=torch.Generator().manual_seed(turn))
        mine = chosen[rank * BATCH : (rank + 1) * BATCH]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images[mine]), labels[mine])
        loss.backward()
        optimizer.step()
        time.sleep(plan["pause"])
        if (turn + 1) % plan["every"] == 0:
            save(rank, home, model, optimizer, turn + 1)
    model.synchronize()
    (home / f"digest-{rank}").write_text(digest(model, optimizer))
    wingbeat.shutdown()


def fresh(home: Path) -> tuple[Any, Any, int]:
    """Return a model, its optimizer and their number of iterations."""
    import torch

    from wingbeat_lab.bench.models import network

    model = network(seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    path = home / "checkpoint.pt"
    if not path.exists():
        return model, optimizer, 0
    state = torch.load(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return model, optimizer, state["iterations"]


def save(rank: int, home: Path, model: Any, optimizer: Any, done: int) -> None:
    """Save a checkpoint atomically."""
    import torch

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "iterations": done}
    if rank == 0:
        torch.save(state, home / "checkpoint.new")
        (home / "checkpoint.new").replace(home / "checkpoint.pt")


def digest(model: Any, optimizer: Any) -> str:
    """Digest of all parameters and the optimizer's state."""
    found = hashlib.sha256()
    for value in model.state_dict().values():
        found.update(value.numpy().tobytes())
    for state in optimizer.state_dict()["state"].values():
        for value in state.values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()


def tell_strangers(world: Any, home: Path) -> None:
    """Write server 0's address and key for the unknown clients."""
    for a, b in itertools.product(range(100), range(10)):
        key = f"messages/servers/{a}.{b}/{world.size}"
        if world.store.has(key):
            (home / "server.new").write_text(world.store.get(key, 1.0))
            (home / "server.new").replace(home / "server")
            return


# -- a run --------------------------------------------------------------------------------


@dataclass
class Case:
    """Which process is killed when, and the results.

    Attributes:
        victim: ``rank N`` or ``server N``.
        moment: share of an undisturbed run's time after which it is killed.
        lines: the last line of each other worker.
        said_s: seconds from the kill until the last of these lines.
        ended_s: the same until all processes had ended.
        wrong: unmet expectations.
        strangers: number of connections that a server has refused.
    """

    victim: str = ""
    moment: float = 0.0
    lines: list[str] = field(default_factory=list)
    said_s: float = 0.0
    ended_s: float = 0.0
    seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    strangers: int = 0


class Run:
    """Workers that train in a folder."""

    def __init__(self, home: Path, args: argparse.Namespace) -> None:
        self.home, self.mark = home, uuid.uuid4().hex
        for name in ("said", "digest", "begun"):
            for path in home.glob(f"{name}-*"):
                path.unlink()
        env = {
            MARK: self.mark,
            "WORLD_SIZE": str(WORKERS),
            "LOCAL_WORLD_SIZE": str(WORKERS),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
        }
        plan = {"env": env, "timeout": args.timeout, "every": args.every}
        plan |= {"iterations": args.iterations, "pause": args.pause}
        context = multiprocessing.get_context("forkserver")
        self.began = time.monotonic()
        self.processes = [
            context.Process(target=work, args=(rank, str(home), plan)) for rank in range(WORKERS)
        ]
        for process in self.processes:
            process.start()

    def wait(self, seconds: float) -> bool:
        """Whether all workers end in time."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        return all(process.exitcode is not None for process in self.processes)

    def training(self) -> float:
        """Wait for the rendezvous of all workers; return its time."""
        until(lambda: len(list(self.home.glob("begun-*"))) == WORKERS or self.over())
        return time.monotonic()

    def over(self) -> bool:
        return any(process.exitcode is not None for process in self.processes)

    def kill(self, victim: str) -> None:
        """Kill a worker, or a server as soon as it runs."""
        role, number = victim.split()
        if role == "rank":
            self.processes[int(number)].kill()
            return
        until(lambda: self.over() or self._server(int(number)) is not None)
        server = self._server(int(number))
        if server is not None:
            server.kill()

    def _server(self, index: int) -> psutil.Process | None:
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                for child in psutil.Process(process.pid).children():
                    words = child.cmdline()
                    ours = words[1:3] == ["-m", "wingbeat.methods.parameter_server"]
                    if ours and json.loads(words[3])["index"] == index:
                        return child
        return None

    def left(self) -> list[int]:
        """The processes of this run that still exist."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                there = process.status() != psutil.STATUS_ZOMBIE
                if there and process.environ().get(MARK) == self.mark:
                    found.append(process.pid)
        return found + [p.pid for p in self.processes if p.is_alive()]

    def end(self) -> None:
        """End all remaining processes."""
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.join()

    def digests(self) -> set[str]:
        paths = [self.home / f"digest-{rank}" for rank in range(WORKERS)]
        return {path.read_text() if path.exists() else "none" for path in paths}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def until(is_so: Any, seconds: float = PATIENCE) -> bool:
    """Wait until the condition holds; return whether it did in time."""
    deadline = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


# -- trials -------------------------------------------------------------------------------


def undisturbed(args: argparse.Namespace, home: Path) -> tuple[str, float]:
    """Return the digest of a run from a folder's checkpoint, and its seconds after the start."""
    run = Run(home, args)
    try:
        begun = run.training()
        if not run.wait(PATIENCE):
            raise SystemExit(f"a run that nobody disturbs takes more than {PATIENCE:g} s")
        digests = run.digests()
        if len(digests) != 1 or "none" in digests:
            raise SystemExit(f"a run that nobody disturbs failed: {logs(home)}")
        return digests.pop(), time.monotonic() - begun
    finally:
        run.end()


def logs(home: Path) -> str:
    return " | ".join(path.read_text()[-300:] for path in sorted(home.glob("log-*")))


def killed(args: argparse.Namespace, case: Case, home: Path, usual: float) -> bool:
    """Kill a process; return whether that was before the end of the run."""
    run = Run(home, args)
    try:
        moment = run.training() + case.moment * usual
        until(lambda: time.monotonic() >= moment or run.over())
        if run.over():
            return False
        run.kill(case.victim)
        at = time.monotonic()
        if not run.wait(args.timeout + PATIENCE):
            case.wrong.append("a worker has not ended")
        if all(process.exitcode == 0 for process in run.processes):
            return False
        case.ended_s = time.monotonic() - at
        see_lines(args, case, run, at)
        if not until(lambda: not run.left(), 5.0):
            case.wrong.append(f"{len(run.left())} processes are left")
        return True
    finally:
        run.end()


def see_lines(args: argparse.Namespace, case: Case, run: Run, at: float) -> None:
    """Record the last lines of the other workers."""
    for rank in range(WORKERS):
        if case.victim == f"rank {rank}":
            continue
        path = run.home / f"said-{rank}"
        if not path.exists():
            case.wrong.append(f"rank {rank} said nothing; its log: {logs(run.home)}")
            continue
        said = json.loads(path.read_text())
        line = said["line"]
        case.lines.append(line)
        case.said_s = max(case.said_s, said["at"] - at)
        if "\n" in line or not line.startswith(f"rank {rank}: "):
            case.wrong.append(f"rank {rank} said no line of its own: {line!r}")
        elif not re.search(rf"\b{case.victim}\b", line.removeprefix(f"rank {rank}: ")):
            case.wrong.append(f"rank {rank} did not name {case.victim}: {line!r}")
    if case.said_s > args.timeout:
        case.wrong.append(f"the last worker said so after {case.said_s:.1f} s")


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Draw victims and times, infinitely."""
    chance = random.Random(args.seed)
    everyone = [f"rank {n}" for n in range(WORKERS)] + [f"server {n}" for n in range(SERVERS)]
    while True:
        for victim in chance.sample(everyone, len(everyone)):
            yield Case(victim, round(chance.random() * 0.9, 3))


def attacked(home: Path, args: argparse.Namespace) -> tuple[Case, str]:
    """Have unknown clients connect to a server; return the results, and the digest."""
    case, run = Case("strangers"), Run(home, args)
    try:
        if not until(lambda: (home / "server").exists() or run.over()) or run.over():
            raise SystemExit(f"the run that strangers were to visit failed: {logs(home)}")
        sent = visit(json.loads((home / "server").read_text()))
        if not run.wait(PATIENCE):
            case.wrong.append("the run has not ended")
        until(lambda: not run.left(), 5.0)
        found = re.findall(r"refused (\d+) connections or", logs(home))
        case.strangers = sum(map(int, found))
        if case.strangers < sent:
            case.wrong.append(f"{case.strangers} of {sent} strangers were counted: {logs(home)}")
        return case, ", ".join(sorted(run.digests()))
    finally:
        run.end()


def visit(card: dict[str, Any]) -> int:
    """Connect without the key, and send garbage; return how often."""
    chance, sent = random.Random(0), 0
    for port in card["ports"][0]:
        for _ in range(STRANGERS):
            for begin in (b"wingbeat", b""):
                with socket.create_connection((card["uses"][0], port), timeout=5) as stranger:
                    stranger.sendall(begin + chance.randbytes(200))
                sent += 1
            time.sleep(0.02)
    return sent


def launch(args: argparse.Namespace) -> int:
    """Run the requested number of kills, and judge."""
    from wingbeat_lab.bench import machine

    refuse_unwritable(args.json)
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [
            "torch",
            "sklearn.datasets",
            "wingbeat",
            "wingbeat.engine.api",
            "wingbeat.methods.parameter_server.exchange",
        ]
    )
    done: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="wingbeat-kills-") as folder:
        root = Path(folder)
        want, usual = undisturbed(args, made(root / "alone"))
        print(f"a run that nobody disturbs: {usual:.1f} s", flush=True)
        for case in cases(args):
            if len(done) == args.kills:
                break
            begin, home = time.monotonic(), made(root / "killed")
            if killed(args, case, home, usual):
                (home / "checkpoint.new").unlink(missing_ok=True)
                if undisturbed(args, home)[0] != want:
                    case.wrong.append("the run that was started again ended with other bits")
                case.seconds = time.monotonic() - begin
                done.append(case)
                tell(case)
            shutil.rmtree(home)
        strangers, bits = attacked(made(root / "attacked"), args)
        if bits != want:
            strangers.wrong.append("the run that strangers visited ended with other bits")
        tell(strangers)
    return report(args, done, strangers, machine)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


def tell(case: Case) -> None:
    print(f"{case.victim} at {case.moment:.0%}: said after {case.said_s:.1f} s, ended after "
          f"{case.ended_s:.1f} s{'; '.join(['', *case.wrong])}", flush=True)  # fmt: skip
    for line in case.lines:
        print(f"    {line}", flush=True)


def report(args: argparse.Namespace, done: list[Case], strangers: Case, machine: Any) -> int:
    fine = sum(not case.wrong for case in done)
    found = {
        "machine": machine.describe(),
        "versions": machine.versions(),
        "cases": [asdict(case) for case in done],
        "strangers": asdict(strangers),
        "fine": fine,
    }
    show(found, table(done, strangers.strangers, args.timeout))
    write(args.json, found)
    return int(fine < len(done) or bool(strangers.wrong))


COLUMNS = ("killed", "times", "all as it is to be", "said after, s", "least .. largest, s")


def table(done: list[Case], strangers: int, timeout: float) -> Printed:
    """Return the results of all kills for printing."""
    cells = []
    for role in ("rank", "server"):
        some = [case for case in done if case.victim.startswith(role)]
        took = [case.said_s for case in some]
        times = ("", "")
        if took:
            times = f"{statistics.median(took):.1f}", f"{min(took):.1f} .. {max(took):.1f}"
        fine = sum(not case.wrong for case in some)
        cells.append((role, str(len(some)), str(fine), *times))
    notes = [
        "as it is to be: the others said who, ended, and nothing was lost",
        f"the timeout is {timeout:g} s; strangers refused: {strangers}",
    ]
    return Printed.of("a worker or a server killed", COLUMNS, cells, notes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=at_least_one, default=20)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--every", type=int, default=5, help="iterations between two checkpoints")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds slept in an iteration")
    parser.add_argument("--timeout", type=float, default=6.0, help="of wingbeat.init")
    parser.add_argument("--seed", type=int, default=0, help="of who is killed when")
    parser.add_argument("--json", type=Path, default=Path("out/kills.json"))
    return launch(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
