#include "coding.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../layout.h"
#include "../raw.h"
#include "../scaled_half.h"
#include "../sketch.h"
#include "../topk.h"

namespace wingbeat::net {

namespace {

constexpr std::uint64_t alignment = 4;  // of each region's payload

std::uint64_t aligned(std::uint64_t bytes) {
  return (bytes + alignment - 1) / alignment * alignment;
}

// As layout.count_of: Python rounds to the nearest, ties to even.
std::size_t count_of(std::size_t n, double density) {
  const double wanted = std::nearbyint(density * static_cast<double>(n));
  return std::min(n, std::max(std::size_t{1}, static_cast<std::size_t>(wanted)));
}

// As TopKCodec: the payload of top-k, in which a sketch takes the place of the values.
void sketched_topk_encode(const float* x, std::size_t n, std::uint8_t* payload, std::size_t k,
                          int bits, float* residual, unsigned threads) {
  std::vector<std::uint8_t> whole(topk_bytes(n, k));
  topk_encode(x, n, whole.data(), k, residual, nullptr, 0.0F, threads);
  std::vector<float> values(k);
  std::memcpy(values.data(), whole.data(), 4 * k);
  sketch_encode(values.data(), k, payload, bits, Split::error, Level::mean, nullptr, threads);
  std::memcpy(payload + sketch_bytes(k, bits), whole.data() + 4 * k, whole.size() - 4 * k);
  if (residual == nullptr) return;
  std::vector<float> arrived(k);
  sketch_decode(payload, k, arrived.data(), bits, false, threads);
  for (std::size_t i = 0; i < k; ++i) {
    const float lost = values[i] - arrived[i];
    store(whole.data() + 4 * i, std::isfinite(lost) ? lost : 0.0F);
  }
  topk_decode(whole.data(), n, residual, k, true, threads);
}

Decoded sketched_topk_decode(const std::uint8_t* payload, std::size_t n, float* out, std::size_t k,
                             int bits, bool add, unsigned threads) {
  std::vector<std::uint8_t> whole(topk_bytes(n, k));
  std::vector<float> values(k);
  sketch_decode(payload, k, values.data(), bits, false, threads);
  std::memcpy(whole.data(), values.data(), 4 * k);
  std::memcpy(whole.data() + 4 * k, payload + sketch_bytes(k, bits), whole.size() - 4 * k);
  return topk_decode(whole.data(), n, out, k, add, threads);
}

}  // namespace

bool Region::sketches_values(std::uint64_t elements) const {
  return bits != whole_bits && !topk_is_raw(elements, count_of(elements, density));
}

std::uint64_t Region::bytes(std::uint64_t elements) const {
  const std::size_t k = codec == Codec::topk ? count_of(elements, density) : 0;
  switch (codec) {
    case Codec::half:
      return half_bytes(elements);
    case Codec::sketch:
      return sketch_bytes(elements, bits);
    case Codec::topk:
      return topk_bytes(elements, k) - (sketches_values(elements) ? 4 * k - sketch_bytes(k, bits) : 0);
    default:
      return 4 * elements;
  }
}

// Calls visit(part, offset, bytes) for the part of each region in [start, stop), with the place of
// its payload, until it returns false.
template <class Visit>
void EncodedPacking::visit(std::uint64_t start, std::uint64_t stop, Visit visit) const {
  std::uint64_t offset = 0;
  for (const Region& region : coding_->regions) {
    Region part = region;
    part.start = std::max(start, region.start);
    part.stop = std::min(stop, region.stop);
    if (part.start >= part.stop) continue;
    const std::uint64_t bytes = part.bytes(part.stop - part.start);
    if (!visit(part, offset, bytes)) return;
    offset += aligned(bytes);
  }
}

std::uint64_t EncodedPacking::bytes(std::uint64_t start, std::uint64_t stop) const {
  std::uint64_t total = 0;
  visit(start, stop, [&](const Region&, std::uint64_t offset, std::uint64_t bytes) {
    total = offset + aligned(bytes);
    return true;
  });
  return total;
}

void EncodedPacking::encode(const Region& part, const float* x, std::uint8_t* out) const {
  const std::size_t n = part.stop - part.start;
  float* residual = residual_ == nullptr ? nullptr : residual_ + part.start;
  std::vector<float> sum;
  if (residual != nullptr && !part.feedback && part.codec != Codec::dense) {
    sum.resize(n);
    raw_encode(x, n, reinterpret_cast<std::uint8_t*>(sum.data()), residual);
    x = sum.data();
    residual = nullptr;
  }
  switch (part.codec) {
    case Codec::sketch:
      return sketch_encode(x, n, out, part.bits, part.split, part.level, residual, threads_);
    case Codec::half:
      return half_encode(x, n, out);
    case Codec::topk:
      if (part.sketches_values(n)) {
        return sketched_topk_encode(x, n, out, count_of(n, part.density), part.bits, residual,
                                    threads_);
      }
      return topk_encode(x, n, out, count_of(n, part.density), residual, nullptr, 0.0F, threads_);
    default:
      return raw_encode(x, n, out, residual);
  }
}

const char* EncodedPacking::decode(const Region& part, const std::uint8_t* payload, float* out,
                                   bool add) const {
  const std::size_t n = part.stop - part.start;
  switch (part.codec) {
    case Codec::sketch:
      sketch_decode(payload, n, out, part.bits, add, threads_);
      return nullptr;
    case Codec::half:
      half_decode(payload, n, out, add);
      return nullptr;
    case Codec::topk:
      if (part.sketches_values(n)) {
        return text_of(sketched_topk_decode(payload, n, out, count_of(n, part.density), part.bits,
                                            add, threads_));
      }
      return text_of(topk_decode(payload, n, out, count_of(n, part.density), add, threads_));
    default:
      raw_decode(payload, n, out, add);
      return nullptr;
  }
}

void EncodedPacking::pack(std::uint8_t* buffer, std::uint64_t start, std::uint64_t stop,
                          std::uint8_t* out, bool result) const {
  auto* const values = reinterpret_cast<float*>(buffer);
  visit(start, stop, [&](const Region& part, std::uint64_t offset, std::uint64_t bytes) {
    encode(part, values + part.start, out + offset);
    std::memset(out + offset + bytes, 0, aligned(bytes) - bytes);
    if (result) decode(part, out + offset, values + part.start, false);
    return true;
  });
}

const char* EncodedPacking::unpack(const std::uint8_t* chunk, std::uint8_t* buffer,
                                   std::uint64_t start, std::uint64_t stop, bool add) const {
  auto* const values = reinterpret_cast<float*>(buffer);
  const char* wrong = nullptr;
  visit(start, stop, [&](const Region& part, std::uint64_t offset, std::uint64_t) {
    wrong = decode(part, chunk + offset, values + part.start, add);
    return wrong == nullptr;
  });
  return wrong;
}

}  // namespace wingbeat::net
