"""`init` and `shutdown`: find the other workers, check the job, connect one link per interface."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import multiprocessing
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Annotated, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist

# Imported before the group exists: the default group is a default argument of its functions. A
# later import, as by the first optimizer, would keep the group and its open port.
import torch.distributed.nn.functional

from wingbeat.environment import warning_of_unknown
from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.observe.log import (
    chosen_level,
    log,
    log_event,
    log_to_stderr,
    set_incarnation,
)
from wingbeat.schema import MAX_REAL, Length, MalformedMessage, Range, parse_json, to_json
from wingbeat.transport import (
    descriptors,
    encryption,
    graceful_shutdown,
    launchers,
    replica_jobs,
    restarts,
    tcp,
)
from wingbeat.transport import interfaces as nic
from wingbeat.transport import world as world_module
from wingbeat.transport.failures import (
    LivenessListener,
    ProcessAddress,
    is_running,
    publish_failure,
    publish_incarnation,
)
from wingbeat.transport.gloo import watch_listeners
from wingbeat.transport.hosted_services import request_service
from wingbeat.transport.link import Link
from wingbeat.transport.nccl import nccl_group
from wingbeat.transport.replica_jobs import (
    Claim,
    Former,
    Introduction,
    ReplicaSettings,
    TorchJob,
)
from wingbeat.transport.served_store import RemoteStore
from wingbeat.transport.services import Service, ServiceConfig
from wingbeat.transport.store import AtomicStore
from wingbeat.transport.text import first_line, parse_number
from wingbeat.transport.torch_store import (
    KEY_VARIABLE,
    TAG_PREFIX,
    Authenticator,
    ColumnStore,
    RawStore,
    StoreWatch,
    TorchStore,
    WatchedStore,
    job_key,
    server_of,
)
from wingbeat.transport.world import World
from wingbeat.types import Layout

_JOB_KEY = "job"
_MAX_NAME_CHARS = 256

_OVERWRITE_S = 2.0
"""Seconds for rank 0 to overwrite a rejected value; after that it has another key."""

_MAX_ATTEMPT_DIGITS = 9

StartGroup: TypeAlias = Callable[[Sequence[nic.Interface]], None]
"""Starts torch's default group on one of the interfaces that connect the hosts."""

_RELEASE_S, _RELEASE_POLL_S = 5.0, 0.2
"""Seconds for a process to exit before the next process of its rank is refused, and between two
connections to it.
"""


class JobIdentity(NamedTuple):
    """The job's identity, as published by rank 0; ``drawn`` means that ``name`` is random."""

    name: str
    drawn: bool
    size: Annotated[int, Range(1)]

    def __str__(self) -> str:
        return "a job without a name" if self.drawn else f"job {self.name!r}"


def check_job(
    store: TorchStore,
    rank: int,
    size: int,
    name: str,
    seconds: float,
    where: str,
    *,
    replicas: bool = False,
) -> str:
    """Check that the store belongs to this worker's job; return the job's name.

    ``size`` and ``name`` are the launcher's; ``name`` is empty if it has none. ``where`` is the
    store's address for error messages; ``replicas`` is whether the store is that of replicas which
    are torch jobs. A `RendezvousError` if the store is another job's, or rank 0 published nothing
    within ``seconds``.
    """
    apart = "set a different MASTER_PORT for each job"
    counted = "WORLD_SIZE"
    if replicas:
        apart = f"set a different {launchers.JOB} for each job"
        counted = f"{replica_jobs.COUNT} times the ranks of a replica"
    own = (
        JobIdentity(name[:_MAX_NAME_CHARS], False, size)
        if name
        else JobIdentity(secrets.token_hex(16), True, size)
    )
    try:
        text = (
            store.claim(_JOB_KEY, json.dumps(own))
            if rank == 0
            else store.get(_JOB_KEY, seconds, rejected_s=_OVERWRITE_S)
        )
    except TimeoutError as error:
        raise RendezvousError(
            f"rank {rank}: rank 0 did not publish the job's name in the store at {where} within "
            f"{seconds:g} s: {error}; check that rank 0 runs the same script, and that all workers "
            f"have the same {KEY_VARIABLE} or none"
        ) from None
    if text.startswith(TAG_PREFIX):
        raise RendezvousError(
            f"rank {rank} has no {KEY_VARIABLE}, but the job of the store at {where} has one: set "
            f"the same on all workers, or {apart}"
        )
    try:
        found = parse_json(JobIdentity, text)
        if len(found.name) > _MAX_NAME_CHARS:
            raise MalformedMessage("a long name")
    except MalformedMessage:
        raise RendezvousError(
            f"rank {rank}: the store at {where} has a malformed job name: {text[:80]!r}; another "
            f"program uses it: {apart}"
        ) from None
    if (found.drawn, found.name) != (own.drawn, own.name) and not (found.drawn and own.drawn):
        raise RendezvousError(
            f"rank {rank} belongs to {own}, but the store at {where} to {found}: {apart}, and the "
            f"same {launchers.JOB} for all workers of a job"
        )
    if found.size != size:
        raise RendezvousError(
            f"rank {rank} is one of {size} workers ({counted}), but the store at {where} belongs "
            f"to a job of {found.size}: {apart}"
        )
    return found.name


_MIN_PROBE_BYTES = 16 << 10
_PROBE_S = 0.04
_MAX_PROBE_BYTES = 16 << 20

_PROBE_REPEATS = 3
"""Repetitions of the final measurement; the best one counts, as a busy host only adds delay."""


def measure_speeds(world: World) -> tuple[float, ...]:
    """Measure all links; return the bytes per second of each, equal on every rank.

    Each rank sends to the next rank and receives from the previous one, on one link at a time. The
    message size doubles until a transfer takes 40 ms; that transfer is measured three times. The
    speed of a link is that of its slowest rank in the best of the three.
    """
    speeds = []
    for link in world.links:
        nbytes = _MIN_PROBE_BYTES
        while (seconds := _best_seconds(world, link, nbytes)) < _PROBE_S:
            if nbytes >= _MAX_PROBE_BYTES:
                break
            nbytes *= 2
        speeds.append(nbytes / seconds)
    return tuple(speeds)


def _best_seconds(world: World, link: Link, nbytes: int) -> float:
    """Return the duration of an exchange on its slowest rank, in the best of several runs."""
    best = float("inf")
    for _ in range(_PROBE_REPEATS):
        best = min(best, max(world.exchange("speed", _exchange_seconds(world, link, nbytes))))
        if best < _PROBE_S and nbytes < _MAX_PROBE_BYTES:
            break  # a longer message is measured next
    return best


def _exchange_seconds(world: World, link: Link, nbytes: int) -> float:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    begin = time.monotonic()
    receive = link.recv(incoming, before, 0)
    send = link.send(outgoing, after, 0)
    try:
        receive.wait(world.timeout)
        send.wait(world.timeout)
        if getattr(link, "moved", False):
            raise RuntimeError("its data had to use another interface")
    except RuntimeError as err:
        raise PeerError(
            f"rank {world.rank}: measuring interface {link.name} with ranks {before} and {after} "
            f"failed after {time.monotonic() - begin:.1f} s: {str(err).splitlines()[0]}; check "
            "that it joins these hosts, or name others: wingbeat.init(interfaces=[...])"
        ) from None
    return time.monotonic() - begin


DEFAULT_TIMEOUT = 300.0
_generation = itertools.count()

_stores: dict[tuple[object, ...], tuple[int, int, dist.Store]] = {}
"""The store of this process, kept for the next `init`.

If it were closed, a worker that is ahead could connect to rank 0's old store shortly before that
closes.
"""


def init(
    *,
    timeout: float = DEFAULT_TIMEOUT,
    interfaces: Sequence[str] | None = None,
    encrypted: bool | None = None,
    cuda: str = "nccl",
    dscp: int = 0,
) -> World:
    """Connect to the other workers of the job.

    The job is started by torchrun, srun, mpirun or ``wingbeat lab run``. `init` connects them over
    each network interface, measures the speed of the interfaces, and starts the default group of
    ``torch.distributed`` if the script has not. srun and mpirun do not set the variables
    that ``torch.distributed`` reads; `init` sets them in ``os.environ``. Without a launcher the
    world has one worker.

    A worker may be restarted alone while the others continue and the store still exists. It
    connects to no other worker, `World.returned` is True, and it can open groups.

    With ``WINGBEAT_REPLICA``, ``WINGBEAT_REPLICAS`` and ``WINGBEAT_STORE``, the launcher has
    started one replica of several. The world has the ranks of all replicas, and torch's default
    group those of this one. A replica may be restarted as a whole, and all of its ranks have
    `World.returned`.

    Args:
        timeout: seconds without a sign of life from a worker's process after which a wait for it
            fails, here and in training. For a worker that is alive and not itself waiting, the wait
            lasts up to 10 times as long.
        interfaces: names of the interfaces to use on this host, in the same order of networks on
            all hosts; default: all networks that connect all hosts, or in a BCube one per level.
        encrypted: whether to encrypt the connections of collectives, the same on all workers.
            Default: ``WINGBEAT_ENCRYPTED`` (``1`` or ``0``), or else between hosts.
        cuda: what carries tensors on CUDA devices, the same on all workers: ``"nccl"``, or
            ``"tcp"``, wingbeat's own connections, from pinned host buffers. Tensors on other
            accelerators always travel in the second way.
        dscp: class of what this worker sends over the connections of collectives, 0 to 63, in the
            header of each packet. It has an effect where switches and hosts give this class a queue
            of its own.

    Returns:
        The world, which `distribute` uses by default.

    Raises:
        UsageError: the environment is incomplete or has an invalid value, an interface does not
            exist, a spawned process imports the main script, or workers differ in ``encrypted`` or
            ``cuda``.
        RendezvousError: workers are missing; names rank, address, interface and duration.
    """
    _check_arguments(timeout, encrypted, cuda, dscp)
    chosen_level()  # an invalid variable is an error before anything is started
    encrypted = encryption.choose(encrypted)
    descriptors.raise_limit()
    before = world_module.set_current(None)
    if before is not None:
        world_module.set_current(before)  # the caller may continue to use it
        raise UsageError("wingbeat.init() was called twice: call wingbeat.shutdown() in between")
    key = job_key(os.environ)
    settings = replica_jobs.settings_of(os.environ)
    if settings is not None:
        world = _init_replica(settings, timeout, interfaces, encrypted, dscp, key)
    else:
        world = _init_torch_job(timeout, interfaces, encrypted, cuda, dscp, key)
    world_module.set_current(world)
    graceful_shutdown.close_at_exit(world, shutdown)
    set_incarnation(world.incarnation)
    event = "rejoined" if world.returned else "joined"
    log_event(event, f"rank {world.rank}: {event} a job of {world.size} workers", rank=world.rank)
    return world


def _init_torch_job(
    timeout: float,
    interfaces: Sequence[str] | None,
    encrypted: bool | None,
    cuda: str,
    dscp: int,
    key: bytes | None,
) -> World:
    """Return the world of the ranks of one torch job."""
    met_by_torch = dist.is_initialized()
    rank, size, store = _rendezvous(timeout)
    _start_logging(rank)
    place = _next_place(store, rank, size, timeout, key)
    store = dist.PrefixStore(f"wingbeat/{place}", store)
    own, watch = _watched_connection(store, rank, size)
    first = TorchStore(own, None if key is None else Authenticator(key, place))
    world = World(rank, size, (), (), timeout, first, encrypted=encrypted, dscp=dscp)
    if cuda == "tcp":
        world.nccl_devices = frozenset()
    if size > 1:
        job = check_job(
            first, rank, size, launchers.job_name(os.environ), timeout, _store_address()
        )
        if key is not None:
            world.store = TorchStore(own, Authenticator(key, f"{place}/{job}"))
        incarnation = _claim_rank(world, alone=not met_by_torch)
        # Groups of torch accept no late members.
        start = functools.partial(_start_default_group, store, world, rank, size)
        try:
            attempt = parse_number(place.partition("/")[0], _MAX_ATTEMPT_DIGITS) or 0
            world.incarnation = publish_incarnation(world.store, rank, attempt)
            _join(world, interfaces, key, None if world.returned else start)
            _forget_exit(world, store)
        except BaseException as error:
            _give_up(world, incarnation, error)
            raise
        world.on_closed(incarnation.close)  # another process may then claim its rank
        if watch is not None:
            # Rank 0 may end the store once all have published that they leave.
            world.on_close(watch.quiet)
            world.on_closed(watch.close)
    elif not dist.is_initialized():
        _init_default_group(world, store=dist.HashStore(), rank=0, world_size=1)
    return world


def _give_up(world: World, incarnation: LivenessListener, error: BaseException) -> None:
    """Publish the error for the ranks that wait for this one, and free its rank."""
    publish_failure(world.store, world.rank, error)
    incarnation.close()


def _start_logging(rank: int) -> None:
    log_to_stderr(f"rank {rank}", leads=rank == 0)
    text = warning_of_unknown(os.environ)
    if rank == 0 and text:
        log.warning("%s", text)


def _next_place(store: dist.Store, rank: int, size: int, timeout: float, key: bytes | None) -> str:
    """Return a prefix that separates the keys of successive worlds in one process.

    It also separates those of a restart by torchrun, which reuses the store.
    """
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if restarts.has_agents(os.environ):
        prefix = "wingbeat/starts"
        own = _own_connection(dist.PrefixStore(prefix, store), size)
        signed = TorchStore(own, None if key is None else Authenticator(key, prefix))
        start = restarts.agree_on_start(signed, rank, size, timeout)
    return f"{start}/{next(_generation)}"


def _init_replica(
    settings: ReplicaSettings,
    timeout: float,
    interfaces: Sequence[str] | None,
    encrypted: bool | None,
    dscp: int,
    key: bytes | None,
) -> World:
    """Return the world of the ranks of all replicas, one of which is this torch job."""
    replica_jobs.end_with_launcher(os.environ)
    torch_rank, torch_size, torch_store = _rendezvous(timeout)
    place = _next_place(torch_store, torch_rank, torch_size, timeout, key)
    torch_store = dist.PrefixStore(f"wingbeat/{place}", torch_store)
    rank, size = settings.number * torch_size + torch_rank, settings.replicas * torch_size
    _start_logging(rank)
    inside = World(
        *(torch_rank, torch_size, (), (), timeout),
        TorchStore(
            _own_connection(torch_store, torch_size),
            None if key is None else Authenticator(key, f"replica {settings.number}/{place}"),
        ),
        members=tuple(range(rank - torch_rank, rank - torch_rank + torch_size)),
    )
    own = Introduction(settings, secrets.token_hex(8))
    answers = inside.exchange("replica", own, Introduction)
    replica_jobs.refuse_unequal([each.settings for each in answers])
    torch_job = TorchJob(rank - torch_rank, torch_size, answers[0].life)
    # Without the number of restarts: a restarted replica reads what its former processes read.
    name = os.environ.get(launchers.JOB, "")
    prefix = f"wingbeat/replicas/{name}/{place.rpartition('/')[2]}"
    root = replica_jobs.reach_store(settings, rank, timeout, key)
    shared = root.under(prefix)
    store = TorchStore(shared, None if key is None else Authenticator(key, prefix), prefix)
    replica_jobs.check_counts(store, settings, torch_size)
    job = check_job(store, rank, size, name, timeout, settings.where, replicas=True)
    if key is not None:
        store = TorchStore(shared, Authenticator(key, f"{prefix}/{job}"), prefix)
    world = World(
        *(rank, size, (), (), timeout, store),
        encrypted=encrypted,
        dscp=dscp,
        nccl_devices=frozenset(),  # NCCL needs a group of torch with all ranks
        torch_job=torch_job,
        host_service=functools.partial(_host_service, root),
    )
    incarnation = _claim_in_replica(world, settings, torch_job, inside)
    try:
        world.incarnation = publish_incarnation(store, rank, 0)
        if world.returned:
            replica_jobs.require_others(store, settings, torch_job, rank)
        start = functools.partial(_start_default_group, torch_store, world, torch_rank, torch_size)
        _join(world, interfaces, key, start)
        _forget_exit(world, shared)
        replica_jobs.publish_joined(store, rank, incarnation.address.to_text())
    except BaseException as error:
        _give_up(world, incarnation, error)
        raise
    world.on_closed(incarnation.close)
    return world


def _host_service(root: RemoteStore, config: ServiceConfig, store: AtomicStore) -> Service:
    own = store.own if isinstance(store, ColumnStore) else store
    assert isinstance(own, TorchStore)
    return request_service(root, config, own)


def _claim_in_replica(
    world: World, settings: ReplicaSettings, torch_job: TorchJob, inside: World
) -> LivenessListener:
    """Claim this rank, and agree in the replica whether all of its ranks were restarted."""
    incarnation = None
    assert isinstance(world.store, TorchStore)
    try:
        incarnation = _listen(world.rank, settings.host, replica_jobs.STORE)
        # A rank that is free at once waits for this rank's claim for no longer than the timeout.
        seconds = world.timeout / 2
        replaced = claim_rank(
            *(world.store, world.rank, incarnation.address, seconds, settings.where),
            exiting_s=replica_jobs.EXITING_S,
            replicas=True,
        )
        own = Claim(replica_jobs.former_of(world.store, world.rank, replaced))
    except RendezvousError as error:
        own = Claim(Former.NONE, str(error))
    try:
        claims = inside.exchange("claim", own, Claim)
        world.returned = replica_jobs.agree(settings, torch_job, claims)
    except BaseException:
        if incarnation is not None:
            incarnation.close()
        raise
    assert incarnation is not None, "agree() raises the error of each rank"
    return incarnation


def _check_arguments(timeout: float, encrypted: bool | None, cuda: str, dscp: int) -> None:
    """Raise a `UsageError` for an invalid argument or a process that must not join the job."""
    if cuda not in ("nccl", "tcp"):
        raise UsageError(f"cuda={cuda!r}: allowed are 'nccl' and 'tcp'")
    if encrypted not in (None, True, False):
        raise UsageError(f"encrypted={encrypted!r}: allowed are True, False and None")
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r}: allowed are seconds above 0")
    if type(dscp) is not int or not 0 <= dscp < 64:
        raise UsageError(f"dscp={dscp!r}: allowed are the integers 0 to 63")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # multiprocessing uses the same check. This process would join the job in place of its
        # parent.
        raise UsageError(
            "wingbeat.init() was called while a process spawned by multiprocessing, such as a "
            "DataLoader worker, imports the main script: put the training code under "
            "if __name__ == '__main__':"
        )


def connect(
    store: dist.Store, rank: int, size: int, timeout: float, interfaces: Sequence[str] | None = None
) -> World:
    """Connect ranks that have found each other, such as those of a process group of torch.

    Starts no default group and is not the `current` world. `World.close` closes the connections.

    Args:
        store: torch's store, with a prefix that no other world uses.
        rank: this process, 0 to ``size - 1``.
        size: number of processes.
        timeout: seconds for connecting and for each wait.
        interfaces: as in `init`.

    Raises:
        UsageError: an interface does not exist.
        RendezvousError: ranks are missing; names rank, address, interface and duration.
    """
    descriptors.raise_limit()
    key = job_key(os.environ)
    signed = TorchStore(
        _own_connection(store, size), None if key is None else Authenticator(key, "process group")
    )
    world = World(rank, size, (), (), timeout, signed, encrypted=encryption.choose(None))
    if size > 1:
        _connect(world, interfaces, key)
    return world


def connect_column(job: World, members: Sequence[int], name: str) -> World:
    """Connect some ranks of a job to each other, as a world of their own: a column of a mesh.

    Every member must call it; one that was restarted alone connects as in `init`. Closing the world
    of the job closes it too.

    Args:
        job: the world that `init` returned.
        members: ranks of the job; the world numbers them from 0.
        name: distinguishes columns, the same on all members.

    Raises:
        RendezvousError: ranks are missing; names rank, address, interface and duration. Or the
            former process of this rank was never connected to them.
    """
    assert isinstance(job.store, TorchStore)
    store = ColumnStore(job.store, f"column/{name}/{members[0]}")
    rank, size = list(members).index(job.rank), len(members)
    world = World(
        *(rank, size, (), (), job.timeout, store),
        encrypted=job.encrypted,
        dscp=job.dscp,
        nccl_devices=job.nccl_devices,
        members=tuple(members),
        host_service=job.host_service,
        returned=job.returned,
    )
    if size > 1 and job.returned and not world.has_published("speeds", rank):
        raise RendezvousError(
            f"rank {job.rank} cannot rejoin: its former process ended in distribute(), before it "
            f"was connected to the other replicas; {replica_jobs.START_AGAIN}"
        )
    if size > 1:
        named = list(job.interfaces) or None
        try:
            _join(world, named, job_key(os.environ), job=job)
        except RendezvousError as error:
            raise RendezvousError(
                f"{error} (rank {job.rank} connects replicas, whose numbers these are: replica 0 "
                f"is rank {members[0]} of the job, and so on: {', '.join(map(str, members))})"
            ) from None
    # Peers read how this rank has left before they find its connections closed.
    job.on_close(world.finish)
    job.on_closed(world.close)
    return world


def shutdown() -> None:
    """Stop wingbeat's threads and close its connections. Does nothing before `init`.

    Also destroys the default group of ``torch.distributed`` if `init` started it and it still
    exists. Call either ``destroy_process_group()`` and then this function, or only this function.
    """
    world = world_module.set_current(None)
    if world is not None:
        graceful_shutdown.close_world(world)


def _end_default_group(group: dist.ProcessGroup) -> None:
    """Destroy the group that `init` started, unless the script did."""
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _rendezvous(timeout: float) -> tuple[int, int, dist.Store]:
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
        return dist.get_rank(), dist.get_world_size(), store
    os.environ.update(launchers.from_environment(os.environ))
    if "RANK" not in os.environ:
        return 0, 1, dist.HashStore()
    key = (os.getpid(), *(os.environ[k] for k in launchers.VARIABLES))
    if key not in _stores:
        _stores.clear()
        _stores[key] = _open_store(timeout)
    rank, size, store = _stores[key]
    store.set_timeout(timedelta(seconds=timeout))
    return rank, size, store


def _open_store(timeout: float) -> tuple[int, int, dist.Store]:
    begin, env = time.monotonic(), os.environ
    serves = env["RANK"] == "0" and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    # Without them connections to the store are closed, and the other ranks try again in silence.
    descriptors.require(
        descriptors.of_store(launchers.parse_count(env, "WORLD_SIZE"), serves=serves),
        f"rank {env['RANK']}: {'serving' if serves else 'reaching'} the store",
    )
    while True:
        try:
            store, rank, size = next(
                iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
            )
            return rank, size, store
        except (RuntimeError, ValueError) as err:
            in_use = env["RANK"] == "0" and "EADDRINUSE" in str(err)
            if in_use and _await_port(int(env["MASTER_PORT"]), begin + _RELEASE_S):
                continue
            if in_use:
                raise RendezvousError(
                    f"rank 0 cannot serve the store at {_store_address()}: another job or program "
                    "uses the port; set another MASTER_PORT on all workers"
                ) from None
            raise RendezvousError(
                f"rank {env['RANK']} did not reach the store at {_store_address()} after "
                f"{time.monotonic() - begin:.1f} s: {first_line(err)}; check that rank 0 runs, "
                "that its address is correct, and that no firewall blocks the port"
            ) from None


def _await_port(port: int, deadline: float) -> bool:
    """Wait for a port that the former process of rank 0 may still hold; whether it is free."""
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return True
        time.sleep(_RELEASE_POLL_S)
    return False


def _own_connection(store: dist.Store, size: int) -> dist.Store:
    """Return a store that no wait of torch locks."""
    return store.clone() if size > 1 else store


def _watched_connection(
    store: dist.Store, rank: int, size: int
) -> tuple[RawStore, StoreWatch | None]:
    """Return a store that no wait of torch locks, and what detects the end of its server."""
    own, server = _own_connection(store, size), server_of(store)
    by_launcher = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if size == 1 or server is None or (rank == 0 and not by_launcher):
        return own, None
    host, port = server
    averages = "Ripples, ADPSGD, LocalSGD and DiLoCo"
    server_name, effect, where = "rank 0", f"{averages} continue, other strategies end", ""
    if by_launcher:  # rank 0 itself may train on, and the group generator beside it
        server_name, where = "the launcher of rank 0", " under Canary and ADPSGD"
        effect = f"training continues; a lost worker now ends all strategies but {averages}"
    try:
        watch = StoreWatch(
            host,
            port,
            f"rank {rank}: {server_name}, which serves the rendezvous store at {host}:{port}, has "
            "ended",
            f"{effect}; no worker can rejoin, and wingbeat.synchronize() fails{where}; so that any "
            "rank may be restarted, start `wingbeat store` and each rank as a replica "
            "(WINGBEAT_REPLICA)",
        )
    except OSError:
        return own, None  # torch has reached it: later requests report what fails
    return WatchedStore(own, watch), watch


def _store_address() -> str:
    if "MASTER_PORT" not in os.environ:
        return "the address of torch.distributed's default group"
    env = os.environ
    return f"{env.get('MASTER_ADDR')}:{env['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def _claim_rank(world: World, *, alone: bool) -> LivenessListener:
    """Claim this worker's rank, and detect whether it replaces another process.

    ``alone`` is whether the worker may be restarted alone: groups of torch accept no late members.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    incarnation = _listen(world.rank, host, "MASTER_ADDR")
    try:
        assert isinstance(world.store, TorchStore)
        place = incarnation.address
        if alone:
            world.returned = claim_rank(
                world.store, world.rank, place, world.timeout, _store_address()
            )
        else:
            world.store.set(f"here/{world.rank}", place.to_text())
    except BaseException:
        incarnation.close()
        raise
    return incarnation


def _listen(rank: int, host: str, variable: str) -> LivenessListener:
    try:
        return LivenessListener(host)
    except OSError as err:
        raise RendezvousError(
            f"rank {rank} cannot listen on its interface towards {host} ({variable}): {err}"
        ) from None


def claim_rank(
    store: TorchStore,
    rank: int,
    own: ProcessAddress,
    seconds: float,
    where: str,
    exiting_s: float = _RELEASE_S,
    *,
    replicas: bool = False,
) -> bool:
    """Claim a rank, and return whether a former process has exited.

    Waits up to ``exiting_s`` for a process that is exiting, and at most ``seconds``. A
    `RendezvousError` names the address of a running process that holds the rank. ``where`` is the
    store's address for error messages, ``replicas`` as for `check_job`.
    """
    apart = f"give it a MASTER_PORT or {launchers.JOB} of its own"
    if replicas:
        apart = (
            f"give it a {launchers.JOB} of its own, or, if another replica, a {replica_jobs.NUMBER}"
        )
    key, text = f"here/{rank}", own.to_text()
    deadline = time.monotonic() + min(seconds, exiting_s)
    try:
        first = found = store.replace(key, "", text)
        while found != text:
            other = _parse_holder(rank, found, where)
            running = is_running(other)
            if running and time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rank {rank} is taken: a process of the job whose store is at {where} has it, "
                    f"and still runs at {other.host} (port {other.port}); end that one first, or, "
                    f"if this is another job, {apart}"
                )
            if running:
                time.sleep(_RELEASE_POLL_S)
            found = store.replace(key, "" if running else found, text)
    except TimeoutError as error:
        raise RendezvousError(f"rank {rank}: the store does not answer: {error}") from None
    return first != text


def _parse_holder(rank: int, text: str, where: str) -> ProcessAddress:
    try:
        return ProcessAddress.from_text(text)
    except ValueError:
        raise RendezvousError(
            f"rank {rank}: the store at {where} has a malformed address of this rank's process: "
            f"{text[:80]!r}; start the job again at another port"
        ) from None


def _join(
    world: World,
    named: Sequence[str] | None,
    key: bytes | None,
    start: StartGroup | None = None,
    job: World | None = None,
) -> None:
    """Connect to the others, or to none if this worker was restarted alone.

    ``start`` and ``job`` are as in `_connect`.
    """
    if not world.returned:
        _connect(world, named, key, start, job)
        return
    # The others are connected to the former process.
    hosts = world.replay_exchange("interfaces", nic.Host)
    world.layout = _layout_of(world, hosts)
    chosen = nic.choose(hosts, world.rank, named)
    world.networks = _check_networks(world.replay_exchange("networks", list[str]))
    world.interfaces = tuple(interface.name for interface in chosen)
    world.speeds = _read_speeds(world, len(chosen))
    if start is not None:
        start(chosen)
    answers = world.replay_exchange("connections")
    links = tcp.rejoin(
        *(world.rank, chosen, answers, key, world.store),
        members=world.members,
        encrypted=world.encrypted,
        dscp=world.dscp,
        shared_memory=tcp.shared_memory_enabled(),
    )
    _open_groups(world, links)
    for link in links:  # they carry groups only, and are not the world's
        world.on_closed(link.close)


def _forget_exit(world: World, store: dist.Store | RemoteStore) -> None:
    """Delete how the former process of this rank has left: the rank has rejoined."""
    if world.returned:
        with contextlib.suppress(RuntimeError):  # an append-only store
            for name in ("left", "failed"):
                store.delete_key(f"{name}/{world.rank}")


def _connect(
    world: World,
    named: Sequence[str] | None,
    key: bytes | None,
    start: StartGroup | None = None,
    job: World | None = None,
) -> None:
    """Connect to the others.

    ``start`` starts torch's default group, unless it is None. ``job`` is the connected world of all
    ranks, if this one is of some of them.
    """
    rank, size = world.rank, world.size
    hosts = world.exchange("interfaces", to_json(nic.local()), nic.Host)
    world.layout = _layout_of(world, hosts)
    chosen = nic.choose(hosts, rank, named)
    world.networks = _exchange_networks(world, chosen)
    world.interfaces = tuple(interface.name for interface in chosen)
    descriptors.require(
        descriptors.of_world(size, _local_ranks(world.layout, rank), len(chosen), serves=rank == 0),
        f"rank {rank}: connecting {size} ranks",
    )
    if start is not None:
        start(chosen)
    world.links = links = tcp.connect(
        *(rank, chosen, world.exchange, key, world.timeout, world.store),
        members=world.members,
        encrypted=world.encrypted,
        dscp=world.dscp,
        shared_memory=tcp.shared_memory_enabled(),
    )
    # A worker that left now would break peers that are still connecting.
    _check_carriers(world)
    world.speeds = _known_speeds(world, job) or measure_speeds(world)
    world.publish("speeds", world.speeds)
    world.make_nccl_group = functools.partial(nccl_group, rank, size, members=world.members)
    _open_groups(world, links)


def _check_carriers(world: World) -> None:
    """Raise a `UsageError` if workers differ in what carries tensors on CUDA devices."""
    own = "nccl" if "cuda" in world.nccl_devices else "tcp"
    for rank, other in enumerate(world.exchange("connected", own, str)):
        if other != own:
            raise UsageError(
                f"cuda={own!r} on rank {world.rank} and {other[:16]!r} on rank {rank}: pass the "
                "same to wingbeat.init() on all workers"
            )


def _open_groups(world: World, links: Sequence[tcp.TcpLink]) -> None:
    """Have the groups of a world use these links."""
    world.make_links = lambda group: tuple(tcp.GroupLink(link, group) for link in links)


def _known_speeds(world: World, job: World | None) -> tuple[float, ...]:
    """Return what `init` has measured of the links of a column; empty if these are others.

    In the job one rank of a host sends to another host at a time. All columns exchange at once, and
    share the links of their hosts.
    """
    if job is None:
        return ()
    here, there = world.layout.hosts, job.layout.hosts
    same = world.interfaces == job.interfaces and (len(here) > 1) == (len(there) > 1)
    if not all(world.exchange("speeds-known", same, bool)):
        return ()
    columns = max(map(len, there)) / max(map(len, here))
    return tuple(speed / columns for speed in job.speeds)


def _read_speeds(world: World, links: int) -> tuple[float, ...]:
    """Return the speeds measured when all workers connected."""
    hint = Annotated[tuple[Annotated[float, Range(1, MAX_REAL)], ...], Length("links")]
    speeds: tuple[float, ...] = world.read("speeds", 0, hint, links=links)
    return speeds


def _layout_of(world: World, hosts: Sequence[nic.Host]) -> Layout:
    """Return the layout of the ranks; warn if the launcher placed more or fewer here."""
    layout = Layout.by_name(host.identity for host in hosts)
    told = os.environ.get("LOCAL_WORLD_SIZE", "")
    if world.members or not told.isdecimal():  # a column has a part of the ranks
        return layout
    rank, job = world.rank, world.torch_job
    launched = range(world.size) if job is None else range(job.first, job.first + job.size)
    found = sum(hosts[each].identity == hosts[rank].identity for each in launched)
    if int(told) != found:
        remedy = "a container with a network namespace of its own is a host; start it with the "
        remedy += "network of the host"
        if found > int(told):
            remedy = "several launchers run there, and these ranks use the loopback interface; "
            remedy += "start one on each host"
        log.warning(
            "rank %d: LOCAL_WORLD_SIZE is %s, but %d of the ranks are on its host: %s",
            *(rank, told, found, remedy),
        )
    return layout


def _local_ranks(layout: Layout, rank: int) -> int:
    return len(layout.hosts[layout.host_of[rank]])


def _exchange_networks(
    world: World, chosen: Sequence[nic.Interface]
) -> tuple[tuple[str, ...], ...]:
    return _check_networks(world.exchange("networks", [each.subnet for each in chosen], list[str]))


def _check_networks(answers: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], ...]:
    for rank, answer in enumerate(answers):
        if len(answer) != len(answers[0]):
            raise UsageError(
                f"rank {rank} uses {len(answer)} network interfaces and rank 0 {len(answers[0])}: "
                "name as many on all hosts, wingbeat.init(interfaces=['eth0'])"
            )
    return tuple(map(tuple, answers))


def _start_default_group(
    store: dist.Store, world: World, rank: int, size: int, chosen: Sequence[nic.Interface]
) -> None:
    """Start torch's default group on an interface that connects the hosts.

    By default gloo listens on the address of the host's name, often a loopback address.
    """
    if dist.is_initialized():
        return
    with _environment("GLOO_SOCKET_IFNAME", chosen[0].name):
        try:
            _init_default_group(
                world,
                store=dist.PrefixStore("default", store),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=world.timeout),
            )
        except RuntimeError as err:
            raise RendezvousError(
                f"rank {world.rank} could not start torch's default process group with "
                f"GLOO_SOCKET_IFNAME={os.environ['GLOO_SOCKET_IFNAME']}: {first_line(err)}; check "
                "that every host has this interface, and can reach the others over it"
            ) from None


def _init_default_group(world: World, **options: Any) -> None:
    """Start torch's default group, which listens only until its ranks are connected.

    `torch.distributed.split_group` would use the same port and block until its timeout; without a
    device it fails at once. `torch.distributed.new_group` listens on its own port.
    """
    devices = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    _, listener = watch_listeners(
        functools.partial(dist.init_process_group, "gloo", **options), count=devices
    )
    group = dist.group.WORLD
    world.on_closed(functools.partial(_end_default_group, group))
    if listener.known and "TORCH_GLOO_LAZY_INIT" not in os.environ:  # connects later
        listener.block()
        group._get_backend(torch.device("cpu")).options._devices = []


@contextlib.contextmanager
def _environment(key: str, default: str) -> Iterator[None]:
    if key in os.environ:
        yield
        return
    os.environ[key] = default
    try:
        yield
    finally:
        del os.environ[key]
