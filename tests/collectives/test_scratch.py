from __future__ import annotations

import torch

from wingbeat.collectives import packing
from wingbeat.collectives.packing import ScratchPool


def test_returned_tensor_is_reused() -> None:
    pool = ScratchPool()
    first = pool.acquire(1000, torch.bfloat16)
    assert (first.shape, first.dtype, first.is_contiguous()) == ((1000,), torch.bfloat16, True)
    where = first.data_ptr()
    other = pool.acquire(1000, torch.bfloat16)
    assert other.data_ptr() != where
    pool.release(first)
    assert pool.acquire(600, torch.bfloat16).data_ptr() == where


def test_dtypes_and_sizes_far_apart_do_not_mix() -> None:
    pool = ScratchPool()
    small = pool.acquire(10, torch.float32)
    where = small.data_ptr()
    pool.release(small)
    assert pool.acquire(10, torch.float16).dtype is torch.float16
    assert pool.acquire(17, torch.float32).shape == (17,)
    assert pool.acquire(16, torch.float32).data_ptr() == where
    assert pool.acquire(1, torch.float32).shape == (1,)


def test_pool_keeps_at_most_the_limit(monkeypatch) -> None:
    monkeypatch.setattr(packing, "MAX_POOL_BYTES", 3 * 4096)
    pool = ScratchPool()
    taken = [pool.acquire(1024, torch.float32) for _ in range(5)]
    kept = {tensor.data_ptr() for tensor in taken[:3]}
    for _ in range(2):
        for tensor in taken[:3]:
            pool.release(tensor)
        again = [pool.acquire(1024, torch.float32) for _ in range(3)]
        assert {tensor.data_ptr() for tensor in again} == kept
    # What is refused does not count: the next time as much is kept.
    for _ in range(3):
        for tensor in taken:
            pool.release(tensor)
        again = [pool.acquire(1024, torch.float32) for _ in range(5)]
        assert {tensor.data_ptr() for tensor in again} & {t.data_ptr() for t in taken} == kept
