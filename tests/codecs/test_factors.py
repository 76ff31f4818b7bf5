"""Factors that are summed: PowerSGD's algorithm, and what is no matrix, no number or nothing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.amounts import examples
from wingbeat.codecs.lowrank import Factors, Matrix, Round, check_starts, fresh, restart
from wingbeat.errors import UsageError

WORKERS, ROWS, COLS, RANK = 3, 40, 60, 2
AHEAD, TAIL = 5, 7
LENGTH = AHEAD + ROWS * COLS + TAIL
WEIGHT = Matrix("weight", AHEAD, ROWS, COLS, RANK)


def exchange(factors: list[Factors], buffers: list[Tensor]) -> list[Round]:
    """What all-reduces would do, by adding."""
    rounds = [each.begin(buffer) for each, buffer in zip(factors, buffers, strict=True)]
    firsts = torch.stack([each.first for each in rounds]).sum(0)
    for each in rounds:
        each.first.copy_(firsts)
        each.compute_second()
    seconds = torch.stack([each.second for each in rounds]).sum(0)
    for each in rounds:
        each.second.copy_(seconds)
        each.keep_residual()
        each.write_result()
    return rounds


def workers(matrices: list[Matrix], length: int, size: int = WORKERS) -> list[Factors]:
    return [Factors(matrices, length, size, torch.zeros(length), {}) for _ in range(size)]


def inputs(steps: int, size: int = WORKERS, scale: float = 1.0) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(4)
    return [
        [torch.randn(LENGTH, generator=generator) * scale for _ in range(size)]
        for _ in range(steps)
    ]


def gram_schmidt(p: Tensor) -> Tensor:
    """Algorithm 1, line 5, of Vogels et al. (2019)."""
    columns: list[Tensor] = []
    for column in p.T:
        for before in columns:
            column = column - (before @ column) * before
        columns.append(column / column.norm())
    return torch.stack(columns).T


def powersgd(steps: list[list[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Algorithms 1 and 2 as they are written, in float64: each step's sum, and what it lacks."""
    q = fresh("weight", COLS, RANK).double()
    size = len(steps[0])
    memory = [torch.zeros(ROWS, COLS, dtype=torch.float64)] * size
    sums = []
    for step in steps:
        given = [WEIGHT.of(each).double() + lost for each, lost in zip(step, memory, strict=True)]
        p = gram_schmidt(torch.stack([each @ q for each in given]).mean(0))
        q = torch.stack([each.T @ p for each in given]).mean(0)
        memory = [each - p @ q.T for each in given]
        sums.append(size * (p @ q.T))
    return sums, torch.stack(memory).sum(0)


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e12])
def test_it_is_powersgd(scale: float) -> None:
    """Over several steps, from the same start; residuals differ, and their sum does not."""
    steps = inputs(6, scale=scale)
    wanted, lacking = powersgd(steps)
    each = workers([WEIGHT], LENGTH)
    for step, want in zip(steps, wanted, strict=True):
        buffers = [buffer.clone() for buffer in step]
        exchange(each, buffers)
        for buffer in buffers:
            torch.testing.assert_close(
                WEIGHT.of(buffer).double() / scale, want / scale, rtol=1e-5, atol=1e-5
            )
            beside = [buffer[:AHEAD], buffer[-TAIL:]]
            exact = torch.stack(step).sum(0)
            torch.testing.assert_close(torch.cat(beside), torch.cat([exact[:AHEAD], exact[-TAIL:]]))
    residual = sum(WEIGHT.of(f.residual) for f in each if f.residual is not None)
    torch.testing.assert_close(
        torch.as_tensor(residual).double() / scale, lacking / scale, rtol=1e-4, atol=1e-4
    )


@settings(deadline=None, max_examples=examples(30))
@given(
    size=st.integers(1, 4),
    shapes=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 5)), min_size=1, max_size=4
    ),
    gap=st.integers(0, 3),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_sums_and_residuals_make_up_what_was_given(size, shapes, gap, dtype) -> None:
    """Of any matrices, with or without something between them, and of any width."""
    matrices, start = [], gap
    for number, (rows, cols, rank) in enumerate(shapes):
        matrices.append(Matrix(str(number), start, rows, cols, min(rank, rows, cols)))
        start = matrices[-1].span.stop + gap
    each = workers(matrices, start, size)
    generator = torch.Generator().manual_seed(size)
    given = torch.zeros(start, dtype=torch.float64)
    got = torch.zeros(start, dtype=torch.float64)
    for _ in range(3):
        buffers = [torch.randn(start, generator=generator).to(dtype) for _ in range(size)]
        given += torch.stack(buffers).double().sum(0)
        exchange(each, buffers)
        assert all(torch.equal(buffer, buffers[0]) for buffer in buffers)
        got += buffers[0].double()
    left = torch.stack([f.residual for f in each if f.residual is not None]).double().sum(0)
    loose = 3e-1 if dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(got + left, given, rtol=loose, atol=loose)


def test_a_matrix_of_that_rank_arrives_whole() -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = torch.randn(ROWS, RANK, generator=generator), torch.randn(RANK, COLS)
    each = workers([WEIGHT], LENGTH, 1)
    buffer = torch.zeros(LENGTH)
    WEIGHT.of(buffer).copy_(left @ right)
    exchange(each, [buffer])
    torch.testing.assert_close(WEIGHT.of(buffer), left @ right, rtol=1e-4, atol=1e-4)
    assert each[0].residual is not None
    assert float(each[0].residual.abs().max()) < 1e-4


@pytest.mark.parametrize("wild", [float("inf"), float("-inf"), float("nan")])
def test_what_is_not_finite_arrives_as_nan_and_leaves_no_mark(wild: float) -> None:
    """As if that step, which a scaler skips, had not been; other matrices and workers too."""
    other = Matrix("other", LENGTH, 20, 20, 1)
    length = other.span.stop
    each = workers([WEIGHT, other], length)
    generator = torch.Generator().manual_seed(2)

    def step() -> list[Tensor]:
        return [torch.randn(length, generator=generator) for _ in range(WORKERS)]

    exchange(each, step())
    before = [f.residual.clone() for f in each if f.residual is not None]
    starts = each[0].starts[0].clone()
    spoilt = step()
    spoilt[1][AHEAD + 100] = wild
    exchange(each, spoilt)
    for f, buffer, was in zip(each, spoilt, before, strict=True):
        assert bool(WEIGHT.of(buffer).isnan().all())
        assert bool(other.of(buffer).isfinite().all())
        assert f.residual is not None
        assert torch.equal(WEIGHT.of(f.residual), WEIGHT.of(was))
        assert torch.equal(f.starts[0], starts)
        assert bool(f.residual.isfinite().all())
    after = step()
    exchange(each, after)
    assert bool(after[0].isfinite().all())


def test_a_matrix_that_is_zero_for_a_while_is_no_matrix_of_zeros_for_ever() -> None:
    each = workers([WEIGHT], LENGTH, 1)
    for _ in range(2):
        buffer = torch.zeros(LENGTH)
        exchange(each, [buffer])
        assert not bool(buffer.any())
    buffer = inputs(1, 1)[0][0]
    was = float(WEIGHT.of(buffer).norm())
    exchange(each, [buffer])
    assert float(WEIGHT.of(buffer).norm()) > 0.1 * was


def test_who_begins_with_other_factors_is_found_out() -> None:
    each = workers([WEIGHT], LENGTH)
    each[1].starts[0][3, 1] += 1e-3
    buffers = inputs(1)[0]
    rounds = exchange(each, buffers)
    assert [bool(r.agreed) for r in rounds] == [False] * WORKERS
    assert all(bool(WEIGHT.of(buffer).isnan().all()) for buffer in buffers)


def test_starts_move_with_their_parameters_and_are_made_anew_where_none_fits() -> None:
    starts: dict[str, Tensor] = {}
    first = Factors([WEIGHT], LENGTH, 1, None, starts)
    exchange([first], [inputs(1, 1)[0][0]])
    moved = Factors([Matrix("weight", 0, ROWS, COLS, RANK)], ROWS * COLS, 1, None, starts)
    assert torch.equal(moved.starts[0], first.starts[0])
    assert starts["weight"] is not first.starts[0]
    wider = Factors([Matrix("weight", 0, ROWS, COLS, 3)], ROWS * COLS, 1, None, starts)
    assert torch.equal(wider.starts[0], fresh("weight", COLS, 3))
    restart(starts, {"weight": torch.ones(COLS, 3), "later": torch.ones(4, 2)})
    assert torch.equal(wider.starts[0], torch.ones(COLS, 3))
    assert torch.equal(starts["later"], torch.ones(4, 2))
    restart(starts, {})
    assert torch.equal(wider.starts[0], fresh("weight", COLS, 3))


@pytest.mark.parametrize("starts", [3, {"a": 3}, {"a": torch.ones(3)}, {"a": torch.ones(2, 2) / 0}])
def test_damaged_starts_are_refused(starts) -> None:
    with pytest.raises(UsageError, match="where: starts is no dict of finite matrices"):
        check_starts({"starts": starts}, "where")


def test_bytes_are_those_of_two_factors_and_what_is_beside() -> None:
    factors = Factors([WEIGHT], LENGTH, 1)
    assert factors.nbytes == 4 * (RANK * (ROWS + COLS) + AHEAD + TAIL + 1)
