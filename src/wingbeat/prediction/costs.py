"""The processor time of communication for a profile's device."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from wingbeat.profiling.layers import OPTIMIZER
from wingbeat.profiling.profile import Profile
from wingbeat.simulator.cluster import Work

_ON_CPU = re.compile(r", \d+ threads?, ")
"""What `wingbeat profile` writes for a CPU only."""


def accelerated(profile: Profile) -> bool:
    """Whether a profile's times are those of an accelerator."""
    return not _ON_CPU.search(profile.device)


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
            'overlap, as with wingbeat.init(cuda="tcp"); codecs take the time of a CPU core, so '
            "rows with one are pessimistic; none of this was measured on a GPU"
        )
    else:
        notes.append("codecs, sums and updates take the time of one core of a server CPU")
    return work, notes
