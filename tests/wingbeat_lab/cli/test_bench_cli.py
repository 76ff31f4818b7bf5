"""``wingbeat bench`` and ``wingbeat demo`` as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.disk import room_for
from helpers.verbs import wingbeat
from wingbeat.errors import UsageError
from wingbeat_lab.bench import contenders, table
from wingbeat_lab.bench.table import Printed
from wingbeat_lab.cli.bench import spread, write

PNG = b"\x89PNG\r\n\x1a\n"
TUNED = "dear:trials=1,steps=1"


def test_figures_cut_short_leave_the_old_file_and_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Figures:
        runs = ()

        def to_json(self) -> dict[str, str]:
            return {"figures": "x" * 100_000}

    monkeypatch.setattr(table, "printed", lambda _: Printed.of("figures", ("row",), ()))
    path = tmp_path / "figures.json"
    path.write_text("good")
    outcome: Any = SimpleNamespace(report=Figures(), events=[])
    with room_for(1000), pytest.raises(UsageError, match=r"^cannot write .*figures\.json'.*$"):
        write(outcome, path, None, None)
    assert path.read_text() == "good"


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--strategies", "a", "b"], ["--strategies", "a", "--strategies", "b"]),
        (["--strategies", "a", "--strategies", "b"], ["--strategies", "a", "--strategies", "b"]),
        (["--strategies=a", "--lab", "x"], ["--strategies=a", "--lab", "x"]),
        (
            ["--strategies", "a", "b:c=1", "--png", "p"],
            ["--strategies", "a", "--strategies", "b:c=1", "--png", "p"],
        ),
        (["--strategies"], ["--strategies"]),
    ],
)
def test_strategies_are_separated_by_spaces_or_repeated(
    args: list[str], expected: list[str]
) -> None:
    assert spread(args) == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--lab", "sta:4@1gbit"], ["'sta'", "star"]),
        (["--lab", "star:4@1gbti"], ["gbti", "gbit"]),
        (["--model", "paced:resnet5"], ["'resnet5'", "'resnet50'"]),
        (["--strategies", "ddp", "deer"], ["'deer'", "'dear'"]),
        (["--strategies", "ddp", "--strategies", "dear:mbb=3"], ["'mbb'", "'mb'"]),
        (["--iterations", "0"], ["iterations", "1 or more"]),
        (["--iterations", "many"], ["--iterations", "integer"]),
        (["--optimizer", "adam"], ["'adam'", "'adamw'"]),
        (["--json", "/proc/none/out.json"], ["/proc/none/out.json"]),
        (["--slow", "3=+2x", "--slow", "h3@200mbit"], ["--lab star:4@1gbit,h3@200mbit"]),
        (["--target-loss", "0.1"], ["target_loss = 0.1", "digits"]),
    ],
)
def test_bad_input_is_one_line_and_exit_2(args: list[str], words: list[str]) -> None:
    done = wingbeat("bench", *args)
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    for word in words:
        assert word in line


def test_help_says_of_each_row_what_it_is() -> None:
    done = wingbeat("bench", "--help")
    assert done.returncode == 0
    shown = " ".join(done.stdout.split())
    for name in contenders.names():
        assert f" {name}: " in shown
    assert "dear: All-reduce in two halves" in shown
    assert "--slow 3=+2x" in shown
    assert "star:4@1gbit,h3@200mbit" in shown
    assert "topksgd: TopK-SGD: the largest of all gradients, sent after backward" in shown
    assert shown.count("(exact, synchronous)") == 15
    assert shown.count("(not exact, synchronous)") == 7
    assert contenders.parse(contenders.COMPOSED).traits.halves
    assert f"as in {contenders.COMPOSED}" in shown


def run_bench(tmp_path: Path, *args: str) -> dict[str, Any]:
    out = tmp_path / "out.json"
    done = wingbeat("bench", *args, "--json", str(out), timeout=170)
    assert done.returncode == 0, done.stderr
    assert "p10 .. p90" in done.stdout
    data: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    (kept,) = (Printed.from_json(each) for each in data["tables"])
    assert [row[0] for row in kept.rows] == [run["strategy"] for run in data["runs"]]
    return data


def check_exact(runs: list[dict[str, Any]]) -> None:
    """Strategies that are exact train the same weights, so their losses agree."""
    losses = [run["final_loss"] for run in runs if run["exact"]]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-5)


def test_a_bench_is_planned_and_shown_without_torch() -> None:
    """It takes seconds to load, and the workers are those that need it."""
    code = (
        "import sys; from wingbeat_lab.bench import bars, demo, picture, runner, table\n"
        "from wingbeat_lab.bench.config import BenchConfig\n"
        "BenchConfig(lab='star:2@1gbit', model='digits', strategies=('ddp', 'omgs')).check()\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.alone  # the host's loopback counts what others send too
@pytest.mark.slow
def test_loopback_with_real_data(tmp_path: Path) -> None:
    data = run_bench(
        tmp_path, "--lab", "loopback:2", "--model", "digits", "--iterations", "3",
        "--rounds", "1", "--warmup", "1", "--strategies", "ddp", "allreduce", "dear",
    )  # fmt: skip
    runs = data["runs"]
    assert [run["strategy"] for run in runs] == ["ddp", "allreduce", "dear"]
    check_exact(runs)
    assert {run["bound_s"] for run in runs} == {None}
    # Small as it is there is one plan only, which DeAR finds out before it is timed.
    ddp, allreduce, dear = runs
    assert ddp["deciding"] is allreduce["deciding"] is None
    assert 1 <= dear["deciding"]["iterations"] <= 2
    assert dear["deciding"]["decision"] == {"bucket_bytes": 25 << 20}
    assert all(0.0 <= run["accuracy"] <= 1.0 for run in runs)
    # DDP sends every gradient once, 71,000 floats and headers; wingbeat in the host's memory.
    assert ddp["bytes_per_iteration"] == pytest.approx(4 * 71_754, rel=0.1)
    assert all(run["bytes_per_iteration"] < 4_000 for run in (allreduce, dear))


@pytest.mark.lab
@pytest.mark.alone
def test_star_with_a_paced_model(tmp_path: Path) -> None:
    png, trace = tmp_path / "out.png", tmp_path / "trace.json"
    data = run_bench(
        tmp_path, "--lab", "star:2@12gbit", "--model", "paced:alexnet@0.01",
        "--iterations", "4", "--rounds", "1", "--warmup", "2", "--slow", "1=+0.5x",
        "--strategies", "ddp", TUNED, "--strategies", "single",
        "--png", str(png), "--trace", str(trace),
    )  # fmt: skip
    assert data["lab"] == "star:2@120mbit"
    assert data["asked_lab"] == "star:2@12gbit"
    ddp, dear, single = data["runs"]
    check_exact(data["runs"])
    for run in (ddp, dear, single):
        # A shaper lets 8 ms of its rate through at once after a pause, which counts at this scale.
        assert run["bound_s"] <= 1.05 * run["iteration_s"]["median"]
        assert run["iteration_s"]["p10"] <= run["iteration_s"]["median"]
        assert len(run["samples_s"]) == 4
        # Worker 1 computes and sleeps half as long in addition; alone it keeps nobody waiting.
        own = run["samples_by_rank_s"]
        assert [len(samples) for samples in own] == [4, 4]
        assert min(own[1]) >= 0.98 * 1.5 * data["normal_iteration_s"]
        rates = run["iterations_per_s"]
        assert rates["total"] == pytest.approx(sum(rates["by_rank"]))
        assert min(run["cpu_s_per_iteration"]["worker"]) > 0
    fast, slow = single["iterations_per_s"]["by_rank"]
    assert fast > 1.3 * slow
    assert data["normal_iteration_s"] == pytest.approx(sum(data["compute_s"].values()))
    assert dear["deciding"]["iterations"] >= 1 + 2
    assert dear["deciding"]["seconds"] > 0
    assert list(dear["deciding"]["decision"]) == ["bucket_bytes"]
    # 1 % of AlexNet's 244 MB, once out of each of two workers.
    for run in (ddp, dear):
        assert run["bytes_per_iteration"] == pytest.approx(2.44e6, rel=0.1)
    assert single["bytes_per_iteration"] < 20_000
    assert single["iteration_s"]["median"] < ddp["iteration_s"]["median"]
    assert png.read_bytes().startswith(PNG)
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    processes = {e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {f"{s}, worker {w}" for s in ("ddp", TUNED, "single") for w in (0, 1)}
    kinds = {e["cat"] for e in events if e["ph"] == "X"}
    assert kinds >= {"forward", "backward", "all_reduce", "reduce_scatter", "all_gather"}


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.alone
def test_the_demo_shows_a_table_and_leaves_its_files(tmp_path: Path) -> None:
    done = wingbeat("demo", "--quick", "--out", str(tmp_path / "demo"), timeout=175)
    assert done.returncode == 0, done.stderr
    for word in ("digits (real)", "resnet50 (paced)", "allreduce", "timeline.png", "perfetto"):
        assert word in done.stdout
    assert (tmp_path / "demo" / "timeline.png").read_bytes().startswith(PNG)
    figures = json.loads((tmp_path / "demo" / "demo.json").read_text(encoding="utf-8"))
    digits, paced = figures["benches"]
    assert figures["links"] == "shaped"
    assert digits["lab"] == paced["lab"] == "star:4@1gbit"
    check_exact(digits["runs"])
    check_exact(paced["runs"])
