"""Findings, and the checks of one process and its host. Pure: facts in, findings out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from wingbeat.doctor.facts import Facts, Reach
from wingbeat.environment import unknown_variables
from wingbeat.errors import UsageError
from wingbeat.transport import descriptors, encryption, interfaces, launchers, replica_jobs
from wingbeat.transport.interfaces import Host, Interface
from wingbeat.transport.torch_store import KEY_VARIABLE

OK, WARNING, FAILED = "ok", "warning", "failed"
"""States of a finding."""

SCRIPT_FILES = 100
"""Open files that the checks reserve for the script, its data and its libraries."""

MIN_SHM_BYTES = 128 << 20
"""Containers have 64 MB in ``/dev/shm`` by default, which data loaders and NCCL fill."""


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of a check: its state, the value found, what to do, and the host; empty: all."""

    check: str
    status: str
    value: str
    remedy: str = ""
    host: str = ""


def failed(findings: Iterable[Finding]) -> bool:
    """Whether a check has failed."""
    return any(each.status == FAILED for each in findings)


def refused(check: str, error: str) -> Finding:
    """Return the finding of a value that wingbeat refuses, by the text of its `UsageError`."""
    value, separator, allowed = error.partition("; allowed: ")
    if separator:
        return Finding(check, FAILED, value, f"allowed are {allowed}")
    value, _, remedy = error.rpartition(": ")
    return Finding(check, FAILED, value, remedy)


def named(host: Host, names: Sequence[str] | None) -> list[Finding]:
    """Return the finding of a named interface that a host does not have, as a list; or nothing."""
    try:
        interfaces.choose([host], 0, names)
    except UsageError as error:
        return [refused("NICs", str(error))]
    return []


def merged(findings: Iterable[Finding], hosts: int) -> list[Finding]:
    """Return findings in the order of their checks, with one for what is equal on several hosts."""
    where: dict[Finding, list[str]] = defaultdict(list)
    for each in findings:
        where[replace(each, host="")].append(each.host)
    order = list(dict.fromkeys(each.check for each in where))
    made = []
    for each, names in where.items():
        everywhere = not all(names) or len(set(names)) == hosts
        made.append(replace(each, host="" if everywhere else ", ".join(dict.fromkeys(names))))
    return sorted(made, key=lambda each: order.index(each.check))


# -- one host -----------------------------------------------------------------------------


def local(facts: Facts, on_host: int = 1, *, several_hosts: bool = False) -> list[Finding]:
    """Check one process and its host, which has ``on_host`` processes of the job."""
    return [
        Finding(
            "versions", OK, f"wingbeat {facts.wingbeat}, torch {facts.torch}, Python {facts.python}"
        ),
        _instructions(facts, several_hosts),
        _cores(facts, on_host),
        _gpus(facts, on_host),
        *_nics(facts, several_hosts),
        _files(facts, on_host),
        *_memory(facts, on_host),
        *_environment(facts),
        *_interface_variables(facts, several_hosts),
        *_key(facts),
        *_replica_store(facts),
    ]


def _instructions(facts: Facts, several_hosts: bool) -> Finding:
    aes = "AES" if facts.can_encrypt else "no AES"
    value = f"{facts.instructions}, {aes}"
    encrypted = facts.env.get(encryption.VARIABLE)
    if not facts.can_encrypt and encrypted != "0" and (several_hosts or encrypted == "1"):
        return Finding(
            "instructions",
            FAILED,
            f"{value}: connections between hosts cannot be encrypted",
            remedy=f"give a virtual machine the host's processor, or set {encryption.VARIABLE}=0 "
            "on all workers",
        )
    if facts.instructions == "portable":
        return Finding(
            "instructions",
            WARNING,
            f"{value}: sums and codecs are slower without AVX2",
            remedy="give a virtual machine the host's processor, such as -cpu host",
        )
    return Finding("instructions", OK, value)


def _cores(facts: Facts, on_host: int) -> Finding:
    value = f"{facts.cores:g} for {on_host} process{'es' * (on_host > 1)}"
    if facts.cores < 2 * on_host:
        return Finding(
            "cores",
            WARNING,
            f"{value}: the threads of training and of communication share cores",
            remedy="2 cores or more for each process: srun --cpus-per-task, docker --cpus, the "
            "limits of a pod",
        )
    return Finding("cores", OK, value)


def _gpus(facts: Facts, on_host: int) -> Finding:
    if facts.gpu_problem:
        return Finding(
            "GPUs",
            WARNING,
            f"none, but driver {facts.driver}: {facts.gpu_problem}",
            remedy="install a torch that fits the driver (pytorch.org/get-started), and check "
            "nvidia-smi and CUDA_VISIBLE_DEVICES",
        )
    if not facts.gpus:
        return Finding("GPUs", OK, "none")
    value = f"{facts.gpus}, driver {facts.driver or 'unknown'}"
    if facts.gpus < on_host:
        return Finding(
            "GPUs",
            WARNING,
            f"{value}, for {on_host} processes",
            remedy=f"start one process for each GPU: torchrun --nproc-per-node {facts.gpus}",
        )
    return Finding("GPUs", OK, value)


def _nics(facts: Facts, several_hosts: bool) -> Iterator[Finding]:
    usable = [each for each in facts.host.interfaces if not interfaces.is_loopback(each)]
    for each in [] if several_hosts else usable:
        yield Finding("NICs", OK, describe_nic(facts, each))
    if not several_hosts and not usable:
        yield Finding(
            "NICs",
            WARNING,
            "no NIC is up and has an address",
            remedy="a job on several hosts needs one: ip link set NIC up; ip address add ...",
        )
    used = {each.name for each in facts.host.interfaces}
    unused = [
        f"{each.name} (down)" if not each.up else f"{each.name} (no address)"
        for each in facts.nics
        if each.name not in used
    ]
    loopback = {each.name for each in facts.host.interfaces if interfaces.is_loopback(each)}
    unused += [f"{each} (loopback)" for each in sorted(loopback)]
    if unused:
        yield Finding("NICs", OK, f"not used: {', '.join(unused)}")


def describe_nic(facts: Facts, interface: Interface) -> str:
    """Return the name, address, speed and MTU of an interface."""
    nic = next((each for each in facts.nics if each.name == interface.name), None)
    prefix = interface.subnet.partition("/")[2]
    parts = [f"{interface.name} {interface.address}/{prefix}"]
    if nic is not None:
        parts += [f"{nic.speed / 1000:g} Gbit/s"] * (nic.speed > 0) + [f"MTU {nic.mtu}"]
        parts += ["bridge: used only if its network connects all hosts"] * nic.bridge
    return ", ".join(parts)


def _files(facts: Facts, on_host: int) -> Finding:
    networks = max(1, sum(not interfaces.is_loopback(each) for each in facts.host.interfaces))
    own = descriptors.of_world(facts.size, on_host, networks, serves=facts.rank == 0)
    needed = own + SCRIPT_FILES
    value = f"hard limit {facts.files}" if facts.files else "no limit"
    if 0 < facts.files < needed:
        return Finding(
            "open files",
            FAILED if facts.files < own else WARNING,
            f"{value}: {own} are needed to connect {facts.size} ranks, and the script opens "
            "files too",
            remedy=f"raise the hard limit to {max(1024, needed)} or more: ulimit -Hn, LimitNOFILE= "
            "of systemd, docker --ulimit nofile=",
        )
    return Finding("open files", OK, value)


def _memory(facts: Facts, on_host: int) -> Iterator[Finding]:
    if facts.shared_memory:
        yield Finding(
            "shared memory",
            WARNING if on_host > 1 else OK,
            f"not available: {facts.shared_memory}; processes of this host use TCP",
            remedy="allow memfd_create in the sandbox of the container" if on_host > 1 else "",
        )
    if facts.shm_bytes < MIN_SHM_BYTES:
        yield Finding(
            "/dev/shm",
            WARNING,
            f"{facts.shm_bytes >> 20} MB: data loaders with workers, and NCCL, use it; "
            "wingbeat does not",
            remedy="docker run --shm-size=8g, or --ipc=host; an emptyDir with medium: Memory in "
            "Kubernetes",
        )
    else:
        yield Finding("/dev/shm", OK, f"{facts.shm_bytes >> 20} MB")


def _environment(facts: Facts) -> Iterator[Finding]:
    yield from (refused("environment", problem) for problem in facts.problems)
    own = {name: value for name, value in facts.env.items() if name.startswith("WINGBEAT_")}
    unknown = unknown_variables(own)
    for name, near in unknown.items():
        yield Finding(
            "environment",
            WARNING,
            f"{name} is not a variable of wingbeat",
            remedy=f"did you mean {near}? Otherwise unset it" if near else "unset it",
        )
    known = [f"{name}={value}" for name, value in own.items() if name not in unknown]
    if not facts.problems and (known or not own):
        none = f"no WINGBEAT_* variables{f' but {facts.key}' if facts.key else ''}"
        yield Finding("environment", OK, ", ".join(known) or none)


def _interface_variables(facts: Facts, several_hosts: bool) -> Iterator[Finding]:
    up = [each.name for each in facts.nics if each.up]
    loopback = {each.name for each in facts.host.interfaces if interfaces.is_loopback(each)}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = facts.env.get(name, "")
        if not value or value.startswith("^"):  # NCCL: interfaces to exclude
            continue
        used = name == "GLOO_SOCKET_IFNAME" or facts.gpus > 0
        for each in value.split(","):
            prefix = name == "NCCL_SOCKET_IFNAME" and not value.startswith("=")
            wanted = each.removeprefix("=").partition(":")[0]
            found = [nic for nic in up if nic == wanted or (prefix and nic.startswith(wanted))]
            if not found or (several_hosts and loopback.issuperset(found)):
                why = "is loopback" if found else "is not up, or does not exist"
                others = ", ".join(nic for nic in up if nic not in loopback) or "none"
                yield Finding(
                    "environment",
                    FAILED if used else WARNING,
                    value=f"{name}={value}: {wanted} {why}",
                    remedy=f"unset {name}, and wingbeat names the interface, or name one that is "
                    f"up: {others}",
                )


def _key(facts: Facts) -> Iterator[Finding]:
    if any(KEY_VARIABLE in problem for problem in facts.problems):
        return
    if not facts.key:
        yield Finding(
            "job key",
            OK,
            f"none; with {KEY_VARIABLE} the store's values are authenticated "
            "(docs/how-to/security.md)",
        )
    elif facts.key_mode & 0o077:
        path = facts.env.get(facts.key, "")
        yield Finding(
            "job key",
            WARNING,
            f"{facts.key}: other users may open {path} (mode {facts.key_mode:03o})",
            remedy=f"chmod 600 {path}",
        )
    else:
        yield Finding("job key", OK, f"from {facts.key}")


def _replica_store(facts: Facts) -> Iterator[Finding]:
    if (reach := facts.replica_store) is None:
        return
    where = f"{facts.env.get(replica_jobs.STORE, '')} ({replica_jobs.STORE})"
    if reach.outcome == "ok":
        yield Finding("store", OK, f"reached at {where}")
        return
    yield Finding(
        "store",
        FAILED,
        f"not reached at {where}: {reach.detail}",
        remedy="start `wingbeat store` there, check its address, and open its port",
    )


# -- the store ----------------------------------------------------------------------------


def store(rank: int, place: str, reach: Reach, *, loopback: bool = False) -> Finding:
    """Check how a rank has reached the store.

    ``place`` is host, port and their variables; ``loopback`` is whether the host's name is a
    loopback address here.
    """
    took = f"after {reach.seconds:.1f} s"
    if reach.outcome == "ok":
        if not reach.address:
            return Finding("store", OK, f"served at {place}")
        return Finding("store", OK, f"reached at {place}: {reach.address} from {reach.own}")
    where = f"{place}, {reach.address}" if reach.address else place
    value = f"rank {rank} did not reach {where} {took}: {reach.detail}"
    host = place.partition(" ")[0].rpartition(":")[0]
    remedies = {
        "name": f"use a name or an address of rank 0's host that is known here (getent hosts "
        f"{host}), or add it to /etc/hosts",
        "timeout": "nothing answers: open the port in the firewalls of rank 0's host and of the "
        "network, and check that the address is rank 0's",
        "refused": "the host answers and nothing listens at the port: check that rank 0 runs, and "
        "that it has the same MASTER_PORT; or a firewall rejects it",
        "unreachable": "the network reports that the host cannot be reached: check that it is up, "
        f"and the route, ip route get {reach.address or host}",
        "route": f"this host has no route to it: ip route get {reach.address or host}",
        "forbidden": "this host's own firewall forbids the connection: allow outgoing connections",
        "in use": "another job or program uses the port: set another MASTER_PORT on all workers",
        "elsewhere": "set MASTER_ADDR on all workers to an address of the host that has rank 0, or "
        "start rank 0 on the host of MASTER_ADDR (--node-rank 0 of torchrun)",
        "protocol": "another program answers there, or the versions of torch differ: set another "
        "MASTER_PORT on all workers, and compare the versions",
    }
    remedy = remedies.get(reach.outcome, "check that rank 0 runs and that its address is correct")
    if loopback and rank and reach.outcome == "refused":
        remedy = (
            "the address is loopback, so this host connects to itself: set MASTER_ADDR to an "
            "address of rank 0's host that all hosts reach"
        )
    return Finding("store", FAILED, value, remedy=remedy)


# -- a process that cannot continue ----------------------------------------------------------


def other_key(
    rank: int, why: str = "rank 0 has another job key, or only one of both has one"
) -> Finding:
    """Return the finding of a rank that has another key than rank 0."""
    return Finding(
        "job key",
        FAILED,
        f"rank {rank}: {why}",
        remedy=f"set the same {KEY_VARIABLE} on all workers, or none",
    )


def unreadable(rank: int, why: str) -> Finding:
    """Return the finding of a rank that has sent what this version does not read."""
    return Finding(
        "versions",
        FAILED,
        f"rank {rank} sent a malformed value: {why}",
        remedy="install one version of wingbeat on all hosts; or another program uses the store: "
        "set another MASTER_PORT",
    )


def duplicate(rank: int, hostnames: Sequence[str]) -> Finding:
    """Return the finding of two processes with one rank."""
    return Finding(
        "ranks",
        FAILED,
        f"two processes have rank {rank}, on {' and '.join(hostnames)}",
        remedy="give each process a RANK of its own (--node-rank of torchrun), and each job a "
        f"MASTER_PORT or {launchers.JOB} of its own",
    )


def silent_first_rank(rank: int, seconds: float) -> Finding:
    """Return the finding of a rank that waits for rank 0."""
    return Finding(
        "ranks",
        FAILED,
        f"rank {rank}: no value of rank 0 within {seconds:.0f} s, but the store answers",
        remedy="read the output of rank 0, and start all ranks at the same time; if its host is "
        "slow, a longer --timeout on all ranks",
    )


def late(rank: int) -> Finding:
    """Return the finding of a rank for which rank 0 has not waited."""
    return Finding(
        "ranks",
        FAILED,
        f"rank {rank} came after rank 0 had stopped waiting",
        remedy="start all ranks at the same time, or with a longer --timeout",
    )
