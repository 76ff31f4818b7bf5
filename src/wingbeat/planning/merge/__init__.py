"""Merge plans: which consecutive tensors share a bucket when encoding and exchanging take time.

OMGS-SGD (Shi et al., INFOCOM 2020), sections III and IV. A plan cuts the tensors, first ready
first, into segments; each segment is a bucket. `predict` computes when each bucket is encoded and
exchanged; the other functions make plans.
"""

from __future__ import annotations

from wingbeat.planning.merge.optimal import (
    SearchResult,
    exact,
    exact_two_phase,
    exhaustive,
    search,
)
from wingbeat.planning.merge.rules import (
    by_elements,
    greedy,
    greedy_as_printed,
    mg_wfbp,
    single_bucket,
)
from wingbeat.planning.merge.selection import Candidate, candidates
from wingbeat.planning.merge.timeline import (
    BucketTimes,
    Timeline,
    bucket_stops,
    gather_phase_s,
    plan_from_stops,
    predict,
)

__all__ = [
    "BucketTimes",
    "Candidate",
    "SearchResult",
    "Timeline",
    "bucket_stops",
    "by_elements",
    "candidates",
    "exact",
    "exact_two_phase",
    "exhaustive",
    "gather_phase_s",
    "greedy",
    "greedy_as_printed",
    "mg_wfbp",
    "plan_from_stops",
    "predict",
    "search",
    "single_bucket",
]
