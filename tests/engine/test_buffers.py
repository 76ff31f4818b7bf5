"""Buffers follow the root's, and are never those of two moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wingbeat
from helpers import late
from helpers.training import TINY_MB, assert_same, on
from wingbeat.collectives import Collectives
from wingbeat.engine import buffers
from wingbeat.engine.buffers import (
    BufferSync,
    ByteBuffer,
    Spec,
    _parse,
    _serialise,
    broadcast_now,
)
from wingbeat.errors import UsageError
from wingbeat.transport import loopback
from wingbeat.transport.world import World

STRATEGIES = [wingbeat.AllReduce(mb=TINY_MB), wingbeat.DeAR(plan="fixed", mb=TINY_MB)]


def _mixed() -> list[Tensor]:
    return [
        torch.tensor([True, False, True]),
        torch.arange(5, dtype=torch.int64),
        torch.tensor(2.5, dtype=torch.float64),
        torch.randn(3, 2, generator=torch.Generator().manual_seed(1)).T,
        torch.empty(0, 4),
    ]


def test_bytes_hold_tensors_of_any_dtype_and_shape() -> None:
    tensors = _mixed()
    packed = ByteBuffer(tensors)
    packed.pack(tensors)
    others = [torch.zeros_like(t) for t in tensors]
    packed.unpack(others)
    for one, other in zip(tensors, others, strict=True):
        assert torch.equal(one, other)


def test_unpack_overwrites_only_unchanged_tensors() -> None:
    new, before = [torch.ones(2), torch.ones(2)], [torch.zeros(2), torch.zeros(2)]
    packed, where = ByteBuffer(new), ByteBuffer(before)
    packed.pack(new)
    where.pack(before)
    before[1][0] = 5.0
    packed.unpack(before, where)
    assert before[0].tolist() == [1.0, 1.0]
    assert before[1].tolist() == [5.0, 0.0]


def test_equality_compares_bits() -> None:
    tensors = [torch.tensor([float("nan"), 0.0]), torch.zeros(2, 3)]
    packed = ByteBuffer(tensors)
    packed.pack(tensors)
    assert packed.equal(tensors) == [True, True]
    assert packed.equal([torch.tensor([float("nan"), -0.0]), torch.zeros(2, 3)]) == [False, True]
    assert packed.equal([tensors[0], torch.zeros(3, 2)]) == [True, False]
    assert packed.equal([tensors[0].double(), None]) == [False, False]


@pytest.mark.parametrize("limit", [1, 20, 1 << 20])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast_in_batches_of_any_size_copies_the_roots_tensors(limit: int, root: int) -> None:
    def body(world: Any) -> list[Tensor]:
        tensors = [t.clone() if world.rank == root else torch.zeros_like(t) for t in _mixed()]
        broadcast_now(tensors, Collectives(world), root, limit)
        return tensors

    for tensors in on(3, body):
        for got, wanted in zip(tensors, _mixed(), strict=True):
            assert torch.equal(got, wanted)


class Holder(nn.Module):
    """Buffers with names that occur twice, one shared, one absent."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.register_buffer("seen", torch.full((2,), value))
        self.register_buffer("mine", torch.full((2,), value))
        self.register_buffer("none", None)
        self.inner.register_buffer("mine", torch.full((2,), value))
        self.inner.register_buffer("again", self.seen)


def test_a_missing_tensor_equals_nothing_and_leaves_the_others_comparable() -> None:
    packed = ByteBuffer([torch.ones(2), torch.ones(3)])
    packed.pack([torch.ones(2), torch.ones(3)])
    assert packed.equal([None, torch.ones(3)]) == [False, True]
    assert packed.equal([None, torch.zeros(3)]) == [False, False]
    assert packed.equal([torch.ones(2), torch.ones(3)]) == [True, True]


def test_a_buffer_replaced_or_moved_changes_the_contents() -> None:
    model = nn.Sequential(nn.BatchNorm1d(2), nn.BatchNorm1d(2))
    contents = buffers._Contents(model)
    assert contents.have_changed()
    assert not contents.have_changed()
    model[0].running_mean = torch.zeros(2)
    assert contents.have_changed()
    model.register_module("late", nn.BatchNorm1d(2))
    assert contents.have_changed()
    model[1].register_buffer("more", torch.zeros(1))
    assert contents.have_changed()
    moved = model[0]._buffers.pop("num_batches_tracked")
    model[1]._buffers = {"num_batches_tracked": moved, **model[1]._buffers}
    assert contents.have_changed()
    assert not contents.have_changed()


def test_ignored_buffers_are_named_in_full() -> None:
    def body(world: Any) -> list[float]:
        holder = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, {"mine"}, Collectives(world))
        assert holder in buffers.owners()
        assert nn.BatchNorm1d(2) not in buffers.owners()
        buffers.request(0)
        buffers.apply()
        return [float(b[0]) for b in (holder.seen, holder.mine, holder.inner.mine)]

    assert on(2, body) == [[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]]


def test_status_comes_from_the_requested_root() -> None:
    """After `join` has changed the root, also where nothing has been sent by it before."""

    def body(world: Any) -> list[float]:
        holder = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, (), Collectives(world))
        found = []
        for root in (0, 2):
            holder.seen.fill_(10.0 * root + world.rank)
            buffers.start(root)
            buffers.request(root)
            buffers.apply()
            found.append(float(holder.seen[0]))
        holder.seen.fill_(50.0 + world.rank)
        buffers.request(1)
        buffers.apply()
        return [*found, float(holder.seen[0])]

    assert on(3, body) == [[0.0, 22.0, 51.0]] * 3


def test_buffers_after_a_backward_come_from_its_root() -> None:
    """Also if it is another one than that of the forward before."""

    def body(world: Any) -> list[float]:
        holder = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, (), Collectives(world))
        found = []
        for root in (0, 2, 1):
            holder.seen.fill_(10.0 * root + world.rank)
            buffers.start(root)
            buffers.apply()
            found.append(float(holder.seen[0]))
        return found

    assert on(3, body) == [[0.0, 22.0, 11.0]] * 3


class Seeing(nn.Module):
    """Counts its forwards, in another way on each rank; has a hook from before `distribute`."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("count", torch.zeros(1))
        self.rank = rank
        self.told: list[float] = []
        self.register_forward_pre_hook(lambda *_: self.told.append(float(self.count)))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1 + self.rank
        return self.weight * x


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_hooks_of_the_user_see_buffers_that_are_synchronised(strategy: Any) -> None:
    """As under DDP, which synchronises before it calls the model."""

    def body(world: Any) -> list[float]:
        model = Seeing(world.rank)
        told = model.told
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2)).sum().backward()
            with torch.no_grad():  # so that the background has nothing to give
                model.count += world.rank
            optimizer.step()
        return told

    assert on(2, body) == [[0.0, 1.0, 2.0]] * 2


def test_ignored_buffers_may_differ() -> None:
    """In shape, too."""

    def body(world: Any) -> list[float]:
        model: Any = nn.Linear(2, 2)
        model.register_buffer("mine", torch.full((1 + world.rank,), float(world.rank)))
        ignore = nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model
        ignore(model, ["mine"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = wingbeat.distribute(model, optimizer, STRATEGIES[0], world=world)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        model.synchronize()
        found: list[float] = model.mine.tolist()
        return found

    assert on(2, body) == [[0.0], [1.0, 1.0]]


@pytest.mark.parametrize("new", [torch.zeros(3), torch.zeros(2, dtype=torch.float64)])
def test_a_buffer_may_be_given_a_tensor_of_another_shape_or_dtype(new: Tensor) -> None:
    def body(world: Any) -> list[Tensor]:
        holder: Any = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, (), Collectives(world))
        buffers.start(0)
        buffers.request(0)
        buffers.apply()
        found = []
        for value in (4.0, 6.0):
            holder.mine = new + value + world.rank / 3
            buffers.start(0)
            buffers.request(0)
            buffers.apply()
            found.append(holder.mine)
        return found

    for first, second in on(2, body):
        assert_same([first, second], [new + 4.0, new + 6.0])


def test_buffers_written_after_a_backward_stay_until_the_next_forward() -> None:
    def body(world: Any) -> list[float]:
        holder = Holder(1.0)
        buffers = BufferSync(holder, (), Collectives(world))
        holder.seen.fill_(2.0 + world.rank)
        buffers.start(0)
        holder.seen.fill_(7.0 + world.rank)
        buffers.apply()
        here = float(holder.seen[0])
        buffers.request(0)
        buffers.apply()
        return [here, float(holder.seen[0])]

    assert on(2, body) == [[7.0, 7.0], [8.0, 7.0]]


def test_two_backwards_send_one_after_the_other() -> None:
    """The second must not write into what the links may still be reading."""

    def body(world: Any) -> float:
        holder = Holder(1.0)
        collectives = Collectives(world)
        buffers = BufferSync(holder, (), collectives)
        handles: list[Spied] = []
        send = collectives.broadcast

        def broadcast(*args: Any, **kwargs: Any) -> Any:
            assert all(handle.waited for handle in handles)
            handles.append(Spied(send(*args, **kwargs)))
            return handles[-1]

        collectives.broadcast = broadcast  # type: ignore[method-assign]
        for value in (2.0, 3.0):
            holder.seen.fill_(value if world.rank == 0 else 1.0)
            buffers.start(0)
        buffers.apply()
        assert all(handle.waited for handle in handles)
        return float(holder.seen[0])

    assert on(2, body) == [3.0, 3.0]


class Spied:
    """A handle that notes that somebody has waited for it."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle
        self.waited = False

    def wait(self) -> None:
        self._handle.wait()
        self.waited = True


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["allreduce", "dear"])
def test_running_statistics_after_two_backwards_of_one_forward_are_updated_once(
    strategy: Any,
) -> None:
    def body(world: Any) -> list[Tensor]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = wingbeat.distribute(model, optimizer, strategy, world=world)
        for step in range(3):
            rng = torch.Generator().manual_seed(10 * step + world.rank)
            loss = model(torch.randn(4, 3, generator=rng)).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        model.synchronize()
        return [b.detach().clone() for b in model.buffers()]

    with late.open_worlds(2) as (members, _):
        first, second = loopback.run(members, body)
    alone = nn.BatchNorm1d(3)
    for step in range(3):
        alone(torch.randn(4, 3, generator=torch.Generator().manual_seed(10 * step)))
    for one, other, wanted in zip(first, second, alone.buffers(), strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, wanted)


@pytest.mark.parametrize("act", [lambda b: b.start(), lambda b: b.request(0), lambda b: b.apply()])
def test_without_buffers_nothing_is_exchanged(act: Callable[[BufferSync], None]) -> None:
    def body(world: Any) -> None:
        buffers = BufferSync(nn.Linear(2, 2), (), Collectives(world))
        assert buffers.channel is None
        act(buffers)

    on(2, body)


def _taken_over(change: Callable[[Any, int], None]) -> list[Any]:
    """What a worker's inner buffer is, or why it is refused, after a forward of each begins."""

    def body(world: Any) -> Any:
        holder: Any = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, (), Collectives(world))
        change(holder, world.rank)
        try:
            for _ in range(2):
                buffers.request(0)
                buffers.apply()
        except UsageError as err:
            return str(err)
        return [float(v) for v in holder.inner.mine] + [float(v) for v in holder.mine]

    found: list[Any] = on(2, body)
    return found


def test_a_persistent_buffer_of_another_shape_becomes_rank_zeros() -> None:
    def change(holder: Any, rank: int) -> None:
        holder.inner.mine = torch.full((2 + rank,), 5.0 + rank)

    assert _taken_over(change) == [[5.0, 5.0, 1.0, 1.0]] * 2


@pytest.mark.parametrize("longer", [0, 1])
def test_a_buffer_of_another_shape_that_is_not_persistent_stays(longer: int) -> None:
    def change(holder: Any, rank: int) -> None:
        value = torch.full((2 + (rank == longer),), 5.0 + rank)
        holder.inner.register_buffer("mine", value, persistent=False)

    first, second = _taken_over(change)
    assert first == [5.0] * (2 + (longer == 0)) + [1.0, 1.0]
    assert second == [6.0] * (2 + (longer == 1)) + [1.0, 1.0]


def test_a_buffer_that_only_rank_zero_has_made_is_registered_by_all() -> None:
    def change(holder: Any, rank: int) -> None:
        del holder.inner.mine
        if rank == 0:
            holder.inner.register_buffer("mine", torch.full((3,), 7.0))
        else:
            holder.inner.register_buffer("mine", None)

    assert _taken_over(change) == [[7.0, 7.0, 7.0, 1.0, 1.0]] * 2


def test_a_persistent_buffer_that_rank_zero_has_not_is_refused_by_name_and_shape() -> None:
    def change(holder: Any, rank: int) -> None:
        if rank == 1:
            holder.inner.register_buffer("extra", torch.zeros(4, 3))

    _, second = _taken_over(change)
    assert second == (
        "buffer 'inner.extra': rank 1 has one of shape (4, 3), and rank 0 has none: make it in the "
        "same forward on all ranks, or register it with persistent=False if each worker has its own"
    )


def test_a_buffer_that_got_its_tensor_on_another_rank_only_is_refused() -> None:
    def change(holder: Any, rank: int) -> None:
        if rank == 1:
            holder.none = torch.zeros(4)

    _, second = _taken_over(change)
    assert second.startswith("buffer 'none': rank 1 has one of shape (4,), and rank 0 has none")


def test_a_buffer_that_has_no_place_on_another_rank_is_refused_by_name_and_shape() -> None:
    def change(holder: Any, rank: int) -> None:
        if rank == 0:
            holder.inner.register_buffer("extra", torch.zeros(4, 3))
        else:
            holder.inner.extra = "no buffer"

    _, second = _taken_over(change)
    assert "buffer 'inner.extra': rank 0 has one of shape (4, 3), and rank 1 no place" in second
    assert "already exists" in second


def test_buffers_replaced_by_a_forward_invalidate_the_broadcast_after_backward() -> None:
    def body(world: Any) -> list[float]:
        holder: Any = Holder(1.0)
        buffers = BufferSync(holder, (), Collectives(world))
        holder.seen.fill_(3.0 + world.rank)
        if world.rank == 0:
            holder.mine = torch.zeros(5)
        buffers.start(0)
        buffers.apply()
        kept = float(holder.seen[0])
        buffers.request(0)
        buffers.apply()
        return [kept, float(holder.seen[0]), len(holder.mine)]

    assert on(2, body) == [[3.0, 3.0, 5.0], [4.0, 3.0, 5.0]]


def test_level_copies_shapes_too() -> None:
    def body(world: Any) -> list[float]:
        holder: Any = Holder(1.0 + world.rank)
        buffers = BufferSync(holder, (), Collectives(world), lockstep=False)
        holder.mine = torch.full((2 + world.rank,), 5.0 + world.rank)
        buffers.level()
        return [*holder.mine.tolist(), float(holder.seen[0])]

    assert on(2, body) == [[5.0, 5.0, 1.0]] * 2


LAYOUT = '[[["seen","float32",[2],true]],["seen"]]'


@pytest.mark.parametrize(
    "said",
    [
        "{}",
        "no json",
        "[[],[],[]]",
        LAYOUT.replace("float32", "load"),
        LAYOUT.replace('"float32"', "32"),
        LAYOUT.replace("[2]", "[-2]"),
        LAYOUT.replace("[2]", "[2.0]"),
        LAYOUT.replace("[2]", "2"),
        LAYOUT.replace("true", "1"),
        LAYOUT.replace('["seen"]', '["other"]'),
        LAYOUT.replace('["seen"]', "[1]"),
        "[" * 100_000,
    ],
)
def test_a_malformed_list_of_buffers_is_refused(said: str) -> None:
    with pytest.raises(ValueError, match="tensor"):
        _parse(torch.tensor(list(said.encode()), dtype=torch.uint8))


def test_a_serialised_layout_parses_to_the_same() -> None:
    specs = [Spec("seen", torch.float32, (2,), True), Spec("n", torch.bool, (), False)]
    names = frozenset({"seen", "n", "again"})
    assert _parse(_serialise(specs, names)) == (specs, names)


def test_a_larger_model_is_not_searched_for_buffers_more_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A search goes through the whole model: one for each module made `distribute` take 14 s."""
    searches: list[str] = []
    search = buffers._places

    def counted(model: nn.Module, ignored: Collection[str]) -> Iterator[buffers.Place]:
        searches.append(model._get_name())
        return search(model, ignored)

    monkeypatch.setattr(buffers, "_places", counted)

    def made_of(layers: int) -> int:
        searches.clear()

        def body(world: World) -> None:
            model = nn.Sequential(*(nn.BatchNorm1d(3) for _ in range(layers)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            wingbeat.release(
                *wingbeat.distribute(model, optimizer, wingbeat.AllReduce(), world=world)
            )

        on(2, body)
        return len(searches)

    assert made_of(20) == made_of(2) > 0
