"""A blank matplotlib figure. matplotlib is imported only to draw."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wingbeat.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def blank(what: str, size: tuple[float, float], dpi: int) -> Figure:
    """Return a white figure of ``size`` inches; ``what`` names it in errors.

    Raises:
        UsageError: matplotlib (the extra ``bench``) is missing.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise UsageError(
            f"drawing a {what} needs matplotlib; install it with: pip install 'wingbeat[bench]'"
        ) from None
    figure = Figure(figsize=size, dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure
