"""What draws random numbers and leaves none drawn."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import torch

_ALONE = threading.Lock()


@contextlib.contextmanager
def kept_random_state(cuda: list[torch.device]) -> Iterator[None]:
    """Put the state of torch's random numbers back afterwards, on the CPU and on these devices.

    One thread at a time: torch asks for a generator's lock while it holds Python's, and may give
    Python's away while it holds the generator's, so that two threads can wait for each other.
    """
    with _ALONE, torch.random.fork_rng(devices=cuda):
        yield
