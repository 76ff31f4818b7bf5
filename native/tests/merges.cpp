#include "merges.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "merge.h"

namespace naive {

namespace {

using wingbeat::Merged;
using wingbeat::MergeCosts;

constexpr double tie = 1e-12;
constexpr std::size_t most_tensors = 10;

struct Instance {
  std::vector<double> ready;
  std::vector<std::int64_t> first{0};
  std::vector<double> encode, exchange, delay;

  MergeCosts costs() const {
    return {ready.size(),  ready.data(),    first.data(),
            encode.data(), exchange.data(), delay.data()};
  }
};

// Seconds that make many ties, tenths whose sums differ by rounding, or any.
double seconds(std::mt19937& random, unsigned kind) {
  const auto dice = static_cast<double>(random() % 4);
  if (kind == 0) return dice;
  if (kind == 1) return dice / 10;
  return static_cast<double>(random()) / 4e9;
}

Instance make_instance(unsigned number) {
  std::mt19937 random(number);
  Instance made;
  const unsigned gaps = random() % 3, encodes = random() % 3, exchanges = random() % 3;
  const unsigned delays = random() % 6;  // of half of the instances nothing
  const std::size_t count = 1 + random() % most_tensors;
  for (std::size_t stop = 1; stop <= count; ++stop) {
    made.ready.push_back((stop > 1 ? made.ready.back() : 0.0) + seconds(random, gaps));
    const bool new_kind = stop > 1 && random() % 8 == 0;
    made.first.push_back(new_kind ? static_cast<std::int64_t>(stop) - 1 : made.first.back());
    for (auto start = made.first.back(); start < static_cast<std::int64_t>(stop); ++start) {
      made.encode.push_back(seconds(random, encodes));
      made.exchange.push_back(seconds(random, exchanges));
      const bool delaying = delays < 3 && stop < count;
      made.delay.push_back(delaying ? seconds(random, delays) : 0.0);
    }
  }
  return made;
}

struct Priced {
  double finish;  // infinite if a run of the plan does not exist
  std::size_t buckets;
};

// The equations, bucket by bucket; the bits are the stops but the last.
Priced price(const Instance& instance, std::uint32_t stops) {
  const auto count = static_cast<std::int64_t>(instance.ready.size());
  Priced plan{0.0, 0};
  double encoded = 0.0;  // and delayed by exchanges
  std::int64_t start = 0;
  std::size_t run = 0;
  for (std::int64_t stop = 1; stop <= count; ++stop) {
    const std::int64_t first = instance.first[static_cast<std::size_t>(stop)];
    if (stop == count || (stops >> (stop - 1) & 1) != 0) {
      if (start < first) return {std::numeric_limits<double>::infinity(), 0};
      const std::size_t at = run + static_cast<std::size_t>(start - first);
      encoded += instance.encode[at];
      plan.finish = std::max(instance.ready[static_cast<std::size_t>(stop - 1)] + encoded,
                             plan.finish) + instance.exchange[at];
      encoded += instance.delay[at];
      ++plan.buckets;
      start = stop;
    }
    run += static_cast<std::size_t>(stop - first);
  }
  return plan;
}

Priced best_of_all(const Instance& instance) {
  std::vector<Priced> plans;
  for (std::uint32_t stops = 0; stops < 1U << (instance.ready.size() - 1); ++stops) {
    plans.push_back(price(instance, stops));
  }
  const auto sooner = [](const Priced& a, const Priced& b) { return a.finish < b.finish; };
  const double least = std::min_element(plans.begin(), plans.end(), sooner)->finish;
  std::erase_if(plans, [&](const Priced& plan) { return plan.finish > least * (1.0 + tie); });
  return *std::min_element(plans.begin(), plans.end(), [](const Priced& a, const Priced& b) {
    return a.buckets != b.buckets ? a.buckets < b.buckets : a.finish < b.finish;
  });
}

Priced found(const Instance& instance, const Merged& merged) {
  std::uint32_t bits = 0;
  for (const std::int64_t stop : merged.stops) bits |= 1U << (stop - 1);
  return price(instance, bits);
}

}  // namespace

std::string wrong_merge(unsigned number) {
  const Instance instance = make_instance(number);
  const Priced best = best_of_all(instance);
  const std::uint64_t enough = std::uint64_t{1} << 62;
  for (const wingbeat::MergeSearch& how :
       {wingbeat::MergeSearch{tie, 32, 4, 4, enough}, {tie, 1, 1, 2, enough}, {tie, 2, 1, 3, enough},
        {tie, 1, 1, 2, 30}, {tie, 32, 4, 4, 0}}) {
    const Merged merged = wingbeat::best_merge(instance.costs(), how);
    const Priced plan = found(instance, merged);
    if (how.work == enough && !merged.proven) return "unlimited work proves the best plan";
    if (merged.least > best.finish * (1.0 + 1e-11)) return "no plan finishes before the bound";
    if (merged.proven && (plan.finish != best.finish || plan.buckets != best.buckets)) {
      return "the best of all plans, to the last bit";
    }
    if (!(plan.finish < std::numeric_limits<double>::infinity())) return "runs of one kind";
  }
  return "";
}

}  // namespace naive
