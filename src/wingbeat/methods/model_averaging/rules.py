"""The group generator's options: each step of the paper's ablation is one."""

from __future__ import annotations

from dataclasses import dataclass

from wingbeat.errors import UsageError

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
