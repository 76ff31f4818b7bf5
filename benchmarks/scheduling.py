"""The CPU time to decide which slice is next, per iteration: Geryon's Fig. 10.

    python benchmarks/scheduling.py --json out/scheduling.json

The slices of VGG-19 for eight workers and eight servers, at the three thresholds of the paper's
Table IV. In each iteration a worker looks up the class of each slice that it pushes and puts it
into its queue, and a server puts every worker's sums, as they become complete, into its own and
takes them out: the real tables and queues, without messages, so that only the decisions are timed.
The rows' iterations take turns; CPU time of one core in milliseconds, worker and server together:
median, 99th percentile, maximum.

``waiting`` is how long complete sums are held back for another that is needed sooner and is not
complete yet, as the slowest sum of an iteration in a server's units of one arriving slice: the cost
of TICTAC's order in addition to the decisions. Geryon holds nothing back.

Exit code 1 if Geryon's median is 1 ms or more.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from common import refuse_unwritable, show, write

from wingbeat import Strategy
from wingbeat.methods.parameter_server.protocol import (
    Flow,
    Order,
    SendQueue,
    position_of,
    urgency_of,
)
from wingbeat.methods.parameter_server.slicing import RequestPlanner, SliceRequest
from wingbeat.parts import Servers
from wingbeat.simulator.model import buckets_of
from wingbeat_lab import baselines, paced
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

WORKERS = 8
SLICES = (1 << 20, 1 << 19, 1 << 18)
ROWS = {"Geryon": "geryon:pull=start", "TICTAC": "tictac", "P3": "p3"}
LIMIT_MS = 1.0
LARGEST = 1 << 20
"""Maximum number of elements in a message."""


class Side:
    """One worker's requests of all servers, and one server's queue for all workers.

    Attributes:
        held: maximum number of arrivals for which a sum was held back.
    """

    def __init__(self, strategy: Strategy) -> None:
        servers = strategy.exchange
        assert isinstance(servers, Servers)
        model = paced.simulator_model(paced.load_profile("vgg19_k40"))
        buckets = buckets_of(model, strategy.plan.fusion())
        self.planner = RequestPlanner(servers, WORKERS, seed=0)
        kinds = buckets.fully_connected
        self.planner.set_buckets(buckets.numel, buckets.forward, kinds, buckets.places, LARGEST)
        self.order = Order(servers.sending)
        self.buckets = range(len(buckets.numel))
        self.forward = buckets.forward
        self.held = 0

    def slices(self) -> int:
        return sum(len(self.planner.requests(bucket)) for bucket in self.buckets)

    def worker(self) -> float:
        """Seconds of a worker's decisions about its pushes of one iteration."""
        queue: SendQueue[SliceRequest] = SendQueue(
            self.order if self.order is Order.URGENT else Order.READY
        )
        asked = [self.planner.requests(bucket) for bucket in self.buckets]
        urgency_of_push = self.planner.priorities.of_push
        begin = time.thread_time()
        for slices in asked:
            for each in slices:
                urgency = urgency_of_push(each.position)
                queue.enqueue(Flow(each.slice.server, urgency), each.position, 1, each)
            queue.flush(_room, _send)
        return time.thread_time() - begin

    def server(self) -> float:
        """Seconds of the first server's decisions about its sums of one iteration."""
        mine = [
            [each for each in self.planner.requests(bucket) if each.slice.server == 0]
            for bucket in self.buckets
        ]
        in_turn = self.order is Order.FORWARD
        queue: SendQueue[SliceRequest] = SendQueue(self.order)
        arrived: dict[int, int] = {}
        now = self.held = 0

        def send(_flow: Flow, each: SliceRequest) -> Any:
            self.held = max(self.held, now - arrived[each.slice.number])
            return _arrived

        begin = time.thread_time()
        if in_turn:  # the order is known in advance
            for bucket in self.forward:
                for each in mine[bucket]:
                    _add(queue, each)
        for slices in mine:
            for each in slices:
                now += 1
                arrived[each.slice.number] = now
                if not in_turn:
                    _add(queue, each)
                queue.flush(_room, send, lambda one: one.slice.number in arrived)
        return time.thread_time() - begin


def _add(queue: SendQueue[SliceRequest], each: SliceRequest) -> None:
    """Put a sum into the queue for every worker."""
    route = each.ids.route
    urgency, position = urgency_of(route), position_of(route)
    for worker in range(WORKERS):
        queue.enqueue(Flow(worker, urgency), position, 1, each)


def _room(_flow: Flow) -> int:
    return 1 << 40


def _arrived() -> bool:
    return True


def _send(_flow: Flow, _each: SliceRequest) -> Any:
    return _arrived


def measured(iterations: int) -> list[dict[str, Any]]:
    """Return the figures of every row at every threshold; rows take turns."""
    found = []
    for elements in SLICES:
        sides = {
            name: Side(baselines.parse(f"{row}{',' if ':' in row else ':'}slice={elements}"))
            for name, row in ROWS.items()
        }
        samples: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(iterations):
            for name, side in sides.items():
                samples[name].append(1e3 * (side.worker() + side.server()))
        for name, side in sides.items():
            ordered = sorted(samples[name])
            found.append(
                {
                    "row": name,
                    "elements": elements,
                    "slices": side.slices(),
                    "median_ms": statistics.median(ordered),
                    "p99_ms": ordered[int(0.99 * (len(ordered) - 1))],
                    "longest_ms": ordered[-1],
                    "held_back": side.held,
                    "samples_ms": samples[name],
                }
            )
    return found


COLUMNS = (
    "order, elements of a slice",
    "slices",
    "median, ms",
    "least .. p99, ms",
    "longest, ms",
    "waiting, slices",
)


def table(rows: list[dict[str, Any]]) -> Printed:
    cells = [
        (
            f"{row['row']}, {row['elements']:,}",
            str(row["slices"]),
            f"{row['median_ms']:.3f}",
            f"{min(row['samples_ms']):.3f} .. {row['p99_ms']:.3f}",
            f"{row['longest_ms']:.3f}",
            str(row["held_back"]),
        )
        for row in rows
    ]
    title = f"VGG-19, {WORKERS} workers and servers: deciding what goes next"
    notes = [f"processor time of {len(rows[0]['samples_ms'])} iterations"]
    return Printed.of(title, COLUMNS, cells, notes)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=300, help="of each row (300)")
    parser.add_argument("--json", type=Path, default=Path("out/scheduling.json"))
    args = parser.parse_args()
    refuse_unwritable(args.json)
    rows = measured(args.iterations)
    report = {"machine": machine.describe(), "versions": machine.versions(), "rows": rows}
    show(report, table(rows))
    write(args.json, report)
    missed = [
        f"{row['elements']} elements: {row['median_ms']:.3f} ms; limit {LIMIT_MS}"
        for row in rows
        if row["row"] == "Geryon" and row["median_ms"] >= LIMIT_MS
    ]
    for line in missed:
        print(f"MISSED: {line}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
