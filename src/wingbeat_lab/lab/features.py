"""Which features of a lab this machine supports, by trial; shown by ``wingbeat lab doctor``."""

from __future__ import annotations

import functools
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from wingbeat.errors import LabError
from wingbeat_lab.lab.launch import isolation, look_in_sbin

_LINK = "ip link add wa type veth peer name wb && ip link set wa up && ip link set wb up"
_MODULE = "use a kernel with {} (on Debian and Ubuntu: apt install linux-modules-extra-$(uname -r))"
_TIMEOUT = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """One feature: whether it is available, and what its absence costs.

    Attributes:
        name: short name.
        found: whether the attempt worked.
        required: whether the lab cannot work without it.
        cost: what is lost without it.
        remedy: what to install or set.
        detail: what was observed, such as a version or the kernel's error.
    """

    name: str
    found: bool
    required: bool
    cost: str
    remedy: str
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return a plain dictionary for ``json.dumps``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Trial:
    """A feature and a shell line that succeeds in private namespaces only if it is available."""

    name: str
    script: str
    required: bool
    cost: str
    remedy: str


_TRIALS = (
    _Trial("mount", "mount -t tmpfs tmpfs /run", True, "hosts have no names of their own",
           "allow mounts in user namespaces (containers: --security-opt seccomp=unconfined)"),
    _Trial("veth", _LINK, True, "hosts have no links", _MODULE.format("CONFIG_VETH")),
    _Trial("bridge", "ip link add wbr type bridge", True, "there are no switches",
           _MODULE.format("CONFIG_BRIDGE")),
    _Trial("tbf", f"{_LINK} && tc qdisc add dev wa root tbf rate 1gbit burst 98304 limit 1000000",
           True, "links have no rates", _MODULE.format("CONFIG_NET_SCH_TBF")),
    _Trial("htb", f"{_LINK} && tc qdisc add dev wa root handle 1: htb && "
           "tc class add dev wa parent 1: classid 1:1 htb rate 1gbit",
           False, "no priority classes (prio=)", _MODULE.format("CONFIG_NET_SCH_HTB")),
    _Trial("u32", f"{_LINK} && tc qdisc add dev wa root handle 1: htb && tc filter add dev wa "
           "parent 1: protocol ip prio 1 u32 match ip dsfield 0xb8 0xfc flowid 1:10",
           False, "no priority classes (prio=)", _MODULE.format("CONFIG_NET_CLS_U32")),
    _Trial("ingress", f"{_LINK} && tc qdisc add dev wa ingress", False,
           "nothing: the lab shapes where packets leave", _MODULE.format("CONFIG_NET_SCH_INGRESS")),
    _Trial("prio", f"{_LINK} && tc qdisc add dev wa root prio", False,
           "nothing: htb gives strict priority", _MODULE.format("CONFIG_NET_SCH_PRIO")),
    _Trial("ets", f"{_LINK} && tc qdisc add dev wa root ets bands 2", False,
           "nothing: htb gives strict priority", _MODULE.format("CONFIG_NET_SCH_ETS")),
    _Trial("netem", f"{_LINK} && tc qdisc add dev wa root netem delay 1ms", False,
           "nothing: the lab emulates no delay or loss", _MODULE.format("CONFIG_NET_SCH_NETEM")),
)  # fmt: skip


def examine() -> list[Finding]:
    """Try every feature; leave nothing behind."""
    look_in_sbin()
    findings = [_tool("ip"), _tool("tc"), _tool("unshare"), *_namespaces()]
    try:
        prefix = isolation()
    except LabError:
        prefix = None
    for trial in _TRIALS:
        found, detail = _try(prefix, trial.script) if prefix else (False, "no namespaces to try in")
        findings.append(
            Finding(trial.name, found, trial.required, trial.cost, trial.remedy, detail)
        )
    return [*findings, _congestion_control()]


@functools.lru_cache(maxsize=1)
def available() -> str | None:
    """Return None if a lab works on this machine, else one line with the reason and the remedy."""
    if not sys.platform.startswith("linux"):
        return "the lab needs Linux; use loopback:N, whose links are unshaped"
    look_in_sbin()
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} is not found: install iproute2 (apt install iproute2)"
    try:
        prefix = isolation()
    except LabError as err:
        return str(err)
    # One attempt covers all required features; they are tried separately only if it fails.
    names = {t.name: t for t in _TRIALS}
    together = " && ".join(names[n].script for n in ("mount", "bridge", "tbf"))
    if _try(prefix, together)[0]:
        return None
    for trial in _TRIALS:
        found, detail = _try(prefix, trial.script)
        if trial.required and not found:
            return f"{trial.name} does not work here ({detail}): {trial.remedy}"
    return "the lab's network cannot be built here; see: wingbeat lab doctor"


def _tool(name: str) -> Finding:
    remedy = f"apt install {'util-linux' if name == 'unshare' else 'iproute2'}"
    path, version = shutil.which(name), ""
    if path:
        done = subprocess.run([path, "-V"], capture_output=True, text=True, check=False)
        version = (done.stdout or done.stderr).strip()
    return Finding(name, path is not None, True, "no lab", remedy, version)


def _namespaces() -> list[Finding]:
    """Try each namespace separately, to name the one that is refused."""
    root_only = "run as root, or "
    user_remedy = (
        "allow them: sysctl user.max_user_namespaces=15000; on Ubuntu 24.04 also "
        "kernel.apparmor_restrict_unprivileged_userns=0; containers: --privileged"
    )
    try:
        in_use = isolation()
    except LabError:
        in_use = None
    rootless = in_use is None or "--user" in in_use
    user = ("unshare", "--user", "--map-root-user")
    found, detail = _try(user, ":")
    findings = [
        Finding("user namespace", found, rootless, "only root can run the lab", user_remedy, detail)
    ]
    base = user if rootless else ("unshare",)
    for kind in ("net", "mount", "uts", "pid"):
        flags = (f"--{kind}", "--fork") if kind == "pid" else (f"--{kind}",)
        found, detail = _try((*base, *flags), ":")
        findings.append(
            Finding(f"{kind} namespace", found, True, "no lab", root_only + user_remedy, detail)
        )
    return findings


def _try(prefix: tuple[str, ...], script: str) -> tuple[bool, str]:
    """Run a shell line in new namespaces; return whether it succeeded, and its first error."""
    try:
        done = subprocess.run(
            [*prefix, "sh", "-c", script],
            capture_output=True,
            text=True,
            check=False,
            timeout=_TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        return False, str(err)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return done.returncode == 0, "" if done.returncode == 0 else (lines or ["no message"])[0]


def _congestion_control() -> Finding:
    """Return the TCP congestion control of workers: cubic, or else the system's default."""
    folder = Path("/proc/sys/net/ipv4")
    try:
        used = (folder / "tcp_congestion_control").read_text().strip()
        known = (folder / "tcp_available_congestion_control").read_text().strip()
    except OSError as err:
        return Finding("tcp", False, False, "unknown congestion control", "", str(err))
    hosts = "cubic" if "cubic" in known.split() else used
    detail = f"hosts use {hosts}; the system uses {used}; this kernel has {known}"
    return Finding("tcp", True, False, "", "", detail)
