// The codec of scaled float16, as HalfCodec of wingbeat/codecs/codec.py: [scale: float32][values].
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat {

inline std::size_t half_bytes(std::size_t n) { return n == 0 ? 0 : 4 + 2 * n; }

// Encode n elements into half_bytes(n) bytes, aligned to 2.
void half_encode(const float* x, std::size_t n, std::uint8_t* payload);

// Decode n elements; `add` adds to `out` instead of overwriting it. Any payload can be decoded.
void half_decode(const std::uint8_t* payload, std::size_t n, float* out, bool add);

}  // namespace wingbeat
