// What Python sees. Tensors and arrays come as addresses, so that torch's own types stay out of the
// build; wingbeat/kernels/native.py, wingbeat/planning/merge.py and
// wingbeat/methods/parameter_server/aggregator.py checked them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "ending.h"
#include "loops.h"
#include "merge.h"
#include "messages.h"
#include "net.h"
#include "sketch.h"
#include "topk.h"

namespace nb = nanobind;

namespace {

using wingbeat::Unlocked;

template <class T>
T* at(std::uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

void sketch_encode(std::uintptr_t x, std::size_t n, std::uintptr_t payload, int bits,
                   bool by_error, bool ends, std::uintptr_t residual, unsigned threads) {
  using namespace wingbeat;
  sketch_encode(at<const float>(x), n, at<std::uint8_t>(payload), bits,
                by_error ? Split::error : Split::count, ends ? Level::ends : Level::mean,
                at<float>(residual), threads);
}

void sketch_decode(std::uintptr_t payload, std::size_t n, std::uintptr_t out, int bits, bool add,
                   unsigned threads) {
  wingbeat::sketch_decode(at<const std::uint8_t>(payload), n, at<float>(out), bits, add, threads);
}

void topk_encode(std::uintptr_t x, std::size_t n, std::uintptr_t payload, std::size_t k,
                 std::uintptr_t residual, std::uintptr_t velocity, float momentum,
                 unsigned threads) {
  wingbeat::topk_encode(at<const float>(x), n, at<std::uint8_t>(payload), k, at<float>(residual),
                        at<float>(velocity), momentum, threads);
}

void topk_decode(std::uintptr_t payload, std::size_t n, std::uintptr_t out, std::size_t k,
                 bool add, unsigned threads) {
  const char* wrong = wingbeat::text_of(wingbeat::topk_decode(
      at<const std::uint8_t>(payload), n, at<float>(out), k, add, threads));
  if (wrong != nullptr) throw std::invalid_argument(wrong);
}

void add_half(std::uintptr_t total, const std::vector<std::uintptr_t>& payloads, std::size_t n,
              bool bfloat16, bool begin) {
  std::vector<const std::uint8_t*> from;
  from.reserve(payloads.size());
  for (const std::uintptr_t each : payloads) from.push_back(at<const std::uint8_t>(each));
  wingbeat::loops().add_half(from.data(), from.size(), n, bfloat16, begin, at<float>(total));
}

void narrow_half(std::uintptr_t total, std::size_t n, bool bfloat16, std::uintptr_t out) {
  wingbeat::loops().narrow_half(at<const float>(total), n, bfloat16, at<std::uint16_t>(out));
}

std::tuple<std::vector<std::int64_t>, double, bool> best_merge(
    std::size_t count, std::uintptr_t ready, std::uintptr_t first, std::uintptr_t encode,
    std::uintptr_t exchange, std::uintptr_t delay, double tie, std::size_t width, std::size_t room,
    std::size_t growth, std::uint64_t work) {
  const wingbeat::MergeCosts costs{count, at<const double>(ready), at<const std::int64_t>(first),
                                   at<const double>(encode), at<const double>(exchange),
                                   at<const double>(delay)};
  wingbeat::Merged found;
  {
    const Unlocked unlocked;
    found = wingbeat::best_merge(costs, {tie, width, room, growth, work});
  }
  return {std::move(found.stops), found.least, found.proven};
}

}  // namespace

NB_MODULE(_native, module) {
  const nb::call_guard<Unlocked> unlocked;
  module.def("sketch_encode", &sketch_encode, unlocked);
  module.def("sketch_decode", &sketch_decode, unlocked);
  module.def("topk_encode", &topk_encode, unlocked);
  module.def("topk_decode", &topk_decode, unlocked);
  module.def("add_half", &add_half, unlocked);
  module.def("narrow_half", &narrow_half, unlocked);
  module.def("best_merge", &best_merge);
  module.def("instructions", [] { return wingbeat::loops().name; });
  module.def("prefer_portable", &wingbeat::prefer_portable);
  bind_messages(module);
  bind_net(module);
}
