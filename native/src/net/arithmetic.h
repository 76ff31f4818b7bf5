// Sums and casts of the elements that travel. Results equal those of torch's CPU kernels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat::net {

enum class Dtype : std::uint8_t {
  float32,
  float64,
  float16,
  bfloat16,
  int8,
  uint8,
  int16,
  int32,
  int64,
  boolean,
};

inline constexpr std::size_t most_element_bytes = 8;

std::size_t size_of(Dtype dtype);

// total += part, each of n elements. Integers wrap; booleans are combined by "or".
void add(Dtype dtype, std::uint8_t* total, const std::uint8_t* part, std::size_t n);

// float32 to float16 or bfloat16: nearest, ties to even.
void narrow(Dtype to, const float* from, std::uint8_t* out, std::size_t n);

// out = part or, with `accumulate`, out += part; part is float16 or bfloat16.
void widen(Dtype from, const std::uint8_t* part, float* out, std::size_t n, bool accumulate);

}  // namespace wingbeat::net
