// Payloads that are the values themselves, because those are no larger.
#pragma once

#include <cstddef>
#include <cstdint>

#include "layout.h"

namespace wingbeat {

// Nothing is lost, so the residual becomes 0.
inline void raw_encode(const float* x, std::size_t n, std::uint8_t* payload, float* residual) {
  for (std::size_t i = 0; i < n; ++i) {
    store(payload + 4 * i, residual == nullptr ? x[i] : x[i] + residual[i]);
    if (residual != nullptr) residual[i] = 0.0F;
  }
}

inline void raw_decode(const std::uint8_t* payload, std::size_t n, float* out, bool add) {
  for (std::size_t i = 0; i < n; ++i) {
    const float value = load<float>(payload + 4 * i);
    out[i] = add ? out[i] + value : value;
  }
}

}  // namespace wingbeat
