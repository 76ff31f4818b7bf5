"""Error feedback of compressed averages, also after failures."""

from __future__ import annotations

import pytest
import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Bf16Codec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.topk import TopKCodec
from wingbeat.collectives import Encoded
from wingbeat.methods.model_averaging.generator import Run
from wingbeat.methods.model_averaging.group_all_reduce import GroupAllReduce, ModelCompression
from wingbeat.transport import failures, loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

NUMEL = 200


@pytest.fixture(autouse=True)
def _quick_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", 0.2)


def topk(residual: torch.Tensor, density: float = 0.1, bits: int = 32) -> ModelCompression:
    codec = TopKCodec(density, bits=bits)
    return ModelCompression(Coding([Region(Span(0, NUMEL), codec)]), residual, gathers=True)


def used(compression: ModelCompression, part: Span) -> torch.Tensor:
    """Begin an average; return what of it is kept, and spoil that as an encoder does."""
    wire = compression.begin(part)
    assert isinstance(wire, Encoded)
    assert wire.residual is not None
    before = wire.residual.clone()
    wire.residual.fill_(5.0)
    return before


def test_residual_is_replaced_on_commit() -> None:
    residual = torch.arange(float(NUMEL))
    compression, part = topk(residual), Span(10, 30)
    assert torch.equal(used(compression, part), residual[10:30])
    compression.end(part)
    assert torch.equal(residual, torch.arange(float(NUMEL)))
    compression.commit()
    assert (residual[10:30] == 5.0).all()
    assert torch.equal(residual[30:], torch.arange(30.0, NUMEL))


def test_residual_is_kept_after_a_failed_average() -> None:
    residual = torch.ones(NUMEL)
    compression, part = topk(residual), Span(0, NUMEL)
    for _ in range(2):
        assert torch.equal(used(compression, part), torch.ones(NUMEL))
    compression.commit()  # of an average of this worker alone, for which nothing was encoded
    assert torch.equal(residual, torch.ones(NUMEL))


def test_residual_of_models_is_replaced_at_once_and_added_back() -> None:
    """Averages with several groups may follow each other before one is taken over."""
    residual, model = torch.ones(NUMEL), torch.zeros(NUMEL + 3)
    compression = ModelCompression(
        Coding([Region(Span(0, NUMEL), Bf16Codec())]), residual, models=True
    )
    for before in (1.0, 5.0):
        assert (used(compression, Span(0, NUMEL)) == before).all()
        compression.end(Span(0, NUMEL))
    compression.commit()
    assert (residual == 5.0).all()
    compression.add_residual(model)
    assert not residual.any()
    assert model.tolist() == [5.0] * NUMEL + [0.0] * 3
    other = topk(torch.ones(NUMEL))
    other.add_residual(model)  # differences' is none of a model
    assert model[0] == 5.0


def test_repeated_average_sends_the_same_again() -> None:
    board = loopback.Switchboard()

    def values(rank: int) -> torch.Tensor:
        return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))

    def body(world: World) -> torch.Tensor | None:
        buffer, residual = values(world.rank), torch.zeros(NUMEL)
        reducer = GroupAllReduce(world, buffer, topk(residual, bits=2))
        if world.rank == 2:
            reducer.average(Run(0, 0, (0, 1, 2), 0), 1, lambda: True)
            board.fail(2)
            return None
        reducer.average(Run(0, 0, (0, 1, 2), 0), 1, lambda: True)
        reducer.compression.commit()
        buffer.copy_(values(world.rank))
        sent = residual.clone()
        assert reducer.average(Run(1, 0, (0, 1, 2), 0), 1, lambda: True) == 2
        assert torch.equal(buffer, values(world.rank))
        assert reducer.average(Run(1, 1, (0, 1), 0), 2, lambda: True) is None
        reducer.compression.commit()
        reducer.close()
        return torch.stack([buffer, residual - sent])

    found = loopback.run(loopback.worlds(3, switchboard=board), body)
    first, second = found[0], found[1]
    assert first is not None
    assert second is not None
    assert torch.equal(first[0], second[0])
    # What came, and what each still owes, is what the two have offered.
    whole = first[0] * 2 + first[1] + second[1]
    torch.testing.assert_close(whole, values(0) + values(1), rtol=1e-5, atol=1e-5)


def test_uncompressed_average_ignores_the_codec() -> None:
    def body(world: World) -> torch.Tensor:
        buffer, residual = torch.full((NUMEL,), world.rank + 0.123456), torch.ones(NUMEL)
        reducer = GroupAllReduce(world, buffer, topk(residual))
        reducer.uncompressed = True
        reducer.average(Run(0, 0, (0, 1), 0), 1, lambda: True)
        reducer.compression.commit()
        reducer.close()
        assert (residual == 1).all()
        return buffer

    for found in loopback.run(loopback.worlds(2), body):
        torch.testing.assert_close(found, torch.full((NUMEL,), 0.623456))
