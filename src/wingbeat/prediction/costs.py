"""The processor time of communication for a profile's device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from wingbeat.collectives.program import NATIVE_CHUNK_BYTES
from wingbeat.profiling.layers import OPTIMIZER
from wingbeat.profiling.profile import Profile
from wingbeat.simulator.cluster import Work

_ON_CPU = re.compile(r", \d+ threads?, ")
"""What `wingbeat profile` writes for a CPU only."""


def accelerated(profile: Profile) -> bool:
    """Whether a profile's times are those of an accelerator."""
    return not _ON_CPU.search(profile.device)


def of_replica(profile: Profile, inside: int) -> Profile:
    """Return the profile of each of so many processes of a replica, which update its parts."""
    layers = [
        replace(layer, forward_ms=layer.forward_ms / inside) if layer.name == OPTIMIZER else layer
        for layer in profile.layers
    ]
    return replace(profile, layers=tuple(layers))


def thread_bit_per_s(work: Work) -> float:
    """Return the payload in bit/s that the thread of a NIC sends, and receives, in an all-reduce.

    Of the bytes received, half are added to a sum.
    """
    chunk = NATIVE_CHUNK_BYTES[1]
    seconds = 2 * (work.chunk_s / chunk + work.wire_s_per_byte) + work.add_s_per_byte / 2
    return 8 / seconds


def work_of(profile: Profile) -> tuple[Work, Sequence[str]]:
    """Return the costs for a profile, and what is assumed in them, in sentences.

    An optimizer that was profiled is not counted again. On an accelerator, copies into buckets and
    updates take no processor time, while codecs and sums between hosts keep that of a core.
    """
    work, notes = Work(), []
    if any(layer.name == OPTIMIZER for layer in profile.layers):
        work = replace(work, update_s_per_byte=0.0)
        notes.append("the optimizer's time is the profile's")
    if accelerated(profile):
        work = replace(work, update_s_per_byte=0.0, fill_s_per_byte=0.0)
        notes.append(
            f"times are those of {profile.device}, taken for an accelerator: copies to the host "
            'overlap, as with wingbeat.init(cuda="tcp"); codecs, and sums between hosts, take the '
            "time of a CPU core, so rows with a codec are pessimistic; none of this was measured "
            "on a GPU"
        )
    else:
        notes.append("codecs, sums and updates take the time of one core of a server CPU")
    return work, notes
