"""Channels of a world come and go; its end is theirs, and theirs is not its."""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from wingbeat.collectives import Collectives
from wingbeat.collectives.native import executors_of
from wingbeat.errors import PeerError, RendezvousError
from wingbeat.transport import loopback, rendezvous
from wingbeat.transport import world as world_module
from wingbeat.transport.failures import LivenessListener, publish_exit, publish_failure
from wingbeat.transport.torch_store import TorchStore
from wingbeat.transport.world import World


def summed(world: World) -> float:
    buffer = torch.full((6,), world.rank + 1.0)
    Collectives(world).all_reduce(buffer).wait()
    return float(buffer[0])


def test_closed_world_closes_its_channels() -> None:
    """Threads that still used a channel would meet closed sockets."""
    members = loopback.worlds(2, timeout=5)
    channels = loopback.run(members, lambda world: world.open_channel())
    assert loopback.run(channels, summed) == [3.0] * 2
    for world in members:
        world.close()
    with pytest.raises(PeerError, match="started after"):
        Collectives(channels[0]).all_reduce(torch.ones(6))


@pytest.mark.parametrize("restarted", [False, True])
def test_links_are_closed_after_all_users_of_the_world(restarted: bool) -> None:
    """Users send what is queued, and the last one publishes how the rank leaves."""
    order: list[str] = []
    link: Any = SimpleNamespace(name="lo", close=lambda: order.append("link"))
    world = World(0, 2, () if restarted else (link,), (), 1.0, loopback.Switchboard())
    rendezvous._open_groups(world, [link])
    if restarted:  # its links carry groups only
        world.on_closed(link.close)
    world.on_close(lambda: order.append("user"))
    world.close()
    assert order == ["user", "link"]


def test_closed_channel_leaves_its_world_open() -> None:
    members = loopback.worlds(2, timeout=5)
    channels = loopback.run(members, lambda world: world.open_channel())
    for channel in channels:
        channel.close()
    assert loopback.run(members, summed) == [3.0] * 2
    for world in members:
        world.close()


def test_executors_of_a_collected_channel_end() -> None:
    """A model that its user drops without releasing it leaves no executor behind."""
    members = loopback.worlds(2, timeout=5)
    channels = loopback.run(members, lambda world: world.open_channel())
    loopback.run(channels, summed)
    mine = [each for channel in channels for each in executors_of(channel)]
    assert not any(each._closing for each in mine)
    del channels
    gc.collect()
    assert all(each._closing for each in mine)
    for world in members:
        world.close()


def test_what_is_published_in_two_channels_is_kept_apart() -> None:
    def body(world: World) -> list[str]:
        first, second = world.open_channel(), world.open_channel()
        if world.rank == 0:
            second.publish("order", "second")
            first.publish("order", "first")
        return [channel.read("order", 0) for channel in (first, second)]

    members = loopback.worlds(2, timeout=0.5)
    assert loopback.run(members, body) == [["first", "second"]] * 2


def test_channel_reads_no_values_of_an_earlier_one_of_its_number() -> None:
    members = loopback.worlds(2, timeout=0.3)

    def before(world: World) -> int:
        channel = world.open_channel()
        channel.exchange("plan", "old")
        channel.publish("order", "old")
        channel.close()
        return channel.channel

    assert loopback.run(members, before) == [1, 1]
    first, _ = loopback.run(members, lambda world: world.open_channel())
    assert first.channel == 1
    with pytest.raises(RendezvousError, match="rank 1 published nothing for 'plan'"):
        first.exchange("plan", "new")
    with pytest.raises(RendezvousError, match="rank 1 published nothing for 'order'"):
        first.read("order", 1)


def test_a_channel_that_another_rank_still_uses_is_not_taken() -> None:
    """There a model is not collected yet, so that its messages may still be on their way."""
    members = loopback.worlds(2, timeout=5)
    channels = loopback.run(members, lambda world: world.open_channel())
    channels[1].close()
    again = loopback.run(members, lambda world: world.open_channel())
    assert [channel.channel for channel in again] == [2, 2]


def test_value_of_a_live_rank_is_awaited_beyond_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    (one, other) = loopback.worlds(2, timeout=0.05)

    def lives(store: object, rank: int, peer: int) -> bool:
        asked.append(peer)
        if len(asked) == 3:
            other.publish("plan", 7)
        return True

    monkeypatch.setattr("wingbeat.transport.world.is_progressing", lives)
    assert one.read("plan", 1) == 7
    assert asked == [1, 1, 1]
    assert one.store.get("waiting/0", 0.0) == "", "it waits no more"
    with pytest.raises(RendezvousError, match="rank 0: rank 1 published nothing for 'nothing'"):
        one.read("nothing", 1)
    assert 8 <= len(asked) - 3 <= 11, "ten timeouts"


def listening(world: World) -> LivenessListener:
    """Have the process of this rank answer probes, until the result is closed."""
    listener = LivenessListener("127.0.0.1")
    world.store.set(f"here/{world.rank}", listener.address.to_text())
    return listener


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("killed", "rank 0: the process of rank 1 has ended, and published nothing for 'plan': it"),
        ("failed", "rank 0: rank 1 failed with KeyError: 'mine', noticed in the exchange of 'pla"),
        ("finished", "rank 0: rank 1 has finished .* and waits for it in 'plan'"),
    ],
)
def test_value_of_a_process_that_has_ended_is_not_awaited(how: str, said: str) -> None:
    one, other = loopback.worlds(2, timeout=600)
    listener = listening(other)
    if how == "failed":
        publish_failure(other.store, 1, KeyError("mine"))
    if how == "finished":
        publish_exit(other.store, 1, finished=True)
    listener.close()
    with pytest.raises(RendezvousError, match=said):
        one.exchange("plan", 7)


def test_value_that_a_process_published_before_it_ended_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wingbeat.transport.world._LIVENESS_CHECK_S", 0.01)
    one, other = loopback.worlds(2, timeout=600)
    listening(other).close()

    def ended(*_: object) -> bool:
        other.publish("plan", 7)
        return True

    monkeypatch.setattr("wingbeat.transport.world.process_has_ended", ended)
    assert one.read("plan", 1) == 7


def test_value_in_a_store_that_has_ended_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    one, _ = loopback.worlds(2, timeout=600)

    def gone(key: str, _: float) -> str:
        raise TimeoutError(f"{key}: connection reset by peer")

    monkeypatch.setattr(one.store, "get", gone)
    with pytest.raises(
        RendezvousError, match=r"rank 0: cannot read 'plan' of rank 1 in the store: .* reset by p"
    ):
        one.read("plan", 1)


def test_long_wait_for_a_rank_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(world_module, "_LOG_S", 0.05)
    store = TorchStore(dist.HashStore())
    world = World(0, 2, (), (), 0.3, store)
    with pytest.raises(RendezvousError, match=r"rank 1 published nothing for 'key' within 0\.3 s"):
        world.exchange("key", 1)
    assert len(caplog.records) == 1
    assert "rank 0: has waited for 'key' of rank 1 for 0 s, and waits for up to 0 s" in caplog.text
