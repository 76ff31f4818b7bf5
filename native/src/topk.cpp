#include "topk.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "layout.h"
#include "loops.h"
#include "parallel.h"
#include "raw.h"
#include "select.h"

namespace wingbeat {

namespace {

constexpr std::size_t least_slice = std::size_t{1} << 18;
constexpr std::size_t most_samples = 65536;
constexpr std::size_t elements_a_sample = 64;
constexpr std::size_t too_few_to_sample = 4096;
constexpr std::uint32_t largest_finite = infinity_bits - 1;

bool finite(std::uint32_t bits) { return (bits & magnitude_mask) < infinity_bits; }

// What one slice found; the indices are relative to its begin.
struct Part {
  Slice slice;
  std::unique_ptr<std::uint32_t[]> index;
  Found found;
};

Accumulate shifted(const Accumulate& from, std::size_t by) {
  return {from.x + by, from.residual == nullptr ? nullptr : from.residual + by,
          from.velocity == nullptr ? nullptr : from.velocity + by, from.momentum};
}

float accumulated(const Accumulate& from, std::size_t i) {
  float acc = from.x[i];
  if (from.velocity != nullptr) acc = from.momentum * from.velocity[i] + acc;
  return from.residual == nullptr ? acc : from.residual[i] + acc;
}

// A magnitude that a few more than k elements reach, judged by a sample: three standard
// deviations beyond the sample's own share. 0 for few elements: all are looked at.
std::uint32_t guess(const Accumulate& from, std::size_t n, std::size_t k) {
  if (n < too_few_to_sample) return 0;
  const std::size_t size = sample_size(n);
  const std::size_t stride = n / size;
  const auto sample = std::make_unique_for_overwrite<float[]>(size);
  for (std::size_t i = 0; i < size; ++i) {
    sample[i] = accumulated(from, sample_place(i, stride));
  }
  const double share = static_cast<double>(size) * static_cast<double>(k) / static_cast<double>(n);
  const auto rank = static_cast<std::size_t>(share + 3 * std::sqrt(share) + 3);
  if (rank >= size) return 0;
  // Whatever is not finite must be found, because it may not stay in a residual.
  return std::min(kth_largest(sample.get(), size, rank, 1).magnitude, largest_finite);
}

// Find, in each slice, what is greater than `magnitude` and the first `ties` that equal it.
void find(const Accumulate& from, std::vector<Part>& parts, std::size_t capacity,
          std::uint32_t magnitude, std::size_t ties, unsigned threads) {
  for (Part& part : parts) {
    const std::size_t room = std::min(part.slice.size(), capacity);
    if (part.index == nullptr) {
      part.index = std::make_unique_for_overwrite<std::uint32_t[]>(2 * room);
    }
    part.found = {part.index.get(), part.index.get() + room, 0, room,
                  static_cast<std::int32_t>(magnitude) - 1, magnitude, ties, false};
  }
  parallel(parts.size(), threads, [&](std::size_t i) {
    loops().scan(shifted(from, parts[i].slice.begin), parts[i].slice.size(), parts[i].found);
  });
}

// The k-th largest of all that was found; what was found must hold the k largest.
Kth kth_found(const std::vector<Part>& parts, std::size_t k) {
  if (parts.size() == 1) return kth_largest(parts[0].found.bits, parts[0].found.count, k, 1);
  std::vector<std::uint32_t> all;
  for (const Part& part : parts) {
    all.insert(all.end(), part.found.bits, part.found.bits + part.found.count);
  }
  return kth_largest(all.data(), all.size(), k, 1);
}

void clear(const Accumulate& from, std::size_t at, bool sent, std::uint32_t bits) {
  if (from.residual != nullptr && (sent || !finite(bits))) from.residual[at] = 0.0F;
  if (from.velocity != nullptr) {
    if (sent || !std::isfinite(from.velocity[at])) from.velocity[at] = 0.0F;
  }
}

// Write the k largest of what was found, in order, and clear them where they were taken from.
void send(const Accumulate& from, std::size_t n, const std::vector<Part>& parts, std::size_t k,
          std::uint8_t* payload) {
  const Kth kth = kth_found(parts, k);
  std::size_t ties = k - kth.greater;
  std::uint8_t* counts = payload + 4 * k;
  std::uint8_t* offsets = counts + 4 * blocks_of(n);
  std::memset(counts, 0, 4 * blocks_of(n));
  std::size_t sent = 0;
  for (const Part& part : parts) {
    for (std::size_t i = 0; i < part.found.count; ++i) {
      const std::uint32_t bits = part.found.bits[i];
      const std::uint32_t magnitude = bits & magnitude_mask;
      const std::size_t at = part.slice.begin + part.found.index[i];
      const bool tie = magnitude == kth.magnitude && ties > 0;
      const bool chosen = tie || magnitude > kth.magnitude;
      if (tie) --ties;
      if (chosen) {
        store(payload + 4 * sent, bits);
        store(offsets + 2 * sent, static_cast<std::uint16_t>(at % block_elements));
        std::uint8_t* count = counts + 4 * (at / block_elements);
        store(count, load<std::uint32_t>(count) + 1);
        ++sent;
      }
      clear(from, at, chosen, bits);
    }
  }
}

// What is not finite and was not found may not stay either.
void sweep(float* values, const Slice& slice) {
  if (values == nullptr) return;
  for (std::size_t i = slice.begin; i < slice.end; ++i) {
    const std::uint32_t bits = load<std::uint32_t>(values + i);
    values[i] = finite(bits) ? values[i] : 0.0F;
  }
}

// Select from everything, exactly: the guess was wrong.
void send_exactly(const Accumulate& from, std::size_t n, std::vector<Part>& parts, std::size_t k,
                  std::size_t capacity, std::uint8_t* payload, unsigned threads) {
  const float* acc = from.residual == nullptr ? from.x : from.residual;
  const Kth kth = kth_largest(acc, n, k, threads);
  find({acc, nullptr, nullptr, 0.0F}, parts, capacity, kth.magnitude, k - kth.greater, threads);
  send(from, n, parts, k, payload);
  parallel(parts.size(), threads, [&](std::size_t i) {
    sweep(from.residual, parts[i].slice);
    sweep(from.velocity, parts[i].slice);
  });
}

void raw_topk(const Accumulate& from, std::size_t n, std::uint8_t* payload) {
  for (std::size_t i = 0; i < n; ++i) {
    store(payload + 4 * i, accumulated(from, i));
    if (from.residual != nullptr) from.residual[i] = 0.0F;
    if (from.velocity != nullptr) from.velocity[i] = 0.0F;
  }
}

}  // namespace

std::size_t sample_size(std::size_t n) { return std::min(most_samples, n / elements_a_sample); }

std::size_t sample_place(std::size_t i, std::size_t stride) {
  const std::uint64_t scattered = std::uint64_t{i} * 0x9e3779b97f4a7c15U;
  return i * stride + static_cast<std::size_t>(scattered >> 33) % stride;
}

void topk_encode(const float* x, std::size_t n, std::uint8_t* payload, std::size_t k,
                 float* residual, float* velocity, float momentum, unsigned threads) {
  const Accumulate from{x, residual, velocity, momentum};
  if (topk_is_raw(n, k)) {
    raw_topk(from, n, payload);
    return;
  }
  std::vector<Part> parts;
  for (const Slice slice : slices(n, threads, least_slice)) parts.push_back({slice, nullptr, {}});
  const std::size_t capacity = 2 * k + 64 * (n / std::min(most_samples, n)) + too_few_to_sample;
  find(from, parts, capacity, guess(from, n, k), k, threads);
  std::size_t count = 0;
  bool overflow = false;
  for (const Part& part : parts) {
    count += part.found.count;
    overflow |= part.found.overflow;
  }
  if (overflow || count < k) {
    send_exactly(from, n, parts, k, capacity, payload, threads);
  } else {
    send(from, n, parts, k, payload);
  }
}

namespace {

Decoded check(const std::uint8_t* counts, const std::uint8_t* offsets, std::size_t n,
              std::size_t k) {
  std::size_t sum = 0;
  for (std::size_t block = 0; block < blocks_of(n); ++block) {
    sum += load<std::uint32_t>(counts + 4 * block);
  }
  if (sum != k) return Decoded::wrong_counts;
  for (std::size_t block = 0, at = 0; block < blocks_of(n); ++block) {
    const std::size_t end = at + load<std::uint32_t>(counts + 4 * block);
    const std::size_t length = std::min(block_elements, n - block * block_elements);
    for (std::size_t last = 0; at < end; ++at) {
      const std::size_t offset = load<std::uint16_t>(offsets + 2 * at);
      if (offset >= length) return Decoded::beyond_the_end;
      if (offset < last) return Decoded::not_ascending;
      last = offset + 1;
    }
  }
  return Decoded::well;
}

}  // namespace

const char* text_of(Decoded decoded) {
  switch (decoded) {
    case Decoded::wrong_counts:
      return "malformed top-k payload: the counts do not add up to k";
    case Decoded::not_ascending:
      return "malformed top-k payload: the indices do not ascend";
    case Decoded::beyond_the_end:
      return "malformed top-k payload: an index is beyond the end";
    default:
      return nullptr;
  }
}

Decoded topk_decode(const std::uint8_t* payload, std::size_t n, float* out, std::size_t k,
                    bool add, unsigned threads) {
  if (topk_is_raw(n, k)) {
    raw_decode(payload, n, out, add);
    return Decoded::well;
  }
  const std::uint8_t* counts = payload + 4 * k;
  const std::uint8_t* offsets = counts + 4 * blocks_of(n);
  const Decoded checked = check(counts, offsets, n, k);
  if (checked != Decoded::well) return checked;
  if (!add) {
    const auto cut = slices(n, threads, least_slice);
    parallel(cut.size(), threads, [&](std::size_t i) {
      std::memset(out + cut[i].begin, 0, 4 * cut[i].size());
    });
  }
  for (std::size_t block = 0, at = 0; block < blocks_of(n); ++block) {
    float* to = out + block * block_elements;
    const std::size_t end = at + load<std::uint32_t>(counts + 4 * block);
    for (; at < end; ++at) {
      const float value = load<float>(payload + 4 * at);
      float& element = to[load<std::uint16_t>(offsets + 2 * at)];
      element = add ? element + value : value;
    }
  }
  return Decoded::well;
}

}  // namespace wingbeat
