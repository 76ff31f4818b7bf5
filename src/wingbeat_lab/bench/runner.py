"""The parent of a bench: starts workers on a lab, shows progress, builds the report."""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import wingbeat
from wingbeat.errors import WingbeatError
from wingbeat.observe import trace
from wingbeat.observe.events import Event
from wingbeat_lab import lab
from wingbeat_lab.bench import machine, protocol, results
from wingbeat_lab.bench.breakdown import breakdown
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.estimate import Progress
from wingbeat_lab.bench.measure import Measured, Timings, measured
from wingbeat_lab.bench.protocol import WHOLE
from wingbeat_lab.bench.results import Block, Deciding, Report, Run
from wingbeat_lab.bench.table import NOTES
from wingbeat_lab.bench.traffic import Seen

KEPT_LINES = 8
"""Last lines of a worker's output that are shown if it fails."""

_PREFIX = "wingbeat-bench-"
_NEW_S = 60.0
"""Age in seconds from which an unlocked folder is one of a killed bench."""


class WorkerError(WingbeatError):
    """A bench's worker failed; ``exit_code`` is the worker's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


@dataclass
class Listener:
    """Sorts the workers' output: messages go to the progress; the rest is kept for a failure."""

    progress: Progress
    last: dict[int, deque[str]] = field(default_factory=dict)

    def __call__(self, rank: int, line: str) -> None:
        """Process one line of a worker's output."""
        message = protocol.parse_message(line)
        if message is None:
            self.last.setdefault(rank, deque(maxlen=KEPT_LINES)).append(line)
        elif message["kind"] == "progress":
            self.progress.at(
                message["done"], message["row"], message["round"], message["iteration"]
            )
        elif message["kind"] == "phase":
            self.progress.phase(message["text"])


@dataclass(frozen=True)
class Outcome:
    """A report, and the recorded events of each row (empty without a trace)."""

    report: Report
    events: list[list[Event]]


def run(config: BenchConfig, *, command: Sequence[str] = (), quiet: bool = False) -> Outcome:
    """Run a bench; leave no process or file behind.

    Args:
        config: what to measure.
        command: the user's command, for the report.
        quiet: no progress on standard error.

    Raises:
        UsageError: a value in ``config`` is invalid; nothing was started.
        LabError: this machine cannot create the lab.
        WorkerError: a worker failed; the message has its rank and its last lines.
    """
    checked = config.check()
    about, disturbances = machine.describe(), machine.Disturbances()
    with _own_folder() as folder, Progress(checked, quiet=quiet) as progress:
        config_path, result_path = folder / "config.json", folder / "result.json"
        config_path.write_text(config.to_json(), encoding="utf-8")
        listener = Listener(progress)
        ended = lab.run(
            checked.lab,
            [sys.executable, "-m", "wingbeat_lab.bench.worker", str(config_path), str(result_path)],
            per_host=config.per_host,
            env=_environment(),
            on_line=listener,
        )
        if ended.exit_code:
            raise _failure(ended, listener)
        about |= disturbances()
        raw = json.loads(result_path.read_text(encoding="utf-8"))
        events = _events(checked, folder)
    report = _report(checked, raw, about, command, ended.cross)
    if config.breakdown:
        report = replace(report, runs=_broken_down(checked, report.runs, events))
    whole = [own for (_, variant), own in events.items() if variant == WHOLE]
    return Outcome(report, whole if config.trace else [])


@contextlib.contextmanager
def _own_folder() -> Iterator[Path]:
    """Create a temporary folder; remove it in the end, and those that killed benches have left."""
    for left in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if left.lstat().st_uid == os.getuid() and time.time() - left.stat().st_mtime > _NEW_S:
                with _locked(left):
                    shutil.rmtree(left)
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as name, _locked(Path(name)):
        yield Path(name)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder until this process ends or leaves; a `BlockingIOError` if another has it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def _environment() -> dict[str, str]:
    """Have workers import the same wingbeat as this process, installed or not.

    Monitoring is off unless requested: a supervisor's CPU time would count as a server's.
    """
    source = str(Path(wingbeat.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join(filter(None, [source, inherited]))
    return {"PYTHONPATH": path, "WINGBEAT_TOP": os.environ.get("WINGBEAT_TOP", "off")}


def _failure(ended: lab.RunResult, listener: Listener) -> WorkerError:
    failure = ended.first_failure
    if failure is None:
        return WorkerError("the bench was ended before its workers were done", ended.exit_code)
    lines = [line for line in listener.last.get(failure.rank, ()) if line.strip()]
    output = "".join(f"\n  {line}" for line in lines) or " no output"
    return WorkerError(f"{failure}; its last lines:{output}", failure.code)


Events = dict[tuple[int, str], list[Event]]
"""By row and variant."""


def _events(checked: Checked, folder: Path) -> Events:
    ranks = range(checked.workers)
    return {
        (row, variant): trace.merge([protocol.part(folder, row, rank, variant) for rank in ranks])
        for row, variant in checked.recorded
    }


def _broken_down(checked: Checked, runs: Sequence[Run], events: Events) -> list[Run]:
    """Add the breakdowns; FSDP has none, because its waits cannot be observed from outside."""
    out = []
    for row, run in enumerate(runs):
        own = {variant: breakdown(e) for (number, variant), e in events.items() if number == row}
        seen = checked.rows[row].traits.bound != "fsdp"
        out.append(replace(run, breakdown=own) if seen else run)
    return out


def _measured(checked: Checked, raw: list[list[dict[str, Any]]]) -> Measured | None:
    rounds = [[Timings(**own) for own in round_] for round_ in raw]
    return measured(rounds, bucket_bytes=checked.bucket_bytes)


def _report(
    checked: Checked,
    raw: dict[str, Any],
    about: dict[str, Any],
    command: Sequence[str],
    cross: Seen,
) -> Report:
    blocks = [Block(**block) for block in raw["blocks"]]
    deciding = [None if own is None else Deciding(**own) for own in raw["deciding"]]
    alone = _measured(checked, raw["timings"])
    times = checked.model.compute_s()
    now = datetime.datetime.now(datetime.timezone.utc)
    return Report(
        lab=str(checked.lab),
        model=checked.model.name,
        machine=about,
        runs=results.runs(
            checked,
            blocks,
            alone,
            cores=about["cores"],
            deciding=deciding,
            prices=raw["prices"],
            cross=cross,
        ),
        asked_lab=str(checked.asked),
        workers=checked.workers,
        config=asdict(checked.config),
        command=shlex.join(command),
        date=now.isoformat(timespec="seconds"),
        versions=machine.versions(),
        compute_s=None if times is None else {"forward": times[0], "backward": times[1]},
        notes=NOTES,
        measured=alone,
        normal_iteration_s=raw["normal_s"] or None,
    )
