#include "parallel.h"

#include <algorithm>
#include <atomic>
#include <system_error>
#include <thread>

namespace wingbeat {

namespace {

constexpr std::size_t grain = 64;
constexpr std::size_t most = std::size_t{1} << 31;

}  // namespace

std::vector<Slice> slices(std::size_t n, unsigned threads, std::size_t least) {
  std::size_t count = std::min<std::size_t>(std::max(threads, 1U), n / least);
  count = std::max({count, (n + most - 1) / most, std::size_t{1}});
  const std::size_t each = (n / count + grain) / grain * grain;
  std::vector<Slice> cut;
  for (std::size_t begin = 0; begin < n || cut.empty(); begin += each) {
    cut.push_back({begin, std::min(begin + each, n)});
  }
  return cut;
}

void parallel(std::size_t count, unsigned threads, const std::function<void(std::size_t)>& work) {
  std::atomic<std::size_t> next{0};
  const auto drain = [&] {
    for (std::size_t i = next.fetch_add(1); i < count; i = next.fetch_add(1)) work(i);
  };
  std::vector<std::thread> others;
  const std::size_t wanted = std::min<std::size_t>(count, std::max(threads, 1U));
  others.reserve(wanted);
  try {
    while (others.size() + 1 < wanted) others.emplace_back(drain);
  } catch (const std::system_error&) {
  }
  drain();
  for (std::thread& other : others) other.join();
}

}  // namespace wingbeat
