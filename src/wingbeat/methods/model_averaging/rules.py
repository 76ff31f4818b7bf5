"""Options of the group generator, and the placement of workers on hosts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.errors import UsageError

GROUP_SIZE = 3
"""Size of random groups (Ripples, section 7.1.3)."""

THRESHOLD = 4
"""C_thres. The paper states no value; see ``docs/developers/decisions/0020-group-generator.md``."""

FORGET = 32
"""Requests of the fastest worker after which all counters are halved."""

CONNECT = 2
"""Requests per worker, times the bit length of their number, within which groups connect them all.
"""


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Workers by host. Hosts may have different numbers of workers.

    Attributes:
        hosts: the workers of each host in ascending order; the k-th is local worker k of the host.
        host_of: the host of each worker.

    Raises:
        UsageError: there is no worker, or a host has none.

    >>> Layout([0, 0, 1, 1]).hosts
    ((0, 1), (2, 3))
    """

    hosts: tuple[tuple[int, ...], ...]
    host_of: tuple[int, ...] = field(compare=False, repr=False)

    def __init__(self, host_of: Sequence[int]) -> None:
        hosts: list[list[int]] = [[] for _ in range(max(host_of, default=-1) + 1)]
        for worker, host in enumerate(host_of):
            if host < 0:
                raise UsageError(f"Layout: worker {worker} is on host {host}: allowed are 0 and up")
            hosts[host].append(worker)
        if not hosts:
            raise UsageError("Layout: there are no workers: name the host of one at least")
        if not all(hosts):
            raise UsageError(f"Layout: host {hosts.index([])} has no worker: leave no number out")
        object.__setattr__(self, "hosts", tuple(map(tuple, hosts)))
        object.__setattr__(self, "host_of", tuple(host_of))

    @classmethod
    def even(cls, hosts: int, workers: int) -> Layout:
        """Return the layout of ``hosts`` hosts with ``workers`` workers each, in torchrun's order.

        Raises:
            UsageError: there are no hosts, or no workers.
        """
        if hosts < 1 or workers < 1:
            raise UsageError(f"Layout.even(hosts={hosts}, workers={workers}): 1 or more of each")
        return cls([host for host in range(hosts) for _ in range(workers)])

    @classmethod
    def by_name(cls, names: Iterable[object]) -> Layout:
        """Return the layout of workers that each name their host, by any hashable value.

        >>> Layout.by_name(["a", "b", "a"]).hosts
        ((0, 2), (1,))
        """
        numbers: dict[object, int] = {}
        return cls([numbers.setdefault(name, len(numbers)) for name in names])

    @property
    def workers(self) -> int:
        """The number of workers."""
        return len(self.host_of)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the generator makes groups (Ripples, sections 4.1 and 5). The default is the smart GG.

    The defaults are the paper's smart GG with three additions: ``filter_intra``, ``forget`` and
    ``connect``. `Rules.paper()` is the paper's smart GG, `Rules.random()` its random GG, and
    `Rules.everyone()` makes one group of all workers.

    Attributes:
        size: members of a random group. The remainder of a division makes some groups larger by one
            or two.
        buffer: whether a worker that is already in a group gets that group (Group Buffer).
        division: whether all idle workers are divided into groups at once (Global Division). Needs
            ``buffer``.
        inter_intra: whether a division gives each worker two groups: first one across hosts for one
            worker of each host and one within the host for the others, then the whole host. Needs
            ``division``.
        threshold: C_thres. A worker that is this many requests or more behind the initiator is left
            out of its group (slowdown filter). None disables the filter.
        filter_intra: whether the filter applies to second groups too: a worker ``threshold``
            requests behind the fastest worker is alone in its second group. False in the paper,
            which filters a division once, by the initiator's counter. No effect without
            ``threshold``.
        forget: requests of the fastest worker after which all counters are halved. None disables
            this, as in the paper, where a worker that was slow once remains filtered.
        connect: requests per worker, times the bits of their number, within which groups connect
            all workers. After that, the next group gets a worker of another component, even if it
            is not idle. None disables the bound, as in the paper.
        notified: whether a group runs as soon as its members are in no older group (Fig. 8),
            instead of when all of them have sent a request (section 5.1).
        whole: whether each group has all active workers. Use `Rules.everyone()`.

    Raises:
        UsageError: a value is not allowed, or needs another one.
    """

    size: int = GROUP_SIZE
    buffer: bool = True
    division: bool = True
    inter_intra: bool = True
    threshold: int | None = THRESHOLD
    filter_intra: bool = True
    forget: int | None = FORGET
    connect: int | None = CONNECT
    notified: bool = False
    whole: bool = False

    def __post_init__(self) -> None:
        """Check the values; raise UsageError for one that is not allowed, or needs another one."""
        if self.size < 2:
            raise UsageError(f"Rules(size={self.size}): allowed are groups of 2 workers and more")
        if self.threshold is not None and self.threshold < 2:
            raise UsageError(
                f"Rules(threshold={self.threshold}): allowed are 2 and more requests, since the "
                "initiator's last request puts it 1 ahead of equally fast workers; or None for no "
                "filter"
            )
        if self.forget is not None and self.forget < 2:
            raise UsageError(
                f"Rules(forget={self.forget}): allowed are 2 and more requests, or None for never"
            )
        if self.connect is not None and self.connect < 1:
            raise UsageError(
                f"Rules(connect={self.connect}): allowed are 1 and more, or None for no bound"
            )
        if self.division and not self.buffer:
            raise UsageError(
                "Rules(division=True, buffer=False): a division needs a Group Buffer; set "
                "buffer=True or division=False"
            )
        if self.inter_intra and not self.division:
            raise UsageError(
                "Rules(inter_intra=True, division=False): inter-intra groups are made by a "
                "division; set division=True or inter_intra=False"
            )
        self._check_whole()

    def _check_whole(self) -> None:
        if not self.whole:
            return
        only: dict[str, int | None] = {"size": GROUP_SIZE, "buffer": True, "notified": False}
        only |= {"division": False, "inter_intra": False, "threshold": None, "connect": None}
        for name, allowed in only.items():
            if getattr(self, name) != allowed:
                raise UsageError(
                    f"Rules(whole=True, {name}={getattr(self, name)}): {name} has no effect on a "
                    "group of all workers; use Rules.everyone()"
                )

    @classmethod
    def everyone(cls) -> Rules:
        """Return the rules that answer each request with one group of all active workers.

        The group runs when all of them have sent a request. A worker that joins meanwhile is in the
        next group.
        """
        return cls(
            division=False, inter_intra=False, threshold=None, forget=None, connect=None, whole=True
        )

    @classmethod
    def paper(cls, size: int = GROUP_SIZE, threshold: int | None = THRESHOLD) -> Rules:
        """Return the rules of the paper's smart GG without additions (section 5).

        Group Buffer and Global Division (5.1), Inter-Intra (5.2) and the slowdown filter (5.3),
        with counters that only grow. The paper states neither the group size of a division nor
        C_thres, so both are arguments. These rules do not bound how long two sets of workers stay
        unconnected.
        """
        return cls(size=size, threshold=threshold, filter_intra=False, forget=None, connect=None)

    @classmethod
    def random(cls, size: int = GROUP_SIZE, *, notified: bool = False) -> Rules:
        """Return the rules of the paper's random GG (section 4.1)."""
        return cls(
            size=size,
            buffer=False,
            division=False,
            inter_intra=False,
            threshold=None,
            forget=None,
            connect=None,
            notified=notified,
        )


ABLATION = {
    "random": Rules.random(),
    "+ buffer": Rules(division=False, inter_intra=False, threshold=None),
    "+ division": Rules(inter_intra=False, threshold=None),
    "+ inter-intra": Rules(threshold=None),
    "+ filter": Rules(),
}
"""The steps of section 5's ablation."""


POLICIES = ("smart", "paper", "random", "buffered", "divided", "inter-intra", "static", "all")
"""Names of policies in strategies. Each step of the ablation includes the previous ones."""

FILTERED = ("smart", "paper")
"""Policies with a slowdown filter."""


def rules_of(policy: str, size: int, threshold: int | None) -> Rules:
    """Return the rules of a policy.

    Args:
        policy: one of `POLICIES`, except ``"static"``, which needs no rules.
        size: members of a random group.
        threshold: C_thres of the slowdown filter.

    Raises:
        UsageError: a value is not allowed.
    """
    if policy == "all":
        return Rules.everyone()
    if policy == "random":
        return Rules.random(size)
    if policy == "paper":
        return Rules.paper(size, threshold)
    return Rules(
        size=size,
        division=policy != "buffered",
        inter_intra=policy not in ("buffered", "divided"),
        threshold=threshold if policy == "smart" else None,
    )
