"""Which workers average together: the generator's rules and policies, and the static schedule.

A policy maps an initiator and the worker pool to groups, in the order in which they run (Ripples,
sections 4.1, 5.1 and 5.2). The initiator is in at least one of them.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import TypeAlias

from wingbeat.errors import UsageError
from wingbeat.types import Layout

GROUP_SIZE = 3
"""Size of random groups (Ripples, section 7.1.3)."""

THRESHOLD = 4
"""C_thres. The paper states no value; see ``docs/developers/decisions/0020-group-generator.md``."""

HALVE_AFTER = 32
"""Requests of the fastest worker after which all counters are halved."""

CONNECT = 2
"""Requests per worker, times the bits of their number, within which groups connect them all."""

_BRIDGE_DRAWS = 16
"""Draws of a worker of another component, before the search is left to the next request."""

_MEMBER_DRAWS = 8
"""Draws per member of a random group until one is fast enough and not in the group yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How the generator makes groups (Ripples, sections 4.1 and 5). The default is the smart GG.

    The defaults are the paper's smart GG with three additions: ``filter_intra``, ``halve_after``
    and ``connect``. `Rules.paper()` is the paper's smart GG, `Rules.random()` its random GG, and
    `Rules.all_workers()` makes one group of all workers.

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
            requests behind the fastest worker is alone in its second group. The paper filters a
            division once, by the initiator's counter.
        halve_after: requests of the fastest worker after which all counters are halved. None
            disables this, as in the paper, where a worker that was slow once remains filtered.
        connect: requests per worker, times the bits of their number, within which groups connect
            all workers. After that, the next group gets a worker of another component, even if it
            is not idle. None disables the bound, as in the paper.
        notified: whether a group runs as soon as its members are in no older group (Fig. 8),
            instead of when all of them have sent a request (section 5.1).
        whole: whether each group has all active workers. Use `Rules.all_workers()`.
        quorum: with ``whole``, the workers that make a group: once as many are there, it waits
            ``grace`` seconds for the others, and runs without those that are late. It never runs
            with fewer, unless the missing ones have left or synchronize. None: all active workers.
        grace: those seconds.

    Raises:
        UsageError: a value is not allowed, or needs another one.
    """

    size: int = GROUP_SIZE
    buffer: bool = True
    division: bool = True
    inter_intra: bool = True
    threshold: int | None = THRESHOLD
    filter_intra: bool = True
    halve_after: int | None = HALVE_AFTER
    connect: int | None = CONNECT
    notified: bool = False
    whole: bool = False
    quorum: int | None = None
    grace: float = 0.0

    def __post_init__(self) -> None:
        """Check the values."""
        self._check_quorum()
        if self.size < 2:
            raise UsageError(f"Rules(size={self.size}): allowed are groups of 2 workers and more")
        if self.threshold is not None and self.threshold < 2:
            raise UsageError(
                f"Rules(threshold={self.threshold}): allowed are 2 and more requests, since the "
                "initiator's last request puts it 1 ahead of equally fast workers; or None for no "
                "filter"
            )
        if self.halve_after is not None and self.halve_after < 2:
            raise UsageError(
                f"Rules(halve_after={self.halve_after}): allowed are 2 and more requests, or None "
                "for never"
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
        only: dict[str, int | None] = {"size": GROUP_SIZE, "buffer": True, "notified": False}
        only |= {"division": False, "inter_intra": False, "threshold": None, "connect": None}
        for name, allowed in only.items() if self.whole else ():
            if getattr(self, name) != allowed:
                raise UsageError(
                    f"Rules(whole=True, {name}={getattr(self, name)}): {name} has no effect on a "
                    "group of all workers; use Rules.all_workers()"
                )

    def _check_quorum(self) -> None:
        if self.quorum is not None and (self.quorum < 1 or not self.whole):
            raise UsageError(
                f"Rules(quorum={self.quorum}, whole={self.whole}): allowed are 1 worker and more, "
                "and groups of all workers, as Rules.all_workers(quorum=...) makes"
            )
        if self.grace < 0 or (self.grace and self.quorum is None):
            raise UsageError(
                f"Rules(quorum={self.quorum}, grace={self.grace}): allowed are 0 seconds and more, "
                "after a quorum"
            )

    @classmethod
    def all_workers(cls, quorum: int | None = None, grace: float = 0.0) -> Rules:
        """Return the rules that answer each request with one group of all active workers.

        The group runs when all of them have sent a request, or by ``quorum`` and ``grace``. A
        worker that joins meanwhile is in the next group.
        """
        return cls(
            division=False,
            inter_intra=False,
            threshold=None,
            halve_after=None,
            connect=None,
            whole=True,
            quorum=quorum,
            grace=grace,
        )

    @classmethod
    def paper(cls, size: int = GROUP_SIZE, threshold: int | None = THRESHOLD) -> Rules:
        """Return the rules of the paper's smart GG without additions (section 5).

        The paper states neither the group size of a division nor C_thres. These rules do not bound
        how long two sets of workers stay unconnected.
        """
        return cls(
            size=size, threshold=threshold, filter_intra=False, halve_after=None, connect=None
        )

    @classmethod
    def random(cls, size: int = GROUP_SIZE, *, notified: bool = False) -> Rules:
        """Return the rules of the paper's random GG (section 4.1)."""
        return cls(
            size=size, buffer=False, division=False, inter_intra=False, threshold=None,
            halve_after=None, connect=None, notified=notified,
        )  # fmt: skip


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


def rules_of(
    policy: str, size: int, threshold: int | None, quorum: int | None = None, grace: float = 0.0
) -> Rules:
    """Return the rules of a policy.

    Args:
        policy: one of `POLICIES`, except ``"static"``, which needs no rules.
        size: members of a random group.
        threshold: C_thres of the slowdown filter.
        quorum, grace: of ``"all"``.

    Raises:
        UsageError: a value is not allowed.
    """
    if policy == "all":
        return Rules.all_workers(quorum, grace)
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


# -- the generator's choice ---------------------------------------------------------------


class WorkerPool:
    """The active workers, their request counters, and which of them are idle.

    Calls take constant time, except `take_idle`, whose time grows with the workers it returns, and
    `remove`. Every ``rules.halve_after`` requests of the fastest worker all counters are halved.

    Attributes:
        rng: the source of all random choices.
        active: the workers that take part, in no order.
        requests: by worker, the requests that it has sent; halved periodically.
    """

    def __init__(self, layout: Layout, rules: Rules, rng: Random) -> None:
        self.layout, self.rules, self.rng = layout, rules, rng
        self.active = list(range(layout.workers))
        self.requests = [0] * layout.workers
        self._most_requests = 0
        self._position = list(range(layout.workers))
        # Idle workers by number of requests, so a division skips filtered workers without visiting
        # them. Only divisions need this index.
        self._tracks_idle = rules.division
        self._idle: dict[int, dict[int, None]] = {}
        self._counts: list[int] = []
        for worker in self.active:
            self.mark_idle(worker)

    def __contains__(self, worker: int) -> bool:
        return self._position[worker] >= 0

    def add(self, worker: int) -> None:
        """Add an idle worker, with the counter of the fastest."""
        self.requests[worker] = self._most_requests
        self._position[worker] = len(self.active)
        self.active.append(worker)
        self.mark_idle(worker)

    def remove(self, worker: int) -> None:
        """Remove an active worker."""
        last = self.active.pop()
        if last != worker:
            self.active[self._position[worker]] = last
            self._position[last] = self._position[worker]
        self._position[worker] = -1
        self.mark_busy(worker)
        self._most_requests = max((self.requests[other] for other in self.active), default=0)

    def mark_idle(self, worker: int) -> None:
        """Mark a worker as in no group."""
        if self._tracks_idle:
            count = self.requests[worker]
            if count not in self._idle:
                self._idle[count] = {}
                insort(self._counts, count)
            self._idle[count][worker] = None

    def mark_busy(self, worker: int) -> None:
        """Mark a worker as in a group."""
        count = self.requests[worker]
        equals = self._idle.get(count)
        if equals is not None and worker in equals:
            del equals[worker]
            if not equals:
                del self._idle[count]
                del self._counts[bisect_left(self._counts, count)]

    def count_request(self, worker: int) -> None:
        """Count a request of a worker that is not idle."""
        self.requests[worker] += 1
        self._most_requests = max(self._most_requests, self.requests[worker])
        if self.requests[worker] == self.rules.halve_after:
            self.requests = [count // 2 for count in self.requests]
            self._most_requests //= 2
            idle = [worker for equals in self._idle.values() for worker in equals]
            self._idle, self._counts = {}, []
            for worker in idle:
                self.mark_idle(worker)

    def min_requests(self, initiator: int) -> int:
        """Return the requests that a worker needs to pass the slowdown filter of ``initiator``."""
        return self._floor(self.requests[initiator])

    @property
    def min_requests_of_all(self) -> int:
        """Those that it needs to pass the filter of the fastest worker."""
        return self._floor(self._most_requests)

    def _floor(self, requests: int) -> int:
        threshold = self.rules.threshold
        return 0 if threshold is None else requests - threshold + 1

    def take_idle(self, initiator: int) -> list[int]:
        """Return ``initiator`` and all idle workers that pass its filter, shuffled; mark them busy.

        See section 5.1, and 5.3 for the filter.
        """
        first = bisect_left(self._counts, self.min_requests(initiator))
        taken = [initiator]
        for count in self._counts[first:]:
            taken += self._idle.pop(count)
        del self._counts[first:]
        shuffle(taken, self.rng)
        return taken


class Components:
    """Connected components of the workers that groups connect: a union-find structure."""

    def __init__(self, workers: int) -> None:
        self._parent = list(range(workers))

    def root(self, worker: int) -> int:
        """Return the worker that represents the component."""
        parent = self._parent
        while parent[worker] != worker:
            parent[worker] = parent[parent[worker]]
            worker = parent[worker]
        return worker

    def connect(self, members: Iterable[int]) -> int:
        """Connect members; return the number of components that this has removed."""
        roots = dict.fromkeys(map(self.root, members))
        first = next(iter(roots), 0)
        for root in roots:
            self._parent[root] = first
        return max(0, len(roots) - 1)


class Connectivity:
    """Whether the groups made so far connect all active workers.

    A division takes idle workers only, and workers that send requests at the same time are idle at
    the same time. Without a bound, two sets of workers could therefore stay unconnected forever.
    """

    def __init__(self, workers: int, steps: int | None) -> None:
        self._workers, self._steps = workers, steps
        self.reset(workers)

    def reset(self, active: int) -> None:
        """Start again, with ``active`` unconnected workers."""
        self._components, self._left = Components(self._workers), active
        self._requests = 0
        self._max_requests = active * active.bit_length() * (self._steps or 0)

    def count_request(self) -> bool:
        """Count a request; return whether all workers should be connected by now."""
        self._requests += 1
        return self._steps is not None and self._requests > self._max_requests

    def add_group(self, members: Iterable[int], active: int) -> None:
        """Connect members; reset if that connects all ``active`` workers."""
        if self._steps is None:
            return
        self._left -= self._components.connect(members)
        if self._left <= 1:
            self.reset(active)

    def find_unconnected(self, worker: int, pool: WorkerPool) -> int | None:
        """Return a random worker of another component that passes the filter of ``worker``.

        None if a bounded number of draws finds none; the next request draws again.
        """
        root, floor = self._components.root(worker), pool.min_requests(worker)
        draw, active = pool.rng.random, pool.active
        for _ in range(_BRIDGE_DRAWS):
            other = active[int(draw() * len(active))]
            if pool.requests[other] >= floor and self._components.root(other) != root:
                return other
        return None


Policy: TypeAlias = Callable[[int, WorkerPool], list[list[int]]]


def policy_of(rules: Rules) -> Policy:
    """Return the policy that ``rules`` select."""
    if rules.whole:
        return all_workers
    if rules.inter_intra:
        return inter_and_intra
    return division if rules.division else random_group


def all_workers(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Make one group of all active workers, even if they are in other groups."""
    assert initiator in pool, "the initiator is active"
    return [list(pool.active)]


def random_group(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Make one group of the initiator and random workers, even if they are in other groups (4.1).

    With a filter the group may be smaller, if too few fast workers are found.
    """
    active, draw = pool.active, pool.rng.random
    group, floor = [initiator], pool.min_requests(initiator)
    size = min(pool.rules.size, len(active))
    if pool.rules.threshold is None:
        # The sample has one worker more than needed, because it may contain the initiator.
        drawn = pool.rng.sample(active, size)
        return [group + [worker for worker in drawn if worker != initiator][: size - 1]]
    for _ in range(_MEMBER_DRAWS * size):
        if len(group) == size:
            break
        worker = active[int(draw() * len(active))]
        if worker not in group and pool.requests[worker] >= floor:
            group.append(worker)
    return [group]


def division(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Divide all idle workers into groups (section 5.1)."""
    return split_evenly(pool.take_idle(initiator), pool.rules.size)


def inter_and_intra(initiator: int, pool: WorkerPool) -> list[list[int]]:
    """Give each idle worker two groups (section 5.2).

    First a random idle worker of each host, its head, is in a group of heads, and the others are in
    groups within their host. Then all idle workers of a host are in one group. A worker without
    partners gets a group of its own, so it needs as many steps to its second group as the others.

    A second group waits for its members' next steps. A slow member would slow down the others,
    which would then fail the filter themselves. So with ``rules.filter_intra`` a worker that fails
    the fastest worker's filter is alone in its second group.
    """
    hosts: dict[int, list[int]] = {}
    for worker in pool.take_idle(initiator):
        hosts.setdefault(pool.layout.host_of[worker], []).append(worker)
    heads = [local[0] for local in hosts.values()]
    # Hosts with many workers tend to come first.
    shuffle(heads, pool.rng)
    groups = split_evenly(heads, pool.rules.size)
    for local in hosts.values():
        groups += split_evenly(local[1:], pool.rules.size)
    floor = pool.min_requests_of_all if pool.rules.filter_intra else 0
    for local in hosts.values():
        fast = [worker for worker in local if pool.requests[worker] >= floor]
        groups += [fast] if fast else []
        groups += [[worker] for worker in local if pool.requests[worker] < floor]
    return groups


def split_evenly(workers: Sequence[int], size: int) -> list[list[int]]:
    """Split into parts of about ``size`` that differ by one at most; avoids parts of one worker.

    >>> [len(part) for part in split_evenly(range(8), 3)]
    [3, 3, 2]
    >>> [len(part) for part in split_evenly(range(7), 3)]
    [4, 3]
    """
    number = max(1, (len(workers) + (size - 1) // 2) // size)
    short, longer = divmod(len(workers), number)
    starts = [part * short + min(part, longer) for part in range(number + 1)]
    return [list(workers[a:b]) for a, b in itertools.pairwise(starts) if b > a]


def shuffle(items: list[int], rng: Random) -> None:
    """Shuffle in place, three times as fast as ``Random.shuffle``."""
    draw = rng.random
    for i in range(len(items) - 1, 0, -1):
        j = int(draw() * (i + 1))
        items[i], items[j] = items[j], items[i]


# -- without a generator ------------------------------------------------------------------

PHASES = 4
"""Steps after which the static schedule repeats, with an even number of hosts."""


def group_of(layout: Layout, worker: int, step: int) -> tuple[int, ...]:
    """Return the group of ``worker`` in a step of the static schedule, in ascending order.

    Section 4.2; Figs. 9 and 10 have 4 hosts of 4 workers. Generalized to any number of workers:

    ===== =========================== ============================== =========================
    phase local worker 0              local worker 1                 the others
    ===== =========================== ============================== =========================
    0     with 0 of all hosts         alone                          with one another
    1, 3  with its whole host         with its whole host            with their whole host
    2     with local workers 3, 4 ... with the one of another host   2 alone, 3... with 0
    ===== =========================== ============================== =========================

    In phase 2, the last worker of a host with three acts as local worker 3, and the only worker of
    a host as local worker 1. The other host is the *opposite on the ring*, half the number of hosts
    ahead. With an odd number of hosts one has no opposite, a different one in each cycle.

    Groups of one step never overlap. But they depend on the step, which the convergence proof of
    AD-PSGD, the paper's third condition, does not allow (section 4.3), and one slow worker delays
    all.

    >>> group_of(Layout.even(hosts=4, workers=4), worker=5, step=2)
    (5, 13)
    """
    host = layout.host_of[worker]
    local = layout.hosts[host]
    phase = step % PHASES
    if phase == 0:
        if worker == local[0]:
            return tuple(sorted(workers[0] for workers in layout.hosts))
        return (worker,) if worker == local[1] else local[2:]
    if phase == 2:
        outgoing = [local[1] if len(local) > 1 else local[0] for local in layout.hosts]
        if worker == outgoing[host]:
            other = outgoing[_opposite(host, len(layout.hosts), step // PHASES)]
            return tuple(sorted({worker, other}))
        staying = local[:1] + (local[3:] or local[2:])
        return staying if worker in staying else (worker,)
    return local


def _opposite(host: int, hosts: int, cycle: int) -> int:
    """Return the host half a ring away; the host itself if it has none in this cycle."""
    half = hosts // 2
    # With an odd number of hosts, half a ring forth and back leads to another host. So pairs start
    # at another host in each cycle, and the last host is left over.
    first = cycle % hosts if hosts % 2 else 0
    place = (host - first) % hosts
    if place >= 2 * half:
        return host
    return (first + (place + half) % (2 * half)) % hosts


# -- weights of an average ----------------------------------------------------------------

WEIGHTS = ("equal", "tokens", "decoupled")
"""Rules by which workers have weights in an average; see `weight_of`."""


def weight_of(rule: str, tokens: int, steps: int) -> float:
    """Return a worker's weight by its tokens and steps since its last merge.

    ``"tokens"``: its tokens, so that each token counts alike. ``"decoupled"``: its tokens times its
    tokens per step (Decoupled DiLoCo, Douillard et al., 2026, section 3.2).

    >>> weight_of("tokens", 600, 30), weight_of("decoupled", 600, 30)
    (600.0, 12000.0)
    """
    assert rule in WEIGHTS[1:], rule
    if rule == "tokens":
        return float(tokens)
    return tokens * tokens / steps if steps else 0.0


class Unmerged:
    """The tokens and steps of each fragment that no average has merged.

    Attributes:
        counted: by fragment, tokens and steps.
    """

    def __init__(self, fragments: int, rule: str) -> None:
        self._rule = rule
        self.counted = [(0, 0)] * fragments
        self._offered: dict[int, tuple[int, int]] = {}

    def count(self, tokens: int) -> None:
        """Count tokens."""
        self.counted = [(before + tokens, steps) for before, steps in self.counted]

    def step(self) -> None:
        """Count a step."""
        self.counted = [(tokens, steps + 1) for tokens, steps in self.counted]

    def offer(self, first: int, last: int) -> tuple[int, int]:
        """Return the tokens and steps that an average of these fragments is to merge."""
        self._offered = {number: self.counted[number] for number in range(first, last)}
        return max(self._offered.values())

    def weight(self, tokens: int, steps: int) -> float:
        """Return the weight of these tokens and steps."""
        return weight_of(self._rule, tokens, steps)

    def merged(self) -> None:
        """Record that the average that was offered last has merged what was offered, once."""
        for number, (tokens, steps) in self._offered.items():
            now = self.counted[number]
            self.counted[number] = now[0] - tokens, now[1] - steps
        self._offered = {}

    def reset(self) -> None:
        """Drop all counts: the model is another worker's now."""
        self.counted, self._offered = [(0, 0)] * len(self.counted), {}

    def load(self, counted: Sequence[Sequence[int]]) -> None:
        """Continue from `counted`; of another number of fragments, each has the largest counts."""
        self.reset()
        pairs = [(tokens, steps) for tokens, steps in counted]
        if len(pairs) != len(self.counted):
            pairs = [max(pairs, default=(0, 0))] * len(self.counted)
        self.counted = pairs


# -- how well groups mix models (section 3.3) ---------------------------------------------


def spectral_gap(groups: Iterable[Sequence[int]], workers: int) -> float:
    """Return 1 - rho of equally likely groups (section 3.3).

    rho is the second largest eigenvalue of E[F^T F], which is E[F] because each F is a projection.
    The gap is 0 if and only if the groups do not connect all workers. A single group leaves most of
    many workers unchanged: multiply by the groups per iteration for the gap of an iteration.

    Raises:
        ValueError: there is no group.
    """
    import numpy as np

    total, number = np.zeros((workers, workers)), 0
    for group in groups:
        number += 1
        if len(group) > 1:
            total[np.ix_(group, group)] += 1 / len(group)
            total[group, group] -= 1
    if not number:
        raise ValueError("spectral_gap(): there is no group")
    if workers == 1:
        return 1.0
    # Eigenvalues of I - E[F]. The smallest is 0 and belongs to the mean of all models.
    gaps = np.linalg.eigvalsh(-total / number)
    return max(0.0, float(gaps[1]))


def count_components(groups: Iterable[Sequence[int]], workers: int) -> int:
    """Return the number of connected components of the workers: 1 if all models mix."""
    components = Components(workers)
    return workers - sum(map(components.connect, groups))
