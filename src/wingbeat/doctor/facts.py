"""Facts of a process and its host, and of the paths between hosts, as records; and their reading.

Records travel through the rendezvous store as JSON. They have limits, as another process sends
them, and contain no key.
"""

from __future__ import annotations

import errno
import os
import platform
import resource
import secrets
import socket
import stat
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import psutil
import torch

import wingbeat
from wingbeat import _native
from wingbeat.environment import VARIABLES, unknown_variables
from wingbeat.errors import UsageError
from wingbeat.observe import reporter
from wingbeat.observe.log import chosen_level
from wingbeat.schema import Length, Range, Text
from wingbeat.transport import encryption, interfaces, launchers, replica_jobs, tcp
from wingbeat.transport.text import first_line
from wingbeat.transport.torch_store import KEY_FILE_VARIABLE, KEY_VARIABLE, job_key

_UNKNOWN_SPEED = 65535
"""What drivers of virtual interfaces return as their speed."""

_MAX_UNKNOWN = 64
"""Unknown variables that are reported: records are limited."""

_OTHERS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "LOCAL_WORLD_SIZE")

CONNECT_S, _RETRY_S = 5.0, 0.2
"""Seconds to connect, and between two attempts."""

Name = Annotated[str, Text(200)]
Line = Annotated[str, Text(600)]
Seconds = Annotated[float, Range(-1e12, 1e12)]
_Count = Annotated[int, Range(0, 1 << 53)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Nic:
    """A network interface: ``speed`` in Mbit/s, 0 if unknown; ``mtu`` in bytes."""

    name: Name
    up: bool = True
    speed: _Count = 0
    mtu: _Count = 0
    bridge: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The outcome of opening a TCP connection.

    Attributes:
        outcome: ``ok``, or the reason of a failure as in `outcome_of`.
        detail: the system's error.
        address: the address that was tried.
        own: the own address of the connection.
        seconds: what it took.
    """

    outcome: Name = "ok"
    detail: Line = ""
    address: Name = ""
    own: Name = ""
    seconds: Seconds = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What one process knows of itself and its host.

    Attributes:
        rank: 0 to ``size - 1``.
        size: number of processes of the job.
        hostname: name of the host.
        host: its identity, and its interfaces that are up and have an address.
        nics: all of its interfaces.
        wingbeat: version; ``torch`` and ``python`` likewise.
        instructions: instructions of the extension's loops.
        can_encrypt: whether the processor has AES instructions.
        cores: processors that this process may use, by its affinity and its cgroup.
        files: hard limit of open files; 0: none.
        shm_bytes: size of ``/dev/shm``.
        shared_memory: why the ranks of this host cannot share memory; empty: they can.
        receive_bytes: maximum buffer of a TCP connection; ``send_bytes`` likewise. 0: unknown.
        gpus: number of CUDA devices; ``driver`` is the version of their driver.
        gpu_problem: why there are none, though there is a driver.
        env: the variables of wingbeat and some others, without the job's key; unknown ones
            without their values.
        problems: values of the environment that wingbeat refuses, as errors.
        key: where the job's key is from: a variable, or empty.
        key_mode: permissions of its file; 0 without one.
        job: name of the job; empty if it has none.
        secret: drawn for this check; part of the key of connections.
        replica_store: how ``WINGBEAT_STORE`` was reached; None without one.
    """

    rank: _Count
    size: _Count
    hostname: Name
    host: interfaces.Host
    nics: Annotated[tuple[Nic, ...], Length(most=4096)]
    wingbeat: Name
    torch: Name
    python: Name
    instructions: Name
    can_encrypt: bool
    cores: Annotated[float, Range(0, 1e6)]
    files: _Count
    shm_bytes: _Count
    shared_memory: Line
    receive_bytes: _Count
    send_bytes: _Count
    gpus: _Count
    driver: Name
    gpu_problem: Line
    env: Annotated[dict[Name, Line], Length(most=256)]
    problems: Annotated[tuple[Line, ...], Length(most=64)]
    key: Name
    key_mode: _Count
    job: Name
    secret: Name
    replica_store: Reach | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """A connection from one host to another, over the interfaces of one network.

    Attributes:
        peer: rank that was connected to.
        network: index of the network.
        reach: the outcome; ``handshake`` if the peer did not prove that it has the job's key.
        round_trip_s: shortest round trip.
        clock_s: the peer's clock minus this host's, at most half a round trip wrong.
        mtu: bytes of the largest packet, as the kernel knows.
        stalled: in which direction full-size packets are lost: ``there``, ``back`` or empty.
    """

    peer: _Count
    network: _Count
    reach: Reach
    round_trip_s: Seconds = 0.0
    clock_s: Seconds = 0.0
    mtu: _Count = 0
    stalled: Name = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a host listens in a network: an interface, its address, and a TCP port."""

    name: Name
    address: Name
    subnet: Name
    port: Annotated[int, Range(1, 1 << 16)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """What the first rank of a host listens on, one place for each network; or why on nothing."""

    places: Annotated[tuple[Place, ...], Length(most=64)] = ()
    error: Line = ""

    def __post_init__(self) -> None:
        """Raise a `UsageError` if an address is malformed."""
        own = (interfaces.Interface(each.name, each.address, each.subnet) for each in self.places)
        interfaces.Host("", tuple(own))


def collect(env: Mapping[str, str], rank: int = 0, size: int = 1) -> Facts:
    """Return the facts of this process."""
    problems, key = _problems(env)
    gpus, driver, gpu_problem = _gpus()
    receive, send = (_last_number(f"/proc/sys/net/ipv4/tcp_{each}mem") for each in "rw")
    shm = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    path = env.get(KEY_FILE_VARIABLE) if key else None
    return Facts(
        rank=rank,
        size=size,
        hostname=socket.gethostname(),
        host=interfaces.local(),
        nics=_nics(),
        wingbeat=wingbeat.__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        instructions=_native.instructions(),
        can_encrypt=_native.can_encrypt(),
        cores=_cores(),
        files=0 if hard == resource.RLIM_INFINITY else hard,
        shm_bytes=shm.f_blocks * shm.f_frsize if shm else 0,
        shared_memory=_shared_memory(),
        receive_bytes=receive,
        send_bytes=send,
        gpus=gpus,
        driver=driver,
        gpu_problem=gpu_problem,
        env=_variables(env),
        problems=problems,
        key=(KEY_FILE_VARIABLE if path else KEY_VARIABLE) if key else "",
        key_mode=stat.S_IMODE(os.stat(path).st_mode) if path else 0,
        job=launchers.job_name(env),
        secret=secrets.token_hex(32),
        replica_store=_reach_replica_store(env),
    )


def _problems(env: Mapping[str, str]) -> tuple[tuple[str, ...], bytes | None]:
    """Return what wingbeat refuses in an environment, and the job's key."""
    found, key = [], None
    readers: tuple[Callable[[Mapping[str, str]], Any], ...] = (
        lambda env: encryption.choose(None, env),
        chosen_level,
        tcp.shared_memory_enabled,
        reporter.enabled,
        reporter.places,
        replica_jobs.settings_of,
    )
    for reader in readers:
        try:
            reader(env)
        except UsageError as error:
            found.append(str(error))
    try:
        key = job_key(env)
    except UsageError as error:
        found.append(str(error))
    return tuple(found), key


def _reach_replica_store(env: Mapping[str, str]) -> Reach | None:
    try:
        settings = replica_jobs.settings_of(env)
    except UsageError:  # one of the problems
        return None
    if settings is None:
        return None
    return reach(settings.host, settings.port, time.monotonic() + CONNECT_S)


def _variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to report, without the key.

    Unknown ones have no value: one of them may be the key, under a misspelled name.
    """
    known = {*VARIABLES, *_OTHERS} - {KEY_VARIABLE}
    unknown = list(unknown_variables(env))[:_MAX_UNKNOWN]
    return {name: env[name] for name in sorted(known & env.keys())} | dict.fromkeys(unknown, "")


def _nics() -> tuple[Nic, ...]:
    return tuple(
        Nic(
            name=name,
            up=found.isup,
            speed=0 if found.speed == _UNKNOWN_SPEED else found.speed,
            mtu=found.mtu,
            bridge=os.path.isdir(f"/sys/class/net/{name}/bridge"),
        )
        for name, found in sorted(psutil.net_if_stats().items())
    )


def _cores() -> float:
    """Return the processors that this process may use; a cgroup may allow a fraction of one."""
    cores = float(len(os.sched_getaffinity(0)))
    with suppress(OSError, IndexError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        own = next((line[3:] for line in lines if line.startswith("0::")), "/")
        root = Path("/sys/fs/cgroup")
        inside = root / own.lstrip("/")
        for folder in (inside, *(each for each in inside.parents if each.is_relative_to(root))):
            with suppress(OSError, ValueError):
                quota, period = (folder / "cpu.max").read_text().split()
                cores = min(cores, int(quota) / int(period))  # "max": no limit
    with suppress(OSError, ValueError):  # the first version of cgroups
        quota, period = (
            Path(f"/sys/fs/cgroup/cpu/cpu.cfs_{each}_us").read_text()
            for each in ("quota", "period")
        )
        if int(quota) > 0:
            cores = min(cores, int(quota) / int(period))
    return cores


def _shared_memory() -> str:
    """Return why memory cannot be shared with processes of this host; empty if it can."""
    try:
        _native.Rings()
    except (OSError, RuntimeError) as error:
        return str(error)
    return ""


def _last_number(path: str) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(path).read_text().split()[-1])
    return 0


def _gpus() -> tuple[int, str, str]:
    """Return the number of GPUs, the driver, and why a driver has none."""
    driver = ""
    with suppress(OSError, IndexError):
        driver = Path("/proc/driver/nvidia/version").read_text().split("Module")[1].split()[0]
    try:
        if torch.cuda.is_available():
            for number in range(torch.cuda.device_count()):
                torch.cuda.get_device_properties(number)  # fails if a device does
            return torch.cuda.device_count(), driver, ""
    except RuntimeError as error:
        return 0, driver, str(error).splitlines()[0]
    if not driver:
        return 0, "", ""
    built = torch.version.cuda
    return 0, driver, f"torch is built for CUDA {built}" if built else "torch is built without CUDA"


# -- opening a connection -----------------------------------------------------------------


def reach(host: str, port: int, deadline: float, connect_s: float = CONNECT_S) -> Reach:
    """Open a TCP connection, again until the deadline, and close it.

    Tries all addresses of the host's name, and reports the last failure.
    """
    begin = time.monotonic()
    while True:
        found = Reach(outcome="name", detail=f"{host} has no address")
        try:
            entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            entries = []
            found = Reach(outcome="name", detail=f"{host} cannot be resolved: {text_of(error)}")
        for family, kind, protocol, _, address in entries:
            seconds = max(0.1, min(connect_s, deadline - time.monotonic()))
            with socket.socket(family, kind, protocol) as connection:
                connection.settimeout(seconds)
                try:
                    connection.connect(address)
                except OSError as error:
                    found = reach_of(error, str(address[0]), seconds)
                    continue
                took = time.monotonic() - begin
                own = str(connection.getsockname()[0])
                return Reach(address=str(address[0]), own=own, seconds=took)
        if time.monotonic() + _RETRY_S >= deadline:
            return replace(found, seconds=time.monotonic() - begin)
        time.sleep(_RETRY_S)


def not_here(host: str, port: int) -> Reach | None:
    """Return why no process of this host can serve at a host's name; None if one can."""
    try:
        entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        detail = f"{host!r} cannot be resolved: {text_of(error)}"
        return Reach(outcome="name", detail=detail)
    for family, kind, protocol, _, address in entries:
        with socket.socket(family, kind, protocol) as own, suppress(OSError):
            own.bind((address[0], 0, *address[2:]))  # fails with addresses of other hosts
            return None
    shown = str(entries[0][4][0])
    detail = f"{shown} is not an address of this host, which has rank 0 and serves the store"
    return Reach(outcome="elsewhere", detail=detail, address=shown)


_OUTCOMES = {
    errno.ECONNREFUSED: "refused",
    errno.EHOSTUNREACH: "unreachable",
    errno.ENETUNREACH: "route",
    errno.EINVAL: "route",  # a route of type blackhole
    errno.EACCES: "forbidden",
    errno.EPERM: "forbidden",
}


def outcome_of(error: OSError) -> str:
    """Return the reason of a failed connection: the word by which `checks` has its remedy."""
    if isinstance(error, TimeoutError):
        return "timeout"
    return _OUTCOMES.get(error.errno or 0, "error")


def reach_of(error: OSError, address: str, seconds: float) -> Reach:
    """Return the facts of a failed connection, which had ``seconds``."""
    detail = f"no answer within {seconds:.1f} s" if isinstance(error, TimeoutError) else ""
    return Reach(outcome=outcome_of(error), detail=detail or text_of(error), address=address)


def text_of(error: Exception) -> str:
    """Return the system's text of an error."""
    return getattr(error, "strerror", None) or first_line(error)
