"""Codecs of averages: what they lose is owed once, whatever fails."""

from __future__ import annotations

import pytest
import torch

from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Bf16Codec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.topk import TopKCodec
from wingbeat.collectives import Encoded
from wingbeat.exchanges.average import GroupAverage
from wingbeat.exchanges.lossy import Lossy
from wingbeat.groups.generator import Run
from wingbeat.transport import failures, loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

NUMEL = 200


@pytest.fixture(autouse=True)
def _quick_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "ANSWER_TIMEOUT_S", 0.2)


def topk(owed: torch.Tensor, density: float = 0.1, bits: int = 32) -> Lossy:
    codec = TopKCodec(density, bits=bits)
    return Lossy(Coding([Region(Span(0, NUMEL), codec)]), owed, gathers=True)


def used(lossy: Lossy, part: Span) -> torch.Tensor:
    """Begin an average; return what of it is kept, and spoil that as an encoder does."""
    wire = lossy.begin(part)
    assert isinstance(wire, Encoded)
    assert wire.residual is not None
    before = wire.residual.clone()
    wire.residual.fill_(5.0)
    return before


def test_what_was_lost_is_owed_when_the_average_is_taken_over() -> None:
    owed = torch.arange(float(NUMEL))
    lossy, part = topk(owed), Span(10, 30)
    assert torch.equal(used(lossy, part), owed[10:30])
    lossy.made(part)
    assert torch.equal(owed, torch.arange(float(NUMEL)))
    lossy.taken()
    assert (owed[10:30] == 5.0).all()
    assert torch.equal(owed[30:], torch.arange(30.0, NUMEL))


def test_an_average_that_failed_owes_what_was_owed_before() -> None:
    owed = torch.ones(NUMEL)
    lossy, part = topk(owed), Span(0, NUMEL)
    for _ in range(2):
        assert torch.equal(used(lossy, part), torch.ones(NUMEL))
    lossy.taken()  # of an average of this worker alone, for which nothing was encoded
    assert torch.equal(owed, torch.ones(NUMEL))


def test_models_owe_at_once_and_get_it_back_before_all_meet() -> None:
    """Averages with several groups may follow each other before one is taken over."""
    owed, model = torch.ones(NUMEL), torch.zeros(NUMEL + 3)
    lossy = Lossy(Coding([Region(Span(0, NUMEL), Bf16Codec())]), owed, models=True)
    for before in (1.0, 5.0):
        assert (used(lossy, Span(0, NUMEL)) == before).all()
        lossy.made(Span(0, NUMEL))
    lossy.taken()
    assert (owed == 5.0).all()
    lossy.settle(model)
    assert not owed.any()
    assert model.tolist() == [5.0] * NUMEL + [0.0] * 3
    other = topk(torch.ones(NUMEL))
    other.settle(model)  # differences' is none of a model
    assert model[0] == 5.0


def test_members_that_go_on_without_one_send_the_same_again() -> None:
    board = loopback.Switchboard()

    def values(rank: int) -> torch.Tensor:
        return torch.randn(NUMEL, generator=torch.Generator().manual_seed(rank))

    def body(world: World) -> torch.Tensor | None:
        buffer, owed = values(world.rank), torch.zeros(NUMEL)
        averages = GroupAverage(world, buffer, topk(owed, bits=2))
        if world.rank == 2:
            averages.average(Run(0, 0, (0, 1, 2), 0), 1, lambda: True)
            board.fail(2)
            return None
        averages.average(Run(0, 0, (0, 1, 2), 0), 1, lambda: True)
        averages.wire.taken()
        buffer.copy_(values(world.rank))
        sent = owed.clone()
        assert averages.average(Run(1, 0, (0, 1, 2), 0), 1, lambda: True) == 2
        assert torch.equal(buffer, values(world.rank))
        assert averages.average(Run(1, 1, (0, 1), 0), 2, lambda: True) is None
        averages.wire.taken()
        averages.close()
        return torch.stack([buffer, owed - sent])

    found = loopback.run(loopback.worlds_on(board, 3), body)
    first, second = found[0], found[1]
    assert first is not None
    assert second is not None
    assert torch.equal(first[0], second[0])
    # What came, and what each still owes, is what the two have offered.
    whole = first[0] * 2 + first[1] + second[1]
    torch.testing.assert_close(whole, values(0) + values(1), rtol=1e-5, atol=1e-5)


def test_what_is_plain_travels_as_it_is() -> None:
    def body(world: World) -> torch.Tensor:
        buffer, owed = torch.full((NUMEL,), world.rank + 0.123456), torch.ones(NUMEL)
        averages = GroupAverage(world, buffer, topk(owed))
        averages.plain = True
        averages.average(Run(0, 0, (0, 1), 0), 1, lambda: True)
        averages.wire.taken()
        averages.close()
        assert (owed == 1).all()
        return buffer

    for found in loopback.run(loopback.worlds(2), body):
        torch.testing.assert_close(found, torch.full((NUMEL,), 0.623456))
