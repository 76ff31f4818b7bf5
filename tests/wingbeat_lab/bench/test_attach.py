"""DDP's buckets at a scale, and nothing else of DDP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn

from wingbeat_lab.bench import attach


@pytest.fixture(autouse=True)
def _group() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_only_the_model_at_hand_has_smaller_buckets() -> None:
    untyped: Any = dist
    usual = untyped._DEFAULT_FIRST_BUCKET_BYTES
    scaled: Any = attach.wrap(nn.Linear(3, 3), mb=attach.DEFAULT_MB, scale=0.25)
    assert scaled.bucket_bytes_cap == int(0.25 * 25 * 2**20)
    assert usual == untyped._DEFAULT_FIRST_BUCKET_BYTES
    plain: Any = attach.wrap(nn.Linear(3, 3), mb=attach.DEFAULT_MB, scale=1.0)
    assert plain.bucket_bytes_cap == 25 * 2**20


def test_the_first_bucket_is_put_back_also_where_ddp_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    untyped: Any = dist
    usual, seen = untyped._DEFAULT_FIRST_BUCKET_BYTES, []

    def fail(*_args: Any, **_options: Any) -> None:
        seen.append(untyped._DEFAULT_FIRST_BUCKET_BYTES)
        raise ArithmeticError

    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "_ddp_init_helper", fail)
    with pytest.raises(ArithmeticError):
        attach.wrap(nn.Linear(3, 3), mb=attach.DEFAULT_MB, scale=0.25)
    assert seen == [usual // 4]
    assert usual == untyped._DEFAULT_FIRST_BUCKET_BYTES
