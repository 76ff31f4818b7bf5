"""The simulated cluster: network interfaces and the processor time of communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Network interfaces of every worker, all alike, on a switch that is never the bottleneck.

    Attributes:
        bytes_per_s: payload rate of one interface in each direction, without headers.
        latency_s: seconds from the end of sending a chunk to its arrival.
        count: interfaces of each worker; messages to and from servers use all of them.
        priorities: whether interfaces and the switch serve urgent classes first. Only messages of
            servers have classes.
        quantum: bytes of a message that are sent before a more urgent one can preempt it.

    Raises:
        UsageError: a value is out of range.
    """

    bytes_per_s: float
    latency_s: float = 100e-6
    count: int = 1
    priorities: bool = True
    quantum: int = 64 << 10

    def __post_init__(self) -> None:
        if not 0 < self.bytes_per_s < math.inf:
            raise UsageError(f"Links(bytes_per_s={self.bytes_per_s}): allowed are numbers above 0")
        if not 0 <= self.latency_s < math.inf:
            raise UsageError(f"Links(latency_s={self.latency_s}): allowed are 0 and above")
        if self.count < 1:
            raise UsageError(f"Links(count={self.count}): allowed are 1 and above")
        if self.quantum < 1:
            raise UsageError(f"Links(quantum={self.quantum}): allowed are 1 byte and above")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Processor time of communication, in seconds.

    The defaults are those of one core of a server CPU of 2023: over gloo, and for messages those of
    "Messages" in ``docs/results.md`` (a round trip of 136 microseconds passes four ends; 3.91 GB/s
    unencrypted, 1.65 GB/s encrypted).

    Attributes:
        chunk_s: thread of a link, for each chunk sent or received.
        add_s_per_byte: the same thread, and a server, for each byte added to a sum.
        fill_s_per_byte: training thread, for each gradient byte copied into a bucket.
        update_s_per_byte: training thread, for each parameter byte updated.
        message_s: thread that pushes and pulls, and a server, for each message sent or received.
        message_s_per_byte: the same, for each byte sent or received.
        encrypt_s_per_byte: added to it if messages are encrypted.
        meeting_s: until the members of a group are connected, unless connections are kept.
        copy_s_per_byte: averaging thread, for each parameter byte copied or divided by the group
            size.
    """

    chunk_s: float = 60e-6
    add_s_per_byte: float = 0.15e-9
    fill_s_per_byte: float = 0.1e-9
    update_s_per_byte: float = 0.4e-9
    message_s: float = 30e-6
    message_s_per_byte: float = 0.25e-9
    encrypt_s_per_byte: float = 0.35e-9
    meeting_s: float = 6e-3
    copy_s_per_byte: float = 0.1e-9
