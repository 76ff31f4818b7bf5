"""The kernel's byte counters: interfaces from ``/proc/net/dev``, classes from ``tc -s``.

A *class* counts bytes on the wire, headers of every segment included. An *interface* counts the
headers once for each piece of up to 64 KB that TCP hands down, so it reads 4% lower for bulk
traffic, close to the payload.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from wingbeat.errors import LabError
from wingbeat_lab.lab.plan import NetworkPlan, class_names

_QDISC = re.compile(
    r"^qdisc \S+ (?P<handle>\w+): .*?dev (?P<device>\S+) .*\n"
    r"\s*Sent (?P<bytes>\d+) bytes (?P<packets>\d+) pkts? \(dropped (?P<drops>\d+)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class InterfaceCounters:
    """Bytes and packets that an interface received and sent since it was created."""

    rx_bytes: int
    rx_packets: int
    tx_bytes: int
    tx_packets: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        """Traffic between two readings."""
        return InterfaceCounters(
            self.rx_bytes - earlier.rx_bytes,
            self.rx_packets - earlier.rx_packets,
            self.tx_bytes - earlier.tx_bytes,
            self.tx_packets - earlier.tx_packets,
        )


@dataclass(frozen=True, slots=True)
class ClassCounters:
    """Bytes (on the wire) and packets that a class sent, and packets it dropped."""

    bytes: int
    packets: int
    drops: int


@dataclass(frozen=True, slots=True)
class PortStats:
    """Counters of one host interface.

    Attributes:
        interface: counters of the host's interface.
        out: classes of the link from the host, by name (``all`` without priorities).
        into: classes of the switch port towards the host.
    """

    interface: InterfaceCounters
    out: dict[str, ClassCounters] = field(default_factory=dict)
    into: dict[str, ClassCounters] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LabStats:
    """All counters of a lab: ``hosts["h0"]["eth0"]``, ``trunks["leaf0-1 -> spine0"]["all"]``."""

    spec: str
    hosts: dict[str, dict[str, PortStats]]
    trunks: dict[str, dict[str, ClassCounters]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return plain dictionaries for ``json.dumps``."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> LabStats:
        """Build from the result of ``to_json``; ValueError if the data has another form."""
        try:
            hosts = {
                host: {
                    name: PortStats(
                        InterfaceCounters(**port["interface"]),
                        _classes(port["out"]),
                        _classes(port["into"]),
                    )
                    for name, port in ports.items()
                }
                for host, ports in data["hosts"].items()
            }
            trunks = {name: _classes(classes) for name, classes in data["trunks"].items()}
            return cls(data["spec"], hosts, trunks)
        except (AttributeError, KeyError, TypeError) as err:
            raise ValueError(f"malformed counters of a lab: {err!s:.80}") from None


def read() -> dict[str, InterfaceCounters]:
    """Return the counters of every interface in the caller's network namespace.

    Inside a lab these are the interfaces of the worker's own host. No privileges are needed.

    Raises:
        LabError: this system has no ``/proc/net/dev`` (it is not Linux).
    """
    try:
        return parse_proc_net_dev(Path("/proc/self/net/dev").read_text(encoding="ascii"))
    except FileNotFoundError:
        raise LabError("no /proc/self/net/dev: interface counters need Linux") from None


def parse_proc_net_dev(text: str) -> dict[str, InterfaceCounters]:
    """Parse the format of ``/proc/net/dev``."""
    counters = {}
    for line in text.splitlines()[2:]:
        name, _, numbers = line.partition(":")
        n = [int(v) for v in numbers.split()]
        counters[name.strip()] = InterfaceCounters(n[0], n[1], n[8], n[9])
    return counters


def read_classes(prio: int) -> dict[str, dict[str, ClassCounters]]:
    """Return the class counters of the caller's network namespace, by device and name.

    Inside a lab they count what the worker's own host has sent. No privileges are needed.

    Args:
        prio: the lab's number of priority classes.

    Raises:
        LabError: ``tc`` is missing or failed.
    """
    command = ["tc", "-s", "qdisc", "show"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise LabError("tc not found: install iproute2") from None
    if done.returncode:
        raise LabError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return parse_qdiscs(done.stdout, prio)


def parse_qdiscs(text: str, prio: int) -> dict[str, dict[str, ClassCounters]]:
    """Parse ``tc -s qdisc show`` of a lab with ``prio`` classes, by device and name."""
    names = class_names(prio)
    wanted = {f"1{i}": name for i, name in enumerate(names)} if prio else {"1": names[0]}
    devices: dict[str, dict[str, ClassCounters]] = {}
    for m in _QDISC.finditer(text):
        if m["handle"] in wanted:
            counters = ClassCounters(int(m["bytes"]), int(m["packets"]), int(m["drops"]))
            devices.setdefault(m["device"], {})[wanted[m["handle"]]] = counters
    return devices


def gather(
    spec: str,
    plan: NetworkPlan,
    interfaces: Mapping[str, Mapping[str, InterfaceCounters]],
    out: Mapping[str, Mapping[str, dict[str, ClassCounters]]],
    ports: Mapping[str, dict[str, ClassCounters]],
) -> LabStats:
    """Combine readings: two by host and interface, ``ports`` by switch port."""
    hosts = {
        host.name: {
            i.name: PortStats(
                interfaces[host.name][i.name],
                out[host.name].get(i.name, {}),
                ports.get(i.port, {}),
            )
            for i in host.interfaces
        }
        for host in plan.hosts
    }
    trunks = {}
    for t in plan.trunks:
        trunks[f"{t.lower} -> {t.upper}"] = ports.get(t.lower_port, {})
        trunks[f"{t.upper} -> {t.lower}"] = ports.get(t.upper_port, {})
    return LabStats(spec, hosts, trunks)


def _classes(data: Mapping[str, Any]) -> dict[str, ClassCounters]:
    return {name: ClassCounters(**values) for name, values in data.items()}
