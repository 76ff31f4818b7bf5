"""Whether processes of a long job grow, while its membership changes, and what they leave.

    python benchmarks/soak.py --minutes 60 --json out/soak.json
    python benchmarks/soak.py --minutes 10 --strategies ripples diloco:every=5

Four workers train a small network on the digits on this host, under one strategy after the other.
Under strategies that continue without a worker, each is a replica of `wingbeat store`, and replicas
2 and 3 are disturbed in turn: killed (SIGKILL) and started again, or stopped (SIGSTOP) for two
seconds. Under the others a rank is stopped in turn. Every two seconds the resident memory, threads,
sockets, other descriptors and mapped shared memory of each process are read, and the entries of
``/dev/shm``, of the temporary folder and of the folder of `wingbeat top`, all three of this run
alone. At the end all workers and the store are killed (SIGKILL).

Limits, for each process that lives from the begin to the end, after a warm-up (a third of the time,
at most 5 minutes), by a robust slope (Theil and Sen): resident memory grows by less than 1 MB per
10 minutes, and by less than 1 MB in a shorter time; threads, sockets, descriptors, shared memory
and entries do not grow. No worker that is not disturbed makes no step for 60 s. 15 s after the end
no process is left, and no entry of wingbeat's. Where memory grows, the report has the types of
Python objects of which there are more. Exit status 1 if a limit is missed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from common import run_and_judge, show, write
from killing import put

from wingbeat.errors import LabError
from wingbeat_lab import baselines
from wingbeat_lab.bench.table import Printed

STRATEGIES = (
    "dear", "allreduce:compression=sketch@4", "canary", "ripples", "diloco:every=5",
    "parameterserver",
)  # fmt: skip
RETURNING = ("canary", "ripples", "localsgd", "diloco", "adpsgd")
"""Strategies whose replicas may die and return."""
WORKERS = 4
DISTURBED = (2, 3)
"""Replicas that are killed and stopped; the others live from begin to end."""
SAMPLE_S = 2.0
KEPT_S = 30.0
"""Seconds between the samples of the report."""
EVERY_S = 20.0
"""Seconds between the end of a disturbance and the next one."""
STOPPED_S = 2.0
STILL_S = 60.0
START_S = 300.0
TELL_S = 60.0
LEFT_S = 15.0
MB_PER_10_MINUTES = 1.0
LEAST_MB = 1.0
"""Allowed growth of memory in less than 10 minutes."""
COUNTED = ("threads", "sockets", "descriptors", "shared_mb", "entries")
"""What must not grow."""


def main() -> int:
    args = arguments()

    def measure(report: dict[str, Any]) -> list[str]:
        for row in args.strategies:
            baselines.parse(row)  # fail before processes are started
        report["rows"], missed = {}, []
        for row in args.strategies:
            found = report["rows"][row] = soaked(row, 60.0 * args.minutes, args.seed)
            show(report, table(row, found))
            missed += [f"{row}: {each}" for each in judged(found)]
            write(args.json, report)
        return missed

    return run_and_judge(args.json, measure)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=minutes, default=10.0, help="of each strategy (10)")
    parser.add_argument(
        "--strategies", nargs="+", default=STRATEGIES, metavar="NAME", help=" ".join(STRATEGIES)
    )
    parser.add_argument("--seed", type=int, default=0, help="of whom and what (0)")
    parser.add_argument("--json", type=Path, default=Path("out/soak.json"), metavar="FILE")
    return parser.parse_args()


def minutes(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 1.0 <= float(text) <= 24 * 60:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}: allowed are 1 to 1440 minutes")


# -- the run ---------------------------------------------------------------------------------


def soaked(row: str, seconds: float, seed: int) -> dict[str, Any]:
    """Train for so long; return samples, growth, disturbances and what was left."""
    print(f"{row}: {seconds / 60:g} minutes", flush=True)
    with tempfile.TemporaryDirectory(prefix="wingbeat-soak-", dir="/var/tmp") as folder:
        job = Job(row, Path(folder), seed)
        try:
            job.start()
            warm_s = min(seconds / 3.0, 300.0)
            job.train(warm_s)
            job.count_objects(0)
            warm = job.seconds
            job.train(seconds - warm_s)
            job.count_objects(1)
            return {
                "warm_s": warm, "seconds": job.seconds, "samples": kept(job.samples),
                "growth": growths(job.samples, warm), "disturbed": job.disturbed,
                "objects": job.grown_objects(), "steps": job.steps(), **job.kill(),
            }  # fmt: skip
        finally:
            job.close()


class Job:
    """The processes of a job, and the samples of them.

    Args:
        row: the strategy.
        home: a new folder.
        seed: determines disturbances.

    Attributes:
        samples: a dict per process and time: ``at`` in seconds after the start, ``process``, and
            its figures.
        disturbed: the disturbances: ``at``, ``replica`` and ``how``.
    """

    def __init__(self, row: str, home: Path, seed: int) -> None:
        self._row, self._home, self._drawn = row, home, random.Random(seed)
        self._returning = row.partition(":")[0] in RETURNING
        self._roots: dict[str, subprocess.Popen[str]] = {}
        self._lives = [0] * WORKERS
        self._moved: dict[int, tuple[int, float]] = {}
        self._seen: set[psutil.Process] = set()
        self._begin, self._next, self._told = time.monotonic(), 0.0, 0.0
        self._halted: tuple[int, float] | None = None
        self._back: int | None = None
        self.samples: list[dict[str, Any]] = []
        self.disturbed: list[dict[str, Any]] = []
        self._folders = {name: home / name for name in ("tmp", "top")}
        for folder in self._folders.values():
            folder.mkdir(mode=0o700)
        self._folders["/dev/shm"] = Path("/dev/shm")
        self._shm = set(os.listdir("/dev/shm"))
        self._env = os.environ | {
            "TMPDIR": str(home / "tmp"),
            "WINGBEAT_RUNTIME_DIR": str(home / "top"),
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
            "WINGBEAT_LOG": "error",
        }
        self._ports = [free_port() for _ in range(WORKERS)]
        self._store = ""

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begin

    def start(self) -> None:
        """Start all processes; wait until all train."""
        if self._returning:
            self._serve()
        for number in range(WORKERS):
            self._launch(number)
        deadline = time.monotonic() + START_S
        while any(self._step(number) is None for number in range(WORKERS)):
            self._check()
            if time.monotonic() > deadline:
                raise LabError(f"{self._row}: not all workers train after {START_S:g} s")
            time.sleep(0.2)
        self._begin = time.monotonic()
        self._next = EVERY_S

    def train(self, seconds: float) -> None:
        """Disturb and sample for so long."""
        end, sampled = time.monotonic() + seconds, -SAMPLE_S
        while time.monotonic() < end:
            self._check()
            self._watch()
            self._disturb()
            if self.seconds >= sampled + SAMPLE_S:
                sampled = self.seconds
                self._sample()
            if self.seconds >= self._told + TELL_S:
                self._told = self.seconds
                print(
                    f"{self._row}: {self._told / 60:.0f} min, steps {self.steps()}, disturbances "
                    f"{len(self.disturbed)}", flush=True,
                )  # fmt: skip
            time.sleep(0.1)

    def count_objects(self, moment: int) -> None:
        """Have the workers that are not disturbed count their Python objects."""
        put(self._home / f"count-{moment}", moment)
        deadline = time.monotonic() + START_S
        for number in self._calm():
            while not (self._home / f"objects-{moment}-{number}").exists():
                self._check()
                self._disturb()  # a stopped one has to continue
                if time.monotonic() > deadline:
                    raise LabError(
                        f"{self._row}: worker {number} has not counted its objects in {START_S:g} "
                        f"s; steps {self.steps()}"
                    )
                time.sleep(0.1)

    def grown_objects(self) -> dict[str, dict[str, tuple[int, int]]]:
        """Return the types with more objects at the second moment, of each worker: the ten most."""
        found = {}
        for number in self._calm():
            first, last = (
                json.loads((self._home / f"objects-{moment}-{number}").read_text())
                for moment in (0, 1)
            )
            more = sorted(last, key=lambda name: first.get(name, 0) - last[name])[:10]
            found[f"worker {number}"] = {
                name: (first.get(name, 0), last[name])
                for name in more
                if last[name] > first.get(name, 0)
            }
        return found

    def steps(self) -> list[int]:
        """Return the steps of each worker's current incarnation."""
        return [self._step(number) or 0 for number in range(WORKERS)]

    def kill(self) -> dict[str, list[str]]:
        """Kill workers and store; return processes and entries that are left."""
        self._collect()
        for each in self._roots.values():
            each.kill()
        for each in self._roots.values():
            each.wait()
        _, alive = psutil.wait_procs(self._seen, LEFT_S)
        processes = [f"{each.pid}: {role(each, '?')}" for each in alive]
        return {"processes": processes, "entries": sorted(self._entries())}

    def close(self) -> None:
        """End whatever still runs."""
        self._collect()
        for process in self._seen:
            with contextlib.suppress(psutil.Error):
                process.kill()
        for each in self._roots.values():
            each.kill()
            each.wait()

    # -- processes --

    def _serve(self) -> None:
        words = [sys.executable, "-m", "wingbeat.cli.main", "store", "--port", "0"]
        store = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=self._env)
        self._roots["store"] = store
        assert store.stdout is not None
        port = store.stdout.readline().rpartition(" ")[2].strip()
        if not port.isdecimal():
            raise LabError(f"wingbeat store ended with exit status {store.wait()}")
        self._store = f"127.0.0.1:{port}"

    def _launch(self, number: int) -> None:
        if self._returning:
            own = {
                "WINGBEAT_REPLICA": str(number), "WINGBEAT_REPLICAS": str(WORKERS),
                "WINGBEAT_STORE": self._store, "RANK": "0", "WORLD_SIZE": "1",
                "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
                "MASTER_PORT": str(self._ports[number]),
            }  # fmt: skip
        else:
            own = {
                "RANK": str(number), "WORLD_SIZE": str(WORKERS), "LOCAL_RANK": str(number),
                "LOCAL_WORLD_SIZE": str(WORKERS), "MASTER_PORT": str(self._ports[0]),
            }  # fmt: skip
        life = self._lives[number]
        words = [sys.executable, __file__, "--work", str(self._home), self._row]
        self._roots[f"worker {number}"] = subprocess.Popen(
            [*words, str(number), str(life)], text=True, env=self._env | own
        )

    def _calm(self) -> range:
        return range(DISTURBED[0]) if self._returning else range(WORKERS)

    def _check(self) -> None:
        for name, each in self._roots.items():
            if each.poll() is not None:
                raise LabError(
                    f"{self._row}: {name} ended with exit status {each.returncode}; its errors "
                    "are above"
                )

    def _step(self, number: int) -> int | None:
        with contextlib.suppress(FileNotFoundError):
            found = json.loads((self._home / f"at-{number}").read_text())
            return int(found["steps"]) if found["life"] == self._lives[number] else None
        return None

    def _watch(self) -> None:
        """Raise LabError if a worker that is not disturbed makes no step."""
        now = time.monotonic()
        for number in self._calm():
            steps = self._step(number) or 0
            before, since = self._moved.get(number, (-1, now))
            if steps != before:
                self._moved[number] = steps, now
            elif now - since > STILL_S:
                raise LabError(
                    f"{self._row}: worker {number} made no step for {STILL_S:g} s after step "
                    f"{steps}; the last disturbance was {self.disturbed[-1:]}"
                )

    def _disturb(self) -> None:
        now = self.seconds
        if self._halted is not None and now >= self._halted[1]:
            os.kill(self._roots[f"worker {self._halted[0]}"].pid, signal.SIGCONT)
            self._halted, self._next = None, now + EVERY_S
        if self._back is not None and self._step(self._back) is not None:
            self.disturbed[-1]["back_s"] = now - self.disturbed[-1]["at"]
            self._back, self._next = None, now + EVERY_S
        if self._back is not None and now - self.disturbed[-1]["at"] > START_S:
            raise LabError(f"{self._row}: replica {self._back} did not return in {START_S:g} s")
        if self._halted is not None or self._back is not None or now < self._next:
            return
        victim = self._drawn.choice(DISTURBED if self._returning else range(WORKERS))
        process = self._roots[f"worker {victim}"]
        if self._returning and len(self.disturbed) % 2 == 0:
            process.kill()
            process.wait()
            self._lives[victim] += 1
            self._launch(victim)
            self._back, how = victim, "killed"
        else:
            os.kill(process.pid, signal.SIGSTOP)
            self._halted, how = (victim, now + STOPPED_S), "stopped"
        self.disturbed.append({"at": now, "replica": victim, "how": how})

    # -- samples --

    def _collect(self) -> dict[str, list[psutil.Process]]:
        """Return each root with its descendants, and remember all."""
        found = {}
        for name, root in self._roots.items():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(root.pid)
                found[name] = [process, *process.children(recursive=True)]
                self._seen.update(found[name])
        return found

    def _sample(self) -> None:
        at = round(self.seconds, 1)
        for name, tree in self._collect().items():
            for number, process in enumerate(tree):
                with contextlib.suppress(psutil.Error, OSError):
                    title = name if number == 0 else role(process, name)
                    figures = figures_of(process)
                    self.samples.append({"at": at, "process": f"{title} ({process.pid})"} | figures)
        self.samples.append(
            {"at": at, "process": "folders", "entries": len(self._entries()), "rss_mb": 0.0}
        )

    def _entries(self) -> list[str]:
        """Entries of the three folders; in ``/dev/shm`` those of this job's processes."""
        pids = {str(process.pid) for process in self._seen}
        found = []
        for name, folder in self._folders.items():
            for path in folder.rglob("*"):
                # Others use /dev/shm too; what wingbeat, torch and multiprocessing create there
                # is named by process or begins with the name of the library.
                if name != "/dev/shm" or (
                    path.name not in self._shm
                    and (path.name.startswith("wingbeat") or pids & set(path.name.split("_")))
                ):
                    found.append(f"{name}/{path.relative_to(folder)}")
        return found


def figures_of(process: psutil.Process) -> dict[str, float]:
    """Return what a process uses now."""
    kinds: collections.Counter[str] = collections.Counter()
    for number in os.listdir(f"/proc/{process.pid}/fd"):
        with contextlib.suppress(OSError):
            link = os.readlink(f"/proc/{process.pid}/fd/{number}")
            kinds["sockets" if link.startswith("socket:") else "descriptors"] += 1
    status = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    value = {line.split(":")[0]: line.split()[1] for line in status if len(line.split()) > 1}
    return {
        "rss_mb": int(value["VmRSS"]) / 1024.0,
        "shared_mb": int(value["RssShmem"]) / 1024.0,
        "threads": int(value["Threads"]),
        "sockets": kinds["sockets"],
        "descriptors": kinds["descriptors"],
    }


def role(process: psutil.Process, parent: str) -> str:
    """Return what a child process does, by its module."""
    with contextlib.suppress(psutil.Error, ValueError, IndexError):
        words = process.cmdline()
        return f"{words[words.index('-m') + 1].removesuffix('.__main__')} of {parent}"
    return f"child of {parent}"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# -- the slopes ------------------------------------------------------------------------------


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """Return the median slope of all pairs (Theil and Sen), of at most 400 evenly chosen points.

    >>> slope([0, 1, 2, 3, 4], [5, 6, 7, 80, 9])
    1.0
    """
    chosen = np.unique(np.linspace(0, len(times) - 1, min(len(times), 400)).astype(int))
    x, y = np.array(times, float)[chosen], np.array(values, float)[chosen]
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def growths(samples: Sequence[dict[str, Any]], warm_s: float) -> dict[str, dict[str, Any]]:
    """Return the growth after ``warm_s`` of each process that lives from the begin to the end.

    ``seconds`` is the time between its first and its last sample, and each figure has its value at
    the begin, at the end (medians of five samples), and ``grown``, its slope times ``seconds``.
    """
    begin, end = samples[0]["at"], samples[-1]["at"]
    found = {}
    for name in dict.fromkeys(sample["process"] for sample in samples):
        own = [each for each in samples if each["process"] == name]
        lived = own[0]["at"] <= begin + 5 * SAMPLE_S and own[-1]["at"] >= end - 5 * SAMPLE_S
        own = [each for each in own if each["at"] >= warm_s]
        if not lived or len(own) < 5:
            continue
        times = [each["at"] for each in own]
        found[name] = {"seconds": times[-1] - times[0]}
        for figure in own[0].keys() - {"at", "process"}:
            values = [each[figure] for each in own]
            found[name][figure] = {
                "begin": float(np.median(values[:5])),
                "end": float(np.median(values[-5:])),
                "grown": slope(times, values) * (times[-1] - times[0]),
            }
    return found


def kept(samples: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the samples of one moment in `KEPT_S`, for the report."""
    moments: dict[float, float] = {}
    for sample in samples:
        moments.setdefault(sample["at"] // KEPT_S, sample["at"])
    return [each for each in samples if moments[each["at"] // KEPT_S] == each["at"]]


def allowed_mb(seconds: float) -> float:
    """Return the allowed growth of resident memory.

    >>> [allowed_mb(s) for s in (60, 600, 3600)]
    [1.0, 1.0, 6.0]
    """
    return max(LEAST_MB, MB_PER_10_MINUTES * seconds / 600.0)


def judged(found: dict[str, Any]) -> list[str]:
    """Return the missed limits of one strategy."""
    missed = []
    for name, figures in found["growth"].items():
        limit, grown = allowed_mb(figures["seconds"]), figures["rss_mb"]["grown"]
        if grown >= limit:
            more = found["objects"].get(name.partition(" (")[0], "not counted")
            missed.append(
                f"{name}: memory grew by {grown:.2f} MB; limit {limit:g}; objects: {more}"
            )
        for figure in COUNTED:
            # A slope of less than one half in the whole time is not one more of anything.
            if figure in figures and figures[figure]["grown"] >= 0.5:
                begin, end = figures[figure]["begin"], figures[figure]["end"]
                missed.append(f"{name}: {figure} grew from {begin:g} to {end:g}")
    if not any("worker" in name for name in found["growth"]):
        missed.append("no worker lived from the begin to the end")
    missed += [f"process {each} is left" for each in found["processes"]]
    # torch keeps caches in the temporary folder.
    ours = [each for each in found["entries"] if not each.startswith("tmp/torch")]
    return missed + [f"{each} is left" for each in ours]


def table(row: str, found: dict[str, Any]) -> Printed:
    """Return a row for each long-lived process."""
    cells = []
    for name, figures in found["growth"].items():
        counts = [
            f"{figures[each]['begin']:g} .. {figures[each]['end']:g}" if each in figures else ""
            for each in COUNTED
        ]
        rss = figures["rss_mb"]
        memory = (f"{rss['begin']:.1f} .. {rss['end']:.1f}", f"{rss['grown']:+.2f}")
        cells.append((name, *(memory if "threads" in figures else ("", "")), *counts))
    killed = sum(each["how"] == "killed" for each in found["disturbed"])
    notes = [
        f"after {found['warm_s']:.0f} of {found['seconds']:.0f} s, in which {killed} replicas were "
        f"killed and {len(found['disturbed']) - killed} stopped; steps: {found['steps']}",
        f"left after the kill of all: {len(found['processes'])} processes, "
        f"{len(found['entries'])} entries",
    ]
    columns = ("process", "memory, MB", "grown", "threads", "sockets", "descriptors",
               "shared, MB", "entries")  # fmt: skip
    return Printed.of(row, columns, cells, notes)


# -- a worker --------------------------------------------------------------------------------


def work(home: Path, row: str, number: int, life: int) -> None:
    """Train until killed."""
    import torch

    import wingbeat
    from wingbeat_lab.bench import models

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=STILL_S)
    images, answers, _, _ = models.data()
    network: Any = models.network(number + life)
    optimizer: Any = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    network, optimizer = wingbeat.distribute(network, optimizer, baselines.parse(row))
    batches = models.batches(images, answers, rank=world.rank, workers=world.size, seed=life)
    moment = 0
    for steps, (x, y) in enumerate(batches):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
        put(home / f"at-{number}", {"life": life, "steps": steps})
        if (home / f"count-{moment}").exists():
            put(home / f"objects-{moment}-{number}", counted_objects())
            moment += 1


def counted_objects() -> dict[str, int]:
    """Return the number of Python objects by type, of those that the garbage collector tracks."""
    gc.collect()
    return dict(
        collections.Counter(f"{type(o).__module__}.{type(o).__name__}" for o in gc.get_objects())
    )


if __name__ == "__main__":
    try:
        if sys.argv[1:2] == ["--work"]:
            work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
            sys.exit(0)
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
