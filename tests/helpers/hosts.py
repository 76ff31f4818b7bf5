"""Facts of hosts as `wingbeat doctor` collects them, for its checks."""

from __future__ import annotations

from typing import Any

from wingbeat.doctor.facts import Facts, Listening, Nic, PathFacts, Place, Reach
from wingbeat.transport.interfaces import Host, Interface

GOOD: dict[str, Any] = {
    "size": 2,
    "wingbeat": "1.0",
    "torch": "2.11.0",
    "python": "3.11.7",
    "instructions": "avx2",
    "can_encrypt": True,
    "cores": 16.0,
    "files": 1 << 20,
    "shm_bytes": 8 << 30,
    "shared_memory": "",
    "receive_bytes": 6 << 20,
    "send_bytes": 4 << 20,
    "gpus": 0,
    "driver": "",
    "gpu_problem": "",
    "env": {},
    "problems": (),
    "key": "",
    "key_mode": 0,
    "job": "job 7",
    "replica_store": None,
}


def facts_of(rank: int = 0, **changes: Any) -> Facts:
    """A rank on a host of its own, with nothing to report: eth0 is in a network of all hosts."""
    own = {
        "rank": rank,
        "hostname": f"node{rank}",
        "host": host_of(rank),
        "nics": (Nic(name="eth0", speed=10_000, mtu=1500), Nic(name="lo", mtu=65536)),
        "secret": f"secret {rank}",
    }
    return Facts(**{**GOOD, **own, **changes})


def host_of(rank: int, *networks: int) -> Host:
    """A host with an interface ``eth{n}`` in each of the networks; default: the first."""
    nics = [
        Interface(f"eth{n}", f"10.{n}.0.{rank + 1}", f"10.{n}.0.0/24") for n in networks or (0,)
    ]
    return Host(f"host {rank}", (*nics, Interface("lo", "127.0.0.1", "127.0.0.0/8")))


def listening_of(rank: int, *networks: int) -> Listening:
    """What the first rank of that host listens on."""
    return Listening(
        places=tuple(
            Place(name=each.name, address=each.address, subnet=each.subnet, port=40_000)
            for each in host_of(rank, *networks).interfaces[:-1]
        )
    )


def path_to(peer: int, outcome: str = "ok", detail: str = "", **changes: Any) -> PathFacts:
    """A path over the first network, 50 us long."""
    given = {"network": 0, "round_trip_s": 50e-6, "mtu": 1500}
    reach = Reach(outcome=outcome, detail=detail, address=f"10.0.0.{peer + 1}")
    return PathFacts(peer=peer, reach=reach, **{**given, **changes})
