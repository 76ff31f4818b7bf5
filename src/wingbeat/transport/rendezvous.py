"""`init` and `shutdown`: find the other workers and connect, one link per interface."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import multiprocessing
import os
import secrets
import time
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

# Its functions have the default group as a default argument. Imported after the group exists, as
# the first optimizer does, the module would keep the group and its open port forever.
import torch.distributed.nn.functional

from wingbeat.errors import PeerError, RendezvousError, UsageError
from wingbeat.observe.log import speak
from wingbeat.transport import descriptors, graceful_shutdown, launchers
from wingbeat.transport import interfaces as nic
from wingbeat.transport import world as world_module
from wingbeat.transport.gloo import GlooLink, listening
from wingbeat.transport.gloo_groups import GlooGroups
from wingbeat.transport.incarnation import Incarnation, register
from wingbeat.transport.link import Link
from wingbeat.transport.nccl import nccl_group
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import KEY_VARIABLE, MARK, Refused, Seal, TorchStore, job_key
from wingbeat.transport.world import World

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


_FIRST_BYTES = 16 << 10
_LONG_ENOUGH_S = 0.04
_LAST_BYTES = 16 << 20

_TIMES = 3
"""How often a message that counts is sent: on a busy host any one may be late, none is early."""


def measure_speeds(world: World) -> tuple[float, ...]:
    """Measure all links and return the bytes a second of each, equal on every rank.

    Each rank sends to the next while it receives from the one before, on one link after the
    other, with messages that grow until one takes 40 ms, three times of three. A link is as fast
    as its slowest rank, at its best.

    Raises:
        PeerError: a transfer failed or took longer than the world's timeout.
    """
    speeds = []
    for link in world.links:
        nbytes = _FIRST_BYTES
        while (seconds := _best_seconds(world, link, nbytes)) < _LONG_ENOUGH_S:
            if nbytes >= _LAST_BYTES:
                break
            nbytes *= 2
        speeds.append(nbytes / seconds)
    return tuple(speeds)


def _best_seconds(world: World, link: Link, nbytes: int) -> float:
    """Return how long an exchange takes its slowest rank, at best; equal on every rank."""
    best = float("inf")
    for _ in range(_TIMES):
        best = min(best, max(world.exchange("speed", _exchange_seconds(world, link, nbytes))))
        if best < _LONG_ENOUGH_S and nbytes < _LAST_BYTES:
            break  # a larger one will tell
    return best


def _exchange_seconds(world: World, link: Link, nbytes: int) -> float:
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    outgoing, incoming = (torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2))
    begin = time.monotonic()
    receive = link.recv(incoming, before, 0)
    send = link.send(outgoing, after, 0)
    try:
        receive.wait(world.timeout)
        send.wait(world.timeout)
    except RuntimeError as err:
        raise PeerError(
            f"rank {world.rank}: measuring interface {link.name} with ranks {before} and {after} "
            f"failed after {time.monotonic() - begin:.1f} s: {str(err).splitlines()[0]}; check "
            "that it joins these hosts, or name others: wingbeat.init(interfaces=[...])"
        ) from None
    return time.monotonic() - begin


DEFAULT_TIMEOUT = 300.0
_generation = itertools.count()

_met: dict[tuple[object, ...], tuple[int, int, dist.Store]] = {}
"""The store of this process, kept for the next `init`. Were it closed, a worker that is ahead
could meet the old one, which rank 0 serves, shortly before it ends."""

_incarnations: weakref.WeakKeyDictionary[World, Incarnation] = weakref.WeakKeyDictionary()


def init(*, timeout: float = DEFAULT_TIMEOUT, interfaces: Sequence[str] | None = None) -> World:
    """Join the other workers, as torchrun, srun, mpirun or ``wingbeat lab run`` started them.

    Connects one process group per network interface, measures the interfaces' speed, and starts
    ``torch.distributed``'s default group if the script has not. srun and mpirun do not set what
    ``torch.distributed`` reads: this does, in ``os.environ``. Started by nobody this is a world of
    one worker. A worker that is started again alone, while the others go on and the store still
    lives, connects to nobody: `World.returned`; it may open groups.

    Args:
        timeout: seconds without a sign of a worker's process after which a wait for it ends, here
            and in training. A worker that lives, and waits for nobody itself, is waited for up to
            10 times as long.
        interfaces: names of the interfaces to use on this host, in the same order of networks
            on all hosts; default: all networks that join all hosts, or in a BCube one a level.

    Returns:
        The world, which `distribute` then uses by itself.

    Raises:
        UsageError: the environment is incomplete, an interface does not exist, or a process that
            was spawned imports the main script.
        RendezvousError: workers were missing; names rank, address, interface and the wait.
    """
    _check_call(timeout)
    descriptors.raise_limit()
    before = world_module.set_current(None)
    if before is not None:
        world_module.set_current(before)  # whoever catches this goes on with it
        raise UsageError("wingbeat.init() was called twice: call wingbeat.shutdown() in between")
    key = job_key(os.environ)
    met_by_torch = dist.is_initialized()
    rank, size, store = _rendezvous(timeout)
    # A world may be closed and made again in one process: keep the keys of each apart.
    # torchrun starts all workers again by the store that they had: they are not to find old keys.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    place = f"{attempt}/{next(_generation)}"
    store = dist.PrefixStore(f"wingbeat/{place}", store)
    first = TorchStore(store, None if key is None else Seal(key, place))
    world = World(rank, size, (), (), timeout, first)
    if size > 1:
        job = enter(first, rank, size, launchers.job_name(os.environ), timeout, _where())
        if key is not None:
            world.store = TorchStore(store, Seal(key, f"{place}/{job}"))
        incarnation = _register(world, alone=not met_by_torch)
        try:
            _join(world, store, interfaces)
        except BaseException:
            incarnation.close()
            raise
        _incarnations[world] = incarnation
    elif not dist.is_initialized():
        _init_default_group(world, store=dist.HashStore(), rank=0, world_size=1)
    world_module.set_current(world)
    if rank == 0:
        speak()
    graceful_shutdown.at_the_end(world, shutdown)
    return world


def _check_call(timeout: float) -> None:
    """Raise a `UsageError` for a wrong timeout, or a process that must not join the job."""
    if not isinstance(timeout, (int, float)) or not 0 < timeout < float("inf"):
        raise UsageError(f"timeout={timeout!r}: allowed are seconds above 0")
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        # As multiprocessing itself finds out; this would join the job in its parent's place.
        raise UsageError(
            "wingbeat.init() was called while a process that multiprocessing has spawned, as for a "
            "DataLoader, imports the main script: put what trains under if __name__ == '__main__':"
        )


def shutdown() -> None:
    """Leave: stop wingbeat's threads and close its connections. Does nothing before `init`.

    Ends ``torch.distributed``'s default group too if `init` has started it and the script has
    not ended it itself: either ``destroy_process_group()`` first and then this, or this alone.
    """
    world = world_module.set_current(None)
    if world is not None:
        graceful_shutdown.close(world)
        incarnation = _incarnations.pop(world, None)
        if incarnation is not None:  # not before it has left: another may then have its rank
            incarnation.close()


def _end_default_group(group: dist.ProcessGroup) -> None:
    """Destroy the group that `init` made, unless the script has done so."""
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
    if key not in _met:
        _met.clear()
        _met[key] = _meet(timeout)
    rank, size, store = _met[key]
    store.set_timeout(timedelta(seconds=timeout))
    return rank, size, store


def _meet(timeout: float) -> tuple[int, int, dist.Store]:
    begin = time.monotonic()
    try:
        store, rank, size = next(
            iter(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
        )
    except (RuntimeError, ValueError) as err:
        env = os.environ
        if env["RANK"] == "0" and "EADDRINUSE" in str(err):
            raise RendezvousError(
                f"rank 0 cannot serve the store at {_where()}: another job, or program, has the "
                "port; set another MASTER_PORT on all workers"
            ) from None
        raise RendezvousError(
            f"rank {env['RANK']} did not reach the store at {_where()} after "
            f"{time.monotonic() - begin:.1f} s: {first_line(err)}; check that rank 0 runs, that "
            "its address is right, and that no firewall closes the port"
        ) from None
    return rank, size, store


def _where() -> str:
    """Return how messages call the store."""
    if "MASTER_PORT" not in os.environ:
        return "the address of torch.distributed's default group"
    env = os.environ
    return f"{env.get('MASTER_ADDR')}:{env['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT)"


def _register(world: World, *, alone: bool) -> Incarnation:
    """Take this worker's rank, and find out whether it comes in the place of another process.

    Args:
        world: this worker's.
        alone: whether it may have been started again alone: torch lets nobody come late into a
            group of its own.

    Raises:
        RendezvousError: another process has it.
    """
    host = os.environ.get("MASTER_ADDR", "127.0.0.1")
    try:
        incarnation = Incarnation(host)
    except OSError as err:
        raise RendezvousError(
            f"rank {world.rank} cannot listen on its interface towards {host} (MASTER_ADDR): {err}"
        ) from None
    try:
        assert isinstance(world.store, TorchStore)
        place = incarnation.place
        if alone:
            world.returned = register(world.store, world.rank, place, world.timeout, _where())
        else:
            world.store.set(f"here/{world.rank}", place.to_text())
    except BaseException:
        incarnation.close()
        raise
    return incarnation


def _join(world: World, store: dist.Store, named: Sequence[str] | None) -> None:
    """Connect to the others, or to nobody where this worker was started again alone."""
    if not world.returned:
        _connect(world, store, named)
        return
    # Those who would connect to it have done so with the process before it.
    chosen = _chosen(world, world.repeated("interfaces"), named)
    world.networks = _checked(world, world.repeated("networks"))
    world.interfaces = tuple(interface.name for interface in chosen)
    world.speeds = _speeds(world, len(chosen))
    _join_groups(world, store, chosen)
    with contextlib.suppress(RuntimeError):  # a store that keeps everything
        for said in ("left", "failed"):
            store.delete_key(f"{said}/{world.rank}")  # it is there again


def _connect(world: World, store: dist.Store, named: Sequence[str] | None) -> None:
    rank, size = world.rank, world.size
    chosen = _chosen(world, world.exchange("interfaces", nic.local().to_json()), named)
    world.networks = _networks(world, chosen)
    world.interfaces = tuple(interface.name for interface in chosen)
    descriptors.require(
        # The default group's device too; each rank has a second connection to the store, at rank 0.
        (1 + len(chosen)) * (descriptors.GLOO_DEVICE + size - 1) + 1 + size * (rank == 0),
        f"rank {rank}: connecting {size} ranks",
    )
    _start_default_group(store, world, chosen)
    world.links = tuple(
        GlooLink(dist.PrefixStore(f"link{i}", store), rank, size, interface, world.timeout)
        for i, interface in enumerate(chosen)
    )
    # Gloo calls itself connected when its own pairs are: a worker that leaves at once would close
    # them on one that still connects to others, whose `init` would fail.
    world.exchange("connected", True)
    world.speeds = measure_speeds(world)
    world.publish("speeds", world.speeds)
    world.make_native = functools.partial(nccl_group, rank, size)
    _join_groups(world, store, chosen)


def _join_groups(world: World, store: dist.Store, chosen: Sequence[nic.Interface]) -> None:
    """Let the world open groups of some workers."""
    assert isinstance(world.store, TorchStore)
    groups = GlooGroups(store, world.rank, world.size, chosen, world.store.seal)
    world.make_links, world.group_store = groups.links, groups.store
    world.on_close(groups.close)


def _speeds(world: World, links: int) -> tuple[float, ...]:
    """Return what was measured when all workers met.

    Raises:
        RendezvousError: a peer sent something else.
    """
    answer = world.read("speeds", 0)
    if (
        not isinstance(answer, list)
        or len(answer) != links
        or not all(type(speed) is float and 0 < speed < math.inf for speed in answer)
    ):
        raise RendezvousError(
            f"rank {world.rank}: rank 0 sent malformed speeds of its links: {str(answer)[:80]}"
        )
    return tuple(answer)


def _chosen(
    world: World, answers: Sequence[Any], named: Sequence[str] | None
) -> list[nic.Interface]:
    """Return this host's interfaces to use, by what all hosts have.

    Raises:
        UsageError: one that is named does not exist, or none joins the hosts.
        RendezvousError: a peer sent something else.
    """
    try:
        hosts = [nic.Host.from_json(answer) for answer in answers]
    except ValueError as err:
        raise RendezvousError(f"rank {world.rank}: a peer sent a {err}") from None
    return nic.choose(hosts, world.rank, named)


def _networks(world: World, chosen: Sequence[nic.Interface]) -> tuple[tuple[str, ...], ...]:
    """Tell the others which networks are used here, and hear which they use.

    Raises:
        UsageError: not all use as many interfaces, so that each would wait for the other's.
        RendezvousError: a peer sent something else.
    """
    return _checked(world, world.exchange("networks", [each.subnet for each in chosen]))


def _checked(world: World, answers: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    for rank, answer in enumerate(answers):
        if not isinstance(answer, list) or not all(isinstance(s, str) for s in answer):
            raise RendezvousError(
                f"rank {world.rank}: rank {rank} sent a malformed list of networks: "
                f"{str(answer)[:80]}"
            )
    for rank, answer in enumerate(answers):
        if len(answer) != len(answers[0]):
            raise UsageError(
                f"rank {rank} uses {len(answer)} network interfaces and rank 0 {len(answers[0])}: "
                "name as many on all hosts, wingbeat.init(interfaces=['eth0'])"
            )
    return tuple(map(tuple, answers))


def _start_default_group(store: dist.Store, world: World, chosen: Sequence[nic.Interface]) -> None:
    """Start torch's default group, on an interface that joins the hosts.

    By itself gloo listens where the host's name resolves to, which on many distributions is a
    loopback address that no other host can reach.
    """
    if dist.is_initialized():
        return
    with _environment("GLOO_SOCKET_IFNAME", chosen[0].name):
        try:
            _init_default_group(
                world,
                store=dist.PrefixStore("default", store),
                rank=world.rank,
                world_size=world.size,
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

    `torch.distributed.split_group` would meet on the same port, and wait for its whole timeout:
    without a device it fails at once. `torch.distributed.new_group` listens on a port of its own.
    """
    devices = len(os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    _, listener = listening(
        functools.partial(dist.init_process_group, "gloo", **options), count=devices
    )
    group = dist.group.WORLD
    world._close = functools.partial(_end_default_group, group)
    if listener.known and "TORCH_GLOO_LAZY_INIT" not in os.environ:  # with it they connect later
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
