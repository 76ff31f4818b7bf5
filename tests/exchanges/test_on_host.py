"""Buckets of an accelerator in exchanges on the host, on a device whose streams run late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import accelerator
from wingbeat.collectives import Handle
from wingbeat.exchanges.on_host import BucketsOnHost

pytestmark = pytest.mark.skipif(bool(accelerator.why_not()), reason=accelerator.why_not())

NUMEL = 1000
BUSY = 30


@pytest.mark.parametrize("seed", range(12))
def test_second_result_of_a_bucket_does_not_overwrite_the_first_before_it_is_copied(
    seed: int,
) -> None:
    accelerator.load().late_seed(seed)
    device = torch.device(accelerator.NAME, 0)
    first, second = torch.zeros(NUMEL, device=device), torch.zeros(NUMEL, device=device)
    bucket: Any = SimpleNamespace(
        index=0, flat=first, numel=NUMEL, slots=[], flags=[], counts=[],
        wire=None, blocks=None, handle=None,
    )  # fmt: skip
    on_host = BucketsOnHost([bucket])
    for _ in range(BUSY):
        first.add_(1.0)  # the copy of the first result has to wait for these
    for value, into in ((1.0, None), (2.0, second)):
        copy = on_host.of(0)
        flat = copy.flat

        def submit(flat: torch.Tensor = flat, value: float = value) -> Handle:
            flat.fill_(value)
            return Handle([])

        on_host.start(copy, submit, out=False, into=into)
        bucket.handle.wait()
    assert first.tolist() == [1.0] * NUMEL
    assert second.tolist() == [2.0] * NUMEL
