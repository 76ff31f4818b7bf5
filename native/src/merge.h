// The best plan of merged tensors; wingbeat/planning/merge.py says why it is the best.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace wingbeat {

// What each run [start, stop) of `count` tensors costs, in seconds, finite and 0 or more. Runs are
// packed: those that end at stop 1, then those at stop 2 and so on; of each, starts first[stop] to
// stop - 1 in this order. ready[i], not falling, is when tensor i is ready.
struct MergeCosts {
  std::size_t count;          // 1 or more
  const double* ready;        // count
  const std::int64_t* first;  // count + 1: below stop, not falling, first[1] is 0
  const double* encode;
  const double* exchange;
  const double* delay;  // of all that is ready later; of runs that end at `count` it must be 0
};

struct MergeSearch {
  double tie;          // relative: finishes so close are equal
  std::size_t width;   // corners kept for each place in the first round, 1 or more
  std::size_t room;    // beginnings followed from each place in the first round, 1 or more
  std::size_t growth;  // of both, from round to round, 2 or more
  std::uint64_t work;  // beginnings and rests it may look at, about; some nanoseconds each
};

struct Merged {
  std::vector<std::int64_t> stops;  // before which tensors the buckets end, rising, the last count
  double least;                     // no plan finishes earlier, rounding aside
  bool proven;  // it is the best plan; if not, the work was used up, and it is the best seen
};

// Find the plan with the least finish; of those within the tie of it one with the fewest buckets,
// and of these the one with the least finish.
Merged best_merge(const MergeCosts& costs, const MergeSearch& search);

}  // namespace wingbeat
