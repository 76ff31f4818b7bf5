#include "select.h"

#include <array>
#include <cassert>
#include <memory>

#include "layout.h"
#include "loops.h"
#include "parallel.h"

namespace wingbeat {

namespace {

constexpr std::size_t buckets = 2048;
constexpr std::size_t most_copies = 4;  // an increment waits for the last one of the same counter
constexpr std::size_t one_copy_most = 16384;
constexpr std::size_t least_slice = 1 << 18;

using Histogram = std::array<std::array<std::uint32_t, buckets>, most_copies>;

struct Digit {
  int shift;
  int width;
};

constexpr Digit digits[] = {{20, 11}, {10, 10}, {0, 10}};

std::uint32_t magnitude_at(const std::uint8_t* values, std::size_t i) {
  return load<std::uint32_t>(values + 4 * i) & magnitude_mask;
}

// Count `digit` of the elements whose higher bits are those of `prefix`.
template <std::size_t copies>
void count_digit(const std::uint8_t* values, std::size_t n, Digit digit, std::uint32_t prefix,
                 Histogram& counts) {
  for (std::size_t copy = 0; copy < copies; ++copy) counts[copy] = {};
  const std::uint32_t mask = (1U << digit.width) - 1;
  const int above = digit.shift + digit.width;
  if (above == 31) {
    for (std::size_t i = 0; i < n; ++i) {
      ++counts[i % copies][magnitude_at(values, i) >> digit.shift];
    }
    return;
  }
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = magnitude_at(values, i);
    if (magnitude >> above == prefix >> above) {
      ++counts[i % copies][magnitude >> digit.shift & mask];
    }
  }
}

}  // namespace

Kth kth_largest(const void* values, std::size_t n, std::size_t k, unsigned threads) {
  assert(1 <= k && k <= n);
  const auto* bytes = static_cast<const std::uint8_t*>(values);
  const auto cut = slices(n, threads, least_slice);
  const auto counts = std::make_unique_for_overwrite<Histogram[]>(cut.size());
  const std::size_t copies = n <= one_copy_most ? 1 : most_copies;
  std::uint32_t prefix = 0;
  std::size_t greater = 0;
  for (const Digit digit : digits) {
    parallel(cut.size(), threads, [&](std::size_t i) {
      const auto count = copies == 1 ? count_digit<1> : count_digit<most_copies>;
      count(bytes + 4 * cut[i].begin, cut[i].size(), digit, prefix, counts[i]);
    });
    for (std::size_t bucket = std::size_t{1} << digit.width; bucket-- > 0;) {
      std::size_t here = 0;
      for (std::size_t i = 0; i < cut.size(); ++i) {
        for (std::size_t copy = 0; copy < copies; ++copy) here += counts[i][copy][bucket];
      }
      if (greater + here >= k) {
        prefix |= static_cast<std::uint32_t>(bucket) << digit.shift;
        break;
      }
      greater += here;
    }
  }
  return {prefix, greater};
}

}  // namespace wingbeat
