"""Workers under bounded staleness that are killed, one after the other, and restarted.

    python benchmarks/canary_kills.py --json out/canary_kills.json

Real processes in a lab train a network on the digits with `Canary`. Repeatedly one of them is
killed (SIGKILL) at a moment that follows from the seed, most often during an iteration, and
restarted after a while; the others continue. The rendezvous store is outside of the workers'
processes, as with torchrun, so rank 0 may be killed too.

Limits: each time the others continue, and a worker that rejoins trains with them; the journals of
all incarnations pass the audit (each contribution counts once, or was lost with its sender); all
replicas are bitwise equal in the end; the loss has fallen to under a tenth.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from common import at_least_one
from killing import (
    PATIENCE_S,
    Killer,
    Telling,
    keep,
    kill_cells,
    loss_of,
    losses,
    missed_losses,
    run_once,
    standstills,
    trained,
)  # fmt: skip

from wingbeat_lab import baselines, lab
from wingbeat_lab.audit import Audit, applied_delays, audit
from wingbeat_lab.bench.table import Printed


def main() -> int:
    return run_once(arguments(), run, tables, judged)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lab", default="star:4@100mbit", help="(star:4@100mbit)")
    parser.add_argument(
        "--row", default="canary:s=8,p=2,colayers=4,compression=fp32,encrypted=False",
        help="(canary:s=8,p=2,colayers=4,compression=fp32,encrypted=False)",
    )  # fmt: skip
    parser.add_argument("--kills", type=at_least_one, default=20, help="(20)")
    parser.add_argument("--seed", type=int, default=0, help="of whom and when (0)")
    parser.add_argument("--json", type=Path, default=Path("out/canary_kills.json"), metavar="FILE")
    return parser.parse_args()


def run(args: argparse.Namespace, home: Path) -> dict[str, Any]:
    """Train in a lab, and kill workers."""
    killer = Killer(home, lab.LabSpec.parse(args.lab).hosts, args.kills, args.seed)
    env = {"WINGBEAT_JOURNAL": str(home)}
    lines = trained(args.lab, __file__, home, args.row, env, killer)
    journals = [path.read_text().splitlines(keepends=True) for path in home.glob("training*")]
    found = audit(journals)
    back = [line for line in lines if line.endswith(" is back")]
    return {
        "kills": killer.kills,
        "audit": {name: getattr(found, name) for name in Audit.__slots__},
        "delays": applied_delays(journals),
        "losses": losses(home),
        "lines": lines,
        "lines_back": len(back),
    }


def judged(kills: int, report: dict[str, Any]) -> list[str]:
    """Return the missed limits."""
    missed = [f"audit: {line}" for line in report["audit"]["findings"]]
    if len(report["kills"]) != kills or report["audit"]["pulls"] < kills:
        missed.append(
            f"{len(report['kills'])} kills and {report['audit']['pulls']} pulls of {kills}"
        )
    missed += missed_losses(report["losses"])
    return missed


COLUMNS = ("kill", "rank", "at round", "stood still, s", "rounds without", "back after, s")


def tables(report: dict[str, Any]) -> list[Printed]:
    """Return a row for each kill, and the totals."""
    found = report["audit"]
    notes = [
        *standstills(report["kills"]),
        f"audit: {found['incarnations']} incarnations, {found['rounds']} rounds, "
        f"{found['counted']} contributions, {found['dropped']} iterations dropped, "
        f"{found['lost']} colayers lost, {found['pulls']} pulls, {len(found['findings'])} findings",
    ]
    cells = kill_cells(report["kills"])
    return [Printed.of("workers under bounded staleness, killed", COLUMNS, cells, notes)]


# -- on a host of the lab --------------------------------------------------------------------


def work(home: Path, row: str, life: int) -> None:
    """Train up to the round that the killer names."""
    import torch

    import wingbeat
    from wingbeat.methods.bounded_staleness.build import bounded_exchange
    from wingbeat_lab.bench import models

    torch.set_num_threads(1)
    world = wingbeat.init(timeout=PATIENCE_S)
    images, answers, *held_out = models.data()
    network = models.network(1 if world.returned else 0)  # a worker that rejoins pulls parameters
    loss = loss_of(held_out)
    first = loss(models.network(0))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    model, optimizer = wingbeat.distribute(network, optimizer, baselines.parse(row))
    exchange, telling = bounded_exchange(model), Telling(home, world.rank, life)
    assert exchange is not None
    machine = exchange.machine
    for x, y in models.batches(
        images, answers, rank=world.rank, workers=world.size, seed=machine.incarnation
    ):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        if not telling.say(machine.applied):
            break
    wingbeat.synchronize(model)
    telling.end(first, model, loss)
    wingbeat.shutdown()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--keep"]:
        sys.exit(keep(__file__, Path(sys.argv[2]), sys.argv[3]))
    if sys.argv[1:2] == ["--work"]:
        work(Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
        sys.exit()
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
