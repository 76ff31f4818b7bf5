"""``{diloco,ripples}_replicas.py``, ``replica_kills.py``: arbiter, judgement, refusals."""

from __future__ import annotations

import argparse
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from helpers.scripts import Refusal, benchmark


@pytest.fixture(scope="module")
def diloco() -> Iterator[ModuleType]:
    with benchmark("diloco_replicas") as module:
        yield module


@pytest.fixture(scope="module")
def ripples() -> Iterator[ModuleType]:
    with benchmark("ripples_replicas") as module:
        yield module


# -- DiLoCo -----------------------------------------------------------------------------------


def settings(**more: Any) -> argparse.Namespace:
    given = {"width": 8, "length": 4, "batch": 1, "seed": 3, "per_host": 2, "every": 2}
    return argparse.Namespace(**{**given, "outer_lr": 0.7, "outer_momentum": 0.9, **more})


def by_optimizers(module: ModuleType, args: argparse.Namespace, hosts: int, rounds: int) -> Any:
    """DiLoCo with torch's own outer SGD, and one backward for each process's batch."""
    task = module.diloco.text(args.length, args.batch)
    count = hosts * args.per_host
    batches = [task.batches(rank, count, args.seed) for rank in range(count)]
    shared = module.transformer(args, torch.float64)
    outer = torch.optim.SGD(
        shared.parameters(), lr=args.outer_lr, momentum=args.outer_momentum, nesterov=True
    )
    replicas = [copy.deepcopy(shared) for _ in range(hosts)]
    inner = [torch.optim.AdamW(each.parameters(), lr=module.RATE) for each in replicas]
    for _ in range(rounds):
        for number, replica in enumerate(replicas):
            for _ in range(args.every):
                inner[number].zero_grad()
                for rank in range(number * args.per_host, (number + 1) * args.per_host):
                    loss, _ = module.accuracy.loss_of(replica, *next(batches[rank]))
                    (loss / args.per_host).backward()
                inner[number].step()
        for name, p in shared.named_parameters():
            p.grad = sum(p.detach() - dict(r.named_parameters())[name] for r in replicas) / hosts
        outer.step()
        for replica in replicas:
            replica.load_state_dict(shared.state_dict())
    return {name: p.detach() for name, p in shared.named_parameters()}


@pytest.mark.parametrize("hosts", [2, 3])
def test_the_arbiter_is_local_steps_and_an_outer_nesterov(diloco: ModuleType, hosts: int) -> None:
    args = settings()
    task = diloco.diloco.text(args.length, args.batch)
    found = diloco.arbiter(args, task, hosts, torch.float64, 3)
    assert diloco.difference(found, by_optimizers(diloco, args, hosts, 3)) < 1e-9


@pytest.mark.parametrize("other", [{"outer_momentum": 0.0}, {"every": 3}, {"per_host": 1}])
def test_other_settings_make_a_difference_above_the_limit(
    diloco: ModuleType, other: dict[str, Any]
) -> None:
    args = settings()
    task = diloco.diloco.text(args.length, args.batch)
    found = diloco.arbiter(args, task, 2, torch.float64, 2)
    moved = diloco.arbiter(settings(**other), task, 2, torch.float64, 2)
    assert diloco.difference(moved, found) > 100 * diloco.WEIGHTS_LIMIT


def test_a_difference_is_that_of_the_worst_tensor_and_nan_stays_nan(diloco: ModuleType) -> None:
    wanted = {"a": torch.ones(4), "b": torch.tensor([3.0, 4.0])}
    assert diloco.difference(wanted, wanted) == 0.0
    moved = {**wanted, "b": torch.tensor([3.0, 4.5])}
    assert diloco.difference(moved, wanted) == pytest.approx(0.1)
    broken = diloco.difference({**wanted, "a": torch.full((4,), torch.nan)}, wanted)
    assert not broken <= diloco.WEIGHTS_LIMIT
    with pytest.raises(ValueError, match="tensors differ"):
        diloco.difference({"a": torch.ones(4)}, wanted)


def averaged(step_s: float, nbytes: float, **more: float) -> dict[str, Any]:
    return {"step_s": [step_s] * 3, "outer_s": [step_s] * 3, "bytes": nbytes, **more}


def test_rows_are_judged_by_torchfts_faster_form_and_its_fewer_bytes(diloco: ModuleType) -> None:
    rows = {
        diloco.PLAIN: averaged(0.10, 90.0),
        diloco.BUCKETS: averaged(0.12, 100.0),
        "diloco:every=30": averaged(0.11, 90.0, difference_double=2e-6),
        "diloco:every=30,compression=sketch@4": averaged(0.09, 9.0),
    }
    assert diloco.judge(rows) == [
        "diloco:every=30: weights differ by 2.0e-06, limit 1e-06",
        "diloco:every=30: 1.10 of torchft's step, limit 1",
        "diloco:every=30,compression=sketch@4: 0.1000 of torchft's bytes, limit 0.02",
    ]
    rows["diloco:every=30"] = averaged(0.10, 90.0, difference_double=1e-7)
    rows["diloco:every=30,compression=sketch@4"] = averaged(0.09, 1.0)
    assert diloco.judge(rows) == []


def test_weights_that_are_not_numbers_miss_the_limit(diloco: ModuleType) -> None:
    rows = {
        diloco.PLAIN: averaged(0.1, 90.0),
        diloco.BUCKETS: averaged(0.1, 90.0),
        "diloco:every=30": averaged(0.1, 90.0, difference_double=float("nan")),
    }
    assert diloco.judge(rows) == ["diloco:every=30: weights differ by nan, limit 1e-06"]


def test_without_torchft_one_line_says_how_to_install_it(
    diloco: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["diloco_replicas.py"])
    monkeypatch.setattr(diloco.importlib.util, "find_spec", lambda name: None)
    assert diloco.main() == 2
    assert "pip install 'wingbeat[torchft]'" in capsys.readouterr().err


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_diloco_have_the_arbiters_weights_and_a_sketch_an_eighth_of_the_bytes(
    diloco: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torchft")
    words = ["--width", "64", "--every", "4", "--rounds", "1", "--codecs", "sketch@4"]
    monkeypatch.setattr(sys, "argv", ["d", "--json", str(tmp_path / "a.json"), *words])
    assert diloco.main() == 1  # 1/8 is more than 1/50
    rows = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["rows"]
    *exact, sketched = rows.values()
    assert len(exact) == 3
    assert all(row["difference_double"] < diloco.WEIGHTS_LIMIT for row in exact)
    assert 1 / 8 < sketched["of_bytes"] < 1 / 6
    assert sketched["difference"] > 1e-3


# -- Ripples ----------------------------------------------------------------------------------


def test_the_slow_replica_is_not_among_the_others(ripples: ModuleType) -> None:
    turns = {
        "hsdp": {"equal": [[1.0, 1.0, 1.0]], "one slow": [[0.25, 0.25, 0.25]]},
        "ripples:policy=smart": {"equal": [[1.0, 1.0, 1.0]], "one slow": [[1.0, 0.25, 0.8]]},
    }
    found = ripples.figures(turns, slow=1)["ripples:policy=smart"]
    assert found["one slow"] == {"total": [2.05], "others": [1.8], "slow": [0.25]}
    assert found["kept"] == [pytest.approx(0.9)]
    assert found["of_reference"] == [pytest.approx(2.05 / 0.75)]


@pytest.mark.parametrize(
    ("kept", "times", "missed"),
    [
        ([0.9, 0.85, 0.2], [3.0, 3.1, 2.0], []),
        ([0.8], [3.0], ["ripples:policy=smart: the others keep 0.80, limit 0.85"]),
        ([0.9], [2.5], ["ripples:policy=smart: 2.50 times HSDP's steps a second, limit 3"]),
    ],
)
def test_medians_of_ripples_are_judged_and_hsdps_are_not(
    ripples: ModuleType, kept: list[float], times: list[float], missed: list[str]
) -> None:
    rows = {
        "hsdp": {"kept": [0.2], "of_reference": [1.0]},
        "ripples:policy=smart": {"kept": kept, "of_reference": times},
    }
    assert ripples.judge(rows) == missed


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--model", "digits"], "allowed are paced models"),
        (["--rows", "ripples"], "hsdp must be first"),
        (["--rows", "hsdp", "riples"], "'ripples'"),
        (["--slow-rank", "8"], "allowed are 0 to 7"),
        (["--lab", "star:1@1gbit"], "two hosts or more"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(
    ripples: ModuleType, refusal: Refusal, words: list[str], named: str
) -> None:
    assert named in refusal(ripples, words)


@pytest.mark.parametrize("name", ["hsdp", "diloco_replicas"])
@pytest.mark.parametrize(
    ("spec", "named"),
    [("star:1@1gbit", "two hosts or more"), ("ring:2", "unknown lab kind 'ring'")],
)
def test_labs_without_replicas_are_refused_before_anything_starts(
    name: str, refusal: Refusal, spec: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with benchmark(name) as module:
        if name == "diloco_replicas":
            monkeypatch.setattr(module.importlib.util, "find_spec", lambda _: True)
        assert named in refusal(module, ["--lab", spec])


@pytest.mark.lab
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hsdp_waits_for_the_slow_process_and_ripples_does_not(
    ripples: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    words = ["--lab", "star:3@10gbit", "--model", "paced:resnet50@0.02", "--normal", "compute"]
    words += ["--rows", "hsdp", "allreduce", "ripples", "--rounds", "1", "--seconds", "15"]
    monkeypatch.setattr(sys, "argv", ["r", "--json", str(tmp_path / "a.json"), *words])
    assert ripples.main() in (0, 1)  # on a busy machine they keep less than the limit
    found = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert found["sleep_s"] == pytest.approx(4 * 0.2177, rel=0.01)
    for row in ("hsdp", "allreduce"):
        [slowed] = found["turns"][row]["one slow"]
        assert min(slowed) == pytest.approx(max(slowed), rel=0.1)  # all in lockstep
        assert max(slowed) < 1 / found["sleep_s"]
    [(first, slow, last)] = found["turns"]["ripples"]["one slow"]
    assert min(first, last) > 1.5 * slow


# -- kills ------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [["--replicas", "1"], ["--kills", "0"], ["--ranks", "x"]])
def test_numbers_with_which_no_replica_can_return_are_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with benchmark("replica_kills") as module:
        monkeypatch.setattr(sys, "argv", ["replica_kills.py", *words])
        with pytest.raises(SystemExit) as ended:
            module.main()
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert f"argument {words[0]}: {words[1]!r}: allowed are whole numbers" in said
