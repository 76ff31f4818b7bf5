#include "merge.h"

#include <algorithm>
#include <utility>

#include "merge_fewest.h"
#include "merge_front.h"
#include "merge_passes.h"
#include "merge_runs.h"

namespace wingbeat {

namespace {

class Search {
 public:
  Search(const MergeCosts& costs, const MergeSearch& how)
      : costs_(costs),
        how_(how),
        work_{how.work},
        runs_(costs),
        known_{runs_.hopeful(), 0.0},
        labels_(runs_.count() + 1),
        rests_(runs_.count() + 1) {
    known_.finish = finish_of(costs, known_.stops);
  }

  Merged find();

 private:
  double limit() const { return known_.finish * (1.0 + how_.tie) * (1.0 + slack); }
  bool round(std::size_t width, std::size_t room);
  bool beginnings(std::size_t most, Keep keep);
  void take(std::vector<std::int64_t> stops);

  const MergeCosts& costs_;
  const MergeSearch& how_;
  Work work_;
  OpenRuns runs_;
  Known known_;  // the best plan so far
  double least_ = 0.0;
  Fronts<Label> labels_;
  Fronts<Rest> rests_;
};

void Search::take(std::vector<std::int64_t> stops) {
  const double finish = finish_of(costs_, stops);
  if (finish > known_.finish) return;
  if (finish == known_.finish && stops.size() >= known_.stops.size()) return;
  known_ = {std::move(stops), finish};
}

// Follow beginnings, and take the best plan they lead to. Returns whether no other is better.
bool Search::beginnings(std::size_t most, Keep keep) {
  Followed found = follow(runs_, rests_, limit(), most, keep, work_);
  if (work_.over()) return false;
  // Of whole plans the last is the best: y falls.
  const auto whole = found.labels.at(runs_.count());
  if (!whole.empty()) take(stops_of(found.labels.all(), runs_.count()));
  if (keep == Keep::corners) {
    least_ = std::max(least_, whole.empty() ? limit() : whole.back().y);
    labels_ = std::move(found.labels);
  }
  return found.complete;
}

// Bound from the end what rests of plans take, find a better plan by that, then bound from the
// start what beginnings take. Returns whether the best plan is found.
bool Search::round(std::size_t width, std::size_t room) {
  runs_.keep([&, latest = limit()](const Run& run) {
    const Beginning here = runs_.with(runs_.least_before(run.start), run);
    const Rest& after = runs_.least_after(run.stop);
    return std::max(here.x + after.y, here.y + after.x) <= latest;
  });
  runs_.index();
  runs_.find_gaps();
  rests_ = bound_rests(runs_, labels_, limit(), width, work_);
  if (work_.over()) return false;
  least_ = std::max(least_, least_finish(rests_.at(0), nothing_yet));
  runs_.keep([&, latest = limit()](const Run& run) {
    const Beginning here = runs_.with(runs_.least_before(run.start), run);
    return least_finish(rests_.at(run.stop), here) <= latest;
  });
  return beginnings(room, Keep::hopeful) || beginnings(width, Keep::corners);
}

Merged Search::find() {
  const Rest& all = runs_.least_after(0);
  least_ = std::max({all.x, all.y, runs_.least_before(runs_.count()).y});
  bool best = false;
  for (std::size_t width = how_.width, room = how_.room; !best && !work_.over();
       width *= how_.growth, room *= how_.growth) {
    best = round(width, room);
  }
  if (best) {
    least_ = known_.finish;
    known_ = fewest_buckets(runs_, rests_, known_, how_.tie, work_);
  }
  return {known_.stops, std::min(least_, known_.finish), !work_.over()};
}

}  // namespace

Merged best_merge(const MergeCosts& costs, const MergeSearch& search) {
  return Search(costs, search).find();
}

}  // namespace wingbeat
