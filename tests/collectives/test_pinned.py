"""Copies of device tensors in pinned memory, on a device whose streams run late."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from helpers import accelerator
from helpers.waiting import PATIENCE
from wingbeat.collectives.pinned import (
    Copies,
    HostMirror,
    Pair,
    on_stream,
    pinned_like,
    pinned_zeros,
)
from wingbeat.errors import PeerError, UsageError

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())

BUSY = 30
SEEDS = range(12)


@pytest.fixture(autouse=True, scope="module")
def _device() -> None:
    accelerator.load()


@pytest.fixture(params=SEEDS)
def device(request: pytest.FixtureRequest) -> torch.device:
    """A device with streams in the order of a seed."""
    accelerator.load().late_seed(request.param)
    return torch.device(accelerator.NAME, 0)


def late(value: float, device: torch.device, numel: int = 50) -> torch.Tensor:
    """A tensor that has this value after many kernels."""
    made = torch.full((numel,), value, device=device)
    for _ in range(BUSY):
        made.mul_(2.0)
    for _ in range(BUSY):
        made.mul_(0.5)
    return made


def synchronizations() -> int:
    found: int = accelerator.load().late_synchronizations(threading.get_native_id())
    return found


def test_threads_on_the_same_stream_each_return_to_their_own() -> None:
    device = torch.device(accelerator.NAME, 0)
    shared, entered, left = torch.Stream(device), threading.Barrier(2), threading.Event()

    def use(first: bool) -> None:
        own = torch.Stream(device)
        with on_stream(own):
            with on_stream(shared):
                assert torch.accelerator.current_stream() == shared
                entered.wait(PATIENCE)
                if not first:
                    left.wait(PATIENCE)
            assert torch.accelerator.current_stream() == own
            left.set()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(use, (True, False)))


def test_stream_is_that_of_before_after_an_exception() -> None:
    device = torch.device(accelerator.NAME, 0)
    before = torch.accelerator.current_stream()
    with pytest.raises(MemoryError), on_stream(torch.Stream(device)):
        raise MemoryError
    assert torch.accelerator.current_stream() == before


class Done:
    """An operation that is done, or has failed."""

    def __init__(self, error: str = "") -> None:
        self._error = error

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def wait(self) -> None:
        if self._error:
            raise PeerError(self._error)


def test_operation_on_the_hosts_copy_is_read_and_written_without_host_waits(
    device: torch.device,
) -> None:
    copies, buffer = Copies(device), late(1.0, device)
    host = pinned_like(buffer)
    before = synchronizations()

    def submit() -> Done:
        host.add_(1.0)
        return Done()

    operation = copies.start("a test", [Pair(buffer, host)], submit, [Pair(buffer, host)])
    operation.wait()
    buffer.mul_(10.0)
    assert synchronizations() == before
    assert buffer.tolist() == [20.0] * 50


def test_result_is_copied_after_earlier_kernels_have_used_the_buffer(device: torch.device) -> None:
    copies, buffer = Copies(device), late(1.0, device)
    host = pinned_zeros(50, torch.float32)
    operation = copies.start("a test", [], Done, [Pair(buffer, host)])
    operation.wait()
    assert buffer.tolist() == [0.0] * 50


def test_operation_that_copies_nothing_to_the_host_begins_at_once() -> None:
    accelerator.load().late_seed(0)
    device = torch.device(accelerator.NAME, 0)
    copies, buffer, began = Copies(device), late(1.0, device), threading.Event()
    pair = Pair(buffer, pinned_like(buffer))

    def submit() -> Done:
        assert began.wait(PATIENCE)
        return Done()

    def begin() -> Done:
        began.set()
        return Done()

    earlier = copies.start("earlier", [pair], submit, [])
    copies.start("later", [], begin, [pair])
    assert began.is_set()
    earlier.wait()


def test_error_of_an_operation_is_raised_by_wait(device: torch.device) -> None:
    copies, buffer = Copies(device), late(1.0, device)
    pair = Pair(buffer, pinned_like(buffer))
    failed = copies.start("a test", [pair], lambda: Done("rank 1 is gone"), [pair])
    with pytest.raises(PeerError, match="rank 1 is gone"):
        failed.wait()

    def submit() -> Done:
        raise ValueError("no")

    with pytest.raises(PeerError, match=r"a test: ValueError\('no'\)"):
        copies.start("a test", [pair], submit, [pair]).wait()


def test_wrong_use_that_an_operation_finds_stays_a_usage_error(device: torch.device) -> None:
    copies, buffer = Copies(device), late(1.0, device)

    def submit() -> Done:
        raise UsageError("a line for the user")

    operation = copies.start("bucket 3", [Pair(buffer, pinned_like(buffer))], submit, [])
    for _ in range(2):
        with pytest.raises(UsageError, match=r"^a line for the user$"):
            operation.wait()


def test_memory_that_is_released_during_a_copy_is_not_reused_before(device: torch.device) -> None:
    copies = Copies(device)
    host = pinned_zeros(50, torch.float32)
    copied = copies.out([Pair(late(3.0, device), host)], copies.ready())
    copied.synchronize()
    assert host.tolist() == [3.0] * 50
    copies.back([Pair(torch.empty(50, device=device), host)], copies.ready())
    torch.accelerator.synchronize(device)  # raises if a copy has used released memory


def test_mirror_reads_what_the_device_will_have_and_writes_before_later_kernels(
    device: torch.device,
) -> None:
    mirror = HostMirror()
    flat = pinned_zeros(100, torch.float32)
    hosts = list(flat.split(50))
    tensors = [late(1.0, device), late(2.0, device).to(torch.float64)]
    mirror.read(hosts, tensors)
    assert flat.tolist() == [1.0] * 50 + [2.0] * 50
    flat.add_(1.0)
    before = synchronizations()
    mirror.write(tensors, hosts)
    sums = [tensor * 1.0 for tensor in tensors]
    assert synchronizations() == before
    mirror.read(hosts, [tensor * 10.0 for tensor in tensors])
    assert flat.tolist() == [20.0] * 50 + [30.0] * 50
    assert [each.tolist() for each in sums] == [[2.0] * 50, [3.0] * 50]


def test_mirror_writes_to_contiguous_tensors_of_the_same_dtype_without_memory_of_the_device(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror, flat = HostMirror(), pinned_zeros(100, torch.float32)
    tensors = [late(1.0, device), late(2.0, device)]
    flat.fill_(3.0)
    monkeypatch.delattr(HostMirror, "moved")
    mirror.write(tensors, flat.split(50))
    assert [each.tolist() for each in tensors] == [[3.0] * 50] * 2


def test_mirror_of_the_cpu_and_of_an_accelerator_copies_each(device: torch.device) -> None:
    mirror, flat = HostMirror(), pinned_zeros(4, torch.float32)
    hosts = list(flat.split(2))
    tensors = [torch.ones(2), late(2.0, device, 2)]
    mirror.read(hosts, tensors)
    assert flat.tolist() == [1.0, 1.0, 2.0, 2.0]
    flat.mul_(3.0)
    mirror.write(tensors, hosts)
    assert [each.tolist() for each in tensors] == [[3.0, 3.0], [6.0, 6.0]]
