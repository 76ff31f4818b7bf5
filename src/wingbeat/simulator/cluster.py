"""The simulated cluster: its interfaces, the costs of communication, and what its hosts send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from wingbeat.compression import Coded, Sketch, options_of
from wingbeat.errors import UsageError
from wingbeat.simulator import codecs
from wingbeat.simulator.codecs import Price, Prices, Slowed


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Network interfaces of every host, on a switch for each, or on leaf switches below a spine.

    Attributes:
        bytes_per_s: payload rate of one interface in each direction, without headers.
        latency_s: seconds from the end of sending a chunk to its arrival.
        count: interfaces of each worker; messages to and from servers use all of them.
        priorities: whether interfaces and the switch serve urgent classes first. Only messages of
            servers have classes.
        quantum: bytes of a message that are sent before a more urgent one can preempt it.
        rates: bytes per second of hosts, or of single interfaces by host and number, that differ.
        latencies: seconds of latency of hosts that differ; between two hosts it is the mean.
        leaf: hosts on each leaf switch; 0: all hosts are on one switch.
        trunk_bytes_per_s: rate between a leaf switch and the spine in each direction, for each
            interface of a host. A path over the spine has twice the latency.

    Raises:
        UsageError: a value is out of range.
    """

    bytes_per_s: float
    latency_s: float = 100e-6
    count: int = 1
    priorities: bool = True
    quantum: int = 64 << 10
    rates: Mapping[int | tuple[int, int], float] = field(default_factory=dict)
    latencies: Mapping[int, float] = field(default_factory=dict)
    leaf: int = 0
    trunk_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise UsageError(f"Links(bytes_per_s={self.bytes_per_s}): allowed are numbers above 0")
        if not 0 <= self.latency_s < math.inf:
            raise UsageError(f"Links(latency_s={self.latency_s}): allowed are 0 and above")
        if self.count < 1:
            raise UsageError(f"Links(count={self.count}): allowed are 1 and above")
        if self.quantum < 1:
            raise UsageError(f"Links(quantum={self.quantum}): allowed are 1 byte and above")
        if min(self.rates.values(), default=1.0) <= 0 or self.trunk_bytes_per_s <= 0:
            raise UsageError(
                f"Links(rates={dict(self.rates)}, trunk_bytes_per_s={self.trunk_bytes_per_s}): "
                "allowed are rates above 0"
            )
        if min(self.latencies.values(), default=0.0) < 0 or self.leaf < 0:
            raise UsageError(
                f"Links(latencies={dict(self.latencies)}, leaf={self.leaf}): allowed are 0 and "
                "above"
            )

    @property
    def alike(self) -> bool:
        """Whether all hosts have equal links to all others."""
        return not (self.rates or self.latencies or self.leaf)

    def rate(self, host: int, interface: int) -> float:
        """Return the bytes per second of an interface of a host."""
        known = self.rates.get((host, interface), self.rates.get(host))
        return self.bytes_per_s if known is None else known

    def speeds(self, hosts: int) -> tuple[float, ...]:
        """Return the rate of each interface on the slowest of so many hosts."""
        if not self.rates:
            return (self.bytes_per_s,) * self.count
        return tuple(
            min(self.rate(host, number) for host in range(hosts)) for number in range(self.count)
        )

    def latency(self, source: int, target: int) -> float:
        """Return the seconds of latency between two hosts."""
        ends = (self.latencies.get(host, self.latency_s) for host in (source, target))
        return sum(ends) / 2 * (2 if self.crosses(source, target) else 1)

    def crosses(self, source: int, target: int) -> bool:
        """Whether the path between two hosts leads over the spine."""
        return self.leaf > 0 and source // self.leaf != target // self.leaf


SLACK_S = 0.5e-3
"""Seconds between layers in which other work of the training thread delays nothing, with
`Work.launch_s`: the device has operations in its queue. It is that of paced models.
"""

SHORTEST_WAIT_S = 0.2e-3
"""Seconds. With `Work.launch_s`, a shorter wait for the device is added to the next, as in paced
models.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Processor time of communication, in seconds.

    The defaults are those of one core of a server CPU. Chunks: an awaited all-gather of 4 KB
    between two processes, a chunk each way, took 13 microseconds, and one of 40 MB over TCP 9.2 to
    10 ms of CPU time for 20 MB out and 20 MB in (2026-11-27). Messages: those of "Messages" in
    ``docs/results.md`` (a round trip of 136 microseconds passes four ends; 3.91 GB/s unencrypted,
    1.65 GB/s encrypted).

    Attributes:
        chunk_s: thread of a link, for each chunk sent or received.
        local_chunk_s: the same, where the other worker is on the same host; by default ``chunk_s``.
        wire_s_per_byte: the same, for each byte sent to another host or received from one. What
            stays on a host takes the time of `wingbeat.simulator.network.LOCAL`, sums included.
        add_s_per_byte: the same thread, and a server, for each byte added to a sum.
        fill_s_per_byte: training thread, for each gradient byte copied into a bucket.
        wake_s: each thread, when it continues after a wait and its processor was idle.
        hook_s: training thread, for each gradient that is ready.
        start_s: the same, for each operation on a bucket that it starts.
        launch_s: training thread, for each layer in forward and each parameter in backward, while
            its time on the device passes; a thread that is late by less than `SLACK_S` delays
            nothing.
        codecs: factor of the seconds of codecs in collectives, which are those of one core
            (`wingbeat.simulator.codecs`).
        codecs_idle: share of these in which the processor is idle, where codecs are slowed.
        prices: seconds of codecs that were measured, instead of those of one core; ``codecs``
            applies to their bytes. Casts have their usual seconds.
        inside_s: training thread, for each gather or sum of a layer inside a replica.
        inside_s_per_byte: the same, for each of its bytes.
        step_s: training thread, for each step of the optimizer, on all buckets or on one.
        update_s: the same, for each parameter updated.
        update_s_per_byte: the same, for each of its bytes.
        message_s: thread that pushes and pulls, and a server, for each message sent or received.
        message_s_per_byte: the same, for each byte sent or received.
        encrypt_s_per_byte: added to it if messages are encrypted.
        meeting_s: until the members of a group are connected, unless connections are kept.
        copy_s_per_byte: averaging thread, for each parameter byte copied or divided by the group
            size.
    """

    chunk_s: float = 5e-6
    local_chunk_s: float | None = None
    wire_s_per_byte: float = 0.23e-9
    add_s_per_byte: float = 0.15e-9
    fill_s_per_byte: float = 0.1e-9
    wake_s: float = 0.0
    hook_s: float = 0.0
    start_s: float = 0.0
    launch_s: float = 0.0
    codecs: float = 1.0
    codecs_idle: float = 0.0
    prices: Prices | None = None
    inside_s: float = 0.0
    inside_s_per_byte: float = 0.0
    step_s: float = 0.0
    update_s: float = 0.0
    update_s_per_byte: float = 0.4e-9
    message_s: float = 30e-6
    message_s_per_byte: float = 0.25e-9
    encrypt_s_per_byte: float = 0.35e-9
    meeting_s: float = 6e-3
    copy_s_per_byte: float = 0.1e-9

    def byte_s(self, encrypted: bool) -> float:
        """Return the seconds for each byte of a message."""
        return self.message_s_per_byte + self.encrypt_s_per_byte * encrypted

    def slowed(self, seconds: float) -> Slowed:
        """Return seconds of a codec on one core, times `codecs`."""
        return codecs.slowed(seconds, self.codecs, self.codecs_idle)

    def priced(self, price: Price, numel: int) -> Slowed:
        """Return the seconds of an operation of a codec with a price on so many elements."""
        return codecs.priced(price, numel, self.codecs, self.codecs_idle)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coding:
    """Encoding of gradients and their sums; dense float32 by default.

    Attributes:
        ratio: encoded bytes for each byte of float32.
        encode_s_per_byte: seconds for each byte of float32, on the training thread for gradients,
            and on an owner's communication thread for sums.
        decode_s_per_byte: the same, on an owner's communication thread for each contribution, and
            on the training thread for sums.

    Raises:
        UsageError: a value is out of range.
    """

    ratio: float = 1.0
    encode_s_per_byte: float = 0.0
    decode_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise UsageError(f"Coding(ratio={self.ratio}): allowed are numbers above 0 up to 1")
        if min(self.encode_s_per_byte, self.decode_s_per_byte) < 0:
            raise UsageError("Coding(): seconds for each byte are 0 or more")


SKETCH = Coding(
    ratio=0.251, encode_s_per_byte=codecs.SKETCH.encode, decode_s_per_byte=codecs.SKETCH.decode
)
"""An 8-bit sketch on one core, with the seconds of `wingbeat.simulator.codecs`."""

SKETCH_4 = Coding(
    ratio=0.126, encode_s_per_byte=codecs.SKETCH_4.encode, decode_s_per_byte=codecs.SKETCH_4.decode
)
"""A 4-bit sketch on one core."""

_HALF = 0.5
_FEW_BITS = 4


def coding_of(wire: str | Coded) -> Coding:
    """Return the encoding of a strategy's ``wire`` on one core.

    Raises:
        UsageError: the encoded size depends on tensor shapes, or differs between tensors.
    """
    if not wire:
        return Coding()
    if options_of(wire).rounded_bytes:
        return Coding(ratio=_HALF)
    if isinstance(wire, Sketch) and not wire.groups:
        known = SKETCH if wire.bits > _FEW_BITS else SKETCH_4
        return replace(known, ratio=wire.bits / 32 + 0.001)
    raise UsageError(
        f"simulate(): how small {wire} makes gradients depends on which they are: give "
        "coding=simulator.Coding(ratio=...)"
    )


class Traffic:
    """Bytes sent by hosts, by intervals of time.

    Args:
        span_s: seconds of an interval.

    Attributes:
        sent: bytes by host.
    """

    def __init__(self, span_s: float = 0.5) -> None:
        self.span_s = span_s
        self.sent: dict[int, int] = {}
        self._spans: dict[int, list[float]] = {}

    def carried(self, host: int, start: float, end: float, nbytes: int) -> None:
        """Record that an interface of a host sends bytes evenly from ``start`` to ``end``."""
        self.sent[host] = self.sent.get(host, 0) + nbytes
        spans = self._spans.setdefault(host, [])
        first, last = int(start / self.span_s), int(end / self.span_s)
        if last >= len(spans):
            spans.extend([0.0] * (last + 1 - len(spans)))
        if first == last:
            spans[first] += nbytes
            return
        for number in range(first, last + 1):
            begin, stop = number * self.span_s, (number + 1) * self.span_s
            spans[number] += nbytes * (min(end, stop) - max(start, begin)) / (end - start)

    def utilisation(self, bytes_per_s: float, seconds: float) -> list[float]:
        """Return the utilisation of the interfaces in each interval, the mean over the hosts.

        Args:
            bytes_per_s: rate of all interfaces of a host together.
            seconds: end of the run; an incomplete interval at its end is omitted.
        """
        whole = bytes_per_s * self.span_s * max(len(self._spans), 1)
        return [
            sum(spans[number] for spans in self._spans.values() if number < len(spans)) / whole
            for number in range(int(seconds / self.span_s))
        ]
