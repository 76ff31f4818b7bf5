"""Files of residuals beside a checkpoint: the old ones are there until all new ones are."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from helpers.disk import room_for
from wingbeat.errors import UsageError
from wingbeat.integrations import checkpoint

NAME = "residuals_0"


def write(folder: Path, size: int, ranks: Sequence[int], value: float = 0.0) -> None:
    for rank in ranks:
        checkpoint.write_part({"rank": rank, "of": size, "value": value}, folder, NAME, rank, size)


def read(folder: Path, rank: int, size: int) -> list[tuple[int, int]]:
    return [(part["rank"], part["of"]) for part in checkpoint.read_parts(folder, NAME, rank, size)]


def files(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    write(tmp_path, 4, (0, 1, 3))
    assert read(tmp_path, 1, 4) == [(1, 4)]
    assert checkpoint.read_parts(tmp_path, "residuals_1", 1, 4) == []
    for rank, size in ((2, 4), (0, 2)):
        with pytest.raises(UsageError, match="has residuals of 3 of 4 workers, and not"):
            read(tmp_path, rank, size)
    for path in tmp_path.iterdir():
        path.write_bytes(b"PK nonsense")
    with pytest.raises(UsageError, match="cannot be read"):
        read(tmp_path, 0, 4)


@pytest.mark.parametrize("nbytes", [100, 300_000])
def test_write_cut_short_leaves_the_old_part(tmp_path: Path, nbytes: int) -> None:
    """At the first bytes, and in the middle of a tensor, where torch hides what the disk says."""
    write(tmp_path, 1, [0])
    large = {"rank": 7, "of": 1, "residual": torch.zeros(1_000_000)}
    with room_for(nbytes), pytest.raises(UsageError, match=r"cannot write .*: File too large"):
        checkpoint.write_part(large, tmp_path, NAME, 0, 1)
    assert read(tmp_path, 0, 1) == [(0, 1)]
    assert files(tmp_path) == ["wingbeat_residuals_0_0_of_1.pt"]


def test_parts_of_another_size_stay_until_all_new_ones_stand(tmp_path: Path) -> None:
    write(tmp_path, 4, range(4))
    old = files(tmp_path)
    write(tmp_path, 2, [1])
    assert set(old) < set(files(tmp_path))
    write(tmp_path, 2, [0])
    assert files(tmp_path) == [f"wingbeat_{NAME}_{rank}_of_2.pt" for rank in range(2)]
    assert read(tmp_path, 0, 4) == [(0, 2), (1, 2)]


def test_part_that_cannot_be_written_keeps_those_of_another_size(tmp_path: Path) -> None:
    write(tmp_path, 4, range(4))
    old = files(tmp_path)
    with room_for(100), pytest.raises(UsageError, match="File too large"):
        write(tmp_path, 1, [0])
    assert files(tmp_path) == old
    assert read(tmp_path, 2, 4) == [(2, 4)]


def test_newest_files_tell_which_run_they_are_of(tmp_path: Path) -> None:
    """On hosts with folders of their own no host ever sees all parts, and old ones stay."""
    write(tmp_path, 2, range(2))
    write(tmp_path, 4, [2, 3])
    for path in tmp_path.iterdir():
        age = 100 if "_of_2" in path.name else 0
        os.utime(path, ns=(10**18 - age, 10**18 - age))
    assert read(tmp_path, 2, 4) == [(2, 4)]
    for rank, size in ((0, 2), (1, 4), (0, 3)):
        with pytest.raises(UsageError, match="has residuals of 2 of 4 workers, and not"):
            read(tmp_path, rank, size)
