"""BML and other strategies along a BCube: how they are spelled, what they train and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import wingbeat
from wingbeat import Strategy, TopK, parts, strategies
from wingbeat.errors import UsageError
from wingbeat.strategies import MGWFBP
from wingbeat.transport import loopback
from wingbeat.transport.world import World


def test_bml_is_allreduce_along_a_bcube() -> None:
    bml = wingbeat.BML(mb=3, first_mb=2)
    assert bml == wingbeat.AllReduce(mb=3, first_mb=2, topology="bcube")
    assert bml.exchange == parts.BCube()
    assert (bml.traits.exact, bml.traits.synchronous) == (True, True)
    assert wingbeat.BML().topology == "bcube"
    assert strategies.parse("bml:mb=3,first_mb=2") == bml


@pytest.mark.parametrize("preset", [wingbeat.BML, wingbeat.AllReduce, wingbeat.DeAR, wingbeat.OMGS])
def test_every_preset_takes_a_size(preset: Any) -> None:
    made = preset(topology="bcube@3x2")
    assert made.topology == "bcube@3x2"
    assert made.exchange == parts.BCube(3, 2)
    assert strategies.parse(f"{preset.__name__.lower()}:topology=bcube@3x2") == made
    for wrong in ("bcube@", "bcube@3", "bcube@0x2", "bcube@1x2", "bcubes@3x2", "ring@3x2"):
        with pytest.raises(UsageError) as caught:
            preset(topology=wrong)
        assert "\n" not in str(caught.value)


def test_a_composition_takes_a_value_or_a_name() -> None:
    for exchange in ("bcube@3x2", parts.BCube(3, 2)):
        made = Strategy(exchange=exchange)
        assert made.topology == "bcube@3x2"
        assert made == strategies.parse("strategy:exchange=bcube@3x2")
        assert eval(repr(made), {"Strategy": Strategy, "BCube": parts.BCube}) == made
    with pytest.raises(UsageError, match=r"bcube@x: allowed are PORTSxLEVELS, such as bcube@3x2"):
        Strategy(exchange="bcube@x")


@pytest.mark.parametrize("topology", ["ring", "mesh", "doubling"])
def test_bml_has_no_other_topology(topology: str) -> None:
    with pytest.raises(UsageError, match=rf"BML\(topology='{topology}'\): BML has bcube"):
        wingbeat.BML(topology=topology)


@pytest.mark.parametrize("wire", ["sketch", "lowrank:bits=8", "fp16"])
def test_a_codec_that_would_go_another_way_is_refused(wire: str) -> None:
    for make in (
        wingbeat.BML,
        lambda compression: wingbeat.DeAR(topology="bcube", compression=compression),
    ):
        with pytest.raises(UsageError, match=r"most are no neighbours there; allowed: \"bf16\""):
            make(compression=wire)
    assert wingbeat.AllReduce(compression=wire).topology == "ring"


def test_payloads_that_all_gather_go_along_it() -> None:
    assert wingbeat.BML(compression=TopK()).wire == TopK()
    assert wingbeat.BML(compression="bf16").wire == "bfloat16"
    with pytest.raises(UsageError, match="most are no neighbours"):
        wingbeat.DeAR(topology="bcube", compression="topk")


TRAINED = {
    "bml": wingbeat.BML(mb=0.001, first_mb=0.001),
    "bml bf16": wingbeat.BML(compression="bf16"),
    "bml topk": wingbeat.BML(compression=TopK(density=0.1, auto_disable=False)),
    "dear": wingbeat.DeAR(plan="fixed", mb=0.001, topology="bcube"),
    "dear sharded": wingbeat.DeAR(plan="fixed", topology="bcube@2x2", shard_optimizer=True),
    "omgs": wingbeat.OMGS(merge="none", topology="bcube", steps=1),
    "measured": MGWFBP(topology="bcube", steps=1),
}


def weights_after(strategy: Any, interfaces: int) -> list[torch.Tensor]:
    """Train four workers of so many interfaces; return what each has in the end."""

    def body(world: World) -> torch.Tensor:
        model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.ReLU(), torch.nn.Linear(33, 3))
        chance = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for p in model.parameters():  # torch's own generator is shared by all threads
                p.copy_(0.3 * torch.randn(p.shape, generator=chance))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        wingbeat.distribute(model, optimizer, strategy, world=world)
        for _ in range(6):
            everyones = torch.randn(world.size * 4, 7, generator=chance)
            optimizer.zero_grad()
            model(everyones[world.rank :: world.size]).square().mean().backward()
            optimizer.step()
        found = torch.cat([p.detach().flatten() for p in model.parameters()]).clone()
        wingbeat.release(model, optimizer)
        return found

    members = loopback.worlds(4, interfaces=interfaces)
    found = loopback.run(members, body)
    for world in members:
        world.close()
    return found


@pytest.mark.parametrize("name", TRAINED)
def test_four_workers_with_two_interfaces_train_alike(name: str) -> None:
    weights = weights_after(TRAINED[name], 2)
    assert all(torch.equal(each, weights[0]) for each in weights)
    if TRAINED[name].traits.exact:
        assert torch.allclose(weights[0], weights_after(wingbeat.AllReduce(), 1)[0], atol=1e-6)


def test_what_makes_no_bcube_is_refused_when_training_begins() -> None:
    members = loopback.worlds(3, interfaces=2)

    def body(world: World) -> str:
        model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(UsageError) as caught:
            wingbeat.distribute(model, optimizer, wingbeat.BML(), world=world)
        return str(caught.value)

    for text in loopback.run(members, body):
        assert "4 workers with 2 interfaces each are BCube(2, 2)" in text
        assert "you have 3 with 2" in text
    for world in members:
        world.close()
