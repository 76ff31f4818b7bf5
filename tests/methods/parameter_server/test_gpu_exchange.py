"""`GpuServerExchange` on CPUs: collectives of torch.distributed groups, one for each class."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

import wingbeat
import wingbeat_lab
from helpers.pool import Pool
from wingbeat import transport
from wingbeat.errors import UsageError
from wingbeat.methods.parameter_server.exchange import GpuServerExchange
from wingbeat.methods.parameter_server.options import Servers
from wingbeat.schedules.events import Operation
from wingbeat.transport.nccl import NcclGroup, nccl_group


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool(3)
    yield made
    made.close()


def trained(strategy: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer = wingbeat.distribute(model, optimizer, strategy)
    rank = torch.distributed.get_rank()
    for step in range(6):
        inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(inputs).square().mean()
        if step == 2:  # dropped, and made anew
            loss.backward()
            optimizer.zero_grad()
            loss = model(inputs).square().mean()
        loss.backward()
        if step == 4:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = [p.detach().clone() for p in model.parameters()]
    wingbeat.release(model, optimizer)
    return weights


def trains_as_all_reduce_does() -> None:
    world = wingbeat.init(timeout=20)
    want = trained(wingbeat.AllReduce())
    made: list[int | None] = []

    def make(traffic_class: int | None) -> NcclGroup:
        made.append(traffic_class)
        return NcclGroup(torch.distributed.new_group(), world.rank, world.size)

    world.make_nccl_group, world.nccl_devices = make, frozenset({"cpu"})
    for pull in ("ready", "start"):
        got = trained(wingbeat.Geryon(pull=pull, mb=0.00005, threshold=0.3))
        assert all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True)
        )
    # Buffers go by the usual one; the urgent class is EF.
    assert set(made) - {None} == {0xB8, 0x00}, made
    # What GPUs do not serve is served by processes on the host.
    for other in (wingbeat_lab.VanillaPS(), wingbeat.Geryon(update="server", encrypted=False)):
        got = trained(other)
        assert all(
            torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(got, want, strict=True)
        )
    wingbeat.shutdown()


def test_training_equals_all_reduce(pool: Pool) -> None:
    pool.run(trains_as_all_reduce_does)


class Recorded:
    """Writes down what is begun in which class."""

    def __init__(self, log: list[tuple[str, int | None]], traffic_class: int | None) -> None:
        self._log, self._class = log, traffic_class

    def __getattr__(self, name: str) -> Any:
        def begin(_buffer: torch.Tensor) -> Any:
            self._log.append((name, self._class))
            return SimpleNamespace(wait=lambda: self._log.append(("waited", self._class)))

        return begin


def exchange(servers: Servers) -> tuple[GpuServerExchange, list[Any], list[tuple[str, int | None]]]:
    log: list[tuple[str, int | None]] = []
    world = transport.World(0, 1, (), (), 1.0, dist.HashStore())
    world.make_nccl_group = lambda traffic_class: Recorded(log, traffic_class)  # type: ignore[assignment,return-value]
    world.nccl_devices = frozenset({"cpu"})
    flat = torch.zeros(2)
    buckets: list[Any] = [
        SimpleNamespace(index=i, flat=flat, handle=None, slots=[], names=[f"layer{i}.weight"])
        for i in range(4)
    ]
    made = GpuServerExchange(world, servers)
    made.planned(buckets, buckets)
    return made, buckets, log


@pytest.mark.parametrize(("pushes", "pushed"), [(True, 0xB8), (False, 0)])
def test_start_uses_group_of_class(pushes: bool, pushed: int) -> None:
    made, (first, *_, last), log = exchange(Servers(pushes=pushes))
    made.start(Operation.PUSH, first)
    made.start(Operation.PULL, first)
    made.start(Operation.ALL_REDUCE, last)
    assert log == [
        ("reduce_scatter", pushed),
        ("waited", pushed),
        ("all_gather", 0xB8),
        ("all_reduce", 0),
    ]


def test_start_without_classes_uses_default_group() -> None:
    made, (first, *_), log = exchange(Servers(classes=1))
    made.start(Operation.ALL_REDUCE, first)
    assert log == [("all_reduce", None)]


@pytest.mark.parametrize(
    "servers",
    [
        Servers(count=2),
        Servers(placement="whole"),
        Servers(order="forward"),
        Servers(order="random"),
    ],
)
def test_gpus_do_not_serve_with_other_options(servers: Servers) -> None:
    assert GpuServerExchange.fits(Servers(), "")
    assert not GpuServerExchange.fits(servers, "")
    assert not GpuServerExchange.fits(Servers(), "bf16")


def test_planned_with_parameters_on_two_devices_raises() -> None:
    made, _, _ = exchange(Servers())
    slot = SimpleNamespace(name="far")
    there: Any = SimpleNamespace(index=0, flat=torch.zeros(1, device="meta"), slots=[slot])
    with pytest.raises(UsageError, match="'far' is on meta and others are on a GPU"):
        made.planned([there], [there])


def test_nccl_group_sets_traffic_class(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def new_group(ranks: Any, backend: str, pg_options: Any, **_: Any) -> str:
        assert ranks is None
        asked.append((backend, pg_options and pg_options.config.traffic_class))
        return "group"

    config = SimpleNamespace(traffic_class=-1)
    options = SimpleNamespace(Options=lambda: SimpleNamespace(config=config))
    monkeypatch.setattr(torch.distributed, "new_group", new_group)
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", options, raising=False)
    assert nccl_group(0, 2).handle == "group"
    nccl_group(0, 2, 0xB8)
    assert asked == [("nccl", None), ("nccl", 0xB8)]
    del config.traffic_class
    with pytest.raises(UsageError, match=r"torch 2\.8 or later"):
        nccl_group(0, 2, 0xB8)
