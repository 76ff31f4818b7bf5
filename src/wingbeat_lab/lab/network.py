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
from wingbeat_lab.lab import counters, kernel, realise
from wingbeat_lab.lab.plan import Host, Interface, NetworkPlan, plan_network
from wingbeat_lab.lab.spec import LabSpec


class Network:
    """Hosts and switches of one spec; the switches are in the caller's namespace.

    LabError if the kernel refused an operation; the message has the tool and its error.
    """

    def __init__(self, spec: LabSpec) -> None:
        self.spec = spec
        self.plan: NetworkPlan = plan_network(spec)
        self._files: list[int] = []
        self._rates = {i.port: i.rate for h in self.plan.hosts for i in h.interfaces}
        try:
            self._build()
        except OSError as err:
            raise LabError(
                f"cannot build the lab's network: {err}; see: wingbeat lab doctor"
            ) from None

    def _build(self) -> None:
        self._files = [kernel.new_network() for _ in self.plan.hosts]
        paths = {h.index: f"/proc/self/fd/{self._files[h.index]}" for h in self.plan.hosts}
        batch("ip", ["link set dev lo up", *realise.switch_links(self.plan, paths)], self._files)
        batch("tc", realise.switch_shaping(self.plan))
        for host in self.plan.hosts:
            with kernel.inside(self._files[host.index]):
                if self.spec.kind == "bcube":
                    _forward_packets()
                if self.plan.prio:
                    _answer_in_kind()
                batch("ip", realise.host_links(host))
                _use_cubic(host)
                batch("tc", realise.host_shaping(host, self.plan.prio))
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
        batch("ip", [realise.resize(i.port, rate) for i in chosen])
        batch("tc", [line for i in chosen for line in realise.reshape(i.port, rate, prio)])
        with kernel.inside(self._files[host]):
            batch("ip", [realise.resize(i.name, rate) for i in chosen])
            batch("tc", [line for i in chosen for line in realise.reshape(i.name, rate, prio)])

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
            batch("ip", realise.host_congestion(host, "cubic"))


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
