"""What workers run in `test_two_level`: hosts with several devices, on one machine."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import wingbeat
from contracts.strategies import devices
from contracts.strategies.compare import assert_same_on_every_rank
from helpers import accelerator, waiting
from helpers.accelerator import group
from wingbeat.codecs import Coding
from wingbeat.codecs.codec import Dense, SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.collectives import Collectives, Encoded
from wingbeat.collectives.pinned import Copies, Pair
from wingbeat.collectives.two_level import TwoLevel, TwoLevelJob
from wingbeat.errors import PeerError
from wingbeat.transport import interfaces, tcp, world
from wingbeat.transport.host_group import HostGroup
from wingbeat.transport.world import World
from wingbeat.types import Span

BUSY = 30
"""Kernels before a buffer has its values, so that what does not wait for them is wrong."""

SIZES = (1, 7, 4, 1000, 70_004)

DEVICE = torch.device("privateuseone", 0)


_placing = ""


def join(placing: str, timeout: float = 60.0) -> None:
    """Call `init` on these hosts of the ranks."""
    global _placing
    group.register()
    if placing == _placing:
        return
    _placing = placing
    wingbeat.shutdown()
    host = f"host {placing[dist.get_rank()]}"
    interfaces.host_identity = tcp.host_identity = lambda: host
    os.environ["LOCAL_WORLD_SIZE"] = str(placing.count(placing[dist.get_rank()]))
    wingbeat.init(timeout=timeout, interfaces=["lo"])


def opened() -> tuple[World, Collectives]:
    """A channel with collectives that sum inside hosts, where these are even."""
    channel = world.current().open_channel()
    made = Collectives(channel)
    made.sum_inside_hosts(DEVICE)
    return channel, made


def values(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Whole numbers, whose sums do not depend on their order."""
    made = torch.randint(-8, 8, (numel,), generator=torch.Generator().manual_seed(rank + numel))
    return made.to(dtype)


def late_copy(value: torch.Tensor) -> torch.Tensor:
    """The value on the device, where it is known only after many kernels."""
    made = torch.zeros_like(value, device=DEVICE)
    made.copy_(value.pin_memory(), non_blocking=True)
    for _ in range(BUSY):
        if value.is_floating_point():
            made.mul_(2).div_(2)
        else:
            made.add_(1).sub_(1)
    return made


def start(collectives: Collectives, what: str, buffer: torch.Tensor, wire: Any = None) -> Any:
    if what == "halves":
        scattered = collectives.reduce_scatter(buffer, wire=wire)
        return collectives.all_gather(buffer, after=scattered, wire=wire)
    return getattr(collectives, what)(buffer, wire=wire)


def part_of(collectives: Collectives, what: str, buffer: torch.Tensor) -> torch.Tensor:
    own = collectives.owned(buffer.numel())
    return buffer[own.start : own.stop] if what == "reduce_scatter" else buffer


def calls_of(collectives: Collectives) -> int:
    """How many were done on two levels."""
    two: TwoLevel | None = collectives._two_level
    return 0 if two is None else two._calls


def equals_host_memory(what: str, wire: torch.dtype | None, seeds: range) -> int:
    """Compare with the same collectives on host memory; return how many used two levels."""
    late, rank = accelerator.load(), world.current().rank
    channel, collectives = opened()
    want = []
    for numel in SIZES:
        want.append(values(rank, numel))
        start(collectives, what, want[-1], wire).wait()
    for seed in seeds:
        late.late_seed(4 * seed + rank)
        buffers = [late_copy(values(rank, numel)) for numel in SIZES]
        doubled = [torch.empty_like(each) for each in buffers]
        before = late.late_synchronizations(threading.get_native_id())
        handles = [start(collectives, what, buffer, wire) for buffer in buffers]
        for handle, buffer, twice in zip(handles, buffers, doubled, strict=True):
            handle.wait()
            twice.copy_(buffer * 2)  # on the current stream
            buffer.zero_()
        assert late.late_synchronizations(threading.get_native_id()) == before
        for twice, wanted in zip(doubled, want, strict=True):
            got = part_of(collectives, what, twice.cpu())
            assert torch.equal(got, 2 * part_of(collectives, what, wanted)), (seed, twice.numel())
    found = calls_of(collectives)
    channel.close()
    return found


def bytes_copied(what: str, numel: int) -> tuple[int, int]:
    """How many bytes of a float32 buffer are copied to the host and back."""
    channel, collectives = opened()
    found = {"out": 0, "back": 0}

    def counted(name: str) -> Callable[..., torch.Event]:
        original = getattr(Copies, name)

        def count(self: Copies, pairs: Sequence[Pair], ready: torch.Event) -> torch.Event:
            found[name] += sum(pair.host.nbytes for pair in pairs)
            return original(self, pairs, ready)

        return count

    with mock.patch.multiple(Copies, **{name: counted(name) for name in found}):
        start(collectives, what, late_copy(values(0, numel))).wait()
    channel.close()
    return found["out"], found["back"]


def kinds_in_turn(seeds: range) -> None:
    """All kinds and dtypes, of which none is waited for before all have begun."""
    late, rank = accelerator.load(), world.current().rank
    channel, collectives = opened()
    kinds = ["all_reduce", "halves", "all_reduce", "all_gather", "all_reduce", "reduce_scatter"]
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.int64, torch.float16]
    plans = list(zip(kinds, dtypes, strict=True))
    want = []
    for number, (what, dtype) in enumerate(plans):
        want.append(values(rank, 400 + 4 * number, dtype))
        start(collectives, what, want[-1]).wait()
    for seed in seeds:
        late.late_seed(4 * seed + rank)
        buffers = [late_copy(values(rank, each.numel(), each.dtype)) for each in want]
        handles = [
            start(collectives, what, buffer)
            for (what, _), buffer in zip(plans, buffers, strict=True)
        ]
        for handle in reversed(handles):
            handle.wait()
        for (what, _), buffer, wanted in zip(plans, buffers, want, strict=True):
            got, wanted = (part_of(collectives, what, each) for each in (buffer.cpu(), wanted))
            assert torch.equal(got, wanted), (seed, what, wanted.dtype)
    assert calls_of(collectives) == len(seeds) * (len(kinds) + 1)
    channel.close()


def sketch_equals_host_memory(what: str, seeds: range) -> None:
    """Compare results and residuals, bit for bit, with those of the host's memory."""
    late, rank, numel = accelerator.load(), world.current().rank, 5000
    channel, collectives = opened()
    coding = Coding(
        [Region(Span(0, numel - 7), SketchCodec(8)), Region(Span(numel - 7, numel), Dense())]
    )
    draws = torch.Generator().manual_seed(rank)
    given = [torch.randn(numel, generator=draws) for _ in range(3)]
    want, kept = [each.clone() for each in given], torch.zeros(numel)
    for each in want:
        start(collectives, what, each, Encoded(coding, kept)).wait()
    assert bool(kept.any())
    for seed in seeds:
        late.late_seed(4 * seed + rank)
        residual = torch.zeros(numel, device=DEVICE)
        for each, wanted in zip(given, want, strict=True):
            buffer = late_copy(each)
            start(collectives, what, buffer, Encoded(coding, residual)).wait()
            got = part_of(collectives, what, buffer.cpu())
            assert torch.equal(got, part_of(collectives, what, wanted))
        assert torch.equal(residual.cpu(), kept)
        if what != "reduce_scatter":
            assert_same_on_every_rank({"buffer": buffer.cpu()}, "after a sketch")
    assert calls_of(collectives) >= len(seeds) * len(given)
    channel.close()


def first_half_writes_nothing_later(seeds: range) -> None:
    """Whether it has ended or not when the second begins, which writes the whole buffer."""
    late, rank, numel = accelerator.load(), world.current().rank, 4000
    channel, collectives = opened()
    for seed, ended in itertools.product(seeds, (True, False)):
        late.late_seed(4 * seed + rank)
        buffer = late_copy(values(rank, numel))
        scattered = collectives.reduce_scatter(buffer)
        if ended:
            waiting.until(scattered.done)
        collectives.all_gather(buffer, after=scattered).wait()
        buffer.fill_(7.0)
        waiting.until(scattered.done)
        torch.accelerator.synchronize(DEVICE)
        assert buffer.tolist() == [7.0] * numel, (seed, ended)
    channel.close()


def memory_is_released_after_use(seeds: range) -> None:
    """Nobody waits for the results of buffers and residuals that are dropped."""
    late, rank, numel = accelerator.load(), world.current().rank, 4000
    channel, collectives = opened()
    coding = Coding([Region(Span(0, numel), SketchCodec(8))])
    kinds = ("reduce_scatter", "all_gather", "halves", "all_reduce")
    for seed, what, coded in itertools.product(seeds, kinds, (False, True)):
        late.late_seed(4 * seed + rank)
        done = threading.Semaphore(0)
        wire = Encoded(coding, torch.zeros(numel, device=DEVICE)) if coded else None
        handle = start(collectives, what, late_copy(values(rank, numel)), wire)
        handle.add_done_callback(lambda _, done=done: done.release())
        if what == "all_reduce":  # whose gather begins at a wait
            collectives.all_gather(late_copy(values(rank, 4)))
        del handle, wire
        until = time.monotonic() + waiting.PATIENCE
        while not done.acquire(timeout=0.002):
            gc.collect()  # it may not take what is in progress
            assert time.monotonic() < until, (seed, what, coded)
        torch.accelerator.synchronize(DEVICE)  # or it raises
    channel.close()


def close_ends_after_a_gather_that_has_begun() -> None:
    """Other ranks of the host have agreed to it, and torch does not protect a group in use."""
    rank = world.current().rank
    channel, collectives = opened()
    begun, proceed, closed = threading.Event(), threading.Event(), threading.Event()
    gather, close = TwoLevel._gather_inside, HostGroup.close

    def held(self: TwoLevel, job: TwoLevelJob) -> None:
        begun.set()
        assert proceed.wait(waiting.PATIENCE)
        gather(self, job)

    def noted(self: HostGroup) -> None:
        closed.set()
        close(self)

    with (
        mock.patch.object(TwoLevel, "_gather_inside", held),
        mock.patch.object(HostGroup, "close", noted),
    ):
        buffer = late_copy(values(rank, 4))
        handle = collectives.all_gather(buffer)
        assert begun.wait(waiting.PATIENCE)
        closing = threading.Thread(target=channel.close)
        closing.start()
        waiting.until(lambda: not channel._closers)
        assert not closed.wait(0.1)
        proceed.set()
        handle.wait()
        closing.join(waiting.PATIENCE)
    assert closed.is_set()
    assert buffer.tolist() == [float(values(peer, 4)[peer]) for peer in range(4)]


def groups_left() -> int:
    """The groups of torch after use, beside the default group."""
    channel, collectives = opened()
    collectives.all_reduce(late_copy(values(0, 10))).wait()
    during = len(dist.distributed_c10d._world.pg_map)
    channel.close()
    assert during > len(dist.distributed_c10d._world.pg_map)
    return len(dist.distributed_c10d._world.pg_map) - 1


def other_order() -> str:
    """Ranks 0 and 2 wait for the first bucket before they start the second, others do not."""
    rank = world.current().rank
    channel, collectives = opened()
    buffers = [late_copy(values(rank, 100)) for _ in range(2)]
    said = ""
    try:
        first = collectives.all_reduce(buffers[0], bucket=0)
        if rank % 2 == 0:
            first.wait()
        second = collectives.all_reduce(buffers[1], bucket=1)
        for each in (first, second):
            each.wait()
    except PeerError as error:
        said = str(error)
    channel.close()
    return said


def one_dies() -> str:
    """Rank 3 exits; what the others say."""
    rank = world.current().rank
    _, collectives = opened()
    collectives.all_reduce(late_copy(values(rank, 100))).wait()
    if rank == 3:
        os._exit(9)
    try:
        collectives.all_reduce(late_copy(values(rank, 100)), bucket=5).wait()
    except PeerError as error:
        return str(error)
    return ""


def scenario(name: str, strategy: str, mb: float, seeds: range) -> int:
    """Run a scenario of the contract; return how many collectives used two levels."""
    count, original = 0, TwoLevel.start

    def counted(self: TwoLevel, *args: Any) -> Any:
        nonlocal count
        count += 1
        return original(self, *args)

    TwoLevel.start = counted  # type: ignore[method-assign]
    try:
        devices.scenario_on_late_device(name, strategy, mb, seeds)
    finally:
        TwoLevel.start = original  # type: ignore[method-assign]
    return count
