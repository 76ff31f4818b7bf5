#include "merge_runs.h"

#include <algorithm>

#include "merge_front.h"

namespace wingbeat {

double finish_of(const MergeCosts& costs, const std::vector<std::int64_t>& stops) {
  Beginning here{0.0, 0.0};
  std::size_t start = 0;
  std::size_t stop = 1;
  std::size_t base = 0;  // of the runs that end at stop
  for (const std::int64_t end : stops) {
    for (; stop < static_cast<std::size_t>(end); ++stop) {
      base += stop - static_cast<std::size_t>(costs.first[stop]);
    }
    const std::size_t i = base + start - static_cast<std::size_t>(costs.first[stop]);
    here = with(here, costs.ready[stop - 1], costs.encode[i], costs.exchange[i],
                costs.delay[i]);
    start = stop;
  }
  return here.y;
}

OpenRuns::OpenRuns(const MergeCosts& costs)
    : count_(costs.count), ready_(costs.ready), ends_(count_ + 2), starts_(count_ + 1) {
  for (std::size_t stop = 1; stop <= count_; ++stop) {
    ends_[stop + 1] = ends_[stop] + stop - static_cast<std::size_t>(costs.first[stop]);
  }
  runs_.reserve(ends_[count_ + 1]);
  for (std::size_t stop = 1; stop <= count_; ++stop) {
    for (auto start = static_cast<std::size_t>(costs.first[stop]); start < stop; ++start) {
      const std::size_t i = runs_.size();
      runs_.push_back({costs.encode[i], costs.exchange[i], costs.delay[i],
                       static_cast<std::uint32_t>(start), static_cast<std::uint32_t>(stop)});
    }
  }
  find_least();
}

void OpenRuns::find_least() {
  before_.assign(count_ + 1, {infinity, infinity});
  before_[0] = {0.0, 0.0};
  for (const Run& run : runs_) {
    const Beginning here = with(before_[run.start], run);
    Beginning& least = before_[run.stop];
    least = {std::min(least.x, here.x), std::min(least.y, here.y)};
  }
  after_.assign(count_ + 1, {infinity, infinity});
  after_[count_] = {0.0, 0.0};
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
    const Rest& after = after_[run->stop];
    Rest& least = after_[run->start];
    const double rest = run->exchange + after.x;
    const double late = run->encode + std::max(ready(*run) + rest, run->delay + after.y);
    least = {std::min(least.x, rest), std::min(least.y, late)};
  }
}

void OpenRuns::find_gaps() {
  gap_before_.assign(count_ + 1, infinity);
  gap_before_[0] = 0.0;
  for (const Run& run : runs_) {
    const double begin = std::max(ready(run), gap_before_[run.start] - run.encode);
    const double gap = begin + run.exchange - run.delay;
    gap_before_[run.stop] = std::min(gap_before_[run.stop], gap);
  }
  gap_after_.assign(count_ + 1, infinity);
  gap_after_[count_] = 0.0;
  for (auto run = runs_.rbegin(); run != runs_.rend(); ++run) {
    const double after = run->delay + gap_after_[run->stop] - run->exchange;
    const double gap = std::max(ready(*run), after) + run->encode;
    gap_after_[run->start] = std::min(gap_after_[run->start], gap);
  }
}

std::vector<std::int64_t> OpenRuns::hopeful() const {
  std::vector<Beginning> chosen(count_ + 1, {0.0, 0.0});
  std::vector<std::size_t> parent(count_ + 1, 0);
  for (std::size_t stop = 1; stop <= count_; ++stop) {
    double least = infinity;
    for (const Run& run : ending(stop)) {
      const Beginning here = with(chosen[run.start], run);
      const double hope = std::max(here.x + after_[stop].y, here.y + after_[stop].x);
      if (hope >= least) continue;
      least = hope;
      chosen[stop] = here;
      parent[stop] = run.start;
    }
  }
  std::vector<std::int64_t> stops;
  for (std::size_t place = count_; place > 0; place = parent[place]) {
    stops.push_back(static_cast<std::int64_t>(place));
  }
  std::reverse(stops.begin(), stops.end());
  return stops;
}

void OpenRuns::index() {
  std::fill(starts_.begin(), starts_.end(), 0);
  for (const Run& run : runs_) ++starts_[run.start + 1];
  for (std::size_t i = 1; i < starts_.size(); ++i) starts_[i] += starts_[i - 1];
  by_start_.resize(runs_.size());
  std::vector<std::size_t> next(starts_);
  for (const Run& run : runs_) by_start_[next[run.start]++] = run;
}

}  // namespace wingbeat
