// The kernels written down once more, slowly and from the description of the payloads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "codebook.h"

namespace naive {

using Bytes = std::vector<std::uint8_t>;
using Floats = std::vector<float>;

// What arrives of acc in a sketch.
Floats through_sketch(const Floats& acc, int bits, wingbeat::Split split, wingbeat::Level level);

// Decode bit by bit.
Floats read_sketch(const Bytes& payload, std::size_t n, int bits);

// Sort all magnitudes; the whole payload.
Bytes write_topk(const Floats& acc, std::size_t k);

Floats read_topk(const Bytes& payload, std::size_t n, std::size_t k);

}  // namespace naive
