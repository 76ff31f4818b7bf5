"""Canary's Table 3 by hand: collectives in cubes, and the index of a model in training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import wingbeat
from wingbeat.errors import UsageError
from wingbeat.session import CanarySession
from wingbeat.transport import loopback
from wingbeat.transport.world import World


def on(size: int, body: Callable[[World], Any], interfaces: int = 1) -> list[Any]:
    members = loopback.worlds(size, interfaces=interfaces)
    try:
        return loopback.run(members, body)
    finally:
        for world in members:
            world.close()


@pytest.mark.parametrize("interfaces", [1, 2])
@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_all_workers_and_cubes_reduce(interfaces: int, pieces: int) -> None:
    def body(world: World) -> Any:
        high, low = divmod(world.rank, 3)
        with CanarySession((high, low), world=world) as session:
            tensor = torch.full((2, 7), float(world.rank))
            whole = session.all_reduce(tensor, piece_level=pieces)
            assert whole is tensor
            row = session.all_reduce(torch.tensor([float(world.rank)]), (0, high), pieces)
            column = session.all_reduce(torch.tensor([float(world.rank)]), (1, low), pieces)
            return whole.unique().tolist(), float(row), float(column)

    for rank, (whole, row, column) in enumerate(on(9, body, interfaces)):
        high, low = divmod(rank, 3)
        assert whole == [36.0]
        assert row == 9.0 * high + 3
        assert column == 3.0 * low + 9


@pytest.mark.parametrize("pieces", [1, 3])
def test_tensors_are_gathered_in_the_order_of_ports(pieces: int) -> None:
    def body(world: World) -> Any:
        with CanarySession((world.rank // 2, world.rank % 2), world=world) as session:
            mine = (10 * world.rank + torch.arange(6)).view(2, 3)
            column = session.all_gather(mine, (1, world.rank % 2), pieces)
            return session.all_gather(mine, pieces=pieces), column

    for rank, (whole, column) in enumerate(on(4, body)):
        expected = torch.stack([(10 * each + torch.arange(6)).view(2, 3) for each in range(4)])
        assert torch.equal(whole, expected)
        assert torch.equal(column, expected[[rank % 2, rank % 2 + 2]])


def test_tensors_of_all_kinds() -> None:
    """What needs a gradient, as parameters do, what is empty, and a cube in a list."""

    def body(world: World) -> Any:
        with CanarySession([world.rank], world=world) as session:
            param = nn.Parameter(torch.ones(3))
            assert session.all_reduce(param, piece_level=2) is param
            gathered = session.all_gather(param, [0, 0], pieces=2)  # type: ignore[arg-type]
            empty = session.all_gather(torch.ones(0, 4))
        with pytest.raises(UsageError, match="the cubes of this session are closed"):
            session.all_reduce(torch.ones(1), (0, 0))
        assert session.all_reduce(torch.ones(1)) == 2.0
        return param.tolist(), gathered.tolist(), empty.shape

    assert on(2, body) == [([2.0] * 3, [[2.0] * 3] * 2, (2, 0, 4))] * 2


def test_what_is_not_contiguous_is_reduced_in_place() -> None:
    def body(world: World) -> Any:
        tensor = torch.full((3, 2), 1.0 + world.rank).t()
        CanarySession(world=world).all_reduce(tensor)
        return tensor.unique().tolist()

    assert on(2, body) == [[3.0], [3.0]]


def test_a_second_session_has_cubes_of_its_own() -> None:
    def body(world: World) -> Any:
        for _ in range(3):
            with CanarySession((world.rank // 2, world.rank % 2), world=world) as session:
                found = float(session.all_reduce(torch.ones(1), (0, world.rank // 2)))
        return found

    assert on(4, body) == [2.0] * 4


def test_a_worker_alone_has_everything() -> None:
    (world,) = loopback.worlds(1)
    session = CanarySession(world=world)
    assert session.all_reduce(torch.ones(2)).tolist() == [1.0, 1.0]
    assert session.all_gather(torch.ones(2)).tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s, w: s.all_reduce(torch.ones(1), (2, 0)), "levels 0 to 1 and cubes 0 to 1"),
        (lambda s, w: s.all_reduce(torch.ones(1), (0, 1 - w.rank // 2)), "which is in \\(0, "),
        (lambda s, w: s.all_reduce(torch.ones(1), piece_level=0), "piece_level=0: allowed"),
        (lambda s, w: s.all_gather(torch.ones(1), pieces=True), "pieces=True: allowed"),
        (lambda s, w: s.all_reduce(torch.ones(1), 0), "cube_id=0: allowed are whole numbers"),
        (lambda s, w: s.all_reduce(torch.ones(1), (0, "a")), "cube_id=.* allowed are whole"),
        (lambda s, w: s.all_gather(torch.ones(1), (0, 0, 0)), "cube_id=.*allowed are 2 whole"),
        (lambda s, w: s.all_reduce([1.0]), "tensor=list: allowed is a torch.Tensor"),
        (lambda s, w: s.all_gather(torch.eye(2).to_sparse()), "layout torch.sparse_coo on cpu"),
        (lambda s, w: s.all_reduce(torch.ones(2, device="meta")), "torch.strided on meta"),
        (lambda s, w: s.all_reduce(torch.ones(1).expand(3)), r"pass tensor.clone\(\)"),
        (lambda s, w: s.calc_proportion(3), "row=3: allowed are whole numbers"),
        (lambda s, w: s.check_staleness(1.5, 2), "staleness=1.5: allowed are whole numbers"),
        (lambda s, w: s.check_staleness(1, "2"), "threshold='2': allowed are whole numbers"),
        (lambda s, w: s.check_proportion(True, 1), "proportion=True: allowed are whole"),
        (lambda s, w: CanarySession(3, world=w), "worker_id=3: allowed are whole numbers"),  # type: ignore[arg-type]
        (lambda s, w: CanarySession(model="m", world=w), r"CanarySession\(model=str\): allowed"),  # type: ignore[arg-type]
        (lambda s, w: s.gei_matrix(), "without a model has no index"),
        (lambda s, w: CanarySession((1 - w.rank // 2, 0), world=w), "leave it out, or start"),
        (lambda s, w: CanarySession(model=nn.Linear(1, 1), world=w), "wingbeat.Canary"),
    ],
)
def test_wrong_arguments_are_refused(call: Callable[[Any, World], Any], said: str) -> None:
    def body(world: World) -> None:
        session = CanarySession((world.rank // 2, world.rank % 2), world=world)
        with pytest.raises(UsageError, match=said):
            call(session, world)

    on(4, body)


def test_the_index_of_a_model_in_training() -> None:
    def body(world: World) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        # Nobody is ahead; with a p a step applies rounds, so that a backward has only been sent.
        strategy = wingbeat.Canary(s=0, p=2, colayers=3, encrypted=False)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        session = CanarySession(model=model, world=world)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
        own = session.gei_row_vector()
        for value in (0.5, "0"):
            with pytest.raises(UsageError, match=r"iteration=.*: allowed are whole numbers"):
                session.calc_staleness(value)  # type: ignore[arg-type]
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.ones(1, 3)).sum())
        sent = session.gei_row_vector()
        assert len(sent) == 2, "the colayers alone, not what carries options"
        found = (
            session.calc_staleness(), session.calc_staleness(0),
            session.calc_proportion(own), session.calc_proportion(sent), session.gei_matrix(),
        )  # fmt: skip
        with pytest.raises(UsageError, match="rows 3 to "):
            session.gei_row_vector(0)
        optimizer.step()
        wingbeat.release(model, optimizer)
        return found

    for staleness, first, before, after, matrix in on(2, body):
        assert staleness in (0, 1)  # the other may want the next already
        assert first == staleness + 3
        assert (before, after) == (0, 2)
        assert set(matrix) in ({3}, {3, 4})


def test_thresholds() -> None:
    (world,) = loopback.worlds(1)
    session = CanarySession(world=world)
    assert session.check_staleness(18, 18)
    assert not session.check_staleness(19, 18)
    assert session.check_staleness(10**6, None)
    assert session.check_proportion(6, 6)
    assert not session.check_proportion(5, 6)
