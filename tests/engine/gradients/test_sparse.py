"""Sparse gradients among workers that end early, fail, have nothing, or send what cannot be."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers.training import on
from wingbeat.collectives import Collectives, Rows
from wingbeat.engine.gradients.bucket import StepCounter
from wingbeat.engine.gradients.sparse import SparseGradients
from wingbeat.errors import PeerError, UsageError

STRATEGIES = [wingbeat.AllReduce(), wingbeat.DeAR()]
ROWS, WIDTH = 10, 3
Values = dict[str, Tensor]


def first() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 2))


def made(world: Any, strategy: Any, model: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    return wingbeat.distribute(model, optimizer, strategy, world=world)


def batch(step: int, rank: int) -> Tensor:
    return torch.randint(
        0, ROWS, (2 + rank,), generator=torch.Generator().manual_seed(10 * step + rank)
    )


def plainly(model: Any, steps: list[list[int]], size: int = 2) -> Values:
    """One process makes each step on the batches of these ranks."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    for step, ranks in enumerate(steps):
        optimizer.zero_grad()
        for rank in ranks:
            (model(batch(step, rank)).square().mean() / size).backward()
        optimizer.step()
    return values(model)


def values(model: Any) -> Values:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_all(found: list[Values], wanted: Values) -> None:
    for each in found:
        for name, value in wanted.items():
            assert torch.equal(each[name], found[0][name]), name
            torch.testing.assert_close(each[name], value)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_join_with_sparse_gradients_counts_a_worker_without_batches_as_no_rows(
    strategy: Any,
) -> None:
    model = first()

    def body(world: Any) -> Values:
        mine, optimizer = made(world, strategy, model)
        with mine.join():
            for step in range(2 + 2 * world.rank):
                optimizer.zero_grad()
                mine(batch(step, world.rank)).square().mean().backward()
                optimizer.step()
        return values(mine)

    assert_all(on(2, body), plainly(model, [[0, 1], [0, 1], [1], [1]]))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_two_models_may_end_one_backward_in_another_order_on_each_worker(strategy: Any) -> None:
    models = first(), first()

    def body(world: Any) -> Values:
        pairs = [made(world, strategy, model) for model in models]
        for step in range(3):
            losses = []
            for model, optimizer in pairs if world.rank else pairs[::-1]:
                optimizer.zero_grad()
                losses.append(model(batch(step, world.rank)).square().mean())
            torch.autograd.backward(losses)
            for _, optimizer in pairs:
                optimizer.step()
        assert all(torch.equal(a, b) for a, b in zip(*map(_listed, pairs), strict=True))
        return values(pairs[0][0])

    assert_all(on(2, body), plainly(models[0], [[0, 1]] * 3))


def _listed(pair: tuple[Any, Any]) -> list[Tensor]:
    return list(values(pair[0]).values())


@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_a_backward_that_is_cut_short_leaves_no_rows(strategy: Any, ranks: Any) -> None:
    model = first()

    def body(world: Any) -> Values:
        mine, optimizer = made(world, strategy, model)

        def cut(_: Tensor) -> None:
            if world.rank in ranks:
                raise ValueError("cut")

        handle = mine[0].weight.register_hook(cut)
        expected = pytest.raises(ValueError, match="cut")
        with expected if world.rank in ranks else contextlib.nullcontext():
            mine(batch(9, world.rank)).square().mean().backward()
        handle.remove()
        for step in range(3):
            optimizer.zero_grad()
            mine(batch(step, world.rank)).square().mean().backward()
            optimizer.step()
        return values(mine)

    assert_all(on(2, body), plainly(model, [[0, 1]] * 3))


def test_gradients_without_rows_on_all_workers_are_sparse_and_empty() -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True))

    def body(world: Any) -> Tensor:
        mine, _ = made(world, wingbeat.AllReduce(), model)
        mine(torch.zeros(0, dtype=torch.int64)).sum().backward()
        grad: Tensor = mine[0].weight.grad
        return grad

    for grad in on(2, body):
        assert grad.is_sparse
        assert grad.coalesce().values().shape == (0, WIDTH)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sparse_gradient_of_another_dtype_keeps_it(dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True).to(dtype))

    def body(world: Any) -> Tensor:
        mine, _ = made(world, wingbeat.AllReduce(), model)
        mine(torch.tensor([world.rank, 4, 4])).sum().backward()
        grad: Tensor = mine[0].weight.grad
        return grad

    for grad in on(2, body):
        assert grad.dtype is dtype
        assert grad.to_dense()[:, 0].tolist() == [0.5, 0.5, 0, 0, 2, 0, 0, 0, 0, 0]


def _against(told: list[float], payload: list[int]) -> str:
    """Return what rank 0 raises, where rank 1 has told this and sends these bytes."""
    table = nn.Parameter(torch.zeros(ROWS, WIDTH))
    table.grad = torch.ones(ROWS, WIDTH).to_sparse(1)

    def body(world: Any) -> str:
        collectives = Collectives(world, "ring")
        if world.rank:
            Rows(collectives, told, "the sizes of sparse gradients").wait()
            if payload:
                # As long as rank 0's, which has all rows.
                sent = torch.zeros(2, ROWS * (8 + 4 * WIDTH), dtype=torch.uint8)
                sent[1, : len(payload)] = torch.tensor(payload, dtype=torch.uint8)
                collectives.all_gather(sent.view(-1), label="sparse gradients").wait()
            return ""
        sparse = SparseGradients({"table": table}, collectives, StepCounter(world.rank))
        sparse.start(0.5, shadowing=False)

        def exchange() -> None:
            sparse.send()
            sparse.show()

        with pytest.raises(PeerError) as caught:
            exchange()
        return str(caught.value)

    return on(2, body)[0]


@pytest.mark.parametrize(
    ("told", "payload"),
    [
        ([0, 1, ROWS + 1], []),
        ([0, 1, -1], []),
        ([0, 0, 1], []),
        ([0, 7, 1], []),
        ([0, 1, 1], [ROWS] + 7 * [0] + 4 * WIDTH * [0]),
        ([0, 1, 1], 8 * [255] + 4 * WIDTH * [0]),
    ],
)
def test_rows_that_the_table_does_not_have_are_refused_by_rank_and_name(
    told: list[float], payload: list[int]
) -> None:
    said = _against(told, payload)
    assert "rank 1 sent" in said
    assert "'table'" in said


def by_elements(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.to_dense().to_sparse(2)


def test_a_layout_that_is_not_by_rows_is_refused_by_name() -> None:
    model = first()

    def body(world: Any) -> str:
        mine, _ = made(world, wingbeat.AllReduce(), model)
        loss = mine(batch(0, world.rank)).square().mean()
        mine[0].weight.register_post_accumulate_grad_hook(by_elements)
        with pytest.raises(UsageError, match=r"'0.weight' has the layout .*sparse=False") as caught:
            loss.backward()
        return str(caught.value)

    on(2, body)
