#include "merge_passes.h"

#include <algorithm>
#include <limits>

namespace wingbeat {

namespace {

constexpr std::size_t bins_a_pair = 8;  // so many that it is thinning that decides what is lost
constexpr std::size_t crowd = std::size_t{1} << 17;  // labels; of more only the front is kept

// Corners of bins of equal width between two x, so that no candidate has to be stored.
class Bins {
 public:
  Bins(double low, double high, std::size_t count) : low_(low), corners_(count, nobody) {
    const double width = high - low;
    last_ = static_cast<double>(count - 1);
    // The reciprocal of the least width there is would be infinite.
    scale_ = width > 0.0 ? std::min(last_ / width, std::numeric_limits<double>::max()) : 0.0;
  }

  void add(const Rest& rest) {
    const double place = std::clamp((rest.x - low_) * scale_, 0.0, last_);
    Rest& corner = corners_[static_cast<std::size_t>(place)];
    corner = {std::min(corner.x, rest.x), std::min(corner.y, rest.y)};
  }

  std::vector<Rest>& front() {
    keep_falling(corners_);
    return corners_;
  }

 private:
  static constexpr Rest nobody{infinity, infinity};

  double low_;
  double scale_;
  double last_;
  std::vector<Rest> corners_;
};

// All rests from `start` on that may matter, as bins.
Bins rests_from(std::size_t start, const OpenRuns& runs, const Fronts<Rest>& rests, double limit,
                std::size_t bins, Work& work) {
  const double last_x = limit - runs.least_before(start).y;
  const double last_y = limit - runs.least_before(start).x;
  const double gap = runs.gap_before(start);
  Bins found(runs.least_after(start).x, last_x, bins);
  work.done += bins / 4;  // empty ones are filled and looked at too, only faster
  for (const Run& run : runs.leaving(start)) {
    // What begins before the gap waits for the links.
    const double begin = std::max(runs.ready(run) + run.encode, gap);
    ++work.done;
    for (const Rest& after : rests.at(run.stop)) {
      const double rest = run.exchange + after.x;
      const double late = run.encode + run.delay + after.y;
      const double sent = begin + rest;
      ++work.done;
      if (rest > last_x) break;
      const double y = std::max(late, sent);
      if (y <= last_y) found.add({rest, y});
      if (sent >= late) break;  // those that follow have both greater
    }
  }
  return found;
}

// Leave the most hopeful; returns whether any was dropped.
bool crowd_out(std::vector<Label>& front, std::size_t most) {
  if (front.size() <= most) return false;
  std::nth_element(front.begin(), front.begin() + static_cast<std::ptrdiff_t>(most), front.end(),
                   [](const Label& a, const Label& b) { return a.bound < b.bound; });
  front.resize(most);
  std::sort(front.begin(), front.end(), [](const Label& a, const Label& b) { return a.x < b.x; });
  return true;
}

void keep_labels(std::vector<Label>& labels) {
  keep_front(labels, [](const Label& a, const Label& b) { return a.count < b.count; });
}

// The front of all beginnings up to `stop` that may finish by the limit, by the simple bounds.
void labels_to(std::size_t stop, const OpenRuns& runs, const Fronts<Label>& labels, double limit,
               std::vector<Label>& found, Work& work) {
  found.clear();
  const Rest least = runs.least_after(stop);
  // Free before then is as good as free then. Rounding must not let that delay anything.
  const double gap = runs.gap_after(stop) - slack * limit;
  std::size_t reduce_at = crowd;
  for (const Run& run : runs.ending(stop)) {
    ++work.done;
    auto index = static_cast<std::uint32_t>(labels.index(run.start));
    for (const Label& before : labels.at(run.start)) {
      Beginning here = runs.with(before, run);
      ++work.done;
      if (here.x + least.y > limit) break;
      if (here.y + least.x <= limit) {
        here.y = std::max(here.y, here.x + gap);
        found.push_back({here, 0.0, run.start, index, before.count + 1});
      }
      // Where the links are idle, those that follow have both greater.
      if (runs.idle(before, run)) break;
      ++index;
    }
    if (found.size() < reduce_at) continue;
    keep_labels(found);
    reduce_at = found.size() + crowd;
  }
  keep_labels(found);
}

}  // namespace

std::vector<std::int64_t> stops_of(std::span<const Label> labels, std::size_t place) {
  std::vector<std::int64_t> stops;
  for (std::size_t at = labels.size() - 1; place > 0; at = labels[at].before) {
    stops.push_back(static_cast<std::int64_t>(place));
    place = labels[at].start;
  }
  std::reverse(stops.begin(), stops.end());
  return stops;
}

Fronts<Rest> bound_rests(OpenRuns& runs, const Fronts<Label>& before, double limit,
                         std::size_t width, Work& work) {
  Fronts<Rest> rests(runs.count() + 1);
  rests.put(runs.count(), {{0.0, 0.0}});
  for (std::size_t start = runs.count(); start-- > 0 && !work.over();) {
    Bins bins = rests_from(start, runs, rests, limit, bins_a_pair * width + 1, work);
    std::vector<Rest>& front = bins.front();
    const auto beginnings = before.at(start);
    if (!beginnings.empty()) {
      std::erase_if(front, [&](const Rest& r) { return least_finish(beginnings, r) > limit; });
    }
    runs.least_after(start, front.empty() ? Rest{infinity, infinity}
                                          : Rest{front.front().x, front.back().y});
    thin(front, width, [](const Rest&, const Rest&) { return false; });
    rests.put(start, front);
  }
  return rests;
}

Followed follow(OpenRuns& runs, const Fronts<Rest>& rests, double limit, std::size_t most,
                Keep keep, Work& work) {
  Followed done{Fronts<Label>(runs.count() + 1), true};
  done.labels.put(0, {nothing_yet});
  std::vector<Label> found;
  for (std::size_t stop = 1; stop <= runs.count() && !work.over(); ++stop) {
    labels_to(stop, runs, done.labels, limit, found, work);
    for (Label& label : found) label.bound = least_finish(rests.at(stop), label);
    std::erase_if(found, [&](const Label& label) { return label.bound > limit; });
    bool lost = false;
    if (keep == Keep::hopeful) {
      lost = crowd_out(found, most);
    } else {
      runs.least_before(stop, found.empty() ? Beginning{infinity, infinity}
                                            : Beginning{found.front().x, found.back().y});
      lost = thin(found, most, [](const Label& a, const Label& b) { return a.bound < b.bound; });
    }
    done.complete = done.complete && !lost;
    done.labels.put(stop, found);
  }
  return done;
}

}  // namespace wingbeat
