// The sketch codec: each element travels as a code of 1 to 8 bits into a table of values.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codebook.h"

namespace wingbeat {

// Encode n elements into sketch_bytes(n, bits) bytes. With a residual (may be null), x + residual
// is encoded and the residual becomes what the payload loses.
void sketch_encode(const float* x, std::size_t n, std::uint8_t* payload, int bits, Split split,
                   Level level, float* residual, unsigned threads);

// Decode n elements; `add` adds to `out` instead of overwriting it. Any payload can be decoded.
void sketch_decode(const std::uint8_t* payload, std::size_t n, float* out, int bits, bool add,
                   unsigned threads);

}  // namespace wingbeat
