"""Warnings about strategies that cannot pay on the workers that a job has.

They follow from what is known when training begins: the hosts of the workers, the speeds of links
that `wingbeat.init` has measured, and the speed of a codec, measured here. Where a trial decides in
training, as for most codecs, there is no warning.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from wingbeat import codecs
from wingbeat.compression import CodecOptions
from wingbeat.parts.strategy import Strategy
from wingbeat.traits import KEPT, MEANS
from wingbeat.transport.world import World

if TYPE_CHECKING:
    from wingbeat.methods.model_averaging.options import Local
    from wingbeat.methods.parameter_server.options import Servers

_SAMPLE = 1 << 18
"""Elements of the tensor with which a codec is measured: it fits into a cache, as pieces do."""

_ROUNDS = 3
"""Measurements of a codec; the shortest counts, because the first one initializes it."""

_BUSIER = 1.5
"""A server's host is reported if it carries this many times the bytes of a ring's hosts."""

_WITHIN_HOSTS = ("smart", "paper", "inter-intra")
"""Policies of groups in which all workers of a host average together in each division."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of the workers of a strategy when training begins.

    Attributes:
        workers: their number.
        hosts: the number of their hosts.
        link_bytes_s: measured bytes per second that a host sends, over all its links.
        codec_bytes_s: bytes of float32 gradients that all workers of a host encode and decode per
            second; 0.0: not measured.
        meshed: whether each worker is a rank of a replica, with ``distribute(mesh=)``.
    """

    workers: int
    hosts: int
    link_bytes_s: float = 0.0
    codec_bytes_s: float = 0.0
    meshed: bool = False


def advise(strategy: Strategy, facts: Facts) -> list[str]:
    """Return a line for each reason for which ``strategy`` cannot pay: what, and what to do."""
    if facts.workers == 1:
        return [_one_worker(strategy, facts)]
    found = (_codec, _servers, _groups, _every)
    return [f"{strategy!r}: {text}" for rule in found if (text := rule(strategy, facts))]


def _one_worker(strategy: Strategy, facts: Facts) -> str:
    if facts.meshed:
        return (
            f"{strategy!r}: the mesh has one replica, so nothing is exchanged: give its dimension "
            "across= a size of 2 or more"
        )
    return (
        f"{strategy!r}: the job has one worker, so nothing is exchanged: start the script with "
        "torchrun --nproc-per-node=N, and --nnodes on several hosts"
    )


def _codec(strategy: Strategy, facts: Facts) -> str:
    codec = strategy.codec
    if codec is None or tries_codec(strategy):
        return ""
    remedy = "leave out auto_disable=False, for a trial" if strategy.exchange.lockstep else ""
    remedy = f'use compression="fp32"{remedy and ", or "}{remedy}'
    if facts.hosts == 1:
        return (
            f"all {facts.workers} workers are on one host, where no network is to be relieved and "
            f"{codec!r} only adds work: {remedy}"
        )
    # A host of a ring sends this multiple of the gradients' bytes.
    needs_bytes_s = facts.link_bytes_s / (2 * (facts.hosts - 1) / facts.hosts)
    if not 0 < facts.codec_bytes_s < needs_bytes_s:
        return ""
    return (
        f"{codec!r} encodes and decodes {facts.codec_bytes_s / 1e9:.2g} GB of gradients a second "
        f"on each host, and the links, at {8 * facts.link_bytes_s / 1e9:.3g} Gbit/s, exchange "
        f"{needs_bytes_s / 1e9:.2g} GB uncompressed: {remedy}"
    )


def _servers(strategy: Strategy, facts: Facts) -> str:
    if KEPT not in strategy.exchange.has:
        return ""
    if facts.hosts == 1:
        return (
            f"all {facts.workers} workers are on one host, so their servers take processor time "
            "and relieve no network: use AllReduce() or Auto()"
        )
    count, hosts = cast("Servers", strategy.exchange).count, facts.hosts
    # A server sends its part of the sums to each other host, and its host's worker sends the other
    # parts of its gradients to the other servers.
    busier = (hosts + count - 2) / count / (2 * (hosts - 1) / hosts) if count else 1.0
    if busier < _BUSIER:
        return ""
    return (
        f"with {count} server{'s' * (count > 1)} for {facts.hosts} hosts, the NIC of a server's "
        f"host carries {busier:.2g} times the bytes of an all-reduce: leave the number of servers "
        "out, for one on each host"
    )


def _groups(strategy: Strategy, facts: Facts) -> str:
    if facts.hosts > 1 or getattr(strategy.exchange, "policy", "") not in _WITHIN_HOSTS:
        return ""
    return (
        f"all {facts.workers} workers are on one host, where they average together in each step, "
        "so that the slowest delays all: use AllReduce(), workers on several hosts, or "
        'policy="divided"'
    )


def _every(strategy: Strategy, _facts: Facts) -> str:
    if MEANS not in strategy.exchange.has or not strategy.exchange.everyone:
        return ""
    local = cast("Local", strategy.schedule)
    if local.every > 1 or local.delay:
        return ""
    return (
        "every=1 averages the model after each step, which sends as much as gradients and hides "
        "none of it behind backward: use a larger every, such as 30, or AllReduce()"
    )


# -- facts -----------------------------------------------------------------------------------------


def tries_codec(strategy: Strategy) -> bool:
    """Whether a trial in training decides if the codec stays on."""
    codec = strategy.codec
    decides = (codec is not None and codec.auto_disable) or strategy.plan.choosing() is not None
    return strategy.exchange.lockstep and decides


def facts_of(world: World, strategy: Strategy, device: torch.device, *, meshed: bool) -> Facts:
    """Return the facts about the workers of ``world``; a codec is measured on CPUs, in some ms."""
    hosts, codec_bytes_s = len(world.layout.hosts), 0.0
    codec = strategy.codec
    undecided = codec is not None and not tries_codec(strategy)
    # What low rank takes depends on the shapes of matrices; rounding takes next to nothing.
    measured = codec is not None and not codec.rank and not codec.rounded_bytes
    if undecided and codec and measured and hosts > 1 and device.type == "cpu":
        # Workers of a host share its work, and each link has a thread of its own.
        codec_bytes_s = measure_codec(codec) * world.size / hosts * max(1, len(world.links))
    return Facts(
        workers=world.size,
        hosts=hosts,
        link_bytes_s=sum(world.speeds),
        codec_bytes_s=codec_bytes_s,
        meshed=meshed,
    )


def measure_codec(options: CodecOptions) -> float:
    """Return how many bytes of float32 a thread encodes and decodes per second of its own."""
    codec = codecs.make(options)
    values = torch.linspace(-1.0, 1.0, _SAMPLE, device="cpu")
    residual, out = torch.zeros(_SAMPLE, device="cpu"), torch.empty(_SAMPLE, device="cpu")
    payload = torch.empty(codec.nbytes(_SAMPLE), dtype=torch.uint8, device="cpu")
    least = float("inf")
    for _ in range(_ROUNDS):
        begin = time.thread_time()  # other processes do not make it longer
        codec.encode(values, payload, residual=residual)
        codec.decode(payload, out)
        least = min(least, time.thread_time() - begin)
    return 4 * _SAMPLE / max(least, 1e-9)
