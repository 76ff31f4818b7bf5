"""The group generator's options: each step of the paper's ablation is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from wingbeat.errors import UsageError


@dataclass(frozen=True, slots=True, init=False)
class Layout:
    """Workers, by host. Hosts may have different numbers of workers.

    Attributes:
        hosts: the workers of each host, in ascending order: the k-th is the host's local worker k.
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
        """Return the layout of ``hosts`` hosts with ``workers`` workers each, as torchrun's is.

        Raises:
            UsageError: there are no hosts, or no workers.
        """
        if hosts < 1 or workers < 1:
            raise UsageError(f"Layout.even(hosts={hosts}, workers={workers}): 1 or more of each")
        return cls([host for host in range(hosts) for _ in range(workers)])

    @classmethod
    def by_name(cls, names: Iterable[object]) -> Layout:
        """Return the layout of workers that each name their host, by any value.

        >>> Layout.by_name(["a", "b", "a"]).hosts
        ((0, 2), (1,))
        """
        numbers: dict[object, int] = {}
        return cls([numbers.setdefault(name, len(numbers)) for name in names])

    @property
    def workers(self) -> int:
        """How many there are."""
        return len(self.host_of)


GROUP_SIZE = 3
"""Of random groups (Ripples, section 7.1.3)."""

THRESHOLD = 4
"""C_thres; the paper names no value. See "Groups of the moment" in ``docs/design.md``."""

FORGET = 32
"""Requests of the fastest worker after which all counters are halved."""

CONNECT = 2
"""Requests of each worker, times the bits of their number, in which groups connect all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How groups are made (Ripples, sections 4.1 and 5). The defaults are wingbeat's smart groups.

    They are the paper's smart GG with three additions: ``filter_intra``, ``forget`` and
    ``connect``. `Rules.paper()` is the paper's, `Rules.random()` its random GG, and
    `Rules.everyone()` one group of all.

    Attributes:
        size: members of a random group; what remains of a division makes some larger by one or two.
        buffer: whether a worker that is in a group already gets that one (Group Buffer).
        division: whether all idle workers are divided into groups at a time (Global Division).
            Needs ``buffer``.
        inter_intra: whether a division gives each worker two groups: one across hosts for a worker
            of each host and within the host for the others, and then the whole host. Needs
            ``division``.
        threshold: C_thres: who has asked so many times less often than the initiator, or still
            less, is not put in its group (slowdown filter); None for no filter.
        filter_intra: whether the filter holds for second groups, too: a worker ``threshold``
            requests behind the fastest of all is in no second group with others. False in the
            paper, where a division is filtered once, by the initiator's counter. Without
            ``threshold`` it has no effect.
        forget: requests of the fastest worker after which all counters are halved; None for never,
            as in the paper, where whoever was slow once stays out for ever.
        connect: requests of each worker, times the bits of their number, in which groups connect
            all workers; where they have not, a worker of another part is added, though it is not
            idle. None for no such bound, as in the paper.
        notified: whether a group runs as soon as its members are in no other (Fig. 8), and not only
            when all of them have asked (section 5.1).
        whole: whether each group is of all workers that take part. `Rules.everyone()` sets what
            goes with it.

    Raises:
        UsageError: a value is not allowed, or needs another.
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
        """Check the values.

        Raises:
            UsageError: one is not allowed, or needs another; names it.
        """
        if self.size < 2:
            raise UsageError(f"Rules(size={self.size}): allowed are groups of 2 workers and more")
        if self.threshold is not None and self.threshold < 2:
            raise UsageError(
                f"Rules(threshold={self.threshold}): allowed are 2 and more requests, since the "
                "initiator has just asked once more than others as fast; or None for no filter"
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
                "Rules(division=True, buffer=False): groups made in advance need a buffer; set "
                "buffer=True or division=False"
            )
        if self.inter_intra and not self.division:
            raise UsageError(
                "Rules(inter_intra=True, division=False): its two groups are made by a division; "
                "set division=True or inter_intra=False"
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
                    f"Rules(whole=True, {name}={getattr(self, name)}): a group of all leaves "
                    "nothing to choose; use Rules.everyone()"
                )

    @classmethod
    def everyone(cls) -> Rules:
        """Return the rules by which each request is answered by one group of all that take part.

        It runs when all of them have asked. Who joins meanwhile is in the next one.
        """
        return cls(
            division=False, inter_intra=False, threshold=None, forget=None, connect=None, whole=True
        )

    @classmethod
    def paper(cls, size: int = GROUP_SIZE, threshold: int | None = THRESHOLD) -> Rules:
        """Return the rules of the paper's smart GG, with nothing added (section 5).

        Group Buffer and Global Division (5.1), Inter-Intra (5.2) and the slowdown filter (5.3),
        with counters that only grow. The paper states neither a size of groups in a division nor a
        value of C_thres: they are arguments. These rules do not bound how long groups leave two
        parts of the workers unconnected.
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
"""Section 5, a step at a time."""


POLICIES = ("smart", "paper", "random", "buffered", "divided", "inter-intra", "static", "all")
"""What users call the ways to make groups. Each step of the ablation has all before it."""

FILTERED = ("smart", "paper")
"""Those with a slowdown filter."""


def rules_of(policy: str, size: int, threshold: int | None) -> Rules:
    """Return the rules of a policy.

    Args:
        policy: one of `POLICIES`, but ``"static"``, which needs no rules.
        size: members of a random group.
        threshold: of the filter.

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
