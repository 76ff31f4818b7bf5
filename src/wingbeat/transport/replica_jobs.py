"""Jobs whose replicas are torch jobs of their own: settings, agreement, and the store for all.

Each replica is started by a launcher of its own, usually torchrun, and can be restarted alone. The
wingbeat job has the ranks of all replicas, one replica after the other. They meet at a store that
no replica serves (`served_store`), so that it outlives each of them.
"""

from __future__ import annotations

import ctypes
import enum
import json
import re
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from wingbeat.errors import RendezvousError, UsageError
from wingbeat.schema import MalformedMessage, Range, parse_json, printable
from wingbeat.transport.failures import is_alive
from wingbeat.transport.served_store import RemoteStore
from wingbeat.transport.store import read_value
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import TorchStore

NUMBER, COUNT, STORE = "WINGBEAT_REPLICA", "WINGBEAT_REPLICAS", "WINGBEAT_STORE"
"""Variables of a replica that is a torch job of its own; all of them or none are set."""

_MAX_REPLICAS = 1 << 16
_MAX_ERROR_CHARS = 600


class ReplicaSettings(NamedTuple):
    """A replica by the environment: its number, how many there are, and their store."""

    number: int
    replicas: int
    host: str
    port: int

    @property
    def where(self) -> str:
        """The store's address, for error messages."""
        return f"{self.host}:{self.port} ({STORE})"


class Introduction(NamedTuple):
    """What a rank of a replica tells the others first: its settings, and a random text."""

    settings: ReplicaSettings
    life: str


class TorchJob(NamedTuple):
    """The ranks of a job that one launcher has started: a replica, with a default group of torch.

    Attributes:
        first: rank in the job of rank 0 of torch's default group; the others follow it.
        size: number of ranks in torch's default group.
        life: text that is equal on these processes, and different on those that replace them.
    """

    first: int
    size: int
    life: str


def settings_of(env: Mapping[str, str]) -> ReplicaSettings | None:
    """Return the settings of an environment; None if the job is one torch job.

    A `UsageError` if some of the variables are missing or invalid.
    """
    given = [name for name in (NUMBER, COUNT, STORE) if env.get(name)]
    if not given:
        return None
    if missing := [name for name in (NUMBER, COUNT, STORE) if name not in given]:
        raise UsageError(
            f"{', '.join(given)} set and {', '.join(missing)} not: set all of {NUMBER}, {COUNT} "
            f"and {STORE} for replicas that are torch jobs of their own, or none of them"
        )
    number, count = _whole(env, NUMBER), _whole(env, COUNT)
    if not 1 <= count <= _MAX_REPLICAS:
        raise UsageError(f"{COUNT}={count}: allowed are 1 to {_MAX_REPLICAS} replicas")
    if number >= count:
        raise UsageError(
            f"{NUMBER}={number}: with {COUNT}={count}, replicas are numbered 0 to {count - 1}"
        )
    host, _, port = env[STORE].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or not 0 < int(port) < 1 << 16:
        raise UsageError(
            f"{STORE}={env[STORE]!r}: set host and port of `wingbeat store`, such as node1:29400"
        )
    return ReplicaSettings(number, count, host, int(port))


def _whole(env: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", env[name]):
        raise UsageError(f"{name}={env[name]!r} in the environment: it must be a whole number")
    return int(env[name])


def refuse_unequal(answers: Sequence[Sequence[object]]) -> None:
    """Raise a `UsageError` if ranks of one torch job have different settings, as lists."""
    names = NUMBER, COUNT, STORE, STORE
    for rank, answer in enumerate(answers):
        for name, first, other in zip(names, answers[0], answer, strict=True):
            if first != other:
                raise UsageError(
                    f"rank 0 of a torch job has {name}={first}, and rank {rank} {other}: the ranks "
                    "of a torch job are one replica; start each replica by a launcher of its own, "
                    "such as torchrun"
                )


# -- the store ----------------------------------------------------------------------------


def reach_store(
    settings: ReplicaSettings, rank: int, seconds: float, key: bytes | None
) -> RemoteStore:
    """Return a connection to the store, with the job's key.

    A `RendezvousError` if it is not reached in ``seconds``, a `UsageError` if it has another key.
    """
    begin = time.monotonic()
    try:
        return RemoteStore(settings.host, settings.port, seconds, key)
    except RendezvousError as error:
        raise RendezvousError(
            f"rank {rank} did not reach the store at {settings.where} after "
            f"{time.monotonic() - begin:.1f} s: {first_line(error)}; start it there with `wingbeat "
            f"store --port {settings.port}`, and check that no firewall blocks the port"
        ) from None


class _Counts(NamedTuple):
    replicas: Annotated[int, Range(1)]
    ranks: Annotated[int, Range(1)]


def check_counts(store: TorchStore, settings: ReplicaSettings, ranks: int) -> None:
    """Check that all replicas of the job have ``ranks`` ranks each, and agree on their number.

    The first process writes both. A `UsageError` names both values. A `RendezvousError` if the
    store does not answer, or has something else.
    """
    own, where, me = _Counts(settings.replicas, ranks), settings.where, f"replica {settings.number}"
    try:
        found = parse_json(_Counts, store.claim("replicas", json.dumps(own)), "counts")
    except TimeoutError as error:
        raise RendezvousError(f"{me}: the store at {where} does not answer: {error}") from None
    except MalformedMessage as error:
        raise RendezvousError(
            f"{me}: the store at {where} has a malformed number of replicas: {error}; another "
            "program uses it: start `wingbeat store` at another port"
        ) from None
    if found.replicas != own.replicas:
        raise UsageError(
            f"{me} has {COUNT}={own.replicas}, but the job of the store at {where} has "
            f"{found.replicas} replicas: set the same for all of them, and WINGBEAT_JOB_ID for "
            "another job"
        )
    if found.ranks != own.ranks:
        raise UsageError(
            f"{me} has {own.ranks} ranks (WORLD_SIZE of its torch job), but the job of the store "
            f"at {where} has replicas of {found.ranks}: start all with the same numbers of hosts "
            "and of processes per host, and set WINGBEAT_JOB_ID for another job"
        )


_PR_SET_PDEATHSIG = 1


def end_with_launcher(env: Mapping[str, str]) -> None:
    """Let the kernel end this process when its torchrun is killed.

    Otherwise it would train on, and the processes of the torchrun that is started next would be
    refused, as their ranks are taken.
    """
    libc = ctypes.CDLL(None)
    if "TORCHELASTIC_RUN_ID" in env and hasattr(libc, "prctl"):  # Linux
        libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)


# -- agreement inside a replica -----------------------------------------------------------


EXITING_S = 35.0
"""Seconds for a replica's former processes to exit: torchrun kills them 30 s after SIGTERM."""


class Former(enum.IntEnum):
    """What a rank's former process has done: claimed the rank, and also connected the job."""

    NONE = 0
    CLAIMED = 1
    CONNECTED = 2


class Claim(NamedTuple):
    """How a rank of a replica was claimed: what its former process has done, or the error."""

    former: Annotated[int, Range(0, len(Former))]
    error: str = ""


START_AGAIN = (
    "start all replicas again, with another WINGBEAT_JOB_ID, or after `wingbeat store` was started "
    "again"
)


def agree(settings: ReplicaSettings, job: TorchJob, claims: Sequence[Claim]) -> bool:
    """Return whether the replica was restarted alone, which its ranks decide alike.

    A `RendezvousError` names a rank that could not claim its number, or one whose former process
    ended before the job was connected: others may have its old address.
    """
    me = f"replica {settings.number}"
    for claim in claims:
        if claim.error:
            error = printable(claim.error[:_MAX_ERROR_CHARS])
            raise RendezvousError(f"{me} cannot join: {error}")
    if all(claim.former == Former.NONE for claim in claims):
        return False
    for rank, claim in enumerate(claims, job.first):
        if claim.former != Former.CONNECTED:
            raise RendezvousError(
                f"{me} cannot rejoin: its former processes ended before the job at the store at "
                f"{settings.where} was connected, rank {rank}'s among them: {START_AGAIN}"
            )
    return True


def former_of(store: TorchStore, rank: int, replaced: bool) -> Former:
    """Return what the former process of a rank has done; ``replaced``: whether there was one."""
    if not replaced:
        return Former.NONE
    return Former.CONNECTED if store.has(f"joined/{rank}") else Former.CLAIMED


def publish_joined(store: TorchStore, rank: int, place: str) -> None:
    """Publish that the process at ``place`` is connected, and others can rejoin beside it."""
    store.set(f"joined/{rank}", place)


def require_others(store: TorchStore, settings: ReplicaSettings, job: TorchJob, rank: int) -> None:
    """Check that a process of another replica trains; a `RendezvousError` if none does.

    A process that is itself restarted and not connected yet does not count.
    """
    position = rank - job.first
    for other in range(settings.replicas):
        peer = other * job.size + position
        joined = read_value(store, f"joined/{peer}")
        if other == settings.number or joined is None:
            continue
        if joined == read_value(store, f"here/{peer}") and is_alive(store, peer):
            return
    raise RendezvousError(
        f"replica {settings.number} cannot rejoin: no process of another replica of the job at the "
        f"store at {settings.where} runs any more: {START_AGAIN}"
    )
