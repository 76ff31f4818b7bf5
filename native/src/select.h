// Exact selection by magnitude, an integer comparison of the bits without the sign.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat {

struct Kth {
  std::uint32_t magnitude;  // of the k-th largest element
  std::size_t greater;      // how many are greater: fewer than k
};

// Find the k-th largest (1 is the largest) of n floats at `values`, 1 <= k <= n, by counting its
// magnitude's upper 11, middle 10 and lower 10 bits one after another.
Kth kth_largest(const void* values, std::size_t n, std::size_t k, unsigned threads);

}  // namespace wingbeat
