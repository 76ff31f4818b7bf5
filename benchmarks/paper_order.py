"""Whether rows are in the order of Ripples' paper, for the notes of a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

PS, ALL_REDUCE, AD_PSGD = "parameter server", "All-Reduce", "AD-PSGD"
STATIC, RANDOM, SMART = "static groups", "random groups", "smart groups"

_NAMES = {"vanillaps": PS, "ddp": ALL_REDUCE, "allreduce": ALL_REDUCE, "adpsgd": AD_PSGD}
_GROUPS = {"static": STATIC, "random": RANDOM, "paper": SMART}

Pairs = Sequence[tuple[str, str]]
"""Pairs in the paper's order, nearest neighbours only."""

BY_FIGURE: dict[str, Pairs] = {
    "17": ((SMART, ALL_REDUCE), (STATIC, ALL_REDUCE), (ALL_REDUCE, AD_PSGD), (AD_PSGD, PS)),
    "19": ((SMART, RANDOM), (RANDOM, ALL_REDUCE), (RANDOM, AD_PSGD)),
    "18": ((AD_PSGD, ALL_REDUCE), (AD_PSGD, SMART), (RANDOM, SMART), (SMART, STATIC)),
    "20": ((ALL_REDUCE, SMART), (SMART, STATIC), (STATIC, AD_PSGD)),
}
"""17 and 19: faster (sections 1, 7.3 and 7.4; Fig. 19's speed is to a loss). 18: fewer iterations
to a loss (7.3). 20: more accurate after the same time (7.5).
"""


def called(row: str) -> str | None:
    """Return the paper's name of a row; None if the paper does not have it.

    >>> called("ddp+bf16"), called("adpsgd:overlap=False"), called("ripples:policy=paper")
    (None, 'AD-PSGD', 'smart groups')
    >>> called("ripples:policy=smart")  # ours, with what was found missing
    """
    name, _, options = row.partition(":")
    if name == "ripples":
        return _GROUPS.get(options.removeprefix("policy="))
    return _NAMES.get(name)


def notes(
    figures: Mapping[str, float | None],
    pairs: Pairs,
    best: Callable[..., float] = min,
    name: Callable[[str], str | None] = called,
) -> list[str]:
    """Return notes on rows that are not in the paper's order, or that all are.

    Args:
        figures: by row; None for a row that never reached the target, which comes last.
        pairs: of the paper's names, see `Pairs`.
        best: ``min`` or ``max``: what comes first. Of several rows of one name the best counts.
        name: returns the paper's name of a row.

    Returns:
        A line for each pair in the wrong order; one line if there is none; none if the rows have
        no pair.
    """
    worst = float("-inf") if best is max else float("inf")
    found: dict[str, float] = {}
    for row, figure in figures.items():
        if (known := name(row)) is not None:
            found[known] = best(found.get(known, worst), worst if figure is None else figure)
    there = [(a, b) for a, b in pairs if {a, b} <= found.keys() and {found[a], found[b]} != {worst}]
    turned = [
        f"order: not the paper's: it has {a} (here {found[a]:.4g}) before {b} ({found[b]:.4g})"
        for a, b in there
        if found[b] == best(found[a], found[b]) != found[a]
    ]
    if turned or not there:
        return turned
    return [f"order: the paper's, of {', '.join(dict.fromkeys(n for pair in there for n in pair))}"]
