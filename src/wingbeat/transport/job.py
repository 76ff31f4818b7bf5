"""Which job a store belongs to: checked before anything else in it is read."""

from __future__ import annotations

import json
import secrets
import time
from typing import NamedTuple

from wingbeat.errors import RendezvousError
from wingbeat.transport.seal import KEY_VARIABLE, MARK
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import Refused, TorchStore

_KEY = "job"
_LONGEST = 256

_REPLACED_S = 2.0
"""Seconds in which rank 0 writes over what somebody else has put there, before it is believed to
be what rank 0 has written with another key."""

_LOOK_S = 0.05


class Job(NamedTuple):
    """What rank 0 writes into the store.

    Attributes:
        name: the launcher's, or the user's; if there is none, what rank 0 has drawn.
        drawn: whether rank 0 has drawn it.
        size: number of workers.
    """

    name: str
    drawn: bool
    size: int

    @staticmethod
    def from_text(text: str) -> Job:
        """Return what rank 0 has written.

        Raises:
            ValueError: it is something else.
        """
        try:
            match json.loads(text):
                case [str(name), bool(drawn), int(size)] if len(name) <= _LONGEST and size > 0:
                    return Job(name, drawn, size)
        except RecursionError:
            pass
        raise ValueError("no job")

    def __str__(self) -> str:
        return "a job without a name" if self.drawn else f"job {self.name!r}"


def enter(store: TorchStore, rank: int, size: int, name: str, seconds: float, where: str) -> str:
    """Check that the store belongs to this worker's job; return the job's name.

    Args:
        store: where the workers meet.
        rank: this worker's.
        size: the number of workers that its launcher has told it.
        name: the job's, as its launcher has told it; empty if it has told none.
        seconds: how long to wait for rank 0.
        where: how messages call the store.

    Raises:
        RendezvousError: it is another job's, or rank 0 has written nothing.
    """
    own = Job(name[:_LONGEST], False, size) if name else Job(secrets.token_hex(16), True, size)
    try:
        text = store.claim(_KEY, json.dumps(own)) if rank == 0 else _read(store, seconds)
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank}: rank 0 has not written into the store at {where} which job it belongs "
            f"to within {seconds:g} s: {error}; check that rank 0 runs the same script, and that "
            f"all workers have the same {KEY_VARIABLE} or none"
        ) from None
    if text.startswith(MARK):
        raise RendezvousError(
            f"rank {rank} has no {KEY_VARIABLE}, and the job whose store is at {where} has one: "
            "set the same on all workers, or give each job a MASTER_PORT of its own"
        )
    try:
        found = Job.from_text(text)
    except ValueError:
        raise RendezvousError(
            f"rank {rank}: the store at {where} has a malformed name of its job: {text[:80]!r}; "
            "it is another program's: choose another MASTER_PORT"
        ) from None
    if (found.drawn, found.name) != (own.drawn, own.name) and not (found.drawn and own.drawn):
        raise RendezvousError(
            f"rank {rank} belongs to {own}, and the store at {where} to {found}: give each job a "
            "MASTER_PORT of its own; workers of one job need the same WINGBEAT_JOB_ID"
        )
    if found.size != size:
        raise RendezvousError(
            f"rank {rank} is one of {size} workers (WORLD_SIZE), and the store at {where} belongs "
            f"to a job of {found.size}: give each job a MASTER_PORT of its own"
        )
    return found.name


def _read(store: TorchStore, seconds: float) -> str:
    """Return what rank 0 has written.

    Raises:
        TimeoutError: nothing, or with another key.
    """
    if store.seal is None:
        return store.get(_KEY, seconds)
    deadline, refused_since = time.monotonic() + seconds, float("inf")
    while True:
        now = time.monotonic()
        try:
            if (text := store.look(_KEY)) is not None:
                return text
            if now >= deadline:
                raise TimeoutError("nothing is there")
        except RuntimeError as error:
            raise TimeoutError(first_line(error)) from None
        except Refused:
            refused_since = min(refused_since, now)
            if now >= min(deadline, refused_since + _REPLACED_S):
                raise
        time.sleep(_LOOK_S)
