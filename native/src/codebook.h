// From a histogram of leading 16 bits to a table of values and a code for each of them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "loops.h"

namespace wingbeat {

enum class Split { error, count };  // where one code ends and the next begins
enum class Level { mean, ends };    // which value a code stands for

// The bins that occur, in ascending order of their values, and what is decided about each.
struct Bins {
  std::size_t size;
  std::array<std::uint16_t, key_count> key;
  std::array<double, key_count> count;
  std::array<double, key_count> middle;
  std::array<double, key_count> weight;
  std::array<std::uint8_t, key_count> code;
};

struct Codebook {
  std::array<float, 256> table;
};

// Kept by each thread that encodes: too large to make and clear for every call.
struct Scratch {
  std::array<std::uint32_t, key_count> even;  // zero between two calls
  std::array<std::uint32_t, key_count> odd;   // zero between two calls
  std::array<std::uint8_t, key_count> lut;    // by key; set only for keys that occur
  Bins bins;
};

// Up to so many elements are counted in one table only: a second one takes longer to read than it
// saves.
inline constexpr std::size_t one_table_most = 262144;

// Read the counts of `scratch` (and clear them), decide on a codebook for the n elements that
// they count, and write the look-up table of codes.
Codebook make_codebook(Scratch& scratch, std::size_t n, int bits, Split split, Level level);

}  // namespace wingbeat
