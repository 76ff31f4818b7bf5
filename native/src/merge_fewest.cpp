#include "merge_fewest.h"

#include <algorithm>
#include <utility>
#include <vector>

namespace wingbeat {

namespace {

// All beginnings of one bucket, then all of two and so on, until one is a whole plan.
class Layers {
 public:
  Layers(const OpenRuns& runs, const Fronts<Rest>& rests, double limit, Work& work)
      : runs_(runs), rests_(rests), limit_(limit), work_(work), seen_(runs.count() + 1) {
    labels_.push_back(nothing_yet);
    ends_.assign(runs.count() + 2, 1);
    ends_[0] = 0;
  }

  // Buckets from each place to the end, at least.
  std::vector<std::size_t> more() const;
  // Go on to beginnings of one more bucket; only where `more` is at most `left`.
  void next(const std::vector<std::size_t>& more, std::size_t left);
  // The best whole plan of this layer; infinite if there is none.
  double finish() const { return found_.empty() ? infinity : found_.back().y; }
  std::vector<std::int64_t> stops() const { return stops_of(labels_, runs_.count()); }

 private:
  void find(std::size_t stop);
  bool is_new(const Beginning& here, const std::vector<Beginning>& front) const;

  const OpenRuns& runs_;
  const Fronts<Rest>& rests_;
  double limit_;
  Work& work_;
  std::vector<Label> labels_;                 // of all layers
  std::vector<std::size_t> ends_;             // where each place begins in the last layer
  std::vector<Label> found_;                  // at the last place looked at
  std::vector<std::vector<Beginning>> seen_;  // the fronts of all layers so far
};

std::vector<std::size_t> Layers::more() const {
  std::vector<std::size_t> least(runs_.count() + 1, runs_.count() + 1);
  least[runs_.count()] = 0;
  for (std::size_t stop = runs_.count(); stop > 0; --stop) {
    for (const Run& run : runs_.ending(stop)) {
      least[run.start] = std::min(least[run.start], least[stop] + 1);
    }
  }
  return least;
}

// Behind more buckets only what no beginning seen before is below can help.
bool Layers::is_new(const Beginning& here, const std::vector<Beginning>& front) const {
  const auto above = std::partition_point(front.begin(), front.end(),
                                          [&](const Beginning& b) { return b.x <= here.x; });
  return above == front.begin() || (above - 1)->y > here.y;
}

void Layers::find(std::size_t stop) {
  const Rest least = runs_.least_after(stop);
  for (const Run& run : runs_.ending(stop)) {
    ++work_.done;
    for (std::size_t i = ends_[run.start]; i < ends_[run.start + 1]; ++i) {
      const Label& before = labels_[i];
      const Beginning here = runs_.with(before, run);
      ++work_.done;
      if (here.x + least.y > limit_) break;
      if (here.y + least.x <= limit_) {
        found_.push_back({here, 0.0, run.start, static_cast<std::uint32_t>(i), before.count + 1});
      }
      // Where the links are idle, those that follow have both greater.
      if (runs_.idle(before, run)) break;
    }
  }
  keep_front(found_, [](const Label&, const Label&) { return false; });
  std::erase_if(found_, [&, rests = rests_.at(stop)](const Label& label) {
    return !is_new(label, seen_[stop]) || least_finish(rests, label) > limit_;
  });
  if (found_.empty()) return;
  std::vector<Beginning>& seen = seen_[stop];
  const auto old = static_cast<std::ptrdiff_t>(seen.size());
  seen.insert(seen.end(), found_.begin(), found_.end());
  std::inplace_merge(seen.begin(), seen.begin() + old, seen.end(),
                     [](const Beginning& a, const Beginning& b) {
                       return a.x != b.x ? a.x < b.x : a.y < b.y;
                     });
  keep_falling(seen);
}

void Layers::next(const std::vector<std::size_t>& more, std::size_t left) {
  std::vector<std::size_t> ends(ends_.size(), labels_.size());
  for (std::size_t stop = 1; stop <= runs_.count() && !work_.over(); ++stop) {
    found_.clear();
    ends[stop] = labels_.size();
    if (more[stop] <= left) find(stop);
    labels_.insert(labels_.end(), found_.begin(), found_.end());
    ends[stop + 1] = labels_.size();
  }
  ends_ = std::move(ends);
}

}  // namespace

Known fewest_buckets(OpenRuns& runs, const Fronts<Rest>& rests, const Known& best, double tie,
                     Work& work) {
  const double latest = best.finish * (1.0 + tie);
  const double limit = latest * (1.0 + slack);
  runs.keep([&](const Run& run) {
    const Beginning here = runs.with(runs.least_before(run.start), run);
    return least_finish(rests.at(run.stop), here) <= limit;
  });
  Layers layers(runs, rests, limit, work);
  const std::vector<std::size_t> more = layers.more();
  if (more[0] >= best.stops.size()) return best;
  for (std::size_t left = best.stops.size() - 1; left-- > 0 && !work.over();) {
    layers.next(more, left);
    if (!work.over() && layers.finish() <= latest) return {layers.stops(), layers.finish()};
  }
  return best;
}

}  // namespace wingbeat
