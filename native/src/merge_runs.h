// The runs that a good plan may have, and simple bounds for what comes before and after each place.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "merge.h"

namespace wingbeat {

// Relative; bounds add up in another order than plans do, and must not cut off by rounding.
inline constexpr double slack = 1e-11;

struct Run {
  double encode;
  double exchange;
  double delay;
  std::uint32_t start;
  std::uint32_t stop;
};

// A beginning of a plan: all that matters for what follows.
struct Beginning {
  double x;  // delayed: seconds by which encoding and exchanges so far hold up backward
  double y;  // free: when the links will be free
};

// The rest of a plan. With a beginning it finishes at max(delayed + late, free + rest).
struct Rest {
  double x;  // rest: the seconds its exchanges take
  double y;  // late: when its last exchange would end behind links always free, nothing delayed
};

// What a beginning becomes with one more bucket. Every plan is priced by these very additions.
inline Beginning with(const Beginning& before, double ready, double encode, double exchange,
                      double delay) {
  const double encoded = before.x + encode;
  const double end = ready + encoded;
  return {encoded + delay, (end < before.y ? before.y : end) + exchange};
}

struct Known {
  std::vector<std::int64_t> stops;
  double finish;
};

double finish_of(const MergeCosts& costs, const std::vector<std::int64_t>& stops);

class OpenRuns {
 public:
  explicit OpenRuns(const MergeCosts& costs);

  std::size_t count() const { return count_; }
  double ready(const Run& run) const { return ready_[run.stop - 1]; }
  Beginning with(const Beginning& before, const Run& run) const {
    return wingbeat::with(before, ready(run), run.encode, run.exchange, run.delay);
  }
  // Whether the run finds the links idle behind this beginning.
  bool idle(const Beginning& before, const Run& run) const {
    return ready(run) + (before.x + run.encode) >= before.y;
  }

  // The runs with this stop; and those with this start, as they were at the last `index`.
  std::span<const Run> ending(std::size_t stop) const {
    return std::span(runs_).subspan(ends_[stop], ends_[stop + 1] - ends_[stop]);
  }
  std::span<const Run> leaving(std::size_t start) const {
    return std::span(by_start_).subspan(starts_[start], starts_[start + 1] - starts_[start]);
  }
  void index();

  // The least x and the least y, each by itself, of all beginnings up to a place that still matter
  // and of all rests from it on.
  const Beginning& least_before(std::size_t place) const { return before_[place]; }
  const Rest& least_after(std::size_t place) const { return after_[place]; }
  void least_before(std::size_t place, const Beginning& least) { before_[place] = least; }
  void least_after(std::size_t place, const Rest& least) { after_[place] = least; }

  // The least y - x of both. Links that are free before delayed + gap_after wait anyway.
  double gap_before(std::size_t place) const { return gap_before_[place]; }
  double gap_after(std::size_t place) const { return gap_after_[place]; }
  void find_gaps();

  // The plan made of the beginnings that look best by the bounds.
  std::vector<std::int64_t> hopeful() const;

  // Leave only the runs that `holds`.
  template <class Holds>
  void keep(Holds holds) {
    std::size_t kept = 0;
    for (std::size_t stop = 1, i = 0; stop <= count_; ++stop) {
      for (const std::size_t end = ends_[stop + 1]; i < end; ++i) {
        if (holds(runs_[i])) runs_[kept++] = runs_[i];
      }
      ends_[stop + 1] = kept;
    }
    runs_.resize(kept);
  }

 private:
  void find_least();

  std::size_t count_;
  const double* ready_;
  std::vector<Run> runs_;            // by stop, then by start
  std::vector<std::size_t> ends_;    // count + 2
  std::vector<Run> by_start_;
  std::vector<std::size_t> starts_;  // count + 1
  std::vector<Beginning> before_;    // count + 1, as all that follows
  std::vector<Rest> after_;
  std::vector<double> gap_before_;
  std::vector<double> gap_after_;
};

}  // namespace wingbeat
