#include "naive.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <numeric>

namespace naive {

namespace {

using wingbeat::Level;
using wingbeat::Split;

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

float float_of(std::uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

std::uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffff; }

struct Bin {
  double count = 0, low = 0, high = 0, middle = 0, weight = 0;
  std::size_t code = 0;
};

// By order index: the bins ascend with their values.
using Histogram = std::map<int, Bin>;

int order_of(float value) {
  const int key = static_cast<int>(bits_of(value) >> 16);
  return key & 0x8000 ? key ^ 0xffff : key | 0x8000;
}

Bin make_bin(int order) {
  const bool negative = order < 0x8000;
  const auto key = static_cast<std::uint32_t>(negative ? 0x7fff - order : order - 0x8000);
  const double near = float_of(key << 16);
  const double far = key + 1 == 0x7f80 ? std::ldexp(1.0, 128) : double{float_of((key + 1) << 16)};
  const double middle = key == 0 ? 0.0 : (near + far) / 2;
  return negative ? Bin{0, -far, -near, -middle, 0, 0} : Bin{0, near, far, middle, 0, 0};
}

// By code; NaN for a code without bins.
std::vector<double> levels_of(const Histogram& bins, std::size_t codes, Level level) {
  std::vector<Bin> joined(codes);
  for (const auto& [order, bin] : bins) {
    Bin& all = joined[bin.code];
    if (all.count == 0) all.low = bin.low;
    all.high = bin.high;
    all.middle += bin.count * bin.middle;
    all.count += bin.count;
  }
  std::vector<double> levels;
  for (const Bin& all : joined) {
    const double ends = (all.low + all.high) / 2;
    const double value = level == Level::mean ? all.middle / all.count : ends;
    levels.push_back(all.count > 0 ? value : std::numeric_limits<double>::quiet_NaN());
  }
  return levels;
}

void split_counts(Histogram& bins, std::size_t codes) {
  double total = 0, before = 0;
  for (const auto& [order, bin] : bins) total += bin.count;
  for (auto& [order, bin] : bins) {
    const double part = static_cast<double>(codes) * (before + bin.count / 2) / total;
    bin.code = std::min(codes - 1, static_cast<std::size_t>(part));
    before += bin.count;
  }
}

void lloyd(Histogram& bins, std::size_t codes) {
  std::vector<double> levels = levels_of(bins, codes, Level::mean);
  std::erase_if(levels, [](double level) { return std::isnan(level); });
  std::vector<double> boundaries;
  for (std::size_t i = 0; i + 1 < levels.size(); ++i) {
    boundaries.push_back((levels[i] + levels[i + 1]) / 2);
  }
  for (auto& [order, bin] : bins) {
    const auto above = std::upper_bound(boundaries.begin(), boundaries.end(), bin.middle);
    bin.code = static_cast<std::size_t>(above - boundaries.begin());
  }
}

void split_error(Histogram& bins, std::size_t codes, bool zero_reserved) {
  if (bins.size() <= codes) {
    std::size_t next = 0;
    for (auto& [order, bin] : bins) bin.code = next++;
    return;
  }
  double total = 0;
  std::map<int, double> middles;
  for (int run = 0; run < 65536; run += 16) {
    const auto end = bins.lower_bound(run + 16);
    double count = 0, width = 0;
    for (auto at = bins.lower_bound(run); at != end; ++at) count += at->second.count;
    if (count == 0) continue;
    const auto width_at = [&](int order) {
      if (zero_reserved && (order == 0x7fff || order == 0x8000)) return 0.0;
      const Bin bin = make_bin(order);
      return bin.high - bin.low;
    };
    for (int order = run; order < run + 16; ++order) width += width_at(order);
    for (int order = run; order < run + 16; ++order) {
      const double weight = std::cbrt(count / width) * width_at(order);
      middles[order] = total + weight / 2;
      total += weight;
    }
  }
  for (auto& [order, bin] : bins) {
    const double part = static_cast<double>(codes) * middles[order] / total;
    bin.code = std::min(codes - 1, static_cast<std::size_t>(part));
  }
  for (int i = 0; i < 3; ++i) lloyd(bins, codes);
}

}  // namespace

Floats through_sketch(const Floats& acc, int bits, Split split, Level level) {
  Histogram bins;
  std::size_t zeros = 0, broken = 0;
  const std::size_t all = std::size_t{1} << bits;
  for (const float value : acc) {
    zeros += magnitude(value) < 0x10000;
    broken += !std::isfinite(value);
  }
  const bool zero_reserved = zeros > 0 && all * zeros >= acc.size();
  for (const float value : acc) {
    if (!std::isfinite(value) || (zero_reserved && magnitude(value) < 0x10000)) continue;
    const int order = order_of(value);
    auto [at, is_new] = bins.try_emplace(order);
    if (is_new) at->second = make_bin(order);
    ++at->second.count;
  }
  const std::size_t codes = all - zero_reserved - (broken > 0);
  if (codes > 0 && split == Split::count) split_counts(bins, codes);
  if (codes > 0 && split == Split::error) split_error(bins, codes, zero_reserved);
  std::vector<float> table(all);
  const std::vector<double> levels = levels_of(bins, codes, level);
  std::transform(levels.begin(), levels.end(), table.begin(),
                 [](double value) { return static_cast<float>(value); });
  Floats out;
  for (const float value : acc) {
    if (!std::isfinite(value)) {
      out.push_back(std::numeric_limits<float>::quiet_NaN());
    } else if (codes == 0 || (zero_reserved && magnitude(value) < 0x10000)) {
      out.push_back(0.0F);
    } else {
      out.push_back(table[bins.at(order_of(value)).code]);
    }
  }
  return out;
}

Floats read_sketch(const Bytes& payload, std::size_t n, int bits) {
  Floats out(n);
  const auto width = static_cast<std::size_t>(bits);
  const std::size_t table = std::size_t{4} << bits;
  const bool raw = 4 * n <= table + (n * width + 7) / 8;
  for (std::size_t i = 0; i < n; ++i) {
    std::size_t code = raw ? i : 0;
    for (std::size_t bit = 0; bit < width && !raw; ++bit) {
      const std::size_t at = i * width + bit;
      code |= static_cast<std::size_t>(payload[table + at / 8] >> at % 8 & 1) << bit;
    }
    std::memcpy(&out[i], &payload[4 * code], 4);
  }
  return out;
}

Bytes write_topk(const Floats& acc, std::size_t k) {
  const std::size_t n = acc.size();
  const std::size_t blocks = (n + 65535) / 65536;
  Bytes out;
  const auto put = [&](std::uint32_t value, int bytes) {
    for (int i = 0; i < bytes; ++i) out.push_back(static_cast<std::uint8_t>(value >> 8 * i));
  };
  if (4 * n <= 6 * k + 4 * blocks) {
    for (const float value : acc) put(bits_of(value), 4);
    return out;
  }
  std::vector<std::size_t> order(n);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) {
    return magnitude(acc[a]) > magnitude(acc[b]);
  });
  std::sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(k));
  std::vector<std::uint32_t> counts(blocks);
  for (std::size_t i = 0; i < k; ++i) {
    put(bits_of(acc[order[i]]), 4);
    ++counts[order[i] / 65536];
  }
  for (const std::uint32_t count : counts) put(count, 4);
  for (std::size_t i = 0; i < k; ++i) put(static_cast<std::uint32_t>(order[i] % 65536), 2);
  return out;
}

Floats read_topk(const Bytes& payload, std::size_t n, std::size_t k) {
  Floats out(n);
  const std::size_t blocks = (n + 65535) / 65536;
  const bool raw = 4 * n <= 6 * k + 4 * blocks;
  if (raw) {
    if (n > 0) std::memcpy(out.data(), payload.data(), 4 * n);
    return out;
  }
  std::size_t at = 0;
  for (std::size_t block = 0; block < blocks; ++block) {
    std::uint32_t count;
    std::memcpy(&count, &payload[4 * k + 4 * block], 4);
    for (; count > 0; --count, ++at) {
      std::uint16_t offset;
      std::memcpy(&offset, &payload[4 * k + 4 * blocks + 2 * at], 2);
      std::memcpy(&out[block * 65536 + offset], &payload[4 * at], 4);
    }
  }
  return out;
}

}  // namespace naive
