"""Collectives in the extension: the same bits as those of the Python executor, its reference."""

from __future__ import annotations

import gc
import itertools
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any, TypeAlias

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import tcp
from helpers.waiting import until
from wingbeat import _native, compression, topologies
from wingbeat.codecs import Coding, make
from wingbeat.codecs.codec import Codec, Dense, HalfCodec, SketchCodec
from wingbeat.codecs.coding import Region
from wingbeat.codecs.topk import TopKCodec
from wingbeat.collectives import Collectives, Encoded, engine, native
from wingbeat.collectives.handle import Job, NativeJob
from wingbeat.collectives.native import NATIVE_DTYPES
from wingbeat.errors import PeerError
from wingbeat.observe import meter
from wingbeat.topologies import Hierarchical, Topology
from wingbeat.transport import loopback
from wingbeat.transport.world import World
from wingbeat.types import Layout, Span

Clusters: TypeAlias = dict[tuple[int, int, bool], list[World]]

CLUSTERS = (
    *((2, 1, False), (3, 1, False), (4, 1, False), (4, 2, False)),
    *((3, 1, True), (4, 2, True)),
)
"""Ranks, interfaces, and whether the connections are encrypted."""

PAIRS = Layout.even(2, 2)


@pytest.fixture(scope="module", params=[False, True], ids=["tcp", "shared memory"])
def clusters(request: pytest.FixtureRequest) -> Iterator[Clusters]:
    made = {
        (size, nics, encrypted): tcp.worlds(
            size, interfaces=nics, encrypted=encrypted, shared_memory=request.param
        )
        for size, nics, encrypted in CLUSTERS
    }
    yield made
    for members in made.values():
        tcp.close(members)


@pytest.fixture(params=[False, True], ids=["tcp", "shared memory"])
def pair(request: pytest.FixtureRequest) -> Iterator[list[World]]:
    members = tcp.worlds(2, shared_memory=request.param)
    yield members
    tcp.close(members)


def layouts(size: int) -> st.SearchStrategy[Layout]:
    return st.lists(st.integers(0, 2), min_size=size, max_size=size).map(Layout.by_name)


def place(members: list[World], layout: Layout | None) -> None:
    """Have collectives that are created later treat the ranks as those of these hosts."""
    for world in members:
        world.layout = layout or Layout.even(world.size, 1)


def filled(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 50
    return values > 0 if dtype is torch.bool else values.to(dtype)


def results(
    members: list[World], topology: str, what: str, inputs: list[torch.Tensor], cast: str
) -> list[torch.Tensor]:
    wire = getattr(torch, cast) if cast else None

    def body(world: World) -> torch.Tensor:
        collectives = Collectives(world, topology)
        buffer = inputs[world.rank].clone()
        if what == "halves":
            first = collectives.reduce_scatter(buffer, wire=wire)
            collectives.all_gather(buffer, after=first, wire=wire).wait()
            first.wait()
        elif what == "broadcast":
            collectives.broadcast(buffer, 1).wait()
        else:
            collectives.all_reduce(buffer, wire=wire).wait()
        return buffer

    return loopback.run(members, body)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_results_equal_those_of_python_to_the_bit(clusters: Clusters, data: st.DataObject) -> None:
    size, nics, encrypted = data.draw(st.sampled_from(CLUSTERS))
    choices = [name for name in ("ring", "doubling", "mesh", "bcube") if fits(name, size, nics)]
    topology = data.draw(st.sampled_from(choices))
    what = data.draw(st.sampled_from(["all_reduce", "halves", "broadcast"]))
    dtype = data.draw(st.sampled_from(sorted(NATIVE_DTYPES, key=str)))
    can_cast = dtype is torch.float32 and what != "broadcast"
    cast = data.draw(st.sampled_from(["", "bfloat16", "float16"])) if can_cast else ""
    numel = data.draw(st.one_of(st.integers(0, 40), st.integers(1, 300_000)))
    inputs = [filled(numel, dtype, 7 * rank + numel) for rank in range(size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "DIRECT_BYTES", -1)
        members = clusters[size, nics, encrypted]
        check_same_bits(members, topology, what, cast, inputs, nics, data.draw(layouts(size)))


def check_same_bits(
    members: list[World],
    topology: str,
    what: str,
    cast: str,
    inputs: list[torch.Tensor],
    nics: int,
    layout: Layout | None = None,
) -> None:
    place(members, layout)
    native = results(members, topology, what, inputs, cast)
    reference = loopback.worlds(len(inputs), interfaces=nics, layout=layout)
    python = results(reference, topology, what, inputs, cast)
    for ours, theirs in zip(native, python, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
        assert torch.equal(ours.view(torch.uint8), native[0].view(torch.uint8))


@pytest.mark.parametrize(
    ("numel", "expected"),
    [
        (4096, ("all_gather", topologies.Mesh())),
        (4097, ("all_reduce", topologies.Mesh())),
        (8192, ("all_reduce", topologies.Mesh())),
        (8193, ("all_reduce", Hierarchical(PAIRS, direct=True))),
        (16_384, ("all_reduce", Hierarchical(PAIRS, direct=True))),
        (16_385, ("all_reduce", Hierarchical(PAIRS))),
    ],
)
def test_small_sums_go_between_all_workers_only_while_a_host_receives_little(
    clusters: Clusters, numel: int, expected: tuple[str, Topology], monkeypatch: pytest.MonkeyPatch
) -> None:
    members, compiled = clusters[4, 1, False], set()
    compile_collective = engine.compile_collective

    def noting(what: str, topology: Topology, *args: Any) -> Any:
        compiled.add((what, topology))
        return compile_collective(what, topology, *args)

    monkeypatch.setattr(engine, "compile_collective", noting)
    place(members, PAIRS)
    inputs = [filled(numel, torch.int32, rank) for rank in range(4)]
    for found in results(members, "ring", "all_reduce", inputs, ""):
        assert torch.equal(found, sum(inputs))
    assert compiled == {expected}


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_small_buffers_are_summed_in_the_order_of_ranks(
    clusters: Clusters, data: st.DataObject
) -> None:
    size, nics, encrypted = data.draw(st.sampled_from(CLUSTERS))
    dtype = data.draw(st.sampled_from(sorted(NATIVE_DTYPES, key=str)))
    numel = data.draw(st.integers(0, 16_000 // size // 2))
    what = data.draw(st.sampled_from(["all_reduce", "halves"]))
    inputs = [filled(numel, dtype, 3 * rank + numel) for rank in range(size)]
    expected = inputs[0].clone()
    for each in inputs[1:]:
        expected.add_(each)
    members = clusters[size, nics, encrypted]
    place(members, None)
    for found in results(members, "ring", what, inputs, ""):
        if what == "all_reduce" or not dtype.is_floating_point:
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
        else:  # an owner adds to its own part
            assert torch.allclose(found.double(), expected.double(), rtol=2e-2, atol=1.0)


def fits(topology: str, size: int, nics: int) -> bool:
    try:
        topologies.get(topology).fitted(size, nics)
    except ValueError:
        return False
    return True


CODECS: dict[str, Codec] = {
    "dense": Dense(),
    "sketch": SketchCodec(),
    "3 bits": SketchCodec(3, "count", "ends"),
    "no feedback": SketchCodec(feedback=False),
    "top-k": TopKCodec(0.01),
    "sketched top-k": TopKCodec(0.02, bits=4),
    "half": HalfCodec(),
}
"""Codecs that the extension runs."""


def regions_of(data: st.DataObject, numel: int) -> Coding:
    """Regions of random codecs, of which neighbours may be equal."""
    cuts = data.draw(st.lists(st.integers(1, max(1, numel - 1)), max_size=4, unique=True))
    ends = sorted({0, numel, *(each for each in cuts if each < numel)})
    spans = (Span(start, stop) for start, stop in itertools.pairwise(ends))
    names = st.sampled_from(sorted(CODECS))
    return Coding([Region(span, CODECS[data.draw(names)]) for span in spans])


SPECIAL = (0.0, -0.0, 1e-42, 3e38, -3.4e38, float("inf"), float("nan"))


def encoded_results(
    members: list[World], what: str, coding: Coding, keeps: bool, special: list[float], kind: type
) -> list[torch.Tensor]:
    """The buffers and residuals of all ranks after two sums, one after the other."""
    numel = coding.regions[-1].span.stop

    def body(world: World) -> torch.Tensor:
        collectives, seed = Collectives(world), 11 * world.rank
        residual = filled(numel, torch.float32, seed + 1) * 1e-3 if keeps else None
        wire = Encoded(coding, residual)
        buffers = [filled(numel, torch.float32, seed + turn) for turn in range(2)]
        for at, value in enumerate(special):
            buffers[0][(7919 * at + seed) % numel] = value
        handles = []
        for buffer in buffers:
            if what == "halves":
                first = collectives.reduce_scatter(buffer, wire=wire)
                handles += [first, collectives.all_gather(buffer, after=first, wire=wire)]
            else:
                handles.append(collectives.all_reduce(buffer, wire=wire))
        for handle in handles:
            handle.wait()
            assert all(type(job) is kind for job in handle.jobs)
        return torch.cat([*buffers, *([] if residual is None else [residual])])

    return loopback.run(members, body)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_encoded_sums_equal_those_of_python_to_the_bit(
    clusters: Clusters, data: st.DataObject
) -> None:
    size, nics, encrypted = data.draw(st.sampled_from(CLUSTERS))
    numel = data.draw(st.one_of(st.integers(1, 40), st.integers(1, 900_000)))
    coding, keeps = regions_of(data, numel), data.draw(st.booleans())
    what = data.draw(st.sampled_from(["all_reduce", "halves"]))
    special = data.draw(st.lists(st.sampled_from(SPECIAL), max_size=9))
    members, layout = clusters[size, nics, encrypted], data.draw(layouts(size))
    place(members, layout)
    ours = encoded_results(members, what, coding, keeps, special, NativeJob)
    python = loopback.worlds(size, interfaces=nics, layout=layout)
    theirs = encoded_results(python, what, coding, keeps, special, Job)
    for mine, reference in zip(ours, theirs, strict=True):
        assert torch.equal(mine.isnan(), reference.isnan())  # the bits of NaN are not specified
        values = mine.nan_to_num(0.0, torch.inf, -torch.inf)
        expected = reference.nan_to_num(0.0, torch.inf, -torch.inf)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        first = ours[0][: 2 * numel].nan_to_num(0.0, torch.inf, -torch.inf)
        assert torch.equal(values[: 2 * numel].view(torch.uint8), first.view(torch.uint8))


def test_collectives_run_in_the_extension_except_what_only_python_can(pair: list[World]) -> None:
    def encoded(wire: compression.Coded) -> Encoded:
        return Encoded(Coding([Region(Span(0, 1000), make(wire))]))

    def body(world: World) -> list[type]:
        collectives, ones = Collectives(world), torch.ones(1000)
        handles = [
            collectives.all_reduce(ones.clone()),
            collectives.all_reduce(ones.clone(), wire=torch.bfloat16),
            collectives.all_reduce(ones.clone(), wire=encoded(compression.Sketch())),
            collectives.all_reduce(ones.clone(), wire=encoded(compression.LowRank(rank=2))),
            collectives.all_reduce(ones.double(), wire=encoded(compression.Sketch())),
            collectives.all_reduce(torch.ones(10, dtype=torch.complex64)),
        ]
        for handle in handles:
            handle.wait()
        return [type(handle.jobs[0]) for handle in handles]

    for kinds in loopback.run(pair, body):
        assert kinds == [NativeJob, NativeJob, NativeJob, Job, Job, Job]


def test_encoded_sums_are_counted_as_work_of_codecs(pair: list[World]) -> None:
    wire = Encoded(Coding([Region(Span(0, 500_000), CODECS["sketch"])]))
    before, work = meter.codec.total, _native.codec_work()
    loopback.run(pair, lambda world: Collectives(world).all_reduce(torch.ones(500_000), wire=wire))
    loopback.run(pair, lambda world: Collectives(world).all_reduce(torch.ones(10)).wait())
    after = _native.codec_work()
    packed, unpacked = (new[0] - old[0] for old, new in zip(work, after, strict=True))
    assert packed >= 4  # of each rank its contribution to the other, and its result
    assert unpacked >= 4
    assert meter.codec.total - before >= sum(
        new[2] - old[2] for old, new in zip(work, after, strict=True)
    )


def test_malformed_payload_fails_the_sum_and_names_its_sender(pair: list[World]) -> None:
    """Rank 1 sends bytes of the right size that are no top-k payload."""
    numel, codec = 5000, CODECS["top-k"]
    halves = Span(0, numel // 2), Span(numel // 2, numel)
    room = Coding([Region(halves[0], codec)]).room(halves[0])
    bogus = [Region(Span(half.start, half.start + room // 4), Dense()) for half in halves]
    codings = Coding([Region(Span(0, numel), codec)]), Coding(bogus)

    def body(world: World) -> str:
        buffer = torch.full((4 * numel,), 255, dtype=torch.uint8).view(torch.float32)
        handle = Collectives(world).all_reduce(buffer, wire=Encoded(codings[world.rank]))
        if world.rank == 1:
            return ""
        with pytest.raises(PeerError) as caught:
            handle.wait()
        return str(caught.value)

    text = loopback.run(pair, body)[0]
    assert "rank 1 failed during all-reduce" in text
    assert "sent a malformed payload: malformed top-k payload: the" in text


def test_encoded_sums_without_their_peer_fail_and_leave_their_buffers(pair: list[World]) -> None:
    numel = 6_000_000
    residual, buffer = torch.zeros(numel), torch.rand(numel)
    wire = Encoded(Coding([Region(Span(0, numel), CODECS["sketch"])]), residual)
    handle = Collectives(pair[0]).all_reduce(buffer, wire=wire)
    pair[1].links[0].close()
    with pytest.raises(PeerError, match="rank 0: rank 1 failed during all-reduce"):
        handle.wait()
    before = buffer.clone(), residual.clone()
    time.sleep(0.05)
    assert torch.equal(buffer, before[0])
    assert torch.equal(residual, before[1])


def test_plain_sum_behind_an_encoded_one_succeeds(pair: list[World]) -> None:
    wire = Encoded(Coding([Region(Span(0, 2_000_000), CODECS["sketch"])]))

    def body(world: World) -> list[float]:
        collectives, found = Collectives(world), []
        for turn in range(10):
            large, small = torch.ones(2_000_000), torch.full((7,), float(turn))
            handles = collectives.all_reduce(large, wire=wire), collectives.all_reduce(small)
            for handle in handles:
                handle.wait()
            found += [float(large[0]), float(small[0])]
        return found

    expected = [each for turn in range(10) for each in (2.0, 2.0 * turn)]
    for found in loopback.run(pair, body):
        assert found == pytest.approx(expected, rel=0.01)


def test_many_collectives_in_progress_keep_their_order_and_results(pair: list[World]) -> None:
    def body(world: World) -> list[float]:
        collectives = Collectives(world)
        buffers = [torch.full((1 + 977 * n,), float(n + world.rank)) for n in range(60)]
        handles = [collectives.all_reduce(buffer, bucket=n) for n, buffer in enumerate(buffers)]
        for handle in handles:
            handle.wait()
        assert all(bool((buffer == buffer[0]).all()) for buffer in buffers)
        return [float(buffer[0]) for buffer in buffers]

    for found in loopback.run(pair, body):
        assert found == [2.0 * n + 1 for n in range(60)]


def test_rank_that_starts_late_receives_what_was_buffered(pair: list[World]) -> None:
    """More bytes than a channel's window, so that the sender has to wait for credits."""

    def body(world: World) -> float:
        collectives, buffer = Collectives(world), torch.full((6_000_000,), 1.0 + world.rank)
        if world.rank == 1:
            time.sleep(0.3)
        collectives.all_reduce(buffer).wait()
        return float(buffer.sum())

    assert loopback.run(pair, body) == [18_000_000.0] * 2


def test_channel_whose_window_is_full_does_not_delay_another(pair: list[World]) -> None:
    def body(world: World) -> float:
        stuck, free = Collectives(world.open_channel()), Collectives(world)
        large, small = torch.ones(6_000_000), torch.ones(10)
        waiting = stuck.all_reduce(large) if world.rank == 0 else None
        for _ in range(20):
            free.all_reduce(small).wait()
        (waiting or stuck.all_reduce(large)).wait()
        return float(large[0])

    assert loopback.run(pair, body) == [2.0, 2.0]


def test_callbacks_run_once_after_the_result(pair: list[World]) -> None:
    def body(world: World) -> list[float]:
        collectives, buffer = Collectives(world), torch.ones(1000)
        seen: list[float] = []
        handle = collectives.all_reduce(buffer)
        called = threading.Semaphore(0)
        for _ in range(3):
            handle.add_done_callback(lambda _: (seen.append(float(buffer[0])), called.release()))
        for _ in range(3):
            assert called.acquire(timeout=20.0)
        handle.wait()
        handle.add_done_callback(lambda _: seen.append(-1.0))
        return seen

    assert loopback.run(pair, body) == [[2.0, 2.0, 2.0, -1.0]] * 2


def test_buffer_is_released_after_the_wait(pair: list[World]) -> None:
    def body(world: World) -> bool:
        collectives, buffer = Collectives(world), torch.ones(1000)
        released = weakref.ref(buffer)
        collectives.all_reduce(buffer).wait()
        del buffer
        gc.collect()
        return released() is None

    assert loopback.run(pair, body) == [True, True]


def test_buffer_is_released_after_a_wait_that_was_observed(pair: list[World]) -> None:
    buffer = torch.ones(1000)
    released = weakref.ref(buffer)
    executor = native.executors_of(pair[0])[0]
    job = Collectives(pair[0]).all_reduce(buffer)
    until(lambda: executor.waiting is not None)
    Collectives(pair[1]).all_reduce(torch.ones(1000)).wait()
    job.wait()
    assert executor.waiting is None
    del job, buffer
    gc.collect()
    assert released() is None


def test_peer_that_closes_fails_all_jobs_within_a_second_and_is_named() -> None:
    members = tcp.worlds(3)
    collectives = [Collectives(world) for world in members]
    handles = [collectives[0].all_reduce(torch.ones(1000), bucket=n) for n in range(3)]
    begin = time.monotonic()
    members[2].links[0].close()
    for handle in handles:
        with pytest.raises(PeerError, match=r"rank 0: rank 2 failed during all-reduce of bucket"):
            handle.wait()
    assert time.monotonic() - begin < 5.0
    with pytest.raises(PeerError):
        collectives[0].all_reduce(torch.ones(4))
    tcp.close(members)


def test_failed_collective_no_longer_writes_to_its_buffer(pair: list[World]) -> None:
    buffer = torch.zeros(2_000_000)
    handle = Collectives(pair[0]).all_reduce(buffer)
    pair[1].links[0].close()
    with pytest.raises(PeerError):
        handle.wait()
    before = buffer.clone()
    time.sleep(0.05)
    assert torch.equal(buffer, before)


def test_call_after_a_failure_keeps_the_peer_in_the_error_of_the_first(
    pair: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure is explained by the thread that waits, after another call has been made."""
    monkeypatch.setattr(native, "run_callback", lambda _: None)
    collectives = Collectives(pair[0])
    first = collectives.all_reduce(torch.ones(8), bucket=3)
    pair[1].links[0].close()
    deadline = time.monotonic() + 20.0
    while not first.done():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second = collectives.all_reduce(torch.ones(8), bucket=4)
    for handle in (first, second):
        with pytest.raises(PeerError, match="rank 0: rank 1 failed during all-reduce of bucket 3"):
            handle.wait()


def test_world_dropped_without_close_ends_its_collectives_before_their_buffers() -> None:
    members = tcp.worlds(2)
    handle = Collectives(members[0]).all_reduce(torch.ones(8))
    job = handle.jobs[0]
    assert isinstance(job, NativeJob)
    lane = job._executor._lane
    assert lane.waiting() is not None
    del handle, job
    members.pop(0)
    gc.collect()
    assert lane.waiting() is None
    tcp.close(members)


def test_calls_that_differ_are_named_on_a_rank_that_waits(pair: list[World]) -> None:
    def body(world: World) -> str:
        collectives = Collectives(world)
        numel = 1000 if world.rank == 0 else 999
        try:
            collectives.all_reduce(torch.ones(numel), bucket=world.rank).wait()
        except PeerError as err:
            return str(err)
        return ""

    texts = loopback.run(pair, body)
    assert any("all ranks must make the same calls" in text for text in texts), texts
    assert all(texts)


def test_abandoned_collective_ends_at_once(pair: list[World]) -> None:
    collectives = Collectives(pair[0])
    handle = collectives.all_reduce(torch.ones(8))
    begin = time.monotonic()
    collectives.abandon()
    with pytest.raises(PeerError):
        handle.wait()
    assert time.monotonic() - begin < 5.0


def test_executor_closes_after_an_interrupt_in_the_submission_of_a_call(pair: list[World]) -> None:
    collectives = Collectives(pair[0])
    executor = collectives._executors[0]
    assert isinstance(executor, native.NativeExecutor)
    lane = executor._lane

    class Interrupted:
        def submit(self, *_: Any) -> None:
            raise KeyboardInterrupt

        def __getattr__(self, name: str) -> Any:
            return getattr(lane, name)

    executor._lane = Interrupted()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        collectives.all_reduce(torch.ones(8))
    executor.close()  # waits for no call that was not begun


def test_executor_that_a_starting_thread_collects_is_released(
    pair: list[World], monkeypatch: pytest.MonkeyPatch
) -> None:
    completions, thread = native._Completions(), threading.Thread
    released: list[bool] = []

    class Collecting(thread):
        def start(self) -> None:
            collector = thread(target=completions.release, args=(7,), daemon=True)
            collector.start()
            collector.join(10.0)
            released.append(not collector.is_alive())
            super().start()

    executor = Collectives(pair[0])._executors[0]
    assert isinstance(executor, native.NativeExecutor)
    monkeypatch.setattr(threading, "Thread", Collecting)
    completions.watch(executor, 8)
    completions.release(8)
    assert released == [True]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_that_collects_a_world_does_not_wait_for_its_threads() -> None:
    members = tcp.worlds(2)
    made = [Collectives(members[0])]
    handles = [made[0].all_reduce(torch.ones(1000))]
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is ended
        handles.clear()
        made.clear()
        members.clear()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    Collectives(members[1]).all_reduce(torch.ones(1000)).wait()
    handles[0].wait()
    tcp.close(members)
