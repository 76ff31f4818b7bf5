#include "arithmetic.h"

#include <algorithm>

#include "../loops.h"

namespace wingbeat::net {

namespace {

template <class T>
void add_as(std::uint8_t* total, const std::uint8_t* part, std::size_t n) {
  auto* to = reinterpret_cast<T*>(total);
  const auto* from = reinterpret_cast<const T*>(part);
  for (std::size_t i = 0; i < n; ++i) to[i] = static_cast<T>(to[i] + from[i]);
}

// torch computes in float32 and rounds each sum.
void add_halves(bool bfloat16, std::uint8_t* total, const std::uint8_t* part, std::size_t n) {
  constexpr std::size_t tile = 1024;
  float sum[tile];
  for (std::size_t at = 0; at < n; at += tile) {
    const std::size_t length = std::min(tile, n - at);
    const std::uint8_t* both[] = {total + 2 * at, part + 2 * at};
    loops().add_half(both, 2, length, bfloat16, true, sum);
    loops().narrow_half(sum, length, bfloat16, reinterpret_cast<std::uint16_t*>(total + 2 * at));
  }
}

}  // namespace

std::size_t size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::float64:
    case Dtype::int64:
      return 8;
    case Dtype::float32:
    case Dtype::int32:
      return 4;
    case Dtype::float16:
    case Dtype::bfloat16:
    case Dtype::int16:
      return 2;
    default:
      return 1;
  }
}

void add(Dtype dtype, std::uint8_t* total, const std::uint8_t* part, std::size_t n) {
  switch (dtype) {
    case Dtype::float32:
      return add_as<float>(total, part, n);
    case Dtype::float64:
      return add_as<double>(total, part, n);
    case Dtype::float16:
      return add_halves(false, total, part, n);
    case Dtype::bfloat16:
      return add_halves(true, total, part, n);
    case Dtype::int8:
    case Dtype::uint8:
      return add_as<std::uint8_t>(total, part, n);
    case Dtype::int16:
      return add_as<std::uint16_t>(total, part, n);
    case Dtype::int32:
      return add_as<std::uint32_t>(total, part, n);
    case Dtype::int64:
      return add_as<std::uint64_t>(total, part, n);
    case Dtype::boolean:
      for (std::size_t i = 0; i < n; ++i) total[i] = total[i] != 0 || part[i] != 0;
      return;
  }
}

void narrow(Dtype to, const float* from, std::uint8_t* out, std::size_t n) {
  loops().narrow_half(from, n, to == Dtype::bfloat16, reinterpret_cast<std::uint16_t*>(out));
}

void widen(Dtype from, const std::uint8_t* part, float* out, std::size_t n, bool accumulate) {
  loops().add_half(&part, 1, n, from == Dtype::bfloat16, !accumulate, out);
}

}  // namespace wingbeat::net
