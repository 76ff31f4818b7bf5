// Cutting work into slices for threads. Which slices there are never decides a result.
#pragma once

#include <cstddef>
#include <functional>
#include <vector>

namespace wingbeat {

struct Slice {
  std::size_t begin;
  std::size_t end;

  std::size_t size() const { return end - begin; }
};

// Cut [0, n) into at most `threads` slices of at least `least` elements each (fewer slices for
// small n), at multiples of 64 elements. More slices than threads only beyond 2**31 elements a
// slice, so that 32 bit counters and indices hold within one.
std::vector<Slice> slices(std::size_t n, unsigned threads, std::size_t least);

// Call work(i) for each i < count on up to `threads` threads, this one included. `work` must not
// throw. If the system gives no more threads, this one does the rest.
void parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work);

}  // namespace wingbeat
