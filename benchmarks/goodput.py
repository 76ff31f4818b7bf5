"""Goodput under faults: useful steps over those of the same run without a fault.

Each host of a lab has one replica, which trains a network on the digits; a sleep in each step
stands for the computation of a larger one. Faults occur at moments, of kinds and on replicas that
follow from the seed. Each strategy trains twice: without a fault, and with the schedule.

Replicas of strategies that average, and of Canary, meet at `wingbeat store` on a host of its own,
which is started again with its journal, and a supervisor starts each again. Exact strategies are
restarted as a whole, by a torchrun on each host, from a checkpoint; their store is torch's. Rows
``torchft:ddp``, ``torchft:localsgd`` and ``torchft:diloco`` are torchft's, with its lighthouse in
place of the store (pip install 'wingbeat[torchft]'); ``torchft:ddp-wrapper`` is its
DistributedDataParallel in place of its Manager alone.

Exit code 1 if a goal is missed: a goodput of 0.98 with averages, 0.95 under bounded staleness,
0.977 of exact strategies with min_replicas, and for others 0.02 below what the checkpoint interval
allows; all replicas have the same weights in the end, bit for bit; every replica is back; nothing
is left. Root is needed for mounts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import secrets
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import fault_schedule as faults
import goodput_replica as hosts
from common import at_least_one, at_least_two, run_and_judge, show, write
from fault_schedule import Event, Fault

from wingbeat.errors import LabError, UsageError, unknown
from wingbeat_lab import baselines, lab
from wingbeat_lab.audit import audit, read_journal
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import kernel

EXAMPLES = """examples:
  python benchmarks/goodput.py --json out/goodput.json          (9 rows, 10 hours)
  python benchmarks/goodput.py --strategies diloco:every=10 torchft:diloco --minutes 10 --faults 20
  python benchmarks/goodput.py --strategies ripples --minutes 2 --replicas 4 --faults 5
  python benchmarks/goodput.py --strategies localsgd:every=8 --kinds kill stop cut
  python benchmarks/goodput.py --schedule                       (print it, and run nothing)
"""
ROWS = [
    "diloco:every=10,delay=5,quorum=12", "localsgd:every=8,overlap=true,quorum=12", "ripples",
    "canary", "allreduce:min_replicas=8", "dear:plan=fixed",
    "torchft:diloco", "torchft:localsgd", "torchft:ddp",
]  # fmt: skip
"""Averages do not wait for a stopped replica; torchft's interval is that of the row beside it."""
TORCHFT = {"diloco": 10, "localsgd": 8, "ddp": 1, "ddp-wrapper": 1}
"""Rows of torchft, with their steps between two averages. ``ddp`` averages gradients by its
`Manager`; ``ddp-wrapper`` by its `DistributedDataParallel`, which raises an AssertionError on all
replicas if an all-reduce times out (0.2.0)."""
GOALS = {"averaging": 0.98, "staleness": 0.95, "elastic": 0.977}
"""Of exact training without a failed replica: what torchft's authors report of theirs."""
MARGIN = 0.02
"""Allowed difference of an exact strategy's goodput to its bound."""

PACE_S = 0.025
"""Seconds of sleep in a step, times the number of replicas: two cores carry them."""
SLOW = 20
"""A slow NIC has one part in so many of its rate."""
EVERY = 20
"""Steps between two checkpoints."""
DISK_MIB = 128
START_S, BACK_S, END_S = 300.0, 120.0, 60.0
"""Seconds for all replicas to train at first, to be back in the end, and to end."""
LOOK_S = 0.1
STORES = ("wingbeat.cli.main store", "--serve", "torchft_lighthouse")
"""Words in the commands of the processes that no replica has."""
AHEAD = 6
"""Steps, or averages of torchft, after which all end."""
OF_TORCH = ("torchelastic_", "torchinductor_")
"""Begins of the names of temporary folders that torchrun and torch leave."""
PROCESS_MIB = 340
"""Private memory of a process that has imported torch, to refuse what does not fit."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=positive, default=30.0, help="of each of the two runs of a row (30)")
    add("--replicas", type=at_least_two, default=16, help="(16)")
    add("--faults", type=at_least_one, default=62, help="(62)")
    add("--seed", type=int, default=0, help="of the schedule (0)")
    add("--strategies", nargs="+", default=ROWS, metavar="ROW", help=f"({' '.join(ROWS)})")
    add("--kinds", nargs="+", default=list(faults.KINDS), metavar="KIND", help=kinds_help())
    add("--pace", type=positive, help=f"seconds of sleep in a step ({PACE_S:g} times replicas)")
    add("--rate", default="100mbit", help="of each NIC (100mbit)")
    add("--schedule", action="store_true", help="print the schedule and end")
    add("--json", type=Path, default=Path("out/goodput.json"), metavar="FILE",
        help="report; output of the replicas is in FILE.logs (out/goodput.json)")  # fmt: skip
    for role in ("keep", "supervise", "serve", "work"):
        add(f"--{role}", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for role in ("keep", "supervise", "serve", "work"):
        if getattr(args, role):
            return hosts.run(getattr(args, role), role)
    return run_and_judge(args.json, lambda report: measure(args, report))


def positive(text: str) -> float:
    """Parse a number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: allowed are numbers above 0")
    return value


def kinds_help() -> str:
    return "of faults, all by default: " + "; ".join(f"{k}: {v}" for k, v in faults.KINDS.items())


def measure(args: argparse.Namespace, report: dict[str, Any]) -> list[str]:
    """Run all rows; return the missed goals."""
    for kind in args.kinds:
        if kind not in faults.KINDS:
            raise unknown("kind of fault", kind, faults.KINDS)
    rows = {row: row_settings(row) for row in args.strategies}
    drawn = faults.schedule(args.seed, args.minutes, args.replicas, args.faults, args.kinds)
    settings = {key: getattr(args, key) for key in ("minutes", "replicas", "seed", "kinds", "rate")}
    settings |= {"faults": len(drawn), "every": EVERY, "slow": SLOW,
                 "pace": args.pace or PACE_S * args.replicas}  # fmt: skip
    report |= {"settings": settings, "schedule": [fault._asdict() for fault in drawn], "rows": {}}
    print(f"settings: {json.dumps(settings)}\nschedule:")
    print("\n".join(f"  {fault}" for fault in drawn), flush=True)
    if args.schedule:
        write(args.json, report)
        return []
    rows = {row: settings | own for row, own in rows.items()}
    check_memory(rows, args.replicas)
    for row, own in rows.items():
        found = report["rows"][row] = measured(row, own, drawn, args)
        found["missed"] = judged(row, found)
        write(args.json, report)
    for table in tables(report["rows"], settings):
        show(report, table)
    write(args.json, report)
    return [line for found in report["rows"].values() for line in found["missed"]]


def row_settings(row: str) -> dict[str, Any]:
    """Return how a row is trained, and the kinds of faults that it has.

    A `UsageError` for one that does not exist, or that no supervisor can restart.
    """
    if row.partition(":")[0] == "torchft":
        name = row.partition(":")[2]
        if name not in TORCHFT:
            raise unknown("row of torchft", name, TORCHFT)
        kinds = [kind for kind in faults.KINDS if kind != "server"]
        return {"row": row, "family": "torchft", "torchft": name, "sync_every": TORCHFT[name],
                "kinds": kinds}  # fmt: skip
    strategy = baselines.parse(row)
    exchange, kinds = strategy.exchange, [k for k in faults.KINDS if k not in ("server",)]
    if "min_replicas=" in row:
        family = "elastic"
    elif strategy.traits.exact:
        family = "exact"
    elif exchange.readmits:
        family = "staleness" if strategy.traits.bound == "stale" else "averaging"
    else:
        raise UsageError(f"--strategies {row}: no process can rejoin it, and it is not exact")
    if family != "averaging":
        kinds.remove("generator")
    if strategy.traits.bound == "late":
        kinds.append("server")
    return {"row": row, "family": family, "kinds": kinds}


def check_memory(rows: dict[str, dict[str, Any]], replicas: int) -> None:
    """Refuse what does not fit into memory, before any process is started."""
    exact = any(own["family"] == "exact" for own in rows.values())
    needed = PROCESS_MIB * (replicas * (2 if exact else 1) + 2) / 1024
    lines = Path("/proc/meminfo").read_text().splitlines()
    free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 2**20
    if needed > free:
        why = ", which each have a torchrun" if exact else ""
        raise UsageError(
            f"--replicas {replicas}: {needed:.0f} GiB for the processes of {replicas} replicas"
            f"{why}; {free:.0f} GiB are available: use fewer replicas"
        )


# -- a row -------------------------------------------------------------------------------------


def measured(
    row: str, settings: dict[str, Any], drawn: Sequence[Fault], args: argparse.Namespace
) -> dict[str, Any]:
    """Train a row without a fault and with the schedule; return its figures."""
    part = 60 * args.minutes * (1 - faults.LEAD - faults.TAIL) / args.faults
    kinds = [kind for kind in settings["kinds"] if kind in args.kinds]
    if not kinds:
        raise UsageError(f"--kinds {' '.join(args.kinds)}: none of them applies to {row}")
    schedule = faults.applied(drawn, kinds, part)
    replaced = [str(fault) for fault in schedule if fault.drawn]
    if replaced:
        print(f"{row}: replaced kinds that it does not have:\n  " + "\n  ".join(replaced))
    logs = args.json.with_suffix(args.json.suffix + ".logs")
    logs.mkdir(parents=True, exist_ok=True)
    name = row.replace("/", "_")
    runs = [
        Run(row, settings, each, args.minutes, logs / f"{name}.{kind}.log")
        for kind, each in (("calm", []), ("faults", schedule))
    ]
    calm, found = (each.run() for each in runs)
    if differ := faults.differing_steps(*(each.digests for each in runs)):
        found["wrong"].append(
            f"other weights than without a fault after {len(differ)} steps, first {differ[0]}"
        )
    seconds, step_s = 60 * args.minutes, calm["step_s"]
    found["goodput"] = found["useful"] / calm["useful"]
    found["model_goodput"] = found["model_steps"] / calm["model_steps"]
    found |= {"replaced": replaced, "calm": calm, "family": settings["family"]}
    if settings["family"] == "exact":
        slow = 2 * (1 - 1 / args.replicas) * 8 * MODEL_BYTES * SLOW / lab_rate(args.rate)
        found["bound"] = faults.bound(
            schedule, seconds=seconds, step_s=step_s, every=EVERY,
            restart_s=calm["restart_s"], slow_step_s=max(step_s, settings["pace"] + slow),
        )  # fmt: skip
    return found


MODEL_BYTES = 4 * 71_754


def lab_rate(rate: str) -> int:
    """Return a rate in bit/s."""
    return lab.LabSpec.parse(f"star:2@{rate}").rate


def judged(row: str, found: dict[str, Any]) -> list[str]:
    """Return the missed goals of a row."""
    missed = []
    goal = GOALS.get(found["family"], found.get("bound", 0.0) - MARGIN)
    if found["goodput"] < goal:
        missed.append(f"{row}: a goodput of {found['goodput']:.4f}; goal {goal:.4f}")
    for name, run in (("with faults", found), ("without a fault", found["calm"])):
        missed += [f"{row}, {name}: {line}" for line in run["wrong"]]
    return missed


COLUMNS = (
    "strategy", "useful steps", "goodput", "bound", "of the model", "next step, s", "worst",
    "pause, s", "worst", "back, s", "worst", "restart alone, s", "loss", "without faults",
)  # fmt: skip


def tables(rows: dict[str, dict[str, Any]], settings: dict[str, Any]) -> list[Printed]:
    """Return a table of all rows, and one of the kinds of faults for each."""
    cells, notes = [], []
    for row, found in rows.items():
        calm, each = found["calm"], found["faults"]
        cells.append(
            (
                row, str(found["useful"]), number(found["goodput"]), number(found.get("bound")),
                number(found["model_goodput"]),
                *spread(fault["first"] for fault in each), *spread(f["longest"] for f in each),
                *spread(fault["back"] for fault in each), f"{calm['restart_s']:.1f}",
                number(found["loss"]), number(calm["loss"]),
            )
        )  # fmt: skip
        notes.append(
            f"{row}: {calm['useful']} steps without a fault, {1e3 * calm['step_s']:.0f} ms each; "
            f"all trained {calm['start_s']:.0f} and {found['start_s']:.0f} s after the start; "
            f"{calm['memory_gib']:.1f} GiB"
        )
        notes += [f"MISSED: {line}" for line in found["missed"]]
    title = (
        f"{settings['faults']} faults in {settings['minutes']:g} minutes, "
        f"{settings['replicas']} replicas"
    )
    return [Printed.of(title, COLUMNS, cells, notes), kinds_table(rows)]


def kinds_table(rows: dict[str, dict[str, Any]]) -> Printed:
    """Return the pauses after each kind of fault."""
    cells = []
    for row, found in rows.items():
        for kind in faults.KINDS:
            each = [fault for fault in found["faults"] if fault["kind"] == kind]
            if each:
                back = [fault["back"] for fault in each]
                cells.append(
                    (
                        row, kind, str(len(each)), *spread(fault["longest"] for fault in each),
                        *spread(back), str(sum(value is None for value in back)),
                    )
                )  # fmt: skip
    columns = ("strategy", "fault", "times", "pause, s", "worst", "back, s", "worst", "not back")
    return Printed.of("by kind of fault", columns, cells, [])


def spread(values: Any) -> tuple[str, str]:
    """Return the median and the largest of some values, without None."""
    known = [value for value in values if value is not None]
    return (f"{statistics.median(known):.2f}", f"{max(known):.2f}") if known else ("", "")


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


# -- a run -------------------------------------------------------------------------------------


class Run:
    """One training run in a lab, with or without faults.

    Args:
        row: the strategy.
        settings: of the replicas.
        schedule: the faults; empty for a run without one, in which one restart is measured after
            the time.
        minutes: of the run.
        log: file for the output of all replicas.
    """

    def __init__(
        self,
        row: str,
        settings: dict[str, Any],
        schedule: Sequence[Fault],
        minutes: float,
        log: Path,
    ) -> None:
        self._row, self._replicas, self._schedule = row, int(settings["replicas"]), schedule
        self._seconds, self._log, self._rate = 60 * minutes, log, settings["rate"]
        self._mark = secrets.token_hex(8)
        self._settings = settings | {"mark": self._mark, "service": f"h{self._replicas}"}
        self._inject = lab.FaultInjector()
        self._over = threading.Event()
        self._error = ""
        self._found: dict[str, Any] = {"missed_faults": [], "wrong": []}
        self._begin = time.monotonic()
        self._home = Path()
        self.digests = ""  # of the weights after steps, of an exact strategy

    def run(self) -> dict[str, Any]:
        """Train; return the figures."""
        name = f"{len(self._schedule)} faults" if self._schedule else "no fault"
        print(f"{self._row}: {self._seconds / 60:g} minutes with {name}", flush=True)
        with tempfile.TemporaryDirectory(prefix="wingbeat-goodput-") as folder, own_disks(folder):
            self._home = Path(folder)
            for each in ("disk", "journal", "tmp"):
                (self._home / each).mkdir(exist_ok=True)
            settings = self._settings | {"disk": str(self._home / "disk")}
            (self._home / "settings.json").write_text(json.dumps(settings))
            save_digits(self._home / "digits.npz")
            self._records = Records(self._home, self._replicas)
            director = threading.Thread(target=self._direct, name="director")
            with self._log.open("w", encoding="utf-8") as log:
                director.start()
                try:
                    ended = lab.run(
                        f"star:{self._replicas + 1}@{self._rate}",
                        hosts.words(self._home, "keep"),
                        env=self._environment(),
                        faults=self._inject,
                        on_line=lambda rank, line: print(
                            f"{time.monotonic() - self._begin:8.2f} [h{rank}] {line}",
                            file=log, flush=True,
                        ),
                    )  # fmt: skip
                finally:
                    self._over.set()
                    director.join()
            if self._error or ended.exit_code:
                why = self._error or str(ended.first_failure)
                raise LabError(f"{self._row}: {why}; the output is in {self._log}")
            self._judge()
        return self._found

    def _environment(self) -> dict[str, str]:
        return {
            "PYTHONDONTWRITEBYTECODE": "",  # a start that compiles all again takes twice as long
            "TMPDIR": str(self._home / "tmp"),
            "WINGBEAT_JOURNAL": str(self._home / "journal"),
            "WINGBEAT_TOP": "off",
            "RUST_LOG": "error",
        }

    # -- the director's thread --

    def _direct(self) -> None:
        try:
            self._train()
        except LabError as error:
            self._error = str(error)
        except TimeoutError as error:
            self._error = "" if self._over.is_set() else str(error)
        finally:
            with contextlib.suppress(OSError):
                (self._home / "over").touch()

    def _train(self) -> None:
        started = time.monotonic()
        self._until(self._all_train, START_S, "not all replicas train")
        start_s, self._found["memory_gib"] = time.monotonic() - started, self._memory()
        self._found["start_s"], self._begin = start_s, time.monotonic()
        self._tell(f"all train, {self._found['start_s']:.1f} s after the start")
        for at, what, fault in agenda(self._schedule):
            self._sleep(at)
            self._perform(what, fault)
        self._sleep(self._seconds)
        try:
            self._until(self._all_take_part, BACK_S, "")
        except TimeoutError:
            if self._over.is_set():
                raise
            absent = [n for n in range(self._replicas) if not self._takes_part(n)]
            self._found["wrong"].append(
                f"replicas {absent} do not train with the others {BACK_S:g} s after the time"
            )
        if not self._schedule:
            self._restart_one()
        ahead = AHEAD * self._settings.get("sync_every", 1)
        front = faults.model_steps(map(self._records.of, range(self._replicas)), math.inf)
        hosts.write(self._home / "stop", str(front + ahead))
        self._until_done()

    def _until_done(self) -> None:
        done = [self._home / f"done-{n}" for n in range(self._replicas)]
        try:
            self._until(lambda: all(path.exists() for path in done), END_S, "")
        except TimeoutError:
            if self._over.is_set():
                raise
            missing = [n for n, path in enumerate(done) if not path.exists()]
            self._found["wrong"].append(f"replicas {missing} have not ended after {END_S:g} s")
        self._tell("ended")

    def _restart_one(self) -> None:
        """Measure a restart when nothing else happens, and the pause of the others."""
        victim, at = self._replicas - 1, time.monotonic()
        fault = Fault(at - self._begin, "kill", victim, 0.0)
        self._perform("begin", fault)
        trains = lambda: self._back(fault) is not None  # noqa: E731
        self._until(trains, START_S, f"replica {victim} was killed and does not train again")
        self._until(self._all_take_part, START_S, "not all replicas train after a restart")
        back = self._back(fault)
        others = [faults.pause(faults.steps(self._records.of(n)), at, at + (back or 0.0)).longest
                  for n in range(victim)]  # fmt: skip
        self._found |= {"restart_s": back, "restart_pause_s": max(others)}
        self._tell(f"a restart alone takes {back:.1f} s; pause of the others {max(others):.2f} s")

    def _back(self, fault: Fault) -> float | None:
        return faults.returned(fault, self._begin, self._records.of(fault.victim))

    def _perform(self, what: str, fault: Fault) -> None:
        """Begin or end a fault."""
        place, victim = f"{self._mark}/{fault.victim}", fault.victim
        self._tell(f"{what} {fault.kind}, replica {victim}")
        begins, hit = what == "begin", True
        if fault.kind == "cut":
            self._inject.inject(f"h{victim} {'down' if begins else 'up'}")
        elif fault.kind == "slow":
            rate = lab_rate(self._rate) // (SLOW if begins else 1)
            self._inject.inject(f"rate h{victim} {rate // 1000}kbit")
        elif fault.kind == "disk":
            fill(self._home / "disk" / "filler") if begins else unfill(self._home / "disk/filler")
        elif fault.kind == "stop":
            number = signal.SIGSTOP if begins else signal.SIGCONT
            hit = send(number, replica_of(place))
        elif fault.kind == "kill":
            hit = send(signal.SIGKILL, replica_of(place))
        elif fault.kind == "supervisor":
            hit = send(signal.SIGKILL, supervisor_of(place))
        elif fault.kind == "server":
            servers = processes(self._mark, "wingbeat.methods.parameter_server")
            hit = send(signal.SIGKILL, servers[victim % max(1, len(servers)) :][:1])
        elif fault.kind == "generator":
            hit = send(signal.SIGKILL, generators(self._mark))
        else:
            store = processes(self._mark, *STORES)
            hit = send(signal.SIGKILL, [*store, *replica_of(place)])
        if not hit:
            self._tell(f"no process for {fault.kind} of replica {victim} was there")
            self._found["missed_faults"].append(str(fault))

    def _trains(self, replica: int) -> bool:
        """Whether the present process of a replica makes steps."""
        made = faults.steps(faults.last_life(self._records.of(replica)))
        recent = time.monotonic() - max(5.0, 10 * self._settings["pace"])
        return len(made) >= 2 and made[-1] > recent

    def _takes_part(self, replica: int) -> bool:
        """Whether it trains, and has averaged with others, if its strategy does that."""
        if self._settings["family"] not in ("averaging", "torchft"):
            return self._trains(replica)
        kinds = [event.kind for event in faults.last_life(self._records.of(replica))]
        kinds = kinds[len(kinds) - kinds[::-1].index("lost") :] if "lost" in kinds else kinds
        return self._trains(replica) and "merged" in kinds

    def _all_train(self) -> bool:
        return all(self._trains(replica) for replica in range(self._replicas))

    def _all_take_part(self) -> bool:
        return all(self._takes_part(replica) for replica in range(self._replicas))

    def _memory(self) -> float:
        """Return the GiB of memory of all processes; shared pages count once in total."""
        total = 0
        for pid, _ in hosts.found(self._mark):
            with contextlib.suppress(OSError):
                lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
        return total / 2**20

    def _sleep(self, at: float) -> None:
        """Sleep until a moment of the run."""
        if self._over.wait(max(0.0, self._begin + at - time.monotonic())):
            raise TimeoutError("the lab has ended")

    def _until(self, is_so: Any, seconds: float, what: str) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            if time.monotonic() > deadline or self._over.wait(LOOK_S):
                raise TimeoutError(f"{what} after {seconds:g} s")

    def _tell(self, text: str) -> None:
        at = time.monotonic() - self._begin
        print(f"  {at:7.1f} s  {text}", flush=True)

    # -- results --

    def _judge(self) -> None:
        """Add the figures of a run that has ended, and what is wrong."""
        found, until = self._found, self._begin + self._seconds
        records = [self._records.of(replica) for replica in range(self._replicas)]
        useful = self._useful(records, until)
        found |= {
            "useful": sum(useful), "useful_by_replica": useful,
            "model_steps": faults.model_steps(records, until) - faults.model_steps(
                records, self._begin),
            "step_s": self._step_s(records, until),
            "full": sum(event.kind == "full" for events in records for event in events),
            "faults": [self._outcome(number, records) for number in range(len(self._schedule))],
        }  # fmt: skip
        results = [json.loads(path.read_text()) for path in sorted(self._home.glob("result-*"))]
        losses = [result["loss"] for result in results]
        found["loss"] = statistics.fmean(losses) if losses else None
        found["digests"] = sorted({result["digest"] for result in results})
        if len(results) != self._replicas:
            found["wrong"].append(f"{len(results)} of {self._replicas} replicas have a result")
        if len(found["digests"]) > 1:
            found["wrong"].append(f"{len(found['digests'])} different weights in the end")
        path = self._home / "digests"
        self.digests = path.read_text() if path.exists() else ""
        found["wrong"] += self._left()

    def _useful(self, records: Sequence[Sequence[Event]], until: float) -> list[int]:
        """Return the useful steps of each replica from the moment when all trained."""
        family = self._settings["family"]
        count: Callable[[int, float], int]
        if family == "staleness":
            counted = self._counted()
            own = [{t for t, worker in counted if worker == n} for n in range(self._replicas)]
            count = lambda n, at: faults.counted_steps(records[n], at, own[n])  # noqa: E731
        elif family in ("exact", "elastic"):
            count = lambda n, at: faults.kept_steps(records[n], at)  # noqa: E731
        else:
            count = lambda n, at: faults.merged_steps(records[n], at)  # noqa: E731
        return [count(n, until) - count(n, self._begin) for n in range(self._replicas)]

    def _counted(self) -> set[tuple[int, int]]:
        """Return the contributions of which a part is in the parameters; audit the journals."""
        files = [path.read_text() for path in sorted((self._home / "journal").glob("training*"))]
        journals = [text.splitlines(keepends=True) for text in files if "\n" in text]
        result = audit(journals)
        self._found["wrong"] += [f"audit: {line}" for line in result.findings[:5]]
        self._found["audit"] = {name: getattr(result, name) for name in result.__slots__}
        rounds = (read_journal(lines).rounds for lines in journals)
        entries = (
            entries for own in rounds for parts in own.values() for entries in parts.values()
        )
        return {entry for each in entries for entry in each}

    def _step_s(self, records: Sequence[Sequence[Event]], until: float) -> float:
        """Return the mean seconds of a step, over all replicas, while the run lasted."""
        made = sum(
            sum(self._begin < at <= until for at in faults.steps(events)) for events in records
        )
        return self._seconds * self._replicas / max(1, made)

    def _outcome(self, number: int, records: Sequence[Sequence[Event]]) -> dict[str, Any]:
        """Return what a fault has done: pauses of the survivors, and when its victim was back."""
        fault = self._schedule[number]
        begin, end = (
            self._begin + fault.at,
            self._begin + faults.watched(self._schedule, number, self._seconds),
        )
        others = faults.survivors(self._schedule, number, self._begin, records)
        if fault.kind in ("generator", "server", "disk"):
            others = list(range(self._replicas))
        next_victim = [later.victim for later in self._schedule[number + 1 : number + 2]]
        pauses = {}
        for n in others:
            steps = faults.steps(records[n])
            if n in next_victim:  # its next pause is that of the next fault
                steps = [at for at in steps if at <= end]
            pauses[n] = faults.pause(steps, begin, end)
        trains = fault.kind in ("generator", "server", "disk", "slow")
        return fault._asdict() | {
            "survivors": len(others),
            "first": max((each.first for each in pauses.values()), default=None),
            "longest": max((each.longest for each in pauses.values()), default=None),
            "pauses": {n: round(each.longest, 2) for n, each in pauses.items()},
            "back": 0.0 if trains else self._back(fault),
        }

    def _left(self) -> list[str]:
        """Return what the run has left: processes, sockets, shared memory, temporary files."""
        wrong = []
        for path in sorted(self._home.glob("done-*")):
            report = json.loads(path.read_text())
            for what in ("left", "sockets"):
                if report[what]:
                    name = "processes" if what == "left" else "sockets"
                    host = path.name.partition("-")[2]
                    wrong.append(f"{name} are left on host {host}: {report[what][:3]}")
        if processes(self._mark, ""):
            wrong.append(f"processes are left: {hosts.found(self._mark)[:3]}")
        for folder in (Path("/dev/shm"), self._home / "tmp"):
            names = sorted(path.name for path in folder.iterdir())
            left = [name for name in names if not name.startswith(OF_TORCH)]
            self._found["left_by_torch"] = len(names) - len(left)
            if left:
                wrong.append(f"{len(left)} left in {folder.name}: {left[:5]}")
        return wrong


class Records:
    """The records of all replicas, read as they grow."""

    def __init__(self, home: Path, replicas: int) -> None:
        self._paths = [home / f"record-{number}" for number in range(replicas)]
        self._read = [0] * replicas
        self._events: list[list[Event]] = [[] for _ in range(replicas)]
        self._lock = threading.Lock()

    def of(self, replica: int) -> list[Event]:
        """Return the events of a replica up to now."""
        with self._lock, contextlib.suppress(FileNotFoundError):
            with self._paths[replica].open("rb") as file:
                file.seek(self._read[replica])
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[replica] += len(whole)
            self._events[replica] += faults.read(whole.decode())
        return self._events[replica]


def agenda(schedule: Sequence[Fault]) -> list[tuple[float, str, Fault]]:
    """Return the begins and ends of faults in order."""
    begins = [(fault.at, "begin", fault) for fault in schedule]
    ends = [(fault.end, "end", fault) for fault in schedule if fault.lasts]
    return sorted(begins + ends, key=lambda each: each[0])


def processes(mark: str, *words: str) -> list[int]:
    """Return the processes of a run, or a place, whose command has one of the words."""
    return [pid for pid, command in hosts.found(mark) if any(word in command for word in words)]


def supervisor_of(place: str) -> list[int]:
    return processes(place, "--supervise", "torch.distributed.run")


def replica_of(place: str) -> list[int]:
    above = supervisor_of(place)
    return [pid for pid in processes(place, "--work") if pid not in above]


def generators(mark: str) -> list[int]:
    return processes(mark, "wingbeat.methods.model_averaging", "torchft_lighthouse")


def send(number: int, pids: Sequence[int]) -> bool:
    """Send a signal; return whether any process was there."""
    hit = False
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            hit = True
    return hit


def fill(path: Path) -> None:
    """Fill a disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass


def unfill(path: Path) -> None:
    path.unlink(missing_ok=True)


@contextlib.contextmanager
def own_disks(folder: str) -> Iterator[None]:
    """Mount an empty /dev/shm and a small disk for checkpoints, which only this process sees.

    LabError without the right to mount.
    """
    disk = Path(folder) / "disk"
    disk.mkdir()
    try:
        kernel.unshare(kernel.CLONE_NEWNS)
        kernel.mount("none", "/", flags=kernel.MS_REC | kernel.MS_PRIVATE)
        kernel.mount("tmpfs", "/dev/shm", "tmpfs")
        kernel.mount("tmpfs", str(disk), "tmpfs", options=f"size={DISK_MIB}m")
    except OSError as error:
        remedy = "run it as root, or with: unshare --map-root-user --mount"
        raise LabError(f"{error}; {remedy}") from None
    try:
        yield
    finally:
        kernel.detach(str(disk))
        kernel.detach("/dev/shm")


def save_digits(path: Path) -> None:
    """Write the digits; replicas need no scikit-learn, whose import takes seconds."""
    import numpy as np

    from wingbeat_lab.bench import models

    np.savez(path, *(tensor.numpy() for tensor in models.data()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
