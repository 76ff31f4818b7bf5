"""Files are replaced as a whole, or stay as they were."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.disk import room_for
from wingbeat.errors import UsageError
from wingbeat.files import replacing

_FULL = """
import os, subprocess, sys
from wingbeat.errors import UsageError
from wingbeat.files import replacing
folder = sys.argv[1]
if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", folder]).returncode:
    sys.exit(77)
path = os.path.join(folder, "kept")
with replacing(path) as file:
    file.write(b"good")
try:
    with replacing(path) as file:
        file.write(b"x" * 100_000)
except UsageError as error:
    print(error)
print(os.listdir(folder), open(path).read())
"""


def put(path: Path, data: bytes) -> None:
    with replacing(path) as file:
        file.write(data)


def test_new_content_replaces_all_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "made" / "file"
    for data in (b"long content", b"short"):
        put(path, data)
        assert path.read_bytes() == data
    assert os.listdir(path.parent) == ["file"]


def test_write_cut_short_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, b"good")
    with (
        room_for(1000),
        pytest.raises(UsageError, match=r"cannot write '.*file': File too large$"),
    ):
        put(path, b"x" * 100_000)
    assert path.read_bytes() == b"good"
    assert os.listdir(tmp_path) == ["file"]


def test_disk_that_is_full_leaves_the_old_file(tmp_path: Path) -> None:
    command = ["unshare", "-rm", sys.executable, "-c", _FULL, str(tmp_path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("no unshare (util-linux) here")
    if done.returncode == 77 or done.stderr.startswith("unshare:"):
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()[-200:]}")
    assert done.returncode == 0, done.stderr
    path = tmp_path / "kept"
    assert done.stdout.splitlines() == [
        f"cannot write '{path}': No space left on device",
        "['kept'] good",
    ]


def test_exception_inside_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, b"good")
    with contextlib.suppress(KeyError), replacing(path) as file:
        file.write(b"half")
        raise KeyError
    assert path.read_bytes() == b"good"
    assert os.listdir(tmp_path) == ["file"]


def test_old_file_is_there_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    put(path, b"good")
    with replacing(path) as file:
        file.write(b"new")
        file.flush()
        assert path.read_bytes() == b"good"
    assert path.read_bytes() == b"new"


def test_data_and_folder_are_synced_around_the_renaming(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, seen = tmp_path / "file", []

    def fsync(handle: int) -> None:
        seen.append((os.readlink(f"/proc/self/fd/{handle}"), path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    put(path, b"data")
    (data, before), (folder, after) = seen
    assert data.startswith(f"{tmp_path}/.file.")
    assert (before, folder, after) == (False, str(tmp_path), True)


def test_folder_that_is_none_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = replacing(tmp_path / "file" / "below", "results 'below'")
    with (
        pytest.raises(UsageError, match=r"^cannot write results 'below': (Not a dir|File ex)"),
        below,
    ):
        pytest.fail("nothing can be written there")


def test_pipe_is_written_to(tmp_path: Path) -> None:
    """As with ``--json /dev/stdout``: a renaming would put a file in the place of the device."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    found: list[bytes] = []
    reader = threading.Thread(target=lambda: found.append(pipe.read_bytes()), daemon=True)
    reader.start()
    put(pipe, b"through")
    reader.join(10)
    assert found == [b"through"]
    assert pipe.is_fifo()


def test_replacing_removes_drafts_of_killed_processes_and_nothing_else(tmp_path: Path) -> None:
    names = [".kept.0123abcd.part", ".kept.4567cdef.part", ".other.0123abcd.part", "kept.part"]
    for name in names:
        (tmp_path / name).write_bytes(b"half")
    hours_ago = time.time() - 7300
    for name in set(names) - {".kept.4567cdef.part"}:  # another process writes this one
        os.utime(tmp_path / name, (hours_ago, hours_ago))
    put(tmp_path / "kept", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["kept", *names[1:]])
