"""The store of a mesh's column, and what ranks say of their meshes."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist

from wingbeat.errors import MismatchError, UsageError
from wingbeat.transport.mesh import describe, refuse_unequal
from wingbeat.transport.torch_store import Authenticator, ColumnStore, TorchStore

TOLD = {"shape": [2, 2], "names": ["a", "b"], "device": "cpu", "ranks": [0, 1, 2, 3], "across": "a"}


@pytest.mark.parametrize("key", [None, b"secret of the job"])
def test_column_shares_only_what_is_published_of_ranks(key: bytes | None) -> None:
    job = TorchStore(dist.HashStore(), None if key is None else Authenticator(key, "0/1/job"))
    first, second = ColumnStore(job, "column/0/0"), ColumnStore(job, "column/0/1")
    first.set("left/2", "failed")
    assert job.get("left/2", 0.0) == second.get("left/2", 0.0) == "failed"
    first.set("1/model/0", "mine")
    assert first.get("1/model/0", 0.0) == "mine"
    assert not second.has("1/model/0")
    assert not job.has("1/model/0")
    assert second.claim("1/model/0", "other") == "other"
    assert first.claim("1/model/0", "later") == "mine"


def test_value_of_another_column_is_rejected() -> None:
    """It has a valid tag, but for another key."""
    raw = dist.HashStore()
    job = TorchStore(raw, Authenticator(b"secret of the job", "0/1/job"))
    first, second = ColumnStore(job, "a"), ColumnStore(job, "b")
    first.set("plan", "value")
    raw.set("b/plan", raw.get("a/plan"))
    assert not second.has("plan")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (None, "rank 0 gives .* a mesh and rank 3 none"),
        ({**TOLD, "device": "cuda"}, "rank 0's mesh has device type cpu, rank 3's has cuda"),
        ({**TOLD, "names": []}, r"dimensions \['a', 'b'\], rank 3's has \[\]"),
        ({**TOLD, "across": "b"}, "across='a', rank 3 has across='b'"),
    ],
)
def test_first_difference_of_meshes_is_named(other: Any, words: str) -> None:
    refuse_unequal(TOLD, dict(TOLD), 3)
    refuse_unequal(None, None, 3)
    with pytest.raises(MismatchError, match=words):
        refuse_unequal(TOLD, other, 3)


def test_rank_without_a_mesh_is_named_if_it_is_rank_0() -> None:
    with pytest.raises(MismatchError, match=r"rank 2 gives .* a mesh and rank 0 none"):
        refuse_unequal(None, TOLD, 2)


def test_dimension_by_number_is_refused() -> None:
    with pytest.raises(UsageError, match="pass a torch DeviceMesh"):
        describe([[0, 1]], None)
