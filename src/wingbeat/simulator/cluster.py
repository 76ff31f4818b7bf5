"""What a simulated cluster is: links, and what the workers' processors need for communication."""

from __future__ import annotations

import math
from dataclasses import dataclass

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """Every worker's network interfaces, all alike, on a switch that is never the limit.

    Attributes:
        bytes_per_s: what one interface carries in each direction, without headers.
        latency_s: from the moment a chunk has left until the receiver has it.
        count: interfaces of each worker, all of them used, by messages to and from servers too.
        priorities: whether cards and the switch serve messages of an urgent class first. Only
            servers have classes.
        quantum: bytes of a message that are carried before a more urgent one is.

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
    """What communication costs a worker's processors, in seconds.

    The defaults are those of one core of a server's CPU of 2023: over gloo, and those of messages
    from "Messages" in ``docs/results.md`` (a trip of 136 microseconds passes four ends; 3.91 GB/s
    in the clear, 1.65 encrypted).

    Attributes:
        chunk_s: of the thread of a link, for each chunk that it hands over or takes.
        add_s_per_byte: of that thread, for each byte that it adds to a sum; of a server too.
        fill_s_per_byte: of the training thread, for each byte of a gradient put into a bucket.
        update_s_per_byte: of the training thread, for each byte of a parameter that is updated.
        message_s: of the thread that pushes and pulls, and of a server, for each message that it
            posts or takes.
        message_s_per_byte: of that thread, for each byte that it posts or takes.
        encrypt_s_per_byte: the same, on top, if messages are encrypted.
        meeting_s: until the members of a group are connected, where they do not keep connections
            of before.
        copy_s_per_byte: of the thread that averages, for each byte of parameters that it copies, or
            divides by the members of a group.
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
