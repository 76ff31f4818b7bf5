"""Requests per second of the group generator's process, compared with an echo process.

    python benchmarks/generator_service.py --json out/generator_service.json

The mailboxes of all workers, in one process without computation, request a group, receive it,
acknowledge it and request again, as fast as possible; groups are divisions into pairs. The
reference is the same mailboxes with a process that returns each message: the message layer's own
rate of requests. Both take turns. A request of the generator is two messages to it and one back,
one of the echo process one each way. The load's own CPU time is the larger part of both. With few
workers a pair mostly waits for its second member.

Exit code 1 if the generator answers less than half as many.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from common import at_least_one, refuse_unwritable, show, write

from wingbeat.methods.model_averaging.generator import MESSAGES, Done, Request, RunMessage
from wingbeat.methods.model_averaging.rules import Rules
from wingbeat.methods.model_averaging.service import GeneratorConfig
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.messages import Limits, Mailbox, open_mailbox
from wingbeat.transport.services import ProcessService
from wingbeat.transport.services import run_service as serve
from wingbeat.transport.store import Store
from wingbeat_lab.bench import machine
from wingbeat_lab.bench.table import Printed

LEAST = 0.5
SECONDS = 60.0


@dataclass(frozen=True)
class Echo:
    """A process that returns each message."""

    module: ClassVar[str] = "generator_service"
    me: ClassVar[str] = "echo"
    uses_store_later: ClassVar[bool] = False
    timeout: ClassVar[float] = 60.0

    workers: int
    encrypted: bool

    def to_json(self) -> str:
        return json.dumps([self.workers, self.encrypted])

    def connect(self, store: Store) -> Callable[[Callable[[], bool]], None]:
        box = opened(store, self.workers, range(self.workers), "echo/", self.encrypted)

        def run(parent: Callable[[], bool]) -> None:
            while parent() and len(box.left) < self.workers:
                message = box.next(0.25)
                while message is not None:
                    box.post(message.peer, message.kind, urgency=0)
                    message = box.poll()

        return run


def opened(store: Store, number: int, peers: Any, room: str, encrypted: bool) -> Mailbox:
    return open_mailbox(
        store, number, peers, namespace=room, interfaces=["lo"], classes=1, encrypted=encrypted,
        limits=Limits(silence=SECONDS), seconds=SECONDS,
    )  # fmt: skip


def run_service() -> int:
    args = arguments()
    refuse_unwritable(args.json)
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    report: dict[str, Any] = {"machine": machine.describe(), "command": sys.argv, "rows": []}
    missed = False
    for workers in args.workers:
        rates: dict[str, list[float]] = {"generator": [], "messages": []}
        for _ in range(args.rounds):
            rates["generator"].append(generator_rate(workers, args))
            rates["messages"].append(echo_rate(workers, args))
        ratios = [a / b for a, b in zip(rates["generator"], rates["messages"], strict=True)]
        ratio = statistics.median(ratios)
        row = {"workers": workers, **rates, "ratio": ratio, "ratios": ratios}
        report["rows"].append(row)
        write(args.json, report)
        missed |= ratio < LEAST
    show(report, table(report["rows"]))
    write(args.json, report)
    if missed:
        print(f"MISSED: the generator answers less than {LEAST} of the message layer's requests")
    return int(missed)


COLUMNS = ("workers", "generator, 1/s", "messages, 1/s", "ratio", "least .. largest")


def table(rows: list[dict[str, Any]]) -> Printed:
    cells = [
        (
            str(row["workers"]),
            *(f"{statistics.median(row[name]):,.0f}" for name in ("generator", "messages")),
            f"{row['ratio']:.2f}",
            f"{min(row['ratios']):.2f} .. {max(row['ratios']):.2f}",
        )
        for row in rows
    ]
    title = "requests answered by the generator's process, and by one that only answers"
    return Printed.of(title, COLUMNS, cells, [f"medians of {len(rows[0]['ratios'])} rounds"])


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", nargs="+", type=at_least_one, default=[16, 64])
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (3)")
    parser.add_argument(
        "--rounds", type=at_least_one, default=3, help="how often they take turns (3)"
    )
    parser.add_argument("--clear", action="store_true", help="without encryption")
    parser.add_argument("--json", type=Path, default=Path("out/generator_service.json"))
    return parser.parse_args()


def send(box: Mailbox, generator: int, message: Any) -> None:
    kind, ids, _ = MESSAGES.pack(message)
    box.post(generator, kind, ids=ids, urgency=0)


def generator_rate(workers: int, args: argparse.Namespace) -> float:
    rules = Rules(size=2, inter_intra=False)
    config = GeneratorConfig(
        room="groups/", host_of=(0,) * workers, interfaces=("lo",), encrypted=not args.clear,
        timeout=SECONDS, rules=rules, silence=SECONDS, least=SECONDS,
    )  # fmt: skip

    def answer(box: Mailbox, message: Any) -> bool:
        run = MESSAGES.parse(message, workers=workers)
        if not isinstance(run, RunMessage):
            return False
        send(box, workers, Done(run.number, run.epoch))
        send(box, workers, Request())
        return True

    return measured(config, workers, "groups/", answer, args)


def echo_rate(workers: int, args: argparse.Namespace) -> float:
    def answer(box: Mailbox, _message: Any) -> bool:
        send(box, workers, Request())
        return True

    return measured(Echo(workers, not args.clear), workers, "echo/", answer, args)


def measured(
    config: Any, workers: int, room: str, answer: Callable[[Mailbox, Any], bool],
    args: argparse.Namespace,
) -> float:  # fmt: skip
    """Return the answers per second to workers that send the next request at once."""
    store = Switchboard()
    process = ProcessService(config, store)
    try:
        with ThreadPoolExecutor(workers) as threads:
            boxes = list(
                threads.map(
                    lambda worker: opened(store, worker, [workers], room, not args.clear),
                    range(workers),
                )
            )
        for box in boxes:
            send(box, workers, Request())
        begun, answers = time.monotonic(), 0
        while time.monotonic() < begun + args.seconds:
            for box in boxes:
                message = box.poll()
                while message is not None:
                    answers += answer(box, message)
                    message = box.poll()
        seconds = time.monotonic() - begun
        for box in boxes:
            box.abandon()
        return answers / seconds
    finally:
        process.kill()


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("["):
        serve(Echo(*json.loads(sys.argv[1])))
    else:
        sys.exit(run_service())
