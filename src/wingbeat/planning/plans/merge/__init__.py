"""Which neighbouring tensors share a bucket when encoding and exchanging both take time.

OMGS-SGD (Shi et al., INFOCOM 2020), sections III and IV. A plan cuts the tensors, first ready
first, into runs; each run is a bucket. `predict` says when each bucket is encoded and exchanged;
everything else here makes plans.
"""

from __future__ import annotations

from wingbeat.planning.plans.merge.exact import Bounded, bounded, exact
from wingbeat.planning.plans.merge.exhaustive import exhaustive
from wingbeat.planning.plans.merge.halves import both, feed_s
from wingbeat.planning.plans.merge.paper import greedy, printed, wfbp
from wingbeat.planning.plans.merge.simple import by_size, one
from wingbeat.planning.plans.merge.timeline import Row, Timeline, predict

__all__ = [
    "Bounded",
    "Row",
    "Timeline",
    "both",
    "bounded",
    "by_size",
    "exact",
    "exhaustive",
    "feed_s",
    "greedy",
    "one",
    "predict",
    "printed",
    "wfbp",
]
