// Pareto fronts of pairs (x, y): those that no other is below, kept with x rising and y falling.
#pragma once

#include <algorithm>
#include <cstddef>
#include <limits>
#include <span>
#include <utility>
#include <vector>

namespace wingbeat {

inline constexpr double infinity = std::numeric_limits<double>::infinity();

// Drop most of what is dominated without sorting: what is above the least y of all lower bins of x.
template <class Item>
void drop_dominated(std::vector<Item>& items) {
  constexpr std::size_t most_bins = 1024;
  const auto [low, high] = std::minmax_element(
      items.begin(), items.end(), [](const Item& a, const Item& b) { return a.x < b.x; });
  const double begin = low->x;
  const double width = high->x - begin;
  if (!(width > 0.0)) return;
  const std::size_t bins = std::min(most_bins, items.size() / 4);
  const auto bin = [=](const Item& item) {
    // Divided first: the reciprocal of the least width there is would be infinite.
    return static_cast<std::size_t>((item.x - begin) / width * static_cast<double>(bins));
  };
  double least[most_bins + 2];
  std::fill_n(least, bins + 2, infinity);
  for (const Item& item : items) {
    double& here = least[bin(item) + 1];
    here = std::min(here, item.y);
  }
  for (std::size_t i = 1; i < bins + 2; ++i) least[i] = std::min(least[i], least[i - 1]);
  std::erase_if(items, [&](const Item& item) { return item.y >= least[bin(item)]; });
}

// Of items in order of x, keep those whose y is below all before.
template <class Item>
void keep_falling(std::vector<Item>& items) {
  double least = infinity;
  std::erase_if(items, [&](const Item& item) {
    if (item.y >= least) return true;
    least = item.y;
    return false;
  });
}

// Keep the front; of equal pairs the one that is `better`, or any.
template <class Item, class Better>
void keep_front(std::vector<Item>& items, Better better) {
  constexpr std::size_t soon_sorted = 64;
  if (items.size() > soon_sorted) drop_dominated(items);
  std::sort(items.begin(), items.end(), [&](const Item& a, const Item& b) {
    if (a.x != b.x) return a.x < b.x;
    return a.y != b.y ? a.y < b.y : better(a, b);
  });
  keep_falling(items);
}

// A group of neighbours is as large as its lesser side: so much a bound loses by their corner.
template <class Item>
double size_of(const Item& first, const Item& last) {
  return std::min(last.x - first.x, first.y - last.y);
}

template <class Item>
std::size_t groups_of(const std::vector<Item>& front, double size) {
  std::size_t count = 0;
  for (std::size_t i = 0; i < front.size(); ++count) {
    const Item& first = front[i];
    while (i < front.size() && size_of(first, front[i]) <= size) ++i;
  }
  return count;
}

// Replace neighbours on a front by the corner below them until at most `most` are left, the largest
// group as small as can be. What else there is to an item comes from the `better` ones. Returns
// whether anything was replaced.
template <class Item, class Better>
bool thin(std::vector<Item>& front, std::size_t most, Better better) {
  if (front.size() <= most) return false;
  constexpr int halvings = 10;
  double low = 0.0;
  double high = size_of(front.front(), front.back());
  for (int i = 0; i < halvings; ++i) {
    const double middle = low + (high - low) / 2;
    (groups_of(front, middle) <= most ? high : low) = middle;
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < front.size(); ++kept) {
    const Item first = front[i];
    Item best = first;
    double y = first.y;
    for (; i < front.size() && size_of(first, front[i]) <= high; ++i) {
      y = front[i].y;
      if (better(front[i], best)) best = front[i];
    }
    best.x = first.x;
    best.y = y;
    front[kept] = best;
  }
  front.resize(kept);
  return true;
}

// A front for each place.
template <class Item>
class Fronts {
 public:
  explicit Fronts(std::size_t places) : ends_(places, {0, 0}) {}

  void put(std::size_t place, const std::vector<Item>& front) {
    ends_[place] = {items_.size(), items_.size() + front.size()};
    items_.insert(items_.end(), front.begin(), front.end());
  }
  std::span<const Item> at(std::size_t place) const {
    return std::span(items_).subspan(ends_[place].first, ends_[place].second - ends_[place].first);
  }
  // The index, among all items, of the first at a place.
  std::size_t index(std::size_t place) const { return ends_[place].first; }
  std::span<const Item> all() const { return items_; }

 private:
  std::vector<Item> items_;
  std::vector<std::pair<std::size_t, std::size_t>> ends_;
};

// The least max(x + pair.y, y + pair.x) over a front.
template <class Item, class Pair>
double least_finish(std::span<const Item> front, const Pair& pair) {
  // Along the front x rises and y falls: the best is where one overtakes the other.
  const auto found = std::partition_point(front.begin(), front.end(), [&](const Item& item) {
    return item.x + pair.y < item.y + pair.x;
  });
  const double rising = found == front.end() ? infinity : found->x + pair.y;
  const double falling = found == front.begin() ? infinity : (found - 1)->y + pair.x;
  return std::min(rising, falling);
}

}  // namespace wingbeat
