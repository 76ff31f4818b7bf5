"""All-reduces over all interfaces of a BCube, compared with a ring over one interface.

    python benchmarks/bcube.py --size 3x2 --rate 100mbit --json out/bcube.json

Two emulated clusters with the same number of hosts take turns, round by round:

- bcube:SIZE@RATE: ``bml``, the strategy's topology; ``table2``, Canary's Table 2 as it is written;
  ``routed``, a ring over all interfaces of the same network, through intermediate hosts;
- star:HOSTS@RATE: ``ring``, on the one interface that connects all hosts: the best case of a ring
  over one interface.

In each round a case all-reduces a tensor repeatedly, one collective after the other as in training.
The figures are medians over rounds. An interface's share of its line rate counts what a case must
send over it: 2 (1 - 1/n) of the tensor over one, or equal parts of it over all of a BCube.
TCP over Ethernet cannot exceed 1448/1514 = 0.956 with frames of 1,500 bytes. Bytes are the
kernel's counters of each host's interfaces, between two barriers.

Exit code 1 if ``bml`` is less than 1.8 times as fast as ``ring`` (2 interfaces; 0.9 of their number
in general), if it has less than 0.9 of the line rate of all interfaces together, or if one host's
interfaces sent amounts that differ by more than 5%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from common import end_as_by_ctrl_c, refuse_unwritable, show, write

from wingbeat import topologies
from wingbeat.errors import LabError, UsageError
from wingbeat_lab import lab
from wingbeat_lab.bcube import AggregatingBCube
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.lab import counters
from wingbeat_lab.lab.spec import parse_rate

OF_INTERFACES = 0.9
OF_LINE_RATE = 0.9
UNEQUAL = 1.05
TCP_BOUND = 1448 / 1514
IN_BCUBE = ("bml", "table2", "routed")


def topology_of(case: str) -> topologies.Topology:
    """The topology of a case."""
    known = {"bml": topologies.BCube(), "table2": AggregatingBCube()}
    return known.get(case, topologies.Ring())


def worker(args: argparse.Namespace) -> None:
    """Time each case on this rank; rank 0 writes all results."""
    import torch

    import wingbeat
    from wingbeat.collectives import Collectives

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=args.timeout)
    found: dict[str, Any] = {}
    numel = int(args.mb * 2**20) // 4
    for case in args.cases:
        collectives = Collectives(world, topology_of(case))
        tensors = [torch.ones(numel) for _ in range(args.count)]
        collectives.all_reduce(torch.ones(numel)).wait()  # connections, memory, caches
        torch.distributed.barrier()
        before = counters.read()
        torch.distributed.barrier()
        begin = time.monotonic()
        for handle in [collectives.all_reduce(tensor) for tensor in tensors]:
            handle.wait()
        seconds = time.monotonic() - begin
        torch.distributed.barrier()
        after = counters.read()
        torch.distributed.barrier()
        if not all(bool((tensor == world.size).all()) for tensor in tensors):
            raise RuntimeError(f"rank {world.rank}: {case} gave wrong sums")
        sent = [(after[link.name] - before[link.name]).tx_bytes for link in world.links]
        everyone = world.exchange("figures", {"seconds": seconds, "sent": sent})
        found[case] = {
            "seconds": max(each["seconds"] for each in everyone),
            "sent": [each["sent"] for each in everyone],
        }
    if world.rank == 0:
        Path(args.json).write_text(json.dumps(found))
    wingbeat.shutdown()


def run_lab(args: argparse.Namespace, spec: str, cases: tuple[str, ...]) -> dict[str, Any]:
    """Run some cases on a lab; return rank 0's results."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        words = [sys.executable, __file__, "--worker", "--json", str(path)]
        words += ["--mb", str(args.mb), "--count", str(args.count)]
        words += ["--timeout", str(args.timeout), "--cases", *cases]
        result = lab.run(
            spec, words, on_line=lambda rank, line: print(f"[{rank}] {line}"), timeout=args.timeout
        )
        if result.exit_code:
            raise LabError(f"{spec}: {result.first_failure or result.exit_code}")
        found: dict[str, Any] = json.loads(path.read_text())
    return found


def shares(case: str, seconds: float, setting: dict[str, Any]) -> float:
    """The share of its line rate that an interface carried of what the case must send over it."""
    workers, levels = setting["workers"], setting["levels"]
    interfaces = 1 if case == "ring" else levels
    must = 2 * (1 - 1 / workers) * setting["bytes"] / interfaces
    if case == "table2":
        must = (levels + 1) * (1 - 1 / setting["ports"]) * setting["bytes"] / levels
    return float(must / seconds / setting["bytes_per_s"])


def summary(rounds: list[dict[str, Any]], setting: dict[str, Any]) -> dict[str, Any]:
    """Combine the rounds, by case."""
    made = {}
    for case in rounds[0]:
        seconds = [each[case]["seconds"] for each in rounds]
        median = statistics.median(seconds)
        worst = [max(host) / max(1, min(host)) for each in rounds for host in each[case]["sent"]]
        made[case] = {
            "seconds": median,
            "rounds": seconds,
            "of_line_rate": shares(case, median, setting),
            "of_tcp_bound": shares(case, median, setting) / TCP_BOUND,
            "most_over_least_sent": max(worst),
            "sent_mb": statistics.mean(
                sum(host) for each in rounds for host in each[case]["sent"]
            )
            / 2**20,
        }  # fmt: skip
    return made


def missed(made: dict[str, Any], levels: int) -> list[str]:
    """Return the missed limits."""
    bml, ring = made["bml"], made["ring"]
    speedup, wanted = ring["seconds"] / bml["seconds"], OF_INTERFACES * levels
    lines = []
    if speedup < wanted:
        lines.append(f"bml is {speedup:.2f} times as fast as one interface's ring, not {wanted:g}")
    if bml["of_line_rate"] < OF_LINE_RATE:
        lines.append(f"bml has {bml['of_line_rate']:.3f} of the line rate, not {OF_LINE_RATE:g}")
    if bml["most_over_least_sent"] > UNEQUAL:
        lines.append(
            f"a host's interfaces sent amounts {bml['most_over_least_sent']:.3f} times each other"
            f" under bml, more than {UNEQUAL:g}"
        )
    return lines


COLUMNS = (
    "case",
    "s",
    "least .. largest, s",
    "times the ring",
    "of line rate",
    "of TCP's bound",
    "MiB a host",
    "most / least sent",
)


def table(made: dict[str, Any], setting: dict[str, Any]) -> Printed:
    cells = [
        (
            case,
            f"{row['seconds']:.3f}",
            f"{min(row['rounds']):.3f} .. {max(row['rounds']):.3f}",
            f"{made['ring']['seconds'] / row['seconds']:.2f}",
            f"{row['of_line_rate']:.3f}",
            f"{row['of_tcp_bound']:.3f}",
            f"{row['sent_mb']:.1f}",
            f"{row['most_over_least_sent']:.3f}",
        )
        for case, row in made.items()
    ]
    title = f"{setting['bytes'] / 2**20:.1f} MiB on {' and '.join(setting['labs'])}"
    rounds = len(made["ring"]["rounds"])
    notes = [
        f"median of {rounds} rounds; ring: on one interface of the star",
        "most / least sent: by the interfaces of one host, in the worst round",
    ]
    return Printed.of(title, COLUMNS, cells, notes)


def launch(args: argparse.Namespace) -> int:
    ports, levels = topologies.parse_size(args.size)
    cube = topologies.BCube(ports, levels)
    specs = f"bcube:{args.size}@{args.rate}", f"star:{cube.workers}@{args.rate}"
    setting = {
        "labs": specs,
        "workers": cube.workers,
        "ports": ports,
        "levels": levels,
        "bytes": args.count * (int(args.mb * 2**20) // 4) * 4,
        "bytes_per_s": parse_rate(args.rate) / 8,
    }
    for spec in specs:
        lab.LabSpec.parse(spec)
    report: dict[str, Any] = {"command": sys.argv, "machine": machine.describe(), **setting}
    rounds: list[dict[str, Any]] = []
    for number in range(args.rounds):
        print(f"round {number + 1}/{args.rounds}", flush=True)
        rounds.append(run_lab(args, specs[0], IN_BCUBE) | run_lab(args, specs[1], ("ring",)))
        made = summary(rounds, setting)
        report |= {"cases": made, "missed": missed(made, levels)}
        write(args.json, report)
    show(report, table(made, setting))
    write(args.json, report)
    for line in report["missed"]:
        print(f"MISSED: {line}")
    return int(bool(report["missed"]))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="3x2", help="PORTSxLEVELS of the BCube (3x2: 9 hosts)")
    parser.add_argument("--rate", default="100mbit", help="of each interface (100mbit)")
    parser.add_argument("--mb", type=float, default=36.0, help="of the tensor (36)")
    parser.add_argument("--count", type=int, default=2, help="all-reduces in a round (2)")
    parser.add_argument("--rounds", type=int, default=3, help="of all cases (3)")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for a lab (300)")
    parser.add_argument("--json", type=Path, default=Path("out/bcube.json"), metavar="FILE")
    parser.add_argument("--cases", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if min(args.mb, args.count, args.rounds, args.timeout) <= 0:
        parser.error("--mb, --count, --rounds and --timeout: allowed are numbers above 0")
    return args


def main() -> int:
    """Parse the command line; inside a lab, act as a worker."""
    args = arguments()
    if args.worker:
        worker(args)
        return 0
    end_as_by_ctrl_c()
    refuse_unwritable(args.json)
    try:
        return launch(args)
    except (LabError, UsageError) as error:
        print(f"bcube.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
