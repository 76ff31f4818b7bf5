"""Replicas that are torch jobs of their own, under `distribute(mesh=...)`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import replica_training_cases as cases
import torch.distributed as dist

from helpers.code_blocks import blocks_of
from helpers.pool import Pool
from wingbeat.transport.served_store import StoreServer

HERE = Path(__file__).parent
SCRIPT = HERE / "replica_training_script.py"
PAGE = HERE.parent.parent / "docs/how-to/checkpoints.md"
HERE_NAME = "tests/engine/test_replica_training.py"

Stores: TypeAlias = tuple[list[dist.TCPStore], StoreServer]
"""Those of two torch jobs, and the one of the whole job."""


@pytest.fixture(scope="module")
def job() -> Iterator[Pool]:
    """Four processes without a default group."""
    pool = Pool(4, default_group=False)
    yield pool
    pool.close()


@pytest.fixture
def stores() -> Iterator[Stores]:
    served = StoreServer(0)
    yield (
        [dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False) for _ in "12"],
        served,
    )
    served.close()


def test_exact_strategies_between_torch_jobs_have_the_weights_of_one_process(
    job: Pool, stores: Stores
) -> None:
    ports = [each.port for each in stores[0]]
    for found in job.run(cases.exact, ["allreduce", "dear"], 5, ports, stores[1].port):
        assert max(found) < 1e-12, found


REFUSED = {
    "across": "this torch job is one replica .*leave across out",
    "terminated": r"on_terminate\(\) was called in a job of several torch jobs",
    "other shapes": r"rank 0's mesh has dimensions \[\], rank 1's has \['dp_shard'\]",
}


def test_what_a_replica_cannot_do_is_refused_in_one_line(job: Pool, stores: Stores) -> None:
    ports = [each.port for each in stores[0]]
    for found in job.run(cases.refusals, ports, stores[1].port):
        assert found.keys() == REFUSED.keys()
        for name, words in REFUSED.items():
            assert re.search(words, found[name]), found[name]
            assert "\n" not in found[name]


TAKEN = (
    "^replica 0 cannot join: rank .* is taken: a process of the job whose store"
    # the other torch job has ended already, on a slow machine
    "|^replica 0 cannot rejoin: its former processes ended before the job at the store at"
)


def test_two_replicas_of_one_number_are_refused_on_all_of_their_ranks(
    job: Pool, stores: Stores
) -> None:
    ports, same = [each.port for each in stores[0]], [{"WINGBEAT_REPLICA": "0"}] * 4
    errors = job.run(cases.joined, ports, stores[1].port, 8.0, same)
    taken = [error for error in errors if re.search(TAKEN, error)]
    missing = [error for error in errors if re.search("rank 2 published nothing", error)]
    assert len(taken) in (2, 4), errors
    assert len(taken) + len(missing) == 4, errors
    assert not any("\n" in error for error in errors)


def test_ranks_of_a_torch_job_with_several_numbers_are_refused(job: Pool, stores: Stores) -> None:
    ports, turned = [each.port for each in stores[0]], [{"WINGBEAT_REPLICA": n} for n in "0101"]
    for error in job.run(cases.joined, ports, stores[1].port, 4.0, turned):
        assert "rank 0 of a torch job has WINGBEAT_REPLICA=0, and rank 1 1" in error


# -- a restarted replica ------------------------------------------------------------------


class Replicas:
    """Two replicas of two processes, each under a torchrun.

    Args:
        folder: where they run, and for what they print.
        store: the port of `wingbeat store`.
        commands: the command of each, as words.
    """

    def __init__(self, folder: Path, store: int, commands: Sequence[Sequence[str]]) -> None:
        self.folder = folder
        self.processes = [
            subprocess.Popen(
                words,
                cwd=folder,
                env=os.environ
                | {
                    "WINGBEAT_REPLICA": str(replica),
                    "WINGBEAT_REPLICAS": "2",
                    "WINGBEAT_STORE": f"127.0.0.1:{store}",
                    "WINGBEAT_TOP": "off",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": os.pathsep.join(map(str, (HERE, HERE.parent))),
                },
                stdout=(folder / f"out-{replica}").open("w"),
                stderr=(folder / f"log-{replica}").open("w"),
            )
            for replica, words in enumerate(commands)
        ]

    def reports(self, life: int, replica: int) -> list[dict[str, Any]]:
        """Wait until both ranks of a replica train in an incarnation; their reports."""
        deadline = time.monotonic() + 120
        paths = [self.folder / f"{life}-{2 * replica + place}" for place in range(2)]
        while not all(path.exists() for path in paths):
            assert time.monotonic() < deadline, f"replica {replica} does not train"
            assert all(each.poll() is None for each in self.processes), self.end()
            time.sleep(0.05)
        return [json.loads(path.read_text()) for path in paths]

    def end(self) -> list[str]:
        """End what still runs; what each has written to standard error."""
        for each in self.processes:
            each.terminate()
            each.wait()
        return [(self.folder / f"log-{replica}").read_text()[-4000:] for replica in range(2)]


@pytest.fixture
def store() -> Iterator[int]:
    """The port of a `wingbeat store`."""
    verb = [sys.executable, "-m", "wingbeat.cli.main", "store", "--port", "0"]
    process = subprocess.Popen(verb, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield int(process.stdout.readline().rpartition(" ")[2])
    process.terminate()
    assert process.wait(20) == 0
    process.communicate()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("row", "victim"),
    [
        ("localsgd:every=2", 0),
        ("localsgd:average_state=true", 1),
        ("diloco:every=3", 1),
        ("ripples", 1),
    ],
)
def test_killed_replica_rejoins_and_all_have_the_same_weights(
    row: str, victim: int, store: int, tmp_path: Path
) -> None:
    """Also replica 0: neither the store nor the group generator ends with it."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", "--max-restarts", "3", str(SCRIPT), str(tmp_path), row]
    replicas = Replicas(tmp_path, store, [command] * 2)
    try:
        for replica in range(2):
            assert not any(each["returned"] for each in replicas.reports(0, replica))
        os.kill(replicas.reports(0, victim)[1]["pid"], signal.SIGKILL)
        again = replicas.reports(1, victim)
        assert all(each["returned"] for each in again)
        assert min(each["steps"] for each in again) > 0, "it has copied a state"
        (tmp_path / "stop").touch()
        assert [each.wait(120) for each in replicas.processes] == [0, 0]
        lines = replicas.end()
        found = [json.loads((tmp_path / f"end-{rank}").read_text()) for rank in range(4)]
        assert found[0] == found[2], lines
        assert found[1] == found[3], lines
    finally:
        replicas.end()


PACED = """    optimizer.step()
    pathlib.Path(f"at-{world.rank}-{world.returned}").write_text(str(os.getpid()))
    if step > 100 and not pathlib.Path("at-2-True").exists():
        time.sleep(0.05)  # until the killed replica is back
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_program_of_the_page_trains_on_after_a_replica_is_killed(
    store: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [each for each in blocks_of(PAGE) if each.word("elsewhere") == HERE_NAME]
    served, *starts, program = [each.code for each in blocks]
    assert [each.language for each in blocks] == ["sh", "sh", "sh", "python"]
    assert served == "wingbeat store --port 29400\n"  # the fixture runs it, with another port
    assert "    optimizer.step()\n" in program
    (tmp_path / "replicas.py").write_text(
        "import os, pathlib, time\n" + program.replace("    optimizer.step()\n", PACED)
    )
    scripts = [code.replace("node1:29400", f"127.0.0.1:{store}") for code in starts]
    assert len(scripts) == 2
    assert not set(scripts) & set(starts)
    bin_first = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    monkeypatch.setenv("PATH", bin_first)
    commands = [
        ["bash", "-eu", "-c", each.replace("torchrun", "exec torchrun")] for each in scripts
    ]
    replicas = Replicas(tmp_path, store, commands)
    try:
        first, deadline = tmp_path / "at-3-False", time.monotonic() + 120
        while not (first.exists() and first.read_text()):
            assert time.monotonic() < deadline, "replica 1 does not train"
            time.sleep(0.05)
        os.kill(int(first.read_text()), signal.SIGKILL)
        codes = [each.wait(200) for each in replicas.processes]
        logs = replicas.end()
        assert codes == [0, 0], logs
        assert (tmp_path / "at-3-True").exists(), logs
        said = [(tmp_path / f"out-{replica}").read_text().strip() for replica in range(2)]
        losses = [re.fullmatch(r"replica (\d): loss (\d\.\d{4})", each) for each in said]
        assert [each and each[1] for each in losses] == ["0", "1"], said
        assert all(each and float(each[2]) < 0.1 for each in losses), said
    finally:
        replicas.end()
