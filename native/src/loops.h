// The loops that touch every element, compiled once for each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace wingbeat {

inline constexpr std::uint32_t magnitude_mask = 0x7fffffff;
inline constexpr std::uint32_t infinity_bits = 0x7f800000;
inline constexpr std::size_t key_count = 65536;

// Elements that were found, in ascending order; and the rule by which more are found.
struct Found {
  std::uint32_t* index;     // relative to the slice
  std::uint32_t* bits;      // the element, as it is
  std::size_t count;        // at most `capacity`
  std::size_t capacity;
  std::int32_t limit;       // magnitudes greater than this are found; -1 finds all
  std::uint32_t tie;        // of this magnitude no more than `ties_left` are found
  std::size_t ties_left;
  bool overflow;            // there was no room for all
};

// How `scan` makes the element that is looked at: acc = x (+ residual), or, with a velocity,
// velocity = momentum * velocity + x and acc = velocity + residual. Residual and velocity are
// null where there is none; the residual is left holding acc.
struct Accumulate {
  const float* x;
  float* residual;
  float* velocity;
  float momentum;
};

struct Loops {
  const char* name;

  // Count the leading 16 bits of each element of x (+ residual) into two tables, which are to be
  // added up: neighbours go to different ones, because an increment must wait for the last one
  // of the same counter.
  void (*count_keys)(const float* x, const float* residual, std::size_t n, std::uint32_t* even,
                     std::uint32_t* odd);

  // Write the code of each element of x (+ residual), `bits` wide, to `codes`, padded with zeros
  // to a whole byte. The residual becomes what the table loses, 0 where acc is not finite.
  void (*write_codes)(const float* x, float* residual, std::size_t n, const std::uint8_t* lut,
                      const float* table, int bits, std::uint8_t* codes);

  // out = (out +) table[code]; `table` has 256 entries.
  void (*read_codes)(const std::uint8_t* codes, std::size_t n, const float* table, int bits,
                     bool add, float* out);

  // Accumulate n elements and find those that `found` asks for.
  void (*scan)(const Accumulate& from, std::size_t n, Found& found);

  // Add n elements of each payload, one payload after the other, to `total`, which begins with the
  // first one if `begin`. They are bfloat16, or float16, and need not be aligned.
  void (*add_half)(const std::uint8_t* const* payloads, std::size_t count, std::size_t n,
                   bool bfloat16, bool begin, float* total);

  // Round n sums to bfloat16, or float16: to the nearest, ties to even.
  void (*narrow_half)(const float* total, std::size_t n, bool bfloat16, std::uint16_t* out);
};

extern const Loops portable_loops;
#ifdef WINGBEAT_AVX2
extern const Loops avx2_loops;
#endif

// The fastest that this processor runs, or the portable ones after `prefer_portable(true)`.
const Loops& loops();
void prefer_portable(bool on);

}  // namespace wingbeat
