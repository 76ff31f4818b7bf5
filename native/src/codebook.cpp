#include "codebook.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "layout.h"

namespace wingbeat {

namespace {

constexpr int lloyd_iterations = 3;
constexpr std::size_t run = 16;  // neighbouring order indices that share a density
constexpr std::uint32_t sign_bit = 0x8000;
constexpr std::uint32_t infinity_key = infinity_bits >> 16;

std::uint32_t magnitude_key(std::uint32_t key) { return key & ~sign_bit; }

// Order indices ascend with values; keys do not.
std::uint32_t key_of_order(std::size_t order) {
  const auto index = static_cast<std::uint32_t>(order);
  return index < sign_bit ? index ^ 0xffff : index & ~sign_bit;
}

std::size_t order_of_key(std::uint32_t key) {
  return key & sign_bit ? key ^ 0xffff : key | sign_bit;
}

double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}

// Width of the bins around a magnitude key. Bins below the smallest normal number are as wide as
// those just above it.
double width_of(std::uint32_t magnitude) {
  const int exponent = std::max(1, static_cast<int>(magnitude >> 7));
  return power_of_two(exponent - 127 - 7);
}

// The value `part` of the way through a bin, away from zero; in doubles, because the last finite
// bin ends at 2**128.
double inside(std::uint32_t magnitude, double part) {
  const double lead = magnitude >> 7 ? 128.0 : 0.0;
  return (lead + (magnitude & 127) + part) * width_of(magnitude);
}

double middle_of(std::uint32_t key) {
  if (magnitude_key(key) == 0) return 0.0;
  const double size = inside(magnitude_key(key), 0.5);
  return key & sign_bit ? -size : size;
}

double lower_edge(std::uint32_t key) {
  return key & sign_bit ? -inside(magnitude_key(key), 1.0) : inside(key, 0.0);
}

double upper_edge(std::uint32_t key) {
  return key & sign_bit ? -inside(magnitude_key(key), 0.0) : inside(key, 1.0);
}

// How many of the codes are set aside, and for what.
struct Reserved {
  bool not_finite;
  bool zero;
  std::uint8_t not_finite_code;
  std::uint8_t zero_code;
  std::size_t left;
};

bool any_of(const std::uint32_t* counts, std::size_t n) {
  std::uint32_t any = 0;
  for (std::size_t i = 0; i < n; ++i) any |= counts[i];
  return any != 0;
}

// Move the counts of the keys from `low` on into `bins`, in the order of their values; clear them.
void move_counts(Scratch& scratch, std::uint32_t low, std::size_t length) {
  Bins& bins = scratch.bins;
  const bool descending = (low & sign_bit) != 0;
  for (std::size_t i = 0; i < length; ++i) {
    const std::size_t key = low + (descending ? length - 1 - i : i);
    const std::uint64_t count = std::uint64_t{scratch.even[key]} + scratch.odd[key];
    if (count == 0) continue;
    bins.key[bins.size] = static_cast<std::uint16_t>(key);
    bins.count[bins.size] = static_cast<double>(count);
    bins.middle[bins.size] = middle_of(static_cast<std::uint32_t>(key));
    ++bins.size;
  }
  std::fill_n(scratch.even.data() + low, length, 0U);
  std::fill_n(scratch.odd.data() + low, length, 0U);
}

// Move all counts into `bins`. Most keys do not occur, so many are passed over at once.
void gather(Scratch& scratch, bool one_table) {
  scratch.bins.size = 0;
  constexpr std::size_t wide = 256;
  constexpr std::size_t narrow = 16;
  const auto occurs = [&](std::uint32_t low, std::size_t length) {
    return any_of(scratch.even.data() + low, length) ||
           (!one_table && any_of(scratch.odd.data() + low, length));
  };
  const auto lowest = [](std::size_t first, std::size_t length) {
    return std::min(key_of_order(first), key_of_order(first + length - 1));
  };
  for (std::size_t first = 0; first < key_count; first += wide) {
    if (!occurs(lowest(first, wide), wide)) continue;
    for (std::size_t at = first; at < first + wide; at += narrow) {
      const std::uint32_t low = lowest(at, narrow);
      if (occurs(low, narrow)) move_counts(scratch, low, narrow);
    }
  }
}

// Take the bins with codes of their own out of `bins`, and write those into the look-up table.
Reserved reserve(Scratch& scratch, std::size_t n, int bits) {
  Bins& bins = scratch.bins;
  double zeros = 0;
  bool not_finite = false;
  for (std::size_t i = 0; i < bins.size; ++i) {
    const std::uint32_t magnitude = magnitude_key(bins.key[i]);
    if (magnitude == 0) zeros += bins.count[i];
    not_finite |= magnitude >= infinity_key;
  }
  const std::size_t codes = std::size_t{1} << bits;
  Reserved out{};
  out.not_finite = not_finite;
  out.zero = zeros > 0 && static_cast<double>(codes) * zeros >= static_cast<double>(n);
  out.left = codes - not_finite - out.zero;
  out.zero_code = static_cast<std::uint8_t>(out.left);
  out.not_finite_code = static_cast<std::uint8_t>(codes - 1);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < bins.size; ++i) {
    const std::uint32_t magnitude = magnitude_key(bins.key[i]);
    if (magnitude >= infinity_key) {
      scratch.lut[bins.key[i]] = out.not_finite_code;
    } else if (out.zero && magnitude == 0) {
      scratch.lut[bins.key[i]] = out.zero_code;
    } else {
      if (kept != i) {
        bins.key[kept] = bins.key[i];
        bins.count[kept] = bins.count[i];
        bins.middle[kept] = bins.middle[i];
      }
      ++kept;
    }
  }
  bins.size = kept;
  return out;
}

// Panter and Dite: for many codes, density**(1/3) of them at each value loses least. `weight`
// becomes the cumulated weight up to the middle of each bin.
double companded(Bins& bins, bool zero_reserved) {
  double before = 0;
  for (std::size_t i = 0; i < bins.size;) {
    const std::size_t first = order_of_key(bins.key[i]) / run * run;
    std::size_t end = i;
    double counted = 0;
    for (; end < bins.size && order_of_key(bins.key[end]) < first + run; ++end) {
      counted += bins.count[end];
    }
    const double width = width_of(magnitude_key(bins.key[i]));
    const std::size_t zero = first < sign_bit ? sign_bit - 1 : sign_bit;
    const bool short_run = zero_reserved && first / run == zero / run;
    const double members = static_cast<double>(short_run ? run - 1 : run);
    const double weight = std::cbrt(counted / (members * width)) * width;
    for (; i < end; ++i) {
      std::size_t below = order_of_key(bins.key[i]) - first;
      if (short_run && first == sign_bit) --below;
      bins.weight[i] = before + (static_cast<double>(below) + 0.5) * weight;
    }
    before += members * weight;
  }
  return before;
}

// `weight` becomes the cumulated count up to the middle of each bin.
double counted(Bins& bins) {
  double before = 0;
  for (std::size_t i = 0; i < bins.size; ++i) {
    bins.weight[i] = before + bins.count[i] / 2;
    before += bins.count[i];
  }
  return before;
}

void cut_evenly(Bins& bins, std::size_t codes, double total) {
  const double scale = static_cast<double>(codes);
  for (std::size_t i = 0; i < bins.size; ++i) {
    const auto code = static_cast<std::size_t>(scale * bins.weight[i] / total);
    bins.code[i] = static_cast<std::uint8_t>(std::min(codes - 1, code));
  }
}

std::size_t end_of_code(const Bins& bins, std::size_t first) {
  std::size_t end = first + 1;
  while (end < bins.size && bins.code[end] == bins.code[first]) ++end;
  return end;
}

double mean_of(const Bins& bins, std::size_t first, std::size_t end) {
  double sum = 0;
  double count = 0;
  for (std::size_t i = first; i < end; ++i) {
    sum += bins.count[i] * bins.middle[i];
    count += bins.count[i];
  }
  return sum / count;
}

// One iteration: means of the codes in use, then each bin to the nearest mean. Codes are numbered
// anew, without gaps.
void improve(Bins& bins) {
  std::array<double, 257> mean;
  std::size_t codes = 0;
  for (std::size_t i = 0; i < bins.size;) {
    const std::size_t end = end_of_code(bins, i);
    mean[codes++] = mean_of(bins, i, end);
    i = end;
  }
  mean[codes] = std::numeric_limits<double>::infinity();
  std::size_t code = 0;
  double boundary = (mean[0] + mean[1]) / 2;
  for (std::size_t i = 0; i < bins.size; ++i) {
    while (bins.middle[i] >= boundary) {
      ++code;
      boundary = (mean[code] + mean[code + 1]) / 2;
    }
    bins.code[i] = static_cast<std::uint8_t>(code);
  }
}

void assign(Bins& bins, std::size_t codes, Split split, bool zero_reserved) {
  if (split == Split::count) {
    cut_evenly(bins, codes, counted(bins));
    return;
  }
  if (bins.size <= codes) {
    for (std::size_t i = 0; i < bins.size; ++i) bins.code[i] = static_cast<std::uint8_t>(i);
    return;
  }
  cut_evenly(bins, codes, companded(bins, zero_reserved));
  for (int i = 0; i < lloyd_iterations; ++i) improve(bins);
}

}  // namespace

Codebook make_codebook(Scratch& scratch, std::size_t n, int bits, Split split, Level level) {
  gather(scratch, n <= one_table_most);
  const Reserved reserved = reserve(scratch, n, bits);
  Bins& bins = scratch.bins;
  Codebook book{};
  if (reserved.not_finite) {
    book.table[reserved.not_finite_code] = std::numeric_limits<float>::quiet_NaN();
  }
  if (reserved.left == 0) {
    for (std::size_t i = 0; i < bins.size; ++i) scratch.lut[bins.key[i]] = reserved.zero_code;
    return book;
  }
  if (bins.size == 0) return book;
  assign(bins, reserved.left, split, reserved.zero);
  for (std::size_t i = 0; i < bins.size;) {
    const std::size_t end = end_of_code(bins, i);
    const double value =
        level == Level::mean ? mean_of(bins, i, end)
                             : (lower_edge(bins.key[i]) + upper_edge(bins.key[end - 1])) / 2;
    book.table[bins.code[i]] = static_cast<float>(value);
    for (; i < end; ++i) scratch.lut[bins.key[i]] = bins.code[i];
  }
  return book;
}

}  // namespace wingbeat
