"""The checks of a job: its ranks, what has to be equal, and the paths between its hosts. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from wingbeat.doctor import checks
from wingbeat.doctor.checks import FAILED, OK, WARNING, Finding
from wingbeat.doctor.facts import Facts, Listening, PathFacts
from wingbeat.transport import encryption, interfaces, launchers
from wingbeat.transport.interfaces import Interface
from wingbeat.transport.torch_store import KEY_VARIABLE

MAX_CLOCK_S = 0.05
"""Difference of two clocks from which the times of two hosts are not comparable."""

_DOCS = "docs/how-to/hosts.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What rank 0 has collected of a job.

    Attributes:
        size: number of ranks of the job.
        seconds: how long rank 0 has waited for them.
        facts: of each rank that came; never empty.
        rejected: ranks whose values lack the job's key, with the reason.
        malformed: ranks whose values this version does not read, with the reason.
        duplicates: further processes of a rank.
        listening: what the first rank of each host listens on.
        paths: connections that the first rank of each host has tried.
    """

    size: int
    seconds: float
    facts: Mapping[int, Facts]
    rejected: Mapping[int, str] = field(default_factory=dict)
    malformed: Mapping[int, str] = field(default_factory=dict)
    duplicates: Sequence[Facts] = ()
    listening: Mapping[int, Listening] = field(default_factory=dict)
    paths: Mapping[int, Sequence[PathFacts]] = field(default_factory=dict)

    @property
    def hosts(self) -> list[list[int]]:
        """The ranks of each host, in ascending order."""
        return ranks_by_host(self.facts)

    def name(self, rank: int) -> str:
        """Return the name of a rank's host; with the rank if two hosts have one name."""
        own = self.facts[rank]
        same = {each.host.identity for each in self.facts.values() if each.hostname == own.hostname}
        return own.hostname if len(same) == 1 else f"{own.hostname} (rank {rank})"


def ranks_by_host(facts: Mapping[int, Facts]) -> list[list[int]]:
    """Return the ranks of each host, in ascending order."""
    hosts: dict[str, list[int]] = defaultdict(list)
    for rank, each in sorted(facts.items()):
        hosts[each.host.identity].append(rank)
    return list(hosts.values())


def job(found: Job) -> list[Finding]:
    """Check a job: its ranks, what has to be equal, and the paths between its hosts."""
    hosts = found.hosts
    several = len(hosts) > 1
    findings = [_ranks(found), *_rejected(found), *_duplicates(found), _hosts(found)]
    for ranks in hosts:
        for each in checks.local(found.facts[ranks[0]], len(ranks), several_hosts=several):
            findings.append(replace(each, host=found.name(ranks[0])))
    findings += [*_equal(found), *_placement(found)]
    if several:
        findings += [*_networks(found), *_paths(found), *_clocks(found), *_buffers(found)]
    return checks.merged(findings, len(hosts))


def _listed(ranks: Iterable[int]) -> str:
    """Return ranks as text.

    >>> _listed([0, 1, 2, 5, 7, 8])
    '0-2, 5, 7, 8'
    """
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return ", ".join(texts)


def _ranks(found: Job) -> Finding:
    known = {*found.facts, *found.rejected, *found.malformed}
    missing = [rank for rank in range(found.size) if rank not in known]
    if not missing:
        return Finding("ranks", OK, f"{found.size} of {found.size} came")
    came = ", ".join(
        f"{found.name(ranks[0])} (rank{'s' * (len(ranks) > 1)} {_listed(ranks)})"
        for ranks in found.hosts
    )
    return Finding(
        "ranks",
        FAILED,
        f"rank{'s' * (len(missing) > 1)} {_listed(missing)} of {found.size} did not come "
        f"within {found.seconds:.0f} s; these came: {came}",
        remedy="read the output of the missing ranks: a rank that does not reach the store reports "
        "it there; check that their hosts are up and that the launcher starts them",
    )


def _rejected(found: Job) -> Iterator[Finding]:
    for rank, why in sorted(found.rejected.items()):
        yield checks.other_key(rank, why)
    for rank, why in sorted(found.malformed.items()):
        yield checks.unreadable(rank, why)


def _duplicates(found: Job) -> Iterator[Finding]:
    for each in found.duplicates:
        first = found.facts.get(each.rank)
        others = [] if first is None else [first.hostname]
        yield checks.duplicate(each.rank, [*others, each.hostname])


def _hosts(found: Job) -> Finding:
    names = [f"{found.name(ranks[0])} ({len(ranks)})" for ranks in found.hosts]
    value = f"{len(names)} with {len(found.facts)} ranks: {', '.join(names)}"
    plain = [found.facts[ranks[0]].hostname for ranks in found.hosts]
    if len(set(plain)) < len(plain):
        return Finding(
            "hosts",
            WARNING,
            f"{value}: several have the same name",
            remedy="name each host differently; containers that should be one host need one "
            "network namespace (--network host)",
        )
    return Finding("hosts", OK, value)


def _by_value(found: Job, of: Callable[[Facts], str]) -> str:
    """Return a text of each value and the ranks that have it; empty if all are equal."""
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, facts in found.facts.items():
        ranks[of(facts)].append(rank)
    if len(ranks) < 2:
        return ""
    return "; ".join(
        f"{value or 'none'} on rank{'s' * (len(own) > 1)} {_listed(own)}"
        for value, own in ranks.items()
    )


_SAME: tuple[tuple[str, str, str, Callable[[Facts], str], str], ...] = (
    ("versions", FAILED, "wingbeat", lambda f: f.wingbeat, "install one version on all hosts"),
    ("versions", FAILED, "torch", lambda f: f.torch, "install one version on all hosts"),
    (
        *("versions", WARNING, "Python", lambda f: f.python.rpartition(".")[0]),
        "use one version on all hosts",
    ),
    (
        *("environment", FAILED, encryption.VARIABLE),
        lambda f: f.env.get(encryption.VARIABLE, ""),
        "set the same on all workers, or none",
    ),
    (
        *("environment", FAILED, "the name of the job", lambda f: f.job),
        f"set the same {launchers.JOB} on all workers of a job, and a MASTER_PORT of its own",
    ),
    (
        *("environment", FAILED, "WORLD_SIZE", lambda f: str(f.size)),
        "start all workers with the same number of ranks, and each job at a MASTER_PORT of its own",
    ),
)
"""What has to be equal: check, state if not, name, value and remedy."""


def _equal(found: Job) -> Iterator[Finding]:
    for check, status, name, of, remedy in _SAME:
        if different := _by_value(found, of):
            value = f"{name} differs: {different}"
            yield Finding(check, status, value, remedy=remedy)


def _placement(found: Job) -> Iterator[Finding]:
    counts = {found.name(ranks[0]): len(ranks) for ranks in found.hosts}
    complete = len(found.facts) == found.size
    if complete and len(set(counts.values())) > 1:
        yield Finding(
            "hosts",
            WARNING,
            "numbers of processes differ: "
            + ", ".join(f"{name} {count}" for name, count in counts.items()),
            remedy="hosts with the same number of processes exchange less: "
            "--nproc-per-node, --ntasks-per-node",
        )
    gpus = {found.name(ranks[0]): found.facts[ranks[0]].gpus for ranks in found.hosts}
    if len(set(gpus.values())) > 1:
        yield Finding(
            "GPUs",
            WARNING,
            "numbers differ: " + ", ".join(f"{name} {n}" for name, n in gpus.items()),
            remedy="check nvidia-smi and CUDA_VISIBLE_DEVICES on the hosts with fewer",
        )
    for ranks in found.hosts if complete else []:
        told = found.facts[ranks[0]].env.get("LOCAL_WORLD_SIZE", "")
        if told.isdecimal() and int(told) != len(ranks):
            yield Finding(
                "hosts",
                WARNING,
                f"LOCAL_WORLD_SIZE is {told}, but {len(ranks)} of the ranks are on the host",
                remedy="a container with a network namespace of its own is a host: start it with "
                "the network of the host",
                host=found.name(ranks[0]),
            )


# -- networks and paths -----------------------------------------------------------------------


def _chosen(found: Job) -> dict[int, list[Interface]]:
    return {
        rank: [Interface(each.name, each.address, each.subnet) for each in own.places]
        for rank, own in found.listening.items()
        if not own.error
    }


def _networks(found: Job) -> Iterator[Finding]:
    errors: dict[str, list[str]] = defaultdict(list)
    for rank, answer in found.listening.items():
        if answer.error:
            errors[answer.error].append(found.name(rank))
    for error, hosts in errors.items():
        value, _, remedy = error.partition("; name the interfaces: ")
        remedy = f"name the interfaces that connect the hosts: {remedy}" if remedy else ""
        everywhere = len(hosts) == len(found.hosts)
        yield Finding(
            "networks",
            FAILED,
            value,
            remedy=remedy or f"name interfaces of this host ({_DOCS})",
            host="" if everywhere else ", ".join(hosts),
        )
    chosen = _chosen(found)
    if len({len(own) for own in chosen.values()}) > 1:
        yield Finding(
            "networks",
            FAILED,
            "numbers of interfaces differ: "
            + ", ".join(f"{found.name(rank)} {len(own)}" for rank, own in chosen.items()),
            remedy="name as many interfaces on each host, in the same order of networks",
        )
        return
    for rank, own in chosen.items():
        for each in own:
            yield Finding(
                "networks",
                OK,
                f"used: {checks.describe_nic(found.facts[rank], each)}",
                host=found.name(rank),
            )
    for row in zip(*chosen.values(), strict=True):
        yield from _alike(found, dict(zip(chosen, row, strict=True)))
    yield from _incomplete(found, chosen)


def _alike(found: Job, network: Mapping[int, Interface]) -> Iterator[Finding]:
    """Check that the interfaces of a network have one MTU and one speed."""
    nics = {
        rank: nic
        for rank, own in network.items()
        for nic in found.facts[rank].nics
        if nic.name == own.name
    }
    for what, values, remedy in (
        (
            "MTU",
            {rank: nic.mtu for rank, nic in nics.items() if nic.mtu},
            "set one MTU on all hosts and switches: ip link set {} mtu {}",
        ),
        (
            "speed in Mbit/s",
            {rank: nic.speed for rank, nic in nics.items() if nic.speed},
            "check cable, port and autonegotiation of the slower one: ethtool {}",
        ),
    ):
        if len(set(values.values())) > 1:
            listed = ", ".join(
                f"{found.name(rank)} {network[rank].name} {value}" for rank, value in values.items()
            )
            least = min(values, key=lambda rank: values[rank])
            yield Finding(
                "networks",
                WARNING,
                f"{what} differs in one network: {listed}",
                remedy=remedy.format(network[least].name, values[least]),
            )


def _incomplete(found: Job, chosen: Mapping[int, Sequence[Interface]]) -> Iterator[Finding]:
    """Report networks that connect some of the hosts, and what the others have instead."""
    used = {each.subnet for own in chosen.values() for each in own}
    if any(
        each.subnet not in {other.subnet for other in own}
        for mine in chosen.values()
        for each in mine
        for own in chosen.values()
    ):
        return  # interfaces were named, or the hosts form a BCube
    leaders = [ranks[0] for ranks in found.hosts]
    members: dict[str, dict[int, Interface]] = defaultdict(dict)
    for rank in leaders:
        for each in found.facts[rank].host.interfaces:
            if not interfaces.is_loopback(each) and each.subnet not in used:
                members[each.subnet].setdefault(rank, each)
    for subnet, own in sorted(members.items(), key=lambda item: interfaces.subnet_order(item[0])):
        names = ", ".join(f"{found.name(rank)} {each.name}" for rank, each in own.items())
        lacking = [rank for rank in leaders if rank not in own]
        kinds = {each.name for each in own.values()}
        distinct = len({each.address for each in own.values()}) == len(own)
        down = any(
            nic.name in kinds and not nic.up for rank in lacking for nic in found.facts[rank].nics
        )
        if not lacking and distinct:
            continue  # other interfaces were named
        if not distinct or (len(own) == 1 and not down):
            why = "one host only" if distinct else "the same address on several hosts"
            yield Finding("networks", OK, f"not used: {subnet}, {why} ({names})")
            continue
        states = ", ".join(
            f"{found.name(rank)} ({_state(found.facts[rank], kinds)})" for rank in lacking
        )
        yield Finding(
            "networks",
            WARNING,
            f"not used: {subnet} connects {names}, but not {states}",
            remedy=f"bring it up there, ip link set {min(kinds)} up, and give it an address in "
            f"{subnet}",
        )


def _state(facts: Facts, names: set[str]) -> str:
    for nic in facts.nics:
        if nic.name in names:
            return f"{nic.name} has another address" if nic.up else f"{nic.name} is down"
    return f"it has no {' or '.join(sorted(names))}"


_PATH_REMEDIES = {
    "timeout": "a firewall drops packets, or a route is wrong: open all TCP ports between the "
    f"hosts of a job ({_DOCS})",
    "refused": "a firewall rejects connections: open all TCP ports between the hosts of a job "
    f"({_DOCS})",
    "unreachable": "a router or a firewall reports that the host cannot be reached: check the "
    "route there, ip route get {}",
    "route": "the sending host has no route: ip route get {}",
    "forbidden": "the sending host's own firewall forbids the connection: allow outgoing ones",
    "handshake": f"set the same {KEY_VARIABLE} on all workers; or another program answers at this "
    "address: check that no two hosts have it",
}


def _paths(found: Job) -> Iterator[Finding]:
    leaders = [ranks[0] for ranks in found.hosts]
    for rank in leaders:
        if rank not in found.paths and rank in _chosen(found):
            yield Finding(
                "connections",
                FAILED,
                f"rank {rank} has not reported its connections in time",
                remedy="read its output; a longer --timeout, if its host is slow",
                host=found.name(rank),
            )
    tried = [(rank, each) for rank, own in found.paths.items() for each in own]
    broken: dict[tuple[int, int, str, str], list[int]] = defaultdict(list)
    for rank, each in tried:
        if each.reach.outcome != "ok":
            key = (each.peer, each.network, each.reach.outcome, each.reach.detail)
            broken[key].append(rank)
    works = {(rank, each.peer, each.network) for rank, each in tried if each.reach.outcome == "ok"}
    for (peer, network, outcome, detail), ranks in broken.items():
        yield _broken_path(found, works, peer, network, outcome, detail, ranks)
    yield from _stalled(found, tried)
    good = [each for _, each in tried if each.reach.outcome == "ok" and not each.stalled]
    if good and not broken:
        trips = sorted(each.round_trip_s for each in good)
        names = sorted({own.name for places in _chosen(found).values() for own in places})
        yield Finding(
            "connections",
            OK,
            f"{len(good)} of {len(tried)}, each direction of each pair of hosts over "
            f"{', '.join(names)}; round trips {1e6 * trips[0]:.0f} to {1e6 * trips[-1]:.0f} us",
        )


def _broken_path(
    found: Job,
    works: set[tuple[int, int, int]],
    peer: int,
    network: int,
    outcome: str,
    detail: str,
    ranks: Sequence[int],
) -> Finding:
    chosen = _chosen(found)
    target = chosen[peer][network]
    sources = ", ".join(f"{found.name(rank)} ({chosen[rank][network].address})" for rank in ranks)
    remedy = _PATH_REMEDIES.get(outcome, f"open all TCP ports between the hosts of a job ({_DOCS})")
    remedy = remedy.format(target.address)
    value = f"{sources} to {found.name(peer)} ({target.address}, {target.name}): {detail}"
    if outcome in ("timeout", "refused") and all((peer, r, network) in works for r in ranks):
        value += "; the other direction works"
        remedy = f"a firewall on {found.name(peer)} or before it: {remedy}"
    return Finding("connections", FAILED, value, remedy=remedy)


def _stalled(found: Job, tried: Sequence[tuple[int, PathFacts]]) -> Iterator[Finding]:
    seen: dict[tuple[int, int, int], int] = {}
    for rank, each in tried:
        if each.stalled:
            way = (rank, each.peer) if each.stalled == "there" else (each.peer, rank)
            seen[way[0], way[1], each.network] = each.mtu
    for (source, target, network), mtu in seen.items():
        own = _chosen(found)[source][network]
        yield Finding(
            "connections",
            FAILED,
            f"{found.name(source)} to {found.name(target)} over {own.name}: small packets "
            f"arrive, packets of {mtu} bytes do not",
            remedy=f"a switch, VPN or tunnel on the path has a smaller MTU: lower it on all hosts, "
            f"ip link set {own.name} mtu 1400 (1500 for switches without jumbo frames), or allow "
            "ICMP in the firewalls",
        )


def _clocks(found: Job) -> Iterator[Finding]:
    """Compare the clocks of all hosts with that of the first."""
    first = found.hosts[0][0]
    offsets = dict(_offsets(found, first))
    if not offsets:
        return
    for rank, (trip, offset) in sorted(offsets.items()):
        if abs(offset) - trip / 2 > MAX_CLOCK_S:
            yield Finding(
                "clocks",
                WARNING,
                f"{found.name(rank)} is {abs(offset):.3f} s "
                f"{'ahead of' if offset > 0 else 'behind'} {found.name(first)}",
                remedy="run chrony or another NTP client on all hosts; only traces, timelines and "
                "log lines depend on it, training does not",
            )
    most = max(abs(offset) + trip / 2 for trip, offset in offsets.values())
    if most <= 2 * MAX_CLOCK_S:
        yield Finding("clocks", OK, f"at most {1e3 * most:.2g} ms apart")


def _offsets(found: Job, first: int) -> dict[int, tuple[float, float]]:
    """Return for each host the shortest round trip to the first, and the clock's offset."""
    offsets: dict[int, tuple[float, float]] = {}
    for rank, own in found.paths.items():
        for each in own:
            if each.reach.outcome == "ok" and first in (rank, each.peer):
                other, sign = (each.peer, 1) if rank == first else (rank, -1)
                measured = each.round_trip_s, sign * each.clock_s
                offsets[other] = min(offsets.get(other, measured), measured)
    return offsets


def _buffers(found: Job) -> Iterator[Finding]:
    """Check that a connection can fill its link: a buffer of speed times round trip."""
    for rank, own in found.paths.items():
        facts = found.facts[rank]
        limit = min(facts.receive_bytes, facts.send_bytes)
        needed = 0
        for each in own:
            name = _chosen(found)[rank][each.network].name
            speed = next((nic.speed for nic in facts.nics if nic.name == name), 0)
            needed = max(needed, int(speed * 1e6 / 8 * each.round_trip_s))
        if 0 < limit < needed:
            yield Finding(
                "TCP buffers",
                WARNING,
                f"{limit >> 10} kB at most, and a link needs {needed >> 10} kB (its speed "
                "times the round trip)",
                remedy=f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {2 * needed}' "
                f"net.ipv4.tcp_wmem='4096 65536 {2 * needed}'",
                host=found.name(rank),
            )
