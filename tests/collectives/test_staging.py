"""Collectives on buffers of an accelerator, whose streams run late and in an order of a seed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from helpers import accelerator, waiting
from wingbeat.codecs import Coding
from wingbeat.codecs.codec import SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded, Handle
from wingbeat.collectives.staging import StagedCall, StagedJob, Staging
from wingbeat.errors import PeerError
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Span

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())

SEEDS = range(6)
SIZES = [1, 7, 1000, 70_003]
BUSY = 30
"""Kernels before a buffer has its values, so that what does not wait for them is wrong."""


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    accelerator.load()


@pytest.fixture(params=[2, 3], ids="workers={}".format)
def members(request: pytest.FixtureRequest) -> Iterator[list[World]]:
    made = loopback.worlds(request.param)
    yield made
    for world in made:
        world.close()


def values(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * rank + numel))


def late_copy(value: torch.Tensor, rank: int) -> torch.Tensor:
    """The value on the rank's device, where it is known only after many kernels."""
    made = torch.zeros_like(value, device=torch.device(accelerator.NAME, rank))
    pinned = value.pin_memory()
    made.copy_(pinned, non_blocking=True)
    for _ in range(BUSY):
        made.mul_(2.0)
    for _ in range(BUSY):
        made.mul_(0.5)
    return made


def on_cpu(collectives: Collectives, what: str, buffers: list[torch.Tensor]) -> list[torch.Tensor]:
    handles = [run(collectives, what, buffer) for buffer in buffers]
    for handle in handles:
        handle.wait()
    return buffers


def run(collectives: Collectives, what: str, buffer: torch.Tensor, wire=None):
    if what == "halves":
        scattered = collectives.reduce_scatter(buffer, wire=wire)
        return collectives.all_gather(buffer, after=scattered, wire=wire)
    if what == "broadcast":
        return collectives.broadcast(buffer, 1)
    return getattr(collectives, what)(buffer, wire=wire)


def own_part(collectives: Collectives, what: str, buffer: torch.Tensor) -> torch.Tensor:
    mine = collectives.owned(buffer.numel())
    return buffer[mine.start : mine.stop] if what == "reduce_scatter" else buffer


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["all_reduce", "halves", "reduce_scatter", "broadcast"])
def test_staged_collective_equals_that_of_host_memory_without_host_waits(
    members: list[World], what: str, seed: int
) -> None:
    late = accelerator.load()
    late.late_seed(seed)

    def body(world: World) -> None:
        collectives = Collectives(world)
        want = on_cpu(collectives, what, [values(world.rank, n) for n in SIZES])
        buffers = [late_copy(values(world.rank, n), world.rank) for n in SIZES]
        doubled = [torch.empty_like(each) for each in buffers]
        before = late.late_synchronizations(threading.get_native_id())
        handles = [run(collectives, what, buffer) for buffer in buffers]
        for handle, buffer, twice in zip(handles, buffers, doubled, strict=True):
            handle.wait()
            twice.copy_(buffer * 2)  # on the current stream
            buffer.zero_()
        assert late.late_synchronizations(threading.get_native_id()) == before
        for twice, wanted in zip(doubled, want, strict=True):
            got = own_part(collectives, what, twice.cpu())
            assert torch.equal(got, 2 * own_part(collectives, what, wanted))

    loopback.run(members, body)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("what", ["all_reduce", "halves"])
def test_staged_codec_equals_that_of_host_memory_with_its_residual(
    members: list[World], what: str, seed: int
) -> None:
    accelerator.load().late_seed(seed)
    numel = 5000

    def wire_of(residual: torch.Tensor) -> Encoded:
        return Encoded(Coding([Region(Span(0, numel), SketchCodec(8))]), residual)

    def body(world: World) -> None:
        collectives = Collectives(world)
        want, kept = values(world.rank, numel), torch.zeros(numel)
        residual = torch.zeros(numel, device=torch.device(accelerator.NAME, world.rank))
        for _ in range(2):
            run(collectives, what, want, wire_of(kept)).wait()
            # In the second round the residual of the first one is added.
        buffer = late_copy(values(world.rank, numel), world.rank)
        for _ in range(2):
            run(collectives, what, buffer, wire_of(residual)).wait()
        assert torch.equal(buffer.cpu(), want)
        assert torch.equal(residual.cpu(), kept)

    loopback.run(members, body)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_of_a_buffer_that_nobody_waits_for_is_released_after_its_copy(
    members: list[World], seed: int
) -> None:
    accelerator.load().late_seed(seed)

    def body(world: World) -> None:
        collectives = Collectives(world)
        done = threading.Semaphore(0)
        for numel in SIZES:
            handle = collectives.all_reduce(late_copy(values(world.rank, numel), world.rank))
            handle.add_done_callback(lambda _: done.release())
            del handle
            assert done.acquire(timeout=10)
        torch.accelerator.synchronize(torch.device(accelerator.NAME, world.rank))  # or it raises

    loopback.run(members, body)


class Held(Handle):
    """A collective that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__([])
        self.callbacks: list[Any] = []

    def add_done_callback(self, callback: Any) -> None:
        self.callbacks.append(callback)

    def end(self) -> None:
        for callback in self.callbacks:
            callback(self)


def test_first_half_that_ends_last_does_not_overwrite_the_buffer() -> None:
    accelerator.load().late_seed(0)
    world = loopback.worlds(1)[0]
    staged = Staging(world)
    buffer = torch.zeros(4, device=torch.device(accelerator.NAME, 0))
    ends: list[Held] = []

    def submit(job: StagedJob, _: object) -> Held:
        job.host.fill_(len(ends) + 1.0)
        ends.append(Held())
        return ends[-1]

    def call(what: str) -> StagedCall:
        return StagedCall(what, buffer, 0, None, None)

    first = staged.start(call("reduce_scatter"), None, submit)
    second = staged.start(call("all_gather"), first, submit)
    waiting.until(lambda: len(ends) == 2)
    ends[1].end()
    second.wait()
    buffer.fill_(7.0)
    torch.accelerator.synchronize(buffer.device)
    ends[0].end()
    torch.accelerator.synchronize(buffer.device)
    assert buffer.tolist() == [7.0] * 4
    world.close()


def test_callback_of_a_staged_collective_runs_once_it_is_known(members: list[World]) -> None:
    accelerator.load().late_seed(1)

    def body(world: World) -> None:
        called = threading.Event()
        handle = Collectives(world).all_reduce(late_copy(values(world.rank, 100), world.rank))
        handle.add_done_callback(lambda _: called.set())
        assert called.wait(10)
        assert handle.done()

    loopback.run(members, body)


def test_lost_peer_is_named_by_the_wait_of_a_staged_collective() -> None:
    accelerator.load().late_seed(1)
    members = loopback.worlds(2, timeout=0.5)
    opened = threading.Barrier(2)

    def body(world: World) -> str:
        collectives = Collectives(world)
        collectives.all_reduce(late_copy(values(world.rank, 10), world.rank)).wait()
        opened.wait()
        if world.rank == 1:
            return ""
        with pytest.raises(PeerError) as caught:
            collectives.all_reduce(late_copy(values(0, 1000), 0)).wait()
        return str(caught.value)

    said = loopback.run(members, body)[0]
    assert "rank 1" in said
    for world in members:
        world.close()


def test_without_waits_of_streams_results_differ() -> None:
    """The device of these tests shows what a missing wait does: this is what they rely on."""
    late = accelerator.load()
    device = torch.device(accelerator.NAME, 0)

    def result(seed: int, ignore: bool) -> torch.Tensor:
        late.late_seed(seed)
        late.late_ignore_waits(int(ignore))
        try:
            buffer = late_copy(torch.ones(8), 0)
            side = torch.Stream(device=device)
            side.wait_stream(torch.accelerator.current_stream(device))
            host = torch.empty(8, pin_memory=True)
            with side:
                host.copy_(buffer, non_blocking=True)
            side.synchronize()
            torch.accelerator.synchronize(device)
            return host.clone()
        finally:
            late.late_ignore_waits(0)

    assert all(torch.equal(result(seed, ignore=False), torch.ones(8)) for seed in SEEDS)
    assert not all(torch.equal(result(seed, ignore=True), torch.ones(8)) for seed in SEEDS)
