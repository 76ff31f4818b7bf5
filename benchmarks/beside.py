"""Rows measured in a lab, compared with the same rows in virtual time.

Shared by ``ripples_virtual.py`` and ``canary_beside.py``, which predict the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common import show

from wingbeat import Strategy, simulator
from wingbeat.errors import UsageError
from wingbeat_lab import paced
from wingbeat_lab.bench.config import BenchConfig, Checked
from wingbeat_lab.bench.contenders import Contender
from wingbeat_lab.bench.simulated import GOODPUT
from wingbeat_lab.bench.table import Printed

WITHIN = 0.1
"""Allowed error of a row, relative to the lab's time."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows that were measured together, or one after the other.

    Attributes:
        title: of the table.
        figure: of the paper, by its name in the report; ``name`` is the part's name in it.
        rows: the results, by row.
        configs: the benches that produced the rows.
    """

    title: str
    figure: str
    name: str
    rows: dict[str, Any]
    configs: list[dict[str, Any]]

    def checked(self, text: str) -> tuple[Checked, Contender]:
        """Return a row and its bench, reduced to this row."""
        for config in self.configs:
            if text in config["strategies"]:
                plain: dict[str, Any] = {
                    key: tuple(value) if isinstance(value, list) else value
                    for key, value in (config | {"strategies": [text]}).items()
                }
                checked = BenchConfig(**plain).check()
                return checked, checked.rows[0]
        raise UsageError(f"{self.title}: no config has row {text!r}: measure it again")


def parser(doc: str | None, measured: str, json_file: str) -> argparse.ArgumentParser:
    """Return the parser of a command line.

    Args:
        doc: of the program.
        measured: the program that wrote the measurements.
        json_file: default path of the report.
    """
    made = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("measured", type=Path, help=f"what {measured} has written")
    made.add_argument("--within", type=float, default=WITHIN, help=f"of the lab's ({WITHIN:g})")
    made.add_argument("--json", type=Path, default=Path(json_file))
    return made


def parts_of(
    path: Path, figures: Sequence[str], program: str, called: Callable[[str], str] = str
) -> list[Part]:
    """Return each figure's parts that have rows.

    Args:
        path: of the report.
        figures: to search for, in this order.
        program: that wrote the report.
        called: returns the name of a part for titles.
    """
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        report = kept.get("report", kept)  # as written by the program, or by tools/figures.py
        found = [
            Part(
                f"{figure}, {called(name)}", figure, name, dict(part["rows"]),
                part["configs"] if "configs" in part else [part["config"]],
            )
            for figure in figures
            for name, part in report.get(figure, {}).items()
        ]  # fmt: skip
    except KeyError:
        found = []
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UsageError(f"{str(path)!r} is no report of {program}: {error}") from None
    if not found:
        raise UsageError(
            f"{str(path)!r} has no rows of figures {', '.join(figures)}: write one with "
            f"benchmarks/{program} --json"
        )
    return found


@dataclass(frozen=True, slots=True)
class Predicted:
    """The prediction of a row.

    Attributes:
        seconds: of the mean iteration.
        nbytes: sent by a worker's NICs in it, forwarded bytes included; None if not counted.
    """

    seconds: float
    nbytes: float | None = None


def compare(
    parts: Sequence[Part],
    predict: Callable[[Checked, Contender], Predicted | None],
    judged: str,
    within: float,
    report: dict[str, Any],
) -> list[str]:
    """Print rows with their predictions, fill the report, and return those that are too far off.

    Args:
        parts: the measurements.
        predict: predicts a row; None if it cannot be simulated.
        judged: prefix of the rows that must be within the limit.
        within: the limit, relative to the lab's time.
        report: by figure, name of the part and row: seconds and bytes of both, and the error.
    """
    missed = []
    for part in parts:
        rows = report.setdefault(part.figure, {}).setdefault(part.name, {})
        for text, found in part.rows.items():
            checked, row = part.checked(text)
            simulated = row.strategy is not None and checked.model.profile is not None
            predicted = predict(checked, row) if simulated else None
            if predicted is None:
                continue
            rows[text] = _beside(found, predicted)
            if text.startswith(judged):
                missed += [
                    f"{part.title}: {text}: {what} {rows[text][off]:+.1%}; limit {within:.0%}"
                    for what, off in (("seconds", "off"), ("bytes", "bytes_off"))
                    if abs(rows[text].get(off, 0.0)) > within
                ]
        show(report, table(part, rows, within))
    return missed


def _beside(found: dict[str, Any], predicted: Predicted) -> dict[str, float]:
    lab_s, virtual_s = float(found["iteration_s"]), predicted.seconds
    row = {"lab_s": lab_s, "virtual_s": virtual_s, "off": virtual_s / lab_s - 1}
    if predicted.nbytes is not None and found.get("bytes_per_iteration"):
        lab = float(found["bytes_per_iteration"])
        row |= {
            "lab_bytes": lab, "virtual_bytes": predicted.nbytes,
            "bytes_off": predicted.nbytes / lab - 1,
        }  # fmt: skip
    return row


COLUMNS = (
    "row",
    "lab, mean iteration, s",
    "p10 .. p90, s",
    "virtual time, s",
    "off, %",
    "lab, MB sent",
    "virtual time, MB sent",
    "bytes off, %",
)


def table(part: Part, rows: dict[str, dict[str, float]], within: float) -> Printed:
    """Return a part's rows for printing, the largest error first."""
    cells = []
    for text, found in sorted(part.rows.items(), key=lambda each: -_off(rows.get(each[0]))):
        row, spread = rows.get(text, {}), found.get("quantiles_s")
        cells.append(
            (
                text,
                f"{found['iteration_s']:.3f}",
                f"{spread['p10']:.3f} .. {spread['p90']:.3f}" if spread else "",
                f"{row['virtual_s']:.3f}" if row else "",
                f"{100 * row['off']:+.1f}" if row else "",
                f"{row['lab_bytes'] / 1e6:.1f}" if "lab_bytes" in row else "",
                f"{row['virtual_bytes'] / 1e6:.1f}" if "lab_bytes" in row else "",
                f"{100 * row['bytes_off']:+.1f}" if "lab_bytes" in row else "",
            )
        )
    config = part.configs[0]
    title = (
        f"Fig. {part.title}: lab and virtual time; {config['model']} on {config['lab']}, slow "
        f"motion of {config['stretch']:g}, {config['iterations']} iterations"
    )
    notes = [
        f"wanted: at most {within:.0%} off; rows without virtual time cannot be simulated",
    ]
    return Printed.of(title, COLUMNS, cells, notes)


def _off(row: dict[str, float] | None) -> float:
    return -1.0 if row is None else max(abs(row["off"]), abs(row.get("bytes_off", 0.0)))


def strategy_of(row: Contender) -> Strategy:
    """Return the strategy of a row that is wingbeat's."""
    assert row.strategy is not None, "it was asked for"
    return row.strategy


def model_of(checked: Checked) -> simulator.Model:
    """Return the paced model as measured, in slow motion."""
    assert checked.model.profile is not None, "it was asked for"
    return paced.simulator_model(checked.model.profile, checked.model.stretch)


def links_of(checked: Checked) -> simulator.Links:
    """Return the links as measured, less headers."""
    return simulator.Links(
        bytes_per_s=checked.lab.rate / 8 * GOODPUT,
        count=checked.lab.rails,
        priorities=checked.lab.prio > 0,
    )


def in_lockstep(checked: Checked, row: Contender, **options: Any) -> Predicted | None:
    """Predict a row whose workers are in lockstep; None if it cannot be simulated."""
    try:
        run = simulator.simulate(
            model_of(checked), strategy_of(row), checked.workers, links_of(checked), **options
        )
    except UsageError as error:
        print(f"{row.text}: {error}", file=sys.stderr)
        return None
    iterations_s = run.iterations_s[1:] or run.iterations_s
    return Predicted(statistics.fmean(iterations_s))
