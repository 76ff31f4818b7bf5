#include "scaled_half.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "layout.h"
#include "loops.h"

namespace wingbeat {

namespace {

constexpr std::size_t tile = 1024;
constexpr std::uint32_t bias = 127;
constexpr std::uint32_t top_exponent = 14;  // of the largest magnitude after scaling
// float32's largest values would be rounded up to 2**15 * 2**113, which overflows.
constexpr float largest_scaled = 32768.0F - 16.0F;

// The bits of the largest finite magnitude, or 0.
std::uint32_t peak_of(const float* x, std::size_t n) {
  std::int32_t peak = 0;
  for (std::size_t i = 0; i < n; ++i) {
    const auto size = static_cast<std::int32_t>(std::bit_cast<std::uint32_t>(x[i]) & magnitude_mask);
    const std::int32_t finite = size < static_cast<std::int32_t>(infinity_bits) ? size : 0;
    peak = finite > peak ? finite : peak;
  }
  return static_cast<std::uint32_t>(peak);
}

}  // namespace

void half_encode(const float* x, std::size_t n, std::uint8_t* payload) {
  if (n == 0) return;
  const std::uint32_t peak = peak_of(x, n);
  const std::uint32_t exponent = peak >> 23;
  const std::uint32_t field =
      peak == 0 ? bias : std::max(exponent, top_exponent + 1) - top_exponent;
  const auto scale = std::bit_cast<float>(field << 23);
  const auto inverse = std::bit_cast<float>((2 * bias - field) << 23);
  const bool limited = field == 2 * bias - top_exponent;
  store(payload, scale);
  float scaled[tile];
  for (std::size_t at = 0; at < n; at += tile) {
    const std::size_t length = std::min(tile, n - at);
    for (std::size_t i = 0; i < length; ++i) scaled[i] = x[at + i] * inverse;
    for (std::size_t i = 0; limited && i < length; ++i) {
      if (!std::isinf(scaled[i])) scaled[i] = std::clamp(scaled[i], -largest_scaled, largest_scaled);
    }
    loops().narrow_half(scaled, length, false,
                        reinterpret_cast<std::uint16_t*>(payload + 4 + 2 * at));
  }
}

void half_decode(const std::uint8_t* payload, std::size_t n, float* out, bool add) {
  if (n == 0) return;
  const auto scale = load<float>(payload);
  float wide[tile];
  for (std::size_t at = 0; at < n; at += tile) {
    const std::size_t length = std::min(tile, n - at);
    const std::uint8_t* const values = payload + 4 + 2 * at;
    loops().add_half(&values, 1, length, false, true, wide);
    for (std::size_t i = 0; i < length; ++i) {
      const float value = wide[i] * scale;
      out[at + i] = add ? out[at + i] + value : value;
    }
  }
}

}  // namespace wingbeat
