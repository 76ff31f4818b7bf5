"""A disk that is full: a process may not write more than so much to a file."""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def room_for(nbytes: int) -> Iterator[None]:
    """Have the kernel take ``nbytes`` of each file that is written, and refuse the rest.

    It writes what fits and then fails with EFBIG, "File too large", as a full disk does with
    ENOSPC; Python ignores the signal that comes with it.
    """
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
