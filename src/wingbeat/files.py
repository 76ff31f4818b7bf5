"""Files replaced as a whole: after a crash or on a full disk the former content is still there."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from wingbeat.errors import UsageError

_NO_FOLDER_SYNC = (errno.EACCES, errno.EINVAL, errno.ENOTSUP)
"""Not every file system can sync a folder, and a folder need not be readable."""


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], name: str = "") -> Iterator[BinaryIO]:
    """Open a file for writing; it takes the place of ``path`` once all of it is on the disk.

    A symbolic link stays, and what it points to is replaced. A pipe or a device is written to.

    Args:
        path: the file; its folder is made if it is not there.
        name: what messages call it; its path if empty.

    Raises:
        UsageError: the file cannot be written, or what happens inside raises `OSError`; ``path``
            is as it was before.
    """
    target = Path(os.path.realpath(path))
    # A name that nobody can guess, and a file that was not there before: in a folder that
    # others may write to, a link laid in the way must not lead to another file.
    draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        if target.exists() and not target.is_file():
            with target.open("wb") as file:
                yield file
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        file = draft.open("xb")
        try:
            with file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
        except BaseException:
            with contextlib.suppress(OSError):  # what hinders writing may hinder this too
                draft.unlink()
            raise
        _sync(target.parent)
    except OSError as err:
        reason = err.strerror or err
        raise UsageError(f"cannot write {name or repr(str(path))}: {reason}") from None


def _sync(folder: Path) -> None:
    """Put the folder's entries on the disk, without which a power cut may undo a renaming."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as err:
        if err.errno not in _NO_FOLDER_SYNC:
            raise
