"""``wingbeat plan`` as a user runs it."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers.profiles import dense_profile
from wingbeat.cli.main import main
from wingbeat.cli.plan import _Report
from wingbeat.prediction.recommendation import Choice
from wingbeat.profiling import encode

EQUAL = ("--hosts", "3", "--rate", "1gbit")
FEW = ("--strategy", "allreduce", "--strategy", "allreduce:compression=sketch")

Wingbeat = Callable[..., tuple[int, str, str]]


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "dense.json"
    path.write_text(encode(dense_profile()), encoding="utf-8")
    return str(path)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "c.toml"
    path.write_text('kind = "star"\nhosts = 3\nrate = "1gbit"\n', encoding="utf-8")
    return str(path)


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Wingbeat:
    """Run the verb in this process; return the exit code, standard output and error."""

    def run(*args: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main(["plan", *args])
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def as_json(plan: Wingbeat, *args: str) -> Any:
    code, out, err = plan(*args, "--json")
    assert code == 0, err
    return json.loads(out)


def test_plan_verb_ranks_and_shows_the_winners_code(plan: Wingbeat, profile: str) -> None:
    code, out, err = plan(profile, *EQUAL, *FEW)
    assert (code, err) == (0, "")
    assert "dense on 3 hosts of 1 worker, one NIC of 1 Gbit/s, 50 us" in out
    names = [line.split()[0] for line in out.splitlines() if " .. " in line]
    assert names.index("allreduce:compression=sketch") < names.index("allreduce")
    assert {"ddp", "ddp+bf16", "ddp+powersgd:rank=1"} <= set(names)
    assert "exact: stay with ddp, or allreduce: 1.00 times as fast as ddp, within the error" in out
    assert "not exact: stay with ddp+bf16, or allreduce:compression=sketch (lossy, with " in out
    assert "  model, optimizer = wingbeat.distribute(model, optimizer, AllReduce())" in out
    assert "interval: the error of predictions in the lab" in out


def test_plan_verb_takes_a_known_network_and_the_speed_of_other_devices(plan: Wingbeat) -> None:
    words = ("--hosts", "2", "--rate", "100gbit", "--strategy", "allreduce")
    plain, fast = (
        as_json(plan, "paced:resnet50", *words, *more) for more in ((), ("--speed", "2"))
    )
    assert "; computation 2 times as fast as on NVIDIA GeForce RTX 2080 Ti" in fast["plan"]
    seconds = [found["scenarios"][0]["ranking"][0]["iteration_s"] for found in (plain, fast)]
    assert seconds[0] == pytest.approx(0.2177, rel=0.1)
    assert seconds[1] == pytest.approx(seconds[0] / 2, rel=0.1)
    code, _, err = plan("paced:resnet5", *words)
    assert (code, "did you mean 'resnet50'" in err) == (2, True), err
    for speed in ("0", "nan", "1e-300"):
        code, _, err = plan("paced:resnet50", *words, "--speed", speed)
        assert (code, f"--speed {speed}: allowed are 0.001 to 1000" in err) == (2, True), err


def test_plan_verb_ranks_only_a_baseline_that_is_named(plan: Wingbeat, profile: str) -> None:
    found = as_json(plan, profile, *EQUAL, "--strategy", "ddp")
    rows = [row["strategy"] for row in found["scenarios"][0]["ranking"]]
    assert rows
    assert all(name.startswith("ddp") for name in rows)


def test_plan_verb_after_its_limit_ranks_what_it_has(
    plan: Wingbeat, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wingbeat.cli.plan._LIMIT_S", 0.0)
    code, out, err = plan(profile, *EQUAL, *FEW)
    assert code == 0, err
    assert "ddp+bf16" in out
    assert "not predicted: allreduce: the limit of 0 s had passed: --patient predicts it" in out
    assert "not predicted" not in plan(profile, *EQUAL, *FEW, "--patient")[1]


def test_plan_verb_json_has_all_figures(plan: Wingbeat, profile: str) -> None:
    found = as_json(plan, profile, *EQUAL, *FEW, "--what-if", "rate=10gbit")
    base, fast = found["scenarios"]
    assert (base["what_if"], fast["what_if"]) == ("", "rate=10gbit")
    rows = {row["strategy"]: row for row in base["ranking"]}
    ring, ddp = rows["allreduce"], rows["ddp"]
    assert ring["iteration_s"] == ddp["iteration_s"]
    assert ring["speedup"] == 1.0
    hook = min(row["iteration_s"] for name, row in rows.items() if "+" in name)
    assert ring["speedup_over_best_hook"] == pytest.approx(hook / ring["iteration_s"])
    assert ring["low_s"] < ring["iteration_s"] < ring["high_s"]
    # A ring of three sends a sum and a copy of two thirds of 3 MB.
    assert ring["bytes_per_host"] == pytest.approx(4 / 3 * 3e6, rel=0.01)
    assert ring["code"].startswith("import wingbeat")
    assert ddp["code"] is None
    exact, other = (base["recommended"][which] for which in ("exact", "not_exact"))
    assert exact == {
        "name": "allreduce", "ties": [], "rival": "ddp", "faster": False, "slower": False
    }  # fmt: skip
    assert (other["name"], other["rival"]) == ("allreduce:compression=sketch", "ddp+bf16")
    quick = {row["strategy"]: row["iteration_s"] for row in fast["ranking"]}
    assert quick["allreduce"] < ring["iteration_s"]


def test_plan_verb_recommends_a_hook_that_is_faster_beyond_the_error(
    plan: Wingbeat, profile: str
) -> None:
    code, out, _ = plan(profile, "--hosts", "3", "--rate", "100mbit", *FEW)
    assert code == 0
    [line] = [each for each in out.splitlines() if each.startswith("not exact")]
    assert line.startswith(
        "not exact: stay with ddp+powersgd:rank=1: allreduce:compression=sketch takes 1."
    )


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (1.1, "exact: stay with ddp: allreduce takes 1.10 times as long, within the error of the"),
        (1.001, "exact: stay with ddp, or allreduce: 1.00 times as fast as ddp, within the error"),
        (0.9, "exact: stay with ddp, or allreduce: 1.11 times as fast as ddp, within the error"),
    ],
)
def test_strategy_that_is_predicted_slower_within_the_error_is_not_recommended_as_code(
    seconds: float, said: str
) -> None:
    rows = {
        "ddp": SimpleNamespace(iteration_s=1.0),
        "allreduce": SimpleNamespace(iteration_s=seconds),
    }
    report = SimpleNamespace(
        rankings={"": SimpleNamespace(predictions=rows)}, _rivals=lambda _: ("ddp", "ddp"),
        code={"allreduce": "import wingbeat"},
    )  # fmt: skip
    choice = Choice("allreduce", (), "ddp", faster=False, slower=False)
    lines = _Report._advised(report, "", "exact", choice)  # type: ignore[arg-type]
    assert lines[0].startswith(said)
    assert any("import wingbeat" in line for line in lines) == (seconds < 1.005)


def test_plan_verb_recommends_what_is_faster_than_ddp_beyond_the_error(
    plan: Wingbeat, profile: str
) -> None:
    code, out, _ = plan(
        profile, "--hosts", "2", "--per-host", "4", "--rate", "100mbit", "--strategy", "allreduce"
    )
    assert code == 0
    [line] = [each for each in out.splitlines() if each.startswith("exact")]
    assert line.startswith("exact: allreduce: 1.")
    assert line.endswith(" times as fast as ddp")


def test_plan_verb_cluster_file_equals_its_words(
    plan: Wingbeat, profile: str, cluster: str
) -> None:
    by_file = as_json(plan, profile, cluster, *FEW, "--per-host", "2")
    assert by_file == as_json(plan, profile, *EQUAL, *FEW, "--per-host", "2")


def test_plan_verb_what_if_has_a_column_and_a_winner_for_each(plan: Wingbeat, profile: str) -> None:
    code, out, _ = plan(
        profile, *EQUAL, *FEW, "--what-if", "nics=2", "--what-if", "slow-host=1:3,add-hosts=1"
    )
    assert code == 0
    assert "What if" in out
    [row] = [line.split() for line in out.splitlines() if line.startswith(" allreduce  ")][1:]
    now, more, slow = map(float, row[1:])
    assert more < now < slow
    assert "exact with nics=2: stay with ddp, or allreduce" in out
    assert "exact with slow-host=1:3,add-hosts=1: stay with ddp, or allreduce" in out


def test_plan_verb_what_cannot_be_predicted_is_listed_with_the_reason(
    plan: Wingbeat, profile: str
) -> None:
    code, out, _ = plan(profile, *EQUAL, *FEW, "--strategy", "auto", "--what-if", "nics=2")
    assert code == 0
    refused = [line for line in out.splitlines() if line.startswith("not predicted")]
    assert refused == [
        "not predicted: auto: simulate(): a choice by trial (Auto) is not simulated; simulate its "
        "candidates: AllReduce(), DeAR(plan='fixed')"
    ]


def test_plan_verb_codec_ranks_it_beside_the_usual_ones(plan: Wingbeat, profile: str) -> None:
    found = as_json(plan, profile, *EQUAL, *FEW, "--codec", "lowrank@2")
    names = {row["strategy"] for row in found["scenarios"][0]["ranking"]}
    assert "dear:plan=fixed,compression=lowrank@2" in names


INSIDE = ("--per-host", "2", "--inside")


def test_plan_verb_inside_divides_the_optimizer(plan: Wingbeat, tmp_path: Path) -> None:
    profile = dense_profile()
    step = replace(profile.layers[0], name="(optimizer)", parameters=(), backward_ms=0.0)
    found = []
    for ms in (0.0, 1000.0):
        layers = (replace(step, forward_ms=ms), *profile.layers)
        longer = replace(profile, layers=layers, samples_per_second=3e3 / (90.0 + ms))
        path = tmp_path / "step.json"
        path.write_text(encode(longer), encoding="utf-8")
        rows = as_json(plan, str(path), *EQUAL, *INSIDE, "--strategy", "hsdp")["scenarios"][0]
        found.append(rows["ranking"][0]["iteration_s"])
    assert found[1] - found[0] == pytest.approx(0.5, abs=0.02)


def test_plan_verb_inside_compares_replicas_with_hsdp(plan: Wingbeat, profile: str) -> None:
    found = as_json(plan, profile, *EQUAL, *FEW, *INSIDE)
    rows = {row["strategy"]: row for row in found["scenarios"][0]["ranking"]}
    assert set(rows) == {"hsdp", "allreduce", "allreduce:compression=sketch"}
    assert rows["allreduce"]["bytes_per_host"] == pytest.approx(4 / 3 * 3e6, rel=0.01)
    assert rows["allreduce"]["speedup_over_best_hook"] is None
    assert "AllReduce(), mesh=mesh)" in rows["allreduce"]["code"]
    assert 'init_device_mesh("cpu", (world.size // 2, 2)' in rows["allreduce"]["code"]


def test_plan_verb_inside_leaves_out_what_a_mesh_refuses_before_its_limit(
    plan: Wingbeat, profile: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--strategy", "adpsgd", "--strategy", "dear:shard_optimizer=true", *FEW)
    monkeypatch.setattr("wingbeat.cli.plan._LIMIT_S", 0.0)
    code, out, err = plan(profile, *EQUAL, *words, *INSIDE)
    assert code == 0, err
    [line] = [line for line in out.splitlines() if line.startswith("left out")]
    assert line == (
        "left out, because distribute(mesh=...) refuses them: adpsgd: it averages models of single "
        "processes; dear:shard_optimizer=true: fully_shard() divides the optimizer's state already"
    )
    late = {line.split()[2] for line in out.splitlines() if line.startswith("not predicted")}
    assert late == {"allreduce:", "allreduce:compression=sketch:"}
    found = as_json(plan, profile, *EQUAL, *words, *INSIDE, "--patient")["scenarios"][0]
    assert {row["strategy"] for row in found["ranking"]} == {"hsdp", FEW[1], FEW[3]}
    assert found["not_predicted"]["adpsgd"].endswith("use LocalSGD(), DiLoCo() or Ripples()")
    assert "left out" not in plan(profile, *EQUAL, *words, "--per-host", "2")[1]


def test_plan_verb_inside_on_gpus_leaves_out_more_and_prints_their_code(
    plan: Wingbeat, tmp_path: Path
) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(encode(dense_profile(device="NVIDIA H100, float32")), encoding="utf-8")
    words = ("--strategy", "localsgd", "--strategy", "omgs")
    found = as_json(plan, str(path), *EQUAL, *words, *FEW, *INSIDE)["scenarios"][0]
    assert set(found["not_predicted"]) == {"localsgd", "omgs"}
    [code] = [row["code"] for row in found["ranking"] if row["strategy"] == "allreduce"]
    assert 'torch.distributed.init_process_group("cpu:gloo,cuda:nccl")' in code
    assert 'init_device_mesh("cuda", ' in code


def test_plan_verb_names_what_is_assumed(plan: Wingbeat, profile: str) -> None:
    plain, fast, same = (
        as_json(plan, profile, *EQUAL, *FEW, *INSIDE, *more)
        for more in ((), ("--inside-rate", "3600gbit"), ("--inside-rate", "40gbit"))
    )
    assert plain["plan"] == (
        "dense on 3 hosts of 2 workers, one NIC of 1 Gbit/s, 50 us, 40 Gbit/s inside a host, each "
        "host a replica; computation as on AMD EPYC, 2 threads, float32; codecs and sums between "
        "hosts as on a CPU core"
    )
    assert ", 3600 Gbit/s inside a host, " in fast["plan"]
    seconds = [
        {row["strategy"]: row["iteration_s"] for row in found["scenarios"][0]["ranking"]}["hsdp"]
        for found in (plain, fast, same)
    ]
    assert seconds[1] < seconds[2] < seconds[0]  # a stated rate has no processor time of chunks
    assert not any("over each NIC" in note for note in plain["notes"])
    quick = as_json(plan, profile, "--hosts", "2", "--rate", "25gbit", *FEW)
    [note] = [note for note in quick["notes"] if "over each NIC" in note]
    assert note.startswith("a process sends at most 14 Gbit/s over each NIC, which is what a CPU")


@pytest.mark.parametrize("name", ["plan.svg", "plan.png"])
def test_plan_verb_draws_a_picture(plan: Wingbeat, profile: str, tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    code, out, _ = plan(profile, *EQUAL, *FEW, "--picture", str(tmp_path / name))
    assert code == 0
    assert f"picture: {tmp_path / name}" in out
    drawn = (tmp_path / name).read_bytes()
    assert drawn.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert len(drawn) > 5000


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("none.json", *EQUAL), "profile 'none.json': no such file; write one: wingbeat profile"),
        (("PROFILE",), "which cluster? Name the file of wingbeat probe, or describe equal hosts"),
        (("PROFILE", "none.toml"), "cluster file 'none.toml': No such file or directory; write"),
        (("PROFILE", "CLUSTER", "--rate", "2gbit"), "write --what-if rate=2gbit"),
        (("PROFILE", "CLUSTER", "--hosts", "5"), "write --what-if add-hosts=5"),
        (("PROFILE", "--hosts", "1", "--rate", "1gbit"), "allowed are 2 or more hosts"),
        (("PROFILE", *EQUAL, "--per-host", "0"), "--per-host 0"),
        (("CLUSTER", *EQUAL), "not JSON"),
        (("PROFILE", "PROFILE"), "is not TOML"),
        (("PROFILE", *EQUAL, "--what-if", "speed=2"), "unknown change 'speed'"),
        (("PROFILE", *EQUAL, "--strategy", "deer"), "unknown strategy 'deer'"),
        (("PROFILE", *EQUAL, "--codec", "zip"), "'zip'"),
        (("PROFILE", *EQUAL, "--picture", "plan.pdf"), "has to end in .svg or .png"),
        (("PROFILE", *EQUAL, "--inside"), "--inside: hosts have 1 workers; a replica is a host"),
        (("PROFILE", *EQUAL, "--inside-rate", "40gbit"), "each host has one worker, so nothing is"),
        (("PROFILE", *EQUAL, *INSIDE, "--inside-rate", "9"), "unknown unit of a rate ''"),
    ],
)
def test_plan_verb_wrong_input_is_one_line_and_exit_2(
    plan: Wingbeat, profile: str, cluster: str, args: tuple[str, ...], message: str
) -> None:
    named = {"PROFILE": profile, "CLUSTER": cluster}
    code, out, err = plan(*(named.get(arg, arg) for arg in args))
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    assert message in line


def test_plan_verb_starts_as_a_command(profile: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wingbeat.cli.main", "plan", profile, *EQUAL, *FEW],
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "exact: stay with ddp, or allreduce" in done.stdout
