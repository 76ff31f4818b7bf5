"""The emulated network, from inside the private namespaces that hold it.

Open files of this process keep the host namespaces alive. They have no names under ``/run``, so
the outer file system is unused and all of it ends with this process.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

from wingbeat.errors import LabError
from wingbeat_lab.lab import counters, kernel
from wingbeat_lab.lab.plan import CLASSES, Host, Interface, NetworkPlan, plan_network
from wingbeat_lab.lab.spec import LabSpec

BURST = 96 * 1024
MIN_BURST = 6 * 1024
BURST_SECONDS = 0.008
QUEUE_SECONDS = 0.05
MIN_QUEUE = 1_000_000
GSO_MAX = 65536
MIN_GSO = 4096
GSO_SECONDS = 0.001
HEADROOM = 2048
"""Difference of a burst and the largest piece: segment headers, which shapers count."""


def burst_bytes(rate: int) -> int:
    """Token bucket size for a rate in bit/s."""
    return min(BURST, max(MIN_BURST, int(rate / 8 * BURST_SECONDS)))


def piece_bytes(rate: int) -> int:
    """Largest piece that TCP may hand down at a rate in bit/s; it always fits the burst."""
    return min(GSO_MAX, burst_bytes(rate) - HEADROOM, max(MIN_GSO, int(rate / 8 * GSO_SECONDS)))


def queue_bytes(rate: int) -> int:
    """Queue limit for a rate in bit/s."""
    return max(MIN_QUEUE, int(rate / 8 * QUEUE_SECONDS))


def switch_links(plan: NetworkPlan, netns: dict[int, str]) -> list[str]:
    """``ip`` lines for the switches' namespace; ``netns`` maps a host index to a namespace path."""
    lines = []
    for switch in plan.switches:
        lines.append(f"link add {switch} type bridge mcast_snooping 0 stp_state 0")
        lines += _up(switch)
    for host in plan.hosts:
        for i in host.interfaces:
            lines.append(
                f"link add {i.port} type veth peer name {i.name} netns {netns[host.index]}"
            )
            lines += _port_up(i.port, i.switch, i.rate)
    for trunk in plan.trunks:
        lines.append(f"link add {trunk.lower_port} type veth peer name {trunk.upper_port}")
        lines += _port_up(trunk.lower_port, trunk.lower, trunk.rate)
        lines += _port_up(trunk.upper_port, trunk.upper, trunk.rate)
    return lines


def host_links(host: Host) -> list[str]:
    """``ip`` lines for one host's namespace."""
    lines = ["link set dev lo up"]
    for i in host.interfaces:
        lines += _up(i.name, _gso(i.rate))
        # No other device has an IPv6 address of the lab; duplicate detection would take a second.
        options = "nodad" if i.version == 6 else "brd +"
        lines.append(f"addr add {i.address}/{i.prefix} {options} dev {i.name}")
    lines += [f"route add {r.destination}/32 via {r.via} dev {r.interface}" for r in host.routes]
    return lines


def host_congestion(host: Host, name: str) -> list[str]:
    """``ip`` lines that set a host's TCP congestion control to ``name``, as a metric of its routes.

    A namespace may set the sysctl only to what the machine allows to all users; a route takes any.
    """
    local = [
        f"route replace {i.network} dev {i.name} scope link src {i.address} congctl {name}"
        for i in host.interfaces
    ]
    far = [
        f"route replace {r.destination}/32 via {r.via} dev {r.interface} congctl {name}"
        for r in host.routes
    ]
    return local + far


def switch_shaping(plan: NetworkPlan) -> list[str]:
    """``tc`` lines for the switches' namespace."""
    lines = []
    for host in plan.hosts:
        for i in host.interfaces:
            lines += shape(i.port, i.rate, plan.prio)
    for trunk in plan.trunks:
        lines += shape(trunk.lower_port, trunk.rate, plan.prio)
        lines += shape(trunk.upper_port, trunk.rate, plan.prio)
    return lines


def host_shaping(host: Host, prio: int) -> list[str]:
    """``tc`` lines for one host's namespace."""
    return [line for i in host.interfaces for line in shape(i.name, i.rate, prio)]


def shape(device: str, rate: int, prio: int) -> list[str]:
    """``tc`` lines that give ``device`` a rate in bit/s and ``prio`` strict-priority classes."""
    if not prio:
        return [f"qdisc add dev {device} {_tbf(rate)}"]
    lines = [f"qdisc add dev {device} root handle 1: htb default 1{prio - 1}"]
    lines += _htb("add", device, rate, prio)
    for index in range(prio):
        lines.append(
            f"qdisc add dev {device} parent 1:1{index} handle 1{index}: "
            f"bfifo limit {queue_bytes(rate)}"
        )
    for index, (_, tos) in enumerate(CLASSES[: prio - 1]):
        lines.append(
            f"filter add dev {device} parent 1: protocol ip prio {index + 1} "
            f"u32 match ip dsfield {tos:#x} 0xfc flowid 1:1{index}"
        )
    # A saturated urgent class must not block address resolution: no new connection would start.
    lines.append(
        f"filter add dev {device} parent 1: protocol arp prio 9 u32 match u32 0 0 flowid 1:10"
    )
    return lines


def reshape(device: str, rate: int, prio: int) -> list[str]:
    """``tc`` lines that change the rate of a device that ``shape`` set up."""
    return (
        _htb("change", device, rate, prio) if prio else [f"qdisc change dev {device} {_tbf(rate)}"]
    )


def resize(device: str, rate: int) -> str:
    """The ``ip`` line that adapts a device's largest piece to a changed rate."""
    return f"link set dev {device} {_gso(rate)}"


def _port_up(port: str, switch: str, rate: int) -> list[str]:
    return _up(port, f"master {switch} {_gso(rate)}")


def _up(device: str, options: str = "") -> list[str]:
    """Bring a device up without link-local addresses, so that the idle network is silent.

    Two lines, because within one the kernel brings the device up first.
    """
    return [f"link set dev {device} addrgenmode none", f"link set dev {device} {options} up"]


def _gso(rate: int) -> str:
    return f"gso_max_size {piece_bytes(rate)}"


def _tbf(rate: int) -> str:
    return f"root handle 1: tbf rate {rate}bit burst {burst_bytes(rate)} limit {queue_bytes(rate)}"


def _htb(verb: str, device: str, rate: int, prio: int) -> list[str]:
    burst, floor = burst_bytes(rate), max(rate // 1000, 8000)
    lines = [
        f"class {verb} dev {device} parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit "
        f"burst {burst} cburst {burst} quantum {GSO_MAX}"
    ]
    return lines + [
        f"class {verb} dev {device} parent 1:1 classid 1:1{index} htb rate {floor}bit "
        f"ceil {rate}bit burst 1600 cburst {burst} prio {index} quantum {GSO_MAX}"
        for index in range(prio)
    ]


class Network:
    """Hosts and switches of one spec; the switches are in the caller's namespace.

    LabError if the kernel refused an operation; the message has the tool and its error.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.plan: NetworkPlan = plan_network(spec)
        self._files: list[int] = []
        try:
            self._build()
        except OSError as err:
            raise LabError(
                f"cannot build the lab's network: {err}; see: wingbeat lab doctor"
            ) from None

    def _build(self) -> None:
        self._files = [kernel.new_network() for _ in self.plan.hosts]
        paths = {h.index: f"/proc/self/fd/{self._files[h.index]}" for h in self.plan.hosts}
        batch("ip", ["link set dev lo up", *switch_links(self.plan, paths)], self._files)
        batch("tc", switch_shaping(self.plan))
        for host in self.plan.hosts:
            with kernel.inside(self._files[host.index]):
                if self.spec.kind == "bcube":
                    _forward_packets()
                if self.plan.prio:
                    _answer_in_kind()
                batch("ip", host_links(host))
                _use_cubic(host)
                batch("tc", host_shaping(host, self.plan.prio))
        _name_hosts(self.plan.hosts_file())

    def enter(self, host: int) -> None:
        """Move this process onto a host: its network, its name, its view of /sys."""
        kernel.setns(self._files[host], kernel.CLONE_NEWNET)
        kernel.unshare(kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS)
        socket.sethostname(self.plan.hosts[host].name)
        _show_own_sys()

    def processes(self, host: int) -> list[int]:
        """Process ids on a host, as in this process's /proc."""
        inode = os.fstat(self._files[host]).st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdecimal() and (entry / "ns" / "net").stat().st_ino == inode:
                    found.append(int(entry.name))
        return found

    def set_link(self, host: int, interface: int | None, up: bool) -> None:
        """Connect or disconnect one or all cables of a host, at the switch: its carrier changes."""
        state = "up" if up else "down"
        batch("ip", [f"link set dev {i.port} {state}" for i in self._select(host, interface)])

    def set_rate(self, host: int, interface: int | None, rate: int) -> None:
        """Change a link's rate (bit/s) in both directions."""
        chosen, prio = self._select(host, interface), self.plan.prio
        batch("ip", [resize(i.port, rate) for i in chosen])
        batch("tc", [line for i in chosen for line in reshape(i.port, rate, prio)])
        with kernel.inside(self._files[host]):
            batch("ip", [resize(i.name, rate) for i in chosen])
            batch("tc", [line for i in chosen for line in reshape(i.name, rate, prio)])

    def stats(self) -> counters.LabStats:
        """Read every counter of the lab."""
        ports = counters.read_classes(self.plan.prio)
        interfaces, out = {}, {}
        for host in self.plan.hosts:
            with kernel.inside(self._files[host.index]):
                interfaces[host.name] = counters.read()
                out[host.name] = counters.read_classes(self.plan.prio)
        return counters.gather(self.spec.to_text(), self.plan, interfaces, out, ports)

    def _select(self, host: int, interface: int | None) -> tuple[Interface, ...]:
        interfaces = self.plan.hosts[host].interfaces
        return interfaces if interface is None else (interfaces[interface],)


def batch(tool: str, lines: Sequence[str], files: Sequence[int] = ()) -> None:
    """Run ``ip`` or ``tc`` once for many lines.

    LabError if the tool is missing or refused a line; the message has the line.
    """
    try:
        done = subprocess.run(
            [tool, "-batch", "-"],
            input="".join(f"{line}\n" for line in lines),
            capture_output=True,
            text=True,
            pass_fds=files,
            check=False,
        )
    except FileNotFoundError:
        raise LabError(f"{tool} not found: install iproute2") from None
    if done.returncode:
        raise LabError(f"{tool} failed: {explain(done.stderr, lines)}; see: wingbeat lab doctor")


def explain(stderr: str, lines: Sequence[str]) -> str:
    """Describe a batch failure in one line: the tool's first message and the line it refers to."""
    messages = [m.strip() for m in stderr.splitlines() if m.strip()] or ["no message"]
    where = stderr.rpartition("Command failed -:")[2].strip()
    if not where.isdecimal():
        return messages[0]
    return f"{messages[0]} (in: {tuple(lines)[int(where) - 1]})"


def _forward_packets() -> None:
    """Enable forwarding on a host, between any of its interfaces (BCube's servers are routers)."""
    ipv4 = Path("/proc/sys/net/ipv4")
    (ipv4 / "ip_forward").write_text("1")
    for name in ("all", "default"):
        (ipv4 / "conf" / name / "rp_filter").write_text("0")
        (ipv4 / "conf" / name / "send_redirects").write_text("0")


def _use_cubic(host: Host) -> None:
    """Use cubic on a host if it is available, so that figures compare between machines.

    It also shares a slow link between both directions better than bbr.
    """
    known = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
    with contextlib.suppress(OSError):
        if "cubic" in known.read_text().split():
            batch("ip", host_congestion(host, "cubic"))


def _answer_in_kind() -> None:
    """Have accepted connections answer in the class of the caller, on kernels from 5.10 on.

    Acknowledgements in the lowest class would starve behind urgent data in their direction, and
    stall the urgent flow that waits for them.
    """
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/tcp_reflect_tos").write_text("1")


def _name_hosts(text: str) -> None:
    """Bind ``text`` over /etc/hosts in this mount namespace, without leaving a file."""
    kernel.mount("tmpfs", "/run", "tmpfs")
    try:
        Path("/run/hosts").write_text(text)
        kernel.mount("/run/hosts", "/etc/hosts", flags=kernel.MS_BIND)
    finally:
        kernel.detach("/run")


def _show_own_sys() -> None:
    """Mount this host's interfaces under /sys, with cgroup limits visible; best effort.

    Where a container forbids it, tools that read /sys see the interfaces of the container.
    """
    with contextlib.suppress(OSError):
        cgroups = os.open("/sys/fs/cgroup", os.O_PATH)
        kernel.mount("sysfs", "/sys", "sysfs")
        with contextlib.suppress(OSError):
            source = f"/proc/self/fd/{cgroups}"
            kernel.mount(source, "/sys/fs/cgroup", flags=kernel.MS_BIND | kernel.MS_REC)
        os.close(cgroups)
