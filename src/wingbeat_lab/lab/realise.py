"""A plan as ``ip`` and ``tc`` lines for their ``-batch`` mode. Pure.

Every direction of a link is shaped twice, where it leaves the host and where it leaves the switch
port towards the next device. Many senders to one receiver thereby share the receiver's link, as
on a real switch.

The parameters:

* **Burst 96 KB.** The kernel hands TCP data down in pieces of up to 64 KB. A token bucket smaller
  than one piece makes ``tbf`` split it in software, which costs more CPU than the training.
  A sender may exceed the rate by one burst, once: 96 KB is 0.8 ms at 1 Gbit/s. Slow links get less
  (8 ms of their rate).
* **Pieces of 1 ms.** Below 0.5 Gbit/s interfaces make smaller pieces, because an acknowledgement
  waits for the piece in front of it: at 100 Mbit/s 64 KB take 5 ms.
* **Queue 50 ms, at least 1 MB.** Sufficient for TCP to fill the link and lose nothing in a ring.
* **Strict priority** is ``htb``: every class may borrow up to the whole rate, lower ``prio``
  first. A class is guaranteed only a thousandth, which keeps a starved TCP connection alive.
"""

from __future__ import annotations

from wingbeat_lab.lab.plan import Host, NetworkPlan

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

CLASSES = (("ef", 0xB8), ("af41", 0x88), ("af21", 0x48))
"""DSCP names and their bits in the TOS byte, most urgent first; other traffic is ``be``."""


def class_names(prio: int) -> tuple[str, ...]:
    """Class names of a port, most urgent first: 2 to 4 of ef, af41, af21 and be."""
    return (*(name for name, _ in CLASSES[: prio - 1]), "be") if prio else ("all",)


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
