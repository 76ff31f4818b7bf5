"""Which strategy to use: the simplest of those whose predictions differ by less than the error."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from wingbeat.prediction.predict import EXACT, Prediction


@dataclass(frozen=True, slots=True)
class Choice:
    """What to use, and what is as good.

    Attributes:
        name: the strategy.
        ties: others whose predictions differ from the fastest by less than the error, the fastest
            first.
        rival: what PyTorch has for it; empty: nothing.
        faster: whether the strategy is faster than that beyond the error, or there is nothing.
        slower: whether it is slower beyond the error.
    """

    name: str
    ties: tuple[str, ...]
    rival: str
    faster: bool
    slower: bool

    @property
    def used(self) -> str:
        """The strategy if it is faster beyond the error, else what PyTorch has."""
        return self.name if self.faster else self.rival


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The exact strategy to use, and the one that is not, if it is faster beyond the error.

    Attributes:
        exact: the first; None if none was ranked.
        other: the second; None if nothing is faster than ``reference``, or none was ranked.
        reference: the exact strategy or DDP, of which the one is recommended; empty: neither.
        others: number of strategies that were ranked and are not exact.
    """

    exact: Choice | None
    other: Choice | None
    reference: str
    others: int


def recommend(
    found: Mapping[str, Prediction], order: Sequence[str], baselines: Container[str]
) -> Recommendation:
    """Choose among predictions.

    Args:
        found: predictions by name, the fastest first.
        order: all names, the simplest first: of those within the error of the fastest, the first
            is chosen.
        baselines: names of what PyTorch has. Exact strategies are compared with the exact one,
            others with the fastest of the rest that is faster than the exact ones.
    """
    own, theirs = (
        [name for name in found if (name in baselines) is wanted] for wanted in (False, True)
    )
    plain = next((name for name in theirs if found[name].convergence == EXACT), "")
    exact = _choose([n for n in own if found[n].convergence == EXACT], plain, found, order)
    rest = [name for name in own if found[name].convergence != EXACT]
    reference = plain if exact is None else exact.used
    better, hooks = (
        [name for name in names if not reference or sooner(found[name], found[reference])]
        for names in (rest, [name for name in theirs if found[name].convergence != EXACT])
    )
    rival = hooks[0] if hooks else ""
    names = better or (rest if rival else [])
    return Recommendation(exact, _choose(names, rival, found, order), reference, len(rest))


def sooner(one: Prediction, other: Prediction) -> bool:
    """Whether a prediction is shorter than another beyond the error of both."""
    return one.high_s < other.low_s


def _choose(
    names: Sequence[str], rival: str, found: Mapping[str, Prediction], order: Sequence[str]
) -> Choice | None:
    """Choose among ``names``, the fastest first."""
    if not names:
        return None
    ties = [name for name in names if not sooner(found[names[0]], found[name])]
    faster = [name for name in ties if not rival or sooner(found[name], found[rival])]
    as_fast = [name for name in ties if not (rival and sooner(found[rival], found[name]))]
    name = min(faster or as_fast or ties, key=order.index)
    return Choice(
        name,
        tuple(each for each in ties if each != name),
        rival,
        bool(faster),
        bool(rival) and sooner(found[rival], found[name]),
    )
