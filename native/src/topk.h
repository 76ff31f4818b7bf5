// The top-k codec: the k elements of largest magnitude travel, with their places.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat {

// Encode n elements into topk_bytes(n, k) bytes, 1 <= k <= n unless n is 0. Residual and velocity
// may be null; a velocity needs a residual. Equal magnitudes: the lowest index first.
void topk_encode(const float* x, std::size_t n, std::uint8_t* payload, std::size_t k,
                 float* residual, float* velocity, float momentum, unsigned threads);

// The sample by which topk_encode guesses how large the k-th largest is: so many elements, the i-th
// at place i of strides of n / size elements, scattered within each because tensors have periods.
std::size_t sample_size(std::size_t n);
std::size_t sample_place(std::size_t i, std::size_t stride);

enum class Decoded { well, wrong_counts, not_ascending, beyond_the_end };

// What is wrong with the payload; null for `well`.
const char* text_of(Decoded decoded);

// Decode n elements; `add` adds to `out` instead of overwriting it. If the payload is malformed,
// `out` is not touched.
Decoded topk_decode(const std::uint8_t* payload, std::size_t n, float* out, std::size_t k,
                    bool add, unsigned threads);

}  // namespace wingbeat
