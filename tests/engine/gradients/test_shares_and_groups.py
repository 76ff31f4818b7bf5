"""What a bucket travels as where only some layers are encoded, or a share of all iterations."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from wingbeat.codecs.codec import Dense, SketchCodec
from wingbeat.collectives import Encoded
from wingbeat.compression import Half, LowRank, Sketch, TopK
from wingbeat.engine.gradients.bucket import Bucket, Slot
from wingbeat.engine.gradients.compression import Compression
from wingbeat.errors import UsageError
from wingbeat.transport.loopback import Switchboard
from wingbeat.transport.mesh import Replica
from wingbeat.types import Span

NAMES = ("conv.weight", "conv.bias", "fc.weight")
SHAPES = ((30, 4), (7,), (20, 10))
SIZES = (120, 7, 200)
N = sum(SIZES)
EXTRA: dict[str, Any] = {"auto_disable": False}


def slots_of(dtype: torch.dtype = torch.float32) -> list[Slot]:
    made = zip(NAMES, SHAPES, strict=True)
    return [
        Slot(i, name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
        for i, (name, shape) in enumerate(made)
    ]


class Worker:
    """One worker's compression and its one bucket, whose gradients a test chooses."""

    def __init__(
        self, wire: Any, dtype: torch.dtype = torch.float32, inside: Replica | None = None
    ) -> None:
        self.slots = slots_of(dtype)
        self.bucket = Bucket(0, self.slots)
        world = SimpleNamespace(rank=0, size=2, inside=inside, replica=inside)
        collectives = cast("Any", SimpleNamespace(world=world))
        factored = isinstance(wire, LowRank) and inside is not None
        self.compression = Compression(wire, self.slots, collectives, sums=factored)

    def launch(self, gradients: Tensor, used: tuple[bool, ...] = (True,) * 3) -> Any:
        """Begin an iteration and take in all gradients."""
        self.compression.count_step()
        self.bucket.reset()
        self.bucket.flat[:N].copy_(gradients)
        for slot, mine in zip(self.slots, used, strict=True):
            slot.used = mine
            if not mine:
                slot.view.zero_()
        self.bucket.write_tail(0)
        return self.compression.launching(self.bucket)

    def send(self, wire: Encoded) -> Tensor:
        """Encode the bucket; return what the others would read."""
        span = Span(0, self.bucket.flat.numel())
        payload = torch.empty(wire.coding.room(span), dtype=torch.uint8)
        wire.coding.encode(self.bucket.flat, span, payload, wire.residual)
        out = torch.empty(len(span))
        wire.coding.decode(payload, out, span)
        return out[:N]


def grads(seed: int) -> Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed)) ** 3


ENDING = [
    Sketch(bits=2, share=0.5, total=6, **EXTRA),
    LowRank(rank=1, bits=2, share=0.5, total=6, **EXTRA),
    Sketch(bits=2, share=0.5, total=6, groups={"conv.bias": "fp32", "fc.*": 1}, **EXTRA),
]


@pytest.mark.parametrize("wire", ENDING, ids=repr)
def test_residuals_at_the_end_of_the_share_are_sent_once(wire: Any) -> None:
    worker, arrived, given = Worker(wire), torch.zeros(N), torch.zeros(N)
    for step in range(6):
        given += grads(step)
        how = worker.launch(grads(step))
        assert worker.compression.coding == (step < 3)
        assert isinstance(how, Encoded) == (step < 3)
        arrived += worker.bucket.flat[:N] if how is None else worker.send(how)
        if step == 2:
            assert (arrived - given).abs().max() > 0.1, "a lossless codec would not test it"
        if step >= 3:
            torch.testing.assert_close(arrived, given)
        if step >= 4:
            assert torch.equal(worker.bucket.flat[:N], grads(step))


def test_a_share_of_zero_is_dense_from_the_first_iteration() -> None:
    worker = Worker(Sketch(share=0.0, total=5, **EXTRA))
    for step in range(3):
        assert worker.launch(grads(step)) is None
        assert torch.equal(worker.bucket.flat[:N], grads(step))


def test_a_share_of_one_encodes_all_iterations() -> None:
    worker = Worker(Sketch(share=1.0, total=2, **EXTRA))
    assert all(isinstance(worker.launch(grads(step)), Encoded) for step in range(5))


def test_a_parameter_unused_at_the_switch_gets_its_residual_when_used() -> None:
    worker = Worker(Sketch(bits=1, share=0.5, total=2, **EXTRA))
    how = worker.launch(grads(0))
    left = grads(0) - worker.send(how)
    idle = slice(120, 127)
    assert worker.launch(grads(1), (True, False, True)) is None
    sent = worker.bucket.flat[:N].clone()
    assert not sent[idle].any()
    torch.testing.assert_close(sent[:120], (grads(1) + left)[:120])
    worker.launch(grads(2))
    torch.testing.assert_close(worker.bucket.flat[idle], (grads(2) + left)[idle])
    assert torch.equal(worker.bucket.flat[:120], grads(2)[:120])
    worker.launch(grads(3))
    assert torch.equal(worker.bucket.flat[:N], grads(3))


@pytest.mark.parametrize("feedback", [True, False])
def test_a_share_continues_after_loading(feedback: bool) -> None:
    wire = Sketch(bits=2, feedback=feedback, share=0.5, total=6, **EXTRA)
    before = Worker(wire)
    for step in range(2):
        before.send(before.launch(grads(step)))
    state = before.compression.state_dict()
    after = Worker(wire)
    after.compression.load_state_dict(state)
    assert isinstance(after.launch(grads(2)), Encoded)
    assert after.launch(grads(3)) is None


def test_a_run_without_residuals_sends_loaded_residuals_once() -> None:
    saved = Worker(Sketch(bits=2, **EXTRA))
    left = grads(0) - saved.send(saved.launch(grads(0)))
    wire = Sketch(feedback=False, share=0.5, total=9, **EXTRA)
    worker = Worker(wire)
    worker.compression.load_state_dict(saved.compression.state_dict())
    how = worker.launch(grads(1))
    assert isinstance(how, Encoded)
    assert how.residual is None
    torch.testing.assert_close(worker.bucket.flat[:N], grads(1) + left)
    worker.launch(grads(2))
    assert torch.equal(worker.bucket.flat[:N], grads(2))


# -- groups -------------------------------------------------------------------------------


def test_each_layer_is_encoded_by_its_group_and_flags_are_not() -> None:
    worker = Worker(Sketch(bits=3, groups={"fc.*": 6, "*.bias": "fp32"}, **EXTRA))
    how = worker.launch(grads(0))
    assert [(each.span, each.codec) for each in how.coding.regions] == [
        (Span(0, 120), SketchCodec(3)),
        (Span(120, 127), Dense()),
        (Span(127, N), SketchCodec(6)),
        (Span(N, worker.bucket.flat.numel()), Dense()),
    ]
    sent = worker.send(how)
    assert torch.equal(sent[120:127], grads(0)[120:127])
    assert not how.residual[120:127].any()
    coarse, fine = how.residual[:120].abs().mean(), how.residual[127:N].abs().mean()
    assert coarse > 2 * fine > 0


def test_a_bucket_of_dense_layers_alone_is_not_encoded() -> None:
    worker = Worker(Sketch(groups={"conv.*": "fp32", "fc.*": "fp32"}, **EXTRA))
    assert worker.launch(grads(0)) is None
    assert torch.equal(worker.bucket.flat[:N], grads(0))


def test_loaded_residuals_of_dense_layers_are_sent_once() -> None:
    saved = Worker(Sketch(bits=1, **EXTRA))
    left = grads(0) - saved.send(saved.launch(grads(0)))
    worker = Worker(Sketch(groups={"*": "fp32"}, feedback=True, **EXTRA))
    worker.compression.load_state_dict(saved.compression.state_dict())
    worker.launch(grads(1), (True, False, True))
    torch.testing.assert_close(worker.bucket.flat[:120], (grads(1) + left)[:120])
    worker.launch(grads(2))
    torch.testing.assert_close(worker.bucket.flat[120:127], (grads(2) + left)[120:127])
    assert torch.equal(worker.bucket.flat[:120], grads(2)[:120])
    worker.launch(grads(3))
    assert torch.equal(worker.bucket.flat[:N], grads(3))


@pytest.mark.parametrize(
    "wire", [Sketch(groups={"fc.*": 4, "cnov.*": 3}), TopK(groups={"fc": 0.5})], ids=repr
)
def test_a_pattern_that_matches_nothing_is_refused(wire: Any) -> None:
    with pytest.raises(UsageError, match="matches no trained parameter") as caught:
        Worker(wire)
    assert repr(wire.groups[-1][0]) in str(caught.value)
    assert "'conv.weight' to 'fc.weight'" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_float64_is_not_silently_sent_as_float32_in_a_dense_group() -> None:
    with pytest.raises(UsageError, match=r"'conv.bias' is float64, and \"fp32\" in a group"):
        Worker(Sketch(groups={"*.bias": "fp32"}), torch.float64)
    Worker(Sketch(groups={"*.bias": 8}), torch.float64)
    Worker(Half(), torch.float64)


def test_a_bucket_of_bf16_with_dense_layers_in_it_loses_nothing_of_them() -> None:
    worker = Worker(Sketch(bits=4, groups={"*.bias": "fp32"}, **EXTRA), torch.bfloat16)
    how = worker.launch(grads(0))
    assert torch.equal(worker.send(how)[120:127], grads(0)[120:127].bfloat16().float())


def replica(size: int) -> Replica:
    ranks = tuple(range(size))
    return Replica(0, 0, ranks, ("tp",), (None,), "cpu", (ranks,), Switchboard(), 0)


@pytest.mark.parametrize("wire", [Sketch(bits=2), LowRank(rank=2), TopK(warmup=0)], ids=str)
def test_parameter_that_several_ranks_of_a_replica_hold_is_not_encoded(wire: Any) -> None:
    """Its neighbours differ between these ranks, and so would what is sent for it."""
    shared, own = Worker(wire, inside=replica(2)), Worker(wire, inside=replica(1))
    assert own.launch(torch.ones(N)) is not None
    assert not own.compression.dense
    assert shared.launch(torch.ones(N)) is None
    assert shared.compression.dense == set(NAMES)


def test_momentum_correction_of_a_parameter_that_several_ranks_hold_is_refused() -> None:
    with pytest.raises(
        UsageError, match=r"several ranks of a replica hold 'conv.bias', .* write momentum=0"
    ):
        Worker(TopK(momentum=0.5), inside=replica(2))
