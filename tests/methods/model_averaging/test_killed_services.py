"""Real processes are killed while replicas train: rank 0, the group generator, `wingbeat store`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers.code_blocks import blocks_of
from helpers.ports import free_port

PAGE = Path(__file__).parents[3] / "docs/how-to/checkpoints.md"

SCRIPT = """if True:
    import os, sys, time
    from pathlib import Path
    import torch, wingbeat
    from wingbeat.strategies.spelling import parse
    torch.set_num_threads(1)
    home, row = Path(sys.argv[1]), sys.argv[2]
    world = wingbeat.init(timeout=60)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(model, optimizer, parse(row))
    generator = torch.Generator().manual_seed(world.rank)
    made = 0
    while not (home / "stop").exists():
        x = torch.randn(8, 16, generator=generator)
        optimizer.zero_grad()
        (model(x) - x.mean(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        made += 1
        (home / f"at-{world.rank}").write_text(f"{os.getpid()} {made}")
        time.sleep(0.02)
    wingbeat.synchronize(model)
    weights = [p.tolist() for p in model.parameters()]
    (home / f"end-{world.rank}").write_text(repr(weights))
"""

STORE = """if True:
    import signal, sys
    import torch.distributed as dist
    store = dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
    signal.pause()
"""

RANKS = range(3)


class Job:
    """Three processes, each a replica at a store, or all of one torch job."""

    def __init__(
        self, home: Path, row: str, *, hosted: bool, torchrun: bool = False, launched: bool = False
    ) -> None:
        self.home, self.row, self.port, self.hosted = home, row, free_port(), hosted
        self.launched = launched
        self.script = home / "train.py"
        self.script.write_text(SCRIPT)
        self.launcher = ["-m", "torch.distributed.run", "--standalone"] if torchrun else []
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        if hosted:
            self.start_store()
        if launched:
            self._run("launcher", [sys.executable, "-c", STORE, str(self.port)], {})
        for rank in RANKS:
            self.start(rank)

    def start(self, rank: int) -> None:
        size, port = ("1", free_port()) if self.hosted else (str(len(RANKS)), self.port)
        env = {"RANK": "0" if self.hosted else str(rank), "WORLD_SIZE": size}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WINGBEAT_JOB_ID": "job"}
        if self.hosted:
            env |= {"WINGBEAT_REPLICA": str(rank), "WINGBEAT_REPLICAS": str(len(RANKS))}
            env |= {"WINGBEAT_STORE": f"127.0.0.1:{self.port}"}
        if self.launched:
            env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        command = [sys.executable, *self.launcher, str(self.script), str(self.home), self.row]
        self._run(str(rank), command, env)

    def start_store(self) -> None:
        """Run the command of the page checkpoints.md, with another port and file."""
        (block,) = [each for each in blocks_of(PAGE) if "--journal" in each.code]
        own = {
            "29400": str(self.port),
            "/var/lib/wingbeat/store.journal": str(self.home / "journal"),
        }
        first, *words = [own.get(word, word) for word in block.code.split()]
        assert first == "wingbeat"
        self._run("store", [sys.executable, "-m", "wingbeat", *words], {})

    def _run(self, name: str, command: list[str], env: dict[str, str]) -> None:
        env = {**os.environ, "WINGBEAT_TOP": "off", "OMP_NUM_THREADS": "1", **env}
        with (self.home / f"log-{name}").open("a") as log:
            self.processes[name] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        self.processes[name].kill()
        self.processes[name].wait()

    def kill_generator(self) -> None:
        (found,) = [p for p in self.all() if "wingbeat.methods.model_averaging" in p.cmdline()]
        found.kill()

    def all(self) -> list[psutil.Process]:
        """The processes that run, and those that they have started."""
        found = []
        for each in self.processes.values():
            if each.poll() is None:
                own = psutil.Process(each.pid)
                found += [own, *own.children(recursive=True)]
        return found

    def log(self, name: str) -> str:
        return (self.home / f"log-{name}").read_text()

    def made(self, rank: int) -> tuple[int, int]:
        """The process of a rank, and its number of steps."""
        try:
            pid, steps = (self.home / f"at-{rank}").read_text().split()
        except (OSError, ValueError):  # it does not train yet, or writes at this moment
            return 0, 0
        return int(pid), int(steps)

    def await_steps(self, steps: int = 60) -> None:
        """Wait until the present process of each rank has made so many further steps."""
        begun = [self.present(rank) for rank in RANKS]
        self.until(
            lambda: all(self.present(rank) >= begun[rank] + steps for rank in RANKS), "all train"
        )

    def present(self, rank: int) -> int:
        """The number of steps of the present process of a rank."""
        pid, made = self.made(rank)
        own = self.processes[str(rank)].pid
        try:
            return made if own in (pid, psutil.Process(pid).ppid()) else 0
        except psutil.Error:
            return 0

    def until(self, done: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 150
        while not done():
            names = [*map(str, RANKS), *(["store"] if self.hosted else [])]
            logs = "\n".join(self.log(name)[-2000:] for name in names)
            assert time.monotonic() < deadline, f"not: {what}\n{logs}"
            time.sleep(0.05)

    def until_said(self, words: str, times: int, ranks: tuple[int, ...] = tuple(RANKS)) -> None:
        self.until(lambda: all(self.log(str(r)).count(words) == times for r in ranks), words)

    def end_after_return(self) -> None:
        """Start the killed replica 0 again; end once it trains with the others."""
        self.start(0)
        self.until_said("rank 0 is back", 1, (1, 2))
        self.await_steps()
        self.end()

    def end(self) -> None:
        """Let all synchronize; their weights are equal, and no stack trace of C++ was logged."""
        (self.home / "stop").touch()
        for rank in RANKS:
            assert self.processes[str(rank)].wait(90) == 0, self.log(str(rank))
        weights = {(self.home / f"end-{rank}").read_text() for rank in RANKS}
        assert len(weights) == 1
        assert not any("frame #" in self.log(str(rank)) for rank in RANKS)


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def start(row: str, *, hosted: bool = True, **options: bool) -> Job:
        made.append(Job(tmp_path, row, hosted=hosted, **options))
        return made[-1]

    yield start
    for job in made:
        for each in job.all():
            each.send_signal(signal.SIGKILL)
        for process in job.processes.values():
            process.wait()


GROUPS = ["localsgd:every=4", "diloco:every=5", "ripples"]
AGAIN = "another group generator was started"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", [*GROUPS, "diloco:every=5,quorum=2,grace=0.5"])
def test_killed_generator_is_started_again_and_killed_replica_0_rejoins(
    row: str, jobs: Callable[..., Job]
) -> None:
    job = jobs(row)
    job.await_steps()
    for times in (1, 2):
        job.kill_generator()
        job.until_said(AGAIN, times)
        job.await_steps()
    job.kill("0")
    job.end_after_return()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", [*GROUPS, "canary"])
def test_killed_store_is_restored_and_a_killed_replica_rejoins(
    row: str, jobs: Callable[..., Job]
) -> None:
    job = jobs(row)
    job.await_steps()
    job.kill("store")
    job.until_said("does not answer", 1)
    job.await_steps()
    job.start_store()
    job.until_said("answers again", 1)
    if row != "canary":  # which has no generator
        job.until_said(AGAIN, 1)
    job.await_steps()
    job.kill("0")
    job.end_after_return()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", [*GROUPS, "canary"])
def test_survivors_of_a_rank_0_that_serves_the_store_log_one_line_about_it(
    row: str, jobs: Callable[..., Job]
) -> None:
    job = jobs(row, hosted=False)
    job.await_steps()
    job.kill("0")
    job.until_said("which serves the rendezvous store at", 1, (1, 2))
    if row == "canary":
        assert [job.processes[rank].wait(90) for rank in "12"] == [1, 1]
    else:
        begun = [job.made(rank)[1] for rank in (1, 2)]
        job.until(lambda: all(job.made(r)[1] > begun[r - 1] + 40 for r in (1, 2)), "they train")
    for rank in (1, 2):
        said = job.log(str(rank))
        assert "start `wingbeat store` and each rank as a replica" in said
        assert "frame #" not in said
        assert said.count("wingbeat (rank") < 6, said


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", ["localsgd:every=4", "adpsgd", "canary", "allreduce", "geryon"])
def test_workers_train_on_after_the_launcher_that_serves_the_store_has_ended(
    row: str, jobs: Callable[..., Job]
) -> None:
    job = jobs(row, hosted=False, launched=True)
    job.await_steps()
    job.kill("launcher")
    job.until_said("training continues; a lost worker now ends all strategies but Ripples", 1)
    job.await_steps()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_replica_of_a_killed_torchrun_rejoins_under_another_one(jobs: Callable[..., Job]) -> None:
    """Its process does not train on, which would have its rank."""
    job = jobs("localsgd:every=4", torchrun=True)
    job.await_steps()
    pid, _ = job.made(0)
    job.kill("0")
    job.until(lambda: not psutil.pid_exists(pid), "the process ends with its torchrun")
    job.end_after_return()
