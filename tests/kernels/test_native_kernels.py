"""What is the native kernels' own: instruction sets, threads, guesses that fail, addresses.

What all kernels do is in ``tests/contracts/kernels``; ``make sanitize`` runs the C++ by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from wingbeat.kernels import layout, reference

_native = pytest.importorskip("wingbeat._native", reason="the extension is not built")
native = pytest.importorskip("wingbeat.kernels.native")

LARGE = (5 << 19) + 13
"""Enough elements that several threads get work in every loop."""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    _native.prefer_portable(False)


def heavy(n: int) -> Tensor:
    return torch.randn(n) * torch.randn(n).mul_(3).exp_()


def sketch(x: Tensor, bits: int, residual: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    payload = torch.empty(layout.sketch_bytes(x.numel(), bits), dtype=torch.uint8)
    left, out = residual.clone(), torch.empty_like(x)
    native.sketch_encode(x, payload, bits=bits, residual=left)
    native.sketch_decode(payload, out, bits=bits)
    return payload, left, out


def topk(x: Tensor, k: int, residual: Tensor, velocity: Tensor) -> tuple[Tensor, ...]:
    payload = torch.empty(layout.topk_bytes(x.numel(), k), dtype=torch.uint8)
    left, faster, out = residual.clone(), velocity.clone(), torch.empty_like(x)
    native.topk_encode(x, payload, k=k, residual=left, velocity=faster, momentum=0.9)
    native.topk_decode(payload, out, k=k)
    return payload, left, faster, out


def everything(n: int) -> list[Tensor]:
    x, residual, velocity = heavy(n), heavy(n), heavy(n)
    found: list[Tensor] = []
    for bits in (8, 3):
        found += sketch(x, bits, residual)
    for density in (0.001, 0.05):
        found += topk(x, layout.count_of(n, density), residual, velocity)
    return found


def assert_same(ones: list[Tensor], others: list[Tensor]) -> None:
    assert len(ones) == len(others) > 0
    for one, other in zip(ones, others, strict=True):
        assert torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("n", [1000, 70_001])
def test_all_instruction_sets_give_the_same(n: int) -> None:
    torch.manual_seed(1)
    fast = everything(n)
    _native.prefer_portable(True)
    assert native.instructions() == "portable"
    torch.manual_seed(1)
    assert_same(fast, everything(n))


def test_the_number_of_threads_changes_nothing() -> None:
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        torch.manual_seed(1)
        found.append(everything(LARGE))
    assert_same(found[0], found[1])
    assert_same(found[0], found[2])


@pytest.mark.parametrize("where", [slice(-3000, None), slice(0, 3000), slice(0, None, 2)])
@pytest.mark.parametrize("value", [1e6, torch.inf, torch.nan])
@pytest.mark.parametrize("k", [100, 5000])
def test_values_that_a_sample_misjudges(where: slice, value: float, k: int) -> None:
    x = torch.randn(400_003)
    x[where] = value
    x[7] = -torch.inf
    residual, velocity = torch.randn(2, x.numel()).unbind()
    wanted = torch.empty(layout.topk_bytes(x.numel(), k), dtype=torch.uint8)
    left, faster = residual.clone(), velocity.clone()
    reference.topk_encode(x, wanted, k=k, residual=left, velocity=faster, momentum=0.9)
    assert_same([wanted, left, faster], list(topk(x, k, residual, velocity)[:3]))


@pytest.mark.parametrize("value", [0.0, -2.5])
def test_constant_tensors_send_the_first(value: float) -> None:
    x, zeros = torch.full((300_000,), value), torch.zeros(300_000)
    payload, *_ = topk(x, 300, zeros, zeros)
    offsets = payload[-600:].view(torch.int16)
    assert offsets.tolist() == list(range(300))


def test_a_payload_may_begin_at_any_address() -> None:
    x, room = heavy(5000), torch.empty(6100, dtype=torch.uint8)
    for bits in (8, 5):
        size = layout.sketch_bytes(5000, bits)
        payload, out = room[1 : 1 + size], torch.empty_like(x)
        native.sketch_encode(x, payload, bits=bits)
        native.sketch_decode(payload, out, bits=bits)
        assert torch.equal(out, sketch(x, bits, torch.zeros(5000))[2])
    size = layout.topk_bytes(5000, 50)
    native.topk_encode(x, room[3 : 3 + size], k=50)
    native.topk_decode(room[3 : 3 + size], out, k=50)
    assert int(out.count_nonzero()) == 50


@pytest.mark.parametrize(
    "call",
    [
        lambda x, p: native.sketch_encode(x, p, bits=8),
        lambda x, p: native.sketch_decode(p, x, bits=8),
        lambda x, p: native.topk_encode(x, p, k=170),
        lambda x, p: native.topk_decode(p, x, k=170),
    ],
)
def test_tensors_without_memory_here_are_refused(call: Callable[[Tensor, Tensor], None]) -> None:
    x = torch.empty(256, device="meta")
    with pytest.raises(ValueError, match="is on meta; the native kernels need the CPU"):
        call(x, torch.empty(1024, dtype=torch.uint8, device="meta"))


def test_many_threads_may_encode_at_once() -> None:
    """Each has tables of its own, and none holds the interpreter's lock."""
    x = [heavy(200_000) for _ in range(4)]
    zeros = torch.zeros(200_000)
    alone = [sketch(one, 8, zeros)[0] for one in x]
    found: list[list[Tensor]] = [[] for _ in x]

    def work(i: int) -> None:
        found[i] += [sketch(x[i], 8, zeros)[0] for _ in range(10)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(x))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, payloads in enumerate(found):
        assert_same(payloads, [alone[i]] * 10)
