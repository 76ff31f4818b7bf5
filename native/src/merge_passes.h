// The two passes of a round of best_merge: what rests of plans take at least, and which beginnings
// are worth following.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "merge_front.h"
#include "merge_runs.h"

namespace wingbeat {

struct Work {
  std::uint64_t most;
  std::uint64_t done = 0;
  bool over() const { return done > most; }
};

// A beginning, and how it came to be.
struct Label : Beginning {
  double bound;          // no plan with it finishes earlier
  std::uint32_t start;   // of its last run
  std::uint32_t before;  // index of the label before that run
  std::uint32_t count;   // buckets
};

inline constexpr Label nothing_yet{{0.0, 0.0}, 0.0, 0, 0, 0};

// The stops of the plan up to `place` that the last of all labels stands for.
std::vector<std::int64_t> stops_of(std::span<const Label> labels, std::size_t place);

// For each place at most `width` pairs such that no rest that matters is below all of them; a rest
// matters if a plan with it may finish by the limit, for all that `before` says: pairs such that no
// beginning that matters is below all of them, or nothing yet known. Tells `runs` the least.
Fronts<Rest> bound_rests(OpenRuns& runs, const Fronts<Label>& before, double limit,
                         std::size_t width, Work& work);

enum class Keep {
  hopeful,  // drop the least hopeful: what is left are beginnings that there are
  corners,  // join neighbours: what is left bounds all that matter, and `runs` is told the least
};

struct Followed {
  Fronts<Label> labels;
  bool complete;  // nothing was dropped nor joined
};

// Follow beginnings from the start, at each place at most `most` of those that may finish by the
// limit, for all that `rests` say.
Followed follow(OpenRuns& runs, const Fronts<Rest>& rests, double limit, std::size_t most,
                Keep keep, Work& work);

}  // namespace wingbeat
