// Ties: of all plans that finish as early as the best, one with the fewest buckets.
#pragma once

#include "merge_front.h"
#include "merge_passes.h"
#include "merge_runs.h"

namespace wingbeat {

// Of the plans that finish within the tie of `best`, the least there is, return one of the fewest
// buckets; of these, one that finishes first. `rests` are bounds by which no such plan is lost.
Known fewest_buckets(OpenRuns& runs, const Fronts<Rest>& rests, const Known& best, double tie,
                     Work& work);

}  // namespace wingbeat
