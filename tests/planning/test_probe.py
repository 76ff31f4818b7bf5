"""What planning and people get from a probe."""

from __future__ import annotations

import dataclasses

import pytest
from probe_made import SPECS, WIRE, probe, samples

from wingbeat import compression
from wingbeat.errors import UsageError
from wingbeat.planning import merge
from wingbeat.planning.measure import fit_samples, key_of, payload_bytes, wire_text
from wingbeat.types import TensorSpec


def test_probe_gives_workload_for_plan() -> None:
    found = probe()
    workload = found.workload(SPECS, payload_bytes(SPECS, WIRE))
    assert workload.tensors == (3, 2, 1, 0)
    assert workload.ready_s == found.ready_s
    assert workload.numels == (1000, 64_000, 64, 9408)
    assert workload.kinds == ("bfloat16 on cpu",) + 3 * ("float32 on cpu",)
    costs = found.costs()
    assert costs.encode(1e6) == pytest.approx(4e-5 + 2e-3, rel=0.1)
    assert costs.exchange(1e6) == pytest.approx(2e-3 + 9e-2, rel=0.1)
    plan = merge.exact(workload, costs)
    assert plan.buckets[0].tensors == (3,)  # of a kind of its own
    assert merge.predict(plan, workload, costs).backward_s == found.backward_s == 0.06


def test_probe_workload_bytes_follow_ready_order() -> None:
    workload = probe().workload(SPECS, [1.0, 2.0, 3.0, 4.0])
    assert workload.nbytes == (4.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    "specs",
    [SPECS[:3], [*SPECS, TensorSpec("new", (1,), "float32", 4)], SPECS[::-1],
     [*SPECS[:3], dataclasses.replace(SPECS[3], name="head.bias")]],
)  # fmt: skip
def test_probe_other_model_is_refused(specs) -> None:
    with pytest.raises(UsageError, match="measure this model again"):
        probe().workload(specs, [1.0] * len(specs))


def test_payload_bytes_include_flags() -> None:
    assert payload_bytes(SPECS, "") == [37632 + 4, 256 + 4, 256_000 + 4, 2000 + 2]
    assert payload_bytes(SPECS, "bfloat16") == [18816 + 2, 128 + 2, 128_000 + 2, 2000 + 2]
    topk = payload_bytes(SPECS, compression.TopK(density=0.01))
    assert topk == [int(0.06 * n) + 4 for n in (9408, 64, 64_000, 1000)]
    sketch = payload_bytes(SPECS, compression.Sketch(bits=4))
    assert sketch == [n / 2 + 4 for n in (9408, 64, 64_000, 1000)]


def test_probe_explains_coefficients_errors_and_slowest_layers() -> None:
    found = probe()
    lines = found.explain()
    assert lines[0] == "16 workers over eth0 + eth1, gradients as TopK(density=0.001)"
    assert "60 ms from the first of 4 gradients to the last" in lines[1]
    assert "31 ms" in lines[1]
    assert lines[2] == f"encoding, by elements: {found.encode.explain()}"
    assert lines[3] == f"exchange, by bytes: {found.exchange.explain()}"
    assert [text.partition(",")[0] for text in lines[4:10]] == [
        f"{what} on {name}"
        for name in ("eth0", "eth1", "eth0 + eth1")
        for what in ("all-gather", "all-reduce")
    ]
    assert lines[-1] == ("slowest gradients: conv.weight 55.9 ms, fc.weight 4 ms, conv.bias 0.1 ms")
    assert all("\n" not in text for text in lines)


def test_probe_without_times_is_explained() -> None:
    found = probe(1)
    still = tuple(dataclasses.replace(each, ready_s=0.0) for each in found.gradients)
    still = dataclasses.replace(found, gradients=still)
    assert still.explain()[-1].startswith("all-reduce on eth0")


def test_fit_samples_recovers_coefficients() -> None:
    encode, exchange = fit_samples(samples(), WIRE)
    assert encode.error < 0.05
    assert exchange.error < 0.05
    assert exchange.curve(6 * 1024.0) == pytest.approx(2e-3 + 9e-8 * 6 * 1024, rel=0.05)


def test_key_differs_for_model_cluster_and_wire() -> None:
    key = key_of(SPECS, 4, ["eth0"], WIRE, "payload all-gather")
    assert key == key_of(
        list(SPECS), 4, ("eth0",), compression.parse("topk@0.001"), "payload all-gather"
    )
    assert key == key_of(
        SPECS, 4, ["eth0"], compression.TopK(density=0.001, warmup=7), "payload all-gather"
    )
    assert key["workers"] == 4
    on_gpu = [dataclasses.replace(spec, device="cuda:1") for spec in SPECS]
    other_gpu = [dataclasses.replace(spec, device="cuda:0") for spec in SPECS]
    wider = [dataclasses.replace(SPECS[0], shape=(64, 3, 7, 8)), *SPECS[1:]]
    others = [
        key_of(SPECS[:3], 4, ["eth0"], WIRE, "payload all-gather"),
        key_of(wider, 4, ["eth0"], WIRE, "payload all-gather"),
        key_of(on_gpu, 4, ["eth0"], WIRE, "payload all-gather"),
        key_of(SPECS, 5, ["eth0"], WIRE, "payload all-gather"),
        key_of(SPECS, 4, ["eth1"], WIRE, "payload all-gather"),
        key_of(SPECS, 4, ["eth0", "eth1"], WIRE, "payload all-gather"),
        key_of(SPECS, 4, ["eth0"], compression.TopK(density=0.01), "payload all-gather"),
        key_of(SPECS, 4, ["eth0"], WIRE, "reduce-scatter"),
        key_of(SPECS, 4, ["eth0"], WIRE, "payload all-gather", {SPECS[0].name}),
        key_of(SPECS, 4, ["eth0"], WIRE, "payload all-gather", {SPECS[1].name}),
    ]
    assert all(other != key for other in others)
    assert key_of(on_gpu, 4, ["eth0"], "", "all-reduce") == key_of(
        other_gpu, 4, ["eth0"], "", "all-reduce"
    )


def test_wire_text_is_what_users_write() -> None:
    assert [wire_text(w) for w in ("", "bfloat16")] == ["fp32", "bf16"]
    assert wire_text(compression.Sketch(bits=4)) == "Sketch(bits=4)"
