// Sizes of the payloads; the same rules as wingbeat/kernels/layout.py.
#pragma once

#include <bit>
#include <cstddef>
#include <cstring>

namespace wingbeat {

static_assert(std::endian::native == std::endian::little,
              "payloads are little endian, and so is every processor that torch runs on");

inline constexpr std::size_t block_elements = 65536;

inline std::size_t blocks_of(std::size_t n) { return (n + block_elements - 1) / block_elements; }

inline std::size_t table_bytes(int bits) { return std::size_t{4} << bits; }

inline std::size_t code_bytes(std::size_t n, int bits) {
  return (n * static_cast<std::size_t>(bits) + 7) / 8;
}

// Whether the values themselves are no larger than the payload would be, and travel instead.
inline bool sketch_is_raw(std::size_t n, int bits) {
  return 4 * n <= table_bytes(bits) + code_bytes(n, bits);
}

inline bool topk_is_raw(std::size_t n, std::size_t k) {
  return 4 * n <= 6 * k + 4 * blocks_of(n);
}

inline std::size_t sketch_bytes(std::size_t n, int bits) {
  return sketch_is_raw(n, bits) ? 4 * n : table_bytes(bits) + code_bytes(n, bits);
}

inline std::size_t topk_bytes(std::size_t n, std::size_t k) {
  return topk_is_raw(n, k) ? 4 * n : 6 * k + 4 * blocks_of(n);
}

// Payloads may start at any address, so they are read and written by memcpy.
template <class T>
T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

}  // namespace wingbeat
