"""What things cost: curves, how they come from samples, what a backward pass brings. No torch."""

from __future__ import annotations

from wingbeat.planning.costs.curve import NOTHING, Curve, Line, Pieces, Sorting, curve_of
from wingbeat.planning.costs.fit import Fit, best_fit, fit_line, fit_of, fit_sorting
from wingbeat.planning.costs.layers import LayerCosts, backward_floor, forward_floor
from wingbeat.planning.costs.workload import Costs, Workload

__all__ = [
    "NOTHING",
    "Costs",
    "Curve",
    "Fit",
    "LayerCosts",
    "Line",
    "Pieces",
    "Sorting",
    "Workload",
    "backward_floor",
    "best_fit",
    "curve_of",
    "fit_line",
    "fit_of",
    "fit_sorting",
    "forward_floor",
]
