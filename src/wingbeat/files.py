"""Atomic replacement of files: a crash or a full disk leaves the former content intact."""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from wingbeat.errors import UsageError

_NO_FOLDER_SYNC = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""Errors ignored by `_sync`: the file system cannot sync a folder, or it is unreadable."""

_ABANDONED_S = 3600.0
"""Seconds without a write after which a draft is one of a killed process."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], name: str = "") -> Iterator[BinaryIO]:
    """Open a file for writing that replaces ``path`` when it is completely on the disk.

    Missing folders are created. A symbolic link is kept and its target replaced. A pipe or a device
    is written to directly. ``name`` replaces the path in messages.

    Raises:
        UsageError: the file cannot be written, or an `OSError` is raised inside; ``path`` is
            unchanged.
    """
    target = Path(os.path.realpath(path))
    # The name is unpredictable and created exclusively, so that a link placed by another user in a
    # shared folder cannot redirect the write.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_old_drafts(target)
        file = draft.open("xb")
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):  # the cause may prevent this too
                draft.unlink()
            raise
        _sync(target.parent)
    except OSError as err:
        reason = err.strerror or err
        raise UsageError(f"cannot write {name or repr(str(path))}: {reason}") from None


def _remove_old_drafts(target: Path) -> None:
    """Remove the drafts of processes that were killed while they wrote ``target``."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.????????.part"):
        with contextlib.suppress(OSError):
            if time.time() - left.lstat().st_mtime > _ABANDONED_S:
                left.unlink()


def _sync(folder: Path) -> None:
    """Sync the folder's entries; otherwise a power failure may undo the renaming."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as err:
        if err.errno not in _NO_FOLDER_SYNC:
            raise
