"""The backend "wingbeat" of ``torch.distributed``, for CPU tensors.

::

    torch.distributed.init_process_group("cpu:wingbeat,cuda:nccl")

DDP, FSDP2 and any other program then use wingbeat's links, over all network interfaces, without
`distribute`. Sums, gathers and broadcasts are collectives of a group of a `World`; other operations
are messages between pairs of ranks.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch.distributed as dist

from wingbeat.errors import UsageError
from wingbeat.integrations.process_group.group import NAME, ProcessGroupWingbeat
from wingbeat.integrations.process_group.work import ProcessGroupError

__all__ = ["ProcessGroupError", "ProcessGroupWingbeat"]

_created: Counter[str] = Counter()
"""Groups of each name that had connections of their own: a later one must not read their keys."""


def _create(opts: Any, pg_options: Any) -> ProcessGroupWingbeat:
    """Create a group for ``torch.distributed``; subgroups use the default group's connections."""
    default = dist.group.WORLD
    shared = default._connections if isinstance(default, ProcessGroupWingbeat) else None
    store = opts.store
    if shared is None:
        name = str(opts.group_id)
        store = dist.PrefixStore(f"{_created[name]}/", store)
        _created[name] += 1
    ranks = list(opts.global_ranks_in_group) if shared else ()
    if list(ranks) != sorted(ranks):
        raise UsageError(
            f"new_group(ranks={ranks}): the backend wingbeat orders ranks: leave out sort_ranks"
        )
    group = ProcessGroupWingbeat(
        store,
        opts.group_rank,
        opts.group_size,
        opts.timeout,
        _shared=shared,
        _ranks=opts.global_ranks_in_group,
        _options=pg_options,
    )
    group._others.adopt(opts.process_group)
    return group


def register() -> None:
    """Register the backend "wingbeat". torch calls this, or the import of this module does."""
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])


register()
